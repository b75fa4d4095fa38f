"""SafeAILab/EAGLE's own checkpoints: the form of the EAGLE-3 paper, and nothing else."""

from .flat import (
    EAGLE_KEYS,
    check_eagle_config,
    config_of,
    flat_config,
    flat_tensors,
    ids_from_outputs,
    layer_config_of,
    tensors_of,
)


NAME = "safeailab"


def matches(config: dict) -> bool:
    return config.get("architectures") == ["LlamaForCausalLM"] and "draft_vocab_size" in config


def read(config: dict, tensors: dict):
    layer_config = layer_config_of(config, tensors, {"eagle_config"})
    # Whether its code derives the size of a head or takes the config's depends on its version.
    for name, tensor in tensors.items():
        if name.endswith("self_attn.q_proj.weight"):
            layer_config["head_dim"] = len(tensor) // config["num_attention_heads"]
    ours, report = tensors_of(tensors, config)
    eagle_config = config.get("eagle_config") or {}
    check_eagle_config(eagle_config, EAGLE_KEYS)
    ids = ids_from_outputs(eagle_config.get("eagle_aux_hidden_state_layer_ids"))
    assumed = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    if ids is None:
        assumed["eagle_aux_hidden_state_layer_ids"] = "[2, L // 2, L - 3] of the target's L layers"
    draft_config = config_of(config, ours, layer_config, eagle_aux_hidden_state_layer_ids=ids)
    return draft_config, ours, {"format": NAME, **report, "assumed": assumed}


def write(draft):
    config = draft.config
    ids = config.eagle_aux_hidden_state_layer_ids
    heads_fill_width = config.transformer_layer_config.head_dim * config.transformer_layer_config.num_attention_heads
    flat = flat_config(
        draft,
        {
            "`fc_norm`": config.fc_norm,
            "`norm_output`": config.norm_output,
            "a `head_dim` other than hidden_size / num_attention_heads": heads_fill_width != config.hidden_size,
            "scaled rotary embeddings": config.transformer_layer_config.rope_parameters["rope_type"] != "default",
            "states of another width than its own": config.target_hidden_size != config.hidden_size,
            "states other than the default three": ids is not None
            and (len(ids) != 3 or ids[0] != 2 or ids[1] != (ids[2] + 3) // 2),
        },
        NAME,
    )
    flat |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if ids is not None:  # for readers that look; the others take the same by default
        flat["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [layer_id - 1 for layer_id in ids]}
    return flat, flat_tensors(draft)

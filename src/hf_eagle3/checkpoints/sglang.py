"""What SpecForge writes and SGLang serves."""

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


NAME = "sglang"
KEYS = {"eagle_config", "fc_norm", "norm_output", "num_aux_hidden_states", "target_hidden_size", "target_model_type"}


def matches(config: dict) -> bool:
    return any(name.endswith("Eagle3") for name in config.get("architectures") or [])


def read(config: dict, tensors: dict):
    layer_config = layer_config_of(config, tensors, KEYS)
    ours, report = tensors_of(tensors, config)
    eagle_config = config.get("eagle_config") or {}
    check_eagle_config(eagle_config, EAGLE_KEYS)
    return finish(NAME, config, ours, layer_config, report, eagle_config)


def finish(name, config, tensors, layer_config, report, eagle_config, **flags):
    """The last steps of reading, which Model-Optimizer's format shares."""
    ids = ids_from_outputs(eagle_config.get("eagle_aux_hidden_state_layer_ids"))
    num_states = config.get("num_aux_hidden_states")
    if ids is not None and num_states is not None and len(ids) != num_states:
        raise ValueError(f"`num_aux_hidden_states` is {num_states}, but there are ids of {len(ids)} layers.")
    if ids is None and num_states not in (None, 3):
        raise ValueError(f"`num_aux_hidden_states` is {num_states}, but which states they are is not said.")
    assumed = {"norm_before_residual": False, "norm_before_fc": False}
    for flag in ("fc_norm", "norm_output"):
        if config.get(flag) is None:
            assumed[flag] = False
    if ids is None:
        assumed["eagle_aux_hidden_state_layer_ids"] = "[2, L // 2, L - 3] of the target's L layers"
    if config.get("norm_output") and not config.get("fc_norm"):
        assumed["norm_output"] = "true, as SGLang takes it; SpecForge has exported it for drafts trained without"
    assumed = {flag: value for flag, value in assumed.items() if flag not in flags}
    draft_config = config_of(
        config,
        tensors,
        layer_config,
        eagle_aux_hidden_state_layer_ids=ids,
        target_hidden_size=config.get("target_hidden_size"),
        fc_norm=bool(config.get("fc_norm")),
        norm_output=bool(config.get("norm_output")),
        **flags,
    )
    return draft_config, tensors, {"format": name, **report, "assumed": assumed}


def write(draft):
    config = draft.config
    flat = flat_config(draft, {}, NAME)
    flat |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": config.num_aux_hidden_states,
    }
    if config.eagle_aux_hidden_state_layer_ids is not None:
        ids = [layer_id - 1 for layer_id in config.eagle_aux_hidden_state_layer_ids]
        if min(ids) < 0:
            raise ValueError("The sglang format counts outputs of layers, and cannot express the embedding (id 0).")
        flat["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    return flat, flat_tensors(draft)

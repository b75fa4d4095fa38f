"""
What the formats with a flat Llama configuration have in common: the keys of the layer at the top level of
`config.json`, and the first layer's tensors under `midlayer` or `layers.0`.
"""

import torch

from ..remote_code.checks_eagle3 import fingerprint, similarity
from ..remote_code.configuration_eagle3 import Eagle3Config, check_sizes


LAYER_KEYS = (
    "attention_bias",
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)
REQUIRED_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
EAGLE_KEYS = {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"}
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Change no number: what transformers, a trainer or a server writes for itself.
NEUTRAL_KEYS = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "draft_vocab_size",
    "dtype",
    "max_window_layers",
    "model_type",
    "pretraining_tp",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_sliding_window",
}
# Tables that are computed, not learned.
COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def layer_config_of(config: dict, tensors: dict[str, torch.Tensor], known_keys: set[str]) -> dict:
    """
    Configuration of the layers.

    Args:
        known_keys (`set[str]`): Keys at the top level that the format's own reader understands.

    Raises:
        ValueError: if a key is missing, or there is one that nobody here understands.
    """
    if missing := [key for key in REQUIRED_KEYS if config.get(key) is None]:
        raise ValueError(f"config.json lacks {missing}.")
    check_sizes({key: config[key] for key in LAYER_KEYS if config.get(key) is not None})
    unknown = config.keys() - set(LAYER_KEYS) - set(TOKEN_KEYS) - NEUTRAL_KEYS - known_keys
    if unknown := sorted(key for key in unknown if config[key] is not None):
        raise ValueError(f"config.json has flags that this reader does not know: {unknown}.")
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        raise ValueError("config.json has a `sliding_window`, which this format's readers ignore.")
    layer_config = {key: config[key] for key in LAYER_KEYS if config.get(key) is not None}
    has_head_norms = any(name.endswith("self_attn.q_norm.weight") for name in tensors)
    layer_config["model_type"] = "qwen3" if has_head_norms else "llama"
    layer_config.setdefault("num_hidden_layers", 1)
    layer_config.setdefault("num_key_value_heads", config["num_attention_heads"])
    layer_config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    layer_config["tie_word_embeddings"] = False
    layer_config["rope_parameters"] = rope_of(config)
    return layer_config


def rope_of(config: dict) -> dict:
    """Rotary embedding from the new `rope_parameters`, or from the old `rope_theta` and `rope_scaling`."""
    scaling = dict(config.get("rope_scaling") or {})
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    rope = {"rope_type": "default", **(config.get("rope_parameters") or {}), **scaling}  # as transformers reads both
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = config.get("rope_theta") or 10000.0
    return rope


def tensors_of(tensors: dict[str, torch.Tensor], config: dict) -> tuple[dict[str, torch.Tensor], dict]:
    """
    Tensors by our names, and a report of what was `renamed` and `ignored`.

    Raises:
        ValueError: if there are none of a draft, or the vocabulary mapping contradicts the configuration.
    """
    renamed, ignored, ours = {}, [], {}
    for name, tensor in tensors.items():
        if name.endswith(COMPUTED):
            ignored.append(name)
            continue
        new_name = "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
        if new_name != name:
            renamed[name] = new_name
        if new_name in ours:
            raise ValueError(f"two tensors are called {new_name}, one of them by the name {name}.")
        ours[new_name] = tensor
    if "fc.weight" not in ours:
        raise ValueError(f"there is no fc.weight, so this is no EAGLE-3 draft. Tensors: {sorted(tensors)[:8]} ...")
    if "lm_head.weight" not in ours and config.get("tie_word_embeddings") and "embed_tokens.weight" in ours:
        ours["lm_head.weight"] = ours["embed_tokens.weight"].clone()
        renamed["embed_tokens.weight"] = "lm_head.weight (tied)"
    vocab_size = config["vocab_size"]
    draft_vocab_size = config.get("draft_vocab_size") or vocab_size
    if draft_vocab_size == vocab_size:
        for name, neutral in (("d2t", 0), ("t2d", True)):  # some old files carry a mapping that maps nothing
            if name in ours and (ours[name] == neutral).all():
                del ours[name]
                ignored.append(name)
    elif "d2t" not in ours:
        raise ValueError(f"the draft vocabulary has {draft_vocab_size} of {vocab_size} tokens, but there is no d2t.")
    else:
        ours["d2t"] = ours["d2t"].long()
        token_ids = torch.arange(len(ours["d2t"])) + ours["d2t"]
        if "t2d" not in ours and len(token_ids) and token_ids.min() >= 0 and token_ids.max() < vocab_size:
            ours["t2d"] = torch.isin(torch.arange(vocab_size), token_ids)
        elif "t2d" in ours:
            ours["t2d"] = ours["t2d"].bool()
    return ours, {"renamed": renamed, "ignored": ignored}


def check_eagle_config(eagle_config: dict, known_keys: set[str]) -> None:
    """
    Raises:
        ValueError: if it has flags that nobody here understands, or says that this is no EAGLE-3 draft.
    """
    if unknown := sorted(key for key in eagle_config.keys() - known_keys if eagle_config[key] is not None):
        raise ValueError(f"`eagle_config` has flags that this reader does not know: {unknown}.")
    if eagle_config.get("use_aux_hidden_state") is False:
        raise ValueError(
            "`use_aux_hidden_state` is false: it reads the target's last state only, as EAGLE-1 and 2 do."
        )


def config_of(config: dict, tensors: dict, layer_config: dict, **flags) -> Eagle3Config:
    return Eagle3Config(
        transformer_layer_config=layer_config,
        draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
        has_own_embed_tokens="embed_tokens.weight" in tensors,
        **{key: config.get(key) for key in TOKEN_KEYS},
        **flags,
    )


def ids_from_outputs(ids: list[int] | None) -> list[int] | None:
    """
    Ids of layers whose *output* is read, as SpecForge, SGLang and Model-Optimizer count, to ids of layers that it
    enters, as we do.
    """
    return None if ids is None else [layer_id + 1 for layer_id in ids]


def flat_config(draft, refused: dict[str, bool], to: str) -> dict:
    """
    A draft's configuration with the layer's keys at the top level.

    Args:
        refused (`dict[str, bool]`): What the format cannot express, and whether the draft has it.

    Raises:
        ValueError: naming what cannot be expressed.
    """
    config = draft.config
    layer_config = config.transformer_layer_config
    refused = {
        "more than one layer": config.num_hidden_layers > 1,
        "Qwen3 layers, whose q_norm and k_norm readers would skip": layer_config.model_type != "llama",
        "`norm_before_residual`": config.norm_before_residual,
        "`norm_before_fc`": config.norm_before_fc,
        "layers with a window": set(layer_config.layer_types) != {"full_attention"},
        "parallel drafting": config.is_parallel,
        "biases": layer_config.attention_bias or getattr(layer_config, "mlp_bias", False),
        **refused,
    }
    refuse(refused, to)
    if config.has_own_embed_tokens:
        check_table(draft, to)
    rope = dict(layer_config.rope_parameters)
    theta, scaled = rope.pop("rope_theta"), rope["rope_type"] != "default"
    return {
        **{key: getattr(layer_config, key) for key in LAYER_KEYS},
        **{key: getattr(config, key) for key in TOKEN_KEYS},
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "dtype": str(draft.dtype).removeprefix("torch."),
        # For old readers and new ones.
        "rope_theta": theta,
        "rope_scaling": rope if scaled else None,
        "rope_parameters": {**rope, "rope_theta": theta},
    }


def beyond_classic(draft) -> dict[str, bool]:
    """What engines that know the EAGLE-3 paper only would leave out, and whether the draft has it."""
    config, layer = draft.config, draft.config.transformer_layer_config
    return {
        "more than one layer": config.num_hidden_layers > 1,
        "Qwen3 layers, with q_norm and k_norm": layer.model_type != "llama",
        "`fc_norm`": config.fc_norm,
        "`norm_output`": config.norm_output,
        "layers with a window": set(layer.layer_types) != {"full_attention"},
        "parallel drafting": config.is_parallel,
        f"{config.num_aux_hidden_states} states in place of three": config.num_aux_hidden_states != 3,
    }


def check_layer_ids(draft) -> None:
    """
    Raises:
        ValueError: if a draft does not say which states it reads.
    """
    if draft.config.eagle_aux_hidden_state_layer_ids is None:
        raise ValueError("This draft does not say which states it reads. Pair it with its target first (`--target`).")


class CannotExpress(ValueError):
    """What a format cannot express (`reasons`), of what a draft has."""

    def __init__(self, to: str, reasons: list[str]):
        self.reasons = reasons
        super().__init__(
            f"The {to} format cannot express this draft: it has {'; '.join(reasons)}. These are choices of training "
            '(`draft_form="classic"` makes a draft that most engines take); a trained draft cannot be converted.'
        )


def refuse(refused: dict[str, bool], to: str) -> None:
    """
    Raises:
        CannotExpress: if a draft has something that a format cannot express.
    """
    if reasons := [what for what, has in refused.items() if has]:
        raise CannotExpress(to, reasons)


def check_table(draft, to: str) -> None:
    """
    Raises:
        ValueError: if a draft's embedding table is not that of its target, which engines use in its place.
    """
    of_target = draft.config.verifier_fingerprint
    if of_target is None:
        raise ValueError(
            f"This draft stores an embedding table, in place of which readers of the {to} format take the target's. To see "
            "whether they are the same, the target is needed: `--target` of recipes/export.py, or `draft.pair_with(target)`."
        )
    if similarity(fingerprint(draft.embed_tokens.weight), of_target) < 0.9999:
        raise ValueError(
            f"This draft has an embedding table of its own, in place of which readers of the {to} format would take the "
            "target's, which is another one: it would draft something else."
        )


def flat_tensors(draft) -> dict[str, torch.Tensor]:
    """A draft's tensors, with the first layer as `midlayer`, which all readers know."""
    return {
        "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name: tensor
        for name, tensor in draft.state_dict().items()
    }

"""What the keys of a flat `config.json` mean, by which most projects describe their drafts."""

import json
import re
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from ..config_checks import DEFAULTS, NEUTRAL_LAYER_KEYS, NEUTRAL_ROPE_KEYS, ROPE_KEYS, changed_defaults


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
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys of AngelSlim and of DeepSpec, which always count the outputs of layers.
OUTPUT_IDS = ("aux_hidden_states_layer_ids", "target_layer_ids")
# The token that a parallel draft (P-EAGLE) reads in place of unknown ones, by the names that vLLM knows.
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
BOOLEANS = (
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "parallel_drafting",
    "use_aux_hidden_state",
    "use_aux_norm",
)
# Keys that describe the draft. They stand at the top level or in `eagle_config`.
EAGLE_KEYS = (
    *BOOLEANS,
    *OUTPUT_IDS,
    *MASK_TOKENS,
    "draft_num_hidden_layers",
    "eagle_aux_hidden_state_layer_ids",
    "num_aux_hidden_states",
    "num_aux_layers",
    "num_draft_layers",  # verl-SpeCo's name for `draft_num_hidden_layers`
    "target_hidden_size",
)
# Model-Optimizer's flags, and their values for the network that is implemented here.
EXPECTED = {
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
# Our exports write the exact ids here, because programs count `eagle_aux_hidden_state_layer_ids` differently.
EXACT_IDS = "eagle_aux_hidden_state_input_ids"
# Keys that do not change what a draft computes, or that are checked elsewhere.
FLAT_NEUTRAL_KEYS = {
    *(NEUTRAL_LAYER_KEYS - {*LAYER_KEYS, "layer_types"}),
    "allow_global_per_layer_attribute_access",  # about the Python object; NeMo Automodel writes it for Gemma 4
    "attention_head_dim",
    "cla_share_factor",
    "decoder_sparse_step",
    "dense_list",
    "draft_vocab_size",
    "eagle_config",
    "full_attention_interval",
    "gradient_checkpointing",
    "modal_type",
    "num_target_layers",
    "org_vocab_size",
    "original_max_position_embeddings",
    "parallel_draft_heads_num_layers",  # without effect if a step drafts one token
    "pool_type",
    "prefix",
    "quantization",
    "reuse_target_lm_head",
    "target_layer_count",
    "target_num_hidden_layers",
    "tokenizer_class",
    "truncated_vocab_size",
    "use_mrope",
    "use_qk_norm",
}
# Keys about the target and its inputs, and about training. A key about layers is none of these, because it may choose the states.
NEUTRAL_NAMES = (
    r"(target|image|video|audio|vision|linear|train|ttt|down_sample|cod)_.*|.*_(id|ids|token|token_index|train)"
)
# Keys about experts and their routers, which drafts do not have, and about the loss of their training.
NEUTRAL_PARTS = r"expert|router|moe_|topk|n_group|routed_scaling|distill|_loss"


def format_of(config: dict) -> str:
    """Returns the name of the project that writes such a `config.json`, for messages."""
    if (config.get("eagle_config") or {}).keys() & EXPECTED.keys():
        return "modelopt"
    return "safeailab" if config.get("architectures") == ["LlamaForCausalLM"] else "sglang"


def flags_of(config: dict) -> dict:
    """
    Returns the keys that describe the draft, from the top level and `eagle_config`. Missing ones are `None`. Raises
    `ValueError` if the two places contradict each other, or a value is neither true nor false.
    """
    eagle_config = config.get("eagle_config") or {}
    flags = {}
    for key in (*EAGLE_KEYS, *EXPECTED):
        said = [place[key] for place in (config, eagle_config) if place.get(key) is not None]
        if len(said) == 2 and said[0] != said[1]:
            raise ValueError(f"`{key}` is {said[0]!r} in config.json, but {said[1]!r} in its `eagle_config`.")
        flags[key] = said[0] if said else None
        if key in BOOLEANS and said:
            if said[0] and said[0] != 1:  # text would count as true
                raise ValueError(f"`{key}` is {said[0]!r}, but must be true or false.")
            flags[key] = bool(said[0])
    if flags["use_aux_norm"]:
        flags["fc_norm"] = True
    if flags["draft_num_hidden_layers"] is None:
        flags["draft_num_hidden_layers"] = flags["num_draft_layers"]
    return flags


def mask_token_of(flags: dict) -> int | None:
    """Returns the token that a parallel draft reads in place of unknown ones, or `None` if none is named."""
    return next((flags[name] for name in MASK_TOKENS if flags[name] is not None), None)


def is_neutral(key: str) -> bool:
    """Whether a key does not change what a draft computes, or is checked elsewhere."""
    if key in FLAT_NEUTRAL_KEYS or key.startswith("_") or re.search(NEUTRAL_PARTS, key):
        return True
    return "layer" not in key and re.fullmatch(NEUTRAL_NAMES, key) is not None


def keys_of_family(config: dict) -> set[str]:
    """
    Returns the keys of the family in `model_type` if the layers are Llama's, which ignore them: NeMo Automodel copies the
    configuration of its target. Of gpt-oss, whatever the class, they are those of its experts, which drafts do not have.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    if not (isinstance(model_type, str) and model_type in CONFIG_MAPPING and any("Llama" in x for x in architectures)):
        return {"swiglu_alpha", "swiglu_limit"} if model_type == "gpt_oss" else set()
    # The others are gpt-oss's, and in its config.json only, or in that of newer transformers.
    keys = {*CONFIG_MAPPING[model_type]().to_dict(), "initial_context_length", "swiglu_alpha", "swiglu_limit"}
    # Other names of what is missing may say what the draft computes.
    parts = {"hidden_act": "hidden_activation", "rms_norm_eps": "_eps"}
    unsure = [part for key, part in parts.items() if config.get(key) is None]
    return {key for key in keys if not any(part in key for part in unsure)}


def check_flat_keys(config: dict, flags: dict) -> None:
    """Raises `ValueError`, naming the unknown keys that are not false, zero, empty or their default."""

    def unknown_keys(place: dict, known: set[str]) -> list[str]:
        keys = place.keys() - known - flags.keys() - DEFAULTS.keys()
        return sorted([key for key in keys if place[key] and not is_neutral(key)] + changed_defaults(place))

    eagle_config = config.get("eagle_config") or {}
    unknown = unknown_keys(config, {*LAYER_KEYS, *TOKEN_KEYS, EXACT_IDS, "layer_types", *keys_of_family(config)})
    unknown = [key for key in unknown if key != "partial_rotary_factor"]  # `rope_of` takes it, and it is checked later
    unknown += [f"eagle_config.{key}" for key in unknown_keys(eagle_config, set())]
    if unknown:
        raise ValueError(
            f"config.json has flags that this reader does not know: {unknown}. If they do not change what the draft computes, "
            "because they are about its target or its training, remove them. Otherwise try a newer hf-eagle3."
        )


def windows_of(config: dict, num_layers: int) -> dict:
    """
    Returns the keys of the windows of `num_layers` layers, as vLLM reads them. If `layer_types` has more entries, they are the
    target's, and do not count. Raises `ValueError` if there is a window, but no key says which layers have it.
    """
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    layer_types, is_on = config.get("layer_types") or [], config.get("use_sliding_window")
    if len(layer_types) > num_layers or (window and longest and window >= longest):
        return {}
    if "LlamaEagle3DraftModel" in (config.get("architectures") or []):
        return {}  # NeMo Automodel copies the target's windows, and trains without them
    if not {*layer_types} <= {"full_attention"}:
        if is_on is False or len(layer_types) < num_layers:
            reason = "`use_sliding_window` is false" if is_on is False else f"there are {num_layers} layers"
            raise ValueError(f"`layer_types` is {layer_types}, but {reason}. Correct the wrong one.")
        return {"layer_types": layer_types, "sliding_window": window, "use_sliding_window": True}
    if window and is_on is not False and not layer_types:
        layer_types = json.dumps(["sliding_attention"] * num_layers)
        raise ValueError(
            f"config.json has a `sliding_window` of {window}, but does not say which layers have it. If the draft was trained with "
            f'this window, add `"layer_types": {layer_types}`. If it was trained without one, set `use_sliding_window` to false.'
        )
    return {}


def layer_config_of(
    config: dict, flags: dict, rope: dict, tensors: dict[str, torch.Tensor], assumed: dict[str, Any]
) -> dict:
    """Returns the configuration of the layers. Where `tensors` contradict `config`, the correction goes into `assumed`."""
    layer_config = {key: config[key] for key in LAYER_KEYS if config.get(key) is not None}
    layer_config["model_type"] = "qwen3" if "layers.0.self_attn.q_norm.weight" in tensors else "llama"
    layer_config.setdefault("num_hidden_layers", 1)
    if flags["draft_num_hidden_layers"] is not None:  # the other key may count the target's layers
        layer_config["num_hidden_layers"] = flags["draft_num_hidden_layers"]
    held = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    if layer_config["num_hidden_layers"] > 1 and held == {"0"}:
        assumed["num_hidden_layers"] = (
            f"1, the layer that it holds; the target has {layer_config['num_hidden_layers']}"
        )
        layer_config["num_hidden_layers"] = 1
    layer_config |= windows_of(config, layer_config["num_hidden_layers"])
    layer_config.setdefault("num_key_value_heads", config["num_attention_heads"])
    layer_config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    # Versions of EAGLE's own code differ: some take `head_dim` from the configuration, some compute it.
    query = tensors.get("layers.0.self_attn.q_proj.weight")
    if format_of(config) == "safeailab" and query is not None:
        layer_config["head_dim"] = len(query) // config["num_attention_heads"]
    # What the checkpoint does not hold was only its target's, or SpecForge's layers ignored it.
    for flag, part in (("attention_bias", "self_attn.q_proj.bias"), ("mlp_bias", "mlp.up_proj.bias")):
        layer_config[flag] = f"layers.0.{part}" in tensors
    if rope.get("mrope_section"):
        assumed["mrope_section"] = (
            "ignored: the draft reads one position per token, which is the same in texts, but not after images"
        )
    rope = {key: value for key, value in rope.items() if key not in NEUTRAL_ROPE_KEYS}
    return {**layer_config, "tie_word_embeddings": False, "rope_parameters": rope}


def rope_of(config: dict) -> dict:
    """
    Returns the rotary embedding's parameters, from the new `rope_parameters`, or the old `rope_theta` and `rope_scaling`.
    Raises `ValueError` if one of them is not a mapping, they contradict each other, or the embedding is not supported.
    """
    rope: dict[str, Any] = {"rope_type": "default"}
    for key in ("rope_parameters", "rope_scaling"):  # as transformers reads both
        given = config.get(key) or {}
        if not isinstance(given, dict):
            raise ValueError(f"`{key}` is {given!r}, but must be a mapping.")
        if given.get("type") is not None:  # the old name
            given = {"rope_type": given["type"], **given}
        if given.get("factor") and given.get("rope_type") is None:  # transformers would not scale
            raise ValueError(
                f"`{key}` has a `factor` of {given['factor']}, but no `rope_type`. Set it to the scaling that the draft was trained with."
            )
        given = {name: value for name, value in given.items() if value is not None and name != "type"}
        if given.get("rope_type") == "mrope":  # the old name of the default with an `mrope_section`
            given["rope_type"] = "default"
        unlike = {name: value for name, value in given.items() if rope.get(name, value) not in (value, "default")}
        if unlike:
            raise ValueError(
                f"`rope_scaling` says {unlike}, but `rope_parameters` { ({name: rope[name] for name in unlike}) }. Remove the wrong one."
            )
        rope |= given
    names = ["partial_rotary_factor", "rope_theta"]
    if rope["rope_type"] != "default":
        names.append("original_max_position_embeddings")  # where Phi has it
    for name in names:
        if (said := config.get(name)) is None:
            continue
        if rope.setdefault(name, said) != said:
            raise ValueError(
                f"`{name}` is {said!r} in config.json, but {rope[name]!r} in its `rope_parameters`. Remove the wrong one."
            )
    rope.setdefault("rope_theta", 10000.0)
    if rope["rope_type"] == "dynamic" and rope.get("alpha"):
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        theta = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))
        raise ValueError(
            f"it scales its rotary embedding by `dynamic` with `alpha` ({rope['alpha']}), as HunYuan. Remove `rope_scaling`: "
            f"AngelSlim trained drafts as if it were not there. If yours was trained with it, also set `rope_theta` to {theta:.0f}, which "
            "vLLM computes from it."
        )
    return {key: value for key, value in rope.items() if key in ROPE_KEYS or value}  # unknown keys are refused later


def layer_ids_of(config: dict, flags: dict) -> tuple[list[int] | None, bool]:
    """
    Returns the ids of the layers that the states enter, and whether this is certain. Raises `ValueError` if the ids are
    malformed, contradict each other, or do not fit `num_aux_hidden_states`.

    Most projects write the ids of layers whose *output* the states are. Unless the config says so by one of `OUTPUT_IDS`, only the
    target can show what ids count: [`~Eagle3ForSpeculation.resolve_aux_layer_ids`] decides it later.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    ids, exact = flags[key], config.get(EXACT_IDS)
    counts = {name: flags[name] for name in ("num_aux_hidden_states", "num_aux_layers") if flags[name] is not None}
    said = {name: flags[name] for name in OUTPUT_IDS if flags[name]}
    for name, each in ((key, ids), *said.items(), (EXACT_IDS, exact)):
        if each and not (isinstance(each, list) and all(type(layer_id) is int and layer_id >= 0 for layer_id in each)):
            raise ValueError(f"`{name}` is {each!r}, but must be a list of layer numbers.")
    if said:
        (certain, outputs), *others = said.items()
        inputs = [layer_id + 1 for layer_id in outputs]
        said_elsewhere = (
            *((name, each, (outputs,)) for name, each in others),
            (key, ids, (outputs, inputs)),
            (EXACT_IDS, exact, (inputs,)),
        )
        for name, each, fitting in said_elsewhere:
            if each and each not in fitting:
                raise ValueError(
                    f"`{certain}` is {outputs}, but `{name}` is {each}. They name other states; remove the wrong one."
                )
        ids, exact = ids or outputs, inputs
    for name, num_states in counts.items():
        if ids and len(ids) != num_states:
            raise ValueError(f"`{name}` is {num_states!r}, but there are {len(ids)} layer ids.")
        if not ids and num_states != 3:
            raise ValueError(f"`{name}` is {num_states!r}, but `{key}` does not say which they are.")
    if exact:
        return exact, True
    return ([layer_id + 1 for layer_id in ids] if ids else None), False

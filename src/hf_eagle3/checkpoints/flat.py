"""
Reading drafts with a flat Llama configuration, as most projects write them. Keys of the layer and of EAGLE stand side by
side, or those of EAGLE in `eagle_config`. The names of the tensors show what a draft is, whoever wrote it.
"""

import json
import re
from typing import Any

import torch
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

from ..config_checks import (
    DEFAULTS,
    NEUTRAL_ROPE_KEYS,
    OPTIONAL_SIZES,
    ROPE_KEYS,
    changed_defaults,
    check_sizes,
)
from ..file_checks import check_mapping, is_neutral_mapping
from ..remote_code.configuration_eagle3 import Eagle3Config
from ..tensor_names import QWEN3_LAYER, our_names, without_prefix


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
# Keys that describe the draft. They stand at the top level or in `eagle_config`.
EAGLE_KEYS = (
    *OUTPUT_IDS,
    *MASK_TOKENS,
    "draft_num_hidden_layers",
    "eagle_aux_hidden_state_layer_ids",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "num_aux_hidden_states",
    "num_aux_layers",
    "parallel_drafting",
    "target_hidden_size",
    "use_aux_hidden_state",
    "use_aux_norm",
)
BOOLEANS = (
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "parallel_drafting",
    "use_aux_hidden_state",
    "use_aux_norm",
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
NUM_EXPERTS = ("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts")
# Keys that do not change what a draft computes, or that are checked elsewhere.
NEUTRAL_KEYS = {
    *PreTrainedConfig().to_dict(),
    *vars(GenerationConfig()),
    "attention_head_dim",
    "attn_implementation",
    "auto_map",
    "cla_share_factor",
    "decoder_sparse_step",
    "dense_list",
    "draft_vocab_size",
    "eagle_config",
    "full_attention_interval",
    "gradient_checkpointing",
    "max_window_layers",
    "modal_type",
    "model_type",
    "num_depths",  # of a parallel draft's training
    "num_target_layers",
    "org_vocab_size",
    "original_max_position_embeddings",
    "parallel_draft_heads_num_layers",  # without effect if a step drafts one token
    "pool_type",
    "prefix",
    "pretraining_tp",
    "quantization",
    "quantization_config",
    "reuse_target_lm_head",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "target_layer_count",
    "target_num_hidden_layers",
    "tie_word_embeddings",
    "tokenizer_class",
    "torch_dtype",
    "truncated_vocab_size",
    "unsloth_fixed",
    "use_cache",
    "use_mrope",
    "use_qk_norm",
    "use_sliding_window",
}
# Keys about the target and its inputs, and about training. A key about layers is none of these, because it may choose the states.
NEUTRAL_BEGINNINGS = (
    "target_",
    "image_",
    "video_",
    "audio_",
    "vision_",
    "linear_",
    "train_",
    "ttt_",
    "down_sample_",
    "cod_",
)
NEUTRAL_ENDS = ("_id", "_ids", "_token", "_token_index", "_train")
# Keys about experts and their routers, which drafts do not have, and about the loss of their training.
NEUTRAL_PARTS = ("expert", "router", "moe_", "topk", "n_group", "routed_scaling", "distill", "_loss")
# Old names of SGLang for the norms of EAGLE-3.1. Their flag was `use_aux_norm`.
OLD_NORMS = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}
# Projections that converters for engines have fused, and the parts that follow each other in them.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Names in heads of multi-token prediction: Qwen's, and DeepSeek's and GLM's.
MTP_PARTS = r"\bpre_fc_norm_|\b(eh_proj|enorm|hnorm)\.weight$"
LAYER_PARTS = {
    *QWEN3_LAYER,
    "hidden_norm.weight",
    *(f"self_attn.qkv_proj.{kind}" for kind in ("weight", "bias")),
    *(f"mlp.gate_up_proj.{kind}" for kind in ("weight", "bias")),
    *(f"self_attn.{name}_proj.bias" for name in "qkvo"),
    *(f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")),
}
# Names outside of the layers.
OUTSIDE = r"(fc|input_norm|fc_norm\.\d+|aux_norm_(low|mid|high)|norm|lm_head|embed_tokens)\.weight|mask_hidden|d2t|t2d"
# Tables that are computed, not trained.
COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def format_of(config: dict) -> str:
    """Returns the name of the project that writes such a `config.json`, for messages."""
    if (config.get("eagle_config") or {}).keys() & EXPECTED.keys():
        return "modelopt"
    return "safeailab" if config.get("architectures") == ["LlamaForCausalLM"] else "sglang"


def read(config: dict, tensors: dict[str, torch.Tensor]) -> tuple[Eagle3Config, dict[str, torch.Tensor], dict]:
    """
    Reads a draft from the contents of its `config.json` and its tensors. Returns the configuration, the tensors by our names,
    and a report: the `format`, and what was `renamed`, `ignored` and `assumed`. Raises `ValueError` if the draft is of an
    unsupported kind, or has unknown keys.
    """
    if missing := [key for key in REQUIRED_KEYS if config.get(key) is None]:
        nested = [key for key, value in config.items() if isinstance(value, dict) and "hidden_size" in value]
        advice = "It is incomplete: download it again."
        if nested == ["transformer_layer_config"]:
            advice = 'If speculators wrote it, add `"speculators_model_type": "eagle3"`.'
        elif nested:
            advice = f"Move the keys of the draft's layers from {nested} to the top level."
        raise ValueError(f"config.json lacks {missing}. {advice}")
    flags = flags_of(config)
    sizes = {**config, "draft_num_hidden_layers": flags["draft_num_hidden_layers"]}
    check_sizes({key: sizes[key] for key in (*LAYER_KEYS, *OPTIONAL_SIZES) if sizes.get(key) is not None})
    check_kind(config, flags, tensors)
    check_keys(config, flags)
    ours, report = tensors_of(tensors, config)
    assumed: dict[str, Any] = {}
    layer_config = layer_config_of(config, flags, ours, assumed)
    # If no flag says otherwise, a norm that the checkpoint holds is used.
    held = {"norm_before_fc": "input_norm.weight" in ours, "fc_norm": "fc_norm.0.weight" in ours}
    norms = {"norm_before_residual": False, "norm_output": False, **held}
    assumed |= {flag: norm for flag, norm in norms.items() if flags[flag] is None}
    if flags["norm_output"] and not flags["fc_norm"]:
        assumed["norm_output"] = (
            "true, as SGLang reads it, but SpecForge has exported it for drafts trained without it"
        )
    ids, counts_inputs = layer_ids_of(config, flags)
    if ids is None:
        assumed["eagle_aux_hidden_state_layer_ids"] = "[2, L // 2, L - 3] of the target's L layers"
    elif not counts_inputs:
        counted = [layer_id - 1 for layer_id in ids]
        assumed["eagle_aux_hidden_state_layer_ids"] = (
            f"{counted} count outputs of layers, unless the target's depth shows that they count inputs"
        )
    fields: dict[str, Any] = {
        "transformer_layer_config": layer_config,
        "draft_vocab_size": len(ours["d2t"]) if "d2t" in ours else config["vocab_size"],
        "has_own_embed_tokens": "embed_tokens.weight" in ours,
        "eagle_aux_hidden_state_layer_ids": ids,
        "aux_layer_ids_assumed": not counts_inputs,
        "target_hidden_size": flags["target_hidden_size"],
        "mask_token_id": mask_token_of(flags) if "mask_hidden" in ours else None,
        **{flag: norm if flags[flag] is None else flags[flag] for flag, norm in norms.items()},
        **{key: config.get(key) for key in TOKEN_KEYS},
    }
    return Eagle3Config(**fields), ours, {"format": format_of(config), **report, "assumed": assumed}


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
    return flags


def check_kind(config: dict, flags: dict, tensors: dict) -> None:
    """Raises `ValueError` if the draft is of an unsupported kind. The message says which, and what can run it."""
    names = without_prefix(tensors).values()
    quantization = config.get("quantization_config") or config.get("quantization")  # MLX writes the latter
    weights = {name: tensors[name] for name, short in without_prefix(tensors).items() if short not in ("d2t", "t2d")}
    if not quantization:
        weights = {name: weight for name, weight in weights.items() if name.endswith("weight")}
    quantized = [name for name, weight in weights.items() if weight.itemsize == 1 or not weight.is_floating_point()]
    if quantized and not quantization:
        raise ValueError(
            f"it has weights that are integers or of 8 bits, such as {quantized[0]} ({weights[quantized[0]].dtype}), but config.json "
            "has no `quantization_config` that says how to read them. Load the draft that is not quantized."
        )
    # A draft may have its target's configuration, but weights that are not quantized.
    if quantized:
        methods = quantization if isinstance(quantization, dict) else {}
        method = methods.get("quant_method") or methods.get("quant_algo") or "an unnamed method"
        raise ValueError(
            f"its weights are quantized by {method} (`quantization_config`), which is not supported. Load the draft that is not "
            "quantized, or run this one in an engine such as vLLM or SGLang."
        )
    if config.get("kv_lora_rank") or any("kv_a_proj" in name for name in names):
        raise ValueError(
            "it has multi-head latent attention (MLA), but only Llama and Qwen3 layers are supported. SGLang and vLLM run it."
        )
    num_experts = max([config.get(key) or 0 for key in NUM_EXPERTS], default=0)
    # A draft may have its target's configuration, but one MLP a layer.
    is_of_experts = num_experts > 1 and not any(name.endswith(".mlp.down_proj.weight") for name in names)
    if any(".experts." in name for name in names) or is_of_experts:
        raise ValueError(
            f"it is a draft of experts (MoE, {num_experts or 'some'} of them), but only one MLP per layer is supported. The project that "
            "trained it may run it."
        )
    if any(re.search(MTP_PARTS, name) for name in names):
        raise ValueError(
            "it is a head of multi-token prediction (MTP), which reads only the target's last state. SGLang and vLLM run it with "
            "the target that it belongs to."
        )
    reads_one_state = flags["use_aux_hidden_state"] is False
    if reads_one_state or not any("hidden_norm" in name for name in names):
        why = "`use_aux_hidden_state` is false" if reads_one_state else "it has no `hidden_norm`"
        raise ValueError(
            f"it is a draft of EAGLE-1 and 2 ({why}), which reads one state. SGLang and vLLM run it as EAGLE, not EAGLE3."
        )
    is_parallel, steps = "mask_hidden" in names, flags["parallel_draft_step"]
    if (flags["parallel_drafting"] and not is_parallel) or steps not in (None, 1):
        raise ValueError(
            "it drafts several tokens in one pass (`parallel_drafting`, `parallel_draft_step`), but only P-EAGLE is supported, "
            "which stores a `mask_hidden`. vLLM runs this draft."
        )
    if is_parallel and mask_token_of(flags) is None:
        raise ValueError(
            "it is a parallel draft (P-EAGLE), but config.json does not say which token it reads in place of unknown ones. Add "
            "the one that it was trained with as `mask_token_id`."
        )
    if "lm_head_layernorm.weight" in names:
        raise ValueError(
            "it has the names of speculators' research code (`lm_head_layernorm`). Convert it by that code's `convert_checkpoint.py`."
        )
    check_parts(config, tensors)
    rope = rope_of(config)
    if rope["rope_type"] == "dynamic" and rope.get("alpha"):
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        theta = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))
        raise ValueError(
            f"it scales its rotary embedding by `dynamic` with `alpha` ({rope['alpha']}), as HunYuan. Remove `rope_scaling`: "
            f"AngelSlim trained drafts as if it were not there. If yours was trained with it, also set `rope_theta` to {theta:.0f}, which "
            "vLLM computes from it."
        )
    for flag, expected in EXPECTED.items():
        if flags[flag] not in (expected, None):
            raise ValueError(f"`{flag}` is {flags[flag]}, but only drafts with {expected} are supported.")


def check_parts(config: dict, tensors: dict) -> None:
    """
    Raises `ValueError` if a draft has other tensors than EAGLE-3's, its layers have other parts than Llama's and Qwen3's, or
    more than the first read tokens.
    """
    held = {name: tensors[old] for old, name in our_names(tensors).items() if not name.endswith(COMPUTED)}
    layers = {name: tensor for name, tensor in held.items() if name.startswith("layers.")}
    if others := sorted(name for name in held.keys() - layers.keys() if not re.fullmatch(OUTSIDE, name)):
        raise ValueError(
            f"it holds {others[:6]}, which EAGLE-3 drafts do not have. The project that trained it may run it."
        )
    if others := sorted({name.split(".", 2)[-1] for name in layers} - LAYER_PARTS):
        raise ValueError(
            f"its layers hold {others[:6]}, but only Llama and Qwen3 layers are supported, which have no such tensors. The project "
            "that trained it may run it."
        )
    query = layers.get("layers.1.self_attn.q_proj.weight", layers.get("layers.1.self_attn.qkv_proj.weight"))
    if query is not None and query.shape[-1] == 2 * config["hidden_size"]:
        raise ValueError(
            "each of its layers reads the token beside the state. Supported drafts do this in the first layer only. The project that "
            "trained it may run it."
        )


def mask_token_of(flags: dict) -> int | None:
    """Returns the token that a parallel draft reads in place of unknown ones, or `None` if none is named."""
    return next((flags[name] for name in MASK_TOKENS if flags[name] is not None), None)


def is_neutral(key: str) -> bool:
    """Whether a key does not change what a draft computes, or is checked elsewhere."""
    return (
        key in NEUTRAL_KEYS
        or key.startswith("_")
        or ("layer" not in key and (key.startswith(NEUTRAL_BEGINNINGS) or key.endswith(NEUTRAL_ENDS)))
        or any(part in key for part in NEUTRAL_PARTS)
    )


def keys_of_family(config: dict) -> set[str]:
    """
    Returns the keys of the family in `model_type` if the layers are Llama's, which ignore them: NeMo Automodel copies the
    configuration of its target.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    if not (isinstance(model_type, str) and model_type in CONFIG_MAPPING and any("Llama" in x for x in architectures)):
        return set()
    # The last two are in gpt-oss's config.json only.
    keys = {*CONFIG_MAPPING[model_type]().to_dict(), "initial_context_length", "swiglu_limit"}
    # Other names of what is missing may say what the draft computes.
    parts = {"hidden_act": "hidden_activation", "rms_norm_eps": "_eps"}
    unsure = [part for key, part in parts.items() if config.get(key) is None]
    return {key for key in keys if not any(part in key for part in unsure)}


def check_keys(config: dict, flags: dict) -> None:
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


def layer_config_of(config: dict, flags: dict, tensors: dict[str, torch.Tensor], assumed: dict) -> dict:
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
    for name, weight in list(tensors.items()):  # Qwen2's attention has three biases, Llama's four
        if name.endswith("self_attn.q_proj.bias"):
            zeros = torch.zeros(layer_config["hidden_size"], dtype=weight.dtype)
            tensors.setdefault(name.replace("q_proj", "o_proj"), zeros)
    layer_config["tie_word_embeddings"] = False
    rope = rope_of(config)
    if rope.get("mrope_section"):
        assumed["mrope_section"] = "without effect, as in texts: the draft reads one position a token, also of images"
    rope = {key: value for key, value in rope.items() if key not in NEUTRAL_ROPE_KEYS}
    # Unknown keys are refused later.
    layer_config["rope_parameters"] = {key: value for key, value in rope.items() if key in ROPE_KEYS or value}
    return layer_config


def rope_of(config: dict) -> dict:
    """
    Returns the rotary embedding's parameters, from the new `rope_parameters`, or the old `rope_theta` and `rope_scaling`.
    Raises `ValueError` if one of them is not a mapping, or they contradict each other.
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
        rope |= {name: value for name, value in given.items() if value is not None}
    rope.pop("type", None)
    if rope["rope_type"] == "mrope":  # the old name of the default with an `mrope_section`
        rope["rope_type"] = "default"
    original = config.get("original_max_position_embeddings")  # where Phi has it
    if original and rope["rope_type"] != "default":
        rope.setdefault("original_max_position_embeddings", original)
    if (factor := config.get("partial_rotary_factor")) not in (None, 1):
        rope["partial_rotary_factor"] = factor
    thetas = [theta for theta in (rope.get("rope_theta"), config.get("rope_theta")) if theta is not None]
    if len(thetas) == 2 and thetas[0] != thetas[1]:
        raise ValueError(
            f"`rope_theta` is {thetas[1]!r} in config.json, but {thetas[0]!r} in its `rope_parameters`. Remove the wrong one."
        )
    rope["rope_theta"] = (thetas or [10000.0])[0]
    return rope


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


def tensors_of(tensors: dict[str, torch.Tensor], config: dict) -> tuple[dict[str, torch.Tensor], dict]:
    """
    Returns the tensors by our names, and a report of what was `renamed` and `ignored`. Raises `ValueError` if two tensors have
    one name, or the vocabulary mapping contradicts the configuration.
    """
    renamed, ignored, ours = {}, [], {}
    for name, new_name in our_names(tensors).items():
        if name.endswith(COMPUTED):
            ignored.append(name)
            continue
        new_name = OLD_NORMS.get(new_name, new_name)
        if new_name != name:
            renamed[name] = new_name
        if new_name in ours:
            raise ValueError(f"two tensors are called {new_name}; one of them is stored as {name}.")
        ours[new_name] = tensors[name]
    split_fused(ours, renamed, config)
    merge_norms(ours, renamed, ignored)
    if "mask_hidden" in ours:  # some have one dimension less
        ours["mask_hidden"] = ours["mask_hidden"].reshape(1, 1, -1)
    if "lm_head.weight" not in ours and config.get("tie_word_embeddings") and "embed_tokens.weight" in ours:
        ours["lm_head.weight"] = ours["embed_tokens.weight"].clone()
        renamed["embed_tokens.weight"] = "lm_head.weight (tied)"
    vocab_size = config["vocab_size"]
    held = len(ours["d2t"]) if "d2t" in ours else None
    draft_vocab_size = config.get("draft_vocab_size") or held or vocab_size
    if draft_vocab_size == vocab_size and held in (None, vocab_size):
        for name in ("d2t", "t2d"):  # some old files have a mapping without effect
            if name in ours and is_neutral_mapping(name, ours[name]):
                del ours[name]
                ignored.append(name)
    elif held is None:
        raise ValueError(
            f"the draft vocabulary has {draft_vocab_size} of {vocab_size} tokens, but there is no d2t, which names them. If another "
            "file lists their ids (a token map of SGLang, eagle_meta.pt of NeMo Automodel), store them as a tensor `d2t`: each id minus "
            "its index in the list, which begins with 0."
        )
    elif held != draft_vocab_size:
        raise ValueError(f"`draft_vocab_size` is {draft_vocab_size}, but d2t maps {held} tokens.")
    else:
        check_mapping(ours["d2t"])
        ours["d2t"] = ours["d2t"].long()
        if "t2d" in ours:
            ours["t2d"] = ours["t2d"].bool()
    return ours, {"renamed": renamed, "ignored": ignored}


def split_fused(tensors: dict[str, torch.Tensor], renamed: dict[str, str], config: dict) -> None:
    """
    Splits projections that are fused as in engines and in Phi-3: the rows of one part follow those of the other. Raises
    `ValueError` if the number of rows does not fit the parts, or a part is stored beside them.
    """
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    shares = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "gate_proj": 1, "up_proj": 1}
    for name in list(tensors):
        match = re.fullmatch(rf"(layers\.\d+\.(?:self_attn|mlp))\.({'|'.join(FUSED)})\.(weight|bias)", name)
        if match is None:
            continue
        block, fused, kind = match.groups()
        rows, parts = tensors.pop(name), {f"{block}.{part}.{kind}": shares[part] for part in FUSED[fused]}
        if held := sorted(parts.keys() & tensors.keys()):
            raise ValueError(
                f"it has {name}, and its parts beside it: {held}. Remove those that it was not trained with."
            )
        size, rest = divmod(len(rows), sum(parts.values()))
        if rest:
            of_heads = f" for {heads} heads (`num_attention_heads`) and {kv_heads} of keys and values (`num_key_value_heads`). Correct config.json"
            raise ValueError(
                f"{name} has {len(rows)} rows, which cannot be split into {FUSED[fused]}"
                f"{of_heads if fused == 'qkv_proj' else ' of equal size. Download it again'}."
            )
        split = rows.split([size * share for share in parts.values()])
        tensors |= {part: weight.clone() for part, weight in zip(parts, split, strict=True)}
        renamed[name] = ", ".join(parts)


def merge_norms(tensors: dict[str, torch.Tensor], renamed: dict[str, str], ignored: list[str]) -> None:
    """
    Layers after the first have one norm before their attention. SGLang calls it `hidden_norm`, vLLM and we `input_layernorm`.
    Raises `ValueError` if a layer has both and they differ.
    """
    for name in [name for name in tensors if re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.weight", name)]:
        weight, other = tensors.pop(name), name.replace("hidden_norm", "input_layernorm")
        if other not in tensors:
            tensors[other], renamed[name] = weight, other
            continue
        if not torch.equal(tensors[other], weight):
            raise ValueError(
                f"{name} and {other} differ. SGLang normalizes the input of this layer by the first, vLLM by the second. Remove the "
                "one that the draft was not trained with."
            )
        ignored.append(name)

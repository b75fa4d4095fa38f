"""
Checks of values in configurations that others wrote. They do not ship with drafts, because the digest of a configuration
shows that it is as we saved it.
"""

import base64
import sys
from collections.abc import Collection
from dataclasses import fields
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .remote_code.configuration_eagle3 import Eagle3Config


# Others write these into a config.json. They do not change a draft.
NEUTRAL_KEYS = {
    "auto_map",
    "down_sample_ratio",
    "down_sample_ratio_min",
    "embed_requires_grad",
    "enable_sp_ulysses",
    "inference_type",
    "num_depths",  # of a parallel draft's training
    "tie_word_embeddings",
    "torch_dtype",
    "use_cache",
}
# These do not change a draft in `transformer_layer_config`, where some versions of transformers also write all of their defaults.
NEUTRAL_LAYER_KEYS = {
    *NEUTRAL_KEYS,
    *vars(GenerationConfig()),
    *Qwen3Config().to_dict(),
    "attn_implementation",
    "num_aux_hidden_states",
    "partial_rotary_factor",
    "pretraining_tp",
    "pruned_heads",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "transformers.js_config",
    "unsloth_fixed",
}

# Values that are the same as leaving the key out. With others a draft would compute something else.
DEFAULTS = {
    "is_causal": True,
    "is_neox_style": True,  # vLLM's name: the halves of a head rotate together, not its neighbours
    "norm_type": "rms",
    "partial_rotary_factor": 1.0,
    "rope_is_neox_style": True,  # SGLang's name for it
    "use_rope": True,
    "use_rotary_pos_emb": True,
}

ROPE_NUMBERS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
)
# One number for each two entries of a head.
ROPE_LISTS = {"long_factor", "short_factor"}
ROPE_KEYS = {
    *ROPE_NUMBERS,
    *ROPE_LISTS,
    "mscale",
    "mscale_all_dim",
    "rope_type",
    "truncate",
    "type",  # the old name of `rope_type`
}
# Copied from the target, in most cases. The rotary embedding of Llama's and Qwen3's layers does not read them.
NEUTRAL_ROPE_KEYS = {"llama_4_scaling_beta", "max_position_embeddings", "mrope_interleaved", "mrope_section"}

# Drafts of other methods, by their `model_type` or the beginning of a key (`medusa_num_heads`), and what takes them.
OTHER_METHODS = {
    "eagle": ("a draft of EAGLE-1 or 2", "vLLM runs it as `eagle`."),
    "hass": ("a draft of HASS", "vLLM runs it as `eagle`."),
    "hydra": ("a draft of Hydra", "The project that trained it runs it."),
    "medusa": ("a draft of Medusa", "vLLM runs it as `medusa`."),
    "mlp_speculator": ("an MLP speculator", "vLLM runs it as `mlp_speculator`."),
}

SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
LARGEST_SIZE = 2**31 - 1
# These may be null, which stands for a default.
OPTIONAL_SIZES = (
    "draft_num_hidden_layers",
    "draft_vocab_size",
    "head_dim",
    "num_key_value_heads",
    "target_hidden_size",
)


def unknown_keys(config_dict: dict[str, Any], known: Collection[str]) -> list[str]:
    """Returns the keys that are not `known`, without comments and keys whose value is false, zero or empty."""
    return sorted(key for key in config_dict.keys() - set(known) if config_dict[key] and not key.startswith("_"))


def check_keys(name: str, config_dict: dict[str, Any], known: Collection[str]) -> None:
    """Raises `ValueError` if there are [`unknown_keys`]."""
    if unknown := unknown_keys(config_dict, known):
        raise ValueError(
            f"{name} has keys that this version does not know: {unknown}. Their effect would be missing; a later version of "
            "hf-eagle3 may read this draft."
        )


def changed_defaults(config_dict: dict[str, Any]) -> list[str]:
    """Returns the keys whose values are not their [`DEFAULTS`]."""
    return sorted(key for key, default in DEFAULTS.items() if config_dict.get(key) not in (None, default))


def check_sizes(config_dict: dict[str, Any]) -> None:
    """Raises `ValueError` if a size is not a positive integer."""
    for name in (*SIZES, *OPTIONAL_SIZES):
        value = config_dict.get(name, 1)
        is_default = value is None and name in OPTIONAL_SIZES
        if not is_default and (type(value) is not int or not 1 <= value <= LARGEST_SIZE):
            raise ValueError(f"`{name}` is {value!r}, but must be a positive integer, up to {LARGEST_SIZE}.")
    num_heads, num_key_value_heads = (config_dict.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if num_heads and num_key_value_heads and num_heads % num_key_value_heads:
        raise ValueError(
            f"`num_attention_heads` ({num_heads}) must be a multiple of `num_key_value_heads` ({num_key_value_heads})."
        )


def check_layer_config(layer_config: dict[str, Any]) -> None:
    """Raises `ValueError` if a value of a `transformer_layer_config` is of the wrong type or out of range."""
    check_sizes(layer_config)
    rope = layer_config.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}  # transformers refuses other types
    check_rope(rope)
    if (activation := layer_config.get("hidden_act", "silu")) not in ACT2FN:
        raise ValueError(f"`hidden_act` is {activation!r}, which transformers does not know.")
    check_positive(layer_config, "rope_theta", "rms_norm_eps")
    layer_types, num_layers = layer_config.get("layer_types"), layer_config.get("num_hidden_layers")
    if isinstance(layer_types, list) and num_layers and len(layer_types) != num_layers:
        raise ValueError(
            f"`layer_types` has {len(layer_types)} entries, but `num_hidden_layers` is {num_layers}. If they are the target's, remove "
            "`layer_types` from `transformer_layer_config`. Then no layer has a window."
        )
    check_model_type(model_type := layer_config.get("model_type", "llama"))
    known = AutoConfig.for_model(model_type).to_dict().keys() | NEUTRAL_LAYER_KEYS
    changed = {*changed_defaults(layer_config)} - {"partial_rotary_factor"}  # that is checked later
    check_keys("`transformer_layer_config`", {**layer_config, **dict.fromkeys(changed, True)}, known - changed)


def check_positive(config_dict: dict[str, Any], *names: str) -> None:
    """Raises `ValueError` if a value of these names is not a positive number. It may be null."""
    for name in names:
        value = config_dict.get(name)
        if value is not None and not (type(value) in (int, float) and 0 < value < sys.float_info.max):
            raise ValueError(f"`{name}` is {value!r}, but must be a positive number.")


def check_rope(rope: dict[str, Any]) -> None:
    """
    Raises `ValueError` if transformers does not know the kind of rotary embedding, a number is out of range, or a key unknown.
    """
    check_keys("The rotary embedding (`rope_parameters`, `rope_scaling`)", rope, ROPE_KEYS | NEUTRAL_ROPE_KEYS)
    check_positive(rope, *ROPE_NUMBERS)
    for name in ("original_max_position_embeddings", "rope_theta"):
        if rope.get(name, 1) is None:
            raise ValueError(f"`{name}` is None, but must be a positive number.")
    rope_type, rope_types = rope.get("rope_type", "default"), ["default", *ROPE_INIT_FUNCTIONS]
    if rope_type not in rope_types:
        raise ValueError(f"`rope_type` is {rope_type!r}, but must be one of {rope_types}.")


def check_method(config_dict: dict[str, Any], source: Any) -> None:
    """Raises `ValueError` if a `config.json` is of a draft of another method. Its weights may be in files of other names."""
    if "eagle3" in str(config_dict.get("architectures")).lower():  # vLLM calls EAGLE-3's `model_type` `eagle`, too
        return
    for name, (kind, advice) in OTHER_METHODS.items():
        if config_dict.get("model_type") == name or f"{name}_num_heads" in config_dict:
            if "transformer_layer_config" in config_dict:  # saved by this library
                advice = "Load it by `AutoModel.from_pretrained`, after `import hf_eagle3.baselines`."
            raise ValueError(f"{source} is {kind}, not of EAGLE-3. {advice}")


def check_config(config: Eagle3Config) -> None:
    """Raises `ValueError` if the fields of a configuration contradict each other, or draft layers cannot be like that."""
    check_layers(config)
    check_fields(config)
    check_verifier(config)


def check_model_type(model_type: Any) -> None:
    if model_type not in ("llama", "qwen3"):
        raise ValueError(
            f"`transformer_layer_config.model_type` is {model_type!r}; a draft has 'llama' or 'qwen3' layers."
        )


def check_layers(config: Eagle3Config) -> None:
    layer_config = config.transformer_layer_config
    check_model_type(layer_config.model_type)
    rope = layer_config.rope_parameters or {}  # here also what stood in old keys
    check_rope(rope)
    factor = rope.get("partial_rotary_factor") or 1.0
    if factor != 1 and config.model_type != "eagle3":  # z-lab's code ignores it, and other drafts are ours
        raise ValueError(
            f"`partial_rotary_factor` is {factor}, but the layers of these drafts rotate whole heads. Remove it, also "
            "within `rope_parameters` and `rope_scaling`."
        )
    dim = int(layer_config.head_dim * factor)
    if factor != 1 and (factor > 1 or dim % 2 or dim == 0):
        raise ValueError(
            f"`partial_rotary_factor` is {factor}, but must be at most 1, and rotate an even number of a head's "
            f"{layer_config.head_dim} entries."
        )
    for name in rope.keys() & ROPE_LISTS:
        factors, length = rope[name], dim // 2
        is_list = isinstance(factors, list) and all(type(factor) in (int, float) for factor in factors)
        if not (is_list and len(factors) == length):
            raise ValueError(
                f"`{name}` is {factors!r}, but must be a list of {length} numbers, one for each two rotated entries."
            )
    if not set(layer_config.layer_types) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"`layer_types` is {layer_config.layer_types}, but a draft has 'full_attention' and 'sliding_attention' only."
        )
    if "sliding_attention" in layer_config.layer_types:
        if getattr(layer_config, "sliding_window", None) is None:
            raise ValueError(
                "`layer_types` has 'sliding_attention', but no window is on. Set `sliding_window` (Qwen3: `use_sliding_window`, too)."
            )
        check_positive(vars(layer_config), "sliding_window")


def check_fields(config: Eagle3Config) -> None:
    if not 1 <= config.draft_vocab_size <= config.vocab_size:
        raise ValueError(
            f"`draft_vocab_size` is {config.draft_vocab_size}, but must be from 1 to {config.vocab_size}."
        )
    check_sizes({"target_hidden_size": config.target_hidden_size})
    if config.fc_norm and config.norm_before_fc:
        raise ValueError("`fc_norm` and `norm_before_fc` exclude each other; set at most one of them.")
    if config.speculators_model_type != ("peagle" if config.is_parallel else "eagle3"):
        raise ValueError(
            f"`speculators_model_type` is {config.speculators_model_type!r}, expected 'eagle3', or 'peagle' with a `mask_token_id`."
        )
    if config.mask_token_id is not None and not 0 <= config.mask_token_id < config.vocab_size:
        raise ValueError(
            f"`mask_token_id` is {config.mask_token_id}, but must be one of the target's {config.vocab_size} tokens."
        )


def check_verifier(config: Eagle3Config) -> None:
    verifier = (config.speculators_config or {}).get("verifier", {})
    if not isinstance(verifier, dict) or not isinstance(verifier.get("name_or_path"), str | None):
        raise ValueError(
            f"`verifier` in `speculators_config` is {verifier!r}, but must be a mapping whose `name_or_path` is a string."
        )
    try:
        is_fingerprint = len(base64.b64decode(config.verifier_fingerprint or "", validate=True)) in (0, 128)
    except ValueError:
        is_fingerprint = False
    if not is_fingerprint:
        raise ValueError(
            f"`verifier_fingerprint` is {config.verifier_fingerprint!r}, but must be 128 bytes in base64. Remove it."
        )


NO_CONFIG = (
    "There is no config.json, or it is empty. Pass the draft's `subfolder`, or download it again. If the draft is in an engine's own "
    "format (a GGUF file, or Mistral's params.json), run it in that engine, or load the original draft."
)


def check_config_dict(config_class: type[Eagle3Config], config_dict: dict[str, Any]) -> None:
    """
    Raises `ValueError` if a `config.json` is missing, of another kind of draft, without its layers, or of an unknown dtype, or
    has keys that this `config_class` does not know.
    """
    if not config_dict:
        raise ValueError(NO_CONFIG)
    if (algorithm := config_dict.get("speculators_model_type")) not in ("eagle3", "peagle", None):
        raise ValueError(
            f"This is a draft of speculators of the kind {algorithm!r}, which hf-eagle3 does not read. An engine such as vLLM may."
        )
    if config_dict.get("transformer_layer_config") is None:
        raise ValueError("This config.json has no `transformer_layer_config`, which describes the draft's layers.")
    for name in ("dtype", "torch_dtype"):
        dtype = config_dict.get(name)
        known = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
        if known is not None and not (
            isinstance(known, torch.dtype) and known.is_floating_point and known.itemsize > 1
        ):
            raise ValueError(
                f"`{name}` is {dtype!r}, but must be a dtype of torch in which it computes, like 'bfloat16'."
            )
    quantization = config_dict.get("quantization_config")
    if isinstance(quantization, str | list) or quantization == {}:
        raise ValueError(
            f"`quantization_config` is {quantization!r}, but must be a mapping that names a `quant_method`. Remove it."
        )
    known = {field.name for field in fields(config_class)} | PreTrainedConfig().to_dict().keys() | NEUTRAL_KEYS
    check_keys("This config.json", config_dict, known | {"quantization_config"})  # which transformers reads

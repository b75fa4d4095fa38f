"""
Reading drafts with a flat Llama configuration, as most projects write them. Keys of the layer and of EAGLE stand side by
side, or those of EAGLE in `eagle_config`. The names of the tensors show what a draft is, whoever wrote it.
"""

import re
from collections.abc import Collection
from typing import Any

import torch

from ..config_checks import OPTIONAL_SIZES, check_sizes
from ..file_checks import check_dtypes
from ..remote_code.configuration_eagle3 import Eagle3Config
from .keys import (
    EXACT_IDS,
    EXPECTED,
    LAYER_KEYS,
    REQUIRED_KEYS,
    TOKEN_KEYS,
    check_flat_keys,
    flags_of,
    format_of,
    layer_config_of,
    layer_ids_of,
    mask_token_of,
    rope_of,
)
from .parts import by_our_names, check_parts, complete


NUM_EXPERTS = ("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts")
# Names in heads of multi-token prediction: Qwen's, and DeepSeek's and GLM's.
MTP_PARTS = r"\bpre_fc_norm_|\b(eh_proj|enorm|hnorm)\.weight$"


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
    check_precision(config, tensors)
    ours, report = by_our_names(tensors)
    check_kind(config, flags, ours)
    check_parts(ours, config)
    rope = rope_of(config)
    check_flat_keys(config, flags)
    complete(ours, report, config)
    assumed: dict[str, Any] = {}
    layer_config = layer_config_of(config, flags, rope, ours, assumed)
    # If no flag says otherwise, a norm that the checkpoint holds is used.
    held = {"norm_before_fc": "input_norm.weight" in ours, "fc_norm": "fc_norm.0.weight" in ours}
    norms = {"norm_before_residual": False, "norm_output": False, **held}
    assumed |= {flag: norm for flag, norm in norms.items() if flags[flag] is None}
    if flags["norm_output"] and EXACT_IDS not in config:  # not our own export
        # Also with `fc_norm`. Corrected in https://github.com/sgl-project/SpecForge/pull/879, which the file does not show.
        assumed["norm_output"] = (
            "true, as engines read it. But until September 2026 SpecForge trained such drafts without it. If few tokens are accepted, "
            "load it with `norm_output=False`"
        )
    is_angelslim = config.get("architectures") == ["Eagle3LlamaForCausalLM"] and config.get("model_type") == "llama"
    # It reads the key only beside an `mrope_section`.
    if is_angelslim and rope["rope_theta"] != 10000 and not rope.get("mrope_section"):
        assumed["rope_theta"] = (
            f"{rope['rope_theta']}, as engines read it. But AngelSlim trains with 10000 even so. If few tokens are accepted, "
            "load the draft with this base"
        )
    if (rope.get("partial_rotary_factor") or 1) != 1:
        assumed["partial_rotary_factor"] = (
            "a part of each head rotates, as in vLLM. SpecForge, Model-Optimizer and others train whole heads even so. If few tokens are "
            "accepted, remove the key from a downloaded copy"
        )
    ids, are_certain = layer_ids_of(config, flags)
    if ids is None:
        assumed["eagle_aux_hidden_state_layer_ids"] = "[2, L // 2, L - 3] of the target's L layers"
    elif not are_certain:
        counted = [layer_id - 1 for layer_id in ids]
        assumed["eagle_aux_hidden_state_layer_ids"] = (
            f"{counted} count outputs of layers, unless the target's depth shows that they count inputs"
        )
    fields: dict[str, Any] = {
        "transformer_layer_config": layer_config,
        "draft_vocab_size": len(ours["d2t"]) if "d2t" in ours else config["vocab_size"],
        "has_own_embed_tokens": "embed_tokens.weight" in ours,
        "eagle_aux_hidden_state_layer_ids": ids,
        "aux_layer_ids_assumed": not are_certain,
        "target_hidden_size": flags["target_hidden_size"],
        "mask_token_id": mask_token_of(flags) if "mask_hidden" in ours else None,
        **{flag: norm if flags[flag] is None else flags[flag] for flag, norm in norms.items()},
        **{key: config.get(key) for key in TOKEN_KEYS},
    }
    return Eagle3Config(**fields), ours, {"format": format_of(config), **report, "assumed": assumed}


def check_precision(config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Raises `ValueError` if the weights are quantized."""
    quantization = config.get("quantization_config") or config.get("quantization")  # MLX writes the latter
    if not quantization:
        return check_dtypes({name: tensor.dtype for name, tensor in tensors.items()}, "it")
    weights = [weight for name, weight in tensors.items() if not name.endswith(("d2t", "t2d"))]
    # A draft may have its target's configuration, but weights that are not quantized.
    if any(weight.itemsize == 1 or not weight.is_floating_point() for weight in weights):
        methods = quantization if isinstance(quantization, dict) else {}
        method = methods.get("quant_method") or methods.get("quant_algo") or "an unnamed method"
        raise ValueError(
            f"its weights are quantized by {method} (`quantization_config`), which is not supported. Load the draft that is not "
            "quantized, or run this one in an engine such as vLLM or SGLang."
        )


def check_kind(config: dict, flags: dict, names: Collection[str]) -> None:
    """
    Raises `ValueError` if a draft with tensors of these `names`, ours, is of an unsupported kind. The message says which, and
    what can run it.
    """
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
    for flag, expected in EXPECTED.items():
        if flags[flag] not in (expected, None):
            raise ValueError(f"`{flag}` is {flags[flag]}, but only drafts with {expected} are supported.")

"""Loads a draft of any method to measure it, and tells drafts and models apart."""

import hashlib
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..auto import kind_of_draft
from ..baselines import BASELINES, DFlashForSpeculation
from ..remote_code.modeling_eagle3 import Eagle3ForSpeculation
from ..tensor_names import HUB_ARGUMENTS, is_block_draft


NUM_SAMPLED = 64  # numbers of each tensor in a `sampled_digest`


def load_draft(name: str, **kwargs: Any) -> Any:
    """
    Loads a draft (a folder or Hub id), in evaluation mode: an EAGLE-3 draft of any format, a block draft, or another of
    `hf_eagle3.baselines`. It never runs code from the draft's repo. `kwargs` are those of `from_pretrained`. With
    `output_loading_info=True` it returns that, too. Raises `ValueError` if it is not a draft.
    """
    loaded = class_of(name, **kwargs).from_pretrained(name, trust_remote_code=False, **kwargs)
    (loaded[0] if isinstance(loaded, tuple) else loaded).eval()
    return loaded


def class_of(name: str, **kwargs: Any) -> Any:
    """
    Returns the class of a draft, by its `config.json` and the names of its tensors. For anything else it returns
    [`Eagle3ForSpeculation`], whose error says why it is not a draft.
    """
    hub_kwargs = {argument: kwargs[argument] for argument in HUB_ARGUMENTS if argument in kwargs}
    try:
        content, _ = PreTrainedConfig.get_config_dict(name, **hub_kwargs)
    except OSError:  # a LoRA adapter has none
        return Eagle3ForSpeculation
    if "dflash_config" in content or content.get("speculators_model_type") in ("dflash", "dspark"):
        return DFlashForSpeculation
    if "transformer_layer_config" in content:  # saved by this library, or by speculators
        of_type = {
            baseline.draft_class.config_class.model_type: baseline.draft_class for baseline in BASELINES.values()
        }
        return of_type.get(content.get("model_type"), Eagle3ForSpeculation)
    is_block = kind_of_draft(content, name, hub_kwargs)[0] is is_block_draft
    return DFlashForSpeculation if is_block else Eagle3ForSpeculation


def method_of(draft: PreTrainedModel) -> str:
    """Returns the name that benchmarks give to a draft's method, such as `eagle3`, `jetspec` or `medusa`."""
    config = draft.config
    if config.model_type == "dflash" and (config.is_dspark or config.is_causal):
        return "dspark" if config.is_dspark else "jetspec"
    return "eagle-2" if config.model_type == "eagle" and config.static_tree is None else config.model_type


def sampled_digest(model: PreTrainedModel) -> str:
    """
    Returns the SHA-256 of some numbers of each of a model's tensors. Another or retrained model has another one. It takes
    moments, however large the model is. Tensors that a `device_map` offloads are left out.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.is_meta:
            continue
        some = tensor.flatten()[:: max(tensor.numel() // NUM_SAMPLED, 1)].cpu().contiguous()
        digest.update(name.encode() + some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

"""Loading a target by the class that it needs, or without its layers."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from ..environment import warn_of_slow_bfloat16
from ..reading import without_load_report
from ..tokenizer import check_is_target


logger = logging.get_logger(__name__)


def target_class(name: str | Path, with_images: bool = False, **kwargs: Any) -> Any:
    """
    Returns the class of transformers that loads a target: a multimodal one if there are images, or if no other class takes it.

    Args:
        name (`str` or `Path`): Folder or Hub id.
        with_images (`bool`, *optional*, defaults to `False`): Whether the target is to read images.
        kwargs (*optional*): For `AutoConfig.from_pretrained`.

    Raises:
        ValueError: if it is a draft, or an adapter.
    """
    check_is_target(name, **kwargs)
    config = AutoConfig.from_pretrained(name, **kwargs)
    if type(config) not in AutoModelForImageTextToText._model_mapping:
        return AutoModelForCausalLM
    with_images = with_images or type(config) not in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if with_images else AutoModelForCausalLM


def load_on_device(
    name: str | Path,
    device: torch.device | str,
    dtype: torch.dtype | str = "auto",
    bits: int | None = None,
    with_images: bool = False,
    device_map: str | dict[str, Any] | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """
    Loads a target to decode with: on one device, or spread over several by a `device_map` (`"auto"`). It is optionally quantized to
    4 or 8 `bits` by bitsandbytes, as TRL's scripts do. 4-bit layers compute in bfloat16 by default. For `with_images` and `kwargs`
    see [`target_class`].
    """
    auto_class = target_class(name, with_images, **kwargs)
    if bits is not None:
        dtype = "bfloat16" if bits == 4 and dtype == "auto" else dtype
        in_4_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
        kwargs["quantization_config"] = BitsAndBytesConfig(**(in_4_bits if bits == 4 else {"load_in_8bit": True}))
        # Quantized weights are not moved.
        device_map = device_map or {"": device}
    target = auto_class.from_pretrained(name, dtype=dtype, device_map=device_map, **kwargs)
    target = (target.to(device) if device_map is None else target).eval()
    warn_of_slow_bfloat16(target, target.device, logger)
    return target


def load_ends(name: str | Path, revision: str | None = None, **kwargs: Any) -> PreTrainedModel:
    """
    Returns a target without its layers. Only its embedding and head are loaded, because checking a draft and training from
    features need no more. Of a Hub id that is not in the cache, transformers downloads all weights.

    Args:
        name (`str` or `Path`): Folder or Hub id.
        revision (`str`, *optional*): Branch, tag or commit.
        kwargs (*optional*): For `from_pretrained`.

    Raises:
        ValueError: if the checkpoint lacks them, or their sizes differ from its configuration, or it is not a target.
    """
    shared = {"revision": revision, "trust_remote_code": kwargs.get("trust_remote_code", False)}
    auto_class = target_class(name, **shared)
    config = AutoConfig.from_pretrained(name, **shared)
    text_config = config.get_text_config(decoder=True)
    num_layers, text_config.num_hidden_layers = text_config.num_hidden_layers, 0
    # Without layers, tables with a part for each layer (Gemma's per-layer embeddings) no longer fit.
    with without_load_report():  # of every missing layer
        target, info = auto_class.from_pretrained(
            name, config=config, revision=revision, ignore_mismatched_sizes=True, output_loading_info=True, **kwargs
        )
    target.config.get_text_config(decoder=True).num_hidden_layers = num_layers
    ends = {target.get_input_embeddings(), target.get_output_embeddings()}
    names = {f"{path}.weight" for path, module in target.named_modules() if module in ends}
    broken = names & {*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}
    if broken:
        raise ValueError(
            f"{name} lacks {sorted(broken)}, or their sizes differ from its configuration. Download the model again."
        )
    return target

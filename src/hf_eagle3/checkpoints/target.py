"""Loading a target by the class that it needs, or without its layers."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from ..file_checks import without_load_report
from ..tokenizer import check_is_target


def target_class(name: str | Path, with_images: bool = False, **kwargs: Any) -> Any:
    """
    Returns the class of transformers that loads a target: one that sees if there are images, or no other class takes it.

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


def load_ends(name: str | Path, revision: str | None = None, **kwargs: Any) -> PreTrainedModel:
    """
    Returns a target without its layers. Only its embedding and head are loaded, because checking a draft and training from
    features need no more.

    Args:
        name (`str` or `Path`): Folder or Hub id.
        revision (`str`, *optional*): Branch, tag or commit.
        kwargs (*optional*): For `from_pretrained`.

    Raises:
        ValueError: if the checkpoint lacks them, or their sizes differ from its configuration, or it is no target.
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

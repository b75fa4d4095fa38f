"""
Reading and writing EAGLE-3 checkpoints of other projects.

| format | read by | written by | used by |
| --- | --- | --- | --- |
| speculators | `from_pretrained` | `save_pretrained` | speculators, hf-eagle3, vLLM |
| modelopt | `flat` | | NVIDIA Model-Optimizer |
| sglang | `flat` | `sglang` | SpecForge and others, SGLang |
| safeailab | `flat` | `safeailab` | SafeAILab/EAGLE |
| gguf | | `llama_cpp` | llama.cpp |
| openvino | | `openvino` | OpenVINO GenAI |

The module of an export format has `NAME` and `write`. Either `write(draft)` returns configuration and tensors, or
`write(draft, folder, ...)` writes the files itself.
"""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ..auto import draft_classes
from ..config_checks import check_method
from ..reading import fields_among
from ..remote_code.auto_eagle3 import logger
from ..remote_code.configuration_eagle3 import Eagle3Config
from ..remote_code.draft_model_eagle3 import DraftModel
from ..tensor_names import LENIENT, find, is_block_draft, is_draft
from . import flat, llama_cpp, openvino, safeailab, sglang
from .engines import ENGINES, check_is_eagle3, describe_engines
from .files import check_new_folder, read_tensors, save_checkpoint
from .keys import format_of
from .target import load_ends, target_class


# Formats of a configuration and tensors.
FORMATS = {module.NAME: module for module in (sglang, safeailab)}
# Formats of engines that do not load checkpoints.
CONVERSIONS: dict[str, Any] = {module.NAME: module for module in (llama_cpp, openvino)}
WRITABLE = (*FORMATS, *CONVERSIONS)


def read(
    config: dict, source: str | Path, variant: str | None = None, **hub_kwargs: Any
) -> tuple[Eagle3Config, dict[str, torch.Tensor], dict[str, Any]]:
    """
    Returns the configuration and tensors of a checkpoint of another project.

    Args:
        config (`dict`): The contents of its `config.json`.
        source (`str` or `Path`): Folder or Hub id.
        variant (`str`, *optional*): One of several sets of weights.
        hub_kwargs (*optional*): `revision`, `cache_dir`, `token` and the like.

    Returns:
        `tuple[Eagle3Config, dict[str, torch.Tensor], dict]`: The configuration, the tensors by our names, and a
        report: the `format`, and what was `renamed`, `ignored` and `assumed`.

    Raises:
        ValueError: if it is not a draft, is a draft of an unsupported kind, or is broken.
    """
    check_method(config, source)
    tensors = read_tensors(source, variant, **hub_kwargs)
    if is_block_draft(tensors):
        raise ValueError(
            f"{source} is a block draft (DFlash, JetSpec). Load it by `AutoModel.from_pretrained`, after `import hf_eagle3`."
        )
    if not is_draft(tensors):
        raise ValueError(
            f"{source} is in no known EAGLE-3 format. A draft has `fc.weight` and one layer (`midlayer` or `layers.0`) with a "
            f"`hidden_norm`, but this checkpoint holds {sorted(tensors)[:6]} ... {advice_for(tensors, config)}"
        )
    if find(source, "adapter_config.json", **{**hub_kwargs, **LENIENT}) is not None:
        logger.warning_once(
            f"{source} has an adapter (`adapter_config.json`) beside the draft, which is not loaded: Model-Optimizer writes one "
            "that belongs to the target. Load it on the target, or the target accepts fewer of the draft's tokens: "
            f"`target.load_adapter({str(source)!r})`."
        )
    architectures, eagle_config = config.get("architectures") or [], config.get("eagle_config") or {}
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"{source}: `architectures` is {architectures!r}, but must be a list of names.")
    if not isinstance(eagle_config, dict):
        raise ValueError(f"{source}: `eagle_config` is {eagle_config!r}, but must be a mapping.")
    try:
        return flat.read(config, tensors)
    except (AttributeError, KeyError, StrictDataclassError, TypeError, ValueError) as error:  # a value is malformed
        reason = str(error)
        if isinstance(error, KeyError):  # of a missing key, or with a message of transformers
            reason = str(error.args[0]) if " " in str(error.args[0]) else f"there is no {error}"
        raise ValueError(f"{source}, read as {format_of(config)}: {reason}") from error


def advice_for(names: Iterable[str], config: dict) -> str:
    """Returns what to do with a checkpoint with tensors of these names and this `config.json`, which is no known draft."""
    if any(name.startswith("eagle_module.") for name in names):
        return "It is a target with a draft in training. Export the draft with Model-Optimizer's `export_hf_checkpoint.py`."
    if any(name.endswith("embed_tokens.weight") for name in names):
        return (
            "It is a whole model. Pass the name of a draft, or load a small model by `AutoModelForCausalLM`: transformers accepts it "
            "as `assistant_model`, too."
        )
    if called := draft_classes(config):
        return f"It is called {called}. The project that trained it, or an engine such as vLLM, may run it."
    return "Pass the name of a draft."


def with_config(config: Eagle3Config, kwargs: dict[str, Any]) -> dict[str, Any]:
    """
    Returns arguments of `from_pretrained` with the configuration that was read, unless the caller gave one. Fields among the
    arguments move into it, as transformers does with a configuration that it reads itself.
    """
    if kwargs.get("config") is not None:
        return kwargs
    changes = {name: kwargs[name] for name in fields_among(kwargs, config)}
    kwargs = {name: value for name, value in kwargs.items() if name not in changes}
    return {**kwargs, "config": type(config).from_dict(config.to_dict(), **changes) if changes else config}


def export(draft: DraftModel, folder: str | Path, to: str, **options: Any) -> None:
    """
    Writes a draft in another format.

    Args:
        draft ([`Eagle3ForSpeculation`]): The draft.
        folder (`str` or `Path`): A new or empty folder.
        to (`str`): One of `WRITABLE`.
        options (*optional*): `target_gguf` for `"gguf"`, `python` for `"openvino"`.

    Raises:
        ValueError: if that format, or the engine that reads it, cannot express the draft, or the folder is not empty.
    """
    if to not in WRITABLE:
        raise ValueError(f"Unknown format {to!r}. Drafts can be exported to {WRITABLE}.")
    check_is_eagle3(draft)
    check_new_folder(folder)
    folder = Path(folder).resolve()  # a link stays one
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as scratch:  # all or nothing
        written = Path(scratch, folder.name)
        if to in CONVERSIONS:
            CONVERSIONS[to].write(draft, written, **options)
        else:
            save_checkpoint(written, *FORMATS[to].write(draft))
        if folder.exists():
            folder.rmdir()  # Windows would not replace it
        written.replace(folder)


__all__ = ["ENGINES", "FORMATS", "WRITABLE", "describe_engines", "export", "load_ends", "read", "target_class"]

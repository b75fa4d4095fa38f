"""
EAGLE-3 checkpoints of other writers: recognised, read, and written.

| format | read by | written by | of |
| --- | --- | --- | --- |
| speculators | (ours) | (ours) | speculators, hf-eagle3; what vLLM serves |
| modelopt | `flat` | | NVIDIA Model-Optimizer |
| sglang | `flat` | `sglang` | SpecForge and others; what SGLang serves |
| safeailab | `flat` | `safeailab` | SafeAILab/EAGLE |
| gguf | | `llama_cpp` | llama.cpp |
| openvino | | `openvino` | OpenVINO GenAI |

A module of a format that is exported to has `NAME` and `write(draft)`, which returns configuration and tensors, or
`write(draft, folder, ...)`.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub.errors import StrictDataclassError

from ..held import is_block_draft, is_draft
from . import flat, llama_cpp, openvino, safeailab, sglang
from .engines import ENGINES, check_is_eagle3, describe_engines
from .files import check_new_folder, read_tensors, save_checkpoint
from .target import load_ends


# What is exported to as configuration and tensors.
FORMATS = {module.NAME: module for module in (sglang, safeailab)}
# What engines read that do not load checkpoints.
CONVERSIONS = {module.NAME: module for module in (llama_cpp, openvino)}
WRITABLE = (*FORMATS, *CONVERSIONS)


def recognise(config: dict, source) -> str:
    """
    The name of the format that a draft's `config.json` is in.

    Args:
        config (`dict`): What it says.
        source (`str` or `Path`): Folder or Hub id, for messages.

    Raises:
        ValueError: if it is broken.
    """
    if config.get("speculators_model_type") is not None:
        return "speculators"
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"{source}: `architectures` is {architectures!r}, but must be a list of names.")
    return flat.format_of(config)


def read(config: dict, source, **hub_kwargs):
    """
    Reads a checkpoint of another format.

    Args:
        config (`dict`): What its `config.json` says.
        source (`str` or `Path`): Folder or Hub id.
        hub_kwargs (*optional*): `revision`, `cache_dir`, `token` and the like.

    Returns:
        `tuple[Eagle3Config, dict[str, torch.Tensor], dict]`: The configuration, the tensors by our names, and a
        report: the `format`, what was `renamed`, `ignored` and `assumed`.

    Raises:
        ValueError: if it holds no draft, one of a kind that is not read here, or something broken.
    """
    tensors = read_tensors(source, **hub_kwargs)
    if is_block_draft(tensors):
        raise ValueError(
            f"{source} is a block draft (DFlash, JetSpec), not an EAGLE-3 draft. Load it by `AutoModel.from_pretrained`, after "
            "`import hf_eagle3`."
        )
    if not is_draft(tensors):
        raise ValueError(
            f"{source} is in no known EAGLE-3 format: a draft has `fc.weight` beside one layer (`midlayer` or `layers.0`) with a "
            f"`hidden_norm`, but this checkpoint holds {sorted(tensors)[:6]} ..."
        )
    name = recognise(config, source)
    try:
        return flat.read(config, tensors)
    except (
        AttributeError,
        KeyError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ) as error:  # what is there is not what it should be
        reason = f"there is no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{source}, read as {name}: {reason}") from error


def export(draft, folder, to: str, **options) -> None:
    """
    Writes a draft in another format.

    Args:
        draft ([`Eagle3ForSpeculation`]): The draft.
        folder (`str` or `Path`): A new or empty folder.
        to (`str`): One of `WRITABLE`.
        options (*optional*): `target_gguf` for `"gguf"`, `python` for `"openvino"`.

    Raises:
        ValueError: if that format, or the engine that reads it, cannot express the draft.
    """
    if to not in WRITABLE:
        raise ValueError(f"Drafts are exported to {WRITABLE}, not to {to!r}.")
    check_is_eagle3(draft)
    check_new_folder(folder)
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as scratch:  # all or nothing
        written = Path(scratch, folder.name)
        if to in CONVERSIONS:
            CONVERSIONS[to].write(draft, written, **options)
        else:
            save_checkpoint(written, *FORMATS[to].write(draft))
        written.replace(folder)


__all__ = ["ENGINES", "FORMATS", "WRITABLE", "describe_engines", "export", "load_ends", "read", "recognise"]

# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint is what was saved."""

import hashlib
import json
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from transformers.utils import logging
from transformers.utils.hub import cached_file


INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def read_json(path: str | Path) -> dict:
    """
    Raises:
        ValueError: if the file holds no JSON object.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON; is it complete? {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object.")
    return content


def read_index(path: str | Path) -> dict[str, str]:
    """
    Which file of a checkpoint holds which tensor.

    Raises:
        ValueError: if it names files outside of its folder.
    """
    content = read_json(path)
    index = content.get("weight_map")
    if not isinstance(content.get("metadata"), dict):  # which transformers reads, too
        raise ValueError(f"{path} has no `metadata`. Is it complete?")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ValueError(f"{path} does not say which file holds which tensor (`weight_map`).")
    for name in index.values():
        parts = PureWindowsPath(name)  # takes both kinds of slashes
        if parts.anchor or ".." in parts.parts:
            raise ValueError(f"{path} names {name}, which is not in its folder. Do not load this checkpoint.")
    return index


def check_whole(path: str | Path) -> None:
    """
    Raises:
        ValueError: if a safetensors file is shorter or longer than its header says.
    """
    size = Path(path).stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, size)))
            end = (
                8 + length + max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError(
                f"{path} is no safetensors file, or its beginning is broken. Download it again."
            ) from None
    if size != end:
        raise ValueError(f"{path} has {size} bytes, but must have {end}. Download it again.")


def check_token_ids(config: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: if a special token in a `generation_config.json` is none: transformers does not check them there.
    """
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        tokens = value if name == "eos_token_id" and isinstance(value, list) else [0 if value is None else value]
        if not all(type(token) is int for token in tokens):
            raise ValueError(f"`{name}` is {value!r}, but must be the id of a token.")


def check_files(source: str | Path, variant: str | None = None, **hub_kwargs) -> dict | None:
    """
    The files of a checkpoint that transformers reads, or passes over when it cannot.

    Args:
        source (`str` or `Path`): Folder or Hub id.
        variant (`str`, *optional*): Which of several sets of weights.
        hub_kwargs (*optional*): `revision`, `cache_dir`, `token` and the like.

    Returns:
        `dict`: What its `config.json` says; `None` if there is none.

    Raises:
        ValueError: if one is broken, or names files outside of its folder.
    """

    def find(name):
        return cached_file(str(source), name, _raise_exceptions_for_missing_entries=False, **hub_kwargs)

    weights = {"model.safetensors" if variant is None else f"model.{variant}.safetensors"}
    for name in INDEX_FILES:
        if (path := find(name if variant is None else name.replace(".json", f".{variant}.json"))) is not None:
            weights |= set(read_index(path).values())
    for name in weights:
        if name.endswith(".safetensors") and (path := find(name)) is not None:
            check_whole(path)
    if (path := find("generation_config.json")) is not None:
        check_token_ids(read_json(path))
    return None if (path := find("config.json")) is None else read_json(path)


def check_tensors(tensors: dict[str, torch.Tensor], source, digest: str | None = None) -> None:
    """
    Args:
        tensors (`dict[str, torch.Tensor]`): A draft's weights and buffers.
        source: Where they are from, for messages.
        digest (`str`, *optional*): Their [`weights_digest`] when they were saved.

    Raises:
        ValueError: if they are not finite, or not what was saved.
    """
    if any(tensor.is_meta for tensor in tensors.values()):
        return
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ValueError(
            f"{source}: {broken} hold values that are no finite numbers. Download the checkpoint again; if it is right, it "
            "overflows in the `dtype` that it was loaded in."
        )
    if digest is not None and digest != weights_digest(tensors):
        raise ValueError(
            f"The weights of {source} are not those that were saved with its config.json. Download the checkpoint again. If "
            "they were changed on purpose, remove `weights_digest` from config.json."
        )


@contextmanager
def without_load_report():
    """Within it transformers does not report missing and unexpected tensors, which are put right or refused by name."""

    def is_no_report(record):
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.get_logger("transformers.modeling_utils")
    logger.addFilter(is_no_report)
    try:
        yield
    finally:
        logger.removeFilter(is_no_report)


def code_digest(folder: str | Path) -> str:
    """SHA-256 of the code in a folder that travels with drafts."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*_eagle3.py")):
        digest.update(path.name.encode() + path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def weights_digest(state_dict: dict[str, torch.Tensor]) -> str:
    """SHA-256 of a draft's weights in bfloat16, so that it is the same for a float32 draft and its bfloat16 copy."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state_dict.items()):
        if tensor.is_floating_point():
            tensor = tensor.bfloat16().view(torch.int16)
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()

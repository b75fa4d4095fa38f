"""
Checks of checkpoints that others wrote, or that were damaged. They do not ship with drafts, because digests show that a
checkpoint is as we saved it.
"""

import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from .config_checks import NO_CONFIG
from .environment import is_missing_folder
from .tensor_names import HUB_ARGUMENTS, LENIENT, LOCAL, check_is_reachable, find, weights_file


LFS_POINTER = b"version https://git-lfs"


def read_json(path: str | Path) -> dict[str, Any]:
    """Raises `ValueError` if the file holds no JSON object."""
    check_is_fetched(path)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not valid JSON in UTF-8 without a byte order mark; is it complete? {error}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object.")
    return content


def check_is_object(source: str | Path, **kwargs: Any) -> None:
    """
    Raises `ValueError` if the `config.json` of a folder or Hub id holds no JSON object, which transformers takes for granted.
    `kwargs` may be any of `from_pretrained`.
    """
    hub_kwargs = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    path = Path(source) if Path(source).is_file() else find(source, "config.json", **hub_kwargs, **LENIENT)
    if path is not None:
        read_json(path)


def read_index(path: str | Path) -> dict[str, str]:
    """Returns the name of the file that holds each tensor. Raises `ValueError` if one is outside of the index's folder."""
    content = read_json(path)
    index = content.get("weight_map")
    if not isinstance(content.get("metadata"), dict):  # transformers reads it, too
        raise ValueError(f'{path} has no `metadata`. If it is complete, add `"metadata": {{}}` to it.')
    if not (index and isinstance(index, dict) and all(isinstance(name, str) for name in index.values())):
        raise ValueError(f"{path} does not say which file holds which tensor (`weight_map`).")
    for name in index.values():
        parts = PureWindowsPath(name)  # takes both kinds of slashes
        if parts.anchor or ".." in parts.parts:
            raise ValueError(f"{path} names {name}, which is not in its folder. Do not load this checkpoint.")
    return index


def check_is_fetched(path: str | Path) -> None:
    """Raises `ValueError` if a file is a pointer of Git LFS, as in a clone without LFS."""
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(f"{path} is a Git LFS pointer, not the file itself. Run `git lfs pull` in its folder.")


def check_weights_file(path: Path, is_quantized: bool = False) -> None:
    """
    Raises `ValueError` if a file of weights is a pointer of Git LFS, is not whole, has a rounded `d2t`, or has weights that are
    integers or of 8 bits, though the configuration does not say that they are quantized.
    """
    check_is_fetched(path)
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as content:
                d2t = content.get_tensor("d2t") if "d2t" in content.keys() else None  # noqa: SIM118  it is not a dict
                dtypes = {name: content.get_slice(name).get_dtype() for name in content.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a complete safetensors file ({error}). Download it again.") from None
    else:
        # Reads no weights, in the format of torch 1.6 and later.
        tensors = read_file(path, mmap=zipfile.is_zipfile(path))
        d2t, dtypes = tensors.get("d2t"), {name: tensor.dtype for name, tensor in tensors.items()}
    if not is_quantized:
        check_dtypes(dtypes, path)
    if d2t is not None:  # transformers would round it to integers
        check_mapping(d2t, f"{path}: ")


def check_dtypes(dtypes: Mapping[str, Any], place: str | Path) -> None:
    """
    Raises `ValueError` if weights of a draft that is not quantized are integers or of 8 bits. transformers would take them for
    unscaled floating-point numbers.
    """
    # As safetensors calls dtypes, or torch.
    is_quantized = re.compile(r"[IU]|F[48]|BOOL|torch\.(q?u?int|float[48]|bool)")
    names = sorted(
        name for name, dtype in dtypes.items() if name.endswith("weight") and is_quantized.match(str(dtype))
    )
    if names:
        raise ValueError(
            f"{place} has weights that are integers or of 8 bits, such as {names[0]} ({dtypes[names[0]]}), but config.json has no "
            "`quantization_config` that says how to read them. Load the draft that is not quantized."
        )


def check_mapping(d2t: torch.Tensor, place: str = "") -> None:
    """Raises `ValueError` if a `d2t` of floating-point numbers is so large that its dtype may have rounded it."""
    # From this number on, odd ones are rounded to even ones.
    limit = 2 / torch.finfo(d2t.dtype).eps if d2t.is_floating_point() else None
    if limit is not None and not (d2t.double().abs() < limit).all():
        raise ValueError(
            f"{place}`d2t` is stored in {d2t.dtype}, which is exact only below {limit:.0f}, and has larger offsets. They map to wrong "
            "tokens. Download the draft again, or convert it from the original with `d2t` in int64."
        )


def read_file(path: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors in a safetensors file, or in a pickle (`kwargs` are for `torch.load`). Raises `ValueError` if it is broken."""
    check_is_fetched(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # `weights_only`, because a pickle can hold code.
        tensors = torch.load(path, map_location="cpu", weights_only=True, **kwargs)
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{path} cannot be read. Check that it is complete: {error}") from error
    except Exception as error:  # unpickling fails in many ways
        raise ValueError(f"{path} holds other things than tensors, which are never loaded: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise ValueError(
            f"{path} holds other things than tensors: a {type(tensors).__name__}, not tensors by name. Save the tensors alone, "
            "the `state_dict` of the draft."
        )
    return tensors


def check_token_ids(generation_config: dict[str, Any]) -> None:
    """Raises `ValueError` if a special token in a `generation_config.json` is no id. transformers does not check it."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = generation_config.get(name)
        tokens = value if name == "eos_token_id" and isinstance(value, list) else [0 if value is None else value]
        if not all(type(token) is int for token in tokens):
            raise ValueError(f"`{name}` is {value!r}, but must be the id of a token.")


def check_files(
    source: str,
    variant: str | None = None,
    needs_config: bool = True,
    of_adapter: dict[str, Any] | None = None,
    **hub_kwargs: Any,
) -> dict[str, Any] | None:
    """
    Returns the content of a checkpoint's `config.json`, or `None` if there is none. Checks the files that transformers reads, or
    silently passes over if they are broken. If it is an adapter, arguments `of_adapter` replace `hub_kwargs`.

    Raises:
        FileNotFoundError: if the folder does not exist.
        OSError: if the Hub cannot be reached.
        ValueError: if a file is broken or names files outside of its folder, or the `config.json` that is needed is missing.
    """
    if is_missing_folder(source):
        raise FileNotFoundError(f"There is no folder {source}. Pass the folder of a draft, or a Hub id (owner/name).")
    path = find(source, "config.json", **hub_kwargs)
    if path is None and needs_config:  # first, because without a connection each other file takes half a minute
        check_adapter(source, **{**hub_kwargs, **(of_adapter or {})})
    content = None if path is None else read_json(path)
    is_quantized = any((content or {}).get(name) for name in ("quantization_config", "quantization"))
    paths = [weights_file(source, variant, **hub_kwargs)]
    if (path := paths[0]) is not None and path.suffix == ".json":
        paths = [find(source, part, **hub_kwargs) for part in sorted(set(read_index(path).values()))]
    for path in filter(None, paths):
        check_weights_file(path, is_quantized)
    if (path := find(source, "generation_config.json", **hub_kwargs)) is not None:
        check_token_ids(read_json(path))
    return content


def check_adapter(source: str, **hub_kwargs: Any) -> None:
    """Raises `ValueError` if a folder or repo without a `config.json` has no adapter either, or one that does not name its draft."""
    adapter = find(source, "adapter_config.json", **{**hub_kwargs, **LOCAL})
    if adapter is None:
        check_is_reachable(source, "config.json", **hub_kwargs)
        adapter = find(source, "adapter_config.json", **hub_kwargs)
    if adapter is None:
        raise ValueError(f"{source}: {NO_CONFIG}")
    if read_json(adapter).get("base_model_name_or_path") is None:
        raise ValueError(
            f"{source} is an adapter that does not name its draft (`base_model_name_or_path`). Load the draft, and pass both "
            "to `PeftModel.from_pretrained`."
        )

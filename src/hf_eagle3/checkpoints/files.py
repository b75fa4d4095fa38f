"""Files of a checkpoint, local or on the Hub."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..held import WEIGHT_FILES, find
from ..remote_code.loading_eagle3 import read_index


def read_tensors(source, **hub_kwargs) -> dict[str, torch.Tensor]:
    """
    All tensors of a checkpoint, in one file or several.

    Raises:
        FileNotFoundError: if there are no weights, or a part of them is missing.
        ValueError: if a file is cut off, holds other things than tensors, or names files outside of its folder.
    """
    for name in WEIGHT_FILES:
        if (path := find(source, name, **hub_kwargs)) is None:
            continue
        if not name.endswith(".index.json"):
            return read_file(path)
        tensors, index = {}, read_index(path)
        for part in sorted(set(index.values())):
            if (part_path := find(source, part, **hub_kwargs)) is None:
                raise FileNotFoundError(f"{source}: {name} lists {part}, which is not there.")
            tensors |= read_file(part_path)
        if absent := sorted(index.keys() - tensors.keys()):
            raise ValueError(f"{source}: {name} lists tensors that its files do not hold: {absent}.")
        return tensors
    raise FileNotFoundError(f"{source} has no weights: none of {', '.join(WEIGHT_FILES)}.")


def read_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # Tensors and nothing else: a pickle can hold code.
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{path} cannot be read; is it complete? {error}") from error
    except Exception as error:  # unpickling fails in many ways
        raise ValueError(f"{path} holds other things than tensors, which are not loaded: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise ValueError(f"{path} holds other things than named tensors.")
    return tensors


def check_new_folder(folder) -> None:
    """
    Raises:
        ValueError: if a folder has anything in it.
    """
    if Path(folder).exists() and any(Path(folder).iterdir()):
        raise ValueError(f"{folder} is not empty. Choose another folder.")


def save_checkpoint(folder, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Writes `config.json` and `model.safetensors`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

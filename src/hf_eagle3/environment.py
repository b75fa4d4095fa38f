"""Versions and machine of a run, names that are safe to publish, and what differs between runs."""

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import Any, TypeGuard

import torch
import transformers

from . import __version__


def machine_name(device: torch.device | str) -> str:
    """Returns the name of the accelerator, or of the processor with its number of cores."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{platform.machine()}, {device.type}"
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search("^model name\\s*: (.+)", cpuinfo.read_text(encoding="utf-8"), re.M) if cpuinfo.exists() else None
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"


def emulates_bfloat16(device: torch.device) -> bool:
    """Whether a device computes bfloat16 in software, several times slower than float32."""
    return device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported()


def warn_of_slow_bfloat16(target: transformers.PreTrainedModel, device: torch.device, logger: Any) -> None:
    """Warns if a target is in bfloat16, and the device that it runs on computes that in software."""
    if target.dtype == torch.bfloat16 and emulates_bfloat16(device):
        logger.warning(
            "This processor computes bfloat16 in software, which is several times slower than float32. Load the target in float32: "
            '`--dtype float32`, or `dtype="float32"` (for a trainer in `target_model_init_kwargs`).'
        )


def environment(device: torch.device | str) -> dict[str, str | int]:
    """Returns versions and machine, to store beside a measurement."""
    return {
        "hf_eagle3": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": machine_name(device),
        "threads": torch.get_num_threads(),
    }


def is_path(name: str | None) -> TypeGuard[str]:
    """Whether the name of a model is a path on this machine, or was one where the model was trained."""
    if not name:
        return False
    # `Path.exists` raises an error for strings that are too long for a path, up to Python 3.13.
    is_absolute = Path(name).is_absolute() or PureWindowsPath(name).is_absolute()
    return is_absolute or name.startswith((".", "~")) or os.path.exists(name)


def is_missing_folder(name: str) -> bool:
    """Whether the name of a model can only be that of a folder, which does not exist."""
    return not Path(name).is_dir() and (is_path(name) or name.count("/") > 1)


def public_name(name: str | None) -> str | None:
    """Returns a name that is safe to publish: a Hub id as it is, a path without its parent folders."""
    return PureWindowsPath(name).name if is_path(name) else name  # takes both kinds of slashes


def on_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns a copy of nested dictionaries and lists, with the function applied to all other values in them."""
    if isinstance(value, dict):
        return {key: on_leaves(function, each) for key, each in value.items()}
    return [on_leaves(function, each) for each in value] if isinstance(value, list) else function(value)


def without_paths(facts: Any) -> Any:
    """Returns a copy of a dictionary, list or value, with the `public_name` of each string in it."""
    return on_leaves(lambda fact: public_name(fact) if isinstance(fact, str) and len(fact) < 1000 else fact, facts)


def what_differs(before: Any, after: Any) -> str:
    """Returns the entries of two dicts that differ, or two values that differ, in words. Empty if they are the same."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return "" if before == after else f"{before} before, {after} after"
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return ", ".join(f"{name} was {before.get(name)!r} before, {after.get(name)!r} after" for name in names)

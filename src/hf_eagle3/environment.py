"""What a figure was measured with."""

import argparse
import os
import platform
import sys
from pathlib import Path

import torch
import transformers

from . import __version__


def machine_name(device: torch.device | str) -> str:
    """The accelerator, or the processor and how many cores there are."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{platform.machine()}, {device.type}"
    name, cpuinfo = platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        name = names[0] if names else name
    return f"{name}, {os.cpu_count()} cores"


def environment(device: torch.device | str) -> dict[str, str | int]:
    """Versions and machine, to be kept with what was measured."""
    return {
        "hf_eagle3": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": machine_name(device),
        "threads": torch.get_num_threads(),
    }


def is_path(name: str | None) -> bool:
    """Whether the name of a model is a path on this machine."""
    return bool(name) and (Path(name).is_absolute() or name.startswith((".", "~")) or Path(name).exists())


def folder_or_hub_id(name: str) -> str:
    """The name of a model on a command line (`type` of an argument): a mistyped path is told from an id of the Hub."""
    if not Path(name).is_dir():
        if is_path(name) or name.count("/") > 1:
            raise argparse.ArgumentTypeError(f"there is no folder {name}")
        if Path(name).parent.is_dir():
            print(f"There is no folder {name}: it is looked for on the Hub.", file=sys.stderr)
    return name


def public_name(name: str | None) -> str | None:
    """A name to publish: an id of the Hub as it is, a path of this machine without the folders that it lies in."""
    return Path(name).name if is_path(name) else name


def without_paths(facts):
    """The same dictionary, list or value, with the `public_name` of each text in it."""
    if isinstance(facts, dict):
        return {key: without_paths(value) for key, value in facts.items()}
    if isinstance(facts, list):
        return [without_paths(value) for value in facts]
    return public_name(facts) if isinstance(facts, str) and len(facts) < 1000 else facts

"""Measures the peak memory of a call: of an accelerator's allocator, or of the process on a CPU."""

import re
from pathlib import Path

import torch


# What Linux counts for this process: https://man7.org/linux/man-pages/man5/proc.5.html
PROCESS = Path("/proc/self")


def reset_peak_memory(device: torch.device) -> bool:
    """Resets the peak. Returns whether it is counted. On a CPU only Linux counts it, if the process may reset it."""
    allocator = torch.get_device_module(device)
    if hasattr(allocator, "reset_peak_memory_stats"):
        allocator.reset_peak_memory_stats(device)
        return True
    if device.type != "cpu":
        return False
    try:
        (PROCESS / "clear_refs").write_text("5", encoding="utf-8")  # 5 resets the peak
    except OSError:
        return False
    return True


def peak_memory(device: torch.device) -> float:
    """
    Returns the peak since the last reset, in MiB, with the weights. On an accelerator it is the most that was allocated.
    On a CPU it is the most that the process had resident, with what its allocator keeps of earlier calls.
    """
    allocator = torch.get_device_module(device)
    if hasattr(allocator, "max_memory_allocated"):
        return allocator.max_memory_allocated(device) / 2**20
    found = re.search(r"VmHWM:\s*(\d+) kB", (PROCESS / "status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) / 2**10

"""The most memory that a call takes: of an accelerator's allocator, or of the process where there is none."""

import re
from pathlib import Path

import torch


# The kernel's account of this process, https://man7.org/linux/man-pages/man5/proc.5.html
PROCESS = Path("/proc/self")


def reset_peak_memory(device: torch.device) -> bool:
    """Forgets what was measured so far. Returns whether anything is: for CPUs, Linux counts, where a process may tell it to."""
    allocator = torch.get_device_module(device)
    if hasattr(allocator, "reset_peak_memory_stats"):
        allocator.reset_peak_memory_stats(device)
        return True
    if device.type != "cpu":
        return False
    try:
        (PROCESS / "clear_refs").write_text("5")  # which stands for the peak
    except OSError:
        return False
    return True


def peak_memory(device: torch.device) -> float:
    """
    In MiB, the weights included: the most allocated on an accelerator, or for a CPU the most that the process had
    resident, with what its allocator keeps of earlier calls.
    """
    allocator = torch.get_device_module(device)
    if hasattr(allocator, "max_memory_allocated"):
        return allocator.max_memory_allocated(device) / 2**20
    return int(re.search(r"VmHWM:\s*(\d+) kB", (PROCESS / "status").read_text())[1]) / 2**10

"""Measures drafts."""

from typing import TYPE_CHECKING, Any

from .benchmark import run_benchmark
from .plots import plot_all
from .results import METHODS, BenchmarkResults, BenchmarkRow, format_table


if TYPE_CHECKING:
    from .tasks import TASKS, load_prompts, read_prompts


__all__ = [
    "METHODS",
    "TASKS",
    "BenchmarkResults",
    "BenchmarkRow",
    "format_table",
    "load_prompts",
    "plot_all",
    "read_prompts",
    "run_benchmark",
]


def __getattr__(name: str) -> Any:
    # Only tasks need `datasets`.
    if name in ("TASKS", "load_prompts", "read_prompts"):
        from . import tasks

        return getattr(tasks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

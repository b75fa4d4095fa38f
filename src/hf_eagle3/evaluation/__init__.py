"""Measuring drafts."""

from .benchmark import run_benchmark
from .results import METHODS, BenchmarkResults, BenchmarkRow, compare, format_table, plot_all, print_table
from .tasks import TASKS, load_prompts, read_prompts


__all__ = [
    "METHODS",
    "TASKS",
    "BenchmarkResults",
    "BenchmarkRow",
    "compare",
    "format_table",
    "load_prompts",
    "plot_all",
    "print_table",
    "read_prompts",
    "run_benchmark",
]

"""Measuring drafts."""

from .benchmark import METHODS, BenchmarkRow, format_table, plot_acceptance, plot_speedups, read_prompts, run_benchmark


__all__ = [
    "METHODS",
    "BenchmarkRow",
    "format_table",
    "plot_acceptance",
    "plot_speedups",
    "read_prompts",
    "run_benchmark",
]

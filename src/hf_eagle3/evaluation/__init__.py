"""Measuring drafts."""

from .benchmark import BenchmarkRow, format_table, plot_speedups, run_benchmark


__all__ = ["BenchmarkRow", "format_table", "plot_speedups", "run_benchmark"]

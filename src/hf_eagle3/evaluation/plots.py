"""Plots what a benchmark measured."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..environment import public_name
from .results import COLORS, METHODS, BenchmarkResults, BenchmarkRow


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_names(rows: Sequence[BenchmarkRow]) -> list[str]:
    """Returns the names of the plots that there are figures for."""
    names = ["speedup.png"] if rows else []
    names += ["acceptance.png"] * any(row.acceptance_by_position for row in rows)
    names += ["batch_size.png"] * (len({row.batch_size for row in rows}) > 1)
    return names


def plot_all(results: BenchmarkResults, folder: str | Path) -> list[Path]:
    """
    Saves the plots that there are figures for: speed-up by task, acceptance by position, speed-up against batch size.

    Args:
        results ([`BenchmarkResults`]): What was measured.
        folder (`str` or `Path`): The folder. It is created if it does not exist.

    Returns:
        `list[Path]`: The files.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = [Path(folder, name) for name in plot_names(results.rows)]
    for path in paths:
        figure = PLOTS[path.name](results.rows)
        figure.suptitle(subtitle(results), fontsize=7, color="#5f6b76")
        figure.tight_layout()
        figure.savefig(path, dpi=150)
    return paths


def subtitle(results: BenchmarkResults) -> str:
    """Returns what was measured, where, and how often."""
    arguments, environment = results.run.get("arguments", {}), results.run.get("environment", {})
    repeats = max((len(row.speedups) for row in results.rows), default=0)
    facts = [
        public_name(arguments.get("target")),
        environment.get("dtype"),
        environment.get("machine"),
        "one repeat" if repeats == 1 else f"medians and ranges of {repeats} repeats",
    ]
    return ", ".join(str(fact) for fact in facts if fact)


def with_range(rows: Sequence[BenchmarkRow]) -> tuple[list[float], list[list[float]]]:
    """Returns median speed-ups, and how far their range reaches below and above."""
    below = [row.median_speedup - min(row.speedups) for row in rows]
    above = [max(row.speedups) - row.median_speedup for row in rows]
    return [row.median_speedup for row in rows], [below, above]


def plot_speedups(rows: Sequence[BenchmarkRow]) -> "Figure":
    """Plots a bar for each method and task, at the smallest batch size."""
    smallest = min(row.batch_size for row in rows)
    rows = [row for row in rows if row.batch_size == smallest]
    tasks, temperatures = list(dict.fromkeys(row.task for row in rows)), sorted({row.temperature for row in rows})
    methods = [method for method in METHODS if any(row.method == method for row in rows)]
    width = max(4.5, 1.1 * len(tasks) * len(methods) / 2)
    figure, axes = _figure(len(temperatures), figsize=(width * len(temperatures), 3.8))
    for axis, temperature in zip(axes, temperatures):
        axis.axhline(1, color="#9aa5b1", linewidth=0.8, zorder=0)
        for number, method in enumerate(methods):
            shown = [row for row in rows if row.temperature == temperature and row.method == method]
            places = [tasks.index(row.task) + (number - (len(methods) - 1) / 2) * 0.8 / len(methods) for row in shown]
            medians, ranges = with_range(shown)
            bars = axis.bar(
                places,
                medians,
                0.75 / len(methods),
                yerr=None if method == "plain" else ranges,
                error_kw={"elinewidth": 0.8, "ecolor": "#5f6b76"},
                color=COLORS[method],
                label=method,
            )
            labels = [f"{row.median_speedup:.2f}" for row in shown]
            for place, row in enumerate(shown):
                if len(tasks) == 1 and row.acceptance_length:
                    labels[place] += f"\nτ = {row.acceptance_length:.2f}"
            # A white background, because a label may cross the line at 1.
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axis.bar_label(bars, labels, padding=3, fontsize=8, bbox=behind)
        axis.set_xticks(range(len(tasks)), tasks, rotation=0 if len(tasks) < 4 else 30)
        axis.set_title(f"T = {temperature:g}, batch size {smallest}", fontsize=10)
        axis.margins(y=0.2)
    axes[0].set_ylabel("speed-up over plain generation")
    axes[-1].legend(frameon=False, fontsize=8)
    return figure


def plot_acceptance(rows: Sequence[BenchmarkRow]) -> "Figure":
    """
    Plots how often the first, second, ... drafted token was accepted. Tasks are pooled, and each method, temperature and
    batch size has a line.
    """
    figure, (axis,) = _figure(1, figsize=(5.5, 3.6))
    temperatures, sizes = (sorted({getattr(row, name) for row in rows}) for name in ("temperature", "batch_size"))
    for method, temperature, size in itertools.product(METHODS, temperatures, sizes):
        pooled = BenchmarkRow(method, temperature)
        for row in rows:
            if (row.method, row.temperature, row.batch_size) == (method, temperature, size):
                pooled.drafted_lengths.update(row.drafted_lengths)
        if shares := pooled.acceptance_by_position:
            label = (
                f"{method}, T = {temperature:g}, batch size {size}, τ of trees = {pooled.tree_acceptance_length:.2f}"
            )
            line = ["-", "--", ":", "-."][temperatures.index(temperature) % 4]
            style: dict[str, Any] = {"color": COLORS[method], "linestyle": line, "label": label}
            axis.plot(range(1, len(shares) + 1), shares, marker="os^Dv"[sizes.index(size) % 5], **style)
    axis.set_xlabel("drafted token")
    axis.set_ylabel("share of trees in which it is accepted")
    axis.set_ylim(0, 1)
    axis.set_xticks(range(1, 1 + max(len(row.acceptance_by_position) for row in rows)))
    axis.legend(frameon=False, fontsize=7)
    return figure


def plot_batch_sizes(rows: Sequence[BenchmarkRow]) -> "Figure":
    """Plots speed-up against batch size. Each method has a line: the median over tasks and repeats."""
    temperatures, sizes = (sorted({getattr(row, name) for row in rows}) for name in ("temperature", "batch_size"))
    figure, axes = _figure(len(temperatures), figsize=(4.5 * len(temperatures), 3.6))
    for axis, temperature in zip(axes, temperatures):
        axis.axhline(1, color="#9aa5b1", linewidth=0.8, zorder=0)
        for method in METHODS[1:]:
            shown: dict[int, list[float]] = {}
            for row in rows:
                if (row.method, row.temperature) == (method, temperature):
                    shown.setdefault(row.batch_size, []).extend(row.speedups)
            if shown:
                pooled = [BenchmarkRow(method, temperature, speedups=shown[size]) for size in sorted(shown)]
                medians, ranges = with_range(pooled)
                style: dict[str, Any] = {"marker": "o", "capsize": 2, "color": COLORS[method], "label": method}
                axis.errorbar(sorted(shown), medians, yerr=ranges, **style)
        axis.set_xlabel("batch size")
        axis.set_xticks(sizes)
        axis.set_title(f"T = {temperature:g}", fontsize=10)
    axes[0].set_ylabel("speed-up over plain generation")
    axes[-1].legend(frameon=False, fontsize=8)
    return figure


def _figure(columns: int, figsize: tuple[float, float]) -> "tuple[Figure, Sequence[Axes]]":
    # pyplot would keep figures, and ask for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize)
    axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


PLOTS = {"speedup.png": plot_speedups, "acceptance.png": plot_acceptance, "batch_size.png": plot_batch_sizes}

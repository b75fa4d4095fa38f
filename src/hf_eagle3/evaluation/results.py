"""Keeps what a benchmark measured as JSON Lines, and shows it as rows, tables and plots."""

import bisect
import itertools
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..environment import public_name, what_differs
from ..files import write_atomically


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The methods of our own drafts, of hf_eagle3.baselines and of transformers, with their colors in plots.
OURS = {"eagle3-chain": "#f2c14e", "eagle3-no-lookup": "#f5b041", "eagle3": "#e67e22"}
OTHER_DRAFTS = {
    "medusa": "#b8a1d9",
    "hydra": "#8e6bbf",
    "eagle": "#d8a7b1",
    "eagle-2": "#c06c84",
    "hass": "#94346e",
    "p-eagle": "#a5883f",
    "dflash-tree": "#4f9d8f",
    "jetspec": "#2f6f73",
    "eagle3-classic": "#d9b44a",
}
COLORS = {
    "plain": "#9aa5b1",
    "prompt-lookup": "#6aa6c8",
    "assistant": "#4c78a8",
    "mtp": "#72b7b2",
    "dflash": "#54a24b",
    **OTHER_DRAFTS,
    **OURS,
}
METHODS = tuple(COLORS)
# Titles of the tasks of recipes/benchmark.py. Spec-Bench's have their own names.
TITLES = {
    "mt_bench": "MT-Bench",
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
    "alpaca": "Alpaca",
    "cnn_dm": "CNN/DailyMail",
    "math500": "MATH-500",
    "python": "Python's standard library",
}
PLOTS = ("speedup.png", "acceptance.png", "batch_size.png")


def acceptance_length(lengths: Counter[int]) -> float:
    """Returns τ, pooled: all tokens that verification forwards emitted, over the number of those forwards."""
    return sum(length * count for length, count in lengths.items()) / lengths.total()


def acceptance_by_position(lengths: Counter[int]) -> list[float]:
    """
    Returns, as entry `k`, the share of verification forwards that accepted at least `k + 1` drafted tokens. One of the tokens
    that a forward emits is the target's own.
    """
    num_drafted = max(lengths, default=1) - 1
    return [
        sum(count for length, count in lengths.items() if length > k + 1) / lengths.total() for k in range(num_drafted)
    ]


def speedup(tokens_per_second: float, plain: float) -> float:
    """Returns the tokens per second of a repeat over those of plain generation. Raises `ValueError` if one is not positive."""
    if not (tokens_per_second > 0 and plain > 0):
        raise ValueError(f"Tokens per second must be positive, but are {tokens_per_second} and, plain, {plain}.")
    return tokens_per_second / plain


@dataclass
class BenchmarkRow:
    """
    The figures of one method on one task, at one batch size and temperature.

    Args:
        method (`str`): One of `METHODS`.
        temperature (`float`): 0 is greedy.
        task (`str`): Name of the prompts.
        batch_size (`int`): Prompts decoded at once.
        tokens_per_second (`list[float]`):
            One entry for each repeat: all new tokens, without the padding of finished rows, over all seconds.
        speedups (`list[float]`): One entry for each repeat: its tokens per second over plain generation's.
        target_forwards (`int`): Forward passes of the target in all repeats, with those of the prompts.
        new_tokens (`int`): Tokens generated in all repeats.
        accepted_lengths (`Counter[int]`): How many verification forwards emitted 1, 2, ... tokens. Only of our drafts.
        plain_steps (`int`): How many verification forwards had nothing to verify. Only of our drafts.
        lookup_steps (`int`): How many verification forwards verified looked-up tokens. Only of our drafts.
        drafted_lengths (`Counter[int]`): `accepted_lengths` of trees only, without plain steps and lookups.
        draft_share (`float`): The share of the time that drafting trees took. Only of our drafts.
        num_identical (`int`): Prompts with the same tokens as plain generation, in every repeat.
        num_prompts (`int`): All prompts.
        peak_memory (`float`, *optional*):
            In MiB, with the weights: the most that was allocated on an accelerator. On a CPU it is the most that the
            process had resident, with what it keeps of earlier calls. `None` if the system does not count it.
    """

    method: str
    temperature: float
    task: str = "prompts"
    batch_size: int = 1
    tokens_per_second: list[float] = field(default_factory=list)
    speedups: list[float] = field(default_factory=list)
    target_forwards: int = 0
    new_tokens: int = 0
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    plain_steps: int = 0
    lookup_steps: int = 0
    drafted_lengths: Counter[int] = field(default_factory=Counter)
    draft_share: float = 0.0
    num_identical: int = 0
    num_prompts: int = 0
    peak_memory: float | None = None

    @classmethod
    def of(cls, repeats: list[dict]) -> "BenchmarkRow":
        """Returns the row that measurements of one method on one task make up."""

        def total(name: str) -> Any:
            return sum(repeat[name] for repeat in repeats)

        def pooled(name: str) -> Counter[int]:
            lengths: Counter[int] = Counter()
            for repeat in repeats:
                lengths.update(
                    {int(length): count for length, count in repeat[name].items()}
                )  # JSON has texts as keys
            return lengths

        memory = [repeat["peak_memory"] for repeat in repeats if repeat["peak_memory"] is not None]
        first, differing = repeats[0], {prompt for repeat in repeats for prompt in repeat["differing"]}
        return cls(
            method=first["method"],
            temperature=first["temperature"],
            task=first["task"],
            batch_size=first["batch_size"],
            tokens_per_second=[repeat["new_tokens"] / repeat["seconds"] for repeat in repeats],
            speedups=[repeat["speedup"] for repeat in repeats],
            target_forwards=total("target_forwards"),
            new_tokens=total("new_tokens"),
            accepted_lengths=pooled("accepted_lengths"),
            plain_steps=total("plain_steps"),
            lookup_steps=total("lookup_steps"),
            drafted_lengths=pooled("drafted_lengths"),
            draft_share=total("draft_seconds") / total("seconds"),
            num_identical=first["num_prompts"] - len(differing),
            num_prompts=first["num_prompts"],
            peak_memory=max(memory, default=None),
        )

    @property
    def median_tokens_per_second(self) -> float:
        """The median over repeats."""
        return statistics.median(self.tokens_per_second)

    @property
    def median_speedup(self) -> float:
        """The median over repeats."""
        return statistics.median(self.speedups)

    @property
    def acceptance_length(self) -> float | None:
        """
        τ, pooled: all tokens that verification forwards emitted, over the number of those forwards. For methods that do
        not count them, it is all tokens over all forwards of the target, at batch size 1 only.
        """
        if self.accepted_lengths:
            return acceptance_length(self.accepted_lengths)
        if self.method == "plain" or self.batch_size > 1 or self.target_forwards == 0:
            return None
        return self.new_tokens / self.target_forwards

    @property
    def tree_acceptance_length(self) -> float | None:
        """τ of trees only, without plain steps and lookups."""
        return acceptance_length(self.drafted_lengths) if self.drafted_lengths else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Entry `k`: the share of trees with at least `k + 1` accepted tokens."""
        return acceptance_by_position(self.drafted_lengths)


@dataclass
class BenchmarkResults:
    """
    A run and its measurements.

    Args:
        run (`dict`): `arguments`, `environment`, `tree` settings, `draft_weights`, digests of other `models`, and why methods were `left_out`.
        measurements (`list[dict]`): One for each task, batch size, temperature, repeat and method.
    """

    run: dict
    measurements: list[dict] = field(default_factory=list)

    @classmethod
    def read(cls, path: str | Path) -> "BenchmarkResults":
        """
        Reads JSON Lines.

        Args:
            path (`str` or `Path`): The file.

        Raises:
            ValueError: if the file has no results of a benchmark.
        """
        # `splitlines` would also split at separators that JSON allows inside of strings.
        lines = Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n")
        entries = []
        for number, line in enumerate(lines, start=1):
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}, is not JSON: {error}") from error
        if not entries or "environment" not in entries[0]:
            raise ValueError(f"{path} holds no results of recipes/benchmark.py.")
        return cls(entries[0], entries[1:])

    def write(self, path: str | Path) -> None:
        """
        Writes JSON Lines, completely or not at all.

        Args:
            path (`str` or `Path`): The file.
        """
        lines = [json.dumps(entry, ensure_ascii=False) for entry in (self.run, *self.measurements)]
        write_atomically(path, "".join(line + "\n" for line in lines))

    @property
    def rows(self) -> list[BenchmarkRow]:
        """The measurements of all repeats together, by task, batch size, temperature and method."""
        groups: dict[tuple, list[dict]] = {}
        for measured in self.measurements:
            key = (measured["task"], measured["batch_size"], measured["temperature"], measured["method"])
            groups.setdefault(key, []).append(measured)
        return [BenchmarkRow.of(repeats) for repeats in groups.values()]


HEADER = ["T", "method", "tokens/s", "speed-up", "acceptance length", "identical to plain generate"]


def cells(row: BenchmarkRow) -> list[str]:
    """Returns a row of the table, without task and batch size. It has medians over repeats, with the range in brackets."""
    speedup, tau, identical = "1.00", "-", "-"
    if row.method != "plain":
        speedup = f"{row.median_speedup:.2f}"
        if len(row.speedups) > 1:
            speedup += f" ({min(row.speedups):.2f}-{max(row.speedups):.2f})"
        identical = f"{row.num_identical}/{row.num_prompts}"
        if row.acceptance_length is not None:
            tau = f"{row.acceptance_length:.2f}"
    return [f"{row.temperature:g}", row.method, f"{row.median_tokens_per_second:.0f}", speedup, tau, identical]


def format_table(rows: Sequence[BenchmarkRow]) -> str:
    """
    Returns the rows as a Markdown table.

    Args:
        rows (`Sequence[BenchmarkRow]`): The rows.
    """
    header, table = list(HEADER), [cells(row) for row in rows]
    for name in ("batch_size", "task"):
        if len({getattr(row, name) for row in rows}) > 1:
            header.insert(0, name.replace("_", " "))
            table = [[str(getattr(row, name)), *line] for row, line in zip(rows, table)]
    if any(row.peak_memory is not None for row in rows):
        header.append("peak memory, MiB")
        memory = ("-" if row.peak_memory is None else f"{row.peak_memory:.0f}" for row in rows)
        table = [[*line, cell] for line, cell in zip(table, memory)]
    lines = [header, ["---"] * len(header), *table]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


MIN_REPEATS = 5  # in each run, or noise could not be ruled out
SIGNIFICANT = 0.05


def chance(before: Sequence[float], after: Sequence[float]) -> float:
    """
    Returns how often two samples of one distribution are at least as far apart as these. This is Wilcoxon's rank-sum
    test, two-sided and exact. With many values it takes random splits.
    """
    values = [*before, *after]
    order = sorted(values)
    ranks = [bisect.bisect_left(order, value) + bisect.bisect_right(order, value) for value in values]
    size, middle = len(before), len(before) * statistics.mean(ranks)
    splits: Iterable[Sequence[int]] = itertools.combinations(ranks, size)
    if math.comb(len(ranks), size) > 20_000:
        generator = random.Random(0)
        splits = (generator.sample(ranks, size) for _ in range(20_000))
    as_far = [abs(sum(split) - middle) >= abs(sum(ranks[:size]) - middle) - 1e-9 for split in splits]
    return statistics.mean(as_far)


def compare(before: BenchmarkResults, after: BenchmarkResults) -> str:
    """
    Returns what changed from one run to another, as a Markdown table, and whether each change exceeds the noise. It does
    if two runs of the same thing would differ so much in less than one of 20 cases (`chance`). That takes five repeats in
    each run. Speed-ups are compared, not tokens per second, because a busy machine slows all methods down.

    Args:
        before, after ([`BenchmarkResults`]): The runs.
    """
    lines = [
        "| task | batch size | T | method | speed-up before | after | change | exceeds the noise |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    old, new = (
        {(row.task, row.batch_size, row.temperature, row.method): row for row in results.rows if row.method != "plain"}
        for results in (before, after)
    )
    for key in [key for key in new if key in old]:
        was, row = old[key], new[key]
        if min(len(row.speedups), len(was.speedups)) < MIN_REPEATS:
            verdict = f"too few repeats to tell: {MIN_REPEATS} are needed"
        else:
            verdict = "yes" if chance(was.speedups, row.speedups) < SIGNIFICANT else "no"
        change = row.median_speedup / was.median_speedup - 1
        speedups = f"{was.median_speedup:.2f} | {row.median_speedup:.2f} | {change:+.1%}"
        lines.append(
            f"| {row.task} | {row.batch_size} | {row.temperature:g} | {row.method} | {speedups} | {verdict} |"
        )
    if len(lines) == 2:
        raise ValueError("The two runs have no task, batch size, temperature and method in common.")
    for when, rows, others in (("before", old, new), ("after", new, old)):
        for task, batch_size, temperature, method in rows:
            if (task, batch_size, temperature, method) not in others:
                lines.append(f"\nOnly {when}: {task}, batch size {batch_size}, T={temperature:g}, {method}.")
    for name in ("arguments", "prompts", "environment", "tree", "draft_weights"):
        if difference := what_differs(before.run.get(name), after.run.get(name)):
            lines.append(f"\n{name}: {difference}.")
    return "\n".join(lines)


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
    draw = {"speedup.png": plot_speedups, "acceptance.png": plot_acceptance, "batch_size.png": plot_batch_sizes}
    paths = [Path(folder, name) for name in plot_names(results.rows)]
    for path in paths:
        figure = draw[path.name](results.rows)
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


def with_range(rows: Sequence[BenchmarkRow]) -> dict:
    """Returns median speed-ups, and how far their range reaches below and above."""
    medians = [row.median_speedup for row in rows]
    below = [median - min(row.speedups) for median, row in zip(medians, rows)]
    above = [max(row.speedups) - median for median, row in zip(medians, rows)]
    return {"medians": medians, "ranges": [below, above]}


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
            speedups = with_range(shown)
            bars = axis.bar(
                places,
                speedups["medians"],
                0.75 / len(methods),
                yerr=None if method == "plain" else speedups["ranges"],
                error_kw={"elinewidth": 0.8, "ecolor": "#5f6b76"},
                color=COLORS[method],
                label=method,
            )
            labels = [f"{row.median_speedup:.2f}" for row in shown]
            if len(tasks) == 1:
                labels = [
                    label + (f"\nτ = {row.acceptance_length:.2f}" if row.acceptance_length else "")
                    for label, row in zip(labels, shown)
                ]
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
                speedups = with_range(pooled)
                style: dict[str, Any] = {"marker": "o", "capsize": 2, "color": COLORS[method], "label": method}
                axis.errorbar(sorted(shown), speedups["medians"], yerr=speedups["ranges"], **style)
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

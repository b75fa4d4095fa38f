"""Keeps what a benchmark measured as JSON Lines, and shows it as rows and tables."""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import write_atomically


# The methods of our own drafts, of hf_eagle3.baselines and of transformers, with their colors in plots.
OURS = {"eagle3-chain": "#f2c14e", "eagle3-no-lookup": "#f5b041", "eagle3": "#e67e22"}
OTHER_DRAFTS = {
    "medusa": "#b8a1d9",
    "hydra": "#8e6bbf",
    "eagle": "#d8a7b1",
    "eagle-2": "#c06c84",
    "hass": "#94346e",
    "p-eagle": "#a5883f",
    "dflash": "#4f9d8f",
    "jetspec": "#2f6f73",
    "dspark": "#1d4e5f",
    "eagle3-classic": "#d9b44a",
}
COLORS = {
    "plain": "#9aa5b1",
    "prompt-lookup": "#6aa6c8",
    "assistant": "#4c78a8",
    "mtp": "#72b7b2",
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
            # JSON has texts as keys.
            counts = (Counter({int(length): count for length, count in repeat[name].items()}) for repeat in repeats)
            return sum(counts, Counter())

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
        Returns the results in a JSON Lines file.

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
        if not all(isinstance(entry, dict) for entry in entries) or "environment" not in entries[0]:
            raise ValueError(f"{path} holds no results of recipes/benchmark.py.")
        results = cls(entries[0], entries[1:])
        try:
            _ = results.rows
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(
                f"{path} has measurements that recipes/benchmark.py did not write so ({error!r}). Measure again, into another file."
            ) from error
        return results

    def write(self, path: str | Path) -> None:
        """
        Writes the results to a JSON Lines file, completely or not at all.

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
    """Returns a row of the table, without task and batch size. It has medians over repeats, with the range in parentheses."""
    speedup, tau, identical = "1.00", "-", "-"
    if row.method != "plain":
        speedup = f"{row.median_speedup:.2f}"
        if len(row.speedups) > 1:
            speedup += f" ({min(row.speedups):.2f}-{max(row.speedups):.2f})"
        identical = f"{row.num_identical}/{row.num_prompts}"
        if row.acceptance_length is not None:
            tau = f"{row.acceptance_length:.2f}"
    rate = row.median_tokens_per_second
    return [f"{row.temperature:g}", row.method, f"{rate:.{0 if rate >= 9.95 else 1}f}", speedup, tau, identical]


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
    return markdown_table(header, table)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table with these cells."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)

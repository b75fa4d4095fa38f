"""Plain generation, prompt lookup and EAGLE-3, on the same prompts, interleaved."""

import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed


METHODS = ("plain", "prompt-lookup", "eagle3")


def read_prompts(path: str | Path, num_prompts: int | None = None) -> list[str]:
    """Prompts of a JSON Lines file, one `{"prompt": "..."}` a line."""
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        item = json.loads(line)
        if not isinstance(item, dict) or not isinstance(item.get("prompt"), str):
            raise ValueError(f'{path}, line {number}: expected {{"prompt": "..."}}, got {line[:80]}')
        prompts.append(item["prompt"])
    if not prompts:
        raise ValueError(f"{path} has no prompts.")
    return prompts[:num_prompts]


@dataclass
class BenchmarkRow:
    """
    One method at one temperature.

    Args:
        method (`str`): One of `METHODS`.
        temperature (`float`): 0 is greedy.
        tokens_per_second (`list[float]`):
            One entry a repeat: all new tokens, the padding of finished rows included, over all seconds.
        speedups (`list[float]`): The same over plain generation's in that repeat.
        acceptance_length (`float`, *optional*):
            τ, pooled: tokens emitted by verification forwards over the number of those forwards. EAGLE-3 only.
        accepted_lengths (`list[int]`): Tokens each verification forward emitted.
        num_identical (`int`): Prompts whose tokens are, in every repeat, those of plain generation.
        num_prompts (`int`): Of how many.
    """

    method: str
    temperature: float
    tokens_per_second: list[float] = field(default_factory=list)
    speedups: list[float] = field(default_factory=list)
    acceptance_length: float | None = None
    accepted_lengths: list[int] = field(default_factory=list)
    num_identical: int = 0
    num_prompts: int = 0

    @property
    def median_tokens_per_second(self) -> float:
        return statistics.median(self.tokens_per_second)

    @property
    def median_speedup(self) -> float:
        return statistics.median(self.speedups)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Entry `k`: the share of verification forwards in which at least `k + 1` drafted tokens were accepted."""
        num_drafted = max(self.accepted_lengths, default=1) - 1  # one token of each is the target's own
        return [
            sum(length > k + 1 for length in self.accepted_lengths) / len(self.accepted_lengths)
            for k in range(num_drafted)
        ]

    def to_dict(self) -> dict:
        """For JSON. [`from_dict`] reads it."""
        stored = {key: value for key, value in asdict(self).items() if key != "accepted_lengths"}
        return stored | {
            "median_tokens_per_second": self.median_tokens_per_second,
            "median_speedup": self.median_speedup,
            "forwards_by_accepted_length": dict(sorted(Counter(self.accepted_lengths).items())),
        }

    @classmethod
    def from_dict(cls, stored: dict) -> "BenchmarkRow":
        counts = stored["forwards_by_accepted_length"].items()
        lengths = [int(length) for length, count in counts for _ in range(count)]
        own = {item.name: stored[item.name] for item in fields(cls) if item.name != "accepted_lengths"}
        return cls(**own, accepted_lengths=lengths)


def run_benchmark(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft: PreTrainedModel,
    prompts: Sequence[str],
    methods: Sequence[str] = METHODS,
    temperatures: Sequence[float] = (0.0, 1.0),
    max_new_tokens: int = 128,
    repeats: int = 3,
    seed: int = 0,
    sampling: dict[str, float] | None = None,
    batch_size: int = 1,
) -> list[BenchmarkRow]:
    """
    Times each method on each prompt, or batch of prompts. Methods take turns batch by batch, so that a slow spell of the
    machine meets all of them; seeds are the same for all.

    At temperatures above 0 the call is `generate(do_sample=True, temperature=..., **sampling)`: what `sampling` leaves out
    is the target's own generation config's or transformers' default (`top_k=50`). Pass `{"top_k": 0, "top_p": 1.0}` to
    sample from the whole distribution, which is harder to draft for.

    Returns:
        `list[BenchmarkRow]`: One a method and temperature, plain generation first.
    """
    if "plain" not in methods:
        raise ValueError("`methods` must include 'plain': speed-ups are ratios to it.")
    if batch_size > 1 and "prompt-lookup" in methods:
        raise ValueError("transformers' prompt lookup takes one sequence a call. Leave it out of `methods`.")
    if unknown := sorted(set(methods) - set(METHODS)):
        raise ValueError(f"Unknown methods {unknown}; choose from {METHODS}.")
    if "eagle3" in methods and not hasattr(draft, "assisted_decoding"):
        name = getattr(getattr(draft, "config", None), "_name_or_path", None) or type(draft).__name__
        raise ValueError(f"{name} is not an EAGLE-3 draft.")
    methods = sorted(methods, key=METHODS.index)
    assistance = {
        "plain": {},
        "prompt-lookup": {"prompt_lookup_num_tokens": 8},
        "eagle3": {"assistant_model": draft},
    }
    padding = {}
    if batch_size > 1:
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        padding = {"padding": True, "padding_side": "left"}
    encoded = [
        tokenizer(list(prompts[i : i + batch_size]), return_tensors="pt", **padding).to(target.device)
        for i in range(0, len(prompts), batch_size)
    ]
    settings = {"max_new_tokens": max_new_tokens}
    if tokenizer.pad_token_id is not None:
        settings["pad_token_id"] = tokenizer.pad_token_id

    def generate(inputs, method, temperature, run_seed):
        mode = {"do_sample": True, "temperature": temperature, **(sampling or {})}
        if temperature == 0:
            mode = {"do_sample": False}
        set_seed(run_seed)
        _synchronize(target.device)
        start = time.perf_counter()
        sequences = target.generate(**inputs, **settings, **mode, **assistance[method])
        _synchronize(target.device)
        return sequences[:, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - start

    rows = []
    progress = tqdm(total=len(temperatures) * len(methods) * len(encoded) * repeats, desc="Benchmark")
    for temperature in temperatures:
        by_method = {method: BenchmarkRow(method, temperature, num_prompts=len(prompts)) for method in methods}
        for method in methods:  # warm-up
            generate(encoded[0], method, temperature, seed)
        differs = {method: set() for method in methods}
        for repeat in range(repeats):
            tokens, seconds = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0.0)
            for index, inputs in enumerate(encoded):
                for method in methods:
                    new_tokens, elapsed = generate(inputs, method, temperature, seed + repeat * len(prompts) + index)
                    tokens[method] += sum(map(len, new_tokens))
                    seconds[method] += elapsed
                    if method == "plain":
                        expected = new_tokens
                    else:
                        pairs = enumerate(zip(new_tokens, expected))
                        differs[method] |= {(index, row) for row, (ours, plain) in pairs if ours != plain}
                    if method == "eagle3":
                        by_method[method].accepted_lengths += draft.last_generation.accepted_lengths
                    progress.update()
            speeds = {method: tokens[method] / seconds[method] for method in methods}
            for method in methods:
                by_method[method].tokens_per_second.append(speeds[method])
                by_method[method].speedups.append(speeds[method] / speeds["plain"])
        for method, row in by_method.items():
            row.num_identical = len(prompts) - len(differs[method])
            if row.accepted_lengths:
                row.acceptance_length = statistics.mean(row.accepted_lengths)
            rows.append(row)
    progress.close()
    return rows


def format_table(rows: Sequence[BenchmarkRow]) -> str:
    """The rows as a Markdown table. Medians over repeats; the range in brackets."""
    lines = [
        "| T | method | tokens/s | speed-up | acceptance length | identical to plain generate |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        speedup, tau, identical = "1.00", "-", "-"
        if row.method != "plain":
            speedup = f"{row.median_speedup:.2f} ({min(row.speedups):.2f}-{max(row.speedups):.2f})"
            identical = f"{row.num_identical}/{row.num_prompts}"
        if row.acceptance_length is not None:
            tau = f"{row.acceptance_length:.2f}"
        lines.append(
            f"| {row.temperature:g} | {row.method} | {row.median_tokens_per_second:.0f} | {speedup} | {tau} | {identical} |"
        )
    return "\n".join(lines)


def plot_speedups(rows: Sequence[BenchmarkRow], path: str | Path, title: str) -> None:
    """Saves the rows as a bar chart of tokens per second, with speed-ups and acceptance lengths written on the bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    temperatures = sorted({row.temperature for row in rows})
    figure, axes = plt.subplots(
        1, len(temperatures), figsize=(4.5 * len(temperatures), 3.6), sharey=True, squeeze=False
    )
    colors = {"plain": "#9aa5b1", "prompt-lookup": "#6aa6c8", "eagle3": "#f29f05"}
    for axis, temperature in zip(axes[0], temperatures):
        shown = [row for row in rows if row.temperature == temperature]
        bars = axis.bar(
            [row.method for row in shown],
            [row.median_tokens_per_second for row in shown],
            color=[colors[row.method] for row in shown],
        )
        labels = [
            f"{row.median_speedup:.2f}x" + (f"\nτ = {row.acceptance_length:.2f}" if row.acceptance_length else "")
            for row in shown
        ]
        axis.bar_label(bars, labels, padding=2)
        axis.set_title(f"T = {temperature:g}")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.2)
    axes[0][0].set_ylabel("tokens per second")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_acceptance(rows: Sequence[BenchmarkRow], path: str | Path, title: str) -> None:
    """Saves, for each temperature, how often the first, second, ... drafted token was accepted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(5.5, 3.6))
    for row in rows:
        shares = row.acceptance_by_position
        if shares:
            label = f"T = {row.temperature:g}, τ = {row.acceptance_length:.2f}"
            axis.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
    axis.set_xlabel("drafted token")
    axis.set_ylabel("share of steps that accept it")
    axis.set_ylim(0, 1)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    axis.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _synchronize(device: torch.device) -> None:
    if device.type in ("cuda", "xpu", "mps"):
        getattr(torch, device.type).synchronize()

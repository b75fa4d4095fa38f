# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
"""
What more data bring (EAGLE-3, https://huggingface.co/papers/2503.01840, figure 1): drafts of two methods, trained once over
1, 2, 4 and 8 times as much, and their acceptance lengths and speed-ups.

    python recipes/measurements/scaling.py --target Qwen/Qwen3-0.6B --dataset texts.jsonl --prompts prompts.jsonl \
        --rows 250 --output_dir outputs/scaling

The data are the target's own samples at temperature 1, of which there is no end: pieces of texts, continued. `--rows`
are the smallest share. What is sampled, trained and measured stays in the folder: interrupted, the same command goes
on.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from datasets import Dataset
from paper_table import add_arguments, load, settle_arguments, texts_of, train
from transformers import AutoModelForCausalLM

from hf_eagle3.data.regeneration import Output, complete_lines, conversations, regenerate_locally
from hf_eagle3.environment import environment
from hf_eagle3.evaluation import BenchmarkResults, run_benchmark
from hf_eagle3.evaluation.results import what_differs
from hf_eagle3.evaluation.tasks import expand, load_prompts, task_name
from hf_eagle3.tokenizer import load_tokenizer


METHODS = {"eagle3-no-lookup": "eagle3", "eagle-2": "eagle"}


def pieces_of(dataset: Dataset, tokenizer, num_rows: int, num_tokens: int, seed: int) -> list[dict]:
    """`num_rows` different pieces of `num_tokens` tokens, as prompts."""
    generator, pieces = random.Random(seed), {}
    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in dataset["text"]]
    tokens = [each for each in tokens if len(each) >= num_tokens]
    for _ in range(100 * num_rows):
        row = generator.choice(tokens)
        start = generator.randrange(len(row) - num_tokens + 1)
        pieces[tokenizer.decode(row[start : start + num_tokens])] = None
        if len(pieces) == num_rows:
            return [{"prompt": piece} for piece in pieces]
    raise ValueError(f"The data set has no {num_rows} different pieces of {num_tokens} tokens. Take fewer rows.")


def samples(folder: Path, target, tokenizer, args) -> Dataset:
    """The target's own texts, of as many rows as the largest share has."""
    settings = {"rows": args.rows * max(args.shares), "prompt_tokens": args.prompt_tokens, "new": args.sampled_tokens}
    output = Output(folder, settings)
    pieces = pieces_of(texts_of(args.dataset), tokenizer, settings["rows"], args.prompt_tokens, args.seed)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": args.sampled_tokens}
    pending = conversations(pieces, output.done)
    regenerate_locally(target, tokenizer, pending, output, args.sampled_at_once, **sampling)
    rows = [json.loads(line) for part in folder.glob("*.jsonl") for line in complete_lines(part)]
    rows.sort(key=lambda row: row["row"])  # a share is the beginning of the next one
    return Dataset.from_dict({"text": [row["prompt"] + row["completion"] for row in rows]})


def measure(target, tokenizer, tasks, path: Path, drafts: dict, facts: dict, args) -> BenchmarkResults:
    run = {
        "environment": environment(target.device),
        "weights": {name: each["weights"] for name, each in facts.items()},
    }
    results = BenchmarkResults.read(path) if path.exists() else BenchmarkResults(run)
    for name in run:
        if difference := what_differs(results.run.get(name, {}), run[name]):
            raise SystemExit(
                f"{path} was measured with other {name}: {difference}. Delete it, or choose another folder."
            )
    return run_benchmark(
        target,
        tokenizer,
        None,
        tasks,
        ["plain", *drafts],
        args.temperatures,
        max_new_tokens=args.max_new_tokens,
        repeats=args.repeats,
        sampling={"top_k": 0, "top_p": 1.0},
        drafts=drafts,
        results=results,
        save=lambda results: results.write(path),
    )


def plot(points: list[dict], path: Path) -> None:
    """Speed-up and acceptance length against the share of the data, a line for each method and temperature."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6))
    for axis, name in zip(figure.subplots(1, 2), ("speed-up", "acceptance length")):
        for method, temperature in dict.fromkeys((point["method"], point["T"]) for point in points):
            of_line = [point for point in points if (point["method"], point["T"]) == (method, temperature)]
            style = {"marker": "o", "linestyle": "-" if temperature == 0 else "--"}
            style["color"] = "#e67e22" if METHODS[method] == "eagle3" else "#c06c84"
            label = f"{method}, T = {temperature:g}"
            axis.plot([p["share"] for p in of_line], [p[name] for p in of_line], label=label, **style)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({point["share"] for point in points}))
        axis.xaxis.set_major_formatter("{x:g}x")
        axis.set_xlabel("training data")
        axis.set_ylabel(name)
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Folder or Hub id")
    parser.add_argument(
        "--dataset", required=True, help='JSON Lines file of {"text": "..."}, or Hub id: what is continued'
    )
    parser.add_argument("--prompts", "--tasks", nargs="+", required=True, help="See recipes/benchmark.py")
    parser.add_argument("--output_dir", default="outputs/scaling")
    parser.add_argument("--shares", nargs="+", type=int, default=[1, 2, 4, 8], help="Times the rows")
    parser.add_argument("--rows", type=int, default=250, help="Texts of the smallest share")
    parser.add_argument("--prompt_tokens", type=int, default=32, help="Length of the pieces that are continued")
    parser.add_argument("--sampled_tokens", type=int, default=224, help="Length of what the target says")
    parser.add_argument("--sampled_at_once", type=int, default=16, help="Texts that are sampled in one batch")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    add_arguments(parser)
    args = parser.parse_args()

    folder = Path(args.output_dir)
    tokenizer = load_tokenizer(args.target)
    tasks = {task_name(name): load_prompts(name, tokenizer, args.num_prompts) for name in expand(args.prompts)}
    settle_arguments(folder, args, tasks)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).to(device)
    dataset = samples(folder / "samples", target, tokenizer, args)
    folders = {
        (share, method): folder / f"{METHODS[method]}-{share}x" for share in sorted(args.shares) for method in METHODS
    }
    for (share, method), of_draft in folders.items():
        if not (of_draft / "facts.json").exists():
            train(METHODS[method], of_draft, target, tokenizer, dataset.select(range(share * args.rows)), args)
    points = []
    for share in sorted(args.shares):
        drafts = {method: load(method, folders[share, method], target, args) for method in METHODS}
        facts = {method: json.loads((folders[share, method] / "facts.json").read_text()) for method in METHODS}
        results = measure(target, tokenizer, tasks, folder / f"results-{share}x.jsonl", drafts, facts, args)
        for row in (row for row in results.rows if row.method != "plain"):
            point = {"share": share, "task": row.task, "method": row.method, "T": row.temperature}
            point |= {"tokens": facts[row.method]["tokens"], "speed-up": row.median_speedup}
            point |= {"lowest": min(row.speedups), "highest": max(row.speedups)}
            points.append(point | {"acceptance length": row.acceptance_length})
    (folder / "points.json").write_text(json.dumps(points, indent=2) + "\n")
    first = [point for point in points if point["task"] == points[0]["task"]]
    plot(first, folder / "scaling.png")
    lines = ["| task | method | T | data | training tokens | speed-up | acceptance length |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for point in sorted(points, key=lambda p: (p["task"], p["method"], p["T"], p["share"])):
        speedup = f"{point['speed-up']:.2f} ({point['lowest']:.2f}-{point['highest']:.2f})"
        names = f"| {point['task']} | {point['method']} | {point['T']:g} | {point['share']}x | {point['tokens']:,} "
        lines.append(f"{names}| {speedup} | {point['acceptance length']:.2f} |")
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    print(f"{environment(device)}. Wrote {folder / 'table.md'}, {folder / 'points.json'}, {folder / 'scaling.png'}.")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None

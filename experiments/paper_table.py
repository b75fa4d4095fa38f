# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
r"""
Makes the table of the EAGLE-3 paper on your own model. One trainer trains a draft of each method, for the same time on the
same data. One loop verifies them on the same prompts, in turns.

    python experiments/paper_table.py --target Qwen/Qwen3-0.6B --dataset texts.jsonl --prompts prompts.jsonl \
        --minutes 10 --output_dir outputs/paper_table

Methods are those of `hf_eagle3.baselines`, and:

    eagle3-classic    EAGLE-3 as in its paper
    eagle3-no-lookup  our draft with a whole tree in every step, as the other methods have
    eagle3            the same draft as users get it: `tree_policy="auto"`, with lookup
    assistant         speculative sampling with a small model (`--assistant`)

Each method has its paper's loss and number of drafting steps; docs/baselines.md says what differs. Learning rate, optimizer,
data and the number of nodes are the same for all. All guess samples by the same noise (docs/design.md), which no paper
does. Our drafts and P-EAGLE's have a draft vocabulary. The others have the target's whole vocabulary, as in their papers. A
static tree is the best one by the trained draft's accuracies on training data. Trees of DFlash, JetSpec and DSpark are as deep as
their blocks, because depth costs them next to nothing. These three are trained with a sampled softmax.

Trained drafts and measurements stay in the folder. After an interruption, the same command goes on.
"""

import argparse
import hashlib
import json
import time
from itertools import islice
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM

from hf_eagle3 import Eagle3ForSpeculation, Eagle3Trainer, Eagle3TrainingArguments
from hf_eagle3.baselines import BASELINES, DFlashForSpeculation, best_static_tree, measure_accuracies
from hf_eagle3.environment import environment, what_differs
from hf_eagle3.evaluation import BenchmarkResults, load_prompts, plot_all, run_benchmark
from hf_eagle3.evaluation.drafts import sampled_digest
from hf_eagle3.evaluation.results import cells, markdown_table
from hf_eagle3.evaluation.tasks import expand, task_name
from hf_eagle3.files import write_atomically
from hf_eagle3.remote_code.draft_model_eagle3 import weights_digest
from hf_eagle3.scripts import folder_or_hub_id, run_script
from hf_eagle3.tokenizer import load_tokenizer
from hf_eagle3.training.budget import BY_TIME, SHORT, TimeBudget, TimedEagle3Trainer, train_for


# The folder of each method's draft. Some methods share weights.
DRAFTS = {
    "medusa": "medusa",
    "hydra": "hydra",
    "eagle": "eagle",
    "eagle-2": "eagle",
    "hass": "hass",
    "p-eagle": "p-eagle",
    "dflash": "dflash",
    "jetspec": "jetspec",
    "dspark": "dspark",
    "eagle3-classic": "classic",
    "eagle3-no-lookup": "eagle3",
    "eagle3": "eagle3",
}
# Of block drafts. They learn two to three masks for each token, and a whole vocabulary would take most of the time.
SAMPLED_VOCAB_SIZE = 1024
# Arguments that do not change a measurement.
NOT_MEASURED = ("output_dir", "methods", "repeats")


def texts_of(name: str) -> Dataset:
    """Loads a JSON Lines file, or a data set of the Hub."""
    if Path(name).is_file():
        return load_dataset("json", data_files=name, split="train")
    return load_dataset(name, split="train")


def settle_arguments(folder: Path, args, tasks: dict[str, list], **others) -> dict:
    """
    Returns the arguments and `others` that change a measurement, and keeps them in the folder, or ends if it has others.
    """
    arguments = {name: each for name, each in vars(args).items() if name not in NOT_MEASURED} | others
    arguments["prompts_sha256"] = hashlib.sha256(repr(tasks).encode()).hexdigest()
    path = folder / "arguments.json"
    if path.exists() and (difference := what_differs(json.loads(path.read_text()), arguments)):
        raise SystemExit(f"{folder} was made with other arguments: {difference}. Choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(arguments, indent=2) + "\n")
    return arguments


def train(name, folder: Path, target, tokenizer, dataset, args) -> None:
    """Trains a draft for `args.minutes` or on `args.tokens`, and saves it with `facts.json`."""
    baseline = BASELINES.get(name)
    draft, settings = None, {"ttt_steps": args.ttt_steps, "ttt_warmup": 0.8, "draft_vocab_size": args.draft_vocab_size}
    if baseline is not None:
        torch.manual_seed(args.seed)
        is_block = baseline.draft_class is DFlashForSpeculation
        # All draft as many tokens. DSpark's blocks have one token less for that.
        block_size = args.block_size - ("sample_from_anchor" in baseline.overrides)
        sizes = {"num_hidden_layers": args.block_layers, "block_size": block_size} if is_block else {}
        draft, settings = baseline.make_draft(target, **sizes), dict(baseline.training)
        if is_block:
            settings |= {"ttt_steps": args.block_size - 1, "sampled_vocab_size": SAMPLED_VOCAB_SIZE}
    elif name == "classic":  # as in the EAGLE-3 paper
        settings |= {"draft_form": name, "ttt_warmup": 0.0}
    else:
        layer_type = {} if args.layer_type is None else {"model_type": args.layer_type}
        settings |= {"draft_form": "eagle3.1" if name == "eagle3" else name, "model_init_kwargs": layer_type}
    is_timed = args.minutes is not None
    settings |= BY_TIME if is_timed else {"max_steps": max(args.tokens // (args.batch_size * args.max_length), 1)}
    trainer = (TimedEagle3Trainer if is_timed else Eagle3Trainer)(
        model=draft,
        target_model=target,
        args=Eagle3TrainingArguments(
            str(folder) + "-run",
            learning_rate=args.learning_rate,
            max_length=args.max_length,
            per_device_train_batch_size=args.batch_size,
            bf16=args.bf16,
            seed=args.seed,
            **SHORT,
            **settings,
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    start = time.monotonic()
    if is_timed:
        train_for(trainer, TimeBudget(args.minutes, name))
    else:
        trainer.train()
    seconds, draft = time.monotonic() - start, trainer.draft
    if getattr(draft.config, "static_tree", None) is not None:
        depth = len(draft.heads) if hasattr(draft, "heads") else args.tree_depth
        loaded = islice(trainer.get_train_dataloader(), 16)
        batches = (trainer.target_batch(trainer._prepare_inputs(inputs)) for inputs in loaded)
        draft.config.static_tree = best_static_tree(measure_accuracies(draft, batches, depth))
    draft.to(target.dtype).save_pretrained(folder)
    steps = trainer.state.global_step
    facts = {
        "steps": steps,
        "tokens": steps * args.batch_size * args.max_length,
        "seconds": round(seconds, 1),
        "weights": weights_digest(draft.state_dict()),
        "trained_parameters": sum(each.numel() for each in draft.parameters() if each.requires_grad),
    }
    # Written last, so that only a complete draft has it.
    write_atomically(folder / "facts.json", json.dumps(facts, indent=2) + "\n")


def load(method: str, folder: Path, target, args):
    draft_class = BASELINES[DRAFTS[method]].draft_class if DRAFTS[method] in BASELINES else Eagle3ForSpeculation
    draft = draft_class.from_pretrained(folder, dtype=target.dtype).to(target.device).eval()
    if method == "eagle-2":
        draft.config.static_tree = None
    is_block = isinstance(draft, DFlashForSpeculation)
    draft.generation_config.update(
        tree_depth=draft.config.num_drafted if is_block else args.tree_depth,
        num_assistant_tokens=args.num_assistant_tokens,
        assistant_confidence_threshold=draft.generation_config.assistant_confidence_threshold
        if method == "eagle3"
        else 0.0,
        tree_policy="auto" if method == "eagle3" else "static",
    )
    return draft


def tables(results: BenchmarkResults, facts: dict[str, dict]) -> str:
    """
    Returns a table for each task. Each method has a line with its speed-up, acceptance length and identical texts at each
    temperature.
    """
    temperatures = sorted({row.temperature for row in results.rows})
    columns = [
        f"{name}, T={each:g}" for each in temperatures for name in ("speed-up", "acceptance length", "same text")
    ]
    names, parts = ["method", "trained parameters", "training tokens", *columns], []
    for task in dict.fromkeys(row.task for row in results.rows):
        lines, rows = [], [row for row in results.rows if row.task == task]
        for method in dict.fromkeys(row.method for row in rows):
            known = facts.get(DRAFTS.get(method), {})
            line = [method, *(f"{known[name]:,}" if known else "-" for name in ("trained_parameters", "tokens"))]
            by_temperature = {row.temperature: row for row in rows if row.method == method}
            for row in map(by_temperature.get, temperatures):
                line += ["-"] * 3 if row is None else cells(row)[3:]
            lines.append(line)
        parts.append(f"{task}:\n\n{markdown_table(names, lines)}")
    return "\n\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=folder_or_hub_id, required=True, help="Folder or Hub id")
    parser.add_argument("--dataset", required=True, help='JSON Lines file of {"text": "..."}, or Hub id, to train on')
    parser.add_argument("--prompts", "--tasks", nargs="+", required=True, help="See recipes/benchmark.py")
    parser.add_argument("--output_dir", default="outputs/paper_table")
    parser.add_argument("--methods", nargs="+", choices=DRAFTS, default=list(DRAFTS))
    parser.add_argument("--assistant", help="A small model for speculative sampling: folder or Hub id")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="How long to train each draft")
    length.add_argument("--tokens", type=int, help="How many tokens to train each draft on")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--draft_vocab_size", type=int, default=4096, help="Draft vocabulary of EAGLE-3 and P-EAGLE")
    parser.add_argument("--layer_type", choices=["llama", "qwen3"], help="Of EAGLE-3's and P-EAGLE's drafts")
    parser.add_argument("--learning_rate", type=float, default=5e-3, help="Tried with small targets only")
    parser.add_argument("--ttt_steps", type=int, default=5, help="Drafting steps unrolled for EAGLE-3 and P-EAGLE")
    parser.add_argument("--block_layers", type=int, default=5, help="Layers of block drafts")
    parser.add_argument(
        "--block_size", type=int, default=16, help="Tokens of their blocks, with the known one (DSpark: one less)"
    )
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--tree_depth", type=int, default=6)
    parser.add_argument("--num_assistant_tokens", type=int, default=24, help="Nodes to verify")
    parser.add_argument("--num_prompts", type=int, help="Only the first so many prompts of each task")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto", help="Dtype of the target and of what is measured")
    parser.add_argument("--bf16", action="store_true", help="Train in mixed precision")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    folder = Path(args.output_dir)
    tokenizer = load_tokenizer(args.target)
    tasks = {task_name(name): load_prompts(name, tokenizer, args.num_prompts) for name in expand(args.prompts)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).to(device)
    others = {"sampled_vocab_size": SAMPLED_VOCAB_SIZE, "target_digest": sampled_digest(target)}
    arguments = settle_arguments(folder, args, tasks, **others)
    names, facts, dataset = dict.fromkeys(DRAFTS[method] for method in args.methods), {}, None
    for name in names:
        if not (folder / name / "facts.json").exists():
            if dataset is None:
                dataset = texts_of(args.dataset)
            train(name, folder / name, target, tokenizer, dataset, args)
        facts[name] = json.loads((folder / name / "facts.json").read_text())

    path = folder / "results.jsonl"
    run = {"arguments": arguments, "environment": environment(device), "facts": facts, "missing_tasks": {}}
    results = BenchmarkResults.read(path) if path.exists() else BenchmarkResults(run)
    if difference := what_differs(results.run["environment"], run["environment"]):
        raise SystemExit(f"{path} was measured elsewhere: {difference}. Choose another folder.")
    known = results.run["facts"]
    renewed = {name for name in facts if known.get(name, {}).get("weights") != facts[name].get("weights")}
    results.measurements[:] = [each for each in results.measurements if DRAFTS.get(each["method"]) not in renewed]
    results.run["facts"] = known | facts
    with_assistant = ["assistant"] if args.assistant else []
    run_benchmark(
        target,
        tokenizer,
        None,
        tasks,
        ["plain", "prompt-lookup", *with_assistant, *args.methods],
        args.temperatures,
        max_new_tokens=args.max_new_tokens,
        repeats=args.repeats,
        sampling={"top_k": 0, "top_p": 1.0},
        assistant=AutoModelForCausalLM.from_pretrained(args.assistant, dtype=args.dtype).to(device)
        if args.assistant
        else None,
        drafts={method: load(method, folder / DRAFTS[method], target, args) for method in args.methods},
        results=results,
        save=lambda results: results.write(path),
    )
    lines = tables(results, results.run["facts"])
    for name, reason in results.run["left_out"].items():
        lines += f"\n\nLeft out: {name}. {reason}"
    (folder / "table.md").write_text(lines + "\n")
    print(lines)
    print(
        f"{results.run['environment']}. Wrote {', '.join(map(str, [folder / 'table.md', *plot_all(results, folder)]))}."
    )


if __name__ == "__main__":
    run_script(main)

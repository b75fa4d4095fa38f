# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
r"""
Checks that the tree policy `auto` keeps its promises on a pairing: it is as fast as the best fixed tree, and never slower
than plain generation, even with a useless draft.

    python experiments/tree_policy.py --target TARGET --draft DRAFT --prompts PROMPTS.jsonl \
        --batch_sizes 1 4 16

For each batch size and temperature, it tries a grid of fixed trees on the first batch and keeps the fastest ones
(`--finalists`). On all prompts it then times these trees, `auto`, `auto` with a draft of random weights, and plain
generation, in turns. It prints the speed-up over plain generation in the same repeat, as the median over repeats.
"""

import argparse
import copy
import itertools
import json
import statistics
import time
from functools import partial

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_eagle3.environment import environment
from hf_eagle3.evaluation.benchmark import synchronize
from hf_eagle3.evaluation.drafts import load_draft
from hf_eagle3.evaluation.tasks import OFFLINE, load_prompts
from hf_eagle3.remote_code.configuration_eagle3 import tree_settings
from hf_eagle3.tokenizer import padded_inputs, padding_token


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Target: a folder or a Hub id")
    parser.add_argument("--draft", required=True, help="Draft: a folder or a Hub id")
    parser.add_argument("--prompts", default=OFFLINE, help="A task of recipes/benchmark.py, or a file")
    parser.add_argument("--num_prompts", type=int, default=16)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 5, 7])
    parser.add_argument("--branching_factors", type=int, nargs="+", default=[1, 2, 4, 10])
    parser.add_argument("--budgets", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--finalists", type=int, default=4)
    parser.add_argument("--grid_batches", type=int, default=1, help="Batches that the whole grid is timed on")
    parser.add_argument(
        "--prompt_lookup_num_tokens", type=int, default=0, help="By default nothing is looked up: trees against trees"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="Where to keep the figures")
    return parser.parse_args()


def fixed_trees(depths, branching_factors, budgets) -> list[dict]:
    """Returns the trees of a grid, without those that are equal to another one or cannot reach their depth."""
    trees = []
    for depth, width, budget in itertools.product(depths, branching_factors, budgets):
        candidates = width + width * width * (depth - 1)
        smaller = [other for other in budgets if other < budget]
        if budget >= depth and not (smaller and candidates <= max(smaller)):
            trees.append({"tree_depth": depth, "branching_factor": width, "num_assistant_tokens": budget})
    return trees


def useless(draft):
    """Returns a copy of the draft with random weights."""
    draft = copy.deepcopy(draft)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    return draft


def timed(target, inputs, args, temperature: float, seed: int, assistant=None, **tree):
    """Returns tokens per second, and the text."""
    mode = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    if assistant is not None:
        tree = {"assistant_confidence_threshold": 0.0, **tree}
        assistant.generation_config.update(prompt_lookup_num_tokens=args.prompt_lookup_num_tokens, **tree)
        mode["assistant_model"] = assistant
    set_seed(seed)
    synchronize(target.device)
    start = time.perf_counter()
    text = target.generate(**inputs, max_new_tokens=args.max_new_tokens, pad_token_id=0, **mode)
    synchronize(target.device)
    return text.shape[0] * args.max_new_tokens / (time.perf_counter() - start), text


def fastest_trees(time_call, draft, batches, trees: list[dict], number: int, name: str) -> list[dict]:
    """Returns the fastest trees of a grid."""
    rates = [
        statistics.mean(
            time_call(inputs, seed=0, assistant=draft, tree_policy="static", **tree)[0] for inputs in batches
        )
        for tree in tqdm(trees, desc=f"Grid, {name}")
    ]
    return [trees[index] for index in sorted(range(len(trees)), key=lambda index: -rates[index])[:number]]


def compare_ways(time_call, ways: dict[str, dict], batches, repeats: int) -> list[dict]:
    """Times the ways of decoding in turns. Returns the speed-ups of each, and how many of its texts differ."""
    ratios = {name: [] for name in ways}
    differing = dict.fromkeys(ways, 0)
    for repeat in range(repeats):
        seconds = dict.fromkeys(ways, 0.0)
        for index, inputs in enumerate(batches):
            for name, way in ways.items():
                rate, text = time_call(inputs, seed=1 + repeat * len(batches) + index, **way)
                seconds[name] += 1 / rate
                if name == "plain":
                    expected = text
                differing[name] += int((text != expected).any(dim=1).sum())
        for name in ways:
            ratios[name].append(seconds["plain"] / seconds[name])
    return [
        {
            "way": name,
            "speedup": statistics.median(ratios[name]),
            "repeats": ratios[name],
            "differing_texts": differing[name],
        }
        for name in ways
    ]


def main():
    args = parse_arguments()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).to(args.device).eval()
    tokenizer.pad_token = padding_token(tokenizer, target.config.get_text_config(decoder=True).vocab_size)
    draft = load_draft(args.draft, dtype=target.dtype).to(args.device)
    target.generation_config.eos_token_id = None  # texts of one length
    prompts = load_prompts(args.prompts, tokenizer, args.num_prompts)
    drafts = {"auto": draft, "auto, useless draft": useless(draft)}
    # The draft's own settings, which the grid changes. Under its threshold a useless draft may propose nothing.
    names = "tree_depth", "branching_factor", "num_assistant_tokens", "assistant_confidence_threshold"
    own = {name: tree_settings(draft.generation_config)[name] for name in names}
    trees = fixed_trees(args.depths, args.branching_factors, args.budgets)
    facts = {**environment(args.device), "dtype": str(target.dtype).removeprefix("torch.")}
    results = []

    for batch_size, temperature in itertools.product(args.batch_sizes, args.temperatures):
        batches = [
            padded_inputs(target, tokenizer, prompts[i : i + batch_size]) for i in range(0, len(prompts), batch_size)
        ]
        time_call = partial(timed, target, args=args, temperature=temperature)
        setting = f"batch size {batch_size}, T={temperature:g}"
        finalists = fastest_trees(time_call, draft, batches[: args.grid_batches], trees, args.finalists, setting)
        ways = {"plain": {}}
        for name, assistant in drafts.items():
            ways[name] = {"assistant": assistant, "tree_policy": "auto", **own}
        for tree in finalists:
            ways["fixed " + "/".join(map(str, tree.values()))] = {"assistant": draft, "tree_policy": "static", **tree}
        results += [
            {"batch_size": batch_size, "temperature": temperature, **row}
            for row in compare_ways(time_call, ways, batches, args.repeats)
        ]
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump({"environment": facts, "arguments": vars(args), "results": results}, file, indent=2)
    print(
        "| batch size | T | decoding (fixed: depth/branching/nodes) | speed-up | texts that differ |\n| --- | --- | --- | --- | --- |"
    )
    for row in results:
        if row["way"] != "plain":
            span = f"{min(row['repeats']):.2f}-{max(row['repeats']):.2f}"
            texts = f"{row['differing_texts']}/{len(prompts) * args.repeats}"
            print(
                f"| {row['batch_size']} | {row['temperature']:g} | {row['way']} | {row['speedup']:.2f} ({span}) | {texts} |"
            )
    print(f"{args.max_new_tokens} new tokens, medians of {args.repeats} repeats; {facts}")


if __name__ == "__main__":
    main()

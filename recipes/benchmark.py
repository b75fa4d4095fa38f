"""
Compares plain generation, prompt lookup and an EAGLE-3 draft on the same prompts.

    python recipes/benchmark.py --target Qwen/Qwen3-8B --draft me/Qwen3-8B-speculator.eagle3 \
        --prompts prompts.jsonl --dtype bfloat16 --json results.json

`prompts.jsonl` holds one `{"prompt": "..."}` a line.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_eagle3.environment import environment, weights_digest
from hf_eagle3.evaluation import METHODS, format_table, plot_speedups, read_prompts, run_benchmark
from hf_eagle3.policy_eagle3 import DEFAULT_TREE_SETTINGS, tree_settings


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Target: a folder or a Hub id")
    parser.add_argument("--draft", required=True, help="Draft: a folder or a Hub id")
    parser.add_argument("--prompts", required=True, help='JSON Lines file, one {"prompt": "..."} a line')
    parser.add_argument("--json", help="Where to write the results")
    parser.add_argument("--plot", help="Where to save a picture of the results")
    parser.add_argument("--methods", nargs="+", help="By default all: plain, prompt-lookup (batch size 1) and eagle3")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    for name, kind in (("top_k", int), ("top_p", float)):
        parser.add_argument(
            f"--{name}", type=kind, help="When sampling; by default what `generate` does for the target"
        )
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--num_prompts", type=int, help="Only the first so many prompts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto", help="Dtype of target and draft")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in DEFAULT_TREE_SETTINGS.items():
        parser.add_argument(f"--{name}", type=type(default), help="Overrides the draft's own setting")
    args = parser.parse_args()

    prompts = read_prompts(args.prompts, args.num_prompts)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    draft = AutoModel.from_pretrained(args.draft, dtype=args.dtype, trust_remote_code=True).to(args.device).eval()
    for name in DEFAULT_TREE_SETTINGS:
        if getattr(args, name) is not None:
            setattr(draft.generation_config, name, getattr(args, name))

    sampling = {name: getattr(args, name) for name in ("top_k", "top_p") if getattr(args, name) is not None}
    rows = run_benchmark(
        target,
        tokenizer,
        draft,
        prompts,
        args.methods or (METHODS if args.batch_size == 1 else ("plain", "eagle3")),
        args.temperatures,
        args.max_new_tokens,
        args.repeats,
        sampling=sampling,
        batch_size=args.batch_size,
    )
    tree = tree_settings(draft.generation_config)
    facts = {**environment(args.device), "target_dtype": str(target.dtype), "draft_dtype": str(draft.dtype)}
    print(format_table(rows))
    print(
        f"{len(prompts)} prompts, {args.max_new_tokens} new tokens, batch size {args.batch_size}, medians of {args.repeats} interleaved "
        f"repeats (range in brackets); sampling {sampling or 'as generate does by default'}; tree {tree}; {facts}"
    )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "draft_weights": weights_digest(draft.state_dict()),  # whose figures these are
                    "task": Path(args.prompts).stem,
                    "arguments": vars(args),
                    "environment": facts,
                    "tree": tree,
                    "results": [row.to_dict() for row in rows],
                },
                file,
                indent=2,
            )
        print(f"Wrote {args.json}")
    if args.plot:
        plot_speedups(rows, args.plot, f"Tokens per second, batch size {args.batch_size}")
        print(f"Wrote {args.plot}")


if __name__ == "__main__":
    main()

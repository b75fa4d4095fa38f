# /// script
# dependencies = ["hf-eagle3[train]", "gguf"]
# ///
r"""
Runs the same draft and prompts in transformers, vLLM, llama.cpp and OpenVINO GenAI, on the CPU: greedily, one prompt at a
time. Each engine is compared with itself without a draft.

    python experiments/engines/compare.py --target TARGET --draft DRAFT --prompts PROMPTS.jsonl \
        --output_dir outputs/engines

The draft must be classic (`draft_form="classic"`), or a block draft (DFlash, JetSpec) for vLLM alone. llama.cpp runs `--target_gguf`; without it the target must be a Qwen3.
transformers and vLLM run `--dtype`, and OpenVINO float32. Each engine gets its own environment in `--output_dir`. Together
they take some gigabytes. Engines take turns, each in its own process. The first prompt runs once before it is timed.
`forwards` counts the forwards that verified something.
"""

import argparse
import hashlib
import json
import statistics
from pathlib import Path

import torch
from environments import make_environment, run_engine, run_transformers, tree
from target_gguf import write_target
from transformers import AutoModelForCausalLM

from hf_eagle3.baselines import DFlashForSpeculation
from hf_eagle3.checkpoints import export
from hf_eagle3.checkpoints.openvino import convert
from hf_eagle3.environment import environment
from hf_eagle3.evaluation.drafts import load_draft, sampled_digest
from hf_eagle3.evaluation.tasks import load_prompts
from hf_eagle3.tokenizer import load_tokenizer


ENGINES = ("transformers", "hf-eagle3", "vllm", "llama_cpp", "openvino")
DEPTH = 5
TREE = {"tree_depth": 6, "branching_factor": 8, "num_assistant_tokens": 24}
CHAIN = {"num_draft_tokens": DEPTH, "num_assistant_tokens": DEPTH}
# What runs: the engine, the kind of step, and the engine's settings.
WAYS = (
    ("transformers", "plain", None),
    ("hf-eagle3", f"chain of {DEPTH}", tree(DEPTH)),
    ("hf-eagle3", "tree 6/8/24", tree(*TREE.values())),
    ("hf-eagle3", "auto, nothing looked up", {"prompt_lookup_num_tokens": 0}),
    ("hf-eagle3", "auto", {}),
    ("vllm", "plain", None),
    ("vllm", f"chain of {DEPTH}", CHAIN),
    ("llama_cpp", "plain", None),
    ("llama_cpp", f"chain of {DEPTH}", CHAIN),
    ("openvino", "plain", None),
    ("openvino", f"chain of {DEPTH}", CHAIN),
    ("openvino", "tree 6/8/24", TREE),
)


def ways_of_blocks(block_size: int) -> tuple:
    """`WAYS` of a block draft. Its trees are as deep as its blocks, because depth costs nothing."""
    depth = block_size - 1
    of_vllm = {"num_draft_tokens": depth, "method": "dflash"}
    return (
        ("transformers", "plain", None),
        ("hf-eagle3", f"chain of {depth}", tree(depth)),
        ("hf-eagle3", f"tree {depth}/8/24", tree(depth, 8, 24)),
        ("hf-eagle3", "auto", {}),
        ("vllm", "plain", None),
        ("vllm", f"chain of {depth}", of_vllm),
    )


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--target_gguf", type=Path, help="The target as llama.cpp runs it. By default float32")
    parser.add_argument("--dtype", default="float32", help="Of transformers and vLLM. OpenVINO runs float32")
    parser.add_argument("--num_prompts", type=int, default=12)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="By default all that can run the draft")
    parser.add_argument("--output_dir", default="outputs/engines")
    return parser.parse_args()


def prepare(args, target, draft, tokenizer, folder: Path) -> dict[str, dict]:
    """Writes what each engine loads. Returns the paths, and the interpreter, by engine."""
    if not (folder / "saved").exists():
        for name, model in (("target", target), ("draft", draft)):
            model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / "target")
        (folder / "saved").touch()
    loaded = {"vllm": {"target": folder / "target", "draft": folder / "draft", "dtype": args.dtype}}
    loaded["llama_cpp"] = {
        "target": args.target_gguf or folder / "target.gguf",
        "draft": folder / "gguf" / "draft.gguf",
    }
    loaded["openvino"] = {"target": folder / "target-openvino", "draft": folder / "openvino"}
    loaded = {name: paths for name, paths in loaded.items() if name in args.engines}
    for name, paths in loaded.items():
        paths["python"] = make_environment(name, args.output_dir)
        if name == "llama_cpp" and not paths["draft"].exists():
            if args.target_gguf is None:
                write_target(target, tokenizer, paths["target"])
            export(draft, folder / "gguf", "gguf", target_gguf=paths["target"])
        if name == "openvino" and not paths["draft"].exists():
            convert(paths["python"], folder / "target", paths["target"])
            export(draft, paths["draft"], "openvino", python=paths["python"])
    return loaded


def run(engine, settings, args, target, prompts, loaded, threads) -> dict:
    prompts = [prompts[0], *prompts]  # the first run also pays for preparation, and is not counted
    if engine in ("transformers", "hf-eagle3"):
        torch.set_num_threads(threads)
        draft = None if settings is None else args.draft
        found = run_transformers(target, prompts, args.max_new_tokens, draft, **(settings or {}))
    else:
        job = {**loaded[engine], "prompts": prompts, "max_new_tokens": args.max_new_tokens, **(settings or {})}
        python = job.pop("python")
        if settings is None:
            del job["draft"]
        found = run_engine(python, engine, threads, **job)
    return {name: value[1:] if isinstance(value, list) else value for name, value in found.items()}


def main():
    args = parse_arguments()
    tokenizer = load_tokenizer(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).eval()
    prompts = load_prompts(args.prompts, tokenizer)[: args.num_prompts]
    draft = load_draft(args.draft, dtype=target.dtype)
    all_ways = ways_of_blocks(draft.config.block_size) if isinstance(draft, DFlashForSpeculation) else WAYS
    if lacking := sorted(set(args.engines or ()) - {engine for engine, *_ in all_ways}):
        raise SystemExit(f"{', '.join(lacking)} cannot run this draft. Leave it out of --engines.")
    args.engines = ["transformers", *(args.engines or dict.fromkeys(engine for engine, *_ in all_ways))]
    ways = [way for way in all_ways if way[0] in args.engines]
    # Other models get another folder: what engines load is exported once.
    made_of = f"{sampled_digest(target)} {sampled_digest(draft)} {args.dtype} {args.target_gguf}"
    folder = Path(args.output_dir) / f"of-{Path(args.draft).name}-{hashlib.sha256(made_of.encode()).hexdigest()[:8]}"
    loaded, measured = prepare(args, target, draft, tokenizer, folder), []
    for threads in args.threads:
        results = {}
        for _ in range(args.repeats):
            for engine, kind, settings in ways:
                found = run(engine, settings, args, target, prompts, loaded, threads)
                results.setdefault((engine, kind), []).append(found)
        texts = results["transformers", "plain"][0]["tokens"]
        for (engine, kind), repeats in results.items():
            alone = results["transformers" if engine == "hf-eagle3" else engine, "plain"]
            speedups = [sum(a["seconds"]) / sum(b["seconds"]) for a, b in zip(alone, repeats)]
            num_tokens = sum(map(len, repeats[0]["tokens"]))
            measured.append(
                {
                    "threads": threads,
                    "engine": engine,
                    "version": repeats[0].get("version"),
                    "kind": kind,
                    "tokens_per_second": num_tokens / statistics.median(sum(each["seconds"]) for each in repeats),
                    "speedups": speedups,
                    "forwards": sum(repeats[0]["forwards"]),
                    "new_tokens": num_tokens,
                    "identical": sum(a == b for a, b in zip(texts, repeats[0]["tokens"])),
                }
            )
            print(json.dumps(measured[-1]), flush=True)
    with open(folder / "engines.json", "w") as file:
        json.dump({"environment": environment(target.device), "measured": measured}, file, indent=2)
    print("\n| threads | engine | step | tokens/s | speed-up | forwards | acceptance length | same text |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in measured:
        speedups = row["speedups"]
        spread = f"{statistics.median(speedups):.2f} ({min(speedups):.2f}-{max(speedups):.2f})"
        plain = row["kind"] == "plain"
        length = (row["new_tokens"] - len(prompts)) / row["forwards"] if row["forwards"] else 1
        name = row["engine"] if row["version"] is None else f"{row['engine']} {row['version']}"
        print(
            f"| {row['threads']} | {name} | {row['kind']} | {row['tokens_per_second']:.0f} | "
            f"{'1.00' if plain else spread} | {'-' if plain else row['forwards']} | {'-' if plain else f'{length:.2f}'} | "
            f"{row['identical']}/{len(prompts)} |"
        )


if __name__ == "__main__":
    main()

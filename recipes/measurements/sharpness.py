# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
"""
To which power should a draft's probabilities be taken, to say how sure it is? And how deep should a tree be?

    python recipes/measurements/sharpness.py --target TARGET --drafts DRAFT --prompts prompts.jsonl --json sharpness.json

Acceptance lengths with the whole tree in every step, whose nodes are chosen by probabilities to a fixed power, or to
one that is learned while decoding. Texts are the same.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path
from unittest import mock

import torch
from ablation import acceptance_length
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.evaluation import load_prompts
from hf_eagle3.remote_code import policy_eagle3
from hf_eagle3.remote_code.policy_eagle3 import DEFAULT_TREE_SETTINGS, Calibration


class FixedCalibration(Calibration):
    """Learns nothing."""

    RATE = 0.0


def table(results: list[dict]) -> str:
    drafts = list(dict.fromkeys(result["draft"] for result in results))
    lines = [f"| T | depth | power | {' | '.join(drafts)} |", "| --- | --- | --- |" + " --- |" * len(drafts)]
    rows = {}
    for result in results:
        cells = rows.setdefault((result["T"], result["depth"], result["power"] or "learned"), {})
        cells.setdefault(result["draft"], []).append(result["length"])
    for (temperature, depth, power), lengths in rows.items():
        cells = (f"{statistics.mean(lengths[draft]):.2f}" for draft in drafts)
        lines.append(f"| {temperature} | {depth} | {power} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Folder or Hub id")
    parser.add_argument("--drafts", nargs="+", required=True)
    parser.add_argument("--prompts", required=True, help="See recipes/benchmark.py")
    parser.add_argument("--json", required=True, help="Where the figures go")
    parser.add_argument(
        "--powers", nargs="*", type=float, default=[1.0, 2.0, 3.0, 4.0], help="Besides the learned one"
    )
    parser.add_argument("--tree_depths", nargs="+", type=int, default=[DEFAULT_TREE_SETTINGS["tree_depth"]])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="Of samples")
    parser.add_argument("--num_prompts", type=int)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    args = parser.parse_args()

    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    prompts = load_prompts(args.prompts, AutoTokenizer.from_pretrained(args.target), args.num_prompts)
    ways = itertools.product(args.drafts, (0, 1), args.tree_depths, (*args.powers, None))
    results = []
    for name, temperature, depth, power in ways:
        for seed in args.seeds if temperature else args.seeds[:1]:
            draft = Eagle3ForSpeculation.from_pretrained(name, dtype=torch.float32).eval()  # of which nothing is known
            draft.generation_config.tree_depth = depth
            calibration = Calibration if power is None else lambda first, power=power: FixedCalibration(power)
            with mock.patch.object(policy_eagle3, "Calibration", calibration):
                length = acceptance_length(target, draft, prompts, temperature, args.max_new_tokens, seed)
            results.append({"draft": Path(name).name, "T": temperature, "depth": depth, "power": power})
            results[-1].update(seed=seed, length=length)
            Path(args.json).write_text(json.dumps(results, indent=2) + "\n")
            print(results[-1], flush=True)
    print(table(results))


if __name__ == "__main__":
    main()

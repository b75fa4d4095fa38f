r"""
Counts how often greedy text differs from plain `generate` in low precision, and checks that each difference is a near tie.

    python experiments/low_precision.py --target Qwen/Qwen3-8B --draft me/Qwen3-8B-speculator.eagle3 \
        --prompts prompts.jsonl --dtypes bfloat16 float16

A forward over a tree adds the same numbers in another order than a forward over one token, and rounds differently. So
does any batch. Where two texts part, both have the same prefix. The script prints the gap there: how far apart the target's
logits of the two tokens are. Beside it is the target's own rounding noise: how much the logits of plain decoding differ
from those of one forward over the whole text, without any draft. A gap of at most twice that noise is a near tie, which
rounding can turn. Anything else is a bug.
"""

import argparse
import json
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_eagle3.environment import environment
from hf_eagle3.evaluation.drafts import load_draft
from hf_eagle3.scripts import folder_or_hub_id, run_script


@torch.no_grad()
def compare(target, draft, input_ids, max_new_tokens: int) -> dict:
    """Decodes greedily with and without the draft. Returns the noise, and where the texts part, the gap."""
    settings = {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    plain = target.generate(input_ids, **settings)
    ours = target.generate(input_ids, assistant_model=draft, **settings)
    length = input_ids.shape[1]
    plain_logits = torch.cat(plain.logits)  # (T, V)
    whole = target(plain.sequences[:, :-1]).logits[0, length - 1 :].float()  # (T, V)
    result = {
        "noise": (whole - plain_logits).abs().max().item(),
        "acceptance_length": draft.last_generation.acceptance_length,
    }
    texts = plain.sequences[0, length:].tolist(), ours.sequences[0, length:].tolist()
    same = next((i for i, (a, b) in enumerate(zip(*texts)) if a != b), min(map(len, texts)))
    result["tree_noise"] = (torch.cat(ours.logits[:same]) - plain_logits[:same]).abs().max().item() if same else 0.0
    if texts[0] != texts[1]:
        if same == min(map(len, texts)):
            raise RuntimeError(f"One text ends where the other goes on: {texts}")
        one, other = texts[0][same], texts[1][same]
        result |= {
            "position": same,
            "tokens": [one, other],
            "gap": (plain_logits[same, one] - plain_logits[same, other]).item(),
            "gap_with_tree": (ours.logits[same][0, one] - ours.logits[same][0, other]).item(),
            "tree_noise": max(result["tree_noise"], (ours.logits[same][0] - plain_logits[same]).abs().max().item()),
        }
    return result


def main():
    from hf_eagle3.evaluation import load_prompts  # needs more than `compare` does

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=folder_or_hub_id, required=True, help="Folder or Hub id")
    parser.add_argument("--draft", type=folder_or_hub_id, required=True, help="Folder or Hub id")
    parser.add_argument("--prompts", required=True, help='JSON Lines file, one {"prompt": "..."} a line')
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--num_prompts", type=int)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--tree_policy",
        choices=["static", "auto"],
        default="static",
        help="static: a whole tree in every step. auto: the default of `generate`, which also looks up, and may decode plainly",
    )
    parser.add_argument("--json", help="Where to write the results")
    args = parser.parse_args()

    prompts = load_prompts(args.prompts, AutoTokenizer.from_pretrained(args.target), args.num_prompts)
    results, unexplained, facts = {}, 0, environment(args.device)
    lines = [
        "| dtype | texts that differ | near ties | largest gap | noise of the target | noise of the tree |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for dtype in args.dtypes:
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(args.device).eval()
        draft = load_draft(args.draft, dtype=dtype).to(args.device)
        draft.generation_config.tree_policy = args.tree_policy
        results[dtype] = rows = [
            compare(target, draft, torch.tensor([prompt], device=args.device), args.max_new_tokens)
            for prompt in tqdm(prompts, desc=dtype)
        ]
        noise = max(row["noise"] for row in rows)
        different = [row for row in rows if "gap" in row]
        near_ties = [row for row in different if abs(row["gap"]) <= 2 * noise]
        unexplained += len(different) - len(near_ties)
        largest = f"{max(abs(row['gap']) for row in different):.2g}" if different else "-"
        tree_noise = max(row["tree_noise"] for row in rows)
        lines.append(
            f"| {dtype} | {len(different)}/{len(rows)} | {len(near_ties)}/{len(different)} | {largest} | {noise:.2g} | "
            f"{tree_noise:.2g} |"
        )
    print("\n".join([*lines, f"{args.max_new_tokens} new tokens; {facts}"]))
    if args.json:
        Path(args.json).write_text(
            json.dumps({"environment": facts, "arguments": vars(args), "results": results}, indent=2), encoding="utf-8"
        )
    if unexplained:
        raise SystemExit(f"{unexplained} differences are not near ties. Please report them.")


if __name__ == "__main__":
    run_script(main)

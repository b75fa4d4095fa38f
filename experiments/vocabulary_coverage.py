# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
r"""
Computes which share of tokens a draft vocabulary covers, in texts and in the target's own writing. It helps to choose
`draft_vocab_size`: a draft vocabulary has the most frequent tokens of the texts.

    python experiments/vocabulary_coverage.py --target Qwen/Qwen3-0.6B --dataset texts.jsonl \
        --prompts prompts.jsonl --sizes 16000 32000 64000
"""

import argparse

import numpy as np
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_eagle3.data import count_tokens, coverage, most_frequent_tokens
from hf_eagle3.evaluation import load_prompts
from hf_eagle3.scripts import folder_or_hub_id, run_script


def count_written(target, prompts: list[list[int]], max_new_tokens: int, **sampling) -> np.ndarray:
    """Returns how often the target writes each of its tokens."""
    counts = np.zeros(target.config.get_text_config(decoder=True).vocab_size, dtype=np.int64)
    set_seed(0)
    for prompt in prompts:
        inputs = torch.tensor([prompt], device=target.device)
        sequences = target.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, **sampling
        )
        counts += np.bincount(sequences[0, len(prompt) :].cpu().numpy(), minlength=len(counts))
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=folder_or_hub_id, required=True, help="Folder or Hub id")
    parser.add_argument("--dataset", required=True, help='JSON Lines file of {"text": "..."} to train on')
    parser.add_argument("--prompts", required=True, help='Held-out prompts, one {"prompt": "..."} a line')
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="Draft vocabularies")
    parser.add_argument("--num_prompts", type=int, default=40)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto", help="Dtype of the target")
    args = parser.parse_args()

    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    texts = load_dataset("json", data_files=args.dataset, split="train").map(
        lambda row: {"input_ids": tokenizer(row["text"])["input_ids"]}
    )
    prompts = load_prompts(args.prompts, tokenizer, args.num_prompts)
    of_texts = count_tokens(texts, target.config.get_text_config(decoder=True).vocab_size)
    greedy = count_written(target, prompts, args.max_new_tokens, do_sample=False)
    samples = count_written(target, prompts, args.max_new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    print("| draft vocabulary | of the texts | of greedy texts of the target | of its samples |")
    print("| --- | --- | --- | --- |")
    for size in args.sizes:
        token_ids = most_frequent_tokens(of_texts, size)
        shares = " | ".join(f"{coverage(counts, token_ids):.1%}" for counts in (of_texts, greedy, samples))
        print(f"| {size:,} | {shares} |")


if __name__ == "__main__":
    run_script(main)

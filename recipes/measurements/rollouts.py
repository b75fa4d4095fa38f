# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
"""
How much of a draft is accepted in the rollouts of TRL's `GRPOTrainer`, while the target that it was trained for goes on
learning: with the draft left as it is, and with drafts that follow (`assist_rollouts(..., learning_rate=...)`).

    python recipes/measurements/rollouts.py --target TARGET --draft DRAFT --prompts prompts.jsonl --steps 200 \
        --draft_learning_rates 0 3e-4 --json rollouts.json

The target is rewarded for upper-case letters: something that it can learn soon, and that its draft has not seen.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.environment import environment
from hf_eagle3.evaluation import load_prompts
from hf_eagle3.tokenizer import load_tokenizer
from hf_eagle3.training import assist_rollouts


def share_of_upper_case(completions: list[str], **kwargs) -> list[float]:
    letters = [[letter for letter in text if letter.isalpha()] for text in completions]
    return [sum(map(str.isupper, each)) / max(len(each), 1) for each in letters]


def run(prompts: list[str], tokenizer, draft_learning_rate: float, args) -> list[dict]:
    """What was logged of each step."""
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    draft = Eagle3ForSpeculation.from_pretrained(args.draft, dtype=torch.float32).eval()
    draft.generation_config.update(tree_policy=args.tree_policy, assistant_confidence_threshold=0.0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=target,
            reward_funcs=share_of_upper_case,
            args=GRPOConfig(
                folder,
                learning_rate=args.learning_rate,
                lr_scheduler_type="constant",
                per_device_train_batch_size=args.batch_size,
                num_generations=args.num_generations,
                steps_per_generation=1,
                max_completion_length=args.max_completion_length,
                max_steps=args.steps,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
                disable_tqdm=True,
                seed=args.seed,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
        )
        with assist_rollouts(trainer, draft, draft_learning_rate or None):
            trainer.train()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def table(runs: dict[float, list[dict]], every: int) -> str:
    names = [f"draft, learning rate {rate:g}" if rate else "draft as it is" for rate in runs]
    lines = ["| steps | reward | " + " | ".join(names) + " |", "| --- | --- |" + " --- |" * len(names)]
    history = next(iter(runs.values()))
    for start in range(0, len(history), every):
        span = slice(start, start + every)
        reward = statistics.mean(entry["reward"] for entry in history[span])
        lengths = [statistics.mean(entry["acceptance_length"] for entry in each[span]) for each in runs.values()]
        cells = [f"{start + 1}-{min(start + every, len(history))}", f"{reward:.3f}", *(f"{x:.2f}" for x in lengths)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Folder or Hub id")
    parser.add_argument("--draft", required=True, help="Folder or Hub id")
    parser.add_argument("--prompts", required=True, help="See recipes/benchmark.py")
    parser.add_argument("--json", required=True, help="Where the logs go")
    parser.add_argument("--draft_learning_rates", nargs="+", type=float, default=[0.0, 3e-4], help="0: as it is")
    parser.add_argument("--learning_rate", type=float, default=1e-4, help="The target's")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=25, help="Steps of a line of the table")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--num_generations", type=int, default=8, help="Texts of each prompt")
    parser.add_argument("--max_completion_length", type=int, default=48)
    parser.add_argument("--tree_policy", choices=["static", "auto"], default="static")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tokenizer = load_tokenizer(args.target)
    prompts = [tokenizer.decode(prompt) for prompt in load_prompts(args.prompts, tokenizer, None)]
    runs = {}
    for rate in args.draft_learning_rates:
        runs[rate] = run(prompts, tokenizer, rate, args)
        Path(args.json).write_text(json.dumps(runs, indent=2) + "\n")
        first = next(iter(runs.values()))
        if any(ours["reward"] != theirs["reward"] for ours, theirs in zip(runs[rate], first, strict=True)):
            raise SystemExit("The rewards depend on the draft, which they must not: the texts are not the target's.")
    print(table(runs, args.every))
    print(environment("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None

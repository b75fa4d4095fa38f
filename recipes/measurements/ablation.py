# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
"""
Trains a draft for each choice and seed at equal compute, and compares their acceptance lengths.

    python recipes/measurements/ablation.py --target Qwen/Qwen3-0.6B --dataset texts.jsonl --prompts prompts.jsonl \
        --json ablation.json

Compute is tokens times drafting steps, so that a draft trained without training-time test sees more tokens. What is
done is kept in the JSON file; the same command goes on from there. Choices:

    baseline      forward KL, EAGLE-3.1's norms, three states of the target, Muon for the matrices, the whole unroll from the beginning
    ce, lk_alpha, lk_lambda, race               other losses
    classic       without `fc_norm` and `norm_output`: the EAGLE-3 paper's form
    top_features  only the state that enters the target's last layer
    no_ttt        without training-time test
    ttt_warmup    an unroll that grows over the first 80% of the steps
    adamw, adamw_1e-3                           AdamW for everything, at the same learning rate and at that one
    same_lr       AdamW's part beside Muon at Muon's learning rate
    rows_60, rows_40               an unroll that grows, and of which each step goes on with so many percent of the rows of the one before
    sampled, sampled_rows_60       an unroll that grows, and a softmax with 1,024 of the tokens that are improbable in the batch, with all rows or 60%
    echo_2        sampled_rows_60, and each batch is learned from twice
    batch_1, batch_2, batch_4      an unroll that grows, and so many sequences a step
    rollouts      besides the unroll that grows, in the second half a quarter of the batches is written by target and draft
    rollouts_without_rejected, rollouts_greedy   the same without rejected nodes, and of greedy texts

With `--minutes` each is trained for the same time instead. What runs beside it takes some of that time, so that all
should run alone, or all beside the same; or in one thread (`OMP_NUM_THREADS=1`) on a CPU, where processor time is
counted, and so only what slows memory down counts.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from datasets import load_dataset
from training_cost import mean_steps
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, set_seed

from hf_eagle3 import Eagle3Trainer, Eagle3TrainingArguments
from hf_eagle3.evaluation import load_prompts
from hf_eagle3.evaluation.results import what_differs
from hf_eagle3.training.budget import BY_TIME, SHORT, TimeBudget, TimedEagle3Trainer, train_for


ROLLOUTS = {"ttt_warmup": 0.8, "rollout_share": 0.25, "rollout_start": 0.5, "rollout_interval": 64}
CHOICES = {
    "baseline": {},
    "ce": {"loss_type": "ce"},
    "lk_alpha": {"loss_type": "lk_alpha"},
    "lk_lambda": {"loss_type": "lk_lambda"},
    "classic": {"model_init_kwargs": {"fc_norm": False, "norm_output": False}},
    "top_features": {"model_init_kwargs": {"eagle_aux_hidden_state_layer_ids": "last"}},
    "no_ttt": {"ttt_steps": 1},
    "ttt_warmup": {"ttt_warmup": 0.8},
    **{f"rows_{share}": {"ttt_warmup": 0.8, "ttt_row_share": share / 100} for share in (60, 40)},
    "sampled": {"ttt_warmup": 0.8, "sampled_vocab_size": 1024},
    "sampled_rows_60": {"ttt_warmup": 0.8, "sampled_vocab_size": 1024, "ttt_row_share": 0.6},
    "echo_2": {"ttt_warmup": 0.8, "sampled_vocab_size": 1024, "ttt_row_share": 0.6, "echo_factor": 2},
    "adamw": {"use_muon": False},
    "adamw_1e-3": {"use_muon": False, "learning_rate": 1e-3},
    "same_lr": {"adamw_learning_rate": "learning_rate"},
    "race": {"loss_type": "race"},
    **{f"batch_{size}": {"ttt_warmup": 0.8, "per_device_train_batch_size": size} for size in (1, 2, 4)},
    "rollouts": ROLLOUTS,
    "rollouts_without_rejected": {**ROLLOUTS, "rollout_rejected_weight": 0.0},
    "rollouts_greedy": {**ROLLOUTS, "rollout_temperature": 0.0},
}

# Arguments that change no result.
UNRELATED = {"json", "output_dir", "choices", "seeds"}


def train(target, tokenizer, dataset, choice: dict, seed: int, args):
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    settings = {
        "ttt_steps": args.ttt_steps,
        "ttt_warmup": args.ttt_warmup,
        "learning_rate": args.learning_rate,
        "per_device_train_batch_size": args.batch_size,
        **choice,
    }
    if settings.get("adamw_learning_rate") == "learning_rate":
        settings["adamw_learning_rate"] = args.learning_rate
    init = {"model_type": "qwen3", **settings.pop("model_init_kwargs", {})}
    if init.get("eagle_aux_hidden_state_layer_ids") == "last":
        init["eagle_aux_hidden_state_layer_ids"] = [num_layers - 1]
    tokens_per_step = settings["per_device_train_batch_size"] * args.max_length
    if args.minutes is None:
        drafting_steps = tokens_per_step * mean_steps(settings["ttt_steps"], settings["ttt_warmup"])
        settings["max_steps"] = int(args.compute / drafting_steps)
    else:  # the time ends it
        settings |= BY_TIME
    with tempfile.TemporaryDirectory() as folder:
        trainer = (Eagle3Trainer if args.minutes is None else TimedEagle3Trainer)(
            model=None,
            target_model=target,
            args=Eagle3TrainingArguments(
                folder,
                model_init_kwargs=init,
                draft_vocab_size=args.draft_vocab_size,
                max_length=args.max_length,
                bf16=args.bf16,
                use_cpu=not torch.cuda.is_available(),
                disable_tqdm=True,
                seed=seed,
                **SHORT,
                **settings,
            ),
            train_dataset=dataset,
            processing_class=tokenizer,
        )
        if args.minutes is None:
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        else:
            one_thread = torch.get_num_threads() == 1 and not torch.cuda.is_available()
            clock = time.process_time if one_thread else time.monotonic
            train_for(trainer, TimeBudget(args.minutes, "Draft", clock=clock))
    return trainer.draft.to(target.dtype), trainer.state.global_step * tokens_per_step


def acceptance_length(
    target, draft, prompts: list[list[int]], temperature: float, max_new_tokens: int, seed: int = 0
) -> float:
    """Pooled, with the whole tree in every step; sampling from all tokens."""
    draft.generation_config.tree_policy, draft.generation_config.assistant_confidence_threshold = "static", 0.0
    sampling = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    lengths = []
    set_seed(seed)
    for prompt in prompts:
        inputs = torch.tensor([prompt], device=target.device)
        target.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            assistant_model=draft,
            max_new_tokens=max_new_tokens,
            **sampling,
        )
        lengths += draft.last_generation.accepted_lengths
    return statistics.mean(lengths)


def table(results: list[dict]) -> str:
    lines = [
        "| choice | seeds | tokens | acceptance length, T=0 | T=1 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for choice in dict.fromkeys(result["choice"] for result in results):
        runs = [result for result in results if result["choice"] == choice]
        columns = [
            f"{statistics.mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"
            for values in ([run[key] for run in runs] for key in ("acceptance_length_0", "acceptance_length_1"))
        ]
        tokens = round(statistics.mean(run["tokens"] for run in runs))
        lines.append(f"| {choice} | {len(runs)} | {tokens:,} | {columns[0]} | {columns[1]} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Folder or Hub id")
    parser.add_argument("--dataset", required=True, help='JSON Lines file of {"text": "..."} to train on')
    parser.add_argument("--prompts", required=True, help='Held-out prompts, one {"prompt": "..."} a line')
    parser.add_argument("--json", required=True, help="Where results are kept")
    parser.add_argument("--output_dir", help="Where drafts go, if they are to be kept")
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--compute", type=int, default=450_000, help="Tokens times drafting steps of each training")
    parser.add_argument("--minutes", type=float, help="Trains for so long instead, whatever the compute")
    parser.add_argument("--ttt_steps", type=int, default=3)
    parser.add_argument("--ttt_warmup", type=float, default=0.0, help="Of choices that say nothing else")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--draft_vocab_size", type=int, default=2048)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--num_prompts", type=int, default=20)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto", help="Dtype of the target")
    parser.add_argument("--bf16", action="store_true", help="Train in mixed precision")
    args = parser.parse_args()

    dataset = load_dataset("json", data_files=args.dataset, split="train")
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = load_prompts(args.prompts, tokenizer, args.num_prompts)
    path = Path(args.json)
    results = json.loads(path.read_text()) if path.exists() else []
    settings = {name: value for name, value in vars(args).items() if name not in UNRELATED}
    for result in results:
        if difference := what_differs(result.get("settings"), settings):
            raise SystemExit(f"{path} has results of other settings: {difference}. Choose another file.")
    done = {(result["choice"], result["seed"]) for result in results}
    for seed in args.seeds:
        for choice in args.choices:
            if (choice, seed) in done:
                continue
            draft, num_tokens = train(target, tokenizer, dataset, CHOICES[choice], seed, args)
            if args.output_dir is not None:
                draft.save_pretrained(Path(args.output_dir) / f"{choice}-{seed}")
            run = {"choice": choice, "seed": seed, "tokens": num_tokens, "settings": settings}
            for temperature in (0, 1):
                run[f"acceptance_length_{temperature}"] = acceptance_length(
                    target, draft.eval(), prompts, temperature, args.max_new_tokens
                )
            results.append(run)
            path.write_text(json.dumps(results, indent=2))
            print(results[-1], flush=True)
    print(table(results))


if __name__ == "__main__":
    main()

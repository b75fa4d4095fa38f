# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
r"""
Computes what training a draft will take, from the sizes of the models. Nothing is measured.

    python experiments/training_cost.py --target Qwen/Qwen3-8B --draft_vocab_size 32000 --tokens 5e8 \
        --tflops 989 --utilization 0.4

Each token takes two operations for each weight in forward, and four more in backward for each trained weight. Attention,
the optimizer and the data are left out. `--tflops` is the GPU's peak in its data sheet (989 for an H100 SXM in bfloat16).
`--utilization` is the share of the peak that you expect.
"""

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_eagle3 import Eagle3ForSpeculation, Eagle3TrainingArguments
from hf_eagle3.scripts import folder_or_hub_id, run_script


def matrices(module) -> int:
    """Returns the number of weights in matrices, without embeddings."""
    tables = {id(each.weight) for each in module.modules() if isinstance(each, torch.nn.Embedding)}
    return sum(each.numel() for each in module.parameters() if each.dim() == 2 and id(each) not in tables)


def mean_steps(steps: int, warmup: float) -> float:
    """Returns the mean number of drafting steps in a training whose unroll grows."""
    return steps * (1 - warmup / 2) if steps > 1 else 1.0  # 1, 2, ..., `steps - 1`, for equally many steps each


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target",
        type=folder_or_hub_id,
        required=True,
        help="Folder or Hub id. Only the configuration is read",
    )
    parser.add_argument("--draft_vocab_size", type=int, default=32000)
    parser.add_argument("--layer_type", choices=["llama", "qwen3"], default="llama")
    parser.add_argument(
        "--tokens", type=float, default=5e8, help="Tokens to learn. A token that comes twice counts twice"
    )
    parser.add_argument("--ttt_steps", type=int, default=Eagle3TrainingArguments.ttt_steps)
    parser.add_argument("--ttt_warmup", type=float, default=Eagle3TrainingArguments.ttt_warmup)
    parser.add_argument("--tflops", type=float, required=True, help="Peak of one GPU, in the precision of training")
    parser.add_argument("--utilization", type=float, default=0.4)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()

    config = AutoConfig.from_pretrained(args.target)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.arange(min(args.draft_vocab_size, config.get_text_config().vocab_size))
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=ids, model_type=args.layer_type)
    # A head that is tied to the embeddings works like any other.
    head = target.get_output_embeddings().weight
    of_target = 2 * (matrices(target.base_model) + head.numel())
    fusing, step = draft.fc.weight.numel(), matrices(draft.layers) + draft.lm_head.weight.numel()
    steps = mean_steps(args.ttt_steps, args.ttt_warmup)
    of_draft = 6 * (fusing + step * steps)
    trained = sum(each.numel() for each in draft.parameters() if each.requires_grad)
    print(f"target: {target.num_parameters():,} parameters, {of_target / 1e9:.1f} GFLOP a token")
    print(
        f"draft: {trained:,} trained parameters, {of_draft / 1e9:.1f} GFLOP a token in {steps:.2f} drafting steps on average"
    )
    states = (draft.config.num_aux_hidden_states + 1) * draft.config.target_hidden_size
    for name, size in (("bfloat16", 2), ("float8_e4m3fn", 1)):
        print(
            f"stored features, {name}: {states * size / 1024:.0f} KiB a token, {states * size * args.tokens / 1e12:.2f} TB"
        )
    memory = target.num_parameters() * 2 + trained * 4 * 4  # weights, gradients and two moments in float32, at most
    print(
        f"weights, gradients and optimizer of one process: {memory / 2**30:.0f} GiB at most, and activations besides"
    )
    print(f"a checkpoint: {trained * 3 * 4 / 1e9:.1f} GB at most")
    print("\n| GPUs | tokens/s | hours | GPU hours |\n| --- | --- | --- | --- |")
    for num_gpus in args.gpus:
        rate = num_gpus * args.tflops * 1e12 * args.utilization / (of_target + of_draft)
        hours = args.tokens / rate / 3600
        print(f"| {num_gpus} | {rate:,.0f} | {hours:.1f} | {hours * num_gpus:.1f} |")


if __name__ == "__main__":
    run_script(main)

r"""
Measures time and memory of a step of training-time test, for sequences of several lengths.

    python experiments/training_step.py --target Qwen/Qwen3-0.6B --draft_vocab_size 8192 \
        --lengths 512 1024 2048 4096

Each length runs in its own process: forward and backward over one sequence of random tokens and random target states. The
target itself does not run. Memory is the peak, without the draft and the inputs. Then steps of the optimizers are timed:
torch's Muon, which computes in bfloat16, ours in float32, and both forms of AdamW.
"""

import argparse
import multiprocessing
import resource

import torch
from gpu_steps import median_ms
from transformers import AutoConfig, AutoModelForCausalLM

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.training.optimizer import Float32Muon, split_parameters
from hf_eagle3.training.ttt import TTTBatch, ttt_loss


def random_batch(draft, vocab_size: int, length: int, document_length: int) -> TTTBatch:
    """Returns a sequence of random tokens and random states of the target, on the draft's device."""
    device, config = draft.device, draft.config
    tokens = torch.randint(0, vocab_size, (1, length), device=device)
    return TTTBatch(
        input_ids=tokens,
        aux_hidden_states=torch.randn(
            1, length, config.num_aux_hidden_states * config.target_hidden_size, device=device
        ),
        target_logits=torch.randn(1, length, config.draft_vocab_size, device=device),
        target_mass=torch.ones(1, length, device=device),
        target_tokens=tokens,
        labels=tokens,
        documents=torch.arange(length, device=device)[None] // document_length,
        position_ids=torch.arange(length, device=device)[None] % document_length,
    )


def measure(args, length: int, results) -> None:
    config = AutoConfig.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_config(config)
    text_config = target.config.get_text_config()
    draft = (
        Eagle3ForSpeculation.from_target(target, draft_token_ids=range(args.draft_vocab_size)).float().to(args.device)
    )
    target.model.layers = None  # only its embedding is needed
    draft.borrow_embeddings(target.to(args.device))
    batch = random_batch(draft, text_config.vocab_size, length, args.document_length)
    draft.zero_grad()
    for parameter in draft.parameters():
        parameter.grad = torch.zeros_like(parameter)
    on_gpu = args.device != "cpu"
    before = torch.cuda.memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def step():
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.bf16):
            ttt_loss(draft, batch, args.ttt_steps, row_share=args.row_share).loss_sums.sum().backward()

    seconds = median_ms(step, draft.device, args.repeats, warmups=0) / 1000
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results.put((seconds, (peak - before) / 2**20))


def step_of(name: str, matrices: list, others: list):
    """Returns an optimizer's `step`, for parameters that have gradients."""
    muon = Float32Muon if name == "Muon, float32" else torch.optim.Muon
    if name.startswith("Muon"):
        return muon(matrices, adjust_lr_fn="match_rms_adamw").step
    return torch.optim.AdamW(others, fused=name == "AdamW, fused" or None).step


def seconds_of(name: str, args) -> float:
    """Returns the median time of an optimizer's step, in seconds."""
    target = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.target))
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=range(args.draft_vocab_size)).float()
    matrices, others = split_parameters(draft.to(args.device).named_parameters(), exclude=("lm_head",))
    for weight in (*matrices, *others):
        weight.grad = torch.randn_like(weight)
    return median_ms(step_of(name, matrices, others), matrices[0].device, args.repeats) / 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Folder or Hub id; only its configuration is read")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument(
        "--document_length", type=int, default=512, help="Tokens attend within documents of this length"
    )
    parser.add_argument("--draft_vocab_size", type=int, default=2048)
    parser.add_argument("--ttt_steps", type=int, default=7)
    parser.add_argument("--row_share", type=float, default=1.0, help="See `ttt_row_share` of the trainer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    print("| tokens | seconds a step | tokens/s | peak memory, MiB |\n| --- | --- | --- | --- |")
    for length in args.lengths:
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        process = context.Process(target=measure, args=(args, length, results))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"Length {length} failed.")
        seconds, peak = results.get()
        print(f"| {length} | {seconds:.2f} | {length / seconds:.0f} | {peak:.0f} |", flush=True)
    for name in ("Muon, bfloat16", "Muon, float32", "AdamW, torch's default", "AdamW, fused"):
        print(f"A step of {name}: {seconds_of(name, args):.3f} s, {torch.get_num_threads()} threads", flush=True)


if __name__ == "__main__":
    main()

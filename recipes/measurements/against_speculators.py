# /// script
# dependencies = ["hf-eagle3[train]", "speculators"]
# ///
"""
Training-time test here and in the `speculators` package, on the same states of the same target: forward and backward
of a step, in float32, with its eager attention and loss.

    pip install speculators
    python recipes/measurements/against_speculators.py --target path/to/target --length 1024 --ttt_steps 3

Each measurement runs in a process of its own, the two taking turns. Memory is the peak beyond what there is before the
first step: weights, gradients and inputs.
"""

import argparse
import multiprocessing
import resource
import statistics
import time

import torch


def make_inputs(args, hidden_size: int, vocab_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(args.length)[None]
    return {
        "input_ids": torch.randint(vocab_size, (1, args.length), generator=generator),
        "aux": torch.randn(1, args.length, 3 * hidden_size, generator=generator),
        "last": torch.randn(1, args.length, hidden_size, generator=generator),
        "documents": positions // args.document_length,
        "position_ids": positions % args.document_length,
    }


def ours(args):
    from transformers import AutoModelForCausalLM

    from hf_eagle3 import Eagle3ForSpeculation
    from hf_eagle3.training.features import TargetStates
    from hf_eagle3.training.ttt import TTTBatch, ttt_loss

    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    config = target.config.get_text_config()
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=range(args.draft_vocab_size), model_type="qwen3")
    states = TargetStates(target, draft.resolve_aux_layer_ids(target))
    inputs = make_inputs(args, config.hidden_size, config.vocab_size)

    def step():
        logits, mass, tokens = states.distributions(inputs["last"], draft.draft_token_ids)
        batch = TTTBatch(
            input_ids=inputs["input_ids"],
            aux_hidden_states=inputs["aux"],
            target_logits=logits,
            target_mass=mass,
            target_tokens=tokens,
            labels=inputs["input_ids"],
            documents=inputs["documents"],
            position_ids=inputs["position_ids"],
        )
        outputs = ttt_loss(draft, batch, args.ttt_steps)
        return (outputs.loss_sums / outputs.num_rows).sum()

    return draft, step


def theirs(args):
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.core import Eagle3DraftModel
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(args.target)
    num_layers, vocab_size = config.num_hidden_layers, config.vocab_size
    inputs = make_inputs(args, config.hidden_size, vocab_size)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    draft = Eagle3DraftModel.from_training_args(
        config,
        t2d=torch.arange(vocab_size) < args.draft_vocab_size,
        d2t=torch.zeros(args.draft_vocab_size, dtype=torch.long),
        draft_vocab_size=args.draft_vocab_size,
        norm_before_residual=False,
        fc_norm=True,
        norm_output=True,
        ttt_steps=args.ttt_steps,
        target_layer_ids=[2, num_layers // 2, num_layers - 3],
        verifier_name_or_path=args.target,
        draft_attn_impl="eager",
    ).float()
    draft.lm_head.weight.requires_grad_(True)  # as here
    loss_config = resolve_loss_config("kl_div", "eager")

    def step():
        _, loss, _ = draft(
            hidden_states=inputs["aux"],
            input_ids=inputs["input_ids"].roll(-1),
            document_ids=inputs["documents"],
            loss_mask=torch.ones(1, args.length, dtype=torch.bool),
            position_ids=inputs["position_ids"],
            verifier_last_hidden_states=inputs["last"],
            ttt_steps=args.ttt_steps,
            loss_config=loss_config,
        )
        return loss

    return draft, step


def measure(make, args, results) -> None:
    draft, step = make(args)
    draft.train()
    for parameter in draft.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(args.steps + 1):
        start = time.perf_counter()
        step().backward()
        seconds.append(time.perf_counter() - start)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    num_trained = sum(parameter.numel() for parameter in draft.parameters() if parameter.requires_grad)
    results.put((args.length / statistics.median(seconds[1:]), memory / 1024, num_trained))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Folder or Hub id of a Qwen3 model")
    parser.add_argument("--length", type=int, default=1024, help="Tokens a step, in one packed row")
    parser.add_argument("--document_length", type=int, default=256)
    parser.add_argument("--draft_vocab_size", type=int, default=2048)
    parser.add_argument("--ttt_steps", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="Steps of each measurement, after one to warm up")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    context, runs = multiprocessing.get_context("spawn"), {"hf-eagle3": [], "speculators": []}
    for _ in range(args.repeats):
        for name, make in (("hf-eagle3", ours), ("speculators", theirs)):
            queue = context.Queue()
            process = context.Process(target=measure, args=(make, args, queue))
            process.start()
            process.join()
            if process.exitcode != 0:
                raise SystemExit(f"{name} failed.")
            runs[name].append(queue.get())
    print("| | tokens/s | ratio | peak memory, MiB | trained parameters |\n| --- | --- | --- | --- | --- |")
    for name, measured in runs.items():
        ratios = [mine[0] / other[0] for mine, other in zip(measured, runs["speculators"])]
        print(
            f"| {name} | {statistics.median(run[0] for run in measured):.0f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f}) | {statistics.median(run[1] for run in measured):.0f} | {measured[0][2]} |"
        )
    print(f"{args}, torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()

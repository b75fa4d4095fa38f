# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
"""
Correctness in low precision, and the time of a step and its parts, at real size without weights: nothing is
downloaded.

    python recipes/measurements/random_weights.py --output_dir outputs/qwen3-8b-random

makes a randomly initialised target of Qwen3-8B's size (another one's by `--target`, of which only the configuration is
read) and a draft for it, on a GPU in bfloat16, and writes `results.json` and `results.md`:

- greedy and sampled text with the draft against plain `generate`. The draft's vocabulary is what the target writes
  most, so that it does get tokens accepted. Where two texts part, the target's logits of the two tokens must be nearly
  tied.
- a forward over 1 to 64 tokens after a context, a drafting level, and where a whole step's time goes.
- plain steps and steps with the draft, eager and compiled (with a static cache), beside the time that reading the
  weights of target and draft once takes at best, measured by a copy of as many bytes; and what tokens per second
  follow for acceptance lengths from 2 to 6.

What depends on trained weights (acceptance, speed-up) it cannot say.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from low_precision import compare
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig, DynamicCache, set_seed

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.environment import environment
from hf_eagle3.evaluation.benchmark import synchronize
from hf_eagle3.evaluation.memory import peak_memory, reset_peak_memory
from hf_eagle3.evaluation.profile import format_profile, profile_steps


QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def make_pairing(args):
    """A random target, and a draft whose vocabulary is what that target writes most."""
    set_seed(args.seed)
    config = AutoConfig.from_pretrained(args.target) if args.target else AutoConfig.for_model("qwen3", **QWEN3_8B)
    config.eos_token_id = None
    with torch.device(args.device):
        target = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
        prompts = torch.randint(0, config.get_text_config().vocab_size, (args.num_prompts, args.prompt_length))
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = None, 0
    text = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=64, do_sample=False)
    written = Counter(text[:, args.prompt_length :].flatten().tolist())
    frequent = [token for token, _ in written.most_common(args.draft_vocab_size)]
    others = (token for token in range(config.get_text_config().vocab_size) if token not in written)
    frequent += [next(others) for _ in range(args.draft_vocab_size - len(frequent))]
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=frequent).to(args.device, target.dtype).eval()
    draft.generation_config.tree_policy = "static"  # a tree in every step
    return target, draft, prompts


def check(target, draft, prompts, max_new_tokens: int) -> dict:
    """How many texts differ from plain generation's, and whether at near ties."""
    rows = [compare(target, draft, prompt[None], max_new_tokens) for prompt in prompts]
    noise = max(row["noise"] for row in rows)
    gaps = [abs(row["gap"]) for row in rows if "gap" in row]
    same_samples = 0
    for seed, prompt in enumerate(prompts):
        texts = []
        for assistance in ({}, {"assistant_model": draft}):
            set_seed(seed)
            texts.append(
                target.generate(prompt[None], max_new_tokens=max_new_tokens, do_sample=True, **assistance).tolist()
            )
        same_samples += texts[0] == texts[1]
    return {
        "texts": len(rows),
        "greedy_differing": len(gaps),
        "near_ties": sum(gap <= 2 * noise for gap in gaps),
        "largest_gap": max(gaps, default=None),
        "noise_of_the_target": noise,
        "same_samples": same_samples,
        "acceptance_length": statistics.mean(row["acceptance_length"] for row in rows),
    }


def median_ms(function, device, repeats: int) -> float:
    times = []
    for repeat in range(repeats + 3):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        if repeat >= 3:  # the first ones warm up
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


@torch.no_grad()
def time_parts(target, draft, args) -> dict:
    """Milliseconds, medians."""
    device, vocab_size = target.device, target.config.get_text_config().vocab_size
    cache = DynamicCache(config=target.config)
    target(torch.randint(0, vocab_size, (1, args.context), device=device), past_key_values=cache, logits_to_keep=1)

    def forward(num_tokens):
        tokens = torch.randint(0, vocab_size, (1, num_tokens), device=device)

        def once():
            target(tokens, past_key_values=cache)
            cache.crop(-num_tokens)

        return once

    verify = {size: median_ms(forward(size), device, args.repeats) for size in args.sizes}
    width = draft.generation_config.branching_factor or 8
    hidden_states = torch.randn(1, width, draft.config.hidden_size, device=device, dtype=draft.dtype)
    draft_cache = DynamicCache()

    def draft_once(num_rows):
        inputs = {"hidden_states": hidden_states[:, :1].expand(-1, num_rows, -1)}
        draft(inputs_embeds=inputs["hidden_states"], cache=draft_cache, logits_to_keep=1, **inputs)

    draft_once(args.context)

    def level():
        draft(inputs_embeds=hidden_states, hidden_states=hidden_states, cache=draft_cache)
        draft_cache.crop(args.context - draft_cache.get_seq_length())

    weights = (*target.parameters(), *draft.parameters())
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    source = torch.empty(min(num_bytes, 4 << 30) // 2, dtype=torch.int16, device=device)
    copied = torch.empty_like(source)
    copy = median_ms(lambda: copied.copy_(source), device, args.repeats)
    # A copy reads and writes; a step only reads.
    floor = copy / 2 * num_bytes / (source.numel() * 2)
    return {"verify": verify, "draft_level": median_ms(level, device, args.repeats), "weights_floor": floor}


def time_steps(target, draft, prompt, args) -> dict:
    """Milliseconds of a plain step and of one with the draft, medians: eager and, with `--compile`, compiled."""
    ways = {"eager": {}}
    if args.compile:
        config = CompileConfig(mode=args.compile, backend=args.backend)
        config._compile_all_devices = True
        ways["compiled"] = {"cache_implementation": "static", "compile_config": config}
    inputs = {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt)[None], "do_sample": False}
    steps = {}
    for name, way in ways.items():
        for kind, assistance in (("plain", {}), ("with the draft", {"assistant_model": draft})):
            generate = partial(target.generate, **inputs, **assistance, **way)
            # The longer first: static caches stay as long, so that nothing is compiled for the shorter.
            whole = median_ms(partial(generate, max_new_tokens=args.max_new_tokens), target.device, args.repeats)
            num_steps = len(draft.last_generation.accepted_lengths) if assistance else args.max_new_tokens - 1
            prompt_ms = median_ms(partial(generate, max_new_tokens=1), target.device, args.repeats)
            steps[f"{name}, {kind}"] = (whole - prompt_ms) / num_steps
    return steps


def report(results: dict) -> str:
    correctness, parts = results["correctness"], results["parts"]
    plain, floor = parts["verify"][min(parts["verify"])], parts["weights_floor"]
    ways = [way.removesuffix(", plain") for way in results["steps"] if way.endswith(", plain")]
    with_draft = {way: results["steps"][f"{way}, with the draft"] for way in ways}
    lines = [
        f"{results['num_parameters'] / 1e9:.2f} B parameters, {results['arguments']['dtype']}; {results['environment']}",
        "",
        f"Correctness: {correctness['texts'] - correctness['greedy_differing']}/{correctness['texts']} greedy texts are those of plain "
        f"generate, {correctness['near_ties']}/{correctness['greedy_differing']} of the others part at near ties; "
        f"{correctness['same_samples']}/{correctness['texts']} samples are the same. "
        f"Acceptance length {correctness['acceptance_length']:.2f}.",
        "",
        "| forward over tokens | ms | of one token's |",
        "| --- | --- | --- |",
        *(f"| {size} | {ms:.2f} | {ms / plain:.2f} |" for size, ms in parts["verify"].items()),
        "",
        f"A drafting level takes {parts['draft_level']:.2f} ms; reading the weights of target and draft once, at the speed of a copy, "
        f"{floor:.2f} ms.",
        "",
        "| step | ms | of that |",
        "| --- | --- | --- |",
        *(f"| {name} | {ms:.2f} | {ms / floor:.2f} |" for name, ms in results["steps"].items()),
        "",
        "The parts of an eager step, each waiting for what it has started:",
        "",
        format_profile(results["profile"]),
        "",
        "Tokens/s that follow, and the speed-up over plain steps of the same kind:",
        "",
        "| acceptance length | " + " | ".join(ways) + " |",
        "| --- |" + " --- |" * len(ways),
        *(
            f"| {tau} | "
            + " | ".join(
                f"{1000 * tau / step:.0f} ({tau * results['steps'][f'{way}, plain'] / step:.2f}x)"
                for way, step in with_draft.items()
            )
            + " |"
            for tau in range(2, 7)
        ),
    ]
    if results["peak_memory"] is not None:
        lines += ["", f"Peak memory {results['peak_memory']:.0f} MiB."]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--target", help="Folder or Hub id whose configuration is taken, instead of Qwen3-8B's sizes")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--draft_vocab_size", type=int, default=32000)
    parser.add_argument("--num_prompts", type=int, default=8)
    parser.add_argument("--prompt_length", type=int, default=64)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 25, 32, 48, 64])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compile",
        metavar="MODE",
        default="reduce-overhead" if torch.cuda.is_available() else None,
        help="Mode of torch.compile; CPUs compile only if this is given",
    )
    parser.add_argument("--backend", default="inductor", help="Of torch.compile")
    args = parser.parse_args()
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)

    counts_memory = reset_peak_memory(torch.device(args.device))
    target, draft, prompts = make_pairing(args)
    results = {
        "arguments": vars(args),
        "environment": environment(args.device),
        "num_parameters": sum(weight.numel() for weight in target.parameters()),
        "correctness": check(target, draft, prompts, args.max_new_tokens),
        "parts": time_parts(target, draft, args),
        "steps": time_steps(target, draft, prompts[0], args),
        "profile": profile_steps(target, draft, [prompts[0].tolist()], args.max_new_tokens),
        "peak_memory": peak_memory(target.device) if counts_memory else None,
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    (folder / "results.md").write_text(report(results), encoding="utf-8")
    print(report(results) + f"\nWrote {folder / 'results.json'} and {folder / 'results.md'}")
    correctness = results["correctness"]
    if correctness["near_ties"] < correctness["greedy_differing"]:
        raise SystemExit("Some texts part where there is no near tie.")


if __name__ == "__main__":
    main()

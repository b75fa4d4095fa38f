"""
What does a step cost? A part of `gpu_report.py`: a model of Qwen3-8B's size with random weights, made on the device.

Random weights say nothing about acceptance or speed-up.
"""

import contextlib
import statistics
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from step_profile import format_profile, profile_steps
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig, DynamicCache

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.evaluation.benchmark import synchronize
from hf_eagle3.evaluation.memory import peak_memory, reset_peak_memory
from hf_eagle3.remote_code import attention_eagle3
from hf_eagle3.remote_code.policy_eagle3 import StaticPolicy
from hf_eagle3.remote_code.tree_eagle3 import Plan


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
SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def make_pairing(config, device: str, dtype: torch.dtype, draft_vocab_size: int):
    """Returns a random target and an untrained draft."""
    config.eos_token_id = None
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = None, 0
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=range(draft_vocab_size)).to(device, dtype).eval()
    draft.generation_config.tree_policy = "static"  # a tree in every step
    return target, draft


def median_ms(function, device: torch.device, repeats: int, warmups: int = 1) -> float:
    times = []
    for repeat in range(repeats + warmups):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        if repeat >= warmups:
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def ceilings(device: torch.device, tiny: bool) -> dict:
    """Returns what the device can do: GB/s of a copy (read and written), and TFLOP/s of a matrix product in bfloat16."""
    source = torch.randint(0, 99, (1 << (20 if tiny else 31),), dtype=torch.int8, device=device)
    copied, size = torch.empty_like(source), 256 if tiny else 8192
    copy_ms = median_ms(lambda: copied.copy_(source), device, 10, 3)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    product_ms = median_ms(lambda: a @ b, device, 10, 3)
    return {"copy_gb_per_s": 2 * source.numel() / copy_ms / 1e6, "tflop_per_s": 2 * size**3 / product_ms / 1e9}


@torch.no_grad()
def forwards(target, draft, sizes, context: int, repeats: int) -> dict:
    """Returns milliseconds of an eager forward of the target, for each number of tokens after a context, and of a drafting level."""
    device, vocab_size = target.device, target.config.vocab_size
    cache = DynamicCache(config=target.config)
    target(torch.randint(0, vocab_size, (1, context), device=device), past_key_values=cache, logits_to_keep=1)

    def forward(tokens):
        target(tokens, past_key_values=cache)
        cache.crop(-tokens.shape[1])

    verify = {
        size: median_ms(partial(forward, torch.randint(0, vocab_size, (1, size), device=device)), device, repeats, 3)
        for size in sizes
    }
    hidden_states = torch.randn(1, 8, draft.config.hidden_size, device=device, dtype=draft.dtype)
    draft_cache = DynamicCache()
    prompt = hidden_states[:, :1].expand(-1, context, -1)
    draft(inputs_embeds=prompt, hidden_states=prompt, cache=draft_cache, logits_to_keep=1)

    def level():
        draft(inputs_embeds=hidden_states, hidden_states=hidden_states, cache=draft_cache)
        draft_cache.crop(-hidden_states.shape[1])

    return {"target": verify, "draft_level": median_ms(level, device, repeats, 3)}


def step_ms(generate, draft, device, tokens: int, repeats: int) -> dict:
    """Returns milliseconds of a step, and how often the host waits for the device in one. Both come from calls of two lengths."""

    def measure(length):
        milliseconds = median_ms(partial(generate, max_new_tokens=length), device, repeats)
        steps = length - 1 if draft is None else draft.last_generation.target_forwards - 1
        return milliseconds, steps, count_waits(partial(generate, max_new_tokens=length), device)

    # The longer call comes first. Its static cache then serves the shorter one, which compiles nothing.
    long, short = measure(tokens), measure(4)
    steps = long[1] - short[1]
    waits = None if long[2] is None else (long[2] - short[2]) / steps
    return {"ms": (long[0] - short[0]) / steps, "waits": waits}


def count_waits(function, device: torch.device) -> int | None:
    """Returns how often the host waits for a CUDA device while `function` runs: the calls that `torch.cuda` reports."""
    if device.type != "cuda":
        return None
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return sum("synchronizing CUDA operation" in str(each.message) for each in caught)


def on_device(function, device: torch.device) -> dict | None:
    """Returns what the device does while `function` runs: milliseconds in kernels, their number, and the longest of them."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        start = time.perf_counter()
        function()
        synchronize(device)
        wall = 1000 * (time.perf_counter() - start)
    return {"wall_ms": wall, **kernels(profiled)}


def kernels(profiled, steps: int = 1) -> dict:
    """Returns milliseconds a step in kernels, their number, and the longest of them, of a profile of some steps."""
    total, number, by_name, launches = 0.0, 0, Counter(), Counter()
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total += event.time_range.elapsed_us() / 1000
            number += 1
            by_name[event.name[:80]] += event.time_range.elapsed_us() / 1000
        elif event.name.startswith("cuda"):
            launches[event.name] += 1
    longest = {name: round(ms / steps, 3) for name, ms in by_name.most_common(16)}
    return {
        "busy_ms": total / steps,
        "kernels": number / steps,
        "launches": dict(launches.most_common(8)),
        "longest": longest,
    }


def hot_functions(function, number: int = 30) -> list[str]:
    """Returns where the host spends its time. Each function has its own milliseconds, and those with its callees."""
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    profiler.runcall(function)
    stats = pstats.Stats(profiler).stats
    rows = sorted(stats.items(), key=lambda entry: -entry[1][2])[:number]
    return [
        f"{1000 * own:.1f} {1000 * whole:.1f} {calls} {'/'.join(file.split('/')[-2:])}:{line}:{name}"
        for (file, line, name), (_, calls, own, whole, _) in rows
    ]


def small_steps(args, batch_size: int, context: int, tokens: int, repeats: int) -> dict:
    """
    Returns milliseconds of a step of plain `generate`, and of ours without trees and with trees of 24 nodes, for a random
    target of SmolLM2-135M's size, where the host is what is slow. Next to no drafted token is accepted.
    """
    device = torch.device(args.device)
    config = AutoConfig.for_model("llama", **(TINY if args.tiny else SMOLLM2_135M))
    target, draft = make_pairing(config, args.device, torch.float32 if args.tiny else torch.bfloat16, 32)
    draft.generation_config.num_assistant_tokens = 24
    ids = torch.randint(0, config.vocab_size, (batch_size, context), device=device)
    results = {}
    for name in ("plain", "no trees", "trees"):
        for kind, sampling in {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}.items():
            assistance = {} if name == "plain" else {"assistant_model": draft}
            generate = partial(target.generate, ids, attention_mask=torch.ones_like(ids), **sampling, **assistance)
            no_tree = mock.patch.object(StaticPolicy, "plan", lambda self, *args: Plan())
            with no_tree if name == "no trees" else contextlib.nullcontext():
                results[f"{name}, {kind}"] = {
                    "ms": step_ms(generate, None if name == "plain" else draft, device, tokens, repeats)["ms"],
                    "functions": hot_functions(partial(generate, max_new_tokens=tokens)),
                }
    return results


def way_of(mode: str, tiny: bool) -> dict:
    if mode == "eager":
        return {}
    config = CompileConfig(backend="eager", mode=None) if tiny else CompileConfig()
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def measure(args, sections) -> None:
    device, tiny = torch.device(args.device), args.tiny
    sections.measure("ceilings", ceilings, device, tiny)
    config = AutoConfig.from_pretrained(args.config) if args.config else None
    config = config or AutoConfig.for_model("qwen3", **(TINY if tiny else QWEN3_8B))
    dtype = torch.float32 if tiny else torch.bfloat16
    target, draft = make_pairing(config, args.device, dtype, 32 if tiny else 32000)
    context, tokens, repeats = (16, 12, 1) if tiny else (256, 28, 3)
    weights = {
        name: sum(each.nbytes for each in model.parameters()) for name, model in (("target", target), ("draft", draft))
    }
    embedding = target.get_input_embeddings().weight.nbytes  # a step reads only a few rows of it
    sections.measure(
        "model",
        dict,
        parameters=sum(each.numel() for each in target.parameters()),
        target_bytes=weights["target"] - embedding,
        draft_bytes=weights["draft"],
        dtype=str(dtype).removeprefix("torch."),
        context=context,
    )
    sections.measure("forwards", forwards, target, draft, [1, 9, 25, 61], context, 2 if tiny else 10, seconds=5)

    def prompts(batch_size, length=context):
        ids = torch.randint(0, target.config.vocab_size, (batch_size, length), device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}

    def step(mode, nodes, batch_size=1, length=context):
        arguments = {**prompts(batch_size, length), **way_of(mode, tiny)}
        if nodes == 0:
            return step_ms(partial(target.generate, **arguments), None, device, tokens, repeats)
        draft.generation_config.num_assistant_tokens = nodes
        generate = partial(target.generate, **arguments, assistant_model=draft)
        return step_ms(generate, draft, device, tokens, repeats)

    def steps(mode, batch_size, trees, seconds):
        for nodes in trees:
            name = f"{mode}, batch {batch_size}, " + (f"{nodes} nodes" if nodes else "plain")
            sections.measure(name, step, mode, nodes, batch_size, seconds=0 if tiny else seconds)

    def long_step(nodes, packs_heads=True):
        repeats_keys = mock.patch.object(attention_eagle3, "_can_be_packed", lambda *_: False)
        with contextlib.nullcontext() if packs_heads else repeats_keys:
            return step("eager", nodes, length=32 if tiny else 8192)

    def call(mode, nodes, length):
        draft.generation_config.num_assistant_tokens = nodes or 24
        assistance = {"assistant_model": draft} if nodes else {}
        return partial(target.generate, **prompts(1), **way_of(mode, tiny), **assistance, max_new_tokens=length)

    def profile(mode, nodes):
        function = call(mode, nodes, min(tokens, 10))
        function()
        facts = on_device(function, device)
        if facts is not None:
            # A plain call makes one forward for each token.
            facts["steps"] = draft.last_generation.target_forwards - 1 if nodes else min(tokens, 10) - 1
        return {"device": facts, "functions": hot_functions(function)}

    prompt, compiled = prompts(1)["input_ids"][0].tolist(), way_of("compiled", tiny)

    def parts_of(way):
        draft.generation_config.num_assistant_tokens = 24
        return profile_steps(target, draft, [prompt], tokens, **way)

    for batch_size in (2,) if tiny else (1, 16, 64):
        sizes = (16, 8, 1) if tiny else (64, 24, 1)
        name = f"a small model's steps, batch {batch_size}"
        sections.measure(name, small_steps, args, batch_size, *sizes, seconds=0 if tiny else 10)
    steps("eager", 1, (0, 24), 15)
    sections.measure("parts of an eager step", parts_of, {}, seconds=8)
    steps("eager", 1, (8, 60), 15)
    for name, arguments in {"plain": (0,), "24 nodes": (24,), "24 nodes with keys for each head": (24, False)}.items():
        sections.measure(f"eager, long context, {name}", long_step, *arguments, seconds=0 if tiny else 20)
    for batch_size in (2,) if tiny else (8, 32):
        steps("eager", batch_size, (0, 24, 8), 15)
    # On an H100 the plain step compiled in about 55 s. A step with a tree took longer than 105 s, with draft and cache.
    steps("compiled", 1, (24,), 150)
    steps("compiled", 1, (0,), 70)
    has_compiled = "compiled, batch 1, 24 nodes" in sections.results
    if has_compiled:
        sections.measure("parts of a compiled step", parts_of, compiled, seconds=8)
        if not tiny:
            steps("compiled", 1, (8, 60), 150)
            steps("compiled", 8, (0, 24), 150)
    # Profilers come last: PyTorch says that CUDA graphs may fail after one (`TEARDOWN_CUPTI` in its sources).
    sections.measure("eager profile", profile, "eager", 24, seconds=10)
    if has_compiled:
        sections.measure("compiled profile", profile, "compiled", 24, seconds=10)
        sections.measure("compiled plain profile", profile, "compiled", 0, seconds=10)

    def memory():
        call("eager", 24, tokens)()
        return peak_memory(device)

    if reset_peak_memory(device):
        sections.measure("peak memory", memory)


def render(results: dict) -> str:
    lines, floor = [], {}
    if "ceilings" in results:
        copy = results["ceilings"]["copy_gb_per_s"]
        lines += [
            f"The device copies {copy:.0f} GB/s (read and written) and multiplies matrices at "
            f"{results['ceilings']['tflop_per_s']:.0f} TFLOP/s in bfloat16.",
            "",
        ]
        if "model" in results:
            model = results["model"]
            floor = {name: model[f"{name}_bytes"] / copy / 1e6 for name in ("target", "draft")}
            lines += [
                f"A random model of {model['parameters'] / 1e9:.2f} B parameters in {model['dtype']}, after a context of "
                f"{model['context']} tokens. Reading its weights once takes {floor['target']:.2f} ms at that speed, and reading "
                f"the draft's takes {floor['draft']:.2f} ms.",
                "",
            ]
    if "forwards" in results:
        verify = results["forwards"]["target"]
        lines += ["| eager forward over tokens | ms |", "| --- | --- |"]
        lines += [f"| {size} | {ms:.2f} |" for size, ms in verify.items()]
        lines += [f"| a level of the draft (8 nodes) | {results['forwards']['draft_level']:.2f} |", ""]
    ways = {name: result for name, result in results.items() if isinstance(result, dict) and "ms" in result}
    if ways:
        lines += ["| step | ms | over the floor | over the plain step | waits of the host |", "| --- |" + " --- |" * 4]
        for name, result in ways.items():
            plain = ways.get(name.rpartition(", ")[0] + ", plain")
            over_floor = f"{result['ms'] / floor['target']:.2f}" if floor else "-"
            over_plain = f"{result['ms'] / plain['ms']:.2f}" if plain else "-"
            waits = "-" if result["waits"] is None else f"{result['waits']:.1f}"
            lines.append(f"| {name} | {result['ms']:.2f} | {over_floor} | {over_plain} | {waits} |")
        lines += ["", "What follows at batch 1 with 24 nodes: tokens per second, and the speed-up:", ""]
        modes = [mode for mode in ("eager", "compiled") if f"{mode}, batch 1, 24 nodes" in ways]
        lines += ["| acceptance length | " + " | ".join(modes) + " |", "| --- |" + " --- |" * len(modes)]
        for tau in range(2, 7):
            cells = []
            for mode in modes:
                tree, plain = ways[f"{mode}, batch 1, 24 nodes"]["ms"], ways[f"{mode}, batch 1, plain"]["ms"]
                cells.append(f"{1000 * tau / tree:.0f} ({tau * plain / tree:.2f}x)")
            lines.append(f"| {tau} | " + " | ".join(cells) + " |")
        lines.append("")
    for name, result in results.items():
        if name.startswith("a small model's steps"):
            each = ", ".join(f"{way} {step['ms']:.2f} ms" for way, step in result.items())
            lines += [f"{name.capitalize()} (a random target of SmolLM2-135M's size): {each}.", ""]
    for mode in ("eager", "compiled"):
        if f"parts of an {mode} step" in results or f"parts of a {mode} step" in results:
            profiled = results.get(f"parts of an {mode} step") or results[f"parts of a {mode} step"]
            lines += [
                f"Parts of a step, {mode}, with a synchronization after each part:",
                "",
                format_profile(profiled),
                "",
            ]
    for name in ("eager profile", "compiled profile", "compiled plain profile"):
        facts = (results.get(name) or {}).get("device")
        if facts:
            steps = facts["steps"]
            lines += [
                f"{name.capitalize()}: kernels run for {facts['busy_ms'] / steps:.2f} ms of a step's "
                f"{facts['wall_ms'] / steps:.2f} ms (under the profiler), {facts['kernels'] / steps:.0f} of them.",
                "",
            ]
    if results.get("peak memory"):
        lines.append(f"Peak memory {results['peak memory']:.0f} MiB.")
    return "\n".join(lines).rstrip()


def plot(results: dict, folder: Path) -> list[Path]:
    """Plots milliseconds of each kind of step, as bars."""
    from matplotlib.figure import Figure

    ways = {name: result["ms"] for name, result in results.items() if isinstance(result, dict) and "ms" in result}
    if not ways:
        return []
    figure = Figure(figsize=(7, 1 + 0.3 * len(ways)))
    axis = figure.subplots()
    axis.barh(list(ways), list(ways.values()), color=["#9aa5b1" if "plain" in name else "#e67e22" for name in ways])
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds a step")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / "steps.png", dpi=150)
    return [folder / "steps.png"]

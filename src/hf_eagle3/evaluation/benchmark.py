"""Times plain generation and methods that speed it up, on the same prompts, in turns."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from transformers import BatchFeature, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging

from ..remote_code.outputs_eagle3 import Eagle3GenerationStats
from ..tokenizer import padded_inputs, padding_token
from .memory import peak_memory, reset_peak_memory
from .results import METHODS, OTHER_DRAFTS, OURS, BenchmarkResults, speedup


if TYPE_CHECKING:
    from ..data.images import ImageReader

logger = logging.get_logger(__name__)

# Tokens. A prompt with images has `input_ids`, and what [`ImageReader`] reads.
Prompt = list[int] | dict[str, Any]

# The other methods are transformers' own, which take one prompt at a time.
IN_BATCHES = frozenset(("plain", *OTHER_DRAFTS, *OURS))


def run_benchmark(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft: PreTrainedModel | None,
    tasks: Mapping[str, Sequence[Prompt]],
    methods: Sequence[str] = ("plain", "prompt-lookup", "eagle3"),
    temperatures: Sequence[float] = (0.0, 1.0),
    batch_sizes: Sequence[int] = (1,),
    max_new_tokens: int = 128,
    repeats: int = 3,
    seed: int = 0,
    sampling: dict[str, float] | None = None,
    call: dict | None = None,
    assistant: PreTrainedModel | None = None,
    drafts: Mapping[str, PreTrainedModel] | None = None,
    results: BenchmarkResults | None = None,
    save: Callable[[BenchmarkResults], None] = lambda results: None,
    images: "ImageReader | None" = None,
) -> BenchmarkResults:
    """
    Times each method on each prompt, or on each batch of prompts. Methods take turns batch by batch, so if the machine
    becomes slow, all methods do. Seeds are the same for all.

    At temperatures above 0 the call is `generate(do_sample=True, temperature=..., **sampling)`. Settings that are not in
    `sampling` come from the target's generation config, or are transformers' defaults (`top_k=50`). Pass
    `{"top_k": 0, "top_p": 1.0}` to sample from the whole distribution, which is harder to draft for.

    Args:
        target, tokenizer: The model, and its tokenizer.
        draft ([`Eagle3ForSpeculation`], *optional*):
            The draft of `eagle3`, `eagle3-no-lookup` (trees only) and `eagle3-chain` (one child for each node).
        tasks (`Mapping[str, Sequence[Prompt]]`): Tokenized prompts, by task; see [`~hf_eagle3.evaluation.load_prompts`].
        methods (`Sequence[str]`):
            Some of `METHODS`. `mtp` needs a target with MTP layers. A method that the target does not take is left out,
            with the reason in `results.run["left_out"]`.
        temperatures (`Sequence[float]`, *optional*): 0 is greedy.
        batch_sizes (`Sequence[int]`, *optional*):
            Prompts in a call. Transformers' own methods are measured at batch size 1 only.
        max_new_tokens (`int`, *optional*, defaults to `128`): New tokens for each prompt.
        repeats (`int`, *optional*, defaults to `3`): How often everything is measured, each time with other seeds.
        seed (`int`, *optional*, defaults to `0`): The seed of the first prompt in the first repeat.
        sampling (`dict`, *optional*): `top_k`, `top_p` and other settings of sampling. See above.
        call (`dict`, *optional*):
            More arguments of `generate`, for all methods, such as `{"cache_implementation": "static"}`.
        assistant (`PreTrainedModel`, *optional*): The small model of the method `assistant`.
        drafts (`Mapping[str, PreTrainedModel]`, *optional*): More drafts by method, such as those of `hf_eagle3.baselines`.
        results (`BenchmarkResults`, *optional*): The results of an interrupted run. They are not measured again.
        save (`Callable`, *optional*): Called with the results after each repeat.
        images ([`ImageReader`], *optional*): Reads the images of prompts.

    Returns:
        `BenchmarkResults`: One measurement for each task, batch size, temperature, repeat and method.

    Raises:
        ValueError: if a method is unknown or lacks its model, or a task has fewer prompts than a batch.
    """
    drafts = {method: draft for method in OURS if draft is not None} | dict(drafts or {})
    methods = check_methods(methods, drafts, assistant)
    check_batches(tasks, batch_sizes)
    results = results or BenchmarkResults({})
    left_out = results.run.setdefault("left_out", {})
    tokenizer.pad_token = padding_token(tokenizer, target.config.get_text_config(decoder=True).vocab_size)
    settings = {"max_new_tokens": max_new_tokens, "pad_token_id": tokenizer.pad_token_id, **(call or {})}
    settings["return_dict_in_generate"] = False  # some targets' generation configs say True
    generate = TimedGeneration(target, settings, sampling or {}, assistance_of(drafts, assistant))
    done = whole_repeats(results, methods)
    suited = {size: [method for method in methods if size == 1 or method in IN_BATCHES] for size in batch_sizes}
    calls = sum(
        math.ceil(len(prompts) / size) * len(suited[size]) for prompts in tasks.values() for size in batch_sizes
    )
    progress = tqdm(total=calls * len(temperatures) * repeats, desc="Benchmark")
    warm = set()
    for (task, prompts), batch_size in product(tasks.items(), batch_sizes):
        batches = [
            padded_inputs(target, tokenizer, prompts[start : start + batch_size], images)
            for start in range(0, len(prompts), batch_size)
        ]
        # A static cache keeps the length of its first call.
        longest = max(batches, key=lambda inputs: inputs["input_ids"].shape[1])
        for temperature, repeat in product(temperatures, range(repeats)):
            if (task, batch_size, temperature, repeat) in done:
                progress.update(len(batches) * len(suited[batch_size]))
                continue
            for method in suited[batch_size]:
                # With a static cache, each task may compile anew.
                kind = method, batch_size, temperature, task if settings.get("cache_implementation") else None
                if kind not in warm and method not in left_out:
                    warm.add(kind)
                    left_out |= warm_up(generate, longest, method, temperature, seed)
            kept = [method for method in suited[batch_size] if method not in left_out]
            progress.update(len(batches) * (len(suited[batch_size]) - len(kept)))
            first_seed = seed + repeat * len(prompts)
            unit = {"task": task, "batch_size": batch_size, "temperature": temperature, "repeat": repeat}
            measured = measure_repeat(generate, batches, kept, temperature, first_seed, progress)
            results.measurements += [unit | {"num_prompts": len(prompts)} | total for total in measured]
            save(results)
    progress.close()
    return results


def check_batches(tasks: Mapping[str, Sequence], batch_sizes: Sequence[int]) -> None:
    """Raises `ValueError` if a task has fewer prompts than a batch."""
    largest = max(batch_sizes, default=0)
    for task, prompts in tasks.items():
        if len(prompts) < largest:
            raise ValueError(
                f"The task {task} has {len(prompts)} prompts, which do not fill a batch of {largest}. Pass more prompts or a smaller "
                "batch size, or leave the task out."
            )


def assistance_of(
    drafts: Mapping[str, PreTrainedModel], assistant: PreTrainedModel | None
) -> dict[str, dict[str, Any]]:
    """Returns the arguments of `generate` that turn on each method."""
    trees_only = {"prompt_lookup_num_tokens": 0}
    settings = {"eagle3": {}, "eagle3-chain": {**trees_only, "branching_factor": 1}}
    ours = {method: {"assistant_model": draft, **settings.get(method, trees_only)} for method, draft in drafts.items()}
    return {
        "plain": {},
        "prompt-lookup": {"prompt_lookup_num_tokens": 8},
        "assistant": {"assistant_model": assistant},
        "mtp": {"use_mtp": True},
        **ours,
    }


@dataclass
class TimedGeneration:
    """Calls `generate` by a method, and measures the call."""

    target: PreTrainedModel
    settings: dict
    sampling: dict
    assistance: dict[str, dict[str, Any]]  # arguments of `generate`, by method

    def __call__(
        self, inputs: BatchFeature, method: str, temperature: float, seed: int
    ) -> tuple[list[list[int]], dict[str, Any]]:
        """Returns the new tokens of each row, and seconds, forwards, accepted lengths and peak memory of the call."""
        mode: dict[str, Any] = {"do_sample": False}
        if temperature != 0:
            mode = {"do_sample": True, "temperature": temperature, **self.sampling}
        device, draft = self.target.device, self.assistance[method].get("assistant_model")
        ours = draft if hasattr(draft, "assisted_decoding") else None
        set_seed(seed)
        forwards: list[None] = []
        hook = self.target.register_forward_pre_hook(lambda *_: forwards.append(None))
        try:
            counts_memory = reset_peak_memory(device)
            synchronize(device)
            start = time.perf_counter()
            sequences = self.target.generate(**inputs, **self.settings, **mode, **self.assistance[method])
            synchronize(device)
            seconds = time.perf_counter() - start
        finally:
            hook.remove()
        stats = Eagle3GenerationStats() if ours is None else ours.last_generation
        facts = {
            "seconds": seconds,
            "draft_seconds": stats.draft_seconds,
            "target_forwards": len(forwards),
            "accepted_lengths": Counter(stats.accepted_lengths),
            "drafted_lengths": Counter(stats.drafted_lengths),
            "plain_steps": stats.plain_steps,
            "lookup_steps": stats.lookup_steps,
            "peak_memory": peak_memory(device) if counts_memory else None,
        }
        ends = self.target.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        new_tokens = sequences[:, inputs["input_ids"].shape[1] :].tolist()
        return [without_padding(row, self.settings["pad_token_id"], ends) for row in new_tokens], facts


def warm_up(
    generate: TimedGeneration, inputs: BatchFeature, method: str, temperature: float, seed: int
) -> dict[str, str]:
    """Calls a method once. Returns the reason, by method, if the target does not take one of transformers' own."""
    try:
        generate(inputs, method, temperature, seed)
    except (ValueError, TypeError, NotImplementedError, AttributeError, OSError) as error:
        if method in IN_BATCHES:
            raise
        logger.warning(f"{method} is left out: {error}")
        return {method: f"{type(error).__name__}: {error}"}
    return {}


def measure_repeat(
    generate: TimedGeneration, batches: list, methods: list[str], temperature: float, seed: int, progress: tqdm
) -> list[dict]:
    """Runs all methods once over all batches, in turns. Returns a measurement of each method, plain generation's first."""
    measured: dict[str, dict[str, Any]] = {
        method: {"method": method, "new_tokens": 0, "differing": [], "peak_memory": None} for method in methods
    }
    row = 0
    for index, inputs in enumerate(batches):
        for method, total in measured.items():
            new_tokens, facts = generate(inputs, method, temperature, seed + index)
            if method == "plain":
                expected = new_tokens
            total["new_tokens"] += sum(map(len, new_tokens))
            total["differing"] += [row + i for i, tokens in enumerate(new_tokens) if tokens != expected[i]]
            if (peak := facts.pop("peak_memory")) is not None:
                total["peak_memory"] = max(total["peak_memory"] or 0, peak)
            for name, value in facts.items():
                total[name] = total[name] + value if name in total else value
            progress.update()
        row += len(expected)
    plain_rate = measured["plain"]["new_tokens"] / measured["plain"]["seconds"]
    for total in measured.values():
        total["speedup"] = speedup(total["new_tokens"] / total["seconds"], plain_rate)
        for name in ("accepted_lengths", "drafted_lengths"):
            total[name] = {str(length): count for length, count in sorted(total[name].items())}
    return list(measured.values())


def check_methods(
    methods: Sequence[str], drafts: Mapping[str, PreTrainedModel], assistant: PreTrainedModel | None
) -> list[str]:
    """
    Returns the methods in their usual order, plain generation first. Raises `ValueError` if a method is unknown or lacks its
    model or has one of another kind, or plain generation is not among them.
    """
    if "plain" not in methods:
        raise ValueError("`methods` must include 'plain': speed-ups are ratios to it.")
    if unknown := sorted(set(methods) - set(METHODS)):
        raise ValueError(f"Unknown methods {unknown}; choose from {METHODS}.")
    for method in set(methods) & {*OURS, *OTHER_DRAFTS}:
        draft = drafts.get(method)
        if not hasattr(draft, "assisted_decoding"):
            name = getattr(getattr(draft, "config", None), "_name_or_path", None) or type(draft).__name__
            kind = "an EAGLE-3 draft" if method in OURS else f"a draft for the method {method!r}"
            raise ValueError(f"{name} is not {kind}. Pass another model, or leave out the method {method!r}.")
    if "assistant" in methods and assistant is None:
        raise ValueError("The method 'assistant' needs a model: pass `assistant`.")
    if "assistant" in methods and hasattr(assistant, "assisted_decoding"):
        raise ValueError(
            f"The method 'assistant' is transformers' own, and {type(assistant).__name__} is a draft of hf-eagle3. Pass `--draft`."
        )
    return sorted(methods, key=METHODS.index)


def without_padding(tokens: list[int], pad_token: int, ends: set[int]) -> list[int]:
    """Returns a row's own tokens, up to the first token that ends it. Padding follows that."""
    length = len(tokens)
    while length > 0 and tokens[length - 1] == pad_token:
        length -= 1
    has_end = length > 0 and tokens[length - 1] in ends
    if length < len(tokens) and pad_token in ends and not has_end:  # the first padding token is the row's own end
        length += 1
    return tokens[:length]


def whole_repeats(results: BenchmarkResults, methods: Sequence[str]) -> set[tuple]:
    """Returns task, batch size, temperature and number of each complete repeat. Drops measurements of incomplete ones."""
    measured: dict[tuple, set[str]] = {}

    def key(each: dict[str, Any]) -> tuple:
        return each["task"], each["batch_size"], each["temperature"], each["repeat"]

    for each in results.measurements:
        measured.setdefault(key(each), set()).add(each["method"])
    whole = {
        unit
        for unit, those in measured.items()
        if those >= {each for each in methods if unit[1] == 1 or each in IN_BATCHES} - set(results.run["left_out"])
    }
    results.measurements[:] = [each for each in results.measurements if key(each) in whole]
    return whole


def synchronize(device: torch.device) -> None:
    """Waits until an accelerator has computed everything. It may be another than the current one."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

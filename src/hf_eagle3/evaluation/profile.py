"""Where the time of a step goes."""

import functools
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList

from .benchmark import own_module, synchronize


# Part, and a function that does it: of the draft's code (module, class if it is a method), or of transformers. What a function of
# another part does inside it is that part's.
PARTS = (
    ("draft forwards", "drafter_eagle3.Drafter", "step"),
    ("draft forwards", "drafter_eagle3.Drafter", "observe"),
    ("tree building", "drafter_eagle3.Drafter", "grow"),
    ("draft, of fixed shapes", "static_eagle3.StaticDrafter", "grow"),
    ("masks", "drafter_eagle3", "tree_attention_mask"),
    ("masks", "generation_eagle3", "tree_attention_mask"),
    ("verify", "generation_eagle3.Eagle3Decoding", "verify"),
    ("accept", "text_eagle3.Text", "walk"),
    ("looking up", "lookup_eagle3.PromptLookup", "extend"),
    ("looking up", "lookup_eagle3.PromptLookup", "expected_progress"),
    ("looking up", "lookup_eagle3.PromptLookup", "next_tokens"),
    ("processors and criteria", LogitsProcessorList, "__call__"),
    ("processors and criteria", StoppingCriteriaList, "__call__"),
    ("cache", "cache_eagle3.TreeCache", "keep_paths"),
    ("cache", "cache_eagle3.TreeCache", "track"),
    ("cache", "generation_eagle3", "take_paths"),
    ("prompt", GenerationMixin, "_prefill"),
)
REST = "Python and the rest"


@torch.no_grad()
def profile_steps(
    target, draft, prompts: list[list[int]], max_new_tokens: int = 64, temperature: float = 0.0, **settings
) -> dict:
    """
    Decodes prompts with the draft under torch's profiler, one after the other, and sorts the time into parts. On an accelerator each
    part waits for what it has started, so that a step takes longer than without the profiler; its parts are what can be compared.

    Returns:
        `dict`: `steps`, `seconds` a step by part, without the prompts' own, and, of all calls together, `seconds_of_calls` and
        `seconds_of_prompts`.
    """
    mode = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    settings = {"max_new_tokens": max_new_tokens, **mode, **settings}

    def generate(prompt):
        inputs = torch.tensor([prompt], device=target.device)
        target.generate(inputs, attention_mask=torch.ones_like(inputs), assistant_model=draft, **settings)
        synchronize(target.device)
        return len(draft.last_generation.accepted_lengths)

    generate(prompts[0])  # warm-up
    activities = [ProfilerActivity.CPU]
    if target.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    own, steps = Counter(), 0
    with labelled(draft, target.device):
        for prompt in prompts:
            with profile(activities=activities) as profiler, record_function("eagle3: call"):
                steps += generate(prompt)
            own.update(own_times(profiler.events()))
    total, prompt_seconds = sum(own.values()), own.pop("prompt", 0.0)
    seconds = {
        part: own[part] / max(steps, 1) for part in dict.fromkeys(part for part, *_ in PARTS) if part != "prompt"
    }
    seconds = {part: spent for part, spent in seconds.items() if spent}
    seconds[REST] = own["call"] / max(steps, 1)
    return {"steps": steps, "seconds": seconds, "seconds_of_calls": total, "seconds_of_prompts": prompt_seconds}


def own_times(events) -> dict[str, float]:
    """Seconds in each of our labels, without those in labels inside it."""
    spans = sorted(
        (
            (event.time_range.start, event.time_range.end, event.name)
            for event in events
            if event.name.startswith("eagle3: ")
        ),
        key=lambda span: (span[0], -span[1]),
    )
    own, open_spans = {}, []
    for start, end, name in spans:
        while open_spans and open_spans[-1][1] <= start:
            open_spans.pop()
        part = name.removeprefix("eagle3: ")
        own[part] = own.get(part, 0.0) + (end - start) / 1e6
        if open_spans:
            outer = open_spans[-1][2].removeprefix("eagle3: ")
            own[outer] -= (end - start) / 1e6
        open_spans.append((start, end, name))
    return own


@contextmanager
def labelled(draft, device):
    """Puts the profiler's labels around the functions of `PARTS`, in the code that this draft came with, and takes them off again."""

    def label(function, part):
        @functools.wraps(function)
        def with_label(*args, **kwargs):
            with record_function(f"eagle3: {part}"):
                result = function(*args, **kwargs)
                synchronize(device)
            return result

        return with_label

    with ExitStack() as stack:
        for part, holder, name in PARTS:
            if isinstance(holder, str):
                module, _, owner = holder.partition(".")
                with suppress(ModuleNotFoundError):  # a draft brings the code it was saved with
                    holder = own_module(draft, module)
                if isinstance(holder, str):
                    continue
                holder = getattr(holder, owner) if owner else holder
            function = getattr(holder, name)
            setattr(holder, name, label(function, part))
            stack.callback(setattr, holder, name, function)
        yield


def format_profile(profiled: dict) -> str:
    """As a Markdown table."""
    step = sum(profiled["seconds"].values())
    lines = ["| part of a step | ms | share |", "| --- | --- | --- |"]
    lines += [
        f"| {part} | {1000 * seconds:.2f} | {seconds / step:.0%} |" for part, seconds in profiled["seconds"].items()
    ]
    lines.append(f"| all | {1000 * step:.2f} | 100% |")
    return "\n".join(lines)

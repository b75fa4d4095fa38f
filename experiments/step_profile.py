"""Measures where the time of a decoding step goes. `gpu_steps.py` uses it."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_eagle3.evaluation.benchmark import synchronize
from hf_eagle3.evaluation.results import markdown_table
from hf_eagle3.remote_code import decoding_eagle3, verify_eagle3
from hf_eagle3.remote_code.cache_eagle3 import TreeCache
from hf_eagle3.remote_code.drafter_eagle3 import Drafter, Slots
from hf_eagle3.remote_code.lookup_eagle3 import PromptLookup
from hf_eagle3.remote_code.modeling_eagle3 import Eagle3ForSpeculation
from hf_eagle3.remote_code.verify_eagle3 import Verifier


PROMPT, REST = "prompt", "Python and the rest"
IN_A_GRAPH = ("draft forwards", "tree building")  # on CUDA devices a graph drafts the whole tree, so they are one part
# A part, and a function of it, in a class or module. Where a function of another part runs inside, its time counts for the
# other part.
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("draft forwards", Eagle3ForSpeculation, "combine_hidden_states"),
    ("draft forwards", Eagle3ForSpeculation, "forward"),  # with the head
    ("draft forwards", Eagle3ForSpeculation, "step"),  # of the prompt
    ("tree building", Drafter, "propose"),
    ("masks", Slots, "masks"),
    ("masks", verify_eagle3, "tree_attention_mask"),
    ("verify", Verifier, "verify"),
    ("accept", decoding_eagle3, "accept"),
    ("looking up", PromptLookup, "observe"),
    ("looking up", PromptLookup, "expected_progress"),
    ("looking up", PromptLookup, "propose"),
    ("processors and criteria", LogitsProcessorList, "__call__"),
    ("processors and criteria", StoppingCriteriaList, "__call__"),
    ("cache", TreeCache, "keep"),
    ("cache", TreeCache, "track"),
    (PROMPT, GenerationMixin, "_prefill"),
)


class OwnTimes:
    """Counts the seconds in each part, without those in other parts inside it."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self.seconds: dict[str, float] = defaultdict(float)
        self.inside: list[float] = []  # seconds of other parts inside each open part

    @contextmanager
    def spent_on(self, part: str) -> Iterator[None]:
        start = self.now()
        self.inside.append(0.0)
        try:
            yield
        finally:
            seconds = self.now() - start
            self.seconds[part] += seconds - self.inside.pop()
            if self.inside:
                self.inside[-1] += seconds


@torch.no_grad()
def profile_steps(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    **settings: Any,
) -> dict:
    """
    Decodes prompts with the draft, one after the other, and sorts the time into parts. On an accelerator each part ends with a
    synchronization. So a step takes longer than usual, and only its parts can be compared. Returns `steps`; `seconds` of a
    step by part, without the prompts; and `seconds_of_calls` and `seconds_of_prompts` of all calls together.
    """
    mode = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    settings = {"max_new_tokens": max_new_tokens, **mode, **settings}

    def generate(prompt: list[int]) -> int:
        inputs = torch.tensor([prompt], device=target.device)
        target.generate(inputs, attention_mask=torch.ones_like(inputs), assistant_model=draft, **settings)
        synchronize(target.device)
        return len(draft.last_generation.accepted_lengths)

    generate(prompts[0])  # warm-up
    times, steps = OwnTimes(), 0
    with timed_parts(target.device, times):
        for prompt in prompts:
            with times.spent_on(REST):
                steps += generate(prompt)
    own, total = times.seconds, sum(times.seconds.values())
    prompt_seconds = own.pop(PROMPT, 0.0)
    order = [*dict.fromkeys(part for part, *_ in PARTS), REST]
    if target.device.type == "cuda":
        own["drafting"] = sum(own.pop(part, 0.0) for part in IN_A_GRAPH)
        order.insert(0, "drafting")
    seconds = {part: own[part] / max(steps, 1) for part in order if own[part]}
    return {"steps": steps, "seconds": seconds, "seconds_of_calls": total, "seconds_of_prompts": prompt_seconds}


@contextmanager
def timed_parts(device: torch.device, times: OwnTimes) -> Iterator[None]:
    """Times the functions of `PARTS`."""

    def timed(function: Callable, part: str) -> Callable:
        @functools.wraps(function)
        def timed_function(*args: Any, **kwargs: Any) -> Any:
            # What is compiled or captured has no separate parts, and a capture must not synchronize.
            is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if torch.compiler.is_compiling() or is_captured:
                return function(*args, **kwargs)
            with times.spent_on(part):
                result = function(*args, **kwargs)
                synchronize(device)
            return result

        return timed_function

    with ExitStack() as stack:
        for part, holder, name in PARTS:
            function = getattr(holder, name)
            setattr(holder, name, timed(function, part))
            stack.callback(setattr, holder, name, function)
        yield


def format_profile(profiled: dict) -> str:
    """Returns a profile as a Markdown table."""
    step = sum(profiled["seconds"].values())
    seconds = {**profiled["seconds"], "all": step}
    rows = [[part, f"{1000 * each:.2f}", f"{each / step:.0%}"] for part, each in seconds.items()]
    return markdown_table(["part of a step", "ms", "share"], rows)

"""`experiments/step_profile.py`: the time of a step, sorted into parts."""

import sys

import pytest
import torch
from conftest import EXPERIMENTS, make_block_draft, make_draft, make_prompt, make_target

from hf_eagle3.remote_code.verify_eagle3 import Verifier


sys.path.append(str(EXPERIMENTS))
from step_profile import OwnTimes, profile_steps, timed_parts  # noqa: E402


def test_profile():
    target = make_target("llama")
    draft = make_draft(target, [make_prompt(5)])
    draft.generation_config.tree_policy = "static"
    prompts = [make_prompt(9)[0].tolist(), make_prompt(5)[0].tolist()]
    profiled = profile_steps(target, draft, prompts, 16, repetition_penalty=1.1)
    parts = ("draft forwards", "tree building", "masks", "verify", "accept", "processors and criteria", "cache")
    assert all(profiled["seconds"][part] > 0 for part in parts)
    assert profiled["steps"] > len(draft.last_generation.accepted_lengths)
    in_steps = sum(profiled["seconds"].values()) * profiled["steps"]
    assert in_steps + profiled["seconds_of_prompts"] == pytest.approx(profiled["seconds_of_calls"])
    static = profile_steps(target, draft, prompts, 16, 1.0, cache_implementation="static")["seconds"]
    assert all(static[part] > 0 for part in ("draft forwards", "tree building", "masks", "verify", "accept"))
    # The labels are off again.
    assert not hasattr(Verifier.verify, "__wrapped__")


def test_a_profile_leaves_captures_of_cuda_graphs_alone(monkeypatch):
    target = make_target("llama")
    draft = make_draft(target, [make_prompt(5)])
    waits, times = [], OwnTimes()
    monkeypatch.setattr("step_profile.synchronize", waits.append)
    inputs = torch.zeros(1, 1, draft.fc.in_features)
    for is_capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda is_capturing=is_capturing: is_capturing)
        with timed_parts(torch.device("cuda"), times):
            draft.combine_hidden_states(inputs)
        assert bool(waits) == bool(times.seconds) == (not is_capturing)


def test_the_head_counts_as_the_draft():
    target, seconds = make_target("llama"), 0.0
    draft = make_draft(target, [make_prompt(5)])
    times = OwnTimes(now=lambda: seconds)

    def slow_head(*args):
        nonlocal seconds
        seconds += 1

    draft.lm_head.register_forward_hook(slow_head)
    draft.generation_config.tree_policy = "static"
    with timed_parts(target.device, times):
        target.generate(make_prompt(5), assistant_model=draft, max_new_tokens=8)
    assert set(times.seconds) > {"draft forwards", "tree building"}
    assert times.seconds["draft forwards"] == seconds > 0


def test_a_block_draft():
    """Its class is elsewhere, and its steps are ours."""
    target = make_target("llama")
    profiled = profile_steps(target, make_block_draft("dflash", target), make_prompt(5).tolist(), 8)
    assert profiled["seconds"]["verify"] > 0


def test_own_times():
    clock = iter([0, 10, 20, 30, 50, 60, 70, 100])
    times = OwnTimes(now=lambda: next(clock))
    with pytest.raises(ValueError), times.spent_on("call"):
        with times.spent_on("a"), times.spent_on("b"):
            pass
        with times.spent_on("b"):
            raise ValueError
    assert times.seconds == {"call": 50, "a": 30, "b": 20}

"""
Any mix of generation settings: plain `generate` and ours give the same tokens.

`HF_EAGLE3_EXAMPLES=2000 pytest tests/test_properties.py` tries as many; by default a few, the same each time.
"""

import contextlib
import functools
import os
import re

import pytest
import torch
from conftest import (
    CONVOLUTIONAL,
    FAMILIES,
    INDEXED,
    RECURRENT,
    VOCAB_SIZE,
    lookups_of,
    make_baseline,
    make_batch,
    make_oracle,
    make_target,
)
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.baselines import BASELINES
from hf_eagle3.remote_code.outputs_eagle3 import CAN_SELECT_HIDDEN_STATES


NUM_EXAMPLES = int(os.environ.get("HF_EAGLE3_EXAMPLES", 0))


class StopAfter(StoppingCriteria):
    """Ends rows at certain pairs of tokens."""

    def __init__(self, modulus):
        self.modulus = modulus

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -2:].sum(dim=1) % self.modulus == 0


cached_target = functools.cache(make_target)
token = st.integers(2, VOCAB_SIZE - 1)


@st.composite
def calls(draw):
    """Keyword arguments of `generate`."""
    options = {
        "repetition_penalty": st.floats(0.7, 1.6),
        "no_repeat_ngram_size": st.integers(1, 4),
        "min_new_tokens": st.integers(1, 10),
        "bad_words_ids": st.lists(st.lists(token, min_size=1, max_size=2), min_size=1, max_size=4),
        "suppress_tokens": st.lists(token, min_size=1, max_size=30),
        "begin_suppress_tokens": st.lists(token, min_size=1, max_size=30),
        "forced_eos_token_id": token,
        "sequence_bias": st.dictionaries(st.tuples(token), st.floats(-8, 8), min_size=1, max_size=5),
        "exponential_decay_length_penalty": st.tuples(st.integers(1, 8), st.floats(1.01, 1.5)),
        "stopping_criteria": st.integers(5, 40).map(lambda modulus: [StopAfter(modulus)]),
        "renormalize_logits": st.just(True),
        "prefill_chunk_size": st.integers(1, 9),
        "encoder_repetition_penalty": st.floats(0.7, 1.6),
        "guidance_scale": st.floats(1.1, 2.0),
    }
    sampling = {
        "temperature": st.floats(0.3, 2.0),
        "top_k": st.integers(1, VOCAB_SIZE),
        "top_p": st.floats(0.1, 1.0),
        "min_p": st.floats(0.0, 0.5),
        "typical_p": st.floats(0.2, 0.95),
        "epsilon_cutoff": st.floats(1e-4, 0.05),
        "eta_cutoff": st.floats(1e-4, 0.05),
    }
    kwargs = {"max_new_tokens": draw(st.integers(1, 24)), "do_sample": draw(st.booleans()), "pad_token_id": 0}
    kwargs["eos_token_id"] = draw(st.one_of(st.none(), token, st.lists(token, min_size=1, max_size=8)))
    if kwargs["do_sample"]:
        options |= sampling
    for name in draw(st.lists(st.sampled_from(sorted(options)), unique=True, max_size=4)):
        kwargs[name] = draw(options[name])
    if kwargs["eos_token_id"] is None:
        kwargs.pop("exponential_decay_length_penalty", None)  # needs one
    return kwargs


@settings(
    max_examples=NUM_EXAMPLES or 40,
    derandomize=not NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(
    family=st.sampled_from(sorted(FAMILIES | CONVOLUTIONAL | INDEXED | RECURRENT)),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    kwargs=calls(),
    tree=st.fixed_dictionaries(
        {
            "tree_depth": st.integers(1, 8),
            "branching_factor": st.integers(1, 16),
            "num_assistant_tokens": st.integers(1, 64),
            "assistant_confidence_threshold": st.sampled_from([0.0, 0.01, 0.3]),
            "prompt_lookup_num_tokens": st.integers(1, 64),
            "tree_policy": st.sampled_from(["static", "auto"]),
        }
    ),
    cache=st.sampled_from([{}, {"cache_implementation": "static"}]),
    method=st.sampled_from(
        ["eagle3", "knows the text", "block that knows the text", *BASELINES, "eagle-2", "p-eagle"]
    ),
    looks_up=st.booleans(),
    waits=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_settings(family, lengths, kwargs, tree, cache, method, looks_up, waits, seed):
    target, batch = cached_target(family), make_batch(lengths, seed)
    if family not in FAMILIES:  # which are refused otherwise
        cache = {}
    # Older transformers make no masks for static caches of Llama 4, and fail at those of Gemma 4 if the prefill is chunked.
    if family.startswith(("llama4", "gemma4")) and not CAN_SELECT_HIDDEN_STATES:
        cache = {}
    if looks_up:  # which others do not
        tree = {**tree, "tree_policy": "auto"}
    torch.manual_seed(seed)
    try:
        expected = target.generate(**batch, **kwargs)
    except (RuntimeError, ValueError) as error:  # settings that contradict each other, or leave nothing to sample from
        expected, message = None, str(error)
    if method.endswith("knows the text") and expected is not None:
        kind = "dflash" if method.startswith("block") else "eagle3"
        padding = (1 - batch["attention_mask"]).sum(dim=1, keepdim=True)
        draft = make_oracle(target, expected, seed, padding, kind)
    elif method in (*BASELINES, "eagle-2", "p-eagle"):
        draft = make_baseline(method, target)
    else:
        torch.manual_seed(seed)
        draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=range(seed % 90, VOCAB_SIZE)).eval()
    draft.generation_config.update(**tree)
    torch.manual_seed(seed)
    if expected is None:
        with pytest.raises((RuntimeError, ValueError), match=re.escape(message)):
            target.generate(**batch, assistant_model=draft, **cache, **kwargs)
        return
    with contextlib.ExitStack() as stack:
        if looks_up:
            stack.enter_context(lookups_of(expected, seed))
        if waits:  # as if on an accelerator
            patches = stack.enter_context(pytest.MonkeyPatch.context())
            for module in ("accept", "decoding", "drafter"):
                patches.setattr(f"hf_eagle3.remote_code.{module}_eagle3.reads_without_sync", lambda device: False)
        actual = target.generate(**batch, assistant_model=draft, **cache, **kwargs)
    note(f"plain {expected.tolist()}, with a draft {actual.tolist()}")
    assert actual.tolist() == expected.tolist()

"""Targets that can read chains only: their attention takes no mask of a tree, or tells distances by indices."""

import functools

import pytest
import torch
from conftest import (
    assert_gives_its_text,
    assert_same_text,
    causal_only,
    each_once,
    generate,
    make_batch,
    make_target,
    oracle_of,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.flex_attention import WrappedFlexAttention

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.remote_code import target_eagle3


@pytest.mark.parametrize(
    ("family", "lengths"), each_once(["llama", "qwen3", "mistral-window", "qwen3_moe"], [[11], [20, 9, 33]])
)
def test_attention_that_takes_causal_masks_only(family, lengths, monkeypatch):
    hints = []
    monkeypatch.setattr(target_eagle3.logger, "warning_once", hints.append)
    target = make_target(family, attn_implementation="causal_only")
    batch = make_batch(lengths)
    draft = oracle_of(target, batch)
    for policy in ("static", "auto"):
        draft.generation_config.tree_policy = policy
        assert_gives_its_text(draft, target, batch)
        assert_same_text(target, draft, batch, do_sample=True, temperature=0.7)
    assert hints and "attn_implementation='sdpa'" in hints[0]
    draft = oracle_of(target, batch)  # its guesses go on from those of the calls before, which measured times decide
    causal_only.seen.clear()
    stats = assert_gives_its_text(draft, target, batch)
    assert stats.target_forwards < 15 and stats.acceptance_length > 1.5
    # Prompts, the chain of 11 tokens by which this attention is tried with the first of them alone, and chains.
    assert 1 + draft.generation_config.tree_depth == max(set(causal_only.seen) - {max(lengths), 11})


def test_a_static_cache_needs_masks():
    target, batch = make_target("llama", attn_implementation="causal_only"), make_batch([9])
    with pytest.raises(ValueError, match="'causal_only' cannot tell the free slots of a static cache"):
        generate(target, batch, assistant_model=oracle_of(target, batch), cache_implementation="static")


def test_flex_attention_on_a_cpu(monkeypatch):
    """Traced only: inductor takes a minute, and on processors without AVX-512 gives other results each time (torch 2.13)."""
    monkeypatch.setattr(WrappedFlexAttention, "_instance", None)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    target, batch = make_target("llama", attn_implementation="flex_attention"), make_batch([9])
    draft = oracle_of(make_target("llama"), batch)
    text = generate(target, batch, assistant_model=draft, max_new_tokens=8)
    assert torch.equal(text, draft.text[:, : text.shape[1]]) and draft.last_generation.target_forwards < 7


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        (
            "gpt_neo",
            {"num_layers": 6, "num_heads": 4, "window_size": 8, "attention_types": [[["global", "local"], 3]]},
        ),
        ("falcon", {"num_hidden_layers": 6, "num_attention_heads": 4, "alibi": True}),
    ],
)
def test_distances_by_indices(model_type, changes):
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.3}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**sizes, **changes})
    target = AutoModelForCausalLM.from_config(config).eval()
    draft = Eagle3ForSpeculation.from_target(target).eval()
    for policy in ("static", "auto"):
        draft.generation_config.tree_policy = policy
        assert_same_text(target, draft, make_batch([20, 9, 33]))
        assert_same_text(target, draft, make_batch([9]), do_sample=True)

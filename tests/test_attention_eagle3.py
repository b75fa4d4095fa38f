import contextlib
import importlib.util
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from conftest import make_prompt
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_eagle3.remote_code import attention_eagle3, verify_eagle3
from hf_eagle3.remote_code.attention_eagle3 import PACKED_HEADS, additive_mask, install_packed_attention


OPTIONS = {"dropout": 0.0, "scaling": 0.3, "sliding_window": None}


class GroupedAttention:
    """What `sdpa` reads of an attention module."""

    num_key_value_groups, is_causal = 4, True


def make_inputs(num_queries=5, num_keys=13, num_heads=8, num_masks=2):
    """Query, key, value and mask. Values are wider than keys, as in some models."""
    generator = torch.Generator().manual_seed(0)
    shapes = (num_heads, num_queries, 16), (num_heads // 4, num_keys, 16), (num_heads // 4, num_keys, 24)
    states = [torch.randn(2, *shape, generator=generator) for shape in shapes]
    allowed = torch.rand(num_masks, num_queries, num_keys, generator=generator) < 0.7
    return *states, additive_mask(allowed, torch.float32)[:, None]


@pytest.fixture
def attended(monkeypatch):
    """The keys and the mask that torch's attention gets in each call."""
    calls, attend = [], F.scaled_dot_product_attention

    def record(query, key, value, attn_mask=None, **kwargs):
        calls.append((key, attn_mask))
        return attend(query, key, value, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(verify_eagle3, "has_own_code", lambda target: False)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    return calls


@pytest.fixture
def registered():
    """Registers another function for `sdpa`."""
    before = AttentionInterface()["sdpa"]
    yield lambda function: AttentionInterface.register("sdpa", function)
    AttentionInterface.register("sdpa", before)


@pytest.mark.parametrize("kind", ["additive", "boolean"])
@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("num_masks", [1, 2])
@pytest.mark.parametrize("num_heads", [4, 8])
def test_heads_that_share_keys_attend_as_one(attended, kind, num_queries, num_masks, num_heads):
    query, key, value, mask = make_inputs(num_queries, num_heads=num_heads, num_masks=num_masks)
    mask = mask if kind == "additive" else mask == 0
    expected, _ = sdpa_attention_forward(GroupedAttention, query, key, value, mask, **OPTIONS)
    with PACKED_HEADS.on():
        output, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](GroupedAttention, query, key, value, mask, **OPTIONS)
    torch.testing.assert_close(output, expected)
    assert weights is None and output.is_contiguous()
    shared, packed_mask = attended[-1]
    assert shared is key
    assert all(stride % 8 == 0 for stride in packed_mask.stride()[:-1])  # as fused kernels read masks


@pytest.mark.parametrize(
    "case", ["no tree", "another thread", "no mask", "a mask for each head", "a bias", "many queries"]
)
def test_other_calls_are_passed_on(registered, case):
    seen = []

    def record(*args, **kwargs):
        seen.append((args, kwargs))
        return sdpa_attention_forward(*args, **kwargs)

    record.__module__ = "transformers.integrations"
    registered(record)
    install_packed_attention()
    query, key, value, mask = make_inputs(num_queries=33 if case == "many queries" else 5)
    if case == "no mask":
        mask = None
    elif case == "a mask for each head":
        mask = mask.expand(-1, 8, -1, -1)

    bias = torch.zeros(1, 8, 5, 13) if case == "a bias" else None  # for each head

    def attend():
        ALL_ATTENTION_FUNCTIONS["sdpa"](GroupedAttention, query, key, value, mask, 0.0, position_bias=bias)

    with contextlib.nullcontext() if case == "no tree" else PACKED_HEADS.on():
        if case == "another thread":
            thread = threading.Thread(target=attend)
            thread.start()
            thread.join()
        else:
            attend()
    ((module, *given), options), *others = seen
    assert not others and module is GroupedAttention and options == {"position_bias": bias}
    assert all(one is other for one, other in zip(given, (query, key, value, mask, 0.0), strict=True))


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}])
def test_the_past_is_not_repeated_for_trees(target, draft, attended, cache):
    assert target.config.num_attention_heads > target.config.num_key_value_heads
    settings = {"tree_policy": "static", "num_assistant_tokens": 8, "max_new_tokens": 8, "do_sample": False}
    target.generate(make_prompt(5), assistant_model=draft, **settings, **cache)
    of_trees = [key for key, mask in attended if mask is not None and mask.is_floating_point()]
    heads = {target.config.num_key_value_heads, draft.config.transformer_layer_config.num_key_value_heads}
    assert of_trees and {key.shape[1] for key in of_trees} <= heads
    assert not PACKED_HEADS.are_on


def test_a_forward_over_a_tree_is_compiled_apart_from_others():
    """Once each, and without a graph break."""
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    query, key, value, mask = make_inputs()
    compiled = torch.compile(
        lambda *states: ALL_ATTENTION_FUNCTIONS["sdpa"](GroupedAttention, *states, **OPTIONS)[0],
        fullgraph=True,
        backend=backend,
    )
    for is_tree in (False, True, False, True):
        with torch.no_grad(), PACKED_HEADS.on(is_tree):
            output = compiled(query, key, value, mask)
        torch.testing.assert_close(
            output, sdpa_attention_forward(GroupedAttention, query, key, value, mask, **OPTIONS)[0]
        )
    assert len(graphs) == 2


def test_each_copy_of_the_code_installs_its_own_once(registered):
    before = AttentionInterface()["sdpa"]
    install_packed_attention()
    assert AttentionInterface()["sdpa"] is before
    name = "hf_eagle3.remote_code.another_copy"
    spec = importlib.util.spec_from_file_location(name, attention_eagle3.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    copy.install_packed_attention()
    both = AttentionInterface()["sdpa"]
    assert both is not before
    for each in (copy, attention_eagle3, copy):
        each.install_packed_attention()
    assert AttentionInterface()["sdpa"] is both
    query, key, value, mask = make_inputs()
    expected, _ = sdpa_attention_forward(GroupedAttention, query, key, value, mask, **OPTIONS)
    for each in (copy, attention_eagle3):
        with each.PACKED_HEADS.on():
            torch.testing.assert_close(both(GroupedAttention, query, key, value, mask, **OPTIONS)[0], expected)
    assert name not in sys.modules


def test_attention_of_somebody_else_is_left_alone(registered):
    def attend(module, query, key, value, attention_mask, **kwargs):
        raise AssertionError("only compared")

    registered(attend)
    install_packed_attention()
    assert AttentionInterface()["sdpa"] is attend

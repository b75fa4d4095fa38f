from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from conftest import make_prompt
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_eagle3.remote_code.attention_eagle3 import MOST_QUERIES, additive_mask, install_packed_attention


class GroupedAttention:
    """What `sdpa` reads of an attention module."""

    num_key_value_groups, is_causal = 4, True


def make_inputs(num_queries=5, num_keys=13, num_heads=8, batch_size=2, num_masks=2, dtype=torch.float32):
    """Query, key, value and mask. Values are wider than keys, as in some models."""
    generator = torch.Generator().manual_seed(0)
    shapes = (num_heads, num_queries, 16), (num_heads // 4, num_keys, 16), (num_heads // 4, num_keys, 24)
    states = [torch.randn(batch_size, *shape, generator=generator).to(dtype) for shape in shapes]
    allowed = torch.rand(num_masks, num_queries, num_keys, generator=generator) < 0.7
    return *states, additive_mask(allowed, dtype)[:, None]


@pytest.fixture
def attended():
    """The keys and the mask that torch's attention gets in each call."""
    calls, attend = [], F.scaled_dot_product_attention

    def record(query, key, value, attn_mask=None, **kwargs):
        calls.append((key, attn_mask))
        return attend(query, key, value, attn_mask=attn_mask, **kwargs)

    with patch.object(torch.nn.functional, "scaled_dot_product_attention", record):
        yield calls


@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("num_masks", [1, 2])
@pytest.mark.parametrize("num_heads", [4, 8])
@torch.no_grad()
def test_heads_that_share_keys_attend_as_one(attended, num_queries, num_masks, num_heads):
    query, key, value, mask = make_inputs(num_queries, num_heads=num_heads, num_masks=num_masks)
    options = {"dropout": 0.0, "scaling": 0.3, "sliding_window": None}
    expected, _ = sdpa_attention_forward(GroupedAttention, query, key, value, mask, **options)
    output, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](GroupedAttention, query, key, value, mask, **options)
    torch.testing.assert_close(output, expected)
    assert weights is None and output.is_contiguous()
    shared, packed_mask = attended[-1]
    assert shared is key
    # As fused kernels read masks.
    assert all(stride % 8 == 0 for stride in packed_mask.stride()[:-1])


@pytest.mark.parametrize(
    "case",
    ["gradients", "many queries", "boolean", "no mask", "a mask for each head", "a bias", "own keys"],
)
def test_other_calls_are_passed_on(case):
    query, key, value, mask = make_inputs(num_queries=MOST_QUERIES + 1 if case == "many queries" else 5)
    module, options = GroupedAttention(), {"scaling": 0.3}
    if case == "boolean":
        mask = mask == 0
    elif case == "no mask":
        mask = None
    elif case == "a mask for each head":
        mask = mask.expand(-1, 8, -1, -1)
    elif case == "a bias":
        options["position_bias"] = torch.randn(1, 8, 5, 13)
    elif case == "own keys":
        module.num_key_value_groups = 1
        key, value = (each.repeat(1, 4, 1, 1) for each in (key, value))
    with torch.set_grad_enabled(case == "gradients"):
        expected, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
        output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}])
def test_the_past_is_not_repeated_for_trees(target, draft, attended, cache):
    assert target.config.num_attention_heads > target.config.num_key_value_heads
    target.generate(
        make_prompt(5), assistant_model=draft, tree_policy="static", max_new_tokens=8, do_sample=False, **cache
    )
    of_trees = [key for key, mask in attended if mask is not None and mask.is_floating_point()]
    heads = {target.config.num_key_value_heads, draft.config.transformer_layer_config.num_key_value_heads}
    assert of_trees and {key.shape[1] for key in of_trees} <= heads


def test_installing_it_again_changes_nothing():
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    install_packed_attention()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before

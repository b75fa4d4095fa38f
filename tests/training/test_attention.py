from types import SimpleNamespace

import pytest
import torch

from hf_eagle3.baselines import dflash_training
from hf_eagle3.baselines.dflash_training import BlockCache
from hf_eagle3.training import attention
from hf_eagle3.training.attention import (
    TTTCache,
    attend_by_flex,
    can_compile_flex,
    causal_block_mask,
    chunked_attention,
    fits_flex,
    merged_attention,
    padded_length,
)


def naive_attention(query, keys, values, documents, scaling):
    """Each row's softmax over what it may see, row by row."""
    batch_size, num_heads, length, _ = query.shape
    groups = num_heads // keys[0].shape[1]
    output = torch.zeros_like(query)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (batch_size, num_heads, length))).tolist():
        seen = [
            (keys[0][b, h // groups, j], values[0][b, h // groups, j])
            for j in range(i + 1)
            if documents[b, j] == documents[b, i]
        ]
        seen += [(key[b, h // groups, i], value[b, h // groups, i]) for key, value in zip(keys[1:], values[1:])]
        weights = torch.stack([query[b, h, i] @ key * scaling for key, _ in seen]).softmax(dim=0)
        output[b, h, i] = sum(weight * value for weight, (_, value) in zip(weights, seen))
    return output


def dense_attention(query, key, value, block_mask, scale):
    """What flex attention gives, with gradients on a CPU, where it has none."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2) * scale
    index = torch.arange(query.shape[2], device=query.device)
    batch = torch.arange(len(query), device=query.device)[:, None, None]
    scores = scores.masked_fill(~block_mask.mask_mod(batch, 0, index[:, None], index)[:, None], -torch.inf)
    return scores.softmax(-1) @ value.repeat_interleave(groups, dim=1), scores.logsumexp(-1)


@pytest.mark.parametrize("num_steps", [1, 2, 7])
@pytest.mark.parametrize("path", ["one chunk", "chunks", "merged", "merged, padded", "flex"])
def test_attention_and_its_gradients_equal_the_naive_ones(monkeypatch, path, num_steps):
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if path == "flex" and torch.cuda.is_available() else "cpu"
    has_gradients = path != "flex" or device == "cuda"

    def randn(heads):
        return torch.randn(2, heads, 13, 16, generator=generator).to(device).requires_grad_(has_gradients)

    query, keys, values = randn(4), [randn(2) for _ in range(num_steps)], [randn(2) for _ in range(num_steps)]
    documents = torch.tensor([[1] * 13, [1] * 4 + [2] * 6 + [-1] * 3], device=device)
    upstream = torch.randn(2, 4, 13, 16, generator=generator).to(device)
    own = tuple(torch.stack(states[1:], dim=3) for states in (keys, values) if num_steps > 1)
    if "chunk" not in path:
        attend = attend_by_flex if path == "flex" else dense_attention
        mask = causal_block_mask(documents, 32 if path == "merged, padded" else None)
        output = merged_attention(query, keys[0], values[0], mask, 0.3, own, attend)
    else:
        monkeypatch.setattr(attention, "QUERIES_AT_A_TIME", 5 if path == "chunks" else 512)
        output = chunked_attention(query, keys[0], values[0], documents, 0.3, own)
    expected = naive_attention(query, keys, values, documents, 0.3)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    if has_gradients:
        inputs = [query, *keys, *values]
        for ours, theirs in zip(*(torch.autograd.grad(out, inputs, upstream) for out in (output, expected))):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_few_lengths_are_compiled():
    lengths = {padded_length(length) for length in range(1, 8193)}
    assert sorted(lengths) == [128, 256, 512, 1024, 2048, 4096, 8192]
    assert all(length <= padded_length(length) for length in range(1, 8193))


@pytest.mark.parametrize("has_triton", [True, False])
def test_flex_attention_needs_triton(monkeypatch, has_triton):
    """PyTorch for Windows comes without it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: has_triton or None)
    cuda = SimpleNamespace(type="cuda")
    assert can_compile_flex(cuda) == has_triton and not can_compile_flex(torch.device("cpu"))
    documents = torch.zeros(1, 4).long()
    for module in (attention, dflash_training):
        monkeypatch.setattr(module, "can_compile_flex", lambda _: can_compile_flex(cuda))
    for cache in (TTTCache(documents), BlockCache(documents, documents, 2, is_causal=False)):
        assert (cache.block_mask is not None) == has_triton


@pytest.mark.parametrize("memory, fits", [(101_376, False), (166_912, True)])  # of RTX 5090 and A100
def test_large_heads_need_much_shared_memory(monkeypatch, memory, fits):
    properties = SimpleNamespace(shared_memory_per_block_optin=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    for dtype, largest in ((torch.bfloat16, 128), (torch.float32, 64)):
        assert fits_flex(torch.zeros(1, 2, 3, largest, dtype=dtype))
        assert fits_flex(torch.zeros(1, 2, 3, largest + 1, dtype=dtype)) == fits
    with monkeypatch.context() as on_amd:
        on_amd.setattr(torch.version, "hip", "7.0")
        assert fits_flex(torch.zeros(1, 2, 3, 256))
    documents, calls = torch.zeros(1, 4).long(), []
    for module in (attention, dflash_training):
        monkeypatch.setattr(module, "can_compile_flex", lambda _: True)
        monkeypatch.setattr(module, "merged_attention", lambda query, *args: calls.append(args) or query)
    states = torch.rand(1, 2, 8, 96)
    for cache in (TTTCache(documents), BlockCache(documents, documents, 2, is_causal=False)):
        query = states[:, :, : 4 if isinstance(cache, TTTCache) else 8]
        cache.update(states[:, :, :4], states[:, :, :4], 0)
        cache.attend(0, query, query, query, 0.3)
    assert len(calls) == (2 if fits else 0)

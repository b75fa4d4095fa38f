# SPDX-License-Identifier: Apache-2.0
"""How trees attend: masks, and attention that reads keys once for all heads that share them."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, Cache, PreTrainedConfig
from transformers.cache_utils import StaticLayer

from .cache_eagle3 import has_keys


def additive_mask(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where attention is allowed, else the lowest number. Rows begin at multiples of 8, because fused kernels copy other masks."""
    length = allowed.shape[-1]
    shape = *allowed.shape[:-1], length + -length % 8
    mask = torch.full(shape, torch.finfo(dtype).min, dtype=dtype, device=allowed.device)[..., :length]
    return mask.masked_fill_(allowed, 0)


def tree_attention_mask(
    config: PreTrainedConfig,
    cache: Cache,
    past_length: int,
    ancestors: torch.Tensor,
    depths: torch.Tensor,
    padding_mask: torch.Tensor | None = None,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """
    Additive masks for trees (see [`~tree_eagle3.DraftTree`]) that follow a linear past, given the target's cache
    before the forward and the `padding_mask` `(B, past_length)`. Returns a mask `(B, 1, N, K)`, or a dict of masks by
    layer type if there are several, as `transformers.masking_utils.create_masks_for_generate` does.

    Windows and chunks count positions in the text: siblings have different cache indices, but the same position.
    """
    device = depths.device
    padding_mask = None if padding_mask is None else padding_mask.bool()

    def mask_for(layer_type: str, layer: Any) -> torch.Tensor:
        num_slots = layer.keys.shape[-2] if type(layer) is StaticLayer else None
        num_past = past_length if num_slots else layer.keys.shape[-2]
        allowed = F.pad(ancestors, (num_past, 0), value=True)  # (B, N, K)
        if padding_mask is not None:
            allowed[..., :num_past].logical_and_(padding_mask[:, None, past_length - num_past : past_length])
        if layer_type != "full_attention":
            past = torch.arange(past_length - num_past, past_length, device=device).expand(len(depths), -1)
            key = torch.cat([past, past_length + depths], dim=1)[:, None]  # positions
            query = (past_length + depths)[..., None]
            if layer_type == "sliding_attention":
                allowed &= query - key < config.sliding_window
            else:
                chunk = config.attention_chunk_size
                if padding_mask is not None:  # holes in the text do not count
                    left_padding = (padding_mask.cumsum(dim=1) == 0).sum(dim=1)[:, None, None]
                    query, key = query - left_padding, key - left_padding
                allowed &= query // chunk == key // chunk
        if num_slots:
            allowed = F.pad(allowed, (0, num_slots - allowed.shape[-1]), value=False)
        return additive_mask(allowed, layer.keys.dtype)[:, None]  # eager attention adds it to the scores

    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:  # all layers are alike
        kinds = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention"}
        found = (kind for name, kind in kinds.items() if getattr(config, name, None) is not None)
        layer_types = [next(found, "full_attention")]
    masks: dict[str, torch.Tensor] = {}
    for layer_type, layer in zip(layer_types, cache.layers):
        if has_keys(layer) and layer_type not in masks:
            masks[layer_type] = mask_for(layer_type, layer)
    # Some models do not read `layer_types`, and take no dict.
    return masks if len(masks) > 1 else next(iter(masks.values()))


class PackedHeads(threading.local):
    """Whether this thread runs a forward over a tree, in which [`packed_attention`] packs heads."""

    are_on = False

    @contextlib.contextmanager
    def on(self, are_on: bool = True) -> Iterator[None]:
        """Turns it on. Not for plain steps: their compiled forward would be compiled again."""
        self.are_on, before = are_on, self.are_on
        try:
            yield
        finally:
            self.are_on = before


PACKED_HEADS = PackedHeads()


def packed_attention(
    sdpa: Callable,
    module: torch.nn.Module,
    query: torch.Tensor,  # (B, num_heads, N, head_dim): those of the nodes
    key: torch.Tensor,  # (B, num_key_value_heads, K, head_dim): those of the past and the nodes
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,  # (B or 1, 1, N, K)
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    transformers' `sdpa`, but in forwards over trees query heads that share keys attend as one head with more queries. If there
    are several queries under a mask, transformers repeats keys and values for each query head, which copies the whole past in
    each layer.
    """
    is_tree = PACKED_HEADS.are_on and kwargs.get("position_bias") is None
    if attention_mask is None or not is_tree or not _can_be_packed(query, key, attention_mask):
        return sdpa(module, query, key, value, attention_mask, *args, **kwargs)
    num_shared, num_queries, length = query.shape[1] // key.shape[1], query.shape[2], attention_mask.shape[3]
    query = query.reshape(query.shape[0], key.shape[1], num_shared * num_queries, query.shape[3])
    padded = attention_mask.new_empty(attention_mask.shape[0], num_shared, num_queries, length + -length % 8)
    mask = padded[..., :length].copy_(attention_mask).flatten(1, 2)[:, None]  # rows begin as in `additive_mask`
    output, _ = sdpa(None, query, key, value, mask, *args, **kwargs)  # without a module it repeats nothing
    return output.unflatten(1, (num_shared, num_queries)).permute(0, 2, 3, 1, 4).flatten(2, 3).contiguous(), None


def _can_be_packed(query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor) -> bool:
    if not query.dim() == key.dim() == attention_mask.dim() == 4 or attention_mask.shape[1:3] != (1, query.shape[2]):
        return False
    are_shared = query.shape[1] > key.shape[1] and query.shape[1] % key.shape[1] == 0
    return are_shared and query.shape[2] <= key.shape[1] * key.shape[3]  # else the mask is larger than repeated keys


def install_packed_attention() -> None:
    """Lets transformers' `sdpa` pack heads. Each copy of this file installs its own once, which does nothing in other calls."""
    sdpa, mark = AttentionInterface()["sdpa"], f"_packs_heads_of_{__name__}"
    # Somebody else's attention may treat each head in another way.
    if sdpa.__module__.startswith("transformers.") and not hasattr(sdpa, mark):
        packed = functools.wraps(sdpa)(functools.partial(packed_attention, sdpa))
        setattr(packed, mark, True)
        AttentionInterface.register("sdpa", packed)

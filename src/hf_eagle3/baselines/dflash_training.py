"""
Training of block drafts (DFlash, https://huggingface.co/papers/2602.06036). One pass drafts many blocks of a text, at places
that are drawn at random.

As in `ttt.py`, row `t` of a text drafts after the target's state at position `t`. Its block has the known token at `t + 1`
and masks behind it. The block attends to the text up to `t`, and to itself.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ..training.attention import (
    BLOCK_SIZE,
    UnrollCache,
    attend_by_flex,
    can_compile_flex,
    compiled_flex,
    fits_flex,
    padded_length,
)
from ..training.ttt import TTTBatch, counted_rows


def draw_rows(
    batch: TTTBatch, steps: int, share: float, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Draws rows of each text of `L` tokens at random, from those that count in any step. Returns them in order, and the number
    of rows that each one stands for, both `(B, K)`. `K` is the `share` of `L`, rounded up.
    """
    length = batch.input_ids.shape[1]
    counted = [counted_rows(batch.labels, batch.documents, step) for step in range(steps)]
    counts = torch.stack([F.pad(rows, (0, length - rows.shape[1])) for rows in counted]).any(dim=0)  # (B, L)
    num = math.ceil(share * length)
    order = torch.rand(counts.shape, device=counts.device, generator=generator) + counts
    rows = order.topk(num, dim=1).indices.sort(dim=1).values
    # A text may have fewer than `K` rows that count. It gets them all, and others that add nothing to the loss.
    return rows, (counts.sum(dim=1, keepdim=True) / num).clamp(min=1).expand(-1, num)


class BlockCache(UnrollCache):
    """
    The draft's cache in training. It computes the attention of `K` blocks to the text and to themselves.

    Args:
        documents (`torch.LongTensor` of shape `(B, L)`): The number of each token's document.
        rows (`torch.LongTensor` of shape `(B, K)`): The last row of the text that each block attends to.
        block_size (`int`): Tokens of a block.
        is_causal (`bool`): Whether a token of a block attends only to those before it.
    """

    def __init__(self, documents: torch.Tensor, rows: torch.Tensor, block_size: int, is_causal: bool):
        super().__init__(documents)
        self.rows = rows.repeat_interleave(block_size, dim=1)  # (B, K * block_size)
        self.block_size, self.is_causal = block_size, is_causal
        if can_compile_flex(documents.device):  # compiling takes longer than many steps, so few lengths are compiled
            lengths = (padded_length(each.shape[1]) for each in (documents, self.rows))
            self.block_mask = padded_mask(documents, self.rows, block_size, is_causal, *lengths)

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        keys, values = self.text[layer_idx]
        query, key, keys = (each.to(value.dtype) for each in (query, key, keys))  # under autocast they differ
        if self.block_mask is not None and fits_flex(query):
            return attend_by_padded_flex(
                query, (keys, values), (key, value), self.block_mask, scaling, compiled_flex()
            )
        num_queries = max(BLOCK_SIZE // self.block_size, 1) * self.block_size  # at a time, whole blocks
        parts = zip(
            *(each.split(num_queries, dim=2) for each in (query, key, value)), self.rows.split(num_queries, dim=1)
        )
        outputs = []
        for query, key, value, rows in parts:
            is_allowed = mask_of_blocks(self.documents, rows, self.block_size, self.is_causal)
            sizes = (*rows.shape, keys.shape[2] + key.shape[2])
            batch, queries, places = (torch.arange(size, device=rows.device) for size in sizes)
            allowed = is_allowed(batch[:, None, None], None, queries[:, None], places)  # (B, Q, L + Q)
            key, value = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
            outputs.append(
                F.scaled_dot_product_attention(query, key, value, allowed[:, None], scale=scaling, enable_gqa=True)
            )
        return torch.cat(outputs, dim=2)


def mask_of_blocks(documents: torch.Tensor, rows: torch.Tensor, block_size: int, is_causal: bool) -> Callable:
    """
    Returns the function `is_allowed(batch, head, query, key)` of flex attention for `Q` tokens of whole blocks: whether each
    attends to the `L` keys of the text, and to the `Q` of the blocks after them. See [`BlockCache`]; `rows` are `(B, Q)`.
    """
    num_keys, own_documents = documents.shape[1], documents.gather(1, rows)
    documents = F.pad(documents, (0, rows.shape[1]))  # an entry for each key

    def is_allowed(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        of_text = (key <= rows[batch, query]) & (documents[batch, key] == own_documents[batch, query])
        place = key - num_keys  # in the blocks
        of_block = (place >= 0) & (place // block_size == query // block_size)
        return of_text | (of_block & (place <= query) if is_causal else of_block)

    return is_allowed


def padded_mask(
    documents: torch.Tensor, rows: torch.Tensor, block_size: int, is_causal: bool, num_keys: int, num_queries: int
) -> BlockMask:
    """Returns the mask of [`attend_by_padded_flex`], with the text padded to `num_keys` tokens, and the blocks to `num_queries`."""
    documents = F.pad(documents, (0, num_keys - documents.shape[1]), value=-1)
    rows = F.pad(rows, (0, num_queries - rows.shape[1]))  # padding attends to the first token
    is_allowed = mask_of_blocks(documents, rows, block_size, is_causal)
    return create_block_mask(is_allowed, len(rows), None, num_queries, num_keys + num_queries, device=rows.device)


def attend_by_padded_flex(
    query: torch.Tensor,
    text: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    block_mask: BlockMask,
    scaling: float,
    attend: Callable = attend_by_flex,
) -> torch.Tensor:
    """
    Returns the attention of the blocks' queries `(B, H, Q, D)` to the keys and values of the text `(B, H_kv, L, D)` and to their
    `own` `(B, H_kv, Q, D)`, by flex attention (`attend`) with a mask of [`padded_mask`].
    """
    num_queries, num_keys = block_mask.shape[-2], block_mask.shape[-1] - block_mask.shape[-2]

    def padded(states: torch.Tensor, length: int) -> torch.Tensor:
        return F.pad(states, (0, 0, 0, length - states.shape[2]))

    joined = (torch.cat([padded(a, num_keys), padded(b, num_queries)], dim=2) for a, b in zip(text, own))
    output, _ = attend(padded(query, num_queries), *joined, block_mask, scaling)
    return output[:, :, : query.shape[2]]

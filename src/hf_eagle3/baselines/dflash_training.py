"""
Training of block drafts (DFlash, https://huggingface.co/papers/2602.06036). One pass drafts many blocks of a text, at places
that are drawn at random.

As in `ttt.py`, row `t` of a text drafts after the target's state at position `t`. Its block has the known token at `t + 1`
and masks behind it. The block attends to the text up to `t`, and to itself.
"""

import math

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ..training.attention import (
    QUERIES_AT_A_TIME,
    UnrollCache,
    can_compile_flex,
    compiled_flex,
    fits_flex,
    merged_attention,
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
        self.rows, self.block_size, self.is_causal = rows, block_size, is_causal
        if can_compile_flex(documents.device):  # compiling takes longer than many steps, so few lengths are compiled
            num_queries = padded_length(rows.shape[1] * block_size)
            self.block_mask = text_mask(documents, rows, block_size, num_queries, padded_length(documents.shape[1]))

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        keys, values = self.text[layer_idx]
        query, key, keys = (each.to(value.dtype) for each in (query, key, keys))  # under autocast they differ
        if self.block_mask is not None and fits_flex(query):
            own = tuple(each.unflatten(2, (-1, self.block_size)) for each in (key, value))
            return merged_attention(
                query, keys, values, self.block_mask, scaling, own, compiled_flex(), self.is_causal
            )
        num_blocks = max(QUERIES_AT_A_TIME // self.block_size, 1)  # at a time
        num_queries, outputs = num_blocks * self.block_size, []
        parts = zip(*(each.split(num_queries, dim=2) for each in (query, key, value)))
        for rows, part in zip(self.rows.split(num_blocks, dim=1), parts):
            arguments = (*part, keys, values, self.documents, rows, scaling, self.block_size, self.is_causal)
            outputs.append(block_attention(*arguments))
        return torch.cat(outputs, dim=2)


def block_attention(
    query: torch.Tensor,  # (B, H, Q, D)
    own_keys: torch.Tensor,  # (B, H_kv, Q, D): those of the blocks
    own_values: torch.Tensor,
    keys: torch.Tensor,  # (B, H_kv, L, D): those of the text
    values: torch.Tensor,
    documents: torch.Tensor,
    rows: torch.Tensor,
    scaling: float,
    block_size: int,
    is_causal: bool,
) -> torch.Tensor:
    """
    Returns the attention of `K` blocks to the text and to themselves, `(B, H, Q, D)`, where `Q = K * block_size`. For the other
    arguments see [`BlockCache`].
    """
    of_text = documents.gather(1, rows)[..., None] == documents[:, None]
    of_text &= rows[..., None] >= torch.arange(documents.shape[1], device=rows.device)  # (B, K, L)
    own = torch.ones(block_size, block_size, dtype=torch.bool, device=rows.device)
    own = torch.block_diag(*[own.tril() if is_causal else own] * rows.shape[1]).bool()  # (Q, Q)
    allowed = torch.cat([of_text.repeat_interleave(block_size, dim=1), own.expand(len(rows), -1, -1)], dim=2)
    return F.scaled_dot_product_attention(
        query,
        torch.cat([keys, own_keys], dim=2),
        torch.cat([values, own_values], dim=2),
        allowed[:, None],
        scale=scaling,
        enable_gqa=True,
    )


def text_mask(
    documents: torch.Tensor, rows: torch.Tensor, block_size: int, num_queries: int, num_keys: int
) -> BlockMask:
    """
    Returns the mask of [`merged_attention`] for blocks behind `rows` `(B, K)`, padded to numbers of queries and keys. It leaves
    out the keys of the blocks: `create_block_mask` has all entries in memory, and there may be four times as many of these.
    """
    rows = rows.repeat_interleave(block_size, dim=1)
    rows = F.pad(rows, (0, num_queries - rows.shape[1]))  # padding attends to the first token
    own_documents = documents.gather(1, rows)
    documents = F.pad(documents, (0, num_keys - documents.shape[1]), value=-1)

    def is_allowed(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (rows[batch, query] >= key) & (own_documents[batch, query] == documents[batch, key])

    return create_block_mask(is_allowed, len(rows), None, num_queries, num_keys, device=documents.device)

"""
Attention during training-time test: within a document it is causal to the keys of step 0, and diagonal to the keys of every
later step. CUDA devices compute it by flex attention, if there is Triton. Others compute it for some queries at a time.
"""

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from ..remote_code.modeling_eagle3 import Eagle3Attention
from ..remote_code.text_eagle3 import flat_indices


# Attention scores of this many queries are in memory at once.
QUERIES_AT_A_TIME = 512


class UnrollCache:
    """
    A draft's cache in training. It keeps the keys and values of a text, whose tokens are in the documents `(B, L)`, and computes
    the attention to them.
    """

    def __init__(self, documents: torch.Tensor):
        self.documents = documents
        self.text: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer: (keys, values) (B, H_kv, L, D)
        self.block_mask: BlockMask | None = None  # for flex attention

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps the first keys and values of each layer, which are those of the text."""
        self.text.setdefault(layer_idx, (keys, values))
        return keys, values

    def attention_forward(
        self,
        module: Eagle3Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        return self.attend(module.layer_idx, query, key, value, scaling).transpose(1, 2), None

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Returns the attention of a layer's queries, `(B, H, L, D)`."""
        raise NotImplementedError


class TTTCache(UnrollCache):
    """The draft's cache during an unroll. It also keeps the keys and values of each row at its later steps."""

    def __init__(self, documents: torch.Tensor):
        super().__init__(documents)
        self.rows: torch.Tensor | None = None  # (B, M): the rows of the text that go on. By default all
        self.own: dict[int, tuple[torch.Tensor, ...]] = {}  # layer: (keys, values) (B, H_kv, M, steps, D)
        if can_compile_flex(documents.device):  # compiling takes longer than many steps, so few lengths are compiled
            self.block_mask = causal_block_mask(documents, padded_length(documents.shape[1]))

    def keep(self, kept: torch.Tensor, rows: torch.Tensor) -> None:
        """Goes on with the entries `kept` `(B, M)` of the step before, which are these `rows` `(B, M)` of the text."""
        self.rows = rows
        for layer_idx, own in self.own.items():
            index = flat_indices(kept, own[0].shape)
            shape = (*own[0].shape[:2], kept.shape[1], *own[0].shape[3:])
            self.own[layer_idx] = tuple(each.flatten(0, 2).index_select(0, index).view(shape) for each in own)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self.text:
            new = keys.unsqueeze(3), values.unsqueeze(3)
            before = self.own.get(layer_idx)
            self.own[layer_idx] = new if before is None else tuple(torch.cat(each, dim=3) for each in zip(before, new))
        return super().update(keys, values, layer_idx)

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        text, own = self.text[layer_idx], self.own.get(layer_idx, ())
        if self.rows is None and self.block_mask is not None and fits_flex(query):
            return merged_attention(query, *text, self.block_mask, scaling, own, compiled_flex())
        return chunked_attention(query, *text, self.documents, scaling, own, self.rows)


def recomputed(function: Callable, *arguments: Any) -> Any:
    """Returns `function(*arguments)`, which backward computes again. It must not draw random numbers."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def chunked_attention(
    query: torch.Tensor,  # (B, H, M, D)
    keys: torch.Tensor,  # (B, H_kv, L, D): those of step 0
    values: torch.Tensor,
    documents: torch.Tensor,  # (B, L): the number of each token's document
    scaling: float,
    own: tuple[torch.Tensor, ...] = (),  # keys and values of later steps, each (B, H_kv, M, steps, D)
    rows: torch.Tensor | None = None,  # (B, M): the rows of the queries. By default all `L`
) -> torch.Tensor:
    """
    Computes the attention of one step, `(B, H, M, D)`. Within a document it is causal to the keys of step 0, and diagonal to the
    keys of every later step. Scores of `QUERIES_AT_A_TIME` queries are in memory at a time, and backward computes them again.
    """
    outputs, num_queries = list[torch.Tensor](), query.shape[2]
    is_large = len(own) > 0 and (rows is not None or num_queries > QUERIES_AT_A_TIME)
    attend: Callable = partial(recomputed, chunk_attention) if is_large else chunk_attention
    places = torch.arange(num_queries, device=query.device).expand(len(query), -1) if rows is None else rows
    for start in range(0, num_queries, QUERIES_AT_A_TIME):
        chunk = slice(start, start + QUERIES_AT_A_TIME)
        seen = slice(chunk.stop) if rows is None else slice(None)  # the last of some rows would force a sync
        text = keys[:, :, seen], values[:, :, seen], documents[:, seen]
        outputs.append(
            attend(query[:, :, chunk], *text, places[:, chunk], scaling, *(each[:, :, chunk] for each in own))
        )
    return torch.cat(outputs, dim=2)


def chunk_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    documents: torch.Tensor,
    rows: torch.Tensor,
    scaling: float,
    own_keys: torch.Tensor | None = None,
    own_values: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Computes [`chunked_attention`] for some `rows` `(B, Q)`, which also attend to `own_keys` and `own_values` of the
    later steps, `(B, H_kv, Q, steps, D)`.
    """
    num_keys, groups = keys.shape[2], query.shape[1] // keys.shape[1]
    allowed = documents.gather(1, rows)[..., None] == documents[:, None]
    allowed &= rows[..., None] >= torch.arange(num_keys, device=query.device)  # (B, Q, K)
    mask = torch.zeros(allowed.shape, dtype=query.dtype, device=query.device)
    mask = mask.masked_fill_(~allowed, torch.finfo(query.dtype).min)[:, None]
    if own_keys is None or own_values is None:
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=scaling, enable_gqa=True)
    query = query.unflatten(1, (-1, groups)) * scaling  # (B, H_kv, G, Q, D)
    scores = query @ keys.unsqueeze(2).transpose(-1, -2) + mask[:, None]  # (B, H_kv, G, Q, K)
    own_scores = torch.einsum("bhgqd,bhqsd->bhgqs", query, own_keys)
    weights = torch.cat([scores, own_scores], dim=-1).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    weights, own_weights = weights.split([num_keys, own_scores.shape[-1]], dim=-1)
    output = weights @ values.unsqueeze(2) + torch.einsum("bhgqs,bhqsd->bhgqd", own_weights, own_values)
    return output.flatten(1, 2)


def attend_by_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: BlockMask,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the attention `(B, H, L, D)` and the logarithms of its sums of exponentials `(B, H, L)`."""
    from torch.nn.attention.flex_attention import AuxRequest  # torch 2.9, which training needs

    output, aux = flex_attention(
        query, key, value, block_mask=block_mask, scale=scaling, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    assert aux.lse is not None  # as asked for
    return output, aux.lse


def merged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_mask: BlockMask,
    scaling: float,
    own: tuple[torch.Tensor, ...] = (),
    attend: Callable = attend_by_flex,
    is_causal: bool = False,
) -> torch.Tensor:
    """
    Computes by flex attention (`attend`), with a `block_mask`, how queries `(B, H, Q, D)` attend to the keys and values
    `(B, H_kv, L, D)` of a text. If `K` blocks of queries also have keys and values of their `own`, `(B, H_kv, K, S, D)`, it merges
    both, each weighted by its share of the sum of exponentials. `is_causal` lets a query attend only to its block's keys up to
    its own. Returns `(B, H, Q, D)`.

    With the mask of [`causal_block_mask`], and rows as blocks, this is [`chunked_attention`].
    """
    num_queries = query.shape[2]
    lengths = block_mask.shape[-2], block_mask.shape[-1], block_mask.shape[-1]
    padded = (F.pad(each, (0, 0, 0, length - each.shape[2])) for each, length in zip((query, keys, values), lengths))
    output, log_sums = (each[:, :, :num_queries] for each in attend(*padded, block_mask, scaling))
    if not own:
        return output
    own_keys, own_values = own
    heads, blocks = (keys.shape[1], -1), (own_keys.shape[2], -1)
    # (B, H_kv, G, K, Q / K, ...)
    query, output, log_sums = (each.unflatten(2, blocks).unflatten(1, heads) for each in (query, output, log_sums))
    scores = torch.einsum("bhgkqd,bhksd->bhgkqs", query * scaling, own_keys).float()
    if is_causal:
        after = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(after, -torch.inf)
    weights = torch.cat([log_sums[..., None], scores], dim=-1).softmax(dim=-1).to(output.dtype)
    output = output * weights[..., :1] + torch.einsum("bhgkqs,bhksd->bhgkqd", weights[..., 1:], own_values)
    return output.flatten(3, 4).flatten(1, 2)


def causal_block_mask(documents: torch.Tensor, length: int | None = None) -> BlockMask:
    """Returns the `BlockMask` of causal attention within documents `(B, L)`. Queries and keys may be padded to a `length`."""
    documents = F.pad(documents, (0, (length or documents.shape[1]) - documents.shape[1]), value=-1)
    batch_size, length = documents.shape

    def is_allowed(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    return create_block_mask(is_allowed, batch_size, None, length, length, device=documents.device)


def padded_length(length: int) -> int:
    """Returns the next power of two, at least one block of the kernel (128)."""
    return max(1 << (length - 1).bit_length(), 128)


def fits_flex(query: torch.Tensor) -> bool:
    """
    Whether kernels of [`compiled_flex`] fit on the device of queries `(B, H, L, D)`. GPUs with about 100 KiB of shared memory (RTX,
    A10, L4, L40S) have too little for heads of more than 256 bytes (https://github.com/pytorch/pytorch/issues/180278 and 198224).
    AMD's have kernels of their own.
    """
    size = (1 << (query.shape[-1] - 1).bit_length()) * query.element_size()
    if size <= 256 or torch.version.hip is not None:
        return True
    properties = torch.cuda.get_device_properties(query.device)
    return properties.shared_memory_per_block_optin >= 112 * 1024  # type: ignore[attr-defined]  # torch's stub lacks it


def can_compile_flex(device: torch.device) -> bool:
    """Whether [`compiled_flex`] runs on a device. PyTorch for Windows comes without Triton."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


@cache
def compiled_flex() -> Callable:
    """Returns [`attend_by_flex`], compiled once."""
    return torch.compile(attend_by_flex, dynamic=False)

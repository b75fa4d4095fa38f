# SPDX-License-Identifier: Apache-2.0
"""The draft's cache: slots for each row, where a forward writes to, and the CUDA graphs that calls leave to later ones."""

import threading
import weakref

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .attention_eagle3 import additive_mask
from .devices_eagle3 import GraphedFunction, captures_graphs
from .embedding_eagle3 import PackedTable
from .target_eagle3 import has_plain_modules, position_limits
from .text_eagle3 import flat_indices
from .tree_eagle3 import Plan


class DraftCache:
    """
    The draft's `keys` and `values`, of each layer `(P, num_heads, num_slots, head_dim)`: a place for each row, and perhaps
    more. Each row has slots of its own, filled from the left by its text and then a tree. So nothing moves when rows accept
    different numbers of tokens, or when a tree is forgotten. If the tree is captured as a CUDA graph, the cache has that
    `graph`, which reads and writes these slots, and the `conditions` under which a later call may take both.
    """

    graph: GraphedFunction | None = None
    conditions: tuple | None = None

    def __init__(self, draft: PreTrainedModel, like: torch.Tensor, num_places: int, num_slots: int):
        config = draft.config.transformer_layer_config
        shape = num_places, config.num_key_value_heads, num_slots, config.head_dim
        with torch.inference_mode(False):  # calls in and outside of this mode write to them
            self.keys, self.values = ([like.new_zeros(shape) for _ in draft.layers] for _ in range(2))

    @property
    def num_places(self) -> int:
        return len(self.keys[0])

    @property
    def num_slots(self) -> int:
        return self.keys[0].shape[2]

    def copy_rows(self, source: "DraftCache", rows: torch.Tensor | slice) -> None:
        """Makes some rows of a cache, which may be this one, the first rows of this one."""
        for states, others in zip((*self.keys, *self.values), (*source.keys, *source.values)):
            chosen = others[rows]
            states[: len(chosen), :, : chosen.shape[2]] = chosen

    def zero(self, indices: torch.Tensor) -> None:
        """Zeros the slots `indices` `(B, K)` of the first rows: NaNs pass through any mask."""
        flat = flat_indices(indices, (len(indices), *self.keys[0].shape[1:]))
        for states in (*self.keys, *self.values):
            states.view(-1, states.shape[3]).index_fill_(0, flat, 0)

    def keep(self, draft: PreTrainedModel) -> None:
        """Keeps it and its graph for as long as the draft lives, unless it is large, or `MOST_KEPT` others have more rows."""
        is_large = sum(each.nbytes for each in (*self.keys, *self.values)) > MOST_BYTES
        if self.graph is None or self.graph.graph is None or self.conditions is None or is_large:
            return
        with _LOCK:
            kept = _KEPT.setdefault(draft, {})
            kept[self.num_places] = self
            if len(kept) > MOST_KEPT:
                del kept[min(kept)]

    @staticmethod
    def take(draft: PreTrainedModel, num_places: int, num_slots: int, conditions: tuple | None) -> "DraftCache | None":
        """Takes one that was kept under the same conditions, so that no other thread uses it. Its slots are zeros."""
        if conditions is None:
            return None
        with _LOCK:
            cache = _KEPT.get(draft, {}).pop(num_places, None)
        # Many more slots would make each step longer.
        if cache is None or cache.conditions != conditions or not num_slots <= cache.num_slots <= 4 * num_slots:
            return None
        for states in (*cache.keys, *cache.values):
            states.zero_()
        return cache


# The caches with graphs of each draft, by the number of places.
_KEPT: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_LOCK, MOST_KEPT, MOST_BYTES = threading.Lock(), 8, 2**28


class Slots:
    """
    The cache of one forward of the draft. It writes to the slots `indices` `(B, Q)` of the first rows of a [`DraftCache`],
    and attends to their first `num_visible` slots where its mask allows.
    """

    def __init__(self, cache: DraftCache, indices: torch.Tensor, num_visible: int):
        self.cache, self.indices, self.num_visible = cache, indices, num_visible

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`~transformers.Cache.update`]."""
        keys, values = self.cache.keys[layer_idx], self.cache.values[layer_idx]
        num_rows = len(self.indices)
        flat = flat_indices(self.indices, (num_rows, *keys.shape[1:]))
        for states, new in ((keys, key_states), (values, value_states)):
            states.view(-1, states.shape[3]).index_copy_(0, flat, new.flatten(0, 2).to(states.dtype))
        return keys[:num_rows, :, : self.num_visible], values[:num_rows, :, : self.num_visible]

    def masks(
        self, config: PreTrainedConfig, allowed: torch.Tensor, distances: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Additive masks by layer type, given the allowed slots `(B, Q, num_visible)` and their distances."""
        dtype, masks = self.cache.keys[0].dtype, {}
        for layer_type in set(config.layer_types):
            seen = allowed & (distances < config.sliding_window) if layer_type == "sliding_attention" else allowed
            masks[layer_type] = additive_mask(seen, dtype)[:, None]
        return masks


def can_be_captured(draft: PreTrainedModel, embedding: torch.nn.Embedding) -> bool:
    """Whether a draft's tree can be captured as a CUDA graph: it must not sync."""
    device, config = draft.device, draft.config
    is_on_device = config.has_own_embed_tokens or embedding.weight.device == device
    if getattr(config, "static_tree", None) is not None:  # EAGLE's reads lists
        return False
    # Frequencies that switch depend on the largest position.
    return captures_graphs(device) and is_on_device and not position_limits(config.transformer_layer_config)


def graph_conditions(
    draft: PreTrainedModel, embedding: torch.nn.Embedding, max_plan: Plan, is_static: bool
) -> tuple | None:
    """What a graph depends on, beside its inputs and slots; `None` if that may change unnoticed."""
    # The weights that autocast has cast are freed at its end.
    if torch.is_autocast_enabled("cuda") or isinstance(embedding, PackedTable):
        return None
    if not has_plain_modules(draft, PLAIN_MODULES):
        return None
    tensors = (*draft.parameters(), *draft.buffers(), embedding.weight)
    if any(type(each) not in (torch.Tensor, torch.nn.Parameter) for each in tensors):  # quantized, or sharded
        return None
    return max_plan, is_static, tuple((each.data_ptr(), each.shape, each.dtype) for each in tensors)


# Modules whose computation nothing but their tensors can change. Adapters can be switched off, and others.
PLAIN_MODULES = ("torch.nn.", "transformers.", "hf_eagle3.", f"{__package__}.")

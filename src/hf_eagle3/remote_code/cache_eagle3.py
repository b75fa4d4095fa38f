# SPDX-License-Identifier: Apache-2.0
"""The target's cache during a call: keeping what was accepted, and rolling back what was not."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticLayer,
)

from .devices_eagle3 import GraphedFunction, captures_graphs, on_device
from .text_eagle3 import align_right, flat_indices


# The classes of layers that can be rolled back, by name because older transformers do not have all. Layers that share
# another layer's keys, and layers with keys of an index beside them, which only `crop` keeps in step:
SHARING, INDEXED = "DummyLayer", "DynamicIndexedLayer"
ATTENTION = {"DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", SHARING, INDEXED}
# Layers with convolutions, or with recurrent states that can be replayed, and those with convolutions beside a window:
LINEAR = {"LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer"}
SLIDING_LINEAR = "LinearAttentionAndSlidingWindowAttentionLayer"


class TreeCache:
    """
    The target's cache during one call. After each step it keeps what was accepted of at most `most_nodes` nodes. It
    reads chains only, unless the target `takes_trees`. Recurrent states are refused, unless it `may_replay` them.
    """

    # If more tokens wait to be replayed, the next forward has no tree. Not measured on accelerators.
    MOST_REPLAYED = 16

    def __init__(self, cache: Cache | None, most_nodes: int, may_replay: bool = False, takes_trees: bool = True):
        self.most_nodes, self.may_replay, self.is_chain = most_nodes, may_replay, not takes_trees
        self.num_new = 0  # the newest entries, still undecided
        self._adopt(check_cache(cache, may_replay))

    def track(self, cache: Cache, num_new: int) -> None:
        """Takes the cache that a forward returned, with `num_new` new entries."""
        self.num_new = num_new
        if cache is not self.cache:  # Phi-3 makes a new one when its rotary frequencies switch
            self._adopt(check_cache(cache, self.may_replay), num_new)
            self.record()

    def _adopt(self, cache: Cache, num_new: int = 0) -> None:
        self.cache = cache
        self.length = int(cache.get_seq_length()) - num_new  # kept in Python: a static cache counts on its device
        for layer in cache.layers:  # states updated by every token can follow one path only
            self.is_chain |= isinstance(layer, LinearAttentionCacheLayerMixin) or type(layer).__name__ == INDEXED
        self.is_static, self.graphed_keep = is_static(cache), None
        devices = {layer.keys.device for layer in filter(has_keys, cache.layers)}
        if self.is_static and len(devices) == 1 and captures_graphs(*devices):
            self.graphed_keep = GraphedFunction(*devices)
        self.recurrent_layers = recurrent = recurrent_layers(cache)
        self.saved: list[torch.Tensor] | None = None  # recurrent states before the replayed tokens
        self.replayed: dict[str, torch.Tensor] = {}  # their inputs, kept because the text may be edited
        self.layers = [layer for layer in cache.layers if layer not in recurrent or has_keys(layer)]
        types = DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin
        self.recording_layers = [each for each in self.layers if each not in recurrent and isinstance(each, types)]

    def record(self) -> None:
        """From here on sliding layers and convolutions keep what a rollback needs."""
        for layer in self.recording_layers:
            layer.activate_past_recording()
        if not self.is_static:
            self.crop(0)

    def release(self) -> None:
        """Ends what [`record`] began."""
        for layer in self.recording_layers:
            layer.record_past = False

    @property
    def capacity(self) -> int:
        """How many entries a static cache can hold."""
        return min(layer.max_cache_len for layer in self.cache.layers if isinstance(layer, StaticLayer))

    @property
    def num_replayed(self) -> int:
        """How many tokens the next forward reads again."""
        return self.replayed["input_ids"].shape[-1] if self.replayed else 0

    def crop(self, tokens_to_remove: int, *layers: Any) -> None:
        """`Cache.crop` without recurrent states, of these layers or of all."""
        for layer in layers or self.layers:  # recurrent states may have keys beside them
            (DynamicLayer if layer in self.recurrent_layers else type(layer)).crop(layer, tokens_to_remove)

    def prepare(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Puts the inputs of replayed tokens before those of the nodes, `(..., B, N)`. Called before a forward."""
        return inputs

    def keep(self, nodes: list[list[int]], batch_growth: int) -> None:
        """Keeps the ascending `nodes` of each row's newest tree. The cache becomes longer by `batch_growth`."""
        await_prefetch(self.cache)
        num_nodes, self.num_new, path = self.num_new, 0, nodes[0]
        self.length += batch_growth
        if any(other != path for other in nodes) or len(path) != batch_growth:
            keep_rows(self.cache, nodes, num_nodes, batch_growth, self.length)
            return
        num_left_out = num_nodes - len(path)
        if num_left_out > 0 and (self.is_static or path != list(range(len(path)))):
            device = next(filter(has_keys, self.cache.layers)).keys.device
            padded = on_device([*path, *[0] * num_left_out, len(path)], device)
            if self.graphed_keep is not None and num_nodes == self.most_nodes:
                self.graphed_keep(partial(keep_path, self.cache), padded)
            else:
                keep_path(self.cache, padded)
        if not self.is_static:
            self.crop(-num_left_out)

    def end_replay(self) -> None:
        """What was replayed is part of the past from here on."""
        self.crop(0)
        self.replayed, self.saved = {}, None

    def discard_tree(self) -> None:
        """Forgets the newest tree. Zeros its slots in a static cache: NaNs pass through any mask."""
        self.keep([[]], batch_growth=0)
        if self.is_static:
            for layer in filter(has_keys, self.cache.layers):
                for states in (layer.keys, layer.values):
                    states[..., self.length :, :] = 0

    def roll_back(self) -> None:
        """Rolls back to the last complete step after an error. Some layers may not have read the tree."""
        for layer in self.layers:
            conv_states = getattr(layer, "conv_states", {})
            kernel_sizes = {i: layer.conv_kernel_size[i] for i, states in conv_states.items() if states is not None}
            before = {i: conv_states[i][..., :size] for i, size in kernel_sizes.items()}
            num_new = int(layer.get_seq_length()) - self.length + self.num_replayed if has_keys(layer) else 0
            index = getattr(layer, "indexer_keys", None)
            if num_new > 0 and self.is_static:
                layer.cumulative_length.fill_(self.length)
            elif num_new > 0:
                self.crop(-num_new, layer)
            if index is not None:  # a forward that broke off may have left it shorter than the keys, or longer
                layer.indexer_keys = index[:, : self.length]
            conv_states.update(before)  # `crop` shortens also those that have not read the tree

    def select(self, rows: list[int], excess: int) -> None:
        """Keeps only these rows, and drops the `excess` leftmost positions, which only other rows used."""
        await_prefetch(self.cache)
        self.length -= excess
        for layer in self.cache.layers:  # a list would force a sync for each tensor
            layer.batch_select_indices(on_device(rows, layer.keys.device) if has_keys(layer) else rows)
        if excess > 0:  # treats the newest position as new, and keeps it
            keep_rows(self.cache, [[0] for _ in rows], 1, 1 - excess, self.length)


class ReplayCache(TreeCache):
    """Recurrent states cannot forget a token. This restores them, and reads the accepted tokens again with the next chain."""

    def prepare(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.saved is None and inputs["input_ids"].shape[-1] > 1:
            self.saved = [state.clone() for state in self._states()]
        self.read = inputs
        if self.replayed:
            self.read = {
                name: torch.cat([self.replayed[name].to(entries.device), entries], dim=-1)
                for name, entries in inputs.items()
            }
        return self.read

    def _states(self) -> Iterator[torch.Tensor]:
        for layer in self.recurrent_layers:
            for states in (layer.conv_states, layer.recurrent_states):
                yield from (state for state in states.values() if state is not None)

    def _restore(self, saved: list[torch.Tensor]) -> None:
        for state, old in zip(self._states(), saved):
            state.copy_(old)

    def keep(self, nodes: list[list[int]], batch_growth: int) -> None:
        num_nodes, self.num_new = self.num_new, 0
        self.length += batch_growth
        if batch_growth < num_nodes and self.saved is not None:  # a single node is always accepted
            self._restore(self.saved)
            num_read = self.num_replayed
            self.crop(-num_read - num_nodes)
            self.replayed = {name: entries[..., : num_read + batch_growth] for name, entries in self.read.items()}
        else:
            self.end_replay()

    def roll_back(self) -> None:
        if self.saved is None:  # a plain step's token belongs to the text
            self.crop(0)  # sliding layers may hold more than their window
            return
        self._restore(self.saved)
        super().roll_back()


def has_keys(layer: Any) -> bool:
    """Whether a cache layer stores keys. Convolutions do not, nor do layers that share another layer's keys."""
    return getattr(layer, "keys", None) is not None


def recurrent_layers(cache: Cache) -> list[Any]:
    """The layers of a cache with recurrent states or, if it has any, with convolutions, which are treated alike."""
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    are_recurrent = any(any(layer.is_recurrent_states_initialized.values()) for layer in layers)
    return layers if are_recurrent else []


def is_user_defined(cache: Cache) -> bool:
    """Whether the caller passed the cache to `generate`, and can read it after the call."""
    return getattr(cache, "_is_user_defined", False)


def is_static(cache: Cache) -> bool:
    """Whether a cache has a fixed number of slots."""
    return any(isinstance(layer, StaticLayer) for layer in cache.layers)


def is_unused_static(cache: Any) -> bool:
    """Whether a cache is a static one that `generate` made for this call, of layers that [`with_room`] can make anew."""
    known = "StaticLayer", "StaticSlidingWindowLayer", SHARING
    return (
        type(cache) is StaticCache
        and not is_user_defined(cache)
        and not cache.offloading
        and all(type(layer).__name__ in known for layer in cache.layers)
    )


def with_room(cache: StaticCache, max_length: int, num_slots: int) -> Cache:
    """
    A cache like an unused static one, with at least `max_length` slots, and `num_slots` more for a tree. Sliding layers
    keep all tokens, because a rollback needs them.
    """
    lengths = [layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)]
    capacity = num_slots + max(max_length, *lengths)
    layers = [StaticLayer(capacity) if isinstance(layer, StaticLayer) else layer for layer in cache.layers]
    for layer, given in zip(layers, cache.layers):
        if has_keys(given):  # initialized before a compiled prefill
            layer.lazy_initialization(given.keys[..., :0, :], given.values[..., :0, :])
            given.keys = given.values = None  # `generate` holds the given cache until its end, with all its memory
            given.is_initialized = False
    return Cache(layers=layers)


def copy_into(cache: StaticCache, source: Cache, prompt_length: int, length: int) -> None:
    """Fills an unused static cache with the first `length` entries of another, as a prompt and the text after it."""
    for layer, source_layer in zip(cache.layers, source.layers):
        if not has_keys(source_layer):
            continue
        full = max(prompt_length, min(length, layer.max_cache_len))  # full sliding layers update differently
        for begin, end in ((0, prompt_length), (prompt_length, full), (full, length)):
            if begin < end:
                layer.update(source_layer.keys[..., begin:end, :], source_layer.values[..., begin:end, :])


def keep_path(cache: Cache, padded: torch.Tensor) -> tuple[()]:
    """
    Moves some of the last `N` entries to their front. A static cache forgets the others. `padded` `(N + 1,)` has the
    ascending indices, zeros, and their number. Shapes do not depend on it, so this can be captured.
    """
    num_new, device = len(padded) - 1, None
    for layer in filter(has_keys, cache.layers):
        if layer.keys.device != device:
            device = layer.keys.device
            path, count = padded.to(device).split([num_new, 1])
            front = torch.arange(num_new, device=device)
        begin = layer.cumulative_length - num_new if type(layer) is StaticLayer else None
        for states in (layer.keys, layer.values):
            if begin is None:
                new = states[..., -num_new:, :]
                new.index_copy_(-2, front, new.index_select(-2, path))
            else:
                states.index_copy_(-2, begin + front, states.index_select(-2, begin + path))
        if begin is not None:
            layer.cumulative_length.add_(count[0] - num_new)
    return ()


def keep_rows(cache: Cache, kept: Sequence[list[int]], num_new: int, batch_growth: int, length: int) -> None:
    """
    Keeps the ascending entries `kept` of the last `num_new` entries of each row. Rows may keep different numbers of
    them: all end at the right, like a batch that is padded on the left. The cache grows by `batch_growth`, to
    `length`.
    """
    most = max(map(len, kept))
    table = [[*indices, *[0] * (most - len(indices)), len(indices)] for indices in kept]
    indices_of: dict[tuple, torch.Tensor] = {}
    for layer in filter(has_keys, cache.layers):
        has_slots = type(layer) is StaticLayer
        num_past = length - batch_growth if has_slots else layer.keys.shape[-2] - num_new
        moved = []
        for states in (layer.keys, layer.values):
            key = num_past, *states.shape[:3], states.device
            if key not in indices_of:  # each row's past, and what it keeps of the new entries
                new, counts = on_device(table, states.device).split([most, 1], dim=1)
                past = torch.arange(num_past, device=states.device).expand(len(kept), -1)
                source = torch.cat([past, num_past + new], dim=1)
                source = align_right(source, num_past + counts[:, 0], min(length, num_past + most))
                indices_of[key] = flat_indices(source, states.shape)
            entries = states.flatten(0, 2).index_select(0, indices_of[key])
            moved.append(entries.view(*states.shape[:2], -1, states.shape[3]))
        if has_slots:
            for states, kept_states in zip((layer.keys, layer.values), moved):
                states[..., :length, :] = kept_states
            layer.cumulative_length.fill_(length)
            continue
        layer.keys, layer.values = moved
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = length
    if not is_static(cache):
        cache.crop(0)  # to what sliding layers need


def await_prefetch(cache: Cache) -> None:
    """Waits for the first layer of an offloaded cache. A forward begins to fetch it for the next one."""
    if cache.offloading:
        torch.cuda.default_stream(cache.prefetch_stream.device).wait_stream(cache.prefetch_stream)


def has_own_methods(cache: Cache) -> bool:
    """Whether methods of a cache are not transformers' own. They may evict or change what a tree, or a rollback, needs."""
    methods = [name for name, value in vars(Cache).items() if callable(value) and not name.startswith("__")]
    return any(name in vars(cache) or getattr(type(cache), name) is not getattr(Cache, name) for name in methods)


def check_cache(cache: Cache | None, may_replay: bool) -> Cache:
    """Returns the cache. Raises `ValueError` if it is missing, or tokens cannot be rolled back in it."""
    if cache is None:
        raise ValueError("EAGLE-3 decoding needs a target that returns a cache. Leave `assistant_model` out.")
    if not isinstance(cache, Cache) or has_own_methods(cache):
        raise ValueError(
            f"EAGLE-3 decoding cannot roll back a {type(cache).__name__}, which is no cache of transformers or has methods of its "
            "own. Use the default `DynamicCache`. If the target takes no other cache, leave out the draft."
        )
    if cache.offloading and is_static(cache):
        raise ValueError("EAGLE-3 decoding does not offload a static cache. Use `cache_implementation='static'`.")
    for layer in cache.layers:
        name = type(layer).__name__
        if name in ATTENTION and not (is_static(cache) and name.startswith("Dynamic")):
            continue
        if name in {*LINEAR, SLIDING_LINEAR} and not is_static(cache):
            is_recurrent = any(layer.is_recurrent_states_initialized.values())
            if not is_recurrent or (may_replay and name in LINEAR):
                continue
        raise ValueError(
            f"EAGLE-3 decoding cannot roll back a {type(cache).__name__} with {name} layers. If you chose the cache, use the default, "
            "or `cache_implementation='static'` if layers slide. Otherwise the target takes no draft: leave it out."
        )
    return cache

# SPDX-License-Identifier: Apache-2.0
"""The cache of a model that reads trees: what a query attends to, and what is kept of what was read."""

import torch
import torch.nn.functional as F
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
)


def tree_attention_mask(config, cache, past_length, visible, query_depths, key_depths, padding_mask=None):
    """
    Additive masks for tree rows that follow a linear past. Distances are those of positions in the text: siblings lie
    at different cache indices but at one position, which is what windows and chunks count.

    Args:
        config (`PreTrainedConfig`): Text configuration of the model that attends.
        cache (`Cache`): Its cache, before the forward.
        past_length (`int`): Number of positions before the tree. May be a tensor of that if the cache is static.
        visible (`torch.BoolTensor` of shape `(B, Q, T)`):
            Which of `T` tree rows each of `Q` queries attends to. The queries are the last `Q` of the tree rows, the
            others are in the cache.
        query_depths (`torch.LongTensor` of shape `(B, Q)`), key_depths (`torch.LongTensor` of shape `(B, T)`):
            Depths below the root.
        padding_mask (`torch.Tensor` of shape `(B, >= past_length)`, *optional*): Zeros on padding; no more entries
        than a static cache.

    Returns:
        `torch.FloatTensor` of shape `(B, 1, Q, K)`, or a dict of those by layer type if the model's layers differ, as
        `transformers.masking_utils.create_masks_for_generate` does.
    """
    batch_size, num_queries, num_tree_rows = visible.shape
    device = visible.device
    left_padding = 0
    if padding_mask is not None:
        padding_mask = padding_mask.bool()
        left_padding = (padding_mask.cumsum(dim=1) == 0).sum(dim=1)[:, None, None]  # not holes

    def rows_of(layer):  # of a static layer: which slots hold the tree, and which of its rows
        row = torch.arange(layer.keys.shape[-2], device=device) - past_length
        return (row >= 0) & (row < num_tree_rows), row.clamp(0, num_tree_rows - 1)

    def allowed_by(layer):  # (B, Q, K), but for windows
        if type(layer) is StaticLayer:  # fixed shapes, whatever the length
            is_tree, row = rows_of(layer)
            is_past = torch.arange(len(row), device=device) < past_length
            if padding_mask is not None:
                is_past = is_past & F.pad(padding_mask, (0, len(row) - padding_mask.shape[1]))[:, None]
            return torch.where(is_tree, visible[..., row], is_past)
        num_past = layer.keys.shape[-2] - (num_tree_rows - num_queries)
        allowed = F.pad(visible, (num_past, 0), value=True)
        if padding_mask is not None:
            allowed[..., :num_past] &= padding_mask[:, None, past_length - num_past : past_length]
        return allowed

    def positions_in(layer):  # (B, K)
        if type(layer) is StaticLayer:
            is_tree, row = rows_of(layer)
            return torch.where(is_tree, past_length + key_depths[:, row], torch.arange(len(row), device=device))
        num_past = layer.keys.shape[-2] - (num_tree_rows - num_queries)
        past = torch.arange(past_length - num_past, past_length, device=device)
        return torch.cat([past.expand(batch_size, -1), past_length + key_depths], dim=1)

    def mask_for(layer_type, layer):
        allowed = allowed_by(layer)
        if layer_type != "full_attention":
            query, key = (past_length + query_depths)[:, :, None], positions_in(layer)[:, None]
            if layer_type == "sliding_attention":
                allowed &= query - key < config.sliding_window
            else:
                chunk = config.attention_chunk_size
                allowed &= (query - left_padding) // chunk == (key - left_padding) // chunk
        # Additive: eager attention would add a boolean mask to the scores.
        lowest = torch.finfo(layer.keys.dtype).min
        mask = torch.full(allowed.shape, lowest, dtype=layer.keys.dtype, device=device)
        return mask.masked_fill_(allowed, 0)[:, None]

    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        if getattr(config, "sliding_window", None) is not None:
            layer_type = "sliding_attention"
        elif getattr(config, "attention_chunk_size", None) is not None:
            layer_type = "chunked_attention"
        else:
            layer_type = "full_attention"
        return mask_for(layer_type, cache.layers[0])
    first_layers = {}
    for layer_type, layer in zip(layer_types, cache.layers):
        if getattr(layer, "keys", None) is not None:  # layers that share another one's keys store none
            first_layers.setdefault(layer_type, layer)
    return {layer_type: mask_for(layer_type, layer) for layer_type, layer in first_layers.items()}


class TreeCache:
    """
    The target's cache, from which a step removes the nodes it did not accept.

    Recurrent states cannot forget a token. They are put back to what they were before the step, and read what it
    accepted again, together with the next tree.

    Args:
        cache (`Cache`): As the prompt's forward left it.
        path_length (`int`): The most nodes that a path may have.
        may_reread (`bool`):
            Whether the target reads several tokens from where recurrent states are as it reads them one by one.
    """

    # More tokens than so many are read again without a tree. A guess: accelerators, for which it matters, have not
    # been measured.
    MOST_TO_REREAD = 16

    def __init__(self, cache, path_length: int, may_reread: bool):
        check_cache(cache, may_reread)
        self.path_length, self.may_reread = path_length, may_reread
        self.keep_path = keep_path
        self.cache = None
        self.track(cache, num_new=0)

    def track(self, cache, num_new: int):
        """
        Takes the cache of the target's outputs, which a target may exchange (Phi-3 at its rotary switch), with
        `num_new` entries that are not decided on.
        """
        self.num_new, self.is_in_forward = num_new, False
        if cache is self.cache:
            self.length += num_new
            return
        check_cache(cache, self.may_reread)
        self.cache = cache
        self.length = int(cache.get_seq_length())  # on the host: a static cache counts on its device
        # States that each token updates can be rolled back to along one path only.
        self.is_chain = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
        self.is_static = is_static(cache)
        self.recurrent_layers = recurrent_layers(cache)
        self.to_reread = 0  # tokens at the end of `length` that these have forgotten
        self.saved = None  # their states before that
        self.layers = [layer for layer in cache.layers if layer not in self.recurrent_layers]
        self.recording_layers = [layer for layer in self.layers if hasattr(layer, "record_past")]
        self.were_recording = [layer.record_past for layer in self.recording_layers]
        # From here on sliding layers and convolutions keep what a step may have to roll back to.
        for layer in self.recording_layers:
            layer.activate_past_recording()
        if not self.is_static:
            self.crop(0)

    @property
    def capacity(self) -> int:
        """How many entries a static cache can hold."""
        return min(layer.max_cache_len for layer in self.cache.layers if not stores_nothing(layer))

    @property
    def room(self) -> int:
        """How many more entries a static cache can hold."""
        return self.capacity - self.length

    def crop(self, tokens_to_remove: int) -> None:
        """`Cache.crop`, but for recurrent states."""
        for layer in self.layers:
            layer.crop(tokens_to_remove)
        for layer in self.recurrent_layers:
            if isinstance(layer, DynamicLayer):  # with keys beside them
                DynamicLayer.crop(layer, tokens_to_remove)

    def prepare(self, num_new: int) -> None:
        """Called before a forward over `num_new` nodes: remembers what recurrent states may have to be put back to."""
        self.is_in_forward = True
        if num_new > 1 and self.saved is None and self.recurrent_layers:
            self.saved = [state.clone() for state in self._states()]

    def _states(self):
        """Of recurrent layers."""
        for layer in self.recurrent_layers:
            for states in (layer.conv_states, layer.recurrent_states):
                yield from (state for state in states.values() if state is not None)

    def put_back(self) -> None:
        """Lets recurrent layers forget what they read since `prepare`."""
        for state, saved in zip(self._states(), self.saved):
            state.copy_(saved)

    def keep_paths(self, paths: list[list[int]], growth: int) -> None:
        """Keeps each row's path, ascending, of the newest tree, if it has one. The cache becomes longer by `growth`."""
        num_nodes, self.num_new = self.num_new, 0
        if num_nodes == 0:
            return
        self.length += growth - num_nodes
        path = paths[0]
        if self.recurrent_layers:
            if growth < num_nodes and self.saved is not None:  # a single node is not taken back
                self.put_back()
                self.crop(-self.to_reread - num_nodes)
                self.to_reread += growth
            else:
                self.crop(0)
                self.to_reread, self.saved = 0, None
            return
        if any(other != path for other in paths) or len(path) != growth:
            keep_rows(self.cache, paths, num_nodes, growth, self.length)
        elif self.is_static and growth < num_nodes:
            device = self.cache.layers[0].keys.device
            path = torch.tensor(path + [0] * (self.path_length - growth), device=device)
            self.keep_path(self.cache, path, torch.tensor(growth, device=device), num_nodes)
        elif not self.is_static:
            if path != list(range(growth)):
                index = None
                for layer in self.cache.layers:
                    if getattr(layer, "keys", None) is None:
                        continue
                    if index is None or index.device != layer.keys.device:
                        index = torch.tensor(path, device=layer.keys.device)
                    for states in (layer.keys, layer.values):
                        nodes = states[..., -num_nodes:, :]
                        nodes[..., :growth, :] = nodes.index_select(-2, index)
            self.crop(growth - num_nodes)

    def take_back(self) -> None:
        """Forgets all of the newest nodes, and what they left in the slots of a static cache: perhaps no numbers."""
        self.keep_paths([[]], growth=0)
        if self.is_static:
            for layer in self.cache.layers:
                if not stores_nothing(layer):
                    for states in (layer.keys, layer.values):
                        states[..., self.length :, :] = 0

    def leave_forward(self) -> None:
        """
        After a forward that raised something: keeps the root, which plain `generate` would have read, in the layers
        that it came to. Recurrent states read it again.
        """
        if not self.is_in_forward:
            return
        self.is_in_forward = False
        length, num_kept = self.length - self.to_reread, 1
        if self.saved is not None:
            self.put_back()
            num_kept, self.to_reread, self.length = 0, self.to_reread + 1, self.length + 1
        for layer in self.cache.layers:
            is_recurrent = layer in self.recurrent_layers
            if stores_nothing(layer) or (is_recurrent and not isinstance(layer, DynamicLayer)):
                continue
            if getattr(layer, "keys", None) is not None:
                num_new = int(layer.get_seq_length()) - length
            else:  # a convolution
                num_new = layer.conv_states[0].shape[-1] - layer.conv_kernel_size[0]
            if num_new > num_kept and self.is_static:
                layer.cumulative_length.fill_(length + num_kept)
            elif num_new > num_kept:
                (DynamicLayer if is_recurrent else type(layer)).crop(layer, num_kept - num_new)

    def select(self, rows: list[int], excess: int) -> None:
        """Forgets all rows but these, and the `excess` positions at the left that only others had. A step must have ended."""
        self.length -= excess
        select_rows(self.cache, rows, self.length, excess)

    def release(self) -> None:
        """Leaves the cache as plain `generate` does."""
        for layer, was_recording in zip(self.recording_layers, self.were_recording):
            layer.record_past = was_recording


def recurrent_layers(cache) -> list:
    """If a cache has recurrent states: its layers with these or with convolutions, which are then treated like them."""
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    are_recurrent = any(any(layer.is_recurrent_states_initialized.values()) for layer in layers)
    return layers if are_recurrent else []


def is_static(cache) -> bool:
    """Whether a cache has room for a fixed number of tokens, into which it writes by index."""
    return any(isinstance(layer, StaticLayer) for layer in cache.layers)


def is_unused_static(cache) -> bool:
    """Whether a cache is a static one that `generate` made for this call."""
    return (
        type(cache) is StaticCache
        and not getattr(cache, "_is_user_defined", False)
        and not cache.offloading
        and all(isinstance(layer, StaticLayer) or stores_nothing(layer) for layer in cache.layers)
        and not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    )


def with_room(cache, max_length: int, num_slots: int):
    """
    A cache like an unused static one, of at least `max_length` slots and with `num_slots` more for the nodes of a
    tree. Its sliding layers, which would have overwritten what a step may have to roll back to, hold all tokens.
    """
    lengths = [layer.max_cache_len for layer in cache.layers if not stores_nothing(layer)]
    capacity = num_slots + max(max_length, *lengths)
    layers = [layer if stores_nothing(layer) else StaticLayer(capacity) for layer in cache.layers]
    for layer, given in zip(layers, cache.layers):
        if given.is_initialized and not stores_nothing(given):  # ahead of a prefill that is compiled
            layer.lazy_initialization(given.keys[..., :0, :], given.values[..., :0, :])
    return Cache(layers=layers)


def copy_into(cache, source, prompt_length: int, length: int) -> None:
    """Fills an unused static cache with the first `length` entries of another, as if they had come after a prompt."""
    for layer, source_layer in zip(cache.layers, source.layers):
        if stores_nothing(layer):
            continue
        full = max(prompt_length, min(length, layer.max_cache_len))  # sliding layers go on otherwise from there
        for begin, end in ((0, prompt_length), (prompt_length, full), (full, length)):
            if begin < end:
                layer.update(source_layer.keys[..., begin:end, :], source_layer.values[..., begin:end, :])


def stores_nothing(layer) -> bool:
    """Whether a layer of a cache shares another one's keys."""
    return type(layer).__name__ == "DummyLayer"


def keep_path(cache, path: torch.LongTensor, growth: torch.LongTensor, num_new: int) -> None:
    """
    Of the last `num_new` entries of a static cache, keeps the first `growth` of the ascending ones in `path`. Shapes
    depend on neither, so that it can be compiled.
    """
    for layer in cache.layers:
        if stores_nothing(layer):
            continue
        begin, source = layer.cumulative_length - num_new, path[:num_new].to(layer.keys.device)
        target = begin + torch.arange(len(source), device=source.device)
        for states in (layer.keys, layer.values):
            states.index_copy_(-2, target, states.index_select(-2, begin + source))
        layer.cumulative_length.add_(growth.to(source.device) - num_new)


def keep_rows(cache, kept: list[list[int]], num_new: int, growth: int, length: int) -> None:
    """
    Of the last `num_new` entries of each row of a cache, keeps the ascending ones in `kept`. Rows may keep different
    numbers: all end at the cache's right, like a batch that is padded on the left. The cache becomes longer by
    `growth`, which is what its longest row does, and has `length` positions then.
    """
    counts = torch.tensor([len(indices) for indices in kept])[:, None]
    most = int(counts.max())
    table = torch.tensor([[0] * (most - len(indices)) + indices for indices in kept])  # (B, most), at the right
    indices_of = {}
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            continue
        has_slots = type(layer) is StaticLayer
        num_past = length - growth if has_slots else layer.keys.shape[-2] - num_new
        moved = []
        for states in (layer.keys, layer.values):
            key = num_past, *states.shape[:3], states.device
            if key not in indices_of:
                from_right = torch.arange(min(length, num_past + most)).flip(0)  # (S,)
                past = num_past - 1 - (from_right - counts)
                new = num_past + table.gather(1, (most - 1 - from_right).clamp(min=0).expand(len(kept), -1))
                source = torch.where(from_right < counts, new, past).clamp(min=0)  # (B, S)
                indices_of[key] = flat_indices(source.to(states.device), states.shape)
            moved.append(
                states.flatten(0, 2).index_select(0, indices_of[key]).view(*states.shape[:2], -1, states.shape[3])
            )
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


def select_rows(cache, rows: list[int], length: int, excess: int) -> None:
    """Keeps only some rows of a dynamic cache, and of those the last `length` positions: all but `excess` of them."""
    cache.batch_select_indices(rows)
    if excess > 0:  # as if the newest position were new
        keep_rows(cache, [[0] for _ in rows], num_new=1, growth=1 - excess, length=length)


def flat_indices(indices: torch.LongTensor, shape) -> torch.LongTensor:
    """
    Where the entries `(B, K)` of states of a `shape` `(B, H, S, ...)` are when these dimensions are flattened,
    `(B * H * K,)`. With them `index_select` copies whole vectors, which `gather` does number by number.
    """
    batch_size, num_heads, num_entries = shape[:3]
    first = torch.arange(batch_size * num_heads, device=indices.device).view(batch_size, num_heads, 1) * num_entries
    return (first + indices[:, None]).flatten()


def take_rows(states: torch.Tensor, indices: torch.LongTensor) -> torch.Tensor:
    """Vectors `(B, K, D)` of `states` `(B, S, D)` at `indices` `(B, K)`."""
    flat = flat_indices(indices, states[:, None].shape)
    return states.flatten(0, 1).index_select(0, flat).view(*indices.shape, -1)


def take_paths(features, paths):
    """The rows `(B, R, ...)` of the nodes on each path; shorter paths are at the right."""
    if len(paths) == 1:
        return features[:, paths[0]]
    most = max(map(len, paths))
    index = torch.tensor([[0] * (most - len(path)) + path for path in paths], device=features.device)
    return take_rows(features, index)


def check_cache(cache, may_reread: bool) -> None:
    """Refuses caches from which the nodes of a tree, or of a chain, cannot be taken out again (see [`TreeCache`])."""
    if cache is None:
        raise ValueError("EAGLE-3 decoding needs a target that returns `past_key_values`.")
    if getattr(type(cache), "crop", None) is not Cache.crop:
        raise ValueError(
            f"EAGLE-3 decoding cannot roll back a {type(cache).__name__}. Use the default `DynamicCache`."
        )
    if getattr(cache, "offloading", False) and is_static(cache):
        raise ValueError("EAGLE-3 decoding does not offload a static cache. Use `cache_implementation='static'`.")
    for layer in cache.layers:
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer):
            continue
        if stores_nothing(layer):
            continue
        if not is_static(cache):
            if may_reread and type(layer) in (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer):
                continue
            if type(layer) is LinearAttentionLayer and not any(layer.is_recurrent_states_initialized.values()):
                continue
        raise ValueError(
            f"EAGLE-3 decoding cannot roll back a {type(cache).__name__} with {type(layer).__name__} layers. Use the "
            "default `DynamicCache` (no `cache_implementation`). What cannot be rolled back: recurrent states, but for those of a few targets; "
            "convolutions beside static layers; a `StaticCache` with sliding layers that was made before the call (`cache_implementation='static'` makes "
            "another)."
        )

# SPDX-License-Identifier: Apache-2.0
"""The cache of a model that reads trees: what a query attends to, and what is kept of what was read."""

import types
import weakref

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

from .ragged_eagle3 import additive_mask, align_right, flat_indices, on_device


def tree_attention_mask(config, cache, past_length, ancestors, depths, padding_mask=None):
    """
    Additive masks for the nodes of trees that follow a linear past. Distances are those of positions in the text:
    siblings lie at different cache indices but at one position, which is what windows and chunks count.

    Args:
        config (`PreTrainedConfig`): Text configuration of the model that attends.
        cache (`Cache`): Its cache, before the forward.
        past_length (`int`): Number of positions before the tree.
        ancestors (`torch.BoolTensor` of shape `(B, N, N)`), depths (`torch.LongTensor` of shape `(B, N)`):
            See [`~tree_eagle3.DraftTree`].
        padding_mask (`torch.Tensor` of shape `(B, past_length)`, *optional*): Zeros on padding.

    Returns:
        `torch.FloatTensor` of shape `(B, 1, N, K)`, or a dict of those by layer type if the model's layers differ, as
        `transformers.masking_utils.create_masks_for_generate` does.
    """
    device, left_padding = depths.device, 0
    if padding_mask is not None:
        padding_mask = padding_mask.bool()
        left_padding = (padding_mask.cumsum(dim=1) == 0).sum(dim=1)[:, None, None]  # not holes

    def mask_for(layer_type, layer):
        num_slots = layer.keys.shape[-2] if type(layer) is StaticLayer else None
        num_past = past_length if num_slots else layer.keys.shape[-2]
        allowed = F.pad(ancestors, (num_past, 0), value=True)  # (B, N, K)
        if padding_mask is not None:
            allowed[..., :num_past] &= padding_mask[:, None, past_length - num_past : past_length]
        if layer_type != "full_attention":
            past = torch.arange(past_length - num_past, past_length, device=device).expand(len(depths), -1)
            key = torch.cat([past, past_length + depths], dim=1)[:, None]  # positions
            query = (past_length + depths)[..., None]
            if layer_type == "sliding_attention":
                allowed &= query - key < config.sliding_window
            else:
                chunk = config.attention_chunk_size
                allowed &= (query - left_padding) // chunk == (key - left_padding) // chunk
        if num_slots:
            allowed = F.pad(allowed, (0, num_slots - allowed.shape[-1]), value=False)
        # Additive: eager attention would add a boolean mask to the scores.
        return additive_mask(allowed, layer.keys.dtype)[:, None]

    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        is_sliding, is_chunked = (
            getattr(config, name, None) is not None for name in ("sliding_window", "attention_chunk_size")
        )
        layer_type = "sliding_attention" if is_sliding else "chunked_attention" if is_chunked else "full_attention"
        return mask_for(layer_type, cache.layers[0])
    first_layers = {}
    for layer_type, layer in zip(layer_types, cache.layers):
        if getattr(layer, "keys", None) is not None:  # layers that share another one's keys store none
            first_layers.setdefault(layer_type, layer)
    return {layer_type: mask_for(layer_type, layer) for layer_type, layer in first_layers.items()}


class TreeCache:
    """
    The target's cache during one call, rolled back after each step to what was accepted.

    Args:
        cache (`Cache`): As the prefill left it.
        path_length (`int`): The most nodes that a path may have.
        may_replay (`bool`): Whether recurrent states of the target may be rolled back, by [`ReplayCache`].
        takes_trees (`bool`): Whether the target can read more than chains.
    """

    num_replayed = 0  # tokens that the next forward reads again

    def __init__(self, cache, path_length: int, may_replay: bool = False, takes_trees: bool = True):
        self.path_length, self.may_replay, self.keep_path = path_length, may_replay, keep_path
        self.takes_trees = takes_trees
        check_cache(cache, may_replay)
        self.cache = None
        self.track(cache, num_new=0)

    def track(self, cache, num_new: int) -> None:
        """
        Takes the cache of the target's outputs, which a target may exchange (Phi-3 at its rotary switch), with
        `num_new` entries that are not decided on.
        """
        self.num_new = num_new
        if cache is self.cache:
            return
        check_cache(cache, self.may_replay)
        is_exchanged, self.cache = self.cache is not None, cache
        self.length = int(cache.get_seq_length()) - num_new  # on the host: a static cache counts on its device
        # States that each token updates can be rolled back to along one path only.
        is_linear = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
        self.is_chain = is_linear or not self.takes_trees
        self.is_static = is_static(cache)
        self.layers = [layer for layer in cache.layers if layer not in recurrent_layers(cache)]
        self.recording_layers = [layer for layer in self.layers if hasattr(layer, "record_past")]
        if is_exchanged:
            self.record()

    def record(self) -> None:
        """From here on sliding layers and convolutions keep what a step may have to roll back to."""
        for layer in self.recording_layers:
            layer.activate_past_recording()
        if not self.is_static:
            self.crop(0)

    @property
    def capacity(self) -> int:
        """How many entries a static cache can hold."""
        return min(layer.max_cache_len for layer in self.cache.layers if not stores_nothing(layer))

    @property
    def may_read_tree(self) -> bool:
        """Whether the next forward may read more than the root."""
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """`Cache.crop`, but for recurrent states."""
        for layer in self.layers:
            layer.crop(tokens_to_remove)

    def prepare(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Called before a forward, with what has an entry for each node `(..., B, N)`."""
        return inputs

    def keep(self, nodes: list[list[int]], growth: int) -> None:
        """Keeps some nodes of the newest tree in each row, ascending. The cache becomes longer by `growth`."""
        num_nodes, self.num_new, path = self.num_new, 0, nodes[0]
        self.length += growth
        if any(other != path for other in nodes) or len(path) != growth:
            keep_rows(self.cache, nodes, num_nodes, growth, self.length)
        elif self.is_static and growth < num_nodes:
            device = self.cache.layers[0].keys.device
            padding = [0] * (self.path_length - growth)
            path, growth = on_device([*path, *padding, growth], device).split([self.path_length, 1])
            self.keep_path(self.cache, path, growth[0], num_nodes)
        elif not self.is_static:
            if path != list(range(growth)):
                index = None
                for layer in self.cache.layers:
                    if getattr(layer, "keys", None) is None:
                        continue
                    if index is None or index.device != layer.keys.device:
                        index = on_device(path, layer.keys.device)
                    for states in (layer.keys, layer.values):
                        new = states[..., -num_nodes:, :]
                        new[..., :growth, :] = new.index_select(-2, index)
            self.crop(growth - num_nodes)

    def discard_tree(self) -> None:
        """Forgets all of the newest nodes, and what they left in the slots of a static cache: perhaps no numbers."""
        self.keep([[]], growth=0)
        if self.is_static:
            for layer in self.cache.layers:
                if not stores_nothing(layer):
                    for states in (layer.keys, layer.values):
                        states[..., self.length :, :] = 0

    def roll_back(self) -> None:
        """Forgets a step that was broken off, perhaps in a forward that some layers had not come to."""
        for layer in self.layers:
            if stores_nothing(layer):
                continue
            if getattr(layer, "keys", None) is not None:
                num_new = int(layer.get_seq_length()) - self.length + self.num_replayed
            else:  # a convolution
                num_new = layer.conv_states[0].shape[-1] - layer.conv_kernel_size[0]
            if num_new > 0 and self.is_static:
                layer.cumulative_length.fill_(self.length)
            elif num_new > 0:
                layer.crop(-num_new)

    def finish(self, target, forward, inputs: dict) -> None:
        """Completes what a call leaves to whoever sees the cache after it. `inputs` are those of the next token."""

    def select(self, rows: list[int], excess: int) -> None:
        """Forgets all rows but these, and the `excess` positions at the left that only others had."""
        self.length -= excess
        self.cache.batch_select_indices(rows)
        if excess > 0:  # as if the newest position were new
            keep_rows(self.cache, [[0] for _ in rows], num_new=1, growth=1 - excess, length=self.length)

    def release(self) -> None:
        """Leaves the cache as plain `generate` does."""
        for layer in self.recording_layers:
            layer.record_past = False


class ReplayCache(TreeCache):
    """
    A cache with recurrent states, which cannot forget a token. They are put back to what they were before a step, and
    replay what it accepted together with the next chain.
    """

    # More tokens than so many are replayed without a chain after them. A guess: accelerators, for which it matters,
    # have not been measured.
    MOST_REPLAYED = 16

    def track(self, cache, num_new: int) -> None:
        if cache is not self.cache:
            self.recurrent_layers = recurrent_layers(cache)
            self.saved = None  # their states before what is to be replayed
            self.replayed: dict[str, torch.Tensor] = {}  # what the target read of it, as the text may be edited
        super().track(cache, num_new)

    @property
    def num_replayed(self) -> int:
        return self.replayed["input_ids"].shape[-1] if self.replayed else 0

    @property
    def may_read_tree(self) -> bool:
        return self.num_replayed <= self.MOST_REPLAYED

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        for layer in self.recurrent_layers:
            if isinstance(layer, DynamicLayer):  # with keys beside them
                DynamicLayer.crop(layer, tokens_to_remove)

    def prepare(self, inputs):
        if self.saved is None and inputs["input_ids"].shape[-1] > 1:
            self.saved = [state.clone() for state in self._states()]
        self.read = inputs
        if self.replayed:
            self.read = {
                name: torch.cat([self.replayed[name].to(entries.device), entries], dim=-1)
                for name, entries in inputs.items()
            }
        return self.read

    def _states(self):
        for layer in self.recurrent_layers:
            for states in (layer.conv_states, layer.recurrent_states):
                yield from (state for state in states.values() if state is not None)

    def _restore(self) -> None:
        for state, saved in zip(self._states(), self.saved):
            state.copy_(saved)

    def keep(self, nodes, growth):
        num_nodes, self.num_new = self.num_new, 0
        self.length += growth
        if growth < num_nodes and self.saved is not None:  # a single node is not taken back
            self._restore()
            num_read = self.num_replayed
            self.crop(-num_read - num_nodes)
            self.replayed = {name: entries[..., : num_read + growth] for name, entries in self.read.items()}
        else:
            self.crop(0)
            self.replayed, self.saved = {}, None

    def roll_back(self):
        """Rolls back to before what was to be replayed. A plain step has read one token, and that is the text's."""
        if self.saved is None:
            return
        self._restore()
        super().roll_back()
        for layer in self.recurrent_layers:
            if getattr(layer, "keys", None) is not None:
                DynamicLayer.crop(layer, min(self.length - self.num_replayed - int(layer.get_seq_length()), 0))

    def finish(self, target, forward, inputs: dict) -> None:
        """Replays what is left, so that the cache is as plain `generate` leaves it."""
        num_replayed = self.num_replayed
        if num_replayed == 0:
            return
        inputs = {**inputs, **self.replayed}
        if inputs.get("attention_mask") is not None:
            inputs["attention_mask"] = inputs["attention_mask"][..., : self.length]
        forward(**target.prepare_inputs_for_generation(inputs.pop("input_ids"), **inputs), return_dict=True)
        self.crop(0)
        self.replayed, self.saved = {}, None


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


# What was compiled for each draft, by the settings of the compiler.
_COMPILED: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def compiled(function, module, compile_config):
    """`function`, compiled for the calls with `module`; itself without a `compile_config` (`CompileConfig`)."""
    if compile_config is None:
        return function
    functions = _COMPILED.setdefault(module, {})
    key = (function.__name__, repr(sorted(compile_config.to_dict().items(), key=str)))
    if key not in functions:
        # Dynamo counts how often it compiled a code object, and gives up: each draft gets its own.
        own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        functions[key] = torch.compile(own, **compile_config.to_dict())
    return functions[key]


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
    most = max(map(len, kept))
    table = [[*indices, *[0] * (most - len(indices)), len(indices)] for indices in kept]
    indices_of = {}
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            continue
        has_slots = type(layer) is StaticLayer
        num_past = length - growth if has_slots else layer.keys.shape[-2] - num_new
        moved = []
        for states in (layer.keys, layer.values):
            key = num_past, *states.shape[:3], states.device
            if key not in indices_of:  # the past of each row, and what it keeps after that
                new, counts = on_device(table, states.device).split([most, 1], dim=1)
                past = torch.arange(num_past, device=states.device).expand(len(kept), -1)
                source = torch.cat([past, num_past + new], dim=1)
                source = align_right(source, num_past + counts[:, 0], min(length, num_past + most))
                indices_of[key] = flat_indices(source, states.shape)
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


def check_cache(cache, may_replay: bool) -> None:
    """Refuses caches from which the nodes of a tree, or of a chain, cannot be taken out again (see [`TreeCache`])."""
    if cache is None:
        raise ValueError("EAGLE-3 decoding needs a target that returns a cache.")
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
            if may_replay and type(layer) in (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer):
                continue
            if type(layer) is LinearAttentionLayer and not any(layer.is_recurrent_states_initialized.values()):
                continue
        raise ValueError(
            f"EAGLE-3 decoding cannot roll back a {type(cache).__name__} with {type(layer).__name__} layers. Use the "
            "default `DynamicCache` (no `cache_implementation`). What cannot be rolled back: recurrent states, but for those of a few targets; "
            "convolutions beside static layers; a `StaticCache` with sliding layers that was made before the call (`cache_implementation='static'` makes "
            "another)."
        )

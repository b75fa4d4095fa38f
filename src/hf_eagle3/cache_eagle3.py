# Copyright 2026 The hf-eagle3 authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""The cache of a model that reads trees: what a query attends to, and what is kept of what was read."""

import torch
import torch.nn.functional as F
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)


def tree_attention_mask(config, cache, past_length, visible, query_depths, key_depths, padding_mask=None):
    """
    Additive masks for tree rows that follow a linear past. Distances are those of positions in the text: siblings lie
    at different cache indices but at one position, which is what windows and chunks count.

    Args:
        config (`PreTrainedConfig`): Text configuration of the model that attends.
        cache (`Cache`): Its cache, before the forward.
        past_length (`int`): Number of positions before the tree.
        visible (`torch.BoolTensor` of shape `(B, Q, T)`):
            Which of `T` tree rows each of `Q` queries attends to. The queries are the last `Q` of the tree rows, the
            others are in the cache.
        query_depths (`torch.LongTensor` of shape `(B, Q)`), key_depths (`torch.LongTensor` of shape `(B, T)`):
            Depths below the root.
        padding_mask (`torch.Tensor` of shape `(B, >= past_length)`, *optional*): Zeros on padding.

    Returns:
        `torch.FloatTensor` of shape `(B, 1, Q, K)`, or a dict of those by layer type if the model's layers differ, as
        `transformers.masking_utils.create_masks_for_generate` does.
    """
    batch_size, num_queries, num_tree_rows = visible.shape
    device = visible.device
    left_padding = 0
    if padding_mask is not None:
        padding_mask = padding_mask[:, :past_length].bool()
        left_padding = (padding_mask.cumsum(dim=1) == 0).sum(dim=1)[:, None, None]  # not holes

    def mask_for(layer_type, layer):
        num_past = layer.keys.shape[-2] - (num_tree_rows - num_queries)
        allowed = F.pad(visible, (num_past, 0), value=True)
        if padding_mask is not None:
            allowed[..., :num_past] &= padding_mask[:, None, past_length - num_past :]
        if layer_type != "full_attention":
            past = torch.arange(past_length - num_past, past_length, device=device)
            query = (past_length + query_depths)[:, :, None]
            key = torch.cat([past.expand(batch_size, -1), past_length + key_depths], dim=1)[:, None]
            if layer_type == "sliding_attention":
                allowed &= query - key < config.sliding_window
            else:
                chunk = config.attention_chunk_size
                allowed &= (query - left_padding) // chunk == (key - left_padding) // chunk
        # Additive: eager attention would add a boolean mask to the scores.
        mask = torch.zeros(allowed.shape, dtype=layer.keys.dtype, device=device)
        return mask.masked_fill_(~allowed, torch.finfo(mask.dtype).min)[:, None]

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
    """The target's cache, from which a step removes the nodes it did not accept."""

    def __init__(self, cache):
        check_cache(cache)
        self.cache = None
        self.track(cache, num_new=0)

    def track(self, cache, num_new: int):
        """
        Takes the cache of the target's outputs, which a target may exchange (Phi-3 at its rotary switch), with `num_new`
        entries that are not decided on.
        """
        self.num_new = num_new
        if cache is self.cache:
            return
        check_cache(cache)
        self.cache = cache
        # States that each token updates can be rolled back to along one path only.
        self.is_chain = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
        self.recording_layers = [layer for layer in cache.layers if hasattr(layer, "record_past")]
        self.were_recording = [layer.record_past for layer in self.recording_layers]
        # From here on sliding layers and convolutions keep what a step may have to roll back to.
        cache.activate_past_recording()
        cache.crop(0)

    @property
    def length(self) -> int:
        return self.cache.get_seq_length()

    def keep_paths(self, paths: list[list[int]], growth: int) -> None:
        """Keeps each row's path, ascending, of the newest tree, if it has one. The cache becomes longer by `growth`."""
        num_nodes, self.num_new = self.num_new, 0
        if num_nodes == 0:
            return
        path = paths[0]
        if any(other != path for other in paths) or len(path) != growth:
            keep_rows(self.cache, paths, num_nodes, growth)
            return
        if path != list(range(len(path))):
            for layer in self.cache.layers:
                if getattr(layer, "keys", None) is None:
                    continue
                for states in (layer.keys, layer.values):
                    nodes = states[..., -num_nodes:, :]
                    nodes[..., : len(path), :] = nodes[..., path, :]
        self.cache.crop(len(path) - num_nodes)

    def release(self) -> None:
        """Leaves the cache as plain `generate` does."""
        for layer, was_recording in zip(self.recording_layers, self.were_recording):
            layer.record_past = was_recording


def keep_rows(cache, kept: list[list[int]], num_new: int, growth: int) -> None:
    """
    Of the last `num_new` entries of each row of a cache, keeps the ascending ones in `kept`. Rows may keep different
    numbers: all end at the cache's right, like a batch that is padded on the left. The cache becomes longer by `growth`,
    which is what its longest row does.
    """
    length = cache.get_seq_length() - num_new + growth
    counts = torch.tensor([len(indices) for indices in kept])[:, None]
    most = int(counts.max())
    table = torch.tensor([[0] * (most - len(indices)) + indices for indices in kept])  # (B, most), at the right
    sources = {}
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            continue
        num_past = layer.keys.shape[-2] - num_new
        if num_past not in sources:
            from_right = torch.arange(min(length, num_past + most)).flip(0)  # (S,)
            past = num_past - 1 - (from_right - counts)
            new = num_past + table.gather(1, (most - 1 - from_right).clamp(min=0).expand(len(kept), -1))
            sources[num_past] = torch.where(from_right < counts, new, past).clamp(min=0).to(layer.keys.device)
        source = sources[num_past][:, None, :, None]  # (B, 1, S, 1)
        layer.keys = layer.keys.gather(-2, source.expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3]))
        layer.values = layer.values.gather(-2, source.expand(-1, layer.values.shape[1], -1, layer.values.shape[3]))
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = length
    cache.crop(0)  # to what sliding layers need


def take_paths(features, paths):
    """The rows `(B, R, ...)` of the nodes on each path; shorter paths are at the right."""
    if len(paths) == 1:
        return features[:, paths[0]]
    most = max(map(len, paths))
    index = torch.tensor([[0] * (most - len(path)) + path for path in paths], device=features.device)
    return features.gather(1, index[..., None].expand(-1, -1, features.shape[-1]))


def check_cache(cache) -> None:
    """Refuses caches from which the nodes of a tree, or of a chain, cannot be taken out again."""
    if cache is None:
        raise ValueError("EAGLE-3 decoding needs a target that returns `past_key_values`.")
    if getattr(type(cache), "crop", None) is not Cache.crop:
        raise ValueError(
            f"EAGLE-3 decoding cannot roll back a {type(cache).__name__}. Use the default `DynamicCache`."
        )
    for layer in cache.layers:
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            continue
        if type(layer).__name__ == "DummyLayer":  # stores nothing: shares another one's keys
            continue
        records_past = type(layer) is LinearAttentionLayer and hasattr(layer, "activate_past_recording")
        if records_past and not any(layer.is_recurrent_states_initialized.values()):  # only convolutions do
            continue
        raise ValueError(
            f"EAGLE-3 decoding cannot roll back a {type(cache).__name__} with {type(layer).__name__} layers. Use the "
            "default `DynamicCache` (no `cache_implementation`); recurrent states cannot be rolled back."
        )

# SPDX-License-Identifier: Apache-2.0
"""The draft as a proposer: its cache, its unread tokens, and growing its tree."""

import itertools
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from .accept_eagle3 import Sampler, sample_scores
from .attention_eagle3 import PACKED_HEADS, additive_mask
from .devices_eagle3 import GraphedFunction, captures_graphs, on_device, reads_without_sync
from .target_eagle3 import PackedTable, has_plain_modules, position_limits
from .text_eagle3 import flat_indices, right_index, stack_right, take_rows
from .tree_eagle3 import Accepted, DraftTree, GenerationCall, Plan, Proposer


# The cache: slots for each row, and the CUDA graphs that calls leave to later ones --------------------------------


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
        """
        Keeps the cache and its graph for later calls, unless it is larger than `MOST_BYTES`. Beyond `MOST_KEPT`, the one with the
        fewest rows is dropped.
        """
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


# Reading and drafting ----------------------------------------------------------------------------------------------


# Unread tokens (B, R), the states and positions before them, and how many of them, at the right, are each row's.
UnreadTokens = tuple[Sequence[torch.Tensor], list[int]]


class DraftState(NamedTuple):
    """A draft during a call, the embedding that it may borrow from the target, and its cache."""

    draft: PreTrainedModel
    embedding: torch.nn.Embedding
    cache: DraftCache
    longest: int | None  # tokens that the longest row has read; `None` for fixed shapes


class Unread(NamedTuple):
    """What the draft reads next: the newest tokens of each row, at the right, and the target's states before them."""

    tokens: torch.Tensor  # (B, R)
    states: torch.Tensor  # (B, R, n_aux * H)
    positions: torch.Tensor  # (B, R): of the states
    counts: torch.Tensor  # (B,): how many of the R tokens are each row's
    lengths: torch.Tensor  # (B,): how many tokens each row has read before


def read_unread(state: DraftState, unread: Unread, num_masks: int = 0) -> Any:
    """Reads tokens, and `num_masks` masks after them. Returns the [`Eagle3Output`] of each row's last token and of the masks."""
    draft, embedding, cache, longest = state
    tokens, states, positions, counts, lengths = unread
    index = right_index(counts, tokens.shape[1])  # (B, R)
    states = states.where((index >= 0)[..., None], 0)  # padding may have NaNs, which pass through any mask
    inputs_embeds, hidden_states = draft.embed(tokens, embedding), draft.combine_hidden_states(states)
    if num_masks > 0:
        ahead = torch.arange(num_masks, device=tokens.device)
        index = torch.cat([index, counts[:, None] + ahead], dim=1)
        positions = torch.cat([positions, positions[:, -1:] + 1 + ahead], dim=1)
        inputs_embeds, hidden_states = (
            torch.cat([known, mask.expand(len(tokens), -1, -1)], dim=1)
            for known, mask in zip((inputs_embeds, hidden_states), draft.mask_inputs(num_masks, embedding))
        )
    num_visible = cache.num_slots if longest is None else min(longest + index.shape[1], cache.num_slots)
    # Padding goes to free slots after the row's text.
    indices = (lengths[:, None] + index % index.shape[1]).clamp(max=cache.num_slots - 1)
    slots = Slots(cache, indices, num_visible)
    distances = (lengths[:, None] + index.clamp(min=0))[..., None] - torch.arange(num_visible, device=tokens.device)
    return draft(
        inputs_embeds=inputs_embeds,
        hidden_states=hidden_states,
        position_ids=positions,
        attention_mask=slots.masks(draft.config.transformer_layer_config, distances >= 0, distances),
        cache=slots,
        logits_to_keep=1 + num_masks,
    )


def read_and_grow(state: DraftState, unread: Unread, plan: Plan, *settings: Any) -> DraftTree:
    """
    Reads tokens and grows a tree below them, then clears its slots. A parallel draft runs once, because its logits
    do not depend on drafted tokens. `settings` are those of [`~tree_eagle3.grow_tree`], from `threshold` on.
    """
    draft, embedding, cache, longest = state
    tokens, positions = unread.tokens, unread.positions
    num_masks = plan.depth - 1 if draft.config.is_parallel else 0
    newest = read_unread(state, unread, num_masks)
    logits, hidden_states = newest.logits[:, -1 - num_masks], newest.last_hidden_state[:, -1 - num_masks]
    lengths = (unread.lengths + unread.counts)[:, None]  # (B, 1)
    depths, all_slots = tokens[:, :0], torch.arange(cache.num_slots, device=tokens.device).expand(len(tokens), -1)

    def advance(
        node_tokens: torch.Tensor, hidden_states: torch.Tensor, level: int, visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal depths
        width = node_tokens.shape[1]
        if draft.config.is_parallel:
            return newest.logits[:, level - 1 - num_masks, None].expand(-1, width, -1), hidden_states
        depths = torch.cat([depths, torch.full_like(node_tokens, level)], dim=1)  # (B, T), of all nodes so far
        nodes = lengths + torch.arange(depths.shape[1], device=tokens.device)  # their slots
        past = all_slots if longest is None else all_slots[:, : longest + tokens.shape[1] + depths.shape[1]]
        slots = Slots(cache, nodes[:, -width:], past.shape[1])
        allowed = (past < lengths)[:, None].expand(-1, width, -1)
        allowed = allowed.scatter(2, nodes[:, None].expand(-1, width, -1), visible)
        # Siblings share a position. The first level's is the one after the newest token's.
        distances = (lengths + level - 1) - past.scatter(1, nodes, lengths + depths - 1)
        outputs = draft(
            inputs_embeds=draft.embed(node_tokens, embedding),
            hidden_states=hidden_states,
            position_ids=(positions[:, -1:] + level).expand(-1, width),
            attention_mask=slots.masks(draft.config.transformer_layer_config, allowed, distances[:, None]),
            cache=slots,
        )
        return outputs.logits, outputs.last_hidden_state

    token_ids = None if draft.d2t is None else draft.draft_token_ids
    tree = draft.grow_tree(tokens[:, -1:], logits, hidden_states, advance, token_ids, plan, *settings)
    cache.zero(lengths + torch.arange(depths.shape[1] + num_masks, device=tokens.device))  # the slots of the tree
    return tree


class Drafter(Proposer):
    """
    The draft during one call. On CUDA devices the largest tree is grown by a function of fixed shapes, which is captured
    as a CUDA graph. It is not compiled: compiling many levels takes minutes.
    """

    # Older unread steps are dropped. Otherwise plain decoding would keep the whole text's states.
    MAX_UNREAD = 256
    MOST_PAIRS = 2**25  # entries of a mask, whose distances then take 256 MiB

    def __init__(self, draft: PreTrainedModel, call: GenerationCall):
        self.draft, self.call, self.is_static = draft, call, call.capacity is not None
        self.max_plan = call.max_plan._replace(depth=min(call.max_plan.depth, call.max_plan.num_nodes))
        self.most_new = self.max_plan.depth + 1  # tokens that a step with a tree may accept
        self.cache: DraftCache | None = None
        self.lengths: list[int] = []  # how many tokens each row has read
        self.unread: list[UnreadTokens] = []  # what each step accepted
        self.token_ids = None if draft.d2t is None else draft.draft_token_ids
        head = draft.get_output_embeddings().weight
        # What logits look like: their width, dtype and device. A quantized head could not make other tensors.
        self.like = torch.empty(len(head), dtype=head.dtype, device=head.device)
        # Slots beside the text: for accepted tokens, or a tree. EAGLE's static one may have wider levels than its branching factor.
        plan = self.max_plan
        width = min(plan.branching_factor, len(head))
        self.num_spare = max(self.most_new, width * (plan.depth - 1), plan.num_nodes)
        self.is_captured = can_be_captured(draft, call.embedding)

    def observe(self, accepted: Accepted) -> None:
        states: Any = accepted.states
        tokens, positions = accepted.tokens.to(self.like.device), accepted.positions.to(self.like.device)
        self.unread.append(((tokens, states.to(self.like), positions), accepted.counts))
        if len(self.unread) > self.MAX_UNREAD:
            if self.lengths:
                del self.unread[0]
            else:  # the prompt: all later tokens attend to its first ones
                self.unread.append(self.read_all_but_newest(has_fixed_shape=False))

    def select(self, rows: list[int]) -> None:
        index = on_device(rows, self.like.device)  # a list would force a sync for each tensor
        for i, (blocks, counts) in enumerate(self.unread):
            counts = [counts[row] for row in rows]
            self.unread[i] = [block[index, -max(counts) :] for block in blocks], counts
        if self.cache is not None:
            self.lengths = [self.lengths[row] for row in rows]
            self.cache.copy_rows(self.cache, index)
            # Another capture takes longer than drafting for rows that left. A power of two lets calls share graphs.
            num_places = 1 << (len(rows) - 1).bit_length() if self.is_captured else len(rows)
            if num_places < self.cache.num_places:
                self._move(num_places, self.cache.num_slots)

    def propose(self, plan: Plan, root_tokens: torch.Tensor, sampler: Sampler | None = None) -> DraftTree:
        has_fixed_shape = self.is_captured and plan == self.max_plan
        with PACKED_HEADS.on():
            blocks, counts = self.read_all_but_newest(has_fixed_shape)
            if has_fixed_shape:
                num_missing = self.most_new - blocks[0].shape[1]
                blocks = [F.pad(block, (*(0, 0) * (block.dim() - 2), num_missing, 0)) for block in blocks]
            state, unread = self._begin_reading(blocks, counts, self.num_spare, has_fixed_shape)
            if has_fixed_shape:
                return self._fixed_tree(state, unread, sampler)
            # Counting the nodes above a threshold forces a sync. Verifying more costs little.
            threshold = self.call.threshold if reads_without_sync(unread.tokens.device) else 0.0
            guess = None if sampler is None else partial(sampler.guess, token_ids=self.token_ids)
            return read_and_grow(state, unread, plan, threshold, self.call.calibration.power, guess)

    def _fixed_tree(self, state: DraftState, unread: Unread, sampler: Sampler | None) -> DraftTree:
        """[`read_and_grow`] as a function of tensors alone, which can be captured."""
        device = unread.tokens.device
        noise = temperature = None
        if sampler is not None:
            noise = sampler.noise_ahead(range(self.max_plan.depth), self.token_ids, self.like)
            noise, temperature = _filled(noise, state.cache.num_places), on_device(sampler.temperature, device)
        power = on_device(self.call.calibration.power, device, torch.float32)

        def grow(*inputs: Any) -> tuple[torch.Tensor | None, ...]:
            *unread, power, noise, temperature = inputs

            def guess(logits: torch.Tensor, level: int) -> torch.Tensor:
                return sample_scores(logits.float() / temperature, noise[:, level])

            guess_samples = None if noise is None else guess
            tree = read_and_grow(state, Unread(*unread), self.max_plan, 0.0, power, guess_samples)
            return tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.confidences

        assert state.cache.graph is not None
        grown = state.cache.graph(grow, *unread, power, noise, temperature)
        of_rows: Any = (None if each is None else each[: len(self.lengths)] for each in grown)
        tokens, parents, depths, ancestors, confidences = of_rows
        # The next CUDA graph overwrites what this one returned. Tokens may be needed longer (see `ReplayCache`).
        return DraftTree(tokens.clone(), parents, depths, ancestors, self.max_plan.depth, confidences)

    def _begin_reading(
        self, blocks: Sequence[torch.Tensor], counts: list[int], num_spare: int, has_fixed_shape: bool
    ) -> tuple[DraftState, Unread]:
        """
        Returns the inputs of a forward over some tokens. Makes room in the cache for them and `num_spare` more, and counts them as read.
        """
        past = self.lengths or [0] * len(counts)
        self.lengths = [length + count for length, count in zip(past, counts)]
        cache = self.reserve(max(past) + blocks[0].shape[1] + num_spare)
        num_places, longest = (cache.num_places, None) if has_fixed_shape else (len(counts), max(past))
        state = DraftState(self.draft, self.call.embedding, cache, longest)
        tokens, states, positions, counts, past = (_filled(each, num_places) for each in (*blocks, counts, past))
        return state, Unread(tokens, states, positions, *on_device([counts, past], tokens.device))

    def take_unread(self) -> UnreadTokens:
        """All unread steps, joined."""
        steps, self.unread = self.unread, []
        if len(steps) == 1:
            return steps[0]
        blocks, counts = zip(*steps)
        ends = list(itertools.accumulate(tokens.shape[1] for tokens, *_ in blocks))
        # Of each row, the columns that are not padding.
        rows = [[i for end, count in zip(ends, each) for i in range(end - count, end)] for each in zip(*counts)]
        index = stack_right(rows, device=self.like.device)
        tokens, states, positions = (torch.cat(each, dim=1) for each in zip(*blocks))
        return (tokens.gather(1, index), take_rows(states, index), positions.gather(1, index)), list(map(len, rows))

    def read_all_but_newest(self, has_fixed_shape: bool) -> UnreadTokens:
        """Reads the prompt but for its last token, and what exceeds a fixed shape. Returns the rest."""
        blocks, counts = self.take_unread()
        num_left = blocks[0].shape[1]
        most = self.most_new if has_fixed_shape else num_left if self.lengths else 1
        num_visible = max(self.lengths, default=0) + num_left
        while num_left > most:
            size = min(num_left - most, max(self.MOST_PAIRS // (len(counts) * num_visible), 1))
            num_left -= size
            self.read([block[:, :size] for block in blocks], [max(count - num_left, 0) for count in counts])
            blocks, counts = [block[:, size:] for block in blocks], [min(count, num_left) for count in counts]
        return blocks, counts

    def read(self, blocks: Sequence[torch.Tensor], counts: list[int]) -> None:
        """Reads tokens only to fill the cache."""
        state, unread = self._begin_reading(blocks, counts, 0, has_fixed_shape=False)
        read_unread(state, unread)

    def reserve(self, num_slots: int) -> DraftCache:
        """The cache, with room for `num_slots` in each row."""
        if self.call.capacity is not None:
            num_slots = self.call.capacity + self.num_spare
        if self.is_captured:  # few sizes, so that calls can share graphs
            num_slots = max(1 << (num_slots - 1).bit_length(), 256)
        if self.cache is None:
            return self._move(len(self.lengths), num_slots)
        if num_slots > self.cache.num_slots:  # at least doubles each time
            return self._move(self.cache.num_places, max(num_slots, 2 * self.cache.num_slots))
        return self.cache

    def _move(self, num_places: int, num_slots: int) -> DraftCache:
        """Moves all rows to another cache: one that an earlier call left with its graph, or a new one."""
        old, cache, conditions = self.cache, None, None
        if self.is_captured:
            conditions = graph_conditions(self.draft, self.call.embedding, self.max_plan, self.is_static)
            cache = DraftCache.take(self.draft, num_places, num_slots, conditions)
        if cache is None:
            cache = DraftCache(self.draft, self.like, num_places, num_slots)
            cache.graph, cache.conditions = GraphedFunction(self.like.device) if self.is_captured else None, conditions
        if old is not None:
            cache.copy_rows(old, slice(len(self.lengths)))
            if old.num_places != num_places:  # one that has become too small is not kept
                old.keep(self.draft)
        self.cache = cache
        return cache

    def finish(self) -> None:
        """Keeps the graph for the next call. The slots of its text are not needed any more."""
        if self.cache is not None:
            self.cache.keep(self.draft)


def _filled(entries: Any, num_places: int) -> Any:
    """The entries of each row (a tensor or a list), and those of the first row for places without a row."""
    num_unused = num_places - len(entries)
    if isinstance(entries, list):
        return entries + entries[:1] * num_unused
    return torch.cat([entries, *[entries[:1]] * num_unused]) if num_unused > 0 else entries

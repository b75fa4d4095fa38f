# SPDX-License-Identifier: Apache-2.0
"""Drafting with static shapes, for calls with a static cache: one function of tensors, which can be compiled."""

import types
import weakref

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, DynamicCache, StaticLayer

from .cache_eagle3 import tree_attention_mask
from .drafter_eagle3 import Drafter
from .noise_eagle3 import sample_scores
from .proposer_eagle3 import Call
from .ragged_eagle3 import flat_indices, right_index
from .tree_eagle3 import DraftTree, grow_tree


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


def read_and_draft(
    draft,
    embedding,
    cache,
    tokens,
    features,
    positions,
    counts,
    lengths,
    plan,
    noise,
    temperature,
):
    """
    Reads the newest tokens of each row and grows a tree below them.

    Args:
        draft (`Eagle3ForSpeculation`): The draft.
        embedding (`nn.Embedding`): The target's, for drafts without a table of their own.
        cache (`Cache`): The draft's, static. Its rows end together, at the length of the longest.
        tokens (`torch.LongTensor` of shape `(B, R)`): The newest `R` tokens of each row.
        features (`torch.FloatTensor` of shape `(B, R, n_aux * H)`): The target's states at the positions before them.
        positions (`torch.LongTensor` of shape `(B, R)`): Those positions.
        counts (`torch.LongTensor` of shape `(B,)`): How many of them, at the right, are to be read.
        lengths (`torch.LongTensor` of shape `(B,)`): How many each row of the cache has read before.
        plan (`Plan`): The tree.
        noise (`torch.FloatTensor` of shape `(B, plan.depth, draft_vocab_size)`, *optional*), temperature
        (`torch.Tensor`, *optional*):
            With what the next tokens will be sampled, if they are.

    Returns:
        `tuple` of the fields of a [`DraftTree`], but for the confidences.
    """
    logits, hidden_states, lengths = read(draft, embedding, cache, tokens, features, positions, counts, lengths)
    length = lengths.max()
    config, padding_mask = draft.config.transformer_layer_config, _is_text(cache, lengths)

    def advance(tokens, hidden_states, level, visible):
        width = tokens.shape[1]
        depths = torch.arange(1, level + 1, device=tokens.device).repeat_interleave(width).expand(len(tokens), -1)
        mask = tree_attention_mask(config, cache, length, visible, depths[:, -width:], depths, padding_mask)
        outputs = draft(
            inputs_embeds=draft.embed(tokens, embedding),
            hidden_states=hidden_states,
            position_ids=(positions[:, -1:] + level).expand(-1, width),
            attention_mask=mask,
            past_key_values=cache,
        )
        return outputs.logits, outputs.last_hidden_state

    def guess(logits, level):
        return sample_scores(logits.float() / temperature, noise[:, level])

    token_ids = None if draft.d2t is None else draft.draft_token_ids
    tree = grow_tree(
        tokens[:, -1:],
        logits,
        hidden_states,
        advance,
        token_ids,
        plan,
        guess=None if noise is None else guess,
    )
    drafted = length + torch.arange((plan.depth - 1) * plan.branching_factor, device=length.device)
    for layer in cache.layers:
        layer.cumulative_length.copy_(length)
        for states in (layer.keys, layer.values):  # which may be no numbers: no mask keeps those from the next step
            states.index_fill_(-2, drafted, 0)
    return tree.tokens, tree.parents, tree.depths, tree.ancestors


def read(draft, embedding, cache, tokens, features, positions, counts, lengths):
    """The first half of [`read_and_draft`]; returns logits `(B, V)` and hidden states `(B, H)` of the last, and new lengths."""
    num_rows, device = tokens.shape[1], tokens.device
    index = right_index(counts, num_rows)  # (B, R)
    length, depths = lengths.max(), index.clamp(min=0)
    visible = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril() & (index >= 0)[:, None]
    mask = tree_attention_mask(
        draft.config.transformer_layer_config, cache, length, visible, depths, depths, _is_text(cache, lengths)
    )
    outputs = draft(
        inputs_embeds=draft.embed(tokens, embedding),
        hidden_states=draft.combine_hidden_states(features.to(draft.lm_head.weight)),
        position_ids=positions,
        attention_mask=mask,
        past_key_values=cache,
        logits_to_keep=1,
    )
    # Rows may have read different numbers of tokens: let all end at the new length.
    new_lengths = lengths + counts
    new_length = new_lengths.max()
    for layer in cache.layers:
        from_right = new_length - 1 - torch.arange(layer.max_cache_len, device=device)
        past, new = length - 1 - (from_right - counts[:, None]), length + num_rows - 1 - from_right
        source = torch.where(from_right < counts[:, None], new, past).clamp(0, layer.max_cache_len - 1)
        for states in (layer.keys, layer.values):
            states.copy_(states.flatten(0, 2).index_select(0, flat_indices(source, states.shape)).view_as(states))
        layer.cumulative_length.copy_(new_length)
    return outputs.logits[:, -1], outputs.last_hidden_state[:, -1], new_lengths


def _is_text(cache, lengths):
    """`(B, max_cache_len)`: which slots hold text, in rows of those lengths that end together."""
    slots = torch.arange(cache.layers[0].max_cache_len, device=lengths.device)
    return (slots >= lengths.max() - lengths[:, None]) & (slots < lengths.max())


class StaticDrafter(Drafter):
    """
    The draft, with a static cache. Draws the same tree in every step, by one function of fixed shapes.

    Args:
        draft (`Eagle3ForSpeculation`): The draft.
        call (`Call`): The call of `generate`.
    """

    def __init__(self, draft, call: Call):
        super().__init__(draft, call)
        self.whole = call.whole._replace(depth=min(call.whole.depth, call.whole.num_nodes))
        self.num_rows = self.whole.depth + 1  # the most that a step with a tree leaves to read
        self.spare = max(self.num_rows, self.whole.branching_factor * (self.whole.depth - 1))
        slots = call.capacity + self.spare
        self.cache = Cache(layers=[StaticLayer(slots) for _ in draft.layers])
        self.lengths = None  # (B,), what each row has read
        self.draft_tree = compiled(read_and_draft, draft, call.compile_config)

    @property
    def has_read_nothing(self):
        return self.lengths is None

    @torch.no_grad()
    def propose(self, plan, root_tokens, sampler=None) -> DraftTree:
        """[`Drafter.propose`], but always the whole tree."""
        *blocks, counts, excess = self._read_ahead()
        newest = [
            # Strides must not depend on what it was cut from: compilers look at them, even where there is but one row.
            F.pad(block, (*(0, 0) * (block.dim() - 2), -excess, 0)).clone(memory_format=torch.contiguous_format)
            for block in blocks
        ]
        noise = temperature = None
        if sampler is not None:
            like = self.draft.lm_head.weight.T  # as wide as logits
            noise = [sampler.noise_ahead(level, self.token_ids, like) for level in range(self.whole.depth)]
            noise, temperature = torch.stack(noise, dim=1), torch.tensor(sampler.temperature, device=counts.device)
        fields = self.draft_tree(
            self.draft, self.embedding, self.cache, *newest, counts, self.lengths, self.whole, noise, temperature
        )
        self.lengths = self.lengths + counts
        # What a CUDA graph returns is overwritten by the next one.
        return DraftTree(*(entries.clone() for entries in fields), depth=self.whole.depth)

    @torch.no_grad()
    def read_ahead(self) -> None:
        """Reads all but the newest tokens, as many as a step with a tree leaves to read."""
        *blocks, counts, _ = self._read_ahead()
        counts = counts.tolist()
        self.unread = [(tuple(block[:, -max(counts) :] for block in blocks), counts)]

    def _read_ahead(self):
        """
        Reads the same. Returns what [`Drafter.take_unread`] does, but for how many of the newest tokens are left to
        read of each row, and by how many the others exceed them.
        """
        tokens, features, positions, counts = self.take_unread()
        counts, excess = torch.tensor(counts, device=tokens.device), tokens.shape[1] - self.num_rows
        if self.lengths is None:
            self.lengths, config = torch.zeros_like(counts), self.layer_config
            self.cache.early_initialization(
                len(counts), config.num_key_value_heads, config.head_dim, features.dtype, features.device
            )
            if excess > 0:
                self._read_prompt(
                    tokens[:, :excess], features[:, :excess], positions[:, :excess], counts - self.num_rows
                )
        else:
            for begin in range(0, excess, self.spare):
                end = min(begin + self.spare, excess)
                blocks = [block[:, begin:end] for block in (tokens, features, positions)]
                block_counts = (counts - tokens.shape[1] + end).clamp(0, end - begin)
                *_, self.lengths = read(self.draft, self.embedding, self.cache, *blocks, block_counts, self.lengths)
        return tokens, features, positions, counts.clamp(max=self.num_rows), excess

    def _read_prompt(self, tokens, features, positions, counts):
        """Reads with the causal mask that attention can do without, as a mask over all slots would be large."""
        cache, num_rows = DynamicCache(), tokens.shape[1]
        is_text = torch.arange(num_rows, device=tokens.device) >= num_rows - counts[:, None]
        self.draft.step(
            inputs_embeds=self.draft.embed(tokens, self.embedding),
            hidden_states=self.draft.combine_hidden_states(features),
            position_ids=positions,
            attention_mask=is_text.long() if len(tokens) > 1 else None,
            past_key_values=cache,
            only_last=True,
        )
        for layer, read_layer in zip(self.cache.layers, cache.layers):
            layer.update(read_layer.keys, read_layer.values)
        self.lengths = counts.clamp(min=0)

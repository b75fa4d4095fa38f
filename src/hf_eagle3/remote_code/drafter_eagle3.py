# SPDX-License-Identifier: Apache-2.0
"""The draft proposes: its cache during one call, and where in the text it stands."""

import torch
from transformers import DynamicCache

from .cache_eagle3 import keep_rows, select_rows, tree_attention_mask
from .proposer_eagle3 import Call, Proposer
from .ragged_eagle3 import right_index, stack_right, take_rows
from .tree_eagle3 import DraftTree, Plan, grow_tree


class Drafter(Proposer):
    """
    The draft, with a growing cache. What it computes never leaves the call, so that it can do so in inference mode,
    whose operators cost less than those of `no_grad`.

    Args:
        draft (`Eagle3ForSpeculation`): The draft.
        call (`Call`): The call of `generate`.
    """

    # Steps that may be left to read: a text that is decoded plainly could leave the states of all of its tokens.
    MAX_UNREAD = 256

    def __init__(self, draft, call: Call):
        self.draft, self.embedding = draft, call.embedding
        self.threshold, self.calibration = call.threshold, call.calibration
        self.layer_config = draft.config.transformer_layer_config
        self.token_ids = None if draft.d2t is None else draft.draft_token_ids
        self.cache = DynamicCache()
        self.lengths = None  # of each row in the cache, which ends at its right
        self.padding_mask = None  # (B, past_length), in batches
        # What was accepted and not read yet: tokens, states and positions (B, R, ...), and how many of each row.
        self.unread: list[tuple[tuple[torch.Tensor, ...], list[int]]] = []

    @property
    def has_read_nothing(self) -> bool:
        return self.cache.get_seq_length() == 0

    def observe(self, accepted):
        blocks, counts = (accepted.tokens, accepted.states, accepted.positions), accepted.counts
        self.unread.append((tuple(block[:, -max(counts) :] for block in blocks), counts))
        if len(self.unread) > self.MAX_UNREAD:
            if self.has_read_nothing:  # the prompt, to whose first tokens all later ones attend
                self.read_ahead()
            else:
                del self.unread[0]

    def take_unread(self) -> tuple[torch.LongTensor, torch.FloatTensor, torch.LongTensor, list[int]]:
        """The newest tokens `(B, R)`, the states and positions before them, and how many of those each row has to read."""
        (tokens, states, positions), counts = self.unread[0]
        if len(self.unread) > 1:
            rows, begin = [[] for _ in counts], 0
            for (block, *_), block_counts in self.unread:
                begin += block.shape[1]
                for row, count in zip(rows, block_counts):
                    row += range(begin - count, begin)
            index, counts = stack_right(rows, device=tokens.device), list(map(len, rows))
            tokens, states, positions = (
                torch.cat(blocks, dim=1) for blocks in zip(*(blocks for blocks, _ in self.unread))
            )
            tokens, positions = tokens.gather(1, index), positions.gather(1, index.to(positions.device))
            states = take_rows(states, index.to(states.device))
        self.unread = []
        parameter = self.draft.lm_head.weight
        return tokens.to(parameter.device), states.to(parameter), positions.to(parameter.device), counts

    @torch.inference_mode()
    def read_ahead(self) -> None:
        """Reads all but the newest token."""
        *blocks, counts = self.take_unread()
        self.read(*(block[:, :-1] for block in blocks), [count - 1 for count in counts])
        self.unread = [(tuple(block[:, -1:] for block in blocks), [1] * len(counts))]

    def step(self, tokens, hidden_states, position_ids, attention_mask=None, logits_to_keep=0):
        return self.draft(
            inputs_embeds=self.draft.embed(tokens, self.embedding),
            hidden_states=hidden_states,
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=self.cache,
            logits_to_keep=logits_to_keep,
        )

    def read(self, tokens, states, positions, counts) -> None:
        """Catches up: reads what [`take_unread`] returns, and keeps what the draft says at the last token of each row."""
        past_length = self.cache.get_seq_length()
        num_rows, hidden_states = tokens.shape[1], self.draft.combine_hidden_states(states)
        is_batch, device = len(counts) > 1, tokens.device
        index = right_index(torch.tensor(counts, device=device), num_rows)  # (B, R)
        if past_length > 0:  # a chain below what was read before
            chain = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril() & (index >= 0)[:, None]
            depths = index.clamp(min=0)
            mask = tree_attention_mask(
                self.layer_config, self.cache, past_length, chain, depths, depths, self.padding_mask
            )
        else:  # the attention's own causal mask will do
            mask = (index >= 0).long() if is_batch else None
        outputs = self.step(tokens, hidden_states, positions, mask, logits_to_keep=1)
        self.logits, self.hidden_states = outputs.logits[:, -1], outputs.last_hidden_state[:, -1]
        self.position = positions[:, -1:]
        if is_batch:
            lengths = counts if self.lengths is None else [a + b for a, b in zip(self.lengths, counts)]
            growth = max(lengths) - max(self.lengths or [0])
            kept = [list(range(num_rows - count, num_rows)) for count in counts]
            keep_rows(self.cache, kept, num_rows, growth, max(lengths))
            self.lengths = lengths
            self.padding_mask = right_index(torch.tensor(lengths, device=device), max(lengths)) >= 0

    @torch.inference_mode()
    def select(self, rows):
        unread, self.unread = self.unread, []
        for blocks, counts in unread:
            counts = [counts[row] for row in rows]
            self.unread.append((tuple(block[rows, -max(counts) :] for block in blocks), counts))
        if self.lengths is None:
            return
        excess, self.lengths = max(self.lengths), [self.lengths[row] for row in rows]
        excess -= max(self.lengths)
        select_rows(self.cache, rows, max(self.lengths), excess)
        self.padding_mask = self.padding_mask[rows][:, excess:]
        if len(rows) == 1:
            self.lengths = self.padding_mask = None

    @torch.inference_mode()
    def propose(self, plan: Plan, root_tokens, sampler=None) -> DraftTree:
        """Catches up with the text, drafts a tree below its newest tokens, and forgets that again."""
        self.read(*self.take_unread())
        root_tokens = root_tokens.to(self.logits.device)
        past_length, depths = self.cache.get_seq_length(), root_tokens[:, :0]

        def advance(tokens, hidden_states, level, visible):
            nonlocal depths
            width = tokens.shape[1]
            depths = torch.cat([depths, torch.full_like(tokens, level)], dim=1)
            mask = tree_attention_mask(
                self.layer_config, self.cache, past_length, visible, depths[:, -width:], depths, self.padding_mask
            )
            outputs = self.step(tokens, hidden_states, (self.position + level).expand(-1, width), mask)
            return outputs.logits, outputs.last_hidden_state

        def guess(logits, level):
            return sampler.guess(logits, level, self.token_ids)

        tree = grow_tree(
            root_tokens,
            self.logits,
            self.hidden_states,
            advance,
            self.token_ids,
            plan,
            self.threshold,
            self.calibration,
            None if sampler is None else guess,
        )
        self.cache.crop(past_length - self.cache.get_seq_length())
        return tree

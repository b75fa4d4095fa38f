# SPDX-License-Identifier: Apache-2.0
"""The draft during one call of `generate`."""

import time

import torch
from transformers import DynamicCache

from .cache_eagle3 import keep_rows, select_rows, take_paths, tree_attention_mask
from .noise_eagle3 import sample_scores
from .policy_eagle3 import StepPlan
from .text_eagle3 import text_positions
from .tree_eagle3 import DraftTree, grow_tree


class Drafter:
    """
    The draft during one call: its cache, and where in the text it stands. What it computes never leaves the call, so
    that it can do so in inference mode, whose operators cost less than those of `no_grad`.
    """

    # Steps that may be left to read: a text that is decoded plainly could leave the states of all of its tokens.
    MAX_UNREAD = 256

    def __init__(self, draft, embedding):
        self.draft, self.embedding = draft, embedding
        self.layer_config = draft.config.transformer_layer_config
        self.token_ids = None if draft.d2t is None else draft.draft_token_ids
        self.cache = DynamicCache()
        self.lengths = None  # of each row in the cache, which ends at its right
        self.padding_mask = None  # (B, past_length), in batches
        self.unread: list[tuple[torch.FloatTensor, list[int]]] = []  # states of the target, and how many of each row

    def step(self, tokens, hidden_states, position_ids, attention_mask=None, logits_to_keep=0):
        return self.draft(
            inputs_embeds=self.draft.embed(tokens, self.embedding),
            hidden_states=hidden_states,
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=self.cache,
            logits_to_keep=logits_to_keep,
        )

    @property
    def has_read_nothing(self) -> bool:
        return self.cache.get_seq_length() == 0

    def remember(self, features, counts, text, model_kwargs):
        """Takes the target's own states `(B, R, n_aux * H)` at the newest `counts` positions of each row, or the prompt's."""
        if not self.unread and self.has_read_nothing:
            # A prompt that came with a cache, in chunks or as embeddings shows only its end, and one that was healed
            # has positions for what it was; padding is not read at all.
            num_seen = min(features.shape[1], text.shortest, text_positions(model_kwargs).shape[1] - 1)
            counts, attention_mask = [num_seen] * text.batch_size, model_kwargs.get("attention_mask")
            if attention_mask is not None:
                counts = attention_mask[:, -num_seen - 1 : -1].bool().sum(dim=1).clamp(min=1).tolist()
        self.unread.append((features[:, -max(counts) :], counts))
        if len(self.unread) > self.MAX_UNREAD:
            if self.has_read_nothing:  # the prompt, to whose first tokens all later ones attend
                self.read_ahead(text, model_kwargs)
            else:
                del self.unread[0]

    @torch.inference_mode()
    def read_ahead(self, text, model_kwargs) -> None:
        """Reads all but the newest token."""
        tokens, features, positions, counts = self.take_unread(text, model_kwargs)
        self.read(tokens[:, :-1], features[:, :-1], positions[:, :-1], [count - 1 for count in counts])
        self.unread = [(features[:, -1:], [1] * len(counts))]

    def take_unread(self, text, model_kwargs):
        """The newest tokens `(B, R)`, the states and positions before them, and how many of those each row has to read."""
        features, counts = self.unread[0]
        if len(self.unread) > 1:
            rows, begin = [[] for _ in range(text.batch_size)], 0
            for block, block_counts in self.unread:
                begin += block.shape[1]
                for row, count in zip(rows, block_counts):
                    row += range(begin - count, begin)
            features = take_paths(torch.cat([block for block, _ in self.unread], dim=1), rows)
            counts = [len(row) for row in rows]
        self.unread = []
        num_rows, parameter = max(counts), self.draft.lm_head.weight
        positions = text_positions(model_kwargs)[:, -num_rows - 1 : -1].to(parameter.device)
        return text.newest(num_rows).to(parameter.device), features.to(parameter), positions, counts

    @torch.inference_mode()
    def observe(self, text, model_kwargs):
        """Reads the newest tokens with what was remembered of the positions before them."""
        self.read(*self.take_unread(text, model_kwargs))

    def read(self, tokens, features, positions, counts):
        """Reads what [`Drafter.take_unread`] returns, and keeps what the draft says at the last token of each row."""
        past_length = self.cache.get_seq_length()
        num_rows, hidden_states = tokens.shape[1], self.draft.combine_hidden_states(features)
        is_batch, device = len(counts) > 1, tokens.device
        index = (
            torch.arange(num_rows, device=device) - num_rows + torch.tensor(counts, device=device)[:, None]
        )  # (B, R)
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
            left_padding = max(lengths) - torch.tensor(lengths, device=device)[:, None]
            self.padding_mask = torch.arange(max(lengths), device=device) >= left_padding

    def noise_ahead(self, text, level: int) -> torch.FloatTensor:
        """[`Text.noise_ahead`] of the draft's vocabulary, `(B, draft_vocab_size)`."""
        noise = text.noise_ahead(level).to(self.draft.lm_head.weight.device)
        if self.token_ids is None and noise.shape[-1] == self.draft.config.draft_vocab_size:
            return noise
        # A target may have fewer logits than tokens, or more: what it cannot say has any noise.
        token_ids = self.draft.draft_token_ids if self.token_ids is None else self.token_ids
        return noise[:, token_ids.clamp(max=noise.shape[-1] - 1)]

    @torch.inference_mode()
    def select(self, rows: list[int]) -> None:
        """Forgets all rows of the batch but these."""
        unread, self.unread = self.unread, []
        for features, counts in unread:
            counts = [counts[row] for row in rows]
            self.unread.append((features[rows, -max(counts) :], counts))
        if self.lengths is None:
            return
        excess, self.lengths = max(self.lengths), [self.lengths[row] for row in rows]
        excess -= max(self.lengths)
        select_rows(self.cache, rows, max(self.lengths), excess)
        self.padding_mask = self.padding_mask[rows][:, excess:]
        if len(rows) == 1:
            self.lengths = self.padding_mask = None

    @torch.inference_mode()
    def grow(self, text, model_kwargs, plan: StepPlan, **settings) -> DraftTree:
        """
        Catches up with the text, drafts a tree below its newest tokens, as far as the step's `plan` goes, and forgets
        that again.
        """
        is_usual = len(self.unread) == 1 and self.cache.get_seq_length() > 0
        begin, begins = time.perf_counter(), []  # of all, and of each level
        self.observe(text, model_kwargs)
        root_tokens = text.newest(1).to(self.logits.device)
        observed, depths = self.cache.get_seq_length(), root_tokens[:, :0]

        def advance(tokens, hidden_states, level, visible):
            nonlocal depths
            begins.append(time.perf_counter())
            width = tokens.shape[1]
            depths = torch.cat([depths, torch.full_like(tokens, level)], dim=1)
            mask = tree_attention_mask(
                self.layer_config, self.cache, observed, visible, depths[:, -width:], depths, self.padding_mask
            )
            outputs = self.step(tokens, hidden_states, (self.position + level).expand(-1, width), mask)
            return outputs.logits, outputs.last_hidden_state

        def guess(logits, level):
            return sample_scores(text.warp(logits), self.noise_ahead(text, level))

        tree = grow_tree(
            root_tokens,
            self.logits,
            self.hidden_states,
            advance,
            self.token_ids,
            plan=plan,
            guess=guess if text.do_sample else None,
            **settings,
        )
        self.cache.crop(observed - self.cache.get_seq_length())
        levels, end = len(begins), time.perf_counter()
        if levels > 1:  # what comes after the last one is not its own
            level_seconds = (begins[-1] - begins[0]) * levels / (levels - 1)
        else:
            level_seconds = end - begins[0] if begins else 0.0
        plan.record_draft(levels, end - begin - level_seconds, level_seconds, is_usual)
        return tree

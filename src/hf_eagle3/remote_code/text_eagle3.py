# SPDX-License-Identifier: Apache-2.0
"""The text that `generate` writes: one token at a time, as `GenerationMixin._sample` picks it."""

import copy
from collections import deque

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessorList, MaxLengthCriteria

from .cache_eagle3 import take_rows
from .noise_eagle3 import SamplingNoise, random_state, set_random_state
from .policy_eagle3 import looks_are_free
from .tree_eagle3 import DraftTree


class Text:
    """
    The text as it grows. A finished row goes on as in `_sample`: with padding, up to the length of the longest. Its
    modes:

    - `in_step`: the rows of a batch advance by as much as the slowest can, so that logits processors and stopping
      criteria which are not known to look at each row by itself are called as `_sample` calls them. Otherwise at their
      own pace.
    - `may_retire`: finished rows leave the batch ([`Text.retire`]), where nobody asked for what the target says of
      padding.
    - `may_pick_at_once`: no processor or criterion reads the text before a token. Then all nodes of a tree are looked
      at in one go, and the host waits once; `visits_nodes`, where looks cost nothing but scores do, only those that
      the walk comes by.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, S)`): The prompts.
        logits_processor, stopping_criteria, generation_config, streamer: What `_sample` is called with.
        returned (`ReturnedOutputs`): Collects what the caller wants besides the text.
        in_step (`bool`): Whether something else than these requires it.
        path_length (`int`): The most nodes that a path of a drafted tree may have.
        can_read_padding (`bool`):
            Whether the target has an embedding for the token that finished rows are padded with.
        may_retire (`bool`): Whether the target may be called with fewer rows than it was at first.
    """

    # How far a row may run ahead of the slowest; noise is kept for the rows in between.
    MAX_LEAD = 64

    def __init__(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        returned,
        streamer,
        in_step,
        path_length,
        can_read_padding,
        may_retire,
    ):
        self.num_rows, self.prompt_length = input_ids.shape
        self.rows = list(range(self.num_rows))  # of the batch, those that have not left it
        self.retired: dict[int, torch.LongTensor] = {}  # the texts of the others
        # A streamer that raises finds all rows where plain `generate` leaves them.
        self.in_step = in_step or self.num_rows == 1 or streamer is not None or not can_read_padding
        # Others may also change the text that they are given.
        self.may_be_edited = not all(map(is_row_wise, [*logits_processor, *stopping_criteria]))
        self.in_step |= self.may_be_edited
        self.ids = input_ids.long()  # (B, capacity), of which each row has written its length
        self.lengths = [self.prompt_length] * self.batch_size
        self.is_finished = [False] * self.batch_size
        self.were_finished = list(self.is_finished)  # before the last walk
        self.paths = [[] for _ in range(self.batch_size)]  # of the last walk, the nodes at which tokens were picked
        self.picked = [[] for _ in range(self.batch_size)]  # those tokens
        self.starts = list(self.lengths)  # where that walk began
        self.logits_processor, self.stopping_criteria, self.returned = logits_processor, stopping_criteria, returned
        self.max_length = max_length_of(stopping_criteria)
        self.do_sample, self.pad_token = generation_config.do_sample, generation_config._pad_token_tensor
        self.pads_finished_rows = any(hasattr(criteria, "eos_token_id") for criteria in stopping_criteria)
        self.can_read_padding = can_read_padding
        # What follows a finished row is padding, or nothing at all.
        pads = self.pads_finished_rows or all(isinstance(each, MaxLengthCriteria) for each in stopping_criteria)
        self.may_retire = may_retire and pads and not self.in_step and not returned.wants_dict
        # Noise is drawn before it is used, and a draft may see it, where nothing else draws in between.
        may_draw = [each for each in (*logits_processor, *stopping_criteria) if not is_row_wise(each)]
        is_known = streamer is None or (is_one_of(streamer, STREAMERS) and "on_finalized_text" not in vars(streamer))
        self.draws_ahead = self.do_sample and is_known and not may_draw
        self.sampling_noise = SamplingNoise(self.num_rows, input_ids.device)
        self.noise = [deque() for _ in range(self.batch_size)]  # drawn, but not yet used
        self.warpers = [processor for processor in logits_processor if is_one_of(processor, WARP_DRAFTS)]
        self.temperature = next((each.temperature for each in self.warpers if hasattr(each, "temperature")), 1.0)
        self.streamer, self.num_streamed = streamer, self.prompt_length
        self.path_length = path_length
        # A greedy row that will leave may as well hurry: nothing is kept for the rows in between.
        hurries = self.num_rows == 1 or (self.may_retire and not self.do_sample)
        self.max_lead = self.max_length if hurries else self.MAX_LEAD
        # States of the random generator before the draws for positions that no row has written yet, and after the
        # last.
        self.random_states: deque[tuple[int, torch.Tensor]] = deque()
        self.last_random_state = None
        self.num_drawn = 0
        self.may_pick_at_once = (
            (self.batch_size == 1 or not self.in_step)
            and (self.draws_ahead or not self.do_sample)
            and not returned.collects
            and all(is_one_of(processor, PREFIX_FREE) for processor in logits_processor)
            and all(is_one_of(criteria, READ_LAST_TOKEN) for criteria in stopping_criteria)
        )
        # Where a look is free, it is cheaper to process the scores of visited nodes only.
        self.visits_nodes = looks_are_free(input_ids.device) and (self.do_sample or len(logits_processor) > 0)
        if self.may_pick_at_once:
            ends = [criteria.eos_token_id for criteria in stopping_criteria if hasattr(criteria, "eos_token_id")]
            self.eos_tokens = {token for tokens in ends for token in tokens.flatten().tolist()}

    @property
    def batch_size(self) -> int:
        """How many rows have not left."""
        return len(self.rows)

    @property
    def shortest(self) -> int:
        return min(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def room_for(self, tree: DraftTree) -> torch.LongTensor | None:
        """
        How far below its newest token each row may still pick one, `(B, 1)`; deeper nodes need no position. `None` if
        that is as far as any node of the tree may be.
        """
        if self.max_length - self.longest >= self._levels(tree):
            return None
        return torch.tensor([[max(self.max_length - length - 1, 0)] for length in self.lengths])

    def _levels(self, tree: DraftTree) -> int:
        """The most nodes that a path of the tree may have."""
        return min(tree.num_nodes, self.path_length if tree.depth is None else 1 + tree.depth)

    @property
    def growth(self) -> int:
        """By how much the last walk made the longest row longer."""
        return max(start + len(path) for start, path in zip(self.starts, self.paths)) - max(self.starts)

    @property
    def rows_behind(self) -> list[bool]:
        """Which rows hold up the batch: unfinished ones that the slowest of those could overtake in a step."""
        unfinished = [length for length, is_finished in zip(self.lengths, self.is_finished) if not is_finished]
        limit = min(unfinished, default=0) + self.path_length
        return [length < limit and not done for length, done in zip(self.lengths, self.is_finished)]

    @property
    def progress(self) -> int:
        """How far the last walk took the slowest of the rows that were unfinished before it: 1 in plain decoding."""
        rows = [row for row, was_finished in enumerate(self.were_finished) if not was_finished]
        return min(self.lengths[row] for row in rows) - min(self.starts[row] for row in rows) if rows else 0

    @property
    def is_complete(self) -> bool:
        return all(self.is_finished) and (self.may_retire or self.shortest == self.longest)

    @property
    def length(self) -> int:
        """Of the longest row, whether or not it has left."""
        return max([self.longest, *map(len, self.retired.values())])

    def retire(self) -> list[int] | None:
        """Lets finished rows leave. Returns the indices of those that stay, and `None` if all do, or none."""
        if not self.may_retire or not any(self.is_finished) or all(self.is_finished):
            return None
        for row, length, ids, is_finished in zip(self.rows, self.lengths, self.ids, self.is_finished):
            if is_finished:
                self.retired[row] = ids[:length].clone()
        staying = [i for i, is_finished in enumerate(self.is_finished) if not is_finished]
        self.ids = self.ids[staying]
        for name in ("rows", "lengths", "is_finished", "were_finished", "paths", "picked", "starts", "noise"):
            setattr(self, name, [getattr(self, name)[i] for i in staying])
        return staying

    def sequences(self) -> torch.LongTensor:
        """The texts of all rows, `(num_rows, length)`."""
        texts = {row: ids[:length] for row, ids, length in zip(self.rows, self.ids, self.lengths)} | self.retired
        texts = [texts[row] for row in range(self.num_rows)]
        return pad_sequence(texts, batch_first=True, padding_value=int(self.pad_token or 0))

    def newest(self, num_tokens: int) -> torch.LongTensor:
        """The last tokens of every row, `(B, num_tokens)`; shorter rows begin with zeros."""
        if self.shortest == self.longest:
            return self.ids[:, self.longest - num_tokens : self.longest]
        index = torch.arange(num_tokens) - num_tokens + torch.tensor(self.lengths)[:, None]
        index = index.to(self.ids.device)
        return self.ids.gather(1, index.clamp(min=0)).masked_fill(index < 0, 0)

    def walk(self, tree: DraftTree, outputs, root_row: int, may_take_back: bool = False) -> bool:
        """
        Picks tokens for as long as the tree has them. With `may_take_back` it picks none, and returns `False`, where
        scores of a root are no numbers: a node whose states are none reaches all others through any mask (0 * NaN).
        """
        self.were_finished, self.picked = list(self.is_finished), [[] for _ in self.rows]
        self.vocab_size = outputs.logits.shape[-1]
        if self.may_pick_at_once and (not self.visits_nodes or tree.num_nodes == 1 < self.batch_size):
            return self._walk_at_once(tree, outputs.logits[:, root_row:], may_take_back)
        if may_take_back and outputs.logits[:, root_row].isnan().any():
            return False
        children, nodes = tree.children(), [0] * self.batch_size
        self.paths, self.starts = [[] for _ in nodes], list(self.lengths)
        while walking := self._walking(nodes):
            together = {}  # rows of any length, or equally long ones where something reads the text
            for row in walking:
                self.paths[row].append(nodes[row])
                together.setdefault(None if self.may_pick_at_once else self.lengths[row], []).append(row)
            for rows in together.values():
                tokens = self._advance(rows, outputs, root_row, tree.num_nodes)
                for row, token in zip(rows, tokens):
                    self.picked[row].append(token)
                    nodes[row] = children[row].get((nodes[row], token))
        return True

    def _walk_at_once(self, tree: DraftTree, logits: torch.FloatTensor, may_take_back: bool) -> bool:
        """Picks a token at every node, and reads once which of them the walk comes by."""
        tree, logits = tree.to(self.ids.device), logits.to(self.ids.device)
        were_finished = self.were_finished
        choices, is_broken = self._choices(tree, logits, keeps_noise=may_take_back)  # (B, N)
        if self.pads_finished_rows and any(were_finished):
            choices[were_finished] = int(self.pad_token)
        nodes, counts, tokens = tree.parents, None, choices
        if tree.num_nodes > 1:
            nodes, counts = tree.accepted(choices)
            tokens, is_broken = choices.gather(1, nodes), is_broken.gather(1, nodes)
        if may_take_back:
            counts = torch.ones_like(nodes[:, 0]) if counts is None else counts
            counts = counts.masked_fill(logits[:, 0].isnan().any(dim=-1), 0)
        if counts is None:
            read = [[[0], token, broken, [1]] for token, broken in torch.stack([tokens, is_broken], dim=1).tolist()]
        else:
            read = torch.stack([nodes, tokens, is_broken, counts[:, None].expand_as(nodes)], dim=1).tolist()
        if any(count == 0 for *_, (count, *_) in read):
            return False

        self.paths, self.starts = [[] for _ in read], list(self.lengths)
        end = min(self.max_length, self.shortest + self.max_lead)
        for row in sorted(range(self.batch_size), key=were_finished.__getitem__):
            path, row_tokens, broken, (count, *_) = read[row]
            end_of_row = self.longest if were_finished[row] else end
            for i in range(min(count, end_of_row - self.lengths[row])):
                if broken[i]:
                    raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
                self.paths[row].append(path[i])
                self.picked[row].append(row_tokens[i])
                self.lengths[row] += 1
                self.is_finished[row] |= self._ends_with(row, row_tokens[i])
                if self.is_finished[row] and not were_finished[row]:
                    break
            if self.noise[row]:
                for _ in self.paths[row]:
                    self.noise[row].popleft()
        if self.longest > self.ids.shape[1]:
            self.ids = F.pad(self.ids, (0, max(self.longest, 256)))
        counts = [length - start for start, length in zip(self.starts, self.lengths)]
        if len(set(self.starts)) == len(set(counts)) == 1:
            self.ids[:, self.starts[0] : self.lengths[0]] = tokens[:, : counts[0]]
        else:
            rows = [row for row, count in enumerate(counts) for _ in range(count)]
            offsets = [offset for count in counts for offset in range(count)]
            self.ids[rows, [self.starts[row] + offset for row, offset in zip(rows, offsets)]] = tokens[rows, offsets]
        try:
            self._stream()
        except BaseException:
            # As if the walk had ended there: whoever catches this finds the cache of the tokens before.
            for row, start in enumerate(self.starts):
                self.paths[row] = self.paths[row][: max(self.num_streamed + 1 - start, 0)]
                self.lengths[row] = start + len(self.paths[row])
            raise
        return True

    def _choices(
        self, tree: DraftTree, logits: torch.FloatTensor, keeps_noise: bool
    ) -> tuple[torch.LongTensor, torch.BoolTensor]:
        """
        The next token at each node `(B, N)`, as [`_pick`] picks it, and where there is none to pick. `keeps_noise`:
        until the tokens are written.
        """
        num_nodes = logits.shape[1]
        scores = logits.float()
        if len(self.logits_processor):
            ids = self.ids[:, :1].repeat_interleave(num_nodes, dim=0)  # which none of these processors reads
            scores = self.logits_processor(ids, scores.flatten(0, 1)).view_as(scores)
        if not self.do_sample:
            choices = scores.argmax(dim=-1)
            return choices, torch.zeros_like(choices, dtype=torch.bool)
        probs = torch.softmax(scores, dim=-1)
        levels = self._levels(tree)
        if levels == 1 and not keeps_noise and not any(self.noise):  # for all rows, at once
            noise = self._draw()
            noise = (noise if len(noise) == len(probs) else noise[self.rows])[:, None]
        else:
            while min(map(len, self.noise)) < levels:
                self._keep(self._draw())
            noise = torch.stack([torch.stack([queue[level] for level in range(levels)]) for queue in self.noise])
            noise = take_rows(noise, tree.depths)
        return (probs / noise).argmax(dim=-1), ~_are_probabilities(probs)

    def _draw(self) -> torch.FloatTensor:
        """
        The noise for one more position of every row `(num_rows, V)`, as `torch.multinomial` would have drawn it: for
        rows that have left, too. The position may never be written.
        """
        device = self.ids.device
        before = random_state(device)
        if self.random_states and not torch.equal(before, self.last_random_state):
            self.random_states.clear()  # another thread has drawn
        self.random_states.append((self.num_drawn, before))
        while self.random_states[0][0] < self.length - self.prompt_length:
            self.random_states.popleft()
        self.num_drawn += 1
        noise = torch.empty(self.num_rows, self.vocab_size, dtype=torch.float32, device=device).exponential_()
        self.last_random_state = random_state(device)
        return noise

    def _keep(self, draw: torch.FloatTensor) -> None:
        for queue, row in zip(self.noise, self.rows):
            queue.append(draw[row].clone())

    def noise_ahead(self, level: int) -> torch.FloatTensor:
        """With what the token `level` after the next one of each row will be sampled, `(B, V)`."""
        if not self.draws_ahead:
            return self.sampling_noise.ahead(level, self.vocab_size)
        while min(map(len, self.noise)) <= level:
            self._keep(self._draw())
        return torch.stack([queue[level] for queue in self.noise])

    def warp(self, logits: torch.FloatTensor) -> torch.FloatTensor:
        """A draft's logits `(..., V)` as those of the target will be before it samples, as far as that costs little."""
        scores = logits.float().flatten(0, -2)
        for warper in self.warpers:
            scores = warper(None, scores)
        return scores.view_as(logits)

    def finish(self) -> None:
        """
        Leaves the random generator as `_sample` does, which draws for written positions only. If another thread has
        drawn since, it would get the same numbers again, and where the generator should be nobody can tell.
        """
        device, num_written = self.ids.device, self.length - self.prompt_length
        for position, state in self.random_states:
            if position == num_written and torch.equal(random_state(device), self.last_random_state):
                set_random_state(device, state)

    def _walking(self, nodes: list[int | None]) -> list[int]:
        """The rows that pick a token at their node."""
        rows = [row for row, node in enumerate(nodes) if node is not None]
        if self.in_step:
            return rows if len(rows) == self.batch_size and not all(self.is_finished) else []
        ends = [self.longest if is_finished else self.shortest + self.max_lead for is_finished in self.is_finished]
        return [row for row in rows if self.lengths[row] < ends[row]]

    def _advance(self, rows: list[int], outputs, root_row: int, num_nodes: int) -> list[int]:
        """
        Picks the next token of rows, at the last node of each one's path. They are equally long unless tokens may be
        picked at once, for which nothing reads the text.
        """
        lengths, device = [self.lengths[row] for row in rows], self.ids.device
        length = max(lengths)
        nodes = [root_row + self.paths[row][-1] for row in rows]
        if len(rows) == self.batch_size and len(set(nodes)) == 1:
            logits = outputs.logits[:, nodes[0]].to(copy=True, dtype=torch.float32, device=device)
        else:
            logits = outputs.logits[rows, nodes].float().to(device)
        ids = self._read(rows, 1 if self.may_pick_at_once else length)
        scores = self._processor_of(rows)(ids, logits)
        next_tokens = self._pick(rows, scores)
        if length == self.ids.shape[1]:
            # Who may edit the text, or keep it, gets it itself, and another one after the next token.
            self.ids = F.pad(self.ids, (0, 1 if self.may_be_edited else max(length, 256)))
        self.ids[rows, lengths] = next_tokens
        for i, row in enumerate(rows):
            self.returned.add(row, outputs, logits[i : i + 1], scores[i : i + 1], self.paths[row], num_nodes)
            self.lengths[row] += 1
        tokens = next_tokens.tolist()
        if self.may_pick_at_once:
            is_done = list(map(self._ends_with, rows, tokens))
        else:
            all_scores = self.returned.all_scores() if self.in_step else None  # no other criteria read them
            is_done = self.stopping_criteria(self._read(rows, length + 1), all_scores).tolist()
            tokens = self.ids[rows, lengths].tolist() if self.may_be_edited else tokens
        for row, is_row_done in zip(rows, is_done):
            self.is_finished[row] |= is_row_done
        if self.streamer is not None:  # with which rows are in step
            self.streamer.put(next_tokens.cpu())  # as they were picked, whatever the criteria have made of the text
            self.num_streamed += 1
        return tokens

    def _ends_with(self, row: int, token: int) -> bool:
        """Whether the token that was just written ends a row, by criteria that may be asked at once."""
        return token in self.eos_tokens or self.lengths[row] >= self.max_length

    def _processor_of(self, rows: list[int]):
        """The logits processors for some rows. One of transformers' has an entry for each row of the batch."""
        if len(rows) == self.num_rows or all(_lengths_to_ignore(each) is None for each in self.logits_processor):
            return self.logits_processor
        processors = LogitsProcessorList(map(copy.copy, self.logits_processor))
        for processor in processors:
            if (lengths := _lengths_to_ignore(processor)) is not None:
                processor.prompt_ignore_length = lengths[[self.rows[row] for row in rows]]
        return processors

    def _read(self, rows: list[int], length: int) -> torch.LongTensor:
        return self.ids[:, :length].contiguous() if len(rows) == self.batch_size else self.ids[rows, :length]

    def _pick(self, rows: list[int], scores: torch.FloatTensor) -> torch.LongTensor:
        """The next tokens of rows, as `_sample` picks them."""
        if not self.do_sample:
            next_tokens = torch.argmax(scores, dim=-1)
        elif not self.draws_ahead:
            next_tokens = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            # What `torch.multinomial` does, with the noise it would have drawn for all rows at this position.
            probs = torch.softmax(scores, dim=-1)
            if not _are_probabilities(probs).all():
                raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
            if any(not self.noise[row] for row in rows):  # of those that are as long as what was drawn for
                self._keep(self._draw())
            next_tokens = torch.argmax(probs / torch.stack([self.noise[row].popleft() for row in rows]), dim=-1)
        if self.pads_finished_rows and any(self.is_finished):
            finished = torch.tensor([self.is_finished[row] for row in rows], device=next_tokens.device)
            next_tokens = next_tokens.masked_fill(finished, int(self.pad_token))
        return next_tokens

    def foresee_padding(self, tree: DraftTree, tree_depth: int, **settings) -> DraftTree:
        """Replaces the trees of rows whose next tokens are known to be padding by chains of it."""
        foresees = self.pads_finished_rows and self.can_read_padding and any(self.is_finished)
        if tree.num_nodes == 1 or not foresees:
            return tree
        tokens, parents = tree.tokens.clone(), tree.parents.clone()
        tokens[self.is_finished, 1:] = int(self.pad_token)
        parents[self.is_finished, 1:] = torch.arange(tree.num_nodes - 1, device=parents.device).clamp(
            max=tree_depth - 1
        )
        return DraftTree.from_parents(tokens, parents, tree.confidences, tree_depth)

    def _stream(self) -> None:
        """Hands out what all rows have."""
        if self.streamer is None:
            return
        while self.num_streamed < self.shortest:
            self.streamer.put(self.ids[:, self.num_streamed].to("cpu", copy=True))
            self.num_streamed += 1


# Logits processors and stopping criteria of transformers that look at each row by itself, whichever others are there.
ROW_WISE = {
    "EosTokenCriteria",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MaxLengthCriteria",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "StopStringCriteria",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
    "WatermarkLogitsProcessor",
}


# Those that do not look at the text before a token at all, and those that look at its end and its length only.
PREFIX_FREE = {
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}
# And those that drafted samples follow: the others sort all scores, which takes longer than it saves, or change them
# little.
WARP_DRAFTS = {"MinPLogitsWarper", "TemperatureLogitsWarper", "TopKLogitsWarper"}
READ_LAST_TOKEN = {"EosTokenCriteria", "MaxLengthCriteria"}
STREAMERS = {"AsyncTextIteratorStreamer", "TextIteratorStreamer", "TextStreamer"}


def max_length_of(stopping_criteria) -> int:
    """The length at which the first of them ends every row."""
    lengths = [criteria.max_length for criteria in stopping_criteria if isinstance(criteria, MaxLengthCriteria)]
    return min(lengths, default=torch.iinfo(torch.long).max)


def is_row_wise(processor) -> bool:
    """Whether a logits processor or stopping criterion is known to treat each row of a batch as if it were alone."""
    return is_one_of(processor, ROW_WISE)


def is_one_of(processor, names: set[str]) -> bool:
    """Whether a logits processor or stopping criterion is transformers' own of one of these names."""
    return type(processor).__module__.startswith("transformers.generation.") and type(processor).__name__ in names


def _lengths_to_ignore(processor) -> torch.LongTensor | None:
    """How much of each row's prompt a logits processor passes over, where it was told that for each by itself."""
    lengths = getattr(processor, "prompt_ignore_length", None)
    return lengths if isinstance(lengths, torch.Tensor) else None


def _are_probabilities(probs: torch.FloatTensor) -> torch.BoolTensor:
    """Of what `softmax` returns `(..., V)`: `(...)`. It is never infinite or negative, and one broken score breaks the sum."""
    return torch.isfinite(probs.sum(dim=-1))


def text_positions(model_kwargs) -> torch.LongTensor:
    """Positions `(B, L)` in the text, of position ids that may have more dimensions than that one."""
    position_ids = model_kwargs["position_ids"]
    return position_ids if position_ids.dim() == 2 else position_ids[0]

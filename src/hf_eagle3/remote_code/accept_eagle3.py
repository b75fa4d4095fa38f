# SPDX-License-Identifier: Apache-2.0
"""The acceptance rule, and picking tokens as `_sample` does."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from transformers import LogitsProcessorList

from .noise_eagle3 import NoiseStream, sample_scores
from .ragged_eagle3 import stack_right, take_rows
from .text_eagle3 import Text
from .tree_eagle3 import DraftTree


@dataclass
class Accepted:
    """
    What a step wrote, or, first of all, the prompt. Rows end at the right, those of tensors after padding.

    Args:
        tokens (`torch.LongTensor` of shape `(B, R)`): The new tokens.
        counts (`list[int]`): How many of them, at the right, are each row's own.
        positions (`torch.LongTensor` of shape `(B, R)`): In the text, of the tokens before them.
        states (`torch.FloatTensor` of shape `(B, R, n * H)`, *optional*):
            The target's at those positions, from the layers that the proposer reads.
        new_tokens (`list[list[int]]`): The new tokens on the host; of the prompt all.
        nodes (`list[list[int]]`): Where in the tree their parents are.
        growth (`int`): By how much the longest row became longer.
        progress (`int`): How far the slowest of the rows came that were unfinished: 1 in plain decoding.
        was_finished, is_finished (`list[bool]`): Rows that go on with padding, or nothing, before and after the step.
    """

    tokens: torch.LongTensor
    counts: list[int]
    positions: torch.LongTensor
    states: torch.FloatTensor | None
    new_tokens: list[list[int]]
    nodes: list[list[int]]
    growth: int
    progress: int
    was_finished: list[bool]
    is_finished: list[bool]


def accept(text: Text, sampler: "Sampler", tree: DraftTree, outputs, may_discard: bool = False) -> Accepted | None:
    """
    Each row walks down its tree: it picks the next token from the target's scores at the node it is at, and goes on at
    the child that carries that token, until there is none or it is time to stop. So the text is the target's, and the
    tree only decides how much of it a step can write.

    Args:
        text (`Text`): Extended by what is accepted.
        sampler (`Sampler`): Picks the tokens.
        tree (`DraftTree`): What was verified.
        outputs (`Outputs`): The target's, at the nodes of the tree.
        may_discard (`bool`, *optional*, defaults to `False`):
            Accept nothing, and return `None`, where scores of a root are no numbers: a node whose states are none
            reaches all others through any mask (0 * NaN).
    """
    starts, was_finished = list(text.lengths), list(text.is_finished)
    asked = sampler.ask(tree, outputs, may_discard)
    if asked is None:
        return None
    children, pick = asked
    at: list[int | None] = [0] * text.batch_size
    nodes, tokens = [[] for _ in at], [[] for _ in at]
    while rows := text.advancing(at):
        for row, token in zip(rows, pick(rows, [at[row] for row in rows])):
            nodes[row].append(at[row])
            tokens[row].append(token)
            at[row] = children[row].get((at[row], token))

    counts = list(map(len, tokens))
    unfinished = [row for row, done in enumerate(was_finished) if not done]
    progress = min((text.lengths[row] for row in unfinished), default=0)
    progress -= min((starts[row] for row in unfinished), default=0)
    positions, states = outputs.positions.expand(len(nodes), -1), outputs.states
    if tree.num_nodes > 1:
        index = stack_right(nodes, device=positions.device)
        positions = positions.gather(1, index)
        states = None if states is None else take_rows(states, index.to(states.device))
    growth = text.longest - max(starts)
    return Accepted(
        text.newest(max(counts)), counts, positions, states, tokens, nodes, growth, progress, was_finished,
        list(text.is_finished),
    )  # fmt: skip


class Sampler:
    """
    Picks tokens as `_sample` does, from the target's scores.

    Where no processor or criterion reads the text before a token, tokens are picked at all nodes of a tree at once, so
    that the host waits once. Otherwise, and on a CPU if scores are to be processed, only at the nodes that the walk visits.

    Args:
        text (`Text`): What it picks for.
        logits_processor, stopping_criteria, generation_config, streamer: What `_sample` is called with.
        returned (`ReturnedOutputs`): Collects what the caller wants besides the text.
    """

    def __init__(self, text, logits_processor, stopping_criteria, generation_config, returned, streamer):
        self.text, self.logits_processor, self.stopping_criteria = text, logits_processor, stopping_criteria
        self.returned, self.streamer, self.do_sample = returned, streamer, generation_config.do_sample
        device = text.ids.device
        # Noise is drawn ahead, and a draft may see it, where nothing else draws in between.
        is_known = streamer is None or (is_one_of(streamer, STREAMERS) and "on_finalized_text" not in vars(streamer))
        self.draws_ahead = self.do_sample and is_known and not text.may_be_edited
        self.noise = NoiseStream(text.num_rows, device, self.draws_ahead)
        self.warpers = [processor for processor in logits_processor if is_one_of(processor, WARP_DRAFTS)]
        self.temperature = next((each.temperature for each in self.warpers if hasattr(each, "temperature")), 1.0)
        self.may_pick_at_once = (
            (text.batch_size == 1 or not text.in_step)
            and (self.draws_ahead or not self.do_sample)
            and not returned.collects
            and all(is_one_of(processor, PREFIX_FREE) for processor in logits_processor)
            and all(is_one_of(criteria, READ_LAST_TOKEN) for criteria in stopping_criteria)
        )
        # Where a look is free, it is cheaper to process the scores of visited nodes only.
        self.visits_nodes = reads_without_sync(device) and (self.do_sample or len(logits_processor) > 0)
        if self.may_pick_at_once:
            ends = [criteria.eos_token_id for criteria in stopping_criteria if hasattr(criteria, "eos_token_id")]
            self.eos_tokens = {token for tokens in ends for token in tokens.flatten().tolist()}

    def ask(self, tree, outputs, may_discard) -> tuple[list[dict], Callable] | None:
        """
        The children of the tree's nodes, and how to pick the next tokens of some rows at nodes of theirs:
        `pick(rows, nodes) -> tokens`. `None` if the tree is to be discarded.
        """
        if self.may_pick_at_once and (not self.visits_nodes or tree.num_nodes == 1 < self.text.batch_size):
            return self._ask_at_once(tree, outputs, may_discard)
        if may_discard and outputs.logits[:, 0].isnan().any():
            return None
        return tree.children(), lambda rows, nodes: self._pick(rows, nodes, outputs)

    def _ask_at_once(self, tree, outputs, may_discard):
        """Picks at every node, and lets the host look once."""
        device = self.text.ids.device
        tree, logits = tree.to(device), outputs.logits.to(device)
        choices, is_broken = self._choices(tree, logits)
        facts = [choices, is_broken.long()]
        if may_discard:
            facts.append(logits[:, :1].isnan().any(dim=-1).long().expand_as(choices))
        _, (choices, is_broken, *is_nan) = tree.on_host(*facts)
        if may_discard and any(is_nan_in_row[0] for is_nan_in_row in is_nan[0]):
            return None
        children = tree.children()

        def pick(rows, nodes):
            picked = []
            for row, node in zip(rows, nodes):
                token, is_token_broken = choices[row][node], is_broken[row][node]
                if self.text.is_finished[row] and self.text.pads_finished_rows:
                    token = self.text.pad_token
                if is_token_broken:
                    self._raise_broken([row])
                self.text.append(row, token)
                picked.append(token)
            self._end(rows, picked)
            if self.streamer is not None:
                self.streamer.put(torch.tensor(picked, device="cpu"))
            return picked

        return children, pick

    def _choices(self, tree, logits):
        """The next token at each node `(B, N)`, and where there is none to pick."""
        num_nodes, scores = logits.shape[1], logits.float()
        if len(self.logits_processor):
            ids = self.text.ids[:, :1].repeat_interleave(num_nodes, dim=0)  # which none of these processors reads
            scores = self.logits_processor(ids, scores.flatten(0, 1)).view_as(scores)
        if not self.do_sample:
            choices = scores.argmax(dim=-1)
            return choices, torch.zeros_like(choices, dtype=torch.bool)
        self.vocab_size = scores.shape[-1]
        noise = torch.stack([self._noise_of_rows(level) for level in range(1 + tree.max_depth)], dim=1)
        return _sample_with(scores, noise if num_nodes == 1 else take_rows(noise, tree.depths))

    def _noise_of_rows(self, level: int, rows: list[int] | None = None) -> torch.FloatTensor:
        """With what the token `level` after the next one of each row is sampled, `(rows, V)`."""
        text, first = self.text, self.text.shortest
        rows = range(text.batch_size) if rows is None else rows
        positions = {text.lengths[row] + level for row in rows}
        if len(positions) == 1 and len(rows) == text.num_rows:
            return self.noise.at(*positions, first, self.vocab_size)
        noise = [self.noise.at(text.lengths[row] + level, first, self.vocab_size)[text.rows[row]] for row in rows]
        return torch.stack(noise)

    def guess(self, logits: torch.FloatTensor, level: int, token_ids: torch.LongTensor | None) -> torch.FloatTensor:
        """
        A draft's scores `(..., V)` for the tokens `level` after the next ones, as the target will sample them: warped,
        as far as that costs little, and with the same noise.
        """
        scores = logits.float().flatten(0, -2)
        for warper in self.warpers:
            scores = warper(None, scores)
        return sample_scores(scores.view_as(logits), self.noise_ahead(level, token_ids, logits))

    def noise_ahead(self, level: int, token_ids: torch.LongTensor | None, like: torch.Tensor) -> torch.FloatTensor:
        """The noise `(B, draft_vocab_size)` of the tokens `level` after the next ones, for logits like a draft's."""
        noise = self._noise_of_rows(level).to(like.device)
        if token_ids is None and noise.shape[-1] == like.shape[-1]:
            return noise
        # A target may have fewer logits than tokens, or more: what it cannot say has any noise.
        token_ids = torch.arange(like.shape[-1], device=like.device) if token_ids is None else token_ids
        return noise[:, token_ids.clamp(max=noise.shape[-1] - 1)]

    def _pick(self, rows: list[int], nodes: list[int], outputs) -> list[int]:
        """Picks where the walk has come to: for rows of one length together, if anything reads their text."""
        text, picked = self.text, {}
        groups: dict[int | None, list[tuple[int, int]]] = {}
        for row, node in zip(rows, nodes):
            groups.setdefault(None if self.may_pick_at_once else text.lengths[row], []).append((row, node))
        for group in groups.values():
            group_rows, group_nodes = (list(each) for each in zip(*group))
            picked.update(zip(group_rows, self._pick_together(group_rows, group_nodes, outputs)))
        return [picked[row] for row in rows]

    def _pick_together(self, rows, nodes, outputs) -> list[int]:
        text = self.text
        length, device = max(text.lengths[row] for row in rows), text.ids.device
        if len(rows) == text.batch_size and len(set(nodes)) == 1:
            logits = outputs.logits[:, nodes[0]].to(copy=True, dtype=torch.float32, device=device)
        else:
            logits = outputs.logits[rows, nodes].float().to(device)
        ids = text.read(rows, 1 if self.may_pick_at_once else length)
        scores = self._processor_of(rows)(ids, logits)
        next_tokens = self._sample(rows, scores)
        tokens = next_tokens.tolist()
        for i, (row, node, token) in enumerate(zip(rows, nodes, tokens)):
            text.append(row, token)
            self.returned.add(row, outputs, logits[i : i + 1], scores[i : i + 1], node)
        if self.may_pick_at_once:
            self._end(rows, tokens)
        else:
            all_scores = self.returned.all_scores() if text.in_step else None  # no other criteria read them
            is_done = self.stopping_criteria(text.read(rows, length + 1), all_scores).tolist()
            tokens = text.ids[rows, [length] * len(rows)].tolist() if text.may_be_edited else tokens
            for row, is_row_done in zip(rows, is_done):
                text.is_finished[row] |= is_row_done
        if self.streamer is not None:  # with which rows are in step
            self.streamer.put(next_tokens.cpu())  # as they were picked, whatever the criteria have made of the text
        return tokens

    def _end(self, rows, tokens) -> None:
        """Notes which rows the tokens end that were just written, by criteria that look at nothing else."""
        for row, token in zip(rows, tokens):
            self.text.is_finished[row] |= token in self.eos_tokens or self.text.lengths[row] >= self.text.max_length

    def _sample(self, rows: list[int], scores: torch.FloatTensor) -> torch.LongTensor:
        """The next tokens of rows, as `_sample` picks them."""
        text, self.vocab_size = self.text, scores.shape[-1]
        if not self.do_sample:
            next_tokens = torch.argmax(scores, dim=-1)
        elif not self.draws_ahead:
            next_tokens = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            next_tokens, is_broken = _sample_with(scores, self._noise_of_rows(0, rows))
            if is_broken.any():
                self._raise_broken([row for row, broken in zip(rows, is_broken.tolist()) if broken])
        if text.pads_finished_rows and any(text.is_finished):
            finished = torch.tensor([text.is_finished[row] for row in rows], device=next_tokens.device)
            next_tokens = next_tokens.masked_fill(finished, text.pad_token)
        return next_tokens

    def _raise_broken(self, rows: list[int]) -> NoReturn:
        """As `torch.multinomial` does, at the next tokens of these rows, before it draws anything for them."""
        self.noise.rewind(min(self.text.lengths[row] for row in rows))
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    def _processor_of(self, rows: list[int]):
        """The logits processors for some rows. One of transformers' has an entry for each row of the batch."""
        processors = self.logits_processor
        if len(rows) == self.text.num_rows or all(_lengths_to_ignore(each) is None for each in processors):
            return processors
        processors = LogitsProcessorList(map(copy.copy, processors))
        for processor in processors:
            if (lengths := _lengths_to_ignore(processor)) is not None:
                processor.prompt_ignore_length = lengths[[self.text.rows[row] for row in rows]]
        return processors


def reads_without_sync(device) -> bool:
    """Whether the host reads a tensor of a device without waiting for it."""
    return device.type == "cpu"


# Logits processors and stopping criteria of transformers that do not look at the text before a token.
PREFIX_FREE = {
    *("EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor", "LogitNormalization"),
    *("MinPLogitsWarper", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper"),
    *("TopPLogitsWarper", "TypicalLogitsWarper"),
}
# Those that look at its end and its length only.
READ_LAST_TOKEN = {"EosTokenCriteria", "MaxLengthCriteria"}
# Those that look at each row by itself, whichever others are there.
ROW_WISE = {
    *(*PREFIX_FREE, *READ_LAST_TOKEN, "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor"),
    *("ForcedEOSTokenLogitsProcessor", "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"),
    *("NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor"),
    *("SequenceBiasLogitsProcessor", "StopStringCriteria", "SuppressTokensAtBeginLogitsProcessor"),
    *("TopHLogitsWarper", "WatermarkLogitsProcessor"),
}
# Those that drafted samples follow: the others sort all scores, which takes longer than it saves, or change them
# little.
WARP_DRAFTS = {"MinPLogitsWarper", "TemperatureLogitsWarper", "TopKLogitsWarper"}
STREAMERS = {"AsyncTextIteratorStreamer", "TextIteratorStreamer", "TextStreamer"}


def is_one_of(processor, names: set[str]) -> bool:
    """Whether a logits processor or stopping criterion is transformers' own of one of these names."""
    return type(processor).__module__.startswith("transformers.generation.") and type(processor).__name__ in names


def _lengths_to_ignore(processor) -> torch.LongTensor | None:
    """How much of each row's prompt a logits processor passes over, where it was told that for each by itself."""
    lengths = getattr(processor, "prompt_ignore_length", None)
    return lengths if isinstance(lengths, torch.Tensor) else None


def _sample_with(scores: torch.FloatTensor, noise: torch.FloatTensor) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """What `torch.multinomial` samples from `scores` `(..., V)` with that noise, and where it would raise: both `(...)`."""
    probs = torch.softmax(scores, dim=-1)
    return (probs / noise).argmax(dim=-1), ~torch.isfinite(probs.sum(dim=-1))  # one broken score breaks the sum

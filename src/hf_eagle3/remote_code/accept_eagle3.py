# SPDX-License-Identifier: Apache-2.0
"""The acceptance rule, and picking tokens as `_sample` does, with the noise that it would draw."""

import copy
from collections.abc import Callable, Sequence

import torch
from transformers import EosTokenCriteria, LogitsProcessorList, TemperatureLogitsWarper

from .devices_eagle3 import random_state, reads_without_sync, set_random_state
from .outputs_eagle3 import ReturnedOutputs, TreeOutputs
from .text_eagle3 import SampleArguments, Text, stack_right, take_rows
from .tree_eagle3 import Accepted, DraftTree


# Picks the next token of some rows at one node each: `pick(rows, nodes) -> tokens`.
Pick = Callable[[list[int], list[int]], list[int]]


def accept(
    text: Text, sampler: "Sampler", tree: DraftTree, outputs: TreeOutputs, may_discard: bool = False
) -> Accepted | None:
    """
    Walks down the tree in each row: picks the next token from the target's scores at a node, goes on at the child that
    carries this token, and ends where there is no such child. So the text is the target's, and the tree only decides
    how much of it one step writes.

    Returns `None`, and accepts nothing, if it `may_discard` the tree and a root's scores are NaN. They may come from
    another node: NaNs pass through any mask (0 * NaN).
    """
    starts = list(text.lengths)
    pick = sampler.start_walk(tree, outputs, may_discard)
    if pick is None:
        return None
    children = tree.children()
    at: dict[int, int] = dict.fromkeys(range(text.batch_size), 0)  # the node of each row whose walk goes on
    unfinished = [row for row in at if not text.is_finished[row]]
    nodes: list[list[int]] = [[] for _ in at]
    tokens: list[list[int]] = [[] for _ in at]
    num_written = [0] * text.batch_size
    while rows := text.rows_to_advance(at, of_one_length=not sampler.ignores_prefix):
        for row in rows:
            num_written[row] += not text.is_finished[row]  # else it takes padding
        for row, token in zip(rows, pick(rows, [at[row] for row in rows])):
            node = at.pop(row)
            nodes[row].append(node)
            tokens[row].append(token)
            if (child := children[row].get((node, token))) is not None:
                at[row] = child

    counts = list(map(len, tokens))
    progress = min((text.lengths[row] for row in unfinished), default=0)
    progress -= min((starts[row] for row in unfinished), default=0)
    positions, states = outputs.positions.expand(len(nodes), -1), outputs.states
    if tree.num_nodes > 1:
        index = stack_right(nodes, device=positions.device)
        positions = positions.gather(1, index)
        states = None if states is None else take_rows(states, index.to(states.device))
    return Accepted(
        tokens=text.newest(max(counts)),
        counts=counts,
        positions=positions,
        states=states,
        new_tokens=tokens,
        nodes=nodes,
        batch_growth=text.longest - max(starts),
        progress=progress,
        num_written=num_written,
        is_finished=list(text.is_finished),
    )


class Sampler:
    """
    Picks tokens from the target's scores as `_sample` does.

    If no processor or criterion reads the text before a token, it picks at all nodes of a tree at once, with one sync.
    Otherwise, and on a CPU if scores need processing, it picks only at the nodes that the walk visits.
    """

    def __init__(self, text: Text, arguments: SampleArguments, returned: ReturnedOutputs, vocab_size: int):
        _, logits_processor, stopping_criteria, generation_config, streamer, _ = arguments
        self.text, self.logits_processor, self.stopping_criteria = text, logits_processor, stopping_criteria
        self.returned, self.streamer, self.do_sample = returned, streamer, generation_config.do_sample
        # Noise may be drawn ahead, and shown to a draft, if nothing else draws between two tokens.
        is_known = streamer is None or (is_one_of(streamer, STREAMERS) and "on_finalized_text" not in vars(streamer))
        self.draws_ahead = self.do_sample and is_known and not text.exposes_ids
        self.noise = NoiseStream(text.num_rows, vocab_size, text.ids.device, self.draws_ahead)
        self.warpers = [processor for processor in logits_processor if is_one_of(processor, WARP_DRAFTS)]
        temperatures = (each.temperature for each in self.warpers if isinstance(each, TemperatureLogitsWarper))
        self.temperature = next(temperatures, 1.0)
        # Whether a token depends only on the scores at its node and on noise that can be drawn ahead.
        self.ignores_prefix = (
            (text.batch_size == 1 or not text.in_lockstep)
            and (self.draws_ahead or not self.do_sample)
            and not returned.collected
            and all(is_one_of(processor, PREFIX_FREE) for processor in logits_processor)
            and all(is_one_of(criteria, READ_LAST_TOKEN) for criteria in stopping_criteria)
        )
        # If reading forces no sync, it is cheaper to process visited nodes only.
        self.prefers_visits = reads_without_sync(text.ids.device) and (self.do_sample or len(logits_processor) > 0)
        ends = [each for each in stopping_criteria if self.ignores_prefix and isinstance(each, EosTokenCriteria)]
        self.eos_tokens = {token for each in ends for token in each.eos_token_id.flatten().tolist()}
        self.reminders = [each for each in stopping_criteria if getattr(each, "max_position_embeddings", None)]

    def start_walk(self, tree: DraftTree, outputs: TreeOutputs, may_discard: bool) -> Pick | None:
        """How to pick tokens in this tree; `None` if it is discarded."""
        if self.ignores_prefix and not self.prefers_visits:
            return self._pick_at_all_nodes(tree, outputs, may_discard)
        if may_discard and outputs.logits[:, 0].isnan().any():
            return None
        return lambda rows, nodes: self._pick(rows, nodes, outputs)

    def _pick_at_all_nodes(self, tree: DraftTree, outputs: TreeOutputs, may_discard: bool) -> Pick | None:
        """[`start_walk`] that picks tokens now, with a single sync."""
        logits, device = outputs.logits, self.text.ids.device
        if self.do_sample or len(self.logits_processor):
            logits = logits.to(device)
        # Else only the choices move, if the prompt is on another device than the target.
        choices, is_broken = self._choices(tree, logits)
        flags = [logits[:, :1].isnan().any(dim=-1).expand_as(choices)] if may_discard else []
        _, _, _, tokens_of, broken_of, *is_nan = tree.on_host(
            *(each.to(device) for each in (choices, is_broken, *flags))
        )
        if any(row[0] for rows in is_nan for row in rows):
            return None

        def pick(rows: list[int], nodes: list[int]) -> list[int]:
            at = list(zip(rows, nodes))
            self._check_probabilities(rows, [broken_of[row][node] for row, node in at])
            picked = [self.text.append(row, tokens_of[row][node]) for row, node in at]
            self._end(rows, picked)
            return self._stream(picked)

        return pick

    def _choices(self, tree: DraftTree, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token at each node `(B, N)`, and whether its probabilities are broken."""
        num_nodes, scores = logits.shape[1], logits.float()
        if len(self.logits_processor):
            ids = self.text.ids[:, :1].repeat_interleave(num_nodes, dim=0)  # these processors do not read them
            scores = self.logits_processor(ids, scores.flatten(0, 1)).view_as(scores)
        if not self.do_sample:
            choices = scores.argmax(dim=-1)
            return choices, torch.zeros_like(choices, dtype=torch.bool)
        noise = self._noise_of_rows(range(1 + tree.max_depth))
        return _sample_with(scores, noise if num_nodes == 1 else take_rows(noise, tree.depths))

    def _noise_of_rows(self, levels: Sequence[int], rows: list[int] | None = None) -> torch.Tensor:
        """The noise `(rows, levels, V)` of the tokens `levels` after the next one, in these rows or all."""
        text = self.text
        rows = list(range(text.batch_size)) if rows is None else rows
        positions = [[text.lengths[row] + level for level in levels] for row in rows]
        return self.noise.of([text.rows[row] for row in rows], positions, text.shortest)

    def guess(self, logits: torch.Tensor, level: int, token_ids: torch.Tensor | None) -> torch.Tensor:
        """
        Scores `(..., V)` for a draft's `logits` `(..., V)`; `level` 0 is the next token of each row. The largest one belongs
        to the likeliest sample, since the target will draw with the same noise. Logits are warped like the target's
        where that is cheap. `token_ids` `(V,)` are the target's ids of the draft vocabulary, `None` if both are the same.
        """
        scores = logits.float().flatten(0, -2)
        for warper in self.warpers:
            scores = warper(None, scores)
        return sample_scores(scores.view_as(logits), self.noise_ahead([level], token_ids, logits)[:, 0])

    def noise_ahead(self, levels: Sequence[int], token_ids: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """The noise `(B, levels, V)` with which the target will draw, for logits of the width and device of `like`."""
        noise = self._noise_of_rows(levels).to(like.device)
        if token_ids is None and noise.shape[-1] == like.shape[-1]:
            return noise
        # A target may have fewer logits than tokens, or more. Tokens without a logit get any noise.
        token_ids = torch.arange(like.shape[-1], device=like.device) if token_ids is None else token_ids
        return noise[..., token_ids.clamp(max=noise.shape[-1] - 1)]

    def _pick(self, rows: list[int], nodes: list[int], outputs: TreeOutputs) -> list[int]:
        """Picks at visited nodes. Rows have one length if anything reads their text."""
        text = self.text
        length, device = text.lengths[rows[0]], text.ids.device
        if len(rows) == text.batch_size and len(set(nodes)) == 1:
            logits = outputs.logits[:, nodes[0]].to(copy=True, dtype=torch.float32, device=device)
        else:
            logits = outputs.logits[rows, nodes].float().to(device)
        ids = text.read(rows, 1 if self.ignores_prefix else length)
        scores = self._processor_of(rows)(ids, logits)
        picked = [text.append(row, token) for row, token in zip(rows, self._sample(rows, scores))]
        for i, (row, node) in enumerate(zip(rows, nodes)):
            self.returned.add(row, outputs, logits[i : i + 1], scores[i : i + 1], node)
        if self.ignores_prefix:
            self._end(rows, picked)
            return self._stream(picked)
        all_scores = self.returned.all_scores() if text.in_lockstep else None  # only unknown criteria read them
        is_done = self.stopping_criteria(text.read(rows, length + 1), all_scores).tolist()
        tokens = text.ids[rows, [length] * len(rows)].tolist() if text.exposes_ids else picked
        for row, is_row_done in zip(rows, is_done):
            text.is_finished[row] |= is_row_done
        self._stream(picked)
        return tokens  # criteria may have edited them

    def _end(self, rows: list[int], tokens: list[int]) -> None:
        """Finishes rows by their newest tokens and lengths, if criteria read nothing else."""
        text = self.text
        for row, token in zip(rows, tokens):
            text.is_finished[row] |= token in self.eos_tokens or text.lengths[row] >= text.max_length
        for criteria in self.reminders:  # which are not called otherwise: `MaxLengthCriteria`
            if text.longest >= criteria.max_position_embeddings:
                criteria(torch.empty(1, text.longest, device="meta"), None)  # warns once, by the shape

    def _stream(self, picked: list[int]) -> list[int]:
        """Returns the tokens after the streamer, if any, got them. Rows are in lockstep then."""
        if self.streamer is not None:
            self.streamer.put(torch.tensor(picked, device="cpu"))
        return picked

    def _sample(self, rows: list[int], scores: torch.Tensor) -> list[int]:
        """The next tokens of rows, as `_sample` picks them from processed scores."""
        if not self.do_sample:
            return torch.argmax(scores, dim=-1).tolist()
        if not self.draws_ahead:
            return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1).tolist()
        next_tokens, is_broken = _sample_with(scores, self._noise_of_rows([0], rows)[:, 0])
        self._check_probabilities(rows, is_broken.tolist())
        return next_tokens.tolist()

    def _check_probabilities(self, rows: list[int], is_broken: list) -> None:
        """Raises what `torch.multinomial` raises, as if nothing was drawn for the next tokens of broken rows."""
        if any(is_broken):
            self.noise.rewind(min(self.text.lengths[row] for row, broken in zip(rows, is_broken) if broken))
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    def _processor_of(self, rows: list[int]) -> LogitsProcessorList:
        """The logits processors for some rows. The repetition penalty may have an entry for each row of the batch."""
        processors = self.logits_processor
        if len(rows) == self.text.num_rows or not any(map(_is_by_row, processors)):
            return processors
        processors = LogitsProcessorList(map(copy.copy, processors))
        for processor in filter(_is_by_row, processors):
            processor.prompt_ignore_length = processor.prompt_ignore_length[[self.text.rows[row] for row in rows]]
        return processors


# Logits processors and stopping criteria of transformers, by what they read of a text. None of it:
PREFIX_FREE = {
    *("EpsilonLogitsWarper", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinPLogitsWarper"),
    *("SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"),
    "TypicalLogitsWarper",
}
# Its last token and its length:
READ_LAST_TOKEN = {"EosTokenCriteria", "MaxLengthCriteria"}
# Their own row, whatever the other rows are. (Eta's reads no text, but raises if a score is NaN, as at a rejected node.)
ROW_WISE = {
    *(*PREFIX_FREE, *READ_LAST_TOKEN, "EtaLogitsWarper", "ExponentialDecayLengthPenalty"),
    *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "MinLengthLogitsProcessor"),
    *("MinNewTokensLengthLogitsProcessor", "NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor"),
    *("RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor", "StopStringCriteria"),
    *("SuppressTokensAtBeginLogitsProcessor", "TopHLogitsWarper", "WatermarkLogitsProcessor"),
}
# Applied to a draft's logits, too. The others sort all scores, which costs more than it saves, or change
# little.
WARP_DRAFTS = {"MinPLogitsWarper", "TemperatureLogitsWarper", "TopKLogitsWarper"}
STREAMERS = {"AsyncTextIteratorStreamer", "TextIteratorStreamer", "TextStreamer"}


def is_one_of(instance: object, names: set[str]) -> bool:
    """Whether an object's class is one of transformers' own with these names."""
    return type(instance).__module__.startswith("transformers.generation.") and type(instance).__name__ in names


def _is_by_row(processor: Callable) -> bool:
    return isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)


def _sample_with(scores: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `torch.multinomial` samples from scores `(..., V)` with this noise, and whether it would raise."""
    probs = torch.softmax(scores, dim=-1)
    return (probs / noise).argmax(dim=-1), ~torch.isfinite(probs.sum(dim=-1))  # one broken score breaks the sum


def sample_scores(logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Scores like `logits` `(B, V)` or `(B, K, V)`. The largest is the best guess of a sample with `noise` `(B, V)` (Gumbel-max)."""
    return logits - (noise if logits.dim() == 2 else noise[:, None]).log()


class NoiseStream:
    """
    The exponential noise that `torch.multinomial` draws for each row of a batch, by position in the text. The sample is
    the token with the largest `probability / noise`. A draft that divides its own probabilities by the same noise can
    guess it (Gumbel coupling: Daliri, Musco and Suresh, https://huggingface.co/papers/2408.07978).

    If nothing else draws between two tokens, noise is drawn ahead, and the generator is rewound at the end
    ([`rewind`]). Otherwise another generator predicts what `torch.multinomial` will draw, because setting back the
    device's own would repeat numbers that other threads have drawn. Predictions are dropped if something else has drawn.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, draws_ahead: bool):
        self.device, self.generator = device, None if draws_ahead else torch.Generator(device)
        self.shape = num_rows, vocab_size
        self.drawn: dict[int, Sequence[torch.Tensor]] = {}  # the noise of each row, by position
        self.states: dict[int, torch.Tensor | None] = {}  # the generator's before it was drawn
        self.last_state: torch.Tensor | None = None  # of the device's generator, after the last draw
        self.next = 0  # the next position to draw for

    def of(self, rows: list[int], positions: list[list[int]], first: int) -> torch.Tensor:
        """The noise `(B, K, V)` of `K` positions of `B` rows of the call. Drops the noise before `first`, which all rows have used."""
        self._draw_up_to(max(map(max, positions)), first)
        vectors = [self.drawn[position][row] for row, of_row in zip(rows, positions) for position in of_row]
        return torch.stack(vectors).view(len(rows), -1, self.shape[1])

    def _draw_up_to(self, last: int, first: int) -> None:
        """Draws for the positions from `first` to `last` that are not drawn yet."""
        for old in [old for old in self.drawn if old < first]:
            del self.drawn[old], self.states[old]
        self.next = max(self.next, first)
        if self.generator is not None:
            state = random_state(self.device)
            before = self.states.get(first)
            if before is None or not torch.equal(before, state):
                self.drawn.clear()
                self.states.clear()
                self.generator.set_state(state)
                self.next = first
        while self.next <= last:
            self._draw(self.next)
            self.next += 1

    def _draw(self, position: int) -> None:
        before = random_state(self.device) if self.generator is None else self.generator.get_state()
        if self.last_state is not None and not torch.equal(before, self.last_state):
            self.states = dict.fromkeys(self.states)  # another thread has drawn: no state before that can be restored
        noise = torch.empty(self.shape, dtype=torch.float32, device=self.device)
        self.drawn[position] = noise.exponential_(generator=self.generator).unbind()
        self.states[position] = before
        if self.generator is None:
            self.last_state = random_state(self.device)

    def rewind(self, position: int) -> None:
        """Rewinds the device's generator to before `position`, unless others have drawn since."""
        state = self.states.get(position)
        if state is None or self.last_state is None:  # also if nothing was drawn ahead
            return
        if torch.equal(random_state(self.device), self.last_state):
            set_random_state(self.device, state)

# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch: the text of each row, and tensors whose rows have different lengths (all end at the right)."""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .devices_eagle3 import on_device


class SampleArguments(NamedTuple):
    """The arguments of `GenerationMixin._sample`. The prompts `input_ids` have shape `(B, S)`."""

    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    streamer: BaseStreamer | None
    model_kwargs: dict[str, Any]


class Text:
    """
    The rows of a batch. As in `_sample`, a finished row goes on with padding up to the length of the longest row. All
    rows advance by the same number of tokens (`in_lockstep`), or each at its own pace. If processors or criteria may
    edit or keep the ids that they get, the text `exposes_ids`. If it `may_retire` finished rows, they leave the batch.
    """

    # How far a row may run ahead of the slowest one. Noise is kept for the positions in between.
    MAX_LEAD = 64

    def __init__(self, arguments: SampleArguments, in_lockstep: bool, exposes_ids: bool, may_retire: bool):
        input_ids, stopping_criteria = arguments.input_ids, arguments.stopping_criteria
        self.num_rows, self.prompt_length = input_ids.shape
        self.rows = list(range(self.num_rows))  # the rows of the call that are still in the batch
        self.retired: dict[int, torch.Tensor] = {}  # the texts of the others
        self.in_lockstep, self.exposes_ids = in_lockstep, exposes_ids
        self._ids = input_ids.long()  # (B, capacity)
        self.lengths = [self.prompt_length] * self.num_rows
        self.unwritten: list[tuple[int, int, int]] = []  # row, column and id of tokens that are not yet in `_ids`
        self.is_finished = [False] * self.num_rows
        # A caller's criterion may be met by the prompt. Each row takes a token in any case.
        self.max_length = max(max_length_of(stopping_criteria), self.prompt_length + 1)
        self.pad_token = pad_token_of(arguments.generation_config)
        self.pads_finished_rows = any(hasattr(criteria, "eos_token_id") for criteria in stopping_criteria)
        # A row may leave if only padding, or nothing, can follow its end.
        pads = self.pads_finished_rows or all(type(each) is MaxLengthCriteria for each in stopping_criteria)
        self.may_retire = may_retire and pads and not in_lockstep
        # Greedy calls keep no noise, so that a row may run ahead as far as it likes if it can leave then.
        is_unlimited = self.num_rows == 1 or (self.may_retire and not arguments.generation_config.do_sample)
        self.max_lead = self.max_length if is_unlimited else self.MAX_LEAD

    @property
    def batch_size(self) -> int:
        """The number of rows that are still in the batch."""
        return len(self.rows)

    @property
    def shortest(self) -> int:
        """The length of the shortest row in the batch."""
        return min(self.lengths)

    @property
    def longest(self) -> int:
        """The length of the longest row in the batch."""
        return max(self.lengths)

    @property
    def longest_of_call(self) -> int:
        """The length of the longest row, rows that left the batch included."""
        return max([self.longest, *map(len, self.retired.values())])

    @property
    def is_complete(self) -> bool:
        """Whether all rows are finished, and padded where they must be."""
        return all(self.is_finished) and (self.may_retire or self.shortest == self.longest)

    def bottlenecks(self, reach: int) -> list[bool]:
        """Whether the batch waits for each row, or may soon: it is less than `reach` tokens ahead of the slowest."""
        unfinished = [length for length, is_finished in zip(self.lengths, self.is_finished) if not is_finished]
        limit = min(unfinished, default=0) + reach
        return [length < limit and not is_finished for length, is_finished in zip(self.lengths, self.is_finished)]

    def rows_to_advance(self, walking: Collection[int], of_one_length: bool) -> list[int]:
        """The rows that take another token, of those whose walk down the tree goes on: all, or the shortest ones."""
        rows = sorted(walking)
        if self.in_lockstep:
            return rows if len(rows) == self.batch_size and not all(self.is_finished) else []
        unfinished_end, finished_end = min(self.max_length, self.shortest + self.max_lead), self.longest
        ends = [finished_end if is_finished else unfinished_end for is_finished in self.is_finished]
        rows = [row for row in rows if self.lengths[row] < ends[row]]
        least = min((self.lengths[row] for row in rows), default=0)
        return [row for row in rows if self.lengths[row] == least] if of_one_length else rows

    def append(self, row: int, token: int) -> int:
        """Appends a token, or padding if the row is finished, and returns it. It is copied to the device with later ones."""
        token = self.pad_token if self.is_finished[row] and self.pads_finished_rows else token
        self.unwritten.append((row, self.lengths[row], token))
        self.lengths[row] += 1
        return token

    @property
    def ids(self) -> torch.Tensor:
        """The ids of all rows, `(B, capacity)`. Entries beyond the end of a row mean nothing."""
        if self.unwritten:
            if self.longest > self._ids.shape[1]:
                # If others may edit or keep these ids, there is no room to spare: the next token makes another tensor.
                self._ids = F.pad(self._ids, (0, 1 if self.exposes_ids else max(self.longest, 256)))
            rows, columns, tokens = on_device(list(zip(*self.unwritten)), self._ids.device)
            self._ids[rows, columns] = tokens
            self.unwritten = []
        return self._ids

    def read(self, rows: list[int], length: int) -> torch.Tensor:
        """The first `length` tokens of some rows, `(len(rows), length)`."""
        return self.ids[:, :length].contiguous() if len(rows) == self.batch_size else self.ids[rows, :length]

    def newest(self, num_tokens: int) -> torch.Tensor:
        """The last tokens of every row, `(B, num_tokens)`. Shorter rows begin with zeros."""
        ids = self.ids
        if self.shortest == self.longest:
            return ids[:, self.longest - num_tokens : self.longest]
        return align_right(ids, on_device(self.lengths, ids.device), num_tokens)

    def retire(self) -> list[int] | None:
        """Removes finished rows from the batch. Returns the indices of the others; `None` if nothing changes."""
        if not self.may_retire or not any(self.is_finished) or all(self.is_finished):
            return None
        ids = self.ids
        staying = [i for i, is_finished in enumerate(self.is_finished) if not is_finished]
        for i, row in enumerate(self.rows):
            if self.is_finished[i]:
                self.retired[row] = ids[i, : self.lengths[i]].clone()
        self._ids = ids[on_device(staying, ids.device)]
        self.rows, self.lengths = [self.rows[i] for i in staying], [self.lengths[i] for i in staying]
        self.is_finished = [False] * len(staying)
        return staying

    def sequences(self) -> torch.Tensor:
        """The texts of all rows of the call, `(num_rows, length)`, padded at the right."""
        texts = {row: ids[:length] for row, ids, length in zip(self.rows, self.ids, self.lengths)} | self.retired
        ordered = [texts[row] for row in range(self.num_rows)]
        return pad_sequence(ordered, batch_first=True, padding_value=self.pad_token)


def pad_token_of(generation_config: GenerationConfig) -> int:
    """The token that `_sample` pads finished rows with. Without a pad token it is the first that ends a text."""
    pad_token = generation_config._pad_token_tensor
    return 0 if pad_token is None else int(pad_token)


def max_length_of(stopping_criteria: StoppingCriteriaList) -> int:
    """The length at which `MaxLengthCriteria` end every row. Subclasses of it may not."""
    lengths = [criteria.max_length for criteria in stopping_criteria if type(criteria) is MaxLengthCriteria]
    return math.ceil(min([*lengths, torch.iinfo(torch.long).max]))  # they may be floats


def right_index(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Which entry is in each of `width` columns `(B, width)`, if rows of `lengths` `(B,)` end at the right. Negative is padding."""
    return torch.arange(width, device=lengths.device) - width + lengths[:, None]


def align_right(entries: torch.Tensor, lengths: torch.Tensor, width: int) -> torch.Tensor:
    """
    Moves the first `lengths[b]` of the `entries` `(..., B, L)` of each row to the right of `width` columns. Longer
    rows lose their beginning; shorter rows begin with zeros.
    """
    source = right_index(lengths, width)
    shape = (*entries.shape[:-2], *source.shape)
    moved = entries.expand(*shape[:-1], -1).gather(-1, source.clamp(min=0).expand(shape))
    return moved.masked_fill(source < 0, 0)


def stack_right(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    """A tensor `(B, length of the longest)` of lists of numbers. Shorter ones begin with zeros."""
    width = max(map(len, rows))
    return on_device([[0] * (width - len(row)) + row for row in rows], device, dtype=torch.long)


def flat_indices(indices: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """
    The places `(B * H * K,)` of the entries `indices` `(B, K)` of states `(B, H, S, ...)` of this `shape`, once their
    first three dimensions are flattened. `index_select` with them copies whole vectors; `gather` copies number by
    number.
    """
    batch_size, num_heads, num_entries = shape[:3]
    first = torch.arange(batch_size * num_heads, device=indices.device).view(batch_size, num_heads, 1) * num_entries
    return (first + indices[:, None]).flatten()


def take_rows(states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The vectors `(B, K, D)` of `states` `(B, S, D)` at `indices` `(B, K)`."""
    flat = flat_indices(indices, states[:, None].shape)
    return states.flatten(0, 1).index_select(0, flat).view(*indices.shape, -1)

# SPDX-License-Identifier: Apache-2.0
"""The text of a batch as it grows, row by row."""

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import MaxLengthCriteria

from .ragged_eagle3 import align_right, on_device


class Text:
    """
    The rows of a batch. A finished row goes on as in `_sample`: with padding, up to the length of the longest.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, S)`): The prompts.
        stopping_criteria, generation_config: What `_sample` is called with.
        in_step (`bool`):
            Whether the rows advance by as much as the slowest can, so that whoever looks at the batch as a whole sees
            what `_sample` would show. Otherwise each advances at its own pace.
        may_be_edited (`bool`): Whether processors or criteria may change the ids that they are given, or keep them.
        may_retire (`bool`): Whether finished rows may leave the batch.
    """

    # How far a row may run ahead of the slowest; noise is kept for the rows in between.
    MAX_LEAD = 64

    def __init__(self, input_ids, stopping_criteria, generation_config, in_step, may_be_edited, may_retire):
        self.num_rows, self.prompt_length = input_ids.shape
        self.rows = list(range(self.num_rows))  # of the batch, those that have not left it
        self.retired: dict[int, torch.LongTensor] = {}  # the texts of the others
        self.in_step, self.may_be_edited = in_step, may_be_edited
        self._ids = input_ids.long()  # (B, capacity), of which each row has written its length
        self.lengths = [self.prompt_length] * self.num_rows
        self.unwritten: list[list[int]] = [[] for _ in self.rows]  # the last tokens, not yet in `_ids`
        self.is_finished = [False] * self.num_rows
        # A criterion of the caller's may have been met before; each row takes a token in any case.
        self.max_length = max(max_length_of(stopping_criteria), self.prompt_length + 1)
        self.pad_token = None if (pad := generation_config._pad_token_tensor) is None else int(pad)
        self.pads_finished_rows = any(hasattr(criteria, "eos_token_id") for criteria in stopping_criteria)
        # What follows a finished row is padding, or nothing at all.
        pads = self.pads_finished_rows or all(type(each) is MaxLengthCriteria for each in stopping_criteria)
        self.may_retire = may_retire and pads and not in_step
        # Noise is kept for the positions between the slowest and the fastest row. Greedy calls need none.
        hurries = self.num_rows == 1 or (self.may_retire and not generation_config.do_sample)
        self.max_lead = self.max_length if hurries else self.MAX_LEAD

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

    @property
    def length(self) -> int:
        """Of the longest row, whether or not it has left."""
        return max([self.longest, *map(len, self.retired.values())])

    @property
    def is_complete(self) -> bool:
        return all(self.is_finished) and (self.may_retire or self.shortest == self.longest)

    def rows_behind(self, reach: int) -> list[bool]:
        """Which rows hold up the batch: unfinished ones that the slowest of those could overtake by `reach` tokens."""
        unfinished = [length for length, is_finished in zip(self.lengths, self.is_finished) if not is_finished]
        limit = min(unfinished, default=0) + reach
        return [length < limit and not done for length, done in zip(self.lengths, self.is_finished)]

    def advancing(self, nodes: list[int | None]) -> list[int]:
        """The rows that go on by a token, of those that have come to a node of their tree."""
        rows = [row for row, node in enumerate(nodes) if node is not None]
        if self.in_step:
            return rows if len(rows) == self.batch_size and not all(self.is_finished) else []
        unfinished_end, finished_end = min(self.max_length, self.shortest + self.max_lead), self.longest
        ends = [finished_end if is_finished else unfinished_end for is_finished in self.is_finished]
        return [row for row in rows if self.lengths[row] < ends[row]]

    def append(self, row: int, token: int) -> None:
        """Goes on with a token, which is written to the device with those that follow."""
        self.unwritten[row].append(token)
        self.lengths[row] += 1

    def _make_room(self, length: int) -> None:
        if length > self._ids.shape[1]:
            # Who may edit the text, or keep it, gets it itself, and another one after the next token.
            self._ids = F.pad(self._ids, (0, 1 if self.may_be_edited else max(length, 256)))

    @property
    def ids(self) -> torch.LongTensor:
        """`(B, capacity)`: what is behind the end of a row is not its text."""
        if any(self.unwritten):
            self._make_room(self.longest)
            starts = [length - len(tokens) for length, tokens in zip(self.lengths, self.unwritten)]
            if len(set(starts)) == len(set(self.lengths)) == 1:
                tokens = on_device(self.unwritten, self._ids.device)
                self._ids[:, starts[0] : self.longest] = tokens
            else:
                rows = [row for row, tokens in enumerate(self.unwritten) for _ in tokens]
                columns = [start + i for start, tokens in zip(starts, self.unwritten) for i in range(len(tokens))]
                tokens = [token for tokens in self.unwritten for token in tokens]
                rows, columns, tokens = on_device([rows, columns, tokens], self._ids.device)
                self._ids[rows, columns] = tokens
            self.unwritten = [[] for _ in self.rows]
        return self._ids

    def read(self, rows: list[int], length: int) -> torch.LongTensor:
        """The first `length` tokens of some rows."""
        return self.ids[:, :length].contiguous() if len(rows) == self.batch_size else self.ids[rows, :length]

    def newest(self, num_tokens: int) -> torch.LongTensor:
        """The last tokens of every row, `(B, num_tokens)`; shorter rows begin with zeros."""
        ids = self.ids
        if self.shortest == self.longest:
            return ids[:, self.longest - num_tokens : self.longest]
        return align_right(ids, on_device(self.lengths, ids.device), num_tokens)

    def retire(self) -> list[int] | None:
        """Lets finished rows leave. Returns the indices of those that stay, and `None` if all do, or none."""
        if not self.may_retire or not any(self.is_finished) or all(self.is_finished):
            return None
        ids = self.ids
        staying = [i for i, is_finished in enumerate(self.is_finished) if not is_finished]
        for i, row in enumerate(self.rows):
            if self.is_finished[i]:
                self.retired[row] = ids[i, : self.lengths[i]].clone()
        self._ids = ids[staying]
        for name in ("rows", "lengths", "is_finished", "unwritten"):
            setattr(self, name, [getattr(self, name)[i] for i in staying])
        return staying

    def sequences(self) -> torch.LongTensor:
        """The texts of all rows, `(num_rows, length)`."""
        texts = {row: ids[:length] for row, ids, length in zip(self.rows, self.ids, self.lengths)} | self.retired
        texts = [texts[row] for row in range(self.num_rows)]
        return pad_sequence(texts, batch_first=True, padding_value=self.pad_token or 0)


def max_length_of(stopping_criteria) -> int:
    """The length at which the first of them ends every row. One that somebody derived may go on."""
    lengths = [criteria.max_length for criteria in stopping_criteria if type(criteria) is MaxLengthCriteria]
    return min(lengths, default=torch.iinfo(torch.long).max)

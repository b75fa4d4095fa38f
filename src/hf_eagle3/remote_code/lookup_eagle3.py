# SPDX-License-Identifier: Apache-2.0
"""Next tokens without a forward of the draft: what followed the newest ones where they stood in the text before."""

import itertools
from collections.abc import Iterator

import torch

from .proposer_eagle3 import Proposer
from .tree_eagle3 import DraftTree


class MatchCalibration:
    """
    How probable it is that the text goes on as it did where the same tokens stood before, by how many tokens are the
    same. Every token that is written tells, whether or not it was looked up.
    """

    PRIOR = (1.0, 2.0)  # went on like that, of as many
    MEMORY = 0.98  # a token's weight after the next with about as long a match
    LONGEST = 64  # longer matches are as good

    def __init__(self):
        # By the number of binary digits of the length, as 20 and 30 tokens tell the same and 2 and 3 do not.
        self.counts = [self.PRIOR] * (self.LONGEST.bit_length() + 1)

    def __call__(self, length: int) -> float:
        followed, asked = self.counts[min(length, self.LONGEST).bit_length()]
        return followed / asked

    def record(self, length: int, has_followed: bool) -> None:
        kind = min(length, self.LONGEST).bit_length()
        followed, asked = self.counts[kind]
        self.counts[kind] = self.MEMORY * followed + has_followed, self.MEMORY * asked + 1


class TextIndex:
    """
    The text of one row, and the place in it where the newest tokens stood before.

    Args:
        tokens (`list[int]`): The text so far.
    """

    SIZES = (3, 2)  # of the n-grams by which a place is found, the more telling first

    def __init__(self, tokens: list[int]):
        self.tokens: list[int] = []
        self.followers: dict[tuple[int, ...], int] = {}  # where the token is that followed an n-gram last
        for token in tokens:
            self._write(token)
        self._find()

    def append(self, token: int) -> bool:
        """Goes on with a token. Returns whether that was the one to expect."""
        is_expected = self.match_length > 0 and self.tokens[self.place] == token
        self._write(token)
        if is_expected:
            self.place, self.match_length = self.place + 1, self.match_length + 1
        else:
            self._find()
        return is_expected

    def next_tokens(self, num_tokens: int) -> list[int]:
        """The tokens that followed there; where they reach to the end, the text is taken to go round."""
        period = self.tokens[self.place : self.place + num_tokens] if self.match_length > 0 else self.tokens[-1:]
        return (period * num_tokens)[:num_tokens]

    def _write(self, token: int) -> None:
        for size in self.SIZES:
            if len(self.tokens) >= size:
                self.followers[tuple(self.tokens[-size:])] = len(self.tokens)
        self.tokens.append(token)

    def _find(self) -> None:
        """Sets `place`, whose token is to be expected next, and how many tokens before it are the newest, 0 if there is none."""
        tokens = self.tokens
        for size in self.SIZES:
            place = self.followers.get(tuple(tokens[-size:]))
            if place is not None:
                length, longest = size, min(place, MatchCalibration.LONGEST)
                while length < longest and tokens[place - 1 - length] == tokens[-1 - length]:
                    length += 1
                self.place, self.match_length = place, length
                return
        self.place = self.match_length = 0


class PromptLookup(Proposer):
    """
    Proposes for each row what followed its newest tokens where they stood before. (Prompt lookup decoding, as in
    transformers; LLMA, https://huggingface.co/papers/2304.04487.)

    Args:
        num_tokens (`int`): The most to look up at once.
        calibration (`MatchCalibration`): Counts how often a text goes on as it did before.
        vocab_size (`int`): Of the target's embedding. A prompt of embeddings may have placeholders for tokens.
    """

    def __init__(self, num_tokens: int, calibration: MatchCalibration, vocab_size: int):
        self.rows: list[TextIndex] = []
        self.is_finished: list[bool] = []
        self.num_tokens, self.calibration, self.vocab_size = num_tokens, calibration, vocab_size

    def observe(self, accepted):
        if not self.rows:
            self.rows = list(map(TextIndex, accepted.new_tokens))
        else:  # but for the padding of rows that were finished
            for row, tokens, was_finished in zip(self.rows, accepted.new_tokens, accepted.was_finished):
                for token in () if was_finished else tokens:
                    length = row.match_length
                    is_expected = row.append(token)
                    if length > 0:
                        self.calibration.record(length, is_expected)
        self.is_finished = list(accepted.is_finished)

    def propose(self, plan, root_tokens, sampler=None):
        guesses = [
            [token if 0 <= token < self.vocab_size else 0 for token in row] for row in self.next_tokens(plan.depth)
        ]
        return DraftTree.chain(torch.cat([root_tokens, root_tokens.new_tensor(guesses)], dim=1))

    def select(self, rows):
        self.rows, self.is_finished = [self.rows[row] for row in rows], [self.is_finished[row] for row in rows]

    def next_tokens(self, num_tokens: int) -> list[list[int]]:
        """Guesses for each row: any, where there is nothing to look up."""
        return [row.next_tokens(num_tokens) for row in self.rows]

    def expected_progress(self, num_tokens: int) -> list[float]:
        """
        How far to expect the slowest of the unfinished rows to come in a step that verifies 0, 1, ... `num_tokens` of
        those that are looked up for each.
        """
        rows = [row for row, is_finished in zip(self.rows, self.is_finished) if not is_finished]
        shortest = min((len(row.tokens) for row in rows), default=0)
        states = {(len(row.tokens) - shortest, row.match_length) for row in rows}
        if not rows or (0, 0) in states:  # the slowest has nothing to look up
            return [1.0] * (num_tokens + 1)
        expected = ([lead + tokens for tokens in self._expected(length, num_tokens)] for lead, length in states)
        return list(map(min, zip(*expected)))

    def _expected(self, length: int, num_tokens: int) -> Iterator[float]:
        """Tokens to expect of a row with a match of that length."""
        probabilities = (self.calibration(length + i) if length > 0 else 0.0 for i in range(num_tokens))
        return itertools.accumulate(itertools.accumulate(probabilities, float.__mul__), initial=1.0)

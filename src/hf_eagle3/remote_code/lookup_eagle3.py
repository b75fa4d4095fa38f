# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: proposes the tokens that followed the previous occurrence of the newest ones."""

import itertools
from collections.abc import Iterator

import torch

from .accept_eagle3 import Sampler
from .devices_eagle3 import on_device
from .tree_eagle3 import Accepted, DraftTree, Plan, Proposer


class MatchCalibration:
    """
    Estimates how likely the next token repeats an earlier passage, given how many tokens before it match. Learns from every
    written token.
    """

    PRIOR = (1.0, 2.0)  # right guesses, of all guesses
    MEMORY = 0.98  # weight of a guess after the next guess of about the same length
    LONGEST = 64  # longer matches count the same

    def __init__(self) -> None:
        # By the number of binary digits of the length: 20 and 30 matching tokens say the same, 2 and 3 do not.
        self.counts = [self.PRIOR] * (self.LONGEST.bit_length() + 1)

    def probability(self, length: int) -> float:
        """The probability that the next token is right after `length` tokens that match."""
        num_right, num_guesses = self.counts[min(length, self.LONGEST).bit_length()]
        return num_right / num_guesses

    def record(self, length: int, is_right: bool) -> None:
        """Learns from a guess after `length` tokens that match."""
        bucket = min(length, self.LONGEST).bit_length()
        num_right, num_guesses = self.counts[bucket]
        self.counts[bucket] = self.MEMORY * num_right + is_right, self.MEMORY * num_guesses + 1


class TextIndex:
    """
    The text of one row. `place` is the index of the guess for its next token. The `match_length` tokens before `place` equal
    the newest ones. If there is no guess, `match_length` is 0.
    """

    SIZES = (3, 2)  # n-grams by which a place is found; the longer ones first

    def __init__(self, tokens: list[int]):
        self.tokens: list[int] = []
        self.followers: dict[tuple[int, ...], int] = {}  # the place after the latest occurrence of each n-gram
        self.place = self.match_length = 0
        for token in tokens:
            self._write(token)
        self._find()

    def append(self, token: int) -> bool:
        """Appends a token. Returns whether it is the one that was guessed."""
        is_guessed = self.match_length > 0 and self.tokens[self.place] == token
        self._write(token)
        if is_guessed:
            self.place, self.match_length = self.place + 1, self.match_length + 1
        else:
            self._find()
        return is_guessed

    def next_tokens(self, num_tokens: int) -> list[int]:
        """The tokens from `place` on, repeated if the text ends before `num_tokens` of them."""
        period = self.tokens[self.place : self.place + num_tokens] if self.match_length > 0 else self.tokens[-1:]
        return (period * num_tokens)[:num_tokens]

    def _write(self, token: int) -> None:
        for size in self.SIZES:
            if len(self.tokens) >= size:
                self.followers[tuple(self.tokens[-size:])] = len(self.tokens)
        self.tokens.append(token)

    def _find(self) -> None:
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
    """Proposes up to `num_tokens` tokens a row (prompt lookup decoding of transformers; LLMA, https://huggingface.co/papers/2304.04487)."""

    def __init__(self, num_tokens: int, calibration: MatchCalibration, vocab_size: int):
        self.rows: list[TextIndex] = []
        self.is_finished: list[bool] = []
        self.num_tokens, self.calibration, self.vocab_size = num_tokens, calibration, vocab_size

    def observe(self, accepted: Accepted) -> None:
        if not self.rows:
            self.rows = list(map(TextIndex, accepted.new_tokens))
        else:
            for row, tokens, num_written in zip(self.rows, accepted.new_tokens, accepted.num_written):
                for token in tokens[:num_written]:  # the others are padding
                    length = row.match_length
                    is_right = row.append(token)
                    if length > 0:
                        self.calibration.record(length, is_right)
        self.is_finished = list(accepted.is_finished)

    def propose(self, plan: Plan, root_tokens: torch.Tensor, sampler: Sampler | None = None) -> DraftTree:
        # Prompts of embeddings may have placeholders as tokens.
        guesses = [
            [token if 0 <= token < self.vocab_size else 0 for token in row.next_tokens(plan.depth)]
            for row in self.rows
        ]
        return DraftTree.chain(torch.cat([root_tokens, on_device(guesses, root_tokens.device)], dim=1))

    def select(self, rows: list[int]) -> None:
        self.rows, self.is_finished = [self.rows[row] for row in rows], [self.is_finished[row] for row in rows]

    def expected_progress(self, num_tokens: int) -> list[float]:
        """The expected progress of the slowest unfinished row, if 0, 1, ... `num_tokens` guesses are verified."""
        rows = [row for row, is_finished in zip(self.rows, self.is_finished) if not is_finished]
        shortest = min((len(row.tokens) for row in rows), default=0)
        states = {(len(row.tokens) - shortest, row.match_length) for row in rows}
        if not rows or (0, 0) in states:  # the slowest row has no guess
            return [1.0] * (num_tokens + 1)
        expected = ([lead + tokens for tokens in self._expected(length, num_tokens)] for lead, length in states)
        return list(map(min, zip(*expected)))

    def _expected(self, length: int, num_tokens: int) -> Iterator[float]:
        """The expected tokens of a row with a match of that length, if 0, 1, ... of its guesses are verified."""
        rates = (self.calibration.probability(length + i) if length > 0 else 0.0 for i in range(num_tokens))
        return itertools.accumulate(itertools.accumulate(rates, float.__mul__), initial=1.0)

# Copyright 2026 The hf-eagle3 authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""How many nodes a step verifies: what brings the most tokens per second on this machine."""

import statistics
import weakref
from collections import deque


class StaticPolicy:
    """As many nodes as the settings say, in every step."""

    def __init__(self, num_nodes: int):
        self.num_nodes = num_nodes

    def choose(self) -> int:
        return self.num_nodes

    def record(self, num_nodes: int, tokens: float, seconds: float) -> None:
        pass


class AutoPolicy:
    """
    Measures steps of several sizes, plain decoding among them, and takes the size of the highest rate. Rates are taken to
    rise and then fall with the size: from time to time a neighbour of the best is tried, or plain decoding, ever more
    rarely while none is better. The text does not depend on the size, so that timing may.

    Args:
        num_nodes (`int`): The most nodes that a step may verify.
    """

    LATEST_TOKENS, LATEST_SECONDS = 64, 16  # steps of a size that count; how many tokens one brings varies more
    DOUBTS = 2
    FIRST_TRIAL, TRIAL = 5, 3  # steps
    REVIEW = 4  # steps after which the best is to prove itself again
    INTERVALS = (32, 512)  # steps between trials: at first, and at most

    def __init__(self, num_nodes: int):
        self.sizes = sorted({0, max(num_nodes // 9, 1), max(num_nodes // 3, 1), num_nodes})
        self.tokens = {size: deque(maxlen=self.LATEST_TOKENS) for size in self.sizes}
        self.seconds = {size: deque(maxlen=self.LATEST_SECONDS) for size in self.sizes}
        self.best = self.current = self.sizes[0]
        self.steps_left, self.interval, self.num_trials = self.FIRST_TRIAL, self.INTERVALS[0], 0
        self.last_recorded = None

    def rate(self, size: int) -> float:
        """Tokens per second and row; 0 if nothing is known. Seconds are capped, because a step may meet a pause that is not its own."""
        seconds = list(self.seconds[size])  # other threads may add to it
        if not seconds:
            return 0.0
        cap = 3 * statistics.median(seconds)
        # A few steps say little of how many tokens to expect: as if there had been some before that brought one each.
        tokens = [*self.tokens[size], *[1] * self.DOUBTS]
        return statistics.fmean(tokens) / statistics.fmean(min(value, cap) for value in seconds)

    def choose(self) -> int:
        """The size of the next step; 0 is plain decoding."""
        if self.steps_left == 0 or (self._is_due_for_review() and max(self.sizes, key=self.rate) != self.best):
            self._plan()
        self.steps_left = max(self.steps_left - 1, 0)
        return self.current

    def _is_due_for_review(self) -> bool:
        return self.current == self.best and self.steps_left % self.REVIEW == 0

    def _plan(self) -> None:
        """What to do for the next steps: try a size, or use the best."""
        known = [size for size in self.sizes if self.seconds[size]]
        if not known:
            self.steps_left = self.FIRST_TRIAL
            return
        best, was_trial = max(known, key=self.rate), self.current != self.best
        at = self.sizes.index(best)
        neighbours = [size for size in self.sizes if abs(self.sizes.index(size) - at) == 1]
        unknown = [size for size in neighbours if size not in known]
        if best != self.best:
            self.best, self.interval = best, self.INTERVALS[0]
        elif was_trial:
            self.interval = min(2 * self.interval, self.INTERVALS[1])
        if unknown:  # climb on
            self.current, self.steps_left = unknown[0], self.FIRST_TRIAL
        elif was_trial or self.current != best:
            self.current, self.steps_left = best, self.interval
        else:
            candidates = sorted({0, *neighbours} - {best})
            self.current, self.steps_left = candidates[self.num_trials % len(candidates)], self.TRIAL
            self.num_trials += 1

    def record(self, num_nodes: int, tokens: float, seconds: float) -> None:
        """What a step of a size brought: tokens for each row that was not finished, and the time it took."""
        # The first step after a change of size pays for the change: cold caches, and what the draft has to catch up on.
        if self.last_recorded == num_nodes and num_nodes in self.seconds:
            self.tokens[num_nodes].append(tokens)
            self.seconds[num_nodes].append(seconds)
        self.last_recorded = num_nodes


# What was measured of each target: the policies of its drafts and ways of decoding.
_POLICIES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def tree_policy(name: str, num_nodes: int, target, draft, **kind) -> StaticPolicy | AutoPolicy:
    """
    The policy of a name. `"auto"` remembers, for as long as target and draft live, what calls of the same `kind` measured.

    Raises:
        ValueError: if there is no such policy.
    """
    if name == "static":
        return StaticPolicy(num_nodes)
    if name != "auto":
        raise ValueError(f"`tree_policy` must be 'auto' or 'static', got {name!r}.")
    policies = _POLICIES.setdefault(target, weakref.WeakKeyDictionary()).setdefault(draft, {})
    key = (num_nodes, *sorted(kind.items()))
    return policies.setdefault(key, AutoPolicy(num_nodes))

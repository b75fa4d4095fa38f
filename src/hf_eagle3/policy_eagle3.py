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
    rise and then fall with the size, so that from time to time only a neighbour of the best is tried, ever more rarely
    while it stays the worse. The text does not depend on the size, so that timing may.

    Args:
        num_nodes (`int`): The most nodes that a step may verify.
    """

    WINDOW = 24  # the latest steps, which count
    FIRST_TRIAL = 3  # steps that each size is given
    TRIAL = 2
    INTERVALS = (32, 512)  # steps between trials: at first, and at most

    def __init__(self, num_nodes: int):
        self.sizes = sorted({0, max(num_nodes // 9, 1), max(num_nodes // 3, 1), num_nodes})
        self.tokens = {size: deque(maxlen=self.WINDOW) for size in self.sizes}
        self.seconds = {size: deque(maxlen=self.WINDOW) for size in self.sizes}
        self.best, self.trial, self.above = None, None, True
        self.steps_left, self.interval = 0, self.INTERVALS[0]

    def rate(self, size: int) -> float:
        """Tokens per second and row. The median, because a step may meet a pause that is not its own."""
        return statistics.fmean(self.tokens[size]) / statistics.median(self.seconds[size])

    def choose(self) -> int:
        """The size of the next step; 0 is plain decoding."""
        if self.steps_left > 0:
            self.steps_left -= 1
            return self.best if self.trial is None else self.trial
        known = [size for size in self.sizes if len(self.seconds[size]) >= self.FIRST_TRIAL]
        if not known:
            self.best = self.trial = self.sizes[0]
            self.steps_left = self.FIRST_TRIAL - 1
            return self.trial
        best = max(known, key=self.rate)
        at = self.sizes.index(best)
        larger = self.sizes[at + 1 : at + 2]
        if larger and larger[0] not in known:  # climb on
            self.best, self.trial, self.steps_left = best, larger[0], self.FIRST_TRIAL - 1
            return self.trial
        if best != self.best:
            self.best, self.interval = best, self.INTERVALS[0]
        elif self.trial is not None:
            self.interval = min(2 * self.interval, self.INTERVALS[1])
        if self.trial is None:  # the best has had its time
            neighbours = larger + self.sizes[max(at - 1, 0) : at]
            self.above = not self.above
            self.trial, self.steps_left = neighbours[-1 if self.above else 0], self.TRIAL - 1
            return self.trial
        self.trial, self.steps_left = None, self.interval - 1
        return self.best

    def record(self, num_nodes: int, tokens: float, seconds: float) -> None:
        """What a step of a size brought: tokens for each row that was not finished, and the time it took."""
        if num_nodes in self.seconds:
            self.tokens[num_nodes].append(tokens)
            self.seconds[num_nodes].append(seconds)


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

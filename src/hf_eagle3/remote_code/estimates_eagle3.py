# SPDX-License-Identifier: Apache-2.0
"""What the policy `auto` goes by: how long the parts of a step take, and how often guesses turn out to be right."""

import bisect
import math
import statistics

import torch


def measurable(seconds: float) -> float:
    """Clocks may be coarse, stand still or be set while something is measured: nothing takes no time, or for ever."""
    return min(max(seconds, 1e-6), 1e6)


class StepCosts:
    """
    Seconds that the parts of a step take, by their size: `"level"`, each level but the first, for so many nodes in all
    rows together; `"first"`, all of drafting but those, for so many rows; `"verify"`, for so many tokens in all rows
    together; `"step"`, a whole one, of so many levels; `"lookup"`, one that looks up so many tokens. Medians of the
    latest measurements, since a step may meet a pause that is not its own. The first measurement of a part pays for
    its preparation and does not count.

    Threads share them: what is stored is replaced, not changed, and what is asked for is read once.
    """

    LATEST = 5
    TRUSTED = 256  # measurements after which one that was not renewed is forgotten

    def __init__(self):
        self.samples: dict[tuple[str, int], tuple[float, ...]] = {}
        self.renewed: dict[tuple[str, int], int] = {}
        self.curves: dict[str, tuple[list[int], list[float]]] = {}  # what `lines` follows, until something is recorded
        self.num_recorded = 0

    def record(self, part: str, size: int, seconds: float) -> None:
        self.num_recorded += 1
        key, seconds = (part, size), measurable(seconds)
        if key in self.renewed:
            self.samples[key] = (*self.samples.get(key, ()), seconds)[-self.LATEST :]
            self.curves.pop(part, None)
        self.renewed[key] = self.num_recorded

    def forget(self) -> None:
        """Forgets what is old: it may have been a pause, or of shorter texts."""
        for key in list(self.samples):
            if self.num_recorded - self.renewed[key] > self.TRUSTED:
                self.samples.pop(key, None)
                self.curves.pop(key[0], None)

    def measured(self, part: str) -> list[tuple[int, tuple[float, ...]]]:
        """Sizes, ascending, with their latest measurements."""
        return sorted((size, seconds) for (name, size), seconds in list(self.samples.items()) if name == part)

    def near(self, part: str, size: int) -> float | None:
        """Seconds of the next size that was measured: a larger one, if there is."""
        samples = self.measured(part)
        larger = [seconds for known, seconds in samples if known >= size]
        return statistics.median_low((larger or [seconds for _, seconds in samples[::-1]])[0]) if samples else None

    def lines(self, part: str, sizes: list[int]) -> list[float] | None:
        """
        Seconds of some sizes, on lines between and beyond those that were measured more than once (a single
        measurement may have met a pause); `None` if there are fewer than two of them. Less does not take longer, and
        half not less than half.
        """
        curve = self.curves.get(part)
        if curve is None:
            samples = [(size, seconds) for size, seconds in self.measured(part) if len(seconds) > 1]
            seconds = [statistics.median_low(seconds) for _, seconds in samples]
            curve = [size for size, _ in samples], [min(seconds[i:]) for i in range(len(samples))]
            self.curves[part] = curve
        known, seconds = curve
        if len(known) < 2:
            return None
        costs = []
        for size in sizes:
            right = min(max(bisect.bisect_left(known, size), 1), len(known) - 1)
            left = 0 if size > known[-1] else right - 1
            slope = (seconds[right] - seconds[left]) / (known[right] - known[left])
            line = seconds[left] + slope * (size - known[left])
            costs.append(max(line, seconds[0] * size / known[0]) if size < known[0] else line)
        return costs


class Calibration:
    """
    How probable it is that the target accepts a node whose parent it accepts, from what the draft says of it. Nodes
    are counted by ranges of the draft's log-probability, a parent's best child apart from its siblings: greedy targets
    take it more often than it is probable, and the others less. In each range the draft is right about so many times
    as often as it says.
    """

    # Wherever and in whatever the caller makes tensors by default.
    KIND = {"dtype": torch.float32, "device": "cpu"}
    BOUNDS = list(map(math.log, (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)))
    BOUNDS_TENSOR = torch.tensor(BOUNDS, **KIND)
    PRIOR = 1.0  # the draft is taken at its word until it was expected to be right about so often
    MEMORY = 0.95  # a step's weight after the next

    def __init__(self):
        self.num_ranges = len(self.BOUNDS) + 1
        self.expected = self.accepted = [self.PRIOR] * (2 * self.num_ranges)
        self.factors = torch.zeros(2 * self.num_ranges, **self.KIND)  # logarithms

    def __call__(self, confidences: torch.FloatTensor) -> torch.FloatTensor:
        """Log-probabilities `(..., K)` of siblings, in descending order before and after."""
        device = confidences.device
        ranges = torch.bucketize(confidences, self.BOUNDS_TENSOR.to(device))
        ranges[..., 1:] += self.num_ranges
        return (confidences + self.factors.to(device).take(ranges)).clamp(max=0).cummin(dim=-1).values

    def record(self, confidences: list[list[float]], parents: list[list[int]], paths: list[list[int]]) -> None:
        """
        Counts which nodes of trees were accepted, those on the `paths`, of those whose parent was. `parents` are those
        of all nodes, as in [`DraftTree`], `confidences` are of all but the root.
        """
        fresh = self.PRIOR * (1 - self.MEMORY)
        expected, accepted = (
            [self.MEMORY * count + fresh for count in each] for each in (self.expected, self.accepted)
        )
        for row_confidences, row_parents, path in zip(confidences, parents, map(set, paths)):
            for node, confidence in enumerate(row_confidences, start=1):
                if row_parents[node] in path:
                    kind = bisect.bisect_left(self.BOUNDS, confidence)
                    if node > 1 and row_parents[node] == row_parents[node - 1]:  # the best child is the first
                        kind += self.num_ranges
                    expected[kind] += math.exp(confidence)
                    accepted[kind] += node in path
        # Not in place: other threads read them.
        self.expected, self.accepted = expected, accepted
        self.factors = torch.tensor([math.log(a / b) for a, b in zip(accepted, expected)], **self.KIND)


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

# SPDX-License-Identifier: Apache-2.0
"""The policy: what steps cost on this machine, how right the draft is, and which plan pays."""

import bisect
import math
import statistics
import weakref
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedModel

from .lookup_eagle3 import MatchCalibration, PromptLookup
from .tree_eagle3 import Accepted, DraftTree, Plan, Prices


LEAST_SECONDS = 1e-6  # of a step: clocks may be coarse, or stall


class StepCosts:
    """
    Seconds that parts of a step take, by size: `"draft"` by levels, `"verify"` by tokens of all rows. Keeps the
    five latest measurements of each size. Uses the second shortest of four or five (the shortest of fewer), because pauses
    lengthen the others. Drops the first measurement of a size, which includes warm-up.
    """

    LATEST = 5
    TRUSTED = 256  # a size is forgotten after so many measurements of other sizes: texts may be longer now

    def __init__(self) -> None:
        self.samples: dict[tuple[str, int], list[float]] = {}
        self.renewed: dict[tuple[str, int], int] = {}
        self.num_recorded: dict[str, int] = {}  # by part

    def record(self, part: str, size: int, seconds: float) -> None:
        """Adds a measurement."""
        self.num_recorded[part] = now = self.num_recorded.get(part, 0) + 1
        if (part, size) in self.renewed:
            self.samples.setdefault((part, size), []).append(max(seconds, LEAST_SECONDS))
            del self.samples[part, size][: -self.LATEST]
        self.renewed[part, size] = now
        for key in [key for key in self.samples if key[0] == part and now - self.renewed[key] > self.TRUSTED]:
            del self.samples[key]

    def known(self, part: str) -> list[tuple[int, float]]:
        """The measured sizes, ascending, and their seconds. Sizes measured once count only if no other is known."""
        samples = {size: seconds for (name, size), seconds in self.samples.items() if name == part}
        repeated = {size: seconds for size, seconds in samples.items() if len(seconds) > 1}
        return sorted(
            (size, sorted(seconds)[(len(seconds) - 1) // 3]) for size, seconds in (repeated or samples).items()
        )

    def seconds(self, part: str, size: int) -> float | None:
        """
        The seconds of any size, by linear interpolation and extrapolation; `None` if no size is known. A smaller size
        never takes longer, and half a size takes at least half the time.
        """
        if not (known := self.known(part)):
            return None
        sizes, seconds = [size for size, _ in known], [seconds for _, seconds in known]
        seconds = [min(seconds[i:]) for i in range(len(seconds))]
        least = seconds[0] * min(size / sizes[0], 1.0)
        if len(known) == 1:
            return least
        right = min(max(bisect.bisect_left(sizes, size), 1), len(known) - 1)
        left = 0 if size > sizes[-1] else right - 1
        slope = (seconds[right] - seconds[left]) / (sizes[right] - sizes[left])
        return max(seconds[left] + slope * (size - sizes[left]), least)


class Calibration:
    """
    Learns the `power` to which the draft's probabilities are raised, so that they match how often the target accepts
    them (temperature scaling: Guo et al., https://huggingface.co/papers/1706.04599). A draft learns the target's
    distribution, but a greedy target always takes its best token. A draft may also be overconfident. The power
    rises if the best children of nodes are accepted more often than their probabilities say.
    """

    RATE = 0.1  # by how much the power's logarithm rises per accepted node that was not expected at all
    LEAST, MOST = 0.1, 10.0

    def __init__(self, power: float):
        self.power = power

    def record(self, tree: DraftTree, accepted: Accepted) -> None:
        """Learns from a drafted tree, in unfinished rows."""
        if tree.confidences is None or tree.num_nodes == 1 or all(accepted.is_finished):
            return
        rows = zip(*tree.on_host()[1:], accepted.nodes, accepted.is_finished)
        surprise = 0.0  # accepted best children, minus the expected number of them
        for parents, confidences, path, is_finished in rows:
            if is_finished:
                continue
            best_children: dict[int, int] = {}
            for node, parent in enumerate(parents[1:], start=1):
                best_children.setdefault(parent, node)  # the best sibling is first
            for child in filter(None, map(best_children.get, path)):
                surprise += (child in path) - math.exp(confidences[child])
        surprise /= accepted.is_finished.count(False)
        self.power = min(max(self.power * math.exp(self.RATE * surprise), self.LEAST), self.MOST)


class Reach:
    """How deep the target follows the draft: the expected tokens of trees of each depth."""

    MEMORY = 0.95  # each step multiplies the weights of the earlier ones by this
    PRIOR = 2.0  # a level's rate starts as that of the level above, with the weight of so many steps

    def __init__(self, depth: int):
        # By level: how often it had a node whose parent was accepted, and how often one was accepted.
        self.num_reached, self.num_accepted = [0.0] * depth, [0.0] * depth

    def record(self, tree: DraftTree, accepted: Accepted) -> None:
        """Counts how deep rows followed a drafted tree. The paths of finished rows may be cut short."""
        paths = [path for path, is_finished in zip(accepted.nodes, accepted.is_finished) if not is_finished]
        if not paths:
            return
        for counts in (self.num_reached, self.num_accepted):
            counts[:] = [self.MEMORY * count for count in counts]
        for path in paths:
            for level in range(min(tree.max_depth, len(self.num_reached))):
                self.num_reached[level] += len(path) > level
                self.num_accepted[level] += len(path) > level + 1

    def expected_tokens(self) -> dict[int, float]:
        """The expected tokens by the depth of the tree."""
        expected: dict[int, float] = {}
        tokens = share = rate = 1.0
        for depth, (num_accepted, num_reached) in enumerate(zip(self.num_accepted, self.num_reached), start=1):
            rate = (num_accepted + self.PRIOR * rate) / (num_reached + self.PRIOR)
            share *= rate
            expected[depth] = tokens = tokens + share
        return expected


class DraftingTrial:
    """Judges whether drafting pays in batches of about one size. If it does not, it is tried again, more and more rarely."""

    FIRST_PLAIN_STEPS = 3  # measured before the first tree
    FIRST_STEPS, MIN_STEPS = 8, 2  # drafted steps of the first trial with one row, and of other trials
    LATEST, PRIOR_STEPS = 32, 4  # window of drafted steps, and how many of them start the next trial
    INTERVALS = (16, 64)  # plain steps between trials: at first, and at most; each time four times as many
    MOST_LOST = 0.01  # share of the time that trials may lose, where the intervals allow it
    MOST_PLAIN = 16  # most intervals between trials, since a pause may cause the loss
    MOST_IF_CHANCE = 2  # most intervals if the loss may be bad luck
    MAY_PAY, MAY_BE_CHANCE = 2, 4  # standard errors of a loss up to which drafting goes on, or its pause is short
    REVIEWS = (8, 256)  # drafted steps between measurements of plain steps: at first, and at most

    def __init__(self, num_rows: int):
        self.first_steps = max(self.FIRST_STEPS // num_rows, self.MIN_STEPS)  # each row counts
        self.plain_left, self.interval = self.FIRST_PLAIN_STEPS, self.INTERVALS[0]
        self.num_drafted = 0  # steps since drafting began
        self.latest: list[tuple[float, float]] = []  # each drafted step's worth in plain steps, and its seconds
        self.lost = 0.0  # plain steps, since drafting began

    @property
    def rate(self) -> float:
        """Tokens per second and row of drafted steps."""
        tokens, seconds = map(sum, zip(*self.latest)) if self.latest else (0.0, 1.0)
        return tokens / seconds

    @property
    def is_running(self) -> bool:
        """Whether it is too early to judge drafting."""
        return self.num_drafted < (self.first_steps if self.interval == self.INTERVALS[0] else self.MIN_STEPS)

    def take_plain_step(self) -> bool:
        """
        Begins a step. Takes one of the plain steps that are left (`plain_left`), and returns whether there was one. Now and then, while
        drafting goes on, it first adds two, to measure them again. They count as one drafted step (`num_drafted`).
        """
        first, at_most = self.REVIEWS
        power_of_two = 1 << max(self.num_drafted.bit_length() - 1, 0)  # rounded down
        if self.num_drafted >= first and self.num_drafted % min(power_of_two, at_most) == 0:
            self.num_drafted += 1
            self.plain_left = 2
        self.plain_left -= 1
        return self.plain_left >= 0

    def judge(self, tokens: float, seconds: float, plain: float | None) -> None:
        """Judges by a drafted step: the plain steps that it was worth, its seconds, and those of a plain step."""
        self.latest = [*self.latest, (tokens, max(seconds, LEAST_SECONDS))][-self.LATEST :]
        self.num_drafted += 1
        if plain is None:
            return
        gains = [tokens - seconds / plain for tokens, seconds in self.latest]
        self.lost -= gains[-1]
        mean = sum(gains) / len(gains)
        error = sum((gain - mean) ** 2 for gain in gains) ** 0.5 / len(gains)  # standard error of the mean
        if self.is_running or mean + self.MAY_PAY * error >= 0:
            return
        if self.num_drafted > self.INTERVALS[0]:  # it used to pay
            self.interval = self.INTERVALS[0]
        most = (self.MOST_PLAIN if mean + self.MAY_BE_CHANCE * error < 0 else self.MOST_IF_CHANCE) * self.interval
        self.plain_left = min(max(self.interval, int(self.lost / self.MOST_LOST)), most)
        self.interval = min(4 * self.interval, self.INTERVALS[1])
        self.num_drafted, self.lost = 0, 0.0
        self.latest = self.latest[:: math.ceil(len(self.latest) / self.PRIOR_STEPS)]


# How trees get their sizes. "priced": the draft stops growing where prices say so. "depth": the policy chooses the depth
# before. "whole": the draft makes only the largest tree. "fixed": looked-up trees have that size, too.
Sizing = Literal["priced", "depth", "whole", "fixed"]


class CallKind(NamedTuple):
    """What changes the costs and gains of a call's steps. Only calls of one kind share measurements."""

    max_plan: Plan  # the largest tree
    num_rows: int = 1
    do_sample: bool = False
    looks_up: bool = True  # lookup leaves the harder steps to the draft
    sizing: Sizing = "priced"
    may_retire: bool = False  # finished rows leave the batch
    drafts_in_one_pass: bool = False  # drafting costs the same at any depth
    exposes_ids: bool = False  # a grammar, or other code of the caller, takes time and forbids tokens
    is_static: bool = False  # each forward reads all slots of the cache


class StaticPolicy:
    """Drafts the largest tree in every step. Only the calibration learns."""

    def __init__(self, max_plan: Plan, do_sample: bool = False):
        self.max_plan, self.calibration = max_plan, Calibration(1.5 if do_sample else 2.0)

    def plan(self, bottlenecks: list[bool], lookup: PromptLookup | None = None) -> Plan:
        """Plans a step. `bottlenecks` are the rows that the batch waits for, if any."""
        return self.max_plan

    def record(self, plan: Plan, tree: DraftTree, accepted: Accepted, *timing: Any) -> None:
        """Learns from a step. See [`Policy.record`] for its timing."""
        self.calibration.record(tree, accepted)


class Policy(StaticPolicy):
    """
    Chooses for each step the plan with the largest

        gain(plan) = E[tokens | plan] - rate * seconds(plan),

    where `rate` is the tokens per second of the best way of decoding so far. Seconds are measured. It counts how often
    looked-up tokens are right, and how deep the target follows the draft. Where the draft's confidences can be read
    without a sync, the plan has prices, by which the draft sizes each tree. The text does not depend
    on the tree, so timing may decide.

    A batch ends with its slowest row, so a step of a batch is worth what its slowest row gains.
    """

    HORIZON = 16  # drafted steps that a batch is assumed to have left
    MEASURED_LOOKUP = 1.5  # expected tokens that make measuring a lookup's cost worthwhile
    SIZES = (*range(5), 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # few numbers of nodes, so that each is measured often

    def __init__(self, kind: CallKind):
        super().__init__(kind.max_plan, kind.do_sample)
        self.kind, self.is_priced = kind, kind.sizing == "priced"
        self.costs, self.matches = StepCosts(), MatchCalibration()
        most = kind.max_plan.num_nodes
        self.sizes = [*self.SIZES[: bisect.bisect_left(self.SIZES, most)], most]
        self.trials: dict[int, DraftingTrial] = {}  # by the number of rows, up to a power of two
        self.reach = Reach(min(kind.max_plan.depth, most))
        # The latest plan, before `Verifier.limit` cut it.
        self.planned = kind.max_plan
        self.last_proposer: str | None = None

    def trial(self, num_rows: int) -> DraftingTrial:
        """The trial of drafting in batches of about this size."""
        return self.trials.setdefault((num_rows - 1).bit_length(), DraftingTrial(num_rows))

    def cost_part(self, proposer: str | None) -> str:
        """The part of [`StepCosts`] for verifying. Without a sync after drafting it includes time of the draft."""
        return "verify" if self.is_priced else f"verify {proposer}"

    def plain_seconds(self, num_rows: int) -> float | None:
        """Seconds of a plain step."""
        return self.costs.seconds(self.cost_part(None), num_rows)

    def rate(self, num_rows: int) -> float:
        """Tokens per second and row of the better way of decoding."""
        plain = self.plain_seconds(num_rows)
        return max(1 / plain if plain else 0.0, self.trial(num_rows).rate)

    def size_to_measure(self, num_rows: int) -> int | None:
        """How many nodes to verify in order to measure their cost; `None` if two sizes are known, or nodes have no price."""
        if not self.is_priced or len(self.costs.known("verify")) > 1:
            return None
        return max(self.max_plan.num_nodes // 3 // num_rows, 1)

    def plan(self, bottlenecks: list[bool], lookup: PromptLookup | None = None) -> Plan:
        num_rows = len(bottlenecks)
        num_looked_up = 0 if lookup is None else self.num_to_look_up(num_rows, lookup)
        if num_looked_up > 0:
            self.planned = Plan("lookup", num_looked_up, num_looked_up)
        elif not any(bottlenecks):  # only padding is left, and whole trees are accepted
            self.planned = self.max_plan
        elif self.trial(num_rows).take_plain_step():
            self.planned = Plan()
        else:
            self.planned = self.draft_plan(bottlenecks)
        return self.planned

    def draft_plan(self, bottlenecks: list[bool]) -> Plan:
        """The plan of a step that drafts, by the kind's `sizing`."""
        num_rows, plan = len(bottlenecks), self.max_plan
        if self.kind.sizing in ("whole", "fixed"):
            return plan
        rate = self.rate(num_rows)
        if self.kind.sizing == "depth":
            tokens = self.reach.expected_tokens()
            gains = {depth: tokens[depth] - rate * (self.costs.seconds("draft", depth) or 0.0) for depth in tokens}
            return plan._replace(depth=max(gains, key=gains.__getitem__))
        levels = self.costs.known("draft")
        if (size := self.size_to_measure(num_rows)) is not None or not levels:
            return plan._replace(depth=min(plan.depth, 2), num_nodes=size or 1)
        (fewest, least), (most, longest) = levels[0], levels[-1]
        level = max(longest - least, 0.0) / max(most - fewest, 1)  # 0 until a deeper tree was drafted
        nodes = [math.inf] * (plan.num_nodes + 1)
        plain = self.plain_seconds(num_rows) or 0.0
        for size in self.sizes:
            nodes[size] = rate * ((self.costs.seconds("verify", num_rows * (1 + size)) or 0.0) - plain)
        return plan._replace(prices=Prices(rate * level, nodes, bottlenecks, self.trial(num_rows).is_running))

    def num_to_look_up(self, num_rows: int, lookup: PromptLookup) -> int:
        """How many tokens to look up; 0 if another step brings more."""
        sizes = [size for size in self.sizes if size <= lookup.num_tokens]
        sizes = sizes if self.is_priced else sizes[-1:]  # accelerators verify more tokens in about the same time
        expected, plain = lookup.expected_progress(sizes[-1]), self.plain_seconds(num_rows)
        if expected[-1] <= 1 or plain is None:
            return 0
        if (most := self.size_to_measure(num_rows)) is not None:  # an unsure draft may never verify as many
            size = max([size for size in sizes if size <= most], default=0)
            return size if expected[size] > self.MEASURED_LOOKUP else 0
        part, rate = self.cost_part("lookup"), self.rate(num_rows)
        costs = (max(self.costs.seconds(part, num_rows * (1 + size)) or 0.0, plain) for size in sizes)
        gains = {size: expected[size] - rate * seconds for size, seconds in zip(sizes, costs)}
        best = max(sizes, key=gains.__getitem__)
        return best if gains[best] > 0 else 0

    def record(
        self,
        plan: Plan,
        tree: DraftTree,
        accepted: Accepted,
        bottlenecks: list[bool],
        draft_seconds: float,
        verify_seconds: float,
        num_replayed: int = 0,
    ) -> None:
        """Learns from a step: how long proposing and verifying took, with `num_replayed` tokens beside the tree's."""
        num_rows = len(accepted.counts)
        trial, plain = self.trial(num_rows), self.plain_seconds(num_rows)
        catches_up, self.last_proposer = self.last_proposer != "draft", plan.proposer
        if plan.proposer is None and num_replayed > 0:
            if self.planned.proposer == "draft":  # drafting is to blame for the replay
                trial.judge(accepted.progress, verify_seconds, plain)
            return
        verify_part, num_tokens = self.cost_part(plan.proposer), num_rows * tree.num_nodes
        self.costs.record(verify_part, num_tokens, verify_seconds)
        if plan.proposer != "draft":
            return

        self.reach.record(tree, accepted)
        self.calibration.record(tree, accepted)
        levels = 1 if self.kind.drafts_in_one_pass else max(tree.depth, 1)  # a discarded tree has none
        self.costs.record("draft", levels, draft_seconds)
        drafted, verified = self.costs.seconds("draft", levels), self.costs.seconds(verify_part, num_tokens)
        if drafted is None or verified is None:
            return

        if catches_up and plain is not None:  # that time is lost if drafting turns out not to pay
            trial.lost += max(draft_seconds - drafted, 0.0) / plain
        only_measures = self.is_priced and self.planned.prices is None and self.planned != self.max_plan
        if only_measures and tree.num_nodes > 1:
            if plain is not None:
                trial.lost += max((draft_seconds + verify_seconds) / plain - accepted.progress, 0.0)
        elif any(bottlenecks):
            trial.judge(self.equivalent_plain_steps(accepted, bottlenecks, trial), drafted + verified, plain)

    def equivalent_plain_steps(self, accepted: Accepted, bottlenecks: list[bool], trial: DraftingTrial) -> float:
        """
        How many plain steps a step is worth. A batch ends with its slowest row. Similar rows take turns at being
        slowest, and the slowest falls behind their mean by the square root of the steps. So at first the mean over the
        bottleneck rows counts, later the slowest row. If finished rows leave, the time that each row adds to
        a step is saved from then on.
        """
        counts, num_rows = accepted.counts, len(accepted.counts)
        if num_rows == 1:
            return counts[0]
        lag = min((trial.num_drafted + 1) / self.HORIZON, 1.0) ** 0.5
        mean = statistics.mean(count for count, is_bottleneck in zip(counts, bottlenecks) if is_bottleneck)
        slowest = lag * accepted.progress + (1 - lag) * mean
        share = 0.0  # of a plain step's time that grows with the rows
        if self.kind.may_retire and len(self.costs.known(self.cost_part(None))) > 1:
            plain, twice = self.plain_seconds(num_rows), self.plain_seconds(2 * num_rows)
            share = min(twice / plain - 1, 1.0) if plain and twice else 0.0
        return share * sum(counts) / num_rows + (1 - share) * slowest


# The policies of each target with each of its drafts. Threads share them: they are replaced, never changed.
_POLICIES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def policies_of(target: PreTrainedModel, assistant: Any) -> dict[CallKind, Policy]:
    """The latest policy of each kind of call with a target and an assistant, for as long as both live."""
    return _POLICIES.setdefault(target, weakref.WeakKeyDictionary()).setdefault(assistant, {})

# SPDX-License-Identifier: Apache-2.0
"""The policy: settings of the tree, costs of steps on this machine, and which plan pays."""

import bisect
import copy
import difflib
import math
import statistics
import weakref

from transformers import GenerationConfig

from .lookup_eagle3 import MatchCalibration, PromptLookup
from .tree_eagle3 import Plan, Prices


# Longest path below the root; children tried per node, and nodes expanded per level; nodes verified per step at most;
# the probability, by the draft, that a path must have to be verified; how many of them at most may be looked up in the
# text instead of drafted; and whether a step may draft less, or look up, if that is faster. Names are those of
# OpenVINO GenAI and transformers. They live in the draft's generation config, and a call may bring others in the
# `GenerationConfig` given to `generate`.
DEFAULT_TREE_SETTINGS = {
    "tree_depth": 8,
    "branching_factor": 8,
    "num_assistant_tokens": 24,
    "assistant_confidence_threshold": 0.0,
    "prompt_lookup_num_tokens": 24,
    "tree_policy": "auto",
}


def tree_settings(
    draft_config: GenerationConfig, call_config: GenerationConfig | None = None
) -> dict[str, float | str]:
    """
    The tree's shape: what the call's generation config says, else the draft's, else the default.

    `generate` fills `num_assistant_tokens` and `assistant_confidence_threshold` of every call with transformers' own
    defaults (20 and 0.4), so that a call which asks for exactly these cannot be told from one which does not ask; set
    them on the draft instead.

    Raises:
        ValueError: if a setting is out of range, or misspelled.
    """
    filled_in, known = GenerationConfig._get_default_generation_params(), vars(GenerationConfig())
    for config in filter(None, (draft_config, call_config)):
        for name in vars(config).keys() - known.keys() - DEFAULT_TREE_SETTINGS.keys():
            if meant := difflib.get_close_matches(name, DEFAULT_TREE_SETTINGS, n=1, cutoff=0.8):
                whose = "draft" if config is draft_config else "call"
                raise ValueError(
                    f"The generation config of the {whose} has a setting `{name}`, which does not exist. Did you mean `{meant[0]}`?"
                )
    settings = {}
    for name, default in DEFAULT_TREE_SETTINGS.items():
        value = getattr(call_config, name, None)
        if value is None or value == filled_in.get(name):
            value = getattr(draft_config, name, None)
        settings[name] = value = default if value is None else value
        if name == "assistant_confidence_threshold":
            is_right, kind = isinstance(value, (int, float)) and 0 <= value < 1, "in [0, 1)"
        elif name == "tree_policy":
            is_right, kind = value in ("auto", "static"), "'auto' or 'static'"
        else:
            least = 0 if name == "prompt_lookup_num_tokens" else 1
            is_right, kind = type(value) is int and value >= least, f"an integer of at least {least}"
        if not is_right:
            raise ValueError(f"`{name}` must be {kind}, got {value!r}.")
    return settings


class StepCosts:
    """
    Seconds that the parts of a step take, by their size: `"draft"`, for so many levels; `"verify"`, for so many tokens
    in all rows together. Of the latest five measurements the second shortest, since a step may meet a pause that is
    not its own. The first measurement of a size pays for its preparation and does not count.
    """

    LATEST = 5
    TRUSTED = 256  # measurements of a part, after which one that was not renewed is forgotten: texts may be longer now

    def __init__(self):
        self.samples: dict[tuple[str, int], list[float]] = {}
        self.renewed: dict[tuple[str, int], int] = {}
        self.num_recorded: dict[str, int] = {}  # of each part

    def record(self, part: str, size: int, seconds: float) -> None:
        self.num_recorded[part] = now = self.num_recorded.get(part, 0) + 1
        if (part, size) in self.renewed:
            self.samples.setdefault((part, size), []).append(measurable(seconds))
            del self.samples[part, size][: -self.LATEST]
        self.renewed[part, size] = now
        for key in [key for key in self.samples if key[0] == part and now - self.renewed[key] > self.TRUSTED]:
            del self.samples[key]

    def known(self, part: str) -> list[tuple[int, float]]:
        """Sizes that were measured, ascending, with what they took: more than once, if any were."""
        samples = {size: seconds for (name, size), seconds in self.samples.items() if name == part}
        repeated = {size: seconds for size, seconds in samples.items() if len(seconds) > 1}
        return sorted(
            (size, sorted(seconds)[(len(seconds) - 1) // 3]) for size, seconds in (repeated or samples).items()
        )

    def seconds(self, part: str, size: int) -> float | None:
        """
        On lines between and beyond the sizes that are known; `None` if none is. Less does not take longer, and half
        not less than half.
        """
        if not (known := self.known(part)):
            return None
        sizes, seconds = [size for size, _ in known], [seconds for _, seconds in known]
        seconds = [min(seconds[i:]) for i in range(len(seconds))]
        share = seconds[0] * min(size / sizes[0], 1.0)
        if len(known) == 1:
            return share
        right = min(max(bisect.bisect_left(sizes, size), 1), len(known) - 1)
        left = 0 if size > sizes[-1] else right - 1
        slope = (seconds[right] - seconds[left]) / (sizes[right] - sizes[left])
        return max(seconds[left] + slope * (size - sizes[left]), share)


def measurable(seconds: float) -> float:
    """Clocks may be coarse, stand still or be set while something is measured: nothing takes no time, or for ever."""
    return min(max(seconds, 1e-6), 1e6)


class Calibration:
    """
    To which power the draft's probabilities are to be taken, so that they say how often the target accepts its guesses
    (temperature scaling: Guo et al., https://huggingface.co/papers/1706.04599). A draft learns to give each token its
    share, but a greedy target always takes its best one; and a draft of another target, or of other texts, may be sure
    of the wrong ones. Where the best children of nodes are accepted more often than that says, the power rises.

    Args:
        power (`float`): At first.
    """

    RATE = 0.1  # by how much its logarithm rises for each node that was accepted and not expected at all
    LEAST, MOST = 0.1, 10.0

    def __init__(self, power: float):
        self.power = power

    def record(self, tree, accepted) -> None:
        """Learns from a tree of the draft, in rows that are unfinished: others may have ended before."""
        if tree.confidences is None or tree.num_nodes == 1 or all(accepted.is_finished):
            return
        read, _ = tree.on_host()
        rows = zip(read.confidences, read.parents, accepted.nodes, accepted.is_finished)
        surprise = 0.0  # how often more best children were accepted than that says
        for confidences, parents, path, is_finished in rows:
            if is_finished:
                continue
            best_children = {}
            for node, parent in enumerate(parents[1:], start=1):
                best_children.setdefault(parent, node)  # siblings stand in order
            for child in filter(None, map(best_children.get, path)):
                surprise += (child in path) - math.exp(confidences[child])
        surprise /= accepted.is_finished.count(False)
        self.power = min(max(self.power * math.exp(self.RATE * surprise), self.LEAST), self.MOST)


class StaticPolicy:
    """
    The whole tree in every step: the same ones in each call.

    Args:
        whole (`Plan`): The largest tree.
        do_sample (`bool`, *optional*, defaults to `False`): Whether the target samples.
    """

    matches = None

    def __init__(self, whole: Plan, do_sample: bool = False):
        self.whole, self.calibration = whole, Calibration(1.5 if do_sample else 2.0)

    def plan(self, behind: list[bool], lookup: PromptLookup | None = None) -> Plan:
        """Plans a step, given the rows of the batch that hold it up (none if all texts are finished)."""
        return self.whole

    def record(self, plan: Plan, tree, accepted, behind, draft_seconds, verify_seconds, num_replayed=0) -> None:
        """Learns from a step: how long proposing and verifying took, with `num_replayed` tokens beside the tree's."""
        self.calibration.record(tree, accepted)


class Drafting:
    """
    Whether drafting pays in batches of a size, by what drafted steps brought in place of plain ones. Where it does
    not, it is tried again ever more rarely.
    """

    FIRST_PLAIN_STEPS = 3  # measured before the first tree
    FIRST_STEPS, MIN_STEPS = 6, 2  # of the first trial, with one row, and of others: more rows teach faster
    LATEST, PRIOR_STEPS = 32, 4  # drafted steps by which it is judged, and how many of them are left in a trial
    INTERVALS = (16, 64)  # plain steps between trials: at first, and at most; four times as many after each
    MOST_LOST = 0.01  # share of the time that may be lost to trials; they are the rarer for it
    MOST_PLAIN = 16  # times the interval, whatever was lost: the machine may just have been slow
    REVIEWS = (8, 256)  # drafted steps before plain ones, which tell what those take now: at first, and at most

    def __init__(self, num_rows: int):
        self.first_steps = max(self.FIRST_STEPS // num_rows, self.MIN_STEPS)
        self.plain_left, self.interval = self.FIRST_PLAIN_STEPS, self.INTERVALS[0]
        self.num_drafted = 0  # steps since drafting was taken up
        self.latest: list[tuple[float, float]] = []  # how many plain steps they were worth, and what they took
        self.lost = 0.0  # plain steps, since drafting was taken up

    @property
    def rate(self) -> float:
        """Tokens per second and row."""
        return sum(tokens for tokens, _ in self.latest) / max(sum(seconds for _, seconds in self.latest), 1e-6)

    @property
    def is_trial(self) -> bool:
        """Whether too few steps were drafted to tell whether that pays."""
        return self.num_drafted < (self.first_steps if self.interval == self.INTERVALS[0] else self.MIN_STEPS)

    def decodes_plainly(self) -> bool:
        """Whether the next step does not draft."""
        first, at_most = self.REVIEWS
        power_of_two = 1 << max(self.num_drafted.bit_length() - 1, 0)  # the largest that is not larger
        if self.num_drafted >= first and self.num_drafted % min(power_of_two, at_most) == 0:
            self.num_drafted += 1
            self.plain_left = 2
        self.plain_left -= 1
        return self.plain_left >= 0

    def judge(self, tokens: float, seconds: float, plain: float | None) -> None:
        """Takes how many plain steps a step was worth, what it took, and what a plain one takes."""
        self.latest = [*self.latest, (tokens, measurable(seconds))][-self.LATEST :]
        self.num_drafted += 1
        if plain is None:
            return
        gains = [tokens - seconds / plain for tokens, seconds in self.latest]
        self.lost -= gains[-1]
        # Steps vary. What may be bad luck is no reason to give up a draft that may as well bring a little.
        mean = sum(gains) / len(gains)
        luck = 1.5 * sum((gain - mean) ** 2 for gain in gains) ** 0.5 / len(gains)  # standard errors
        if self.is_trial or mean + luck >= 0:
            return
        if self.num_drafted > self.INTERVALS[0]:  # it did pay, for long
            self.interval = self.INTERVALS[0]
        self.plain_left = min(max(self.interval, int(self.lost / self.MOST_LOST)), self.MOST_PLAIN * self.interval)
        self.interval = min(4 * self.interval, self.INTERVALS[1])
        self.num_drafted, self.lost = 0, 0.0
        self.latest = self.latest[:: math.ceil(len(self.latest) / self.PRIOR_STEPS)]


class Policy(StaticPolicy):
    """
    Does in each step what brings the most tokens per second: of all plans the one with the largest

        gain(plan) = E[tokens | plan] - rate * seconds(plan),

    the tokens that a step writes, less those that the best way of decoding so far would have written in its time, at
    its `rate` in tokens per second. Seconds are measured. How much of a text goes on as it did before is counted, and
    so is how deep the target follows the draft; where the host may read the draft's confidences without waiting, a
    plan has prices by which the draft makes each tree as large as it pays. The text does not depend on the tree, so
    that timing may decide.

    A batch is done when its slowest row is: there what a step is worth is how far that one comes.

    Args:
        whole (`Plan`): The largest tree.
        reads_draft (`bool`): Whether the host reads the draft's confidences at no cost.
        has_one_shape (`bool`): Whether all that is verified has the shape of a whole tree.
        may_retire (`bool`): Whether rows leave the batch when they are finished.
        do_sample (`bool`): Whether the target samples.
        drafts_whole_trees (`bool`): Whether the draft draws whole trees only, at a cost that does not depend on depth.
    """

    HORIZON = 16  # drafted steps that a batch is taken to have before it
    MEASURED_LOOKUP = 1.5  # tokens to expect of a step that looks up, to be worth measuring what such a step takes
    MEMORY, PRIOR = 0.95, 2.0  # a step's weight after the next; and of the depth above in what is counted at a depth

    def __init__(
        self,
        whole: Plan,
        reads_draft: bool,
        has_one_shape: bool = False,
        may_retire: bool = False,
        do_sample: bool = False,
        drafts_whole_trees: bool = False,
    ):
        super().__init__(whole, do_sample)
        self.drafts_whole_trees = drafts_whole_trees or has_one_shape
        self.reads_draft, self.has_one_shape, self.may_retire = reads_draft, has_one_shape, may_retire
        self.costs, self.matches = StepCosts(), MatchCalibration()
        sizes = [size for size in (*range(5), 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if size < whole.num_nodes]
        self.sizes = [whole.num_nodes] if has_one_shape else [*sizes, whole.num_nodes]
        self.drafting: dict[int, Drafting] = {}  # by the number of rows, up to a power of two
        depth = min(whole.depth, whole.num_nodes)
        self.asked, self.followed = [0.0] * depth, [0.0] * depth  # how often there was a node at a depth, and it held
        self.planned, self.last = whole, None

    def of(self, num_rows: int) -> Drafting:
        """The record of drafting for so many rows."""
        return self.drafting.setdefault((num_rows - 1).bit_length(), Drafting(num_rows))

    def part(self, proposer: str | None) -> str:
        """Where the host does not wait for the draft, verifying what it drafted takes some of its time."""
        return "verify" if self.reads_draft else f"verify {proposer}"

    def plain(self, num_rows: int) -> float | None:
        """Seconds of a plain step."""
        return self.costs.seconds(self.part(None), num_rows)

    def rate(self, num_rows: int) -> float:
        """Tokens per second and row of the better way of decoding."""
        plain = self.plain(num_rows)
        return max(1 / plain if plain else 0.0, self.of(num_rows).rate)

    def cheap_size(self, num_rows: int) -> int | None:
        """How many nodes to verify for the sake of measuring it; `None` if that is not needed to tell sizes apart."""
        has_two = not self.reads_draft or len(self.costs.known("verify")) > 1
        return None if has_two else max(self.whole.num_nodes // 3 // num_rows, 1)

    def plan(self, behind, lookup=None):
        num_rows = len(behind)
        num_looked_up = 0 if lookup is None else self.num_to_look_up(num_rows, lookup)
        if num_looked_up > 0:
            self.planned = Plan("lookup", num_looked_up, num_looked_up)
        elif not any(behind):  # what is left is padding, of rows that lag behind: whole trees of it are accepted
            self.planned = self.whole
        elif self.of(num_rows).decodes_plainly():
            self.planned = Plan()
        else:
            self.planned = self.drafted(behind)
        return self.planned

    def drafted(self, behind: list[bool]) -> Plan:
        """The plan of a step that drafts."""
        num_rows, plan, levels = len(behind), self.whole, self.costs.known("draft")
        if self.drafts_whole_trees:
            return plan
        rate = self.rate(num_rows)
        if not self.reads_draft:
            costs = (self.costs.seconds("draft", depth) or 0.0 for depth in range(1, len(self.asked) + 1))
            gains = [tokens - rate * seconds for tokens, seconds in zip(self.expected_tokens(), costs)]
            return plan._replace(depth=1 + max(range(len(gains)), key=gains.__getitem__))
        if (size := self.cheap_size(num_rows)) is not None or not levels:
            return plan._replace(depth=min(plan.depth, 2), num_nodes=size or 1)
        (fewest, least), (most, longest) = levels[0], levels[-1]
        level = max(longest - least, 0.0) / max(most - fewest, 1)  # nothing, until a deeper tree was drafted
        nodes = [math.inf] * (plan.num_nodes + 1)  # few sizes, each of which is measured often
        for size in self.sizes:
            nodes[size] = rate * (self.costs.seconds("verify", num_rows * (1 + size)) - self.plain(num_rows))
        return plan._replace(prices=Prices(rate * level, nodes, behind, self.of(num_rows).is_trial))

    def num_to_look_up(self, num_rows: int, lookup: PromptLookup) -> int:
        """How many tokens of the text to verify, or 0 if another step brings more."""
        sizes = [size for size in self.sizes if size <= lookup.num_tokens]
        sizes = sizes if self.reads_draft else sizes[-1:]  # on an accelerator a few tokens more take about as long
        expected, plain = lookup.expected_progress(sizes[-1]), self.plain(num_rows)
        if expected[-1] <= 1 or plain is None:
            return 0
        if (cheap := self.cheap_size(num_rows)) is not None:  # a draft that is unsure of everything verifies nothing
            size = max([size for size in sizes if size <= cheap], default=0)
            return size if expected[size] > self.MEASURED_LOOKUP else 0
        part, rate = self.part("lookup"), self.rate(num_rows)
        costs = (max(self.costs.seconds(part, num_rows * (1 + size)) or 0.0, plain) for size in sizes)
        gains = {size: expected[size] - rate * seconds for size, seconds in zip(sizes, costs)}
        best = max(sizes, key=gains.__getitem__)
        return best if gains[best] > 0 else 0

    def record(self, plan, tree, accepted, behind, draft_seconds, verify_seconds, num_replayed=0):
        num_rows, num_tokens = len(accepted.counts), len(accepted.counts) * tree.num_nodes
        drafting, plain, last, self.last = self.of(num_rows), self.plain(num_rows), self.last, plan.proposer
        if plan.proposer is None and num_replayed > 0:
            if self.planned.proposer == "draft":  # having to replay is what drafting takes, too
                drafting.judge(accepted.progress, verify_seconds, plain)
            return
        self.costs.record(self.part(plan.proposer), num_tokens, verify_seconds)
        if plan.proposer != "draft":
            return
        live = [row for row, done in enumerate(accepted.is_finished) if not done]  # others may have ended before
        if live:
            self.count(tree, [accepted.nodes[row] for row in live])
        self.calibration.record(tree, accepted)
        levels = max(tree.max_depth if tree.depth is None else tree.depth, 1)  # 0 of one that was discarded
        self.costs.record("draft", levels, draft_seconds)
        drafted = self.costs.seconds("draft", levels)
        verified = self.costs.seconds(self.part("draft"), num_tokens)
        if drafted is None or verified is None:
            return
        if last != "draft" and plain is not None:
            # There was more to read than usual, which is lost if drafting turns out not to pay.
            drafting.lost += max(draft_seconds - drafted, 0.0) / plain
        if self.reads_draft and self.planned.prices is None and self.planned != self.whole and tree.num_nodes > 1:
            if plain is not None:  # a step that only measures is no tree to judge drafting by
                drafting.lost += max((draft_seconds + verify_seconds) / plain - accepted.progress, 0.0)
        elif any(behind):
            drafting.judge(self.equivalent_plain_steps(accepted, behind, drafting), drafted + verified, plain)

    def equivalent_plain_steps(self, accepted, behind: list[bool], drafting: Drafting) -> float:
        """
        How many plain steps a step is worth. A call ends with its slowest row. Of rows that are alike another one is
        the slowest each time, and how far it lies behind their mean grows with the square root of the steps: at first
        the mean of those that may become it tells more. Where finished rows leave, the time that a row adds to a step
        is saved from then on.
        """
        counts, num_rows = accepted.counts, len(accepted.counts)
        if num_rows == 1:
            return counts[0]
        lag = min((drafting.num_drafted + 1) / self.HORIZON, 1.0) ** 0.5
        hold_up = statistics.mean(count for count, is_behind in zip(counts, behind) if is_behind)
        slowest = lag * accepted.progress + (1 - lag) * hold_up
        share = 0.0  # of a plain step's time that is for rows
        if self.may_retire and len(self.costs.known(self.part(None))) > 1:
            share = min(self.plain(2 * num_rows) / self.plain(num_rows) - 1, 1.0)
        return share * sum(counts) / num_rows + (1 - share) * slowest

    def count(self, tree, nodes: list[list[int]]) -> None:
        """Counts how deep some rows followed the draft: by their `nodes` on its tree."""
        for counts in (self.asked, self.followed):
            counts[:] = [self.MEMORY * count for count in counts]
        for path in nodes:
            for level in range(min(tree.max_depth, len(self.asked))):
                self.asked[level] += len(path) > level
                self.followed[level] += len(path) > level + 1

    def expected_tokens(self) -> list[float]:
        """Tokens to expect of a tree of each depth, from 1."""
        tokens, share, rate = [1.0], 1.0, 1.0
        for followed, asked in zip(self.followed, self.asked):
            rate = (followed + self.PRIOR * rate) / (asked + self.PRIOR)
            share *= rate
            tokens.append(tokens[-1] + share)
        return tokens[1:]


# What was measured of each target with each of its drafts. Threads share it: what is in it is replaced, not changed.
_MEASURED: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Measured:
    """
    What calls with a target and an assistant have measured, by the kind of call, for as long as both live. Each call
    goes on from what the last one left, in a copy of its own.
    """

    def __init__(self, target, assistant, *kind):
        self.key = kind
        self.policies = _MEASURED.setdefault(target, weakref.WeakKeyDictionary()).setdefault(assistant, {})

    def policy(self, *args, **kwargs) -> Policy:
        known = self.policies.get(self.key)
        return Policy(*args, **kwargs) if known is None else copy.deepcopy(known)

    def keep(self, policy: Policy) -> None:
        self.policies[self.key] = policy

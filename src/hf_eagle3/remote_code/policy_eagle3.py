# SPDX-License-Identifier: Apache-2.0
"""What tree each step drafts: its settings, and how much of it pays on this machine."""

import difflib
import itertools
import math
import statistics
import sys
import weakref

import torch
from transformers import GenerationConfig

from .estimates_eagle3 import Calibration, MatchCalibration, StepCosts, measurable
from .lookup_eagle3 import PromptLookup


# Longest path below the root; children tried per node, and nodes expanded per level; nodes verified per step at most;
# the probability, by the draft, that a path must have to be verified; how many of them at most may be looked up in the
# text instead of drafted; and whether a step may draft less, or look up, if that is faster. Names are those of
# OpenVINO GenAI and transformers. They live in the draft's generation config, and a call may bring others in the
# `GenerationConfig` given to `generate`.
DEFAULT_TREE_SETTINGS = {
    "tree_depth": 6,
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
    for config in (draft_config, call_config):
        for name in vars(config).keys() - known.keys() - DEFAULT_TREE_SETTINGS.keys() if config is not None else ():
            if meant := difflib.get_close_matches(name, DEFAULT_TREE_SETTINGS, n=1, cutoff=0.8):
                raise ValueError(
                    f"The generation config has a setting `{name}`, which does not exist. Did you mean `{meant[0]}`?"
                )
    settings = {}
    for name, default in DEFAULT_TREE_SETTINGS.items():
        value = getattr(call_config, name, None)
        if value is None or value == filled_in.get(name):
            value = getattr(draft_config, name, None)
        settings[name] = default if value is None else value
        if name == "assistant_confidence_threshold":
            if not isinstance(settings[name], (int, float)) or not 0 <= settings[name] < 1:
                raise ValueError(f"`{name}` must be in [0, 1), got {settings[name]!r}.")
        elif name == "tree_policy":
            if settings[name] not in ("auto", "static"):
                raise ValueError(f"`tree_policy` must be 'auto' or 'static', got {settings[name]!r}.")
        else:
            least = 0 if name == "prompt_lookup_num_tokens" else 1
            if isinstance(settings[name], bool) or not isinstance(settings[name], int) or settings[name] < least:
                kind = "a positive integer" if least else "an integer of at least 0"
                raise ValueError(f"`{name}` must be {kind}, got {settings[name]!r}.")
    return settings


class StepPlan:
    """What one step does, and what it is told about that. This one drafts and verifies the whole tree."""

    drafts = True  # whether the step drafts at all
    num_looked_up = 0  # tokens of the text that it verifies instead
    width = sys.maxsize  # how many nodes to expand at most
    calibration: Calibration | None = None  # what makes probabilities of acceptance of the draft's, if anything

    def more_levels(self, values: torch.FloatTensor, at_most: int) -> int:
        """How many levels to draft below paths of log-probabilities `values` `(B, K)` before this is asked again."""
        return at_most

    def choose_num_nodes(self, values: torch.FloatTensor) -> int:
        """How many of the candidates with log-probabilities `values` `(B, N)`, descending, to verify."""
        return values.shape[1]

    def record_draft(self, levels: int, first_seconds: float, level_seconds: float, is_usual: bool) -> None:
        """
        What drafting took: the further `levels`, and everything else, which is to catch up with the text and read off
        the first level and the tree. It is usual to catch up with the step before; after plain steps, and with the
        prompt, there is more to read.
        """

    def record_verification(
        self, tree, paths: list[list[int]], live: list[bool], progress: int, seconds: float, num_reread: int = 0
    ) -> None:
        """
        What came of the `tree` (`DraftTree`): the nodes on each row's path through it, which rows went on when it
        ended, by how many tokens the slowest row came on, and what verifying it and reading off the tokens took, with
        `num_reread` that earlier trees left to read again.
        """


class StaticPolicy:
    """The whole tree in every step."""

    match_calibration: MatchCalibration | None = None  # what is known of looking up, if the policy does so

    def plan_step(self, behind: list[bool], lookup: PromptLookup | None = None) -> StepPlan:
        """
        The plan of one step, given the rows of the batch that hold it up (none if all texts are finished), and what
        may be looked up.
        """
        return StepPlan()


class AutoPolicy(StaticPolicy):
    """
    Drafts and verifies what brings the most tokens per second: of all sizes `n` of a tree, the one with the largest

        gain(n) = E[tokens | n] - rate * seconds(n),

    the tokens that a step writes, less those that the best way of decoding so far would have written in its time, at
    its `rate` in tokens per second. Expected tokens are sums of the draft's own confidences, calibrated by what the
    target accepted so far; seconds are measured. (OPT-Tree, https://huggingface.co/papers/2406.17276, maximises the
    first; dynamic depth by confidence is from https://huggingface.co/papers/2409.00142.)

    A batch is done when its slowest row is: there what a step is worth is how far that one comes, and confidences are
    averaged over the rows that hold it up.

    What followed the newest tokens where they stood in the text before needs no draft ([`PromptLookup`]). As many of
    it are verified as bring the most, where that is more than drafting or decoding plainly would in that time.

    Where drafting does not pay it decodes plainly, and tries again ever more rarely. The text does not depend on the
    tree, so that timing may decide.

    Args:
        num_nodes (`int`): The most nodes that a step may verify.
        costs (`StepCosts`): Of this target and draft.
        calibration (`Calibration`): Of this draft.
        num_rows (`int`, *optional*, defaults to 1): Of the batch.
        may_retire (`bool`, *optional*, defaults to `False`): Whether rows leave the batch when they are finished.
        match_calibration (`MatchCalibration`, *optional*): Of texts of this target, if tokens may be looked up.
    """

    FIRST_PLAIN_STEPS = 3  # measured before the first tree
    MIN_STEPS = 2  # of a trial
    FIRST_STEPS = 6  # of the first, in which it is learned what the draft is worth: of one row, more teach it faster
    PRIOR_STEPS = 4  # what was known before counts as much in a trial
    MEMORY = 0.95  # weight of a drafted step after the next
    INTERVALS = (16, 64)  # plain steps between trials: at first, and at most; four times as many after each
    MOST_LOST = 0.01  # share of the time that may be lost to trials; they are the rarer for it
    MOST_PLAIN = 16  # times the interval, whatever was lost: the machine may just have been slow
    HORIZON = 16  # drafted steps that a batch is taken to have before it
    MEASURED_LOOKUP = 1.5  # tokens to expect of a step that looks up, to be worth measuring what such a step takes
    REVIEWS = (8, 256)  # drafted steps before plain ones, which tell what those take now: at first, and at most

    def __init__(
        self,
        num_nodes: int,
        costs: StepCosts,
        calibration: Calibration,
        num_rows: int = 1,
        may_retire: bool = False,
        match_calibration: MatchCalibration | None = None,
    ):
        self.num_nodes, self.costs, self.calibration, self.may_retire = num_nodes, costs, calibration, may_retire
        self.match_calibration = match_calibration
        self.first_steps = max(self.FIRST_STEPS // num_rows, self.MIN_STEPS)
        self.sizes = [size for size in (*range(5), 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if size < num_nodes]
        self.sizes.append(num_nodes)
        self.plain_left, self.interval = self.FIRST_PLAIN_STEPS, self.INTERVALS[0]
        self.num_drafted = 0  # steps since drafting was taken up
        self.weight = self.tokens = self.seconds = self.squares = 0.0  # of drafted steps, for each row
        self.plain_steps_lost, self.has_caught_up = 0.0, False  # since drafting was taken up

    @property
    def is_trial(self) -> bool:
        """Whether too few steps were drafted to tell whether that pays."""
        is_first = self.interval == self.INTERVALS[0]
        return self.num_drafted < (self.first_steps if is_first else self.MIN_STEPS)

    def plain(self, num_rows: int) -> float | None:
        """Seconds of a plain step."""
        lines = self.costs.lines("verify", [num_rows])
        return lines[0] if lines else self.costs.near("verify", num_rows)

    def rate(self, num_rows: int) -> float:
        """Tokens per second and row of the better way of decoding."""
        plain = self.plain(num_rows)
        drafted = self.tokens / self.seconds if self.seconds else 0.0
        return max(1 / plain if plain else 0.0, drafted)

    def plan_step(self, behind, lookup=None):
        num_looked_up = 0 if lookup is None else self.num_to_look_up(len(behind), lookup)
        if num_looked_up > 0:
            return _LookupStep(self, num_looked_up)
        if not any(behind):  # what is left is padding, of rows that lag behind: whole trees of it are accepted
            return StepPlan()
        first, at_most = self.REVIEWS
        power_of_two = 1 << max(self.num_drafted.bit_length() - 1, 0)  # the largest that is not larger
        if self.num_drafted >= first and self.num_drafted % min(power_of_two, at_most) == 0:
            self.num_drafted += 1
            self.plain_left = 2
        if self.plain_left > 0:
            self.plain_left -= 1
            return _PlainStep(self, len(behind))
        self.costs.forget()
        return self.drafted_step(behind)

    def drafted_step(self, behind):
        return _DraftedStep(self, behind)

    def cheap_size(self, num_rows: int) -> int:
        """How many nodes to verify for the sake of measuring it."""
        return max(self.num_nodes // 3 // num_rows, 1)

    def num_to_look_up(self, num_rows: int, lookup: PromptLookup) -> int:
        """How many tokens of the text to verify, or 0 if another step brings more."""
        sizes = [size for size in self.sizes if size <= lookup.num_tokens]
        expected = lookup.expected_progress(sizes[-1])
        if expected[-1] <= 1:
            return 0
        costs = self.lookup_costs(num_rows, sizes)
        if costs is None:  # measure one that costs little: a draft that is unsure of everything verifies nothing
            size = max([size for size in sizes if size <= self.cheap_size(num_rows)], default=0)
            return size if expected[size] > self.MEASURED_LOOKUP and self.plain(num_rows) is not None else 0
        rate = self.rate(num_rows)
        gains = {size: expected[size] - rate * cost for size, cost in zip(sizes, costs)}
        best = max(sizes, key=gains.__getitem__)
        return best if gains[best] > 0 else 0

    def lookup_costs(self, num_rows: int, sizes: list[int]) -> list[float] | None:
        """Seconds of steps that look up so many tokens."""
        return self.costs.lines("verify", [num_rows * (1 + size) for size in sizes])

    def record_lookup_step(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        self.costs.record("verify", num_rows * (1 + num_tokens), seconds)

    def record_catching_up(self, seconds: float, usual: float | None, num_rows: int) -> None:
        """
        What a part of a step took for which more than usual was to be read: it is lost if drafting turns out not to
        pay. The first time pays for its preparation and does not count.
        """
        plain = self.plain(num_rows)
        if plain is not None and self.has_caught_up:
            self.plain_steps_lost += max(seconds - (usual or 0.0), 0.0) / plain
        self.has_caught_up = True

    def record_plain_step(self, num_rows: int, seconds: float) -> None:
        self.costs.record("verify", num_rows, seconds)

    def record_step_without_tree(self, num_rows: int, progress: int, seconds: float, num_reread: int) -> None:
        """A step that was to have a tree, for which there was no room. If it had to read again, that is what drafting takes, too."""
        if num_reread == 0:
            self.record_plain_step(num_rows, seconds)
        else:
            self.record_drafted_step(progress, seconds, self.plain(num_rows))

    def equivalent_plain_steps(self, advances: list[int], behind: list[bool], progress: int) -> float:
        """
        How many plain steps a step of a batch is worth that took its rows on by `advances`, the slowest by `progress`.

        The call ends with the slowest row. Of rows that are alike another one is the slowest each time, and how far it
        lies behind their mean grows with the square root of the steps: at first the mean of those that may become it
        tells more. Where finished rows leave, the time that a row adds to a step is saved from then on.
        """
        num_rows, lag = len(advances), min((self.num_drafted + 1) / self.HORIZON, 1.0) ** 0.5
        hold_up = statistics.mean(advance for advance, counts in zip(advances, behind) if counts)
        slowest = lag * progress + (1 - lag) * hold_up
        seconds = self.costs.lines("verify", [num_rows, 2 * num_rows]) if self.may_retire else None
        share = min(seconds[1] / seconds[0] - 1, 1.0) if seconds else 0.0  # of a plain step's time that is for rows
        return share * sum(advances) / num_rows + (1 - share) * slowest

    def record_drafted_step(self, tokens: float, seconds: float, plain: float | None) -> None:
        """How many `plain` steps the step was worth, and what it took; decides whether to go on drafting."""
        seconds = measurable(seconds)
        gain = 0.0 if plain is None else tokens - seconds / plain
        for name, new in (("weight", 1.0), ("tokens", tokens), ("seconds", seconds), ("squares", gain**2)):
            setattr(self, name, getattr(self, name) * self.MEMORY + new)
        self.num_drafted += 1
        if plain is None:
            return
        self.plain_steps_lost -= gain
        # Steps vary. What may be bad luck is no reason to give up a draft that may as well bring a little.
        mean = (self.tokens - self.seconds / plain) / self.weight
        luck = (max(self.squares / self.weight - mean**2, 0.0) / self.weight) ** 0.5
        if self.is_trial or mean + luck >= 0:
            return
        long_ago = self.num_drafted > self.INTERVALS[0]
        if long_ago:
            self.interval = self.INTERVALS[0]
        self.plain_left = min(
            max(self.interval, int(self.plain_steps_lost / self.MOST_LOST)), self.MOST_PLAIN * self.interval
        )
        self.num_drafted = 0
        self.plain_steps_lost = 0.0
        self.interval = min(4 * self.interval, self.INTERVALS[1])
        scale = min(self.PRIOR_STEPS / self.weight, 1.0)
        for name in ("weight", "tokens", "seconds", "squares"):
            setattr(self, name, scale * getattr(self, name))


class _PlainStep(StepPlan):
    """A step of `AutoPolicy` that does not draft."""

    drafts = False

    def __init__(self, policy: AutoPolicy, num_rows: int):
        self.policy, self.num_rows = policy, num_rows

    def record_verification(self, tree, paths, live, progress, seconds, num_reread=0):
        if num_reread == 0:  # otherwise it took longer
            self.policy.record_plain_step(self.num_rows, seconds)


class _LookupStep(StepPlan):
    """A step of `AutoPolicy` that verifies tokens of the text."""

    drafts = False

    def __init__(self, policy: AutoPolicy, num_looked_up: int):
        self.policy, self.num_looked_up = policy, num_looked_up

    def record_verification(self, tree, paths, live, progress, seconds, num_reread=0):
        if tree.num_nodes == 1:  # too close to a limit
            self.policy.record_step_without_tree(len(paths), progress, seconds, num_reread)
        else:
            self.policy.record_lookup_step(len(paths), tree.num_nodes - 1, seconds)


class _DraftedStep(StepPlan):
    """A step of `AutoPolicy` that drafts."""

    def __init__(self, policy: AutoPolicy, behind: list[bool]):
        self.policy, self.behind = policy, behind
        self.calibration = policy.calibration
        rows, costs = len(behind), policy.costs
        self.rate, self.first = policy.rate(rows), costs.near("first", rows)
        self.verification = costs.lines("verify", [rows * (1 + size) for size in policy.sizes])
        self.mass = 1.0  # of the root: tokens to expect of the nodes that are expanded next
        self.tokens = 1.0  # expected, of the nodes to verify
        self.levels = None  # drafted below the first
        self.num_expanded = 0  # nodes in those
        self.first_seconds = None  # what all but those took, if that tells more than nothing
        self.only_measures = False  # and is no tree to judge drafting by

    def _expected(self, values: torch.FloatTensor) -> list[float]:
        """Probabilities that nodes are accepted, averaged over the rows that count."""
        expected = (values if all(self.behind) else values[self.behind]).exp()
        return (expected[0] if len(expected) == 1 else expected.mean(dim=0)).tolist()

    def more_levels(self, values, at_most):
        expected, before = self._expected(values), self.mass
        self.mass = mass = max(sum(expected), 1e-9)
        if self.verification is None or self.level_seconds(1) is None:  # measure one: a batch's where it may be of use
            is_single = len(self.behind) == 1
            self.width, goes_deeper = len(expected) if is_single else 1, before == 1.0 and (is_single or mass > 0.5)
        else:
            # What one more level may bring: as much of each node as this one kept of the one before, less verification.
            kept = min(mass / before, 1.0)
            node_cost = self.rate * (self.verification[-1] - self.verification[0]) / self.policy.num_nodes
            children = [kept * each - node_cost for each in expected if kept * each > node_cost]
            self.width = max(len(children), 1)  # what is below the others would not be verified
            goes_deeper = sum(children) > self.rate * self.level_seconds(self.width)
        self.num_expanded += self.width * goes_deeper
        return int(goes_deeper)

    def level_seconds(self, width: float) -> float | None:
        """Of each level, if they are so wide on average."""
        return self.policy.costs.near("level", self._level_size(width))

    def _level_size(self, width: float) -> int:
        """Nodes in all rows, rounded: few sizes, each of which is measured often."""
        return len(self.behind) << (math.ceil(width) - 1).bit_length()

    def choose_num_nodes(self, values):
        policy, expected = self.policy, list(itertools.accumulate(self._expected(values), initial=1.0))
        sizes = [size for size in policy.sizes if size < len(expected)]
        if self.verification is None:  # measure what costs little: also the node of a level that a batch drafted
            best = min(policy.cheap_size(len(self.behind)) + (self.num_expanded == 1), len(expected) - 1)
            self.only_measures = best > 0
        else:
            gains = {size: expected[size] - self.rate * each for size, each in zip(sizes, self.verification)}
            if policy.is_trial:  # only what is verified can tell whether the draft is any good
                sizes = sizes[1:] or sizes
            best = max(sizes, key=gains.__getitem__)
        self.tokens = expected[best]
        return best

    def record_draft(self, levels, first_seconds, level_seconds, is_usual):
        self.levels, costs, num_rows = levels, self.policy.costs, len(self.behind)
        width = self.num_expanded / max(levels, 1)
        if levels == 1 and (known := self.level_seconds(width)) is not None:  # then what is its own cannot be told
            first_seconds += level_seconds - known
        elif levels:
            costs.record("level", self._level_size(width), level_seconds / levels)
        self.level = self.level_seconds(width) or 0.0
        if is_usual:
            costs.record("first", num_rows, first_seconds)
        else:
            if self.policy.has_caught_up:  # it may never be usual, where steps that look up come between
                self.first_seconds = first_seconds
            self.policy.record_catching_up(first_seconds, self.first, num_rows)

    def record_verification(self, tree, paths, live, progress, seconds, num_reread=0):
        policy, costs, num_rows, num_tokens = self.policy, self.policy.costs, len(paths), len(paths) * tree.num_nodes
        if self.levels is None:  # too close to the end
            policy.record_step_without_tree(num_rows, progress, seconds, num_reread)
            return
        costs.record("verify", num_tokens, seconds)
        rows = [row for row, goes_on in enumerate(live) if goes_on]  # others may have ended before their tree did
        if tree.num_nodes > 1 and rows:
            confidences, parents = tree.confidences.tolist(), tree.parents.tolist()
            policy.calibration.record(*([each[row] for row in rows] for each in (confidences, parents, paths)))
        first, verification = costs.near("first", num_rows) or self.first_seconds, costs.lines("verify", [num_tokens])
        plain = policy.plain(num_rows)
        if verification is None and tree.num_nodes == 1 and plain is not None:
            verification = [plain]  # all a draft may ever come to that is unsure of everything
        if self.only_measures and plain is not None and first is not None:
            policy.plain_steps_lost += max((first + seconds) / plain - progress, 0.0)
        elif first is not None and verification is not None:
            if num_rows == 1:
                # What one row should have brought varies less than what it did, but a draft may be modest, and what it
                # says is not corrected before some steps were drafted.
                tokens = (self.tokens + len(paths[0])) / 2
            else:
                tokens = policy.equivalent_plain_steps(list(map(len, paths)), self.behind, progress)
            policy.record_drafted_step(tokens, first + self.level * self.levels + verification[0], plain)


class PlannedPolicy(AutoPolicy):
    """
    [`AutoPolicy`] for accelerators, where each look at the draft's confidences waits for the device, and for static
    caches, whose steps have one shape. Plans how deep to draft before a step, by how far the target followed the draft
    in earlier ones, and measures steps as a whole: its `costs` are by depth, 0 being a plain step.

    Args:
        tree_depth (`int`): The deepest that a step may draft.
        has_one_shape (`bool`):
            Whether a step that drafts has to draft that deep, and one that looks up has to look up `num_nodes` tokens.
    """

    PRIOR = 2.0  # at each depth the target is taken to follow as often as one above, until it was asked about so often

    def __init__(
        self,
        num_nodes: int,
        costs: StepCosts,
        num_rows: int,
        tree_depth: int,
        has_one_shape: bool,
        match_calibration: MatchCalibration | None = None,
    ):
        super().__init__(num_nodes, costs, Calibration(), num_rows, match_calibration=match_calibration)
        self.depths = [tree_depth] if has_one_shape else list(range(1, tree_depth + 1))
        self.sizes = [num_nodes] if has_one_shape else self.sizes  # to look up
        self.asked, self.followed = [0.0] * tree_depth, [0.0] * tree_depth  # whether they accept a node at each depth

    def drafted_step(self, behind):
        deepest = best = self.depths[-1]
        seconds = self.costs.lines("step", self.depths)
        if seconds is not None:
            expected, rate = self.expected_tokens(), self.rate(len(behind))
            gains = {depth: expected[depth] - rate * each for depth, each in zip(self.depths, seconds)}
            best = max(self.depths, key=gains.__getitem__)
        return _PlannedStep(self, best if self.seconds_of(deepest) is not None else deepest, behind)

    def seconds_of(self, depth: int) -> float | None:
        """Of a step that drafts so deep."""
        seconds = self.costs.samples.get(("step", depth))
        return statistics.median_low(seconds) if seconds else None

    def plain(self, num_rows):
        return self.seconds_of(0)

    def record_plain_step(self, num_rows, seconds):
        self.costs.record("step", 0, seconds)

    def lookup_costs(self, num_rows, sizes):
        self.costs.forget()
        plain = self.plain(num_rows)  # on an accelerator a few tokens more take about as long
        return None if plain is None else [self.costs.near("lookup", size) or plain for size in sizes]

    def record_lookup_step(self, num_rows, num_tokens, seconds):
        self.costs.record("lookup", num_tokens, seconds)

    def expected_tokens(self) -> list[float]:
        """Tokens to expect of a step of each depth, from 0."""
        tokens, share, rate = [1.0], 1.0, 1.0
        for followed, asked in zip(self.followed, self.asked):
            rate = (followed + self.PRIOR * rate) / (asked + self.PRIOR)
            share *= rate
            tokens.append(tokens[-1] + share)
        return tokens

    def record_paths(self, lengths: list[int], depth: int) -> None:
        """How many nodes below the root each row accepted of a tree of a certain depth."""
        for counts in (self.asked, self.followed):
            counts[:] = [self.MEMORY * count for count in counts]
        for level in range(1, depth + 1):
            self.asked[level - 1] += sum(length >= level - 1 for length in lengths)
            self.followed[level - 1] += sum(length >= level for length in lengths)


class _PlannedStep(StepPlan):
    """A step of `PlannedPolicy` that drafts."""

    def __init__(self, policy: PlannedPolicy, depth: int, behind: list[bool]):
        self.policy, self.depth, self.behind = policy, depth, behind
        self.drafted = None

    def more_levels(self, values, at_most):
        return min(self.depth - 1, at_most)

    def record_draft(self, levels, first_seconds, level_seconds, is_usual):
        self.drafted, self.seconds, self.is_usual = levels + 1, first_seconds + level_seconds, is_usual

    def record_verification(self, tree, paths, live, progress, seconds, num_reread=0):
        policy = self.policy
        if self.drafted is None:  # too close to the end
            policy.record_step_without_tree(len(paths), progress, seconds, num_reread)
            return
        lengths = [len(path) - 1 for path, *counts in zip(paths, live, self.behind) if all(counts)]
        if lengths:
            policy.record_paths(lengths, self.drafted)
        whole_step = policy.seconds_of(self.drafted)
        if self.is_usual:
            policy.costs.record("step", self.drafted, self.seconds + seconds)
        else:
            if whole_step is None and policy.has_caught_up:  # as above
                whole_step = self.seconds + seconds
            policy.record_catching_up(self.seconds + seconds, whole_step, len(paths))
        if lengths and whole_step is not None:
            tokens = policy.expected_tokens()[self.drafted]
            if len(paths) > 1:
                tokens = policy.equivalent_plain_steps(list(map(len, paths)), self.behind, progress)
            policy.record_drafted_step(tokens, whole_step, policy.plain(len(paths)))


# What was measured of each target with each of its drafts.
_MEASURED: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def tree_policy(
    name: str,
    target,
    draft,
    num_rows: int,
    batch_size: int,
    tree_depth: int,
    branching_factor: int,
    num_assistant_tokens: int,
    has_one_shape: bool = False,
    may_retire: bool = False,
    looks_up: bool = False,
    **kind,
) -> StaticPolicy:
    """
    The policy of a name, for the `num_rows` that are left of a batch. `"auto"` remembers, for as long as target and
    draft live, what calls of the same shape took and what came of calls of the same `kind`, with about as many rows.

    """
    if name == "static":
        return StaticPolicy()
    measured = _MEASURED.setdefault(target, weakref.WeakKeyDictionary()).setdefault(draft, {})
    shape = (tree_depth, branching_factor, num_assistant_tokens)
    rows = batch_size if num_rows == batch_size else 1 << (num_rows - 1).bit_length()
    # What is left to draft is harder where much is looked up.
    kind = tuple(sorted({**kind, "looks_up": looks_up}.items()))
    key = (batch_size, rows, may_retire, has_one_shape, *shape, *kind)
    matches = measured.setdefault(kind, MatchCalibration()) if looks_up else None
    if has_one_shape or not looks_are_free(target.device):
        depth = min(tree_depth, num_assistant_tokens)
        policy = PlannedPolicy(num_assistant_tokens, StepCosts(), rows, depth, has_one_shape, matches)
        return measured.setdefault(key, policy)
    # Picking a token is part of a step: what one takes depends on the kind of call, too.
    costs = measured.setdefault((batch_size, branching_factor, *kind), StepCosts())
    calibration = measured.setdefault((*shape, *kind), Calibration())
    policy = AutoPolicy(num_assistant_tokens, costs, calibration, rows, may_retire, matches)
    return measured.setdefault(key, policy)


def looks_are_free(device) -> bool:
    """Whether the host reads a tensor of a device without waiting for it."""
    return device.type == "cpu"

import copy
import math
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import make_batch, make_oracle, make_target

from hf_eagle3.remote_code.policy_eagle3 import AutoPolicy, Calibration, StepCosts


class Machine:
    """
    Decodes with a policy in simulated time. The draft offers a chain in which each token is right with probability
    `skill`, of which it says `confidence`; beside it stand siblings that share what is left.
    """

    def __init__(
        self, skill, confidence=None, plain=1.0, per_node=0.02, first=0.2, level=0.1, num_nodes=24, depth=6, unread=0.0
    ):
        self.skill, self.confidence = skill, skill if confidence is None else confidence
        self.unread = unread  # seconds to catch up with what was decoded plainly
        self.plain, self.per_node, self.first, self.level, self.depth = plain, per_node, first, level, depth
        self.policy = AutoPolicy(num_nodes, StepCosts(), Calibration())
        self.generator = torch.Generator().manual_seed(0)
        self.chosen, self.levels = [], []

    def uniform(self):
        return float(torch.rand((), generator=self.generator))

    def step(self):
        """Tokens and seconds of one step."""
        plan = self.policy.plan_step([True])
        pause = 10 if self.uniform() < 0.02 else 1  # now and then the machine does something else
        if not plan.drafts:
            self.chosen.append(0)
            tree = SimpleNamespace(num_nodes=1)
            plan.record_verification(tree, [[0]], [True], 1, self.plain * pause)
            return 1, self.plain
        # At each level the chain's next node and seven others; by the policy's reckoning of the draft's confidence.
        confidences = torch.tensor([[self.confidence] + 7 * [(1 - self.confidence) / 8]]).log().clamp(max=0)
        pool, before = [], 0.0
        for level in range(1, self.depth + 1):
            values = before + plan.calibration(confidences)
            pool += values[0].tolist()
            before = pool[-8]
            if level == self.depth or not plan.more_levels(values, self.depth - level):
                break
        levels = level - 1
        self.levels.append(levels)
        is_usual = len(self.chosen) > 0 and self.chosen[-1] > 0
        unread = 0 if is_usual else self.unread
        plan.record_draft(levels, (self.first + unread) * pause, levels * self.level, is_usual)
        ranking = sorted(range(len(pool)), key=lambda node: -pool[node])[: self.policy.num_nodes]
        num_nodes = plan.choose_num_nodes(torch.tensor([[pool[node] for node in ranking]]))
        self.chosen.append(num_nodes)

        kept = sorted(ranking[:num_nodes])
        parents = [0] + [kept.index(8 * (node // 8 - 1)) + 1 if node >= 8 else 0 for node in kept]
        path = [0]
        for level in range(levels + 1):
            if 8 * level not in kept or self.uniform() > self.skill:
                break
            path.append(kept.index(8 * level) + 1)
        seconds = self.plain + self.per_node * num_nodes
        tree = SimpleNamespace(
            num_nodes=num_nodes + 1,
            parents=torch.tensor([parents]),
            confidences=confidences[:, [node % 8 for node in kept]],
        )
        plan.record_verification(tree, [path], [True], len(path), seconds * pause)
        return len(path), self.first + unread + levels * self.level + seconds

    def speedup(self, num_steps):
        tokens, seconds = zip(*(self.step() for _ in range(num_steps)))
        return sum(tokens) / sum(seconds) * self.plain


def test_drafts_where_it_pays():
    machine = Machine(skill=0.8)
    assert machine.step() == (1, 1.0)  # plain steps first: there is nothing to compare with
    machine.speedup(100)
    # A chain of 6 would bring (1 - 0.8 ** 7) / 0.2 = 3.95 tokens for 1 + 0.2 + 0.5 + 0.12.
    assert machine.speedup(1000) > 0.95 * 3.95 / 1.82


@pytest.mark.parametrize(
    ("skill", "confidence"), [(0.0, 0.05), (0.05, 0.05), (0.0, 0.9)], ids=["weak", "modest", "boastful"]
)
def test_decodes_plainly_where_it_does_not(skill, confidence):
    machine = Machine(skill, confidence)
    assert machine.speedup(200) > 0.93
    assert machine.speedup(2000) > 0.98
    assert any(machine.chosen[-1000:])  # but looks again


def test_a_modest_draft_is_not_given_up():
    """Whose word makes no tree worth its time, until what the target accepts has corrected it."""
    machine = Machine(skill=0.8, confidence=0.02)
    machine.speedup(300)
    assert machine.chosen[-100:].count(0) < 10 and machine.speedup(500) > 1.3


def test_what_it_takes_to_catch_up_counts():
    machine = Machine(skill=0.0, confidence=0.05, unread=8.0)
    machine.speedup(200)
    assert machine.speedup(4000) > 0.97
    assert any(machine.chosen[-2000:])
    machine.skill = machine.confidence = 0.8
    machine.speedup(3000)
    assert machine.chosen[-200:].count(0) < 20


def test_verifies_less_where_nodes_are_dear():
    cheap, dear = Machine(skill=0.7, per_node=0.001), Machine(skill=0.7, per_node=0.2)
    for machine in (cheap, dear):
        machine.speedup(500)
    mean = [sum(machine.chosen[200:]) / 300 for machine in (cheap, dear)]
    assert mean[0] > 5 and mean[1] < 4
    # Two nodes would bring 2.19 tokens for 1 + 0.4 + 0.2 + 0.1.
    assert dear.speedup(1000) > 0.93 * 2.19 / 1.7


def test_drafts_less_deep_where_levels_are_dear():
    cheap, dear = Machine(skill=0.7, level=0.01), Machine(skill=0.7, level=0.3)
    for machine in (cheap, dear):
        machine.speedup(500)
    mean = [sum(machine.levels[-300:]) / len(machine.levels[-300:]) for machine in (cheap, dear)]
    assert mean[0] > 4 and mean[1] < 2


@pytest.mark.parametrize("per_node", [0.02, 0.15])
def test_follows_a_change(per_node):
    machine = Machine(skill=0.0, confidence=0.8, per_node=per_node)
    machine.speedup(1000)
    assert machine.chosen[-100:].count(0) > 90
    machine.skill = 0.8
    machine.speedup(6000)
    assert machine.chosen[-200:].count(0) < 20


def test_calibration():
    """The best child apart from the others, and only of parents that were accepted."""
    calibration = Calibration()
    confidences, parents = torch.tensor([[0.4, 0.4, 0.02, 0.9]]).log(), [[0, 0, 0, 0, 1]]
    siblings = confidences[:, :3]
    assert torch.allclose(calibration(siblings), siblings)  # taken at its word
    for step in range(400):
        path = [0, 2] if step % 8 == 0 else [0, 1, 4] if step % 2 == 0 else [0, 1]
        calibration.record(confidences.tolist(), parents, [path])
    best, other, never = calibration(siblings)[0].exp().tolist()
    assert best == pytest.approx(7 / 8, abs=0.1) and other == pytest.approx(1 / 8, abs=0.07) and never < 0.02
    assert calibration(torch.tensor([[0.9]]).log()).exp() == pytest.approx(3 / 7, abs=0.15)
    assert calibration(torch.tensor([[0.5, 0.0]]).log())[0, 1] == -torch.inf


def test_calibrated_siblings_stay_in_order():
    """What was learned of one range of probabilities must not put a child before its better sibling."""
    calibration = Calibration()
    confidences = torch.tensor([[0.7, 0.15]]).log()
    for _ in range(50):
        calibration.record(confidences.tolist(), [[0, 0, 0]], [[0, 2]])
    first, second = calibration(confidences)[0]
    assert second == first < math.log(0.3)


def test_what_threads_share_is_replaced_not_changed():
    """So that one thread never reads what another is half-way through with."""
    calibration, costs = Calibration(), StepCosts()
    for size in (1, 1, 1, 8, 8, 8):
        costs.record("verify", size, 1.0)
    shared = (calibration.expected, calibration.accepted, calibration.factors, costs.samples["verify", 8])
    before = [copy.deepcopy(each) for each in shared]
    calibration.record([[math.log(0.9), math.log(0.5)]], [[0, 0, 1]], [[0, 1]])
    costs.record("verify", 8, 2.0)
    for each, known in zip(shared, before):
        assert torch.equal(torch.as_tensor(each), torch.as_tensor(known))


def test_costs():
    costs = StepCosts()
    assert costs.near("first", 1) is None and costs.near("verify", 1) is None and costs.lines("verify", [1]) is None
    for size, seconds in ((0, 1.0), (8, 2.0), (24, 3.0)):
        costs.record("verify", size, 100.0)  # of preparation
        for pause in (0, 0, 50):
            costs.record("verify", size, seconds + pause)
    assert costs.near("first", 1) is None
    assert [costs.near("verify", size) for size in (0, 5, 8, 9, 99)] == [1.0, 2.0, 2.0, 3.0, 3.0]
    expected = [1, 1.5, 2, 2.5, 3, 3 + 2 / 24 * 16]
    assert costs.lines("verify", [0, 4, 8, 16, 24, 40]) == pytest.approx(expected)
    for size, seconds in ((4, 1.0), (8, 3.0)):
        for _ in range(3):
            costs.record("level", size, seconds)
    assert costs.lines("level", [2, 4, 6]) == pytest.approx([0.5, 1, 2])  # not 0


def test_steps_that_end_early():
    policy = AutoPolicy(3, StepCosts(), Calibration())
    assert policy.sizes == [0, 1, 2, 3]
    for _ in range(20):
        policy.plan_step([True])  # each call ended before the step was measured
    plan = policy.plan_step([True])
    assert plan.drafts
    assert plan.choose_num_nodes(torch.full((1, 2), -1.0)) in (1, 2)  # a pool smaller than the budget
    plan.record_verification(SimpleNamespace(num_nodes=1), [[0]], [False], 0, 1.0)
    for size in (1, 1, 2, 2):
        policy.costs.record("verify", size, 1.0)
    assert plan.choose_num_nodes(torch.zeros(1, 0)) == 0  # nothing that the draft is sure enough of


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_learns_nothing_from_padding(monkeypatch, cache):
    """When the last text of a batch ends, rows that are behind catch up by padding: no tokens to expect there."""
    target, batch = make_target("llama"), make_batch([5, 9, 7])
    kwargs = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    # Others are cut off by the length.
    kwargs["eos_token_id"] = int(target.generate(**batch, **kwargs).sequences[0, -3])
    expected = target.generate(**batch, **kwargs).sequences
    padding = (1 - batch["attention_mask"]).sum(dim=1, keepdim=True)
    of_padding, expectations, times = [], [], random.Random(0)
    plan_step = AutoPolicy.plan_step

    def noting_padding(self, live, lookup):
        of_padding.append(not any(live))
        return plan_step(self, live, lookup)

    # Every step drafts, at times that lead to trees of all sizes.
    monkeypatch.setattr(AutoPolicy, "FIRST_PLAIN_STEPS", 0)
    monkeypatch.setattr(AutoPolicy, "plan_step", noting_padding)
    monkeypatch.setattr(AutoPolicy, "record_drafted_step", lambda self, tokens, *seconds: expectations.append(tokens))
    monkeypatch.setattr(StepCosts, "near", lambda self, part, size: times.random())
    monkeypatch.setattr(StepCosts, "lines", lambda self, part, sizes: [times.random() for _ in sizes])
    for seed in range(20):
        draft = make_oracle(target, expected, seed, padding)
        draft.generation_config.update(tree_policy="auto", tree_depth=4, branching_factor=1)
        outputs = target.generate(**batch, assistant_model=draft, **kwargs, **cache)
        assert outputs.sequences.tolist() == expected.tolist()
    assert any(of_padding) and expectations and all(tokens >= 1 for tokens in expectations)


def test_a_batch_is_as_fast_as_its_slowest_row(monkeypatch):
    """Of what use is a row that runs ahead, if the call ends with the last?"""
    parts = {"first": 0.2, "level": 0.1}
    monkeypatch.setattr(StepCosts, "near", lambda self, part, size: parts.get(part, 1.0))
    monkeypatch.setattr(StepCosts, "lines", lambda self, part, sizes: [1 + 0.01 * (size - 2) for size in sizes])
    target, batch = make_target("llama"), make_batch([5, 9])
    settings = {"max_new_tokens": 150, "do_sample": False, "pad_token_id": 0}
    expected = target.generate(**batch, **settings)
    padding = (1 - batch["attention_mask"]).sum(dim=1, keepdim=True)
    shares = []
    for knows_both in (True, False):
        text = expected.clone()
        if not knows_both:
            text[1] = 3
        draft = make_oracle(target, text, padding=padding)
        draft.generation_config.update(tree_policy="auto", tree_depth=4, branching_factor=1)
        assert target.generate(**batch, assistant_model=draft, **settings).tolist() == expected.tolist()
        shares.append(draft.last_generation.plain_steps / draft.last_generation.target_forwards)
    assert shares[0] < 0.3 and shares[1] > 0.7


@pytest.mark.parametrize(("fixed", "per_token"), [(1.0, 0.0), (0.0, 0.1), (0.6, 0.1)])
def test_what_it_is_worth_that_rows_run_ahead(fixed, per_token):
    """Where rows that are finished leave, they take their share of a step's time with them."""
    costs = StepCosts()
    for size in (4, 4, 4, 12, 12, 12):
        costs.record("verify", size, fixed + per_token * size)
    leaving, staying = (AutoPolicy(24, costs, Calibration(), 4, may_retire) for may_retire in (True, False))
    for policy in (leaving, staying):
        policy.num_drafted = 100
    # Three of four rows came two tokens on, the slowest one: each of theirs is a row less in a later step.
    share = 3 * per_token / (fixed + 4 * per_token)
    assert leaving.equivalent_plain_steps([2, 2, 2, 1], [True] * 4, progress=1) == pytest.approx(1 + share)
    assert staying.equivalent_plain_steps([2, 2, 2, 1], [True] * 4, progress=1) == 1


@pytest.mark.parametrize(("probability", "levels", "nodes"), [(0.9, 1, 2), (0.01, 0, 1)])
def test_first_trees_of_a_batch(probability, levels, nodes):
    """Before anything was measured: two nodes, one below the other, tell more than one, where they may be of use."""
    plan = AutoPolicy(24, StepCosts(), Calibration(), 16).drafted_step([True] * 16)
    values = torch.tensor([probability] + [0.001] * 7).log().expand(16, -1)
    assert plan.more_levels(values, at_most=5) == levels
    assert plan.more_levels(values, at_most=4) == 0
    assert plan.choose_num_nodes(values) == nodes


def test_wide_levels_of_a_batch_take_longer():
    """What is measured of narrow levels does not tell."""
    costs, num_rows = StepCosts(), 16
    for part, size, seconds in (("verify", 16, 1.0), ("verify", 128, 1.1), ("level", 16, 0.1), ("level", 128, 3.0)):
        for _ in range(3):
            costs.record(part, size, seconds)
    policy = AutoPolicy(24, costs, Calibration(), num_rows)
    for num_probable, levels in ((1, 1), (8, 0)):
        plan = policy.drafted_step([True] * num_rows)
        probabilities = torch.tensor([0.9] * num_probable + [0.001] * (8 - num_probable)) / num_probable
        assert plan.more_levels(probabilities.log().expand(num_rows, -1), at_most=5) == levels


def test_rows_that_are_alike_are_not_judged_by_the_least_lucky():
    """In few steps some row of many is unlucky, but each time another one."""
    generator, num_rows, num_steps = torch.Generator().manual_seed(0), 16, 400
    policy = AutoPolicy(24, StepCosts(), Calibration())
    lengths, worth = torch.zeros(num_rows), []
    for policy.num_drafted in range(num_steps):
        advances = torch.randint(1, 6, (num_rows,), generator=generator)
        before, behind = lengths.min(), lengths < lengths.min() + 7
        lengths = lengths + advances
        worth.append(policy.equivalent_plain_steps(advances.tolist(), behind.tolist(), int(lengths.min() - before)))
    rate = float(lengths.min()) / num_steps
    assert rate > 2.7  # of 3
    assert sum(worth[:2]) / 2 > 0.8 * rate and sum(worth) / num_steps == pytest.approx(rate, rel=0.05)


def test_what_measuring_takes_is_lost():
    """And bounds how soon to try again, as what the steps of a trial take does."""
    machine = Machine(skill=0.0, confidence=0.05, per_node=0.2)
    machine.policy.MOST_PLAIN = 1000  # as many as it takes
    losses = []
    while machine.policy.plain_left < machine.policy.INTERVALS[0] - 1:
        tokens, seconds = machine.step()
        if machine.chosen[-1] > 0:
            losses.append(seconds / machine.plain - tokens)
    # But for the first two, which may be preparation, and what the draft's word makes of the others.
    assert machine.policy.plain_left > 0.8 * sum(losses[2:]) / machine.policy.MOST_LOST


def test_a_draft_that_is_unsure_of_everything_is_given_up():
    """So that nothing that it drafts is ever verified: drafting must not go on for that."""
    policy, num_drafted = AutoPolicy(24, StepCosts(), Calibration()), 0
    for _ in range(1000):
        plan, tree = policy.plan_step([True]), SimpleNamespace(num_nodes=1)
        if plan.drafts:
            num_drafted += 1
            plan.record_draft(0, 0.3, 0.0, is_usual=True)
            assert plan.choose_num_nodes(torch.zeros(1, 0)) == 0
        plan.record_verification(tree, [[0]], [True], 1, 1.0)
    assert num_drafted > 0 and 0.3 * num_drafted < 0.02 * 1000


def test_a_slow_moment_is_soon_forgotten():
    """Whatever the first steps seemed to cost, it is tried again."""
    machine = Machine(skill=0.8)
    machine.first, machine.level, steps = 30.0, 5.0, 0
    while machine.policy.plain_left < machine.policy.INTERVALS[0] - 1:
        machine.step()
        steps += 1
    machine.first, machine.level = 0.2, 0.1
    machine.speedup(400)
    assert steps < 20 and any(machine.chosen[steps:])


@pytest.mark.parametrize(("gain", "least", "most"), [(0.15, 0.6, 1), (-0.5, 0, 0.1), (-1.0, 0, 0.05)])
def test_luck_is_told_from_loss(gain, least, most):
    """A draft that brings a little is not given up for a few unlucky steps, one that costs a little soon is."""
    shares = []
    for seed in range(20):
        policy, random_, drafted = AutoPolicy(24, StepCosts(), Calibration(), num_rows=4), random.Random(seed), 0
        for _ in range(300):
            if policy.plain_left > 0:
                policy.plain_left -= 1
                continue
            drafted += 1
            policy.record_drafted_step(2 + gain + random_.gauss(0, 0.8), seconds=2.0, plain=1.0)
        shares.append(drafted / 300)
    assert least <= sum(shares) / len(shares) <= most


@pytest.mark.parametrize("resolution", [0.0156, None])
@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}, {"do_sample": True}])
def test_coarse_clocks_and_clocks_that_stand_still(monkeypatch, resolution, settings):
    now = 0.0

    def perf_counter():
        nonlocal now
        now += 0.001
        return 0.0 if resolution is None else now // resolution * resolution

    for module in ("generation", "drafter", "static"):
        monkeypatch.setattr(f"hf_eagle3.{module}_eagle3.time", SimpleNamespace(perf_counter=perf_counter))
    target = make_target("llama")
    for batch in (make_batch([5]), make_batch([5, 9, 7])):
        torch.manual_seed(0)
        expected = target.generate(**batch, **{**settings, "cache_implementation": None}, max_new_tokens=64)
        draft = make_oracle(target, expected, padding=(1 - batch["attention_mask"]).sum(dim=1, keepdim=True))
        draft.generation_config.tree_policy = "auto"
        for _ in range(3):
            torch.manual_seed(0)
            assert torch.equal(
                target.generate(**batch, **settings, max_new_tokens=64, assistant_model=draft), expected
            )

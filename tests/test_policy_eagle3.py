import copy
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    each_once,
    generate,
    make_batch,
    make_draft,
    make_oracle,
    make_prompt,
    make_target,
    oracle_of,
)

from hf_eagle3.remote_code import policy_eagle3
from hf_eagle3.remote_code.policy_eagle3 import Calibration, CallKind, DraftingTrial, Policy, StepCosts
from hf_eagle3.remote_code.tree_eagle3 import DraftTree, Plan, grow_tree


WHOLE = Plan("draft", depth=6, num_nodes=24, branching_factor=8)


class Machine:
    """
    Decodes with a policy in simulated time. The draft says of one of eight tokens that it is right with probability
    `confidence`, and shares the rest among the others; it is right with probability `skill`.
    """

    def __init__(
        self, skill, confidence=None, plain=1.0, per_node=0.02, first=0.2, level=0.1, unread=0.0, threshold=0.0, **kind
    ):
        self.skill, self.confidence = skill, skill if confidence is None else confidence
        self.unread = unread  # seconds to catch up with what was decoded plainly
        self.plain, self.per_node, self.first, self.level, self.threshold = plain, per_node, first, level, threshold
        self.policy = Policy(CallKind(WHOLE, **kind))
        self.random = random.Random(0)
        self.chosen, self.depths, self.trees = [], [], []

    def step(self):
        """Tokens and seconds of one step."""
        plan = self.policy.plan([True])
        pause = 10 if self.random.random() < 0.02 else 1  # now and then the machine does something else
        tree, path, drafting = DraftTree.chain(torch.zeros(1, 1, dtype=torch.long)), [0], 0.0
        if plan.proposer is not None:
            rest = (1 - self.confidence) / 7
            logits = torch.tensor([[self.confidence, *7 * [rest]]]).clamp(min=1e-9).log()
            tree = grow_tree(
                torch.full((1, 1), 9),
                logits,
                torch.zeros(1, 1),
                lambda tokens, states, level, visible: (logits[:, None].expand(-1, tokens.shape[1], -1), states),
                None,
                plan,
                self.threshold,
                self.policy.calibration.power,
            )
            children = tree.children()[0]
            while (path[-1], 0) in children and self.random.random() < self.skill:
                path.append(children[path[-1], 0])
            unread = 0 if self.chosen and self.chosen[-1] else self.unread
            drafting = self.first + unread + self.level * (tree.depth - 1)
            self.depths.append(tree.depth)
        verification = self.plain + self.per_node * (tree.num_nodes - 1)
        accepted = SimpleNamespace(counts=[len(path)], nodes=[path], progress=len(path), is_finished=[False])
        self.policy.record(plan, tree, accepted, [True], drafting * pause, verification * pause)
        self.chosen.append(plan.proposer is not None)
        self.trees.append(tree.num_nodes - 1)
        return len(path), drafting + verification

    def speedup(self, num_steps):
        tokens, seconds = zip(*(self.step() for _ in range(num_steps)))
        return sum(tokens) / sum(seconds) * self.plain

    def takes_up_drafting(self, within):
        """Whether it comes to draft in nearly all steps."""
        for _ in range(within):
            self.step()
            if sum(self.chosen[-100:]) > 90:
                return True
        return False

    @property
    def drafting(self):
        return self.policy.trial(1)


KINDS = [{}, {"sizing": "depth"}, {"sizing": "fixed"}]
ids = ["reads the draft", "plans ahead", "one shape"]


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_drafts_where_it_pays(kind):
    machine = Machine(skill=0.8, **kind)
    assert machine.step() == (1, 1.0)  # plain steps first: there is nothing to compare with
    machine.speedup(60)
    # A chain of 6 would bring (1 - 0.8 ** 7) / 0.2 = 3.95 tokens for 1 + 0.2 + 0.5 + 0.12; a whole tree takes 0.36 more.
    assert machine.speedup(400) > 0.94 * 3.95 / (1.82 if not kind else 2.18)


def test_one_pass_has_one_price():
    """Whatever the clock says of trees of several depths."""
    machine = Machine(skill=0.8, drafts_in_one_pass=True)
    machine.speedup(60)
    assert machine.policy.draft_plan([True]).prices.level == 0 and len(set(machine.depths)) > 1
    assert [size for size, _ in machine.policy.costs.known("draft")] == [1]
    # Where the host does not read the draft, the whole tree is drafted from the first step on.
    machine = Machine(skill=0.3, drafts_in_one_pass=True, sizing="whole")
    machine.speedup(60)
    assert set(machine.depths) == {WHOLE.depth}
    other = Machine(skill=0.3, sizing="depth")
    other.speedup(60)
    assert set(other.depths) != {WHOLE.depth}


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_remembers_plain_steps(kind):
    """Which are rare where drafting pays, and without which nothing can be judged, nor looked up."""
    machine = Machine(skill=0.8, **kind)
    machine.speedup(60)
    for _ in range(300):  # a size is forgotten after 256 others
        machine.step()
        assert machine.policy.plain_seconds(1) is not None


@pytest.mark.parametrize("kind", KINDS, ids=ids)
@pytest.mark.parametrize(
    ("skill", "confidence"), [(0.0, 0.05), (0.05, 0.05), (0.0, 0.9)], ids=["weak", "modest", "boastful"]
)
def test_decodes_plainly_where_it_does_not(skill, confidence, kind):
    machine = Machine(skill, confidence, **kind)
    assert machine.speedup(300) > 0.92
    assert machine.speedup(2000) > 0.98
    assert any(machine.chosen[-1100:])  # but looks again


def test_a_modest_draft_is_not_given_up():
    """Whose word makes no tree worth its time, until what the target accepts has corrected it."""
    machine = Machine(skill=0.8, confidence=0.15)
    machine.speedup(200)
    assert sum(machine.chosen[-100:]) > 90 and machine.speedup(200) > 1.3


@pytest.mark.parametrize("kind", KINDS[:2], ids=ids[:2])
def test_a_draft_that_is_unsure_of_everything_is_given_up(kind):
    """Its trees are but roots: they tell that drafting does not pay all the same."""
    machine = Machine(skill=0.0, confidence=0.2, threshold=0.5, **kind)
    machine.speedup(1000)
    assert set(machine.trees) == {0} and 0 < sum(machine.chosen) < 100
    assert machine.speedup(2000) > 0.98


def test_what_it_takes_to_catch_up_counts():
    machine = Machine(skill=0.0, confidence=0.05, unread=8.0)
    machine.speedup(200)
    assert machine.speedup(3000) > 0.97
    assert any(machine.chosen[-2000:])
    machine.skill = machine.confidence = 0.8
    assert machine.takes_up_drafting(within=3000)


def test_verifies_less_where_nodes_are_dear():
    cheap, dear = Machine(skill=0.7, per_node=0.001), Machine(skill=0.7, per_node=0.2)
    for machine in (cheap, dear):
        machine.speedup(180)
    mean = [sum(machine.trees[80:]) / 100 for machine in (cheap, dear)]
    assert mean[0] > 5 and mean[1] < 4
    # Two nodes would bring 2.19 tokens for 1 + 0.4 + 0.2 + 0.1.
    assert dear.speedup(400) > 0.93 * 2.19 / 1.7


@pytest.mark.parametrize("kind", KINDS[:2], ids=ids[:2])
def test_drafts_less_deep_where_levels_are_dear(kind):
    cheap, dear = Machine(skill=0.7, level=0.01, **kind), Machine(skill=0.7, level=0.4, **kind)
    for machine in (cheap, dear):
        machine.speedup(180)
    mean = [sum(machine.depths[-100:]) / len(machine.depths[-100:]) for machine in (cheap, dear)]
    assert mean[0] > 4 and mean[1] < 3


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_follows_a_change(kind):
    machine = Machine(skill=0.0, confidence=0.8, **kind)
    machine.speedup(400)
    assert sum(machine.chosen[-100:]) < 10
    machine.skill = 0.8
    assert machine.takes_up_drafting(within=6000)


def test_a_slow_moment_is_soon_forgotten():
    """Whatever the first steps seemed to cost, it is tried again."""
    machine = Machine(skill=0.8)
    machine.first, machine.level, steps = 30.0, 5.0, 0
    while machine.drafting.plain_left < DraftingTrial.INTERVALS[0] - 1:
        machine.step()
        steps += 1
    machine.first, machine.level = 0.2, 0.1
    machine.speedup(400)
    assert steps < 30 and any(machine.chosen[steps:])


@pytest.mark.parametrize(("gain", "least", "most"), [(0.15, 0.6, 1), (-0.5, 0, 0.1), (-1.0, 0, 0.05)])
def test_luck_is_told_from_loss(gain, least, most):
    """A draft that brings a little is not given up for a few unlucky steps, one that costs a little soon is."""
    shares = []
    for seed in range(20):
        drafting, random_, drafted = DraftingTrial(num_rows=4), random.Random(seed), 0
        for _ in range(300):
            if not drafting.take_plain_step():
                drafted += 1
                drafting.judge(2 + gain + random_.gauss(0, 0.8), seconds=2.0, plain=1.0)
        shares.append(drafted / 300)
    assert least <= sum(shares) / len(shares) <= most


@pytest.mark.parametrize(("lengths", "least", "most"), [([1, 1, 1, 2] * 2, 16, 32), ([1] * 8, 200, 256)])
def test_bad_luck_does_not_end_drafting_for_long(lengths, least, most):
    drafting = DraftingTrial(num_rows=1)
    for tokens in lengths:
        drafting.judge(tokens, seconds=1.65, plain=1.0)
    assert drafting.num_drafted == 0 and least <= drafting.plain_left <= most


@pytest.mark.parametrize(
    ("mean_lengths", "most_lost"), [((1.5, 1.75, 2.0), 0.011), ((2.2, 2.6, 3.0), 0.03), ((1.1,), 0.025)]
)
def test_little_is_lost_by_asking_whether_drafting_pays(mean_lengths, most_lost):
    """Six texts of 64 tokens, some easier for the draft. A drafted step takes 1.4 times as long as a plain one."""

    def seconds(seed, is_plain=None):
        random_, drafting, taken = random.Random(seed), DraftingTrial(num_rows=1), 0.0
        for _ in range(6):
            accepted, left = 1 - 1 / random_.choice(mean_lengths), 64
            while left > 0:
                length, cost = 1, 1.0
                if not (drafting.take_plain_step() if is_plain is None else is_plain):
                    cost = 1.4
                    while length < 8 and random_.random() < accepted:
                        length += 1
                    drafting.judge(length, cost, plain=1.0)
                taken, left = taken + cost, left - length
        return taken

    auto, plain, drafted = (sum(seconds(seed, way) for seed in range(100)) for way in (None, True, False))
    assert auto / min(plain, drafted) - 1 < most_lost


def calibrate(calibration, accepts, num_steps=400, num_rows=1):
    """
    Records trees of a root whose children are of 50%, 30% and 20%, and the best one's, which is of 50%. `accepts(step)`
    tells the path that all rows take, of which the last is finished.
    """
    for step in range(num_steps):
        confidences = torch.tensor([[0.5, 0.3, 0.2]]).pow(calibration.power)
        confidences = (confidences / confidences.sum())[:, [0, 1, 2, 0]].log().expand(num_rows + 1, -1)
        tokens, parents = torch.zeros(num_rows + 1, 5), torch.tensor([[0, 0, 0, 0, 1]]).expand(num_rows + 1, -1)
        nodes, is_finished = num_rows * [accepts(step)] + [[0]], num_rows * [False] + [True]
        tree = DraftTree.from_parents(tokens, parents, confidences)
        calibration.record(tree, SimpleNamespace(nodes=nodes, is_finished=is_finished))
    return confidences[0, [0, 3]].exp().tolist()


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("first_power", [1.0, 2.0])
def test_calibration(first_power, num_rows):
    """Of the best children alone, and only of parents that were accepted."""
    calibration = Calibration(first_power)
    # The root's best child is taken in seven of eight steps, its own in five of these: 12 of 15.
    path_of = [[0, 2], *5 * [[0, 1, 4]], *2 * [[0, 1]]]
    assert calibrate(calibration, lambda step: path_of[step % 8], num_rows=num_rows) == pytest.approx(
        [0.8, 0.8], abs=0.03
    )
    assert calibration.power > 2


def test_calibration_by_batches():
    """A step counts as much, however many rows it has."""
    powers = []
    for num_rows in (1, 5):
        calibration = Calibration(1.0)
        calibrate(calibration, lambda step: [0, 1, 4], num_steps=3, num_rows=num_rows)
        powers.append(calibration.power)
    assert powers[0] == pytest.approx(powers[1]) and powers[0] > 1.02


@pytest.mark.parametrize(("path", "least", "most"), [([0, 3], 0.1, 0.1), ([0, 1, 4], 5, 10)], ids=["never", "always"])
def test_calibration_has_an_end(path, least, most):
    calibration = Calibration(1.0)
    calibrate(calibration, lambda step: path, num_steps=2000)
    assert least <= calibration.power <= most


@pytest.mark.parametrize(
    ("tree_policy", "cache"),
    [("static", {}), ("auto", {}), ("auto", {"cache_implementation": "static"})],
    ids=["static", "auto", "auto, static cache"],
)
def test_what_calls_learn_of_a_draft(monkeypatch, tree_policy, cache):
    """One that is sure and often wrong is believed less and less; `static` begins anew in each call."""
    target, prompt, settings = make_target("llama"), make_prompt(9), {"max_new_tokens": 40, "do_sample": False}
    draft = make_oracle(target, target.generate(prompt, **settings))
    draft.generation_config.update(tree_policy=tree_policy, prompt_lookup_num_tokens=0)
    record, powers = Calibration.record, []
    monkeypatch.setattr(
        Calibration, "record", lambda self, *args: (powers[-1].append(self.power), record(self, *args))
    )
    monkeypatch.setattr(DraftingTrial, "take_plain_step", lambda self: False)  # whatever it measured
    for _ in range(2):
        powers.append([])
        target.generate(prompt, assistant_model=draft, **cache, **settings)
    first, second = powers
    assert len(first) > 5 and first[0] == 2 and first[-1] < 1.9
    assert second[0] == 2 if tree_policy == "static" else second[0] < 1.9


def contents(policy):
    return copy.deepcopy(
        (
            policy.costs.samples,
            {rows: vars(drafting) for rows, drafting in policy.trials.items()},
            policy.calibration.power,
            policy.matches.counts,
            vars(policy.reach),
        )
    )


def test_what_threads_share_is_replaced_not_changed():
    """So that one thread never reads what another is half-way through with."""
    target, prompts = make_target("llama"), [make_prompt(9, seed) for seed in range(3)]
    draft = make_draft(target, prompts)
    draft.generation_config.tree_policy = "auto"
    settings = {"max_new_tokens": 24, "do_sample": False}
    expected = [target.generate(prompt, **settings).tolist() for prompt in prompts]
    target.generate(prompts[0], assistant_model=draft, **settings)
    (shared,) = policy_eagle3._POLICIES[target][draft].values()
    before = contents(shared)
    texts = {}

    def call(number):
        for index in range(3):
            text = target.generate(prompts[(index + number) % 3], assistant_model=draft, **settings)
            texts[number, (index + number) % 3] = text.tolist()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 9 and all(text == expected[index] for (_, index), text in texts.items())
    assert contents(shared) == before
    (now,) = policy_eagle3._POLICIES[target][draft].values()
    assert now is not shared and now.costs.num_recorded["verify"] > shared.costs.num_recorded["verify"]


def test_a_grammar_leaves_the_measurements_of_other_calls_alone():
    """It takes time at each token, and forbids what the draft proposes."""
    target, prompt, settings = make_target("llama"), make_prompt(9), {"max_new_tokens": 24, "do_sample": False}
    draft = make_draft(target, [prompt])
    draft.generation_config.tree_policy = "auto"
    target.generate(prompt, assistant_model=draft, repetition_penalty=1.1, **settings)
    policies = policy_eagle3._POLICIES[target][draft]
    (free,) = policies.values()
    target.generate(prompt, assistant_model=draft, prefix_allowed_tokens_fn=lambda row, ids: [1, 5], **settings)
    grammar = policies[free.kind._replace(exposes_ids=True)]
    assert len(policies) == 2 and policies[free.kind] is free
    target.generate(prompt, assistant_model=draft, **settings)
    assert len(policies) == 2 and policies[grammar.kind] is grammar and policies[free.kind] is not free


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_a_tree_that_was_taken_back_was_drafted(kind):
    """Where the states of a token are no numbers, all that is left of a tree is its root."""
    policy, root = (
        Policy(CallKind(WHOLE, **kind)),
        DraftTree.chain(torch.zeros(1, 1, dtype=torch.long)),
    )
    accepted = SimpleNamespace(counts=[1], nodes=[[0]], progress=1, is_finished=[False])
    num_drafted = 0
    for _ in range(300):
        plan = policy.plan([True])
        num_drafted += plan.proposer is not None
        policy.record(plan, root, accepted, [True], 0.5 * (plan.proposer is not None), 1.0)
    assert 0 < num_drafted < 40


def test_misspelled_arguments_are_refused():
    with pytest.raises(TypeError):
        CallKind(WHOLE, size="whole")


def test_costs():
    costs = StepCosts()
    assert costs.seconds("verify", 1) is None and costs.known("draft") == []
    for size, seconds in ((4, 1.0), (8, 2.0), (24, 3.0)):
        costs.record("verify", size, 100.0)  # of preparation
        assert (size, 100.0) not in costs.known("verify")
        for pause in (0, 0, 50):
            costs.record("verify", size, seconds + pause)
    assert costs.seconds("draft", 1) is None
    expected = [0.5, 1, 1.5, 2, 2.5, 3, 3 + 2 / 20 * 16]  # half takes half at least
    assert [costs.seconds("verify", size) for size in (2, 4, 6, 8, 16, 24, 40)] == pytest.approx(expected)
    costs.record("verify", 12, 100.0)
    costs.record("verify", 12, 100.0)
    assert costs.seconds("verify", 12) == pytest.approx(2.25)  # a single measurement may have met a pause
    for seconds in (1.0, 3.0):
        costs.record("draft", 6, seconds)
    assert costs.known("draft") == [(6, 3.0)]  # if there is no other
    assert [costs.seconds("draft", size) for size in (2, 6, 9)] == pytest.approx([1, 3, 3])
    known = costs.known("verify")
    for _ in range(StepCosts.TRUSTED + 1):
        costs.record("draft", 1, 1.0)
    assert [size for size, _ in costs.known("draft")] == [1] and costs.known(
        "verify"
    ) == known  # too old, of this part


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_learns_nothing_from_padding(monkeypatch, cache):
    """When the last text of a batch ends, rows that are behind catch up by padding: no tokens to expect there."""
    target, batch = make_target("llama"), make_batch([5, 9, 7])
    kwargs = {"max_new_tokens": 20, "pad_token_id": 0}
    # Others are cut off by the length.
    kwargs["eos_token_id"] = int(generate(target, batch, **kwargs)[0, -3])
    expected = generate(target, batch, **kwargs)
    kwargs |= {"return_dict_in_generate": True, **cache}
    of_padding, judged, times = [], [], random.Random(0)
    plan_step = Policy.plan

    def noting_padding(self, behind, lookup=None):
        of_padding.append(not any(behind))
        return plan_step(self, behind, lookup)

    # Every step drafts, at times that lead to trees of all sizes.
    monkeypatch.setattr(DraftingTrial, "FIRST_PLAIN_STEPS", 0)
    monkeypatch.setattr(Policy, "plan", noting_padding)
    monkeypatch.setattr(DraftingTrial, "judge", lambda self, tokens, *seconds: judged.append((tokens, of_padding[-1])))
    monkeypatch.setattr(StepCosts, "seconds", lambda self, part, size: times.random())
    monkeypatch.setattr(StepCosts, "known", lambda self, part: [(1, 0.2), (4, 0.5)])
    for seed in range(30):
        draft = oracle_of(target, batch, seed, text=expected)
        draft.generation_config.update(tree_policy="auto", tree_depth=4, branching_factor=1)
        outputs = generate(target, batch, assistant_model=draft, **kwargs)
        assert outputs.sequences.tolist() == expected.tolist()
        if seed > 5 and any(of_padding):
            break
    assert any(of_padding) and judged and all(tokens >= 1 and not padding for tokens, padding in judged)


def test_a_batch_is_as_fast_as_its_slowest_row(monkeypatch):
    """Of what use is a row that runs ahead, if the call ends with the last?"""
    monkeypatch.setattr(StepCosts, "known", lambda self, part: [(1, 0.2), (4, 0.5)])
    monkeypatch.setattr(
        StepCosts, "seconds", lambda self, part, size: 0.3 if part == "draft" else 1 + 0.01 * (size - 2)
    )
    target, batch = make_target("llama"), make_batch([5, 9], seed=1)
    shares = []
    text = generate(target, batch, max_new_tokens=150)
    for known in (text, torch.stack([text[0], torch.full_like(text[1], 3)])):
        draft = oracle_of(target, batch, text=known)
        draft.generation_config.update(tree_policy="auto", tree_depth=4, branching_factor=1)
        assert torch.equal(generate(target, batch, assistant_model=draft, max_new_tokens=150), text)
        stats = draft.last_generation
        shares.append(stats.plain_steps / stats.target_forwards)
    assert shares[0] < 0.3 and shares[1] > 0.7


def step_of(counts, progress):
    return SimpleNamespace(counts=counts, progress=progress)


@pytest.mark.parametrize(("fixed", "per_token"), [(1.0, 0.0), (0.0, 0.1), (0.6, 0.1)])
def test_what_it_is_worth_that_rows_run_ahead(fixed, per_token):
    """Where rows that are finished leave, they take their share of a step's time with them."""
    leaving, staying = (Policy(CallKind(WHOLE, may_retire=may_retire)) for may_retire in (True, False))
    worth = []
    for policy in (leaving, staying):
        for size in (4, 4, 4, 12, 12, 12):
            policy.costs.record("verify", size, fixed + per_token * size)
        policy.trial(4).num_drafted = 100
        worth.append(policy.equivalent_plain_steps(step_of([2, 2, 2, 1], 1), [True] * 4, policy.trial(4)))
    # Three of four rows came two tokens on, the slowest one: each of theirs is a row less in a later step.
    share = 3 * per_token / (fixed + 4 * per_token)
    assert worth == pytest.approx([1 + share, 1])


def test_rows_that_are_alike_are_not_judged_by_the_least_lucky():
    """In few steps some row of many is unlucky, but each time another one."""
    generator, num_rows, num_steps = torch.Generator().manual_seed(0), 16, 400
    policy, drafting = Policy(CallKind(WHOLE)), DraftingTrial(num_rows)
    lengths, worth = torch.zeros(num_rows), []
    for drafting.num_drafted in range(num_steps):
        advances = torch.randint(1, 6, (num_rows,), generator=generator)
        before, behind = lengths.min(), lengths < lengths.min() + 7
        lengths = lengths + advances
        step = step_of(advances.tolist(), int(lengths.min() - before))
        worth.append(policy.equivalent_plain_steps(step, behind.tolist(), drafting))
    rate = float(lengths.min()) / num_steps
    assert rate > 2.7  # of 3
    assert sum(worth[:2]) / 2 > 0.8 * rate and sum(worth) / num_steps == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "resolution"),
    each_once([{}, {"cache_implementation": "static"}, {"do_sample": True}, {}], [0.0156, None]),
)
def test_coarse_clocks_and_clocks_that_stand_still(monkeypatch, resolution, settings):
    now = 0.0

    def perf_counter():
        nonlocal now
        now += 0.001
        return 0.0 if resolution is None else now // resolution * resolution

    monkeypatch.setattr("hf_eagle3.remote_code.decoding_eagle3.time", SimpleNamespace(perf_counter=perf_counter))
    target = make_target("llama")
    for batch in (make_batch([5]), make_batch([5, 9, 7])):
        draft = oracle_of(target, batch, **{**settings, "cache_implementation": None})
        draft.generation_config.tree_policy = "auto"
        drafted = []
        for _ in range(3):
            assert torch.equal(generate(target, batch, assistant_model=draft, **settings), draft.text)
            drafted += draft.last_generation.drafted_lengths
        assert drafted

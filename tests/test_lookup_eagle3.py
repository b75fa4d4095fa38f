"""Tokens that are looked up in the text instead of drafted."""

import random
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    assert_gives_its_text,
    assert_same_text,
    each_once,
    generate,
    lookups_of,
    make_batch,
    make_oracle,
    make_prompt,
    make_target,
    oracle_of,
)

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.remote_code.lookup_eagle3 import MatchCalibration, PromptLookup, TextIndex
from hf_eagle3.remote_code.policy_eagle3 import CallKind, Policy, StepCosts
from hf_eagle3.remote_code.tree_eagle3 import DraftTree, Plan


def make_lookup(texts, num_tokens, calibration):
    lookup = PromptLookup(num_tokens, calibration, vocab_size=96)
    observe(lookup, texts, [False] * len(texts))
    return lookup


def observe(lookup, new_tokens, is_finished):
    was_finished = lookup.is_finished or is_finished
    num_written = [0 if done else len(tokens) for tokens, done in zip(new_tokens, was_finished)]
    accepted = SimpleNamespace(new_tokens=new_tokens, num_written=num_written, is_finished=is_finished)
    lookup.observe(accepted)


def test_finds_where_the_newest_tokens_stood_before():
    random_ = random.Random(0)
    for num_tokens in range(40):
        begin, text = [random_.randrange(4) for _ in range(num_tokens)], []
        index, text = TextIndex(begin), list(begin)
        for _ in range(60):
            place, length = index.place, index.match_length
            seen = {tuple(text[i : i + 2]) for i in range(len(text) - 2)}
            assert (length > 0) == (len(text) >= 2 and tuple(text[-2:]) in seen)
            if length > 0:
                assert 2 <= length <= place < len(text) and text[place - length : place] == text[-length:]
                assert index.next_tokens(3)[0] == text[place]
            token = random_.randrange(4)
            assert index.append(token) == (length > 0 and text[place] == token)
            text.append(token)


def test_a_text_that_goes_round():
    index = TextIndex([9, 5, 6, 7, 5, 6])
    assert index.match_length == 2 and index.next_tokens(8) == [7, 5, 6, 7, 5, 6, 7, 5]
    for token in index.next_tokens(8):
        assert index.append(token)
    assert index.match_length == 10
    assert index.append(8) is False and index.match_length == 0 and index.next_tokens(2) == [8, 8]


@pytest.mark.parametrize("tokens", [[], [3], [3, 3], [3, 4]])
def test_short_texts_have_nothing_to_look_up(tokens):
    index = TextIndex(tokens)
    assert index.match_length == 0 and len(index.next_tokens(4)) in (0, 4)


def test_calibration_of_matches():
    calibration, random_ = MatchCalibration(), random.Random(0)
    assert calibration.probability(2) == calibration.probability(1000) == 0.5
    for _ in range(1000):
        calibration.record(2, random_.random() < 0.2)
        calibration.record(40, True)
    assert (
        abs(calibration.probability(3) - 0.2) < 0.15
        and calibration.probability(4) == 0.5
        and calibration.probability(50) > 0.97
    )


def test_a_batch_comes_as_far_as_its_slowest_row():
    calibration = MatchCalibration()
    for _ in range(1000):
        calibration.record(2, True)
        calibration.record(4, False)
    lookup = make_lookup([[5, 6, 7, 5, 6], [5, 6, 7, 8, 9], [5, 6, 5, 6]], 4, calibration)

    def expected(*unfinished):
        lookup.is_finished = [row not in unfinished for row in range(len(lookup.rows))]
        return [round(tokens, 1) for tokens in lookup.expected_progress(4)]

    # A match of two tokens, and of three after that one, is sure to go on, and one of four is not.
    assert [1, 2, 3, 3, 3] == expected(0) == expected(2)
    assert [1, 1, 1, 1, 1] == expected(1) == expected(0, 1) == expected()
    assert expected(0, 2) == [1, 2, 3, 3, 3]
    expected(0, 1, 2)
    observe(lookup, [[7], [], []], [False] * 3)  # the first row is ahead, and knows no more
    assert expected(0, 2) == [1, 2, 3, 3, 3]
    assert expected(1, 2) == [1, 2, 2, 2, 2]  # the slowest may overtake the one that has nothing to look up
    expected(0, 1, 2)
    observe(lookup, [[], [7, 5, 6], []], [True, False, False])
    lookup.select([1])
    assert [row.next_tokens(2) for row in lookup.rows] == [[7, 8]] and lookup.is_finished == [False]


def test_padding_tells_nothing():
    calibration = MatchCalibration()
    lookup = make_lookup([[5, 6, 7, 5, 6], [3, 4]], 4, calibration)
    observe(lookup, [[2], [5]], [True, False])
    counts = list(calibration.counts)
    for _ in range(20):
        observe(lookup, [[0, 0], []], [True, False])
    assert calibration.counts == counts and len(lookup.rows[0].tokens) == 6


def test_tokens_that_have_no_embedding_are_not_proposed():
    lookup = make_lookup([[5, 6, 500, -3, 5, 6]], 4, MatchCalibration())
    tree = lookup.propose(Plan("lookup", 4, 4), torch.tensor([[6]]))
    assert tree.tokens.tolist() == [[6, 0, 0, 5, 6]] and tree.parents.tolist() == [[0, 0, 1, 2, 3]]


WHOLE = Plan("draft", depth=6, num_nodes=24, branching_factor=8)


def chain(num_nodes):
    return DraftTree.chain(torch.zeros(1, num_nodes, dtype=torch.long))


def record(policy, plan, seconds, draft_seconds=0.0, num_accepted=1):
    accepted = SimpleNamespace(
        counts=[num_accepted], nodes=[list(range(num_accepted))], progress=num_accepted, is_finished=[False]
    )
    policy.record(plan, chain(1 + plan.num_nodes), accepted, [True], draft_seconds, seconds)


def make_policy(sizing, per_node=0.05):
    """That knows what plain steps take and, where those of trees are measured apart, nothing of these."""
    policy = Policy(CallKind(WHOLE, sizing=sizing))
    for num_nodes in (0, 24) if sizing == "priced" else (0,):
        for _ in range(3):
            policy.costs.record(policy.cost_part(None), 1 + num_nodes, 1 + per_node * num_nodes)
    return policy


@pytest.mark.parametrize("sizing", ["priced", "depth"])
def test_a_bad_draft_is_given_up_between_lookups(sizing):
    """After each of which it has more to read than usual."""
    policy, num_drafted = Policy(CallKind(WHOLE, sizing=sizing)), 0
    for step in range(600):
        if step % 2:
            record(policy, Plan("lookup", 24, 24), 1.5)
            continue
        plan = policy.plan([True])
        num_drafted += plan.proposer is not None
        plan = plan._replace(num_nodes=min(plan.num_nodes, 2), depth=min(plan.depth, 2))
        record(policy, plan, 1.2 if plan.proposer else 1.0, 1.5 * (plan.proposer is not None))
    assert 0 < num_drafted < 60


def test_looks_up_as_much_as_pays():
    matches, text = MatchCalibration(), [5, 6, 7, 8, 5, 6]
    cheap, dear, planned = make_policy("priced", 0.05), make_policy("priced", 0.6), make_policy("depth")

    def chosen(policy, text, num_tokens=24):
        plan = policy.plan([True], make_lookup([text], num_tokens, matches))
        return plan.num_nodes if plan.proposer == "lookup" else 0

    assert chosen(Policy(CallKind(WHOLE)), text) == 0
    assert 0 < chosen(cheap, text) < 12 and chosen(dear, text) == 0  # nothing known of matches: half of them go on
    assert chosen(cheap, [5, 6, 7, 8]) == 0 and chosen(cheap, text, num_tokens=1) == 1
    assert chosen(planned, text) == 24
    for _ in range(300):
        for length in (2, 4, 8, 16, 32, 64):
            matches.record(length, True)
    assert chosen(cheap, text) == chosen(dear, text) == 24
    # Not where drafting brings more still.
    dear.trial(1).latest = [(6.0, 1.0)] * 10
    assert chosen(dear, text) == 0
    for _ in range(300):
        matches.record(2, False)
    assert chosen(cheap, text) == 0


def test_a_planned_lookup_is_measured():
    policy, lookup = make_policy("depth"), make_lookup([[5, 6, 7, 5, 6]], 24, MatchCalibration())
    for _ in range(2):
        plan = policy.plan([True], lookup)
        assert plan.proposer == "lookup"
        record(policy, plan, 5.0)
    assert policy.plan([True], lookup).proposer != "lookup"  # five plain steps for two tokens


CYCLE = torch.tensor([[3, 9, 5, 6]])


@pytest.fixture
def cyclic():
    """A target that says 5, 6, 7, 8, 9, 5, ... whatever came before."""
    target = make_target("llama")
    for layer in target.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    embedding, head = target.get_input_embeddings().weight.data, target.lm_head.weight.data
    head.zero_()
    for token in range(5, 10):
        head[token] = 100 * embedding[(token - 6) % 5 + 5]
    return target


@pytest.fixture
def cheap_nodes(monkeypatch):
    """As if a step took as long as another, and a token more nearly nothing."""
    monkeypatch.setattr(StepCosts, "known", lambda self, part: [(1, 1.0), (25, 1.25)])
    monkeypatch.setattr(StepCosts, "seconds", lambda self, part, size: 1 + 0.01 * size)


@pytest.mark.parametrize(
    ("settings", "waits"),
    [
        ({}, True),
        ({"do_sample": True, "temperature": 0.1}, False),
        ({"repetition_penalty": 1.01}, False),
        ({"num_return_sequences": 3, "do_sample": True}, True),
    ],
    ids=["greedy", "sampling", "processors", "batch"],
)
def test_a_text_that_repeats_itself(cyclic, cheap_nodes, monkeypatch, settings, waits):
    if waits:
        for module in ("accept", "decoding", "drafter"):
            monkeypatch.setattr(f"hf_eagle3.remote_code.{module}_eagle3.reads_without_sync", lambda device: False)
    draft = Eagle3ForSpeculation.from_target(cyclic).eval()
    kwargs = {"max_new_tokens": 60, **settings}
    for seed in range(2):
        stats = assert_same_text(cyclic, draft, CYCLE, seed, **kwargs)
    assert stats.lookup_steps > 0 and max(stats.accepted_lengths) == 25
    assert stats.target_forwards < 12 < 60
    assert assert_same_text(cyclic, draft, CYCLE, ours={"prompt_lookup_num_tokens": 0}, **kwargs).lookup_steps == 0


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_draft_that_is_unsure_of_everything_keeps_nobody_from_looking_up(cyclic, sequences):
    """What it takes to verify several tokens is measured all the same."""
    draft = Eagle3ForSpeculation.from_target(cyclic).eval()
    draft.generation_config.assistant_confidence_threshold = 0.99
    stats = assert_same_text(cyclic, draft, CYCLE.expand(sequences, -1), max_new_tokens=90)
    assert stats.lookup_steps >= 3 and max(stats.accepted_lengths) > 1
    # What was looked up, and what was written plainly, is not taken for the draft's.
    assert len(stats.accepted_lengths) == sequences * (stats.target_forwards - 1)
    num_trees = stats.target_forwards - 1 - stats.lookup_steps - stats.plain_steps
    assert len(stats.drafted_lengths) == sequences * num_trees and stats.plain_steps > 0


@pytest.mark.parametrize("sequences", [1, 3])
def test_static_caches_look_up_as_many_tokens_as_a_tree_has(cyclic, cheap_nodes, sequences, verified, monkeypatch):
    monkeypatch.setattr(cyclic, "_compiled_call_impl", cyclic._call_impl)  # as `cyclic.compile()` does
    draft = Eagle3ForSpeculation.from_target(cyclic).eval()
    kwargs = {"max_new_tokens": 60, "cache_implementation": "static"}
    for num_tokens in (24, 23):
        ours = {"prompt_lookup_num_tokens": num_tokens}
        stats = assert_same_text(cyclic, draft, CYCLE.expand(sequences, -1), ours=ours, **kwargs)
        if num_tokens == 24:
            assert stats.lookup_steps > 0 and max(stats.accepted_lengths) == 25
        else:
            assert stats.lookup_steps == 0
    assert {tree.num_nodes for tree in verified} == {1, 25}  # of one shape, for the compiler


def test_no_more_than_the_nodes_of_a_tree(cyclic, cheap_nodes):
    draft = Eagle3ForSpeculation.from_target(cyclic).eval()
    draft.generation_config.num_assistant_tokens = 4
    generate(cyclic, CYCLE, assistant_model=draft, max_new_tokens=40)
    assert draft.last_generation.lookup_steps > 0 and max(draft.last_generation.accepted_lengths) == 5


@pytest.mark.parametrize(
    ("family", "sampling"),
    each_once(
        ["llama", "mistral-window", "gemma3", "llama4", "gpt_oss", "deepseek_v3"],
        [{}, {"do_sample": True, "temperature": 1.5}],
    ),
)
def test_batches_whose_rows_are_far_apart(family, sampling):
    """Looked up, drafted and plain steps in turn, and rows that leave."""
    target, batch = make_target(family), make_batch([5, 40, 17])
    kwargs = {"max_new_tokens": 40, "pad_token_id": 0, **sampling}
    kwargs["eos_token_id"] = generate(target, batch, **kwargs)[0, -20].item()
    draft, num_lookups = oracle_of(target, batch, **kwargs), 0
    draft.generation_config.tree_policy = "auto"
    for seed in range(2):
        with lookups_of(draft.text, seed):
            num_lookups += assert_gives_its_text(draft, target, batch, **kwargs).lookup_steps
    assert num_lookups > 0


def test_placeholders_of_a_prompt_have_no_embedding(cyclic, cheap_nodes):
    """A cache of a prompt that was read as embeddings comes with tokens that may be anything."""
    prompt = torch.tensor([[3, 5, 6, 5000, 5000, -200, 5000, 5000, 8, 9]])
    draft = Eagle3ForSpeculation.from_target(cyclic).eval()
    texts = []
    for assistant in ({}, {"assistant_model": draft}):
        embeddings = cyclic.get_input_embeddings()(prompt.clamp(0, 9))
        with torch.no_grad():
            cache = cyclic(inputs_embeds=embeddings[:, :-1], use_cache=True).past_key_values
        texts.append(cyclic.generate(prompt, past_key_values=cache, max_new_tokens=60, do_sample=False, **assistant))
    assert torch.equal(*texts) and draft.last_generation.lookup_steps > 0


def test_placeholders_beside_embeddings(target):
    """The target reads embeddings. Tokens that come along may be anything."""
    prompt = torch.tensor([[3, 5, 6, 5000, 5000, -200, 5000, 5000, 8, 9]])
    inputs = {"inputs_embeds": target.get_input_embeddings()(prompt.clamp(0, 9))}
    draft = Eagle3ForSpeculation.from_target(target).eval()
    for policy in ("static", "auto"):
        draft.generation_config.tree_policy = policy
        assert_same_text(target, draft, prompt, **inputs)


def test_the_cache_that_is_returned(target):
    prompt = make_prompt(9)
    kwargs = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(prompt, **kwargs)
    draft = make_oracle(target, expected.sequences)
    draft.generation_config.tree_policy = "auto"
    with lookups_of(expected.sequences):
        actual = target.generate(prompt, assistant_model=draft, **kwargs)
    assert draft.last_generation.lookup_steps > 0 and torch.equal(actual.sequences, expected.sequences)
    for layer, expected_layer in zip(actual.past_key_values.layers, expected.past_key_values.layers):
        torch.testing.assert_close(layer.keys, expected_layer.keys, atol=1e-4, rtol=1e-4)

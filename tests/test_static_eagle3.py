"""Static caches: the same text, fixed shapes, nothing compiled twice."""

import copy
import functools
from unittest import mock

import pytest
import torch
from conftest import (
    FAMILIES,
    VOCAB_SIZE,
    assert_an_oracle_gives_the_text,
    assert_same_text,
    each_once,
    generate,
    lookups_of,
    make_batch,
    make_draft,
    make_oracle,
    make_prompt,
    make_target,
    oracle_of,
)
from simulated_graph import SIMULATION, SimulatedGraph
from test_retired_rows import end_token
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache
from transformers.generation import utils

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.baselines import BASELINES
from hf_eagle3.remote_code import drafter_eagle3, verify_eagle3
from hf_eagle3.remote_code.cache_eagle3 import has_keys, with_room
from hf_eagle3.remote_code.drafter_eagle3 import DraftCache, Drafter, can_be_captured
from hf_eagle3.remote_code.outputs_eagle3 import CAN_SELECT_HIDDEN_STATES
from hf_eagle3.remote_code.policy_eagle3 import StaticPolicy
from hf_eagle3.remote_code.tree_eagle3 import Plan


STATIC = {"cache_implementation": "static"}
WARPED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
PROMPTS = [make_prompt(5), make_prompt(40)]  # windows and chunks are of 16 tokens


def compile_config(backend):
    config = CompileConfig(backend=backend, mode=None)
    config._compile_all_devices = True
    return config


@pytest.fixture(scope="module")
def oracle(target):
    """Knows the target's greedy continuation of a prompt of 5."""
    return oracle_of(target, PROMPTS[0], max_new_tokens=64)


@pytest.fixture(autouse=True)
def fixed_shapes(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(verify_eagle3, "reads_without_sync", lambda device: False)


@pytest.mark.parametrize(
    ("family", "settings"), each_once(FAMILIES, [{}, {"do_sample": True, "top_k": 20}, {"repetition_penalty": 1.3}])
)
def test_every_family_says_what_it_says_without_a_draft(family, settings):
    target = make_target(family)
    if family == "llama4" and not CAN_SELECT_HIDDEN_STATES:
        pytest.skip("transformers before 5.23 makes no masks for static caches of Llama 4, with or without a draft")
    oracle = assert_an_oracle_gives_the_text(target, PROMPTS[1], 1, ours=STATIC, **settings)
    assert oracle.last_generation.acceptance_length > 1.5


@pytest.mark.parametrize(
    ("family", "do_sample"), each_once(["llama", "gemma3", "phi3-window", "gemma4-shared-kv"], [False, True])
)
def test_batches(family, do_sample):
    target, batch = make_target(family), make_batch([5, 30, 17])
    draft = make_draft(target, [batch["input_ids"][1:2]])
    stats = assert_same_text(target, draft, batch, seed=3, ours=STATIC, max_new_tokens=30, do_sample=do_sample)
    assert max(stats.accepted_lengths) > 1


def test_long_prompts_after_plain_steps(target):
    """What a draft has to catch up with may be longer than any tree."""
    for inputs in (make_prompt(3), make_prompt(90), make_batch([2, 50, 9])):
        draft = make_draft(target, PROMPTS)  # a new one, because a policy that has seen it fail may not draft
        draft.generation_config.tree_policy = "auto"
        stats = assert_same_text(target, draft, inputs, ours=STATIC, max_new_tokens=80)
        assert stats.plain_steps and stats.drafted_lengths


class DraftsLate(StaticPolicy):
    """Drafts after many plain steps, and perhaps in the first."""

    def __init__(self, max_plan, do_sample, first, num_plain):
        super().__init__(max_plan, do_sample)
        self.first, self.num_plain, self.num_steps = first, num_plain, 0

    def plan(self, behind, lookup=None):
        self.num_steps += 1
        return Plan() if self.first < self.num_steps <= self.first + self.num_plain else self.max_plan


def test_rows_that_are_far_apart(monkeypatch):
    """A row that ran ahead, and ended, has nothing left to read when another one, after many plain steps, has much."""
    policy = functools.partial(DraftsLate, first=14, num_plain=37)
    monkeypatch.setattr("hf_eagle3.remote_code.decoding_eagle3.StaticPolicy", policy)
    target, batch = make_target("llama"), make_batch([4, 4])
    settings = {"max_new_tokens": 70, "pad_token_id": 0}
    ahead, behind = generate(target, batch, **settings).tolist()
    settings["eos_token_id"] = next(
        token for i, token in enumerate(ahead[54:66], 54) if token not in ahead[4:i] + behind[4:]
    )
    known = generate(target, batch, **settings)
    known[1] = known[1].roll(7)
    oracle = make_oracle(target, known)
    oracle.generation_config.update(tree_depth=6, branching_factor=1, num_assistant_tokens=6)
    assert max(assert_same_text(target, oracle, batch, ours=STATIC, **settings).accepted_lengths) > 4


@pytest.mark.parametrize(
    ("cache", "first", "lengths"),
    [({}, 0, [9]), ({}, 3, [2, 9, 5]), (STATIC, 0, [2, 9, 5])],
    ids=["dynamic", "dynamic-batch", "static-batch"],
)
def test_what_a_long_plain_text_leaves_to_read_is_bounded(monkeypatch, target, cache, first, lengths):
    num_unread, observe = [], Drafter.observe

    def noting(self, *args):
        observe(self, *args)
        num_unread.append(len(self.unread))

    monkeypatch.setattr(Drafter, "observe", noting)
    batch = make_batch(lengths)
    draft = make_draft(target, [batch["input_ids"][:1]])
    draft.generation_config.update(tree_depth=3, branching_factor=2, num_assistant_tokens=5)
    # In the second, what was read ahead is all that has to be: the draft says what it says without a limit.
    accepted = []
    for num_plain, limit in ((30, 8), (14, 8), (14, 256)):
        policy = functools.partial(DraftsLate, first=first, num_plain=num_plain)
        monkeypatch.setattr("hf_eagle3.remote_code.decoding_eagle3.StaticPolicy", policy)
        monkeypatch.setattr(Drafter, "MAX_UNREAD", limit)
        num_unread.clear()
        accepted.append(assert_same_text(target, draft, batch, ours=cache, max_new_tokens=60).accepted_lengths)
        assert max(num_unread) == min(limit, num_plain + 1)
        assert max(accepted[-1]) > 1
    if first == 0:
        assert accepted[1] == accepted[2]


@pytest.mark.parametrize("num_slots", [35, 40, 80])
def test_a_cache_of_the_callers_own(target, oracle, num_slots):
    """It may have room for no tree, for some, or for all."""
    cache = StaticCache(config=target.config, max_cache_len=num_slots)
    oracle.generation_config.num_assistant_tokens = 12
    ours = {"past_key_values": cache}
    assert assert_same_text(target, oracle, PROMPTS[0], ours=ours, max_new_tokens=30).target_forwards < 25
    assert int(cache.get_seq_length()) == 34
    if num_slots == 80:  # another turn, with what is left of the cache
        longer = torch.cat([oracle.text[:, :35], make_prompt(3)], dim=1)
        assert_same_text(target, oracle, longer, ours=ours, max_new_tokens=30)


def test_the_returned_cache_can_be_continued_from(target, oracle):
    generate(target, PROMPTS[0], max_new_tokens=64, **STATIC)  # leaves a cache that is large enough
    settings = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 20, **STATIC}
    first = generate(target, PROMPTS[0], assistant_model=oracle, **settings)
    assert len(first.scores) == 20
    longer = torch.cat([first.sequences, make_prompt(1)], dim=1)
    actual = generate(target, longer, past_key_values=first.past_key_values, max_new_tokens=3)
    assert torch.equal(actual, generate(target, longer, max_new_tokens=3))


@pytest.mark.parametrize(
    ("family", "max_new_tokens"),
    each_once(["llama", "gemma3", "mistral-window", "llama4", "gemma4-shared-kv"], [30, 4]),
)
def test_the_returned_cache_is_as_large_as_plain_generates(family, max_new_tokens):
    if family == "llama4" and not CAN_SELECT_HIDDEN_STATES:
        pytest.skip("transformers before 5.23 makes no masks for static caches of Llama 4, with or without a draft")
    target, batch = make_target(family), make_batch([5, 12])
    settings = {"max_new_tokens": max_new_tokens, "return_dict_in_generate": True, **STATIC}
    expected = generate(target, batch, **settings)
    actual = generate(target, batch, assistant_model=oracle_of(target, batch, text=expected.sequences), **settings)
    assert type(actual.past_key_values) is type(expected.past_key_values)
    assert actual.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    for ours, theirs in zip(actual.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert type(ours) is type(theirs)
        if getattr(theirs, "keys", None) is not None:
            assert torch.equal(ours.cumulative_length, theirs.cumulative_length)
            torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours.values, theirs.values, atol=1e-4, rtol=1e-4)


def test_a_prompt_in_chunks_does_not_allocate_a_cache_twice(target, monkeypatch):
    """For it `generate` allocates the cache before, which ours replaces."""
    settings = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "prefill_chunk_size": 4}
    expected = target.generate(PROMPTS[0], **settings, **STATIC)
    draft, given, held = make_oracle(target, expected.sequences), [], []

    def watch(cache, *args):
        given.extend(cache.layers)
        return with_room(cache, *args)

    monkeypatch.setattr(verify_eagle3, "with_room", watch)
    handle = target.register_forward_hook(lambda *args: held.append(sum(map(has_keys, given))))
    actual = target.generate(PROMPTS[0], assistant_model=draft, **settings, **STATIC)
    handle.remove()
    assert len(given) == 4 and len(held) > 2 and not any(held)
    assert torch.equal(actual.sequences, expected.sequences)
    for ours, theirs in zip(actual.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert ours is given.pop(0) and torch.equal(ours.cumulative_length, theirs.cumulative_length)
        torch.testing.assert_close((ours.keys, ours.values), (theirs.keys, theirs.values), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.8 compiles again for each new static cache")
@pytest.mark.parametrize("policy", ["static", "auto"])
def test_nothing_is_compiled_twice(policy):
    numbers = []

    def backend(graph, inputs):
        places = [node for node in graph.graph.nodes if node.op == "placeholder"]
        numbers.append(
            [place._dynamo_source.name for place, each in zip(places, inputs) if type(each) is torch.SymInt]
        )
        return graph

    target = make_target("llama", num_hidden_layers=1)
    draft = make_draft(target, PROMPTS)
    draft.generation_config.update(tree_depth=3, branching_factor=2, num_assistant_tokens=5, tree_policy=policy)
    torch._dynamo.reset()
    counters.clear()
    ours = {"compile_config": compile_config(backend), **STATIC}
    assert_same_text(target, draft, make_prompt(40), ours=ours)
    assert_same_text(target, draft, make_prompt(40), 1, ours, do_sample=True)
    graphs = counters["stats"]["unique_graphs"]
    # Plain steps, if there are any, and verification.
    assert graphs <= 2 and not counters["graph_break"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (2, 40):
            prompt, sampling = make_prompt(length, seed=length), {"do_sample": True, "temperature": 1 + 1 / length}
            assert_same_text(target, draft, prompt, ours=ours)
            assert_same_text(target, draft, prompt, length, ours, **sampling)
    assert counters["stats"]["unique_graphs"] <= 2
    assert policy == "auto" or graphs == 1 and max(draft.last_generation.accepted_lengths) > 1
    # Kernels for trees of any size would be slower, and take longer to compile.
    names = {str(name() if callable(name) else name) for each in numbers for name in each}
    assert len(numbers) >= graphs and not any("input_ids" in name or "attention_mask" in name for name in names), names


def test_the_state_after_the_last_layer_is_compiled():
    """It is kept by hooks, which are in the graph."""
    target, layer_ids = make_target("llama", num_hidden_layers=1), [0, 1]
    draft = Eagle3ForSpeculation.from_target(target, eagle_aux_hidden_state_layer_ids=layer_ids).eval()
    draft.generation_config.update(tree_depth=1, branching_factor=2, num_assistant_tokens=2, tree_policy="static")
    counters.clear()
    ours = {"compile_config": compile_config("eager"), **STATIC}
    assert_same_text(target, draft, make_prompt(9), ours=ours, max_new_tokens=4)
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]


def test_a_compiler_s_settings_without_effect(target, oracle, monkeypatch):
    """transformers says so, for caches that are not static and devices that it does not compile for."""
    said, settings = [], {"compile_config": CompileConfig(), "max_new_tokens": 8, "do_sample": False}
    monkeypatch.setattr(utils.logger, "warning_once", lambda message, *args: said[-1].add(message))
    for assistant in ({}, {"assistant_model": oracle}):
        said.append(set())
        target.generate(PROMPTS[0], **settings, **assistant)
    assert said[0] == said[1] and any("`compile_config`" in message for message in said[0])


def makes_streams():
    try:
        torch.Stream()
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(
    not makes_streams(), reason="transformers offloads by streams, of which torch for CUDA has none without it"
)
def test_offloaded_static_caches_are_refused(target, oracle):
    with pytest.raises(ValueError, match="does not offload"):
        target.generate(PROMPTS[0], assistant_model=oracle, cache_implementation="offloaded_static", max_new_tokens=4)


def test_static_caches_of_the_callers_own_that_have_windows_are_refused():
    windows = make_target("gemma3")
    draft = make_draft(windows, PROMPTS)
    cache = StaticCache(config=windows.config, max_cache_len=64)
    with pytest.raises(ValueError, match="StaticSlidingWindowLayer layers.*cache_implementation='static'"):
        windows.generate(PROMPTS[0], assistant_model=draft, past_key_values=cache, max_new_tokens=4)


@pytest.fixture
def waiting_host(monkeypatch):
    """As if each look at a tensor had to wait for an accelerator. Counts the looks."""
    looks = []
    for module in ("accept", "decoding", "drafter"):
        monkeypatch.setattr(f"hf_eagle3.remote_code.{module}_eagle3.reads_without_sync", lambda device: False)
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero"):
        original = getattr(torch.Tensor, name)

        def look(self, *args, original=original, name=name, **kwargs):
            looks.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, look)
    return looks


@pytest.mark.parametrize(
    ("cache", "policy", "sampling"),
    [({}, "static", {}), ({}, "auto", WARPED), (STATIC, "static", WARPED), (STATIC, "auto", {})],
    ids=["dynamic-static-greedy", "dynamic-auto-sampling", "static-static-sampling", "static-auto-greedy"],
)
def test_a_step_waits_for_the_device_once(waiting_host, target, cache, policy, sampling):
    if policy == "auto" and not CAN_SELECT_HIDDEN_STATES:
        pytest.skip("plain steps of transformers before 5.23 look at their masks")
    draft, prompt = make_draft(target, PROMPTS), make_prompt(40)
    draft.generation_config.tree_policy = policy
    settings = {"seed": 5, "max_new_tokens": 60, **sampling}
    expected = generate(target, prompt, **settings)
    waiting_host.clear()
    actual = generate(target, prompt, assistant_model=draft, **cache, **settings)
    # Some more before the first step, one of them to know the prompt that may be looked up in.
    assert len(waiting_host) <= draft.last_generation.target_forwards + 13
    assert torch.equal(actual, expected)
    assert policy == "auto" or max(draft.last_generation.accepted_lengths) > 1


def test_walks_at_once_meet_broken_probabilities(waiting_host, target, draft):
    broken = copy.deepcopy(target)
    broken.lm_head.weight.data[3] = torch.inf
    with pytest.raises(RuntimeError, match="inf"):
        broken.generate(PROMPTS[0], max_new_tokens=5, do_sample=True, remove_invalid_values=False)
    with pytest.raises(RuntimeError, match="inf"):
        broken.generate(PROMPTS[0], max_new_tokens=5, do_sample=True, assistant_model=draft)


def test_walks_at_once_do_not_process_scores_that_are_not_visited(waiting_host, target, monkeypatch):
    """`eta_cutoff` raises if any are NaN, as those of drafted tokens may be, until something imports torch's compiler."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    broken, prompt, unsaid = copy.deepcopy(target), PROMPTS[0] % 70, range(70, VOCAB_SIZE)
    broken.lm_head.weight.data[unsaid] = 0
    settings = {"max_new_tokens": 12, "do_sample": True, "top_k": 20, "eta_cutoff": 0.01}
    torch.manual_seed(0)
    expected = broken.generate(prompt, **settings)
    broken.get_input_embeddings().weight.data[unsaid] = torch.nan
    draft = Eagle3ForSpeculation.from_target(broken, unsaid).eval()
    draft.generation_config.tree_policy = "static"
    torch.manual_seed(0)
    assert torch.equal(broken.generate(prompt, **settings, assistant_model=draft), expected)


@pytest.fixture
def graphs(monkeypatch, waiting_host):
    """As on a CUDA device, where the draft is captured, and what static caches keep."""
    for module in ("cache", "decoding", "drafter"):
        monkeypatch.setattr(f"hf_eagle3.remote_code.{module}_eagle3.captures_graphs", lambda device: True)
    for name, value in SIMULATION.items():
        monkeypatch.setattr(name, value)
    monkeypatch.setattr(SimulatedGraph, "made", [])
    monkeypatch.setattr(SimulatedGraph, "has_failed", False)
    return SimulatedGraph.made


@pytest.mark.parametrize(
    ("kind", "sampling", "rows"),
    each_once(
        [("llama", {}), ("gemma3", {}), ("qwen3_5", {}), ("llama", STATIC), ("gemma3", STATIC)],
        [{}, {"do_sample": True, "temperature": 0.8, "top_k": 20}],
        [([40], "static"), ([40, 3, 17], "static"), ([40, 3, 17], "auto")],
    ),
)
def test_a_draft_that_is_captured(graphs, kind, sampling, rows):
    (family, cache), (lengths, policy) = kind, rows
    target, batch = make_target(family), make_batch(lengths)
    draft = make_draft(target, [make_prompt(9)], num_tokens=8)
    draft.generation_config.tree_policy = policy
    assert_same_text(target, draft, batch, seed=5, ours=cache, max_new_tokens=40, **sampling)
    if policy == "static":
        is_chain = family == "qwen3_5"  # shorter ones may be drafted there: they are not captured
        assert sum(graph.num_replays for graph in graphs) > 5 or is_chain
        assert len(graphs) <= 3  # one more where the draft's slots are moved to make room
        if cache and len(lengths) == 1:  # the draft, and what the cache keeps
            assert len(graphs) == 2 and min(graph.num_replays for graph in graphs) > 5


def test_the_next_call_takes_the_graph_of_the_last_one(graphs, target):
    draft, prompts = (
        make_draft(target, PROMPTS),
        [make_prompt(9), make_prompt(11, seed=1), make_prompt(9).repeat(2, 1)],
    )
    numbers = []
    for prompt in (*prompts, prompts[1], prompts[2]):
        assert_same_text(target, draft, prompt)
        numbers.append(len(graphs))
    assert numbers == [1, 1, 2, 2, 2]  # one for each number of rows
    generate(target, prompts[0], assistant_model=draft, do_sample=True, top_k=20)
    assert len(graphs) == 3  # this one takes noise, too
    for number in (4, 4):
        generate(target, prompts[0], assistant_model=draft)
        assert len(graphs) == number
    draft.set_output_embeddings(copy.deepcopy(draft.get_output_embeddings()))
    generate(target, prompts[0], assistant_model=draft)
    assert len(graphs) == 5  # the weights are elsewhere
    handle = draft.layers[0].register_forward_hook(lambda *_: None)
    for number in (6, 7):
        generate(target, prompts[0], assistant_model=draft)
        assert len(graphs) == number  # a hook may do anything, and is no part of a graph
    handle.remove()


def test_the_slots_that_a_graph_keeps(graphs, target):
    """They are zeroed, because NaNs pass through any mask. A call takes them if they are enough, and not far too many."""
    draft, prompt = make_draft(target, PROMPTS), make_prompt(9)
    lengths = assert_same_text(target, draft, prompt).accepted_lengths
    (kept,) = drafter_eagle3._KEPT[draft].values()
    assert max(lengths) > 1 and kept.num_slots == 256
    for states in (*kept.keys, *kept.values):
        states.fill_(torch.nan)
    assert assert_same_text(target, draft, prompt).accepted_lengths == lengths and len(graphs) == 1
    for length, number in ((300, 2), (9, 2)):
        assert_same_text(target, draft, make_prompt(length))
        assert len(graphs) == number
    for num_slots, is_taken in ((257, False), (256, True), (64, True), (63, False)):
        kept.keep(draft)
        assert (DraftCache.take(draft, 1, num_slots, kept.conditions) is kept) == is_taken


@pytest.mark.parametrize("what", ["autocast", "large", "quantized"])
def test_graphs_that_are_not_kept(graphs, target, monkeypatch, what):
    draft, prompt = make_draft(target, PROMPTS), make_prompt(9)
    if what == "autocast":  # it frees the weights that it has cast
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": device == "cuda")
    elif what == "large":
        monkeypatch.setattr("hf_eagle3.remote_code.drafter_eagle3.MOST_BYTES", 2**10)
    else:
        weight = draft.norm.weight.detach().as_subclass(type("Quantized", (torch.Tensor,), {}))
        draft.norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    for number in (1, 2):
        generate(target, prompt, assistant_model=draft)
        assert len(graphs) == number


def test_the_smallest_of_many_graphs_is_dropped(graphs, target, monkeypatch):
    monkeypatch.setattr("hf_eagle3.remote_code.drafter_eagle3.MOST_KEPT", 2)
    draft, numbers = make_draft(target, PROMPTS), []
    for num_rows in (2, 3, 1, 4, 3, 4):
        generate(target, make_prompt(9).repeat(num_rows, 1), assistant_model=draft)
        numbers.append(len(graphs))
    assert numbers == [1, 2, 3, 4, 4, 4]


def test_static_trees_of_eagle_are_not_captured(graphs, target):
    draft = BASELINES["eagle"].make_draft(target)
    assert draft.config.static_tree is not None and not can_be_captured(draft, target.get_input_embeddings())


def test_calls_at_the_same_time_do_not_share_a_graph(graphs, target):
    draft, prompt = make_draft(target, PROMPTS), make_prompt(9)
    assert_same_text(target, draft, prompt)
    propose, texts, proposed = Drafter.propose, [], []

    def propose_beside_another_call(self, *args):
        proposed.append(self)
        if len(proposed) == 3:
            texts.append(generate(target, prompt, assistant_model=draft))
        return propose(self, *args)

    with mock.patch.object(Drafter, "propose", propose_beside_another_call):
        texts.append(generate(target, prompt, assistant_model=draft))
    assert [text.tolist() for text in texts] == [generate(target, prompt).tolist()] * 2
    assert len(graphs) == 2  # one of them found none


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 20}], ids=["greedy", "sampling"])
def test_rows_that_leave_do_not_make_new_graphs(graphs, target, sampling):
    batch = make_batch([5, 40, 17, 9, 25, 13, 8, 30], seed=3)
    settings = {"seed": 1, "pad_token_id": 0, **sampling, "max_new_tokens": 48}
    settings["eos_token_id"] = end_token(batch, generate(target, batch, **settings))
    draft = make_draft(target, [batch["input_ids"]])
    draft.generation_config.tree_policy, draft.generation_config.output_steps = "static", True
    for _ in range(2):
        assert len({len(step.rows) for step in assert_same_text(target, draft, batch, **settings).steps}) > 3
    assert {len(graph.inputs[0]) for graph in graphs} <= {8, 4, 2, 1}
    assert len(graphs) <= 4


def test_a_captured_draft_beside_short_lookups(graphs, target):
    draft, prompt = make_draft(target, PROMPTS), make_prompt(9)
    draft.generation_config.tree_policy = "auto"
    text = generate(target, prompt, max_new_tokens=60)
    for num_tokens in (1, 10, 24):
        with lookups_of(text):
            ours = {"prompt_lookup_num_tokens": num_tokens}
            assert assert_same_text(target, draft, prompt, ours=ours, max_new_tokens=60).lookup_steps > 0
    assert any(graph.num_replays > 0 for graph in graphs)


def test_a_capture_that_fails(monkeypatch, graphs, target, caplog):
    def fail(self, function, inputs, stream):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(SimulatedGraph, "__init__", fail)
    draft = make_draft(target, PROMPTS)
    for _ in range(2):
        assert_same_text(target, draft, make_prompt(40))
    assert SimulatedGraph.has_failed

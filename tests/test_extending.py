"""Other proposers than an EAGLE-3 draft: the text stays that of plain `generate`."""

import re
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import assert_same_text, generate, make_batch, make_draft, make_prompt, make_target
from transformers import GenerationConfig, GenerationMixin

from hf_eagle3 import AssistantMixin, DraftTree, Proposer
from hf_eagle3.remote_code import assistant_eagle3


EXAMPLE = re.search(r"```py\n(.*?)```", (Path(__file__).parents[1] / "docs" / "extending.md").read_text(), re.S)[1]


class SmallModelProposer(Proposer):
    """A causal language model proposes a tree: its best next tokens, and what it says greedily after each of them."""

    def __init__(self, model):
        self.model, self.rows = model, []

    def observe(self, accepted):
        self.rows = self.rows or [[] for _ in accepted.new_tokens]
        for row, tokens in zip(self.rows, accepted.new_tokens):
            row += tokens

    def select(self, rows):
        self.rows = [self.rows[row] for row in rows]

    def propose(self, plan, root_tokens, sampler=None):
        width = 1 if plan.branching_factor == 1 else max(min(3, plan.num_nodes // plan.depth), 1)
        trees = [self.tree_of(row, plan.depth, width) for row in self.rows]
        tokens = torch.tensor([[row[-1], *tree] for row, tree in zip(self.rows, trees)])
        parents = [0] + [0 if i % plan.depth == 0 else i for i in range(width * plan.depth)]
        return DraftTree.from_parents(tokens, torch.tensor([parents] * len(tokens)))

    def tree_of(self, row, depth, width):
        nodes = []
        for token in self.model(torch.tensor([row])).logits[0, -1].topk(width).indices.tolist():
            branch = [token]
            while len(branch) < depth:
                branch.append(int(self.model(torch.tensor([row + branch])).logits[0, -1].argmax()))
            nodes += branch
        return nodes


class SmallModelAssistant(AssistantMixin):
    def __init__(self, model):
        self.model, self.generation_config = model, GenerationConfig()

    def proposer(self, call):
        return SmallModelProposer(self.model)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_assistant_that_was_left_on_another_device(monkeypatch, device):
    said, target, prompt = [], make_target("llama"), make_prompt(5)
    monkeypatch.setattr(assistant_eagle3.logger, "warning_once", said.append)
    assistant = SmallModelAssistant(target)
    assistant.device = torch.device(device)
    target.generate(prompt, assistant_model=assistant, max_new_tokens=2, do_sample=False)
    expected = ["on cuda and the target on cpu, so drafting is slow. Move the assistant"] * (device == "cuda")
    assert [each[each.index("on ") :].partition(":")[0] for each in said] == expected


def make_assistant(kind, target, **settings):
    if kind == "bigrams":
        scope = {"target": target, "inputs": {"input_ids": make_prompt(6), "do_sample": False}}
        exec(EXAMPLE, scope)
        assistant = scope["BigramAssistant"]()
        assistant.generation_config = GenerationConfig()
    else:
        small = make_target("llama", num_hidden_layers=2)
        small.load_state_dict(target.state_dict(), strict=False)  # the target's first layers
        assistant = SmallModelAssistant(small)
    assistant.generation_config.update(**{"tree_policy": "static", "tree_depth": 3, **settings})
    return assistant


def make_knowing_assistant(target):
    """Its small model is the target itself."""
    assistant = SmallModelAssistant(target)
    assistant.generation_config.update(tree_policy="static", tree_depth=3, num_assistant_tokens=9)
    return assistant


def test_the_example_is_short_and_runs():
    target = make_target("llama")
    scope = {"target": target, "inputs": {"input_ids": make_prompt(6), "do_sample": False}}
    exec(EXAMPLE, scope)
    assert torch.equal(scope["text"], target.generate(make_prompt(6), do_sample=False, max_new_tokens=64))
    code = EXAMPLE[EXAMPLE.index("class BigramProposer") : EXAMPLE.index("text = ")]
    assert len([line for line in code.splitlines() if line.strip()]) <= 40


@pytest.mark.parametrize(
    ("settings", "kind", "policy", "lengths"),
    [
        ({}, "small model", "static", [9]),
        ({"do_sample": True, "temperature": 0.8}, "bigrams", "static", [12, 5, 17]),
        ({"repetition_penalty": 1.3}, "bigrams", "auto", [9]),
        ({"cache_implementation": "static"}, "bigrams", "static", [12, 5, 17]),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "small model", "auto", [9]),
    ],
    ids=["greedy", "sampling", "processors", "static", "returned"],
)
def test_the_text_is_that_of_plain_generate(settings, kind, policy, lengths):
    target, batch = make_target("llama"), make_batch(lengths)
    assistant = make_assistant(kind, target, tree_policy=policy)
    settings = {"max_new_tokens": 16, "eos_token_id": [7, 8], "pad_token_id": 0, **settings}
    stats = assert_same_text(target, assistant, batch, 3, **settings)
    assert stats.target_forwards == 1 + len(stats.accepted_lengths) or len(lengths) > 1


@pytest.mark.parametrize("family", ["gemma3", "llama4", "lfm2", "qwen3_5"])
def test_other_families(family):
    target, batch = make_target(family), make_batch([9, 20])
    assert assert_same_text(target, make_assistant("bigrams", target), batch, max_new_tokens=40).drafted_lengths
    assert assert_same_text(target, make_knowing_assistant(target), make_prompt(9)).acceptance_length > 1.5


def test_targets_get_no_other_arguments_than_without_it():
    """The forward of a target of your own may take no others. The proposer reads no states, so none are asked for."""
    target, prompt, given = make_target("llama"), make_prompt(9), []
    bigrams = make_assistant("bigrams", target)
    handle = target.register_forward_pre_hook(lambda module, args, kwargs: given[-1].update(kwargs), with_kwargs=True)
    for assistant in ({}, {"assistant_model": bigrams}):
        given.append(set())
        generate(target, prompt, attention_mask=torch.tensor([[0] + [1] * 8]), **assistant)
    handle.remove()
    assert given[0] == given[1]


def test_a_small_model_gets_tokens_accepted():
    target, prompt = make_target("llama"), make_prompt(9)
    assistant = make_knowing_assistant(target)
    generate(target, prompt, max_new_tokens=40, assistant_model=assistant)
    assert assistant.last_generation.acceptance_length > 3.5


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize(
    ("make_tree", "error", "message"),
    [
        (lambda root: None, TypeError, "must propose a `DraftTree`, not NoneType"),
        (lambda root: root, TypeError, "must propose a `DraftTree`, not Tensor"),
        (lambda root: DraftTree.chain(torch.cat([root + 1, root], dim=1) % 96), ValueError, "begin with its root"),
        (lambda root: DraftTree.chain(root[:1].repeat(1, 3)), ValueError, "begin with its root"),  # of one row
        (lambda root: DraftTree.from_parents(root.repeat(1, 3), torch.zeros(2, 3, dtype=torch.long)), ValueError, "a `branching_factor` of 1, but the proposed tree is no chain"),
        (lambda root: DraftTree.chain(root.repeat(1, 30)), ValueError, "room for 24 nodes below the root, in 3 levels, but the proposed tree has 29 in 29"),
    ],
)  # fmt: skip
def test_trees_that_would_change_the_text(family, make_tree, error, message):
    class Careless(Proposer):
        def propose(self, plan, root_tokens, sampler=None):
            return make_tree(root_tokens)

    class CarelessAssistant(AssistantMixin):
        generation_config = GenerationConfig(tree_policy="static")

        def proposer(self, call):
            return Careless()

    takes_it = "no chain" in message and family == "llama"
    with nullcontext() if takes_it else pytest.raises(error, match=message):
        batch = make_batch([7, 7])
        make_target(family).generate(**batch, assistant_model=CarelessAssistant(), max_new_tokens=5, do_sample=False)


def test_an_assistant_may_refuse_a_target():
    class Choosy(AssistantMixin):
        def validate_target(self, target):
            raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        make_target("llama").generate(make_prompt(5), assistant_model=Choosy())


def test_settings_are_checked_before_anything_runs(target, draft):
    """Else a caller's cache would be filled already."""
    calls = []
    handle = target.register_forward_hook(lambda *args: calls.append(1))
    config = GenerationConfig(max_new_tokens=5, do_sample=False)
    config.tree_policy = "fastest"
    with pytest.raises(ValueError, match="`tree_policy` must be"):
        target.generate(make_prompt(5), generation_config=config, assistant_model=draft)
    handle.remove()
    assert calls == []


def test_the_assistant_says_what_it_may_replay(monkeypatch):
    """Also where an older copy of the code, with a shorter list, was loaded first."""
    target, prompt = make_target("qwen3_5"), make_prompt(9)
    draft = make_draft(target, [prompt])
    older = GenerationMixin._assisted_decoding
    assert older._decodes_with_assistant
    monkeypatch.setattr(assistant_eagle3, "REPLAYABLE_MODEL_TYPES", ())  # of the copy that has the hook
    monkeypatch.setattr(type(draft), "may_replay", lambda self, target: True, raising=False)
    assert_same_text(target, draft, prompt)


def test_a_hook_of_older_code_is_extended(monkeypatch):
    """It asks nobody what may be replayed."""

    def validate_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        if self._is_stateful and "assistant_model" in generation_mode_kwargs:
            raise ValueError("assisted generation is not supported with stateful models")

    monkeypatch.setattr(GenerationMixin, "_validate_generation_mode", validate_mode)
    monkeypatch.setattr(GenerationMixin, "generate", GenerationMixin.generate.__wrapped__)  # nor tells of drafts
    assistant_eagle3.install_generation_hook()
    assert GenerationMixin.generate._serves_assistants
    installed = GenerationMixin._validate_generation_mode
    assistant_eagle3.install_generation_hook()
    assert GenerationMixin._validate_generation_mode is installed is not validate_mode
    target, prompt = make_target("qwen3_5"), make_prompt(9)
    assert_same_text(target, make_draft(target, [prompt]), prompt)


def test_the_last_call_is_that_of_the_thread_itself(target, draft):
    """Threads that end leave their ident to others."""
    seen = []

    def call(num_tokens):
        if num_tokens:
            target.generate(make_prompt(5), max_new_tokens=num_tokens, do_sample=False, assistant_model=draft)
        seen.append(draft.last_generation.new_tokens)

    def in_thread(num_tokens):
        thread = threading.Thread(target=call, args=(num_tokens,))
        thread.start()
        thread.join()

    in_thread(7)
    call(9)
    in_thread(0)  # made no call: the last of any thread
    call(0)
    assert seen == [7, 9, 9, 9]

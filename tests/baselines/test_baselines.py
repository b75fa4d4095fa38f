"""Drafts of other methods: what they propose is what they were trained to, and the text is the target's."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    BLOCK_DRAFTS,
    VOCAB_SIZE,
    assert_same_text,
    features_of,
    generate,
    make_baseline,
    make_batch,
    make_prompt,
    make_target,
    run_in_two_processes,
)
from trainers import TEXTS, losses, make_trainer
from transformers import AutoModel

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.baselines import BASELINES, best_static_tree, measure_accuracies
from hf_eagle3.baselines.static_tree import grow_static_tree, part_of_tree
from hf_eagle3.checkpoints import describe_engines
from hf_eagle3.hub import render_card
from hf_eagle3.remote_code.policy_eagle3 import Calibration
from hf_eagle3.remote_code.tree_eagle3 import GenerationCall, Plan
from hf_eagle3.training import ttt
from hf_eagle3.training.models import draft_to_train
from hf_eagle3.training.rollouts import DraftLearner
from hf_eagle3.training.target_states import TargetStates
from hf_eagle3.training.ttt import draft_loss, ttt_unroll


BY_LEVEL = [method for method in BASELINES if method not in BLOCK_DRAFTS]
METHODS = [*BY_LEVEL, "eagle-2", "p-eagle"]
ALL_METHODS = [*METHODS, *BLOCK_DRAFTS]
DEPTH = 4


def unroll_of(draft, batch, steps):
    return draft.unroll(batch, steps) if hasattr(draft, "unroll") else ttt_unroll(draft, batch, steps)


class Observed:
    """What a proposer is told of a prompt of which the first new token is known."""

    def __init__(self, tokens, aux):
        self.tokens, self.states, self.counts = tokens[:, 1:], aux, [aux.shape[1]] * len(aux)
        self.positions = torch.arange(aux.shape[1]).expand(len(aux), -1)


def propose(target, draft, tokens, plan):
    """The tree below the last of some tokens `(B, L)`."""
    aux, _ = TargetStates(target, draft.resolve_aux_layer_ids(target))({"input_ids": tokens[:, :-1]})
    proposer = draft.proposer(GenerationCall(target, target.get_input_embeddings(), plan, 0.0, Calibration(1.0), None))
    proposer.observe(Observed(tokens, aux))
    return proposer.propose(plan, tokens[:, -1:])


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_drafting_is_what_training_unrolls(method):
    """Along the draft's own chain: the tokens of each step are the best of the unroll's row at the prompt's end."""
    target, tokens = make_target("llama"), make_prompt(9, batch_size=2)
    draft = make_baseline(method, target)
    draft.config.static_tree = None  # one that follows confidences tells them
    tree = propose(target, draft, tokens, Plan("draft", DEPTH, DEPTH))
    assert tree.tokens.shape == (2, 1 + DEPTH)
    text = torch.cat([tokens, tree.tokens[:, 1:]], dim=1)
    batch = features_of(target, draft, text)
    chosen = []
    for step, (states, head, *_) in enumerate(unroll_of(draft, batch, DEPTH)):
        log_probs, best = head(states)[:, tokens.shape[1] - 2].log_softmax(-1).max(-1)
        chosen.append(draft.draft_token_ids[best])
        torch.testing.assert_close(tree.confidences[:, step], log_probs, atol=1e-4, rtol=1e-4)
    assert torch.equal(torch.stack(chosen, dim=1), tree.tokens[:, 1:])
    assert len(set(map(tuple, tree.tokens[:, 1:].tolist()))) == 2  # not the same whatever was read


@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle"])
@torch.no_grad()
def test_static_trees_are_those_of_the_ranks_on_each_path(method):
    """Each path of the tree, drafted alone."""
    target, tokens = make_target("llama"), make_prompt(9, batch_size=2)
    draft = make_baseline(method, target)
    paths = [(0,), (1,), (0, 0), (2,), (0, 1), (2, 0), (0, 1, 0), (0, 1, 1)]
    draft.config.static_tree = [list(path) for path in paths]
    tree = propose(target, draft, tokens, Plan("draft", 3, 8, branching_factor=3))
    assert tree.parents.tolist() == [[0, 0, 0, 0, 1, 1, 3, 5, 5]] * 2 and tree.max_depth == 3
    order = sorted(paths, key=len)
    for node, path in enumerate(order, start=1):
        text = tokens
        for rank in path:
            batch = features_of(target, draft, torch.cat([text, text[:, :1]], dim=1))
            step = text.shape[1] - tokens.shape[1]
            *_, (states, head, *_) = draft.unroll(batch, 1 + step)
            best = head(states)[:, tokens.shape[1] - 2].topk(3).indices[:, rank]
            text = torch.cat([text, draft.draft_token_ids[best][:, None]], dim=1)
        assert torch.equal(tree.tokens[:, node], text[:, -1]), path


def test_parts_of_static_trees():
    tree = best_static_tree(torch.tensor([[0.6, 0.3, 0.05], [0.5, 0.2, 0.1], [0.4, 0.3, 0.2]]), num_nodes=20)
    for depth, num_nodes, width in itertools.product((1, 2, 3), (1, 4, 20), (1, 2, 3)):
        paths = part_of_tree(tree, Plan("draft", depth, num_nodes, width))
        assert all(path[:-1] in {(), *paths} for path in paths) and len(paths) <= num_nodes
        assert all(len(path) <= depth and max(path) < width for path in paths)
        assert paths == sorted(paths, key=len)
        if width == 1:
            assert paths == [(0,) * n for n in range(1, len(paths) + 1)]


def test_the_best_static_tree_is_the_best_of_all():
    generator = torch.Generator().manual_seed(0)

    def value(tree, accuracies):
        return sum(torch.stack([accuracies[i, rank] for i, rank in enumerate(path)]).prod().item() for path in tree)

    for _ in range(5):
        accuracies = torch.rand(3, 3, generator=generator).sort(dim=1, descending=True).values
        accuracies /= accuracies.sum(dim=1, keepdim=True)

        nodes = [path for length in (1, 2, 3) for path in itertools.product(range(3), repeat=length)]
        closed = [tree for tree in itertools.combinations(nodes, 4) if all(path[:-1] in {(), *tree} for path in tree)]
        best = max(value(tree, accuracies) for tree in closed)
        assert value(best_static_tree(accuracies, 4), accuracies) == pytest.approx(best)


def test_static_trees_that_are_wider_than_the_branching_factor():
    target, prompt = make_target("llama"), make_prompt(27)
    draft = make_baseline("eagle", target)
    ours = {"tree_policy": "static", "num_assistant_tokens": 54, "tree_depth": 4}
    assert_same_text(target, draft, prompt, max_new_tokens=11, ours=ours)


def test_static_trees_with_fewer_tokens_than_ranks():
    logits = torch.tensor([[0.1, 0.9]])
    tree = grow_static_tree([[0], [1], [2]], torch.tensor([[5]]), logits, logits, None, None, Plan("draft", 1, 3, 3))
    assert tree.tokens.tolist() == [[5, 1, 0, 0]]


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_measured_accuracies_are_shares_of_rows(method):
    target = make_target("llama")
    draft = make_baseline(method, target)
    batches = [features_of(target, draft, make_prompt(12, batch_size=2, seed=seed)) for seed in (0, 1)]
    measured = measure_accuracies(draft, batches, depth=2, width=3, max_logits=500)  # in several pieces
    hits, rows = torch.zeros(2, 3), torch.zeros(2)
    for batch in batches:
        for step, (states, head, *_) in enumerate(draft.unroll(batch, 2)):
            for row, t in itertools.product(range(2), range(12 - 2 - step)):
                ranked = draft.draft_token_ids[head(states)[row, t].argsort(descending=True)[:3]]
                hits[step] += ranked == batch.target_tokens[row, t + 1 + step]
                rows[step] += 1
    torch.testing.assert_close(measured.float(), hits / rows[:, None])
    assert hits.sum() > 0


SETTINGS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "static": {"cache_implementation": "static"},
    "returned": {"return_dict_in_generate": True, "output_scores": True},
}
CALLS = [("static", [12, 5, 17]), ("auto", [9])]
# Proposers: heads, a static tree, a dynamic one in one pass, and a block without and with a Markov head.
PROPOSERS = ["hydra", "eagle", "p-eagle", "dflash", "dspark"]


@pytest.mark.parametrize(
    ("method", "kind", "policy", "lengths"),
    [
        (method, kind, *CALLS[(i + j) % 2])  # each meets each method and each kind
        for (i, method), (j, kind) in itertools.product(enumerate(PROPOSERS), enumerate(SETTINGS))
    ],
)
def test_the_text_is_that_of_plain_generate(method, kind, policy, lengths):
    target = make_target("llama")
    draft = make_baseline(method, target)
    draft.generation_config.tree_policy = policy
    assert_same_text(
        target, draft, make_batch(lengths), 3, max_new_tokens=16, eos_token_id=[7], pad_token_id=0, **SETTINGS[kind]
    )


@pytest.mark.parametrize("method", ALL_METHODS)
def test_small_vocabularies_and_half_precision(method):
    target, batch = make_target("llama"), make_batch([12, 5])
    draft = make_baseline(method, target, draft_token_ids=torch.arange(3, VOCAB_SIZE, 2))
    tree = propose(target, draft, batch["input_ids"][:1], Plan("draft", DEPTH, 12, 3))
    assert set(tree.tokens[0, 1:].tolist()) <= set(range(3, VOCAB_SIZE, 2))
    assert_same_text(target, draft, batch)
    # Rounding may turn ties; a draft of the target's dtype is read and asked all the same.
    target, draft = make_target("llama").bfloat16(), draft.bfloat16()
    draft.generation_config.tree_policy = "static"
    generate(target, batch, assistant_model=draft)
    assert draft.last_generation.drafted_lengths


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *zip(["gemma3", "qwen3_5"] * 2, ["hydra", "eagle-2", "p-eagle", "dflash"]),
        *zip(["cohere2", "llama4", "gpt_oss", "lfm2"], ["p-eagle", "dflash", "hydra", "eagle-2"]),
    ],
)
def test_other_families(family, method):
    target = make_target(family)
    assert_same_text(target, make_baseline(method, target), make_batch([9, 20]))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma4-shared-kv", "cohere2", "llama4", "opt", "qwen3_5"])
@torch.no_grad()
def test_the_state_that_is_read_is_what_the_head_reads(family):
    target, tokens = make_target(family), make_prompt(8)
    depth = target.config.get_text_config().num_hidden_layers
    aux, last = TargetStates(target, [depth])({"input_ids": tokens})
    assert torch.equal(aux, last)
    fed = []
    handle = target.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0]))
    target(tokens)
    handle.remove()
    torch.testing.assert_close(fed[0], aux)


def naive_losses(method, draft, batch, step, states, head):
    """
    Of each row that has a token left, by the papers' formulas; and the part of ours that is missing: cross-entropy with
    the target is here the divergence from it, without the target's own entropy, on which no gradient depends.
    """
    num = batch.input_ids.shape[1] - 2 - step
    logits, expected = head(states)[:, :num], batch.aux_hidden_states[:, 1 + step : 1 + step + num]
    p, q = batch.target_logits[:, 1 + step : 1 + step + num].softmax(-1), logits.softmax(-1)
    if method in ("medusa", "hydra"):
        return -q.gather(-1, batch.input_ids[:, 2 + step :, None]).log()[..., 0], 0
    difference = (states[:, :num] - expected).abs()
    regression = torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean(-1)
    losses = regression - 0.1 * (p * q.log()).sum(-1)
    if method == "hass":
        best, tokens = p.topk(10)
        losses = losses - (best * q.gather(-1, tokens).log()).sum(-1)
    return losses, -0.1 * (p * p.log()).sum()


@pytest.mark.parametrize("method", BY_LEVEL)
def test_losses_are_those_of_the_papers(method):
    target = make_target("llama")
    draft = make_baseline(method, target)
    batch = features_of(target, draft, make_prompt(11, batch_size=2))
    steps = BASELINES[method].training["ttt_steps"]
    outputs = draft_loss(draft, batch, steps)
    for step, (states, head, *_) in enumerate(draft.unroll(batch, steps)):
        losses, entropy = naive_losses(method, draft, batch, step, states, head)
        torch.testing.assert_close(outputs.loss_sums[step] + entropy, losses.sum())
    assert outputs.num_rows.tolist() == [2 * (11 - 2 - step) for step in range(steps)]
    draft.train()
    noisy = draft_loss(draft, batch, steps).loss_sums
    assert torch.equal(noisy, outputs.loss_sums) == (method in ("medusa", "hydra"))


def make_method_trainer(tmp_path, tokenizer, method, dataset=TEXTS, **arguments):
    target = make_target("llama")
    if method == "p-eagle":
        draft, training = None, {"draft_form": "p-eagle", "ttt_steps": 3, "ttt_warmup": 0.0}
    else:
        torch.manual_seed(0)
        draft, training = BASELINES[method].make_draft(target), BASELINES[method].training
    arguments = {"max_steps": 12, **training, **arguments}
    return make_trainer(tmp_path, tokenizer, draft, dataset, target, **arguments)


@pytest.mark.parametrize("method", [*BASELINES, "p-eagle"])
def test_training_saving_and_loading(tmp_path, tokenizer, method):
    trainer = make_method_trainer(tmp_path, tokenizer, method, packing=True, max_length=64)
    draft = trainer.draft
    before = {name: value.clone() for name, value in draft.named_parameters()}
    history = losses(trainer)
    frozen = {name for name, value in draft.named_parameters() if torch.equal(before[name], value)}
    assert frozen == ({"lm_head.weight"} if method in ("eagle", "hass", *BLOCK_DRAFTS) else set())
    assert history[-1] < history[0]
    trainer.save_model(str(tmp_path / "draft"))
    loaded = AutoModel.from_pretrained(tmp_path / "draft", trust_remote_code=method == "p-eagle").eval()
    loaded.borrow_embeddings(trainer.target_model)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in draft.state_dict().items())
    for name in ("static_tree", "num_heads", "mask_token_id", "is_causal", "eagle_aux_hidden_state_layer_ids"):
        assert getattr(loaded.config, name, None) == getattr(draft.config, name, None)
    if method != "p-eagle":
        again = draft_to_train(loaded, trainer.target_model, trainer.args)
        trained = {name for name, weight in again.named_parameters() if weight.requires_grad}
        assert before.keys() - trained == frozen
    assert_same_text(trainer.target_model, loaded, make_prompt(9), max_new_tokens=12)
    if method in BY_LEVEL:
        with pytest.raises(ValueError, match="not of EAGLE-3. Load it by `AutoModel"):
            Eagle3ForSpeculation.from_pretrained(tmp_path / "draft")
        other = next(each for each in BASELINES if each != method)
        with pytest.raises(ValueError, match=f"is not a {other} draft: its config.json is of '{method}'"):
            BASELINES[other].draft_class.from_pretrained(tmp_path / "draft")
        assert not list((tmp_path / "draft").rglob("*.py"))


@pytest.mark.parametrize("method", ["hass", "dflash"])
def test_stored_features_train_the_same_draft(tmp_path, tokenizer, method):
    store = make_method_trainer(tmp_path / "a", tokenizer, method).extract_features(tmp_path / "features")
    online, offline = (
        make_method_trainer(tmp_path / name, tokenizer, method, dataset=data)
        for name, data in (("b", TEXTS), ("c", store))
    )
    for trainer in (online, offline):
        torch.manual_seed(0)  # of HASS's noise, and of DFlash's places
        trainer.train()
    for (name, ours), (_, theirs) in zip(online.draft.named_parameters(), offline.draft.named_parameters()):
        torch.testing.assert_close(ours, theirs, msg=name)


@pytest.mark.parametrize("method", ["hydra", "jetspec"])
def test_a_training_goes_on(tmp_path, tokenizer, method):
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = make_method_trainer(tmp_path / "whole", tokenizer, method, **arguments)
    whole.train()
    make_method_trainer(tmp_path / "parts", tokenizer, method, **arguments).train()
    resumed = make_method_trainer(tmp_path / "parts", tokenizer, method, **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert resumed.state.global_step == 4 and not list((tmp_path / "parts").rglob("README.md"))
    for (name, ours), (_, theirs) in zip(whole.draft.named_parameters(), resumed.draft.named_parameters()):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_the_loss_of_drawn_blocks_is_a_mean(tmp_path, tokenizer):
    trainer = make_method_trainer(tmp_path, tokenizer, "dflash", num_eval_prompts=1, eval_max_new_tokens=4)
    metrics = trainer.evaluate(trainer.train_dataset)
    again = trainer.evaluate(trainer.train_dataset)
    assert metrics["eval_acceptance_length"] >= 1 and metrics["eval_loss"] == again["eval_loss"]
    # A mean over rows, whatever the share that is drawn.
    trainer.draft.BLOCK_SHARE = 1.0
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=0.1)


@pytest.mark.parametrize("family", ["llama", "cohere2"])
@torch.no_grad()
def test_fresh_drafts_say_what_the_target_says(family):
    """Heads begin as the target's own, with the factors that it applies."""
    target, tokens = make_target(family), make_prompt(6)
    expected = target(tokens).logits
    medusa = BASELINES["hydra"].draft_class.from_target(target)
    batch = features_of(target, medusa, tokens)
    for states, head, *_ in medusa.unroll(batch, 5):
        torch.testing.assert_close(head(states), expected)
    for draft_class in (BASELINES["eagle"].draft_class, Eagle3ForSpeculation):
        draft = draft_class.from_target(target)
        draft.set_draft_vocabulary(range(10, 40), target)  # as the trainer does with that of its data
        torch.testing.assert_close(draft.lm_head(batch.aux_hidden_states), expected[..., 10:40])


@pytest.mark.parametrize("method", ["hydra", "eagle"])
def test_every_head_loses_tokens(method):
    target = make_target("llama")
    draft = BASELINES[method].draft_class.from_target(target)
    draft.trim_draft_vocabulary(range(3, 50))
    assert_same_text(target, draft, make_prompt(6))
    heads = [module for name, module in draft.named_modules() if name.endswith("lm_head")]
    assert {head.out_features for head in heads} == {47} == {len(head.weight) for head in heads}


def test_what_other_methods_have_not():
    target = make_target("llama")
    for method, overrides, message in (
        ("medusa", {"fc_norm": True}, "has no .*fc_norm"),
        ("eagle", {"mask_token_id": 3}, "has no .*mask_token_id"),
        ("medusa", {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "reads one state"),
        ("eagle", {"static_tree": [[0, 0], [0]]}, "before its parent"),
    ):
        with pytest.raises(ValueError, match=message):
            BASELINES[method].draft_class.from_target(target, **overrides)
    draft = BASELINES["eagle"].draft_class.from_target(target)
    for use in (describe_engines, lambda draft: render_card("me/tiny", draft)):
        with pytest.raises(ValueError, match="This draft is of eagle"):
            use(draft)


@pytest.mark.parametrize(("method", "most"), [("medusa", 5), ("eagle", 1), ("hass", 3), ("dflash", 15), ("dspark", 7)])
def test_too_many_steps_are_refused(tmp_path, tokenizer, monkeypatch, method, most):
    """Before the data is tokenized, also where training would begin with fewer of them."""
    monkeypatch.setattr("hf_eagle3.training.trainer.encode", None)
    message = f"at most {most} steps deep, not {most + 1}. Pass `ttt_steps={most}`"
    with pytest.raises(ValueError, match=message):
        make_method_trainer(tmp_path, tokenizer, method, ttt_steps=most + 1, ttt_warmup=0.8)
    target = make_target("llama")
    with pytest.raises(ValueError, match=message):
        DraftLearner(target, BASELINES[method].make_draft(target), 1e-3, most + 1, 0.8)


@pytest.mark.parametrize("name, value", [("ttt_row_share", 0.5), ("sampled_vocab_size", 8)])
def test_settings_of_a_loss_that_a_method_does_not_have(tmp_path, tokenizer, name, value):
    with pytest.raises(ValueError, match=f"^{name} would have no effect on the training of a Eagle"):
        make_method_trainer(tmp_path, tokenizer, "eagle", **{name: value})


def test_settings_of_a_block_draft_s_loss(tmp_path, tokenizer, monkeypatch):
    """It has the trainer's loss on its own unroll."""
    monkeypatch.setattr(ttt, "LEAST_PROBABILITY", 0.5)  # few of so small a vocabulary
    losses = []
    for settings in ({}, {"sampled_vocab_size": 8}):
        trainer = make_method_trainer(tmp_path, tokenizer, "dflash", max_steps=1, **settings)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert len(set(losses)) == 2
    with pytest.raises(ValueError, match="^ttt_row_share would have no effect on the training of a DFlash"):
        make_method_trainer(tmp_path, tokenizer, "dflash", ttt_row_share=0.5)


def test_parallel_drafts():
    target = make_target("llama")
    draft = Eagle3ForSpeculation.from_target(target, mask_token_id="pad")
    assert draft.config.mask_token_id == 0 and draft.config.speculators_model_type == "peagle"
    assert draft.config.speculators_config["algorithm"] == "peagle" and not draft.config.fc_norm
    for overrides, message in (
        ({"mask_token_id": VOCAB_SIZE}, "must be one of the target's 96 tokens"),
        ({"mask_token_id": 3, "speculators_model_type": "dflash"}, "expected 'eagle3', or 'peagle'"),
        ({"speculators_model_type": "peagle"}, "expected 'eagle3', or 'peagle'"),
    ):
        with pytest.raises(ValueError, match=message):
            Eagle3ForSpeculation.from_target(target, **overrides)


def test_what_cards_and_engines_say_of_a_parallel_draft():
    draft = Eagle3ForSpeculation.from_target(make_target("llama"), mask_token_id=5)
    text = str(render_card("me/Tiny-speculator.eagle3", draft))
    assert "drafts all tokens in one pass (P-EAGLE)" in text and '"parallel_drafting": true}' in text
    assert "the form of the EAGLE-3 paper" not in text
    engines = dict(describe_engines(draft))
    assert engines.pop("vLLM").startswith("takes it as it is")
    assert all("parallel drafting" in said for said in engines.values())
    normed = Eagle3ForSpeculation.from_target(make_target("llama"), mask_token_id=5, fc_norm=True)
    assert dict(describe_engines(normed))["vLLM"] == "cannot take it: `fc_norm` in a parallel draft"


def test_a_parallel_draft_reads_once_a_step(monkeypatch):
    target = make_target("llama")
    draft, calls = make_baseline("p-eagle", target), []
    draft.generation_config.tree_policy = "static"
    draft.register_forward_hook(lambda *args: calls.append(1))
    generate(target, make_prompt(9), assistant_model=draft)
    num_drafted = draft.last_generation.target_forwards - 1 - draft.last_generation.plain_steps
    assert len(calls) == 1 + num_drafted  # the first one reads the prompt


def test_rows_that_wait_keep_their_state():
    target = make_target("llama")
    proposer = make_baseline("medusa", target).proposer(None)
    first, second = torch.randn(2, 3, 4), torch.randn(2, 2, 4)

    class Step:
        def __init__(self, states, counts):
            self.states, self.counts = states, counts

    proposer.observe(Step(first, [3, 3]))
    proposer.observe(Step(second, [2, 0]))
    assert torch.equal(proposer.states, torch.stack([second[0, -1], first[1, -1]]))
    proposer.select([1])
    assert torch.equal(proposer.states, first[1:, -1])


def test_smooth_l1_is_by_row():
    """The loss of a row does not depend on the others."""
    target = make_target("llama")
    draft = make_baseline("eagle", target)
    batch = features_of(target, draft, make_prompt(11, batch_size=2))
    ((states, _, row_losses, *_),) = draft.unroll(batch, 1)
    expected = F.smooth_l1_loss(states[1, 3], batch.aux_hidden_states[1, 4])
    torch.testing.assert_close(row_losses[1, 3], expected)


SCRIPT = """
import json
import os
import sys
sys.path[:0] = sys.argv[2:4]
from conftest import make_tokenizer
from test_baselines import train_two

losses = train_two(sys.argv[1], make_tokenizer(), int(sys.argv[4]))
if os.environ["RANK"] == "0":
    with open(sys.argv[1] + "/losses.json", "w") as file:
        json.dump(losses, file)
"""


def train_two(folder, tokenizer, batch_size):
    """Their losses, a list for each."""
    histories = []
    for method in ("eagle", "dspark"):
        trainer = make_method_trainer(folder, tokenizer, method, per_device_train_batch_size=batch_size, max_steps=2)
        # What is drawn at random is not the same in each process.
        trainer.draft.NOISE, trainer.draft.BLOCK_SHARE = 0.0, 1.0
        histories.append(losses(trainer))
        trainer.save_model(f"{folder}/{method}")
    return histories


def test_two_processes_give_the_losses_of_one(tmp_path, tokenizer):
    here = Path(__file__).parent
    (tmp_path / "train.py").write_text(SCRIPT)
    result = run_in_two_processes("fsdp2", tmp_path, tmp_path / "train.py", tmp_path, here.parent, here, 2)
    assert result.returncode == 0, result.stderr[-3000:]
    expected = train_two(tmp_path / "one", tokenizer, 4)
    for ours, theirs in zip(json.loads((tmp_path / "losses.json").read_text()), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)
    for method in ("eagle", "dspark"):
        ours, theirs = (AutoModel.from_pretrained(folder / method) for folder in (tmp_path, tmp_path / "one"))
        assert (
            ours.config.static_tree == theirs.config.static_tree
            and ours.state_dict().keys() == theirs.state_dict().keys()
        )

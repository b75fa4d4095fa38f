"""On-policy distillation: what is recorded of rollouts, and what is learned from it."""

import pytest
import torch
from conftest import make_draft, make_prompt, make_target
from training.test_trainer import CHATS, TEXTS, make_trainer
from training.test_ttt import make_batch
from transformers import DynamicCache

from hf_eagle3.data import documents_of_row, prompt_of
from hf_eagle3.remote_code.policy_eagle3 import Calibration
from hf_eagle3.training import on_policy
from hf_eagle3.training.checkpoint import last_whole_checkpoint
from hf_eagle3.training.on_policy import roll_out, rollout_batch
from hf_eagle3.training.ttt import TreeLevel, ttt_loss, ttt_unroll


STEPS = 4
LEAST_PROBABILITY = 1e-3
PROMPTS = [make_prompt(length, seed=length)[0] for length in (5, 9, 7)]


@pytest.fixture(autouse=True)
def improbable_nodes(monkeypatch):
    """A random target is sure of little."""
    monkeypatch.setattr(on_policy, "LEAST_PROBABILITY", LEAST_PROBABILITY)


def make_rollout(family="llama", temperature=0.0, **overrides):
    target = make_target(family)
    target.generation_config.eos_token_id = 7
    draft = make_draft(target, [make_prompt(8, seed=seed) for seed in range(4)], num_tokens=24, **overrides)
    rollout = roll_out(target, draft, PROMPTS, 0, max_new_tokens=20, temperature=temperature, seed=3)
    return target, draft, *rollout


def path_to(nodes, node):
    path = []
    while node >= 0:
        path.insert(0, node)
        node = nodes.parents[node].item()
    return path


@pytest.mark.parametrize(("family", "temperature"), [("llama", 0.0), ("gemma3", 1.0), ("qwen3_5", 0.0)])
def test_nodes_are_what_the_target_says(family, temperature):
    target, draft, texts, nodes, lengths = make_rollout(family, temperature)
    sampling = {
        "do_sample": temperature > 0,
        **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if temperature else {}),
    }
    for prompt, text in zip(PROMPTS, texts):
        assert text[: len(prompt)].tolist() == prompt.tolist()
        if temperature == 0:  # samples are those of the whole batch
            plain = target.generate(prompt[None], max_new_tokens=20, pad_token_id=0, **sampling)[0]
            assert text.tolist() == plain.tolist()
    assert sum(lengths) == sum(map(len, texts)) - sum(map(len, PROMPTS)) - len(PROMPTS)
    assert len(nodes.tokens) > 0 and nodes.weights.count_nonzero() > 0
    is_accepted = set()
    for node in range(len(nodes.tokens)):
        path, text = path_to(nodes, node), texts[nodes.rows[node]]
        root = nodes.roots[node] + 1
        tokens = torch.cat([text[: root + 1], nodes.tokens[path]])
        with torch.no_grad():
            states = target.base_model(tokens[None]).last_hidden_state
            probs = target.lm_head(states) if family != "gemma3" else target(tokens[None]).logits
        probs = probs[0].softmax(-1)
        torch.testing.assert_close(nodes.states[node], states[0, -1], atol=2e-4, rtol=1e-3)
        steps = range(root, root + len(path))
        probability = torch.stack([probs[at, tokens[at + 1]] for at in steps]).prod()
        assert probability > LEAST_PROBABILITY - 1e-6 and nodes.depths[node] == len(path)
        went_there = tokens.tolist() == text[: len(tokens)].tolist()
        if went_there and (family != "qwen3_5" or nodes.weights[node] == 0):  # whose rows go on together, later
            assert nodes.weights[node] == 0
            is_accepted.add(node)
        else:
            torch.testing.assert_close(nodes.weights[node], probability, atol=1e-4, rtol=1e-3)
    assert len(is_accepted) < len(nodes.tokens) and (is_accepted or family == "qwen3_5")


@torch.no_grad()
def batch_of(target, draft, texts, nodes):
    """All rows of a rollout, in another order."""
    rows = [2, 0, 1]
    batch = rollout_batch(rows, texts, texts, nodes, 0)
    levels = [
        TreeLevel(
            level["tokens"],
            level["parents"],
            level["roots"],
            level["weights"],
            (logits := target.lm_head(level["states"]))[..., draft.draft_token_ids],
            logits.softmax(-1)[..., draft.draft_token_ids].sum(-1),
        )
        for level in batch["tree_levels"]
    ]
    made = make_batch(target, draft, batch["input_ids"], batch["labels"], batch["attention_mask"])
    made.tree_levels = levels
    return rows, made


@pytest.mark.parametrize("overrides", [{}, {"num_hidden_layers": 2, "model_type": "qwen3"}])
def test_levels_of_the_unroll_are_trees_as_they_are_drafted(overrides):
    target, draft, texts, nodes, _ = make_rollout(**overrides)
    rows, batch = batch_of(target, draft, texts, nodes)
    fused = draft.combine_hidden_states(batch.aux_hidden_states)
    logits = [None if step.nodes is None else draft.lm_head(step.nodes[0]) for step in ttt_unroll(draft, batch, STEPS)]
    losses, compared = torch.zeros(STEPS), 0
    for place, row in enumerate(rows):
        for depth in range(1, STEPS):
            of_level = ((nodes.rows == row) & (nodes.depths == depth)).nonzero().squeeze(1).tolist()
            for index, node in enumerate(of_level):
                cache, root = DynamicCache(), nodes.roots[node].item()
                tokens = batch.input_ids[place : place + 1, 1 : root + 2]
                outputs = draft(tokens, fused[place : place + 1, : root + 1], cache=cache, use_cache=True)
                for below, each in enumerate(path_to(nodes, node), start=1):
                    outputs = draft(
                        nodes.tokens[each].view(1, 1),
                        outputs.last_hidden_state[:, -1:],
                        cache=cache,
                        position_ids=torch.tensor([[root + below]]),
                    )
                expected = outputs.logits[0, -1]
                torch.testing.assert_close(logits[depth][place, index], expected, atol=1e-4, rtol=1e-4)
                p = target.lm_head(nodes.states[node])[draft.draft_token_ids].softmax(-1)
                losses[depth] += nodes.weights[node] * (p * (p / expected.softmax(-1)).log()).sum()
                compared += 1
    assert compared > 10 and losses[1] > 0 and losses[2] > 0
    with_nodes = ttt_loss(draft, batch, STEPS)
    sampled = ttt_loss(draft, batch, STEPS, num_sampled=draft.config.draft_vocab_size)  # all of it
    torch.testing.assert_close(sampled.loss_sums, with_nodes.loss_sums)
    batch.tree_levels = ()
    texts_alone = ttt_loss(draft, batch, STEPS)
    torch.testing.assert_close(with_nodes.loss_sums - texts_alone.loss_sums, losses, atol=1e-3, rtol=1e-3)
    assert torch.equal(with_nodes.num_rows, texts_alone.num_rows)


ROLLOUTS = {"rollout_share": 0.5, "rollout_start": 0.0, "rollout_interval": 2, "rollout_max_new_tokens": 12}


def recording(trainer):
    """The batches that a trainer learns from."""
    batches, learn = [], trainer.target_features
    trainer.target_features = lambda inputs: batches.append(inputs) or learn(inputs)
    return batches


@pytest.mark.parametrize(
    "arguments",
    [{}, {"packing": True, "max_length": 40}, {"rollout_temperature": 0.0, "gradient_accumulation_steps": 2}],
)
def test_some_batches_are_rollouts(tmp_path, tokenizer, arguments):
    arguments = {**ROLLOUTS, "max_steps": 8, "rollout_start": 0.5, **arguments}
    trainer = make_trainer(tmp_path, tokenizer, **arguments)
    batches = recording(trainer)
    trainer.train()
    is_rollout = ["tree_levels" in batch for batch in batches]
    half = len(batches) // 2
    assert is_rollout == [False] * half + [False, True] * (half // 2)
    data = ["".join(text.split()) for text in TEXTS["text"]]
    tokens_of_data = batches[0]["input_ids"].numel()
    for batch in (batch for batch in batches if "tree_levels" in batch):
        num_tokens = (batch["attention_mask"] == 1).sum()
        assert tokens_of_data / 2 < num_tokens < 2 * tokens_of_data  # a share of the tokens, too
        assert batch["labels"].eq(-100).equal(batch["attention_mask"] == 0)
        for row in batch["input_ids"]:
            begun = "".join(tokenizer.decode(row[:4]).split())
            assert any(begun in text for text in data)
    logged = [entry for entry in trainer.state.log_history if "rollout_acceptance_length" in entry]
    assert logged and all(entry["rollout_acceptance_length"] >= 1 for entry in logged)
    assert all(entry["step"] > 4 for entry in logged)


def test_improbable_nodes_leave_texts(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(on_policy, "LEAST_PROBABILITY", 2.0)
    trainer = make_trainer(tmp_path, tokenizer, **ROLLOUTS)
    batches = recording(trainer)
    trainer.train()
    assert [batch["tree_levels"] for batch in batches if "tree_levels" in batch] == [[]]


def test_what_the_target_generates_by_does_not_matter(tmp_path, tokenizer):
    def written(**own):
        trainer = make_trainer(
            tmp_path, tokenizer, **ROLLOUTS, eval_dataset=TEXTS, eval_strategy="steps", eval_steps=3
        )
        trainer.target_model.generation_config.update(**own)
        trainer.rollouts.roll_out(60)
        metrics = trainer.evaluate()
        assert trainer.target_model.generation_config.to_dict().items() >= own.items()
        return trainer.rollouts.pending[0]["input_ids"].tolist(), metrics["eval_acceptance_length"]

    others = {"num_beams": 2, "num_return_sequences": 2, "return_dict_in_generate": True, "output_attentions": True}
    others |= {
        "repetition_penalty": 5.0,
        "stop_strings": ["a"],
        "use_cache": False,
        "do_sample": True,
        "max_time": 0.0,
    }
    assert written(**others) == written()


@pytest.mark.parametrize("packing", [False, True])
def test_texts_are_rolled_out_some_at_a_time(tmp_path, tokenizer, packing, monkeypatch):
    """Which does not show in what is learned, but for what the other texts of a call tell about a text's trees."""
    monkeypatch.setattr(Calibration, "RATE", 0)

    def pending(rollout_batch_size):
        settings = {
            **ROLLOUTS,
            "rollout_temperature": 0.0,
            "rollout_interval": 4,
            "packing": packing,
            "max_length": 48,
        }
        trainer = make_trainer(tmp_path, tokenizer, **settings, rollout_batch_size=rollout_batch_size)
        calls, generate = [], trainer.target_model.generate

        def counted(input_ids, **kwargs):
            calls.append(len(input_ids))
            return generate(input_ids, **kwargs)

        trainer.target_model.generate = counted
        trainer.rollouts.roll_out(90)
        return trainer.rollouts.pending, calls

    (together, one_call), (apart, calls) = pending(100), pending(3)
    assert len(one_call) == 1 and sum(calls) == one_call[0] > 3 == max(calls)
    assert len(together) == len(apart) == 2
    for batch, other in zip(together, apart):
        for name in ("input_ids", "attention_mask", "labels"):
            assert torch.equal(batch[name], other[name])
        assert len(batch["tree_levels"]) == len(other["tree_levels"]) > 0
        for level, other_level in zip(batch["tree_levels"], other["tree_levels"]):
            for name in ("tokens", "parents", "roots"):
                assert torch.equal(level[name], other_level[name])
            for name in ("weights", "states"):
                torch.testing.assert_close(level[name], other_level[name], atol=1e-4, rtol=1e-3)


def test_all_documents_of_packed_rows_are_rolled_out(tmp_path, tokenizer, monkeypatch):
    prompts = []

    def only_prompts(target, draft, new_prompts, *args, **kwargs):
        prompts.extend(map(tuple, (prompt.tolist() for prompt in new_prompts)))
        return new_prompts, None, [1]

    monkeypatch.setattr(on_policy, "roll_out", only_prompts)
    settings = {**ROLLOUTS, "packing": True, "max_length": 120, "rollout_max_new_tokens": 2}
    trainer = make_trainer(tmp_path, tokenizer, **settings)
    trainer.rollouts.roll_out(2000)
    documents = [documents_of_row(row) for row in trainer.train_dataset]
    firsts, all_of_them = (
        {tuple(prompt_of(document)[0].tolist()) for of_row in documents for document in of_row[:most]}
        for most in (1, None)
    )
    assert len(all_of_them) > len(firsts)
    assert set(prompts) - firsts and set(prompts) <= all_of_them


def test_only_answers_of_chats_are_learned(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer, dataset=CHATS, assistant_only_loss=True, **ROLLOUTS)
    batches = recording(trainer)
    trainer.train()
    (batch,) = [batch for batch in batches if "tree_levels" in batch]
    for tokens, labels in zip(batch["input_ids"], batch["labels"]):
        first = int((labels != -100).nonzero()[0])
        asked = tokenizer.decode(tokens[:first])
        assert "what" in asked.replace(" ", "") and first >= 5
        assert torch.equal(labels[first : first + 3], tokens[first : first + 3])


def test_a_parallel_draft_learns_from_texts_alone(tmp_path, tokenizer):
    """At one depth it says the same at all nodes."""
    trainer = make_trainer(tmp_path, tokenizer, draft_form="p-eagle", **ROLLOUTS)
    features, learn = [], trainer.target_features
    trainer.target_features = lambda inputs: features.append(learn(inputs)) or features[-1]
    trainer.train()
    assert len(features) == 3 and all(len(batch.tree_levels) == 0 for batch in features)
    assert trainer.rollouts.accepted.sum() == 0  # logged


def test_rejected_nodes_are_learned_from(tmp_path, tokenizer):
    def gradient(weight):
        trainer = make_trainer(tmp_path, tokenizer, **ROLLOUTS, ttt_warmup=0.0, rollout_rejected_weight=weight)
        trainer.rollouts.roll_out(60)
        batch = trainer._prepare_inputs(trainer.rollouts.pending[0])
        assert sum(level["weights"].sum() for level in batch["tree_levels"]) > 0
        trainer.compute_loss(trainer.model, batch).backward()
        return trainer.draft.fc.weight.grad

    without, once, twice = map(gradient, (0.0, 1.0, 2.0))
    assert (once - without).norm() > 1e-3 * without.norm()
    torch.testing.assert_close(twice - once, once - without, rtol=1e-3, atol=1e-5)


def test_resumed_rollouts_go_on_as_if_uninterrupted(tmp_path, tokenizer):
    """Also where batches that were rolled out before are still to be learned from."""
    arguments = {**ROLLOUTS, "rollout_interval": 4, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = make_trainer(tmp_path / "whole", tokenizer, **arguments)
    whole.train()
    make_trainer(tmp_path / "parts", tokenizer, **arguments).train()
    resumed = make_trainer(tmp_path / "parts", tokenizer, **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    assert len(torch.load(tmp_path / "parts" / "checkpoint-3" / "rollouts_0.pt")) == 1
    names = ("loss", "rollout_acceptance_length")
    expected, actual = (
        [{name: entry.get(name) for name in names} for entry in each.state.log_history if "loss" in entry]
        for each in (whole, resumed)
    )
    assert actual == expected
    (tmp_path / "parts" / "checkpoint-6" / "rollouts_0.pt").write_bytes(b"")
    assert last_whole_checkpoint(tmp_path / "parts").endswith("checkpoint-3")
    with pytest.raises(ValueError, match="rollout_share was 0.5 before, 0.25 after"):
        make_trainer(tmp_path / "parts", tokenizer, **{**arguments, "max_steps": 9, "rollout_share": 0.25}).train(
            resume_from_checkpoint=True
        )


def test_what_cannot_roll_out(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="rows of a stream do not have"):
        make_trainer(tmp_path, tokenizer, dataset=TEXTS.to_iterable_dataset(), **ROLLOUTS)
    store = make_trainer(tmp_path, tokenizer).extract_features(tmp_path / "features")
    with pytest.raises(ValueError, match="stored features"):
        make_trainer(tmp_path, tokenizer, dataset=store, **ROLLOUTS)
    for wrong, message in (
        ({"rollout_share": 1.5}, r"must be in \[0, 1\]"),
        ({"rollout_temperature": -1.0}, "must not be negative"),
        ({"rollout_interval": 0}, "at least 1"),
        ({"max_length": 12}, "leaves no room for prompts"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(tmp_path, tokenizer, **{**ROLLOUTS, **wrong})

"""Training of block drafts: all blocks of a batch at once give the losses of one block at a time."""

import math
from dataclasses import fields, replace

import pytest
import torch
from conftest import BLOCK_DRAFTS, VOCAB_SIZE, features_of, make_baseline, make_prompt, make_target

from hf_eagle3.baselines import BASELINES
from hf_eagle3.baselines.dflash_training import (
    BlockCache,
    draw_rows,
    text_mask,
)
from hf_eagle3.training import ttt
from hf_eagle3.training.attention import merged_attention, padded_length
from hf_eagle3.training.ttt import TTTBatch, draft_loss


BLOCK, MASK = 6, 3


def make_packed_batch(target, draft):
    """
    Three documents in two rows, with tokens that are not learned, and with padding. Also returns a batch of each document
    alone.
    """
    documents = [(0, 0, make_prompt(14, seed=1)), (0, 14, make_prompt(9, seed=2)), (1, 0, make_prompt(11, seed=3))]
    batches = [(row, begin, features_of(target, draft, tokens)) for row, begin, tokens in documents]
    batches[0][2].labels = batches[0][2].labels.masked_fill(torch.arange(14) % 5 == 3, -100)
    packed = {}
    for field in fields(TTTBatch):
        example = getattr(batches[0][2], field.name)
        padding = {"labels": -100, "documents": -1}.get(field.name, 0)
        packed[field.name] = example.new_full((2, 25, *example.shape[2:]), padding)
        for number, (row, begin, batch) in enumerate(batches):
            length = batch.input_ids.shape[1]
            own = getattr(batch, field.name)[0]
            packed[field.name][row, begin : begin + length] = number if field.name == "documents" else own
    packed["aux_hidden_states"][1, 11:] = 1e3  # of padding: nothing may read it
    return TTTBatch(**packed), [batch for _, _, batch in batches]


def naive_losses(draft, batch, row):
    """`(step, loss, is correct)` of the block behind a row of a document alone, by the pass that decoding makes."""
    tokens, length = batch.input_ids, batch.input_ids.shape[1]
    block = torch.full((1, BLOCK), MASK)
    block[0, 0] = tokens[0, row + 1]
    logits = draft(block, draft.combine_hidden_states(batch.aux_hidden_states[:, : row + 1])).logits[0]
    for step in range(min(BLOCK - 1, length - 2 - row)):
        place = row + 2 + step
        if batch.labels[0, place] == -100:
            continue
        scores = logits[draft.config.first_row + step]
        if draft.markov_head is not None:
            scores = scores + draft.markov_head(tokens[0, place - 1])
        p, q = batch.target_logits[0, place - 1].softmax(-1), scores.softmax(-1)
        best = draft.draft_token_ids[q.argmax()]
        yield step, (p * (p / q).log()).sum(), best == batch.target_tokens[0, place - 1]


@pytest.mark.parametrize("draft_token_ids", [None, range(5, 60)], ids=["whole", "small"])
@pytest.mark.parametrize("method", list(BLOCK_DRAFTS))
def test_the_loss_is_that_of_one_block_at_a_time(method, draft_token_ids):
    target = make_target("llama")
    draft = make_baseline(method, target, draft_token_ids=draft_token_ids).train()
    draft.borrow_embeddings(target)
    draft.BLOCK_SHARE = 1.0
    batch, documents = make_packed_batch(target, draft)
    outputs = draft_loss(draft, batch, BLOCK - 1)
    losses, counts, correct = torch.zeros(BLOCK - 1), torch.zeros(BLOCK - 1).long(), torch.zeros(BLOCK - 1).long()
    for document in documents:
        for row in range(document.input_ids.shape[1] - 2):
            for step, loss, is_correct in naive_losses(draft, document, row):
                losses[step] += loss
                counts[step] += 1
                correct[step] += is_correct
    torch.testing.assert_close(outputs.loss_sums, losses, atol=1e-4, rtol=1e-4)
    assert torch.equal(outputs.num_rows, counts) and torch.equal(outputs.num_correct, correct)
    gradients = []
    for loss in (outputs.loss_sums, losses):
        loss.sum().backward()
        gradients.append(
            {name: each.grad.clone() for name, each in draft.named_parameters() if name != "lm_head.weight"}
        )
        draft.zero_grad()
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-3, rtol=1e-3, msg=name)


@pytest.mark.parametrize("method", list(BLOCK_DRAFTS))
def test_pieces_and_padding_change_nothing(monkeypatch, method):
    target = make_target("llama")
    draft = make_baseline(method, target).train()
    draft.borrow_embeddings(target)
    draft.BLOCK_SHARE = 1.0
    batch, _ = make_packed_batch(target, draft)
    expected = draft_loss(draft, batch, 4).loss_sums
    shorter = TTTBatch(**{field.name: getattr(batch, field.name)[:, :23] for field in fields(TTTBatch)})
    torch.testing.assert_close(draft_loss(draft, shorter, 4).loss_sums, expected)
    monkeypatch.setattr("hf_eagle3.baselines.dflash_training.QUERIES_AT_A_TIME", 3 * BLOCK)
    outputs = draft_loss(draft, batch, 4)
    torch.testing.assert_close(outputs.loss_sums, expected)
    expected.sum().backward()
    gradient = draft.fc.weight.grad.clone()
    draft.zero_grad()
    outputs.loss_sums.sum().backward()
    torch.testing.assert_close(draft.fc.weight.grad, gradient)


def test_drawn_blocks_estimate_the_loss_of_all():
    """The mean over many draws, and one draw of a text that has few rows to draw from."""
    target = make_target("llama")
    draft = make_baseline("dflash", target).train()
    draft.borrow_embeddings(target)
    batch, _ = make_packed_batch(target, draft)
    draft.BLOCK_SHARE = 1.0
    expected = draft_loss(draft, batch, 4).loss_sums
    draft.BLOCK_SHARE = 0.3
    torch.manual_seed(0)
    with torch.no_grad():
        estimates = torch.stack([draft_loss(draft, batch, 4).loss_sums for _ in range(200)])
    assert estimates.std(dim=0).min() > 0
    torch.testing.assert_close(estimates.mean(dim=0), expected, rtol=0.05, atol=0)
    few = replace(batch, labels=batch.labels.masked_fill(torch.arange(25) > 4, -100))
    rows, weights = draw_rows(few, 4, 0.5)
    assert rows.shape == (2, 13) and (rows.diff() > 0).all() and (weights == 1).all()
    assert set(range(3)) <= set(rows[0].tolist()) & set(rows[1].tolist())  # those that predict tokens up to 4


def test_a_sample_of_all_tokens_is_the_vocabulary(monkeypatch):
    """With a target whose logits have a factor and a soft cap."""
    target = make_target("llama")
    draft = make_baseline("dflash", target, output_multiplier=0.5, final_logit_softcapping=2.0)
    draft.borrow_embeddings(target)
    batch, _ = make_packed_batch(target, draft)
    whole = draft_loss(draft, batch, 4)
    monkeypatch.setattr(ttt, "LEAST_PROBABILITY", 2.0)  # no token is always taken
    sampled = draft_loss(draft, batch, 4, sampled_vocab_size=VOCAB_SIZE)
    torch.testing.assert_close(sampled.loss_sums, whole.loss_sums)
    assert torch.equal(sampled.num_correct, whole.num_correct)
    torch.manual_seed(0)
    with torch.no_grad():
        estimates = [draft_loss(draft, batch, 4, sampled_vocab_size=VOCAB_SIZE // 2).loss_sums for _ in range(5)]
    assert torch.stack(estimates).std(dim=0).min() > 0


def test_evaluation_draws_the_same_blocks():
    target = make_target("llama")
    draft = make_baseline("jetspec", target)
    draft.borrow_embeddings(target)
    batch, _ = make_packed_batch(target, draft)
    state = torch.get_rng_state()
    first, second = (draft_loss(draft, batch, 4) for _ in range(2))
    assert torch.equal(first.loss_sums, second.loss_sums) and torch.equal(torch.get_rng_state(), state)
    draft.train()
    torch.manual_seed(0)
    trained = [draft_loss(draft, batch, 4) for _ in range(2)]
    assert not torch.equal(trained[0].loss_sums, trained[1].loss_sums)


@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_flex_attention_gives_the_same(is_causal):
    batch_size, num_keys, block_size = 2, 40, 3
    documents = torch.tensor([[0] * 15 + [1] * 25, [0] * 30 + [-1] * 10])
    rows = torch.tensor([[0, 14, 15, 39], [3, 4, 29, 35]])
    query = torch.randn(batch_size, 4, 12, 16)
    keys, values = torch.randn(2, batch_size, 2, num_keys, 16)
    own_keys, own_values = torch.randn(2, batch_size, 2, 12, 16)
    cache = BlockCache(documents, rows, block_size, is_causal)
    cache.update(keys, values, 0)
    mask = text_mask(documents, rows, block_size, 128, 128)
    own = tuple(each.unflatten(2, (-1, block_size)) for each in (own_keys, own_values))
    by_flex = merged_attention(query, keys, values, mask, 0.3, own, is_causal=is_causal)
    torch.testing.assert_close(by_flex, cache.attend(0, query, own_keys, own_values, 0.3))


def test_the_mask_of_flex_attention_is_of_the_text_alone(monkeypatch):
    """Making it takes memory for each pair of a query and a key, of which blocks have many more."""
    monkeypatch.setattr("hf_eagle3.baselines.dflash_training.can_compile_flex", lambda device: True)
    cache = BlockCache(torch.zeros(1, 128, dtype=torch.long), torch.arange(100)[None], 8, False)
    assert cache.block_mask.shape[-2] >= 800 and cache.block_mask.shape[-1] == padded_length(128)


@pytest.mark.parametrize("method", ["jetspec", "dspark"])
def test_a_trained_draft_is_accepted(method):
    """A draft that learns a few texts by heart."""
    target, prompts = make_target("llama"), make_prompt(9, batch_size=8)
    settings = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    texts = target.generate(prompts, **settings)
    draft = make_baseline(method, target).train()
    draft.borrow_embeddings(target)
    draft.generation_config.tree_policy = "static"

    def acceptance_length():
        assert torch.equal(target.generate(prompts[:2], **settings, assistant_model=draft), texts[:2])
        return draft.last_generation.acceptance_length

    before = acceptance_length()
    batch = features_of(target, draft, texts)
    batch.labels = batch.labels.index_fill(1, torch.arange(9), -100)
    optimizer = torch.optim.AdamW([each for name, each in draft.named_parameters() if "lm_head" not in name], lr=3e-3)
    losses = []
    for _ in range(150):
        outputs = draft_loss(draft, batch, BLOCK - 1)
        loss = (outputs.loss_sums / outputs.num_rows).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert acceptance_length() > max(2.5, 1.5 * before)


def test_methods_make_their_drafts():
    target = make_target("llama")
    drafts = {method: BASELINES[method].make_draft(target, block_size=8) for method in BLOCK_DRAFTS}
    assert drafts["jetspec"].config.is_causal and not drafts["dflash"].config.is_causal
    assert all(draft.config.block_size == 8 for draft in drafts.values())
    assert BASELINES["jetspec"].training["ttt_step_decay"] ** 7 == pytest.approx(1 / math.e)

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCAB_SIZE, make_prompt
from operators import Operators
from trainers import make_ttt_batch
from transformers import DynamicCache

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.training import attention, ttt
from hf_eagle3.training.ttt import counted_rows, ttt_loss, ttt_unroll


STEPS = 7


def naive_unroll(draft, batch, steps):
    """
    What drafting after each position gives, by the inference path: read the true features up to row t, then draft on,
    one token a step, feeding the tokens of the data. Returns logits `(B, L, steps, V)`, NaN where the data ends.
    """
    batch_size, length = batch.input_ids.shape
    result = torch.full((batch_size, length, steps, draft.config.draft_vocab_size), torch.nan)
    for b in range(batch_size):
        fused = draft.combine_hidden_states(batch.aux_hidden_states[b : b + 1])
        for t in range(length - 1):
            cache = DynamicCache()
            outputs = draft(batch.input_ids[b : b + 1, 1 : t + 2], fused[:, : t + 1], cache=cache, use_cache=True)
            for step in range(steps):
                result[b, t, step] = outputs.logits[0, -1]
                if t + 2 + step >= length:
                    break
                outputs = draft(
                    batch.input_ids[b : b + 1, t + 2 + step : t + 3 + step],
                    outputs.last_hidden_state[:, -1:],
                    cache=cache,
                    position_ids=torch.tensor([[t + 1 + step]]),
                )
    return result


def naive_loss(draft, batch, steps):
    """Sums over rows one by one."""
    logits = naive_unroll(draft, batch, steps)
    sums, counts = [torch.zeros(()) for _ in range(steps)], [0] * steps
    for b, t, step in torch.cartesian_prod(*map(torch.arange, (*batch.input_ids.shape, steps))).tolist():
        predicted = t + 2 + step
        if predicted >= batch.input_ids.shape[1] or batch.labels[b, predicted] == -100:
            continue
        p = batch.target_logits[b, predicted - 1].softmax(-1)
        q = logits[b, t, step].softmax(-1)
        sums[step] = sums[step] + (p * (p / q).log()).sum()
        counts[step] += 1
    return torch.stack(sums), counts


def make_draft(target, **overrides):
    torch.manual_seed(0)
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=range(0, VOCAB_SIZE, 3), **overrides)
    for parameter in draft.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    return draft


@pytest.fixture
def pair(target):
    return target, make_draft(target)


def batch_of(pair, length, batch_size=1, unlearned=()):
    """A batch of the target's text, some labels of which are masked: `(row, tokens)`."""
    input_ids = make_prompt(length, batch_size=batch_size)
    labels = input_ids.clone()
    for row, tokens in unlearned:
        labels[row, tokens] = -100
    return make_ttt_batch(*pair, input_ids, labels)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"fc_norm": False, "norm_output": False, "norm_before_residual": True},
        {"num_hidden_layers": 2, "model_type": "qwen3"},
    ],
)
def test_unroll_equals_drafting_token_by_token(target, overrides):
    draft = make_draft(target, **overrides)
    batch = make_ttt_batch(target, draft, make_prompt(12, batch_size=2))
    expected = naive_unroll(draft, batch, STEPS)
    for step, (states, *_) in enumerate(ttt_unroll(draft, batch, STEPS)):
        logits, rows = draft.lm_head(states), 12 - 1 - step
        torch.testing.assert_close(logits[:, :rows], expected[:, :rows, step], atol=1e-4, rtol=1e-4)
        if step == 0:
            tokens = F.pad(batch.input_ids[:, 1:], (0, 1))
            forward = draft(tokens, draft.combine_hidden_states(batch.aux_hidden_states)).logits
            torch.testing.assert_close(logits, forward, atol=1e-5, rtol=1e-5)


def test_loss_and_gradients_equal_the_naive_ones(pair):
    draft, batch = pair[1], batch_of(pair, 11, 2, [(0, slice(5))])
    outputs = ttt_loss(draft, batch, STEPS)
    expected, counts = naive_loss(draft, batch, STEPS)
    torch.testing.assert_close(outputs.loss_sums, expected, atol=1e-3, rtol=1e-4)
    assert outputs.num_rows.tolist() == counts
    ours = torch.autograd.grad(outputs.loss_sums.sum(), list(draft.parameters()))
    theirs = torch.autograd.grad(expected.sum(), list(draft.parameters()))
    for (name, _), our, their in zip(draft.named_parameters(), ours, theirs):
        torch.testing.assert_close(our, their, atol=2e-3, rtol=1e-3, msg=name)
        assert our.abs().max() > 0, name


@pytest.mark.parametrize("settings", [{}, {"row_share": 0.5, "sampled_vocab_size": 8}])
def test_apple_s_gpus_have_all_operators_of_training(target, settings):
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=range(0, VOCAB_SIZE, 2))
    draft.borrow_embeddings(target)
    with Operators() as used:
        ttt_loss(draft, make_ttt_batch(target, draft, make_prompt(20)), 3, **settings).loss_sums.sum().backward()
    assert not used.missing_on_apple_s_gpus() and "embedding" in used.names


def test_counts_equal_the_naive_ones(monkeypatch, pair):
    monkeypatch.setattr(ttt, "ONE_IN", 1)
    draft, batch = pair[1], batch_of(pair, 15, 3, [(0, slice(5)), (1, slice(8, 11))])
    labels = batch.labels
    # So that some agree: the target says what the draft would, in every other place.
    logits = naive_unroll(draft, batch, STEPS)
    best = draft.draft_token_ids[logits.nan_to_num(0).argmax(-1)]
    for t in range(2, 14, 2):
        batch.target_tokens[:, t] = best[:, t - 2, 1]
        batch.target_tokens[:, t - 1] = best[:, t - 2, 0]
    outputs = ttt_loss(draft, batch, STEPS)
    acceptance, reached, accepted, correct = (torch.zeros(STEPS) for _ in range(4))
    for b, t in torch.cartesian_prod(torch.arange(3), torch.arange(15)).tolist():
        is_reached = True
        for step in range(STEPS):
            predicted = t + 2 + step
            counts = predicted < 15 and labels[b, predicted] != -100
            is_correct = counts and best[b, t, step] == batch.target_tokens[b, predicted - 1]
            if counts:
                p = torch.zeros(VOCAB_SIZE)
                p[draft.draft_token_ids] = batch.target_logits[b, predicted - 1].softmax(-1)
                p *= batch.target_mass[b, predicted - 1]
                q = torch.zeros(VOCAB_SIZE)
                q[draft.draft_token_ids] = logits[b, t, step].softmax(-1)
                of_others = torch.maximum(p / p[:, None], q / q[:, None]).nan_to_num(0, posinf=torch.inf)
                acceptance[step] += (1 / (of_others.sum(-1) + (1 - p.sum()) / p))[(p > 0) & (q > 0)].sum()
            is_reached = is_reached and counts
            reached[step] += is_reached
            is_reached = is_reached and is_correct
            accepted[step] += is_reached
            correct[step] += is_correct
    assert torch.equal(outputs.num_sampled, outputs.num_rows)
    torch.testing.assert_close(outputs.acceptance_sums, acceptance, atol=1e-4, rtol=1e-4)
    assert outputs.num_reached.tolist() == reached.tolist()
    assert outputs.num_accepted.tolist() == accepted.tolist()
    assert outputs.num_correct.tolist() == correct.tolist()
    assert 0 < accepted[2] < accepted[0] < reached[0]


def gradients(draft, batch):
    draft.zero_grad()
    outputs = ttt_loss(draft, batch, STEPS)
    (outputs.loss_sums.sum() / outputs.num_rows.sum()).backward()
    return outputs, {name: parameter.grad.clone() for name, parameter in draft.named_parameters()}


def assert_same_training(draft, first, second, tolerance=1e-5):
    (ours, our_gradients), (theirs, their_gradients) = gradients(draft, first), gradients(draft, second)
    torch.testing.assert_close(ours.loss_sums, theirs.loss_sums, atol=1e-3, rtol=1e-4)
    assert torch.equal(ours.num_rows, theirs.num_rows)
    assert torch.equal(ours.num_correct, theirs.num_correct)
    for name in our_gradients:
        torch.testing.assert_close(our_gradients[name], their_gradients[name], atol=tolerance, rtol=1e-3, msg=name)


def test_padding_changes_nothing(pair):
    target, draft = pair
    input_ids = make_prompt(14)
    padded = F.pad(input_ids, (0, 5), value=7)
    mask = F.pad(torch.ones_like(input_ids), (0, 5))
    labels = F.pad(input_ids, (0, 5), value=-100)
    batches = make_ttt_batch(target, draft, input_ids), make_ttt_batch(target, draft, padded, labels, mask)
    assert_same_training(draft, *batches)


def test_what_is_not_to_be_learned_changes_no_loss(pair):
    """Other target distributions over prompt tokens, and over padding, leave loss and gradient as they are."""
    draft = pair[1]
    batch, changed = (batch_of(pair, 16, unlearned=[(0, slice(9))]) for _ in range(2))
    changed.target_logits[:, :8] = torch.randn_like(changed.target_logits[:, :8]) * 9  # about tokens 1 to 8
    changed.target_tokens[:, :8] = 0
    assert_same_training(draft, batch, changed)
    changed.target_logits[:, 8] = 0
    changed.target_logits[:, 8, 0] = 9
    with pytest.raises(AssertionError):
        assert_same_training(draft, batch, changed)


def test_packed_documents_do_not_see_each_other(pair):
    target, draft = pair
    first, second = make_prompt(9, seed=1), make_prompt(13, seed=2)
    packed = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(9), torch.arange(13)])[None]
    padded = torch.cat([F.pad(first, (0, 4)), second])
    mask = torch.tensor([[1] * 9 + [0] * 4, [1] * 13])
    labels = torch.where(mask.bool(), padded, -100)
    # The batch dimension keeps documents apart; so must the packed row.
    apart = make_ttt_batch(target, draft, padded, labels, mask)
    together = make_ttt_batch(target, draft, packed, position_ids=positions)
    for name in ("aux_hidden_states", "target_logits", "target_mass", "target_tokens"):
        setattr(together, name, getattr(apart, name)[mask.bool()][None])
    assert_same_training(draft, apart, together)


def test_the_loss_in_pieces_is_the_loss(monkeypatch, pair):
    monkeypatch.setattr(ttt, "ONE_IN", 3)
    draft, batch = pair[1], batch_of(pair, 17, 2, [(0, slice(5))])
    results = []
    for max_logits in (2**25, 2 * 32 * 4, 1):
        draft.zero_grad()
        outputs = ttt_loss(draft, batch, STEPS, max_logits=max_logits)
        outputs.loss_sums.sum().backward()
        results.append((outputs, [parameter.grad.clone() for parameter in draft.parameters()]))
    for outputs, grads in results[1:]:
        torch.testing.assert_close(outputs.loss_sums, results[0][0].loss_sums)
        assert torch.equal(outputs.num_correct, results[0][0].num_correct)
        assert torch.equal(outputs.num_sampled, results[0][0].num_sampled)
        torch.testing.assert_close(outputs.acceptance_sums, results[0][0].acceptance_sums)
        torch.testing.assert_close(grads, results[0][1], atol=1e-4, rtol=1e-4)


def test_a_sample_of_the_vocabulary_stands_for_all(monkeypatch, pair):
    monkeypatch.setattr(ttt, "LEAST_PROBABILITY", 0.1)
    draft, batch = pair[1], batch_of(pair, 9, 2)
    probs = batch.target_logits.softmax(-1)
    likely = (probs >= 0.1).flatten(0, 1).any(dim=0).nonzero().flatten().tolist()
    num_others = probs.shape[-1] - len(likely)
    assert min(len(likely), num_others) > 5
    states = torch.randn(3, draft.lm_head.in_features)
    of_target, of_draft, times_drawn = 0, 0, torch.zeros(probs.shape[-1])
    vocabularies = [ttt.SampledVocabulary.of(batch, draft, 4) for _ in range(2000)]
    for vocabulary in vocabularies:
        times_drawn[vocabulary.tokens] += 1
        of_target += vocabulary.of_logits(batch.target_logits).exp().sum(-1) / len(vocabularies)
        of_draft += vocabulary.head(states).exp().sum(-1) / len(vocabularies)
    assert {len(vocabulary.tokens) for vocabulary in vocabularies} == {len(likely) + 4}
    assert times_drawn[likely].tolist() == [2000] * len(likely)
    assert (len(likely) + 8) % 2 == 1
    assert len(ttt.SampledVocabulary.of(batch, draft, 8).tokens) == len(likely) + 9  # rounded up
    others = [token for token in range(probs.shape[-1]) if token not in likely]
    assert times_drawn[others].min() > 0.75 * 2000 * 4 / num_others
    # What each softmax is divided by is that of all tokens, on average.
    torch.testing.assert_close(of_target, batch.target_logits.exp().sum(-1), rtol=0.05, atol=0)
    torch.testing.assert_close(of_draft, draft.lm_head(states).exp().sum(-1), rtol=0.05, atol=0)


@pytest.mark.parametrize("least", [0.0, 2.0], ids=["all are likely", "all are drawn"])
def test_a_sample_of_all_tokens_is_the_vocabulary(monkeypatch, pair, least):
    monkeypatch.setattr(ttt, "LEAST_PROBABILITY", max(least, 1e-30))
    draft, batch = pair[1], batch_of(pair, 17, 2)
    results = []
    for sampled_vocab_size in (None, VOCAB_SIZE):
        draft.zero_grad()
        outputs = ttt_loss(draft, batch, STEPS, sampled_vocab_size=sampled_vocab_size)
        outputs.loss_sums.sum().backward()
        results.append((outputs, [parameter.grad.clone() for parameter in draft.parameters()]))
    (whole, of_whole), (sampled, of_sampled) = results
    for ours, theirs in zip(vars(sampled).values(), vars(whole).values()):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(of_sampled, of_whole, atol=1e-4, rtol=1e-4)


def test_gradients_of_a_sampled_vocabulary_point_where_those_of_the_whole_do(monkeypatch, pair):
    monkeypatch.setattr(ttt, "LEAST_PROBABILITY", 0.1)
    draft, batch = pair[1], batch_of(pair, 17, 2)

    def gradient(sampled_vocab_size):
        loss = ttt_loss(draft, batch, 3, sampled_vocab_size=sampled_vocab_size).loss_sums.sum()
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(draft.parameters()))])

    whole = gradient(None)
    mean = sum(gradient(4) for _ in range(40)) / 40
    assert F.cosine_similarity(mean, whole, dim=0) > 0.97


def test_counted_rows():
    labels = torch.tensor([[1, 1, -100, 1, 1, 1, 1, -100]])
    documents = torch.tensor([[1, 1, 1, 1, 2, 2, 2, -1]])
    # Row t predicts token t + 2 + step.
    assert counted_rows(labels, documents, 0).tolist() == [[False, True, False, False, True, False]]
    assert counted_rows(labels, documents, 1).tolist() == [[True, False, False, False, False]]
    assert counted_rows(labels, documents, 6).shape == (1, 0)


@pytest.mark.parametrize("overrides", [{}, {"num_hidden_layers": 2, "model_type": "qwen3"}, {"mask_token_id": "pad"}])
def test_rows_are_the_same_where_others_are_left_out(monkeypatch, target, overrides):
    monkeypatch.setattr(attention, "QUERIES_AT_A_TIME", 4)
    draft = make_draft(target, **overrides)
    documents = torch.cat([torch.arange(9), torch.arange(7)]).expand(2, -1)
    batch = make_ttt_batch(target, draft, make_prompt(16, batch_size=2), position_ids=documents)
    drawn = []
    for whole, some in zip(ttt_unroll(draft, batch, STEPS), ttt_unroll(draft, batch, STEPS, row_share=0.6)):
        if some.rows is not None:
            drawn.append(some.rows)
            assert (some.rows.diff(dim=1) > 0).all()
            expected = whole.states.gather(1, some.rows[..., None].expand(-1, -1, whole.states.shape[-1]))
            torch.testing.assert_close(some.states, expected, atol=1e-5, rtol=1e-5)
    assert [rows.shape[1] for rows in drawn] == [10, 6, 4, 3, 2, 1]
    assert drawn[0].tolist()[0] != drawn[0].tolist()[1]  # each sequence has its own
    for before, after in zip(drawn, drawn[1:]):
        assert all(set(new) <= set(old) for old, new in zip(before.tolist(), after.tolist()))


def test_the_loss_of_some_rows_stands_for_all(monkeypatch, pair):
    monkeypatch.setattr(ttt, "ONE_IN", 1)
    draft, batch = pair[1], batch_of(pair, 16, 2, [(0, slice(9))])
    input_ids, labels = batch.input_ids, batch.labels
    torch.manual_seed(5)
    drawn = [step.rows for step in ttt_unroll(draft, batch, 4, row_share=0.7)][1:]
    torch.manual_seed(5)
    outputs = ttt_loss(draft, batch, 4, row_share=0.7)
    logits = naive_unroll(draft, batch, 4)
    reached = torch.ones_like(input_ids, dtype=torch.bool)
    for step, rows in enumerate([torch.arange(16).expand(2, -1), *drawn]):
        loss, counts, correct_before, survivors = 0, [0, 0, 0, 0], reached, torch.zeros_like(reached)
        for b, row in [(b, row) for b, of_text in enumerate(rows.tolist()) for row in of_text]:
            predicted = row + 2 + step
            if predicted >= 16 or labels[b, predicted] == -100:
                continue
            p, q = batch.target_logits[b, predicted - 1].softmax(-1), logits[b, row, step].softmax(-1)
            loss = loss + (p * (p / q).log()).sum()
            correct = draft.draft_token_ids[q.argmax()] == batch.target_tokens[b, predicted - 1]
            survivors[b, row] = correct_before[b, row] & correct
            for i, counted in enumerate((True, correct, correct_before[b, row], survivors[b, row])):
                counts[i] += int(counted)
        reached = survivors
        torch.testing.assert_close(outputs.loss_sums[step], loss * 16 / rows.shape[1], atol=1e-3, rtol=1e-4)
        names = ("num_rows", "num_correct", "num_reached", "num_accepted")
        assert [getattr(outputs, name)[step].item() for name in names] == counts
        assert outputs.num_sampled[step] == counts[0]
    ours = torch.autograd.grad(outputs.loss_sums.sum(), list(draft.parameters()))
    assert all(gradient.abs().max() > 0 for gradient in ours)


def test_sequences_shorter_than_the_unroll(pair):
    outputs = ttt_loss(pair[1], batch_of(pair, 3), STEPS)
    assert outputs.num_rows.tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert outputs.loss_sums[1:].abs().sum() == 0


@pytest.mark.parametrize("overrides", [{}, {"mask_token_id": 0, "norm_output": False}])
def test_all_parameters_are_in_the_graph_of_one_step(target, overrides):
    """DDP expects that where `ddp_find_unused_parameters=False`."""
    draft = Eagle3ForSpeculation.from_target(target, **overrides).train()
    ttt_loss(draft, make_ttt_batch(target, draft, make_prompt(12)), 1).loss_sums.sum().backward()
    trained = {name: weight for name, weight in draft.named_parameters() if weight.requires_grad}
    assert [name for name, weight in trained.items() if weight.grad is None] == []

import pytest
import torch
import torch.nn.functional as F

from hf_eagle3.training import losses
from hf_eagle3.training.losses import DraftLoss, acceptance_rates, log_sum_exp, probabilities


def naive_rates(p, q):
    """From the definition, over the draft's tokens and one more that it never guesses."""
    p, q = torch.cat([p, 1 - p.sum(-1, keepdim=True)], dim=-1), F.pad(q, (0, 1))
    of_others = torch.maximum(p[..., None, :] / p[..., :-1, None], q[..., None, :] / q[..., :-1, None])
    return (1 / of_others.sum(-1)).sum(-1)


@pytest.mark.parametrize("piece", [2**19, 2 * 2 * 30])
def test_loss_and_gradient_equal_the_naive_ones(piece, monkeypatch):
    monkeypatch.setattr(losses, "PIECE_ON_CPU", piece)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 5, 30, generator=generator) * 3).requires_grad_()
    probs = (torch.randn(2, 5, 30, generator=generator) * 3).softmax(-1)
    upstream = torch.rand(2, 5, generator=generator)
    entropy = torch.special.entr(probs).sum(-1)
    loss = DraftLoss.apply(logits, probs, entropy)
    expected = F.kl_div(logits.log_softmax(-1), probs, reduction="none").sum(-1)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    gradient, expected_gradient = (torch.autograd.grad(each, logits, upstream)[0] for each in (loss, expected))
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-5)
    assert gradient.abs().max() > 0.01


def test_autocast_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    logits, target_logits = (25 * torch.randn(2, 5, 300, generator=generator) for _ in range(2))

    def loss():
        probs, entropy = probabilities(target_logits)
        return DraftLoss.apply(logits, probs, entropy)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = loss()
    assert actual.dtype == torch.float32 and torch.equal(actual, loss())


@pytest.mark.parametrize("agrees", [True, False])
def test_extremes(agrees):
    """A draft that agrees has nothing to learn, and one that shares nothing has finite losses."""
    logits = torch.tensor([[50.0, 0, 0], [0, 50, 0]] if agrees else [[400.0, 0, 0]], requires_grad=True)
    probs = logits.detach().softmax(-1) if agrees else torch.tensor([[0.0, 1, 0]])
    loss = DraftLoss.apply(logits, probs, torch.zeros(len(logits)))
    loss.sum().backward()
    rates = acceptance_rates(logits, probs, torch.ones(len(logits)))
    assert torch.isfinite(loss).all() and torch.isfinite(logits.grad).all()
    assert (rates > 0.999).all() if agrees else (rates == 0).all()
    assert not agrees or (loss.abs().max() < 1e-5 and logits.grad.abs().max() < 1e-5)


@pytest.mark.parametrize("length", [0, 1, 7])
def test_distributions_in_pieces_are_the_whole_ones(length, monkeypatch):
    logits = torch.randn(2, length, 30, generator=torch.Generator().manual_seed(0)) * 3
    monkeypatch.setattr(losses, "PIECE_ON_CPU", 2 * 3 * 30)
    assert [len(piece[0]) for piece in losses.pieces(logits[0])] == ([6, 1] if length == 7 else [length])
    probs, entropy = probabilities(logits)
    torch.testing.assert_close(probs, logits.softmax(-1))
    torch.testing.assert_close(entropy, torch.special.entr(logits.softmax(-1)).sum(-1))
    torch.testing.assert_close(log_sum_exp(logits), logits.logsumexp(-1))


def test_acceptance_rates_are_those_of_sampling_by_the_same_noise():
    generator = torch.Generator().manual_seed(0)
    logits, target_logits = (2 * torch.randn(1, 4, 12, generator=generator) for _ in range(2))
    probs, mass = (target_logits + logits).softmax(-1), torch.tensor([[1.0, 0.9, 0.5, 0.7]])
    rates = acceptance_rates(logits, probs, mass)
    p, q = probs * mass[..., None], logits.softmax(-1)
    torch.testing.assert_close(rates, naive_rates(p, q), atol=1e-5, rtol=1e-5)
    noise = torch.empty(100_000, 1, 4, 13).exponential_(generator=generator)
    p, q = torch.cat([p, 1 - p.sum(-1, keepdim=True)], dim=-1), F.pad(q, (0, 1))
    same = (noise / p).argmin(-1) == (noise / q).argmin(-1)
    torch.testing.assert_close(same.float().mean(0), rates, atol=0.01, rtol=0)


def test_tokens_that_the_target_rules_out():
    """Some targets give tokens of their vocabulary a logit of -inf."""
    target_logits, logits = torch.randn(2, 3, 8), torch.randn(2, 3, 8, requires_grad=True)
    target_logits[..., 5] = -torch.inf
    probs, entropy = probabilities(target_logits)
    losses = DraftLoss.apply(logits, probs, entropy)
    losses.sum().backward()
    kept = [0, 1, 2, 3, 4, 6, 7]
    p, q = target_logits[..., kept].log_softmax(dim=-1), logits.detach().log_softmax(dim=-1)[..., kept]
    torch.testing.assert_close(losses, (p.exp() * (p - q)).sum(dim=-1))
    assert logits.grad.isfinite().all()

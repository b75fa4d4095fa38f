import pytest
import torch
import torch.nn.functional as F

from hf_eagle3.training import losses
from hf_eagle3.training.losses import LOSS_TYPES, DraftLoss, log_sum_exp, probabilities


def naive_loss(logits, probs, mass, loss_type):
    """By autograd, from the definitions."""
    q, p = logits.softmax(-1), probs * mass[..., None]
    alpha = torch.minimum(p, q).sum(-1)
    divergence = F.kl_div(logits.log_softmax(-1), probs, reduction="none").sum(-1)
    if loss_type == "kl":
        return divergence, alpha
    if loss_type == "ce":
        return F.cross_entropy(logits.transpose(1, -1), probs.argmax(-1), reduction="none"), alpha
    if loss_type == "lk_alpha":
        return -alpha.log(), alpha
    weight = (-3 * alpha.detach()).exp()
    return weight * divergence + (1 - weight) * (1 - alpha), alpha


@pytest.mark.parametrize("piece", [2**19, 2 * 2 * 30])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_losses_and_gradients_equal_the_naive_ones(loss_type, piece, monkeypatch):
    monkeypatch.setattr(losses, "PIECE_ON_CPU", piece)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 5, 30, generator=generator) * 3).requires_grad_()
    probs = (torch.randn(2, 5, 30, generator=generator) * 3).softmax(-1)
    mass, upstream = (torch.rand(2, 5, generator=generator) for _ in range(2))
    entropy = torch.special.entr(probs).sum(-1)
    loss, alpha = DraftLoss.apply(logits, probs, mass, entropy, loss_type)
    expected, expected_alpha = naive_loss(logits, probs, mass, loss_type)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alpha, expected_alpha, atol=1e-6, rtol=1e-5)
    assert not alpha.requires_grad
    gradient, expected_gradient = (torch.autograd.grad(each, logits, upstream)[0] for each in (loss, expected))
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-5)
    assert gradient.abs().max() > 0.01


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_autocast_changes_nothing(loss_type):
    generator = torch.Generator().manual_seed(0)
    logits, target_logits = (25 * torch.randn(2, 5, 300, generator=generator) for _ in range(2))

    def loss():
        probs, entropy = probabilities(target_logits)
        return torch.stack(DraftLoss.apply(logits, probs, torch.ones(2, 5), entropy, loss_type))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = loss()
    assert actual.dtype == torch.float32 and torch.equal(actual, loss())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_draft_that_agrees_has_nothing_to_learn(loss_type):
    logits = torch.tensor([[50.0, 0, 0], [0, 50, 0]], requires_grad=True)
    probs = logits.detach().softmax(-1)
    loss, alpha = DraftLoss.apply(logits, probs, torch.ones(2), torch.zeros(2), loss_type)
    loss.sum().backward()
    assert loss.abs().max() < 1e-5 and (alpha > 0.999).all() and logits.grad.abs().max() < 1e-5


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_draft_that_shares_nothing_has_finite_losses(loss_type):
    logits = torch.tensor([[400.0, 0, 0]], requires_grad=True)
    probs = torch.tensor([[0.0, 1, 0]])
    loss, alpha = DraftLoss.apply(logits, probs, torch.ones(1), torch.zeros(1), loss_type)
    loss.sum().backward()
    assert alpha == 0 and torch.isfinite(loss).all() and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("length", [0, 1, 7])
def test_distributions_in_pieces_are_the_whole_ones(length, monkeypatch):
    logits = torch.randn(2, length, 30, generator=torch.Generator().manual_seed(0)) * 3
    monkeypatch.setattr(losses, "PIECE_ON_CPU", 2 * 3 * 30)
    assert [len(piece[0]) for piece in losses.pieces(logits[0])] == ([6, 1] if length == 7 else [length])
    probs, entropy = probabilities(logits)
    torch.testing.assert_close(probs, logits.softmax(-1))
    torch.testing.assert_close(entropy, torch.special.entr(logits.softmax(-1)).sum(-1))
    torch.testing.assert_close(log_sum_exp(logits), logits.logsumexp(-1))

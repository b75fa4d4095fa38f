"""What a draft `q` is trained to have in common with the target `p`."""

from collections.abc import Iterator
from typing import Literal, get_args

import torch


LossType = Literal["kl", "ce", "lk_alpha", "lk_lambda", "race"]
LOSS_TYPES = get_args(LossType)
# How fast `lk_lambda` goes from KL to the acceptance rate (https://huggingface.co/papers/2602.23881: 3 was best).
LAMBDA_DECAY = 3.0
# How many probabilities are computed at once: on a CPU what fits into its cache, elsewhere what keeps the device busy.
PIECE_ON_CPU, PIECE_ELSEWHERE = 2**17, 2**25


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """
    Splits tensors `(..., L, V)`, and `(..., L)` beside them, along `L`, so that intermediate results are small. A CPU
    computes them in its cache, several times as fast as in memory that it has to ask the system for.
    """
    first, dim = tensors[0], tensors[0].dim() - 2
    piece = PIECE_ON_CPU if first.device.type == "cpu" else PIECE_ELSEWHERE
    rows = max(piece * first.shape[dim] // max(first.numel(), 1), 1)
    return zip(*(tensor.split(rows, dim=dim) for tensor in tensors), strict=True)


def log_sum_exp(logits: torch.FloatTensor) -> torch.FloatTensor:
    """`log Σ exp` in float32 of logits `(..., L, V)`: `(..., L)`."""
    return torch.cat([piece.float().logsumexp(dim=-1) for (piece,) in pieces(logits)], dim=-1)


def probabilities(logits: torch.FloatTensor) -> tuple[torch.FloatTensor, torch.FloatTensor]:
    """Probabilities `(..., L, V)` of logits, in float32, and their entropy `(..., L)`."""
    probs = torch.empty_like(logits, dtype=torch.float32)
    entropies = []
    for piece, piece_probs in pieces(logits, probs):
        log_probs = piece.float().log_softmax(dim=-1)
        torch.exp(log_probs, out=piece_probs)
        entropies.append(-dot(piece_probs, log_probs))
    return probs, torch.cat(entropies, dim=-1)


class DraftLoss(torch.autograd.Function):
    r"""
    Loss of each row. `α = Σ min(p, q)` is the probability that speculative sampling accepts the draft's token, on the
    target's whole vocabulary, and `A` that ours does ([`acceptance_rates`]).

    - `"kl"`: forward KL divergence on the draft vocabulary, `Σ p' log(p' / q)` with `p' = p / Σ p`: the loss of
      EAGLE-3 (https://huggingface.co/papers/2503.01840) up to the target's entropy, which has no gradient.
    - `"ce"`: `-log q` of the target's most probable token in the draft vocabulary.
    - `"lk_alpha"`: `-log α` (LK losses, https://huggingface.co/papers/2602.23881).
    - `"lk_lambda"`: `λ KL + (1 - λ) (1 - α)` with `λ = exp(-3 α)`, a constant for the gradient: KL while the draft is
      far from the target, acceptance when it is near (same paper; here each row has its own `λ`).
    - `"race"`: `KL + (1 - A)`. It sorts the vocabulary in each row, which takes longer than all else on a CPU.

    Gradients with respect to the logits have a closed form, so that one tensor of their size is all there is to keep
    for each drafting step; autograd would keep three or more.

    Args:
        logits (`torch.FloatTensor` of shape `(..., draft_vocab_size)`): The draft's.
        probs (`torch.FloatTensor` of shape `(..., draft_vocab_size)`):
            The target's probabilities of the draft's tokens, renormalized to sum to one.
        mass (`torch.FloatTensor` of shape `(...)`): What they sum to in the target's whole vocabulary.
        entropy (`torch.FloatTensor` of shape `(...)`): The entropy of `probs`.
        loss_type (`str`)

    Returns:
        `torch.FloatTensor` of shape `(...)`.
    """

    @staticmethod
    def forward(ctx, logits, probs, mass, entropy, loss_type):
        gradient, losses = torch.empty_like(logits), []
        for *piece, piece_gradient in pieces(logits, probs, mass, entropy, gradient):
            loss, exact_gradient = loss_and_gradient(*piece, loss_type)
            piece_gradient.copy_(exact_gradient)
            losses.append(loss)
        ctx.save_for_backward(gradient)
        return torch.cat(losses, dim=-1)

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[..., None].to(gradient.dtype), None, None, None, None


def loss_and_gradient(logits, probs, mass, entropy, loss_type: LossType):
    """[`DraftLoss`], and its gradient with respect to the logits."""
    log_q = logits.log_softmax(dim=-1, dtype=torch.float32)
    if loss_type == "ce":
        best = probs.argmax(dim=-1, keepdim=True)
        loss = -log_q.gather(-1, best).squeeze(-1)
        return loss, log_q.exp_().scatter_add_(-1, best, -torch.ones_like(log_q[..., :1]))
    kl = -dot(log_q, probs) - entropy
    q = log_q.exp_()
    if loss_type == "kl":
        return kl, q.sub_(probs)
    if loss_type == "race":
        rate, gradient = race(probs * mass[..., None], q, mass)
        gradient = q * (gradient - dot(q, gradient)[..., None])
        return kl + 1 - rate, q - probs - gradient
    shared = torch.minimum(probs * mass[..., None], q)
    alpha = shared.sum(dim=-1)
    # Raising the probability of a token helps where q is the smaller one. d α / d logits:
    helped = torch.where(shared == q, q, 0)
    gradient = helped - q * helped.sum(dim=-1, keepdim=True)
    floor = alpha.clamp(min=1e-5)  # against infinite losses of a draft that shares nothing with the target
    if loss_type == "lk_alpha":
        return -floor.log(), -gradient / floor[..., None]
    if loss_type != "lk_lambda":
        raise ValueError(f"There is no loss {loss_type!r}.")
    weight = (-LAMBDA_DECAY * alpha).exp()
    loss = weight * kl + (1 - weight) * (1 - alpha)
    return loss, weight[..., None] * (q - probs) - (1 - weight)[..., None] * gradient


@torch.no_grad()
def acceptance_rates(logits: torch.FloatTensor, probs: torch.FloatTensor, mass: torch.FloatTensor):
    """
    The probability `A` that a sample of the target is what the draft guesses by the same noise, for each row.

    Both take the token `x` whose exponential noise is the smallest beside its probability, so that
    `A = Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x)` (https://huggingface.co/papers/2408.07978), which is at most `Σ min(p, q)`.

    Args:
        logits, probs, mass: See [`DraftLoss`].

    Returns:
        `torch.FloatTensor` of shape `(...)`.
    """
    rates = []
    for piece_logits, piece_probs, piece_mass in pieces(logits, probs, mass):
        q = piece_logits.softmax(dim=-1, dtype=torch.float32)
        rates.append(race(piece_probs * piece_mass[..., None], q, piece_mass)[0])
    return torch.cat(rates, dim=-1)


def race(p, q, mass):
    """
    `A` of [`acceptance_rates`] and its derivative by each `q`. Tokens that the draft does not have, of which the target
    says `1 - mass`, count as those it never guesses.
    """
    # For a token x the first ratio is the larger one for those y with p_y / q_y >= p_x / q_x. So in the order of p / q:
    order = (p / q.clamp(min=torch.finfo(q.dtype).tiny)).argsort(dim=-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    above = 1 - mass[..., None] + p.cumsum(dim=-1)  # the sum of p_y over those y
    below = (1 - q.cumsum(dim=-1)).clamp(min=0)  # and of q_y over the others
    total = (above * q + below * p).clamp(min=torch.finfo(q.dtype).tiny)
    by_others = (p / total).square() * q
    gradient = (p / total).square() * below - (by_others.cumsum(dim=-1) - by_others)
    return (p * q / total).sum(dim=-1), torch.empty_like(gradient).scatter_(-1, order, gradient)


def dot(a: torch.FloatTensor, b: torch.FloatTensor) -> torch.FloatTensor:
    """`Σ a b` over the last dimension, in float32 also under autocast, which computes `torch.linalg.vecdot` in half of that."""
    return (a * b).sum(dim=-1)

"""Losses between a draft `q` and its target `p`."""

from collections.abc import Iterator
from typing import Any

import torch


# Elements per piece: on a CPU as many as fit into its cache, elsewhere as many as keep the device busy.
PIECE_ON_CPU, PIECE_ELSEWHERE = 2**17, 2**25


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """
    Splits tensors `(..., L, V)` and `(..., L)` along `L`, and yields the pieces. Intermediate results of a piece are
    small. A CPU keeps them in its cache, which is several times faster than new memory of the system.
    """
    first, dim = tensors[0], tensors[0].dim() - 2
    piece = PIECE_ON_CPU if first.device.type == "cpu" else PIECE_ELSEWHERE
    rows = max(piece * first.shape[dim] // max(first.numel(), 1), 1)
    return zip(*(tensor.split(rows, dim=dim) for tensor in tensors), strict=True)


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """Returns `log Σ exp` `(..., L)` of logits `(..., L, V)`, in float32."""
    return torch.cat([piece.float().logsumexp(dim=-1) for (piece,) in pieces(logits)], dim=-1)


def probabilities(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the probabilities of logits `(..., L, V)` and their entropy `(..., L)`, in float32."""
    probs = torch.empty_like(logits, dtype=torch.float32)
    entropies = []
    for piece, piece_probs in pieces(logits, probs):
        log_probs = piece.float().log_softmax(dim=-1)
        torch.exp(log_probs, out=piece_probs)
        # A target may rule tokens out by a logit of -inf. Zero times that would be NaN.
        entropies.append(-dot(piece_probs, log_probs.clamp_(min=torch.finfo(torch.float32).min)))
    return probs, torch.cat(entropies, dim=-1)


class DraftLoss(torch.autograd.Function):
    r"""
    The loss at each position: the forward KL divergence on the draft vocabulary, `Σ p log(p / q)`. This is the loss of EAGLE-3
    (https://huggingface.co/papers/2503.01840) minus the target's entropy, which has no gradient.

    The gradient with respect to the logits has a closed form. So each drafting step keeps one tensor of their size;
    autograd would keep three or more.

    `logits` are the draft's, and `probs` the target's probabilities of the draft's tokens, renormalized to sum to one, both
    `(..., draft_vocab_size)`. `entropy` is that of `probs`, `(...)`, as are the losses.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        gradient, losses = torch.empty_like(logits), []
        for piece, piece_probs, piece_entropy, piece_gradient in pieces(logits, probs, entropy, gradient):
            log_q = piece.log_softmax(dim=-1, dtype=torch.float32)
            losses.append(-dot(log_q, piece_probs) - piece_entropy)
            piece_gradient.copy_(log_q.exp_().sub_(piece_probs))
        ctx.save_for_backward(gradient)
        return torch.cat(losses, dim=-1)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[..., None].to(gradient.dtype), None, None


@torch.no_grad()
def acceptance_rates(logits: torch.Tensor, probs: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """
    Returns the probability `A` that the draft guesses the target's sample from the same noise, `(...)`. For `logits` and `probs`
    see [`DraftLoss`]. `mass` `(...)` is the sum of `probs` before they were renormalized.

    Both take the token with the smallest ratio of its exponential noise to its probability. So
    `A = Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x)` (https://huggingface.co/papers/2408.07978), which is at most
    `Σ min(p, q)`.
    """
    rates = []
    for piece_logits, piece_probs, piece_mass in pieces(logits, probs, mass):
        q = piece_logits.softmax(dim=-1, dtype=torch.float32)
        rates.append(acceptance_rate(piece_probs * piece_mass[..., None], q, piece_mass))
    return torch.cat(rates, dim=-1)


def acceptance_rate(p: torch.Tensor, q: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """
    Returns `A` of [`acceptance_rates`] for probabilities `(..., V)` of the draft's tokens. The draft never guesses the
    other tokens, which have the target probability `1 - mass`.
    """
    # For a token x, p_y / p_x is the larger ratio for those y with p_y / q_y >= p_x / q_x. So sort by p / q.
    order = (p / q.clamp(min=torch.finfo(q.dtype).tiny)).argsort(dim=-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    above = 1 - mass[..., None] + p.cumsum(dim=-1)  # Σ p_y over those y
    below = (1 - q.cumsum(dim=-1)).clamp(min=0)  # Σ q_y over the others
    total = (above * q + below * p).clamp(min=torch.finfo(q.dtype).tiny)
    return (p * q / total).sum(dim=-1)


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """
    Returns `Σ a b` over the last dimension. It stays in float32 under autocast, unlike `torch.linalg.vecdot`.
    """
    return (a * b).sum(dim=-1)

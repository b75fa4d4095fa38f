"""Muon for a draft's matrices, AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..environment import emulates_bfloat16


if TYPE_CHECKING:
    from .arguments import Eagle3TrainingArguments

if not hasattr(torch.optim, "Muon"):
    raise ImportError(f"Training needs torch 2.9, not {torch.__version__}: pip install 'hf-eagle3[train]'.")


def orthogonalized(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """
    Returns the Newton-Schulz iteration of Muon (https://kellerjordan.github.io/posts/muon/), `X <- aX + bGX + cGGX` with `G =
    XX'`, in float32, of a matrix `(M, N)`. `a`, `b` and `c` are the coefficients. Each step multiplies `X` by a polynomial of
    the first `G`. These factors are small, so they are multiplied with each other first, and with `X` at the end.
    """
    a, b, c = coefficients
    wide = matrix.float() if matrix.shape[0] <= matrix.shape[1] else matrix.float().T
    wide = wide / wide.norm().clamp(min=eps)
    gram, factor = wide @ wide.T, 1.0
    rest: torch.Tensor | None = None
    for step in range(steps):
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        # `factor + rest` is the product of all factors `a + polynomial` so far.
        rest = polynomial if rest is None else torch.addmm(a * rest + factor * polynomial, polynomial, rest)
        factor *= a
        if step < steps - 1:
            gram = torch.addmm(gram, polynomial, gram, beta=a)
            gram = torch.addmm(gram, gram, polynomial, beta=a)
    assert rest is not None  # Muon takes at least one step
    wide = torch.addmm(wide, rest, wide, beta=factor)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


class Float32Muon(torch.optim.Muon):
    """
    [`torch.optim.Muon`] in float32, with `adjust_lr_fn="match_rms_adamw"`. torch's own orthogonalizes in bfloat16, which
    is tens of times slower on processors that compute bfloat16 in software.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                average = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(average, group["momentum"]) if group["nesterov"] else average
                update = orthogonalized(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(weight.shape)))


class MuonWithAdamW(torch.optim.Optimizer):
    """
    Two optimizers in one: [`torch.optim.Muon`] (https://huggingface.co/papers/2502.16982) trains the `matrices`, and AdamW the
    `others` (norms, biases and the head, or groups of them). One schedule moves both learning rates: Muon's, `lr`, whose updates
    are scaled to the size of AdamW's, and `adamw_lr`, by default the same.
    """

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        others: Iterable[torch.nn.Parameter | dict[str, Any]],
        lr: float,
        adamw_lr: float | None = None,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        matrices, groups = list(matrices), list[Any](others)
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            muon = Float32Muon if emulates_bfloat16(matrices[0].device) else torch.optim.Muon
            self.parts.append(muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
        if groups:  # LoRA may train matrices only
            adamw_lr = lr if adamw_lr is None else adamw_lr
            # torch's default for CPUs goes through the memory of the weights many times.
            self.parts.append(
                torch.optim.AdamW(groups, lr=adamw_lr, weight_decay=weight_decay, betas=betas, eps=eps, fused=True)
            )
        # Some schedules of transformers read the first learning rate from `defaults`.
        super().__init__([group for part in self.parts for group in part.param_groups], defaults={"lr": lr})
        self._share()

    def _share(self) -> None:
        """Gives the parts this optimizer's groups and states, which schedulers change and checkpoints save."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups, part.state = [next(groups) for _ in part.param_groups], self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self._share()


def split_parameters(
    named: Iterable[tuple[str, torch.nn.Parameter]], exclude: tuple[str, ...] = ()
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """
    Returns the parameters for Muon, and those for AdamW, which have a part of `exclude` in their names or are not matrices.
    """
    matrices, others = list[torch.nn.Parameter](), list[torch.nn.Parameter]()
    for name, weight in named:
        is_for_muon = weight.dim() == 2 and not any(part in name for part in exclude)
        (matrices if is_for_muon else others).append(weight)
    return matrices, others


def muon_with_adamw(
    model: torch.nn.Module, names_of_decayed: Iterable[str], args: Eagle3TrainingArguments
) -> MuonWithAdamW:
    """
    Returns the optimizer of a draft's trained parameters: Muon for the matrices other than the head, and AdamW at a fifth of
    the learning rate for the rest. Norms and biases are not among the `names_of_decayed`.
    """
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    matrices, others = split_parameters(trained.items(), exclude=("lm_head", "markov_head"))
    decayed = {trained[name] for name in trained.keys() & set(names_of_decayed)}
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for weight in others:
        groups.setdefault(args.weight_decay if weight in decayed else 0.0, []).append(weight)
    return MuonWithAdamW(
        matrices,
        [{"params": weights, "weight_decay": decay} for decay, weights in groups.items()],
        lr=args.learning_rate,
        adamw_lr=args.learning_rate / 5,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )

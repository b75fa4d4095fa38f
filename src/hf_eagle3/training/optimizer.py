"""Muon for a draft's matrices, AdamW for the rest."""

import math
from collections.abc import Iterable

import torch


def orthogonalized(matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float):
    """
    The Newton-Schulz iteration of Muon (https://kellerjordan.github.io/posts/muon/), `X <- aX + bGX + cGGX` with
    `G = XX'`, in float32. Its factors are polynomials of the first `G`, so that they are multiplied with each other, which
    are small, and with `X` only in the end.

    Args:
        matrix (`torch.Tensor` of shape `(M, N)`)
        coefficients (`tuple[float, float, float]`): `a`, `b` and `c`.
        steps (`int`), eps (`float`): As of [`torch.optim.Muon`].
    """
    a, b, c = coefficients
    wide = matrix.float() if matrix.shape[0] <= matrix.shape[1] else matrix.float().T
    wide = wide / wide.norm().clamp(min=eps)
    gram, rest, factor = wide @ wide.T, None, 1.0
    for step in range(steps):
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        # The product of all factors `a + polynomial` so far is `factor + rest`.
        rest = polynomial if rest is None else torch.addmm(a * rest + factor * polynomial, polynomial, rest)
        factor *= a
        if step < steps - 1:
            gram = torch.addmm(gram, polynomial, gram, beta=a)
            gram = torch.addmm(gram, gram, polynomial, beta=a)
    wide = torch.addmm(wide, rest, wide, beta=factor)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


class Float32Muon(torch.optim.Muon if hasattr(torch.optim, "Muon") else object):
    """
    [`torch.optim.Muon`], which orthogonalizes in bfloat16, in float32: for processors that multiply bfloat16 in software
    only, tens of times as slow. With `adjust_lr_fn="match_rms_adamw"`.
    """

    @torch.no_grad()
    def step(self, closure=None):
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
    One optimizer of two: [`torch.optim.Muon`] (https://huggingface.co/papers/2502.16982) takes the matrices, AdamW the
    others. One schedule moves both learning rates.

    Args:
        matrices (`Iterable[torch.nn.Parameter]`): Two-dimensional parameters.
        others (`Iterable[torch.nn.Parameter]` or `Iterable[dict]`): Norms, biases and the head, or groups of them.
        lr (`float`): Muon's; its updates are scaled to the size of AdamW's.
        adamw_lr (`float`, *optional*, defaults to `lr`): AdamW's.
        weight_decay (`float`, *optional*, defaults to 0): For both, but for groups that bring their own.
        betas, eps: AdamW's.
    """

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        others: Iterable[torch.nn.Parameter] | Iterable[dict],
        lr: float,
        adamw_lr: float | None = None,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        matrices, others, self.parts = list(matrices), list(others), []
        if matrices:
            is_emulated = matrices[0].device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported()
            muon = Float32Muon if is_emulated else torch.optim.Muon
            self.parts.append(muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
        if others:  # none, if only LoRA's matrices are trained
            adamw_lr = lr if adamw_lr is None else adamw_lr
            self.parts.append(torch.optim.AdamW(others, lr=adamw_lr, weight_decay=weight_decay, betas=betas, eps=eps))
        # Some schedules of transformers read the first rate here.
        super().__init__([group for part in self.parts for group in part.param_groups], defaults={"lr": lr})
        self._share()

    def _share(self):
        """Lets the parts work on this optimizer's groups and states, which schedulers change, and checkpoints save and load."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups, part.state = [next(groups) for _ in part.param_groups], self.state

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self._share()


def muon_with_adamw(model: torch.nn.Module, names_of_decayed: Iterable[str], args) -> MuonWithAdamW:
    """
    The optimizer of what is trained of a draft: Muon for matrices, but for the head.

    Args:
        model (`torch.nn.Module`): The draft, perhaps wrapped.
        names_of_decayed (`Iterable[str]`): Parameters that decay, if any do: not norms and biases.
        args ([`Eagle3TrainingArguments`]): Rates, decay, and AdamW's settings.
    """
    matrices, others, names_of_decayed = [], {}, set(names_of_decayed)
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        if weight.dim() == 2 and "lm_head" not in name:
            matrices.append(weight)
        else:
            others.setdefault(args.weight_decay if name in names_of_decayed else 0.0, []).append(weight)
    return MuonWithAdamW(
        matrices,
        [{"params": weights, "weight_decay": decay} for decay, weights in others.items()],
        lr=args.learning_rate,
        adamw_lr=args.learning_rate / 5,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )

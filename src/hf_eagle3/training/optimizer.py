"""Muon for a draft's matrices, AdamW for the rest."""

from collections.abc import Iterable

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """
    One optimizer of two: [`torch.optim.Muon`] (https://huggingface.co/papers/2502.16982) takes the matrices, AdamW the
    others. One schedule moves both learning rates.

    Args:
        matrices (`Iterable[torch.nn.Parameter]`): Two-dimensional parameters.
        others (`Iterable[torch.nn.Parameter]`): Norms, biases and the head.
        lr (`float`): Muon's; its updates are scaled to the size of AdamW's.
        adamw_lr (`float`, *optional*, defaults to `lr`): AdamW's.
        weight_decay (`float`, *optional*, defaults to 0): For both.
        betas, eps: AdamW's.
    """

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        others: Iterable[torch.nn.Parameter],
        lr: float,
        adamw_lr: float | None = None,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        matrices, others, self.parts = list(matrices), list(others), []
        if matrices:
            self.parts.append(
                torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        if others:  # none, if only LoRA's matrices are trained
            adamw_lr = lr if adamw_lr is None else adamw_lr
            self.parts.append(torch.optim.AdamW(others, lr=adamw_lr, weight_decay=weight_decay, betas=betas, eps=eps))
        super().__init__([group for part in self.parts for group in part.param_groups], defaults={})
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

"""
HASS (https://huggingface.co/papers/2408.15766): EAGLE's network, trained on its own states, and on the target's most
probable tokens.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedModel

from ..training.losses import DraftLoss
from ..training.ttt import RowTargets
from .eagle import EagleConfig, EagleForSpeculation


@strict
class HassConfig(EagleConfig):
    """The configuration of HASS's draft. Like the paper it defaults to EAGLE-2's tree. See [`EagleConfig`]."""

    model_type = "hass"


class HassForSpeculation(EagleForSpeculation):
    """
    HASS's draft: EAGLE's network, with another training.

    - Harmonized context alignment (section 3.2): each step of training reads the predictions of the step before, with the
      attention of drafting. EAGLE-3 calls this training-time test. Gradients flow through all steps.
    - Harmonized objective distillation (section 3.1): a loss on the target's `TOP_K` most probable tokens.

    Args:
        config ([`HassConfig`]): The configuration.
    """

    config_class = HassConfig
    most_steps = 3
    TOP_K, TOP_K_WEIGHT = 10, 1.0

    @classmethod
    def default_overrides(cls, target: PreTrainedModel, overrides: dict[str, Any]) -> dict[str, Any]:
        return super().default_overrides(target, {"static_tree": None} | overrides)

    def row_loss(self, logits: torch.Tensor, targets: RowTargets) -> torch.Tensor:
        loss = DraftLoss.apply(logits, targets.probs, targets.entropy)
        probs, tokens = targets.probs.topk(min(self.TOP_K, targets.probs.shape[-1]), dim=-1)
        log_probs = logits.float().gather(-1, tokens) - torch.logsumexp(logits.float(), dim=-1, keepdim=True)
        top_k_loss = -(probs * log_probs).sum(dim=-1)
        return self.CLASSIFICATION_WEIGHT * loss + self.TOP_K_WEIGHT * top_k_loss

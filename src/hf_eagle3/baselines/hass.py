"""
HASS (https://huggingface.co/papers/2408.15766): EAGLE's network, trained on its own states as it will be used, and on the
target's most probable tokens.
"""

import torch
from huggingface_hub.dataclasses import strict

from ..training.losses import DraftLoss
from .eagle import EagleConfig, EagleForSpeculation


@strict
class HassConfig(EagleConfig):
    """Of the draft of HASS. See [`EagleConfig`]. The paper decodes with EAGLE-2's tree: `static_tree=None`, which is the default."""

    model_type = "hass"


class HassForSpeculation(EagleForSpeculation):
    """
    Harmonized context alignment (section 3.2): later steps of training read what earlier ones predicted, and attend to
    what they would attend to when drafting, which is what EAGLE-3 came to call training-time test. Gradients go through
    all steps. Harmonized objective distillation (section 3.1): a loss on the target's `TOP_K` most probable tokens.

    Args:
        config ([`HassConfig`]): Of the network.
    """

    config_class = HassConfig
    TRAINING_STEPS = 3
    TOP_K, TOP_K_WEIGHT = 10, 1.0

    @classmethod
    def default_overrides(cls, target, overrides):
        return super().default_overrides(target, {"static_tree": None} | overrides)

    def row_loss(self, logits, targets):
        loss = DraftLoss.apply(logits, targets.probs, targets.mass, targets.entropy, "kl")
        probs, tokens = targets.probs.topk(min(self.TOP_K, targets.probs.shape[-1]), dim=-1)
        log_probs = logits.float().gather(-1, tokens) - torch.logsumexp(logits.float(), dim=-1, keepdim=True)
        top_k_loss = -(probs * log_probs).sum(dim=-1)
        return self.CLASSIFICATION_WEIGHT * loss + self.TOP_K_WEIGHT * top_k_loss

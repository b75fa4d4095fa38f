"""
EAGLE (https://huggingface.co/papers/2401.15077) and, with a tree that follows its confidence, EAGLE-2
(https://huggingface.co/papers/2406.16858): one layer goes on with the target's own last states, for the target's own head.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from ..remote_code.modeling_eagle3 import (
    DraftModel,
    Eagle3Attention,
    Eagle3ForSpeculation,
    Eagle3RMSNorm,
    Eagle3RotaryEmbedding,
)
from ..training.losses import DraftLoss
from ..training.ttt import TTTBatch, TTTOutput, UnrollStep, ttt_unroll, unroll_loss
from .baseline import BaselineConfig, BaselineDraft, check_steps


@strict
class EagleConfig(BaselineConfig):
    """Of the draft of EAGLE. See [`BaselineConfig`]. With `static_tree=None` it is EAGLE-2, with the same weights."""

    model_type = "eagle"


class EagleDecoderLayer(nn.Module):
    """A layer of Llama's without a norm before attention; the first one fuses state and embedding (section 4.1)."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        layer_config = config.transformer_layer_config
        size, eps = layer_config.hidden_size, layer_config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size) if layer_idx == 0 else None
        self.self_attn = Eagle3Attention(layer_config, layer_idx, input_size=size)
        self.post_attention_layernorm = Eagle3RMSNorm(size, eps=eps)
        self.mlp = LlamaMLP(layer_config)

    def forward(self, hidden_states, inputs_embeds, only_last=False, **attention_kwargs):
        if self.fc is not None:
            hidden_states = self.fc(torch.cat([inputs_embeds, hidden_states], dim=-1))
        residual = hidden_states[:, -1:] if only_last else hidden_states
        hidden_states = residual + self.self_attn(hidden_states, only_last=only_last, **attention_kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class EagleForSpeculation(BaselineDraft, Eagle3ForSpeculation):
    """
    Reads what the target's head reads at position `t` with the token at `t + 1`, and predicts what the head would read
    at `t + 1`. Each drafting step takes what the one before predicted. The head is a copy of the target's, and is not
    trained.

    Args:
        config ([`EagleConfig`]): Of the network.
    """

    config_class = EagleConfig
    _no_split_modules = ["EagleDecoderLayer"]
    frozen_modules = ("embed_tokens", "lm_head")
    # Weights of the losses (section 4.2), and the noise that states are trained with.
    CLASSIFICATION_WEIGHT, NOISE = 0.1, 0.1
    TRAINING_STEPS = 1

    def __init__(self, config: EagleConfig):
        DraftModel.__init__(self, config)  # of EAGLE-3 it has the steps, not the layers
        layer_config = config.transformer_layer_config
        layer_config._attn_implementation = self.config._attn_implementation
        self.layers = nn.ModuleList(EagleDecoderLayer(config, i) for i in range(layer_config.num_hidden_layers))
        self.norm = nn.Identity()
        self.rotary_emb = Eagle3RotaryEmbedding(layer_config)
        self.set_output_embeddings(nn.Linear(layer_config.hidden_size, config.draft_vocab_size, bias=False))
        self.post_init()

    @classmethod
    def from_target(cls, target, *args, **kwargs):
        """See [`~modeling_eagle3.DraftModel.from_target`]. Factors of the target's logits become part of the copied head."""
        draft, config = super().from_target(target, *args, **kwargs), target.config.get_text_config(decoder=True)
        factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        draft.lm_head.weight.data *= factor
        return draft

    def set_output_embeddings(self, head: nn.Linear) -> None:
        self.lm_head = head.requires_grad_(False)

    def combine_hidden_states(self, aux: torch.FloatTensor) -> torch.FloatTensor:
        """The state itself: there is but one."""
        return aux

    def unroll(self, batch: TTTBatch, steps: int) -> Iterator[UnrollStep]:
        """With the loss of each state: smooth L1 to the target's (section 4.2)."""
        states = batch.aux_hidden_states
        if self.training:  # against states that are a little off when drafting
            batch = replace(batch, aux_hidden_states=states + (2 * torch.rand_like(states) - 1) * self.NOISE)
        for step, (predicted, head, *_) in enumerate(ttt_unroll(self, batch, steps)):
            ahead = min(1 + step, states.shape[1])
            expected = F.pad(states[:, ahead:], (0, 0, 0, ahead))
            yield UnrollStep(predicted, head, F.smooth_l1_loss(predicted, expected, reduction="none").mean(dim=-1))

    def training_loss(self, batch: TTTBatch, steps: int) -> TTTOutput:
        """Regression of states, and a tenth of the cross-entropy with the target's distribution (section 4.2)."""
        check_steps(self, steps, self.TRAINING_STEPS)
        return unroll_loss(self, batch, self.unroll(batch, steps), self.row_loss)

    def row_loss(self, logits, targets):
        # Cross-entropy is the divergence and what does not depend on the draft.
        return self.CLASSIFICATION_WEIGHT * DraftLoss.apply(logits, targets.probs, targets.mass, targets.entropy, "kl")

"""
EAGLE (https://huggingface.co/papers/2401.15077): one layer predicts the target's next last states, and the target's head
reads them. With a dynamic tree it is EAGLE-2 (https://huggingface.co/papers/2406.16858).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from ..remote_code.draft_model_eagle3 import DraftModel
from ..remote_code.modeling_eagle3 import (
    Eagle3Attention,
    Eagle3ForSpeculation,
    Eagle3RMSNorm,
    Eagle3RotaryEmbedding,
)
from ..training.losses import DraftLoss
from ..training.ttt import RowTargets, TTTBatch, UnrollStep, ttt_unroll
from .baseline import BaselineConfig, BaselineDraft


@strict
class EagleConfig(BaselineConfig):
    """The configuration of EAGLE's draft. With `static_tree=None` the same weights are EAGLE-2. See [`BaselineConfig`]."""

    model_type = "eagle"


class EagleDecoderLayer(nn.Module):
    """A Llama layer without a norm before attention. The first layer fuses state and embedding (section 4.1)."""

    def __init__(self, config: EagleConfig, layer_idx: int):
        super().__init__()
        layer_config = config.transformer_layer_config
        size, eps = layer_config.hidden_size, layer_config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size) if layer_idx == 0 else None
        self.self_attn = Eagle3Attention(layer_config, layer_idx, input_size=size)
        self.post_attention_layernorm = Eagle3RMSNorm(size, eps=eps)
        self.mlp = LlamaMLP(layer_config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor,
        only_last: bool = False,
        **attention_kwargs: Any,
    ) -> torch.Tensor:
        if self.fc is not None:
            hidden_states = self.fc(torch.cat([inputs_embeds, hidden_states], dim=-1))
        residual = hidden_states[:, -1:] if only_last else hidden_states
        hidden_states = residual + self.self_attn(hidden_states, only_last=only_last, **attention_kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class EagleForSpeculation(BaselineDraft, Eagle3ForSpeculation):
    """
    EAGLE's draft. It reads the state of the target's head at position `t` and the token at `t + 1`, and predicts the state at
    `t + 1`. Each drafting step reads the prediction of the step before. The head is a copy of the target's, and is not trained.

    Args:
        config ([`EagleConfig`]): The configuration.
    """

    config_class = EagleConfig
    _no_split_modules = ["EagleDecoderLayer"]
    frozen_modules = ("embed_tokens", "lm_head")
    # The weight of cross-entropy beside regression (section 4.2), and the range of the noise on states in training.
    CLASSIFICATION_WEIGHT, NOISE = 0.1, 0.1
    most_steps = 1

    def __init__(self, config: EagleConfig):
        DraftModel.__init__(self, config)  # without EAGLE-3's layers
        layer_config = config.transformer_layer_config
        layer_config._attn_implementation = self.config._attn_implementation
        self.layers = nn.ModuleList(EagleDecoderLayer(config, i) for i in range(layer_config.num_hidden_layers))
        self.norm = nn.Identity()
        self.rotary_emb = Eagle3RotaryEmbedding(layer_config)
        self.set_output_embeddings(nn.Linear(layer_config.hidden_size, config.draft_vocab_size, bias=False))
        self.post_init()

    def set_output_embeddings(self, head: nn.Linear) -> None:
        self.lm_head = head.requires_grad_(False)

    def combine_hidden_states(self, aux: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the state: the draft reads only one."""
        return aux if isinstance(aux, torch.Tensor) else aux[0]

    def unroll(self, batch: TTTBatch, steps: int) -> Iterator[UnrollStep]:
        """Yields the drafting steps with the smooth L1 loss of each state (section 4.2)."""
        states = batch.aux_hidden_states
        if self.training:  # makes the draft robust to its own errors
            batch = replace(batch, aux_hidden_states=states + (2 * torch.rand_like(states) - 1) * self.NOISE)
        for step, (predicted, head, *_) in enumerate(ttt_unroll(self, batch, steps)):
            ahead = min(1 + step, states.shape[1])
            expected = F.pad(states[:, ahead:], (0, 0, 0, ahead))
            yield UnrollStep(predicted, head, F.smooth_l1_loss(predicted, expected, reduction="none").mean(dim=-1))

    def row_loss(self, logits: torch.Tensor, targets: RowTargets) -> torch.Tensor:
        """
        Returns the loss of each row `(B, R)` beside that of [`unroll`]: a tenth of the cross-entropy with the target (section 4.2).
        """
        # Cross-entropy differs from this divergence by a constant.
        return self.CLASSIFICATION_WEIGHT * DraftLoss.apply(logits, targets.probs, targets.entropy)

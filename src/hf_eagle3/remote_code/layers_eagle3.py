# SPDX-License-Identifier: Apache-2.0
"""The draft's decoder layers."""

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from .configuration_eagle3 import Eagle3Config


class Eagle3RMSNorm(LlamaRMSNorm):
    """Llama's norm by torch's own operator, which is faster in training."""

    def forward(self, hidden_states):
        weight = self.weight.to(hidden_states.dtype)  # they differ under autocast, on GPUs the result's dtype, too
        normed = nn.functional.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)
        return normed.to(hidden_states.dtype)


class Eagle3Head(nn.Linear):
    """
    The head `(..., H) -> (..., V)`. In drafting the rows of a level are few, and processors take less time where the larger
    matrix is on the left.
    """

    LARGE = 2**20  # weights from which on that matters

    def forward(self, states):
        if self.out_features == 0:
            raise ValueError(
                "This draft stores no head, and uses its target's. Call `draft.borrow_embeddings(target)` before `draft(...)`; "
                "`target.generate(..., assistant_model=draft)` needs no such call."
            )
        of_processor = states.device.type == "cpu" and states.dtype == torch.float32
        is_plain = (
            type(self.weight) is nn.Parameter and self.bias is None
        )  # neither quantized nor spread over processes
        if not (
            of_processor and is_plain and self.weight.numel() >= self.LARGE and 1 < states.shape[:-1].numel() <= 32
        ):
            return super().forward(states)
        return (self.weight @ states.flatten(0, -2).T).T.reshape(*states.shape[:-1], -1)


class Eagle3RotaryEmbedding(LlamaRotaryEmbedding):
    """
    Llama's, whose frequencies stay in float32 when the draft is cast: rounded to bfloat16 they are those of other
    positions, by a whole radian after a thousand tokens.
    """

    def _apply(self, fn, recurse=True):
        tables = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, table in tables.items():
            if table is not None and self._buffers[name].dtype != table.dtype:
                self._buffers[name] = table.to(self._buffers[name].device)
        return self


class Eagle3Attention(LlamaAttention):
    """Llama's attention with inputs of any width, and Qwen3's query and key norms when the layers are Qwen3's."""

    def __init__(self, config, layer_idx: int, input_size: int):
        super().__init__(config, layer_idx)
        if input_size != config.hidden_size:
            for name in ("q_proj", "k_proj", "v_proj"):
                out_features = getattr(self, name).out_features
                setattr(self, name, nn.Linear(input_size, out_features, bias=config.attention_bias))
        if config.model_type == "qwen3":
            self.q_norm = Eagle3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = Eagle3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()
        is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None

    def forward(self, hidden_states, position_embeddings, attention_mask=None, cache=None, only_last=False, **kwargs):
        rows = slice(-1, None) if only_last else slice(None)
        query_input = hidden_states[:, rows]
        query = self.q_norm(self._by_head(self.q_proj(query_input))).transpose(1, 2)
        key = self.k_norm(self._by_head(self.k_proj(hidden_states))).transpose(1, 2)
        value = self._by_head(self.v_proj(hidden_states)).transpose(1, 2)
        cos, sin = (each.unsqueeze(1) for each in position_embeddings)  # (B, 1, S, head_dim)
        query, key = _rotate(query, cos[:, :, rows], sin[:, :, rows]), _rotate(key, cos, sin)
        if only_last and attention_mask is not None:
            attention_mask = attention_mask[..., rows, :]
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)

        # A cache may bring its own attention: training-time test attends to some keys on the diagonal only.
        attention = getattr(cache, "attention_forward", None)
        if attention is None:
            attention = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention_forward
            )
        attn_output, _ = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(attn_output.reshape(*query_input.shape[:-1], -1))

    def _by_head(self, states):
        return states.view(*states.shape[:-1], -1, self.head_dim)


def _rotate(states, cos, sin):
    return states * cos + rotate_half(states) * sin


class Eagle3DecoderLayer(nn.Module):
    """
    A decoder layer. The first one reads the token's embedding beside the hidden state (EAGLE-3, section 3.1), the
    others are ordinary.

    With `only_last` it returns the last row only: all that others leave to later steps are their keys and values.
    """

    def __init__(self, config: Eagle3Config, layer_idx: int):
        super().__init__()
        layer_config = config.transformer_layer_config
        hidden_size, eps = layer_config.hidden_size, layer_config.rms_norm_eps
        self.reads_embeddings = layer_idx == 0
        self.norm_before_residual = config.norm_before_residual
        if self.reads_embeddings:
            self.hidden_norm = Eagle3RMSNorm(hidden_size, eps=eps)
        self.input_layernorm = Eagle3RMSNorm(hidden_size, eps=eps)
        self.self_attn = Eagle3Attention(
            layer_config, layer_idx, input_size=2 * hidden_size if self.reads_embeddings else hidden_size
        )
        self.post_attention_layernorm = Eagle3RMSNorm(hidden_size, eps=eps)
        self.mlp = (Qwen3MLP if layer_config.model_type == "qwen3" else LlamaMLP)(layer_config)

    def forward(self, hidden_states, inputs_embeds, only_last=False, **attention_kwargs):
        residual = hidden_states
        if self.reads_embeddings:
            hidden_states = self.hidden_norm(hidden_states)
            if self.norm_before_residual:
                residual = hidden_states
            attention_input = torch.cat([self.input_layernorm(inputs_embeds), hidden_states], dim=-1)  # (B, S, 2H)
        else:
            attention_input = self.input_layernorm(hidden_states)
        if only_last:
            residual = residual[:, -1:]
        hidden_states = residual + self.self_attn(attention_input, only_last=only_last, **attention_kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 draft (https://huggingface.co/papers/2503.01840), built from transformers' own parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationMixin, PreTrainedConfig
from transformers.masking_utils import create_masks_for_generate
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
from transformers.utils import ModelOutput

from .configuration_eagle3 import Eagle3Config
from .draft_model_eagle3 import BORROW, DraftModel
from .drafter_eagle3 import Drafter
from .outputs_eagle3 import CACHE
from .tree_eagle3 import GenerationCall


# Layers ------------------------------------------------------------------------------------------------------------


class Eagle3RMSNorm(LlamaRMSNorm):
    """Llama's norm with torch's own operator, which is faster in training."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(hidden_states.dtype)  # under autocast they differ
        normed = nn.functional.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)
        return normed.to(hidden_states.dtype)  # on GPUs autocast computes in float32


class Eagle3Head(nn.Linear):
    """The head `(..., H) -> (..., V)`. Drafting reads few rows, and CPUs are faster if the larger matrix is on the left."""

    MIN_WEIGHTS = 2**20  # smaller heads gain nothing

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.out_features == 0:
            raise ValueError(f"This draft stores no head and uses its target's. {BORROW}")
        is_large = (
            states.device.type == "cpu" and states.dtype == torch.float32 and self.weight.numel() >= self.MIN_WEIGHTS
        )
        is_plain = type(self.weight) is nn.Parameter and self.bias is None  # not quantized, and not sharded
        if not (is_large and is_plain and 1 < states.shape[:-1].numel() <= 32):
            return super().forward(states)
        return (self.weight @ states.flatten(0, -2).T).T.reshape(*states.shape[:-1], -1)


class Eagle3RotaryEmbedding(LlamaRotaryEmbedding):
    """
    Llama's, but of a part of each head if the configuration has a `partial_rotary_factor`. Casts leave the frequencies in
    float32. In bfloat16 positions would be a radian off after a thousand tokens.
    """

    @staticmethod
    def compute_default_rope_parameters(config: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, float]:
        rope = config.rope_parameters
        dim = int(config.head_dim * (rope.get("partial_rotary_factor") or 1))
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim), 1.0

    def _apply(self, fn: Any, recurse: bool = True) -> "Eagle3RotaryEmbedding":
        def move(table: torch.Tensor) -> torch.Tensor:
            moved = fn(table)
            return moved if moved.dtype == table.dtype else table.to(moved.device)

        return super()._apply(move, recurse)


class Eagle3Attention(LlamaAttention):
    """Llama's attention with inputs of any width, and Qwen3's query and key norms if the layers are Qwen3's."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int, input_size: int):
        super().__init__(config, layer_idx)
        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(self, name).out_features
            setattr(self, name, nn.Linear(input_size, size, bias=config.attention_bias))
        has_norms = config.model_type == "qwen3"
        self.q_norm, self.k_norm = (
            Eagle3RMSNorm(self.head_dim, eps=config.rms_norm_eps) if has_norms else nn.Identity() for _ in range(2)
        )
        is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        only_last: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        rows = slice(-1, None) if only_last else slice(None)
        query_input = hidden_states[:, rows]
        query = self.q_norm(self._split_heads(self.q_proj(query_input))).transpose(1, 2)
        key = self.k_norm(self._split_heads(self.k_proj(hidden_states))).transpose(1, 2)
        value = self._split_heads(self.v_proj(hidden_states)).transpose(1, 2)
        cos, sin = (each.unsqueeze(1) for each in position_embeddings)  # (B, 1, S, head_dim)
        query, key = _rotate(query, cos[:, :, rows], sin[:, :, rows]), _rotate(key, cos, sin)
        if only_last and attention_mask is not None:
            attention_mask = attention_mask[..., rows, :]
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)

        # A cache may bring its own attention: in training-time test some keys are attended to on the diagonal only.
        attention = getattr(cache, "attention_forward", None) or ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        kwargs |= {"dropout": dropout, "scaling": self.scaling, "sliding_window": self.sliding_window}
        attn_output, _ = attention(self, query, key, value, attention_mask, **kwargs)
        return self.o_proj(attn_output.reshape(*query_input.shape[:-1], -1))

    def _split_heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.view(*states.shape[:-1], -1, self.head_dim)


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    if (dim := cos.shape[-1]) < states.shape[-1]:  # a part of each head
        return torch.cat([_rotate(states[..., :dim], cos, sin), states[..., dim:]], dim=-1)
    return states * cos + rotate_half(states) * sin


class Eagle3DecoderLayer(nn.Module):
    """
    A decoder layer. The first one reads the token's embedding beside the hidden state (EAGLE-3, section 3.1), the
    others are ordinary. With `only_last` it computes only keys and values for all rows, and returns the last row.
    """

    def __init__(self, config: Eagle3Config, layer_idx: int):
        super().__init__()
        layer_config = config.transformer_layer_config
        hidden_size, eps = layer_config.hidden_size, layer_config.rms_norm_eps
        self.reads_embeddings = layer_idx == 0
        self.config = config
        if self.reads_embeddings:
            self.hidden_norm = Eagle3RMSNorm(hidden_size, eps=eps)
        self.input_layernorm = Eagle3RMSNorm(hidden_size, eps=eps)
        self.self_attn = Eagle3Attention(layer_config, layer_idx, input_size=hidden_size * (1 + self.reads_embeddings))
        self.post_attention_layernorm = Eagle3RMSNorm(hidden_size, eps=eps)
        self.mlp = (Qwen3MLP if layer_config.model_type == "qwen3" else LlamaMLP)(layer_config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor,
        only_last: bool = False,
        **attention_kwargs: Any,
    ) -> torch.Tensor:
        residual = hidden_states
        if self.reads_embeddings:
            hidden_states = self.hidden_norm(hidden_states)
            if self.config.norm_before_residual:
                residual = hidden_states
            attention_input = torch.cat([self.input_layernorm(inputs_embeds), hidden_states], dim=-1)  # (B, S, 2H)
        else:
            attention_input = self.input_layernorm(hidden_states)
        if only_last:
            residual = residual[:, -1:]
        hidden_states = residual + self.self_attn(attention_input, only_last=only_last, **attention_kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


# The draft ------------------------------------------------------------------------------------------------------------


@dataclass
class Eagle3Output(ModelOutput):
    """
    Output of [`Eagle3ForSpeculation`].

    Args:
        logits (`torch.FloatTensor` of shape `(batch_size, sequence_length, draft_vocab_size)`):
            Scores over the draft vocabulary. Row `t` predicts the token at position `t + 2`. With `logits_to_keep`
            there are fewer rows.
        last_hidden_state (`torch.FloatTensor` of shape `(batch_size, sequence_length, hidden_size)`):
            The `hidden_states` of the next drafting step (before or after the final norm, see `norm_output`), with as
            many rows.
        cache (`Cache`, *optional*):
            The draft's own cache.
    """

    logits: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None
    cache: Cache | None = None


class Eagle3ForSpeculation(DraftModel, GenerationMixin):  # named again: transformers asks direct bases
    r"""
    An EAGLE-3 draft. Pass it to the target's `generate` as `assistant_model`, and the text stays the same:

    ```py
    draft = AutoModel.from_pretrained("me/My-Model-speculator.eagle3", trust_remote_code=True)
    target.generate(**inputs, assistant_model=draft)
    ```

    Row `t` of a draft's input pairs the target's states at position `t` with the token at `t + 1`, has rotary
    position `t`, and predicts the token at `t + 2`.

    Args:
        config ([`Eagle3Config`]): Configuration of the network. Its weights are random;
            [`~Eagle3ForSpeculation.from_target`] makes a draft for a target.
    """

    _no_split_modules = ["Eagle3DecoderLayer"]
    _skip_keys_device_placement = ["cache"]
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        layer_config = config.transformer_layer_config
        layer_config._attn_implementation = self.config._attn_implementation
        hidden_size, eps = layer_config.hidden_size, layer_config.rms_norm_eps
        num_states, state_size = config.num_aux_hidden_states, config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = Eagle3RMSNorm(num_states * state_size, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Eagle3RMSNorm(state_size, eps=eps) for _ in range(num_states))
        self.fc = nn.Linear(num_states * state_size, hidden_size, bias=False)
        self.layers = nn.ModuleList(Eagle3DecoderLayer(config, i) for i in range(layer_config.num_hidden_layers))
        self.norm: nn.Module = Eagle3RMSNorm(hidden_size, eps=eps)
        self.lm_head: nn.Linear = Eagle3Head(hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = Eagle3RotaryEmbedding(layer_config)
        if config.is_parallel:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, num_states * state_size))
        self.post_init()

    def combine_hidden_states(self, aux: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """
        Fuses the target's states into one (EAGLE-3, section 3.1).

        Args:
            aux (`torch.FloatTensor` of shape `(batch_size, sequence_length, num_aux * target_hidden_size)`):
                The states of `config.eagle_aux_hidden_state_layer_ids`, concatenated, or a sequence of them.

        Returns:
            `torch.FloatTensor` of shape `(batch_size, sequence_length, hidden_size)`.
        """
        joined = aux if isinstance(aux, torch.Tensor) else torch.cat(list(aux), dim=-1)
        if joined.shape[-1] != self.fc.in_features:
            raise ValueError(
                f"The draft fuses {self.config.num_aux_hidden_states} target states of "
                f"{self.config.target_hidden_size}, {self.fc.in_features} in all, but got {joined.shape[-1]}."
            )
        if self.config.norm_before_fc:
            joined = self.input_norm(joined)
        if self.config.fc_norm:
            states = joined.split(self.config.target_hidden_size, dim=-1)
            joined = torch.cat([norm(state) for norm, state in zip(self.fc_norm, states, strict=True)], dim=-1)
        return self.fc(joined)

    def mask_inputs(self, num_rows: int, embedding: nn.Embedding | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """`inputs_embeds` and `hidden_states` `(1, num_rows, hidden_size)` of tokens that are not known yet (P-EAGLE, section 3)."""
        tokens = torch.full((1, num_rows), self.config.mask_token_id, device=self.lm_head.weight.device)
        hidden_states = self.combine_hidden_states(self.mask_hidden).expand(-1, num_rows, -1)
        return self.embed(tokens, embedding), hidden_states

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> Eagle3Output:
        r"""
        One drafting step.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`):
                Target token ids; row `t` holds the token at position `t + 1`.
            hidden_states (`torch.FloatTensor` of shape `(batch_size, sequence_length, hidden_size)`):
                Row `t` is [`combine_hidden_states`] of the target's states at position `t`, or the
                `last_hidden_state` of the drafting step before.
            attention_mask (`torch.Tensor`, *optional*):
                Of shape `(batch_size, past_length + sequence_length)` with zeros on padding, or an additive mask of
                shape `(batch_size, 1, sequence_length, past_length + sequence_length)`, or a dict of those by layer
                type.
            position_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
                Rotary positions. By default they continue those of the cache.
            cache (`Cache`, *optional*):
                The draft's cache, extended in place.
            inputs_embeds (`torch.FloatTensor` of shape `(batch_size, sequence_length, hidden_size)`, *optional*):
                Embeddings to read instead of `input_ids`.
            logits_to_keep (`int`, *optional*, defaults to `0`):
                Return only this many rows, the last ones. 0 stands for all.
            kwargs (*optional*):
                Ignored.

        Returns:
            [`Eagle3Output`]
        """
        if (input_ids is None) == (inputs_embeds is None) or hidden_states is None:
            raise ValueError(
                "A drafting step takes `hidden_states` and either `input_ids` or `inputs_embeds`. To generate text, call "
                "`target.generate(..., assistant_model=draft)`."
            )
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed(input_ids)
        normed, last_hidden_state = self.step(
            inputs_embeds, hidden_states, attention_mask, position_ids, cache, only_last=logits_to_keep == 1
        )
        logits = self.lm_head(normed[:, -logits_to_keep:])
        return Eagle3Output(logits=logits, last_hidden_state=last_hidden_state[:, -logits_to_keep:], cache=cache)

    def step(
        self,
        inputs_embeds: torch.Tensor,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        only_last: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[`forward`] up to the head: the input of `lm_head`, and the `last_hidden_state`. With `only_last`, of the last row."""
        if inputs_embeds.shape != hidden_states.shape:
            raise ValueError(
                f"Embeddings of shape {tuple(inputs_embeds.shape)} do not match `hidden_states` of shape "
                f"{tuple(hidden_states.shape)}. Fuse the target's states with `combine_hidden_states` first."
            )
        if position_ids is None:
            past_length = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None] + past_length
        layer_config, masks = self.config.transformer_layer_config, attention_mask
        if not isinstance(masks, dict):
            masks = create_masks_for_generate(
                layer_config, inputs_embeds, attention_mask, position_ids=position_ids, **{CACHE: cache}
            )
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer, layer_type in zip(self.layers, layer_config.layer_types, strict=True):
            hidden_states = layer(
                hidden_states,
                inputs_embeds,
                position_embeddings=position_embeddings,
                attention_mask=masks[layer_type],
                cache=cache,
                only_last=only_last and layer is self.layers[-1],  # it needs all rows of the layer before
            )
        normed = self.norm(hidden_states)
        return normed, normed if self.config.norm_output else hidden_states

    def proposer(self, call: GenerationCall) -> Drafter:
        """See [`~assistant_eagle3.AssistantMixin.proposer`]."""
        return Drafter(self, call)


Eagle3ForSpeculation.register_for_auto_class("AutoModel")

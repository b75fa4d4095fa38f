# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 draft (https://huggingface.co/papers/2503.01840), built from transformers' own parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import ModelOutput

from .assistant_eagle3 import CUSTOM_GENERATE, install_generation_hook
from .configuration_eagle3 import Eagle3Config
from .draft_eagle3 import DraftModel
from .drafter_eagle3 import Drafter
from .layers_eagle3 import Eagle3DecoderLayer, Eagle3Head, Eagle3RMSNorm, Eagle3RotaryEmbedding
from .outputs_eagle3 import CACHE
from .tree_eagle3 import GenerationCall


@dataclass
class Eagle3Output(ModelOutput):
    """
    Output of [`Eagle3ForSpeculation`].

    Args:
        logits (`torch.FloatTensor` of shape `(batch_size, sequence_length, draft_vocab_size)`):
            Scores over the draft vocabulary. Row `t` predicts the token at position `t + 2`. Fewer rows with
            `logits_to_keep`.
        last_hidden_state (`torch.FloatTensor` of shape `(batch_size, sequence_length, hidden_size)`):
            What the next drafting step takes as `hidden_states` (before or after the final norm, see `norm_output`).
            As many rows.
        cache (`Cache`, *optional*):
            The draft's own cache.
    """

    logits: torch.FloatTensor | None = None
    last_hidden_state: torch.FloatTensor | None = None
    cache: Cache | None = None


class Eagle3ForSpeculation(DraftModel, GenerationMixin):  # named again: transformers asks direct bases
    r"""
    An EAGLE-3 draft. Pass it to the target's `generate` as `assistant_model` and the text stays what it was:

    ```py
    draft = AutoModel.from_pretrained("me/My-Model-speculator.eagle3", trust_remote_code=True)
    target.generate(**inputs, assistant_model=draft)
    ```

    Row `t` of a draft's input pairs the target's states at position `t` with the token at `t + 1`, sits at rotary
    position `t`, and predicts the token at `t + 2`.

    Args:
        config ([`Eagle3Config`]): Of the network, whose weights are random. A draft for a target is made by
            [`~Eagle3ForSpeculation.from_target`].
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
        aux_size = config.num_aux_hidden_states * config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = Eagle3RMSNorm(aux_size, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                Eagle3RMSNorm(config.target_hidden_size, eps=eps) for _ in range(config.num_aux_hidden_states)
            )
        self.fc = nn.Linear(aux_size, hidden_size, bias=False)
        self.layers = nn.ModuleList(Eagle3DecoderLayer(config, i) for i in range(layer_config.num_hidden_layers))
        self.norm = Eagle3RMSNorm(hidden_size, eps=eps)
        self.lm_head = Eagle3Head(hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = Eagle3RotaryEmbedding(layer_config)
        if config.is_parallel:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, aux_size))
        self.post_init()

    @classmethod
    def overrides_for(cls, target: PreTrainedModel, overrides: dict[str, Any]) -> dict[str, Any]:
        """EAGLE-3.1's norms are on by default, but for parallel drafts, which engines know without."""
        is_parallel = overrides.get("mask_token_id") is not None
        norms = {"fc_norm": not overrides.get("norm_before_fc") and not is_parallel, "norm_output": not is_parallel}
        return norms | overrides

    def combine_hidden_states(self, aux: torch.FloatTensor | Sequence[torch.FloatTensor]) -> torch.FloatTensor:
        """
        Fuses the target's states into one (EAGLE-3, section 3.1).

        Args:
            aux (`torch.FloatTensor` of shape `(batch_size, sequence_length, num_aux * target_hidden_size)`):
                The states of `config.eagle_aux_hidden_state_layer_ids`, concatenated, or a sequence of them.

        Returns:
            `torch.FloatTensor` of shape `(batch_size, sequence_length, hidden_size)`.
        """
        if not isinstance(aux, torch.Tensor):
            aux = torch.cat(list(aux), dim=-1)
        if aux.shape[-1] != self.fc.in_features:
            raise ValueError(
                f"The draft fuses {self.config.num_aux_hidden_states} target states of "
                f"{self.config.target_hidden_size}, {self.fc.in_features} in all, but got {aux.shape[-1]}."
            )
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            states = aux.split(self.config.target_hidden_size, dim=-1)
            aux = torch.cat([norm(state) for norm, state in zip(self.fc_norm, states, strict=True)], dim=-1)
        return self.fc(aux)

    def mask_inputs(self, num_rows: int, embedding: nn.Embedding | None = None):
        """
        What a parallel draft reads in the places behind the newest token (P-EAGLE, section 3).

        Args:
            num_rows (`int`): How many places.
            embedding (`nn.Embedding`, *optional*): See [`~draft_eagle3.DraftModel.embed`].

        Returns:
            `tuple[torch.FloatTensor, torch.FloatTensor]`: `inputs_embeds` and `hidden_states` of shape
            `(1, num_rows, hidden_size)`.
        """
        tokens = torch.full((1, num_rows), self.config.mask_token_id, device=self.lm_head.weight.device)
        hidden_states = self.combine_hidden_states(self.mask_hidden).expand(-1, num_rows, -1)
        return self.embed(tokens, embedding), hidden_states

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        hidden_states: torch.FloatTensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        logits_to_keep: int = 0,
        **kwargs,
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
                Rotary positions. Counted on from the cache by default.
            cache (`Cache`, *optional*):
                The draft's cache, extended in place.
            use_cache (`bool`, *optional*, defaults to `False`):
                Whether to make a cache if none is passed.
            inputs_embeds (`torch.FloatTensor` of shape `(batch_size, sequence_length, hidden_size)`, *optional*):
                In place of `input_ids`.
            logits_to_keep (`int`, *optional*, defaults to `0`):
                Return the last so many rows only. 0 stands for all.
            kwargs (*optional*):
                Not used.

        Returns:
            [`Eagle3Output`]
        """
        normed, last_hidden_state, cache = self.step(
            input_ids,
            hidden_states,
            attention_mask,
            position_ids,
            cache,
            use_cache,
            inputs_embeds,
            only_last=logits_to_keep == 1,
        )
        return Eagle3Output(
            logits=self.lm_head(normed[:, -logits_to_keep:]),
            last_hidden_state=last_hidden_state[:, -logits_to_keep:],
            cache=cache,
        )

    def step(
        self,
        input_ids=None,
        hidden_states=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        use_cache=None,
        inputs_embeds=None,
        only_last=False,
    ) -> tuple[torch.FloatTensor, torch.FloatTensor, Cache | None]:
        """[`forward`] up to the head: what `lm_head` takes, the `last_hidden_state`, and the cache. `only_last`: of the last row."""
        if (input_ids is None) == (inputs_embeds is None) or hidden_states is None:
            raise ValueError(
                "A drafting step takes `hidden_states` and one of `input_ids` and `inputs_embeds`. To generate text, call "
                "`target.generate(..., assistant_model=draft)`."
            )
        if inputs_embeds is None:
            inputs_embeds = self.embed(input_ids)
        if inputs_embeds.shape != hidden_states.shape:
            raise ValueError(
                f"Embeddings of shape {tuple(inputs_embeds.shape)} do not match `hidden_states` of shape "
                f"{tuple(hidden_states.shape)}. `hidden_states` must be fused by `combine_hidden_states` first."
            )
        if use_cache and cache is None:
            cache = DynamicCache()
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
                only_last=only_last and layer is self.layers[-1],  # the layers before it feed its keys and values
            )
        normed = self.norm(hidden_states)
        return normed, normed if self.config.norm_output else hidden_states, cache

    def save_pretrained(self, save_directory, *args, **kwargs):
        """
        Saves the draft and its code. See [`~transformers.PreTrainedModel.save_pretrained`].

        The folder also serves as `custom_generate`:
        `target.generate(..., custom_generate=folder, assistant_model=draft, trust_remote_code=True)`.

        Args:
            save_directory (`str` or `Path`): The folder.
            args, kwargs (*optional*): As there.
        """
        super().save_pretrained(save_directory, *args, **kwargs)
        folder = Path(save_directory) / "custom_generate"
        folder.mkdir(exist_ok=True)
        (folder / "generate.py").write_text(CUSTOM_GENERATE, encoding="utf-8")

    def proposer(self, call: GenerationCall) -> Drafter:
        """See [`~assistant_eagle3.AssistantMixin.proposer`]."""
        return Drafter(self, call)


Eagle3ForSpeculation.register_for_auto_class("AutoModel")
install_generation_hook()


__all__ = ["Eagle3ForSpeculation", "Eagle3Output"]

"""
DFlash (https://huggingface.co/papers/2602.06036): a few layers draft a whole block of tokens in one pass. JetSpec
(https://huggingface.co/papers/2606.18394) is the same network with a causal block. DSpark
(https://huggingface.co/papers/2607.05147) corrects its logits by the token before. `block_tree.py` grows their trees.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import DynamicCache, PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, rotate_half
from transformers.utils import logging

from ..file_checks import read_json
from ..making import logit_factor, resize_head
from ..remote_code.accept_eagle3 import Sampler
from ..remote_code.attention_eagle3 import additive_mask
from ..remote_code.devices_eagle3 import on_device, reads_without_sync
from ..remote_code.drafter_eagle3 import Drafter, Slots
from ..remote_code.modeling_eagle3 import (
    Eagle3Attention,
    Eagle3Head,
    Eagle3Output,
    Eagle3RMSNorm,
    Eagle3RotaryEmbedding,
)
from ..remote_code.text_eagle3 import right_index
from ..remote_code.tree_eagle3 import DraftTree, GenerationCall, Plan
from ..tensor_names import HUB_ARGUMENTS, find
from ..training.ttt import TTTBatch, UnrollStep, selected_outputs
from .baseline import BaselineConfig, BaselineDraft
from .block_tree import grow_block_tree, grow_markov_tree
from .dflash_layout import spread_layer_ids, to_fields, to_zlab
from .dflash_training import BlockCache, draw_rows


logger = logging.get_logger(__name__)


@strict
class DFlashConfig(BaselineConfig):
    """
    Configuration of a DFlash, JetSpec or DSpark draft. `config.json` has z-lab's layout, which vLLM and SGLang read, or for DSpark
    that of DeepSpec, which no engine was tried with. See [`BaselineConfig`] for more fields: here `transformer_layer_config` describes
    Qwen3 layers, and `mask_token_id` is required.

    Args:
        block_size (`int`, *optional*, defaults to `16`):
            Tokens of a block: the known one, and the masks after it. A draft proposes `num_drafted` tokens: one less, or as many with
            `sample_from_anchor`.
        sample_from_anchor (`bool`, *optional*, defaults to `False`):
            Whether each token of the block, the known one too, predicts the token after it, as in DSpark. Otherwise each mask
            predicts the token in its place.
        markov_rank (`int`, *optional*, defaults to `0`):
            Rank of the Markov head (`MarkovHead`). 0 leaves it out.
        is_causal (`bool`, *optional*):
            Whether a token of the block attends only to those before it (JetSpec), or to all (DFlash). `None` makes
            the layers with sliding windows causal, and the others not, as z-lab's code and vLLM do.
        input_embedding_scale (`float`, *optional*, defaults to `1.0`): Factor of the embeddings.
        output_multiplier (`float`, *optional*, defaults to `1.0`): Factor of the logits.
        final_logit_softcapping (`float`, *optional*): Soft cap of the logits, after the factor.
        follows_speculators (`bool`, *optional*, defaults to `False`):
            Whether the draft was trained by `speculators`. Its sliding windows count from the block's known token and hold
            the whole block, the state after the target's last layer is taken before the final norm, and the checkpoint may
            have a head of its own. In z-lab's drafts windows count from each token, and that state is normed.

    Raises:
        ValueError: if the layers are not Qwen3's, or a value is missing or out of range.
    """

    model_type = "dflash"
    has_no_defaults_at_init: ClassVar[bool] = True  # older transformers would make a default one to save another
    reads_one_state: ClassVar[bool] = False

    block_size: int = 16
    sample_from_anchor: bool = False
    markov_rank: int = 0
    is_causal: bool | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    follows_speculators: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        layer_type = self.transformer_layer_config.model_type
        if layer_type != "qwen3":
            raise ValueError(f"A DFlash draft has layers of 'qwen3', not of {layer_type!r}.")
        if self.block_size < 2:
            raise ValueError(f"`block_size` is {self.block_size}, but must be at least 2: a known token and a mask.")
        if self.markov_rank < 0:
            raise ValueError(f"`markov_rank` is {self.markov_rank}, but must be 0 (none) or more.")
        if self.mask_token_id is None:
            raise ValueError(f"`mask_token_id` is None, but must be one of the target's {self.vocab_size} tokens.")
        if self.static_tree is not None:
            raise ValueError("A DFlash draft grows its trees by its confidence. Leave `static_tree` out.")
        if self.eagle_aux_hidden_state_layer_ids is None:
            raise ValueError("A DFlash draft must say which states it reads (`eagle_aux_hidden_state_layer_ids`).")

    @property
    def is_parallel(self) -> bool:
        """`False`: that is the form of EAGLE-3 (P-EAGLE), with a mask of its own."""
        return False

    @property
    def is_dspark(self) -> bool:
        """Whether the draft differs from DFlash as DSpark does."""
        return self.sample_from_anchor or self.markov_rank > 0

    @property
    def first_row(self) -> int:
        """The row of a block that predicts the first drafted token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafted(self) -> int:
        """How many tokens a pass drafts."""
        return self.block_size - self.first_row

    def is_causal_in(self, layer_type: str) -> bool:
        """Whether the block is causal in layers of a type."""
        return layer_type == "sliding_attention" if self.is_causal is None else self.is_causal

    @classmethod
    def recognizes(cls, content: dict[str, Any], source: str | Path) -> bool:
        """See [`BaselineConfig.recognizes`]."""
        return super().recognizes(to_fields(content), source)

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """See [`~transformers.PreTrainedConfig.get_config_dict`]."""
        content, kwargs = super().get_config_dict(*args, **kwargs)
        return to_fields(content) if content else content, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """See [`Eagle3Config.from_dict`]. Takes z-lab's layout, that of `speculators`, and that of [`to_dict`]."""
        return super().from_dict(to_fields(config_dict), **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """Returns what is saved: z-lab's layout."""
        return to_zlab(self.to_dict())


class DFlashAttention(Eagle3Attention):
    """Attention of Qwen3, which also takes the target's fused states as keys and values."""

    def read_context(self, context: torch.Tensor, position_embeddings: Iterable[torch.Tensor], cache: Any) -> None:
        """Adds the keys and values of fused states `(B, C, H)` to the cache. No query is asked for them."""
        cos, sin = (each.unsqueeze(1) for each in position_embeddings)  # (B, 1, C, head_dim)
        key = self.k_norm(self._split_heads(self.k_proj(context))).transpose(1, 2)
        value = self._split_heads(self.v_proj(context)).transpose(1, 2)
        cache.update(key * cos + rotate_half(key) * sin, value, self.layer_idx)


class DFlashDecoderLayer(nn.Module):
    """A layer of Qwen3's."""

    def __init__(self, layer_config: Qwen3Config, layer_idx: int):
        super().__init__()
        size, eps = layer_config.hidden_size, layer_config.rms_norm_eps
        self.input_layernorm = Eagle3RMSNorm(size, eps=eps)
        self.self_attn = DFlashAttention(layer_config, layer_idx, input_size=size)
        self.post_attention_layernorm = Eagle3RMSNorm(size, eps=eps)
        self.mlp = Qwen3MLP(layer_config)

    def forward(
        self, hidden_states: torch.Tensor, context: tuple[torch.Tensor, Any] | None, cache: Any, **kwargs: Any
    ) -> torch.Tensor:
        if context is not None:  # here, because FSDP gathers a layer's weights for its forward
            self.self_attn.read_context(*context, cache)
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), cache=cache, **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class MarkovHead(nn.Module):
    """
    DSpark's correction of logits by the token before: a product of two low-rank matrices. `markov_w1` has rows for the target's
    tokens, `markov_w2` for those of the draft vocabulary.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """What `markov_w2` reads after `tokens` `(...)`: `(..., markov_rank)`."""
        return self.markov_w1(tokens.clamp(max=self.markov_w1.num_embeddings - 1))  # added to the target later

    def forward(self, tokens: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """
        Returns what `tokens` `(...)` add to the logits of the tokens after them, `(..., draft_vocab_size)`, or with `ids` `(C,)`
        of the draft vocabulary only to those, `(..., C)`.
        """
        features, matrix = self.features(tokens), self.markov_w2
        if ids is None:
            return matrix(features)
        if type(matrix) is nn.Linear and type(matrix.weight) is nn.Parameter:
            return F.linear(features, matrix.weight[ids])
        return matrix(features)[..., ids]  # quantized, or with an adapter


class DFlashForSpeculation(BaselineDraft):
    r"""
    A DFlash, JetSpec or DSpark draft. It reads the target's fused states at all positions of the text, and a block. The block is
    the newest token, which has no state yet, and masks. At each mask the draft predicts the token in its place, or the next one
    (`sample_from_anchor`).

    ```py
    import hf_eagle3

    draft = AutoModel.from_pretrained("z-lab/Qwen3-8B-DFlash-b16", dtype="auto")
    target.generate(**inputs, assistant_model=draft)
    ```

    Embedding and head are the target's, which are neither saved nor trained. Drafts of `speculators` may have their own.

    Args:
        config ([`DFlashConfig`]): The configuration. The weights are random.
    """

    config_class = DFlashConfig
    frozen_modules = ("embed_tokens", "lm_head")
    # Blocks in each text of a training batch, by its tokens. The DFlash paper draws 512 in texts of 3072 tokens.
    BLOCK_SHARE = 1 / 6
    _no_split_modules = ["DFlashDecoderLayer"]
    _skip_keys_device_placement = ["cache"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _keys_to_ignore_on_save = ["lm_head.weight"]
    # DSpark's estimate of what is accepted. Decoding here goes by the draft's probabilities, calibrated while it runs.
    _keys_to_ignore_on_load_unexpected = [r"\bconfidence_head\."]

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        self.reads_normed_state = not config.follows_speculators
        layer_config = config.transformer_layer_config
        layer_config._attn_implementation = self.config._attn_implementation
        size, eps = layer_config.hidden_size, layer_config.rms_norm_eps
        self.fc = nn.Linear(config.num_aux_hidden_states * config.target_hidden_size, size, bias=False)
        self.hidden_norm = Eagle3RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(layer_config, i) for i in range(config.num_hidden_layers))
        self.norm = Eagle3RMSNorm(size, eps=eps)
        self.lm_head: nn.Linear = Eagle3Head(size, config.draft_vocab_size, bias=False)
        self.markov_head = MarkovHead(config) if config.markov_rank > 0 else None
        self.drafts_in_one_pass = self.markov_head is None  # with which levels are drafted one by one
        self.rotary_emb = Eagle3RotaryEmbedding(layer_config)
        self.generation_config.tree_depth = config.num_drafted  # as deep as the block allows
        self.post_init()

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        draft_token_ids: Sequence[int] | torch.Tensor | None = None,
        num_hidden_layers: int = 5,  # as in z-lab/Qwen3-4B-DFlash-b16
        **overrides: Any,
    ) -> "DFlashForSpeculation":
        """
        Makes an untrained draft for a loaded target. See [`~draft_model_eagle3.DraftModel.from_target`]. It reads as many of
        the target's states as it has layers, and the mask is the padding token, unless `overrides` say otherwise.
        """
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
        layer_ids = [id_ + 1 for id_ in spread_layer_ids(depth, num_hidden_layers)]  # whose inputs are these outputs
        overrides.setdefault("eagle_aux_hidden_state_layer_ids", layer_ids)
        return super().from_target(target, draft_token_ids, num_hidden_layers, **overrides)

    @classmethod
    def default_overrides(cls, target: PreTrainedModel, overrides: dict[str, Any]) -> dict[str, Any]:
        """Factors and soft cap of the target's logits become the draft's."""
        config = target.config.get_text_config(decoder=True)
        return {
            "model_type": "qwen3",
            "mask_token_id": "pad",
            "output_multiplier": logit_factor(target),
            "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        } | overrides

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path | None, *args: Any, **kwargs: Any) -> Any:
        """
        Loads a draft of z-lab, of JetSpec, of DeepSpec (DSpark), of `speculators`, or of ours. See
        [`~draft_model_eagle3.DraftModel.from_pretrained`]. A tree may be as deep as the block is long, unless a
        `generation_config.json` says otherwise (`tree_depth`). DSpark's confidence head is not read.

        Raises:
            ValueError: as there, and if the checkpoint is of another kind of block draft (DFlash 2, Domino).
        """
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        draft = loaded[0] if isinstance(loaded, tuple) else loaded
        if draft.lm_head.out_features > 0 and (draft.config.follows_speculators or draft.config.is_dspark):
            draft._keys_to_ignore_on_save = None  # the head is its own
        elif draft.lm_head.out_features > 0:
            raise ValueError(
                f"{pretrained_model_name_or_path} has a head of its own (`lm_head.weight`), but a DFlash draft uses its "
                "target's. It is another kind of draft, or the head was saved by mistake: remove it then."
            )
        source = pretrained_model_name_or_path
        hub_kwargs = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
        path = None if source is None else find(source, "generation_config.json", **hub_kwargs)
        is_given = getattr(kwargs.get("generation_config"), "tree_depth", None) is not None
        if not is_given and (path is None or "tree_depth" not in read_json(path)):
            draft.generation_config.tree_depth = draft.config.num_drafted
        return loaded

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """
        See [`~draft_model_eagle3.DraftModel.save_pretrained`]. The layout is z-lab's, or DeepSpec's for DSpark. The target's head is
        left out, and so is our code.
        """
        if self.config.follows_speculators and "sliding_attention" in self.config.transformer_layer_config.layer_types:
            logger.warning(
                "This draft's sliding windows count from the known token, as in `speculators`. It is saved in z-lab's layout, of "
                "which engines count them from each token: there it would be accepted less often."
            )
        weights = dict(self.state_dict() if state_dict is None else state_dict)
        if self._keys_to_ignore_on_save and type(head := weights.get("lm_head.weight")) is torch.Tensor:  # not a shard
            weights["lm_head.weight"] = head[:0]  # as when it is loaded
        super().save_pretrained(save_directory, is_main_process, weights, *args, **kwargs)

    def set_output_embeddings(self, head: nn.Linear) -> None:
        """Sets the head. The Markov head begins anew for its tokens."""
        self.lm_head = head
        if self.markov_head is not None:
            resize_head(self.markov_head.markov_w2, head.out_features)
            self._init_weights(self.markov_head.markov_w2)

    # Training ------------------------------------------------------------------------------------------------------

    @property
    def most_steps(self) -> int:
        """How many tokens a block drafts."""
        return self.config.num_drafted

    def unroll(self, batch: TTTBatch, steps: int) -> Iterator[UnrollStep]:
        """
        Yields a step for each drafted token of the blocks, whose states `(B, K, H)` are those of `K` blocks in each text. With a
        Markov head they are `(B, K, H + markov_rank)`: it reads the token before, of the text. All blocks are computed in one pass.
        Evaluation draws the same blocks each time.
        """
        block_size, device = self.config.block_size, batch.input_ids.device
        generator = None if self.training else torch.Generator(device).manual_seed(0)
        rows, weights = draw_rows(batch, steps, self.BLOCK_SHARE, generator)  # (B, K)
        known = batch.input_ids.gather(1, (rows + 1).clamp(max=batch.input_ids.shape[1] - 1))
        blocks = F.pad(known[..., None], (0, block_size - 1), value=self.config.mask_token_id)  # (B, K, block_size)
        positions = batch.position_ids.gather(1, rows)[..., None] + 1 + torch.arange(block_size, device=device)
        layer_types = self.config.transformer_layer_config.layer_types
        cache = BlockCache(batch.documents, rows, block_size, self.config.is_causal_in(layer_types[0]))
        context = self.combine_hidden_states(batch.aux_hidden_states)
        all_positions = torch.cat([batch.position_ids, positions.flatten(1)], dim=1)
        masks = dict.fromkeys(layer_types)  # the cache masks
        states = self.run_layers(self.embed(blocks.flatten(1)), context, all_positions, masks, cache)
        states = states.unflatten(1, (-1, block_size))  # (B, K, block_size, H)
        if not self.training:  # evaluation divides by the number of drawn rows
            weights = torch.ones_like(weights)
        head = self.trained_head()
        for step in range(steps):
            of_step = states[:, :, self.config.first_row + step]
            if self.markov_head is not None:
                before = batch.input_ids.gather(1, (rows + 1 + step).clamp(max=batch.input_ids.shape[1] - 1))
                of_step = torch.cat([of_step, self.markov_head.features(before)], dim=-1)
            yield UnrollStep(of_step, head, rows=rows, row_weights=weights)

    # The network ---------------------------------------------------------------------------------------------------

    def combine_hidden_states(self, aux: torch.Tensor) -> torch.Tensor:
        """Fuses the target's states `(B, C, n * target_hidden_size)` into one, `(B, C, hidden_size)`."""
        return self.hidden_norm(self.fc(aux))

    def read_context(self, hidden_states: torch.Tensor, position_ids: torch.Tensor, cache: Any) -> None:
        """Adds the keys and values of context to a cache: of [`combine_hidden_states`] `(B, C, hidden_size)` at positions `(B, C)`."""
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        layers: Any = self.layers
        for layer in layers:
            layer.self_attn.read_context(hidden_states, position_embeddings, cache)

    def masks(self, visible: torch.Tensor, distances: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """
        Additive masks by layer type, given which keys are filled, `(B, K)`, and how far keys are before the block's tokens,
        `(B or 1, Q, K)`. The first of these is the known one.
        """
        layer_config, masks = self.config.transformer_layer_config, {}
        for layer_type in set(layer_config.layer_types):
            allowed = visible[:, None].expand(-1, distances.shape[1], -1)
            if self.config.is_causal_in(layer_type):
                allowed = allowed & (distances >= 0)
            if layer_type == "sliding_attention" and self.config.follows_speculators:
                allowed = allowed & (distances[:, :1] <= layer_config.sliding_window)  # from the known token
            elif layer_type == "sliding_attention":
                allowed = allowed & (distances.abs() < layer_config.sliding_window)
            masks[layer_type] = additive_mask(allowed, dtype)[:, None]
        return masks

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> Eagle3Output:
        r"""
        One pass over a block: the newest token, followed by `config.mask_token_id`.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, block_size)`), inputs_embeds (`torch.FloatTensor`):
                The block, or its embeddings.
            hidden_states (`torch.FloatTensor` of shape `(batch_size, context_length, hidden_size)`, *optional*):
                [`combine_hidden_states`] of the target's states, at the positions that `cache` does not hold yet.
            attention_mask (`torch.Tensor`, *optional*):
                Of shape `(batch_size, past_length + context_length + block_size)` with zeros on padding, or a dict of
                additive masks `(batch_size, 1, block_size, past_length + context_length + block_size)` by layer type.
            position_ids (`torch.LongTensor` of shape `(batch_size, context_length + block_size)`, *optional*):
                Positions of the context, then of the block. By default they continue those of the cache.
            cache (`Cache`, *optional*):
                To which context and block are added. Crop the block before the next pass: `cache.crop(-block_size)`.
            logits_to_keep (`int` or `torch.LongTensor`, *optional*, defaults to `0`):
                Return only this many rows, the last ones, or the rows with these indices. 0 stands for all.
            kwargs (*optional*): Ignored.

        Returns:
            [`Eagle3Output`]: Row `k` predicts the `k`-th token of the block itself, and row 0 nothing. With `sample_from_anchor`
            row `k` predicts the token after it. The Markov head, if any, is not applied: it needs the drafted tokens.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "Pass one of `input_ids` and `inputs_embeds`. To generate, call `target.generate(..., assistant_model=draft)`."
            )
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed(input_ids)
        cache = DynamicCache() if cache is None else cache
        batch_size, num_queries = inputs_embeds.shape[:2]
        num_new, masks = num_queries + (0 if hidden_states is None else hidden_states.shape[1]), attention_mask
        if position_ids is None or not isinstance(masks, dict):
            keys = torch.arange(cache.get_seq_length() + num_new, device=inputs_embeds.device)
            position_ids = keys[-num_new:].expand(batch_size, -1) if position_ids is None else position_ids
        if not isinstance(masks, dict):
            visible = keys.new_ones(batch_size, len(keys)) if masks is None else masks
            masks = self.masks(visible.bool(), (keys[-num_queries:, None] - keys)[None], inputs_embeds.dtype)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        states = self.run_layers(inputs_embeds, hidden_states, position_ids, masks, cache)[:, rows]
        return Eagle3Output(logits=self.logits_of(states), last_hidden_state=states, cache=cache)

    def run_layers(
        self,
        inputs_embeds: torch.Tensor,
        hidden_states: torch.Tensor | None,
        position_ids: torch.Tensor,
        masks: dict[str, Any],
        cache: Any,
    ) -> torch.Tensor:
        """Returns the states of a block that the head reads, `(B, S, H)`. See [`forward`]; `masks` are by layer type."""
        states, context = inputs_embeds * self.config.input_embedding_scale, None
        if hidden_states is not None:
            context = hidden_states, self.rotary_emb(hidden_states, position_ids[:, : hidden_states.shape[1]])
        rotary = self.rotary_emb(states, position_ids[:, -states.shape[1] :])
        for layer, layer_type in zip(self.layers, self.config.transformer_layer_config.layer_types, strict=True):
            mask = masks[layer_type]
            states = layer(states, context=context, cache=cache, position_embeddings=rotary, attention_mask=mask)
        return self.norm(states)

    def logits_of(self, states: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """
        Returns the logits `(..., draft_vocab_size)` of states `(..., H)`, as the target computes them. `weight` `(V, H)` has the rows
        of the head for some tokens, if not for all.
        """
        logits = self.lm_head(states) if weight is None else F.linear(states, weight)
        factor = self.config.output_multiplier
        logits = logits if factor == 1 else logits * factor
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def trained_head(self, tokens: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a function from the states of [`unroll`] to logits: of `tokens` of the draft vocabulary, or of all."""
        weight = None if tokens is None else self.lm_head.weight.index_select(0, tokens)
        if self.markov_head is None:
            return partial(self.logits_of, weight=weight)
        whole = self.markov_head.markov_w2
        of_markov = whole if tokens is None else selected_outputs(whole, tokens)

        def logits_of(states: torch.Tensor) -> torch.Tensor:
            states, features = states.tensor_split([self.lm_head.in_features], dim=-1)
            return self.logits_of(states, weight) + of_markov(features)

        return logits_of

    def proposer(self, call: GenerationCall) -> "BlockProposer":
        """See [`~assistant_eagle3.AssistantMixin.proposer`]."""
        return BlockProposer(self, call)


class BlockProposer(Drafter):
    """
    A block draft, during one call of `generate`. It runs the whole block in each step, once, whatever the plan: less of it is
    not what the draft was trained on. Context needs no queries, so a long prompt is cheap to read.
    """

    def __init__(self, draft: DFlashForSpeculation, call: GenerationCall):
        super().__init__(draft, call)
        self.num_spare = draft.config.block_size  # slots beside the text
        self.is_captured = False  # it grows no tree level by level

    def read(self, blocks: Sequence[torch.Tensor], counts: list[int]) -> None:
        """Adds the target's states to the context. The tokens are not read: the states know them, but for the newest."""
        state, unread = self._begin_reading(blocks, counts, 0, has_fixed_shape=True)
        tokens, states, positions, num_new, past = unread
        num_rows = tokens.shape[1]
        index = right_index(num_new, num_rows)
        # Padding goes to free slots behind the row's text, as zeros: NaNs pass through any mask.
        context = self.draft.combine_hidden_states(states).where((index >= 0)[..., None], 0)
        num_slots = state.cache.num_slots
        indices = (past[:, None] + index % num_rows).clamp(max=num_slots - 1)
        slots = Slots(state.cache, indices, num_slots)
        self.draft.read_context(context, positions, slots)

    def propose(self, plan: Plan, root_tokens: torch.Tensor, sampler: Sampler | None = None) -> DraftTree:
        draft, block_size = self.draft, self.draft.config.block_size
        with torch.no_grad():
            blocks, counts = self.take_unread()
            self.read(blocks, counts)
            device, root_tokens = self.like.device, root_tokens.to(self.like.device)
            num_visible = max(self.lengths) + block_size
            cache, ahead = self.reserve(num_visible), torch.arange(block_size, device=device)
            indices = on_device(self.lengths, device)[:, None] + ahead  # (B, Q): slots of the block
            slots, keys = Slots(cache, indices, num_visible), torch.arange(num_visible, device=device)
            block = F.pad(root_tokens, (0, block_size - 1), value=draft.config.mask_token_id)
            first = draft.config.first_row
            logits = draft(
                inputs_embeds=draft.embed(block, self.call.embedding),
                position_ids=blocks[-1][:, -1:] + 1 + ahead,
                attention_mask=draft.masks(keys <= indices[:, -1:], indices[..., None] - keys, cache.keys[0].dtype),
                cache=slots,
                logits_to_keep=ahead[first : first + plan.depth],
            ).logits  # (B, depth, V)
            cache.zero(indices)  # the block is forgotten
            # Counting the nodes above a threshold forces a sync.
            threshold = self.call.threshold if reads_without_sync(device) else 0.0
            power, scores = self.call.calibration.power, logits.float()
            guess = None if sampler is None else partial(sampler.guess, token_ids=self.token_ids)
            if draft.markov_head is not None:
                settings = plan, threshold, power, guess
                return grow_markov_tree(root_tokens, scores, draft.markov_head, self.token_ids, *settings)
            if guess is not None:
                scores = torch.stack([guess(logits[:, i], i) for i in range(logits.shape[1])], dim=1)
            return grow_block_tree(root_tokens, power * scores, self.token_ids, plan, threshold)

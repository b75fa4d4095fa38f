# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 draft (https://huggingface.co/papers/2503.01840), built from transformers' own parts."""

import importlib.util
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
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

from .assistant_eagle3 import CALL_SETTINGS, CUSTOM_GENERATE, AssistantMixin
from .auto_eagle3 import IS_INSTALLED, check_needs, installed_module, logger
from .configuration_eagle3 import Eagle3Config, default_aux_layer_ids
from .drafter_eagle3 import Drafter
from .loading_eagle3 import (
    check_draft,
    check_loading_info,
    check_pairing,
    check_weights,
    read_config,
    weights_digest,
)
from .outputs_eagle3 import CACHE, keep_state_after_last_layer
from .policy_eagle3 import DEFAULT_TREE_SETTINGS, tree_settings
from .target_eagle3 import Borrowed, gathered_table, look_up, table_of
from .tree_eagle3 import GenerationCall, grow_tree


HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
BORROW = (
    "Call `draft.borrow_embeddings(target)` first. `target.generate(..., assistant_model=draft)` needs no such call."
)


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
    Llama's, but the frequencies stay in float32 when the draft is cast. Rounding them to bfloat16 moves positions by a
    whole radian after a thousand tokens.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> "Eagle3RotaryEmbedding":
        tables = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, table in tables.items():
            if table is not None and self._buffers[name].dtype != table.dtype:
                self._buffers[name] = table.to(self._buffers[name].device)
        return self


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
        self.norm_before_residual = config.norm_before_residual
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
            if self.norm_before_residual:
                residual = hidden_states
            attention_input = torch.cat([self.input_layernorm(inputs_embeds), hidden_states], dim=-1)  # (B, S, 2H)
        else:
            attention_input = self.input_layernorm(hidden_states)
        if only_last:
            residual = residual[:, -1:]
        hidden_states = residual + self.self_attn(attention_input, only_last=only_last, **attention_kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


# Drafts ------------------------------------------------------------------------------------------------------------


class DraftModel(AssistantMixin, PreTrainedModel, GenerationMixin):
    """
    A draft of any network. It reads states of a target and proposes what the target may say next. A subclass has the
    network with an `lm_head`, and a [`~assistant_eagle3.AssistantMixin.proposer`].
    """

    config_class = Eagle3Config
    generation_config: GenerationConfig
    # Grows the tree of a step: see [`~tree_eagle3.grow_tree`].
    grow_tree = staticmethod(grow_tree)
    # Whether the state of index `L` is after the target's final norm, as transformers returns it, or before.
    reads_normed_state = False
    # Copies of the target's modules, which are not trained.
    frozen_modules: tuple[str, ...] = ("embed_tokens",)
    d2t: torch.Tensor | None
    t2d: torch.Tensor | None

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        if config.has_own_embed_tokens:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        else:
            self.d2t = self.t2d = None
        # In lists, so that they are no submodules: the target's are not saved, moved or trained with the draft.
        self._borrowed_embedding = Borrowed()
        self._borrowed_head = Borrowed()
        self._borrowed_version: int | None = None
        self.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            **DEFAULT_TREE_SETTINGS,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in DEFAULT_TREE_SETTINGS:
            raise AttributeError(f"The draft itself has no `{name}`. Set `draft.generation_config.{name}`.")
        super().__setattr__(name, value)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path | None, *args: Any, **kwargs: Any) -> Any:
        """
        Loads a draft. If hf-eagle3 is installed, also those of other projects: `speculators`, SafeAILab/EAGLE, SpecForge,
        SGLang, Model-Optimizer, AngelSlim and others. A draft without a head gets its target's when it meets it. See
        [`~transformers.PreTrainedModel.from_pretrained`]. With `output_loading_info=True` the second result also has
        the `format`, and what was `renamed`, `ignored` and `assumed`.

        Args:
            pretrained_model_name_or_path (`str` or `Path`): Folder or Hub id.
            args, kwargs (*optional*): As there.

        Raises:
            ValueError: if a file is broken, a tensor is missing, unexpected, of another shape or not finite, the
                vocabulary mapping is broken, or configuration or weights are not what was saved.
            ImportError: if transformers lacks what this code needs.
        """
        check_needs()
        if not isinstance(pretrained_model_name_or_path, (str, PathLike, type(None))):
            raise TypeError(
                f"`from_pretrained` takes the folder or Hub id of a draft, not {type(pretrained_model_name_or_path).__name__}. "
                "`from_target` makes a draft for a target."
            )
        if settings := [name for name in (*DEFAULT_TREE_SETTINGS, *CALL_SETTINGS) if name in kwargs]:
            raise TypeError(
                f"`from_pretrained` takes no `{settings[0]}`. Pass it to `generate`, or set `draft.generation_config.{settings[0]}`."
            )
        path, source = pretrained_model_name_or_path, str(pretrained_model_name_or_path)
        wants_loading_info = kwargs.pop("output_loading_info", False)
        # This class's code runs. Transformers would also run the folder's `custom_generate`.
        kwargs.pop("trust_remote_code", None)
        hub_kwargs = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # refused by name below
        read = super().from_pretrained
        if IS_INSTALLED:
            reader = installed_module("file_checks", "Loading")
            model, info, content = reader.read_draft(cls, read, path, args, kwargs, hub_kwargs)
        else:  # a copy reads what was saved, as `weights_digest` shows
            content = None if path is None else read_config(source, **hub_kwargs)
            if content is not None and not cls.config_class.recognises(content, source):
                raise ValueError(
                    f"{source} is not in the speculators format. `pip install hf-eagle3` reads others, too."
                )
            model, info = read(path, *args, **kwargs)
            check_loading_info(info, source)
        for name, value in tree_settings(model.generation_config).items():  # drafts of others have none
            setattr(model.generation_config, name, value)
        if not hasattr(model, "hf_quantizer"):
            # These weights are not those that were saved: other variants, float16, adapters, and the caller's own.
            is_changed = kwargs.get("variant") or kwargs.get("state_dict") is not None
            is_changed = is_changed or model.dtype == torch.float16 or model._hf_peft_config_loaded
            digest = None if is_changed or content is None else content.get("weights_digest")
            check_weights(model.state_dict(), source, digest)
        model.loaded_with = {name: hub_kwargs[name] for name in ("revision", "subfolder") if name in hub_kwargs}
        return (model, {"format": "speculators", **info}) if wants_loading_info else model

    @classmethod
    def from_target(cls, target: PreTrainedModel, *args: Any, **kwargs: Any) -> "DraftModel":
        """
        Makes an untrained draft for a loaded `target`. See `hf_eagle3.making.from_target`.

        Args:
            args, kwargs (*optional*): `draft_token_ids`, the target's tokens that it can propose;
                `num_hidden_layers`; and fields of [`Eagle3Config`], or of its `transformer_layer_config`.

        Raises:
            ValueError: if no draft can be made for the target, or a field or a token id does not exist.
        """
        return installed_module("making", "A new draft").from_target(cls, target, *args, **kwargs)

    def set_draft_vocabulary(
        self, draft_token_ids: Sequence[int] | torch.Tensor | None, target: PreTrainedModel
    ) -> None:
        """Replaces the draft vocabulary by `draft_token_ids` (`None`: all), and `lm_head` by the rows of `target` for it."""
        installed_module("making", "Another vocabulary").set_draft_vocabulary(self, draft_token_ids, target)

    def trim_draft_vocabulary(self, draft_token_ids: Sequence[int] | torch.Tensor) -> None:
        """Removes all but `draft_token_ids` (ids of the target) from the draft vocabulary. They keep their rows of `lm_head`."""
        installed_module("making", "A smaller vocabulary").trim_draft_vocabulary(self, draft_token_ids)

    def pair_with(self, target: PreTrainedModel) -> None:
        """Records the `target` in the draft's configuration, for drafts of formats that do not."""
        installed_module("making", "Pairing").pair_with(self, target)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """
        Pushes the draft, its code and a card to `repo_id` (`<owner>/<name>`) in one commit. The `kwargs` are those of
        `hf_eagle3.hub.push_draft`. If hf-eagle3 is not installed, see [`~transformers.utils.PushToHubMixin.push_to_hub`],
        which writes transformers' own card.
        """
        if importlib.util.find_spec("hf_eagle3") is None:
            return super().push_to_hub(repo_id, **kwargs)
        return installed_module("hub", "Pushing a draft").push_draft(self, repo_id, **kwargs)

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """
        Saves the draft and its code in `save_directory`. See [`~transformers.PreTrainedModel.save_pretrained`], also for
        `is_main_process`, `state_dict`, `args` and `kwargs`. Raises `ValueError` if the draft is to be pushed, for which there
        is [`push_to_hub`]. If hf-eagle3 is installed, also if the draft stores no head and has not met the target whose head it
        uses, if it could not be loaded again (also if weights are not finite), or if the folder has another model.

        The folder also serves as `custom_generate`:
        `target.generate(..., custom_generate=folder, assistant_model=draft, trust_remote_code=True)`.
        """
        if any(args[:1]) or kwargs.get("push_to_hub"):
            raise ValueError(
                "`push_to_hub=True` would push a part of the draft, over whatever is in the repo. Call `draft.push_to_hub(repo_id)`."
            )
        tree_settings(self.generation_config)  # raises for settings that could not be loaded
        files = installed_module("checkpoints.files", "Saving") if IS_INSTALLED else None  # a copy is as it was saved
        if files is not None:
            files.check_saving(self, save_directory, is_main_process)
        weights = self.state_dict() if state_dict is None else state_dict
        if is_main_process and all(type(weight) is torch.Tensor and not weight.is_meta for weight in weights.values()):
            self.config.weights_digest = weights_digest(weights)
        try:
            super().save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)
        finally:
            self.config.weights_digest = None
        if files is not None and is_main_process and not self._hf_peft_config_loaded:
            files.remove_stale_weights(save_directory, kwargs.get("variant"))
        if self._auto_class is not None:  # transformers saved the code
            folder = Path(save_directory) / "custom_generate"
            folder.mkdir(exist_ok=True)
            (folder / "generate.py").write_text(CUSTOM_GENERATE, encoding="utf-8")

    @property
    def draft_token_ids(self) -> torch.Tensor:
        """Target token ids of the draft vocabulary, of shape `(draft_vocab_size,)`."""
        like = self.get_output_embeddings().weight if self.d2t is None else self.d2t  # the head may be offloaded
        draft_ids = torch.arange(self.config.draft_vocab_size, device=like.device)
        return draft_ids if self.d2t is None else draft_ids + self.d2t

    def get_input_embeddings(self) -> nn.Embedding | None:
        """The draft's own table, if it has one. The target's is not the draft's to resize or to shard."""
        return self.embed_tokens if self.config.has_own_embed_tokens else None

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "A draft cannot be resized. It works with a target to which tokens were added, but never proposes these. To propose "
            "them, make and train a draft for the larger target."
        )

    def borrow_embeddings(self, target: PreTrainedModel) -> None:
        """Lets `forward` use the target's table and head if the draft stores none of its own."""
        self._borrowed_embedding = Borrowed([gathered_table(table_of(target))])
        self._borrow_head(target)

    def _borrow_head(self, target: PreTrainedModel) -> None:
        if IS_INSTALLED:
            installed_module("making", "A draft of another format").meet_target(self, target)

    def embed(self, input_ids: torch.Tensor, embedding: nn.Embedding | None = None) -> torch.Tensor:
        """
        Looks tokens `(B, S)` up in the draft's own table, else in `embedding`, else in the borrowed one. It uses the weight alone,
        because the factor of some targets' embeddings (Gemma) is not part of the draft's input.
        """
        if self.config.has_own_embed_tokens:
            # Tokens that were added to the target later have no row: the last one stands for them.
            known_ids = input_ids.to(self.embed_tokens.weight.device).clamp(max=self.config.vocab_size - 1)
            embeds = self.embed_tokens(known_ids)
        elif embedding is None and not self._borrowed_embedding:
            raise ValueError(f"This draft stores no embedding table. {BORROW}")
        else:
            embeds = look_up(self._borrowed_embedding[0] if embedding is None else embedding, input_ids)
        return embeds.to(self.get_output_embeddings().weight)

    def validate_target(self, target: PreTrainedModel) -> None:
        """
        Takes the head of `target` if the draft stores none. Raises `ValueError`, naming both sides, if the draft was made for a
        target of another kind, size or vocabulary, or for another model of the same sizes.
        """
        check_pairing(self, target)
        self._borrow_head(target)

    def resolve_aux_layer_ids(self, target: PreTrainedModel) -> list[int]:
        """
        Returns the indices of the `hidden_states` of `target` that this draft reads. Some formats do not say what their ids count
        (`config.aux_layer_ids_assumed`). Then they count outputs of layers, unless they are the usual inputs
        `[2, L // 2, L - 3]` or one of them is `L`. A warning says what was assumed.
        """
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
        ids, default = self.config.eagle_aux_hidden_state_layer_ids, default_aux_layer_ids(depth)
        if not self.config.aux_layer_ids_assumed:
            return list(default if ids is None else ids)
        stored = [layer_id - 1 for layer_id in ids or ()]
        # Drafts that count inputs have the usual states, or the one after the last layer, which is no layer's input.
        counts_inputs = depth >= 6 and stored == default or depth in stored
        resolved = default if ids is None else stored if counts_inputs else list(ids)
        if counts_inputs or ids != default:
            unsaid = f"what its layer ids {stored} count" if stored else "which states it reads"
            logger.warning_once(
                f"The draft {self.config.name_or_path or '(unnamed)'} does not say {unsaid}. We assume the states that enter "
                f"layers {resolved} of the target's {depth}."
            )
        return resolved

    def reads_after_last_layer(self, target: PreTrainedModel) -> bool:
        """Whether it reads the state after the target's last layer, before the final norm."""
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
        return depth in self.resolve_aux_layer_ids(target) and not self.reads_normed_state

    def assisted_decoding(self, target: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        """See [`~assistant_eagle3.AssistantMixin.assisted_decoding`]."""
        check_draft(self, target)
        with keep_state_after_last_layer(target) if self.reads_after_last_layer(target) else nullcontext():
            return super().assisted_decoding(target, *args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "A draft does not generate text by itself. Call `target.generate(..., assistant_model=draft)`. If you did, the "
            "target's `_assisted_decoding` is not transformers' own: remove what replaces it."
        )


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
        """
        `inputs_embeds` and `hidden_states`, each `(1, num_rows, hidden_size)`, of a parallel draft at positions whose
        tokens are not known yet (P-EAGLE, section 3).
        """
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

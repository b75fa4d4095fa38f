# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 draft (https://huggingface.co/papers/2503.01840), built from transformers' own parts."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import ModelOutput, logging

from .assistant_eagle3 import CUSTOM_GENERATE, AssistantMixin, install_generation_hook
from .checks_eagle3 import check_draft, check_pairing, whole_embedding
from .configuration_eagle3 import Eagle3Config, default_aux_layer_ids
from .drafter_eagle3 import Drafter
from .layers_eagle3 import Eagle3DecoderLayer, Eagle3RMSNorm
from .loading_eagle3 import check_files, check_tensors, weights_digest
from .policy_eagle3 import DEFAULT_TREE_SETTINGS, tree_settings
from .proposer_eagle3 import Call


logger = logging.get_logger(__name__)

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


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
        past_key_values (`Cache`, *optional*):
            The draft's own cache.
    """

    logits: torch.FloatTensor | None = None
    last_hidden_state: torch.FloatTensor | None = None
    past_key_values: Cache | None = None


class Eagle3ForSpeculation(AssistantMixin, PreTrainedModel, GenerationMixin):
    r"""
    An EAGLE-3 draft. Pass it to the target's `generate` as `assistant_model` and the text stays what it was:

    ```py
    draft = AutoModel.from_pretrained("me/My-Model-speculator.eagle3", trust_remote_code=True)
    target.generate(**inputs, assistant_model=draft)
    ```

    Row `t` of a draft's input pairs the target's states at position `t` with the token at `t + 1`, sits at rotary
    position `t`, and predicts the token at `t + 2`.
    """

    config_class = Eagle3Config
    base_model_prefix = ""
    main_input_name = "input_ids"
    _no_split_modules = ["Eagle3DecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        layer_config = config.transformer_layer_config
        layer_config._attn_implementation = self.config._attn_implementation
        hidden_size, eps = layer_config.hidden_size, layer_config.rms_norm_eps
        aux_size = config.num_aux_hidden_states * config.target_hidden_size
        if config.has_own_embed_tokens:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden_size)
        if config.norm_before_fc:
            self.input_norm = Eagle3RMSNorm(aux_size, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                Eagle3RMSNorm(config.target_hidden_size, eps=eps) for _ in range(config.num_aux_hidden_states)
            )
        self.fc = nn.Linear(aux_size, hidden_size, bias=False)
        self.layers = nn.ModuleList(Eagle3DecoderLayer(config, i) for i in range(layer_config.num_hidden_layers))
        self.norm = Eagle3RMSNorm(hidden_size, eps=eps)
        self.lm_head = nn.Linear(hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(layer_config)
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        else:
            self.d2t = self.t2d = None
        # A reference in a list is no submodule: the target's table is neither saved, moved nor trained with the draft.
        self._borrowed_embedding: list[nn.Embedding] = []
        self.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            **DEFAULT_TREE_SETTINGS,
        )
        self.post_init()

    # Loading and making -------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """
        Loads a draft: one of ours or of `speculators` and, where hf-eagle3 is installed, of SafeAILab/EAGLE,
        SpecForge, SGLang or Model-Optimizer. See [`~transformers.PreTrainedModel.from_pretrained`]; with
        `output_loading_info=True` the second result also has the `format`, and what was `renamed`, `ignored` and
        `assumed`.

        Raises:
            ValueError: if a file is broken, a tensor is missing, unexpected, of another shape or not finite, the
                vocabulary mapping is broken, or configuration or weights are not what was saved.
        """
        wants_loading_info = kwargs.pop("output_loading_info", False)
        # The code is this class's. Transformers would also run what the folder has for `custom_generate`.
        kwargs.pop("trust_remote_code", None)
        report, path = {"format": "speculators"}, pretrained_model_name_or_path
        hub_kwargs = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        content = None if path is None else check_files(path, kwargs.get("variant"), **hub_kwargs)
        digest = None if kwargs.get("variant") else (content or {}).get("weights_digest")  # which is of the others
        if content is not None and content.get("speculators_model_type") is None:
            config, kwargs["state_dict"], report = read_other_format(content, path, hub_kwargs)
            kwargs["config"], path = kwargs.get("config") or config, None
        # Reported below, by name, with what else is wrong.
        kwargs.update(output_loading_info=True, ignore_mismatched_sizes=True)
        reload_kwargs = dict(kwargs)
        model, info = super().from_pretrained(path, *args, **kwargs)
        if info["unexpected_keys"] == {"embed_tokens.weight"} and not model.config.has_own_embed_tokens:
            # The speculators schema does not say whether a table is stored; the file does.
            model.config.has_own_embed_tokens = True
            reload_kwargs["config"] = model.config
            model, info = super().from_pretrained(path, *args, **reload_kwargs)
        missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
        mismatched = sorted(str(entry) for entry in info["mismatched_keys"])
        if missing or unexpected or mismatched:
            raise ValueError(
                f"{pretrained_model_name_or_path} does not hold the tensors its config.json describes. "
                f"Missing: {missing or 'none'}. Unexpected: {unexpected or 'none'}. "
                f"Of another shape: {mismatched or 'none'}. Check the config's flags (norm_before_fc, fc_norm, "
                "draft_vocab_size, num_hidden_layers, ...) or download the checkpoint again."
            )
        model._check_draft_vocabulary(pretrained_model_name_or_path)
        tree_settings(model.generation_config)
        if not hasattr(model, "hf_quantizer"):
            # What float16 makes of other dtypes cannot be told from other weights.
            digest = None if model.dtype == torch.float16 or kwargs.get("state_dict") is not None else digest
            check_tensors(model.state_dict(), pretrained_model_name_or_path, digest)
        if report["format"] != "speculators":
            model.name_or_path = model.config.name_or_path = str(pretrained_model_name_or_path)
            logger.info(
                f"{pretrained_model_name_or_path} was read as a checkpoint of the {report['format']} format: {report}"
            )
        return (model, {**info, **report}) if wants_loading_info else model

    @classmethod
    def from_target(cls, target: PreTrainedModel, *args: Any, **kwargs: Any) -> "Eagle3ForSpeculation":
        """Makes an untrained draft for a loaded target. See `hf_eagle3.making.from_target`."""
        return installed("making", "A new draft").from_target(cls, target, *args, **kwargs)

    def set_draft_vocabulary(self, draft_token_ids: Sequence[int] | torch.Tensor | None, target: PreTrainedModel):
        """Replaces the draft vocabulary and `lm_head`. See `hf_eagle3.making.set_draft_vocabulary`."""
        installed("making", "Another vocabulary").set_draft_vocabulary(self, draft_token_ids, target)

    def pair_with(self, target: PreTrainedModel) -> None:
        """Writes down which target this draft is for. See `hf_eagle3.making.pair_with`."""
        installed("making", "Pairing").pair_with(self, target)

    def push_to_hub(self, repo_id: str, **kwargs):
        """
        Pushes the draft, its code and a card in one commit; see `hf_eagle3.hub.push_draft`. Where hf-eagle3 is not
        installed, [`~transformers.utils.PushToHubMixin.push_to_hub`] with transformers' own card.
        """
        if importlib.util.find_spec("hf_eagle3") is None:
            return super().push_to_hub(repo_id, **kwargs)
        return installed("hub", "Pushing a draft").push_draft(self, repo_id, **kwargs)

    @property
    def draft_token_ids(self) -> torch.LongTensor:
        """Target token ids of the draft vocabulary, of shape `(draft_vocab_size,)`."""
        draft_ids = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return draft_ids if self.d2t is None else draft_ids + self.d2t

    def _check_draft_vocabulary(self, name) -> None:
        if self.d2t is None:
            return
        token_ids = self.draft_token_ids
        if (token_ids.diff() <= 0).any() or token_ids[0] < 0 or token_ids[-1] >= self.config.vocab_size:
            raise ValueError(
                f"{name}: `d2t` does not map to ascending ids of a vocabulary of {self.config.vocab_size}."
            )
        if not torch.equal(self.t2d.nonzero().flatten(), token_ids):
            raise ValueError(f"{name}: `t2d` marks other tokens than `d2t` maps to.")

    def get_input_embeddings(self) -> nn.Embedding | None:
        """The draft's own table, if it has one: the target's is not the draft's to resize or to shard."""
        return self.embed_tokens if self.config.has_own_embed_tokens else None

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def borrow_embeddings(self, target: PreTrainedModel) -> None:
        """Lets `forward` look tokens up in the target's table, for drafts that store none of their own."""
        self._borrowed_embedding = [whole_embedding(target)]

    def embed(self, input_ids: torch.LongTensor, embedding: nn.Embedding | None = None) -> torch.FloatTensor:
        """
        Looks tokens up in the draft's own table, else in `embedding`, else in the borrowed one. Only the weight is
        used: a factor that the target's embedding applies (Gemma) is not part of the draft's input.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`): Target token ids.
            embedding (`nn.Embedding`, *optional*): The target's embedding.
        """
        if self.config.has_own_embed_tokens:
            return self.embed_tokens(input_ids.to(self.embed_tokens.weight.device)).to(self.lm_head.weight)
        if embedding is None and not self._borrowed_embedding:
            raise ValueError(
                "This draft stores no embedding table. Call `draft.borrow_embeddings(target)` before `draft(...)`; "
                "`target.generate(..., assistant_model=draft)` needs no such call."
            )
        weight = (self._borrowed_embedding[0] if embedding is None else embedding).weight
        return nn.functional.embedding(input_ids.to(weight.device), weight).to(self.lm_head.weight)

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

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        hidden_states: torch.FloatTensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
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
            past_key_values (`Cache`, *optional*):
                The draft's cache, extended in place.
            use_cache (`bool`, *optional*, defaults to `False`):
                Whether to make a cache if none is passed.
            inputs_embeds (`torch.FloatTensor` of shape `(batch_size, sequence_length, hidden_size)`, *optional*):
                In place of `input_ids`.
            logits_to_keep (`int`, *optional*, defaults to `0`):
                Return the last so many rows only. 0 stands for all.
        """
        normed, last_hidden_state, past_key_values = self.step(
            input_ids,
            hidden_states,
            attention_mask,
            position_ids,
            past_key_values,
            use_cache,
            inputs_embeds,
            only_last=logits_to_keep == 1,
        )
        return Eagle3Output(
            logits=self.lm_head(normed[:, -logits_to_keep:]),
            last_hidden_state=last_hidden_state[:, -logits_to_keep:],
            past_key_values=past_key_values,
        )

    def step(
        self,
        input_ids=None,
        hidden_states=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
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
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        if position_ids is None:
            past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None] + past_length
        masks = self._masks_by_layer_type(attention_mask, inputs_embeds, past_key_values, position_ids)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer, layer_type in zip(self.layers, self.config.transformer_layer_config.layer_types, strict=True):
            hidden_states = layer(
                hidden_states,
                inputs_embeds,
                position_embeddings=position_embeddings,
                attention_mask=masks[layer_type],
                past_key_values=past_key_values,
                only_last=only_last and layer is self.layers[-1],  # the layers before it feed its keys and values
            )
        normed = self.norm(hidden_states)
        return normed, normed if self.config.norm_output else hidden_states, past_key_values

    def _masks_by_layer_type(self, attention_mask, inputs_embeds, past_key_values, position_ids):
        layer_types = set(self.config.transformer_layer_config.layer_types)
        if isinstance(attention_mask, dict):
            return attention_mask
        if attention_mask is not None and attention_mask.dim() == 4:
            return dict.fromkeys(layer_types, attention_mask)
        functions = {
            "full_attention": create_causal_mask,
            "sliding_attention": create_sliding_window_causal_mask,
        }
        return {
            layer_type: functions[layer_type](
                config=self.config.transformer_layer_config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
            for layer_type in layer_types
        }

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, *args, **kwargs):
        """
        Saves the draft and its code. See [`~transformers.PreTrainedModel.save_pretrained`].

        The folder also serves as `custom_generate`:
        `target.generate(..., custom_generate=folder, assistant_model=draft, trust_remote_code=True)`.
        """
        tree_settings(self.generation_config)  # with others it could not be loaded
        weights = self.state_dict() if state_dict is None else state_dict
        if is_main_process and all(type(weight) is torch.Tensor and not weight.is_meta for weight in weights.values()):
            self.config.weights_digest = weights_digest(weights)
        try:
            super().save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)
        finally:
            self.config.weights_digest = None
        folder = Path(save_directory) / "custom_generate"
        folder.mkdir(exist_ok=True)
        (folder / "generate.py").write_text(CUSTOM_GENERATE, encoding="utf-8")

    def validate_target(self, target: PreTrainedModel) -> None:
        """
        Checks that this draft was made for `target`.

        Raises:
            ValueError: naming both sides, if the target is of another kind, size or vocabulary, or another model of
                the same sizes.
        """
        check_pairing(self, target)

    def resolve_aux_layer_ids(self, target: PreTrainedModel) -> list[int]:
        """The ids of the target's `hidden_states` that this draft reads."""
        ids = self.config.eagle_aux_hidden_state_layer_ids
        if ids is None:
            ids = default_aux_layer_ids(target.config.get_text_config(decoder=True).num_hidden_layers)
        return list(ids)

    def assisted_decoding(self, target: PreTrainedModel, *args, **kwargs):
        """See [`~assistant_eagle3.AssistantMixin.assisted_decoding`]."""
        check_draft(self, target)
        return super().assisted_decoding(target, *args, **kwargs)

    def proposer(self, call: Call) -> Drafter:
        """See [`~assistant_eagle3.AssistantMixin.proposer`]."""
        return Drafter(self, call)

    def generate(self, *args, **kwargs):
        raise NotImplementedError(
            "A draft does not generate text by itself. Call `target.generate(..., assistant_model=draft)`."
        )


def installed(module: str, what: str):
    """
    A module of the hf-eagle3 package, for what a draft can be used without.

    Raises:
        ModuleNotFoundError: if the package, or what it needs for that, is not installed.
    """
    try:
        return importlib.import_module(f"hf_eagle3.{module}")
    except ModuleNotFoundError as error:
        extra = "" if error.name == "hf_eagle3" else "[train]"
        raise ModuleNotFoundError(f"{what} needs {error.name}: pip install 'hf-eagle3{extra}'") from error


def read_other_format(config: dict, source, hub_kwargs: dict):
    """Configuration, tensors and report of a checkpoint that someone else wrote."""
    if __package__ != "hf_eagle3.remote_code":  # code that came with a draft reads drafts like it
        raise ValueError(f"{source} is not in the speculators format. `pip install hf-eagle3` reads others, too.")
    return installed("checkpoints", f"Reading {source}").read(config, source, **hub_kwargs)


Eagle3ForSpeculation.register_for_auto_class("AutoModel")
install_generation_hook()


__all__ = ["Eagle3ForSpeculation", "Eagle3Output"]

# SPDX-License-Identifier: Apache-2.0
"""The base class of all drafts: loading, saving, vocabulary, and pairing with a target, with the checks of a checkpoint and a pair."""

import base64
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils.hub import cached_file

from .assistant_eagle3 import CALL_SETTINGS, AssistantMixin
from .auto_eagle3 import IS_INSTALLED, check_needs, installed_module, logger
from .configuration_eagle3 import DEFAULT_TREE_SETTINGS, Eagle3Config, default_aux_layer_ids, tree_settings
from .outputs_eagle3 import keep_state_after_last_layer
from .target_eagle3 import Borrowed, check_dropout, gathered_table, look_up, table_of
from .tree_eagle3 import grow_tree


HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
BORROW = (
    "Call `draft.borrow_embeddings(target)` first. `target.generate(..., assistant_model=draft)` needs no such call."
)
# Targets with these settings, for which there are no drafts.
UNREADABLE_TARGETS = {
    "altup_num_inputs": "has several states for each token",  # Gemma 3n
    "cross_attention_layers": "attends to images in separate layers",  # Mllama
}


class DraftModel(AssistantMixin, PreTrainedModel, GenerationMixin):
    """
    A draft with any network. It reads states of a target and proposes its next tokens. A subclass has the network with an
    `lm_head`, and a [`~assistant_eagle3.AssistantMixin.proposer`].
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
        # In lists, so that they are not submodules: the target's are not saved, moved or trained with the draft.
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
        SGLang, Model-Optimizer, AngelSlim and others. A draft without a head gets its target's on first use. See
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
            reader = installed_module("reading", "Loading")
            model, info, content = reader.read_draft(cls, read, path, args, kwargs, hub_kwargs)
        else:  # a copy reads what was saved, as `weights_digest` shows
            content = None if path is None else read_config(source, **hub_kwargs)
            if content is not None and not cls.config_class.recognizes(content, source):
                raise ValueError(
                    f"{source} is not in the speculators format. `pip install hf-eagle3` reads others, too."
                )
            model, info = read(path, *args, **kwargs)
            check_loading_info(info, source)
        of_trees = tree_settings(model.generation_config)  # drafts of others have none
        try:
            model.generation_config.validate(strict=True)
        except ValueError:  # a copy of the target's, with which the draft could not be saved
            model.generation_config = GenerationConfig()
        for name, value in of_trees.items():
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
        `is_main_process`, `state_dict`, `args` and `kwargs`. Raises `ValueError` for `push_to_hub=True`: call [`push_to_hub`].
        If hf-eagle3 is installed, also if the draft stores no head and was not yet used with its target, if it could not be
        loaded again (for example, because weights are NaN), or if the folder has another model.
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
        place: Any = nullcontext(save_directory)
        if files is not None and is_main_process:
            place = files.staged(save_directory, kwargs.get("variant"))
        try:
            with place as folder:
                super().save_pretrained(folder, is_main_process, state_dict, *args, **kwargs)
        finally:
            self.config.weights_digest = None

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
        check_is_model(target)
        if (mismatch := mismatch_of(self, target)) is not None:
            raise ValueError(
                f"The draft {self.config.name_or_path or '(unnamed)'}, made for {self.config.verifier}, does not fit the target "
                f"{type(target).__name__} {target.config.name_or_path or '(unnamed)'}: {mismatch}. Pair each draft with the target "
                "it was trained for."
            )
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
        # Drafts that count inputs have the usual states, or the one after the last layer, which is not the input of a layer.
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
            "A draft does not generate text by itself. Call `target.generate(..., assistant_model=draft)`, not the other way round. If "
            "you did, the target's `_assisted_decoding` is not transformers' own: remove what replaces it."
        )


# Checkpoints -------------------------------------------------------------------------------------------------------


def read_config(source: str, **hub_kwargs: Any) -> dict[str, Any] | None:
    """The content of `config.json`, or `None` if there is none."""
    path = cached_file(source, "config.json", _raise_exceptions_for_missing_entries=False, **hub_kwargs)
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


def check_loading_info(info: dict[str, Any], source: str | Path) -> None:
    """Raises `ValueError` if transformers found tensors missing, unexpected or of another shape."""
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    mismatched = sorted(str(entry) for entry in info["mismatched_keys"])
    if missing or unexpected or mismatched:
        others = "" if IS_INSTALLED else " If another project saved it, `pip install hf-eagle3` may read it."
        raise ValueError(
            f"{source} does not hold the tensors that its config.json describes. Missing: {missing or 'none'}. Unexpected: "
            f"{unexpected or 'none'}. Of another shape: {mismatched or 'none'}. Check the config's flags (norm_before_fc, "
            f"fc_norm, draft_vocab_size, num_hidden_layers, ...) or download the checkpoint again.{others}"
        )


def check_weights(tensors: dict[str, torch.Tensor], source: str | Path, digest: str | None = None) -> None:
    """Raises `ValueError` if weights and buffers are not finite, or their [`weights_digest`] was another when saved."""
    if any(tensor.is_meta for tensor in tensors.values()):
        return
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ValueError(
            f"{source}: {broken} have values that are NaN or infinite. Download the checkpoint again, or load it in another "
            "`dtype` if it overflows in this one."
        )
    if digest is not None and digest != weights_digest(tensors):
        raise ValueError(
            f"The weights of {source} are not those that were saved with its config.json. Download the checkpoint again, or "
            "remove `weights_digest` from config.json if you changed them on purpose."
        )


def weights_digest(state_dict: dict[str, torch.Tensor]) -> str:
    """SHA-256 of a draft's weights in bfloat16, so that a float32 draft and its bfloat16 copy have the same."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state_dict.items()):
        if tensor.is_floating_point():
            tensor = tensor.bfloat16().view(torch.int16)
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


# Targets -----------------------------------------------------------------------------------------------------------


def check_is_model(target: Any) -> None:
    """Raises `TypeError` if a target is no loaded model, but its name, say."""
    if not hasattr(target, "get_input_embeddings"):
        raise TypeError(
            f"The target must be a loaded model, not {type(target).__name__}. Load it with `AutoModelForCausalLM.from_pretrained`, "
            "and pass it without a wrapper."
        )


def reads_both_ways(target: PreTrainedModel) -> bool:
    """Whether the layers of a target are those of an encoder (BERT), which see later tokens."""
    may_be_encoder = getattr(target.config.get_text_config(decoder=True), "is_decoder", None) is False
    # The configuration of GPT-NeoX says the same, but not its layers.
    return may_be_encoder and any(
        getattr(each, "is_decoder", None) is False for each in target.get_decoder().modules()
    )


def mismatch_of(draft: PreTrainedModel, target: PreTrainedModel) -> str | None:
    """Why a draft cannot be for a target: of another kind, size, vocabulary or embedding. `None` if it may be."""
    config, text_config = draft.config, target.config.get_text_config(decoder=True)
    if target.config.is_encoder_decoder:
        return "the target is an encoder-decoder, but EAGLE-3 drafts for decoder-only models"
    if reads_both_ways(target):
        return "the target sees later tokens (`is_decoder` is false), but EAGLE-3 drafts for causal models"
    for name, reason in UNREADABLE_TARGETS.items():
        if getattr(text_config, name, None):
            return f"the target {reason} (`{name}`), which EAGLE-3 drafts cannot read"
    table = table_of(target)
    known_rows = config.verifier_fingerprint if table.weight.device.type != "meta" else None
    # Added tokens (`resize_token_embeddings`) leave the ids and rows of the others, as the fingerprint shows.
    has_more_tokens = known_rows is not None and text_config.vocab_size > config.vocab_size
    if config.vocab_size != text_config.vocab_size and not has_more_tokens:
        return (
            f"it needs a vocabulary of {config.vocab_size}, but the target has one of {text_config.vocab_size}. If you resized "
            "the target's embeddings (`resize_token_embeddings`), make a draft for it after that"
        )
    if config.target_hidden_size != text_config.hidden_size:
        return f"it needs states of size {config.target_hidden_size}, but the target's have size {text_config.hidden_size}"
    layer_ids, depth = draft.resolve_aux_layer_ids(target), text_config.num_hidden_layers
    if not all(0 <= layer_id <= depth for layer_id in layer_ids):
        return f"it reads the states entering layers {layer_ids}, but the target has layers 0 to {depth - 1}"
    if not config.has_own_embed_tokens and table.weight.shape[-1] != config.hidden_size:
        return (
            f"it reads an embedding table of width {config.hidden_size}, but the target's has {table.weight.shape[-1]}"
        )
    # Fine-tuning and quantization hardly change the table, but those of two models are unrelated.
    num_rows = config.vocab_size if has_more_tokens else None
    if known_rows is not None and similarity(known_rows, fingerprint(table, num_rows)) < 0.9:
        return "it was trained for another model: the sizes agree, but the embedding tables are unrelated"
    return None


def check_draft(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raises `ValueError` if the draft or the target is not ready: offloaded, in training mode, or the draft is on several devices."""
    # Its own embedding table may be on another device than the rest.
    devices = {weight.device for name, weight in draft.named_parameters() if name != "embed_tokens.weight"}
    if len(devices) > 1 or any(weight.is_meta for weight in draft.parameters()):
        places = ", ".join(sorted({str(weight.device) for weight in draft.parameters()}))
        raise ValueError(
            f"The draft's weights are on {places}: they are offloaded, split over devices or not loaded. Load it with "
            "`from_pretrained`, whole on one device (without `device_map='auto'`)."
        )
    check_dropout("draft", draft)
    check_embedding(draft, target)


def check_embedding(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raises `ValueError` if the draft reads the embedding of the target, and that is offloaded."""
    if not draft.config.has_own_embed_tokens and table_of(target).weight.device.type == "meta":
        raise ValueError(
            f"The embedding of {type(target).__name__}, which the draft reads, is offloaded. Keep it on a device in the "
            "`device_map`, or make the draft with `has_own_embed_tokens=True`."
        )


def similarity(one: str, other: str) -> float:
    """The cosine similarity of two [`fingerprint`]s."""
    ours, theirs = (
        torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float16).double() for text in (one, other)
    )
    return torch.cosine_similarity(ours, theirs, dim=0).item()


def fingerprint(table: torch.nn.Embedding, num_rows: int | None = None) -> str:
    """The first 4 entries of 16 evenly spaced rows of a table `(vocab_size, hidden_size)`, or of its first `num_rows`, in base64."""
    last = (num_rows or len(table.weight)) - 1
    rows = torch.linspace(0, last, 16, dtype=torch.float32, device=table.weight.device).long()
    entries = look_up(gathered_table(table), rows).detach()[:, :4].flatten().half().cpu()
    return base64.b64encode(entries.numpy().tobytes()).decode()

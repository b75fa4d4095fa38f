# SPDX-License-Identifier: Apache-2.0
"""What drafts have in common, whatever their network: loading, vocabulary, embedding, and the target they are for."""

import importlib.util
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils import logging

from .assistant_eagle3 import AssistantMixin
from .auto_eagle3 import check_needs
from .checks_eagle3 import check_draft, check_pairing, whole, whole_embedding
from .configuration_eagle3 import Eagle3Config, default_aux_layer_ids
from .loading_eagle3 import check_files, check_tensors, code_digest, weights_digest, without_load_report
from .outputs_eagle3 import keep_state_after_last_layer
from .policy_eagle3 import DEFAULT_TREE_SETTINGS, tree_settings
from .tree_eagle3 import grow_tree


# A child of transformers' own logger: shown and silenced with it.
logger = logging.get_logger("transformers.eagle3")

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


class DraftModel(AssistantMixin, PreTrainedModel, GenerationMixin):
    """
    A draft: a network that reads states of a target, and proposes what the target may say next. A subclass has the
    network, `lm_head` among it, and a [`~assistant_eagle3.AssistantMixin.proposer`].
    """

    config_class = Eagle3Config
    # How a draft grows its tree: with the arguments of [`~tree_eagle3.grow_tree`].
    grow_tree = staticmethod(grow_tree)
    # Whether it may read what the target's head reads, which transformers counts as one more layer's state.
    reads_last_state = False
    # What is a copy of the target's, and is not trained.
    frozen = ("embed_tokens",)

    def __init__(self, config):
        super().__init__(config)
        if config.has_own_embed_tokens:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        else:
            self.d2t = self.t2d = None
        # A reference in a list is no submodule: the target's table is neither saved, moved nor trained with the draft.
        self._borrowed_embedding: list[nn.Embedding] = []
        # Likewise the target's head, of which a draft that stores none has a copy.
        self._borrowed_head: list[nn.Module] = []
        self._borrowed_version: int | None = None
        self.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            **DEFAULT_TREE_SETTINGS,
        )

    @classmethod
    def overrides_for(cls, target: PreTrainedModel, overrides: dict[str, Any]) -> dict[str, Any]:
        """What [`from_target`] makes of its `overrides`, where defaults are other than the configuration's."""
        return overrides

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """
        Loads a draft: one of ours or of `speculators` and, where hf-eagle3 is installed, of SafeAILab/EAGLE, SpecForge,
        SGLang, Model-Optimizer, AngelSlim and others. A draft without a head gets its target's when the two meet. See
        [`~transformers.PreTrainedModel.from_pretrained`]; with `output_loading_info=True` the second result also has
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
        wants_loading_info = kwargs.pop("output_loading_info", False)
        # The code is this class's. Transformers would also run what the folder has for `custom_generate`.
        kwargs.pop("trust_remote_code", None)
        report, path = {"format": "speculators"}, pretrained_model_name_or_path
        hub_kwargs = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        content = None if path is None else check_files(path, kwargs.get("variant"), **hub_kwargs)
        digest = None if kwargs.get("variant") else (content or {}).get("weights_digest")  # which is of the others
        if content is not None and not cls.config_class.recognises(content, path):
            config, kwargs["state_dict"], report = read_other_format(content, path, hub_kwargs)
            kwargs["config"], path = kwargs.get("config") or config, None
        # Reported below, by name, with what else is wrong.
        kwargs.update(output_loading_info=True, ignore_mismatched_sizes=True)
        with without_load_report():
            model, info = super().from_pretrained(path, *args, **kwargs)
        if info["unexpected_keys"] == {"embed_tokens.weight"} and not model.config.has_own_embed_tokens:
            # The speculators schema does not say whether a table is stored; the file does.
            model.config.has_own_embed_tokens = True
            kwargs["config"] = model.config
            with without_load_report():
                model, info = super().from_pretrained(path, *args, **kwargs)
        if "lm_head.weight" in info["missing_keys"]:
            info["missing_keys"].remove("lm_head.weight")
            resize_head(model.get_output_embeddings(), 0)
        missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
        mismatched = sorted(str(entry) for entry in info["mismatched_keys"])
        if missing or unexpected or mismatched:
            raise ValueError(
                f"{pretrained_model_name_or_path} does not hold the tensors its config.json describes. "
                f"Missing: {missing or 'none'}. Unexpected: {unexpected or 'none'}. "
                f"Of another shape: {mismatched or 'none'}. Check the config's flags (norm_before_fc, fc_norm, "
                "draft_vocab_size, num_hidden_layers, ...) or download the checkpoint again."
            )
        check_code(content, pretrained_model_name_or_path)
        model._check_draft_vocabulary(pretrained_model_name_or_path)
        for name, value in tree_settings(model.generation_config).items():  # which drafts of others do not have
            setattr(model.generation_config, name, value)
        if not hasattr(model, "hf_quantizer"):
            # What float16 makes of other dtypes, and adapters beside them, cannot be told from other weights.
            is_changed = model.dtype == torch.float16 or getattr(model, "_hf_peft_config_loaded", False)
            digest = None if is_changed or kwargs.get("state_dict") is not None else digest
            check_tensors(model.state_dict(), pretrained_model_name_or_path, digest)
        if report["format"] != "speculators":
            model.name_or_path = model.config.name_or_path = str(pretrained_model_name_or_path)
            logger.info(
                f"{pretrained_model_name_or_path} was read as a checkpoint of the {report['format']} format: {report}"
            )
        return (model, {**info, **report}) if wants_loading_info else model

    @classmethod
    def from_target(cls, target: PreTrainedModel, *args: Any, **kwargs: Any) -> "DraftModel":
        """
        Makes an untrained draft for a loaded target. See `hf_eagle3.making.from_target`.

        Args:
            target (`PreTrainedModel`): The target.
            args, kwargs (*optional*): `draft_token_ids`, the target's tokens that it can propose;
                `num_hidden_layers`; and fields of [`Eagle3Config`], or of its `transformer_layer_config`.

        Raises:
            ValueError: if no draft can be made for the target, or a field or a token id does not exist.
        """
        return installed("making", "A new draft").from_target(cls, target, *args, **kwargs)

    def set_draft_vocabulary(self, draft_token_ids: Sequence[int] | torch.Tensor | None, target: PreTrainedModel):
        """
        Replaces the draft vocabulary, and `lm_head` by the target's rows for it.

        Args:
            draft_token_ids (`Sequence[int]` or `torch.Tensor`, *optional*): Target token ids; `None` stands for all.
            target (`PreTrainedModel`): The target.
        """
        installed("making", "Another vocabulary").set_draft_vocabulary(self, draft_token_ids, target)

    def pair_with(self, target: PreTrainedModel) -> None:
        """
        Writes down which target this draft is for: for drafts of formats that do not say so.

        Args:
            target (`PreTrainedModel`): The target.
        """
        installed("making", "Pairing").pair_with(self, target)

    def push_to_hub(self, repo_id: str, **kwargs):
        """
        Pushes the draft, its code and a card in one commit; see `hf_eagle3.hub.push_draft`. Where hf-eagle3 is not
        installed, [`~transformers.utils.PushToHubMixin.push_to_hub`] with transformers' own card.

        Args:
            repo_id (`str`): `<owner>/<name>`.
            kwargs (*optional*): As there.
        """
        if importlib.util.find_spec("hf_eagle3") is None:
            return super().push_to_hub(repo_id, **kwargs)
        return installed("hub", "Pushing a draft").push_draft(self, repo_id, **kwargs)

    @property
    def draft_token_ids(self) -> torch.LongTensor:
        """Target token ids of the draft vocabulary, of shape `(draft_vocab_size,)`."""
        draft_ids = torch.arange(self.config.draft_vocab_size, device=self.get_output_embeddings().weight.device)
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

    def borrow_embeddings(self, target: PreTrainedModel) -> None:
        """Lets `forward` look tokens up in the target's table, and use its head, for drafts that store none of their own."""
        self._borrowed_embedding = [whole_embedding(target)]
        self._borrow_head(target)

    def _borrow_head(self, target: PreTrainedModel) -> None:
        """Copies the target's head, as far as the draft's vocabulary goes, into a draft that stores none."""
        own, head = self.get_output_embeddings(), target.get_output_embeddings()
        is_own = not self._borrowed_head or own.weight._version != self._borrowed_version  # or was trained since
        if own.out_features > 0 and (is_own or self._borrowed_head[0] is head):
            return
        weight, token_ids = whole(head.weight.detach()), self.draft_token_ids
        is_number = weight.is_floating_point() and not weight.is_meta
        if not is_number or weight.shape[-1] != own.in_features or len(weight) <= token_ids[-1]:
            raise ValueError(
                f"The draft {self.config._name_or_path or '(unnamed)'} stores no head and needs the target's, as rows of "
                f"{own.in_features} numbers for tokens up to {int(token_ids[-1])}, but that of {type(target).__name__} is "
                f"{tuple(weight.shape)} in {weight.dtype} on {weight.device}. Load the target with its head on a device, and "
                "not quantized."
            )
        # Not a view of it: a draft may be trained, cast and moved without its target.
        with torch.inference_mode(False), torch.no_grad():
            resize_head(own, self.config.draft_vocab_size)
            own.weight.copy_(weight[token_ids.to(weight.device)])
        self._borrowed_head, self._borrowed_version = [head], own.weight._version

    def embed(self, input_ids: torch.LongTensor, embedding: nn.Embedding | None = None) -> torch.FloatTensor:
        """
        Looks tokens up in the draft's own table, else in `embedding`, else in the borrowed one. Only the weight is
        used: a factor that the target's embedding applies (Gemma) is not part of the draft's input.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`): Target token ids.
            embedding (`nn.Embedding`, *optional*): The target's embedding.
        """
        if self.config.has_own_embed_tokens:
            return self.embed_tokens(input_ids.to(self.embed_tokens.weight.device)).to(
                self.get_output_embeddings().weight
            )
        if embedding is None and not self._borrowed_embedding:
            raise ValueError(
                "This draft stores no embedding table. Call `draft.borrow_embeddings(target)` before `draft(...)`; "
                "`target.generate(..., assistant_model=draft)` needs no such call."
            )
        weight = (self._borrowed_embedding[0] if embedding is None else embedding).weight
        return nn.functional.embedding(input_ids.to(weight.device), weight).to(self.get_output_embeddings().weight)

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, *args, **kwargs):
        """
        See [`~transformers.PreTrainedModel.save_pretrained`].

        Raises:
            ValueError: if the draft stores no head, and has not met the target whose head it uses.
        """
        if self.get_output_embeddings().out_features == 0:
            raise ValueError("This draft stores no head, and uses its target's. Call `draft.pair_with(target)` first.")
        tree_settings(self.generation_config)  # with others it could not be loaded
        weights = self.state_dict() if state_dict is None else state_dict
        if is_main_process and all(type(weight) is torch.Tensor and not weight.is_meta for weight in weights.values()):
            self.config.weights_digest = weights_digest(weights)
        self.config.code_digest = code_digest(Path(__file__).parent)
        try:
            super().save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)
        finally:
            self.config.weights_digest = self.config.code_digest = None

    def validate_target(self, target: PreTrainedModel) -> None:
        """
        Checks that this draft was made for `target`, whose head it takes if it stores none.

        Args:
            target (`PreTrainedModel`): The target.

        Raises:
            ValueError: naming both sides, if the target is of another kind, size or vocabulary, or another model of
                the same sizes.
        """
        check_pairing(self, target)
        self._borrow_head(target)

    def resolve_aux_layer_ids(self, target: PreTrainedModel) -> list[int]:
        """
        The ids of the target's `hidden_states` that this draft reads. Where another format leaves open what its ids
        count (`config.aux_layer_ids_assumed`), they count outputs of layers, unless they are the usual inputs
        `[2, L // 2, L - 3]` or one of them is `L`; it is said once, where it is not plain.

        Args:
            target (`PreTrainedModel`): The target.
        """
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
        ids, default = self.config.eagle_aux_hidden_state_layer_ids, default_aux_layer_ids(depth)
        name = self.config._name_or_path or "(unnamed)"
        if not self.config.aux_layer_ids_assumed:
            return list(default if ids is None else ids)
        if ids is None:
            logger.warning_once(
                f"The draft {name} does not say which states it reads. Assumed are those that enter layers {default} of the "
                f"target's {depth}, which are usual."
            )
            return default
        stored = [layer_id - 1 for layer_id in ids]
        # Drafts that count inputs have the usual states, or the one after the last layer, which is no layer's input.
        counts_inputs = (depth >= 6 and stored == default) or max(stored) == depth
        if counts_inputs or ids != default:
            logger.warning_once(
                f"The draft {name} does not say what its layer ids {stored} count. They are taken for "
                f"{'inputs' if counts_inputs else 'outputs'} of the target's {depth} layers: it reads what enters layers "
                f"{stored if counts_inputs else ids}."
            )
        return stored if counts_inputs else list(ids)

    def assisted_decoding(self, target: PreTrainedModel, *args, **kwargs):
        """See [`~assistant_eagle3.AssistantMixin.assisted_decoding`]."""
        check_draft(self, target)
        with keep_state_after_last_layer(target) if self.reads_after_last_layer(target) else nullcontext():
            return super().assisted_decoding(target, *args, **kwargs)

    def reads_after_last_layer(self, target: PreTrainedModel) -> bool:
        """Whether one of the states is that after the target's last layer, before its final norm."""
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
        return depth in self.resolve_aux_layer_ids(target) and not self.reads_last_state

    def generate(self, *args, **kwargs):
        raise NotImplementedError(
            "A draft does not generate text by itself. Call `target.generate(..., assistant_model=draft)`. If you did, the "
            "target's `_assisted_decoding` is not transformers' own: remove what replaces it."
        )


def resize_head(head: nn.Linear, num_rows: int) -> None:
    """Gives a head so many rows, which are not set yet."""
    weight = head.weight.new_empty(num_rows, head.in_features)
    head.weight = nn.Parameter(weight, requires_grad=head.weight.requires_grad)
    head.out_features = num_rows


def check_code(content: dict | None, name) -> None:
    """Says so if code that came with a draft is not the code that this draft was saved with."""
    digest, is_installed = (content or {}).get("code_digest"), __package__ == "hf_eagle3.remote_code"
    if digest is not None and not is_installed and digest != code_digest(Path(__file__).parent):
        logger.warning(
            f"{name} runs other code than it was saved with: it was changed, or is that of another draft, from transformers' "
            f"module cache ({Path(__file__).parent}). Download the draft again, or remove that folder."
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

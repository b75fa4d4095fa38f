# SPDX-License-Identifier: Apache-2.0
"""Configuration of an EAGLE-3 draft, in the schema of the `speculators` package, and the settings of its trees."""

import difflib
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from .auto_eagle3 import IS_INSTALLED, installed_module


# One name per class that `AutoXxx.from_pretrained(..., trust_remote_code=True)` may be asked for. All name the same file,
# because transformers tells copies of code apart by a hash of the named file and of the files that it imports. The
# configuration's file alone has the same hash in folders with different models.
AUTO_MAP = {
    "AutoConfig": "auto_eagle3.Eagle3Config",
    "AutoModel": "auto_eagle3.Eagle3ForSpeculation",
    "AutoModelForCausalLM": "auto_eagle3.Eagle3ForSpeculation",
}

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "has_own_embed_tokens")
# Keys of config.json that only drafts have: `speculators`' and ours, and those of other projects.
DRAFT_KEYS = {
    "speculators_model_type",
    "open_spec_config_version",
    "draft_vocab_size",
    "eagle_config",
    "dflash_config",
}
# The fields on which depends what a draft computes.
DIGESTED = (
    *FLAGS,
    "aux_layer_ids_assumed",
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "mask_token_id",
    "speculators_model_type",
    "target_hidden_size",
    "transformer_layer_config",
    "verifier_fingerprint",
)

# Settings of the draft's generation config, which a call may override. Names are those of
# OpenVINO GenAI and transformers.
DEFAULT_TREE_SETTINGS = {
    "tree_depth": 8,  # longest path below the root
    "branching_factor": 8,  # children tried per node, and nodes expanded per level
    "num_assistant_tokens": 24,  # most nodes verified per step
    "assistant_confidence_threshold": 0.0,  # least probability of a verified path, by the draft
    "prompt_lookup_num_tokens": 24,  # most tokens looked up in the text instead of drafted
    "tree_policy": "auto",  # whether a step may draft less, or look up, if that is faster
}


@strict
class Eagle3Config(PreTrainedConfig):
    r"""
    Configuration of an [`Eagle3ForSpeculation`] draft.

    `config.json` follows the `speculators` schema, which `vllm serve` reads. It has no top-level `model_type`, and all
    flags are written out because readers disagree on what a missing one means.

    Args:
        transformer_layer_config (`PreTrainedConfig` or `dict`, *optional*):
            Configuration of the draft's decoder layers. Its `model_type` is `"llama"` or `"qwen3"` (which adds `q_norm`
            and `k_norm`), and its `vocab_size` is the target's. Defaults to a Llama configuration.
        draft_vocab_size (`int`, *optional*):
            Number of tokens the draft can propose. Defaults to the target's vocabulary size, which needs no mapping.
        eagle_aux_hidden_state_layer_ids (`list[int]`, *optional*, defaults to `[2, L // 2, L - 3]`):
            Which target states the draft reads. Id `k` is the state *entering* decoder layer `k`, which is
            `hidden_states[k]` in transformers. The default depends on the target's number of layers `L`, so it stays
            `None` until the draft meets a target.
        aux_layer_ids_assumed (`bool`, *optional*, defaults to `False`):
            Whether the draft's original format did not say if these ids count inputs or outputs of layers. The target's
            number of layers then decides ([`~Eagle3ForSpeculation.resolve_aux_layer_ids`]).
        target_hidden_size (`int`, *optional*):
            Width of one target state. Defaults to the draft's hidden size.
        norm_before_residual (`bool`, *optional*, defaults to `False`):
            Whether the first layer takes its residual after `hidden_norm`.
        norm_before_fc (`bool`, *optional*, defaults to `False`):
            Whether one RMSNorm is applied to the concatenated target states.
        fc_norm (`bool`, *optional*, defaults to `False`):
            Whether each target state has its own RMSNorm before `fc` (EAGLE-3.1,
            https://huggingface.co/papers/2605.09992). Excludes `norm_before_fc`.
        norm_output (`bool`, *optional*, defaults to `False`):
            Whether the next drafting step reads the final norm's output (EAGLE-3.1) instead of its input.
        has_own_embed_tokens (`bool`, *optional*, defaults to `False`):
            Whether the checkpoint stores an embedding table. Without one the draft uses the target's.
        mask_token_id (`int`, *optional*):
            Makes a parallel draft (P-EAGLE, https://huggingface.co/papers/2602.01469), which drafts all tokens in one
            pass. It reads this token in place of tokens that are not known yet. It may be any token of the target.
        verifier_fingerprint (`str`, *optional*):
            A few entries of the target's embedding table (float16, in base64), by which a draft recognizes its target.
        bos_token_id (`int`, *optional*), pad_token_id (`int`, *optional*), eos_token_id (`int` or `list[int]`, *optional*):
            The target's special tokens.
        speculators_model_type (`str`, *optional*, defaults to `"eagle3"`):
            The method's name in `speculators`: `"peagle"` for a parallel draft.
        speculators_version (`str`, *optional*, defaults to `"0.9.0"`):
            The version of the schema.
        speculators_config (`dict`, *optional*):
            Proposal methods and the target (there `verifier`), as `speculators` defines them.
        weights_digest (`str`, *optional*):
            SHA-256 of a checkpoint's weights. It is written when a draft is saved, checked when it is loaded, and not kept.
            A `config_digest` beside it shows if a config.json was changed.

    Raises:
        ValueError: if a value is of the wrong type, flags exclude each other, the layers are not Llama's or Qwen3's, or the
            vocabulary sizes do not fit.
    """

    model_type: ClassVar[str] = "eagle3"
    sub_configs: ClassVar[dict] = {"transformer_layer_config": AutoConfig}

    if TYPE_CHECKING:  # what `__post_init__` makes of them
        transformer_layer_config: Any = None
        draft_vocab_size: int = 0
        target_hidden_size: int = 0
    else:
        transformer_layer_config: dict | PreTrainedConfig | None = None
        draft_vocab_size: int | None = None
        target_hidden_size: int | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    aux_layer_ids_assumed: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    has_own_embed_tokens: bool = False
    mask_token_id: int | None = None
    verifier_fingerprint: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    speculators_model_type: str = "eagle3"
    speculators_version: str = "0.9.0"
    speculators_config: dict | None = None
    weights_digest: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        layer_config = self.transformer_layer_config or {}
        if isinstance(layer_config, dict):
            if IS_INSTALLED:  # a copy reads what was saved with it, as `config_digest` shows
                installed_module("config_checks", "A configuration").check_layer_config(layer_config)
            layer_config = AutoConfig.for_model(**{"model_type": "llama", **layer_config})
        self.transformer_layer_config = layer_config
        # Engines want one entry a layer. Llama's own configuration has no such list.
        if getattr(layer_config, "layer_types", None) is None:
            layer_config.layer_types = ["full_attention"] * layer_config.num_hidden_layers
        if self.draft_vocab_size is None:
            self.draft_vocab_size = layer_config.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = layer_config.hidden_size
        if self.is_parallel and self.speculators_model_type == "eagle3":  # the default
            self.speculators_model_type = "peagle"
        if IS_INSTALLED:
            installed_module("config_checks", "A configuration").check_config(self)
        kwargs.pop("model_type", None)
        super().__post_init__(**kwargs)
        # vLLM takes the width of `fc` from here, and assumes 3 states without it.
        layer_config.num_aux_hidden_states = self.num_aux_hidden_states

    def __setattr__(self, name: str, value: Any) -> None:
        if name in DEFAULT_TREE_SETTINGS:
            raise AttributeError(
                f"The configuration of a draft has no `{name}`. Set `draft.generation_config.{name}`."
            )
        super().__setattr__(name, value)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Any:
        """[`~transformers.PreTrainedConfig.get_config_dict`]. If hf-eagle3 is installed, it checks the file, and reads other formats."""
        read = super().get_config_dict
        if IS_INSTALLED:
            auto = installed_module("auto", "A configuration")
            return auto.read_config_dict(cls, read, pretrained_model_name_or_path, **kwargs)
        return read(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def recognizes(cls, config_dict: dict[str, Any], source: str | Path) -> bool:
        """
        Returns whether the content of a `config.json` is in this schema and is read as it is. If not, the installed package converts the
        checkpoint, or refuses it (block drafts of `speculators`). An override may raise `ValueError` instead of returning `False`.
        """
        return config_dict.get("speculators_model_type") not in (None, "dflash")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """[`~transformers.PreTrainedConfig.from_dict`] that raises `ValueError` if a `config.json` is not what was saved."""
        config_dict = dict(config_dict)
        digest = config_dict.pop("config_digest", None)
        for name in ("weights_digest", "code_digest"):  # of the checkpoint, not of other drafts (older ones have both)
            config_dict.pop(name, None)
        if IS_INSTALLED:
            installed_module("config_checks", "A configuration").check_config_dict(cls, config_dict)
        nullable = config_dict.keys() - {*FLAGS, "auto_map"}
        config_dict = {name: value for name, value in config_dict.items() if value is not None or name in nullable}
        if digest is not None and digest != config_digest(config_dict):
            raise ValueError(
                f"This config.json is not what was saved: one of {', '.join(DIGESTED)} was changed, or a later version of hf-eagle3 "
                "saved it. Download it again with the code beside it, or remove `config_digest` from it if you changed it on purpose."
            )
        if kwargs.get("eagle_aux_hidden_state_layer_ids") is not None:  # the caller's own, which count inputs
            kwargs = {"aux_layer_ids_assumed": False, **kwargs}
        try:
            return super().from_dict(config_dict, **kwargs)
        except (AttributeError, KeyError, StrictDataclassError) as error:
            raise ValueError(f"This config.json cannot be read. {error}") from error

    @property
    def is_parallel(self) -> bool:
        """Whether all tokens are drafted in one pass."""
        return self.mask_token_id is not None

    @property
    def vocab_size(self) -> int:
        """The target's vocabulary size: `generate` compares it with the target's own."""
        return self.transformer_layer_config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.transformer_layer_config.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.transformer_layer_config.num_hidden_layers

    @property
    def num_aux_hidden_states(self) -> int:
        """How many target states are concatenated at each position."""
        ids = self.eagle_aux_hidden_state_layer_ids
        return 3 if ids is None else len(ids)

    @property
    def verifier(self) -> str:
        """Name or path of the draft's target, for messages."""
        verifier = (self.speculators_config or {}).get("verifier")
        name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
        return name or "an unnamed target"

    def to_dict(self) -> dict[str, Any]:
        return self._saved_form(super().to_dict())

    def to_diff_dict(self) -> dict[str, Any]:
        output = super().to_diff_dict()
        layer_config = self.transformer_layer_config
        output["transformer_layer_config"] = {**layer_config.to_diff_dict(), "model_type": layer_config.model_type}
        output = self._saved_form(output | {name: getattr(self, name) for name in FLAGS})
        return {**output, "config_digest": config_digest(output)}

    def _saved_form(self, output: dict[str, Any]) -> dict[str, Any]:
        # vLLM does not recognize a speculators checkpoint that has a top-level `model_type`.
        output.pop("model_type", None)
        output["architectures"] = ["Eagle3DraftModel"]
        output["auto_map"] = dict(AUTO_MAP)
        layer_config = output["transformer_layer_config"]
        for name in ("transformers_version", "dtype"):
            layer_config.pop(name, None)
        return output


def default_aux_layer_ids(num_target_layers: int) -> list[int]:
    """An early, a middle and a late state of the target (EAGLE-3, section 3.1), with ids as in vLLM and speculators."""
    if num_target_layers < 3:  # too shallow for three that differ
        return list(range(num_target_layers))
    if num_target_layers < 6:  # too shallow for the usual three
        return [0, num_target_layers // 2, num_target_layers - 1]
    return [2, num_target_layers // 2, num_target_layers - 3]


def config_digest(config_dict: dict[str, Any]) -> str:
    """SHA-256 of the fields of a `config.json` that change what a draft computes."""
    digested = {name: config_dict[name] for name in DIGESTED if name in config_dict}
    return hashlib.sha256(json.dumps(digested, sort_keys=True, default=str).encode()).hexdigest()


def tree_settings(
    draft_config: GenerationConfig | None, call_config: GenerationConfig | None = None
) -> dict[str, Any]:
    """
    The settings of the tree: the call's, else the draft's, else the defaults.

    `num_assistant_tokens=20` and `assistant_confidence_threshold=0.4` cannot be set per call, because they equal
    transformers' defaults, which `generate` fills into every call. Set them on the draft instead. Raises `ValueError` if a
    setting is out of range, or misspelled.
    """
    filled_in, known = GenerationConfig._get_default_generation_params(), vars(GenerationConfig())
    settings = dict(DEFAULT_TREE_SETTINGS)
    for owner, config in (("draft", draft_config), ("call", call_config)):
        given = {} if config is None else vars(config)
        for name in given.keys() - known.keys() - DEFAULT_TREE_SETTINGS.keys():
            if meant := difflib.get_close_matches(name, DEFAULT_TREE_SETTINGS, n=1, cutoff=0.8):
                raise ValueError(
                    f"The generation config of the {owner} has a setting `{name}`, which does not exist. Did you mean "
                    f"`{meant[0]}`?"
                )
        for name in DEFAULT_TREE_SETTINGS.keys() & given.keys():
            if given[name] is not None and (owner == "draft" or given[name] != filled_in.get(name)):
                settings[name] = given[name]
    for name, value in settings.items():
        if name == "assistant_confidence_threshold":
            is_valid, allowed = isinstance(value, (int, float)) and 0 <= value < 1, "in [0, 1)"
        elif name == "tree_policy":
            is_valid, allowed = value in ("auto", "static"), "'auto' or 'static'"
        else:
            least = 0 if name == "prompt_lookup_num_tokens" else 1
            is_valid, allowed = type(value) is int and value >= least, f"an integer of at least {least}"
        if not is_valid:
            raise ValueError(f"`{name}` must be {allowed}, got {value!r}.")
    return settings


Eagle3Config.register_for_auto_class()

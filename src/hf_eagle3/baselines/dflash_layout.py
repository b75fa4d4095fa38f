"""
The `config.json` of block drafts (z-lab's, JetSpec's, DeepSpec's, those of `speculators`, and the Open Spec Config), and what
[`DFlashConfig`] makes of it.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from ..auto import architectures_of
from ..checkpoints.keys import TOKEN_KEYS, is_neutral, rope_of
from ..config_checks import (
    DEFAULTS,
    NEUTRAL_KEYS,
    NEUTRAL_LAYER_KEYS,
    NEUTRAL_ROPE_KEYS,
    changed_defaults,
    check_positive,
    unknown_keys,
)
from ..remote_code.auto_eagle3 import logger


KINDS = ("dflash", "dspark")  # values of `speculators_model_type` and `projector_type`
OTHER_KEYS = ("target_hidden_size", *TOKEN_KEYS, "dtype", "torch_dtype", "transformers_version")
OLD_ROPE_KEYS = {"rope_scaling", "rope_theta"}
# Keys of the layers: all that transformers' Qwen3 has beyond any model's.
QWEN3_KEYS = Qwen3Config().to_dict().keys() - PreTrainedConfig().to_dict().keys() - {*TOKEN_KEYS} | OLD_ROPE_KEYS
FACTORS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
BLOCK_KEYS = ("block_size", "mask_token_id", *FACTORS)
CAUSAL_KEYS = ("is_causal", "causal", "causal_head")  # z-lab's and vLLM's names, and JetSpec's
ANCHOR_KEYS = ("sample_from_anchor", "dspark_bonus_anchor")  # the second is vLLM's name for the opposite
DSPARK_KEYS = (*ANCHOR_KEYS, "markov_rank", "markov_head_type")
NEUTRAL_DSPARK_KEYS = ("enable_confidence_head", "confidence_head_alpha", "confidence_head_with_markov", "num_anchors")
# z-lab's keys and those of DSpark. They stand in `dflash_config`, in `dspark_config`, or beside these, which counts less.
DFLASH_KEYS = {
    *(*BLOCK_KEYS, *CAUSAL_KEYS, *DSPARK_KEYS, *NEUTRAL_DSPARK_KEYS, "target_hidden_size", "target_layer_ids"),
    # Model-Optimizer's windows, how many states verl-SpeCo's drafts read, of how many layers, and how SpecForge trained.
    *("use_swa", "swa_window_size", "num_context_layers", "num_target_layers", "prefix_weight_base", "training_mode"),
}
# What drafts of ours add at the top level. Other readers pass over them.
OUR_KEYS = (
    *("draft_vocab_size", "follows_speculators", "has_own_embed_tokens", "target_hidden_size"),
    *("verifier_fingerprint", "weights_digest"),
)
# Also of the target, whose configuration may have become the draft's, with its experts.
TOP_KEYS = {
    *(*DFLASH_KEYS, *OUR_KEYS, *NEUTRAL_LAYER_KEYS, *Qwen3MoeConfig().to_dict(), *Qwen3MoeConfig.attribute_map),
    *("config_digest", "dflash_config", "dspark_config", "original_max_position_embeddings", "verifier"),
}
# Values that are the same as leaving the key out. Other values are of other kinds of block drafts.
BLOCK_DEFAULTS = {**{k: (v,) for k, v in DEFAULTS.items()}, "attention_mode": ("gqa",), "projector_type": KINDS}
# Their defaults differ between kinds of models.
NEEDED_KEYS = ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta")
SPECULATORS_KEYS = {
    *(*DSPARK_KEYS, *NEUTRAL_DSPARK_KEYS, *OTHER_KEYS, *NEUTRAL_KEYS, *PreTrainedConfig().to_dict()),
    *("aux_hidden_state_layer_ids", "block_size", "draft_vocab_size", "mask_token_id", "sliding_window_non_causal"),
    *("speculators_config", "speculators_model_type", "speculators_version", "transformer_layer_config"),
    # They name the target, are for training, or for Domino's head, which a draft with `projector_type: "dflash"` lacks.
    *("auf", "emb_dim", "gru_hidden_dim", "lambda_base_decay_ratio", "lambda_base_start", "max_anchors"),
    *("pure_draft_prefix_len", "verifier_architectures"),
}
# The keys of `speculative_config` in an Open Spec Config that every draft needs.
OPEN_KEYS = (
    *("mask_token_id", "sample_from_anchor", "sliding_window_non_causal", "speculative_tokens", "target_layer_ids"),
    "target_layer_start_idx",
)
OPTIONAL_OPEN_KEYS = ("draft_vocab_size", "method", "training_framework", "training_framework_version", "verifier")


def to_fields(content: dict[str, Any]) -> dict[str, Any]:
    """
    Returns the fields of a [`DFlashConfig`], given them or a `config.json` in z-lab's layout, that of `speculators`, or the Open Spec
    Config. Raises `ValueError` if it is not a block draft's, or has unknown keys.
    """
    if "open_spec_config_version" in content:
        content = open_spec_to_speculators(content)
    if content.get("speculators_model_type") in KINDS:
        return fields_of_speculators(content)
    is_flat = content.get("model_type") in ("qwen3", None) or content.keys() & {"dflash_config", "target_layer_ids"}
    return fields_of_zlab(content) if is_flat and "transformer_layer_config" not in content else content


def fields_of_zlab(content: dict[str, Any]) -> dict[str, Any]:
    """
    Returns the fields of a [`DFlashConfig`], given a `config.json` in z-lab's layout, in which ids of layers count outputs: `k` is the
    state that enters layer `k + 1`, and -1 is the embedding. For errors see [`to_fields`].
    """
    if content.get("config_digest") not in (None, digest_of(content)):
        raise ValueError(
            "This config.json is not what was saved. Download it again, or remove `config_digest` if you changed it on purpose."
        )
    # Model-Optimizer writes the string "None" for null.
    content = {key: value for key, value in content.items() if value not in (None, "None")}
    dflash: dict[str, Any] = {}
    for key in ("dflash_config", "dspark_config"):
        if not isinstance(place := content.get(key) or {}, dict):
            raise ValueError(f"`{key}` is {place!r}, but must be a mapping.")
        dflash |= {name: value for name, value in place.items() if value is not None}
    if content.get("aux_hidden_states_layer_ids") == dflash.get("target_layer_ids"):  # AngelSlim repeats them
        content.pop("aux_hidden_states_layer_ids", None)
    if is_automodel := content.get("architectures") == ["Qwen3DFlashDraftModel"]:
        content = without_unread_keys(content, dflash)
    is_qwen3, unknown = content.get("model_type", "qwen3") == "qwen3", unknown_in(content, TOP_KEYS)
    if is_automodel or not is_qwen3:  # what is about the target may be there, too
        unknown = {key for key in unknown if not is_neutral(key)}
    check_unknown(unknown | unknown_in(dflash, DFLASH_KEYS), content)
    placed, rope = {**content, **dflash}, content.get("rope_parameters")
    said = {**placed, **rope} if isinstance(rope, dict) else placed
    check_present(said, ("block_size", "mask_token_id", *(() if is_qwen3 else NEEDED_KEYS)))
    if "target_layer_ids" not in placed:
        placed["target_layer_ids"] = default_layer_ids(placed)
    layer_ids = checked_layer_ids("target_layer_ids", placed, first=-1)
    is_causal, uses_windows = agreed(placed, CAUSAL_KEYS), agreed(placed, ["use_swa"])
    layer_config = {key: content[key] for key in content.keys() & QWEN3_KEYS - OLD_ROPE_KEYS}
    # Block drafts take one position per token, whatever their target.
    rope = {key: value for key, value in rope_of(content).items() if key not in NEUTRAL_ROPE_KEYS}
    has_windows = "sliding_attention" in str(content.get("layer_types"))
    if uses_windows and not has_windows:
        # As in vLLM, all layers have windows then, and none is causal unless another key says so. Otherwise each layer has its type.
        is_causal, has_windows = bool(is_causal), True
        layer_config["max_window_layers"] = 0  # all layers from there on have windows
        layer_config.pop("layer_types", None)
    if has_windows and (uses_windows or "swa_window_size" in placed):
        check_positive(placed, "swa_window_size")
        window = placed.get("swa_window_size", content.get("sliding_window"))
        if window is None:
            raise ValueError(
                "`use_swa` is true, but there is no `swa_window_size`. Add what the draft was trained with."
            )
        layer_config |= {"sliding_window": window, "use_sliding_window": True}
    fields = {key: placed[key] for key in (*BLOCK_KEYS, *OUR_KEYS, *OTHER_KEYS) if key in placed}
    if {"config_digest", "quantization_config"} <= content.keys():  # others may have copied it from their target
        fields["quantization_config"] = content["quantization_config"]
    fields |= {key: float(fields[key]) for key in FACTORS if key in fields}
    if fields.get("final_logit_softcapping") == 0:  # off
        del fields["final_logit_softcapping"]
    verifier = content.get("verifier")
    return {
        "model_type": "dflash",
        "transformer_layer_config": {**layer_config, "rope_parameters": rope, "model_type": "qwen3"},
        "eagle_aux_hidden_state_layer_ids": [id_ + 1 for id_ in layer_ids],
        "is_causal": is_causal,
        "speculators_config": {"verifier": {"name_or_path": verifier}} if verifier else None,
        **dspark_fields(placed, default_anchor=True),
        **fields,
    }


def without_unread_keys(content: dict[str, Any], dflash: dict[str, Any]) -> dict[str, Any]:
    """
    Returns a configuration of NeMo Automodel without what it copied from a target like Qwen3.5, and its Qwen3 layers do not read. They
    rotate whole heads. Its JetSpec drafts are causal by `dflash_config`, whatever stands beside it.
    """
    ignored = {"attn_output_gate", "mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
    ignored |= {"partial_rotary_factor", *(("is_causal",) if dflash.get("causal") is not None else ())}
    kept = {key: value for key, value in content.items() if key not in ignored}
    if isinstance(rope := kept.get("rope_parameters"), dict):
        kept["rope_parameters"] = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    return kept


def spread_layer_ids(num_layers: int, num_states: int) -> list[int]:
    """
    Returns the layers of a target whose outputs most trainers choose for a draft of `num_states` states: from the second one to the
    last but two. A small target may not have enough.
    """
    first, last = (1, num_layers - 3) if num_layers > 4 else (0, max(num_layers - 2, 0))
    if num_states == 1:
        return [min(num_layers // 2, last)]
    return sorted({round(first + index * (last - first) / (num_states - 1)) for index in range(num_states)})


def default_layer_ids(content: dict[str, Any]) -> list[int] | None:
    """
    Returns the ids of layers that SpecForge, TorchSpec, AngelSlim and NeMo Automodel train a draft with whose configuration names
    none: as many as it has layers, or verl-SpeCo's `num_context_layers`. `None` if these numbers are missing, or the target has not
    enough layers for that.
    """
    depth = content.get("num_target_layers")
    count = content.get("num_context_layers") or content.get("num_hidden_layers")
    if type(depth) is not int or type(count) is not int or depth <= 4 or len(spread_layer_ids(depth, count)) != count:
        return None
    spread = spread_layer_ids(depth, count)
    logger.warning_once(
        f"This config.json has no `target_layer_ids`. We take the outputs of layers {spread}, as most trainers do then. If few tokens "
        "are accepted, add what the draft was trained with."
    )
    return spread


def dspark_fields(content: dict[str, Any], default_anchor: bool) -> dict[str, Any]:
    """
    Returns the fields of a [`DFlashConfig`] for what DSpark adds to DFlash. A draft of DSpark that does not say so samples from its
    anchor in DeepSpec's layout, but not in that of `speculators` (`default_anchor`), as in vLLM. Raises `ValueError` if it has
    another head than the papers' low-rank matrices, or a value is missing.
    """
    names = [*architectures_of(content), content.get("projector_type"), content.get("speculators_model_type")]
    is_dspark = "dspark" in " ".join(map(str, names)).lower() or bool(content.get("markov_rank"))
    if is_dspark and type(content.get("markov_rank")) is not int:
        raise ValueError(
            f"`markov_rank` of this DSpark draft is {content.get('markov_rank')!r}, but must be a number. Set it to the "
            "number of columns of `markov_head.markov_w1.weight`, or to 0 if there is no such tensor."
        )
    rank, kind = content.get("markov_rank") or 0, content.get("markov_head_type")
    if rank and kind not in (None, "vanilla"):
        raise ValueError(
            f"This draft has a Markov head of the type {kind!r}, but only 'vanilla' is supported. An engine such as TensorRT-LLM may run it."
        )
    from_anchor = agreed(content, ANCHOR_KEYS, opposite="dspark_bonus_anchor")
    return {
        "sample_from_anchor": is_dspark and default_anchor if from_anchor is None else from_anchor,
        "markov_rank": rank,
    }


def agreed(content: dict[str, Any], keys: Iterable[str], opposite: str | None = None) -> bool | None:
    """
    Returns what a configuration says by one of several keys, the `opposite` of one of which it may be, or `None` if it has none.
    Raises `ValueError` if they contradict each other, or one is neither true nor false.
    """
    said: dict[str, bool] = {}
    for key in keys:
        if (value := content.get(key)) not in (None, False, True):  # text would count as true
            raise ValueError(f"`{key}` is {value!r}, but must be true or false.")
        if value is not None:
            said[key] = bool(value) != (key == opposite)
    if len({*said.values()}) > 1:
        raise ValueError(f"{', '.join(said)} contradict each other in this config.json. Remove the wrong one.")
    return next(iter(said.values()), None)


def unknown_in(place: dict[str, Any], known: set[str]) -> set[str]:
    """Returns the keys that are not `known`, or do not have their default. Those that are checked later are not among them."""
    unknown = {key for key in unknown_keys(place, known) if place[key] not in BLOCK_DEFAULTS.get(key, ())}
    return unknown | {*changed_defaults(place)} - {"is_causal", "partial_rotary_factor"}


def check_present(place: dict[str, Any], keys: Iterable[str]) -> None:
    """Raises `ValueError` if one of the keys is missing or null."""
    if absent := [key for key in keys if place.get(key) is None]:
        raise ValueError(f"This config.json lacks {absent}. Add what the draft was trained with.")


def check_unknown(unknown: Iterable[str], content: dict[str, Any]) -> None:
    """Raises `ValueError` if there are unknown keys."""
    if unknown := sorted(unknown):
        raise ValueError(
            f"This config.json has keys that DFlash does not have: {unknown}. If they are about the target or the training, "
            f"remove them. Otherwise the draft ({content.get('architectures')}) is of another kind (DFlash 2, Domino), or has "
            "other layers, which hf-eagle3 does not read. An engine such as vLLM may run it."
        )


def open_spec_to_speculators(content: dict[str, Any]) -> dict[str, Any]:
    """
    Returns a `config.json` in the layout of `speculators`, given one in the Open Spec Config that its later versions write. There
    the keys of the layers stand at the top level. `target_layer_start_idx` says what ids of layers count: 0 outputs, 1 inputs.
    Raises `ValueError` if its version or method is another one, or keys are missing or unknown.
    """
    settings: Any = content.get("speculative_config")
    version = content["open_spec_config_version"]
    method = settings.get("method") if isinstance(settings, dict) else None
    if version != "0.0.0" or method != "dflash":
        raise ValueError(
            f"This config.json is in version {version!r} of the Open Spec Config, for the method {method!r}. Only version '0.0.0' for "
            "'dflash' is supported. An engine such as vLLM may run this draft."
        )
    check_present(settings, OPEN_KEYS)
    check_unknown(unknown_in(settings, {*OPEN_KEYS, *OPTIONAL_OPEN_KEYS}), content)
    first, num_tokens = settings["target_layer_start_idx"], settings["speculative_tokens"]
    if first not in (0, 1) or type(num_tokens) is not int:
        raise ValueError(
            f"`target_layer_start_idx` is {first!r}, but must be 0 or 1, and `speculative_tokens` is {num_tokens!r}, but must be an integer."
        )
    metadata = content.get("speculators_metadata")
    outside = {key: content[key] for key in ("auto_map", "quantization_config", *OTHER_KEYS) if key in content}
    not_layers = {"architectures", "open_spec_config_version", "speculative_config", "speculators_metadata", *outside}
    return {
        **(metadata if isinstance(metadata, dict) else {"speculators_metadata": metadata}),  # unknown
        **outside,
        "speculators_model_type": "dflash",
        "transformer_layer_config": {key: value for key, value in content.items() if key not in not_layers},
        "aux_hidden_state_layer_ids": [id_ + 1 - first for id_ in checked_layer_ids("target_layer_ids", settings)],
        "block_size": num_tokens if settings["sample_from_anchor"] else num_tokens + 1,
        "draft_vocab_size": settings.get("draft_vocab_size") or content.get("vocab_size"),
        "speculators_config": {"verifier": {"name_or_path": settings.get("verifier")}},
        **{key: settings[key] for key in ("mask_token_id", "sample_from_anchor", "sliding_window_non_causal")},
    }


def fields_of_speculators(content: dict[str, Any]) -> dict[str, Any]:
    """
    Returns the fields of a [`DFlashConfig`], given a `config.json` of a DFlash or DSpark draft of `speculators`. There, ids of layers
    count inputs, so `k` is the state that enters layer `k`. Raises `ValueError` if something is missing or ambiguous, or
    there are unknown keys.
    """
    needed = ("block_size", "draft_vocab_size", "mask_token_id")
    check_present(content, (*needed, "aux_hidden_state_layer_ids", "transformer_layer_config"))
    check_unknown(unknown_in(content, SPECULATORS_KEYS), content)
    layer_config, speculators_config = content["transformer_layer_config"], content.get("speculators_config") or {}
    if not isinstance(layer_config, dict) or not isinstance(speculators_config, dict):
        raise ValueError(
            "`transformer_layer_config` and `speculators_config` must be mappings. Download the draft again."
        )
    layer_types = layer_config.get("layer_types") or ()
    not_causal = content.get("sliding_window_non_causal")
    if (layer_config.get("use_sliding_window") or "sliding_attention" in layer_types) and type(not_causal) is not bool:
        raise ValueError(
            "This draft has sliding windows, but its config.json does not say whether the block is causal in them. Readers "
            "disagree on the default. Set `sliding_window_non_causal` there to what the draft was trained with."
        )
    return {
        "model_type": "dflash",
        "transformer_layer_config": {"model_type": "qwen3", **layer_config},
        "eagle_aux_hidden_state_layer_ids": checked_layer_ids("aux_hidden_state_layer_ids", content),
        "is_causal": False if not_causal else None,  # full attention is never causal
        "follows_speculators": True,
        **dspark_fields(content, default_anchor=False),
        "speculators_config": {"verifier": speculators_config.get("verifier") or {}},
        **{key: content[key] for key in (*needed, *OTHER_KEYS) if content.get(key) is not None},
    }


def checked_layer_ids(name: str, content: dict[str, Any], first: int = 0) -> list[int]:
    """Returns the ids of layers by a key. Raises `ValueError` if they are not a list of numbers from `first` (the embedding) on."""
    ids = content.get(name)
    if not isinstance(ids, list) or not ids or not all(type(id_) is int and id_ >= first for id_ in ids):
        raise ValueError(
            f"`{name}` is {ids!r}, but must be a list of numbers of layers, from {first} (the embedding) on."
        )
    return ids


def to_zlab(fields: dict[str, Any]) -> dict[str, Any]:
    """
    Returns a `config.json` in z-lab's layout, given the fields of a [`DFlashConfig`]. For DSpark it is in DeepSpec's, which has all at the
    top level.
    """
    fields = {**fields, "follows_speculators": fields.get("follows_speculators") or None}  # only where it is so
    others = (*TOKEN_KEYS, *OUR_KEYS, "dtype", "transformers_version", "is_causal", "quantization_config")
    verifier = ((fields.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    of_block = {key: fields[key] for key in BLOCK_KEYS if fields.get(key) is not None}
    of_block["target_layer_ids"] = [id_ - 1 for id_ in fields["eagle_aux_hidden_state_layer_ids"]]
    if fields.get("is_causal") is not None:
        of_block |= dict.fromkeys(("causal", "causal_head"), fields["is_causal"])
    content = {
        **{key: value for key, value in fields["transformer_layer_config"].items() if key in QWEN3_KEYS},
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": fields["block_size"],
        **{key: fields[key] for key in others if fields.get(key) is not None},
        **({"verifier": verifier} if verifier else {}),
    }
    if fields["sample_from_anchor"] or fields["markov_rank"]:
        content |= {**of_block, **{key: fields[key] for key in ("sample_from_anchor", "markov_rank")}}
        content |= {"markov_head_type": "vanilla", "enable_confidence_head": False}
        content["architectures"] = ["Qwen3DSparkModel"]
    else:
        content["dflash_config"] = of_block
    return {**content, "config_digest": digest_of(content)}


def digest_of(content: dict[str, Any]) -> str:
    """SHA-256 of the fields that change what a draft computes, in a `config.json` in z-lab's layout."""
    names = (*QWEN3_KEYS, *OUR_KEYS, *DSPARK_KEYS, *BLOCK_KEYS, *CAUSAL_KEYS, "dflash_config", "target_layer_ids")
    names = (*names, "quantization_config")
    facts = {name: content[name] for name in sorted(names) if name in content and name != "weights_digest"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

"""
The `config.json` of block drafts (z-lab's, JetSpec's, DeepSpec's, those of `speculators`, and the Open Spec Config), and what
[`DFlashConfig`] makes of it.
"""

import hashlib
import json
from typing import Any

from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from ..auto import architectures_of
from ..checkpoints.keys import TOKEN_KEYS, is_neutral
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


TYPE_KEYS = ("dtype", "torch_dtype", "transformers_version")
# Keys of the layers: all that transformers' Qwen3 has beyond any model's, and older names of the rotary embedding's.
LAYER_KEYS = Qwen3Config().to_dict().keys() - PreTrainedConfig().to_dict().keys() - {*TOKEN_KEYS}
LAYER_KEYS |= {"rope_scaling", "rope_theta"}
FACTORS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
# z-lab's keys stand in `dflash_config` or beside it. Its place comes first where both have one.
BLOCK_KEYS = ("block_size", "mask_token_id", *FACTORS)
CAUSAL_KEYS = ("is_causal", "causal", "causal_head")  # z-lab's and vLLM's names, and JetSpec's
# Keys of DSpark, in z-lab's places, in `dspark_config`, or in the schema of `speculators`; and those that decoding here does not need.
ANCHOR_KEYS = ("sample_from_anchor", "dspark_bonus_anchor")  # the second is vLLM's name for the opposite
DSPARK_KEYS = (*ANCHOR_KEYS, "markov_rank", "markov_head_type")
NEUTRAL_DSPARK_KEYS = ("enable_confidence_head", "confidence_head_alpha", "confidence_head_with_markov", "num_anchors")
# What drafts of ours add at the top level. Other readers pass over them.
OUR_KEYS = (
    "draft_vocab_size",
    "follows_speculators",
    "has_own_embed_tokens",
    "target_hidden_size",
    "verifier_fingerprint",
    "weights_digest",
)
# Of scaled rotary embeddings. It may stand at the top level, where Phi has it.
ORIGINAL = "original_max_position_embeddings"
# Model-Optimizer's windows.
WINDOW_KEYS = ("use_swa", "swa_window_size")
# How SpecForge trained the draft.
TRAINING_KEYS = ("prefix_weight_base", "training_mode")
DFLASH_KEYS = {
    *BLOCK_KEYS,
    *CAUSAL_KEYS,
    *WINDOW_KEYS,
    *TRAINING_KEYS,
    *DSPARK_KEYS,
    *NEUTRAL_DSPARK_KEYS,
    "num_context_layers",  # verl-SpeCo's number of states, which `fc` shows, too
    "num_target_layers",
    "target_layer_ids",
    "target_hidden_size",
}
# They name the draft and its target, and do not change what it computes.
NAMING_KEYS = ("dflash_config", "dspark_config", "architectures", "config_digest", "dtype", "model_type", "verifier")
# Values that are the same as leaving the key out. Other values are of other kinds of block drafts.
BLOCK_DEFAULTS = {**DEFAULTS, "attention_mode": "gqa"}
PROJECTOR_TYPES = ("dflash", "dspark")
# Their defaults differ between kinds of models.
NEEDED_KEYS = ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta")
# The keys of `speculators` that every draft needs, and the others that change what it computes.
REQUIRED_KEYS = (
    "aux_hidden_state_layer_ids",
    "block_size",
    "draft_vocab_size",
    "mask_token_id",
    "transformer_layer_config",
)
SPECULATORS_KEYS = {
    *REQUIRED_KEYS,
    *DSPARK_KEYS,
    *NEUTRAL_DSPARK_KEYS,
    *TOKEN_KEYS,
    "sliding_window_non_causal",
    "speculators_config",
    "target_hidden_size",
}
# They name the draft, or are for training, or for Domino's head, which a draft with `projector_type: "dflash"` lacks.
NEUTRAL_SPECULATORS_KEYS = {
    *NEUTRAL_KEYS,
    "auf",
    "emb_dim",
    "gru_hidden_dim",
    "lambda_base_decay_ratio",
    "lambda_base_start",
    "max_anchors",
    "pure_draft_prefix_len",
    "speculators_model_type",
    "speculators_version",
    "verifier_architectures",
}
# The keys of `speculative_config` in an Open Spec Config: those that every draft needs, and the others.
OPEN_KEYS = (
    "mask_token_id",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "speculative_tokens",
    "target_layer_ids",
    "target_layer_start_idx",
)
OPTIONAL_OPEN_KEYS = ("draft_vocab_size", "method", "training_framework", "training_framework_version", "verifier")
# At the top level beside them, and not about the layers.
OUTSIDE_LAYERS = ("auto_map", "quantization_config", "target_hidden_size", *TOKEN_KEYS, *TYPE_KEYS)


def nested_form(content: dict[str, Any]) -> dict[str, Any]:
    """
    Returns the fields of a [`DFlashConfig`], given them or a `config.json` in z-lab's layout, that of `speculators`, or the Open Spec
    Config. In z-lab's, ids of layers count outputs, so `k` is the state that enters layer `k + 1`, and -1 is the embedding.
    Raises `ValueError` if it is not a block draft's, or has unknown keys.
    """
    if "open_spec_config_version" in content:
        content = of_open_spec(content)
    if content.get("speculators_model_type") in PROJECTOR_TYPES:
        return speculators_form(content)
    is_qwen3 = content.get("model_type") in ("qwen3", None)
    has_block_keys = not content.keys().isdisjoint(("dflash_config", "target_layer_ids"))
    if "transformer_layer_config" in content or not (is_qwen3 or has_block_keys):
        return content
    dflash: dict[str, Any] = {}
    for key in ("dflash_config", "dspark_config"):
        if not isinstance(content.get(key) or {}, dict):
            raise ValueError(f"`{key}` is {content[key]!r}, but must be a mapping.")
        dflash |= content.get(key) or {}
    if content.get("aux_hidden_states_layer_ids") == dflash.get("target_layer_ids"):  # AngelSlim repeats them
        content = {key: value for key, value in content.items() if key != "aux_hidden_states_layer_ids"}
    if is_automodel := content.get("architectures") == ["Qwen3DFlashDraftModel"]:
        content = of_automodel(content, dflash)
    known = {*DFLASH_KEYS, *LAYER_KEYS, *TOKEN_KEYS, *OUR_KEYS, *NAMING_KEYS, *NEUTRAL_LAYER_KEYS}
    # The target's configuration may have become the draft's, with its experts. If it says so, there may be more that is about the target.
    known |= {*PreTrainedConfig().to_dict(), *Qwen3MoeConfig().to_dict(), *Qwen3MoeConfig.attribute_map, ORIGINAL}
    is_draft_s = is_qwen3 and not is_automodel
    unknown = {key for key in unknown_keys(without_defaults(content), known) if is_draft_s or not is_neutral(key)}
    unknown |= {*unknown_keys(without_defaults(dflash), DFLASH_KEYS), *changed_defaults(content)} - {*CAUSAL_KEYS}
    if unknown := unknown - {"partial_rotary_factor"}:  # that is checked later
        raise ValueError(
            f"This config.json has keys that DFlash does not have: {sorted(unknown)}. If they are about the target or the training, "
            f"remove them. Otherwise the draft ({content.get('architectures')}) is of another kind (DFlash 2, Domino), or has "
            "other layers, which hf-eagle3 does not read. An engine such as vLLM may run it."
        )
    rope = content.get("rope_parameters")
    said = {**content, **(rope if isinstance(rope, dict) else {}), **dflash}
    needed = ("block_size", "mask_token_id", *(() if is_qwen3 else NEEDED_KEYS))
    if absent := [key for key in needed if said.get(key) is None]:
        raise ValueError(f"This config.json lacks {absent}. Add what the draft was trained with.")
    if content.get("config_digest") not in (None, digest_of(content)):
        raise ValueError(
            "This config.json is not what was saved. Download it again, or remove `config_digest` if you changed it on purpose."
        )
    placed = {**content, **dflash}
    if placed.get("target_layer_ids") is None:
        placed["target_layer_ids"] = default_layer_ids(placed)
    layer_ids = checked_layer_ids("target_layer_ids", placed, first=-1)
    for key in (*CAUSAL_KEYS, "use_swa"):
        if placed.get(key) not in (None, False, True):  # text would count as true
            raise ValueError(f"`{key}` is {placed[key]!r}, but must be true or false.")
    is_causal = {bool(placed[key]) for key in CAUSAL_KEYS if placed.get(key) is not None}
    if len(is_causal) > 1:
        raise ValueError(f"{', '.join(CAUSAL_KEYS)} contradict each other in this config.json.")
    fields = {key: placed[key] for key in BLOCK_KEYS if placed.get(key) is not None}
    fields |= {key: float(fields[key]) for key in FACTORS if key in fields}
    fields |= dspark_fields(placed, default_anchor=True)
    if fields.get("final_logit_softcapping") == 0:  # off
        del fields["final_logit_softcapping"]
    others, verifier = (*TOKEN_KEYS, *OUR_KEYS, *TYPE_KEYS), content.get("verifier")
    layer_config = {key: content[key] for key in LAYER_KEYS if content.get(key) is not None}
    if content.get("partial_rotary_factor") is not None:
        layer_config["partial_rotary_factor"] = content["partial_rotary_factor"]
    has_windows = "sliding_attention" in str(content.get("layer_types"))
    if placed.get("use_swa") and not has_windows:
        # As in vLLM, all layers have windows then, and none is causal unless another key says so. Otherwise each layer has its type.
        is_causal, has_windows = is_causal or {False}, True
        layer_config["max_window_layers"] = 0  # all layers from there on have windows
        layer_config.pop("layer_types", None)
    if has_windows and (placed.get("use_swa") or placed.get("swa_window_size") is not None):
        check_positive(placed, "swa_window_size")
        window = placed.get("swa_window_size") or content.get("sliding_window")
        if window is None:
            raise ValueError(
                "`use_swa` is true, but there is no `swa_window_size`. Add what the draft was trained with."
            )
        layer_config |= {"sliding_window": window, "use_sliding_window": True}
    original = content.get(ORIGINAL)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(layer_config.get(key), dict):  # block drafts take one position a token, whatever their target
            layer_config[key] = scaling = {
                name: "default" if each == "mrope" else each
                for name, each in layer_config[key].items()
                if name not in NEUTRAL_ROPE_KEYS
            }
            is_scaled = scaling.get("rope_type", scaling.get("type", "default")) != "default"
            if original and is_scaled and scaling.setdefault(ORIGINAL, original) != original:
                raise ValueError(
                    f"`{ORIGINAL}` is {original!r} in config.json, but {scaling[ORIGINAL]!r} in `{key}`. Remove the wrong one."
                )
    return {
        "model_type": "dflash",
        "transformer_layer_config": {**layer_config, "model_type": "qwen3"},
        "eagle_aux_hidden_state_layer_ids": [id_ + 1 for id_ in layer_ids],
        "is_causal": is_causal.pop() if is_causal else None,
        "speculators_config": {"verifier": {"name_or_path": verifier}} if verifier else None,
        **fields,
        **{key: placed[key] for key in others if placed.get(key) is not None},
    }


def of_automodel(content: dict[str, Any], dflash: dict[str, Any]) -> dict[str, Any]:
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
    Ids of the states that a fresh draft reads, from the second layer's output to that of the last but two, like z-lab's drafts.
    Id `k` is the state that enters layer `k`, which z-lab calls `k - 1`.
    """
    first, last = (2, num_layers - 2) if num_layers >= 6 else (1, max(num_layers - 1, 1))
    if num_states == 1:
        return [(first + last) // 2]
    return sorted({round(first + i * (last - first) / (num_states - 1)) for i in range(num_states)})


def default_layer_ids(content: dict[str, Any]) -> list[int] | None:
    """
    Returns the ids of layers that SpecForge, TorchSpec, AngelSlim and NeMo Automodel train a draft with whose configuration names
    none: as many as it has layers, or verl-SpeCo's `num_context_layers`, spread over the target. `None` if these numbers are missing,
    or the target has not enough layers for that.
    """
    # Rounded as there. `spread_layer_ids`, which is for fresh drafts, fits small targets, too, and differs in some others by one layer.
    depth, num_layers = content.get("num_target_layers"), content.get("num_hidden_layers")
    count = content.get("num_context_layers") or num_layers
    if type(depth) is not int or type(count) is not int or not (depth > 4 and 1 <= count <= depth):
        return None
    spread = [round(1 + index * (depth - 4) / (count - 1)) for index in range(count)] if count > 1 else [depth // 2]
    if len(set(spread)) < count:
        return None
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
    is_dspark = "dspark" in " ".join(map(str, names)).lower() or content.get("markov_rank")
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
    said = {key: content[key] for key in ANCHOR_KEYS if content.get(key) is not None}
    for key, value in said.items():
        if type(value) is not bool:
            raise ValueError(f"`{key}` is {value!r}, but must be true or false.")
    from_anchor = {value == (key == "sample_from_anchor") for key, value in said.items()}
    if len(from_anchor) > 1:
        raise ValueError(
            f"{', '.join(said)} contradict each other in this config.json: one is the opposite of the other."
        )
    is_default = bool(is_dspark) and default_anchor
    return {"sample_from_anchor": from_anchor.pop() if from_anchor else is_default, "markov_rank": rank}


def without_defaults(content: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration without the keys that have their [`BLOCK_DEFAULTS`], or name a kind that we read."""
    if content.get("projector_type") in PROJECTOR_TYPES:
        content = {key: value for key, value in content.items() if key != "projector_type"}
    return {key: value for key, value in content.items() if key not in BLOCK_DEFAULTS or value != BLOCK_DEFAULTS[key]}


def of_open_spec(content: dict[str, Any]) -> dict[str, Any]:
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
    missing = [key for key in OPEN_KEYS if settings.get(key) is None]
    unknown = unknown_keys(settings, {*OPEN_KEYS, *OPTIONAL_OPEN_KEYS})
    if missing or unknown:
        raise ValueError(
            f"`speculative_config` in this config.json lacks {missing or 'nothing'}, and has unknown keys: {unknown or 'none'}. "
            "Download the draft again, or try a newer hf-eagle3."
        )
    first, num_tokens = settings["target_layer_start_idx"], settings["speculative_tokens"]
    if first not in (0, 1) or type(num_tokens) is not int:
        raise ValueError(
            f"`target_layer_start_idx` is {first!r}, but must be 0 or 1, and `speculative_tokens` is {num_tokens!r}, but must be an integer."
        )
    metadata = content.get("speculators_metadata")
    outside = {key: content[key] for key in OUTSIDE_LAYERS if key in content}
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


def speculators_form(content: dict[str, Any]) -> dict[str, Any]:
    """
    Returns the fields of a [`DFlashConfig`], given a `config.json` of a DFlash or DSpark draft of `speculators`. There, ids of layers
    count inputs, so `k` is the state that enters layer `k`. Raises `ValueError` if something is missing or ambiguous, or
    there are unknown keys.
    """
    if missing := [key for key in REQUIRED_KEYS if content.get(key) is None]:
        raise ValueError(f"This config.json of a block draft of speculators lacks {missing}. Download it again.")
    known = {*SPECULATORS_KEYS, *NEUTRAL_SPECULATORS_KEYS, *PreTrainedConfig().to_dict()}
    if unknown := unknown_keys(without_defaults(content), known):
        raise ValueError(
            f"This config.json of speculators has keys that DFlash does not have: {unknown}. It may be of another kind of block "
            "draft (Domino), which hf-eagle3 does not read. An engine such as vLLM may."
        )
    layer_config, speculators_config = content["transformer_layer_config"], content.get("speculators_config") or {}
    if not isinstance(layer_config, dict) or not isinstance(speculators_config, dict):
        raise ValueError(
            "`transformer_layer_config` and `speculators_config` must be mappings. Download the draft again."
        )
    has_windows = layer_config.get("use_sliding_window") or "sliding_attention" in (
        layer_config.get("layer_types") or ()
    )
    not_causal = content.get("sliding_window_non_causal")
    if has_windows and type(not_causal) is not bool:
        raise ValueError(
            "This draft has sliding windows, but its config.json does not say whether the block is causal in them. Readers "
            "disagree on the default. Set `sliding_window_non_causal` there to what the draft was trained with."
        )
    fields = ("block_size", "draft_vocab_size", "mask_token_id", "target_hidden_size", *TOKEN_KEYS, *TYPE_KEYS)
    return {
        "model_type": "dflash",
        "transformer_layer_config": {"model_type": "qwen3", **layer_config},
        "eagle_aux_hidden_state_layer_ids": checked_layer_ids("aux_hidden_state_layer_ids", content),
        "is_causal": False if not_causal else None,  # full attention is never causal
        "follows_speculators": True,
        **dspark_fields(content, default_anchor=False),
        "speculators_config": {"verifier": speculators_config.get("verifier") or {}},
        **{key: content[key] for key in fields if content.get(key) is not None},
    }


def checked_layer_ids(name: str, content: dict[str, Any], first: int = 0) -> list[int]:
    """Returns the ids of layers by a key. Raises `ValueError` if they are not a list of numbers from `first` (the embedding) on."""
    ids = content.get(name)
    if not isinstance(ids, list) or not ids or not all(type(id_) is int and id_ >= first for id_ in ids):
        raise ValueError(
            f"`{name}` is {ids!r}, but must be a list of numbers of layers, from {first} (the embedding) on."
        )
    return ids


def flat_form(fields: dict[str, Any]) -> dict[str, Any]:
    """
    Returns a `config.json` in z-lab's layout, given the fields of a [`DFlashConfig`]. For DSpark it is in DeepSpec's, which has all at the
    top level.
    """
    layer_ids = [id_ - 1 for id_ in fields["eagle_aux_hidden_state_layer_ids"]]
    dflash = {key: fields[key] for key in BLOCK_KEYS if fields.get(key) is not None}
    causal = {} if fields.get("is_causal") is None else dict.fromkeys(("causal", "causal_head"), fields["is_causal"])
    verifier = ((fields.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    others = (*TOKEN_KEYS, *OUR_KEYS, "dtype", "transformers_version", "is_causal")
    fields = {**fields, "follows_speculators": fields.get("follows_speculators") or None}  # only where it is so
    of_block: dict[str, Any] = {**dflash, **causal, "target_layer_ids": layer_ids}
    if fields["sample_from_anchor"] or fields["markov_rank"]:
        of_block |= {key: fields[key] for key in ("sample_from_anchor", "markov_rank")}
        of_block |= {
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "architectures": ["Qwen3DSparkModel"],
        }
    else:
        of_block = {"dflash_config": of_block}
    content = {
        **{key: value for key, value in fields["transformer_layer_config"].items() if key in LAYER_KEYS},
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": fields["block_size"],
        **{key: fields[key] for key in others if fields.get(key) is not None},
        **({"verifier": verifier} if verifier else {}),
        **of_block,
    }
    return {**content, "config_digest": digest_of(content)}


def digest_of(content: dict[str, Any]) -> str:
    """SHA-256 of the fields that change what a draft computes, in a `config.json` in z-lab's layout."""
    names = (*LAYER_KEYS, *OUR_KEYS, *DSPARK_KEYS, *BLOCK_KEYS, *CAUSAL_KEYS, "dflash_config", "target_layer_ids")
    facts = {name: content[name] for name in sorted(names) if name in content and name != "weights_digest"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

"""Writing drafts in formats with a flat Llama configuration, and checking what these formats can express."""

from collections.abc import Collection
from typing import Any

import torch

from ..config_checks import ROPE_KEYS
from ..remote_code.configuration_eagle3 import FLAGS
from ..remote_code.draft_model_eagle3 import DraftModel, fingerprint, similarity
from .keys import EXACT_IDS, LAYER_KEYS, TOKEN_KEYS


# Features that readers take from the configuration. EAGLE's own code does not.
CONFIGURED = {
    "a `head_dim` other than hidden_size / num_attention_heads",
    "scaled rotary embeddings",
    "states other than the default three",
    "target states of another width than its own",
}
# Engines collect the states layer by layer.
OTHER_ORDER = "one state twice, or its states in another order than the target's layers"
EMBEDDING = "the target's embedding (id 0) among its states"  # as of drafts for targets of less than four layers
NOT_THREE = "more or fewer than three states"
NOT_DEFAULT = "states other than the default three"


def flat_config(draft: DraftModel, takes: Collection[str], to: str) -> dict[str, Any]:
    """
    Returns a draft's configuration with the keys of its layers at the top level. Raises `ValueError` if it has
    [`draft_features`] that are not in `takes`, what the format `to` can express.
    """
    config = draft.config
    layer_config = config.transformer_layer_config
    check_features(draft, takes, to)
    if config.has_own_embed_tokens:
        check_table(draft, to)
    rope = {key: value for key, value in layer_config.rope_parameters.items() if key in ROPE_KEYS}
    theta, scaled = rope.pop("rope_theta"), rope["rope_type"] != "default"
    return {
        **{key: getattr(layer_config, key) for key in LAYER_KEYS},
        **{key: getattr(config, key) for key in TOKEN_KEYS},
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "dtype": str(draft.dtype).removeprefix("torch."),
        # Old readers take the first two, new ones the third.
        "rope_theta": theta,
        "rope_scaling": rope if scaled else None,
        "rope_parameters": {**rope, "rope_theta": theta},
    }


def draft_features(draft: DraftModel) -> dict[str, bool]:
    """
    Returns the features that some format cannot express, and whether the draft has them. Each format names those that it
    takes, so it refuses features that are added here.
    """
    config, layer = draft.config, draft.config.transformer_layer_config
    ids, rope = config.eagle_aux_hidden_state_layer_ids, layer.rope_parameters
    rope_type = rope["rope_type"]
    flags = [flag for flag in FLAGS if flag != "has_own_embed_tokens"]  # which `check_table` checks
    heads_fill_width = layer.head_dim * layer.num_attention_heads == config.hidden_size
    has_attention_factor = rope_type in ("yarn", "longrope") and rope.get("attention_factor") is not None
    has_default_ids = ids is None or len(ids) != 3 or (ids[0] == 2 and ids[1] == (ids[2] + 3) // 2)
    return {
        "more than one layer": config.num_hidden_layers > 1,
        "Qwen3 layers, with q_norm and k_norm": layer.model_type != "llama",
        **{f"`{flag}`": getattr(config, flag) for flag in flags},
        "layers with a window": set(layer.layer_types) != {"full_attention"},
        "biases": layer.attention_bias or getattr(layer, "mlp_bias", False),  # Qwen3 has no biases in its MLP
        "parallel drafting": config.is_parallel,
        "an activation other than silu": layer.hidden_act != "silu",
        "a `head_dim` other than hidden_size / num_attention_heads": not heads_fill_width,
        "rotary embeddings of a part of each head": (rope.get("partial_rotary_factor") or 1) != 1,
        "scaled rotary embeddings": rope_type in ("linear", "llama3"),
        "rotary embeddings scaled other than by linear or llama3": rope_type not in ("default", "linear", "llama3"),
        # SGLang scales `dynamic` from the first token on, and ignores `attention_factor`. OpenVINO reads the same file.
        "`dynamic` rotary scaling, or an `attention_factor`": rope_type == "dynamic" or has_attention_factor,
        "target states of another width than its own": config.target_hidden_size != config.hidden_size,
        NOT_THREE: config.num_aux_hidden_states != 3,
        NOT_DEFAULT: not has_default_ids,
        OTHER_ORDER: ids is not None and ids != sorted(set(ids)),
        EMBEDDING: 0 in (ids or ()) and not config.aux_layer_ids_assumed,
    }


def check_layer_ids(draft: DraftModel) -> None:
    """Raises `ValueError` if a draft does not say which states it reads, or what its ids count."""
    config = draft.config
    if config.eagle_aux_hidden_state_layer_ids is None or config.aux_layer_ids_assumed:
        raise ValueError("This draft does not say which states it reads. Pair it with its target first (`--target`).")


class CannotExpress(ValueError):
    """A draft has features that a format cannot express (`reasons`)."""

    def __init__(self, to: str, reasons: list[str]):
        self.reasons = reasons
        of_states, advice = {EMBEDDING, NOT_THREE, NOT_DEFAULT, OTHER_ORDER}, []
        if of_states.intersection(reasons):
            advice.append(
                'Most engines take three states, from 1 on: `model_init_kwargs={"eagle_aux_hidden_state_layer_ids": [1, ...]}`.'
            )
        if not of_states.issuperset(reasons):
            advice.append('`draft_form="classic"` trains a draft that most engines take.')
        super().__init__(
            f"The {to} format cannot express this draft: it has {'; '.join(reasons)}. Training decides this, and a trained draft "
            f"cannot be converted. {' '.join(advice)}"
        )


def check_features(draft: DraftModel, takes: Collection[str], to: str) -> None:
    """Raises `CannotExpress` if a draft has a feature that a format does not take."""
    features = draft_features(draft)
    assert features.keys() >= set(takes)
    if reasons := [feature for feature, has in features.items() if has and feature not in takes]:
        raise CannotExpress(to, reasons)


def check_table(draft: DraftModel, to: str) -> None:
    """Raises `ValueError` if a draft's embedding table differs from its target's, which engines use instead."""
    of_target = draft.config.verifier_fingerprint
    if of_target is None or draft.embed_tokens.weight.is_meta:  # cards are rendered without weights
        raise ValueError(
            f"This draft stores an embedding table, but readers of the {to} format use the target's. Pass the target, to see whether "
            "they are the same: `--target` of recipes/export.py, or `draft.pair_with(target)`."
        )
    if similarity(fingerprint(draft.embed_tokens), of_target) < 0.9999:
        raise ValueError(
            f"This draft has its own embedding table. Readers of the {to} format use the target's, and would draft something else."
        )


def check_head(draft: DraftModel) -> None:
    """Raises `ValueError` if a draft uses its target's head, and is not paired with it yet."""
    if draft.get_output_embeddings().out_features == 0:
        raise ValueError(
            "This draft stores no head and uses its target's. Pair them first (`--target`, or `draft.pair_with(target)`)."
        )


def layer_ids(draft: DraftModel, unchanged: bool = False) -> dict[str, Any]:
    """
    Returns the keys for the layer ids of the states that a draft reads. Most formats count the outputs of layers, and we count
    the inputs, which are written `unchanged` for some. Our ids are stored as well, so that we read the draft back exactly.
    """
    config = draft.config
    ids = config.eagle_aux_hidden_state_layer_ids
    if ids is None:
        return {}
    written = ids if unchanged else [layer_id - 1 for layer_id in ids]
    exact = {} if config.aux_layer_ids_assumed else {EXACT_IDS: ids}
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": written, "use_aux_hidden_state": True}, **exact}


def flat_tensors(draft: DraftModel) -> dict[str, torch.Tensor]:
    """Returns a draft's tensors. A single layer is called `midlayer`, which all readers know."""
    check_head(draft)
    if draft.config.num_hidden_layers > 1:
        return draft.state_dict()
    return {
        "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name: tensor
        for name, tensor in draft.state_dict().items()
    }

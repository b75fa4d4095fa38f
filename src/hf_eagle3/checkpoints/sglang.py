"""The format that SGLang serves and SpecForge writes."""

from collections.abc import Collection
from typing import Any

import torch

from ..remote_code.draft_model_eagle3 import DraftModel
from .writing import CONFIGURED, CannotExpress, flat_config, flat_tensors, layer_ids


NAME = "sglang"
# What the models of SGLang 0.5.23 compute, as tests/engines shows. They have several layers, any number of states, and (since
# 0.5.17) `norm_before_fc`.
TAKES = {
    *CONFIGURED,
    "`fc_norm`",
    "`norm_before_fc`",
    "`norm_output`",
    "more or fewer than three states",
    "more than one layer",
    "rotary embeddings scaled other than by linear or llama3",
}
# Most of its targets add one to each layer id. Those of deepseek_v2.py and glm4_moe_lite.py do so only if the first id
# is 1 (since 0.5.13).
READS_IDS_UNCHANGED = ("Deepseek", "Kimi", "GlmMoeDsa", "Glm4MoeLite", "MistralLarge3")


def write(draft: DraftModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """
    Returns the configuration and tensors of a draft in this format.

    Raises:
        CannotExpress: if SGLang would ignore a part of the draft.
        ValueError: if the layer ids depend on the target, and the draft does not name it.
    """
    flat, tensors = layout(draft, TAKES, NAME)
    flat |= layer_ids(draft, reads_ids_unchanged(draft))
    if draft.config.norm_before_fc:
        flat["norm_before_fc"] = True
        flat.setdefault("eagle_config", {})["norm_before_fc"] = True
    # Layers after the first have one norm before their attention. SGLang calls it `hidden_norm`.
    for i in range(1, draft.config.num_hidden_layers):
        tensors[f"layers.{i}.hidden_norm.weight"] = tensors[f"layers.{i}.input_layernorm.weight"].clone()
    return flat, tensors


def layout(draft: DraftModel, takes: Collection[str], to: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """
    Returns the part of [`write`] that OpenVINO's converter reads, too. Raises `ValueError` if the draft has features that are not in
    `takes`, what the reader `to` takes.
    """
    config = draft.config
    num_entries = config.num_aux_hidden_states * config.target_hidden_size
    if num_entries == config.hidden_size:
        reason = f"states of {num_entries} entries together, as many as its own width, for which readers skip `fc`"
        raise CannotExpress(to, [reason])
    flat = flat_config(draft, takes, to)
    flat |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": config.num_aux_hidden_states,
    }
    return flat, flat_tensors(draft)


def reads_ids_unchanged(draft: DraftModel) -> bool:
    """
    Returns whether SGLang reads the layer ids unchanged for this draft's target, or adds one to each. Raises `CannotExpress`
    if no ids make SGLang read the draft's states, or `ValueError` if the draft does not name its target.
    """
    config = draft.config
    ids = config.eagle_aux_hidden_state_layer_ids
    verifier = (config.speculators_config or {}).get("verifier", {})
    architectures = verifier.get("architectures") or []
    # A first id of 2 is written as 1, and then all targets add one. Assumed ids are written as they were read.
    if ids is None or ids[0] == 2 or config.aux_layer_ids_assumed:
        return False
    if not architectures:
        raise ValueError(
            "SGLang counts layers by target, and this draft does not name its target. Pass it (`--target`, or `draft.pair_with`)."
        )
    if not any(word in name for name in architectures for word in READS_IDS_UNCHANGED):
        return False
    if ids[0] == 1:
        reason = f"states {ids} of a {architectures[0]}, for which SGLang adds one to ids that begin with 1"
        raise CannotExpress(NAME, [reason])
    return True

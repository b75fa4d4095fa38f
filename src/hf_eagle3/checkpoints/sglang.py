"""What SGLang serves, in the form that SpecForge writes."""

from .writing import CannotExpress, flat_config, flat_tensors, layer_ids


NAME = "sglang"
# The version whose source the following is read in. It takes several layers and any number of states; `norm_before_fc`
# since 0.5.17.
VERSION = "0.5.23"
# Targets of its deepseek_v2.py and glm4_moe_lite.py take ids as they are unless the first is 1 (since 0.5.13); all
# others add one to each.
TAKE_IDS_AS_THEY_ARE = ("Deepseek", "Kimi", "GlmMoeDsa", "Glm4MoeLite", "MistralLarge3")


def write(draft):
    config = draft.config
    ids = config.eagle_aux_hidden_state_layer_ids
    refused = {"the state that is the embedding (id 0)": 0 in (ids or ()) and not config.aux_layer_ids_assumed}
    flat = flat_config(draft, refused, NAME)
    flat |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": config.num_aux_hidden_states,
        **layer_ids(draft, as_inputs(draft)),
    }
    if config.norm_before_fc:
        flat["norm_before_fc"] = True
        flat.setdefault("eagle_config", {})["norm_before_fc"] = True
    return flat, flat_tensors(draft)


def as_inputs(draft) -> bool:
    """
    Whether it will take the ids as they are for this draft's target.

    Raises:
        CannotExpress: if it can be told to read these states in no way.
    """
    config = draft.config
    ids = config.eagle_aux_hidden_state_layer_ids
    verifier = (config.speculators_config or {}).get("verifier", {})
    architectures = verifier.get("architectures") or []
    # The first id 2 is written as 1, to which all add one. What is assumed is written as it was read.
    if ids is None or ids[0] == 2 or config.aux_layer_ids_assumed:
        return False
    if not architectures:
        raise ValueError(
            "SGLang counts layers otherwise for some targets, and this draft does not say which its target is. Pair it with "
            "its target first (`--target`, or `draft.pair_with(target)`)."
        )
    if not any(word in name for name in architectures for word in TAKE_IDS_AS_THEY_ARE):
        return False
    if ids[0] == 1:
        reason = f"states {ids} of a {architectures[0]}, for which SGLang adds one to ids that begin with 1"
        raise CannotExpress(NAME, [reason])
    return True

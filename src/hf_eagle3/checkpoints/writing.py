"""What formats with a flat Llama configuration can say of a draft of ours, and what engines would leave out of it."""

import torch

from ..remote_code.loading_eagle3 import fingerprint, similarity
from .flat import EXACT_IDS, LAYER_KEYS, TOKEN_KEYS


def flat_config(draft, refused: dict[str, bool], to: str) -> dict:
    """
    A draft's configuration with the layer's keys at the top level.

    Args:
        refused (`dict[str, bool]`): What the format cannot express, and whether the draft has it.

    Raises:
        ValueError: naming what cannot be expressed.
    """
    config = draft.config
    layer_config = config.transformer_layer_config
    refused = {
        "Qwen3 layers, whose q_norm and k_norm readers would skip": layer_config.model_type != "llama",
        "`norm_before_residual`": config.norm_before_residual,
        "layers with a window": set(layer_config.layer_types) != {"full_attention"},
        "parallel drafting": config.is_parallel,
        "biases": layer_config.attention_bias or getattr(layer_config, "mlp_bias", False),
        **refused,
    }
    refuse(refused, to)
    if config.has_own_embed_tokens:
        check_table(draft, to)
    rope = dict(layer_config.rope_parameters)
    theta, scaled = rope.pop("rope_theta"), rope["rope_type"] != "default"
    return {
        **{key: getattr(layer_config, key) for key in LAYER_KEYS},
        **{key: getattr(config, key) for key in TOKEN_KEYS},
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "dtype": str(draft.dtype).removeprefix("torch."),
        # For old readers and new ones.
        "rope_theta": theta,
        "rope_scaling": rope if scaled else None,
        "rope_parameters": {**rope, "rope_theta": theta},
    }


def beyond_classic(draft) -> dict[str, bool]:
    """What engines that know the EAGLE-3 paper only would leave out, and whether the draft has it."""
    config, layer = draft.config, draft.config.transformer_layer_config
    return {
        "more than one layer": config.num_hidden_layers > 1,
        "Qwen3 layers, with q_norm and k_norm": layer.model_type != "llama",
        "`fc_norm`": config.fc_norm,
        "`norm_output`": config.norm_output,
        "layers with a window": set(layer.layer_types) != {"full_attention"},
        "parallel drafting": config.is_parallel,
        f"{config.num_aux_hidden_states} states in place of three": config.num_aux_hidden_states != 3,
    }


def check_layer_ids(draft) -> None:
    """
    Raises:
        ValueError: if a draft does not say which states it reads, or what it counts.
    """
    config = draft.config
    if config.eagle_aux_hidden_state_layer_ids is None or config.aux_layer_ids_assumed:
        raise ValueError("This draft does not say which states it reads. Pair it with its target first (`--target`).")


class CannotExpress(ValueError):
    """What a format cannot express (`reasons`), of what a draft has."""

    def __init__(self, to: str, reasons: list[str]):
        self.reasons = reasons
        super().__init__(
            f"The {to} format cannot express this draft: it has {'; '.join(reasons)}. These are choices of training "
            '(`draft_form="classic"` makes a draft that most engines take); a trained draft cannot be converted.'
        )


def refuse(refused: dict[str, bool], to: str) -> None:
    """
    Raises:
        CannotExpress: if a draft has something that a format cannot express.
    """
    if reasons := [what for what, has in refused.items() if has]:
        raise CannotExpress(to, reasons)


def check_table(draft, to: str) -> None:
    """
    Raises:
        ValueError: if a draft's embedding table is not that of its target, which engines use in its place.
    """
    of_target = draft.config.verifier_fingerprint
    if of_target is None:
        raise ValueError(
            f"This draft stores an embedding table, in place of which readers of the {to} format take the target's. To see "
            "whether they are the same, the target is needed: `--target` of recipes/export.py, or `draft.pair_with(target)`."
        )
    if similarity(fingerprint(draft.embed_tokens.weight), of_target) < 0.9999:
        raise ValueError(
            f"This draft has an embedding table of its own, in place of which readers of the {to} format would take the "
            "target's, which is another one: it would draft something else."
        )


def check_head(draft) -> None:
    """
    Raises:
        ValueError: if a draft stores no head, and has not met the target whose head it uses.
    """
    if draft.get_output_embeddings().out_features == 0:
        raise ValueError(
            "This draft stores no head, and uses its target's. Pair it with its target first (`--target`, or "
            "`draft.pair_with(target)`)."
        )


def layer_ids(draft, as_inputs: bool = False) -> dict:
    """
    The ids of the states that a draft reads, as those write them that count outputs of layers; and beside them, as they
    are counted here, for those who read the draft back.

    Args:
        as_inputs (`bool`, *optional*, defaults to `False`): Whether the reader takes ids as they are counted here.
    """
    config = draft.config
    ids = config.eagle_aux_hidden_state_layer_ids
    if ids is None:
        return {}
    written = ids if as_inputs else [layer_id - 1 for layer_id in ids]
    exact = {} if config.aux_layer_ids_assumed else {EXACT_IDS: ids}
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": written, "use_aux_hidden_state": True}, **exact}


def flat_tensors(draft) -> dict[str, torch.Tensor]:
    """A draft's tensors, a single layer as `midlayer`, which all readers know."""
    check_head(draft)
    if draft.config.num_hidden_layers > 1:
        return draft.state_dict()
    return {
        "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name: tensor
        for name, tensor in draft.state_dict().items()
    }

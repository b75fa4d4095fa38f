"""The format of EAGLE's own code (SafeAILab/EAGLE). It takes only drafts in the form of the EAGLE-3 paper."""

from typing import Any

import torch

from ..remote_code.modeling_eagle3 import DraftModel
from .writing import flat_config, flat_tensors, layer_ids


NAME = "safeailab"


def write(draft: DraftModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """
    Returns the configuration and tensors of a draft in this format.

    Raises:
        CannotExpress: if EAGLE's code would ignore a part of the draft.
    """
    config = draft.config
    ids = config.eagle_aux_hidden_state_layer_ids
    heads_fill_width = config.transformer_layer_config.head_dim * config.transformer_layer_config.num_attention_heads
    flat = flat_config(
        draft,
        {
            "more than one layer": config.num_hidden_layers > 1,
            "`norm_before_fc`": config.norm_before_fc,
            "`fc_norm`": config.fc_norm,
            "`norm_output`": config.norm_output,
            "a `head_dim` other than hidden_size / num_attention_heads": heads_fill_width != config.hidden_size,
            "scaled rotary embeddings": config.transformer_layer_config.rope_parameters["rope_type"] != "default",
            "target states of another width than its own": config.target_hidden_size != config.hidden_size,
            "states other than the default three": ids is not None
            and (len(ids) != 3 or ids[0] != 2 or ids[1] != (ids[2] + 3) // 2),
        },
        NAME,
    )
    # EAGLE's code does not read the layer ids. They are the ones that it takes.
    flat |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **layer_ids(draft)}
    return flat, flat_tensors(draft)

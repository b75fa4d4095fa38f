"""The format of EAGLE's own code (SafeAILab/EAGLE). It takes only drafts in the form of the EAGLE-3 paper."""

from typing import Any

import torch

from ..remote_code.draft_model_eagle3 import DraftModel
from .writing import flat_config, flat_tensors, layer_ids


NAME = "safeailab"


def write(draft: DraftModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """
    Returns configuration and tensors in this format. Raises `CannotExpress` if EAGLE's code would ignore a part of the draft.
    """
    flat = flat_config(draft, ("an activation other than silu",), NAME)
    # EAGLE's code does not read the layer ids. They are the ones that it takes.
    flat |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **layer_ids(draft)}
    return flat, flat_tensors(draft)

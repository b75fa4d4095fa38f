"""Loads a draft to measure it, with the installed code or with the code that was saved with it."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from .. import __version__
from ..auto import kind_of_draft
from ..baselines import BASELINES, DFlashForSpeculation
from ..environment import is_path
from ..remote_code.draft_model_eagle3 import DraftModel
from ..remote_code.modeling_eagle3 import Eagle3ForSpeculation
from ..tensor_names import HUB_ARGUMENTS, is_block_draft


NUM_SAMPLED = 64  # numbers of each tensor in a `sampled_digest`
CODES = ("installed", "saved")
CODE_HELP = "The code that the draft runs: the installed hf-eagle3, or the code that was saved with it (remote code)"


def load_draft(name: str, code: str = "installed", **kwargs: Any) -> Any:
    """
    Loads a draft (a folder or Hub id), in evaluation mode: an EAGLE-3 draft of any format, a block draft, or another of
    `hf_eagle3.baselines`. The `code` is that of the installed hf-eagle3, or `"saved"`: what was saved with the draft, as
    `AutoModel.from_pretrained(name, trust_remote_code=True)` runs it. `kwargs` are those of `from_pretrained`. With
    `output_loading_info=True` it returns that, too. Raises `ValueError` if it is not a draft, or no code of a draft was saved.
    """
    hub_kwargs = {argument: kwargs[argument] for argument in HUB_ARGUMENTS if argument in kwargs}
    if code == "installed":
        loaded = class_of(name, **kwargs).from_pretrained(name, **{**kwargs, "trust_remote_code": False})
    elif "AutoModel" not in PreTrainedConfig.get_config_dict(name, **hub_kwargs)[0].get("auto_map", {}):
        raise ValueError(f"No code was saved with {name}. Measure it with the installed code (`--code installed`).")
    else:
        loaded = AutoModel.from_pretrained(name, **{**kwargs, "trust_remote_code": True})
    draft = loaded[0] if isinstance(loaded, tuple) else loaded
    if not hasattr(draft, "assisted_decoding"):
        raise ValueError(
            f"The code of {name} makes a {type(draft).__name__}, which is not a draft of hf-eagle3. Pass `--code installed`."
        )
    draft.eval()
    return loaded


def class_of(name: str, **kwargs: Any) -> Any:
    """
    Returns the class of a draft, by its `config.json` and the names of its tensors. For anything else it returns
    [`Eagle3ForSpeculation`], whose error says why it is not a draft.
    """
    hub_kwargs = {argument: kwargs[argument] for argument in HUB_ARGUMENTS if argument in kwargs}
    try:
        content, _ = PreTrainedConfig.get_config_dict(name, **hub_kwargs)
    except OSError:  # a LoRA adapter has none
        return Eagle3ForSpeculation
    if "dflash_config" in content or content.get("speculators_model_type") == "dflash":
        return DFlashForSpeculation
    if "transformer_layer_config" in content:  # saved by this library, or by speculators
        of_type = {
            baseline.draft_class.config_class.model_type: baseline.draft_class for baseline in BASELINES.values()
        }
        return of_type.get(content.get("model_type"), Eagle3ForSpeculation)
    is_block = kind_of_draft(content, name, hub_kwargs)[0] is is_block_draft
    return DFlashForSpeculation if is_block else Eagle3ForSpeculation


def method_of(draft: PreTrainedModel) -> str:
    """Returns the name that benchmarks give to a draft's method, such as `eagle3`, `jetspec` or `medusa`."""
    config = draft.config
    if config.model_type == "dflash":  # transformers' own DFlash has that name
        return "jetspec" if config.is_causal else "dflash-tree"
    return "eagle-2" if config.model_type == "eagle" and config.static_tree is None else config.model_type


def code_of(draft: PreTrainedModel) -> str:
    """Returns the code that a loaded draft runs: the version of hf-eagle3, or the folder or repo with its digest or commit."""
    if isinstance(draft, DraftModel):
        return f"hf-eagle3 {__version__}"
    name = draft.name_or_path
    folder = Path(name).resolve().name if is_path(name) else name
    # transformers copies the code into a package, whose name is the digest of a folder's code or the commit of a repo.
    version = type(draft).__module__.split(".")[-2]
    return f"saved with the draft, in {folder} ({version})"


def sampled_digest(model: PreTrainedModel) -> str:
    """
    Returns the SHA-256 of some numbers of each of a model's tensors. Another or retrained model has another one. It takes
    moments, however large the model is.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        some = tensor.flatten()[:: max(tensor.numel() // NUM_SAMPLED, 1)].cpu().contiguous()
        digest.update(name.encode() + some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

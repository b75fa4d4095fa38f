"""Loads a draft to measure it, with the installed code or with the code that was saved with it."""

from pathlib import Path
from typing import Any

from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from .. import __version__
from ..environment import is_path
from ..remote_code.modeling_eagle3 import Eagle3ForSpeculation


CODES = ("installed", "saved")
CODE_HELP = "The code that the draft runs: the installed hf-eagle3, or the code that was saved with it (remote code)"


def load_draft(name: str, code: str = "installed", **kwargs: Any) -> PreTrainedModel:
    """
    Loads a draft, in evaluation mode.

    Args:
        name (`str`): A folder or a Hub id.
        code (`str`, *optional*, defaults to `"installed"`):
            `installed` runs the installed hf-eagle3. `saved` runs the code that was saved with the draft, as
            `AutoModel.from_pretrained(name, trust_remote_code=True)` does.
        kwargs (*optional*): Arguments of `from_pretrained`.

    Raises:
        ValueError: if it is not an EAGLE-3 draft, or no code was saved with it.
    """
    if code == "installed":
        return Eagle3ForSpeculation.from_pretrained(name, **kwargs).eval()
    if "AutoModel" not in PreTrainedConfig.get_config_dict(name)[0].get("auto_map", {}):
        raise ValueError(f"No code was saved with {name}. Measure it with the installed code (`--code installed`).")
    draft = AutoModel.from_pretrained(name, trust_remote_code=True, **kwargs).eval()
    if not hasattr(draft, "assisted_decoding"):
        raise ValueError(f"{name} is a {type(draft).__name__}, not an EAGLE-3 draft.")
    return draft


def code_of(draft: PreTrainedModel) -> str:
    """Returns the code that a loaded draft runs: the version of hf-eagle3, or the folder or repo with its digest or commit."""
    if isinstance(draft, Eagle3ForSpeculation):
        return f"hf-eagle3 {__version__}"
    name = draft.name_or_path
    folder = Path(name).resolve().name if is_path(name) else name
    # transformers copies the code into a package, whose name is the digest of a folder's code or the commit of a repo.
    version = type(draft).__module__.split(".")[-2]
    return f"saved with the draft, in {folder} ({version})"

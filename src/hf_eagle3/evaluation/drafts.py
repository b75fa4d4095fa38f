"""Loading a draft to measure it, with the installed code or with the code that was saved with it."""

from pathlib import Path

from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from .. import __version__
from ..environment import is_path
from ..remote_code.modeling_eagle3 import Eagle3ForSpeculation


CODES = ("installed", "saved")
CODE_HELP = "The code that the draft runs: the installed hf-eagle3's, or what was saved with the draft (remote code)"


def load_draft(name: str, code: str = "installed", **kwargs) -> PreTrainedModel:
    """
    Loads a draft, in evaluation mode.

    Args:
        name (`str`): A folder or a Hub id.
        code (`str`, *optional*, defaults to `"installed"`):
            `installed`: hf-eagle3 as it is installed. `saved`: what was saved with the draft, which
            `AutoModel.from_pretrained(name, trust_remote_code=True)` runs.
        kwargs (*optional*): Of `from_pretrained`.

    Raises:
        ValueError: if it is no EAGLE-3 draft, or no code was saved with it.
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
    """The code that a loaded draft runs: the version of hf-eagle3, or the folder or repo, and its digest or commit."""
    if isinstance(draft, Eagle3ForSpeculation):
        return f"hf-eagle3 {__version__}"
    name = draft.name_or_path
    folder = Path(name).resolve().name if is_path(name) else name
    # Transformers keeps a copy for each digest of a folder's code, or commit of a repo, in a package of that name.
    version = type(draft).__module__.split(".")[-2]
    return f"saved with the draft, in {folder} ({version})"

# SPDX-License-Identifier: Apache-2.0
"""
Where `AutoConfig` and `AutoModel` find a draft's classes: in a newer installed hf-eagle3, or in this copy of its code. The
other files are imported only after these checks.
"""

import importlib
from types import ModuleType
from typing import Any

import transformers
from torch.torch_version import TorchVersion
from transformers.utils import logging


# Of all files here. A child of transformers' own logger: shown and silenced with it.
logger = logging.get_logger("transformers.eagle3")

# Whether this is the installed package's code, and not a copy that came with a draft.
IS_INSTALLED = __package__ == "hf_eagle3.remote_code"
# The version of hf-eagle3 that this copy is from.
VERSION = "0.1.0"
# The oldest and the newest transformers that passed the tests.
TESTED = ("5.17", "5.24")
# What this code calls or replaces in transformers, of what may change without notice.
NEEDS = (
    "GenerationConfig._get_default_generation_params",
    "GenerationMixin._assisted_decoding",
    "GenerationMixin._optimize_model_for_decode",
    "GenerationMixin._prefill",
    "GenerationMixin._update_model_kwargs_for_generation",
    "GenerationMixin._valid_auto_compile_criteria",
    "GenerationMixin._validate_generation_mode",
    "PreTrainedConfig._attn_implementation",
    "PreTrainedModel._default_compile_config",
    "PreTrainedModel._hf_peft_config_loaded",
    "PreTrainedModel._is_stateful",
    "PreTrainedModel.get_compiled_call",
)


def __getattr__(name: str) -> Any:
    """`Eagle3Config` and `Eagle3ForSpeculation`: the installed package's if that is newer than this copy, else this copy's."""
    if name not in ("Eagle3Config", "Eagle3ForSpeculation"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if (package := newer_package()) is not None:
        return getattr(package, name)
    check_needs()
    try:
        from .modeling_eagle3 import Eagle3Config, Eagle3ForSpeculation
    except ImportError as error:  # transformers removed or moved a public name
        raise ImportError(f"{error}. {advice()}") from error
    return Eagle3Config if name == "Eagle3Config" else Eagle3ForSpeculation


def newer_package() -> ModuleType | None:
    """The installed hf-eagle3 if it is newer than this copy."""
    try:
        package = importlib.import_module("hf_eagle3")
    except ImportError:
        return None
    if TorchVersion(package.__version__) <= VERSION:
        return None
    logger.warning_once(
        f"The installed hf-eagle3 {package.__version__} reads this draft, because it is newer than the code that came with the "
        f"draft ({VERSION})."
    )
    return package


def installed_module(name: str, what: str) -> ModuleType:
    """A module of the hf-eagle3 package, for `what` a draft can be used without. Raises `ModuleNotFoundError` if it is missing."""
    try:
        return importlib.import_module(f"hf_eagle3.{name}")
    except ModuleNotFoundError as error:
        extra = "" if error.name == "hf_eagle3" else "[train]"
        raise ModuleNotFoundError(f"{what} needs {error.name}: pip install 'hf-eagle3{extra}'") from error


def check_needs() -> None:
    """Raises `ImportError` if transformers lacks a name that this code needs."""
    owners_and_names = (each.split(".") for each in NEEDS)
    found = {(owner, name): hasattr(getattr(transformers, owner, None), name) for owner, name in owners_and_names}
    missing = [f"{owner}.{name}" for (owner, name), is_there in found.items() if not is_there]
    if missing:
        raise ImportError(f"transformers {transformers.__version__} has no {', '.join(missing)}. {advice()}")


def advice() -> str:
    tested = f"The code of this draft (hf-eagle3 {VERSION}) was tested with transformers {TESTED[0]} to {TESTED[1]}."
    if TorchVersion(transformers.__version__) < TESTED[0]:
        return f"{tested} Update it: `pip install -U 'transformers>={TESTED[0]}'`."
    return f"{tested} Install such a transformers, or a newer hf-eagle3, whose code then reads the draft."

# SPDX-License-Identifier: Apache-2.0
"""
Where `AutoConfig` and `AutoModel` find a draft's classes: in a newer installed hf-eagle3, or in this copy of its code. The
other files are imported only after these checks.
"""

import importlib
import inspect
import os
from collections.abc import Callable
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
# The private names of transformers that this code uses. For methods that it calls or replaces: how many arguments they get
# by position, and the names of the others. An "instance" attribute is there if a method of the class uses it.
NEEDS = {
    "GenerationConfig._get_default_generation_params": None,
    "GenerationMixin._assisted_decoding": (1, "logits_processor", "stopping_criteria", "generation_config"),
    "GenerationMixin._is_user_defined": "instance",
    "GenerationMixin._optimize_model_for_decode": (0,),
    "GenerationMixin._pad_token_tensor": "instance",
    "GenerationMixin._prefill": (3,),
    "GenerationMixin._previous_max_cache_length": "instance",
    "GenerationMixin._update_model_kwargs_for_generation": (2, "is_encoder_decoder", "num_new_tokens"),
    "GenerationMixin._valid_auto_compile_criteria": (2,),
    "GenerationMixin._validate_generation_mode": (3,),
    "PreTrainedConfig._attn_implementation": None,
    "PreTrainedModel._auto_class": None,
    "PreTrainedModel._default_compile_config": (0,),
    "PreTrainedModel._hf_peft_config_loaded": None,
    "PreTrainedModel._is_stateful": None,
    "PreTrainedModel.get_compiled_call": (1,),
}


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
    """The installed hf-eagle3 if it is newer than this copy, unless HF_EAGLE3_CODE=copy asks for the copy."""
    asked = os.environ.get("HF_EAGLE3_CODE", "newest")
    if asked not in ("copy", "newest"):
        raise ValueError(f"HF_EAGLE3_CODE is {asked!r}, but must be 'copy' or 'newest'.")
    if asked == "copy":
        return None
    try:
        package = importlib.import_module("hf_eagle3")
    except ImportError:
        return None
    if TorchVersion(package.__version__) <= VERSION:
        return None
    logger.warning_once(
        f"The installed hf-eagle3 {package.__version__} reads this draft, because it is newer than the code that came with the "
        f"draft ({VERSION}). Set HF_EAGLE3_CODE=copy to run that code."
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
    """Raises `ImportError` if transformers lacks a name or an argument that this code needs."""
    if missing := missing_names():
        raise ImportError(f"transformers {transformers.__version__} has no {', '.join(missing)}. {advice()}")


def missing_names() -> list[str]:
    """The `NEEDS` that transformers lacks, or whose arguments differ."""
    missing = []
    for name, arguments in NEEDS.items():
        class_name, _, attribute = name.partition(".")
        owner = getattr(transformers, class_name, object)
        if not (uses(owner, attribute) if arguments == "instance" else hasattr(owner, attribute)):
            missing.append(name)
        elif isinstance(arguments, tuple) and not accepts(getattr(owner, attribute), *arguments):
            count, *others = arguments
            missing.append(f"{name}({', '.join(['_'] * count + others)})")
    return missing


def accepts(method: Callable, count: int, *names: str) -> bool:
    """Whether a method takes `count` arguments by position, besides `self`, and arguments of these names."""
    try:
        inspect.signature(method).bind(*[None] * (1 + count), **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def uses(owner: type, attribute: str) -> bool:
    """Whether a method of a class reads or sets an attribute."""
    methods = (inspect.unwrap(value) for value in vars(owner).values() if callable(value))
    return any(inspect.isfunction(method) and attribute in method.__code__.co_names for method in methods)


def advice() -> str:
    tested = f"The code of this draft (hf-eagle3 {VERSION}) was tested with transformers {TESTED[0]} to {TESTED[1]}."
    if TorchVersion(transformers.__version__) < TESTED[0]:
        return f"{tested} Update it: `pip install -U 'transformers>={TESTED[0]}'`."
    return f"{tested} Install such a transformers, or a newer hf-eagle3, whose code then reads the draft."

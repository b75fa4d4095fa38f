# SPDX-License-Identifier: Apache-2.0
"""
What `AutoConfig` and `AutoModel` find a draft's classes by: who reads the draft, and what that code needs of transformers.
The other files are imported only after these checks.
"""

import dis
import importlib
import inspect
import os

import transformers
from torch.torch_version import TorchVersion
from transformers.utils import logging


# A child of transformers' own logger: shown and silenced with it.
logger = logging.get_logger("transformers.eagle3")

# Of hf-eagle3, when this copy was made.
VERSION = "0.1.0"
# The oldest and the newest transformers that passed the tests.
TESTED = ("5.17", "5.24")
# The private names of transformers that this code uses. Methods have how many arguments they get by position, and the names
# of the others; what no class has is set by a method of the class that is named.
NEEDS = {
    "GenerationConfig._get_default_generation_params": None,
    "GenerationMixin._assisted_decoding": (1, "logits_processor", "stopping_criteria", "generation_config"),
    "GenerationMixin._is_user_defined": None,
    "GenerationMixin._optimize_model_for_decode": (0,),
    "GenerationMixin._pad_token_tensor": None,
    "GenerationMixin._prefill": (3,),
    "GenerationMixin._previous_max_cache_length": None,
    "GenerationMixin._update_model_kwargs_for_generation": (2, "is_encoder_decoder", "num_new_tokens"),
    "GenerationMixin._valid_auto_compile_criteria": (2,),
    "GenerationMixin._validate_generation_mode": (3,),
    "PreTrainedConfig._attn_implementation": None,
    "PreTrainedConfig._name_or_path": None,
    "PreTrainedModel._default_compile_config": (0,),
    "PreTrainedModel._hf_peft_config_loaded": None,
    "PreTrainedModel._is_stateful": None,
    "PreTrainedModel.get_compiled_call": (1,),
}


def __getattr__(name: str):
    """
    `Eagle3Config` and `Eagle3ForSpeculation`: the installed package's if that is newer than this copy, else this copy's.

    Raises:
        ImportError: if transformers lacks what this copy needs.
    """
    if name not in ("Eagle3Config", "Eagle3ForSpeculation"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if (package := newer_package()) is not None:
        return getattr(package, name)
    check_needs()
    try:
        from .modeling_eagle3 import Eagle3Config, Eagle3ForSpeculation
    except ImportError as error:  # a public name of transformers that is gone, or was moved
        raise ImportError(f"{error}. {advice()}") from error
    return Eagle3Config if name == "Eagle3Config" else Eagle3ForSpeculation


def newer_package():
    """
    The installed hf-eagle3 if it is newer than this copy, and the copy is not insisted on (`HF_EAGLE3_CODE=copy`).

    Raises:
        ValueError: if `HF_EAGLE3_CODE` has another value.
    """
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
        f"This draft is read by hf-eagle3 {package.__version__}, which is installed, and not by the code that came with it "
        f"({VERSION}). Set HF_EAGLE3_CODE=copy to run that."
    )
    return package


def check_needs() -> None:
    """
    Raises:
        ImportError: if transformers lacks a name or an argument that this code needs.
    """
    if missing := missing_names():
        raise ImportError(f"transformers {transformers.__version__} has no {', '.join(missing)}. {advice()}")


def missing_names() -> list[str]:
    """Which of `NEEDS` transformers lacks, or calls in another way."""
    missing = []
    for name, arguments in NEEDS.items():
        owner, _, attribute = name.partition(".")
        owner = getattr(transformers, owner, None)
        if not hasattr(owner, attribute):
            if owner is None or not sets(owner, attribute):
                missing.append(name)
        elif arguments is not None and not takes(getattr(owner, attribute), *arguments):
            count, *others = arguments
            missing.append(f"{name}({', '.join(['_'] * count + others)})")
    return missing


def takes(method, count: int, *names: str) -> bool:
    """Whether a method can be called with so many arguments by position, and others by name."""
    try:
        inspect.signature(method).bind(*[None] * (1 + count), **dict.fromkeys(names))  # 1: `self`
    except TypeError:
        return False
    return True


def sets(owner: type, attribute: str) -> bool:
    """Whether a method of a class sets an attribute, of whatever."""
    codes = [getattr(inspect.unwrap(value), "__code__", None) for value in vars(owner).values() if callable(value)]
    return any(
        step.opname == "STORE_ATTR" and step.argval == attribute
        for code in codes
        if code is not None and attribute in code.co_names
        for step in dis.get_instructions(code)
    )


def advice() -> str:
    return (
        f"The code of this draft (hf-eagle3 {VERSION}) needs that, and was tested with transformers {TESTED[0]} to {TESTED[1]}. "
        "Run `pip install -U hf-eagle3`, whose newer code then reads the draft, or install such a transformers."
    )

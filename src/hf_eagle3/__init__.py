"""EAGLE-3 speculative decoding for Hugging Face models: train a draft, generate with it, publish it."""

from importlib import import_module
from typing import Any

from .auto import install_auto_hook


__version__ = "0.1.0"

# Names load on first use, so that `import hf_eagle3` is quick and inference never imports the trainer.
_MODULES = {
    "Eagle3Config": "remote_code.configuration_eagle3",
    "Eagle3ForSpeculation": "remote_code.modeling_eagle3",
    "Eagle3Output": "remote_code.modeling_eagle3",
    "Eagle3GenerationStats": "remote_code.outputs_eagle3",
    "Eagle3Step": "remote_code.outputs_eagle3",
    "assist": "assisting",
    # For proposers other than a draft: docs/extending.md.
    "AssistantMixin": "remote_code.assistant_eagle3",
    "DraftTree": "remote_code.tree_eagle3",
    "Proposer": "remote_code.tree_eagle3",
    "Eagle3Trainer": "training",
    "Eagle3TrainingArguments": "training",
}

__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if _MODULES[name] != "training":
            raise
        raise ModuleNotFoundError(f"{name} needs {error.name}: pip install 'hf-eagle3[train]'") from error


def __dir__() -> list[str]:
    return __all__


install_auto_hook()

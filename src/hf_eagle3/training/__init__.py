"""Training drafts (needs the `train` extra)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .arguments import Eagle3TrainingArguments
    from .features import FeatureStore
    from .rollouts import assist_rollouts
    from .trainer import Eagle3Trainer

# Names load on first use: other methods' drafts are read without the extra, and import `ttt` and `losses`.
_MODULES = {
    "Eagle3Trainer": "trainer",
    "Eagle3TrainingArguments": "arguments",
    "FeatureStore": "features",
    "assist_rollouts": "rollouts",
}

__all__ = ["Eagle3Trainer", "Eagle3TrainingArguments", "FeatureStore", "assist_rollouts"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)

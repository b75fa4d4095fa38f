"""Training drafts (needs the `train` extra)."""

from .arguments import Eagle3TrainingArguments
from .features import FeatureStore
from .trainer import Eagle3Trainer


__all__ = ["Eagle3Trainer", "Eagle3TrainingArguments", "FeatureStore"]

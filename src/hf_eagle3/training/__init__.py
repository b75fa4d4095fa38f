"""Training drafts (needs the `train` extra)."""

from .arguments import Eagle3TrainingArguments
from .features import FeatureStore
from .rollouts import assist_rollouts
from .trainer import Eagle3Trainer


__all__ = ["Eagle3Trainer", "Eagle3TrainingArguments", "FeatureStore", "assist_rollouts"]

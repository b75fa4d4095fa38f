"""
Training methods that have not paid off in our measurements so far (needs the `train` extra). Each has its own trainer and
arguments. Anything here may change or be removed in any release. See docs/training.md, "Experimental".

- [`OnPolicyTrainer`]: some batches are texts that the target and the draft write together.
- [`EchoTrainer`]: the draft learns several times from what the target computes once.
"""

from .echo import EchoTrainer, EchoTrainingArguments
from .on_policy import OnPolicyTrainer, OnPolicyTrainingArguments


__all__ = ["EchoTrainer", "EchoTrainingArguments", "OnPolicyTrainer", "OnPolicyTrainingArguments"]

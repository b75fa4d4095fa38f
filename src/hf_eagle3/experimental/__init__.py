"""
Methods of training that won nothing in our own measurements so far (needs the `train` extra). Each is a trainer with
arguments of its own. Anything here may change or go in any release. See docs/training.md, "Experimental".

- [`OnPolicyTrainer`]: some batches are texts that the target and the draft write together.
- [`EchoTrainer`]: the draft learns several times from what the target computes once.
"""

from .echo import EchoTrainer, EchoTrainingArguments
from .on_policy import OnPolicyTrainer, OnPolicyTrainingArguments


__all__ = ["EchoTrainer", "EchoTrainingArguments", "OnPolicyTrainer", "OnPolicyTrainingArguments"]

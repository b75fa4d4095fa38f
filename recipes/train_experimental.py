# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
"""
Trains a draft like `train.py`, by an experimental method (docs/training.md, "Experimental"): `on_policy` or `echo`.

    accelerate launch recipes/train_experimental.py on_policy --config recipes/qwen3_8b.yaml --rollout_share 0.25

It takes the arguments of `train.py` and those of the method.
"""

import sys

from train import main

from hf_eagle3.experimental import EchoTrainer, EchoTrainingArguments, OnPolicyTrainer, OnPolicyTrainingArguments


METHODS = {"on_policy": (OnPolicyTrainer, OnPolicyTrainingArguments), "echo": (EchoTrainer, EchoTrainingArguments)}

if __name__ == "__main__":
    method = sys.argv[1] if len(sys.argv) > 1 else ""
    if method not in METHODS:
        raise SystemExit(
            f"train_experimental.py: error: the first argument must be one of {list(METHODS)}, got {method!r}."
        )
    main(*METHODS[method], script=f"recipes/train_experimental.py {method}")

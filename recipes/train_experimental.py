# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
"""
Trains a draft like `train.py`, by an experimental method (docs/training.md, "Experimental"): `on_policy` or `echo`.

    accelerate launch recipes/train_experimental.py on_policy --config recipes/qwen3_8b.yaml --rollout_share 0.25

It takes the arguments of `train.py` and those of the method.
"""

import argparse
import sys

from train import main

from hf_eagle3.experimental import EchoTrainer, EchoTrainingArguments, OnPolicyTrainer, OnPolicyTrainingArguments


METHODS = {"on_policy": (OnPolicyTrainer, OnPolicyTrainingArguments), "echo": (EchoTrainer, EchoTrainingArguments)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "method", choices=METHODS, help="`train_experimental.py METHOD --help` lists all arguments of one"
    )
    method = parser.parse_args(sys.argv[1:2]).method
    main(*METHODS[method], script=f"recipes/train_experimental.py {method}")

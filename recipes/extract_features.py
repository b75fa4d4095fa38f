# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
"""
Runs the target once over the training data, and stores its hidden states. Then any number of drafts can be trained
without running the target again.

    accelerate launch recipes/extract_features.py --features_dir outputs/features-qwen3-8b --config recipes/qwen3_8b.yaml
    accelerate launch recipes/train.py --features_dir outputs/features-qwen3-8b --config recipes/qwen3_8b.yaml --eval_strategy no

Evaluation loads the whole target, so the second command turns it off. Arguments are those of `recipes/train.py`. Data, chat
template, packing and layers are fixed here.

Each token takes `(n_aux + 1) * hidden_size` numbers: 32 KiB for Qwen3-8B in bfloat16, and half of that with
`--feature_dtype float8_e4m3fn`. After an interruption the same command writes the missing shards.
"""

import logging
from dataclasses import dataclass, field

from train import TargetConfig, TrainScriptArguments, make_trainer
from trl import DatasetMixtureConfig

from hf_eagle3 import Eagle3TrainingArguments
from hf_eagle3.scripts import run_script
from hf_eagle3.training.parser import Eagle3Parser


MOST_WAITED = 7 * 24 * 3600  # seconds, for the slowest process; on CPUs transformers keeps to 30 minutes
# Arguments that only training uses.
WITHOUT = ("use_peft", "lora_", "use_rslora", "use_dora", "ignore_bias_buffers")


@dataclass
class ExtractionScriptArguments(TrainScriptArguments):
    """Arguments of this script."""

    features_dir: str | None = field(
        default=None, metadata={"help": "Folder to write the features to. An interrupted run continues there."}
    )
    rows_per_shard: int = field(
        default=64,
        metadata={
            "help": "Rows in each file. Each process holds a file in memory, and an interruption loses at most that."
        },
    )
    feature_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Dtype of the stored states. By default the target's.",
            "choices": ["float32", "bfloat16", "float16", "float8_e4m3fn"],
        },
    )


def main():
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_eagle3").setLevel(logging.INFO)
    types = (ExtractionScriptArguments, Eagle3TrainingArguments, TargetConfig, DatasetMixtureConfig)
    parser = Eagle3Parser(types, WITHOUT, description=__doc__)
    parser.set_defaults(ddp_timeout=MOST_WAITED)
    script_args, training_args, target_config, mixture = parser.parse_args_and_config()
    folder, script_args.features_dir = script_args.features_dir, None
    if folder is None:
        raise ValueError("`--features_dir` is missing. Pass the folder to write the features to.")
    training_args.eval_strategy = "no"
    trainer = make_trainer(script_args, training_args, target_config, mixture)
    store = trainer.extract_features(folder, script_args.rows_per_shard, script_args.feature_dtype)
    trainer.accelerator.print(
        f"Wrote {store.index['num_tokens']} tokens in {store.index['num_rows']} rows to {folder} (files: {store.num_shards})."
    )
    # Otherwise a process may abort at its end, while its threads still communicate.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    run_script(main)

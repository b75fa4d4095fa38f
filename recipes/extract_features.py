# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
"""
Runs the target once over the training data and keeps what a draft learns from, so that any number of drafts can be
trained without running the target again.

    accelerate launch recipes/extract_features.py --features_dir features-qwen3-8b --config recipes/qwen3_8b.yaml
    accelerate launch recipes/train.py --features_dir features-qwen3-8b --config recipes/qwen3_8b.yaml --eval_strategy no

(with evaluation the whole target is loaded, too). Arguments are those of `recipes/train.py`: data, chat template, packing and layers are settled here. A folder takes
`(n_aux + 1) * hidden_size` numbers a token: for Qwen3-8B 32 kB in bfloat16, half of that with
`--feature_dtype float8_e4m3fn`. Stopped, it goes on with the shards that are missing.
"""

from dataclasses import dataclass, field

from train import TargetConfig, TrainScriptArguments, make_trainer
from trl import DatasetMixtureConfig

from hf_eagle3 import Eagle3TrainingArguments
from hf_eagle3.training.parser import Eagle3Parser


@dataclass
class ExtractionScriptArguments(TrainScriptArguments):
    """Arguments of this script."""

    rows_per_shard: int = field(default=1024, metadata={"help": "Rows in each file; what an interruption can cost."})
    feature_dtype: str | None = field(
        default=None,
        metadata={
            "help": "What states are stored in; by default the target's dtype.",
            "choices": ["float32", "bfloat16", "float16", "float8_e4m3fn"],
        },
    )


def main():
    types = (ExtractionScriptArguments, Eagle3TrainingArguments, TargetConfig, DatasetMixtureConfig)
    parser = Eagle3Parser(types, without=("use_peft", "lora_", "use_rslora", "use_dora"))
    script_args, training_args, target_config, mixture = parser.parse_args_and_config()
    folder, script_args.features_dir = script_args.features_dir, None
    if folder is None:
        raise ValueError("Say where to write the features: `--features_dir`.")
    training_args.eval_strategy = "no"
    trainer = make_trainer(script_args, training_args, target_config, mixture)
    store = trainer.extract_features(folder, script_args.rows_per_shard, script_args.feature_dtype)
    trainer.accelerator.print(
        f"{store.index['num_tokens']} tokens in {store.index['num_rows']} rows, {store.num_shards} shards in {folder}."
    )
    # Else a process may be aborted at its end while its threads still talk to others.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()

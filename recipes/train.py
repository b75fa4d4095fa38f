# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
r"""
Trains an EAGLE-3 draft for a frozen target.

On one machine, with one process per GPU:

    accelerate launch recipes/train.py \
        --model_name_or_path Qwen/Qwen3-8B --dtype bfloat16 \
        --dataset_name HuggingFaceH4/ultrachat_200k --dataset_train_split train_sft --assistant_only_loss \
        --draft_vocab_size 32000 --max_length 4096 --packing \
        --per_device_train_batch_size 1 --gradient_accumulation_steps 8 \
        --output_dir outputs/Qwen3-8B-speculator.eagle3

A YAML file (`--config`) can have the arguments, and flags override it. This folder has files for known targets, such as
`qwen3_8b.yaml`. `--dataset_name` also takes local data: a JSON Lines, Parquet or text file, a folder with `train.jsonl`
and `test.jsonl`, or the output of `regenerate.py`. Rows may have images if the target takes them (docs/data.md).
`--resume_from_checkpoint true` resumes a stopped run.

`--draft_name_or_path` trains an existing draft further. With `--use_peft` it is adapted by LoRA:

    accelerate launch recipes/train.py --draft_name_or_path me/Qwen3-8B-speculator.eagle3 --use_peft \
        --model_name_or_path Qwen/Qwen3-8B --dataset_name me/my-domain --output_dir outputs/my-domain-adapter
"""

import argparse
import logging
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path


if find_spec("trl") is None:
    raise SystemExit("This script needs more packages: pip install 'hf-eagle3[train]'")

from accelerate import PartialState
from datasets import DatasetDict
from huggingface_hub import is_offline_mode
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.trainer_utils import get_last_checkpoint
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from hf_eagle3 import Eagle3ForSpeculation, Eagle3Trainer, Eagle3TrainingArguments
from hf_eagle3.checkpoints import load_ends, target_class
from hf_eagle3.data import load_data, read_json_lines, rows_of, shows_images
from hf_eagle3.data.loading import load_mixture
from hf_eagle3.data.messages import CONVERSATIONS
from hf_eagle3.environment import is_path
from hf_eagle3.hub import repo_name
from hf_eagle3.scripts import SPREADING, command_line, errors_in_one_line, folder_or_hub_id, place_of_draft
from hf_eagle3.training import FeatureStore
from hf_eagle3.training.models import load_processing_class
from hf_eagle3.training.parser import Eagle3Parser
from hf_eagle3.training.record import non_defaults


# Where a fresh draft is saved by default.
OUTPUT_DIR = "outputs/<target>-speculator.eagle3"
# What printed commands have for names that this script does not know: of accelerate's configuration, and of the target on the Hub.
CONFIG_OF_ACCELERATE, TARGET_ON_HUB = "ACCELERATE.yaml", "OWNER/NAME"


@dataclass
class TrainScriptArguments(ScriptArguments):
    """The arguments of this script."""

    # Parameters whose help is for TRL's own way of loading
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "The data: a Hub id, a file (JSON Lines, JSON, Parquet, CSV or text), a folder with `train.jsonl` and "
            "`test.jsonl`, or the output of `regenerate.py`. For a mixture, write `datasets` in the YAML file instead."
        },
    )
    dataset_train_split: str = field(
        default="train",
        metadata={"help": "The split to read, or a part of it ('train[:1000]'). Streams have no parts."},
    )
    dataset_test_split: str = field(
        default="test",
        metadata={"help": "The split to evaluate on, or a part of one ('test[:512]'). Streams have no parts."},
    )
    dataset_streaming: bool = field(
        default=False, metadata={"help": "Whether to read rows when they are needed, instead of all at the beginning."}
    )

    # Parameters that control the draft and stored features
    draft_name_or_path: str | None = field(
        default=None,
        metadata={"help": "The draft to train further: a folder or a Hub id. By default a fresh one is made."},
    )
    draft_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of the draft's repo (`--draft_name_or_path`)."}
    )
    draft_subfolder: str | None = field(
        default=None, metadata={"help": "The draft's folder in its repo, if it is not the root."}
    )
    features_dir: str | None = field(
        default=None, metadata={"help": "A folder of `recipes/extract_features.py` to train on instead of a data set."}
    )

    def __post_init__(self):
        if self.draft_name_or_path is None and (given := place_of_draft(self)):
            raise ValueError(
                f"`draft_{min(given)}` says where the draft is in its repo. Pass `draft_name_or_path` with it."
            )


@dataclass
class TargetConfig(ModelConfig):
    """TRL's `ModelConfig` for the target. Its LoRA arguments are for the draft."""

    # Parameters whose default values are overridden from ModelConfig
    dtype: str | None = field(
        default="auto",
        metadata={
            "help": "The dtype of the frozen target. The draft is trained in float32, or in mixed precision with `--bf16`.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )

    # Parameters whose help is for a model that is trained
    model_name_or_path: str | None = field(default=None, metadata={"help": "The target: a folder or a Hub id."})
    load_in_8bit: bool = field(default=False, metadata={"help": "Quantizes the target to 8 bits (bitsandbytes)."})
    load_in_4bit: bool = field(default=False, metadata={"help": "Quantizes the target to 4 bits (bitsandbytes)."})

    # Parameters that control where the target is
    device_map: str | None = field(
        default=None,
        metadata={
            "help": "Spreads the target over the devices, for example by 'auto'. This needs one process (`python`, not `accelerate "
            "launch`). By default each process holds a target."
        },
    )
    tp_plan: str | None = field(
        default=None,
        metadata={"help": "'auto' splits each layer of one target over all processes (tensor parallelism)."},
    )
    fsdp_size: int | None = field(
        default=None,
        metadata={
            "help": "Shards the weights of one target over this many processes (FSDP2). It must be all of them."
        },
    )


def load_configured_data(script_args: TrainScriptArguments, mixture: DatasetMixtureConfig) -> DatasetDict:
    """
    Returns the splits of the data set that the arguments name, or of a mixture. Raises `ValueError` if they name no data, or name it
    twice, or `test_split_size` is for a data set that is no mixture.
    """
    name = script_args.dataset_name
    if mixture.datasets:
        if name is not None:
            raise ValueError(
                f"`datasets` and `dataset_name` ({name}) both say what to learn from. Leave one of them out."
            )
        mixture.streaming |= script_args.dataset_streaming
        return load_mixture(mixture)
    if not name:
        what = (
            "train on" if script_args.features_dir is None else "evaluate on, or leave it out (`--eval_strategy no`)"
        )
        raise ValueError(f"There is no data. Say what to {what}: `--dataset_name`, or `datasets` in the YAML file.")
    if mixture.test_split_size is not None:
        raise ValueError(
            "`test_split_size` is for mixtures (`datasets`). With `dataset_name` hold out a part of a split: `--dataset_train_split "
            "'train[200:]' --dataset_test_split 'train[:200]'`."
        )
    split, streaming = script_args.dataset_train_split, script_args.dataset_streaming or mixture.streaming
    return load_data(name, script_args.dataset_config, split, streaming)


def load_configured_target(
    config: TargetConfig, with_layers: bool = True, trust_remote_code: bool = False, with_images: bool = False
) -> PreTrainedModel:
    """
    Loads the target, or only its embeddings and head. Training from features needs no more. Raises `ValueError` if several processes
    would each spread a target over all devices.
    """
    num_processes = PartialState().num_processes
    if config.device_map in SPREADING and num_processes > 1:
        raise ValueError(
            f"`device_map={config.device_map!r}` spreads one target over all devices, but each of the {num_processes} processes would "
            "load one. Start one process (`python` in place of `accelerate launch`). Or leave `--device_map` out, and pass `--load_in_4bit` "
            "or, for training, `--tp_plan auto`."
        )
    if config.load_in_4bit and config.dtype == "auto":
        config.dtype = "bfloat16"  # 4-bit layers compute in it
    quantization_config = get_quantization_config(config)
    device_map = config.device_map
    if device_map is None and quantization_config is not None:
        device_map = {"": PartialState().device}
    distributed_config = None
    if config.tp_plan is not None or config.fsdp_size is not None:
        distributed_config = DistributedConfig(tp_plan=config.tp_plan, fsdp_size=config.fsdp_size)
    name, revision = config.model_name_or_path, config.model_revision
    auto = target_class(name, with_images, revision=revision, trust_remote_code=trust_remote_code)
    load = auto.from_pretrained if with_layers else load_ends
    return load(
        name,
        revision=revision,
        dtype=config.dtype,
        attn_implementation=config.attn_implementation,
        quantization_config=quantization_config,
        device_map=device_map,
        distributed_config=distributed_config,
        trust_remote_code=trust_remote_code,
    )


def default_output_dir(target: str, draft: str | None) -> str:
    """Returns the folder for a fresh draft of a target. A given draft gets another, because it may be in that folder itself."""
    return f"outputs/{repo_name(target)}" if draft is None else "trainer_output"


def check_output_dir(args: Eagle3TrainingArguments) -> None:
    """
    Raises `ValueError` if the folder has checkpoints of another run, or cannot be written to: before training, whose result would
    be lost.
    """
    folder = Path(args.output_dir)
    if not args.resume_from_checkpoint and folder.is_dir() and get_last_checkpoint(folder) is not None:
        raise ValueError(
            f"{folder} has checkpoints of another run, which would be overwritten. To continue it, pass `--resume_from_checkpoint "
            "true`. Otherwise choose another `--output_dir`."
        )
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to: {error}. Choose another `--output_dir`.") from error


def make_trainer(
    script_args: TrainScriptArguments,
    training_args: Eagle3TrainingArguments,
    target_config: TargetConfig,
    mixture: DatasetMixtureConfig,
) -> Eagle3Trainer:
    """Loads models and data, and returns the trainer."""
    if target_config.model_name_or_path is None:
        raise ValueError("There is no target. Pass `--model_name_or_path`, or name it in the YAML file.")
    evaluates = training_args.eval_strategy != "no"
    train_dataset = eval_dataset = None
    if script_args.features_dir is not None:
        train_dataset = FeatureStore(script_args.features_dir)
        training_args.packing = False  # extraction has packed the rows, or not
    if train_dataset is None or evaluates:
        dataset = load_configured_data(script_args, mixture)
        eval_dataset = rows_of(dataset, script_args.dataset_test_split) if evaluates else None
        train_dataset = train_dataset or rows_of(dataset, script_args.dataset_train_split)
    trust = {"trust_remote_code": training_args.trust_remote_code}
    with_images = shows_images(train_dataset) or shows_images(eval_dataset)
    processing_class = load_processing_class(
        target_config.model_name_or_path, with_images, revision=target_config.model_revision, **trust
    )
    draft = None
    if script_args.draft_name_or_path is not None:
        draft = Eagle3ForSpeculation.from_pretrained(script_args.draft_name_or_path, **place_of_draft(script_args))
    trainer = Eagle3Trainer(
        model=draft,
        target_model=load_configured_target(
            target_config, script_args.features_dir is None or evaluates, with_images=with_images, **trust
        ),
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=processing_class,
        peft_config=get_peft_config(target_config),
    )
    # For the card.
    names = [each.data_files if isinstance(each.data_files, str) else each.path for each in mixture.datasets]
    trainer.dataset_names = [name for name in names or [script_args.dataset_name] if name is not None]
    trainer.script_settings = non_defaults(script_args) | non_defaults(target_config) | non_defaults(mixture)
    if mixture.datasets:
        named = [{name: value for name, value in vars(each).items() if value is not None} for each in mixture.datasets]
        trainer.script_settings["datasets"] = named
    return trainer


def resume_command(trainer: Eagle3Trainer, checkpoint: str | None) -> str:
    """Returns the command that continues this run with as many processes."""
    num_processes, is_sharded = trainer.args.world_size, trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    config_file = ["--config_file", CONFIG_OF_ACCELERATE] if is_sharded else []
    launch = ["accelerate", "launch", *config_file, "--num_processes", str(num_processes)]
    command = [*(launch if is_sharded or num_processes > 1 else ["python"]), *sys.argv]
    if checkpoint is not None and command[-2:] != ["--resume_from_checkpoint", "true"]:
        command += ["--resume_from_checkpoint", "true"]  # it overrides an earlier one
    return command_line(command)


def train(trainer: Eagle3Trainer) -> None:
    """Trains, saves and pushes the draft. An interruption ends with the command that continues from there."""
    args, folder = trainer.args, Path(trainer.args.output_dir)
    try:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        if args.enable_jit_checkpoint and trainer.state.global_step < trainer.state.max_steps:  # it ends on SIGTERM
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        checkpoint = get_last_checkpoint(folder) if folder.is_dir() else None
        command = resume_command(trainer, checkpoint)
        where = f"after {Path(checkpoint).name}" if checkpoint else "from the beginning: there is no checkpoint yet"
        if CONFIG_OF_ACCELERATE in command:
            where += f" ({CONFIG_OF_ACCELERATE} is accelerate's configuration, as this run had it)"
        raise SystemExit(f"Interrupted. To continue {where}:\n\n    {command}") from None
    except ValueError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_ours = frame.f_globals["__name__"].startswith("hf_eagle3.")
        if trainer.is_in_train and not is_ours:  # earlier errors are about the checkpoint to resume from
            raise
        raise SystemExit(f"ValueError: {error}") from None
    if not args.push_to_hub:
        trainer.save_model(args.output_dir)
        trainer.create_model_card()
        return
    try:
        trainer.push_to_hub()  # saves, too
    except Exception as error:  # of many types: of the Hub, and of its HTTP client
        raise SystemExit(
            f"The draft is in {folder}, but was not pushed ({type(error).__name__}: {error}). To push it:\n\n    "
            f"{trainer.push_command}"
        ) from None
    trainer.accelerator.print(f"Pushed the draft to {trainer.hub_model_id}.")


def tasks_to_measure(trainer: Eagle3Trainer, dataset_name: str | None) -> list[str]:
    """
    Returns what to measure a draft on: the prompts that local data holds out, or the papers' tasks. Empty for what `benchmark.py`
    measures on by default, source code: if the target takes no chats, or the Hub is offline.
    """
    held_out = None if dataset_name is None else Path(dataset_name, "test.jsonl")
    if held_out is not None and held_out.is_file():
        _, first = next(read_json_lines(held_out), (1, {}))
        if first.keys() & {"prompt", *CONVERSATIONS}:
            return [str(held_out)]
    return [] if trainer.processing_class.chat_template is None or is_offline_mode() else ["paper"]


def measure_command(
    trainer: Eagle3Trainer, config: TargetConfig, draft: str, results: str, tasks: list[str]
) -> list[str]:
    """Returns the command that measures a draft with the target as it was in training."""
    command = ["python", "recipes/benchmark.py", "--target", config.model_name_or_path, "--draft", draft]
    command += ["--json", results, *(["--tasks", *tasks] if tasks else [])]
    if trainer.args.chat_template_path is not None:
        command += ["--chat_template_path", trainer.args.chat_template_path]
    command += [f"--load_in_{bits}bit" for bits in (4, 8) if getattr(config, f"load_in_{bits}bit")]
    command += ["--dtype", config.dtype] if config.dtype not in (None, "auto") else []
    return command + (["--trust_remote_code"] if trainer.args.trust_remote_code else [])


def push_command(trainer: Eagle3Trainer, config: TargetConfig, folder: Path, results: str) -> list[str]:
    """Returns the command that pushes a draft with what was measured."""
    command = ["python", "recipes/push.py", str(folder), "--benchmark", results]
    # The repo of an adapter takes no whole draft.
    command += ["--repo_id", trainer.hub_model_id] if trainer.args.push_to_hub and not config.use_peft else []
    return command + (["--target", TARGET_ON_HUB] if is_path(config.model_name_or_path) else [])


def next_steps(trainer: Eagle3Trainer, config: TargetConfig, script_args: TrainScriptArguments) -> str:
    """Returns the commands that merge, use, measure and push what was trained."""
    base = script_args.draft_name_or_path
    place = "".join(f", {name}={value!r}" for name, value in place_of_draft(script_args).items())
    output_dir = trainer.args.output_dir
    draft, folder = trainer.hub_model_id if trainer.args.push_to_hub else str(Path(output_dir)), Path(output_dir)
    saved, merge = "draft", ""
    if config.use_peft:  # engines and scripts take whole drafts
        folder, saved = Path(f"{folder}-merged"), "adapter"
        merge = (
            f"To merge it:\n\n    base = Eagle3ForSpeculation.from_pretrained({base!r}{place})\n"
            f"    draft = PeftModel.from_pretrained(base, {draft!r}).merge_and_unload()\n"
            f"    draft.save_pretrained({str(folder)!r})\n\nThen, to use it:\n\n"
        )
        draft = str(folder)
    results, tasks = f"{folder}-results.jsonl", tasks_to_measure(trainer, script_args.dataset_name)
    measure = command_line(measure_command(trainer, config, draft, results, tasks))
    push = command_line(push_command(trainer, config, folder, results))
    named = f" (`{TARGET_ON_HUB}` is the target's name on the Hub)" if TARGET_ON_HUB in push else ""
    return (
        f"Saved the {saved} to {output_dir}. " + (merge or "To use it:\n\n") + "    draft = "
        f"hf_eagle3.Eagle3ForSpeculation.from_pretrained({draft!r}, dtype='auto').to(target.device)\n"
        "    target.generate(**inputs, assistant_model=draft)\n\n"
        f"To measure it{'' if tasks else ' on source code (`--tasks FILE` takes your own prompts)'}:\n\n    {measure}\n\n"
        f"To push it, with a card that has what was measured{named}:\n\n    {push}"
    )


def main() -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_eagle3").setLevel(logging.INFO)
    dataclass_types = (TrainScriptArguments, Eagle3TrainingArguments, TargetConfig, DatasetMixtureConfig)
    parser = Eagle3Parser(dataclass_types, ("ignore_bias_buffers",), description=__doc__)
    parser.set_defaults(output_dir=OUTPUT_DIR)
    script_args, training_args, target_config, mixture = parser.parse_args_and_config()
    target, draft = target_config.model_name_or_path, script_args.draft_name_or_path
    if training_args.output_dir == OUTPUT_DIR and target is not None:
        training_args.output_dir = default_output_dir(target, draft)
    with errors_in_one_line():
        check_output_dir(training_args)
        try:
            for name in (target, draft):
                if name is not None:
                    folder_or_hub_id(name)
        except argparse.ArgumentTypeError as error:
            raise SystemExit(f"train.py: error: {error}") from None
        trainer = make_trainer(script_args, training_args, target_config, mixture)
    train(trainer)
    if trainer.is_world_process_zero():  # the others do not know the repo
        print(next_steps(trainer, target_config, script_args))
    # A process that ends while others still talk to its threads may be aborted.
    accelerator = trainer.accelerator
    accelerator.wait_for_everyone()
    # PyTorch's reducer must not be the last to hold the processes' group: it would wait for threads that wait for Python.
    del trainer
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()

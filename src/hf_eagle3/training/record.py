"""The record of a training, for `training.json` and the card."""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.constants import FSDP_MODEL_NAME
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from transformers import PreTrainedConfig, PreTrainedModel, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import ADAPTER_CONFIG_NAME

from ..environment import environment, public_name, what_differs, without_paths
from ..hub.records import TRAINING_RECORD
from ..remote_code.configuration_eagle3 import Eagle3Config
from ..remote_code.draft_model_eagle3 import similarity, weights_digest


if TYPE_CHECKING:
    from .arguments import Eagle3TrainingArguments
    from .trainer import Eagle3Trainer


# How the names of arguments begin that do not change what is learned: outputs, logs and placement.
NOT_OF_TRAINING = (
    "accelerator_config",
    "activation_checkpointing",
    "dataloader_num_workers",
    "dataloader_persistent_workers",
    "dataloader_pin_memory",
    "debug",
    "disable_tqdm",
    "do_",
    "eos_token",  # `to_dict` hides it, so `training_record` adds it
    "eval_on_start",
    "eval_packing",
    "eval_steps",
    "eval_strategy",
    "gradient_checkpointing",
    "hub_",
    "local_rank",
    "logging_",
    "output_dir",
    "pad_to_multiple_of",
    "pad_token",
    "push_to_hub",
    "report_to",
    "resume_from_checkpoint",
    "run_name",
    "save_",
    "use_cpu",
)
# Arguments, and settings of a script, that a resumed training cannot change: it has them from the checkpoint, or would mix two.
FIXED_ON_RESUME = (
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "assistant_only_loss",
    "chat_template_path",
    "completion_only_loss",
    "data_seed",
    "dataloader_drop_last",
    "dataset_config",
    "dataset_name",
    "dataset_text_field",
    "dataset_train_split",
    "datasets",
    "draft_form",
    "draft_vocab_size",
    "learning_rate",
    "lr_scheduler_kwargs",
    "lr_scheduler_type",
    "max_grad_norm",
    "max_length",
    "optim",
    "optim_args",
    "optim_target_modules",
    "optimizers",
    "packing",
    "packing_strategy",
    "sampled_vocab_size",
    "seed",
    "shuffle_dataset",
    "train_sampling_strategy",
    "truncation_mode",
    "ttt_row_share",
    "ttt_step_decay",
    "ttt_steps",
    "ttt_warmup",
    "use_muon",
    "warmup_steps",
    "weight_decay",
)
# Fields of an adapter's configuration that do not change what it computes.
NOT_OF_ADAPTERS = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision")


def non_defaults(arguments: Any, values: dict | None = None) -> dict:
    """Returns the fields of a dataclass that differ from their defaults. `values` replaces the dataclass's own values."""
    values = vars(arguments) if values is None else values
    defaults = {
        item.name: item.default if item.default_factory is MISSING else item.default_factory()
        for item in fields(arguments)
    }
    if "bf16" in defaults:
        defaults["bf16"] = True  # TRL replaces `None` by it
    return {name: value for name, value in values.items() if name in defaults and value != defaults[name]}


def check_resumption(trainer: Eagle3Trainer, checkpoint: str) -> None:
    """Raises `ValueError` if the training of a checkpoint was begun with other data or settings."""
    path, state_path = (Path(checkpoint, name) for name in (TRAINING_RECORD, TRAINER_STATE_NAME))
    state = TrainerState.load_from_json(str(state_path))
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    check_same_launch(trainer, checkpoint)
    check_same_draft(trainer, checkpoint)
    then, now = record.get("target_weights"), target_digest(trainer.target_model)
    if None not in (then, now) and then != now:
        raise ValueError(
            f"{checkpoint} was trained for a target with other weights than {trainer.draft.config.verifier}, such as a fine-tune of the "
            "same model. Pass the target that this training began with, or begin a new training with its draft (`model`, or "
            "`--draft_name_or_path`)."
        )
    if record:
        check_same_settings(trainer, checkpoint, state, record)


def check_unfinished(checkpoint: str, state: TrainerState) -> None:
    """Raises `ValueError` if the `state` of a resumed training has all its steps already."""
    if state.global_step >= state.max_steps:
        raise ValueError(
            f"{checkpoint} is the end of a finished training, of {state.global_step} steps. Its draft is there. To train it further, raise "
            "`max_steps` or `num_train_epochs`."
        )


def check_same_launch(trainer: Eagle3Trainer, checkpoint: str) -> None:
    """Raises `ValueError` if the optimizer's state in a checkpoint has another form: FSDP's, DeepSpeed's or torch's own."""
    patterns = {"with FSDP": f"{FSDP_MODEL_NAME}*", "with DeepSpeed": "global_step*"}
    is_used = {"with FSDP": trainer.is_fsdp_enabled, "with DeepSpeed": trainer.is_deepspeed_enabled}
    then = next((name for name, pattern in patterns.items() if any(Path(checkpoint).glob(pattern))), "without them")
    now = next((name for name in patterns if is_used[name]), "without them")
    if then != now:
        raise ValueError(
            f"The optimizer's state in {checkpoint} cannot be converted between FSDP, DeepSpeed and neither: it was written {then}, and "
            f"this training runs {now}. Launch it as it was begun, or begin a new training with its draft (`model`, or "
            "`--draft_name_or_path`)."
        )


def check_same_draft(trainer: Eagle3Trainer, checkpoint: str) -> None:
    """Raises `ValueError` if a checkpoint has another draft, or an adapter with other settings."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    has_adapter = Path(checkpoint, ADAPTER_CONFIG_NAME).is_file()
    if has_adapter != isinstance(model, PeftModel):
        what = ("an adapter", "a whole draft") if has_adapter else ("a whole draft", "an adapter")
        raise ValueError(
            f"{checkpoint} has {what[0]}, but {what[1]} is trained here. Pass the draft, and the `peft_config` or none, that this "
            "training began with."
        )
    if isinstance(model, PeftModel):
        # PEFT would load the weights, and scale them as it is told now.
        then, now = PeftConfig.from_pretrained(checkpoint).to_dict(), model.active_peft_config.to_dict()
        then, now = (
            {name: value for name, value in each.items() if name not in NOT_OF_ADAPTERS} for each in (then, now)
        )
    else:
        theirs, ours = type(trainer.draft.config).from_pretrained(checkpoint), trainer.draft.config
        fingerprints = [each.verifier_fingerprint for each in (theirs, ours) if each.verifier_fingerprint is not None]
        if len(fingerprints) == 2 and not is_same_table(*fingerprints):
            raise ValueError(
                f"{checkpoint} has a draft for another target than {ours.verifier}. Pass the target that this training began with."
            )
        then, now = draft_facts(theirs), draft_facts(ours)
    if difference := what_differs(then, now):
        raise ValueError(
            f"{checkpoint} has another draft: {difference}. Pass the draft that this training began with."
        )


def check_same_settings(trainer: Eagle3Trainer, checkpoint: str, state: TrainerState, record: dict) -> None:
    """Raises `ValueError` if a checkpoint was trained on other data or with other settings."""
    args, then, now = trainer.args, record["arguments"], training_record(trainer)
    if args.auto_find_batch_size and state.train_batch_size is not None:  # `Trainer` restores it, but later
        now["sequences_per_step"] = state.train_batch_size * args.gradient_accumulation_steps * args.world_size
    facts = {
        name: now[name]
        for name in ("rows", "order_of_rows", "learned_tokens", "sequences_per_step")
        if record.get(name) is not None
    }
    fixed: tuple[str, ...] = FIXED_ON_RESUME
    if None not in (state.best_metric, args.metric_for_best_model):  # figures of two metrics would be compared
        fixed += ("metric_for_best_model", "greater_is_better")
    defaults = {field.name: field.default for field in fields(args)}
    then, now = ({name: each.get(name, defaults.get(name)) for name in fixed} for each in (then, now["arguments"]))
    for each in (then, now):  # `None` and `True` learn the same tokens
        each["completion_only_loss"] = each["completion_only_loss"] is not False
    if difference := what_differs(then | {name: record[name] for name in facts}, now | facts):
        sequences = (
            "`sequences_per_step` is `per_device_train_batch_size` x `gradient_accumulation_steps` x processes. "
        )
        explained = sequences if "sequences_per_step" in difference else ""
        raise ValueError(
            f"{checkpoint} was trained with other settings: {difference}. {explained}Pass the settings that this training "
            "began with, or begin a new training with its draft (`model`, or `--draft_name_or_path`)."
        )


def draft_facts(config: Eagle3Config) -> dict:
    """Returns the fields of a draft's configuration that change what it computes."""
    others = {"weights_digest", "speculators_config", "static_tree", "verifier_fingerprint"}
    others |= PreTrainedConfig().to_dict().keys()
    facts = config.to_dict()
    facts = {item.name: facts.get(item.name) for item in fields(config) if item.name not in others}
    layer = facts.pop("transformer_layer_config") or {}
    return facts | {name: value for name, value in layer.items() if name not in others}


def evaluation_of(trainer: Eagle3Trainer, log: list[dict], step: int) -> dict | None:
    """
    Returns the last evaluation in a log, on the first data set if there are several. `None` if there is none that decoded.
    """
    name = next(iter(trainer.eval_dataset)) if isinstance(trainer.eval_dataset, dict) else None
    prefix = "eval_" if name is None else f"eval_{name}_"
    for entry in reversed(log):
        figures = {metric: entry.get(f"{prefix}{metric}") for metric in ("acceptance_length", "accuracy_0")}
        if None not in figures.values():
            of = {} if name is None else {"dataset": name}
            return {**figures, "num_prompts": trainer.args.num_eval_prompts, "step": min(entry["step"], step), **of}
    return None


def rows_with_images(rows: Dataset | IterableDataset) -> int:
    """Returns how many rows of prepared data have images. Rows of a stream are not counted."""
    has_images = isinstance(rows, Dataset) and "image_text" in rows.column_names
    return sum(map(bool, rows["image_text"])) if has_images else 0


def order_of_rows(rows: Dataset | IterableDataset, args: Eagle3TrainingArguments) -> str | None:
    """
    Returns what shows that prepared data has other rows or another order: a digest of the ends of up to 64 rows, from all over
    it. (The beginnings of conversations may have the date.) Of a stream, how many processes and workers share its files.
    """
    if isinstance(rows, IterableDataset):
        readers = args.world_size, max(args.dataloader_num_workers, 1)
        return "read by {} x {}".format(*(min(number, rows.num_shards) for number in readers))
    if "input_ids" not in rows.column_names:
        return None
    return hashlib.sha256(repr([tokens[-32:] for tokens in sample_of(rows)["input_ids"]]).encode()).hexdigest()[:16]


def learned_tokens(rows: Dataset | IterableDataset) -> str | None:
    """Returns a digest of which tokens of the same rows are learned, and of their documents if they are packed. `None` for a stream."""
    if isinstance(rows, IterableDataset) or "input_ids" not in rows.column_names:
        return None
    sample = sample_of(rows)
    labels = sample["labels" if "labels" in rows.column_names else "input_ids"]
    learned = [[label != -100 for label in each] for each in labels]
    documents = sample["seq_lengths"][:] if "seq_lengths" in rows.column_names else None
    return hashlib.sha256(repr((learned, documents)).encode()).hexdigest()[:16]


def sample_of(rows: Dataset) -> Dataset:
    """Returns up to 64 rows from all over prepared data."""
    return rows.with_format(None).select(range(0, len(rows), -(-len(rows) // 64)))


def is_same_table(one: str, other: str) -> bool:
    """Whether two fingerprints are of one table. Rounding changes them slightly, in bfloat16 by a few millionths."""
    return similarity(one, other) >= 0.99999


def target_digest(target: PreTrainedModel) -> str | None:
    """
    Returns a digest of some numbers of each of the target's weights, in any precision. `None` if the weights are quantized,
    offloaded or sharded, or only the target's embeddings and head are loaded.
    """
    digest = hashlib.sha256()
    weights = dict(target.named_parameters())  # `state_dict` would shard those of FSDP anew, in one process alone
    is_plain = all(type(weight) is torch.nn.Parameter and not weight.is_meta for weight in weights.values())
    has_layers = all(len(each) for each in target.modules() if isinstance(each, torch.nn.ModuleList))
    if not is_plain or not has_layers or getattr(target, "hf_quantizer", None) is not None:
        return None
    for _, weight in sorted(weights.items()):
        some = weight.detach().flatten()[:: max(weight.numel() // 64, 1)].to(torch.bfloat16)
        digest.update(some.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def training_record(trainer: Eagle3Trainer, state_dict: dict[str, torch.Tensor] | None = None) -> dict:
    """
    Returns the data, the arguments that differ from their defaults, the length, the machine and the last evaluation. The
    digest of the draft's weights (`state_dict`) says which draft the record is about.
    """
    args = trainer.args
    datasets = [public_name(name) for name in trainer.dataset_names]
    arguments = {"model_name_or_path": trainer.target_model.config._name_or_path, **trainer.script_settings}
    if datasets and "datasets" not in arguments:
        arguments["dataset_name"] = datasets[0] if len(datasets) == 1 else datasets
    arguments |= {
        name: value
        for name, value in non_defaults(args, args.to_dict()).items()
        if not name.startswith(NOT_OF_TRAINING)
    }
    if args.eos_token is not None:  # hidden like tokens of the Hub
        arguments["eos_token"] = args.eos_token
    if (optimizer := trainer.callers_optimizer) is not None:  # it has its own learning rates
        arguments = {key: value for key, value in arguments.items() if "learning_rate" not in key}
        arguments["optimizers"] = optimizer
    step, epoch, log = trainer.state.global_step, trainer.state.epoch or 0.0, trainer.state.log_history
    logged = {key: value for entry in log for key, value in entry.items()}  # the last value of each
    if trainer.best is not None:
        step, num_logged = trainer.best
        before = [entry for entry in log[:num_logged] if entry["step"] <= step]
        log, epoch = before + log[num_logged:], before[-1]["epoch"]
    return {
        "draft_weights": None if state_dict is None else weights_digest(state_dict),
        "datasets": datasets,
        "rows": len(trainer.train_dataset) if isinstance(trainer.train_dataset, Dataset) else None,  # prepared
        "order_of_rows": trainer.order_of_rows,
        "learned_tokens": trainer.learned_tokens,
        "target_weights": target_digest(trainer.target_model),
        **({} if trainer.rows_with_images == 0 else {"rows_with_images": trainer.rows_with_images}),
        # The command of a user's own script is not known.
        "command": "accelerate launch recipes/train.py --config training.yaml" if trainer.script_settings else None,
        "arguments": without_paths(json.loads(json.dumps(arguments, default=str))),
        "steps": step,
        "epochs": epoch,
        "sequences_per_step": trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "seconds": None if trainer.resumed_from else logged.get("train_runtime"),  # of the last run only
        "num_processes": args.world_size,
        "environment": environment(trainer.accelerator.device),
        "evaluation": evaluation_of(trainer, log, step),
        "has_chat_template": trainer.has_chat_template,
    }

"""Checks of what a trainer is called with."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel
from trl import SFTTrainer

from ..data.checks import check_is_dataset
from ..remote_code.draft_model_eagle3 import DraftModel
from .arguments import Eagle3TrainingArguments
from .features import FeatureStore


if TYPE_CHECKING:
    from .trainer import Eagle3Trainer

# Arguments of `SFTTrainer` that would do nothing here.
UNUSED = {
    "compute_metrics": "there are no predictions to pass. `evaluate` reports the loss, the accuracy of each drafting step and the "
    "acceptance length",
    "preprocess_logits_for_metrics": "no logits are kept",
    "compute_loss_func": "the loss is that of training-time test",
    "quantization_config": "the draft is trained in float32. Quantize the target when it is loaded (`target_model_init_kwargs`)",
}


def check_call(
    target_model: str | PreTrainedModel, args: Eagle3TrainingArguments | None, kwargs: dict[str, Any]
) -> None:
    """
    Checks what does not depend on the models.

    Raises:
        TypeError: if `target_model` is not a target, `args` of another class, an argument does not exist, or a data set is something else.
        ValueError: if an argument of `SFTTrainer` would do nothing, an adapter, a data set or DeepSpeed's stage is of a kind that cannot be
            used, or there is no data set to evaluate on.
    """
    if not isinstance(args, Eagle3TrainingArguments | None):
        raise TypeError(f"`args` must be `Eagle3TrainingArguments`, got {type(args).__name__}.")
    if isinstance(target_model, DraftModel) or not (isinstance(target_model, str) or hasattr(target_model, "config")):
        raise TypeError(
            "`target_model` must be the target, a causal language model or the name of one, and `model` the draft; "
            f"`target_model` is {type(target_model).__name__}."
        )
    adapter = target_model.active_peft_config if isinstance(target_model, PeftModel) else None
    if adapter is not None and (adapter.is_prompt_learning or getattr(adapter, "alora_invocation_tokens", None)):
        raise ValueError(
            "The target is adapted by virtual tokens or an activated LoRA (aLoRA), which training would leave out, and decoding with "
            "a draft refuses. Pass the target without its adapter (`get_base_model()`), or with another one."
        )
    plugin = None if args is None else args.deepspeed_plugin
    if plugin is not None and plugin.hf_ds_config.is_zero3():
        raise ValueError(
            "DeepSpeed ZeRO-3 keeps only parts of the target and the draft in each process, and training needs their whole embeddings and "
            "heads. Use ZeRO-2, or FSDP2 (recipes/accelerate_configs/fsdp2.yaml). If the target does not fit on one GPU, also pass "
            "`--fsdp_size` (the number of processes, with FSDP2), or `--tp_plan auto`."
        )
    known = list(inspect.signature(SFTTrainer.__init__).parameters)[3:]  # after `self`, `model` and `args`
    if unknown := [name for name in kwargs if name not in known]:
        raise TypeError(
            f"Eagle3Trainer has no arguments {unknown}. Pass those of `Eagle3TrainingArguments` in `args`; the others are {known}."
        )
    for name, reason in UNUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"`{name}` would have no effect: {reason}.")
    if isinstance(kwargs.get("train_dataset"), dict):
        splits = sorted(kwargs["train_dataset"], key=lambda split: (split != "train", split))
        raise ValueError(f"`train_dataset` has splits {splits}: pass one of them, such as dataset[{splits[0]!r}].")
    if kwargs.get("eval_dataset") == {}:
        raise ValueError("`eval_dataset` has no data sets. Pass one, or leave `eval_dataset` out.")
    if args is not None and args.eval_strategy != "no" and kwargs.get("eval_dataset") is None:
        raise ValueError(
            "`eval_strategy` asks for evaluation, but there is no `eval_dataset`. Pass one, or leave `eval_strategy` out."
        )
    train_dataset, *evaluated = all_datasets(kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
    has_store = isinstance(train_dataset, FeatureStore)
    if has_store and kwargs.get("formatting_func") is not None and kwargs.get("eval_dataset") is None:
        raise ValueError(
            "`formatting_func` would have no effect: the rows of a feature store were formatted when they were extracted. Leave it out."
        )
    if any(isinstance(dataset, FeatureStore) for dataset in evaluated):
        raise ValueError("`eval_dataset` is a feature store, but evaluation decodes: pass a data set.")
    if not has_store:
        check_is_dataset(train_dataset, "train")
    for dataset in evaluated:
        if dataset is not None:
            check_is_dataset(dataset, "eval")


def optimizer_name(kwargs: dict[str, Any]) -> str | None:
    """Returns the name of the class of an optimizer among the arguments of a trainer, or `None`."""
    optimizer = (kwargs.get("optimizers") or (None, None))[0]
    chosen = kwargs.get("optimizer_cls_and_kwargs") or (None if optimizer is None else type(optimizer),)
    return None if chosen[0] is None else chosen[0].__name__


def check_optimizer(trainer: Eagle3Trainer) -> None:
    """
    Raises `ValueError` if the caller's optimizer has parameters of another model, or only frozen ones, which would leave the draft as
    it is.
    """
    own = set(map(id, trainer.model.parameters()))
    groups = [] if trainer.optimizer is None else trainer.optimizer.param_groups
    given = [parameter for group in groups for parameter in group["params"]]
    if others := sum(id(parameter) not in own for parameter in given):
        raise ValueError(
            f"The optimizer has {others} parameters that are not the draft's. Make it from the parameters of the draft that you pass as "
            "`model`. If that stores no head, call `draft.pair_with(target)` before."
        )
    if given and not any(parameter.requires_grad for parameter in given):
        raise ValueError(
            "The optimizer has only frozen parameters. Those of an adapter are made with it (`peft_config`): pass "
            "`optimizer_cls_and_kwargs` in place of `optimizers`, or a `PeftModel` as `model`."
        )


def all_datasets(train_dataset: Any, eval_dataset: Any) -> list[Any]:
    """Returns the data sets of a trainer."""
    return [train_dataset, *(eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset])]


def check_parallelism(trainer: Eagle3Trainer) -> None:
    """Raises `ValueError` if several processes, FSDP or DeepSpeed cannot do what the arguments ask for."""
    if trainer.args.world_size > 1 and not trainer.accelerator.even_batches:
        raise ValueError(
            "With `even_batches=False` (`accelerator_config`) one process may finish a pass early, and the others wait until `ddp_timeout`. "
            "Leave `even_batches` at its default. Evaluation does not count repeated rows."
        )
    if trainer.args.world_size > 1 and trainer.accelerator.split_batches:
        raise ValueError(
            "With `split_batches=True` (`accelerator_config`) each process gets a part of `per_device_train_batch_size`, and logs and records "
            "would count the rows of a step wrongly. Leave it out, and pass the batch size of one process."
        )
    parallelism = trainer.accelerator.parallelism_config
    if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
        raise ValueError(
            "Context and sequence parallelism (`cp_size` and `sp_size` of `parallelism_config`) give each process a part of a row, and the "
            "unroll needs whole rows. Leave them out."
        )
    fsdp = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    are_flat = trainer.is_deepspeed_enabled or (fsdp is not None and fsdp.fsdp_version == 1)
    if are_flat and trainer.args.use_muon:
        raise ValueError(
            "DeepSpeed and FSDP1 split parameters into flat pieces, and Muon needs whole matrices. Pass `use_muon=False`, or use FSDP2 "
            "(`fsdp_version: 2`)."
        )
    if fsdp is not None and "FULL_STATE_DICT" not in str(fsdp.state_dict_type):
        raise ValueError(
            "`Trainer` cannot save a model that FSDP keeps in parts. Set `fsdp_state_dict_type: FULL_STATE_DICT` in "
            "accelerate's configuration, as in recipes/accelerate_configs/fsdp2.yaml."
        )
    if fsdp is not None and fsdp.activation_checkpointing:
        raise ValueError(
            "`fsdp_activation_checkpointing: true` is not supported: training-time test keeps the keys of every step, and a "
            "recomputed forward would add them again. Leave it out of accelerate's configuration."
        )
    has_own_vocabulary = trainer.draft.d2t is not None or trainer.args.draft_vocab_size is not None
    if fsdp is not None and fsdp.cpu_ram_efficient_loading and has_own_vocabulary:
        raise ValueError(
            "`fsdp_cpu_ram_efficient_loading: true` loads no buffers, such as the draft vocabulary. Set it to false in accelerate's "
            "configuration, as in recipes/accelerate_configs/fsdp2.yaml."
        )
    if trainer.args.sampled_vocab_size is not None and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        raise ValueError(
            "`sampled_vocab_size` takes rows of the head, which FSDP and DeepSpeed keep in parts. Leave it out, or use DDP."
        )


def check_batches(trainer: Eagle3Trainer) -> None:
    """Raises `ValueError` if `dataloader_drop_last` drops all data."""
    train, *evals = all_datasets(trainer.train_dataset, trainer.eval_dataset)
    for dataset, name in [(train, "train"), *((each, "eval") for each in evals)]:
        rows_of_step = getattr(trainer.args, f"per_device_{name}_batch_size") * trainer.args.world_size
        if trainer.args.dataloader_drop_last and isinstance(dataset, Dataset) and len(dataset) < rows_of_step:
            raise ValueError(
                f"The {name} data has {len(dataset)} rows, which `dataloader_drop_last=True` drops: they do not fill a batch of "
                f"{rows_of_step}. Leave it out, or pass a smaller `per_device_{name}_batch_size`."
            )

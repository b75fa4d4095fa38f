"""What evaluation adds to the loss: it decodes with the draft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import torch
from datasets import Dataset, IterableDataset

from ..data.images import ImageReader
from ..data.prompts import documents_of_row, prompt_of
from ..remote_code.draft_model_eagle3 import DraftModel
from ..remote_code.target_eagle3 import device_of, is_sharded
from ..tokenizer import padded_inputs
from .metrics import BY_STEP, sum_dtype
from .models import default_generation


if TYPE_CHECKING:
    from .trainer import Eagle3Trainer


def check_best_metric(trainer: Eagle3Trainer) -> None:
    """Raises `ValueError` if training evaluates, and `metric_for_best_model` is not measured."""
    args, data = trainer.args, trainer.eval_dataset
    if args.metric_for_best_model is None or args.eval_strategy == "no" or data is None:
        return
    names = ["loss", "loss_per_step", "simulated_acceptance_length"]
    if args.num_eval_prompts > 0:
        names += ["acceptance_length"] + ["vocabulary_coverage"] * (trainer.draft.d2t is not None)
    names += [f"{name}_{step}" for name in BY_STEP for step in range(args.ttt_steps)]
    if isinstance(data, dict):
        names = [f"{dataset}_{name}" for dataset in data for name in names]
    if (name := args.metric_for_best_model.removeprefix("eval_")) not in names:
        why = " with `num_eval_prompts=0`" * (args.num_eval_prompts == 0)
        raise ValueError(
            f"`metric_for_best_model` is {name!r}, which is not measured{why}. It must be one of {names}."
        )


def check_decoding(trainer: Eagle3Trainer) -> None:
    """Raises `ValueError` if training evaluates by decoding, and the target refuses a draft."""
    args, target = trainer.args, trainer.target_model
    decodes = args.eval_strategy != "no" and trainer.eval_dataset is not None and args.num_eval_prompts > 0
    is_placed = trainer.draft.device.type == trainer.accelerator.device.type and not trainer.is_fsdp_enabled
    if not decodes or not is_placed:
        return
    tokens = torch.arange(1, 5, device=device_of(target.get_input_embeddings()))[None]
    try:
        with decoding_draft(trainer) as draft:
            inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            target.generate(**inputs, assistant_model=draft, max_new_tokens=2, synced_gpus=False)
    except ValueError as error:
        raise ValueError(
            f"Evaluation decodes, but the target refuses it: {error} To train for another program, set `num_eval_prompts=0`."
        ) from error


@contextmanager
def decoding_draft(trainer: Eagle3Trainer) -> Iterator[DraftModel]:
    """Yields a draft that decodes with a whole tree in every step, for a target that generates by transformers' defaults."""
    draft = trainer.whole_draft()
    policy, draft.generation_config.tree_policy = draft.generation_config.tree_policy, "static"
    was_training = draft.training
    draft.eval()
    try:
        with default_generation(trainer.target_model):
            yield draft
    finally:
        draft.train(was_training)
        draft.generation_config.tree_policy = policy


@torch.no_grad()
def decoding_metrics(trainer: Eagle3Trainer, dataset: Dataset | IterableDataset) -> dict[str, float]:
    """
    Returns `acceptance_length` and `vocabulary_coverage` of continuing the first rows greedily, with a whole tree in
    every step. The acceptance length is the number of emitted tokens per verification, over all rows. The coverage is the
    share of new tokens that the draft vocabulary has.
    """
    if trainer.args.num_eval_prompts == 0:
        return {}
    with decoding_draft(trainer) as draft:
        sums = continue_rows(trainer, dataset, draft)
    num_accepted, num_forwards, num_known, num_new = trainer.accelerator.reduce(sums, "sum").tolist()
    metrics = {"acceptance_length": num_accepted / num_forwards} if num_forwards else {}
    return metrics | ({"vocabulary_coverage": num_known / num_new} if num_new and draft.d2t is not None else {})


def continue_rows(trainer: Eagle3Trainer, dataset: Dataset | IterableDataset, draft: DraftModel) -> torch.Tensor:
    """
    Continues the beginnings of this process's rows. Returns the numbers of emitted tokens, verifications, new tokens in the
    draft vocabulary, and new tokens, `(4,)`.
    """
    args, device = trainer.args, trainer.accelerator.device
    process, num_processes = trainer.accelerator.process_index, trainer.accelerator.num_processes
    if is_sharded(trainer.target_model):  # all processes must run the target together
        process, num_processes = 0, 1
    images = trainer.images if isinstance(trainer.images, ImageReader) else None
    sums = torch.zeros(4, dtype=sum_dtype(device), device=device)
    for row in islice(dataset, process, args.num_eval_prompts, num_processes):
        prompt = prompt_of(documents_of_row(row)[0], row.get("image_end", 0))
        max_new_tokens = args.eval_max_new_tokens
        if trainer.num_positions is not None:
            max_new_tokens = min(max_new_tokens, trainer.num_positions - prompt.shape[-1])
        if max_new_tokens <= 0:
            continue
        prompts = [{**row, "input_ids": prompt[0].tolist()}]
        sequences = trainer.target_model.generate(
            **padded_inputs(trainer.target_model, trainer.processing_class, prompts, images),
            assistant_model=draft,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            synced_gpus=False,  # processes that share the target take the same steps
        )
        stats = draft.last_generation
        assert stats is not None  # of `generate`
        new, lengths = sequences[0, prompt.shape[-1] :], stats.accepted_lengths
        num_known = torch.isin(new, draft.draft_token_ids.to(new.device)).sum().item()
        sums += torch.tensor([sum(lengths), len(lengths), num_known, len(new)], device=device)
    return sums


def without_repeated_rows(trainer: Eagle3Trainer, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    Masks the labels of rows that accelerate repeats, so that all processes have as many. `Trainer` drops their losses, but
    our counts have no rows. With `padding_free` a batch is one row, which counts if any of it is new.
    """
    state, process = trainer.accelerator.gradient_state, trainer.accelerator.process_index
    if trainer.accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
        return inputs
    num_new = max(state.remainder - process * trainer.args.eval_batch_size, 0)
    is_new = torch.arange(len(inputs["labels"]), device=inputs["labels"].device) < num_new
    return {**inputs, "labels": inputs["labels"].where(is_new[:, None], -100)}


@contextmanager
def kept_precision(model: torch.nn.Module) -> Iterator[None]:
    """
    Restores a draft's parameters at the end. `bf16_full_eval` and `fp16_full_eval` cast the draft, and training would go on
    in half precision. Its rotary frequencies, the only floats among its buffers, keep their precision themselves.
    """
    kept = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, data in kept:
            if parameter.dtype != data.dtype:
                parameter.data = data.to(parameter.device)

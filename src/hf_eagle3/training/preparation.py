"""Prepares tokenizer, data and draft vocabulary for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl.data_utils import get_dataset_column_names

from ..data.checks import (
    check_chat_template,
    check_positions,
    drop_cut_images,
    first_row,
    kind_of_data,
    plain_rows,
    report_dropped,
    report_long_rows,
    warn_of_positions,
)
from ..data.encoded import encode_rows, split_documents, taught_pieces, taught_within
from ..data.encoding import RowEncoder
from ..data.images import ImageReader, sees_images, without_images
from ..data.messages import CONVERSATIONS, refuse_json
from ..data.prompts import trained_length
from ..data.rows import SAYS_WHAT_IS_LEARNED
from ..data.vocabulary import count_tokens, coverage, most_frequent_tokens
from ..remote_code.draft_model_eagle3 import DraftModel
from ..tokenizer import padding_token, read_template
from .arguments import Eagle3TrainingArguments


if TYPE_CHECKING:
    from .trainer import Eagle3Trainer

logger = get_logger(__name__)


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, args: Eagle3TrainingArguments, vocab_size: int) -> None:
    """
    Gives the tokenizer the chat template and the EOS token of the arguments, and the arguments a padding token that the target's
    table of `vocab_size` tokens has. Raises `ValueError` if the template is not a Jinja file, or the tokenizer does not have the
    token.
    """
    if args.chat_template_path is not None:
        if not args.chat_template_path.endswith((".jinja", ".j2")):
            raise ValueError(
                f"`chat_template_path` is {args.chat_template_path}, but must be a Jinja file (.jinja or .j2). The template of "
                "another tokenizer would bring tokens that the target does not know."
            )
        tokenizer.chat_template = read_template(args.chat_template_path)
    if args.eos_token is not None:
        if args.eos_token not in tokenizer.get_vocab():
            raise ValueError(
                f"`eos_token` is {args.eos_token!r}, which the tokenizer does not have. Pass one of its tokens."
            )
        tokenizer.eos_token = args.eos_token
    args.pad_token = args.pad_token or padding_token(tokenizer, vocab_size)


class CheckedCollator:
    """
    A caller's `collator`, with a check that its batches learn what the rows say. Those of transformers replace labels. Batches that
    are padded on the left are padded on the right instead, because images and stored features begin there.
    """

    def __init__(self, collator: Callable):
        self.collator = collator

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        name, problem = getattr(self.collator, "__name__", type(self.collator).__name__), None
        try:
            batch = self.collator(examples)
        except Exception as error:  # many of transformers do not pad labels
            raise ValueError(
                f"`data_collator` ({name}) cannot read rows with {sorted(examples[0])}: {error} Leave it out, or correct it."
            ) from error
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            what = f"only {sorted(batch)}" if isinstance(batch, Mapping) else type(batch).__name__
            raise ValueError(
                f"`data_collator` ({name}) returns {what}, but must return a dictionary with `input_ids` and `labels`. Leave it out, or "
                "correct it."
            )
        tokens, labels = batch["input_ids"], batch.get("labels")
        if labels is None:
            problem = "gives no `labels`"
        elif not (isinstance(tokens, torch.Tensor) and isinstance(labels, torch.Tensor)):
            problem = (
                f"gives {type(tokens).__name__} as `input_ids` and {type(labels).__name__} as `labels`, not tensors"
            )
        elif not ((labels == tokens) | (labels == -100)).all():
            problem = "gives labels that are neither the tokens themselves, not shifted, nor -100"
        elif all("labels" in example for example in examples):
            num_learned = sum(label != -100 for example in examples for label in example["labels"])
            if (labels != -100).sum() > num_learned:
                problem = "gives labels to tokens that the rows exclude"
        if problem is not None:
            raise ValueError(f"`data_collator` ({name}) {problem}. Leave it out, or correct it.")
        mask = batch.get("attention_mask")
        if isinstance(mask, torch.Tensor) and not mask[:, 0].all():
            order = mask.int().argsort(dim=1, descending=True, stable=True)
            of_tokens = {key: each for key, each in batch.items() if getattr(each, "shape", None) == mask.shape}
            return {**batch, **{key: each.gather(1, order) for key, each in of_tokens.items()}}
        return dict(batch)


def image_reader(
    target: PreTrainedModel, processor: ProcessorMixin | None, args: Eagle3TrainingArguments
) -> ImageReader | str:
    """Returns what reads the images of rows, or the reason why rows with images are refused."""
    if not sees_images(target.config):
        return (
            f"but {type(target).__name__} reads text only. Pass a target that sees (`AutoModelForImageTextToText`), or remove "
            "the images"
        )
    if processor is None:
        return (
            "but `processing_class` is a tokenizer. Pass the target's processor (`AutoProcessor`), or leave "
            "`processing_class` out"
        )
    if args.packing or args.padding_free:
        return (
            "and packed rows cannot have any: a target counts positions and images from the beginning of a row. Leave out "
            f"`{'packing' if args.packing else 'padding_free'}`"
        )
    if args.truncation_mode == "keep_end" and args.max_length is not None:
        return (
            "and `truncation_mode='keep_end'` would cut them, because they come before most of the text. Leave it out, or pass "
            "`max_length=None`"
        )
    return ImageReader(processor)


def encode(
    trainer: Eagle3Trainer,
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    formatting_func: Callable | None,
    name: str,
) -> Dataset | IterableDataset:
    """
    Returns the data as `input_ids` and `labels`. Errors call it the `name` data. Raises `ValueError` if the arguments do not
    fit it, rows are wrong, or no row has something to learn.
    """
    args = trainer.given_args
    dataset = plain_rows(dataset, name, decodes_images=formatting_func is not None)  # which may look at them
    texts = without_images(dataset)
    first = first_row(texts, name)
    if formatting_func is not None and "input_ids" in first:  # such as `trainer.eval_dataset`
        logger.warning(f"`formatting_func` has no effect on the {name} data, which has `input_ids`.")
        formatting_func = None
    text_field, is_text = args.dataset_text_field, formatting_func is not None
    may_be_text = text_field in ("prompt", *CONVERSATIONS) and "input_ids" not in first
    if not is_text and may_be_text and isinstance(first.get(text_field), str):
        is_text = True
        refuse_json(first[text_field], text_field)
        dataset = dataset.remove_columns(["text"] if "text" in first else []).rename_column(text_field, "text")
    kind = "text" if is_text else kind_of_data(texts, text_field, name)
    is_chat = kind in CONVERSATIONS or (kind == "prompt" and not isinstance(first["prompt"], str))
    says_what_to_learn = kind == "input_ids" and not first.keys().isdisjoint(SAYS_WHAT_IS_LEARNED)
    if is_chat:
        check_chat_template(tokenizer)
    elif args.assistant_only_loss and not says_what_to_learn:
        raise ValueError(
            f"`assistant_only_loss=True` needs conversations, but the {name} data has {kind!r}. Leave it out, or pass "
            "`messages`, or `input_ids` with `labels` or a mask of the assistant's tokens."
        )
    if args.completion_only_loss and kind != "prompt" and not says_what_to_learn:
        raise ValueError(
            f"`completion_only_loss=True` needs `prompt` and `completion`, but the {name} data has {kind!r}. Leave it out. To "
            "learn only what the assistant says in `messages`, pass `assistant_only_loss=True`."
        )
    if not is_chat and kind != "input_ids" and tokenizer.eos_token is None:
        logger.warning("The tokenizer has no EOS token: texts are learned without an end. Name one with `eos_token`.")
    learned = args.assistant_only_loss, args.completion_only_loss
    encoder = RowEncoder(
        tokenizer, kind, trainer.target_vocab_size, *learned, formatting_func, trainer.images, dataset.features
    )
    if is_chat and args.assistant_only_loss and (end := encoder.unlearned_end(first)) is not None:
        logger.warning(
            f"The chat template ends the assistant's turns with {end!r} outside of `{{% generation %}}`, so the draft does not learn "
            "where the target stops. Pass a template with it inside (`chat_template_path`)."
        )
    return encode_rows(dataset, encoder, name, args.dataset_num_proc)


def fit_rows(
    trainer: Eagle3Trainer, dataset: Dataset | IterableDataset, packing: bool, name: str
) -> Dataset | IterableDataset:
    """
    Drops encoded rows that `max_length` would cut within an image. If rows are packed, also drops rows, or pieces of split rows, with
    nothing to learn within `max_length`. Warns of these, of rows that are cut or split, and of those that are longer than the
    target was made for. Raises `ValueError` if no row is left, or one has more tokens than the target's table has positions.
    """
    args = trainer.given_args
    # Only batches without padding keep packed documents apart, and `SFTTrainer` would pack rows as if each were one.
    # It also cuts rows without cutting these lengths.
    is_cut = args.max_length is not None
    if (packing or is_cut or not trainer.padding_free) and "seq_lengths" in get_dataset_column_names(dataset):
        dataset = split_documents(dataset, name)
    is_wrapped = packing and args.packing_strategy == "wrapped"  # into rows of `max_length` tokens, whatever these are
    if trainer.num_positions is not None:
        check_positions(None if is_wrapped else dataset, trainer.num_positions, args.max_length, name)
    if is_wrapped or "seq_lengths" not in get_dataset_column_names(dataset):  # whose positions begin anew within a row
        dataset = warn_of_positions(dataset, trained_length(trainer.target_model), args.max_length, name, is_wrapped)
    dataset = drop_cut_images(dataset, args.max_length, name)
    is_split = packing and args.packing_strategy != "bfd"
    fate = (
        "split off into other rows"
        if is_split
        else "cut off (`packing=True` with `packing_strategy='bfd_split'` keeps them)"
    )
    dataset = report_long_rows(dataset, args.max_length, fate, name)
    if packing and args.packing_strategy == "bfd_split" and args.max_length is not None:
        return taught_pieces(dataset, args.max_length, name)
    if not packing or is_split or args.max_length is None:
        return dataset
    taught = taught_within(dataset, args.max_length)  # `SFTTrainer` drops the others only without packing
    report_dropped(dataset, taught, name, f"they have nothing to learn within `max_length={args.max_length}`")
    return taught


def prepare_vocabulary(
    draft: DraftModel,
    target: PreTrainedModel,
    train_dataset: Dataset | IterableDataset,
    size_from_data: int | None,
) -> None:
    """
    Gives the draft a vocabulary of the most frequent supervised tokens, if it has a `size_from_data`, or checks that its own
    fits the prepared data. Raises `ValueError` if that has less than half of the supervised tokens.
    """
    if draft.config.draft_vocab_size == draft.config.vocab_size and size_from_data is None:
        return
    counts = count_tokens(train_dataset, draft.config.vocab_size)
    if size_from_data is not None:
        draft.set_draft_vocabulary(most_frequent_tokens(counts, size_from_data), target)
        if draft.config.draft_vocab_size < size_from_data:
            logger.warning(
                f"`draft_vocab_size` is {size_from_data}, but the target has only {draft.config.draft_vocab_size} tokens."
            )
    share = coverage(counts, draft.draft_token_ids.tolist())
    shown = "all" if share == 1 else f"{min(share, 0.999):.1%}"  # not 100.0%, which would be rounded
    message = (
        f"Draft vocabulary: {draft.config.draft_vocab_size} of {draft.config.vocab_size} tokens, which make up {shown} of the "
        f"{counts.sum():,} supervised tokens ({np.count_nonzero(counts):,} different ones)."
    )
    if share < 0.5 and size_from_data is None:
        raise ValueError(
            f"{message} The draft cannot propose the others: its vocabulary is for other data or another tokenizer. Make a "
            "fresh draft with a vocabulary of this data (`model=None` and `draft_vocab_size`)."
        )
    logger.info(message)


class SeededLengthSampler(LengthGroupedSampler):
    """
    A sampler whose order follows from the seed and the epoch, so that a resumed training has it, too. It reads the epoch
    itself, because accelerate does not pass `set_epoch` on to the rest of an epoch in several processes. A group has
    the rows of all processes, so the order does not depend on their number.
    """

    def __init__(self, sampler: LengthGroupedSampler, trainer: Eagle3Trainer):
        super().__init__(sampler.batch_size * trainer.args.world_size, lengths=sampler.lengths)
        self.trainer = trainer

    def __iter__(self) -> Iterator[int]:
        args, epoch = self.trainer.args, int(self.trainer.state.epoch or 0)
        self.generator = torch.Generator().manual_seed(
            (args.seed if args.data_seed is None else args.data_seed) + epoch
        )
        return super().__iter__()

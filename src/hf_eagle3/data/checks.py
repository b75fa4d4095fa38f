"""Checks of training data, before or while it is prepared."""

import json
import logging
from itertools import islice
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset, Value
from transformers import PreTrainedTokenizerBase
from trl.data_utils import get_dataset_column_names

from .images import with_unread_images
from .rows import MASKS, kind_of


logger = logging.getLogger(__name__)

NUM_LOOKED_AT = 8  # rows of a stream that may have JSON in place of texts
VERY_LONG = 16_384  # tokens in a row, above which `max_length=None` gives a warning


def check_is_dataset(dataset: Any, name: str) -> None:
    """Raises `TypeError` if a data set (`"train"` or `"eval"`) is not of the library `datasets`."""
    if not isinstance(dataset, Dataset | IterableDataset):
        raise TypeError(
            f"The {name} data is {type(dataset).__name__}, but must be a `Dataset` or `IterableDataset` of the library `datasets`. "
            "`Dataset.from_list` makes one of a list of rows, and `load_dataset` of files."
        )


def plain_rows(
    dataset: Dataset | IterableDataset, name: str, decodes_images: bool = False
) -> Dataset | IterableDataset:
    """
    Returns the data set with rows of Python objects, whatever its format (NumPy, torch, ...). A column `conversation` of messages
    (as in WildChat and LMSYS-Chat) is renamed to `messages`.

    Args:
        dataset (`Dataset` or `IterableDataset`): The data.
        name (`str`): `"train"` or `"eval"`, for messages.
        decodes_images (`bool`, *optional*, defaults to `False`):
            Whether reading a row decodes its images, and columns keep their names. Otherwise it has their bytes and paths.

    Raises:
        TypeError: if it is not of the library `datasets`.
        ValueError: if it computes its rows each time they are read (`with_transform`).
    """
    check_is_dataset(dataset, name)
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise ValueError(
            f"The {name} data computes its rows each time they are read (`with_transform`). Compute them once (`dataset.map`)."
        )
    dataset, columns = dataset.with_format(None), dataset.features or {}
    if decodes_images:  # for a function of the caller
        return dataset
    is_text = isinstance(columns.get("conversation", Value("string")), Value)
    if not is_text and columns.keys().isdisjoint(("messages", "conversations", "prompt", "text", "input_ids")):
        dataset = dataset.rename_column("conversation", "messages")
    return with_unread_images(dataset)


def kind_of_data(dataset: Dataset | IterableDataset, text_field: str, name: str) -> str:
    """
    Returns the kind of a data set. See [`~hf_eagle3.data.kind_of`].

    Args:
        dataset (`Dataset` or `IterableDataset`): The data.
        text_field (`str`): The column that has texts.
        name (`str`): `"train"` or `"eval"`, for messages.

    Raises:
        ValueError: if the data has no rows, or no column to train on.
    """
    first = first_row(dataset, name)
    try:
        kind = kind_of(first, text_field)
    except ValueError as error:
        raise ValueError(f"The {name} data {error}") from None
    if isinstance(dataset, IterableDataset) and dataset.features is None:
        texts = [text for row in islice(dataset, NUM_LOOKED_AT) for text in _texts_in(row.get(kind))]
        if texts and all(map(_is_json, texts)):
            raise ValueError(
                f"The {name} data has JSON in place of texts, such as {texts[0]!r:.80}. A stream of an array in a .json file does so if "
                "texts and lists are mixed. Load the data without `streaming`, or store one object a line (.jsonl)."
            )
    return kind


def _is_json(text: str) -> bool:
    """Whether a text is a text or a list in JSON."""
    try:
        return isinstance(json.loads(text), str | list)
    except ValueError:
        return False


def _texts_in(value: Any) -> list[str]:
    """Returns a text, or the contents of messages that are texts."""
    if isinstance(value, str):
        return [value]
    messages = [message for message in value or () if isinstance(message, dict)] if isinstance(value, list) else []
    contents = [message.get(key) for message in messages for key in ("content", "value")]
    return [content for content in contents if isinstance(content, str)]


def first_row(dataset: Dataset | IterableDataset, name: str) -> dict[str, Any]:
    """Returns the first row of a data set. Raises `ValueError` if there is none."""
    if (first := next(iter(dataset), None)) is None:
        raise ValueError(f"The {name} data has no rows. Check the split and the files.")
    return first


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """
    Checks that there is a chat template for conversations.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.

    Raises:
        ValueError: if it has no chat template.
    """
    if tokenizer.chat_template is None:
        name = tokenizer.name_or_path or "the tokenizer"
        raise ValueError(
            f"The data has conversations, and {name} has no chat template. Pass one as `chat_template_path`, a Jinja file."
        )


def check_positions(
    dataset: Dataset | IterableDataset | None, num_positions: int, max_length: int | None, name: str
) -> None:
    """
    Raises `ValueError` if a row has more tokens than the target's table of positions has entries, or a row of a stream, or of texts
    that are wrapped (`None`), may have more. Rows are cut, split or dropped beyond `max_length`.
    """
    if max_length is not None and max_length <= num_positions:
        return
    rows = f"rows of the {name} data may be longer"
    if isinstance(dataset, Dataset):
        lengths = row_lengths(dataset)
        if not (num_long := int((lengths > num_positions).sum())):
            return
        rows = f"{num_long} of {len(dataset)} rows of the {name} data are longer (up to {lengths.max()} tokens)"
    raise ValueError(
        f"The target has a table of {num_positions} positions, but {rows} and `max_length` is {max_length}. Pass "
        f"`max_length={num_positions}`, or less."
    )


def warn_of_positions(
    dataset: Dataset | IterableDataset, trained_length: int | None, max_length: int | None, name: str, is_wrapped: bool
) -> Dataset | IterableDataset:
    """
    Warns of rows that are longer than the texts that the target was made for. They are cut beyond `max_length`, or wrapped into rows of
    that length. The stream that is returned warns as that of [`report_long_rows`].
    """
    if trained_length is None or (max_length is not None and max_length <= trained_length):
        return dataset
    why = (
        f"longer than {trained_length} tokens, the longest texts that the target was made for (`max_position_embeddings`), and its states "
        f"beyond may be useless. Pass `max_length={trained_length}`, or less."
    )
    if is_wrapped:
        logger.warning(f"The {name} data is packed into rows of {max_length} tokens, which are {why}")
        return dataset
    if isinstance(dataset, IterableDataset):
        return dataset.filter(LongRows(trained_length, name, why, are_kept=True), input_columns="input_ids")
    lengths = row_lengths(dataset)
    if num_long := int((lengths > trained_length).sum()):
        logger.warning(
            f"{num_long} of {len(lengths)} rows of the {name} data (up to {lengths.max()} tokens) are {why}"
        )
    return dataset


def check_seq_lengths(seq_lengths: list[list[int]], lengths: np.ndarray, first: int, name: str) -> None:
    """Raises `ValueError` if the lengths of the documents in rows, the first of which has the number `first`, are not their tokens'."""
    for row, (documents, length) in enumerate(zip(seq_lengths, lengths.tolist()), start=first):
        if documents is not None and (min(documents, default=1) < 1 or sum(documents) != length):
            raise ValueError(
                f"Row {row} of the {name} data has {length} tokens, but 'seq_lengths' {documents}. They must be the lengths of its documents."
            )


def check_unread_masks(columns: list[str], options: list[str], name: str) -> None:
    """Raises `ValueError` if some `options` or masks say what is learned of rows that are trained on as they are, without labels."""
    asked = [*options, *(each for each in columns if each in MASKS and each != "attention_mask")]
    if asked and "labels" not in columns:
        raise ValueError(
            f"{' and '.join(map(repr, asked))} would have no effect on the {name} data: with `skip_prepare_dataset=True` only "
            "`labels` say what is learned. Add them (-100 where nothing is learned), or leave `skip_prepare_dataset` out."
        )


def check_prepared(
    dataset: Dataset | IterableDataset, vocab_size: int, name: str, may_be_padded: bool = False
) -> None:
    """
    Checks rows that are trained on as they are (`skip_prepare_dataset`), except those of a stream, which are not known in advance.
    Raises `ValueError` if there are no `input_ids`, a token is not the target's, labels are not the tokens, no row teaches anything, or
    rows have padding, unless they `may_be_padded`, because a caller's collator reads masks.
    """
    columns = get_dataset_column_names(dataset)
    if "input_ids" not in columns:
        raise ValueError(
            f"`skip_prepare_dataset=True` needs a column `input_ids`, but the {name} data has only {columns}. Tokenize the data, or "
            "remove `skip_prepare_dataset`."
        )
    if not isinstance(dataset, Dataset) or len(dataset) == 0:
        return
    if "attention_mask" in columns and not may_be_padded:
        for table in dataset.select_columns("attention_mask").with_format("arrow").iter(batch_size=1000):
            if not pc.list_flatten(table["attention_mask"].combine_chunks()).to_numpy(zero_copy_only=False).all():
                raise ValueError(
                    f"Rows of the {name} data have padding (`attention_mask`), which `skip_prepare_dataset=True` would leave in, and the "
                    "target would read it. Leave `skip_prepare_dataset` out, which removes padding, or remove it yourself."
                )
    names, num_taught, first = [each for each in ("input_ids", "labels") if each in columns], 0, 0
    read = [*names, *(["seq_lengths"] if "seq_lengths" in columns else [])]
    for table in dataset.select_columns(read).with_format("arrow").iter(batch_size=1000):
        lists = [table[each].combine_chunks() for each in names]
        lengths, *others = (pc.fill_null(pc.list_value_length(each), 0).to_numpy() for each in lists)
        tokens, *labels = (pc.list_flatten(each).to_numpy(zero_copy_only=False) for each in lists)
        rows = first + np.repeat(np.arange(len(lengths)), lengths)
        if (unknown := (tokens < 0) | (tokens >= vocab_size)).any():
            raise ValueError(
                f"Row {rows[unknown][0]} of the {name} data has token {tokens[unknown][0]}, but the target's vocabulary ends at "
                f"{vocab_size - 1}. Tokenize it for this target."
            )
        if "seq_lengths" in table.column_names:
            check_seq_lengths(table["seq_lengths"].to_pylist(), lengths, first, name)
        learned = np.ones(len(tokens), dtype=bool)
        if labels:
            if (differs := lengths != others[0]).any():
                row = np.flatnonzero(differs)[0]
                raise ValueError(
                    f"Row {first + row} of the {name} data has {lengths[row]} tokens, but {others[0][row]} labels. Each token needs one."
                )
            learned = labels[0] != -100
            if (wrong := learned & (labels[0] != tokens)).any():
                raise ValueError(
                    f"Row {rows[wrong][0]} of the {name} data has label {labels[0][wrong][0]} at token {tokens[wrong][0]}. Labels must be "
                    "the tokens, not shifted, or -100."
                )
        places = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        num_taught += len(np.unique(rows[learned & (places >= 2)]))
        first += len(lengths)
    untaught = f"{len(dataset) - num_taught} of {len(dataset)} rows of the {name} data have nothing to learn"
    if num_taught == 0:
        raise ValueError(f"{untaught}: no more than two tokens, or only labels of -100 after them. Check the labels.")
    if num_taught < len(dataset):
        logger.warning(f"{untaught}, and stay, because `skip_prepare_dataset=True` takes the data as it is.")


def report_long_rows(
    dataset: Dataset | IterableDataset, max_length: int | None, fate: str, name: str
) -> Dataset | IterableDataset:
    """
    Logs a warning if tokenized rows are longer than `max_length`: how many, and what happens to their tokens (their `fate`).
    Without a `max_length` it warns of rows that take very long.

    The rows of a stream are not known in advance. The stream that is returned warns at the first long row, the tenth, the hundredth,
    and so on.
    """
    if max_length is None and isinstance(dataset, Dataset):
        longest = row_lengths(dataset).max()
        if longest > VERY_LONG:
            logger.warning(
                f"The longest row of the {name} data has {longest} tokens, and `max_length=None` keeps it whole. Attention over it takes "
                f"{(longest / 2048) ** 2:,.0f} times as long as over 2,048 tokens, in the target and in each drafting step, which "
                "may be hours. Pass `max_length`. With `packing=True` and `packing_strategy='bfd_split'` no token is lost."
            )
    if max_length is None:
        return dataset
    if isinstance(dataset, IterableDataset):
        message = f"longer than `max_length={max_length}`. The tokens beyond it are {fate}."
        return dataset.filter(LongRows(max_length, name, message, are_kept=True), input_columns="input_ids")
    lengths = row_lengths(dataset)
    too_long = lengths > max_length
    if too_long.any():
        logger.warning(
            f"{too_long.sum()} of {len(lengths)} rows of the {name} data are longer than `max_length={max_length}`: "
            f"{(lengths - max_length)[too_long].sum()} of {lengths.sum()} tokens are beyond it and are {fate}."
        )
    return dataset


def drop_cut_images(
    dataset: Dataset | IterableDataset, max_length: int | None, name: str
) -> Dataset | IterableDataset:
    """
    Drops rows that `max_length` would cut before the end of their last image, and logs a warning with their number. Raises
    `ValueError` if no row is left.
    """
    if max_length is None or "image_end" not in get_dataset_column_names(dataset):
        return dataset
    if isinstance(dataset, IterableDataset):
        message = f"dropped: `max_length={max_length}` would cut their images."
        return dataset.filter(LongRows(max_length, name, message, are_kept=False), input_columns="image_end")
    ends = np.asarray(dataset["image_end"])
    if (are_whole := ends <= max_length).all():
        return dataset
    kept = dataset.select(np.flatnonzero(are_whole))
    why = f"`max_length={max_length}` would cut their images, which end at up to {ends.max()} tokens"
    report_dropped(dataset, kept, name, why, "Raise `max_length`, or pass smaller images.")
    return kept


def row_lengths(dataset: Dataset) -> np.ndarray:
    """Returns the number of tokens of each row."""
    tables = dataset.select_columns("input_ids").with_format("arrow").iter(batch_size=1000)
    return np.concatenate([pc.list_value_length(table["input_ids"]).to_numpy() for table in tables])


def report_dropped(
    dataset: Dataset | IterableDataset,
    kept: Dataset | IterableDataset,
    name: str,
    why: str,
    advice: str = "Raise `max_length`.",
) -> None:
    """Warns of rows that were dropped, or raises `ValueError` if all were. Those of a stream are not known."""
    if not isinstance(dataset, Dataset) or len(kept) == len(dataset):
        return
    message = f"{len(dataset) - len(kept)} of {len(dataset)} rows of the {name} data are dropped: {why}. {advice}"
    if len(kept) == 0:
        raise ValueError(message)
    logger.warning(message)


class LongRows:
    """
    Counts the rows of a stream that are longer than `max_length`, and warns at the first one, the tenth, the hundredth, and
    so on. As a filter it drops them, or keeps all rows.
    """

    def __init__(self, max_length: int, name: str, message: str, are_kept: bool):
        self.max_length, self.name, self.message, self.are_kept, self.count = max_length, name, message, are_kept, 0

    def __call__(self, tokens: list[int] | int) -> bool:
        length = tokens if isinstance(tokens, int) else len(tokens)
        if length <= self.max_length:
            return True
        self.count += 1
        if str(self.count).strip("0") == "1":
            logger.warning(f"{self.count} rows of the {self.name} data so far are {self.message}")
        return self.are_kept

"""Encoding the rows of a data set, and what is done with encoded rows before they are trained on."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets
from trl.data_utils import get_dataset_column_names
from trl.trainer.utils import global_then_local_main_first

from .checks import row_lengths
from .encoding import RowEncoder
from .images import ImageReader, storable
from .prompts import documents_of_row
from .rows import IMAGES, summary
from .values import RowError, UnusableRow


logger = logging.getLogger(__name__)

# At most this share of the rows may have assistant turns that cannot be found. Another such share may be unusable: they have no answer,
# or the chat template cannot write them. These are not learned. Above it training is refused. The same holds for all rows of a stream
# that cannot be learned from.
MAX_LOST_SHARE = 0.05


def encode_rows(
    dataset: Dataset | IterableDataset, encoder: RowEncoder, name: str, num_proc: int | None = None
) -> Dataset | IterableDataset:
    """
    Encodes a data set. The rows of a stream are encoded when they are read. Those that cannot be learned from are left out,
    with a warning.

    Args:
        dataset (`Dataset` or `IterableDataset`): The data.
        encoder ([`RowEncoder`]): Encodes its rows.
        name (`str`): `"train"` or `"eval"`, for messages.
        num_proc (`int`, *optional*): Number of processes that encode a `Dataset`.

    Returns:
        The data set with `input_ids` and `labels`, `seq_lengths` if it had them, and `image_data`, `image_text` and
        `image_end` if it has images. Rows with nothing to learn are dropped, with a warning.

    Raises:
        ValueError: if rows are wrong (the message names them), more than 5% of the rows have no answer to learn, are refused by the
            chat template or have assistant turns that cannot be found, or there is nothing to learn. Of a stream, if the first row or
            more than 5% of the rows cannot be learned from.
    """
    columns = get_dataset_column_names(dataset)
    image_column = next((column for column in IMAGES if column in columns), None)
    if all(column in columns for column in IMAGES):
        raise ValueError(f"The {name} data has columns 'image' and 'images'. Remove one.")
    if isinstance(dataset, IterableDataset):
        encoded = dataset.map(EncodedStream(encoder, name), with_indices=True, remove_columns=columns)
        return encoded.filter(bool, input_columns="input_ids")
    lists = ["input_ids", "labels"] + ["seq_lengths"] * ("seq_lengths" in columns)
    features: dict[str, Any] = {column: List(Value("int64")) for column in lists}
    features |= {
        "lost": Value("int32"),
        "drops_reasoning": Value("bool"),
        "is_unpadded": Value("bool"),
        "teaches": Value("bool"),
        "problem": Value("string"),
        "is_unusable": Value("bool"),
    }
    if isinstance(encoder.images, ImageReader):
        features |= {"image_text": Value("string"), "image_end": Value("int32")}
        features |= {} if image_column else {"image_data": List(Value("string"))}
    with global_then_local_main_first():  # the other processes read their cache
        encoded = dataset.map(
            encode_or_explain,
            fn_kwargs={"encoder": encoder, "columns": list(features)},
            remove_columns=[column for column in columns if column not in features],
            features=Features(features),
            num_proc=num_proc,
            desc=f"Tokenizing {name} dataset",
        )
    problems = [(number, problem) for number, problem in enumerate(encoded["problem"]) if problem]
    num_unusable = sum(encoded["is_unusable"])
    if len(problems) > num_unusable or num_unusable > MAX_LOST_SHARE * len(encoded):
        delete_cache(encoded)
        tolerated = f" Up to {MAX_LOST_SHARE:.0%} of such rows are dropped." if len(problems) == num_unusable else ""
        raise ValueError(
            f"{len(problems)} of {len(encoded)} rows of the {name} data cannot be learned from. {summary(problems)} Fix or remove "
            f"them.{tolerated}"
        )
    for column, report in REPORTS.items():
        if rows := [number for number, value in enumerate(encoded[column]) if value]:
            report(rows, len(encoded), name)
    taught = [number for number, is_taught in enumerate(encoded["teaches"]) if is_taught]
    encoded = encoded.remove_columns([*REPORTS, "teaches", "problem", "is_unusable"])
    if not any(encoded["image_text"] if "image_text" in encoded.column_names else []):
        encoded = encoded.remove_columns([column for column in encoded.column_names if column.startswith("image_")])
    elif image_column:  # added now, because `map` would store the images again
        images = dataset.select_columns(image_column).rename_column(image_column, "image_data")
        encoded = concatenate_datasets([encoded, images], axis=1)
    return drop_untaught(encoded, taught, name, problems)


def delete_cache(encoded: Dataset) -> None:
    """Deletes rows that `datasets` has cached. A missing image may be there in the next run, and the cache would not notice."""
    for file in encoded.cache_files:
        with suppress(OSError):  # another process has deleted it
            Path(file["filename"]).unlink()


def report_lost(rows: Sequence[int], num_rows: int, name: str) -> None:
    """
    Warns that assistant turns were not found in these of `num_rows` rows. Raises `ValueError` if they are more than 5% of them.
    """
    message = (
        f"In {len(rows)} of {num_rows} rows of the {name} data (the first are {list(rows[:3])}) assistant turns cannot be found. The "
        "chat template has no generation markers, and renders a turn differently when the conversation goes on or the "
        "target is asked for it (for example, without the reasoning of earlier turns)."
    )
    if len(rows) > MAX_LOST_SHARE * num_rows:
        raise ValueError(
            f"{message} Pass a template as `chat_template_path` that has `{{% generation %}}` and `{{% endgeneration %}}` around what "
            "the assistant says. Or use data with one turn a row, as the target writes it (recipes/regenerate.py), or learn from "
            "all tokens (`assistant_only_loss=False`)."
        )
    logger.warning(f"{message} These turns are not learned.")


def report_cut(rows: Sequence[int], num_rows: int, name: str) -> None:
    """Warns that the template leaves out the reasoning of earlier turns in these of `num_rows` rows."""
    logger.warning(
        f"In {len(rows)} of {num_rows} rows of the {name} data (the first are {list(rows[:3])}) the chat template leaves out what earlier "
        "turns of the assistant have beside their answers, such as reasoning, so the draft does not learn that. To learn it, make one row "
        "for each turn of the assistant, and let the row end with that turn."
    )


def report_unpadded(rows: Sequence[int], num_rows: int, name: str) -> None:
    """Warns that runs of EOS, or of another token that pads, were removed from these of `num_rows` rows."""
    logger.warning(
        f"{len(rows)} of {num_rows} rows of the {name} data (the first are {list(rows[:3])}) have no `attention_mask` and begin or end with "
        "a run of the tokenizer's padding token, such as EOS. It is removed as padding, except for one EOS at the end or BOS at the "
        "beginning. If it is text, add an `attention_mask` of ones."
    )


# What is reported of encoded rows, by the columns that say it.
REPORTS = {"lost": report_lost, "drops_reasoning": report_cut, "is_unpadded": report_unpadded}


def read_whole(stream: IterableDataset) -> Dataset:
    """Returns the rows of an encoded stream, in memory."""
    rows = list(stream)
    for row in rows:
        if "image_data" in row:
            row["image_data"] = list(map(storable, row["image_data"]))
    return Dataset.from_list(rows)


def drop_untaught(encoded: Dataset, taught: list[int], name: str, problems: Sequence[tuple[int, str]] = ()) -> Dataset:
    """
    Returns the rows with something to learn. Warns of the others, some of which are unusable (`problems`). Raises `ValueError` if
    there is no such row.
    """
    if not taught:
        raise ValueError(
            f"{len(encoded)} of {len(encoded)} rows of the {name} data have nothing to learn: no more than two tokens, or only "
            "labels of -100 after them."
        )
    if len(taught) == len(encoded):
        return encoded
    first = sorted(set(range(len(encoded))) - set(taught))[:3]
    what = "cannot be learned from" if problems else "have nothing to learn"
    logger.warning(
        f"{len(encoded) - len(taught)} of {len(encoded)} rows of the {name} data {what} and are dropped (the first are {first})."
        f"{' ' if problems else ''}{summary(problems)}"
    )
    return encoded.select(taught)


def encode_or_explain(row: dict[str, Any], encoder: RowEncoder, columns: list[str]) -> dict[str, Any]:
    """Returns an encoded row, or an empty one with a `problem` that says what is wrong."""
    empty: dict[str, Any] = {column: [] for column in columns}
    empty |= {**dict.fromkeys(REPORTS, False), "lost": 0, "teaches": False, "problem": "", "is_unusable": False}
    if "image_text" in columns:
        empty |= {"image_text": "", "image_end": 0}
    try:
        encoded = encoder(row)
        if "image_data" in columns:  # of messages that hold them, in a column of texts
            encoded["image_data"] = list(map(storable, encoded["image_data"]))
        encoded = {column: value for column, value in encoded.items() if column in columns}
        if "seq_lengths" in columns:  # of other rows
            encoded.setdefault("seq_lengths", [len(encoded["input_ids"])])
        return empty | encoded | {"teaches": any(map(teaches, documents_of_row(encoded)))}
    except RowError as error:
        return empty | {"problem": str(error), "is_unusable": isinstance(error, UnusableRow)}


def teaches(document: dict[str, list[int]]) -> bool:
    """Whether a token after the first two is learned. A draft reads the first two and predicts the third."""
    return any(label != -100 for label in document["labels"][2:])


def split_documents(dataset: Dataset | IterableDataset, name: str) -> Dataset | IterableDataset:
    """
    Returns encoded rows of one document each, for batches that cannot keep packed ones (`seq_lengths`) apart, or to pack them
    anew. Drops documents with nothing to learn.
    """
    kwargs = {"batched": True, "remove_columns": get_dataset_column_names(dataset)}
    if isinstance(dataset, IterableDataset):
        return dataset.map(documents_of_rows, **kwargs)
    with global_then_local_main_first():  # the other processes read their cache
        documents = dataset.map(documents_of_rows, **kwargs, desc=f"Splitting {name} dataset")
    logger.info(
        f"{len(dataset)} packed rows of the {name} data have {len(documents)} documents, which are taken apart."
    )
    return documents


def documents_of_rows(rows: dict[str, list]) -> dict[str, list]:
    """Returns the documents that are packed in a batch of encoded rows, without those that have nothing to learn."""
    packed = (dict(zip(rows, values)) for values in zip(*rows.values()))
    documents = [document for row in packed for document in documents_of_row(row)]
    taught = list(filter(teaches, documents))
    return {column: [document[column] for document in taught] for column in ("input_ids", "labels")}


def taught_pieces(dataset: Dataset | IterableDataset, max_length: int, name: str) -> Dataset | IterableDataset:
    """
    Returns the pieces of at most `max_length` tokens of encoded rows, without those that have nothing to learn, such as parts of a long
    prompt. They are packed as documents of their own, so no other piece reads them.
    """
    kwargs = {
        "batched": True,
        "fn_kwargs": {"max_length": max_length},
        "remove_columns": get_dataset_column_names(dataset),
    }
    if isinstance(dataset, IterableDataset):
        return dataset.map(pieces_of_rows, **kwargs)
    with global_then_local_main_first():  # the other processes read their cache
        pieces = dataset.map(pieces_of_rows, **kwargs, desc=f"Splitting {name} dataset")
    num_pieces = int((-(-row_lengths(dataset) // max_length)).sum())
    message = (
        f"{num_pieces - len(pieces)} of {num_pieces} pieces of the {name} data have nothing to learn and are dropped"
    )
    if len(pieces) == 0:
        raise ValueError(f"{message}. Raise `max_length={max_length}`.")
    if len(pieces) < num_pieces:
        logger.warning(f"{message} (`packing_strategy='bfd_split'` splits rows at `max_length={max_length}`).")
    return pieces


def pieces_of_rows(rows: dict[str, list], max_length: int) -> dict[str, list]:
    """Returns the pieces of a batch of encoded rows that have something to learn."""
    ends = [[*range(max_length, len(tokens), max_length), len(tokens)] for tokens in rows["input_ids"]]
    lengths = [[end - (place * max_length) for place, end in enumerate(each)] for each in ends]
    return documents_of_rows({**rows, "seq_lengths": lengths})


def taught_within(dataset: Dataset | IterableDataset, max_length: int) -> Dataset | IterableDataset:
    """Returns the encoded rows with something to learn within their first `max_length` tokens."""
    kwargs = {"fn_kwargs": {"max_length": max_length}, "input_columns": "labels"}
    if isinstance(dataset, IterableDataset):
        return dataset.filter(is_taught_within, **kwargs)
    with global_then_local_main_first():  # the other processes read their cache
        return dataset.filter(is_taught_within, **kwargs, desc="Dropping rows with nothing to learn")


def is_taught_within(labels: list[int], max_length: int) -> bool:
    """Whether a row has something to learn within its first `max_length` tokens."""
    return teaches({"labels": labels[:max_length]})


class EncodedStream:
    """
    Encodes the rows of a stream. Counts, in each pass, those that cannot be learned from, which it leaves empty, and those
    that are reported.
    """

    def __init__(self, encoder: RowEncoder, name: str):
        self.encoder, self.name, self.has_encoded = encoder, name, False
        self.broken: list[int] = []
        self.reported: dict[str, list[int]] = {}

    def __call__(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        if index == 0:
            self.broken, self.reported = [], {}
        try:
            encoded = self.encoder(row)
        except RowError as error:
            self.report_broken(index, error)
            return {"input_ids": [], "labels": []}
        self.has_encoded = True
        for column, report in REPORTS.items():
            if encoded.pop(column):
                rows = self.reported.setdefault(column, [])
                rows.append(index)
                if len(rows).bit_count() == 1:
                    report(rows, max(index + 1, 100) if column == "lost" else index + 1, self.name)
        return encoded

    def report_broken(self, index: int, error: RowError) -> None:
        """
        Counts a row that cannot be learned from, and warns whenever their number is a power of two. Raises `ValueError` if
        these are more than 5% of the rows, or of 100, or no row before could be learned from.
        """
        self.broken.append(index)
        count, message = len(self.broken), f"Row {index} of the {self.name} data cannot be learned from: {error}."
        if not self.has_encoded:
            raise ValueError(f"{message} Fix or remove it.") from error
        if count > MAX_LOST_SHARE * max(index + 1, 100):
            numbers = f"{count} of {index + 1} rows so far are like this (the first are {self.broken[:3]})"
            raise ValueError(f"{message} {numbers}. Fix or remove them.") from error
        if count.bit_count() == 1:
            logger.warning(f"{message} It is left out, with {count - 1} of the {index} rows before it.")

"""What is wrong with training data, said before or while it is prepared."""

import logging
from collections.abc import Iterator

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from .rows import kind_of


logger = logging.getLogger(__name__)

VERY_LONG = 16_384  # tokens in a row that nothing cuts


def plain_rows(dataset: Dataset | IterableDataset, name: str) -> Dataset | IterableDataset:
    """
    A data set whose rows are Python objects, in whatever format (NumPy, torch, ...) it gives them.

    Args:
        dataset (`Dataset` or `IterableDataset`): The data.
        name (`str`): `"train"` or `"eval"`, for messages.

    Raises:
        ValueError: if it computes its rows anew each time.
    """
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise ValueError(
            f"The {name} data computes its rows anew each time they are read (`with_transform`). Compute them once, by "
            "`dataset.map`."
        )
    return dataset.with_format(None)


def kind_of_data(dataset: Dataset | IterableDataset, text_field: str, name: str) -> str:
    """
    What a data set is; see [`~hf_eagle3.data.kind_of`].

    Args:
        dataset (`Dataset` or `IterableDataset`): The data.
        text_field (`str`): The column of texts.
        name (`str`): `"train"` or `"eval"`, for messages.

    Raises:
        ValueError: if the data has no rows, or no column that can be trained on.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError(f"The {name} data has no rows.")
    try:
        return kind_of(first, text_field)
    except ValueError as error:
        raise ValueError(f"The {name} data {error}") from None


def check_lengths(dataset: Dataset | IterableDataset, name: str) -> None:
    """
    Checks that a tokenized row is long enough; those of a stream are not known.

    Args:
        dataset (`Dataset` or `IterableDataset`): With `input_ids`.
        name (`str`): `"train"` or `"eval"`, for messages.

    Raises:
        ValueError: if no tokenized row has three tokens: one whose state is read, the next, and what these predict.
    """
    if isinstance(dataset, Dataset) and max((int(lengths.max()) for lengths in row_lengths(dataset)), default=0) < 3:
        raise ValueError(f"No row of the {name} data has more than two tokens: there is nothing to learn.")


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """
    Checks that there is a chat template for data that are conversations.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Should have one.

    Raises:
        ValueError: if it has none.
    """
    if tokenizer.chat_template is None:
        name = tokenizer.name_or_path or "the tokenizer"
        raise ValueError(
            f"The data are conversations, and {name} has no chat template: pass one as `chat_template_path`, a Jinja file."
        )


def check_positions(dataset: Dataset | IterableDataset, num_positions: int, max_length: int | None, name: str) -> None:
    """
    Checks that no row has more tokens than a target has positions, where it looks these up in a table.

    Args:
        dataset (`Dataset` or `IterableDataset`): With `input_ids`.
        num_positions (`int`): The size of that table.
        max_length (`int`, *optional*): Rows are cut, split or dropped beyond it.
        name (`str`): `"train"` or `"eval"`, for messages.

    Raises:
        ValueError: if one has more; of a stream, if one may have more.
    """
    if max_length is not None and max_length <= num_positions:
        return
    too_long, longest = 0, max_length
    if isinstance(dataset, Dataset):
        lengths = np.concatenate(list(row_lengths(dataset)))
        too_long, longest = int((lengths > num_positions).sum()), int(lengths.max())
        if not too_long:
            return
    of_rows = f"{too_long} of {len(dataset)} rows" if isinstance(dataset, Dataset) else "rows"
    raise ValueError(
        f"The target has a table of {num_positions} positions, but {of_rows} of the {name} data may be longer (`max_length={max_length}`, "
        f"longest row: {longest} tokens). Pass `max_length={num_positions}`, or less."
    )


def report_long_rows(
    dataset: Dataset | IterableDataset, max_length: int | None, fate: str, name: str
) -> Dataset | IterableDataset:
    """
    Logs a warning of how many tokenized rows are longer than `max_length`, and what becomes of them; without one, of
    rows that take very long. For a stream, whose rows are not known in advance, at the first row that is longer, the
    second, the fourth, and so on.

    Args:
        dataset (`Dataset` or `IterableDataset`): With `input_ids`.
        max_length (`int`, *optional*): Rows are cut, split or dropped beyond it; `None` keeps them whole.
        fate (`str`): What becomes of the tokens beyond it, for the message.
        name (`str`): `"train"` or `"eval"`, for messages.

    Returns:
        The data set, unchanged, or the stream with the warning built in.
    """
    if max_length is None and isinstance(dataset, Dataset):
        longest = max(int(lengths.max()) for lengths in row_lengths(dataset))
        if longest > VERY_LONG:
            logger.warning(
                f"The longest row of the {name} data has {longest} tokens, and `max_length=None` cuts none: attention over it takes "
                f"{(longest / 2048) ** 2:,.0f} times as long as over 2,048 tokens, in the target and in each drafting step, which "
                "may be hours. Pass `max_length`; with `packing=True` and `packing_strategy='bfd_split'` nothing is lost."
            )
    if max_length is None:
        return dataset
    if isinstance(dataset, IterableDataset):
        return dataset.map(LongRowWarning(max_length, fate, name))
    lengths = np.concatenate(list(row_lengths(dataset)))
    too_long = lengths > max_length
    if too_long.any():
        logger.warning(
            f"{too_long.sum()} of {len(lengths)} rows of the {name} data are longer than `max_length={max_length}`: "
            f"{(lengths - max_length)[too_long].sum()} of {lengths.sum()} tokens are beyond it, and are {fate}."
        )
    return dataset


def row_lengths(dataset: Dataset) -> Iterator[np.ndarray]:
    for table in dataset.select_columns("input_ids").with_format("arrow").iter(batch_size=1000):
        yield pc.list_value_length(table["input_ids"]).to_numpy()


class LongRowWarning:
    def __init__(self, max_length: int, fate: str, name: str):
        self.max_length, self.fate, self.name, self.count = max_length, fate, name, 0

    def __call__(self, row):
        if len(row["input_ids"]) > self.max_length:
            self.count += 1
            if self.count.bit_count() == 1:
                logger.warning(
                    f"{self.count} rows of the {self.name} data so far are longer than `max_length={self.max_length}`; the "
                    f"tokens beyond it are {self.fate}."
                )
        return row

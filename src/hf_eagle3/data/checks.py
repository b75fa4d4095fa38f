"""What is wrong with training data, said before or while it is prepared."""

import logging
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig
from trl.chat_template_utils import get_training_chat_template, has_generation_markers


logger = logging.getLogger(__name__)

VERY_LONG = 16_384  # tokens in a row that nothing cuts
COLUMNS = ("messages", "prompt", "input_ids")  # besides `dataset_text_field`


def check_columns(dataset: Dataset | IterableDataset, args: SFTConfig, name: str) -> None:
    """
    Checks that there is something to train on.

    Args:
        dataset (`Dataset` or `IterableDataset`): The data.
        args (`SFTConfig`): Names the column of texts.
        name (`str`): `"train"` or `"eval"`, for messages.

    Raises:
        ValueError: if the data has no rows, or no column that can be trained on.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError(f"The {name} data has no rows.")
    if "prompt" in first and not {"completion", "messages", "input_ids"} & set(first):
        raise ValueError(
            f"The {name} data has prompts, but no 'completion' to learn. Its columns are {sorted(first)}. Remove 'prompt' to learn "
            "one of the others."
        )
    text = first.get(args.dataset_text_field)
    if not set(COLUMNS) & set(first) and not isinstance(text, str | None):
        raise ValueError(
            f"The {name} data's column {args.dataset_text_field!r} must have texts, but the first row has {text!r}."
        )
    if not {*COLUMNS, args.dataset_text_field} & set(first):
        raise ValueError(
            f"The {name} data has columns {sorted(first)}, but needs one of {sorted({*COLUMNS, args.dataset_text_field})}."
        )


def as_messages(dataset: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """
    Conversations as `messages` of `role` and `content`: also those that come as `conversations`, with `from` (`human`, `gpt`)
    and `value` (ShareGPT), and those with their first prompt in a column of its own (ultrachat_200k), which TRL would
    take for half of a pair.

    Args:
        dataset (`Dataset` or `IterableDataset`): The data; of other kinds it stays as it is.
    """
    first = next(iter(dataset), {})
    column = next((name for name in ("messages", "conversations") if isinstance(first.get(name), list)), None)
    if column == "conversations" or (column and first[column] and "from" in first[column][0]):
        dataset = dataset.map(_to_messages, fn_kwargs={"column": column}, remove_columns=column)
    if column and "prompt" in first and "completion" not in first:
        return dataset.remove_columns("prompt")
    return dataset


ROLES = {"human": "user", "gpt": "assistant"}


def _to_messages(row: dict, column: str) -> dict:
    def message(turn):
        others = {name: value for name, value in turn.items() if name not in ("from", "value")}  # such as tool calls
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        return {**others, "role": ROLES.get(role, role), "content": content}

    return {"messages": None if row[column] is None else [message(turn) for turn in row[column]]}


def has_messages(dataset: Dataset | IterableDataset) -> bool:
    """
    Whether the first row is a conversation.

    Args:
        dataset (`Dataset` or `IterableDataset`): The data.
    """
    first = next(iter(dataset), {})
    return any(isinstance(first.get(name), list) for name in ("messages", "prompt"))


def check_rows(dataset: Dataset | IterableDataset, args: SFTConfig, name: str) -> Dataset | IterableDataset:
    """
    Checks that each row has something to train on; a stream's rows when they come.

    Args:
        dataset (`Dataset` or `IterableDataset`): The data.
        args (`SFTConfig`): Names the column of texts.
        name (`str`): `"train"` or `"eval"`, for messages.

    Returns:
        The data set, unchanged, or the stream with the check built in.

    Raises:
        ValueError: if a text or a conversation is `None`, or a conversation has no messages.
    """
    first = next(iter(dataset))
    columns = next(
        columns
        for columns in (
            ["input_ids"],
            ["messages"],
            ["prompt", "completion"],
            [args.dataset_text_field],
        )
        if columns[0] in first
    )
    if isinstance(dataset, IterableDataset):
        return dataset.map(RowCheck(columns, name), with_indices=True)
    for column in columns:
        is_empty = []
        for table in dataset.select_columns(column).with_format("arrow").iter(batch_size=1000):
            values = table[column]
            no_value = pc.is_null(values).to_numpy()
            if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
                no_value |= pc.fill_null(pc.list_value_length(values), 0).to_numpy() == 0
            is_empty.append(no_value)
        if (rows := np.concatenate(is_empty).nonzero()[0]).size:
            raise ValueError(
                f"{len(rows)} of {len(dataset)} rows of the {name} data have nothing as {column!r}, the first of them row "
                f"{rows[0]}. Remove them."
            )
    return dataset


class RowCheck:
    def __init__(self, columns: list[str], name: str):
        self.columns, self.name = columns, name

    def __call__(self, row, index):
        for column in self.columns:
            if row[column] is None or (isinstance(row[column], list) and not row[column]):
                raise ValueError(f"Row {index} of the {self.name} data has nothing as {column!r}. Remove it.")
        return row


def check_tokens(dataset: Dataset | IterableDataset, vocab_size: int, name: str) -> Dataset | IterableDataset:
    """
    Checks that tokenized rows have tokens of the target; a stream's rows when they come.

    Args:
        dataset (`Dataset` or `IterableDataset`): With `input_ids`.
        vocab_size (`int`): The target's vocabulary size.
        name (`str`): `"train"` or `"eval"`, for messages.

    Returns:
        The data set, unchanged, or the stream with the check built in.

    Raises:
        ValueError: if there is an id that the target's vocabulary does not have.
    """
    check = TokenCheck(vocab_size, name)
    if isinstance(dataset, IterableDataset):
        return dataset.map(check)
    for table in dataset.select_columns("input_ids").with_format("arrow").iter(batch_size=1000):
        extremes = pc.min_max(pc.list_flatten(table["input_ids"])).as_py()
        check({"input_ids": [extremes["min"], extremes["max"]] if extremes["min"] is not None else []})
    return dataset


class TokenCheck:
    def __init__(self, vocab_size: int, name: str):
        self.vocab_size, self.name = vocab_size, name

    def __call__(self, row):
        for token in (min(row["input_ids"], default=0), max(row["input_ids"], default=0)):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"The {self.name} data has token {token}, but the target's vocabulary ends at {self.vocab_size - 1}: it was "
                    "tokenized for another target."
                )
        return row


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


def check_chat_template(tokenizer: PreTrainedTokenizerBase, assistant_only_loss: bool, is_chat: bool) -> None:
    """
    Checks that a chat template does what the data and the loss need.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Has the template.
        assistant_only_loss (`bool`): Whether only what the assistant says is to be learned.
        is_chat (`bool`): Whether the data are conversations.

    Raises:
        ValueError: if there are conversations and no chat template, or if only what the assistant says is to be
            learned, and the template does not say, and TRL does not know, what that is.
    """
    name = tokenizer.name_or_path or "the tokenizer"
    if is_chat and tokenizer.chat_template is None and not assistant_only_loss:
        raise ValueError(
            f"The data are conversations, and {name} has no chat template: pass one as `chat_template_path`."
        )
    if not assistant_only_loss:
        return
    remedy = (
        "Pass a template as `chat_template_path` in which what the assistant says stands between `{% generation %}` and "
        "`{% endgeneration %}`, or set `assistant_only_loss=False` to learn from the user's tokens, too."
    )
    if tokenizer.chat_template is None:
        raise ValueError(f"`assistant_only_loss=True` needs a chat template, and {name} has none. {remedy}")
    if not has_generation_markers(tokenizer.chat_template):
        try:
            get_training_chat_template(tokenizer)
        except ValueError:
            raise ValueError(
                f"`assistant_only_loss=True` needs a chat template with generation markers. That of {name} has none, and is "
                f"none of those that TRL has a marked version of. {remedy}"
            ) from None


def check_assistant_turns(dataset: Dataset, name: str) -> None:
    """
    Checks that the assistant says something in each conversation.

    Args:
        dataset (`Dataset`): With `messages`.
        name (`str`): `"train"` or `"eval"`, for messages.

    Raises:
        ValueError: if conversations have no assistant turn.
    """
    missing, roles = [], set()
    for index, messages in enumerate(dataset["messages"]):
        seen = {message["role"] for message in messages}
        roles |= seen
        if "assistant" not in seen:
            missing.append(index)
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(dataset)} rows of the {name} data have no assistant turn, the first of them row "
            f"{missing[0]} (roles in the data: {sorted(roles)}). `assistant_only_loss=True` learns nothing from such rows: "
            "remove them, or rename the role."
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

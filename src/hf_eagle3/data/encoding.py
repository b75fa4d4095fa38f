"""Turning rows into tokens and labels."""

import logging
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.data_utils import common_prefix_length, get_dataset_column_names
from trl.trainer.utils import global_then_local_main_first

from ..tokenizer import PromptEncoder
from .images import Expansion, ImageReader, storable
from .prompts import documents_of_row
from .rows import IMAGES, WEIGHTS, NothingToLearn, Row, RowError, is_learned, read_images, read_row, summary


logger = logging.getLogger(__name__)

Span = tuple[int, int]  # where a part of a text or of its tokens begins and ends

# At most this share of the rows may have assistant turns that cannot be found, or no answer. These are not learned. Above it training
# is refused. The same holds for rows of a stream that cannot be learned from.
MAX_LOST_SHARE = 0.05


def has_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template marks the assistant's turns with `{% generation %}`."""
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    return template is not None and has_generation_markers(template)


def training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """
    Returns TRL's version of the tokenizer's chat template, which marks the assistant's turns. `None` if the template already
    has markers, or TRL knows no such version.
    """
    if has_markers(tokenizer):
        return None
    try:
        return get_training_chat_template(tokenizer)
    except Exception:  # TRL knows no marked version, or this template cannot render its probes
        return None


class RowEncoder(PromptEncoder):
    """
    Turns rows into `input_ids` and `labels`.

    A text begins with the tokenizer's special tokens and ends with EOS, each once. A conversation has the special tokens
    that the chat template writes.

    The template's `{% generation %}` markers show what the assistant says. A template without markers renders the
    conversation twice for each of the assistant's turns: up to where the turn begins, and up to its end. The turn is the
    difference. This works only if the tokens of both are a prefix of the whole conversation's.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        kind (`str`): The kind of the rows. See [`~hf_eagle3.data.kind_of`].
        vocab_size (`int`, *optional*): The target's vocabulary size. Tokens beyond it are refused.
        assistant_only_loss (`bool`, *optional*, defaults to `False`): Whether to learn only what the assistant says.
        completion_only_loss (`bool`, *optional*, defaults to `True`):
            Whether to learn only the completions of rows with prompts and completions.
        formatting_func (`Callable`, *optional*): Makes a text from a row.
        images ([`ImageReader`] or `str`, *optional*): Reads images, or says why rows with images are refused.
        features (`Features`, *optional*): The types of the data set's columns; see [`~hf_eagle3.data.read_row`].
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kind: str,
        vocab_size: int | None = None,
        assistant_only_loss: bool = False,
        completion_only_loss: bool | None = None,
        formatting_func: Callable[[dict], str] | None = None,
        images: ImageReader | str = "and there is no processor to read them",
        features: Features | None = None,
    ):
        template = training_template(tokenizer) if assistant_only_loss else None
        super().__init__(tokenizer, template)
        self.kind, self.vocab_size, self.formatting_func = kind, vocab_size, formatting_func
        self.assistant_only_loss, self.completion_only_loss = assistant_only_loss, completion_only_loss is not False
        self.is_marked = template is not None or has_markers(tokenizer)
        self.images, self.features = images, features

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """
        Reads and encodes a row.

        Args:
            row (`dict`): A row of the data set.

        Returns:
            `dict`: `input_ids`, `labels`, and `seq_lengths` if the row has them. `lost` is the number of assistant turns that
            could not be found. If there is an [`ImageReader`], also `image_data`, the images; `image_text`, the text that
            the processor reads with them, empty without images; and `image_end`, the number of tokens up to the end of the
            last image.

        Raises:
            RowError: if the row cannot be learned from.
        """
        content = self._read(row)
        encoded: dict[str, Any] = {"lost": 0}
        if content.tokens is not None:
            encoded |= content.tokens if "attention_mask" in row else self._without_padding(content.tokens)
        elif content.messages:
            encoded |= self.encode_chat(content)
        else:
            encoded |= self.encode_text(content.text or "", content.completion, content.images)
        if isinstance(self.images, ImageReader):
            encoded = {"image_text": "", "image_end": 0, "image_data": content.images} | encoded
        tokens = encoded["input_ids"]
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if self.vocab_size is not None and not 0 <= token < self.vocab_size:
                raise RowError(
                    f"it has token {token}, but the target's vocabulary ends at {self.vocab_size - 1}. Tokenize it for this target"
                )
        return encoded

    def _read(self, row: dict[str, Any]) -> Row:
        """Reads a row, or the text that `formatting_func` makes of it. Refuses images that cannot be read."""
        if self.formatting_func is None:
            content = read_row(row, self.kind, self.features)
        else:
            text = self.formatting_func(row)
            if not isinstance(text, str):
                raise RowError(
                    f"`formatting_func` returned {type(text).__name__}, but gets one row and must return its text"
                )
            content = Row(text=text, images=read_images(row))
        if content.images and isinstance(self.images, str):
            raise RowError(f"it has images, {self.images}")
        if content.images and any(name in row for name in IMAGES) and not read_images(row):
            raise RowError("it has images in its messages, but the data has a column for images. Use one of them")
        return content

    def _without_padding(self, tokens: dict[str, list[int]]) -> dict[str, list[int]]:
        """Removes padding tokens at both ends of a row without an attention mask, if they cannot be anything else."""
        padding, text = self.tokenizer.pad_token_id, tokens["input_ids"]
        others = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, self.tokenizer.unk_token_id)
        if padding is None or padding in others or "seq_lengths" in tokens:
            return tokens
        places = [place for place, token in enumerate(text) if token != padding] or [0]
        kept = slice(places[0], places[-1] + 1)
        return {name: values[kept] for name, values in tokens.items()}

    def encode_text(self, prompt: str, completion: str | None = None, images: Sequence[Any] = ()) -> dict[str, Any]:
        """Encodes a text, or a prompt and its completion."""
        text, eos = prompt + (completion or ""), self.tokenizer.eos_token
        # The processor reads the special tokens as a part of the text.
        before = "".join(self.tokenizer.convert_ids_to_tokens(self.text(text)[: len(self.special_tokens)]))
        after = "" if eos is None or text.rstrip().endswith(eos) else eos
        whole = ("" if text.startswith(before) else before) + text + after
        expansion = self._expansion(whole, images)
        tokens = self.text(expansion.of(text))
        if after:
            tokens = [*tokens, self.tokenizer.eos_token_id]
        num_given = 0
        if completion is not None and self.completion_only_loss:
            num_given = common_prefix_length(self.text(expansion.of(prompt)), tokens)
        encoded = {"input_ids": tokens, "labels": [-100] * num_given + tokens[num_given:]}
        return self._with_images(encoded, whole, expansion)

    def _expansion(self, text: str, images: Sequence[Any]) -> Expansion:
        return self.images.expand(text, list(images)) if isinstance(self.images, ImageReader) else Expansion()

    def _with_images(self, encoded: dict[str, Any], text: str, expansion: Expansion) -> dict[str, Any]:
        """
        Adds the columns from which a batch gets its images. Tokens that stand for images are not learned, because no target writes
        them.
        """
        if not expansion.replacements:
            return encoded
        if expansion.input_ids != encoded["input_ids"]:
            raise RowError("the processor has other tokens for it than the tokenizer")
        labels = [-100 if kind else label for label, kind in zip(encoded["labels"], expansion.kinds)]
        return encoded | {"labels": labels, "image_text": text, "image_end": expansion.end}

    def encode_chat(self, row: Row) -> dict[str, Any]:
        """Encodes a conversation, or a prompt and its completion that are messages."""
        rendered, spans = self._render(row)
        expansion = self._expansion(rendered, row.images)
        text = expansion.of(rendered)
        tokens = self.rendered_tokens(text)
        if self.assistant_only_loss:
            spans = [(len(expansion.of(rendered[:start])), len(expansion.of(rendered[:end]))) for start, end in spans]
            ranges, lost = self._learned_turns(row, text, tokens, spans, expansion)
        elif all(map(is_learned, row.messages[row.num_given or 0 :])):
            ranges, lost = [(0, len(tokens))], 0
        else:
            raise RowError(
                f"one of {WEIGHTS} is 0 or false, but all messages are learned. Pass `assistant_only_loss=True`, or remove the key"
            )
        num_given = 0
        if row.num_given is not None and self.completion_only_loss:
            num_given = common_prefix_length(self._prompt(row, row.num_given, expansion), tokens)
        labels = [-100] * len(tokens)
        for start, end in ranges:
            start = max(start, num_given)
            labels[start:end] = tokens[start:end]
        encoded = {"input_ids": tokens, "labels": labels, "lost": lost}
        return self._with_images(encoded, rendered, expansion)

    def _learned_turns(
        self, row: Row, text: str, tokens: list[int], spans: list[Span], expansion: Expansion
    ) -> tuple[list[Span], int]:
        """Returns the assistant's turns that are learned, as spans of tokens, and how many could not be found."""
        are_learned = [is_learned(message) for message in row.messages if message["role"] == "assistant"]
        if not are_learned:
            roles = sorted({message["role"] for message in row.messages})
            raise NothingToLearn(
                f"it has no message with the role 'assistant', only {roles}. With `assistant_only_loss=True` it has nothing to learn"
            )
        if self.is_marked and not all(are_learned):
            if len(spans) != len(are_learned):
                raise RowError(
                    f"the chat template marks {len(spans)} of its {len(are_learned)} assistant turns, so those with one of {WEIGHTS} of "
                    "0 cannot be left out. Remove the row or the key"
                )
            spans = list(compress(spans, are_learned))
        if not any(are_learned):
            return [], 0
        return self._marked(text, tokens, spans) if self.is_marked else self._turns(row, tokens, expansion)

    def _render(self, row: Row) -> tuple[str, list[Span]]:
        """Renders a conversation, and returns its text and the spans between markers."""
        try:
            if not (self.assistant_only_loss and self.is_marked):
                text = self.render(row.messages, **row.template_kwargs)
                self.check_written(row.messages, text, **row.template_kwargs)
                return text, []
            # `apply_chat_template` gives the spans only as a mask of tokens, and only for fast tokenizers.
            kwargs = {**self.tokenizer.special_tokens_map, **row.template_kwargs}
            tools = kwargs.pop("tools", None)
            texts, spans = render_jinja_template(
                conversations=[self.as_expected(row.messages)],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(self.chat_template, tools),
                return_assistant_tokens_mask=True,
                **kwargs,
            )
            self.check_written(row.messages, texts[0], **row.template_kwargs)
            return texts[0], spans[0]
        except Exception as error:
            raise RowError(f"the chat template refuses it: {error or type(error).__name__}") from error

    def _prompt(self, row: Row, num_messages: int, expansion: Expansion) -> list[int]:
        """Returns the tokens of the first messages, up to where the answer begins."""
        try:
            text = self.render(row.messages[:num_messages], add_generation_prompt=True, **row.template_kwargs)
            return self.rendered_tokens(expansion.of(text))
        except Exception as error:
            raise RowError(f"the chat template refuses its prompt: {error or type(error).__name__}") from error

    def _marked(self, text: str, tokens: list[int], spans: list[Span]) -> tuple[list[Span], int]:
        """Returns the ranges of tokens between markers, and how many could not be found."""
        if not spans:
            raise RowError("the chat template marks no assistant turn in it")
        if not self.tokenizer.is_fast:  # it has no offsets
            bounds = [[self._num_tokens(text[:place], tokens) for place in span] for span in spans]
            found = [(start, end) for start, end in bounds if start is not None and end is not None]
            return found, len(spans) - len(found)
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        ranges, place = [], 0
        for start, end in spans:
            inside = []
            while place < len(offsets) and offsets[place][0] < end:
                if offsets[place][1] > start:
                    inside.append(place)
                place += 1
            if inside:
                ranges.append((inside[0], inside[-1] + 1))
        return ranges, 0

    def unlearned_end(self, row: dict[str, Any]) -> str | None:
        """Returns the special token that ends the first of a row's learned turns and is not learned, or `None`."""
        try:
            encoded = self(row)
        except RowError:  # reported when all rows are encoded
            return None
        tokens, learned = encoded["input_ids"], [label != -100 for label in encoded["labels"]]
        ends = (place for place in range(1, len(tokens)) if learned[place - 1] and not learned[place])
        special = self.tokenizer.get_added_vocab().values()
        if (end := next(ends, None)) is None or tokens[end - 1] in special or tokens[end] not in special:
            return None
        return self.tokenizer.decode(tokens[end])

    def _num_tokens(self, beginning: str, tokens: list[int]) -> int | None:
        """Returns how many tokens of a text belong to its beginning, or `None` if the beginning alone has other tokens."""
        alone = self.rendered_tokens(beginning)
        num_tokens = common_prefix_length(alone, tokens)
        # White space at the end may be another token than before more text, and some templates end a text with EOS.
        rest = self.tokenizer.decode(alone[num_tokens:], skip_special_tokens=True) if num_tokens < len(alone) else ""
        return None if rest.strip() else num_tokens

    def _turns(self, row: Row, tokens: list[int], expansion: Expansion) -> tuple[list[Span], int]:
        """Returns the ranges of tokens of the assistant's turns, and how many turns could not be found."""
        ranges, lost = [], 0
        for number, message in enumerate(row.messages):
            answers = any(each["role"] != "system" for each in row.messages[:number])
            # A target is never asked for a greeting.
            if message["role"] != "assistant" or not answers or not is_learned(message):
                continue
            try:
                before = self.render(row.messages[:number], add_generation_prompt=True, **row.template_kwargs)
                after = self.render(row.messages[: number + 1], **row.template_kwargs)
                before, after = expansion.of(before), expansion.of(after)
            except Exception:
                lost += 1
                continue
            start, end = self.rendered_tokens(before), self._num_tokens(after, tokens)
            if end is None or end <= len(start) or tokens[: len(start)] != start:
                lost += 1
            else:
                ranges.append((len(start), end))
        if not ranges and not lost:
            raise NothingToLearn(
                "no assistant turn in it answers anyone. With `assistant_only_loss=True` it has nothing to learn"
            )
        return ranges, lost

    def report_lost(self, rows: Sequence[int], num_rows: int, name: str) -> None:
        """
        Warns that assistant turns were not found in some rows.

        Args:
            rows (sequence of `int`): The numbers of these rows.
            num_rows (`int`): How many rows there are in all.
            name (`str`): `"train"` or `"eval"`, for messages.

        Raises:
            ValueError: if these are more than 5% of all rows.
        """
        message = (
            f"In {len(rows)} of {num_rows} rows of the {name} data (the first are {list(rows[:3])}) assistant turns cannot be found. The "
            "chat template has no generation markers, and renders a turn differently when the conversation goes on or the "
            "target is asked for it (for example, without the thoughts of earlier turns)."
        )
        if len(rows) > MAX_LOST_SHARE * num_rows:
            raise ValueError(
                f"{message} Pass a template as `chat_template_path` that has `{{% generation %}}` and `{{% endgeneration %}}` around what "
                "the assistant says. Or use data with one turn a row, as the target writes it (recipes/regenerate.py), or learn from "
                "all tokens (`assistant_only_loss=False`)."
            )
        logger.warning(f"{message} These turns are not learned.")


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
        ValueError: if rows cannot be learned from (the message names them), more than 5% of the rows have no answer to learn or
            assistant turns that cannot be found, or there is nothing to learn. Of a stream, if the first row or more than 5% of
            the rows cannot be learned from.
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
        "teaches": Value("bool"),
        "problem": Value("string"),
        "has_no_answer": Value("bool"),
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
    num_without_answer = sum(encoded["has_no_answer"])
    if len(problems) > num_without_answer or num_without_answer > MAX_LOST_SHARE * len(encoded):
        tolerated = (
            f" Up to {MAX_LOST_SHARE:.0%} of such rows are dropped." if len(problems) == num_without_answer else ""
        )
        raise ValueError(
            f"{len(problems)} of {len(encoded)} rows of the {name} data cannot be learned from. {summary(problems)} Fix or remove "
            f"them.{tolerated}"
        )
    if lost := [number for number, num_lost in enumerate(encoded["lost"]) if num_lost]:
        encoder.report_lost(lost, len(encoded), name)
    taught = [number for number, is_taught in enumerate(encoded["teaches"]) if is_taught]
    encoded = encoded.remove_columns(["lost", "teaches", "problem", "has_no_answer"])
    if not any(encoded["image_text"] if "image_text" in encoded.column_names else []):
        encoded = encoded.remove_columns([column for column in encoded.column_names if column.startswith("image_")])
    elif image_column:  # added now, because `map` would store the images again
        images = dataset.select_columns(image_column).rename_column(image_column, "image_data")
        encoded = concatenate_datasets([encoded, images], axis=1)
    return drop_untaught(encoded, taught, name, problems)


def read_whole(stream: IterableDataset) -> Dataset:
    """Returns the rows of an encoded stream, in memory."""
    rows = list(stream)
    for row in rows:
        if "image_data" in row:
            row["image_data"] = list(map(storable, row["image_data"]))
    return Dataset.from_list(rows)


def drop_untaught(encoded: Dataset, taught: list[int], name: str, problems: Sequence[tuple[int, str]] = ()) -> Dataset:
    """
    Returns the rows with something to learn. Warns of the others, some of which have no answer (`problems`). Raises `ValueError`
    if there is no such row.
    """
    if not taught:
        raise ValueError(
            f"{len(encoded)} of {len(encoded)} rows of the {name} data have nothing to learn: no more than two tokens, or only "
            "labels of -100 after them."
        )
    if len(taught) == len(encoded):
        return encoded
    first = sorted(set(range(len(encoded))) - set(taught))[:3]
    logger.warning(
        f"{len(encoded) - len(taught)} of {len(encoded)} rows of the {name} data have nothing to learn and are dropped (the first "
        f"are {first}).{' ' if problems else ''}{summary(problems)}"
    )
    return encoded.select(taught)


def encode_or_explain(row: dict[str, Any], encoder: RowEncoder, columns: list[str]) -> dict[str, Any]:
    """Returns an encoded row, or an empty one with a `problem` that says what is wrong."""
    empty: dict[str, Any] = {column: [] for column in columns} | {
        "lost": 0,
        "teaches": False,
        "problem": "",
        "has_no_answer": False,
    }
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
        return empty | {"problem": str(error), "has_no_answer": isinstance(error, NothingToLearn)}


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
    whose assistant turns were not found.
    """

    def __init__(self, encoder: RowEncoder, name: str):
        self.encoder, self.name, self.has_encoded = encoder, name, False
        self.broken: list[int] = []
        self.lost: list[int] = []

    def __call__(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        if index == 0:
            self.broken, self.lost = [], []
        try:
            encoded = self.encoder(row)
        except RowError as error:
            self.report_broken(index, error)
            return {"input_ids": [], "labels": []}
        self.has_encoded = True
        if encoded.pop("lost"):
            self.lost.append(index)
            if len(self.lost).bit_count() == 1:
                self.encoder.report_lost(self.lost, max(index + 1, 100), self.name)
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

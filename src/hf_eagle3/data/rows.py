"""
Reading rows of data, in each of the forms that a row may have. `messages.py` reads the messages of a conversation, `values.py` single
values, and `nulls.py` takes out what Arrow added.

A row is read before anything else happens to it. An error names the row, says what is wrong and what to do.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..tokenizer import REASONING, with_text_part
from .messages import CONVERSATIONS, read_messages, refuse_json
from .nulls import without_added_nulls
from .values import RowError, as_list, check_is_json, from_json, is_something, shown


# Columns of system prompts beside a conversation.
SYSTEM = ("system", "system_prompt", "system_message", "system_instruction", "sys_prompt")
IMAGES = ("images", "image")
IMAGE_MARK = "<image>"  # where an image is, in data for LLaVA, LLaMA-Factory and ms-swift
OTHER_MEDIA = ("audio", "audios", "video", "videos")
MASKS = ("attention_mask", "loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "response_mask")
SAYS_WHAT_IS_LEARNED = ("labels", *MASKS[1:])
TOKENIZERS_MASK = "special_tokens_mask"  # says nothing about what is learned
# Other projects' names of `tools`, whose contents have other forms.
OTHER_TOOLS = ("tool_defs", "tool_definitions", "tool_schemas", "available_tools")
# Columns of Alpaca's and Dolly's formats that belong to the prompt, and stay behind when the others are renamed.
PROMPT_PARTS = ("instruction", "input", "history", "context")
# Values of the columns `reasoning` and `thinking` that only say whether there is any (Nemotron).
SWITCHES = ("on", "off")
# Columns that are false beside a bad answer: those of TRL's and LLaMA-Factory's data for KTO.
VERDICTS = ("label", "kto_tag")
NUM_SHOWN = 3  # how many reasons, and rows for each, a message names
# Arguments of `apply_chat_template` that are not the template's.
RESERVED = {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "tokenize"}


@dataclass
class Row:
    """
    A row that has been read. It has one of `messages`, `text` and `tokens`.

    Args:
        messages (`list[dict]`, *optional*): A conversation, in the form that chat templates take.
        num_given (`int`, *optional*): With a prompt and a completion: how many of the messages are the prompt.
        text (`str`, *optional*): A text, or the prompt of a completion.
        completion (`str`, *optional*): The completion of the prompt.
        tokens (`dict[str, list[int]]`, *optional*): `input_ids`, `labels` and, for packed rows, `seq_lengths`.
        template_kwargs (`dict`, *optional*): `tools` and `chat_template_kwargs` for the chat template.
        images (`list`, *optional*): The images, in the order of their places in the messages or the text.
    """

    messages: list[dict] = field(default_factory=list)
    num_given: int | None = None
    text: str | None = None
    completion: str | None = None
    tokens: dict[str, list[int]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    images: list[Any] = field(default_factory=list)


def kind_of(columns: Iterable[str], text_field: str = "text") -> str:
    """
    Returns the kind of a data set, by the names of its columns.

    Args:
        columns (iterable of `str`): The names.
        text_field (`str`, *optional*, defaults to `"text"`): The column that has texts.

    Returns:
        `str`: `"input_ids"`, `"prompt"` (with `"completion"`), `"messages"`, `"conversations"`, or `text_field`. A data set
        with conversations and their first prompt in a column `prompt` (ultrachat_200k) is one of conversations. A
        `text_field` other than `"text"` takes precedence.

    Raises:
        ValueError: if no column can be learned from.
    """
    columns = set(columns)
    if text_field not in columns | {"text"} and "input_ids" not in columns:
        raise ValueError(
            f"has no column {text_field!r}, which `dataset_text_field` names, but {sorted(columns)}. Correct it, or leave it out."
        )
    if text_field in columns - {"text", "input_ids", "prompt", *CONVERSATIONS}:
        return text_field
    if "input_ids" in columns:
        return "input_ids"
    if {"prompt", "completion"} <= columns:
        return "prompt"
    for name in CONVERSATIONS:
        if name in columns:
            return name
    if "prompt" in columns:
        others = sorted(columns - {"prompt"})
        raise ValueError(
            "has prompts, but no 'completion' to learn. Let the target write completions (recipes/regenerate.py)"
            + (f", or remove 'prompt' to learn from another column of {others}." if others else ".")
        )
    if text_field in columns:
        return text_field
    raise ValueError(
        f"has columns {sorted(columns)}, but needs `messages` (or `conversations`), `prompt` and `completion`, {text_field!r}, or "
        "`input_ids`. Rename the columns to learn from (an instruction is a `prompt`, its output a `completion`), or name one of "
        "texts as `dataset_text_field`."
    )


def read_row(row: Mapping[str, Any], kind: str, features: Mapping[str, Any] | None = None) -> Row:
    """
    Reads a row to learn from, and returns its content.

    Args:
        row (`dict`): A row of the data set.
        kind (`str`): See [`~hf_eagle3.data.kind_of`].
        features (`Features`, *optional*):
            The types of the data set's columns. `None`s within a column are kept only if its type is `Json`, because Arrow adds
            others.

    Raises:
        RowError: if the row has another form.
    """
    row = without_added_nulls(row, features)
    images = read_images(row)
    if kind == "input_ids":
        if images:
            raise RowError("it has images beside 'input_ids'. Pass messages or a text with its images")
        return Row(tokens=read_tokens(row))
    if masks := [name for name in MASKS[1:] if is_something(row.get(name))]:
        raise RowError(
            f"it has {masks[0]!r} beside {kind!r}, but masks are for 'input_ids'. Remove the column. To leave out turns of a "
            "conversation, give their messages a `weight` of 0"
        )
    if kind in ("prompt", *CONVERSATIONS) and (verdicts := [name for name in VERDICTS if row.get(name) is False]):
        raise RowError(
            f"its {verdicts[0]!r} is false, so its answer is a bad example. Remove such rows (dataset.filter(lambda row: "
            f"row[{verdicts[0]!r}])). If {verdicts[0]!r} says something else, remove the column"
        )
    if kind in CONVERSATIONS:
        others = [name for name in (*CONVERSATIONS, "text", "prompt", "input_ids") if is_something(row.get(name))]
        if others and kind not in others:
            raise RowError(
                f"{kind!r} has nothing in it, but {others[0]!r} has. All rows must have what is learned in the same column. Convert these "
                "rows, or remove them"
            )
        messages = read_conversation(row, kind)
        _refuse_reasoning_beside(row, messages)
        messages, images = with_places(messages, images, row)
        return Row(messages=messages, template_kwargs=read_template_kwargs(row), images=images)
    if kind != "prompt":
        _refuse_beside_text(row)
        return Row(text=read_text(row.get(kind), kind), images=images)
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) != isinstance(completion, str) and prompt is not None and completion is not None:
        raise RowError(
            "one of 'prompt' and 'completion' is a text, and the other is not. Pass two texts, or two lists of messages"
        )
    if isinstance(prompt, str) or isinstance(completion, str):
        _refuse_beside_prompt(row)
        texts = {name: read_text(row.get(name), name) for name in ("prompt", "completion")}
        for name, text in texts.items():
            refuse_json(text, name)
        _refuse_reasoning_beside(row, [{"role": "assistant", "content": texts["completion"]}])
        return Row(text=texts["prompt"], completion=texts["completion"], images=images)
    given = read_conversation(row, "prompt")
    answer = read_messages(completion, "completion")
    if answer[: len(given)] == given:
        raise RowError("its completion begins with the prompt again. Remove these messages from one of them")
    if all(message["role"] != "assistant" for message in answer):
        raise RowError(
            "its completion has no message of the assistant, so the target would not say it. Correct the roles"
        )
    _refuse_reasoning_beside(row, answer)
    messages, images = with_places(given + answer, images, row)
    return Row(messages=messages, num_given=len(given), template_kwargs=read_template_kwargs(row), images=images)


def read_images(row: dict[str, Any]) -> list[Any]:
    """Returns the images in the columns of a row: PIL images, paths, URLs, or dictionaries of `datasets`."""
    for name in OTHER_MEDIA:
        if is_something(row.get(name)):
            raise RowError(
                f"it has {name!r}, and drafts learn from text and images only. Remove the column, or the rows that use it"
            )
    found = {}
    for name in IMAGES:
        try:
            value = row.get(name)  # `datasets` opens the file now
        except Exception as error:  # of many types: `datasets` raises ValueError, Pillow DecompressionBombError
            raise RowError(
                f"{name!r} cannot be read: {str(error):.200}. Correct the path, or remove the row"
            ) from error
        values = value if isinstance(value, list) else [value]
        if values := [each for each in values if is_something(each)]:
            found[name] = values
    if len(found) > 1:
        raise RowError("it has both 'image' and 'images'. Remove one")
    return next(iter(found.values()), [])


def with_places(messages: list[dict], images: list[Any], columns: Iterable[str]) -> tuple[list[dict], list[Any]]:
    """
    Returns messages with a part `{"type": "image"}` at the place of each image, and the images.

    If no message has such parts, the images are where the marks `<image>` are, or before the first text of the user, as in TRL. If
    the parts have images of their own (`image`, `image_url`, `url` or `path`), these are taken. Raises `RowError` if there are more
    places than images, or more images than places. In data without `columns` of images, marks are texts.
    """
    if not {*IMAGES}.isdisjoint(columns) and not any(isinstance(message["content"], list) for message in messages):
        messages = [_with_marked_places(message) for message in messages]
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    parts = [part for content in contents for part in content if part["type"] == "image"]
    own = [part.pop("image") for part in parts if "image" in part]
    if own and images:
        raise RowError("it has images in its messages and in a column. Remove one of them")
    images = own or images
    if parts or not images:
        if len(parts) != len(images):
            raise RowError(
                f"its messages have {len(parts)} places for images, but it has {len(images)} images. Add or remove images, or "
                'parts {"type": "image"}, or marks <image>'
            )
        return messages, images
    first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise RowError("it has images, but no message of the user to show them in")
    text = {"type": "text", "text": messages[first]["content"]}
    message = {**messages[first], "content": [*({"type": "image"} for _ in images), text]}
    return [*messages[:first], message, *messages[first + 1 :]], images


def _with_marked_places(message: dict) -> dict:
    """Returns a message with parts for images instead of marks. Only the user shows images. Others may have such a text."""
    if message["role"] != "user" or IMAGE_MARK not in message["content"]:
        return message
    parts: list[dict] = []
    for number, text in enumerate(message["content"].split(IMAGE_MARK)):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * (text != "")
    return {**message, "content": parts}


def read_prompt(row: Mapping[str, Any], features: Mapping[str, Any] | None = None) -> Row:
    """
    Reads a row to answer, and returns its content: `messages` (or `conversations`), or a `prompt` that is a text or messages.

    Args:
        row (`dict`): A row of the data set or file.
        features (`Features`, *optional*): As for [`~hf_eagle3.data.read_row`].

    Raises:
        RowError: if the row has another form.
    """
    row = without_added_nulls(row, features)
    kind = next((name for name in (*CONVERSATIONS, "prompt") if row.get(name) is not None), None)
    if kind is None:
        raise RowError(
            f'it has no messages and no prompt, but {sorted(row)}. Expected {{"messages": [...]}} or {{"prompt": "..."}}'
        )
    if isinstance(row[kind], str) and kind == "prompt":
        if not row[kind]:
            raise RowError("it has an empty prompt")
        _refuse_beside_prompt(row)
        refuse_json(row[kind], kind)
        return Row(text=row[kind], images=read_images(row))
    messages, images = with_places(read_conversation(row, kind, is_prompt=True), read_images(row), row)
    return Row(messages=messages, template_kwargs=read_template_kwargs(row), images=images)


def read_text(value: Any, name: str) -> str:
    """Returns the text in the column `name`."""
    if value is None:
        raise RowError(f"{name!r} is missing or has nothing in it")
    if not isinstance(value, str):
        raise RowError(f"{name!r} is {shown(value)}, but must be a text")
    return value


def read_conversation(row: dict[str, Any], name: str, is_prompt: bool = False) -> list[dict]:
    """Returns the messages of a row, with the system prompt from its own column, if the row has one."""
    messages = read_messages(row.get(name), name, is_prompt)
    prompts = {column: read_text(row[column], column) for column in SYSTEM if row.get(column)}
    parts = [part for message in messages for part in with_text_part(message)["content"]]
    _refuse_left_out(row, PROMPT_PARTS, name, [*prompts.values(), *(part.get("text", "") for part in parts)])
    if not prompts:
        return messages
    if messages[0]["role"] == "system":
        prompts[name] = messages[0]["content"]
    (place, text), *others = prompts.items()
    for other, other_text in others:
        if other_text != text:
            raise RowError(f"it has two different system prompts, in {place!r} and in {other!r}. Remove one")
    return messages if name in prompts else [{"role": "system", "content": text}, *messages]


def read_template_kwargs(row: dict[str, Any]) -> dict[str, Any]:
    """
    Returns what a row gives its chat template besides the messages: `tools` (a list or JSON, also in OpenAI's older form,
    `functions`), `documents` (the same) and the contents of `chat_template_kwargs` (a dictionary or JSON).
    """
    kwargs = from_json(row.get("chat_template_kwargs"), "chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise RowError(f"'chat_template_kwargs' is {shown(kwargs)}, but must be a dictionary or JSON of one")
    kwargs = dict(kwargs or {})
    if reserved := RESERVED & kwargs.keys():
        raise RowError(f"'chat_template_kwargs' has {min(reserved)!r}, which is set here. Remove it")
    if others := [name for name in OTHER_TOOLS if is_something(row.get(name))]:
        raise RowError(
            f"it has {others[0]!r}, but tools are read from 'tools'. Rename the column, and give it the JSON schemas that the chat "
            "template takes"
        )
    tools = from_json(row.get("tools"), "tools")
    if not tools and (functions := from_json(row.get("functions"), "functions")):  # OpenAI's older form
        tools = [{"type": "function", "function": each} for each in as_list(functions, "'functions'")]
    if tools:
        tools = [from_json(tool, "tools") for tool in as_list(tools, "'tools'")]
        if not all(isinstance(tool, dict) for tool in tools):
            raise RowError(f"'tools' is {shown(tools)}, but must be a list of JSON schemas")
        check_is_json(tools, "'tools'")
        kwargs["tools"] = tools
    if documents := from_json(row.get("documents"), "documents"):
        if kwargs.get("documents"):
            raise RowError("it has 'documents' in 'chat_template_kwargs' and in a column. Remove one of them")
        kwargs["documents"] = as_list(documents, "'documents'")
        if not all(isinstance(each, dict) for each in kwargs["documents"]):
            raise RowError(
                f"'documents' is {shown(documents)}, but must be a list of dictionaries, which the chat template writes. Convert it, or "
                "remove the column"
            )
    return kwargs


def read_tokens(row: dict[str, Any]) -> dict[str, list[int]]:
    """
    Returns `input_ids` and `labels`. A label is -100 if the row's `labels` or one of its masks exclude the token. Padding
    at both ends, which the attention mask excludes, is removed.
    """
    if unknown := [name for name in row if "mask" in name and name not in (*MASKS, TOKENIZERS_MASK)]:
        raise RowError(
            f"it has {unknown[0]!r}, but masks are read from {list(MASKS)}. Rename the column, or remove it"
        )
    tokens = [] if row.get("input_ids") is None else _integers(row["input_ids"], "input_ids")
    if not tokens:
        raise RowError("'input_ids' is missing or has nothing in it")
    labels = list(tokens) if row.get("labels") is None else _integers(row["labels"], "labels")
    masks = {name: _mask(row[name], name) for name in MASKS if row.get(name) is not None}
    for name, values in {"labels": labels, **masks}.items():
        if len(values) != len(tokens):
            raise RowError(f"{name!r} has {len(values)} entries, but there are {len(tokens)} tokens")
    labels = [label if all(seen) else -100 for label, *seen in zip(labels, *masks.values())]
    if "attention_mask" in masks:
        places = [place for place, seen in enumerate(masks["attention_mask"]) if seen]
        if not places or len(places) != places[-1] - places[0] + 1:
            raise RowError(
                "'attention_mask' excludes tokens in the middle, or all, but a draft learns from whole texts. Remove these tokens"
            )
        kept = slice(places[0], places[-1] + 1)
        tokens, labels = tokens[kept], labels[kept]
    for place, (token, label) in enumerate(zip(tokens, labels)):
        if label not in (-100, token):
            raise RowError(
                f"label {place} is {label}, but token {place} is {token}. Labels must be the tokens, not shifted, or -100"
            )
    read = {"input_ids": tokens, "labels": labels}
    if row.get("seq_lengths") is not None:
        read["seq_lengths"] = _integers(row["seq_lengths"], "seq_lengths")
        if min(read["seq_lengths"], default=1) < 1:
            raise RowError(f"'seq_lengths' has {min(read['seq_lengths'])}, but must be the lengths of documents")
        if sum(read["seq_lengths"]) != len(tokens):
            raise RowError(f"'seq_lengths' sum to {sum(read['seq_lengths'])}, but there are {len(tokens)} tokens")
    elif row.get("position_ids") is not None and _integers(row["position_ids"], "position_ids")[1:].count(0):
        raise RowError("'position_ids' start again within the row. Say where documents end with 'seq_lengths'")
    return read


def _integers(values: Any, name: str) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise RowError(f"{name!r} is {shown(values)}, but must be a list of token ids")
    if not all(type(value) is int for value in values):
        wrong = next(value for value in values if type(value) is not int)
        raise RowError(f"{name!r} has {shown(wrong)}, but must be a list of token ids")
    return list(values)


def _mask(values: Any, name: str) -> list:
    """Returns a mask. Other numbers than 0 and 1 may mean the opposite (-100), or documents (1, 1, 2, 2)."""
    values = list(values) if isinstance(values, tuple) else values
    mask = as_list(values, repr(name), "of zeros and ones")
    if wrong := [value for value in mask if value not in (0, 1, None)]:
        raise RowError(f"{name!r} has {shown(wrong[0])}, but must be a list of zeros and ones")
    return mask


def _refuse_beside_text(row: dict[str, Any]) -> None:
    for name in (*SYSTEM, "tools", "chat_template_kwargs"):
        if is_something(row.get(name)) and row[name] not in ("[]", "{}"):
            raise RowError(
                f"it has {name!r} beside a text, but only conversations can have that. Remove the column, or use messages"
            )


def _refuse_beside_prompt(row: dict[str, Any]) -> None:
    _refuse_beside_text(row)
    _refuse_left_out(row, (*PROMPT_PARTS, "documents"), "prompt", [str(row.get("prompt"))])


def _refuse_left_out(row: dict[str, Any], names: Iterable[str], kind: str, texts: Sequence[str]) -> None:
    """Refuses columns that belong to the prompt, and are not in its texts."""
    for name in names:
        if _is_left_out(row.get(name), *texts):
            raise RowError(
                f"it has {name!r} beside {kind!r}, which does not have it. Write it into {kind!r}, or remove the column"
            )


def _refuse_reasoning_beside(row: dict[str, Any], answers: Iterable[dict[str, Any]]) -> None:
    """Refuses reasoning in a column, where it is not read, unless the assistant's messages have it, too."""
    said = [str(value) for message in answers if message["role"] == "assistant" for value in message.values()]
    # speculators' script wrote it into `metadata`.
    metadata = row["metadata"] if isinstance(row.get("metadata"), dict) else {}
    for columns, where in ((row, ""), (metadata, " in 'metadata'")):
        for name in REASONING:
            if columns.get(name) not in SWITCHES and _is_left_out(columns.get(name), *said):
                raise RowError(
                    f"it has {name!r}{where}, which is not in its answer, and the draft would learn to answer without it. Write it into "
                    "the assistant's message ('reasoning_content') or into the completion, or remove the column"
                )


def _is_left_out(value: Any, *texts: str) -> bool:
    """Whether something in a column, or one of several, is not in any of the texts, whatever the white space."""
    if isinstance(value, list):
        return any(_is_left_out(each, *texts) for each in value)
    if isinstance(value, str):
        return not any("".join(value.split()) in "".join(text.split()) for text in texts)
    return isinstance(value, Mapping) and is_something(value)  # not for NaN or a mark that is false


def summary(problems: Iterable[tuple[int, str]]) -> str:
    """Returns a sentence for each of the first three reasons why rows are wrong, with the numbers of three rows."""
    by_reason: dict[str, list[int]] = {}
    for number, reason in problems:
        by_reason.setdefault(reason.rstrip("."), []).append(number)
    parts = []
    for reason, (first, *others) in list(by_reason.items())[:NUM_SHOWN]:
        also = ", ".join(map(str, others[: NUM_SHOWN - 1])) + (", ..." if len(others) >= NUM_SHOWN else "")
        parts.append(f"Row {first}{f' ({len(others)} more: {also})' if others else ''}: {reason}.")
    if len(by_reason) > NUM_SHOWN:
        parts.append(f"And {sum(map(len, list(by_reason.values())[NUM_SHOWN:]))} more rows, for other reasons.")
    return " ".join(parts)

"""Reading the messages of a conversation."""

import json
from numbers import Real
from typing import Any

from ..tokenizer import REASONING
from .values import RowError, UnusableRow, as_list, check_is_json, from_json, is_something, shown


# ShareGPT's and OpenAI's older names of speakers, and the roles they stand for.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot", "ai", "assistant"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),  # many templates leave out OpenAI's newer name, or refuse it
    **dict.fromkeys(("tool", "observation", "function", "tool_response"), "tool"),
}
# LLaMA-Factory's and ms-swift's names of an assistant that says a tool call, as JSON.
CALLERS = ("function_call", "tool_call")
CONVERSATIONS = ("messages", "conversations")
# Kinds of parts of a message, and the keys that may hold an image.
TEXT_PARTS, IMAGE_PARTS = (None, "text", "input_text", "output_text"), ("image", "image_url", "input_image")
IMAGE_KEYS = ("image", "image_url", "url", "path")
CALLS = ("tool_calls", "function_call")
# An assistant's message without content may have one of these. Empty ones are dropped, because some templates only test whether the
# key exists.
WITHOUT_CONTENT = {"tool_calls", *REASONING}
# Keys that are 0 or false in messages that are not to be learned: those of OpenAI, axolotl, verl, ms-swift and others.
WEIGHTS = ("weight", "train", "training", "trainable", "train_on_turn", "loss_mask", "loss", "loss_scale")
MASKED = "masked"  # torchtune's key, which is true in messages that are not to be learned
# axolotl's weights of characters.
DETAILS = ("train_detail", "training_detail")


def read_messages(value: Any, name: str, is_prompt: bool = False) -> list[dict]:
    """
    Returns messages with `role` and `content`. Also reads ShareGPT's with `from` and `value` (or `text`), and a
    dictionary of lists. A tool call that is a message of its own joins the assistant's message before it. A last answer without
    content is left out, if there are earlier ones or it is a prompt.
    """
    if not is_something(value):
        kind = UnusableRow if name in CONVERSATIONS else RowError
        raise kind(f"{name!r} is missing or has nothing in it")
    if isinstance(value, str):
        raise RowError(
            f"{name!r} is the text {shown(value)}, but must be a list of messages with role and content. {_advice(name)}"
        )
    value = as_list(value, f"{name!r}", "of messages with role and content")
    messages: list[dict] = []
    for number, message in enumerate(value):
        try:
            read = read_message(message, f"message {number} of {name!r}")
        except UnusableRow:  # the last answer is missing. Earlier ones can be learned
            answers = [each for each in messages if is_prompt or each["role"] == "assistant"]
            if number < len(value) - 1 or not answers:
                raise
            break
        speaker = message.get("role") or message.get("from")
        if is_caller(speaker) and read["role"] == "assistant" and messages and messages[-1]["role"] == "assistant":
            messages[-1] = _joined(messages[-1], read, f"message {number} of {name!r}")
        else:
            messages.append(read)
    return messages


def _joined(message: dict, call: dict, where: str) -> dict:
    """Returns a message of the assistant with the tool calls of the next one. `where` names that one in errors."""
    if (unlearned_by(message) is None) != (unlearned_by(call) is None):
        raise RowError(_in_part(f"{where}, a tool call, is joined to the message before it, which"))
    if twice := [key for key in REASONING if key in message and key in call]:
        raise RowError(
            f"{where}, a tool call, is joined to the message before it, and both have {twice[0]!r}. Write it into one of them"
        )
    calls = [*message.get("tool_calls", []), *call["tool_calls"]]
    return {**message, **{key: value for key, value in call.items() if key != "content"}, "tool_calls": calls}


def _in_part(where: str) -> str:
    return f"{where} is to be learned in part, but a message is learned whole or not (`weight`). Split or remove it"


def is_caller(speaker: Any) -> bool:
    """Whether a speaker is an assistant that says a tool call, as JSON."""
    return isinstance(speaker, str) and speaker.lower() in CALLERS


def _advice(name: str) -> str:
    return f"If it is JSON, parse it: dataset.map(lambda row: {{{name!r}: json.loads(row[{name!r}])}})"


def refuse_json(text: str, name: str) -> None:
    """Raises `RowError` if a text is a conversation in JSON, which a model should not read as it is."""
    try:
        value = json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        return
    if value and all(isinstance(message, dict) and message.keys() & {"role", "from"} for message in value):
        raise RowError(f"{name!r} is a text with messages, {shown(text)}. {_advice(name)}")


def read_message(message: Any, where: str) -> dict:
    """Returns a message of [`read_messages`]. `where` names it in errors."""
    if not isinstance(message, dict):
        raise RowError(f"{where} is {shown(message)}, but must have role and content")
    others = {
        key: value
        for key, value in message.items()
        if value is not None and (key not in WITHOUT_CONTENT or is_something(value))
    }
    role = others.pop("role", None)
    speaker = others.pop("from", None) if role is None else role
    if is_caller(speaker):
        place = next((key for key in ("content", "value") if is_something(others.get(key))), "content")
        said = others.get(place)
        calls = _calls_said(said, where)
        if calls is None and role is None:
            raise RowError(f"{where} is {shown(said)}, but {speaker!r} must say a tool call with a name, as JSON")
        if calls is not None:
            role = "assistant"
            del others[place]
            others["tool_calls"] = [{"type": "function", "function": _read_call(call, where)} for call in calls]
    elif role is None and speaker is not None:
        role = ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
        if role is None:
            raise RowError(
                f"{where} is from {speaker!r}, but must be from one of {sorted([*ROLES, *CALLERS])}. Rename it"
            )
    if not isinstance(role, str):
        raise RowError(f"{where} has no role: {shown(message)}")
    role = ROLES.get(role.lower(), role)  # templates may have more roles
    contents = [others.pop(key) for key in ("content", "value", "text") if key in others]
    contents = [content for content in contents if is_something(content)] or contents[:1]
    if len(contents) > 1 and contents[1:] != contents[:-1]:
        raise RowError(f"{where} has two contents, {shown(contents[0])} and {shown(contents[1])}. Remove one")
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    if role == "assistant" and (any(map(others.get, DETAILS)) or any(map(unlearned_by, parts))):
        raise RowError(_in_part(where))
    calls = calls_of({name: from_json(others.pop(name, None), f"{name} of {where}") for name in CALLS})
    if is_something(calls):
        others["tool_calls"] = [_read_call(call, where) for call in as_list(calls, f"tool_calls of {where}")]
    if not contents and role == "assistant" and others.keys() & WITHOUT_CONTENT:
        contents = [""]
    if not contents:
        kind = UnusableRow if role == "assistant" else RowError  # some have no answer
        raise kind(f"{where} has no content: {shown(message)}")
    return {"role": role, "content": _read_content(contents[0], where), **others}


def _calls_said(said: Any, where: str) -> list[dict] | None:
    """Returns the tool calls that a content is, as JSON. `None` if it is something else, which the template may take."""
    if isinstance(said, list) and all(
        isinstance(part, str) or (isinstance(part, dict) and "text" in part) for part in said
    ):
        said = _read_content(said, where)
    try:
        calls = from_json(said, where)
    except RowError:
        return None
    calls = calls if isinstance(calls, list) else [calls]
    are_named = all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls)
    return calls if calls and are_named else None


def _read_content(content: Any, where: str) -> str | list[dict]:
    """Returns a text, or a list of parts if there are images among them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(f"the content of {where} is {shown(content)}, but must be a text")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind in IMAGE_PARTS:
            parts.append(_read_image_part(part, where))
        elif isinstance(text, str) and kind in TEXT_PARTS:
            parts.append({"type": "text", "text": text})
        else:
            raise RowError(f"the content of {where} has {shown(part)}, and drafts learn from text and images only")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _read_image_part(part: dict, where: str) -> dict:
    """Returns a part for an image, with the image if the part has it."""
    for key in IMAGE_KEYS:
        image = part.get(key)
        image = image.get("url") if key == "image_url" and isinstance(image, dict) else image
        if is_something(image):
            return {"type": "image", "image": image}
    if part["type"] != "image":
        raise RowError(f"the content of {where} has {shown(part)}, which has no image")
    return {"type": "image"}


def calls_of(message: dict) -> Any:
    """Returns the tool calls of a message, also one in OpenAI's older form (`function_call`)."""
    calls, call = message.get("tool_calls"), message.get("function_call")
    is_old = is_something(call) and not is_something(calls)
    return [{"type": "function", "function": call}] if is_old else calls


def check_calls(message: dict) -> None:
    """Checks that the tool calls of an answer have the name of a function, and JSON as its arguments."""
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"its answer has a tool call without the name of a function: {shown(call)}")
        if not isinstance(function.get("arguments", {}), dict):
            raise RowError(f"its answer has a tool call whose arguments are no JSON object: {shown(call)}")


def unlearned_by(message: dict) -> str | None:
    """Returns the key of a message that says not to learn it, or `None`. Raises `RowError` if such a key has no number."""
    for key in (*WEIGHTS, MASKED):
        if (value := message.get(key)) is None:
            continue
        if not isinstance(value, Real):  # the text "false" would be true
            raise RowError(f"a message has {shown(value)} as {key!r}, but must have a number, true or false")
        if bool(value) == (key == MASKED):
            return key
    return None


def is_learned(message: dict) -> bool:
    """Whether a message of the assistant is to be learned: it is not empty, and no key says otherwise."""
    return unlearned_by(message) is None and says_something(message)


def says_something(message: dict) -> bool:
    """Whether a message of the assistant has a text, tool calls or reasoning."""
    content = message["content"]
    return bool(content.strip() if isinstance(content, str) else content) or any(map(message.get, WITHOUT_CONTENT))


def _read_call(call: Any, where: str) -> dict:
    """Returns a tool call with JSON arguments parsed."""
    if not isinstance(call, dict):
        raise RowError(f"{where} has {shown(call)} among its tool_calls, but they must be dictionaries")
    call = {key: each for key, each in call.items() if each is not None}
    if isinstance(call.get("function"), dict):
        function = call["function"] = {key: each for key, each in call["function"].items() if each is not None}
    else:
        function = call
    if isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"].strip() or "{}")  # of a function without parameters
        except ValueError:
            return call  # any other text goes to the template as it is
        if isinstance(arguments, dict):
            function["arguments"] = arguments
    check_is_json(function.get("arguments"), f"a tool call of {where}")
    return call

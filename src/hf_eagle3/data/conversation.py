"""A conversation that a target answers turn by turn."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..tokenizer import with_arguments_as_text, with_text_part
from .images import storable
from .rows import IMAGES, read_prompt
from .values import RowError


KEPT_ROLES = {"system", "user", "assistant"}


class Conversation:
    """
    A row that is being answered: its turns so far, and the messages between the answers that are still missing. The row's own
    arguments for the chat template take precedence. `features` are those of the data set. Raises `RowError` if there is nothing to
    answer, or a message that depends on an original answer (`tool`).
    """

    def __init__(
        self,
        row: int,
        example: dict,
        template_kwargs: dict | None = None,
        features: Mapping[str, Any] | None = None,
    ):
        content = read_prompt(example, features)
        self.row, self.text, self.completion = row, content.text, ""
        # In a data set with images the contents of all messages are lists of parts, so that a column has one type.
        self.may_see = any(name in example for name in IMAGES) or bool(content.images)
        self.all_images = content.images
        self.finish_reasons: list[str] = []
        self.template_kwargs = {**(template_kwargs or {}), **content.template_kwargs}
        if self.text is not None:
            return
        if any(message["role"] == "assistant" and image_parts(message) for message in content.messages):
            raise RowError("a message of the assistant has images, and its answers are replaced by texts")
        if unknown := {message["role"] for message in content.messages} - KEPT_ROLES:
            raise RowError(
                f"it has messages of {sorted(unknown)}, which may depend on the answers that are replaced. Only messages of "
                f"{sorted(KEPT_ROLES)} can be there"
            )
        self.pending: list[list[dict]] = []
        before: list[dict] = []
        for message in [*content.messages, {"role": "assistant"}]:
            if message["role"] != "assistant":
                before.append(message)
            elif any(each["role"] == "user" for each in before):
                self.pending.append(before)
                before = []
        if not self.pending:
            raise RowError("it has no user message to answer")
        self.turns = self.pending.pop(0)

    def digest(self) -> str:
        """Returns a short digest of all that the target is asked: texts, template settings, and images that are paths or bytes."""
        asked = [self.turns, *self.pending] if self.text is None else self.text
        images = [image if isinstance(image, str | dict) else None for image in self.all_images]
        content = json.dumps([asked, self.template_kwargs, images], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def images(self) -> list[Any]:
        """The images in the conversation so far."""
        if self.text is not None:
            return self.all_images
        return self.all_images[: sum(len(image_parts(message)) for message in self.turns)]

    def answer(self, message: dict, finish_reason: str) -> bool:
        """
        Adds an answer. Returns whether it was the last one. A tool call is the last, because the tool's result is unknown.
        """
        self.finish_reasons.append(finish_reason)
        if self.text is not None:
            self.completion = message["content"]
            return True
        self.turns.append(message)
        if self.pending and not message.get("tool_calls"):
            self.turns += self.pending.pop(0)
            return False
        return True

    def result(self) -> dict:
        """Returns the new row, with the tools and template settings of the old one."""
        images = {"images": [storable(image) for image in self.images]} if self.may_see else {}
        if self.text is not None:
            texts = {"prompt": self.text, "completion": self.completion}
            return {**images, **texts, "finish_reasons": self.finish_reasons}
        kwargs = dict(self.template_kwargs)
        tools = kwargs.pop("tools", None)
        turns = [with_text_part(turn) for turn in self.turns] if self.may_see else self.turns
        # A column of a data set has one type in all rows, so arguments are JSON.
        content: dict[str, Any] = {**images, "messages": [with_arguments_as_text(message) for message in turns]}
        content |= {"tools": json.dumps(tools, ensure_ascii=False)} if tools else {}
        content |= {"chat_template_kwargs": kwargs} if kwargs else {}
        return {**content, "finish_reasons": self.finish_reasons}


def image_parts(message: dict) -> list[dict]:
    """Returns the parts of a message that stand for images."""
    content = message.get("content")
    return [part for part in content if part["type"] == "image"] if isinstance(content, list) else []

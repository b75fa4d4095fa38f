"""Errors about rows, and reading the values of a row."""

import json
from collections.abc import Sized
from datetime import date, time
from typing import Any


class RowError(ValueError):
    """
    Says what is wrong with a row. The code that iterates over rows adds the row's number.

    Args:
        reason (`str`): What is wrong.
    """

    def __init__(self, reason: str):
        super().__init__(reason)


class UnusableRow(RowError):
    """
    Says that a row is well-formed, but has no answer to learn, or its chat template cannot write it. A few of many rows may be like
    that.
    """


class UnreachableError(RowError):
    """Says that a file or server of a row is not there now. It may be later."""


def as_list(value: Any, where: str, of_what: str = "of dictionaries") -> list:
    """Returns a list. Also reads a NumPy array, and a dictionary of lists of one length."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict) and all(isinstance(each, list) for each in value.values()):
        lengths = set(map(len, value.values()))
        value = [dict(zip(value, each)) for each in zip(*value.values())] if len(lengths) == 1 else value
    if not isinstance(value, list):
        raise RowError(f"{where} is {shown(value)}, but must be a list {of_what}")
    return value


def from_json(value: Any, name: str) -> Any:
    """Returns a value, parsed if it is JSON text; `None` for an empty text. Raises `RowError` if a text is not JSON."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except ValueError:
        raise RowError(f"{name!r} has {shown(value)}, which is not JSON") from None


def check_is_json(value: Any, name: str) -> None:
    """Raises `RowError` if a value has dates and the like. Chat templates would write them in another way than the texts that they were."""
    try:
        json.dumps(value)
    except TypeError as error:
        raise RowError(
            f"{name} has what JSON does not have: {error}. If `datasets` took texts for dates, load the column as the type `Json` of "
            "`datasets`, or store it as JSON text"
        ) from None


def date_as_text(value: Any) -> str:
    """Returns a date or time as a text, for `json.dumps(..., default=date_as_text)`. JSON has none, but messages may."""
    if not isinstance(value, (date, time)):
        raise TypeError(f"{shown(value)} of type {type(value).__name__} cannot be written as JSON")
    return str(value)


def is_something(value: Any) -> bool:
    """Whether a value is neither `None` nor empty."""
    return value is not None and not (isinstance(value, Sized) and len(value) == 0)


def shown(value: Any) -> str:
    """Returns a value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

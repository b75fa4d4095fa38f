"""From data sets to what the trainer needs."""

from .checks import (
    as_messages,
    check_assistant_turns,
    check_chat_template,
    check_columns,
    check_lengths,
    check_rows,
    check_tokens,
    has_messages,
    report_long_rows,
)
from .prompts import documents_of_row, prompt_of
from .vocabulary import count_tokens, coverage, most_frequent_tokens


__all__ = [
    "as_messages",
    "check_assistant_turns",
    "check_chat_template",
    "check_columns",
    "check_lengths",
    "check_rows",
    "check_tokens",
    "count_tokens",
    "coverage",
    "documents_of_row",
    "has_messages",
    "most_frequent_tokens",
    "prompt_of",
    "report_long_rows",
]

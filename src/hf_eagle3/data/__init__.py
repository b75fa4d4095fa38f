"""Loading, reading, checking and encoding training data; choosing the draft vocabulary."""

from .checks import check_chat_template, kind_of_data, plain_rows
from .encoded import encode_rows
from .encoding import RowEncoder
from .images import ImageReader, shows_images
from .loading import load_data, read_json_lines, rows_of
from .prompts import num_positions
from .rows import Row, kind_of, read_prompt, read_row
from .values import RowError
from .vocabulary import count_tokens, coverage, most_frequent_tokens


__all__ = [
    "ImageReader",
    "Row",
    "RowEncoder",
    "RowError",
    "check_chat_template",
    "count_tokens",
    "coverage",
    "encode_rows",
    "kind_of",
    "kind_of_data",
    "load_data",
    "most_frequent_tokens",
    "num_positions",
    "plain_rows",
    "read_json_lines",
    "read_prompt",
    "read_row",
    "rows_of",
    "shows_images",
]

"""Reading, checking and encoding training data; choosing the draft vocabulary."""

from .checks import check_chat_template, check_positions, drop_cut_images, kind_of_data, plain_rows, report_long_rows
from .encoded import encode_rows
from .encoding import RowEncoder
from .images import ImageCollator, ImageReader, sees_images, shows_images
from .prompts import documents_of_row, num_positions, prompt_of
from .rows import Row, kind_of, read_json_lines, read_prompt, read_row
from .values import RowError
from .vocabulary import count_tokens, coverage, most_frequent_tokens


__all__ = [
    "ImageCollator",
    "ImageReader",
    "Row",
    "RowEncoder",
    "RowError",
    "check_chat_template",
    "check_positions",
    "count_tokens",
    "coverage",
    "documents_of_row",
    "drop_cut_images",
    "encode_rows",
    "kind_of",
    "kind_of_data",
    "most_frequent_tokens",
    "num_positions",
    "plain_rows",
    "prompt_of",
    "read_json_lines",
    "read_prompt",
    "read_row",
    "report_long_rows",
    "sees_images",
    "shows_images",
]

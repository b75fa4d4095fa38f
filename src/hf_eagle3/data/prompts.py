"""Prompts to decode from."""

import torch
from transformers import PreTrainedModel

from ..remote_code.target_eagle3 import position_table_size


def documents_of_row(row: dict[str, list[int]]) -> list[dict[str, list[int]]]:
    """
    The documents that are packed in a row, or the row itself.

    Args:
        row (`dict[str, list[int]]`): With `input_ids` and, if it has them, `labels` and `seq_lengths`.

    Returns:
        `list[dict[str, list[int]]]`: `input_ids` and `labels` of each; where there are no labels, all is learned.
    """
    documents, start = [], 0
    for length in row.get("seq_lengths", [len(row["input_ids"])]):
        tokens = slice(start, start + length)
        labels = row.get("labels", row["input_ids"])[tokens]
        documents.append({"input_ids": row["input_ids"][tokens], "labels": labels})
        start += length
    return documents


def prompt_of(document: dict[str, list[int]]) -> torch.LongTensor:
    """
    A prompt `(1, L)`: what is not learned at the beginning of a document, or else its first half.

    Args:
        document (`dict[str, list[int]]`): See [`documents_of_row`].
    """
    tokens, learned = document["input_ids"], [label != -100 for label in document["labels"]]
    num_tokens = learned.index(True) if True in learned else 0
    return torch.as_tensor(tokens[: num_tokens or (len(tokens) + 1) // 2])[None]


def num_positions(target: PreTrainedModel) -> int | None:
    """
    How long texts can be for a target that looks positions up in a table (GPT-2, OPT); `None` if it computes them.

    Args:
        target (`PreTrainedModel`): The target.
    """
    size = position_table_size(target.config.get_text_config(decoder=True))
    tokens = target.get_input_embeddings()
    tables = [each for each in target.modules() if isinstance(each, torch.nn.Embedding) and each is not tokens]
    # OPT's has two entries for padding.
    return size if size is not None and any(size <= table.num_embeddings <= size + 2 for table in tables) else None

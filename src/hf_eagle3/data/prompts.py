"""Prompts to decode from."""

import torch


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

"""Prompts to decode from."""

import torch


def prompt_of_row(row: dict[str, list[int]]) -> torch.LongTensor:
    """
    A prompt `(1, L)` of a row's first document: what is not learned at its beginning, or else its first half.

    Args:
        row (`dict[str, list[int]]`): With `input_ids` and, if it has them, `labels` and `seq_lengths`.
    """
    length = row["seq_lengths"][0] if "seq_lengths" in row else len(row["input_ids"])
    learned = [label != -100 for label in row.get("labels", row["input_ids"])[:length]]
    num_tokens = learned.index(True) if True in learned else 0
    return torch.tensor([row["input_ids"][: num_tokens or (length + 1) // 2]])

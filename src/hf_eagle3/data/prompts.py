"""Prompts from training data, and how long they may be."""

import torch
from transformers import PreTrainedModel

from ..remote_code.target_eagle3 import position_limits


def documents_of_row(row: dict[str, list[int]]) -> list[dict[str, list[int]]]:
    """
    Returns the `input_ids` and `labels` of each document that is packed in a row, or of the row itself if nothing is packed.
    Without labels every token is learned.
    """
    documents, start = [], 0
    for length in row.get("seq_lengths") or [len(row["input_ids"])]:
        tokens = slice(start, start + length)
        labels = row.get("labels", row["input_ids"])[tokens]
        documents.append({"input_ids": row["input_ids"][tokens], "labels": labels})
        start += length
    return documents


def prompt_of(document: dict[str, list[int]], image_end: int = 0) -> torch.Tensor:
    """
    Returns a prompt `(1, L)`: the tokens of a document before the first learned one, or else its first half. The `image_end` tokens
    up to the end of its last image are all in the prompt.
    """
    tokens, learned = document["input_ids"], [label != -100 for label in document["labels"]]
    has_prompt = learned[:1] == [False] and True in learned[image_end:]
    num_tokens = learned.index(True, image_end) if has_prompt else 0
    return torch.as_tensor(tokens[: num_tokens or max((len(tokens) + 1) // 2, image_end)])[None]


def trained_length(target: PreTrainedModel) -> int | None:
    """
    Returns how many tokens a text may have for a target with rotary positions (`max_position_embeddings`, or more with YaRN and the
    like), or `None` if it has none, or does not say.
    """
    config = target.config.get_text_config(decoder=True)
    rope, most = getattr(config, "rope_parameters", None), getattr(config, "max_position_embeddings", None)
    if not rope or most is None or getattr(config, "alibi", False):  # Falcon names rotary positions in any case
        return None
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    scaled = [(kind.get("factor") or 1) * (kind.get("original_max_position_embeddings") or most) for kind in kinds]
    return int(max(most, *scaled))


def num_positions(target: PreTrainedModel) -> int | None:
    """
    Returns the longest text that a target with a table of positions takes (GPT-2, OPT), or `None` if it has no table.

    Args:
        target (`PreTrainedModel`): The target.
    """
    size = dict(position_limits(target.config.get_text_config(decoder=True))).get("table")
    tokens = target.get_input_embeddings()
    tables = [each for each in target.modules() if isinstance(each, torch.nn.Embedding) and each is not tokens]
    # OPT's table has two more entries, for padding.
    return size if size is not None and any(size <= table.num_embeddings <= size + 2 for table in tables) else None

"""The draft vocabulary: which target tokens a draft can propose."""

import numpy as np
from datasets import Dataset, IterableDataset


def most_frequent_tokens(
    dataset: Dataset | IterableDataset, size: int, vocab_size: int, column: str = "labels"
) -> tuple[list[int], float]:
    """
    The most frequent supervised tokens of a tokenized data set (EAGLE-3 drafts for large vocabularies propose only
    those).

    Args:
        dataset (`Dataset` or `IterableDataset`): With a column of token ids; negative ones are not counted.
        size (`int`): How many tokens to take.
        vocab_size (`int`): The target's vocabulary size.
        column (`str`, *optional*, defaults to `"labels"`): The column to count.

    Returns:
        `tuple[list[int], float]`: The ids in ascending order, and the share of the counted tokens they make up.

    Raises:
        ValueError: if nothing is supervised, or a token is outside the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for batch in dataset.iter(batch_size=1000):
        ids = np.concatenate([np.asarray(row, dtype=np.int64) for row in batch[column]])
        ids = ids[ids >= 0]
        if len(ids) and ids.max() >= vocab_size:
            raise ValueError(
                f"The data set holds token {ids.max()}, but the target's vocabulary ends at {vocab_size - 1}: it was "
                "tokenized for another target."
            )
        counts += np.bincount(ids, minlength=vocab_size)
    if counts.sum() == 0:
        raise ValueError(
            f"No token of column {column!r} is supervised, so there is no draft vocabulary to take from it."
        )
    # Ties go to the lower id, so that the same data gives the same vocabulary everywhere.
    kept = np.sort(np.argsort(-counts, kind="stable")[:size])
    return kept.tolist(), float(counts[kept].sum() / counts.sum())

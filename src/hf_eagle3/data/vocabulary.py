"""The draft vocabulary: which target tokens a draft can propose."""

from collections.abc import Sequence

import numpy as np
from datasets import Dataset, IterableDataset
from datasets.utils import tqdm


def count_tokens(dataset: Dataset | IterableDataset, vocab_size: int, max_streamed_rows: int = 100_000) -> np.ndarray:
    """
    Returns how often each token occurs in a tokenized data set.

    Args:
        dataset (`Dataset` or `IterableDataset`): With `labels` (negative ones are not counted), or `input_ids`.
        vocab_size (`int`): The target's vocabulary size.
        max_streamed_rows (`int`, *optional*, defaults to 100000): How many rows of a stream to read.

    Returns:
        `np.ndarray` of shape `(vocab_size,)`.

    Raises:
        ValueError: if nothing is supervised, or a token is outside the vocabulary.
    """
    is_stream = isinstance(dataset, IterableDataset)
    batches = (dataset.take(max_streamed_rows) if is_stream else dataset).iter(batch_size=1000)
    counts = np.zeros(vocab_size, dtype=np.int64)
    # Rows of a stream are read and tokenized now, which may take minutes.
    for batch in tqdm(batches, desc="Counting tokens", unit=" thousand rows", disable=not is_stream):
        rows = batch["labels" if "labels" in batch else "input_ids"]  # without labels every token is learned
        ids = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
        ids = ids[ids >= 0]
        if len(ids) and ids.max() >= vocab_size:
            raise ValueError(
                f"The data set holds token {ids.max()}, but the target's vocabulary ends at {vocab_size - 1}. It was "
                "tokenized for another target: tokenize it again."
            )
        counts += np.bincount(ids, minlength=vocab_size)
    if counts.sum() == 0:
        raise ValueError("No token of the data is supervised (all labels are -100), so it gives no draft vocabulary.")
    return counts


def most_frequent_tokens(counts: np.ndarray, size: int) -> list[int]:
    """
    Returns the ids of the `size` most frequent tokens, ascending. EAGLE-3 drafts for large vocabularies propose only those.

    Args:
        counts (`np.ndarray`): How often each token occurs: see [`count_tokens`].
        size (`int`): How many tokens.
    """
    # Ties go to the lower id, so that the same data gives the same vocabulary everywhere.
    return np.sort(np.argsort(-counts, kind="stable")[:size]).tolist()


def coverage(counts: np.ndarray, token_ids: Sequence[int]) -> float:
    """
    Returns the share of the counted tokens that are among `token_ids`.

    Args:
        counts (`np.ndarray`): How often each token occurs: see [`count_tokens`].
        token_ids (`Sequence[int]`): The draft vocabulary.
    """
    return float(counts[token_ids].sum() / counts.sum())

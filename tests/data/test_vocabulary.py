import itertools

import pytest
from datasets import Dataset, IterableDataset

from hf_eagle3.data import count_tokens, coverage, most_frequent_tokens


ROWS = {"labels": [[5, 5, -100, 3], [5, 1, 3, -100]]}


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_most_frequent_tokens(kind):
    dataset = Dataset.from_dict(ROWS)
    if kind == "iterable":
        dataset = IterableDataset.from_generator(lambda: ({"labels": row} for row in ROWS["labels"]))
    counts = count_tokens(dataset, vocab_size=8)
    assert counts.tolist() == [0, 1, 0, 2, 0, 3, 0, 0]
    assert most_frequent_tokens(counts, size=2) == [3, 5] and coverage(counts, [3, 5]) == 5 / 6
    # Ties go to lower ids, unseen ones included.
    assert most_frequent_tokens(counts, size=4) == [0, 1, 3, 5]


def test_streams_may_be_endless(capfd):
    dataset = IterableDataset.from_generator(lambda: ({"labels": [number % 4]} for number in itertools.count()))
    assert count_tokens(dataset, vocab_size=4, max_streamed_rows=40).tolist() == [10] * 4
    assert "Counting tokens" in capfd.readouterr().err  # it may take minutes


def test_data_that_gives_no_vocabulary():
    with pytest.raises(ValueError, match="ends at 4"):
        count_tokens(Dataset.from_dict(ROWS), vocab_size=5)
    with pytest.raises(ValueError, match="supervised"):
        count_tokens(Dataset.from_dict({"labels": [[-100, -100]]}), vocab_size=5)

import pytest
from datasets import Dataset, IterableDataset

from hf_eagle3 import most_frequent_tokens


ROWS = {"labels": [[5, 5, -100, 3], [5, 1, 3, -100]]}


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_most_frequent_tokens(kind):
    dataset = Dataset.from_dict(ROWS)
    if kind == "iterable":
        dataset = IterableDataset.from_generator(lambda: ({"labels": row} for row in ROWS["labels"]))
    assert most_frequent_tokens(dataset, size=2, vocab_size=8) == ([3, 5], 5 / 6)
    # Ties go to lower ids, unseen ones included.
    assert most_frequent_tokens(dataset, size=4, vocab_size=8) == ([0, 1, 3, 5], 1.0)


def test_data_that_gives_no_vocabulary():
    with pytest.raises(ValueError, match="ends at 4"):
        most_frequent_tokens(Dataset.from_dict(ROWS), size=2, vocab_size=5)
    with pytest.raises(ValueError, match="supervised"):
        most_frequent_tokens(Dataset.from_dict({"labels": [[-100, -100]]}), size=2, vocab_size=5)

"""The metrics, loaded as users load them."""

import doctest
from pathlib import Path

import evaluate
import pytest

import hf_eagle3
from hf_eagle3.evaluation import BenchmarkRow


METRICS = Path(hf_eagle3.__file__).parent / "evaluation" / "metrics"


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", str(folder / "modules"))
        yield lambda name: evaluate.load(str(METRICS / name), cache_dir=str(folder))


def test_acceptance_length(load):
    metric = load("acceptance_length")
    results = metric.compute(predictions=[[1, 3, 4, 2], [2]])
    assert results["acceptance_length"] == 12 / 5 and results["mean_acceptance_length"] == (10 / 4 + 2) / 2
    assert results["acceptance_by_position"] == [4 / 5, 2 / 5, 1 / 5]
    assert results["conditional_acceptance"] == [4 / 5, 1 / 2, 1 / 2]
    row = BenchmarkRow("eagle3", 0.0)
    for lengths in (row.accepted_lengths, row.drafted_lengths):
        lengths.update([1, 3, 4, 2, 2])
    assert row.acceptance_length == results["acceptance_length"]
    assert row.acceptance_by_position == results["acceptance_by_position"]
    with pytest.raises(ValueError, match="at least 1 token"):
        metric.compute(predictions=[[0, 2]])
    with pytest.raises(ValueError, match="no verification forwards"):
        metric.compute(predictions=[[], []])


def test_speedup(load):
    metric = load("speculative_speedup")
    results = metric.compute(predictions=[30.0, 10.0, 80.0], references=[10.0, 10.0, 20.0])
    assert results == {"speedup": 3.0, "min_speedup": 1.0, "max_speedup": 4.0}
    with pytest.raises(ValueError, match="positive"):
        metric.compute(predictions=[1.0], references=[0.0])


@pytest.mark.parametrize("name", ["acceptance_length", "speculative_speedup"])
def test_examples(load, name, monkeypatch):
    metric = load(name)
    real = evaluate.load
    monkeypatch.setattr(evaluate, "load", lambda path: metric if path.endswith(f"metrics/{name}") else real(path))
    examples = doctest.DocTestParser().get_doctest(metric.inputs_description, {"evaluate": evaluate}, name, None, 0)
    assert examples.examples and doctest.DocTestRunner().run(examples).failed == 0

"""Speed-up of speculative decoding, for `evaluate.load`."""

import statistics
from collections.abc import Sequence

import datasets
import evaluate

from hf_eagle3.evaluation.results import speedup


DESCRIPTION = """
Tokens per second with speculative decoding, over those of plain generation. Measure the two in turns.
"""

INPUTS = """
Args:
    predictions (`list[float]`): Tokens per second with speculative decoding, one entry for each repeat.
    references (`list[float]`): Tokens per second of plain generation, in the same repeats.

Returns:
    speedup (`float`): The median over repeats.
    min_speedup, max_speedup (`float`): Their range: how noisy the machine was.

Example:

    >>> metric = evaluate.load("src/hf_eagle3/evaluation/metrics/speculative_speedup")
    >>> metric.compute(predictions=[30.0, 20.0, 40.0], references=[10.0, 10.0, 10.0])
    {'speedup': 3.0, 'min_speedup': 2.0, 'max_speedup': 4.0}
"""

CITATION = """
@inproceedings{leviathan2023fast,
  title={Fast Inference from Transformers via Speculative Decoding},
  author={Leviathan, Yaniv and Kalman, Matan and Matias, Yossi},
  booktitle={International Conference on Machine Learning},
  year={2023}
}
"""


class SpeculativeSpeedup(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
            ),
            reference_urls=["https://huggingface.co/papers/2211.17192"],
        )

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        ratios = [speedup(ours, plain) for ours, plain in zip(predictions, references)]
        return {"speedup": statistics.median(ratios), "min_speedup": min(ratios), "max_speedup": max(ratios)}

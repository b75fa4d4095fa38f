"""Acceptance length of speculative decoding, for `evaluate.load`."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from hf_eagle3.evaluation.results import acceptance_by_position, acceptance_length


DESCRIPTION = """
How many tokens a verification forward of speculative decoding emits: the drafted tokens that it accepts, and one of its own.
"""

INPUTS = """
Args:
    predictions (`list[list[int]]`): For each request, how many tokens each verification forward emitted, at least 1.

Returns:
    acceptance_length (`float`): Pooled: all tokens over all verification forwards.
    mean_acceptance_length (`float`): The mean over requests. Short requests count as much as long ones.
    conditional_acceptance (`list[float]`): Entry `k`: the share of forwards that accepted `k + 1` drafted tokens, among those that
        accepted `k`.
    acceptance_by_position (`list[float]`): Entry `k`: the share of all forwards that accepted at least `k + 1` drafted tokens.

Example:

    >>> metric = evaluate.load("src/hf_eagle3/evaluation/metrics/acceptance_length")
    >>> metric.compute(predictions=[[1, 3], [4]])["acceptance_length"]
    2.6666666666666665
"""

CITATION = """
@article{li2025eagle3,
  title={{EAGLE-3}: Scaling up Inference Acceleration of Large Language Models via Training-Time Test},
  author={Li, Yuhui and Wei, Fangyun and Zhang, Chao and Zhang, Hongyang},
  journal={arXiv preprint arXiv:2503.01840},
  year={2025}
}
"""


class AcceptanceLength(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("int64"))}),
            reference_urls=["https://huggingface.co/papers/2503.01840"],
        )

    def _compute(self, predictions: Sequence[Sequence[int]]) -> dict[str, Any]:
        requests = [list(lengths) for lengths in predictions if len(lengths)]
        lengths = Counter(length for request in requests for length in request)
        if not lengths:
            raise ValueError("There are no verification forwards in `predictions`.")
        if min(lengths) < 1:
            raise ValueError(f"A verification forward emits at least 1 token, but `predictions` has {min(lengths)}.")
        by_position = acceptance_by_position(lengths)
        return {
            "acceptance_length": acceptance_length(lengths),
            "mean_acceptance_length": statistics.mean(acceptance_length(Counter(request)) for request in requests),
            "conditional_acceptance": [after / before for before, after in zip([1.0, *by_position], by_position)],
            "acceptance_by_position": by_position,
        }

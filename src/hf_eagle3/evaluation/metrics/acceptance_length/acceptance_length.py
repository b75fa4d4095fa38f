"""Acceptance length of speculative decoding, for `evaluate.load`."""

from collections import Counter

import datasets
import evaluate


DESCRIPTION = """
How many tokens each verification forward of speculative decoding emits: those it accepts, and the one that it picks itself.
"""

INPUTS = """
Args:
    predictions (`list[list[int]]`): For each request, how many tokens each verification forward emitted, at least 1.

Returns:
    acceptance_length (`float`): Pooled: all tokens over all verification forwards.
    mean_acceptance_length (`float`): The mean of the requests' own, which weighs short requests as much as long ones.
    conditional_acceptance (`list[float]`): Entry `k`: of the forwards that accepted the first `k` drafted tokens, how many accepted
        the next one, too.
    acceptance_by_position (`list[float]`): Entry `k`: of all forwards, how many accepted at least `k + 1` drafted tokens.

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
    def _info(self):
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("int64"))}),
            reference_urls=["https://huggingface.co/papers/2503.01840"],
        )

    def _compute(self, predictions):
        requests = [list(lengths) for lengths in predictions if len(lengths)]
        lengths = Counter(length for request in requests for length in request)
        if not lengths:
            raise ValueError("There are no verification forwards in `predictions`.")
        if min(lengths) < 1:
            raise ValueError(f"A verification forward emits at least 1 token, but `predictions` has {min(lengths)}.")
        num_forwards = lengths.total()
        # Forwards that accepted at least 0, 1, 2, ... drafted tokens.
        reached = [sum(count for length, count in lengths.items() if length > k) for k in range(max(lengths))]
        return {
            "acceptance_length": sum(length * count for length, count in lengths.items()) / num_forwards,
            "mean_acceptance_length": sum(sum(request) / len(request) for request in requests) / len(requests),
            "conditional_acceptance": [after / before for before, after in zip(reached, reached[1:])],
            "acceptance_by_position": [count / num_forwards for count in reached[1:]],
        }

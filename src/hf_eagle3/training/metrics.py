"""Metrics of training-time test, summed until they are logged."""

import statistics
from dataclasses import fields

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger

from .arguments import Eagle3TrainingArguments
from .ttt import TTTOutput


logger = get_logger(__name__)

# Metrics that are measured at each drafting step: `accuracy_0`, `accuracy_1`, ...
BY_STEP = ("accuracy", "acceptance_rate", "conditional_acceptance", "joint_acceptance")


def sum_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype of sums over processes: float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float if device.type == "mps" else torch.double


class TTTMetrics:
    """
    Sums the counts of unrolls until they are logged, over all processes, for training (`"train"`) and evaluation (`"eval"`).
    Reads the trainer's arguments each time, because a caller may change them between two trainings.
    """

    def __init__(self, accelerator: Accelerator, args: Eagle3TrainingArguments):
        self.accelerator, self.args = accelerator, args
        self.counts: dict[str, torch.Tensor] = {}
        self.loss_weights: dict[str, list[float]] = {"train": [], "eval": []}

    def clear(self, mode: str) -> None:
        """Drops the counts of a training or an evaluation that did not end."""
        self.counts.pop(mode, None)
        self.loss_weights[mode] = []

    def add(self, mode: str, outputs: TTTOutput) -> None:
        """Adds the counts of an unroll."""
        dtype, steps = sum_dtype(self.accelerator.device), len(outputs.num_rows)
        sums = [getattr(outputs, count.name).detach() for count in fields(TTTOutput)]
        # Steps that a short unroll does not have count no rows.
        counts = F.pad(torch.stack([each.to(dtype) for each in sums]), (0, self.args.ttt_steps - steps))
        self.counts[mode] = counts + self.counts.get(mode, 0)
        self.loss_weights[mode].append(sum(self.args.ttt_step_decay**step for step in range(steps)))

    def pop(self, mode: str) -> dict[str, float]:
        """
        Returns the metrics since the last call, over all processes, with one entry per drafting step. For an evaluation they
        include the loss over all rows, because `Trainer`'s mean over batches depends on their sizes.
        """
        counts = self.counts.pop(mode, None)
        if counts is None:
            return {}
        counts = self.accelerator.reduce(counts, "sum").cpu()  # one sync for all
        sums = TTTOutput(*counts)
        if sums.num_rows[0] == 0:
            logger.warning(
                f"No token of the last {'steps' if mode == 'train' else 'evaluation'} is learned, so the loss is 0: all labels after the "
                "first two tokens are -100. Check the labels of the data, and the `data_collator` if you pass one."
            )
        accuracy = sums.num_correct / sums.num_rows.clamp(min=1)
        acceptance_rate = sums.acceptance_sums / sums.num_sampled.clamp(min=1)
        conditional = sums.num_accepted / sums.num_reached.clamp(min=1)
        # Not `num_accepted / num_rows[0]`: a row that reaches the end of its text was not rejected there.
        joint = conditional.cumprod(dim=0)
        by_step = dict(zip(BY_STEP, (accuracy, acceptance_rate, conditional, joint), strict=True))
        metrics = {
            f"{name}_{step}": value
            for name, values in by_step.items()
            for step, value in enumerate(values.tolist())
            if sums.num_rows[step] > 0
        }
        # Verification always emits one token, and drafted token k if the first k are accepted.
        metrics["simulated_acceptance_length"] = 1 + joint.sum().item()
        if mode == "eval":
            metrics["loss"] = sums.loss(self.args.ttt_step_decay).item()
        return metrics

    def loss_per_step(self, loss: float, mode: str) -> float:
        """
        Divides a loss by the mean sum of `ttt_step_decay`'s weights since the last call. The result is comparable while
        the unroll grows.
        """
        weights, self.loss_weights[mode] = self.loss_weights[mode], []
        return loss / statistics.mean(weights or [1.0])  # a loss that a caller logs has no weights

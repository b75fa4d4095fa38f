"""Shows a few figures of a training on the console. Trackers get all that is logged."""

import statistics
import time
from collections import deque
from typing import Any

from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging


logger = logging.get_logger(__name__)

# `loss_per_step` is comparable while the unroll grows. `loss`, a sum over its steps, is not.
SHOWN = (
    "loss_per_step",
    "ttt_steps",
    "accuracy_0",
    "simulated_acceptance_length",
    "learning_rate",
    "epoch",
    "train_runtime",
)
# The endings of figures after `eval_`, or after `eval_<name>_` if there are several data sets.
SHOWN_OF_EVALUATION = ("loss_per_step", "accuracy_0", "acceptance_length", "vocabulary_coverage")


def shown(logs: dict | None) -> dict:
    """Returns the figures to show."""
    logs = logs or {}
    of_evaluation = [name for name in logs if name.startswith("eval_") and name.endswith(SHOWN_OF_EVALUATION)]
    return {name: logs[name] for name in [*SHOWN, *of_evaluation] if name in logs}


class FewFigures(TrainerCallback):
    """Passes on few figures of a log, to one of transformers' callbacks that show them."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict | None = None,
        **kwargs: Any,
    ) -> None:
        if few := shown(logs):
            if isinstance(self, PrinterCallback):  # without a bar
                few = {"step": f"{state.global_step}/{state.max_steps}", **few}
            super().on_log(args, state, control, logs=few, **kwargs)


class EagleProgressCallback(FewFigures, ProgressCallback):
    """Transformers' progress bar with few figures."""


class EaglePrinterCallback(FewFigures, PrinterCallback):
    """Transformers' printer with few figures and the progress, for `disable_tqdm`."""


class SlowStepsCallback(TrainerCallback):
    """
    Warns once if steps on a CPU become much slower, and says what helps.

    OpenMP's threads spin at the end of each parallel part until all are done. If another process takes a core, all of
    them wait for the thread on it.
    """

    FACTOR, NUM_KNOWN, NUM_SLOW = 10, 20, 3

    def __init__(self) -> None:
        self.start: float | None = None
        self.usual: deque[float] = deque(maxlen=100)
        self.last: deque[bool] = deque(maxlen=10)
        self.has_warned = False

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.start = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.start is None or self.has_warned:
            return
        seconds, self.start = time.perf_counter() - self.start, None
        is_slow = len(self.usual) >= self.NUM_KNOWN and seconds > self.FACTOR * statistics.median(self.usual)
        self.last.append(is_slow)
        if not is_slow:
            self.usual.append(seconds)
        elif sum(self.last) >= self.NUM_SLOW:
            self.has_warned = True
            logger.warning(
                f"Step {state.global_step} took {seconds:.1f} s, and usual ones {statistics.median(self.usual):.1f} s. If other "
                "processes use the same cores, stop and go on (`--resume_from_checkpoint true`) with OMP_WAIT_POLICY=passive, or "
                "with one less in OMP_NUM_THREADS: see docs/cpus.md."
            )


CALLBACKS = {ProgressCallback: EagleProgressCallback, PrinterCallback: EaglePrinterCallback}


def show_few(trainer: Trainer) -> None:
    """Replaces transformers' callbacks by ours. On CPUs it also watches the time of steps."""
    if trainer.accelerator.device.type == "cpu":
        trainer.add_callback(SlowStepsCallback())
    for theirs, ours in CALLBACKS.items():
        if any(type(callback) is theirs for callback in trainer.callback_handler.callbacks):
            trainer.remove_callback(theirs)
            trainer.add_callback(ours)

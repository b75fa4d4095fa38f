"""Shows a few figures of a training on the console. Trackers get all that is logged."""

from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback


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

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        if few := shown(logs):
            if isinstance(self, PrinterCallback):  # without a bar
                few = {"step": f"{state.global_step}/{state.max_steps}", **few}
            super().on_log(args, state, control, logs=few, **kwargs)


class EagleProgressCallback(FewFigures, ProgressCallback):
    """Transformers' progress bar with few figures."""


class EaglePrinterCallback(FewFigures, PrinterCallback):
    """Transformers' printer with few figures and the progress, for `disable_tqdm`."""


CALLBACKS = {ProgressCallback: EagleProgressCallback, PrinterCallback: EaglePrinterCallback}


def show_few(trainer: Trainer) -> None:
    """Replaces transformers' callbacks by ours."""
    for theirs, ours in CALLBACKS.items():
        if any(type(callback) is theirs for callback in trainer.callback_handler.callbacks):
            trainer.remove_callback(theirs)
            trainer.add_callback(ours)

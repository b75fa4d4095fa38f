"""What the console shows of a training; trackers get all that is logged."""

from transformers import PrinterCallback, ProgressCallback


# `loss_per_step` can be compared while the unroll grows, and `loss`, a sum over its steps, cannot.
SHOWN = (
    "loss_per_step",
    "ttt_steps",
    "accuracy_0",
    "simulated_acceptance_length",
    "rollout_acceptance_length",
    "learning_rate",
    "epoch",
    "train_runtime",
)
# The same after `eval_`, or `eval_<name>_` if there are several data sets.
SHOWN_OF_EVALUATION = ("loss_per_step", "accuracy_0", "acceptance_length", "vocabulary_coverage")


def shown(logs: dict | None) -> dict:
    """The figures by which one sees how a training goes."""
    logs = logs or {}
    of_evaluation = [name for name in logs if name.startswith("eval_") and name.endswith(SHOWN_OF_EVALUATION)]
    return {name: logs[name] for name in [*SHOWN, *of_evaluation] if name in logs}


class EagleProgressCallback(ProgressCallback):
    """Transformers' progress bar, with few figures."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if few := shown(logs):
            super().on_log(args, state, control, logs=few, **kwargs)


class EaglePrinterCallback(PrinterCallback):
    """The same where there is no progress bar (`disable_tqdm`): progress is a figure then."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if few := shown(logs):
            few = {"step": f"{state.global_step}/{state.max_steps}", **few}
            super().on_log(args, state, control, logs=few, **kwargs)


CALLBACKS = {ProgressCallback: EagleProgressCallback, PrinterCallback: EaglePrinterCallback}


def show_few(trainer) -> None:
    """Puts these in the place of transformers' own."""
    for theirs, ours in CALLBACKS.items():
        if any(type(callback) is theirs for callback in trainer.callback_handler.callbacks):
            trainer.remove_callback(theirs)
            trainer.add_callback(ours)

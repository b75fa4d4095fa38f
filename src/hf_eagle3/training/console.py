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
    "eval_loss_per_step",
    "eval_accuracy_0",
    "eval_simulated_acceptance_length",
    "eval_acceptance_length",
    "eval_vocabulary_coverage",
    "train_runtime",
)


def shown(logs: dict | None) -> dict:
    """The figures by which one sees how a training goes."""
    return {name: logs[name] for name in SHOWN if name in (logs or {})}


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

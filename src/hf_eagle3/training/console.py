"""Shows a few figures of a training on the console or in a notebook. Trackers get all that is logged."""

import copy
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.utils import is_in_notebook


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
    """Shows only a few figures of a log in transformers' progress bar or printer (`disable_tqdm`)."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        if few := shown(logs):
            if isinstance(self, PrinterCallback):  # without a bar
                few = {"step": f"{state.global_step}/{state.max_steps}", **few}
            super().on_log(args, state, control, logs=few, **kwargs)


def with_losses_per_step(logs: dict | None) -> dict:
    """Returns logs with the losses per drafting step in place of their sums."""
    logs = logs or {}
    return {name.removesuffix("_per_step"): value for name, value in logs.items() if f"{name}_per_step" not in logs}


class FewColumns(TrainerCallback):
    """Shows only a few figures in the table of a notebook, which has a column for each. Its losses are those per step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=with_losses_per_step(logs), **kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict | None = None, **kwargs: Any) -> None:
        state = copy.copy(state)  # the table takes the loss from its log
        state.log_history = list(map(with_losses_per_step, state.log_history))
        few = with_losses_per_step(shown(metrics))
        super().on_evaluate(args, state, control, metrics=few, **kwargs)


def show_few(trainer: Trainer) -> None:
    """Replaces transformers' callbacks by ones that show only a few figures."""
    kinds: dict[type, type] = {ProgressCallback: FewFigures, PrinterCallback: FewFigures}
    if is_in_notebook():
        from transformers.utils.notebook import NotebookProgressCallback  # needs IPython

        kinds[NotebookProgressCallback] = FewColumns
    for theirs, mixin in kinds.items():
        if any(type(callback) is theirs for callback in trainer.callback_handler.callbacks):
            trainer.remove_callback(theirs)
            trainer.add_callback(type(f"Eagle{theirs.__name__}", (mixin, theirs), {}))

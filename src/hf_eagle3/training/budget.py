"""Training that goes by the time, not by the number of steps."""

import math
import time

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import SFTTrainer

from .trainer import Eagle3Trainer


# Arguments of a training of minutes on running text, which keeps nothing but what it ends with.
SHORT = {
    "packing": True,
    "packing_strategy": "wrapped",
    "warmup_steps": 20,
    "save_strategy": "no",
    "report_to": "none",
}
# Arguments of a training that is ended by the time.
BY_TIME = {"max_steps": 1_000_000, "lr_scheduler_type": "constant_with_warmup"}


class TimeBudget(TrainerCallback):
    """
    Ends training after so many minutes, lets the learning rate fall to zero on the way, and shows the way. Where that
    is too little for `min_steps`, it takes longer, up to `LONGER` times. See [`train_for`].

    Args:
        minutes (`float`): Time for training.
        description (`str`): What is shown beside the way.
        min_steps (`int`, *optional*, defaults to 0): Optimizer steps.
        clock (`Callable`, *optional*): Gives seconds. By default wall time.
    """

    LONGER = 5

    def __init__(self, minutes: float, description: str, min_steps: int = 0, clock=time.monotonic):
        self.given = self.seconds = 60 * minutes
        self.description, self.min_steps, self.clock, self.share = description, min_steps, clock, 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        if args.world_size > 1:
            raise ValueError(
                "Several processes would not agree on the time. Train by `max_steps` or `num_train_epochs`."
            )
        self.start = self.clock()
        self.bar = tqdm(
            total=round(self.seconds),
            desc=self.description,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n}/{total}s{postfix}",
        )

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        elapsed = min((self.clock() - self.start) / self.seconds, 1.0)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5 * (1 + math.cos(math.pi * elapsed))

    def on_step_end(self, args, state, control, **kwargs):
        elapsed = self.clock() - self.start
        needed = min(elapsed / state.global_step * self.min_steps, self.LONGER * self.given)
        if state.global_step >= 5 and needed > self.seconds:  # the first steps take longer
            if needed > 1.1 * self.seconds:
                self.bar.write(
                    f"{self.description}: {state.global_step} steps in {elapsed:.0f} s are few for this machine: training "
                    f"takes {needed:.0f} s instead of {self.given:.0f}."
                )
            self.seconds, self.bar.total = needed, round(needed)
        self.share = min(elapsed / self.seconds, 1.0)
        is_measured = state.global_step >= min(5, self.min_steps)
        if elapsed >= self.seconds and not is_measured:  # it is not known yet how long it will take
            self.bar.total = round(self.LONGER * self.given)
        self.bar.update(min(int(elapsed), self.bar.total) - self.bar.n)
        control.should_training_stop = elapsed >= (self.seconds if is_measured else self.LONGER * self.given)

    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = ("loss", "accuracy_0", "simulated_acceptance_length")
        self.bar.set_postfix({"step": state.global_step, **{key: f"{logs[key]:.2f}" for key in shown if key in logs}})

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


class TimedEagle3Trainer(Eagle3Trainer):
    """Goes by the time, not by the number of steps."""

    budget: TimeBudget

    @property
    def progress(self) -> float:
        return self.budget.share


def train_for(trainer: SFTTrainer, budget: TimeBudget) -> None:
    """
    Trains as long as the budget allows. Its arguments should be those of `BY_TIME`, and others beside them.
    """
    for callback in (ProgressCallback, PrinterCallback):  # which count steps; here time counts
        trainer.remove_callback(callback)
    trainer.add_callback(budget)
    if isinstance(trainer, TimedEagle3Trainer):
        trainer.budget = budget
    trainer.train()

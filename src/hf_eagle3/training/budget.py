"""Training by time instead of the number of steps."""

import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainingArguments
from trl import SFTTrainer

from .trainer import Eagle3Trainer


# Arguments of a short training on running text, without checkpoints, on a GPU if there is one.
SHORT = {
    "packing": True,
    "packing_strategy": "wrapped",
    "warmup_steps": 20,
    "save_strategy": "no",
    "report_to": "none",
    "logging_steps": 50,
    "use_cpu": not torch.cuda.is_available(),
}
# Arguments of a training that a [`TimeBudget`] ends.
BY_TIME = {"max_steps": 1_000_000, "lr_scheduler_type": "constant_with_warmup"}


class TimeBudget(TrainerCallback):
    """
    Ends training after some minutes. Until then the learning rate falls to zero, and a bar with the description shows the
    progress. If the time is too short for `min_steps` optimizer steps, training takes up to `LONGER` times as long. See
    [`train_for`].
    """

    LONGER = 5

    def __init__(
        self, minutes: float, description: str, min_steps: int = 0, clock: Callable[[], float] = time.monotonic
    ):
        self.given = self.seconds = 60 * minutes
        self.description, self.min_steps, self.clock, self.share = description, min_steps, clock, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size > 1:
            raise ValueError(
                "Several processes would not stop at the same step. Train by `max_steps` or `num_train_epochs`."
            )
        self.start = self.clock()
        self.bar = tqdm(
            total=round(self.seconds),
            desc=self.description,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n}/{total}s{postfix}",
        )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
        elapsed = min((self.clock() - self.start) / self.seconds, 1.0)
        for group in optimizer.param_groups:
            group["lr"] *= 1 - elapsed

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        elapsed = self.clock() - self.start
        needed = min(elapsed / state.global_step * self.min_steps, self.LONGER * self.given)
        if state.global_step >= 5 and needed > self.seconds:  # the first steps take longer
            if needed > 1.1 * self.seconds:
                self.bar.write(
                    f"{self.description}: this machine took {elapsed:.0f} s for {state.global_step} steps, so training takes "
                    f"{needed:.0f} s instead of {self.given:.0f} s."
                )
            self.seconds, self.bar.total = needed, round(needed)
        self.share = min(elapsed / self.seconds, 1.0)
        is_measured = state.global_step >= min(5, self.min_steps)
        if elapsed >= self.seconds and not is_measured:  # too few steps to estimate the time
            self.bar.total = round(self.LONGER * self.given)
        self.bar.update(min(int(elapsed), self.bar.total) - self.bar.n)
        control.should_training_stop = elapsed >= (self.seconds if is_measured else self.LONGER * self.given)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        shown = ("loss", "accuracy_0", "simulated_acceptance_length")
        self.bar.set_postfix({"step": state.global_step, **{key: f"{logs[key]:.2f}" for key in shown if key in logs}})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.close()


def on_one_gpu(args: TrainingArguments) -> TrainingArguments:
    """
    Returns the arguments of a trainer, changed to use only the first GPU. `SFTTrainer` refuses several GPUs in one process, and
    a [`TimeBudget`] refuses several processes.
    """
    args._n_gpu = min(args.n_gpu, 1)
    return args


class TimedEagle3Trainer(Eagle3Trainer):
    """An [`Eagle3Trainer`] whose progress is the share of time, not of steps."""

    budget: TimeBudget

    @property
    def progress(self) -> float:
        return self.budget.share


def train_for(trainer: SFTTrainer, budget: TimeBudget) -> None:
    """Trains a trainer, with the arguments of `BY_TIME` and others, until the budget ends it."""
    for callback in (ProgressCallback, PrinterCallback):  # they show steps
        trainer.remove_callback(callback)
    trainer.add_callback(budget)
    if isinstance(trainer, TimedEagle3Trainer):
        trainer.budget = budget
    trainer.train()

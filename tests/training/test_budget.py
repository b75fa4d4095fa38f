import itertools
from types import SimpleNamespace

import pytest
from trainers import make_trainer
from trl import SFTConfig

from hf_eagle3 import Eagle3TrainingArguments
from hf_eagle3.training.budget import BY_TIME, TimeBudget, TimedEagle3Trainer, on_one_gpu, train_for


@pytest.mark.parametrize(
    ("seconds_a_step", "min_steps", "expected"),
    [
        (6, 0, 10),  # as long as it was given, a minute
        (6, 8, 10),
        (6, 11, 11),  # as long as that takes
        (6, 30, 30),
        (6, 1000, 50),  # at most five times as long
        (18, 100, 17),  # a machine so slow that the minute is over before it is known
        (400, 100, 1),
    ],
)
def test_how_long_it_takes(capsys, seconds_a_step, min_steps, expected):
    now, state, control = 0.0, SimpleNamespace(global_step=0), SimpleNamespace()
    budget = TimeBudget(1.0, "Draft", min_steps, clock=lambda: now)
    budget.on_train_begin(SimpleNamespace(world_size=1), state, control)
    for state.global_step in itertools.count(1):
        optimizer = SimpleNamespace(param_groups=[{"lr": 1.0}])
        budget.on_pre_optimizer_step(None, state, control, optimizer)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(max(1 - now / budget.seconds, 0))
        now += seconds_a_step
        budget.on_step_end(None, state, control)
        if control.should_training_stop:
            break
    assert state.global_step == expected
    budget.on_train_end(None, state, control)
    # Whoever waits longer than they asked for is told why.
    assert ("this machine took" in capsys.readouterr().out) == (expected in (30, 50, 17))


def test_several_processes_are_refused():
    with pytest.raises(ValueError, match="would not stop at the same step. Train by `max_steps`"):
        TimeBudget(1.0, "Draft").on_train_begin(SimpleNamespace(world_size=2), None, None)


def test_the_unroll_grows_by_time(tmp_path, tokenizer):
    """The number of steps is not known in advance, and `max_steps` is far beyond it."""
    settings = {**BY_TIME, "ttt_steps": 3, "ttt_warmup": 0.8}
    trainer = make_trainer(tmp_path, tokenizer, trainer_class=TimedEagle3Trainer, **settings)
    train_for(trainer, TimeBudget(1.0, "Draft", clock=lambda: 6.0 * trainer.state.global_step))
    unrolls = [entry["ttt_steps"] for entry in trainer.state.log_history if "loss" in entry]
    assert unrolls == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]


def test_a_machine_with_several_gpus(tmp_path):
    """`SFTTrainer` refuses a process that uses more than one."""
    for arguments in (SFTConfig, Eagle3TrainingArguments):
        args = arguments(str(tmp_path), use_cpu=True, bf16=False)
        for there, used in ((0, 0), (1, 1), (8, 1)):
            args._n_gpu = there
            assert on_one_gpu(args).n_gpu == used

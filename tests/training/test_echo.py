"""Batches that are learned from several times."""

from itertools import pairwise

import pytest
from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader
from conftest import make_target
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from training.test_trainer import TEXTS, make_trainer

from hf_eagle3.training.echo import EchoSampler


def test_batches_come_again():
    sampler = EchoSampler(SequentialSampler(range(11)), batch_size=2, num_batches=2, factor=2)
    windows = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10]]
    assert list(sampler) == [row for window in windows for row in 2 * window] and len(sampler) == 22
    assert list(EchoSampler(SequentialSampler(range(3)), 4, 2, 2)) == [0, 1, 2, 0, 1, 2]


def test_the_order_is_that_without_echoes():
    rows = range(24)
    sampler, plain = EchoSampler(RandomSampler(rows), 4, 2, 3, data_seed=5), SeedableRandomSampler(rows, data_seed=5)
    epochs = [list(sampler) for _ in range(2)]
    for epoch in epochs:
        assert list(dict.fromkeys(epoch)) == list(plain)
    assert epochs[0] != epochs[1]
    sampler.set_epoch(0)
    assert list(sampler) == epochs[0]


@pytest.mark.parametrize("split_batches", [False, True])
def test_processes_read_their_own_batches_again(split_batches):
    size, num_batches, factor, seen = 3, 2, 2, []
    for process in range(2):
        block = 2 * size
        sampler = EchoSampler(RandomSampler(range(30)), block, num_batches, factor, data_seed=1)
        loader = DataLoader(list(range(30)), batch_size=block if split_batches else size, sampler=sampler)
        loader = prepare_data_loader(
            loader,
            num_processes=2,
            process_index=process,
            split_batches=split_batches,
            put_on_device=False,
            use_seedable_sampler=True,
        )
        batches = [tuple(batch.tolist()) for batch in loader]
        seen.append(set(batches))
        assert len(batches) == factor * len(seen[-1]) == factor * 5
        for batch in seen[-1]:
            places = [place for place, other in enumerate(batches) if other == batch]
            assert all(later - earlier <= num_batches for earlier, later in pairwise(places))
    assert sorted(row for batches in seen for batch in batches for row in batch) == list(range(30))


def losses(trainer, **kwargs):
    trainer.train(**kwargs)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def counting(trainer):
    """How many rows the target reads at once."""
    calls, forward = [], trainer.target_states._forward
    trainer.target_states.keeps_documents_apart = True  # else it would be tried
    trainer.target_states._forward = lambda **inputs: calls.append(len(inputs["input_ids"])) or forward(**inputs)
    return calls


ECHO = {"echo_factor": 2, "echo_buffer_size": 2, "max_steps": -1, "num_train_epochs": 2, "ttt_steps": 2}


@pytest.mark.parametrize(
    "settings", [{}, {"packing": True, "max_length": 40, "gradient_accumulation_steps": 2}], ids=str
)
def test_the_target_reads_each_batch_once(tmp_path, tokenizer, settings):
    rows = TEXTS.select(range(22))
    trainer = make_trainer(tmp_path, tokenizer, dataset=rows, **ECHO, **settings)
    calls, num_rows = counting(trainer), len(trainer.train_dataset)
    ours = losses(trainer)
    whole, rest = divmod(num_rows, 4)
    # The rows that are left over come one after the other, in batches that do not come again.
    assert len(calls) == 2 * (whole + -(-2 * rest // 4))
    assert trainer.state.epoch == 2 and trainer.state.num_train_epochs == 2
    assert len(trainer.echo.states) == 2
    # By a target that reads all of them anew, nothing else is learned.
    plain = make_trainer(tmp_path / "plain", tokenizer, dataset=rows, **ECHO, **settings)
    plain.echo = lambda inputs: inputs
    calls = counting(plain)
    assert losses(plain) == ours and len(calls) == 2 * (2 * whole + -(-2 * rest // 4))


@pytest.mark.parametrize("split_batches", [False, True])
def test_a_batch_is_that_of_all_processes(tmp_path, tokenizer, monkeypatch, split_batches):
    trainer = make_trainer(tmp_path, tokenizer, accelerator_config={"split_batches": split_batches}, **ECHO)
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    assert trainer._get_train_sampler().batch_size == (4 if split_batches else 8)


def test_resumed_training_goes_on_as_if_uninterrupted(tmp_path, tokenizer):
    settings = {**ECHO, "save_strategy": "steps", "save_steps": 3}
    whole = losses(make_trainer(tmp_path, tokenizer, **settings))
    for step in (3, 15):  # within a window, and in the second epoch
        resumed = make_trainer(tmp_path, tokenizer, **settings)
        assert losses(resumed, resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}")) == whole, step
    with pytest.raises(ValueError, match="echo_factor"):
        make_trainer(tmp_path, tokenizer, **settings | {"echo_factor": 3, "num_train_epochs": 3}).train(True)


def test_evaluation_and_rollouts_are_not_kept(tmp_path, tokenizer):
    rollouts = {"rollout_share": 0.5, "rollout_start": 0.0, "rollout_interval": 2, "rollout_max_new_tokens": 4}
    settings = {**ECHO, **rollouts, "eval_strategy": "steps", "eval_steps": 1, "num_eval_prompts": 0, "max_steps": 4}
    settings["echo_buffer_size"] = 3
    trainer = make_trainer(tmp_path, tokenizer, eval_dataset=TEXTS.select(range(3)), **settings)
    kept, echo = [], trainer.echo
    trainer.echo = lambda inputs: kept.append(inputs["input_ids"].clone()) or echo(inputs)
    trainer.train()
    assert len(kept) == len(echo.states) == 2  # the other two are rollouts


def test_what_cannot_come_again(tmp_path, tokenizer):
    target = make_target("llama")
    store = make_trainer(tmp_path, tokenizer, target=target).extract_features(tmp_path / "features")
    for dataset, reason in ((store, "stored features"), (TEXTS.to_iterable_dataset(), "those of a stream")):
        with pytest.raises(ValueError, match=f"`echo_factor` is 2.*{reason}"):
            make_trainer(tmp_path, tokenizer, target=target, dataset=dataset, echo_factor=2)
    with pytest.raises(ValueError, match="batch_rebalance"):
        make_trainer(tmp_path, tokenizer, echo_factor=2, train_sampling_strategy="batch_rebalance")
    for name in ("echo_factor", "echo_buffer_size"):
        with pytest.raises(ValueError, match=name):
            make_trainer(tmp_path, tokenizer, **{name: 0})

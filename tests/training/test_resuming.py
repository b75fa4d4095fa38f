"""Resuming: which checkpoints are whole, and what must be as it was begun."""

import json
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from conftest import make_target
from datasets import Dataset
from peft import LoraConfig
from torch.utils.data import DataLoader
from trainers import TEXTS, losses, losses_of, make_trainer
from transformers import TrainerCallback

from hf_eagle3 import Eagle3ForSpeculation, Eagle3Trainer, Eagle3TrainingArguments
from hf_eagle3.training.checkpoint import last_whole_checkpoint, what_is_broken
from hf_eagle3.training.record import check_resumption, learned_tokens, target_digest, training_record


BEGUN = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("begun")
    make_trainer(folder, tokenizer, max_steps=2, **BEGUN).train()
    return folder


@pytest.fixture
def begun(tmp_path, finished):
    """The folder of a training of two steps."""
    return shutil.copytree(finished, tmp_path / "begun")


def test_resuming_as_the_arguments_say_it(begun, tokenizer):
    """`Trainer` itself would begin anew, over the checkpoints."""
    trainer = make_trainer(begun, tokenizer, max_steps=3, resume_from_checkpoint=True, **BEGUN)
    trainer.train()
    assert trainer.resumed_from is not None
    trainer.train(resume_from_checkpoint=False)
    assert trainer.resumed_from is None


@pytest.mark.parametrize(
    "changes", [{}, {"dataset": TEXTS.select(range(8)), "train_sampling_strategy": "group_by_length"}]
)
def test_resumed_training_goes_on_as_if_uninterrupted(tmp_path, tokenizer, changes):
    """The second data set has two steps in an epoch."""
    arguments = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3, **changes}
    first, resumed = (make_trainer(tmp_path, tokenizer, **arguments) for _ in range(2))
    first.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses_of(resumed) == pytest.approx(losses_of(first), rel=1e-5)
    # Nobody knows how long the part took that was cut off.
    assert training_record(first)["seconds"] > 0 and training_record(resumed)["seconds"] is None


def test_the_rest_of_an_epoch_in_several_processes_has_its_order(tmp_path, tokenizer):
    trainer = make_trainer(
        tmp_path, tokenizer, dataset=TEXTS.select(range(16)), train_sampling_strategy="group_by_length"
    )
    trainer.state.epoch = 1.5
    loader = DataLoader(list(range(16)), batch_size=2, sampler=trainer._get_train_sampler())
    loader = prepare_data_loader(loader, num_processes=2, process_index=0)
    whole = [batch.tolist() for batch in loader]
    rest = skip_first_batches(loader, 2)
    rest.set_epoch(1)
    assert [batch.tolist() for batch in rest] == whole[2:] and sorted(sum(whole, [])) != sum(whole, [])


def test_the_order_of_grouped_rows_does_not_depend_on_the_number_of_processes(tmp_path, tokenizer, monkeypatch):
    arguments = {"dataset": TEXTS, "train_sampling_strategy": "group_by_length"}
    one, other = (make_trainer(tmp_path, tokenizer, per_device_train_batch_size=size, **arguments) for size in (4, 2))
    with monkeypatch.context() as patches:
        patches.setattr(Eagle3TrainingArguments, "world_size", 2)
        in_two = list(other._get_train_sampler())
    assert in_two == list(one._get_train_sampler())


def test_a_stream_that_is_shorter_than_training_goes_on_where_it_was(tmp_path, tokenizer):
    """Its six rows are two batches, and the fourth step is the second one of the second pass."""

    def train(folder, max_steps, resume=None, **changes):
        stream = TEXTS.select(range(6)).to_iterable_dataset(num_shards=2).shuffle(seed=0, buffer_size=4)
        arguments = {"max_steps": max_steps, "ttt_warmup": 0, "ttt_steps": 1, **BEGUN, **changes}
        trainer = make_trainer(folder, tokenizer, dataset=stream, **arguments)
        trainer.train(resume_from_checkpoint=resume)
        return losses_of(trainer), [entry["epoch"] for entry in trainer.state.log_history]

    expected = train(tmp_path / "whole", 6)
    for step in (1, 2, 5):
        checkpoint = str(tmp_path / "whole" / f"checkpoint-{step}")
        assert train(tmp_path / "resumed", 6, checkpoint, save_strategy="no") == expected
    with pytest.raises(ValueError, match="order_of_rows was 'read by 1 x 1' before, 'read by 1 x 2' after"):
        train(tmp_path / "resumed", 6, checkpoint, dataloader_num_workers=4)
    # More steps than at first. In the state of the shorter training they are other shares of it.
    for step in (2, 3):
        train(tmp_path / f"short-{step}", step, save_steps=step)
        history, _ = train(tmp_path / f"short-{step}", 6, True, save_strategy="no")
        assert history == expected[0]


def test_a_checkpoint_of_a_terminated_process_is_whole(tmp_path, tokenizer):
    """`enable_jit_checkpoint` saves on SIGTERM, as of a cluster that takes the machine away."""
    arguments = {"max_steps": 3, "enable_jit_checkpoint": True}
    expected = losses(make_trainer(tmp_path / "whole", tokenizer, **arguments))
    trainer = make_trainer(tmp_path / "parts", tokenizer, **arguments)
    manager = next(each.jit_manager for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager"))

    class Terminated(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            manager.is_checkpoint_requested = state.global_step == 1

    trainer.add_callback(Terminated())
    trainer.train()
    assert trainer.state.global_step < 3
    resumed = make_trainer(tmp_path / "parts", tokenizer, **arguments)
    resumed.train(resume_from_checkpoint=True)
    assert losses_of(resumed)[-1] == pytest.approx(expected[-1], rel=1e-5)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


BREAKS = [
    ("trainer_state.json", Path.unlink),
    ("trainer_state.json", cut),  # a full disk
    ("optimizer.pt", lambda path: path.write_bytes(b"")),
    ("optimizer.pt", flip),
    ("model.safetensors", cut),
    ("scheduler.pt", Path.unlink),
    ("rng_state.pth", Path.unlink),
    ("checkpoint_files.json", Path.unlink),  # killed before all of it was written
]


def test_checkpoints_that_are_not_whole_are_passed_over(begun, tokenizer, finished):
    broken, resumed = begun / "checkpoint-2", make_trainer(begun, tokenizer, max_steps=2, **BEGUN)
    for name, break_it in BREAKS:
        shutil.rmtree(broken)
        shutil.copytree(finished / "checkpoint-2", broken)
        assert what_is_broken(broken) is None
        break_it(broken / name)
        with pytest.raises(ValueError, match=f"{name}.*last intact checkpoint"):
            resumed.train(resume_from_checkpoint=str(broken))
        assert last_whole_checkpoint(begun) == str(begun / "checkpoint-1")
    resumed.train(resume_from_checkpoint=True)
    state = json.loads((finished / "checkpoint-2" / "trainer_state.json").read_text())
    expected = [entry["loss"] for entry in state["log_history"]]
    assert losses_of(resumed) == pytest.approx(expected, rel=1e-5) and what_is_broken(broken) is None
    for no_checkpoint, reason in ((begun, "it has no trainer_state.json"), (begun / "none", "there is no such")):
        with pytest.raises(ValueError, match=f"{reason}.*last intact checkpoint"):  # the first is the folder of all
            resumed.train(resume_from_checkpoint=str(no_checkpoint))
    for step in (1, 2):
        (begun / f"checkpoint-{step}" / "optimizer.pt").unlink()
    for how in (True, "auto"):  # it may be the disk that is broken
        with pytest.raises(ValueError, match="no checkpoint to resume from"):
            resumed.train(resume_from_checkpoint=how)
    with pytest.raises(ValueError, match="no checkpoint to resume from .* Correct `output_dir`"):
        make_trainer(begun / "empty", tokenizer, **BEGUN).train(resume_from_checkpoint=True)


def test_a_full_disk_is_mentioned(tmp_path, tokenizer, monkeypatch):
    """By torch the error would be `basic_ios::clear: iostream error`, and no more."""
    trainer = make_trainer(tmp_path, tokenizer, **BEGUN)
    monkeypatch.setattr(torch, "save", Mock(side_effect=RuntimeError("basic_ios::clear: iostream error")))
    with pytest.raises(RuntimeError, match=r"checkpoint of step 1 could not be saved: basic_ios.* \d+\.\d\d GB left"):
        trainer.train()


def test_one_command_for_all_runs_of_a_job(tmp_path, tokenizer):
    arguments = {"max_steps": 2, **BEGUN}
    (tmp_path / "checkpoint-1").mkdir()  # killed before it was written
    expected = losses(make_trainer(tmp_path, tokenizer, **arguments))
    for step in (0, 1):
        for checkpoint in tmp_path.glob("checkpoint-*"):
            if int(checkpoint.name.split("-")[1]) > step:
                for name in ("trainer_state.json", "config.json"):
                    (checkpoint / name).unlink()
        trainer = make_trainer(tmp_path, tokenizer, **arguments)
        trainer.train(resume_from_checkpoint="auto")
        assert bool(trainer.resumed_from) == (step > 0)
        assert losses_of(trainer) == pytest.approx(expected, rel=1e-5)


def test_a_training_goes_on_as_it_was_begun(begun, tokenizer):
    """Its optimizer goes by the checkpoint, whatever the arguments say, and its record must be of both."""
    weights = (begun / "checkpoint-2" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="finished training, of 2 steps"):
        make_trainer(begun, tokenizer, max_steps=2, **BEGUN).train(resume_from_checkpoint=True)
    arguments = {"max_steps": 3, **BEGUN}
    with pytest.raises(ValueError, match="learning_rate was 0.01 before, 0.5 after"):
        make_trainer(begun, tokenizer, **arguments, learning_rate=0.5).train(resume_from_checkpoint=True)
    other = make_trainer(begun, tokenizer, **arguments)
    other.dataset_names = ["others"]
    with pytest.raises(ValueError, match="dataset_name was None before, 'others' after"):
        other.train(resume_from_checkpoint=True)
    assert (begun / "checkpoint-2" / "model.safetensors").read_bytes() == weights
    # In another precision, too, with a target of which bfloat16 rounds the weights.
    target = make_target("llama").bfloat16()
    for changes in ({"logging_steps": 2}, {"target": target, "bf16": True, "max_steps": 4}):
        trainer = make_trainer(begun, tokenizer, **{**arguments, **changes})
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == trainer.args.max_steps


def test_a_first_try_goes_on_by_epochs(begun, tokenizer):
    """Its `max_steps` say nothing about the steps of an epoch."""
    trainer = make_trainer(begun, tokenizer, max_steps=-1, num_train_epochs=0.3, **BEGUN)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == trainer.state.max_steps == 3
    shorter = make_trainer(begun, tokenizer, max_steps=-1, num_train_epochs=0.25, **BEGUN)
    with pytest.raises(ValueError, match="finished training, of 3 steps"):
        shorter.train(resume_from_checkpoint=True)


def test_an_adapter_goes_on_with_its_settings(tmp_path, tokenizer):
    """PEFT loads the weights of a checkpoint, but not how they are scaled."""
    target = make_target("llama")
    arguments = {"target": target, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}

    def train(alpha, resume=None, folder="adapter"):
        draft, lora = Eagle3ForSpeculation.from_target(target), LoraConfig(lora_alpha=alpha, target_modules=["q_proj"])
        lora = None if alpha is None else lora
        trainer = make_trainer(tmp_path / folder, tokenizer, model=draft, peft_config=lora, **arguments)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.state.global_step

    train(8)
    with pytest.raises(ValueError, match="has another draft: lora_alpha was 8 before, 16 after"):
        train(16, str(tmp_path / "adapter" / "checkpoint-1"))
    assert train(8, str(tmp_path / "adapter" / "checkpoint-1")) == 2
    train(None, folder="whole")
    with pytest.raises(ValueError, match="has a whole draft, but an adapter is trained here"):
        train(8, str(tmp_path / "whole" / "checkpoint-1"), "other adapter")
    with pytest.raises(ValueError, match="has an adapter, but a whole draft is trained here"):
        train(None, str(tmp_path / "adapter" / "checkpoint-1"), "other whole")


def test_resuming_what_was_begun_otherwise(tmp_path, tokenizer):
    settings = {"num_train_epochs": 0.3, "max_steps": -1, "save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path, tokenizer, **settings).train()
    longer = {**settings, "num_train_epochs": 0.6}
    other_layers = {"eagle_aux_hidden_state_layer_ids": [3, 1, 0], "rope_parameters": {"rope_theta": 5.0}}
    other_layers["rope_parameters"]["rope_type"] = "default"
    arguments = {
        "adam_beta2": (0.5, "adam_beta2 was 0.95 before, 0.5 after"),
        "warmup_steps": (2, "warmup_steps was 0 before, 2 after"),
        "max_grad_norm": (1.0, "max_grad_norm was 0.5 before, 1.0 after"),
        "data_seed": (7, "data_seed was None before, 7 after"),
        "dataset": (TEXTS.add_column("other", ["abc"] * 40), "order_of_rows was"),
        "dataset_text_field": ("other", "dataset_text_field was 'text'"),
        "dataloader_drop_last": (True, "dataloader_drop_last was False before, True after"),
        "truncation_mode": ("keep_end", "truncation_mode was 'keep_start' before"),
        "lr_scheduler_kwargs": ({"num_cycles": 3}, "lr_scheduler_kwargs was None before, {'num_cycles': 3} after"),
        "gradient_accumulation_steps": (2, "sequences_per_step was 4 before, 8 after"),
    }
    for changed, *matches in (
        ({"dataset": TEXTS.select(range(20))}, "rows was 40 before, 20 after"),
        ({"dataset": TEXTS.select(range(39, -1, -1))}, "order_of_rows was"),  # as many rows, in another order
        ({"per_device_train_batch_size": 2}, "sequences_per_step was 4 before, 2 after. `sequences_per_step` is"),
        ({name: value for name, (value, _) in arguments.items()}, *(match for _, match in arguments.values())),
        (
            {"model_init_kwargs": other_layers},
            "another draft: eagle_aux_hidden_state_layer_ids was [1, 2, 3] before",
            "rope_parameters was",
        ),
        ({"target": make_target("llama", seed=1)}, "has a draft for another target"),
        ({"num_train_epochs": 0.3}, "the end of a finished training"),
    ):
        with pytest.raises(ValueError) as error:
            make_trainer(tmp_path, tokenizer, **{**longer, **changed}).train(resume_from_checkpoint=True)
        assert all(match in str(error.value) for match in matches), error.value
    tuned = make_target("llama")
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    with pytest.raises(ValueError, match="for a target with other weights"):
        make_trainer(tmp_path, tokenizer, target=tuned, **longer).train(True)
    trainer, checkpoint = make_trainer(tmp_path, tokenizer, **longer), tmp_path / "checkpoint-3"
    for name, match in (("pytorch_model_fsdp.bin", "with FSDP"), ("global_step6", "with DeepSpeed")):
        (checkpoint / name).touch()  # beside the list of files
        with pytest.raises(ValueError, match=f"it was written {match}, and this training runs without them"):
            trainer.train(True)
        (checkpoint / name).unlink()
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="it was written without them, and this training runs with FSDP"):
        trainer.train(True)
    half = make_trainer(tmp_path, tokenizer, target=make_target("llama").bfloat16())
    trainer = make_trainer(tmp_path, tokenizer, **longer)
    assert target_digest(half.target_model) == target_digest(trainer.target_model)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6
    for shorter in ({}, {"max_steps": 3}):  # than what was trained
        trainer = make_trainer(tmp_path, tokenizer, **{**settings, **shorter})
        with pytest.raises(ValueError, match="the end of a finished training, of 4 steps"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_which_tokens_are_learned_stays(tmp_path, tokenizer):
    """With the same tokens. Records of older versions do not say it."""
    rows = [{"input_ids": [5, 6, 7, 8, 9, 10 + i], "labels": [-100] * 3 + [8, 9, 10 + i]} for i in range(8)]
    all_learned = Dataset.from_list([{**row, "labels": row["input_ids"]} for row in rows])
    prepared = {"dataset_kwargs": {"skip_prepare_dataset": True}, **BEGUN}
    make_trainer(tmp_path, tokenizer, dataset=Dataset.from_list(rows), max_steps=2, **prepared).train()
    other = make_trainer(tmp_path, tokenizer, dataset=all_learned, max_steps=3, **prepared)
    with pytest.raises(ValueError, match="learned_tokens was"):
        other.train(resume_from_checkpoint=True)
    assert other.learned_tokens == learned_tokens(all_learned.remove_columns("labels"))
    documents = Dataset.from_list([{**row, "seq_lengths": [3, 3]} for row in rows])
    assert learned_tokens(documents) != learned_tokens(documents.remove_columns("seq_lengths"))
    path = tmp_path / "checkpoint-2" / "training.json"
    record = json.loads(path.read_text())
    del record["learned_tokens"]
    path.write_text(json.dumps(record))
    check_resumption(other, str(path.parent))


def test_a_default_that_is_written_out(tmp_path, tokenizer):
    pairs = Dataset.from_dict({"prompt": ["ab"] * 8, "completion": [f"cdef{i}" for i in range(8)]})
    make_trainer(tmp_path, tokenizer, dataset=pairs, max_steps=1, **BEGUN).train()
    arguments = {"dataset": pairs, "max_steps": 2, **BEGUN}
    with pytest.raises(ValueError, match="completion_only_loss was True before, False after"):
        make_trainer(tmp_path, tokenizer, completion_only_loss=False, **arguments).train(resume_from_checkpoint=True)
    make_trainer(tmp_path, tokenizer, completion_only_loss=True, **arguments).train(resume_from_checkpoint=True)


def test_the_best_figures_of_two_metrics_are_not_compared(tmp_path, tokenizer):
    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"eval_dataset": TEXTS.select(range(1)), "load_best_model_at_end": True}
    make_trainer(tmp_path, tokenizer, max_steps=1, metric_for_best_model="loss_per_step", **settings).train()
    trainer = make_trainer(tmp_path, tokenizer, max_steps=2, metric_for_best_model="acceptance_length", **settings)
    difference = "metric_for_best_model was 'loss_per_step' before, 'acceptance_length' after"
    with pytest.raises(ValueError, match=difference):
        trainer.train(resume_from_checkpoint=True)
    settings |= {"load_best_model_at_end": False}
    make_trainer(tmp_path, tokenizer, max_steps=2, **settings).train(resume_from_checkpoint=True)


def test_a_training_goes_on_with_its_kind_of_optimizer(tmp_path, tokenizer):
    def make(optimizer):
        trainer_class = partial(Eagle3Trainer, optimizer_cls_and_kwargs=(optimizer, {"lr": 0.01}))
        return make_trainer(tmp_path, tokenizer, trainer_class=trainer_class, max_steps=2, **BEGUN)

    make(torch.optim.AdamW).train()
    with pytest.raises(ValueError, match="optimizers was 'AdamW' before, 'SGD' after"):
        make(torch.optim.SGD).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

"""Evaluation: its loss, its decoding, and how the best draft is chosen."""

import ast
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import make_target
from datasets import Dataset
from trainers import CHATS, TEXTS, make_trainer
from transformers import TrainerCallback

from hf_eagle3 import Eagle3ForSpeculation, Eagle3TrainingArguments
from hf_eagle3.data.prompts import documents_of_row, prompt_of
from hf_eagle3.training.console import shown
from hf_eagle3.training.evaluation import check_best_metric
from hf_eagle3.training.record import training_record


def test_the_loss_of_an_evaluation_is_that_of_all_its_rows(tmp_path, tokenizer):
    """Whatever the batches. The mean of the losses of batches would give a short row the weight of a long one."""
    rows = Dataset.from_dict({"text": ["the end of it all, and so on"[:length] for length in (5, 28, 9)]})
    settings = {"num_eval_prompts": 0, "ttt_steps": 3}
    losses = []
    for batch_size in (1, 2, 3):
        trainer = make_trainer(tmp_path, tokenizer, per_device_eval_batch_size=batch_size, **settings)
        metrics = trainer.evaluate(rows)
        losses.append(metrics["eval_loss"])
        assert metrics["eval_loss_per_step"] == pytest.approx(metrics["eval_loss"] / (1 + 0.8 + 0.64))
    assert losses[1:] == pytest.approx(losses[:2], rel=1e-5)


@pytest.mark.parametrize("packing", [True, False])
def test_evaluation_decodes(tmp_path, tokenizer, packing):
    target = make_target("llama")
    arguments = {"assistant_only_loss": True, "max_length": 512, "draft_vocab_size": 30}
    arguments |= {"num_eval_prompts": 3, "eval_max_new_tokens": 10}
    trainer = make_trainer(
        tmp_path, tokenizer, target=target, dataset=CHATS, eval_dataset=CHATS, packing=packing, **arguments
    )
    draft = trainer.draft
    draft.generation_config.tree_policy = "auto"
    metrics = trainer.evaluate()
    assert draft.generation_config.tree_policy == "auto"
    draft.generation_config.tree_policy = "static"
    draft.eval()
    lengths, new = [], []
    # Packed rows have several conversations; the first is decoded.
    for row in list(trainer.eval_dataset)[:3]:
        text = tokenizer.decode(row["input_ids"])
        end = [label != -100 for label in row["labels"]].index(True)
        assert "what" in tokenizer.decode(row["input_ids"][:end]) and (text.count("what") > 1) is packing
        settings = {"assistant_model": draft, "max_new_tokens": 10, "do_sample": False}
        sequences = target.generate(torch.tensor([row["input_ids"][:end]]), **settings)
        new += sequences[0, end:].tolist()
        lengths += draft.last_generation.accepted_lengths
    known = set(draft.draft_token_ids.tolist())
    coverage = sum(token in known for token in new) / len(new)
    assert 0 < coverage < 1 and metrics["eval_vocabulary_coverage"] == pytest.approx(coverage)
    assert metrics["eval_acceptance_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert trainer.state.log_history[-1]["eval_acceptance_length"] == metrics["eval_acceptance_length"]
    trainer.args.num_eval_prompts = 0
    assert "eval_acceptance_length" not in trainer.evaluate()


def test_what_evaluation_decodes_from():
    text = {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9]}
    assert prompt_of(text).tolist() == [[5, 6, 7]]
    assert prompt_of({**text, "labels": [-100, -100, 7, -100, 9]}).tolist() == [[5, 6]]
    assert prompt_of({**text, "labels": [-100] * 5}).tolist() == [[5, 6, 7]]
    # With an image up to the second token, in a text that is learned whole, and in an answer.
    assert prompt_of({**text, "labels": [5, -100, 7, 8, 9]}, image_end=2).tolist() == [[5, 6, 7]]
    assert prompt_of({**text, "labels": [-100, -100, -100, 8, 9]}, image_end=2).tolist() == [[5, 6, 7]]
    assert documents_of_row(text) == [text]
    packed = {**text, "labels": [-100, 6, -100, -100, 9], "seq_lengths": [2, 3]}
    assert [prompt_of(document).tolist() for document in documents_of_row(packed)] == [[[5]], [[7, 8]]]
    second = documents_of_row({"input_ids": [5, 6, 7], "seq_lengths": [1, 2]})[1]
    assert second == {"input_ids": [6, 7], "labels": [6, 7]}


CHOICE = {
    **{"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_strategy": "steps", "max_steps": 4},
    **{"load_best_model_at_end": True, "metric_for_best_model": "loss_per_step", "eval_dataset": TEXTS.select([0])},
    **{"ttt_steps": 1, "num_eval_prompts": 0},
}


def with_losses(trainer, losses):
    """Returns the trainer, whose evaluations report these losses."""
    losses, evaluate = iter(losses), trainer.evaluation_loop

    def evaluation_loop(*args, **kwargs):
        output = evaluate(*args, **kwargs)
        output.metrics["eval_loss_per_step"] = output.metrics["eval_accuracy_0"] = next(losses)
        output.metrics["eval_acceptance_length"] = 1.0
        return output

    trainer.evaluation_loop = evaluation_loop
    return trainer


def chosen(folder, tokenizer, losses, resume=False, **changes):
    """A trainer that has trained, and chosen the best of the steps with these losses."""
    trainer = with_losses(make_trainer(folder, tokenizer, **CHOICE | changes), losses)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_the_best_weights_are_recorded(tmp_path, tokenizer):
    """Of figures that rise while the draft becomes worse, the lowest loss is the best, and its record is its own."""
    trainer = make_trainer(tmp_path, tokenizer, **CHOICE)
    evaluate = trainer.evaluation_loop
    with_losses(trainer, [3.0, 1.0, 2.0, 4.0, 5.0]).train()
    assert trainer.state.best_global_step == 2
    record = training_record(trainer)
    assert (record["steps"], record["epochs"], record["evaluation"]["accuracy_0"]) == (2, 0.2, 1.0)
    of_checkpoint = json.loads((tmp_path / "checkpoint-4" / "training.json").read_text())
    assert (of_checkpoint["steps"], of_checkpoint["evaluation"]["accuracy_0"]) == (4, 4.0)
    trainer.evaluate()
    assert training_record(trainer)["evaluation"] == {**record["evaluation"], "accuracy_0": 5.0}
    trainer.evaluation_loop = evaluate
    trainer.train()
    assert training_record(trainer)["steps"] in range(1, 5)


@pytest.mark.parametrize("losses", [[1.0, 3.0, 4.0, 5.0], [4.0, 3.0, 1.0, 5.0]])
def test_the_best_of_what_is_saved(tmp_path, tokenizer, losses):
    """A draft that was not saved cannot be loaded at the end."""
    trainer = chosen(tmp_path, tokenizer, losses, save_steps=2)
    saved = Eagle3ForSpeculation.from_pretrained(tmp_path / "checkpoint-2").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in trainer.draft.state_dict().items())
    record = training_record(trainer)
    assert (record["steps"], record["evaluation"]["accuracy_0"]) == (2, 3.0)


def test_the_best_checkpoint_of_a_folder_that_was_moved(tmp_path, tokenizer, caplog):
    """Or of one in which only the last checkpoint is left."""
    chosen(tmp_path / "first", tokenizer, [1.0, 2.0, 5.0], max_steps=3)
    shutil.rmtree(tmp_path / "first" / "checkpoint-3")
    shutil.copytree(tmp_path / "first" / "checkpoint-2", tmp_path / "last" / "checkpoint-2")
    (tmp_path / "first").rename(tmp_path / "moved")
    for name, best in (("moved", 1), ("last", 3)):
        trainer = chosen(tmp_path / name, tokenizer, [4.0], resume=True, max_steps=3)
        assert trainer.state.best_model_checkpoint == str(tmp_path / name / f"checkpoint-{best}")
        assert training_record(trainer)["steps"] == best
        assert ("no checkpoint-1, the best checkpoint (loss_per_step of 1)" in caplog.text) == (name == "last")


def test_the_best_checkpoint_of_another_run(tmp_path, tokenizer):
    """One that is now where that of the resumed run was."""
    chosen(tmp_path / "place", tokenizer, [1.0, 2.0], save_strategy="best", max_steps=2)
    shutil.copytree(tmp_path / "place", tmp_path / "moved")
    trainer = chosen(tmp_path / "moved", tokenizer, [4.0], resume=True, save_strategy="best", max_steps=2)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "moved" / "checkpoint-1")


def test_the_best_step_was_not_saved(tmp_path, tokenizer):
    """By a run that did not choose."""
    settings = {"save_steps": 2, "max_steps": 6}
    chosen(tmp_path, tokenizer, [5.0, 3.0, 1.0, 4.0, 4.0, 4.0], **settings, load_best_model_at_end=False)
    shutil.rmtree(tmp_path / "checkpoint-6")
    trainer = chosen(tmp_path, tokenizer, [3.0, 2.0], resume=True, **settings)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-6")
    assert training_record(trainer)["steps"] == trainer.state.best_global_step == 6


def test_the_best_checkpoint_vanishes(tmp_path, tokenizer):
    class Vanishing(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 2:
                shutil.rmtree(tmp_path / "checkpoint-1")

    trainer = with_losses(make_trainer(tmp_path, tokenizer, **{**CHOICE, "max_steps": 2}), [1.0, 2.0])
    trainer.add_callback(Vanishing())
    trainer.train()
    assert training_record(trainer)["steps"] == 2


def test_what_the_best_draft_is_chosen_by(tmp_path, tokenizer):
    """A name that no evaluation reports fails before training."""
    rows = TEXTS.select(range(2))
    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "ttt_steps": 2, "draft_vocab_size": 20}
    for changes in (
        {"metric_for_best_model": "acc_length"},
        {"metric_for_best_model": "accuracy_2"},
        {"metric_for_best_model": "acceptance_length", "num_eval_prompts": 0},
        {"metric_for_best_model": "loss", "eval_dataset": {"first": rows}},
    ):
        with pytest.raises(ValueError, match=f"is '{changes['metric_for_best_model']}', which is not measured"):
            make_trainer(tmp_path, tokenizer, **{"eval_dataset": rows, **settings, **changes})
    named = {"metric_for_best_model": "eval_first_loss", "eval_dataset": {"first": rows}}
    make_trainer(tmp_path, tokenizer, **named, **settings)
    trainer = make_trainer(tmp_path, tokenizer, metric_for_best_model="loss", eval_dataset=rows, **settings)
    trainer.train()
    trainer.args.metric_for_best_model = "none"
    with pytest.raises(ValueError) as error:
        check_best_metric(trainer)
    reported = {f"eval_{name}" for name in ast.literal_eval(str(error.value).split("one of ")[1].rstrip("."))}
    speed = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    assert reported == {name for name in trainer.evaluate() if name.startswith("eval_")} - {*speed}


def test_a_target_that_cannot_evaluate_a_draft(tmp_path, tokenizer):
    """It is refused before training. Other programs may take the draft all the same."""
    target = make_target("llama")
    target.__class__ = type("Owner", (type(target),), {"_sample": lambda self, *args, **kwargs: None})
    settings = {"target": target, "eval_dataset": TEXTS.select(range(2)), "eval_strategy": "steps", "eval_steps": 1}
    told = "the target refuses it: .*Owner has a `_sample` of its own.*`num_eval_prompts=0`"
    with pytest.raises(ValueError, match=told):
        make_trainer(tmp_path, tokenizer, **settings)
    trainer = make_trainer(tmp_path, tokenizer, **settings, num_eval_prompts=0, max_steps=1)
    trainer.train()
    assert "eval_loss" in trainer.state.log_history[1]


def test_several_data_sets_to_evaluate(tmp_path, tokenizer):
    data = {"first": TEXTS.select(range(2)), "second": TEXTS.select(range(4, 6))}
    trainer = make_trainer(tmp_path, tokenizer, eval_dataset=data, eval_strategy="steps", eval_steps=2, max_steps=2)
    trainer.train()
    *_, entry = (entry for entry in trainer.state.log_history if "eval_first_acceptance_length" in entry)
    assert {"eval_first_loss_per_step", "eval_first_accuracy_0"} <= shown(entry).keys()
    evaluation = training_record(trainer)["evaluation"]
    assert (evaluation["dataset"], evaluation["step"]) == ("first", entry["step"])
    assert evaluation["acceptance_length"] == entry["eval_first_acceptance_length"]


def test_rows_that_processes_repeat_do_not_count(tmp_path, tokenizer, monkeypatch):
    """The last batches of three processes are filled up with rows of the first."""
    trainer = make_trainer(tmp_path, tokenizer, per_device_eval_batch_size=4)
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(4)])
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 3)
    trainer.model.eval()
    for process, num_new in ((0, 4), (1, 1), (2, 0)):
        expected = {name: value[:num_new] for name, value in batch.items()}
        monkeypatch.setattr(type(trainer.accelerator), "process_index", process)
        trainer.accelerator.gradient_state = SimpleNamespace(end_of_dataloader=True, remainder=5)
        loss, _, _ = trainer.prediction_step(trainer.model, batch, True)
        counts = trainer.metrics.counts.pop("eval")
        if num_new:
            trainer.accelerator.gradient_state = SimpleNamespace(end_of_dataloader=False, remainder=5)
            assert torch.isclose(trainer.prediction_step(trainer.model, expected, True)[0], loss)
            assert torch.equal(trainer.metrics.counts.pop("eval")[0], counts[0])
        else:
            assert loss == 0 and counts[0].sum() == 0


def test_predicting_is_evaluating(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer, num_eval_prompts=1, eval_max_new_tokens=4)
    rows = Dataset.from_dict({"text": ["abcdefgh", "ijk"]})
    expected, output = trainer.evaluate(rows.with_format("torch")), trainer.predict(rows)
    assert output.predictions is None
    for name in ("loss", "accuracy_0", "acceptance_length"):
        assert output.metrics[f"test_{name}"] == expected[f"eval_{name}"]


def test_an_evaluation_that_is_interrupted_does_not_count(tmp_path, tokenizer):
    """As by Ctrl-C in a notebook, before the next one."""

    class Interrupted(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    trainer = make_trainer(tmp_path, tokenizer, num_eval_prompts=0)
    rows, others = TEXTS.select(range(4)), Dataset.from_dict({"text": ["abcdefgh", "ijk"]})
    expected = trainer.evaluate(rows)
    trainer.add_callback(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate(others)
    trainer.remove_callback(Interrupted)
    metrics = trainer.evaluate(rows)
    names = [name for name in expected if name.startswith(("eval_acc", "eval_loss", "eval_sim"))]
    assert [metrics[name] for name in names] == [expected[name] for name in names] and len(names) > 6


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_evaluation_in_half_precision_leaves_the_draft_as_it_is(tmp_path, tokenizer, dtype):
    trainer = make_trainer(tmp_path, tokenizer, max_steps=1, eval_max_new_tokens=4, **{f"{dtype}_full_eval": True})

    def tensors():  # also those that are not saved, such as rotary frequencies
        return dict([*trainer.draft.named_parameters(), *trainer.draft.named_buffers()])

    before = {name: value.clone() for name, value in tensors().items()}
    trainer.evaluate(TEXTS.select(range(2)))
    after = tensors()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items())
    trainer.train()
    assert trainer.draft.dtype == trainer.target_model.dtype == torch.float32


def test_streams_that_processes_evaluate(tmp_path, tokenizer, monkeypatch):
    """They are read whole: processes must evaluate the same number of batches, with rows of several lengths."""
    rows = Dataset.from_dict({"text": ["abcdefgh", "ijk", "ab" * 9]})
    expected = make_trainer(tmp_path, tokenizer, eval_dataset=rows).eval_dataset
    stream = rows.to_iterable_dataset(num_shards=2)
    assert not isinstance(make_trainer(tmp_path, tokenizer, eval_dataset=stream).eval_dataset, Dataset)
    for dataset in (stream, {"a": stream}):
        with monkeypatch.context() as patches:
            patches.setattr(Eagle3TrainingArguments, "world_size", 2)
            trainer = make_trainer(tmp_path, tokenizer, eval_dataset=dataset)
        read = trainer.eval_dataset["a"] if isinstance(dataset, dict) else trainer.eval_dataset
        assert isinstance(read, Dataset) and read.to_list() == expected.to_list()
        assert trainer.accelerator.dataloader_config.dispatch_batches is False
    # Those that are prepared before, too. Three files and two processes would end at different batches.
    arguments = {"dataset": expected, "dataset_kwargs": {"skip_prepare_dataset": True}}
    trainer = make_trainer(tmp_path, tokenizer, eval_dataset=expected.to_iterable_dataset(num_shards=3), **arguments)
    monkeypatch.setattr(Eagle3TrainingArguments, "world_size", 2)
    for loader in (trainer.get_eval_dataloader(), trainer.get_test_dataloader(trainer.eval_dataset)):
        assert isinstance(loader.dataset, Dataset) and loader.dataset["input_ids"][:] == expected["input_ids"][:]

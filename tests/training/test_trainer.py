import ast
import copy
import gc
import json
import logging
import pickle
import statistics
import sys
import weakref
from concurrent.futures import Future
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig, skip_first_batches
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from conftest import make_prompt, make_target
from datasets import Dataset, DatasetDict
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from torch.utils.data import DataLoader
from trainers import CHATS, TEXTS, make_trainer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    ProcessorMixin,
    Trainer,
    TrainerCallback,
    default_data_collator,
)
from transformers.distributed import DistributedConfig
from transformers.utils import PushInProgress
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_eagle3 import Eagle3ForSpeculation, Eagle3Trainer, Eagle3TrainingArguments, assist
from hf_eagle3.baselines import BASELINES
from hf_eagle3.checkpoints import load_ends
from hf_eagle3.data import documents_of_row, prompt_of
from hf_eagle3.remote_code.loading_eagle3 import weights_digest
from hf_eagle3.training import models, ttt
from hf_eagle3.training.checkpoint import last_whole_checkpoint, what_is_broken
from hf_eagle3.training.checks import check_call, check_parallelism
from hf_eagle3.training.console import shown
from hf_eagle3.training.evaluation import check_best_metric
from hf_eagle3.training.parser import Eagle3Parser
from hf_eagle3.training.record import non_defaults, target_digest, training_record
from hf_eagle3.training.saving import check_output_folder


@pytest.mark.parametrize("use_muon", [True, False])
def test_training_moves_every_parameter_of_the_draft_and_none_of_the_target(tmp_path, tokenizer, use_muon):
    target = make_target("gemma3")
    trainer = make_trainer(tmp_path, tokenizer, target=target, use_muon=use_muon, draft_vocab_size=20)
    draft = trainer.draft
    before = {name: value.clone() for name, value in draft.named_parameters()}
    target_before = {name: value.clone() for name, value in target.named_parameters()}
    trainer.train()
    assert before and all(not torch.equal(before[name], value) for name, value in draft.named_parameters())
    assert all(torch.equal(target_before[name], value) for name, value in target.named_parameters())
    assert not any(parameter.requires_grad for parameter in target.parameters())


def test_a_table_of_the_draft_s_own_stays_the_target_s(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer, model_init_kwargs={"has_own_embed_tokens": True})
    trainer.train()
    trained = [weight for group in trainer.optimizer.optimizer.param_groups for weight in group["params"]]
    assert trainer.draft.fc.weight in set(trained) and trainer.draft.embed_tokens.weight not in set(trained)
    assert torch.equal(trainer.draft.embed_tokens.weight, trainer.target_model.get_input_embeddings().weight)
    # Unless an adapter was made for it.
    adapted = get_peft_model(trainer.draft, LoraConfig(target_modules=["q_proj", "embed_tokens"]))
    trainer = make_trainer(tmp_path, tokenizer, model=adapted, target=trainer.target_model)
    assert trainer.draft.embed_tokens.lora_embedding_A["default"].requires_grad


def test_head_and_norms_have_a_learning_rate_of_their_own(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer, learning_rate=1e-2)
    optimizer = trainer.create_optimizer()
    rates = {id(weight): group["lr"] for group in optimizer.param_groups for weight in group["params"]}
    assert rates[id(trainer.draft.fc.weight)] == 1e-2
    assert rates[id(trainer.draft.lm_head.weight)] == rates[id(trainer.draft.norm.weight)] == 2e-3


def test_draft_vocabulary_comes_from_what_is_supervised(tmp_path, tokenizer):
    trainer = make_trainer(
        tmp_path,
        tokenizer,
        dataset=CHATS,
        assistant_only_loss=True,
        draft_vocab_size=3,
        average_tokens_across_devices=False,
    )
    expected = sorted(tokenizer.convert_tokens_to_ids(["z", " ", "</s>"]))
    assert trainer.draft.draft_token_ids.tolist() == expected
    labels = trainer.train_dataset[0]["labels"]
    input_ids = trainer.train_dataset[0]["input_ids"]
    learned = tokenizer.decode([token for token, label in zip(input_ids, labels) if label != -100])
    assert "what" not in learned and "zz" in learned and learned.count("</s>") == 2
    trainer.train()


def test_logs(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer, ttt_steps=4, ttt_warmup=0, eval_dataset=TEXTS.select(range(5)))
    trainer.train()
    trainer.evaluate()
    train, evaluation = trainer.state.log_history[0], trainer.state.log_history[-1]
    names = ("accuracy", "acceptance_rate", "conditional_acceptance", "joint_acceptance")
    assert all(0 <= train[f"{name}_{step}"] <= 1 for name in names for step in range(4))
    assert "accuracy_4" not in train
    joint = torch.tensor([train[f"conditional_acceptance_{step}"] for step in range(4)]).cumprod(0)
    assert joint.tolist() == pytest.approx([train[f"joint_acceptance_{step}"] for step in range(4)])
    assert train["simulated_acceptance_length"] == pytest.approx(1 + joint.sum().item())
    assert {f"eval_{name}_3" for name in names} <= set(evaluation)
    assert {"eval_loss", "eval_simulated_acceptance_length"} <= set(evaluation)


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


def test_arguments_that_change_between_two_trainings(tmp_path, tokenizer):
    """Someone who tries settings in a notebook changes `trainer.args`."""
    trainer = make_trainer(tmp_path, tokenizer, max_steps=1, ttt_steps=2, ttt_warmup=0)
    trainer.train()
    trainer.args.ttt_steps, trainer.args.ttt_step_decay = 4, 0.5
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["ttt_steps"] == 4 and "accuracy_3" in logs
    assert logs["loss_per_step"] == pytest.approx(logs["loss"] / (1 + 0.5 + 0.25 + 0.125))


@pytest.mark.parametrize("packing", [True, False])
def test_evaluation_decodes(tmp_path, tokenizer, packing):
    target = make_target("llama")
    arguments = {"assistant_only_loss": True, "max_length": 512, "draft_vocab_size": 30}
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
        sequences = target.generate(
            torch.tensor([row["input_ids"][:end]]), assistant_model=draft, max_new_tokens=10, do_sample=False
        )
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
    assert documents_of_row({"input_ids": [5, 6, 7], "seq_lengths": [1, 2]})[1] == {
        "input_ids": [6, 7],
        "labels": [6, 7],
    }


def test_a_sampled_softmax(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(ttt, "LEAST_PROBABILITY", 0.5)  # few of so small a vocabulary
    settings = {"ttt_warmup": 0, "max_steps": 30, "learning_rate": 2e-2, "num_eval_prompts": 0}
    trainer = make_trainer(tmp_path, tokenizer, eval_dataset=TEXTS.select(range(4)), sampled_vocab_size=4, **settings)
    sizes, of = [], ttt.SampledVocabulary.of
    monkeypatch.setattr(
        ttt.SampledVocabulary, "of", lambda *args: [sampled := of(*args), sizes.append(len(sampled.tokens))][0]
    )
    trainer.train()
    assert len(sizes) == 30 and 4 <= max(sizes) < trainer.draft.config.draft_vocab_size
    trainer.evaluate()  # by the whole vocabulary
    assert len(sizes) == 30
    history = [entry for entry in trainer.state.log_history if "acceptance_rate_0" in entry]
    first, last = (
        {name: statistics.mean(entry[name] for entry in entries) for name in ("loss", "acceptance_rate_0")}
        for entries in (history[:5], history[-5:])
    )
    assert last["loss"] < 0.9 * first["loss"] and last["acceptance_rate_0"] > first["acceptance_rate_0"]


def test_the_unroll_grows(tmp_path, tokenizer):
    trainer = make_trainer(
        tmp_path, tokenizer, ttt_steps=4, ttt_warmup=0.75, max_steps=8, eval_dataset=TEXTS.select(range(4))
    )
    trainer.train()
    trainer.evaluate()
    *steps, evaluation = [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]
    assert [entry["ttt_steps"] for entry in steps] == [1, 1, 2, 2, 3, 3, 4, 4]
    for entry in steps:  # of steps that the unroll did not come to there is nothing to say
        assert [f"acceptance_rate_{step}" in entry for step in range(4)] == [
            step < entry["ttt_steps"] for step in range(4)
        ]
    assert evaluation["eval_acceptance_rate_3"] > 0
    # Logged less often, the loss of a drafting step is that of unrolls as they were.
    settings = {"ttt_steps": 4, "ttt_warmup": 0.75, "max_steps": 8, "logging_steps": 8}
    seldom = make_trainer(tmp_path / "seldom", tokenizer, **settings)
    seldom.train()
    weights = [entry["loss"] / entry["loss_per_step"] for entry in steps]
    expected = sum(entry["loss"] for entry in steps) / sum(weights)
    assert seldom.state.log_history[0]["loss_per_step"] == pytest.approx(expected, rel=1e-3) and weights[-1] > 2
    with pytest.raises(ValueError, match="ttt_warmup"):
        make_trainer(tmp_path, tokenizer, ttt_warmup=2)


def test_a_share_of_the_rows(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer, ttt_row_share=0.5, ttt_warmup=0.0, max_steps=2, logging_steps=1)
    trainer.train()
    logs = next(log for log in trainer.state.log_history if "loss" in log)
    assert logs["ttt_steps"] == trainer.args.ttt_steps
    inputs = next(iter(trainer.get_train_dataloader()))
    losses = {}
    for mode in ("train", "eval"):
        trainer.model.train(mode == "train")
        with torch.no_grad():
            losses[mode] = [trainer.compute_loss(trainer.model, inputs).item() for _ in range(4)]
    assert len(set(losses["train"])) > 1  # other rows each time
    assert len(set(losses["eval"])) == 1  # all rows
    for wrong in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"`ttt_row_share` must be in \(0, 1\]"):
            make_trainer(tmp_path, tokenizer, ttt_row_share=wrong)


def test_packed_rows_of_padded_batches(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="`eval_packing=True` needs `packing=True`"):
        make_trainer(tmp_path, tokenizer, eval_packing=True)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("max_length", None, "fills rows of `max_length` tokens"),
        ("truncation_mode", "keep_end", "keep the beginnings"),
    ],
)
def test_arguments_that_packing_refuses(tmp_path, name, value, reason):
    with pytest.raises(ValueError, match=reason):
        Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=False, packing=True, **{name: value})


def test_where_a_vocabulary_is_not_sampled(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="`sampled_vocab_size` must be an integer of at least 1, got 0"):
        make_trainer(tmp_path, tokenizer, sampled_vocab_size=0)


@pytest.mark.parametrize("length", [{"max_steps": 0}, {"max_steps": -1, "num_train_epochs": 0}])
def test_a_training_without_steps_is_refused(tmp_path, length):
    with pytest.raises(ValueError, match="so nothing would be trained"):
        Eagle3TrainingArguments(str(tmp_path), use_cpu=True, **length)


def test_resuming_as_the_command_line_says_it(tmp_path):
    said = {
        text: Eagle3TrainingArguments(str(tmp_path), use_cpu=True, resume_from_checkpoint=text)
        for text in ("false", "True", "a")
    }
    assert [args.resume_from_checkpoint for args in said.values()] == [False, True, "a"]


def test_resuming_as_the_arguments_say_it(tmp_path, tokenizer):
    """`Trainer` itself would begin anew, over the checkpoints."""
    settings = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, tokenizer, max_steps=1, **settings).train()
    trainer = make_trainer(tmp_path, tokenizer, max_steps=2, resume_from_checkpoint=True, **settings)
    trainer.train()
    assert trainer.resumed_from is not None
    trainer.train(resume_from_checkpoint=False)
    assert trainer.resumed_from is None


def test_collators_of_callers(tmp_path, tokenizer):
    """Are used if they learn what the rows say."""
    arguments = {"use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1, "assistant_only_loss": True}
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)

    def shifting(examples):
        batch = default_data_collator(examples)
        return {**batch, "labels": batch["labels"].roll(-1, 1)}

    def without_labels(examples):
        return {"input_ids": torch.tensor([example["input_ids"] for example in examples])}

    language_modeling = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    for collator, batch_size, problem in (
        (DataCollatorForSeq2Seq(tokenizer), 2, None),
        (DataCollatorWithFlattening(), 2, None),
        (language_modeling, 1, "labels to tokens that the rows exclude"),
        (
            language_modeling,
            8,
            r"LanguageModeling\) cannot read rows with \['input_ids', 'labels'\]: Unable to create",
        ),
        (shifting, 1, r"`data_collator` \(shifting\) gives labels that are neither the tokens"),
        (without_labels, 1, "gives no `labels`"),
        (list, 1, r"`data_collator` \(list\) returns list, but must return a dictionary"),
        (
            lambda examples: {"input_ids": [[5]], "labels": [[5]]},
            1,
            "list as `input_ids` and list as `labels`, not ten",
        ),
        (lambda examples: {"ids": examples}, 1, r"returns only \['ids'\], but must"),
    ):
        args = Eagle3TrainingArguments(str(tmp_path), per_device_train_batch_size=batch_size, **arguments)
        trainer = Eagle3Trainer(
            None, make_target("llama"), args, train_dataset=CHATS, processing_class=tokenizer, data_collator=collator
        )
        with nullcontext() if problem is None else pytest.raises(ValueError, match=problem):
            trainer.train()


def test_training_that_learns_nothing_says_so(tmp_path, tokenizer, caplog):
    """A collator may mask all labels. The loss of 0 looks like a draft that knows everything."""

    def masking(examples):
        batch = default_data_collator(examples)
        return {**batch, "labels": torch.full_like(batch["labels"], -100)}

    arguments = {"use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 2, "logging_steps": 1}
    args = Eagle3TrainingArguments(str(tmp_path), per_device_train_batch_size=1, **arguments)
    rows = TEXTS.select(range(4))
    trainer = Eagle3Trainer(
        None, make_target("llama"), args, train_dataset=rows, processing_class=tokenizer, data_collator=masking
    )
    trainer.train()
    assert caplog.text.count("No token of the last steps is learned, so the loss is 0") == 2


def test_data_that_is_taken_as_it_is(tmp_path, tokenizer, caplog):
    def rows(*labels, tokens=(5, 6, 7, 8)):
        return Dataset.from_dict({"input_ids": [[5, 6, 7], list(tokens)], "labels": [[-100] * 3, *labels]})

    for data, reason in (
        (rows([-100, 6, 7, 8]), None),
        (rows([-100, -100, -100, 5]), "Row 1 of the train data has label 5 at token 8. Labels must be the tokens"),
        (
            rows([5, 6, 7, 96], tokens=(5, 6, 7, 96)),
            "Row 1 of the train data has token 96, but the target's vocabulary",
        ),
        (rows([5, 6, 7]), "Row 1 of the train data has 4 tokens, but 3 labels"),
        (rows([5, 6, -100, -100]), "2 of 2 rows of the train data have nothing to learn: no more than two tokens"),
        (TEXTS, r"needs a column `input_ids`, but the train data has only \['text'\]"),
    ):
        with nullcontext() if reason is None else pytest.raises(ValueError, match=reason):
            make_trainer(tmp_path, tokenizer, dataset=data, dataset_kwargs={"skip_prepare_dataset": True})
    assert "1 of 2 rows of the train data have nothing to learn, and stay" in caplog.text
    with pytest.raises(ValueError, match="Row 1 of the eval data has label 5"):
        evaluated = {"a": rows([-100, 6, 7, 8]), "b": rows([-100, -100, -100, 5])}
        arguments = {"dataset_kwargs": {"skip_prepare_dataset": True}, "eval_dataset": evaluated}
        make_trainer(tmp_path, tokenizer, dataset=rows([5, 6, 7, 8]), **arguments)


def test_names_and_classes_in_place_of_models(tmp_path, tokenizer):
    args = Eagle3TrainingArguments(str(tmp_path / "draft"), use_cpu=True, report_to="none")
    for model, target, reason in (
        (
            Eagle3ForSpeculation,
            make_target("llama"),
            "`model` is the class Eagle3ForSpeculation, but must be the draft",
        ),
        ({}, make_target("llama"), "`model` is dict, but must be the draft, its name, or `None`"),
        (None, str(tmp_path / "target"), "There is no folder .*target. Pass the folder of the target"),
    ):
        with pytest.raises((TypeError, FileNotFoundError), match=reason):
            Eagle3Trainer(model, target, args, train_dataset=TEXTS, processing_class=tokenizer)


def test_training_learns(tmp_path, tokenizer):
    # With an unroll that grows the loss has ever more terms.
    trainer = make_trainer(tmp_path, tokenizer, ttt_warmup=0, max_steps=60, learning_rate=2e-2)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "simulated_acceptance_length" in entry]
    assert history[-1]["loss"] < 0.6 * history[0]["loss"]
    assert history[-1]["simulated_acceptance_length"] > history[0]["simulated_acceptance_length"] + 0.2


def test_arguments_of_a_fresh_draft(tmp_path, tokenizer):
    init = {"model_type": "qwen3", "norm_output": False}
    trainer = make_trainer(tmp_path, tokenizer, draft_vocab_size=20, model_init_kwargs=init)
    assert trainer.draft.config.transformer_layer_config.model_type == "qwen3"
    assert not trainer.draft.config.norm_output and trainer.draft.config.draft_vocab_size == 20
    assert trainer.args.model_init_kwargs == init
    config = make_trainer(tmp_path, tokenizer, draft_form="classic", target=make_target("qwen3")).draft.config
    assert not config.fc_norm and not config.norm_output and config.transformer_layer_config.model_type == "llama"


def test_a_form_that_is_changed(tmp_path, tokenizer, caplog):
    make_trainer(tmp_path, tokenizer, draft_form="classic", model_init_kwargs={"model_type": "llama"})
    assert "classic" not in caplog.text
    make_trainer(tmp_path, tokenizer, draft_form="classic", model_init_kwargs={"model_type": "qwen3"})
    assert "{'model_type': 'qwen3'}, so the draft is not quite of the form 'classic'" in caplog.text


def test_checkpoints_are_drafts(tmp_path, tokenizer):
    target = make_target("llama")
    trainer = make_trainer(
        tmp_path, tokenizer, target=target, draft_vocab_size=20, save_strategy="steps", save_steps=2, max_steps=2
    )
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    draft = AutoModel.from_pretrained(checkpoint, trust_remote_code=True)
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in trainer.draft.state_dict().items())
    prompt = make_prompt(10)
    expected = target.generate(prompt, max_new_tokens=16, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=16, do_sample=False, assistant_model=draft), expected)
    assert draft.generation_config.assistant_confidence_threshold == 0.02
    assert "model_type" not in json.loads((checkpoint / "config.json").read_text())
    # The draft in hand generates too, though the trainer wraps its forward.
    assert torch.equal(
        target.generate(prompt, max_new_tokens=16, do_sample=False, assistant_model=trainer.draft), expected
    )


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_accumulation_gives_the_same_trajectory(tmp_path, tokenizer):
    target = make_target("llama")
    runs = [
        losses(make_trainer(tmp_path, tokenizer, target=target, **arguments))
        for arguments in (
            {"per_device_train_batch_size": 8},
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        )
    ]
    assert runs[0] == pytest.approx(runs[1], rel=1e-3)


@pytest.mark.parametrize(
    "changes", [{}, {"dataset": TEXTS.select(range(8)), "train_sampling_strategy": "group_by_length"}]
)
def test_resumed_training_goes_on_as_if_uninterrupted(tmp_path, tokenizer, changes):
    """The second data set has two steps in an epoch."""
    arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, **changes}
    expected = losses(make_trainer(tmp_path / "whole", tokenizer, **arguments))
    first = make_trainer(tmp_path / "parts", tokenizer, **arguments)
    first.train()
    resumed = make_trainer(tmp_path / "parts", tokenizer, **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    history = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    assert history == pytest.approx(expected, rel=1e-5)
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
    """Its ten rows are three batches, and the fifth step is the second one of the second pass."""

    def train(folder, max_steps, resume=None, **changes):
        stream = TEXTS.select(range(10)).to_iterable_dataset(num_shards=2).shuffle(seed=0, buffer_size=4)
        arguments = {"max_steps": max_steps, "save_strategy": "steps", "save_steps": 1, "ttt_warmup": 0, **changes}
        trainer = make_trainer(folder, tokenizer, dataset=stream, **arguments, lr_scheduler_type="constant")
        trainer.train(resume_from_checkpoint=resume)
        history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return history, [entry["epoch"] for entry in trainer.state.log_history]

    expected = train(tmp_path / "whole", 8)
    for step in (2, 3, 7):
        assert train(tmp_path / "resumed", 8, str(tmp_path / "whole" / f"checkpoint-{step}")) == expected
    with pytest.raises(ValueError, match="order_of_rows was 'read by 1 x 1' before, 'read by 1 x 2' after"):
        train(tmp_path / "resumed", 8, str(tmp_path / "whole" / "checkpoint-2"), dataloader_num_workers=4)
    # More steps than at first. In the state of the shorter training they are other shares of it.
    for step in (3, 5):
        train(tmp_path / f"short-{step}", step)
        history, _ = train(tmp_path / f"short-{step}", 8, True)
        assert history == expected[0]


def test_gradients_of_one_pass_over_a_stream_do_not_reach_the_next(tmp_path, tokenizer):
    """Its ten rows are two steps of four. `Trainer` would add the gradients of the last two to those of the next step."""
    leftovers = []

    class Looks(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            leftovers.append(sum(weight.grad is not None for weight in model.parameters()))

    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 5}
    trainer = make_trainer(tmp_path, tokenizer, dataset=TEXTS.select(range(10)).to_iterable_dataset(), **steps)
    trainer.add_callback(Looks())
    trainer.train()
    assert leftovers == [0] * 5
    assert max(entry.get("loss_per_step", 0) for entry in trainer.state.log_history) < 3  # not the sum of two steps


def test_a_checkpoint_of_a_terminated_process_is_whole(tmp_path, tokenizer):
    """`enable_jit_checkpoint` saves on SIGTERM, as of a cluster that takes the machine away."""
    arguments = {"max_steps": 5, "enable_jit_checkpoint": True}
    expected = losses(make_trainer(tmp_path / "whole", tokenizer, **arguments))
    trainer = make_trainer(tmp_path / "parts", tokenizer, **arguments)
    manager = next(each.jit_manager for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager"))

    class Terminated(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            manager.is_checkpoint_requested = state.global_step == 2

    trainer.add_callback(Terminated())
    trainer.train()
    assert trainer.state.global_step < 5
    resumed = make_trainer(tmp_path / "parts", tokenizer, **arguments)
    resumed.train(resume_from_checkpoint=True)
    history = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    assert history[-1] == pytest.approx(expected[-1], rel=1e-5)


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


def test_checkpoints_that_are_not_whole_are_passed_over(tmp_path, tokenizer):
    arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    expected = losses(make_trainer(tmp_path, tokenizer, **arguments))
    for name, break_it in BREAKS:
        broken = tmp_path / "checkpoint-6"
        break_it(broken / name)
        resumed = make_trainer(tmp_path, tokenizer, **arguments)
        with pytest.raises(ValueError, match=f"{name}.*last intact checkpoint"):
            resumed.train(resume_from_checkpoint=str(broken))
        assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
        resumed.train(resume_from_checkpoint=True)
        history = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
        assert history == pytest.approx(expected, rel=1e-5) and what_is_broken(broken) is None
    for no_checkpoint in (tmp_path, tmp_path / "none"):  # the folder of all checkpoints
        with pytest.raises(ValueError, match="has no trainer_state.json.*last intact checkpoint"):
            resumed.train(resume_from_checkpoint=str(no_checkpoint))
    for step in (2, 4, 6):
        (tmp_path / f"checkpoint-{step}" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match="no checkpoint to resume from"):
        make_trainer(tmp_path, tokenizer, **arguments).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="no checkpoint to resume from"):
        make_trainer(tmp_path / "empty", tokenizer, **arguments).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="no checkpoint to resume from"):  # it may be the disk that is broken
        make_trainer(tmp_path, tokenizer, **arguments).train(resume_from_checkpoint="auto")


def test_a_full_disk_is_mentioned(tmp_path, tokenizer, monkeypatch):
    """By torch the error would be `basic_ios::clear: iostream error`, and no more."""
    trainer = make_trainer(tmp_path, tokenizer, max_steps=4, save_strategy="steps", save_steps=2)
    monkeypatch.setattr(torch, "save", Mock(side_effect=RuntimeError("basic_ios::clear: iostream error")))
    with pytest.raises(RuntimeError, match=r"checkpoint of step 2 could not be saved: basic_ios.* \d+\.\d\d GB left"):
        trainer.train()


def test_one_command_for_all_runs_of_a_job(tmp_path, tokenizer):
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    (tmp_path / "checkpoint-2").mkdir()  # killed before it was written
    expected = losses(make_trainer(tmp_path, tokenizer, **arguments))
    for step in (0, 2):
        for checkpoint in tmp_path.glob("checkpoint-*"):
            if int(checkpoint.name.split("-")[1]) > step:
                for name in ("trainer_state.json", "config.json"):
                    (checkpoint / name).unlink()
        trainer = make_trainer(tmp_path, tokenizer, **arguments)
        trainer.train(resume_from_checkpoint="auto")
        assert bool(trainer.resumed_from) == (step > 0)
        history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert history == pytest.approx(expected, rel=1e-5)


def test_a_training_goes_on_as_it_was_begun(tmp_path, tokenizer):
    """Its optimizer goes by the checkpoint, whatever the arguments say, and its record must be of both."""
    arguments = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path, tokenizer, **arguments).train()
    weights = (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="finished training, of 2 steps"):
        make_trainer(tmp_path, tokenizer, **arguments).train(resume_from_checkpoint=True)
    arguments["max_steps"] = 4
    with pytest.raises(ValueError, match="learning_rate was 0.01 before, 0.5 after"):
        make_trainer(tmp_path, tokenizer, **arguments, learning_rate=0.5).train(resume_from_checkpoint=True)
    other = make_trainer(tmp_path, tokenizer, **arguments)
    other.dataset_names = ["others"]
    with pytest.raises(ValueError, match="dataset_name was None before, 'others' after"):
        other.train(resume_from_checkpoint=True)
    assert (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes() == weights
    trainer = make_trainer(tmp_path, tokenizer, **arguments, logging_steps=2)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4


def test_a_first_try_goes_on_by_epochs(tmp_path, tokenizer):
    """Its `max_steps` say nothing about the steps of an epoch."""
    settings = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    make_trainer(tmp_path, tokenizer, max_steps=2, **settings).train()
    trainer = make_trainer(tmp_path, tokenizer, max_steps=-1, num_train_epochs=0.4, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == trainer.state.max_steps == 4
    shorter = make_trainer(tmp_path, tokenizer, max_steps=-1, num_train_epochs=0.35, **settings)
    with pytest.raises(ValueError, match="finished training, of 4 steps"):
        shorter.train(resume_from_checkpoint=True)


def test_nothing_keeps_models_in_memory(tmp_path, tokenizer):
    """As after `del` in a notebook, before the cell runs again."""
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": TEXTS.select(range(3))}
    trainer = make_trainer(tmp_path, tokenizer, max_steps=1, **evaluation)
    trainer.train()
    target, draft, inputs = trainer.target_model, trainer.draft.eval(), torch.tensor([[3, 4, 5]])
    draft.generation_config.tree_policy = "auto"
    target.generate(inputs, assistant_model=draft, max_new_tokens=8)
    with assist(target, draft):
        target.generate(inputs, max_new_tokens=8)
    references = [weakref.ref(each) for each in (trainer, target, draft)]
    del trainer, target, draft
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


@pytest.mark.parametrize("bf16", [False, True])
def test_a_trained_draft_can_be_pickled(tmp_path, tokenizer, bf16):
    trainer = make_trainer(tmp_path, tokenizer, max_steps=1, bf16=bf16)
    trainer.train()
    draft, inputs = trainer.draft.eval(), torch.tensor([[3, 4, 5]])
    copied, target = pickle.loads(pickle.dumps(draft)), make_target("llama")
    texts = [
        target.generate(inputs, assistant_model=each, max_new_tokens=8, do_sample=False) for each in (draft, copied)
    ]
    assert torch.equal(*texts)


def test_half_precision_drafts_are_trained_in_float32(tmp_path, tokenizer):
    target = make_target("llama").to(torch.bfloat16)
    draft = Eagle3ForSpeculation.from_target(target)
    assert draft.dtype == torch.bfloat16
    trainer = make_trainer(tmp_path, tokenizer, model=draft, target=target)
    trainer.args.save_strategy, trainer.args.save_steps = "steps", trainer.args.max_steps
    trainer.train()
    assert trainer.draft.dtype == torch.float32
    # Training goes on from what it left; what is used has the target's precision, as does the record of its weights.
    trainer.save_model(str(tmp_path / "checkpoint-best"))
    (checkpoint,) = tmp_path.glob("checkpoint-[0-9]*")
    saved = {}
    for folder in (checkpoint, tmp_path / "checkpoint-best"):
        draft = saved[folder.name] = Eagle3ForSpeculation.from_pretrained(folder)
        record = json.loads((folder / "training.json").read_text())
        assert record["draft_weights"] == weights_digest(draft.state_dict())
    assert saved["checkpoint-best"].dtype == torch.bfloat16 and saved[checkpoint.name].dtype == torch.float32
    assert torch.equal(saved["checkpoint-best"].fc.weight, trainer.draft.fc.weight.bfloat16())


def test_packing(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer, packing=True, max_length=128, per_device_train_batch_size=3)
    examples = [trainer.train_dataset[index] for index in range(3)]
    joined = DataCollatorForLanguageModeling(trainer.processing_class.pad_token_id, padding_free=True)(examples)
    apart = trainer.data_collator(examples)
    assert len(apart["input_ids"]) == 3 and len(joined["input_ids"]) == 1
    assert any(len(example["seq_lengths"]) > 1 for example in examples)
    trainer.model.eval()
    losses = [trainer.compute_loss(trainer.model, each) for each in (apart, joined)]
    torch.testing.assert_close(*losses)
    counts = [trainer._get_num_items_in_batch([each], "cpu") for each in (apart, joined)]
    assert torch.equal(*counts) and counts[0][0] > 0

    trainer.train()
    assert all(torch.isfinite(torch.tensor(entry["loss"])) for entry in trainer.state.log_history if "loss" in entry)


@pytest.mark.parametrize("model_type", ["llama", "lfm2"])
def test_rows_that_are_not_packed(tmp_path, tokenizer, model_type):
    """Evaluation pads them, and `padding_free=True` joins them, with the losses of a plain padded batch."""
    target = make_target(model_type)
    arguments = {"target": target, "eval_dataset": TEXTS.select(range(7, 12)), "eval_packing": False}
    packed = make_trainer(tmp_path, tokenizer, packing=True, **arguments)
    examples = list(packed.eval_dataset)
    assert len({len(example["input_ids"]) for example in examples}) > 1
    joining = make_trainer(tmp_path, tokenizer, padding_free=True, max_length=None, **arguments)
    plain = DataCollatorForLanguageModeling(packed.processing_class.pad_token_id)(examples)
    joining.draft.load_state_dict(packed.draft.state_dict())
    for trainer, num_rows in ((packed, 5), (joining, 1)):
        trainer.model.eval()
        batch = trainer.data_collator(examples)
        losses = [trainer.compute_loss(trainer.model, each) for each in (batch, plain)]
        assert len(batch["input_ids"]) == num_rows and batch.keys() > {"position_ids"}
        torch.testing.assert_close(*losses)
        counts = [trainer._get_num_items_in_batch([each], "cpu") for each in (batch, plain)]
        assert torch.equal(*counts)


def test_an_adapter_of_whatever_is_linear(tmp_path, tokenizer):
    """PEFT's own choice of modules goes by the `model_type`, which a draft's config.json must not have."""
    target, lora = make_target("llama"), LoraConfig(r=2)
    draft = Eagle3ForSpeculation.from_target(target)
    trainer = make_trainer(tmp_path, tokenizer, model=draft, target=target, peft_config=lora, max_steps=1)
    trainer.train()
    adapted = {
        name.split(".lora_")[0].split(".")[-1] for name, weight in trainer.model.named_parameters() if "lora_" in name
    }
    assert {"fc", "q_proj", "down_proj"} <= adapted and "lm_head" not in adapted and lora.target_modules is None
    # Where FSDP shares parameters out, a copy of draft and adapter generates.
    copied, trained = (
        each.state_dict() for each in (trainer._copy_of_draft(trainer.model.state_dict()), trainer.draft)
    )
    assert copied.keys() == trained.keys() and all(copied[name].equal(trained[name]) for name in trained)


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


@pytest.mark.parametrize(
    ("name", "kwargs"), [("polynomial", {}), ("cosine_with_min_lr", {"min_lr": 1e-4}), ("linear", {})]
)
def test_schedules(tmp_path, tokenizer, name, kwargs):
    trainer = make_trainer(tmp_path, tokenizer, lr_scheduler_type=name, lr_scheduler_kwargs=kwargs)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates[0] == 1e-2 and rates[-1] < rates[0]


def test_norms_do_not_decay(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer, weight_decay=0.1)
    optimizer = trainer.create_optimizer()
    decays = {id(weight): group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
    assert {decays[id(weight)] for name, weight in trainer.draft.named_parameters() if weight.dim() > 1} == {0.1}
    assert {decays[id(weight)] for name, weight in trainer.draft.named_parameters() if weight.dim() == 1} == {0.0}


def test_the_best_weights_are_recorded(tmp_path, tokenizer):
    """Of figures that rise while the draft becomes worse, the lowest loss is the best, and its record is its own."""
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_strategy": "steps", "max_steps": 4}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss_per_step"}
    trainer = make_trainer(tmp_path, tokenizer, eval_dataset=TEXTS.select(range(4)), **settings)
    losses = iter([3.0, 1.0, 2.0, 4.0, 5.0])
    evaluate = trainer.evaluation_loop

    def evaluation_loop(*args, **kwargs):
        output = evaluate(*args, **kwargs)
        output.metrics["eval_loss_per_step"] = output.metrics["eval_accuracy_0"] = next(losses)
        return output

    trainer.evaluation_loop = evaluation_loop
    trainer.train()
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


def test_what_the_best_draft_is_chosen_by(tmp_path, tokenizer):
    """A name that no evaluation reports fails before training."""
    rows = TEXTS.select(range(4))
    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "ttt_steps": 2, "draft_vocab_size": 20}
    for changes in (
        {"metric_for_best_model": "acc_length"},
        {"metric_for_best_model": "accuracy_2"},
        {"metric_for_best_model": "acceptance_length", "num_eval_prompts": 0},
        {"metric_for_best_model": "loss", "eval_dataset": {"first": rows}},
    ):
        with pytest.raises(ValueError, match=f"is '{changes['metric_for_best_model']}', which is not measured"):
            make_trainer(tmp_path, tokenizer, **{"eval_dataset": rows, **settings, **changes})
    make_trainer(
        tmp_path, tokenizer, metric_for_best_model="eval_first_loss", eval_dataset={"first": rows}, **settings
    )
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
    settings = {"target": target, "eval_dataset": TEXTS.select(range(4)), "eval_strategy": "steps", "eval_steps": 1}
    with pytest.raises(
        ValueError, match="the target refuses it: .*Owner has a `_sample` of its own.*`num_eval_prompts=0`"
    ):
        make_trainer(tmp_path, tokenizer, **settings)
    trainer = make_trainer(tmp_path, tokenizer, **settings, num_eval_prompts=0, max_steps=1)
    trainer.train()
    assert "eval_loss" in trainer.state.log_history[1]


def test_several_data_sets_to_evaluate(tmp_path, tokenizer):
    data = {"first": TEXTS.select(range(4)), "second": TEXTS.select(range(4, 8))}
    trainer = make_trainer(tmp_path, tokenizer, eval_dataset=data, eval_strategy="steps", eval_steps=2)
    trainer.train()
    *_, entry = (entry for entry in trainer.state.log_history if "eval_first_acceptance_length" in entry)
    assert {"eval_first_loss_per_step", "eval_first_accuracy_0"} <= shown(entry).keys()
    evaluation = training_record(trainer)["evaluation"]
    assert (evaluation["dataset"], evaluation["step"]) == ("first", entry["step"])
    assert evaluation["acceptance_length"] == entry["eval_first_acceptance_length"]


def test_a_table_in_a_notebook_has_few_columns(tmp_path, tokenizer, monkeypatch):
    """Its training loss is that per step, because the sum rises while the unroll grows."""
    display = SimpleNamespace(HTML=str, display=lambda *args, **kwargs: Mock())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("hf_eagle3.training.console.is_in_notebook", lambda: True)
    from transformers.utils.notebook import NotebookProgressCallback

    monkeypatch.setattr("transformers.trainer.DEFAULT_PROGRESS_CALLBACK", NotebookProgressCallback)
    arguments = {"max_steps": 2, "num_eval_prompts": 1, "eval_max_new_tokens": 4}
    for data in (None, rows := TEXTS.select(range(3)), {"a": rows}):
        evaluates = {} if data is None else {"eval_strategy": "steps", "eval_steps": 1}
        trainer = make_trainer(tmp_path, tokenizer, eval_dataset=data, disable_tqdm=False, **arguments, **evaluates)
        kinds = trainer.callback_handler.callbacks
        (callback,) = [callback for callback in kinds if isinstance(callback, NotebookProgressCallback)]
        monkeypatch.setattr(callback, "on_train_end", Mock())  # it would drop the table
        trainer.train()
        columns, *lines = callback.training_tracker.inner_table
        losses = [entry["loss_per_step"] for entry in trainer.state.log_history if "loss_per_step" in entry]
        assert [line[columns.index("Training Loss")] for line in lines] == losses
        assert len(columns) == (2 if data is None else 6 + isinstance(data, dict)), columns


@pytest.mark.parametrize("is_class", [False, True])
def test_an_optimizer_of_the_caller_s(tmp_path, tokenizer, is_class):
    draft = Eagle3ForSpeculation.from_target(target := make_target("llama"))
    trainer = Eagle3Trainer(
        model=draft,
        target_model=target,
        args=make_trainer(tmp_path, tokenizer).args,
        train_dataset=TEXTS,
        processing_class=tokenizer,
        **(
            {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.3})}
            if is_class
            else {"optimizers": (torch.optim.SGD(draft.parameters(), lr=0.3), None)}
        ),
    )
    trainer.train()
    arguments = training_record(trainer)["arguments"]
    assert arguments["optimizers"] == "SGD" and "learning_rate" not in arguments


def test_the_record_has_the_token_that_ends_texts(tmp_path, tokenizer):
    """It is a part of the data, unlike padding."""
    trainer = make_trainer(tmp_path, copy.deepcopy(tokenizer), eos_token=tokenizer.bos_token)
    arguments = training_record(trainer)["arguments"]
    assert arguments["eos_token"] == tokenizer.bos_token and "pad_token" not in arguments


def test_an_optimizer_of_another_model(tmp_path, tokenizer):
    """The draft would learn nothing, as one that is frozen."""
    draft = Eagle3ForSpeculation.from_target(target := make_target("llama"))
    args = make_trainer(tmp_path, tokenizer).args
    for model, other in ((None, draft), (draft, target), (draft, copy.deepcopy(draft))):
        with pytest.raises(ValueError, match="The optimizer has .* parameters that are not the draft's"):
            Eagle3Trainer(
                model=model,
                target_model=target,
                args=args,
                train_dataset=TEXTS,
                processing_class=tokenizer,
                optimizers=(torch.optim.SGD(other.parameters()), None),
            )


def test_an_optimizer_that_was_made_before_the_adapter(tmp_path, tokenizer):
    """All its parameters are frozen then, and the adapter would learn nothing."""
    draft = Eagle3ForSpeculation.from_target(target := make_target("llama"))
    optimizers = torch.optim.SGD(draft.parameters(), lr=0.3), None
    with pytest.raises(ValueError, match="only frozen parameters.*`optimizer_cls_and_kwargs`"):
        make_trainer(
            tmp_path,
            tokenizer,
            model=draft,
            target=target,
            peft_config=LoraConfig(target_modules=["q_proj"]),
            trainer_class=partial(Eagle3Trainer, optimizers=optimizers),
        )


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("names", [("from", "value"), ("role", "content")])
def test_conversations_are_messages(tmp_path, tokenizer, names, is_stream):
    roles = {"user": "human", "assistant": "gpt"} if names[0] == "from" else {"user": "user", "assistant": "assistant"}
    rows = [
        {"conversations": [{names[0]: roles[turn["role"]], names[1]: turn["content"]} for turn in row["messages"]]}
        for row in CHATS
    ]
    expected = make_trainer(tmp_path, tokenizer, dataset=CHATS, assistant_only_loss=True)
    data = Dataset.from_list(rows)
    data = data.to_iterable_dataset() if is_stream else data
    trainer = make_trainer(
        tmp_path, tokenizer, dataset=data, eval_dataset=Dataset.from_list(rows), assistant_only_loss=True
    )
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        assert [row["input_ids"] for row in dataset] == [row["input_ids"] for row in expected.train_dataset]
        assert [row["labels"] for row in dataset] == [row["labels"] for row in expected.train_dataset]


def test_data_in_tensors(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer, eval_dataset=TEXTS.select(range(4)).with_format("torch"))
    assert trainer.evaluate()["eval_acceptance_length"] >= 1


def test_a_processor_s_tokenizer(tmp_path, tokenizer):
    class Processor(ProcessorMixin):
        def __init__(self):
            self.tokenizer = tokenizer

    target = make_target("llama")
    processor = Processor()
    assert models.load_target(target, None, processor) == (target, tokenizer, processor)


def test_a_loss_that_somebody_else_logs(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer)
    trainer.log({"loss": 2.0})
    assert trainer.state.log_history[-1]["loss_per_step"] == 2.0


def test_models_that_fsdp_would_not_save(tmp_path, tokenizer, monkeypatch):
    def with_fsdp(trainer):
        create(trainer)
        trainer.is_fsdp_enabled = True
        monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)

    create = Eagle3Trainer.create_accelerator_and_postprocess
    monkeypatch.setattr(Eagle3Trainer, "create_accelerator_and_postprocess", with_fsdp)
    for kind, refusal in (
        ("SHARDED_STATE_DICT", pytest.raises(ValueError, match="fsdp_state_dict_type: FULL_STATE_DICT")),
        ("FULL_STATE_DICT", nullcontext()),
    ):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        with refusal:
            make_trainer(tmp_path, tokenizer)
    with pytest.raises(ValueError, match="FSDP and DeepSpeed keep in parts"):
        make_trainer(tmp_path, tokenizer, sampled_vocab_size=4)
    plugin.fsdp_version = 1
    with pytest.raises(ValueError, match="Muon needs whole matrices. .*`fsdp_version: 2`"):
        make_trainer(tmp_path, tokenizer)
    plugin.fsdp_version, plugin.cpu_ram_efficient_loading = 2, True
    make_trainer(tmp_path, tokenizer)
    with pytest.raises(ValueError, match="`fsdp_cpu_ram_efficient_loading: true` loads no buffers"):
        make_trainer(tmp_path, tokenizer, draft_vocab_size=20)
    plugin.activation_checkpointing = True
    with pytest.raises(ValueError, match="`fsdp_activation_checkpointing: true` is not supported"):
        make_trainer(tmp_path, tokenizer)


def test_zero_3(tmp_path):
    args = Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=False)
    for stage, refusal in (
        (2, nullcontext()),
        (3, pytest.raises(ValueError, match="DeepSpeed ZeRO-3 .* Use ZeRO-2, or FSDP2")),
    ):
        args.deepspeed_plugin = SimpleNamespace(
            hf_ds_config=HfDeepSpeedConfig({"zero_optimization": {"stage": stage}})
        )
        with refusal:
            check_call("target", args, {"train_dataset": TEXTS})


def test_a_process_with_several_gpus(tmp_path, tokenizer, caplog):
    args = Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=False)
    args._n_gpu = 2
    target, settings = make_target("llama"), {"train_dataset": TEXTS, "processing_class": copy.deepcopy(tokenizer)}
    trainer = Eagle3Trainer(model=None, target_model=target, args=args, **settings)
    assert trainer.args.n_gpu == 1 and args.n_gpu == 2 and "accelerate launch" in caplog.text


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_bfloat16_on_processors(tmp_path, monkeypatch, has_bfloat16):
    """TRL's default where they have it; by software it takes several times as long."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
    assert Eagle3TrainingArguments(str(tmp_path), use_cpu=True).bf16 is has_bfloat16
    for asked in (True, False):
        arguments = Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=asked)
        assert arguments.bf16 is asked
    assert ("bf16" in non_defaults(arguments)) and "bf16" not in non_defaults(arguments, {"bf16": True})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_target_in_bfloat16_on_a_processor_without_it(tmp_path, monkeypatch, tokenizer, caplog, dtype):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    make_trainer(tmp_path, tokenizer, target=make_target("llama").to(dtype))
    assert ("Load the target in float32" in caplog.text) is (dtype == torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("lr_scheduler_kwargs", "[1]", "must be a dictionary"),
        ("lr_scheduler_kwargs", [1], "must be a dictionary"),
        ("model_init_kwargs", "dtype=float32", "must be a dictionary.*dtype=float32"),
        ("dataloader_num_workers", -1, "must be an integer"),
        ("learning_rate", -1.0, "must not be negative"),
        ("learning_rate", "1e-4", "is '1e-4', but must be a number. YAML reads"),
        ("warmup_steps", "10", "is '10', but must be a number"),
        ("max_grad_norm", None, "is None, but must be a number"),
        ("max_steps", 2.0, "is 2.0, but must be an integer"),
        ("ttt_steps", 2.5, "is 2.5, but must be an integer"),
        ("gradient_accumulation_steps", 0, "must be .* got 0"),
        ("per_device_train_batch_size", 0, "must be .* got 0"),
        ("ttt_steps", 0, "must be .* got 0"),
        ("draft_vocab_size", -3, "must be .* got -3"),
        ("max_length", 2, "must be .* got 2"),
        ("eval_max_new_tokens", 0, "must be .* got 0"),
        ("draft_form", "eagle4", "must be one of .*'classic'"),
        ("label_smoothing_factor", 0.1, "has no effect"),
        ("loss_type", "dft", "has no effect"),
        ("neftune_noise_alpha", 5.0, "has no effect"),
        ("use_liger_kernel", True, "has no effect"),
        ("dataset_kwargs", {"add_special_tokens": False}, "would have no effect. Its only key is"),
        ("optim", "adafactor", "has no effect"),
        ("optim_args", "a=1", "has no effect"),
        ("optim_target_modules", "all-linear", "has no effect"),
        ("gradient_checkpointing", True, "is not supported"),
        ("activation_offloading", True, "moves .* where they are already"),
        ("fp16", True, "has no effect on a CPU"),
    ],
)
def test_arguments_that_are_refused(tmp_path, name, value, reason):
    with pytest.raises(ValueError, match=f"`{name}(=True)?` .*{reason}"):
        Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=False, **{name: value})


def test_trackers_that_are_not_there(tmp_path, monkeypatch):
    """Fail before the work, not after all rows are tokenized."""
    monkeypatch.setattr("hf_eagle3.training.arguments.get_available_reporting_integrations", lambda: ["wandb"])
    settings = {"use_cpu": True, "bf16": False}
    assert Eagle3TrainingArguments(str(tmp_path), report_to=["wandb"], **settings).report_to == ["wandb"]
    for report_to, told in (
        (
            ["wandb", "tensorboard"],
            r"has \['tensorboard'\], which are not installed. Install .*pip install tensorboard",
        ),
        ("wanbd", "wanbd is not supported, only .*wandb"),
    ):
        with pytest.raises(ValueError, match=told):
            Eagle3TrainingArguments(str(tmp_path), report_to=report_to, **settings)


def test_arguments_that_are_taken(tmp_path):
    Eagle3Parser([Eagle3TrainingArguments])  # takes `None` out of the types of fields
    arguments = {"max_length": None, "optim": "adafactor", "use_muon": False}
    assert Eagle3TrainingArguments(str(tmp_path), use_cpu=True, **arguments).max_length is None


def test_wrong_arguments(tmp_path, tokenizer):
    target, other = make_target("llama"), make_target("llama", seed=1)
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=range(10))
    with pytest.raises(TypeError, match="`model` is LlamaForCausalLM"):
        make_trainer(tmp_path, tokenizer, model=other, target=target)
    draft.save_pretrained(tmp_path / "draft")
    with pytest.raises(ValueError, match="draft is a draft, not a target"):
        make_trainer(tmp_path, tokenizer, target=str(tmp_path / "draft"))
    with pytest.raises(ValueError, match="trained for another model"):
        make_trainer(tmp_path, tokenizer, model=draft, target=other)
    larger = copy.deepcopy(target)
    larger.resize_token_embeddings(100)
    with pytest.raises(ValueError, match="a target with 96 tokens, and this one has 100"):
        make_trainer(tmp_path, tokenizer, model=draft, target=larger)
    with pytest.raises(ValueError, match="vocabulary of 10"):
        make_trainer(tmp_path, tokenizer, model=draft, target=target, draft_vocab_size=20)
    with pytest.raises(ValueError, match="model_init_kwargs"):
        make_trainer(tmp_path, tokenizer, model=draft, target=target, model_init_kwargs={"model_type": "qwen3"})
    with pytest.raises(ValueError, match="draft_form"):
        make_trainer(tmp_path, tokenizer, model=draft, target=target, draft_form="classic")
    with pytest.raises(ValueError, match="torch_compile"):
        make_trainer(tmp_path, tokenizer, model=torch.compile(draft), target=target)
    with pytest.raises(ValueError, match="adapter of a fresh one"):
        make_trainer(tmp_path, tokenizer, peft_config=LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(TypeError, match="`target_model` is Eagle3ForSpeculation"):
        make_trainer(tmp_path, tokenizer, model=target, target=draft)
    bert = AutoConfig.for_model("bert", vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
    with pytest.raises(ValueError, match="BertForMaskedLM cannot be an EAGLE-3 target"):
        make_trainer(tmp_path, tokenizer, target=AutoModelForMaskedLM.from_config(bert))
    with pytest.raises(TypeError, match="`target_model` is NoneType"):
        Eagle3Trainer(model=None, target_model=None, train_dataset=TEXTS)
    with pytest.raises(ValueError, match=r"dataset\['train'\]"):
        make_trainer(tmp_path, tokenizer, dataset=DatasetDict(test=TEXTS, train=TEXTS))
    with pytest.raises(ValueError, match="more than two tokens"):
        make_trainer(tmp_path, tokenizer, dataset=Dataset.from_dict({"text": ["a"] * 5}))
    chats = Dataset.from_dict(
        {"messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]}
    )
    without_template = copy.deepcopy(tokenizer)
    without_template.chat_template = None
    with pytest.raises(ValueError, match="no chat template. Pass one as `chat_template_path`"):
        make_trainer(tmp_path, without_template, dataset=chats)
    store = make_trainer(tmp_path, tokenizer).extract_features(tmp_path / "features")
    evaluating = Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=False, eval_strategy="epoch")
    for kwargs, error, message in (
        ({"compute_metrics": len}, ValueError, "`compute_metrics` would have no effect"),
        ({"compute_loss_func": len}, ValueError, "`compute_loss_func` would have no effect"),
        ({"preprocess_logits_for_metrics": len}, ValueError, "`preprocess_logits_for_metrics` would have no effect"),
        ({"quantization_config": object()}, ValueError, "Quantize the target when it is loaded"),
        ({"tokenizer": tokenizer}, TypeError, r"no arguments \['tokenizer'\].*the others are .*'processing_class'"),
        ({"max_seq_length": 64}, TypeError, "no arguments .*Pass those of `Eagle3TrainingArguments` in `args`"),
        ({"train_dataset": list(TEXTS)}, TypeError, "The train data is list.*`Dataset.from_list` makes one"),
        ({"train_dataset": None}, TypeError, "The train data is NoneType"),
        ({"eval_dataset": {"one": "texts.jsonl"}}, TypeError, "The eval data is str"),
        ({"eval_dataset": {}}, ValueError, "`eval_dataset` has no data sets"),
        ({"args": {"eval_strategy": "steps"}}, TypeError, "`args` must be `Eagle3TrainingArguments`, got dict"),
        ({"args": evaluating}, ValueError, "asks for evaluation, but there is no `eval_dataset`"),
        ({"eval_dataset": store}, ValueError, "`eval_dataset` is a feature store"),
        ({"eval_dataset": {"one": store}}, ValueError, "`eval_dataset` is a feature store"),
    ):
        args = Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=False)
        with pytest.raises(error, match=message):
            Eagle3Trainer(None, target, **{"args": args, "train_dataset": TEXTS, **kwargs})
    for config in (
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
        LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[7]),
    ):
        with pytest.raises(ValueError, match="which training would leave out"):
            make_trainer(tmp_path, tokenizer, target=get_peft_model(make_target("llama"), config))
    with pytest.raises(TypeError, match="The eval data is list"):
        make_trainer(tmp_path, tokenizer).evaluate(list(TEXTS))
    for error, named in ((ValueError, {}), (TypeError, {"processing_class": "gpt2"})):
        with pytest.raises(error, match="`processing_class`"):
            Eagle3Trainer(
                model=None,
                target_model=target,
                args=Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=False),
                train_dataset=TEXTS,
                **named,
            )


def test_a_draft_that_is_frozen(tmp_path, tokenizer):
    """Also an adapter as `PeftModel.from_pretrained` loads it."""
    draft = Eagle3ForSpeculation.from_target(target := make_target("llama"))
    draft.save_pretrained(tmp_path / "draft")
    adapted = get_peft_model(copy.deepcopy(draft), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(copy.deepcopy(draft), tmp_path / "adapter")
    for frozen in (loaded, copy.deepcopy(draft).requires_grad_(False)):
        with pytest.raises(ValueError, match="parameters of the draft are frozen.*is_trainable=True"):
            make_trainer(tmp_path / "out", tokenizer, model=frozen, target=target)
    loaded = PeftModel.from_pretrained(draft, tmp_path / "adapter", is_trainable=True)
    make_trainer(tmp_path / "out", tokenizer, model=loaded, target=target).train()


@pytest.mark.parametrize("peft_config", [None, LoraConfig(target_modules=["q_proj"])])
def test_a_draft_that_is_the_name_of_an_adapter(tmp_path, tokenizer, peft_config):
    """Transformers loads it into its draft. A `peft_config` would replace it there without a word."""
    Eagle3ForSpeculation.from_target(target := make_target("llama")).save_pretrained(tmp_path / "draft")
    draft = Eagle3ForSpeculation.from_pretrained(tmp_path / "draft")
    get_peft_model(draft, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        ValueError, match="adapter.* is a draft into which transformers loaded an adapter.*merge it first"
    ):
        make_trainer(
            tmp_path / "out", tokenizer, model=str(tmp_path / "adapter"), target=target, peft_config=peft_config
        )
    unnamed = get_peft_model(Eagle3ForSpeculation.from_target(target), LoraConfig(target_modules=["q_proj"]))
    unnamed.save_pretrained(tmp_path / "unnamed")
    with pytest.raises(ValueError, match="unnamed is an adapter that does not name its draft"):
        Eagle3ForSpeculation.from_pretrained(tmp_path / "unnamed")


@pytest.mark.parametrize(
    ("offloaded", "message"),
    [
        ("model.embed_tokens", "The weights of the embeddings of LlamaForCausalLM are offloaded"),
        ("lm_head", "The weights of the head of LlamaForCausalLM are offloaded"),
        ("model.layers.1", None),
    ],
)
def test_offloaded_targets(tmp_path, tokenizer, offloaded, message):
    """As `device_map="auto"` leaves them where memory is short."""
    make_target("llama").save_pretrained(tmp_path / "target")
    layers = [f"model.layers.{number}" for number in range(4)]
    names = ["model.embed_tokens", *layers, "model.norm", "model.rotary_emb", "lm_head"]
    device_map = {name: "disk" if name == offloaded else "cpu" for name in names}
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map=device_map, offload_folder=tmp_path / "offloaded"
    )
    draft = Eagle3ForSpeculation.from_target(make_target("llama"))
    for model in (None, draft):
        with nullcontext() if message is None else pytest.raises(ValueError, match=message):
            make_trainer(tmp_path / "out", tokenizer, model=model, target=target).train()


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_other_model_is_overwritten(tmp_path, tokenizer):
    """The output folder may be that of an earlier training, and of no other model."""
    folder, other = tmp_path / "target", tmp_path / "other"
    make_target("llama").save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder / "checkpoint-7")
    make_target("qwen3").save_pretrained(other)
    before = files_in(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    for output_dir, target in (
        (tmp_path / "link", folder),
        (folder / "checkpoint-7" / "..", folder / "checkpoint-7"),  # whose checkpoints would be rotated
    ):
        for given in (str(target), AutoModelForCausalLM.from_pretrained(target)):
            with pytest.raises(ValueError, match="the target's folder"):
                make_trainer(output_dir, tokenizer, target=given)
    (folder / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(ValueError, match="target has model.safetensors of another model"):
        make_trainer(folder, tokenizer)
    (tmp_path / "config.json").rename(folder / "config.json")
    with pytest.raises(ValueError, match="other has config.json of another model, which the draft would damage"):
        make_trainer(other, tokenizer)
    assert files_in(tmp_path).items() >= before.items()

    run = tmp_path / "run"
    for _ in range(2):
        trainer = make_trainer(run, tokenizer, target=str(folder), max_steps=1)
        trainer.train()
        trainer.save_model()
    (run / "config.json").write_bytes(b"")  # cut off
    make_trainer(run, tokenizer, target=str(folder))
    trainer.save_model()
    lora = LoraConfig(target_modules=["q_proj"])
    with pytest.raises(ValueError, match="run has a whole model, into which .* the draft's adapter"):
        make_trainer(run, tokenizer, model=str(run), target=str(folder), peft_config=lora)
    for _ in range(2):
        adapted = make_trainer(
            tmp_path / "adapter", tokenizer, str(run), target=str(folder), peft_config=lora, max_steps=1
        )
        adapted.train()
        adapted.save_model()
    with pytest.raises(ValueError, match="adapter has adapter_model.safetensors of another model"):
        make_trainer(tmp_path / "adapter", tokenizer, target=str(folder))


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_drafts_of_other_methods_may_be_overwritten(tmp_path, name):
    BASELINES[name].make_draft(make_target("llama")).save_pretrained(tmp_path)
    check_output_folder(tmp_path, "big/Model-8B", False)


def test_resuming_what_was_begun_otherwise(tmp_path, tokenizer):
    settings = {"num_train_epochs": 0.5, "max_steps": -1, "save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path, tokenizer, **settings).train()
    for changed, match in (
        ({"dataset": TEXTS.select(range(20))}, "rows was 40 before, 20 after"),
        ({"dataset": TEXTS.select(range(39, -1, -1))}, "order_of_rows was"),  # as many rows, in another order
        ({"per_device_train_batch_size": 2}, "sequences_per_step was 4 before, 2 after"),
        ({"gradient_accumulation_steps": 2}, "sequences_per_step was 4 before, 8 after"),
        ({"adam_beta2": 0.5}, "adam_beta2 was 0.95 before, 0.5 after"),
        ({"warmup_steps": 2}, "warmup_steps was 0 before, 2 after"),
        ({"max_grad_norm": 1.0}, "max_grad_norm was 0.5 before, 1.0 after"),
        ({"data_seed": 7}, "data_seed was None before, 7 after"),
        (
            {"dataset_text_field": "other", "dataset": TEXTS.add_column("other", ["abc"] * 40)},
            "dataset_text_field was 'text'",
        ),
        ({"dataloader_drop_last": True}, "dataloader_drop_last was False before, True after"),
        ({"truncation_mode": "keep_end"}, "truncation_mode was 'keep_start' before"),
        ({"lr_scheduler_kwargs": {"num_cycles": 3}}, "lr_scheduler_kwargs was None before, {'num_cycles': 3} after"),
        (
            {"model_init_kwargs": {"eagle_aux_hidden_state_layer_ids": [3, 1, 0]}},
            r"another draft: eagle_aux_hidden_state_layer_ids was \[1, 2, 3\] before",
        ),
        (
            {"model_init_kwargs": {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}},
            "another draft: rope_parameters was",
        ),
        ({"target": make_target("llama", seed=1)}, "has a draft for another target"),
        ({"num_train_epochs": 0.5}, "the end of a finished training"),
    ):
        arguments = {**settings, "num_train_epochs": 1.0, **changed}
        with pytest.raises(ValueError, match=match):
            make_trainer(tmp_path, tokenizer, **arguments).train(resume_from_checkpoint=True)
    tuned = make_target("llama")
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    with pytest.raises(ValueError, match="for a target with other weights"):
        make_trainer(tmp_path, tokenizer, target=tuned, **{**settings, "num_train_epochs": 1.0}).train(True)
    checkpoint = tmp_path / "checkpoint-5"
    for name, match in (("pytorch_model_fsdp.bin", "with FSDP"), ("global_step6", "with DeepSpeed")):
        (checkpoint / name).touch()  # beside the list of files
        with pytest.raises(ValueError, match=f"it was written {match}, and this training runs without them"):
            make_trainer(tmp_path, tokenizer, **{**settings, "num_train_epochs": 1.0}).train(True)
        (checkpoint / name).unlink()
    with_fsdp = make_trainer(tmp_path, tokenizer, **{**settings, "num_train_epochs": 1.0})
    with_fsdp.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="it was written without them, and this training runs with FSDP"):
        with_fsdp.train(True)
    half = make_trainer(tmp_path, tokenizer, target=make_target("llama").bfloat16())
    longer = make_trainer(tmp_path, tokenizer, **{**settings, "num_train_epochs": 1.0})
    assert target_digest(half) == target_digest(longer)
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 10
    for shorter in ({}, {"max_steps": 5}):  # than what was trained
        trainer = make_trainer(tmp_path, tokenizer, **{**settings, **shorter})
        with pytest.raises(ValueError, match="the end of a finished training, of 6 steps"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def test_a_training_goes_on_in_another_precision(tmp_path, tokenizer):
    """Also with a target of which bfloat16 rounds the weights."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path, tokenizer, **{**settings, "max_steps": 2}).train()
    target = make_target("llama").bfloat16()
    trainer = make_trainer(tmp_path, tokenizer, target=target, bf16=True, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4


def test_the_best_figures_of_two_metrics_are_not_compared(tmp_path, tokenizer):
    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"eval_dataset": TEXTS.select(range(3)), "load_best_model_at_end": True}
    make_trainer(tmp_path, tokenizer, max_steps=1, metric_for_best_model="loss_per_step", **settings).train()
    trainer = make_trainer(tmp_path, tokenizer, max_steps=2, metric_for_best_model="acceptance_length", **settings)
    with pytest.raises(
        ValueError, match="metric_for_best_model was 'loss_per_step' before, 'acceptance_length' after"
    ):
        trainer.train(resume_from_checkpoint=True)
    settings |= {"load_best_model_at_end": False}
    make_trainer(tmp_path, tokenizer, max_steps=2, **settings).train(resume_from_checkpoint=True)


def test_a_training_goes_on_with_its_kind_of_optimizer(tmp_path, tokenizer):
    def make(optimizer):
        trainer_class = partial(Eagle3Trainer, optimizer_cls_and_kwargs=(optimizer, {"lr": 0.01}))
        return make_trainer(tmp_path, tokenizer, trainer_class=trainer_class, save_strategy="steps", save_steps=2)

    make(torch.optim.AdamW).train()
    with pytest.raises(ValueError, match="optimizers was 'AdamW' before, 'SGD' after"):
        make(torch.optim.SGD).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize(("own", "expected"), [(0.0, 0.02), (0.1, 0.1)])
def test_the_threshold_of_a_draft_that_is_trained_further(tmp_path, tokenizer, own, expected):
    target = make_target("llama")
    draft = Eagle3ForSpeculation.from_target(target)
    draft.generation_config.assistant_confidence_threshold = own
    make_trainer(tmp_path, tokenizer, model=draft, target=target)
    assert draft.generation_config.assistant_confidence_threshold == expected


def test_a_draft_that_is_trained_further_names_its_new_target(tmp_path, tokenizer):
    """`vllm serve DRAFT` loads the target that the draft names."""
    target, tuned = make_target("llama"), make_target("llama")
    target.config._name_or_path, tuned.config._name_or_path = "org/Base", "org/Tuned"
    with torch.no_grad():
        tuned.get_input_embeddings().weight += 0.01
    draft = Eagle3ForSpeculation.from_target(target)
    proposal = draft.config.speculators_config["proposal_methods"] = [
        {"proposal_type": "greedy", "speculative_tokens": 3}
    ]
    trainer = make_trainer(tmp_path, tokenizer, model=draft, target=tuned)
    trainer.train()
    trainer.save_model()
    config = Eagle3ForSpeculation.from_pretrained(tmp_path).config
    assert config.verifier == "org/Tuned" and config.speculators_config["proposal_methods"] == proposal
    assert config.verifier_fingerprint == Eagle3ForSpeculation.from_target(tuned).config.verifier_fingerprint
    tuned.config._name_or_path = ""  # unknown: better the old one than none
    assert make_trainer(tmp_path, tokenizer, model=str(tmp_path), target=tuned).draft.config.verifier == "org/Tuned"


def test_a_target_by_its_name(tmp_path, tokenizer):
    make_target("llama").to(torch.bfloat16).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    settings = {"report_to": "none", "use_cpu": True, "bf16": False, "max_steps": 1, "draft_vocab_size": 20}
    args = Eagle3TrainingArguments(str(tmp_path / "out"), **settings)
    trainer = Eagle3Trainer(None, str(tmp_path / "target"), args, train_dataset=TEXTS)
    assert (
        trainer.target_model.dtype == torch.bfloat16 and trainer.processing_class.get_vocab() == tokenizer.get_vocab()
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "draft"))
    args.target_model_init_kwargs, args.draft_vocab_size = {"dtype": torch.float32}, None
    trainer = Eagle3Trainer(str(tmp_path / "draft"), str(tmp_path / "target"), args, train_dataset=TEXTS)
    assert trainer.target_model.dtype == torch.float32 and trainer.draft.config.draft_vocab_size == 20
    with pytest.raises(ValueError, match="given by its name"):
        Eagle3Trainer(None, trainer.target_model, args, train_dataset=TEXTS)
    with pytest.raises(ValueError, match="saved beside the draft"):
        Eagle3TrainingArguments(str(tmp_path / "out"), target_model_init_kwargs={"token": "hf_mine"}, **settings)


def test_a_target_that_brings_its_code(tmp_path, tokenizer):
    folder = tmp_path / "target"
    make_target("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MineConfig"}}
    config["auto_map"]["AutoModelForCausalLM"] = "mine.MineForCausalLM"
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"report_to": "none", "use_cpu": True, "bf16": False, "max_steps": 1}
    args = Eagle3TrainingArguments(str(tmp_path / "out"), trust_remote_code=True, **settings)
    trainer = Eagle3Trainer(None, str(folder), args, train_dataset=TEXTS)
    assert type(trainer.target_model).__name__ == "MineForCausalLM"
    trainer.train()
    assert type(load_ends(folder, trust_remote_code=True)).__name__ == "MineForCausalLM"
    args.trust_remote_code = False
    with pytest.raises(ValueError, match="trust_remote_code"):
        Eagle3Trainer(None, str(folder), args, train_dataset=TEXTS)


def test_the_tokenizer_is_of_the_same_revision(monkeypatch):
    loaded = []
    tokenizer = SimpleNamespace(chat_template="")
    for auto in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(auto, "from_pretrained", lambda name, **kwargs: loaded.append(kwargs) or tokenizer)
    models.load_target("me/model", {"revision": "v2", "trust_remote_code": True, "dtype": torch.float16})
    config_kwargs, model_kwargs, tokenizer_kwargs = loaded
    assert (
        tokenizer_kwargs
        == config_kwargs
        == {"revision": "v2", "trust_remote_code": True}
        == {name: value for name, value in model_kwargs.items() if name != "dtype"}
    )


def test_arguments_stay_the_caller_s(tmp_path, tokenizer):
    """Also where the trainer could not be made."""
    arguments = {
        "assistant_only_loss": False,
        "model_init_kwargs": {"fc_norm": False},
        "report_to": "none",
        "use_cpu": True,
    }
    args = Eagle3TrainingArguments(str(tmp_path), draft_vocab_size=20, bf16=False, hub_token="hf_mine", **arguments)
    for dataset in (Dataset.from_dict({"text": [3]}), TEXTS):
        try:
            trainer = Eagle3Trainer(
                None, make_target("llama"), args, train_dataset=dataset, processing_class=tokenizer
            )
        except (TypeError, ValueError, AttributeError):
            trainer = None
        assert (trainer is None) == (dataset is not TEXTS)
        assert args.model_init_kwargs == {"fc_norm": False}
    assert trainer.args.model_init_kwargs == {"fc_norm": False} and not trainer.draft.config.fc_norm
    assert trainer.args.hub_token == args.hub_token == "hf_mine" and pickle.loads(pickle.dumps(args)).hub_token is None


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_batches_are_not_copied_from_freed_memory(tmp_path, monkeypatch, device):
    """As on Apple's GPUs (https://github.com/pytorch/pytorch/issues/189690)."""
    monkeypatch.setattr(Eagle3TrainingArguments, "device", torch.device(device))
    args = Eagle3TrainingArguments(str(tmp_path), bf16=False, report_to="none")
    assert args.accelerator_config.non_blocking == (device == "cuda")


@pytest.mark.parametrize(
    "field, advice", [("target_logits", "a lower learning rate"), ("aux_hidden_states", "load the target in bfloat16")]
)
def test_a_loss_that_is_not_a_number_ends_training(tmp_path, tokenizer, field, advice):
    trainer = make_trainer(tmp_path, tokenizer, max_steps=6, save_strategy="steps", save_steps=2)
    compute_loss, calls = trainer.target_features, []

    def broken(inputs):
        batch = compute_loss(inputs)
        calls.append(batch)
        if len(calls) == 4:
            getattr(batch, field)[0, 5] = torch.nan
        return batch

    trainer.target_features = broken
    beginning = r"loss is nan at step 4, for a batch that begins with \['the "
    with pytest.raises(FloatingPointError, match=f"{beginning}.*{advice}"):
        trainer.train()
    Eagle3ForSpeculation.from_pretrained(tmp_path / "checkpoint-2")
    assert not (tmp_path / "checkpoint-4").exists()


def test_weights_that_are_not_finite_are_not_saved(tmp_path, tokenizer):
    """Of a gradient that was not, only the loss of the next step would tell, and training would go on from the checkpoint."""
    trainer = make_trainer(tmp_path, tokenizer, max_steps=4, save_strategy="steps", save_steps=2)

    class Overflow(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            if state.global_step == 3:
                model.fc.weight.grad[0, 0] = torch.inf

    trainer.add_callback(Overflow())
    with pytest.raises(FloatingPointError, match="weights are not finite after step 4, and are not saved"):
        trainer.train()
    assert what_is_broken(tmp_path / "checkpoint-2") is None
    assert not (tmp_path / "checkpoint-4" / "model.safetensors").exists()


def test_processes_wait_while_one_tokenizes(tmp_path):
    """By default those that have nothing to do would give up after half an hour."""
    assert Eagle3TrainingArguments(str(tmp_path), bf16=False).ddp_timeout_delta > timedelta(hours=2)


def test_drafts_with_a_window_are_refused(tmp_path, tokenizer):
    target = make_target("llama")
    draft = Eagle3ForSpeculation.from_target(
        target, model_type="qwen3", layer_types=["sliding_attention"], use_sliding_window=True, sliding_window=8
    )
    with pytest.raises(ValueError, match="Only drafts with full attention can be trained"):
        make_trainer(tmp_path, tokenizer, model=draft, target=target)


@pytest.mark.parametrize(
    "name, value, expected",
    [
        (
            "quantization_config",
            BitsAndBytesConfig(load_in_4bit=True),
            BitsAndBytesConfig(load_in_4bit=True).to_dict(),
        ),
        ("dtype", torch.bfloat16, "bfloat16"),
        ("device_map", {"": torch.device("cpu")}, {"": "cpu"}),
        ("max_memory", {0: "1GiB"}, {"0": "1GiB"}),
        ("distributed_config", DistributedConfig(tp_plan="auto"), DistributedConfig(tp_plan="auto").to_dict()),
    ],
)
def test_arguments_are_json(tmp_path, name, value, expected):
    """Trackers write them at the first log."""
    kwargs = {name: value}
    args = Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=False, target_model_init_kwargs=kwargs)
    written = json.loads(args.to_json_string())["target_model_init_kwargs"]
    assert written == json.loads(json.dumps({name: expected}, default=str)) and args.to_sanitized_dict()
    assert args.target_model_init_kwargs[name] is value


def test_smaller_batches_begin_anew(tmp_path, tokenizer):
    """`auto_find_batch_size` after a batch that memory had no room for: what is logged and recorded is of those that it has."""

    def train(**arguments):
        settings = {"ttt_warmup": 0, "max_steps": 2, "logging_steps": 1, "draft_vocab_size": 20, **arguments}
        return make_trainer(tmp_path, tokenizer, **settings)

    trainer, reference = (
        train(auto_find_batch_size=True, per_device_train_batch_size=8, save_strategy="steps", save_steps=2),
        train(per_device_train_batch_size=7),
    )
    compute_loss, sizes = trainer.compute_loss, []

    def too_large(model, inputs, *args, **kwargs):
        loss = compute_loss(model, inputs, *args, **kwargs)
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] == 8:
            raise RuntimeError("CUDA out of memory.")
        return loss

    trainer.compute_loss = too_large
    trainer.train()
    reference.train()
    assert sizes == [8, 7, 7] and training_record(trainer)["sequences_per_step"] == 7
    first, expected = (each.state.log_history[0] for each in (trainer, reference))
    assert {name: first[name] for name in expected if "runtime" not in name} == pytest.approx(expected)
    longer = train(auto_find_batch_size=True, per_device_train_batch_size=8, max_steps=3)
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 3 and training_record(longer)["sequences_per_step"] == 7


@pytest.mark.parametrize("process, num_new", [(0, 4), (1, 1), (2, 0)])
def test_rows_that_processes_repeat_do_not_count(tmp_path, tokenizer, monkeypatch, process, num_new):
    """The last batches of three processes are filled up with rows of the first."""
    trainer = make_trainer(tmp_path, tokenizer, per_device_eval_batch_size=4)
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(4)])
    expected = {name: value[:num_new] for name, value in batch.items()}
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 3)
    monkeypatch.setattr(type(trainer.accelerator), "process_index", process)
    trainer.accelerator.gradient_state = SimpleNamespace(end_of_dataloader=True, remainder=5)
    trainer.model.eval()
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
    expected, output = trainer.evaluate(rows), trainer.predict(rows)
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
    assert [metrics[name] for name in names] == [expected[name] for name in names] and len(names) > 10


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_evaluation_in_half_precision_leaves_the_draft_as_it_is(tmp_path, tokenizer, dtype):
    trainer = make_trainer(
        tmp_path, tokenizer, num_eval_prompts=1, eval_max_new_tokens=4, **{f"{dtype}_full_eval": True}
    )

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
    for dataset in (stream, {"a": stream}):
        assert not isinstance(make_trainer(tmp_path, tokenizer, eval_dataset=stream).eval_dataset, Dataset)
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


@pytest.mark.parametrize(
    "config, error",
    [
        ({"even_batches": False}, "even_batches=False.*at its default"),
        ({"split_batches": True}, "split_batches=True.*one process"),
    ],
)
def test_batches_that_several_processes_cannot_share(tmp_path, tokenizer, monkeypatch, config, error):
    """They would wait for each other, or count the rows of a step wrongly."""
    make_trainer(tmp_path, tokenizer, accelerator_config=config)
    monkeypatch.setattr(Eagle3TrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match=error):
        make_trainer(tmp_path, tokenizer, accelerator_config=config)


@pytest.mark.parametrize("sizes", [{"cp_size": 2}, {"sp_size": 2}])
def test_rows_that_processes_would_share(tmp_path, tokenizer, monkeypatch, sizes):
    """The last token of a part and the first of the next would not meet."""
    trainer = make_trainer(tmp_path, tokenizer)
    monkeypatch.setattr(type(trainer.accelerator), "parallelism_config", ParallelismConfig(**sizes))
    with pytest.raises(ValueError, match="give each process a part of a row"):
        check_parallelism(trainer)


def test_batches_that_are_not_filled_are_not_all(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="has 3 rows, which `dataloader_drop_last=True` drops"):
        make_trainer(tmp_path, tokenizer, dataset=TEXTS.select(range(3)), dataloader_drop_last=True)
    for evaluated in (TEXTS.select(range(3)), {"long": TEXTS, "short": TEXTS.select(range(3))}):
        with pytest.raises(ValueError, match="eval data has 3 rows, .*`per_device_eval_batch_size`"):
            make_trainer(tmp_path, tokenizer, eval_dataset=evaluated, dataloader_drop_last=True)


LONG_PROMPT = [{"role": "user", "content": "ab" * 40}, {"role": "assistant", "content": "cd"}]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_answers_that_are_cut_off(tmp_path, tokenizer, caplog, packing, is_stream):
    """Rows of prompts alone teach nothing, packed or not."""

    def trainer_of(rows):
        data = Dataset.from_dict({"messages": rows})
        arguments = {"max_length": 32, "assistant_only_loss": True, "packing": packing}
        return make_trainer(
            tmp_path, tokenizer, dataset=data.to_iterable_dataset() if is_stream else data, **arguments
        )

    message = (
        "before the first step|No row of the train data"
        if is_stream
        else "6 of 6 rows of the train data are dropped: they have nothing to learn within"
    )
    with pytest.raises(ValueError, match=message):
        trainer_of([LONG_PROMPT] * 6).train()
    trainer = trainer_of([LONG_PROMPT] * 6 + CHATS["messages"][:2])
    assert is_stream or "6 of 8 rows of the train data are dropped: they have nothing to learn" in caplog.text
    kept = list(trainer.train_dataset)
    assert sum(len(row.get("seq_lengths", [0])) for row in kept) == 2
    assert all(any(label != -100 for label in row["labels"]) for row in kept)


def test_a_stream_that_does_not_fill_a_step(tmp_path, tokenizer):
    """`Trainer` would begin it again and again."""
    stream = TEXTS.select(range(6)).to_iterable_dataset()
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    with pytest.raises(ValueError, match="before the first step, which takes 8 rows"):
        make_trainer(tmp_path, tokenizer, dataset=stream, **arguments).train()


def test_a_target_that_returns_tuples(tmp_path, tokenizer):
    target = make_target("llama")
    expected = losses(make_trainer(tmp_path, tokenizer, target=target))
    target.config.return_dict = False
    assert losses(make_trainer(tmp_path, tokenizer, target=target)) == expected


@pytest.mark.parametrize("depth, expected", [(1, [0]), (2, [0, 1]), (3, [0, 1, 2])])
def test_shallow_targets(tmp_path, tokenizer, depth, expected):
    """Give as many states as differ."""
    trainer = make_trainer(tmp_path, tokenizer, target=make_target("llama", num_hidden_layers=depth))
    assert trainer.aux_layer_ids == expected
    trainer.train()


def test_failed_pushes_are_mentioned(tmp_path, tokenizer, monkeypatch, caplog):
    trainer = make_trainer(tmp_path, tokenizer)
    trainer.hub_model_id, trainer.push_in_progress = "me/draft", None
    failed, done = Future(), Future()
    failed.set_exception(OSError("no space"))
    done.set_result(None)

    def push_both(self, folder):
        self.push_in_progress = PushInProgress([failed, done])

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push_both)
    (tmp_path / "checkpoint-1").mkdir()
    with caplog.at_level(logging.WARNING, logger="hf_eagle3"):
        trainer._push_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert caplog.text.count("in the background failed") == 1 and "OSError: no space" in caplog.text

    def push(self, *args, **kwargs):
        raise OSError("offline")

    monkeypatch.setattr(SFTTrainer, "push_to_hub", push)
    with caplog.at_level(logging.WARNING, logger="hf_eagle3"), pytest.raises(OSError, match="offline"):
        trainer.push_to_hub()
    assert f"To push it from there: python recipes/push.py {tmp_path} --repo_id me/draft" in caplog.text

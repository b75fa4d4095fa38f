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
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers
from conftest import assert_same_text, files_in, generate, make_prompt, make_target
from datasets import Dataset
from huggingface_hub import CommitInfo
from peft import LoraConfig, get_peft_model
from trainers import CHATS, TEXTS, losses, make_trainer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    default_data_collator,
)
from transformers.utils import PushInProgress
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_eagle3 import Eagle3ForSpeculation, Eagle3Trainer, Eagle3TrainingArguments, assist
from hf_eagle3.baselines import BASELINES
from hf_eagle3.remote_code.draft_model_eagle3 import weights_digest
from hf_eagle3.training import ttt
from hf_eagle3.training.checkpoint import what_is_broken
from hf_eagle3.training.preparation import CheckedCollator
from hf_eagle3.training.record import training_record
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


def test_rates_and_decays_of_parameters(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer, learning_rate=1e-2, weight_decay=0.1)
    groups = trainer.create_optimizer().param_groups
    rates, decays = (
        {id(weight): group[key] for group in groups for weight in group["params"]} for key in ("lr", "weight_decay")
    )
    draft = trainer.draft
    assert rates[id(draft.fc.weight)] == 1e-2
    assert rates[id(draft.lm_head.weight)] == rates[id(draft.norm.weight)] == 2e-3
    assert all(decays[id(weight)] == (0.1 if weight.dim() > 1 else 0.0) for weight in draft.parameters())


def test_draft_vocabulary_comes_from_what_is_supervised(tmp_path, tokenizer):
    settings = {"assistant_only_loss": True, "draft_vocab_size": 3, "average_tokens_across_devices": False}
    trainer = make_trainer(tmp_path, tokenizer, dataset=CHATS, max_steps=1, ttt_steps=1, **settings)
    assert trainer.draft.draft_token_ids.tolist() == sorted(tokenizer.convert_tokens_to_ids(["z", " ", "</s>"]))
    row = trainer.train_dataset[0]
    learned = [token for token, label in zip(row["input_ids"], row["labels"]) if label != -100]
    learned = tokenizer.decode(learned)
    assert "what" not in learned and "zz" in learned and learned.count("</s>") == 2
    trainer.train()


def test_arguments_that_change_between_two_trainings(tmp_path, tokenizer):
    """Someone who tries settings in a notebook changes `trainer.args`."""
    trainer = make_trainer(tmp_path, tokenizer, max_steps=1, ttt_steps=2, ttt_warmup=0)
    trainer.train()
    trainer.args.ttt_steps, trainer.args.ttt_step_decay = 4, 0.5
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["ttt_steps"] == 4 and "accuracy_3" in logs
    assert logs["loss_per_step"] == pytest.approx(logs["loss"] / (1 + 0.5 + 0.25 + 0.125))
    trainer.log({"loss": 2.0})  # by somebody else
    assert trainer.state.log_history[-1]["loss_per_step"] == 2.0


def test_a_sampled_softmax(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(ttt, "LEAST_PROBABILITY", 0.5)  # few of so small a vocabulary
    settings = {"ttt_warmup": 0, "max_steps": 30, "learning_rate": 2e-2, "num_eval_prompts": 0}
    trainer = make_trainer(tmp_path, tokenizer, eval_dataset=TEXTS.select(range(4)), sampled_vocab_size=4, **settings)
    sizes, of = [], ttt.SampledVocabulary.of

    def counting(*args):
        sizes.append(len((sampled := of(*args)).tokens))
        return sampled

    monkeypatch.setattr(ttt.SampledVocabulary, "of", counting)
    trainer.train()
    assert len(sizes) == 30 and 4 <= max(sizes) < trainer.draft.config.draft_vocab_size
    trainer.evaluate()  # by the whole vocabulary
    assert len(sizes) == 30
    history = [entry for entry in trainer.state.log_history if "acceptance_rate_0" in entry]

    def means(name):
        return (statistics.mean(entry[name] for entry in entries) for entries in (history[:5], history[-5:]))

    (loss, later), (rate, later_rate) = means("loss"), means("acceptance_rate_0")
    assert later < 0.9 * loss and later_rate > rate


def test_logs_while_the_unroll_grows(tmp_path, tokenizer):
    settings = {"ttt_steps": 4, "ttt_warmup": 0.75, "max_steps": 8, "num_eval_prompts": 0}
    trainer = make_trainer(tmp_path, tokenizer, **settings, eval_dataset=TEXTS.select(range(4)))
    trainer.train()
    trainer.evaluate()
    *steps, evaluation = [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]
    assert [entry["ttt_steps"] for entry in steps] == [1, 1, 2, 2, 3, 3, 4, 4]
    for entry in steps:  # of steps that the unroll did not come to there is nothing to say
        is_said = [f"acceptance_rate_{step}" in entry for step in range(4)]
        assert is_said == [step < entry["ttt_steps"] for step in range(4)]
    names = ("accuracy", "acceptance_rate", "conditional_acceptance", "joint_acceptance")
    last = steps[-1]
    assert all(0 <= last[f"{name}_{step}"] <= 1 for name in names for step in range(4)) and "accuracy_4" not in last
    joint = torch.tensor([last[f"conditional_acceptance_{step}"] for step in range(4)]).cumprod(0)
    assert joint.tolist() == pytest.approx([last[f"joint_acceptance_{step}"] for step in range(4)])
    assert last["simulated_acceptance_length"] == pytest.approx(1 + joint.sum().item())
    assert {f"eval_{name}_3" for name in names} | {"eval_simulated_acceptance_length"} <= set(evaluation)
    assert evaluation["eval_acceptance_rate_3"] > 0
    # Logged less often, the loss of a drafting step is that of unrolls as they were.
    seldom = make_trainer(tmp_path / "seldom", tokenizer, **settings, logging_steps=8)
    seldom.train()
    weights = [entry["loss"] / entry["loss_per_step"] for entry in steps]
    expected = sum(entry["loss"] for entry in steps) / sum(weights)
    assert seldom.state.log_history[0]["loss_per_step"] == pytest.approx(expected, rel=1e-3) and weights[-1] > 2
    with pytest.raises(ValueError, match="ttt_warmup"):
        make_trainer(tmp_path, tokenizer, ttt_warmup=2)


def test_a_share_of_the_rows(tmp_path, tokenizer):
    trainer = make_trainer(tmp_path, tokenizer, ttt_row_share=0.5, ttt_warmup=0.0, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["ttt_steps"] == trainer.args.ttt_steps
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


def test_collators_of_callers(tmp_path, tokenizer):
    """Are used if they learn what the rows say."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    arguments = {"dataset": CHATS.select(range(5, 13)), "assistant_only_loss": True, "max_steps": 1, "ttt_steps": 1}
    rows = list(make_trainer(tmp_path, tokenizer, **arguments).train_dataset)

    def shifting(examples):
        batch = default_data_collator(examples)
        return {**batch, "labels": batch["labels"].roll(-1, 1)}

    def without_labels(examples):
        return {"input_ids": torch.tensor([example["input_ids"] for example in examples])}

    language_modeling = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    for collator, batch_size, problem in (
        (language_modeling, 1, "labels to tokens that the rows exclude"),
        (
            language_modeling,
            8,
            r"LanguageModeling\) cannot read rows with \['input_ids', 'labels'\]: Unable to create",
        ),
        (shifting, 1, r"`data_collator` \(shifting\) gives labels that are neither the tokens"),
        (without_labels, 1, "gives no `labels`"),
        (lambda _: {"input_ids": [[5]], "labels": [[5]]}, 1, "list as `input_ids` and list as `labels`, not ten"),
        (lambda examples: {"ids": examples}, 1, r"returns only \['ids'\], but must"),
    ):
        with pytest.raises(ValueError, match=problem):
            CheckedCollator(collator)(rows[:batch_size])
    refused = pytest.raises(ValueError, match=r"`data_collator` \(list\) returns list, but must return a dictionary")
    taken = DataCollatorForSeq2Seq(tokenizer), DataCollatorWithFlattening()
    for collator, outcome in ((list, refused), *((each, nullcontext()) for each in taken)):
        trainer_class = partial(Eagle3Trainer, data_collator=collator)
        trainer = make_trainer(tmp_path, tokenizer, trainer_class=trainer_class, **arguments)
        with outcome:
            trainer.train()


def test_training_that_learns_nothing_says_so(tmp_path, tokenizer, caplog):
    """A collator may mask all labels. The loss of 0 looks like a draft that knows everything."""

    def masking(examples):
        batch = default_data_collator(examples)
        return {**batch, "labels": torch.full_like(batch["labels"], -100)}

    trainer_class = partial(Eagle3Trainer, data_collator=masking)
    arguments = {"per_device_train_batch_size": 1, "max_steps": 2}
    make_trainer(tmp_path, tokenizer, trainer_class=trainer_class, **arguments).train()
    assert caplog.text.count("No token of the last steps is learned, so the loss is 0") == 2


def test_data_that_is_taken_as_it_is(tmp_path, tokenizer, caplog):
    def rows(*labels, tokens=(5, 6, 7, 8)):
        return Dataset.from_dict({"input_ids": [[5, 6, 7], list(tokens)], "labels": [[-100] * 3, *labels]})

    for data, reason in (
        (rows([-100, 6, 7, 8]), None),
        (rows([-100, -100, -100, 5]), "Row 1 of the train data has label 5 at token 8. Labels must be the tokens"),
        (rows([5, 6, 7, 96], tokens=(5, 6, 7, 96)), "Row 1 of the train data has token 96, but the target's voc"),
        (rows([5, 6, 7]), "Row 1 of the train data has 4 tokens, but 3 labels"),
        (rows([5, 6, -100, -100]), "2 of 2 rows of the train data have nothing to learn: no more than two tokens"),
        (TEXTS, r"needs a column `input_ids`, but the train data has only \['text'\]"),
        (rows([5, 6, 7, 8]).add_column("seq_lengths", [[3], [2, 0, 2]]), r"Row 1 .* 'seq_lengths' \[2, 0, 2\]"),
        (
            rows([5, 6, 7, 8]).add_column("seq_lengths", [[3], [2, 1]]),
            r"Row 1 .* has 4 tokens, but 'seq_lengths' \[2, 1\]",
        ),
        (rows([5, 6, 7, 8]).select([]), "The train data has no rows"),
        (rows([5, 6, 7, 8]).to_iterable_dataset().filter(lambda row: False), "The train data has no rows"),
        (rows([5, 6, 7, 8]).add_column("attention_mask", [[1] * 3, [1] * 4]), None),
        (
            rows([5, 6, 7, 8]).add_column("attention_mask", [[1] * 3, [0, 1, 1, 1]]),
            "Rows of the train data have padding",
        ),
    ):
        with nullcontext() if reason is None else pytest.raises(ValueError, match=reason):
            make_trainer(tmp_path, tokenizer, dataset=data, dataset_kwargs={"skip_prepare_dataset": True})
    unlabeled = rows([5, 6, 7, 8]).remove_columns("labels")
    for data, option, asked in (
        (unlabeled, {"assistant_only_loss": True}, "'assistant_only_loss'"),
        (unlabeled.add_column("loss_mask", [[1] * 3, [0, 0, 1, 1]]), {}, "'loss_mask'"),
    ):
        with pytest.raises(ValueError, match=f"^{asked} would have no effect on the train data"):
            make_trainer(tmp_path, tokenizer, dataset=data, dataset_kwargs={"skip_prepare_dataset": True}, **option)
    assert "longer than" not in caplog.text
    assert "1 of 2 rows of the train data have nothing to learn, and stay" in caplog.text
    make_trainer(tmp_path, tokenizer, dataset=unlabeled, dataset_kwargs={"skip_prepare_dataset": True}, max_length=3)
    assert "longer than `max_length=3`: 1 of 7 tokens are beyond it and are kept by `skip_prepare" in caplog.text
    with pytest.raises(ValueError, match="Row 1 of the eval data has label 5"):
        evaluated = {"a": rows([-100, 6, 7, 8]), "b": rows([-100, -100, -100, 5])}
        arguments = {"dataset_kwargs": {"skip_prepare_dataset": True}, "eval_dataset": evaluated}
        make_trainer(tmp_path, tokenizer, dataset=rows([5, 6, 7, 8]), **arguments)


def test_training_learns(tmp_path, tokenizer):
    # With an unroll that grows the loss has ever more terms.
    trainer = make_trainer(tmp_path, tokenizer, ttt_warmup=0, max_steps=40, learning_rate=3e-2)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "simulated_acceptance_length" in entry]
    assert history[-1]["loss"] < 0.6 * history[0]["loss"]
    assert history[-1]["simulated_acceptance_length"] > history[0]["simulated_acceptance_length"] + 0.2


def test_checkpoints_are_drafts(tmp_path, tokenizer):
    target = make_target("llama")
    saves = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer = make_trainer(tmp_path, tokenizer, target=target, draft_vocab_size=20, **saves)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-1"
    draft = AutoModel.from_pretrained(checkpoint, trust_remote_code=True)
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in trainer.draft.state_dict().items())
    assert draft.generation_config.assistant_confidence_threshold == 0.02
    assert "model_type" not in json.loads((checkpoint / "config.json").read_text())
    for each in (draft, trainer.draft):  # the draft in hand generates too, though the trainer wraps its forward
        assert_same_text(target, each, make_prompt(10), max_new_tokens=16)


def test_accumulation_gives_the_same_trajectory(tmp_path, tokenizer):
    target = make_target("llama")
    whole = losses(make_trainer(tmp_path, tokenizer, target=target, per_device_train_batch_size=4))
    accumulating = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    assert losses(make_trainer(tmp_path, tokenizer, target=target, **accumulating)) == pytest.approx(whole, rel=1e-3)


def test_gradients_of_one_pass_over_a_stream_do_not_reach_the_next(tmp_path, tokenizer):
    """Its ten rows are two steps of four. `Trainer` would add the gradients of the last two to those of the next step."""
    leftovers = []

    class Looks(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            leftovers.append(sum(weight.grad is not None for weight in model.parameters()))

    # `Trainer` would begin a stream that does not fill a step again and again.
    short, arguments = TEXTS.select(range(6)).to_iterable_dataset(), {"per_device_train_batch_size": 2}
    with pytest.raises(ValueError, match="before the first step, which takes 8 rows"):
        make_trainer(tmp_path, tokenizer, dataset=short, gradient_accumulation_steps=4, **arguments).train()
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 5}
    trainer = make_trainer(tmp_path, tokenizer, dataset=TEXTS.select(range(10)).to_iterable_dataset(), **steps)
    trainer.add_callback(Looks())
    trainer.train()
    assert leftovers == [0] * 5
    assert max(entry.get("loss_per_step", 0) for entry in trainer.state.log_history) < 3  # not the sum of two steps


def test_nothing_keeps_models_in_memory(tmp_path, tokenizer):
    """As after `del` in a notebook, before the cell runs again."""
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": TEXTS.select(range(1))}
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


def test_a_trained_draft_can_be_pickled(tmp_path, tokenizer):
    """Also one that was trained with autocast, which wraps its forward."""
    trainer = make_trainer(tmp_path, tokenizer, max_steps=1, ttt_steps=1, bf16=True)
    trainer.train()
    draft, inputs = trainer.draft.eval(), torch.tensor([[3, 4, 5]])
    copied, target = pickle.loads(pickle.dumps(draft)), make_target("llama")
    expected = draft.state_dict()
    assert copied.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in copied.state_dict().items())
    texts = [generate(target, inputs, assistant_model=each) for each in (draft, copied)]
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


@pytest.mark.parametrize(("name", "kwargs"), [("polynomial", {}), ("cosine_with_min_lr", {"min_lr": 1e-4})])
def test_schedules(tmp_path, tokenizer, name, kwargs):
    trainer = make_trainer(tmp_path, tokenizer, lr_scheduler_type=name, lr_scheduler_kwargs=kwargs, ttt_steps=1)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    optimizer, expected = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2), []
    scheduler = transformers.get_scheduler(name, optimizer, 0, 3, scheduler_specific_kwargs=kwargs)
    for _ in range(3):
        expected += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(expected) and rates[-1] < rates[0]


def test_a_table_in_a_notebook_has_few_columns(tmp_path, tokenizer, monkeypatch):
    """Its training loss is that per step, because the sum rises while the unroll grows."""
    display = SimpleNamespace(HTML=str, display=lambda *args, **kwargs: Mock())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("hf_eagle3.training.console.is_in_notebook", lambda: True)
    from transformers.utils.notebook import NotebookProgressCallback

    monkeypatch.setattr("transformers.trainer.DEFAULT_PROGRESS_CALLBACK", NotebookProgressCallback)
    arguments = {"max_steps": 2, "ttt_steps": 1, "eval_max_new_tokens": 4}
    for data in (None, rows := TEXTS.select(range(2)), {"a": rows}):
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
    optimizer = {"optimizers": (torch.optim.SGD(draft.parameters(), lr=0.3), None)}
    if is_class:
        optimizer = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.3})}
    trainer_class = partial(Eagle3Trainer, **optimizer)
    trainer = make_trainer(tmp_path, tokenizer, draft, target=target, trainer_class=trainer_class, max_steps=1)
    trainer.train()
    arguments = training_record(trainer)["arguments"]
    assert arguments["optimizers"] == "SGD" and "learning_rate" not in arguments


def test_the_record_has_the_token_that_ends_texts(tmp_path, tokenizer):
    """It is a part of the data, unlike padding."""

    def make(**kwargs):  # `make_trainer` passes a copy
        return Eagle3Trainer(**{**kwargs, "processing_class": tokenizer})

    trainer = make_trainer(tmp_path, tokenizer, eos_token=tokenizer.bos_token, trainer_class=make)
    arguments = training_record(trainer)["arguments"]
    assert arguments["eos_token"] == tokenizer.bos_token and "pad_token" not in arguments
    assert tokenizer.eos_token != tokenizer.bos_token  # another trainer may get it


def test_conversations_are_messages(tmp_path, tokenizer):
    chats = CHATS.select(range(6))
    expected = make_trainer(tmp_path, tokenizer, dataset=chats, assistant_only_loss=True).train_dataset
    roles = {"user": "human", "assistant": "gpt"}
    others = [[{"from": roles[turn["role"]], "value": turn["content"]} for turn in row["messages"]] for row in chats]
    for conversations, is_stream in ((others, False), (others, True), (chats["messages"], False)):
        rows = Dataset.from_dict({"conversations": conversations})
        data = rows.to_iterable_dataset() if is_stream else rows
        trainer = make_trainer(tmp_path, tokenizer, dataset=data, eval_dataset=rows, assistant_only_loss=True)
        for dataset in (trainer.train_dataset, trainer.eval_dataset):
            for name in ("input_ids", "labels"):
                assert [row[name] for row in dataset] == expected[name][:]


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

    run, lora = tmp_path / "run", LoraConfig(target_modules=["q_proj"])
    of_target = {"target": AutoModelForCausalLM.from_pretrained(folder), "max_steps": 1, "ttt_steps": 1}
    for _ in range(2):
        trainer = make_trainer(run, tokenizer, **of_target)
        trainer.train()
        trainer.save_model()
    (run / "config.json").write_bytes(b"")  # cut off
    make_trainer(run, tokenizer, **of_target)
    trainer.save_model()
    with pytest.raises(ValueError, match="run has a whole model, into which .* the draft's adapter"):
        make_trainer(run, tokenizer, model=str(run), peft_config=lora, **of_target)
    for _ in range(2):
        adapted = make_trainer(tmp_path / "adapter", tokenizer, str(run), peft_config=lora, **of_target)
        adapted.save_model()
    with pytest.raises(ValueError, match="adapter has adapter_model.safetensors of another model"):
        make_trainer(tmp_path / "adapter", tokenizer, **of_target)


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_drafts_of_other_methods_may_be_overwritten(tmp_path, name):
    BASELINES[name].make_draft(make_target("llama")).save_pretrained(tmp_path)
    check_output_folder(tmp_path, "big/Model-8B", False)


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_batches_are_not_copied_from_freed_memory(tmp_path, monkeypatch, device):
    """As on Apple's GPUs (https://github.com/pytorch/pytorch/issues/189690)."""
    monkeypatch.setattr(Eagle3TrainingArguments, "device", torch.device(device))
    args = Eagle3TrainingArguments(str(tmp_path), bf16=False, report_to="none")
    assert args.accelerator_config.non_blocking == (device == "cuda")


@pytest.mark.parametrize(
    "positions, arguments, length",
    [
        (512, {"bf16": True}, 64),
        (96, {"bf16": True}, 32),  # a target without rotary positions would have no more
        (512, {"bf16": True, "pad_to_multiple_of": 10}, 20),
        (512, {}, 19),
    ],
)
def test_lengths_of_rows_are_rounded_where_each_takes_time(tmp_path, tokenizer, positions, arguments, length):
    """In bfloat16 on a CPU, torch compiles kernels for each new shape."""
    target = make_target("llama")
    target.config.max_position_embeddings = positions
    trainer = make_trainer(tmp_path, tokenizer, target=target, use_cpu=True, **arguments)
    batch = trainer.data_collator([{"input_ids": [5] * 19, "labels": [5] * 19}, {"input_ids": [6], "labels": [6]}])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, length)


@pytest.mark.parametrize(
    "field, advice", [("target_logits", "a lower learning rate"), ("aux_hidden_states", "load the target in bfloat16")]
)
def test_a_loss_that_is_not_a_number_ends_training(tmp_path, tokenizer, field, advice):
    trainer = make_trainer(tmp_path, tokenizer, max_steps=6, save_strategy="steps", save_steps=2, ttt_steps=1)
    target_batch, calls = trainer.target_batch, []

    def broken(inputs):
        batch = target_batch(inputs)
        calls.append(batch)
        if len(calls) == 4:
            getattr(batch, field)[0, 5] = torch.nan
        return batch

    trainer.target_batch = broken
    beginning = r"loss is nan at step 4, for a batch that begins with \['the "
    with pytest.raises(FloatingPointError, match=f"{beginning}.*{advice}"):
        trainer.train()
    Eagle3ForSpeculation.from_pretrained(tmp_path / "checkpoint-2")
    assert not (tmp_path / "checkpoint-4").exists()


def test_weights_that_are_not_finite_are_not_saved(tmp_path, tokenizer):
    """Of a gradient that was not, only the loss of the next step would tell, and training would go on from the checkpoint."""
    trainer = make_trainer(tmp_path, tokenizer, max_steps=2, save_strategy="steps", save_steps=1, ttt_steps=1)

    class Overflow(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            if state.global_step == 1:
                model.fc.weight.grad[0, 0] = torch.inf

    trainer.add_callback(Overflow())
    with pytest.raises(FloatingPointError, match="weights are not finite after step 2, and are not saved"):
        trainer.train()
    assert what_is_broken(tmp_path / "checkpoint-1") is None
    assert not (tmp_path / "checkpoint-2" / "model.safetensors").exists()


def test_smaller_batches_begin_anew(tmp_path, tokenizer):
    """`auto_find_batch_size` after a batch that memory had no room for: what is logged and recorded is of those that it has."""

    def train(**arguments):
        settings = {"ttt_warmup": 0, "ttt_steps": 2, "max_steps": 2, "draft_vocab_size": 20, **arguments}
        return make_trainer(tmp_path, tokenizer, **settings)

    finds = {"auto_find_batch_size": True, "per_device_train_batch_size": 8}
    trainer = train(**finds, save_strategy="steps", save_steps=2)
    reference = train(per_device_train_batch_size=7)
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
    longer = train(**finds, max_steps=3)
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 3 and training_record(longer)["sequences_per_step"] == 7


LONG_PROMPT = [{"role": "user", "content": "ab" * 40}, {"role": "assistant", "content": "cd"}]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_answers_that_are_cut_off(tmp_path, tokenizer, caplog, packing, is_stream):
    """Rows of prompts alone teach nothing, packed or not."""

    def trainer_of(rows):
        data = Dataset.from_dict({"messages": rows})
        data = data.to_iterable_dataset() if is_stream else data
        settings = {"max_length": 32, "assistant_only_loss": True, "packing": packing}
        return make_trainer(tmp_path, tokenizer, dataset=data, **settings)

    message = "6 of 6 rows of the train data are dropped: they have nothing to learn within"
    message = "before the first step|No row of the train data" if is_stream else message
    with pytest.raises(ValueError, match=message):
        trainer_of([LONG_PROMPT] * 6).train()
    trainer = trainer_of([LONG_PROMPT] * 6 + CHATS["messages"][:2])
    assert is_stream or "6 of 8 rows of the train data are dropped: they have nothing to learn" in caplog.text
    kept = list(trainer.train_dataset)
    assert sum(len(row.get("seq_lengths", [0])) for row in kept) == 2
    assert all(any(label != -100 for label in row["labels"]) for row in kept)


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


def test_a_benchmark_on_the_hub_that_cannot_be_deleted(tmp_path, tokenizer, monkeypatch, caplog):
    """The draft was pushed all the same."""
    trainer = make_trainer(tmp_path, tokenizer)
    trainer.hub_model_id = "me/draft"
    trainer.save_model()
    commit, delete = Mock(spec=CommitInfo), Mock(side_effect=OSError("no connection"))
    monkeypatch.setattr(SFTTrainer, "push_to_hub", lambda self, *args, **kwargs: commit)
    monkeypatch.setattr("hf_eagle3.training.saving.delete_other_benchmark", delete)
    with caplog.at_level(logging.WARNING, logger="hf_eagle3"):
        assert trainer.push_to_hub() is commit
    assert "me/draft may have a benchmark of other weights, which was not deleted: no connection" in caplog.text

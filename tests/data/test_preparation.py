"""What `Eagle3Trainer` makes of data, good and bad."""

import copy
import json
import logging
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import trainers
from conftest import CHAT_TEMPLATE, make_byte_tokenizer, make_gpt2, make_target
from datasets import Dataset, IterableDataset, load_dataset
from messages import assistant, user
from messages import learned as runs_learned
from transformers import ProcessorMixin
from trl.chat_template_utils import qwen3_chat_template

from hf_eagle3 import Eagle3ForSpeculation, Eagle3Trainer
from hf_eagle3.data import kind_of_data
from hf_eagle3.tokenizer import load_tokenizer, padding_token, read_template
from hf_eagle3.training import ttt
from hf_eagle3.training.models import load_target


def make_trainer(tokenizer, rows, tmp_path, template=CHAT_TEMPLATE, model=None, stream=False, **arguments):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    dataset = Dataset.from_dict(rows) if isinstance(rows, dict) else rows
    dataset = dataset.to_iterable_dataset() if stream else dataset
    target = make_target("llama", vocab_size=len(tokenizer))
    return trainers.make_trainer(tmp_path, tokenizer, model, dataset, target, **{"max_steps": 1, **arguments})


def chat(role="assistant", num_rows=4):
    return {"messages": [[user("abc"), {"role": role, "content": f"d{i}"}] for i in range(num_rows)]}


def learned(trainer, index=0):
    return runs_learned(trainer.processing_class, trainer.train_dataset[index])


@pytest.fixture(scope="module")
def qwen_tokenizer():
    """Qwen3's special tokens and chat template over single bytes."""
    special = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer, named = make_byte_tokenizer(), {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer.add_special_tokens({**named, "extra_special_tokens": ["<|im_start|>", *special]})
    return tokenizer


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    user("Is it raining?"),
    assistant("", reasoning_content="I must look.", tool_calls=[CALL]),
    {"role": "tool", "content": "rain"},
    assistant("Yes.", reasoning_content="It is."),
    user("Thanks"),
    assistant("Bye."),
]


def test_exactly_the_assistants_tokens_are_learned(qwen_tokenizer, tmp_path):
    tools = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}])
    rows = {"messages": [json.loads(json.dumps(CONVERSATION))], "tools": [tools]}
    settings = {"assistant_only_loss": True, "max_length": None}
    trainer = make_trainer(qwen_tokenizer, rows, tmp_path, qwen3_chat_template, **settings)
    text = qwen_tokenizer.decode(trainer.train_dataset[0]["input_ids"])
    assert "# Tools" in text and "<tool_response>\nrain\n</tool_response>" in text
    call, answer, farewell = learned(trainer)
    arguments = json.dumps(CALL["function"])
    # TRL marks the newline after a turn as the assistant's, too.
    assert call == f"<think>\nI must look.\n</think>\n\n<tool_call>\n{arguments}\n</tool_call><|im_end|>\n"
    assert answer == "<think>\nIt is.\n</think>\n\nYes.<|im_end|>\n"
    assert farewell == "<think>\n\n</think>\n\nBye.<|im_end|>\n"


def test_conversations_with_their_first_prompt_in_a_column_of_its_own(tokenizer, tmp_path):
    """As in ultrachat_200k. TRL would take the prompt for half of a pair."""
    rows = {**chat(), "prompt": ["abc"] * 4, "prompt_id": ["x"] * 4}
    for stream in (False, True):
        trainer = make_trainer(tokenizer, rows, tmp_path, assistant_only_loss=True, stream=stream)
        if not stream:
            assert {learned(trainer, index)[0] for index in range(4)} == {f"d{i}</s>" for i in range(4)}
    with pytest.raises(ValueError, match=r"no 'completion' to learn\. .*regenerate\.py\)\.$"):
        make_trainer(tokenizer, {"prompt": ["abc"]}, tmp_path)


@pytest.mark.parametrize("stream", [False, True])
def test_conversations_in_a_column_of_the_singular(tokenizer, tmp_path, stream):
    """As in WildChat. A text may have the same name, and a function of the caller reads the names that the data has."""
    rows = Dataset.from_dict({"conversation": chat()["messages"], "language": ["English"] * 4})
    trainer = make_trainer(tokenizer, rows, tmp_path, assistant_only_loss=True, stream=stream)
    assert len(list(trainer.train_dataset)) == 4
    trainer_class = partial(Eagle3Trainer, formatting_func=lambda row: row["conversation"][1]["content"])
    trainer = make_trainer(tokenizer, rows, tmp_path, stream=stream, trainer_class=trainer_class)
    assert len(list(trainer.train_dataset)) == 4
    rows = {"conversation": ["A: abc. B: def."] * 4}
    trainer = make_trainer(tokenizer, rows, tmp_path, stream=stream, dataset_text_field="conversation")
    assert len(list(trainer.train_dataset)) == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("column", ["prompt", "messages", "conversations"])
def test_texts_in_a_column_that_usually_has_others(tokenizer, tmp_path, stream, column):
    rows = {column: ["abcd"] * 4, "completion": ["ef"] * 4, "text": ["gh"] * 4}
    trainer = make_trainer(tokenizer, rows, tmp_path, stream=stream, dataset_text_field=column)
    assert [tokenizer.decode(row["input_ids"]) for row in trainer.train_dataset] == ["abcd</s>"] * 4
    trainer = make_trainer(tokenizer, {column: ["abcd"]}, tmp_path, stream=stream, dataset_text_field=column)
    with pytest.raises(ValueError, match=f"{column!r} is a text with messages"):
        trainer.evaluate(Dataset.from_dict({column: [json.dumps(chat()["messages"][0])]}))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "mistral"])
def test_packed_documents_give_the_losses_of_separate_ones(tokenizer, tmp_path, family, monkeypatch):
    monkeypatch.setattr(ttt, "ONE_IN", 1)  # acceptance rates of all rows, not of those in some places
    dataset = Dataset.from_dict({"text": [f"{'abcdefghij'[i:]} {i * 37}" for i in range(7)]})
    settings = {"max_length": 40, "ttt_warmup": 0, "max_steps": 1, "per_device_train_batch_size": 8}
    results = []
    for packing in (False, True):
        target = make_target(family)
        torch.manual_seed(0)
        draft = Eagle3ForSpeculation.from_target(target)
        trainer = trainers.make_trainer(tmp_path, tokenizer, draft, dataset, target, packing=packing, **settings)
        batch = next(iter(trainer.get_train_dataloader()))
        assert batch["input_ids"].shape[0] == (3 if packing else 7)
        trainer.train()
        results.append([entry for entry in trainer.state.log_history if "loss" in entry][0])
    apart, packed = results
    assert packed["loss"] == pytest.approx(apart["loss"], rel=1e-4)
    assert packed["acceptance_rate_2"] == pytest.approx(apart["acceptance_rate_2"], rel=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_rows_that_were_packed_before(tokenizer, tmp_path, stream):
    """They are the documents, whatever is made of them."""
    rows = [
        {"input_ids": [5, 6, 7, 8, 9, 10, 11], "seq_lengths": [3, 4]},
        {"input_ids": [12, 13, 14], "seq_lengths": None},
        {"input_ids": [15, 16, 17, 18, 19], "labels": [-100, -100, 17, 18, 19], "seq_lengths": [2, 3]},
    ]
    rows = Dataset.from_list([{"labels": row["input_ids"], **row} for row in rows])
    documents = [[5, 6, 7], [8, 9, 10, 11], [12, 13, 14], [17, 18, 19]]
    trainer = make_trainer(tokenizer, rows, tmp_path, stream=stream)
    assert [row["input_ids"] for row in trainer.train_dataset] == documents
    packed = make_trainer(tokenizer, rows, tmp_path, stream=stream, packing=True, max_length=7)
    assert sorted(row["seq_lengths"] for row in packed.train_dataset) == [[3, 3], [4, 3]]
    packed.train()
    if not stream:
        cut = make_trainer(
            tokenizer, rows, tmp_path, packing=True, eval_packing=False, max_length=7, eval_dataset=rows
        )
        assert [row["input_ids"] for row in cut.eval_dataset] == documents
        kept = make_trainer(tokenizer, rows, tmp_path, padding_free=True, max_length=None)
        assert kept.train_dataset["seq_lengths"] == [[3, 4], [3], [2, 3]]
        (batch,) = kept.get_train_dataloader()
        positions = batch["position_ids"][batch["attention_mask"].bool()]
        assert sorted(positions.tolist()) == [0] * 5 + [1] * 5 + [2] * 4 + [3]


def test_packed_rows_that_are_taken_as_they_are(tokenizer, tmp_path):
    """Their documents do not see each other, without `packing` or `padding_free`, too."""
    packed = Dataset.from_dict({"input_ids": [[5, 6, 7, 8, 9, 10, 11]], "seq_lengths": [[3, 4]]})
    apart = Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9, 10, 11]]})
    arguments = {"dataset_kwargs": {"skip_prepare_dataset": True}, "num_eval_prompts": 0}
    target = make_target("llama", vocab_size=len(tokenizer))
    trainers_of = [
        trainers.make_trainer(tmp_path, tokenizer, dataset=train, target=target, eval_dataset=evaluated, **arguments)
        for train, evaluated in ((packed, packed), (apart, packed), (apart, apart))
    ]
    losses = [trainer.evaluate()["eval_loss"] for trainer in trainers_of]
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-4)
    batch = trainers_of[0].data_collator([packed[0]])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]


def test_evaluating_data_that_is_prepared_already(tokenizer, tmp_path):
    rows = {"text": [f"{'abcdefghij'[i:]} {i * 37}" for i in range(7)]}
    trainer = make_trainer(tokenizer, rows, tmp_path, packing=True, max_length=40, num_eval_prompts=0)
    trainer.eval_dataset = trainer.train_dataset
    assert trainer.evaluate(trainer.eval_dataset)["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"])


def test_a_function_that_makes_texts_is_not_for_tokens(tokenizer, tmp_path, caplog):
    """As in `SFTTrainer`. Data that is prepared already does not have what the function reads."""
    rows = Dataset.from_dict({"question": ["abc", "de"], "answer": ["fgh", "ij"]})
    trainer_class = partial(Eagle3Trainer, formatting_func=lambda row: row["question"] + row["answer"])
    settings = {"eval_dataset": rows, "trainer_class": trainer_class, "num_eval_prompts": 0}
    trainer = trainers.make_trainer(tmp_path, tokenizer, dataset=rows, **settings)
    assert tokenizer.decode(trainer.train_dataset[0]["input_ids"]) == "abcfgh</s>"
    assert trainer.evaluate(trainer.eval_dataset)["eval_loss"] == trainer.evaluate()["eval_loss"]
    assert "`formatting_func` has no effect on the eval data" in caplog.text


@pytest.mark.parametrize(
    ("before", "after", "is_warned"),
    [
        ("", "", False),
        ("</s>{% endgeneration %}", "{% endgeneration %}</s>", True),
        ("</s>{% endgeneration %}", "</s>\n{% endgeneration %}<s>", False),
    ],
)
def test_ends_of_turns_that_are_not_learned(tokenizer, tmp_path, caplog, before, after, is_warned):
    template = CHAT_TEMPLATE.replace(before, after)
    assert (template != CHAT_TEMPLATE) == (before != after)
    make_trainer(tokenizer, chat(), tmp_path, template, assistant_only_loss=True)
    assert ("ends the assistant's turns with '</s>' outside of `{% generation %}`" in caplog.text) == is_warned


def test_streams(tokenizer, tmp_path, caplog):
    rows = {"text": ["abc" * (5 + i) for i in range(24)]}
    settings = {"max_length": 30, "draft_vocab_size": 6, "max_steps": 3, "ttt_steps": 1}
    with caplog.at_level(logging.WARNING, logger="hf_eagle3"):
        trainer = make_trainer(tokenizer, rows, tmp_path, stream=True, **settings)
        trainer.train()
    assert len([entry for entry in trainer.state.log_history if "loss" in entry]) == 3
    for number, is_warned in ((1, True), (2, False), (10, True)):
        assert (f"{number} rows of the train data so far are longer than `max_length=30`" in caplog.text) == is_warned


@pytest.mark.parametrize(
    "packing, fate",
    [
        ({}, "cut off"),
        ({"packing": True}, "cut off"),
        ({"packing": True, "packing_strategy": "bfd_split"}, "split off into other rows"),
    ],
)
def test_long_rows_are_reported(tokenizer, tmp_path, caplog, packing, fate):
    rows = {"text": ["a" * 10, "b" * 29, "c" * 50]}
    with caplog.at_level(logging.WARNING, logger="hf_eagle3"):
        trainer = make_trainer(tokenizer, rows, tmp_path, max_length=30, **packing)
    told = "1 of 3 rows of the train data are longer than `max_length=30`: 21 of 92 tokens are beyond it and are"
    assert f"{told} {fate}" in caplog.text
    kept = sum(len(row) for row in trainer.train_dataset["input_ids"])
    assert kept == (92 if fate.startswith("split off") else 71)


@pytest.mark.parametrize("stream", [False, True])
def test_pieces_of_long_prompts_are_not_packed(tokenizer, tmp_path, caplog, stream):
    """Nothing would read them, and steps on them alone have no loss."""
    rows = {"prompt": ["a" * 45, "b" * 5, "c" * 95], "completion": ["d" * 20, "e" * 6, "f" * 9]}
    packing = {"packing": True, "packing_strategy": "bfd_split", "max_length": 30}
    with caplog.at_level(logging.WARNING, logger="hf_eagle3"):
        trainer = make_trainer(tokenizer, rows, tmp_path, stream=stream, **packing)
    documents = []
    for row in trainer.train_dataset:
        parts = torch.tensor(row["input_ids"]).split([*row["seq_lengths"]])
        documents += [tokenizer.decode(part) for part in parts]
    pieces = ["a" * 15 + "d" * 15, "d" * 5 + "</s>", "b" * 5 + "e" * 6 + "</s>", "c" * 5 + "f" * 9 + "</s>"]
    assert sorted(documents) == sorted(pieces)
    told = "4 of 8 pieces of the train data have nothing to learn and are dropped"
    assert (told in caplog.text) == (not stream)
    rows = {"input_ids": [[5, 6, 7, 8]], "labels": [[-100, -100, -100, 8]]}
    with pytest.raises(ValueError, match="2 of 2 pieces of the train data have nothing to learn"):
        make_trainer(tokenizer, rows, tmp_path, **{**packing, "max_length": 3})


def test_dropped_rows_are_reported(tokenizer, tmp_path, caplog):
    rows = {"prompt": ["a" * 10, "b" * 50], "completion": ["c", "d"]}
    with caplog.at_level(logging.WARNING, logger="hf_eagle3"):
        trainer = make_trainer(tokenizer, rows, tmp_path, max_length=30)
    assert learned(trainer) == ["c</s>"]  # without its prompt
    told = "1 of 2 rows of the train data are dropped: they have nothing to learn within `max_length=30`"
    assert len(trainer.train_dataset) == 1 and told in caplog.text
    with pytest.raises(ValueError, match="2 of 2 rows .* have nothing to learn"):
        make_trainer(tokenizer, rows, tmp_path, max_length=5)


def test_bad_data(tokenizer, tmp_path):
    chats, turns, answers = chat(), chat()["messages"], {"assistant_only_loss": True}
    some = {"messages": turns + chat("narrator")["messages"]}
    tokens, texts = {"input_ids": [[5, 6, 7]]}, {"text": ["abc"]}
    no_assistant = r"Row 0 \(3 more: 1, 2, ...\): it has no message with the role 'assistant', only \['narrator'"
    completions = {"completion_only_loss": True}
    for rows, settings, told in (
        (chat("narrator"), answers, f"4 of 4 rows .* {no_assistant}"),
        (some, answers, "4 of 8 rows .* Row 4 "),
        (chats, {"template": None}, "has no chat template. Pass one as `chat_template_path`"),
        (chats, {"template": None, **answers}, "has no chat template. Pass one as `chat_template_path`"),
        (texts, answers, "needs conversations, but the train data has 'text'"),
        (
            {**tokens, "attention_mask": [[1, 1, 1]]},
            answers,
            "needs conversations, but the train data has 'input_ids'",
        ),
        ({**texts, "labels": [1]}, answers, "needs conversations, but the train data has 'text'"),
        (chats, completions, "has 'messages'. .* pass `assistant_only_loss=True`"),
        (texts, completions, "has 'text'. .* pass `assistant_only_loss=True`"),
        (tokens, completions, "has 'input_ids'. .* pass `assistant_only_loss=True`"),
        (chats, {"chat_template_path": str(tmp_path)}, "must be a Jinja file"),
        (chats, {"chat_template_path": "none.jinja"}, "none.jinja"),
        ({"content": ["abc"]}, {}, r"has columns \['content'\]"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=told):
            make_trainer(tokenizer, rows, tmp_path, **settings)
    trainer = make_trainer(tokenizer, chats, tmp_path, assistant_only_loss=True)
    with pytest.raises(ValueError, match="needs conversations, but the eval data has 'text'"):
        trainer.evaluate(Dataset.from_dict(texts))
    masked = {"input_ids": [[5, 6, 7, 8]], "completion_mask": [[0, 0, 1, 1]]}
    make_trainer(tokenizer, masked, tmp_path, completion_only_loss=True)
    masked = {"input_ids": [[5, 6, 7, 8]], "assistant_masks": [[0, 0, 1, 1]]}
    trainer = make_trainer(tokenizer, masked, tmp_path, assistant_only_loss=True)
    assert trainer.train_dataset[0]["labels"] == [-100, -100, 7, 8]
    for column in ("labels", "loss_mask"):
        some = {"input_ids": [[5, 6, 7]] * 2, column: [[-100, 6, 7] if column == "labels" else [0, 1, 1], None]}
        for option in ({"assistant_only_loss": True}, completions):
            with pytest.raises(
                ValueError, match="1 of 2 rows .* Row 1: it has no 'labels' and no mask of what is learned"
            ):
                make_trainer(tokenizer, some, tmp_path, **option)
        make_trainer(tokenizer, some, tmp_path, completion_only_loss=False)
    unmarked = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (tmp_path / "template.jinja").write_text(CHAT_TEMPLATE.replace("U:", "｜"), encoding="utf-8")
    for path in (None, str(tmp_path / "template.jinja")):
        trainer = make_trainer(tokenizer, chats, tmp_path, unmarked, chat_template_path=path, **answers)
        assert {learned(trainer, i)[0] for i in range(4)} == {f"d{i}</s>" for i in range(4)}
        assert trainer.args.assistant_only_loss and trainer.args.chat_template_path == path
    for trainer_class in (Eagle3Trainer, partial(Eagle3Trainer, formatting_func=lambda row: row["text"])):
        for rows in ({"text": []}, IterableDataset.from_generator(list)):
            with pytest.raises(ValueError, match="^The train data has no rows"):
                make_trainer(tokenizer, rows, tmp_path, trainer_class=trainer_class)
    for column, rows in (
        ("text", ["abcdef", "abcdef", None]),
        ("text", [None, "abcdef", None]),
        ("messages", [[], *turns]),
        ("messages", [*turns, []]),
        ("messages", [*turns, None]),
    ):
        empty = [i for i, row in enumerate(rows) if not row]
        told = f"{column!r} is missing or has nothing in it. Fix or"
        with pytest.raises(ValueError, match=f"{len(empty)} of {len(rows)} rows .* Row {empty[0]}.*: {told}"):
            make_trainer(tokenizer, {column: rows}, tmp_path)
        if empty[0] == 0:
            with pytest.raises(ValueError, match=f"Row 0 of the train data .* {told}"):
                make_trainer(tokenizer, {column: rows}, tmp_path, stream=True)
    for token in (200, -1):
        rows = {"input_ids": [[3, token, 5, 6], [3, 4, 5, 6]]}
        for stream in (False, True):
            with pytest.raises(ValueError, match=f"has token {token}, but the target's vocabulary ends at 95"):
                make_trainer(tokenizer, rows, tmp_path, stream=stream)


def test_a_few_broken_rows_do_not_stop_a_stream(tokenizer, tmp_path, caplog):
    arguments = {"stream": True, "max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1}
    arguments |= {"draft_vocab_size": 20, "ttt_steps": 1}
    texts, histories = [None if i in (3, 7) else f"the {i} of {i * 7}" for i in range(16)], []
    for rows in (texts, [text for text in texts if text is not None]):
        trainer = make_trainer(tokenizer, {"text": rows}, tmp_path, **arguments)
        with caplog.at_level(logging.WARNING, logger="hf_eagle3"):
            histories.append(trainers.losses(trainer))
    assert histories[0] == histories[1] and len(histories[0]) == 4
    assert "'text' is missing or has nothing in it. It is left out, with 1 of the 7 rows before it" in caplog.text


def test_streams_that_have_json_in_place_of_texts(tmp_path):
    """`datasets` does not know the types of an array before it has read it. If only some texts are like JSON, they are texts."""
    path, parts = tmp_path / "a.json", [{"type": "text", "text": "a"}]
    for content, told in (
        (parts, "has JSON in place of texts, such as '\"a\"'. .* without `streaming`"),
        ("a", None),
        ("[INST] a [/INST]", None),
    ):
        rows = [
            [{"role": "user", "content": each}, {"role": "assistant", "content": '"b"'}] for each in ("a", content)
        ]
        path.write_text(json.dumps([{"messages": row} for row in rows]))
        stream = load_dataset("json", data_files=str(path), streaming=True, split="train")
        with nullcontext() if told is None else pytest.raises(ValueError, match=told):
            assert kind_of_data(stream, "text", "train") == "messages"


def test_very_long_rows_are_reported(tokenizer, tmp_path, caplog):
    make_trainer(tokenizer, {"text": ["abc" * 7000]}, tmp_path, max_length=None)
    assert "21001 tokens" in caplog.text and "105 times as long" in caplog.text


def test_a_vocabulary_of_other_data_is_refused(tokenizer, tmp_path):
    target = make_target("llama")
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=range(60, 90))
    with pytest.raises(ValueError, match=r"30 of 96 tokens, which make up 0.0% of the \d+ supervised tokens \("):
        make_trainer(tokenizer, chat(), tmp_path, model=draft)


def test_positions_beyond_a_table(tokenizer, tmp_path):
    """Are refused before training, and not decoded in it."""

    def make(length, **arguments):
        dataset = Dataset.from_list([{"input_ids": [5, 6, 7, 8] * (length // 4)}] * 2)
        arguments |= {"max_steps": 2, "ttt_steps": 2, "eval_max_new_tokens": 64}  # more than there are positions for
        return trainers.make_trainer(tmp_path, tokenizer, None, dataset, make_gpt2(n_positions=32), **arguments)

    with pytest.raises(ValueError, match="table of 32 positions, but 2 of 2 rows .*Pass `max_length=32`"):
        make(80, max_length=100)
    with pytest.raises(ValueError, match="rows of the train data may be longer .*Pass `max_length=32`"):
        make(24, max_length=48, packing=True, packing_strategy="wrapped")
    trainer = make(24, max_length=100)
    trainer.train()
    assert trainer.evaluate(Dataset.from_list([{"input_ids": [5, 6, 7, 8] * 8}]))["eval_acceptance_length"] >= 1


@pytest.mark.parametrize("num_rare, share", [(0, "all"), (1, "99.9%")])
def test_a_share_of_the_vocabulary_is_not_rounded_to_all(tokenizer, tmp_path, caplog, num_rare, share):
    rows = {"input_ids": [[5, 6] * 1000, [5, 6, 5, *[7] * num_rare]]}
    with caplog.at_level(logging.INFO, logger="hf_eagle3"):
        make_trainer(tokenizer, rows, tmp_path, draft_vocab_size=2, max_length=None)
    said = f"2 of 96 tokens, which make up {share} of the {2003 + num_rare:,} supervised tokens ({2 + num_rare} different ones)."
    assert said in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_texts_that_are_longer_than_the_targets(tokenizer, tmp_path, caplog, stream):
    target = make_target("llama", max_position_embeddings=16)

    def said(**arguments):
        caplog.clear()
        rows = Dataset.from_list([{"input_ids": [5, 6, 7, 8] * length} for length in (4, 5)])
        rows = rows.to_iterable_dataset() if stream else rows
        trainer = trainers.make_trainer(tmp_path, tokenizer, None, rows, target, **arguments)
        list(trainer.train_dataset)  # a stream is read now
        return caplog.text

    for max_length in (100, None):
        who = "1 rows of the train data so far" if stream else "1 of 2 rows of the train data (up to 20 tokens)"
        assert f"{who} are longer than 16 tokens, the longest texts" in said(max_length=max_length)
    assert "longest texts" not in said(max_length=16)
    if not stream:
        wrapped = said(max_length=24, packing=True, packing_strategy="wrapped")
        assert "The train data is packed into rows of 24 tokens, which are longer than 16 tokens" in wrapped
    target.config.rope_parameters = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    assert "longest texts" not in said(max_length=100)


@pytest.mark.parametrize("kind", ["numpy", "structure of lists", "with_transform", "images"])
def test_formats_and_columns(tokenizer, tmp_path, kind):
    dataset = Dataset.from_list([{"messages": turns, "images": []} for turns in chat()["messages"]])
    if kind == "numpy":
        dataset = dataset.with_format("numpy")
    elif kind == "structure of lists":
        lists = {name: [turn[name] for turn in chat()["messages"][0]] for name in ("role", "content")}
        dataset = Dataset.from_list([{"messages": lists}])
    elif kind == "images":
        dataset = Dataset.from_list([{"messages": chat()["messages"][0], "image": "x"}])
    else:
        dataset = dataset.with_transform(lambda rows: rows)
    told = {
        "with_transform": "computes its rows each time",
        "images": "Row 0: it has images, but LlamaForCausalLM reads text only. Pass a target that sees",
    }
    with pytest.raises(ValueError, match=told[kind]) if kind in told else nullcontext():
        trainer = make_trainer(tokenizer, dataset, tmp_path, assistant_only_loss=True)
        assert "d0</s>" in {learned(trainer, index)[0] for index in range(len(trainer.train_dataset))}


def test_a_template_of_the_processor(tokenizer, tmp_path):
    class Processor(ProcessorMixin):
        def __init__(self, tokenizer):
            self.tokenizer, self.chat_template = tokenizer, tokenizer.chat_template
            tokenizer.chat_template = None

    own = copy.deepcopy(tokenizer)
    _, given, _ = load_target(make_target("llama"), None, Processor(own))
    assert given is own and own.chat_template == CHAT_TEMPLATE
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    make_target("llama").config.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    assert load_tokenizer(tmp_path).chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize("rows", [{"text": ["abcdef"]}, {"prompt": ["abc"], "completion": ["def"]}])
def test_tokenizers_without_eos_or_padding(tokenizer, tmp_path, rows, caplog):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = tokenizer.pad_token = None
    with caplog.at_level(logging.WARNING, logger="hf_eagle3"):
        trainer = make_trainer(tokenizer, rows, tmp_path)
    assert tokenizer.decode(trainer.train_dataset[0]["input_ids"]) == "abcdef"
    assert "has no EOS token: texts are learned without an end" in caplog.text


def test_files_of_tokenizers(tokenizer, tmp_path, monkeypatch):
    make_target("llama").config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for content, told in (
        ("version https://git-lfs.github.com/spec/v1\n", "tokenizer.json is a Git LFS pointer"),
        ("{", "A file of the tokenizer of .* is not valid JSON"),
    ):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=told):
            load_tokenizer(tmp_path)
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")  # Mistral's
    monkeypatch.setattr("hf_eagle3.tokenizer.AutoTokenizer.from_pretrained", lambda name: tokenizer)
    assert load_tokenizer(tmp_path) is tokenizer
    (tmp_path / "a.jinja").write_bytes(b"\xef\xbb\xbfabc")
    assert read_template(tmp_path / "a.jinja") == "abc"


def test_tokenizers_of_mistral_common(tokenizer, tmp_path, monkeypatch):
    """`AutoTokenizer` prefers them where the package is installed, as beside vLLM. They render without a template."""
    other = type("MistralCommonBackend", (type(tokenizer),), {})(tokenizer_object=tokenizer.backend_tokenizer)
    make_target("llama").config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def from_pretrained(name, mistral_format=None):
        return other if mistral_format is None else tokenizer

    monkeypatch.setattr("hf_eagle3.tokenizer.AutoTokenizer.from_pretrained", from_pretrained)
    assert load_tokenizer(tmp_path) is tokenizer
    with pytest.raises(ValueError, match="is a tokenizer of mistral-common, which takes no chat template. Pass"):
        make_trainer(other, chat(), tmp_path / "draft")


def test_a_padding_token_that_the_target_does_not_have(tokenizer, tmp_path):
    """`add_special_tokens` is often called without `resize_token_embeddings`."""
    target, tokenizer = make_target("llama"), copy.deepcopy(tokenizer)
    num_tokens = target.config.vocab_size
    tokenizer.add_tokens([f"<{number}>" for number in range(num_tokens - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == num_tokens
    assert padding_token(tokenizer, num_tokens) == "</s>" and padding_token(tokenizer, num_tokens + 1) == "[PAD]"
    rows = {"text": ["abc", "abcdefgh"] * 4}
    make_trainer(tokenizer, rows, tmp_path, max_steps=1, per_device_train_batch_size=4).train()

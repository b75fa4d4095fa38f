"""What a row may be, and what is said of one that is something else."""

import json
from datetime import datetime

import numpy as np
import pytest
from datasets import Dataset, Features, Json, List
from messages import assistant, user

from hf_eagle3.data import read_prompt, read_row
from hf_eagle3.data.conversation import Conversation
from hf_eagle3.data.rows import PROMPT_PARTS, SYSTEM, kind_of, summary
from hf_eagle3.data.values import RowError
from hf_eagle3.tokenizer import REASONING


U, A = user("a"), assistant("b")
CHAT, BARE = [U, A], {"role": "assistant"}
C, PAIR = {"messages": CHAT}, {"prompt": "a", "completion": "b"}
TEXTS, TWO = {"text": "a", "completion": "b"}, {"input_ids": [5, 6]}
IMAGE = {"type": "image"}


def M(*messages, **columns):
    """A row with a conversation."""
    return {"messages": list(messages), **columns}


def tokens(input_ids, labels, **others):
    return {"tokens": {"input_ids": input_ids, "labels": labels, **others}}


def system(text):
    return {"role": "system", "content": text}


def part(text):
    return {"type": "text", "text": text}


SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Ulm"}}}
SAID = {"role": "tool_call", "content": json.dumps(CALL["function"])}  # by ms-swift
CALL_AS_TEXT = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Ulm"}'}}
CALL_WITH_NULLS = {"type": "function", "function": {"name": "f", "arguments": {"city": "Ulm", "other": None}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"city": {"type": "string"}}}}}


def parts(*contents):
    return [{"type": "text", "text": text, "image": None} for text in contents]


GOOD = [
    (C, C),
    # Keys that `datasets` added, because other rows have them.
    (M({**U, "tool_calls": None}, A), C),
    # ShareGPT.
    ({"conversations": SHAREGPT}, C),
    ({"messages": SHAREGPT}, C),
    (M({"role": "human", "content": "a"}, {"role": "Assistant", "content": "b"}), C),
    # LangChain's role.
    (M(U, {"role": "ai", "content": "b"}), C),
    (M(U, {"role": "ipython", "content": "b"}), M(U, {"role": "ipython", "content": "b"})),
    # OpenAI's newer name of a system prompt.
    (M({"role": "developer", "content": "s"}, *CHAT), M(system("s"), *CHAT)),
    ({"conversations": [{"from": "human", "text": "a"}, SHAREGPT[1]]}, C),
    (M({"role": "user", "content": "", "value": "a"}, {**A, "value": "b"}), C),
    (M(*CHAT, U, assistant(None)), M(*CHAT, U)),
    ({"messages": {"role": ["user", "assistant"], "content": ["a", "b"]}}, C),
    ({"messages": np.array(CHAT, dtype=object)}, C),
    (M({**U, "content": parts("a")}, assistant(["b"])), C),
    (M({**U, "content": parts("a", "b")}), M(user("ab"))),
    ({"conversations": SHAREGPT, "system": "s"}, M(system("s"), *CHAT)),
    ({"conversations": SHAREGPT, "system": ""}, C),
    *(({**C, name: "s"}, M(system("s"), *CHAT)) for name in SYSTEM),
    (M(U, {**BARE, "content": None, "tool_calls": [CALL]}), "call"),
    (M(U, {**BARE, "tool_calls": [CALL_AS_TEXT]}), "call"),
    (M(U, {**BARE, "tool_calls": json.dumps([CALL_AS_TEXT])}), "call"),
    (M({**U, "tool_calls": []}, {**A, "tool_calls": "[]", "thinking": ""}), C),
    # Keys that `datasets` added.
    (M(U, {**BARE, "tool_calls": [CALL_WITH_NULLS]}), "call"),
    ({"conversations": [SHAREGPT[0], {"from": "gpt", "tool_calls": [CALL]}]}, "call"),
    # LLaMA-Factory's call.
    ({"conversations": [SHAREGPT[0], {"from": "function_call", "value": json.dumps(CALL["function"])}]}, "call"),
    # ms-swift's.
    (M(U, SAID), "call"),
    (M(U, {**SAID, "content": parts(SAID["content"])}), "call"),
    (
        M(U, {**SAID, "content": "f()"}, {**SAID, "content": '{"city": "Ulm"}'}, {**SAID, "content": ["[]"]}),
        M(U, *({**SAID, "content": said} for said in ("f()", '{"city": "Ulm"}', "[]"))),
    ),
    (
        M(U, {**A, "loss": False}, {**SAID, "loss": False, "weight": 0}),
        M(U, {**A, "loss": False, "weight": 0, "tool_calls": [CALL]}),
    ),
    (
        M(*CHAT, *[SAID] * 2, *[{"role": "tool_response", "content": "r"}] * 2),
        M(U, {**A, "tool_calls": [CALL, CALL]}, *[{"role": "tool", "content": "r"}] * 2),
    ),
    # OpenAI's older form of calls, tools and results.
    (M(U, {**BARE, "content": None, "function_call": CALL_AS_TEXT["function"]}), "call"),
    (M(U, {**BARE, "tool_calls": "[]", "function_call": json.dumps(CALL_AS_TEXT["function"])}), "call"),
    (
        {**C, "functions": json.dumps([TOOL])},
        M(*CHAT, template_kwargs={"tools": [{"type": "function", "function": TOOL}]}),
    ),
    (
        M(U, {**A, "tool_calls": [{"function": {"name": "now", "arguments": " "}}]}),
        M(U, {**A, "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}),
    ),
    (
        M(U, {"role": "function", "name": "f", "content": "r", "function_call": None}),
        M(U, {"role": "tool", "name": "f", "content": "r"}),
    ),
    ({**C, "chat_template_kwargs": {"a": True, "b": None}}, {**C, "template_kwargs": {"a": True}}),
    ({**C, "chat_template_kwargs": '{"a": true}'}, {**C, "template_kwargs": {"a": True}}),
    ({**C, "chat_template_kwargs": None, "tools": ""}, C),
    ({**C, "tools": [TOOL]}, M(*CHAT, template_kwargs={"tools": [TOOL]})),
    ({**C, "tools": json.dumps([TOOL])}, M(*CHAT, template_kwargs={"tools": [TOOL]})),
    # Keys that `datasets` added.
    ({**C, "tools": [{**TOOL, "strict": None}]}, M(*CHAT, template_kwargs={"tools": [TOOL]})),
    # Documents.
    *(
        ({**C, "documents": documents}, {**C, "template_kwargs": {"documents": [{"text": "d"}]}})
        for documents in ([{"text": "d", "title": None}], '[{"text": "d"}]')
    ),
    ({**C, "documents": [], "context": None, "reasoning": "on", "thinking": ""}, C),
    # What the messages, or the system prompt, have anyway.
    (M(user([part("a"), IMAGE]), A, image="x", context=["a"]), M(user([part("a"), IMAGE]), A, images=["x"])),
    ({**C, "system": "s t", "instruction": "s\nt", "input": "a"}, M(system("s t"), *CHAT)),
    ({**C, "images": [], "image": None}, C),
    # Images in a column, in their places, at marks and in messages.
    ({**C, "images": ["x", "y"]}, M(user([IMAGE, IMAGE, part("a")]), A, images=["x", "y"])),
    (M(user(["a", {"type": "image", "text": None}]), A, image="x"), M(user([part("a"), IMAGE]), A, images=["x"])),
    (
        {
            "conversations": [
                {"from": "system", "value": "<image>"},
                {"from": "human", "value": "<image>\n<image>a <image> c"},
                {"from": "gpt", "value": "<image>"},
                {"from": "human", "value": "d\n<image>"},
            ],
            "images": ["x", "y", "z", "w"],
        },
        M(
            system("<image>"),
            user([IMAGE, part("\n"), IMAGE, part("a "), IMAGE, part(" c")]),
            assistant("<image>"),
            user([part("d\n"), IMAGE]),
            images=["x", "y", "z", "w"],
        ),
    ),
    (M(user("<image>"), A), M(user("<image>"), A)),
    (
        M(
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            user([{"type": "image", "url": "y", "path": None}]),
            A,
        ),
        M(user([IMAGE]), user([IMAGE]), A, images=["x", "y"]),
    ),
    ({"text": "a", "image": "x"}, {"text": "a", "images": ["x"]}),
    ({**C, "prompt": "a"}, C),
    # Prompts and completions.
    ({"prompt": [U], "completion": [A]}, {**C, "num_given": 1}),
    (PAIR, TEXTS),
    ({**PAIR, "label": True}, TEXTS),
    ({"text": "a", "label": False}, {"text": "a"}),
    (
        {"prompt": "a: c d", "input": "c", "history": [], "context": ["a:  c\n", "d"], "completion": "b"},
        {"text": "a: c d", "completion": "b"},
    ),
    ({**PAIR, "context": float("nan"), "reasoning_content": False}, TEXTS),
    (M(U, {**A, "reasoning": "c\nd"}, metadata={"reasoning_content": ["c\r\nd\n"]}), M(U, {**A, "reasoning": "c\nd"})),
    ({**C, "reasoning_content": None, "metadata": {"reasoning_content": ""}}, C),
    (
        {"prompt": "a", "completion": "<think>c</think>b", "reasoning_content": "c"},
        {"text": "a", "completion": "<think>c</think>b"},
    ),
    ({"text": "a", "tools": None}, {"text": "a"}),
    ({"text": ""}, {"text": ""}),
    # Tokens.
    ({"input_ids": [5, 6]}, {"tokens": {**TWO, "labels": [5, 6]}}),
    ({"input_ids": np.array([5, 6])}, {"tokens": {**TWO, "labels": [5, 6]}}),
    (
        {"input_ids": [0, 5, 6, 0], "attention_mask": [0, 1, 1, 0], "labels": [0, -100, 6, 0]},
        {"tokens": {**TWO, "labels": [-100, 6]}},
    ),
    *(
        ({"input_ids": [5, 6, 7], name: [0, 1, 1]}, tokens([5, 6, 7], [-100, 6, 7]))
        for name in ("loss_mask", "completion_mask", "assistant_masks")
    ),
    (
        {"input_ids": [5, 6, 7], "labels": [5, 6, -100], "loss_mask": (None, 1.0, True)},
        tokens([5, 6, 7], [-100, 6, -100]),
    ),
    ({"input_ids": [5, 6, 7], "seq_lengths": [1, 2]}, tokens([5, 6, 7], [5, 6, 7], seq_lengths=[1, 2])),
]
DAY = {"day": datetime(2026, 1, 2)}
BAD = [
    ({"messages": None}, "'messages' is missing or has nothing in it"),
    ({"messages": None, "text": "a"}, "'messages' has nothing in it, but 'text' has. All rows must"),
    ({"conversations": []}, "'conversations' is missing or has nothing in it"),
    ({"messages": json.dumps(CHAT)}, "'messages' is the text .* parse it: .*json.loads"),
    ({"prompt": json.dumps([U]), "completion": "b"}, "'prompt' is a text with messages, .* parse it: .*json.loads"),
    ({"prompt": "[a", "completion": json.dumps([A])}, "'completion' is a text with messages"),
    ({"messages": 5}, "'messages' is 5, but must be a list of messages"),
    ({"messages": {"role": ["user"], "content": []}}, "but must be a list of messages"),
    (M(U, None), "message 1 of 'messages' is None"),
    (M(U, "b"), "message 1 of 'messages' is 'b', but must have role"),
    (M({"content": "a"}), "message 0 of 'messages' has no role"),
    (M(user(None)), "message 0 of 'messages' has no content"),
    (M(U, {"role": "assistant"}), "message 1 of 'messages' has no content"),
    (M(*CHAT, U, {"role": "assistant"}, *CHAT), "message 3 of 'messages' has no content"),
    (M(user(5)), "the content of message 0 of 'messages' is 5, but must be a text"),
    (
        M(user([{"type": "audio", "audio": "x"}])),
        "the content of message 0 of 'messages' has .*audio.* and drafts learn from text and images only",
    ),
    ({**C, "videos": ["x"]}, "has 'videos', and drafts learn from text and images"),
    (M(user([IMAGE, IMAGE]), A, images=["x"]), "messages have 2 places for images, but it has 1 images"),
    (M(user("<image> a"), A, images=["x", "y"]), "1 places for images, but it has 2 images. .* or marks <image>"),
    (M(user("<image> a"), A, images=[]), "messages have 1 places for images, but it has 0 images"),
    (M(user([IMAGE]), A, images=["x", "y"]), "messages have 1 places for images, but it has 2 images"),
    (M(user([{"type": "image", "image": "x"}]), A, images=["x"]), "images in its messages and in a column"),
    ({**C, "image": "x", "images": ["x"]}, "both 'image' and 'images'"),
    (M(user([{"type": "image_url", "image_url": None}]), A), "has .*image_url.*, which has no image"),
    (M(A, images=["x"]), "no message of the user to show them in"),
    ({"input_ids": [1, 2], "images": ["x"]}, "images beside 'input_ids'"),
    ({"conversations": [{"from": "narrator", "value": "a"}]}, "from 'narrator', .* Rename it"),
    (M(system("s"), *CHAT, system="t"), "two different system prompts, in 'system' and in 'messages'"),
    ({**C, "system": "s", "system_prompt": "t"}, "two different system prompts, in 'system' and in 'system_prompt'"),
    ({**C, "tools": "f(city)"}, r"'tools' has 'f\(city\)', which is not JSON"),
    ({**C, "tools": [5]}, r"'tools' is \[5\], but must be a list of JSON schemas"),
    (
        {**C, "tools": [{**TOOL, "parameters": DAY}]},
        "'tools' has what JSON does not have: Object of type datetime .*load the column as the type `Json`",
    ),
    (
        M(U, {**A, "tool_calls": [{"function": {"name": "f", "arguments": DAY}}]}),
        "a tool call of message 1 of 'messages' has what JSON does not have",
    ),
    ({**C, "chat_template_kwargs": [1]}, r"'chat_template_kwargs' is \[1\], but must be a dictionary"),
    ({**C, "chat_template_kwargs": {"add_generation_prompt": True}}, "has 'add_generation_prompt', which is set here"),
    (M(U, {**A, "tool_calls": ["f"]}), "'f' among its tool_calls"),
    (
        M(U, {**A, "tool_calls": "f(city)"}),
        r"tool_calls of message 1 of 'messages'\" has 'f\(city\)', which is not JSON",
    ),
    ({"text": None}, "'text' is missing or has nothing in it"),
    ({"text": 5}, "'text' is 5, but must be a text"),
    ({"text": "a", "system": "s"}, "has 'system' beside a text, but only conversations"),
    ({**PAIR, "tools": [TOOL]}, "has 'tools' beside a text, but only"),
    ({**C, "tool_defs": [TOOL]}, "'tool_defs', but tools are read from 'tools'. Rename"),
    (
        {"input_ids": [5, 6, 7], "prompt_mask": [1, 1, 0]},
        r"it has 'prompt_mask', but masks are read from \['attention_mask', .*\]. Rename the column, or remove it",
    ),
    ({**C, "loss_mask": [0, 1]}, "'loss_mask' beside 'messages', but"),
    ({**PAIR, "input": "c"}, "'input' beside 'prompt', which does not have it. Write it"),
    ({**PAIR, "context": "c"}, "it has 'context' beside 'prompt', which does not have it"),
    ({**PAIR, "history": [["c", "d"]]}, "it has 'history' beside 'prompt'"),
    (
        M(user("c\nd"), A, reasoning_content="c\nd"),
        "it has 'reasoning_content', which is not in its answer, .* Write it into the assistant's message",
    ),
    *(({**each, name: "c"}, f"{name!r}, which is not in its answer") for each in (PAIR, C) for name in REASONING),
    *(({**C, name: "c"}, f"it has {name!r} beside 'messages', which does not have it") for name in PROMPT_PARTS),
    ({"prompt": [U], "completion": [A], "context": "b"}, "it has 'context' beside 'prompt'"),
    ({**PAIR, "documents": [{"text": "d"}]}, "it has 'documents' beside 'prompt'"),
    ({**C, "documents": ["d"]}, r"'documents' is \['d'\], but must be a list of dictionaries"),
    (
        {**C, "documents": [{"text": "d"}], "chat_template_kwargs": {"documents": [{"text": "d"}]}},
        "'documents' in 'chat_template_kwargs' and in a column",
    ),
    ({"prompt": [U], "completion": [A], "reasoning_content": "c"}, "not in its answer"),
    (
        {"conversations": SHAREGPT, "metadata": {"idx": 0, "reasoning_content": "c"}},
        "'reasoning_content' in 'metadata', which is not in its answer",
    ),
    ({"prompt": [U], "completion": CHAT}, "its completion begins with the prompt again"),
    (M({**U, "value": "c"}, A), "message 0 of 'messages' has two contents, 'a' and 'c'. Remove one"),
    (
        M(U, assistant([{"type": "text", "text": "b", "weight": 0}])),
        "message 1 of 'messages' is to be learned in part",
    ),
    (
        M(U, {**A, "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}),
        "message 1 of 'messages' is to be learned in part",
    ),
    (
        {**PAIR, "label": False},
        r"its 'label' is false, so its answer is a bad example\. Remove such rows \(dataset.filter\(lambda row: row\['label'\]\)\)",
    ),
    ({"conversations": SHAREGPT, "kto_tag": False}, "its 'kto_tag' is false"),
    ({"prompt": "a", "completion": None}, "'completion' is missing or has nothing in it"),
    ({"prompt": [U], "completion": "b"}, "one of 'prompt' and 'completion' is a text"),
    ({"prompt": [U], "completion": [user("c")]}, "no message of the assistant"),
    (
        {"conversations": [SHAREGPT[0], {"from": "function_call", "value": "5"}]},
        "message 1 of 'conversations' is '5', but 'function_call' must say a tool call with a name, as JSON",
    ),
    *(
        (
            M(U, {**A, "loss": not learned}, {**SAID, "loss": bool(learned)}),
            "message 2 of 'messages', a tool call, is joined to the message before it, which is to be learned in part",
        )
        for learned in (0, 1)
    ),
    (
        M(U, {**A, "reasoning_content": "c"}, {**SAID, "reasoning_content": "d"}),
        "message 2 of 'messages', a tool call, is joined to the message before it, and both have 'reasoning_content'",
    ),
    ({"input_ids": []}, "'input_ids' is missing or has nothing in it"),
    ({"input_ids": "abc"}, "'input_ids' is 'abc', but must be a list of token ids"),
    ({"input_ids": [5, 6.5]}, "'input_ids' has 6.5, but"),
    ({**TWO, "labels": [5]}, "'labels' has 1 entries, but there are 2 tokens"),
    ({**TWO, "loss_mask": [1, 1, 1]}, "'loss_mask' has 3 entries, but there are 2 tokens"),
    ({"input_ids": 5}, "'input_ids' is 5, but must be a list of token ids"),
    ({**TWO, "loss_mask": 1}, "'loss_mask' is 1, but must be a list of zeros and ones"),
    ({**TWO, "loss_mask": [-100, 1]}, "has -100, but must be a list of zeros and ones"),
    ({**TWO, "loss_mask": ["0", "1"]}, "has '0', but must be a list of zeros and ones"),
    ({**TWO, "attention_mask": [1, 2]}, "has 2, but must be a list of zeros"),
    ({**TWO, "position_ids": 1}, "'position_ids' is 1, but must be a list"),
    ({"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, "label 0 is 6, but token 0 is 5"),
    ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "excludes tokens in the middle"),
    ({"input_ids": [0, 0], "attention_mask": [0, 0]}, "excludes tokens in the middle, or all"),
    ({**TWO, "seq_lengths": [1]}, "sum to 1, but there are 2 tokens"),
    ({**TWO, "seq_lengths": [3, -1]}, "'seq_lengths' has -1, but must"),
    ({**TWO, "seq_lengths": [1, 0, 1]}, "'seq_lengths' has 0, but must"),
    ({**TWO, "position_ids": [0, 0]}, "Say where documents end"),
]


@pytest.mark.parametrize("row, expected", GOOD)
def test_rows(row, expected):
    if expected == "call":
        expected = {"messages": [U, {"role": "assistant", "content": "", "tool_calls": [CALL]}]}
    read = read_row(row, kind_of(row))
    assert {key: value for key, value in vars(read).items() if value not in (None, {}, [])} == expected
    if read.messages and read.num_given is None:
        assert read_prompt(row) == read


@pytest.mark.parametrize("place", ["texts", "Json", "structures"])
def test_nulls_are_kept_unless_arrow_may_have_added_them(place):
    """The schemas of pydantic have `"default": null`, and servers show it to their model."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"city": {"type": "string", "default": None}}}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": None}}}
    row = {"messages": [U, {**A, "tool_calls": [call]}, U], "tools": [tool], "chat_template_kwargs": {"style": None}}
    types = Features({"messages": List(Json()), "tools": List(Json()), "chat_template_kwargs": Json()})
    if place == "texts":
        arguments = {**call, "function": {"name": "f", "arguments": '{"city": null}'}}
        messages = [U, {**A, "tool_calls": [arguments]}, U]
        row = {"messages": messages, "tools": json.dumps([tool]), "chat_template_kwargs": '{"style": null}'}
    rows = Dataset.from_list([row], features=types if place == "Json" else None)
    read = read_row(rows[0], "messages", rows.features)
    assert read == read_prompt(rows[0], rows.features)
    assert Conversation(0, rows[0], features=rows.features).template_kwargs == read.template_kwargs
    if place == "structures":
        del tool["function"]["parameters"]["city"]["default"], call["function"]["arguments"]["city"]
    assert read.messages[1]["tool_calls"] == [call] and read.template_kwargs["tools"] == [tool]
    assert ("style" in read.template_kwargs) == (place != "structures")


@pytest.mark.parametrize("row, told", BAD)
def test_rows_that_are_something_else(row, told):
    with pytest.raises(RowError, match=told):
        read_row(row, kind_of(row))


def test_rows_to_answer():
    assert read_prompt({"prompt": "a"}).text == "a" and read_prompt({"prompt": [U]}).messages == [U]
    assert read_prompt({"prompt": "a", "completion": "b", "label": False}).text == "a"  # which gets another answer
    assert read_prompt({"prompt": '[{"city": "Rome"}]'}).text == '[{"city": "Rome"}]'
    for row, told in (
        ({"prompt": json.dumps([U])}, "'prompt' is a text with messages"),
        ({"text": "a"}, r"it has no messages and no prompt, but \['text'\]"),
        ({"prompt": ""}, "empty"),
    ):
        with pytest.raises(RowError, match=told):
            read_prompt(row)


def test_a_column_of_texts_that_was_asked_for_comes_first():
    columns = {"content", "messages", "text"}
    assert kind_of(columns, "content") == "content" and kind_of(columns) == "messages"
    with pytest.raises(ValueError, match="has no column 'contents', which `dataset_text_field` names"):
        kind_of(columns, "contents")
    assert kind_of(["input_ids"], "contents") == "input_ids"  # of texts that were tokenized before


def test_a_summary_names_the_first_few_of_each_kind():
    problems = [(1, "it is a"), (2, "it is b."), (5, "it is a"), (7, "it is a"), (9, "it is a"), (11, "c"), (12, "d")]
    assert (
        summary(problems)
        == "Row 1 (3 more: 5, 7, ...): it is a. Row 2: it is b. Row 11: c. And 1 more rows, for other reasons."
    )

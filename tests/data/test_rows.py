"""What a row may be, and what is said of one that is something else."""

import json
from datetime import datetime

import numpy as np
import pytest
from datasets import Dataset, Features, Json, List

from hf_eagle3.data import read_prompt, read_row
from hf_eagle3.data.conversation import Conversation
from hf_eagle3.data.rows import kind_of, summary
from hf_eagle3.data.values import RowError


U, A = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CHAT = [U, A]
IMAGE = {"type": "image"}


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


GOOD = {
    "messages": ({"messages": CHAT}, {"messages": CHAT}),
    "names of other rows": ({"messages": [{**U, "tool_calls": None}, A]}, {"messages": CHAT}),
    "ShareGPT": ({"conversations": SHAREGPT}, {"messages": CHAT}),
    "ShareGPT under messages": ({"messages": SHAREGPT}, {"messages": CHAT}),
    "ShareGPT's roles": (
        {"messages": [{"role": "human", "content": "a"}, {"role": "Assistant", "content": "b"}]},
        {"messages": CHAT},
    ),
    "LangChain's roles": (
        {"messages": [{"role": "human", "content": "a"}, {"role": "ai", "content": "b"}]},
        {"messages": CHAT},
    ),
    "a role of a template": (
        {"messages": [U, {"role": "ipython", "content": "b"}]},
        {"messages": [U, {"role": "ipython", "content": "b"}]},
    ),
    "OpenAI's newer name of a system prompt": (
        {"messages": [{"role": "developer", "content": "s"}, *CHAT]},
        {"messages": [{"role": "system", "content": "s"}, *CHAT]},
    ),
    "text in place of value": ({"conversations": [{"from": "human", "text": "a"}, SHAREGPT[1]]}, {"messages": CHAT}),
    "an empty content of other rows": (
        {"messages": [{"role": "user", "content": "", "value": "a"}, {**A, "value": "b"}]},
        {"messages": CHAT},
    ),
    "no last answer": ({"messages": [*CHAT, U, {**A, "content": None}]}, {"messages": [*CHAT, U]}),
    "a structure of lists": (
        {"messages": {"role": ["user", "assistant"], "content": ["a", "b"]}},
        {"messages": CHAT},
    ),
    "an array": ({"messages": np.array(CHAT, dtype=object)}, {"messages": CHAT}),
    "parts": ({"messages": [{**U, "content": parts("a")}, {**A, "content": ["b"]}]}, {"messages": CHAT}),
    "several parts": ({"messages": [{**U, "content": parts("a", "b")}]}, {"messages": [{**U, "content": "ab"}]}),
    "a system column": (
        {"conversations": SHAREGPT, "system": "s"},
        {"messages": [{"role": "system", "content": "s"}, *CHAT]},
    ),
    "an empty system column": ({"conversations": SHAREGPT, "system": ""}, {"messages": CHAT}),
    "a call": ({"messages": [U, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}, "call"),
    "a call with arguments as text": ({"messages": [U, {"role": "assistant", "tool_calls": [CALL_AS_TEXT]}]}, "call"),
    "calls as JSON": ({"messages": [U, {"role": "assistant", "tool_calls": json.dumps([CALL_AS_TEXT])}]}, "call"),
    "no calls and no reasoning": (
        {"messages": [{**U, "tool_calls": []}, {**A, "tool_calls": "[]", "thinking": ""}]},
        {"messages": CHAT},
    ),
    "arguments of other rows": ({"messages": [U, {"role": "assistant", "tool_calls": [CALL_WITH_NULLS]}]}, "call"),
    "ShareGPT with a call": ({"conversations": [SHAREGPT[0], {"from": "gpt", "tool_calls": [CALL]}]}, "call"),
    "LLaMA-Factory's call": (
        {"conversations": [SHAREGPT[0], {"from": "function_call", "value": json.dumps(CALL["function"])}]},
        "call",
    ),
    "ms-swift's call": ({"messages": [U, SAID]}, "call"),
    "its call in parts": ({"messages": [U, {**SAID, "content": parts(SAID["content"])}]}, "call"),
    "calls of a template": (
        {
            "messages": [
                U,
                {**SAID, "content": "f()"},
                {**SAID, "content": '{"city": "Ulm"}'},
                {**SAID, "content": ["[]"]},
            ]
        },
        {"messages": [U, *({**SAID, "content": said} for said in ("f()", '{"city": "Ulm"}', "[]"))]},
    ),
    "a call and its text that are not learned": (
        {"messages": [U, {**A, "loss": False}, {**SAID, "loss": False, "weight": 0}]},
        {"messages": [U, {**A, "loss": False, "weight": 0, "tool_calls": [CALL]}]},
    ),
    "ms-swift's calls after a text": (
        {
            "messages": [
                *CHAT,
                *[SAID] * 2,
                *[{"role": "tool_response", "content": "r"}] * 2,
            ]
        },
        {"messages": [U, {**A, "tool_calls": [CALL, CALL]}, *[{"role": "tool", "content": "r"}] * 2]},
    ),
    "OpenAI's older call": (
        {"messages": [U, {"role": "assistant", "content": None, "function_call": CALL_AS_TEXT["function"]}]},
        "call",
    ),
    "an older call as JSON": (
        {
            "messages": [
                U,
                {"role": "assistant", "tool_calls": "[]", "function_call": json.dumps(CALL_AS_TEXT["function"])},
            ]
        },
        "call",
    ),
    "OpenAI's older tools": (
        {"messages": CHAT, "functions": json.dumps([TOOL])},
        {"messages": CHAT, "template_kwargs": {"tools": [{"type": "function", "function": TOOL}]}},
    ),
    "a call without arguments": (
        {"messages": [U, {**A, "tool_calls": [{"function": {"name": "now", "arguments": " "}}]}]},
        {"messages": [U, {**A, "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}]},
    ),
    "and its result": (
        {"messages": [U, {"role": "function", "name": "f", "content": "r", "function_call": None}]},
        {"messages": [U, {"role": "tool", "name": "f", "content": "r"}]},
    ),
    "an unknown template argument": (
        {"messages": CHAT, "chat_template_kwargs": {"a": True, "b": None}},
        {"messages": CHAT, "template_kwargs": {"a": True}},
    ),
    "template arguments as JSON": (
        {"messages": CHAT, "chat_template_kwargs": '{"a": true}'},
        {"messages": CHAT, "template_kwargs": {"a": True}},
    ),
    "no template arguments": ({"messages": CHAT, "chat_template_kwargs": None, "tools": ""}, {"messages": CHAT}),
    "tools": ({"messages": CHAT, "tools": [TOOL]}, {"messages": CHAT, "template_kwargs": {"tools": [TOOL]}}),
    "tools as JSON": (
        {"messages": CHAT, "tools": json.dumps([TOOL])},
        {"messages": CHAT, "template_kwargs": {"tools": [TOOL]}},
    ),
    "properties of other rows": (
        {"messages": CHAT, "tools": [{**TOOL, "strict": None}]},
        {"messages": CHAT, "template_kwargs": {"tools": [TOOL]}},
    ),
    "no images": ({"messages": CHAT, "images": [], "image": None}, {"messages": CHAT}),
    "images in a column": (
        {"messages": CHAT, "images": ["x", "y"]},
        {
            "messages": [{"role": "user", "content": [IMAGE, IMAGE, {"type": "text", "text": U["content"]}]}, A],
            "images": ["x", "y"],
        },
    ),
    "images in their places": (
        {"messages": [{"role": "user", "content": ["a", {"type": "image", "text": None}]}, A], "image": "x"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}, A], "images": ["x"]},
    ),
    "images at marks": (
        {
            "conversations": [
                {"from": "system", "value": "<image>"},
                {"from": "human", "value": "<image>\n<image>a <image> c"},
                {"from": "gpt", "value": "<image>"},
                {"from": "human", "value": "d\n<image>"},
            ],
            "images": ["x", "y", "z", "w"],
        },
        {
            "messages": [
                {"role": "system", "content": "<image>"},
                {"role": "user", "content": [IMAGE, part("\n"), IMAGE, part("a "), IMAGE, part(" c")]},
                {"role": "assistant", "content": "<image>"},
                {"role": "user", "content": [part("d\n"), IMAGE]},
            ],
            "images": ["x", "y", "z", "w"],
        },
    ),
    "a text about marks": (
        {"messages": [{**U, "content": "<image>"}, A]},
        {"messages": [{**U, "content": "<image>"}, A]},
    ),
    "images in messages": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                {"role": "user", "content": [{"type": "image", "url": "y", "path": None}]},
                A,
            ]
        },
        {
            "messages": [{"role": "user", "content": [IMAGE]}, {"role": "user", "content": [IMAGE]}, A],
            "images": ["x", "y"],
        },
    ),
    "a text with an image": ({"text": "a", "image": "x"}, {"text": "a", "images": ["x"]}),
    "a prompt in a column of its own": ({"messages": CHAT, "prompt": "a"}, {"messages": CHAT}),
    "a completion of messages": ({"prompt": [U], "completion": [A]}, {"messages": CHAT, "num_given": 1}),
    "a completion": ({"prompt": "a", "completion": "b"}, {"text": "a", "completion": "b"}),
    "a good answer": ({"prompt": "a", "completion": "b", "label": True}, {"text": "a", "completion": "b"}),
    "a class of a text": ({"text": "a", "label": False}, {"text": "a"}),
    "a prompt written from an input": (
        {"prompt": "a: c d", "input": "c", "history": [], "context": ["a:  c\n", "d"], "completion": "b"},
        {"text": "a: c d", "completion": "b"},
    ),
    "no context": (
        {"prompt": "a", "context": float("nan"), "completion": "b", "reasoning_content": False},
        {"text": "a", "completion": "b"},
    ),
    "reasoning twice": (
        {"messages": [U, {**A, "reasoning": "c\nd"}], "metadata": {"reasoning_content": ["c\r\nd\n"]}},
        {"messages": [U, {**A, "reasoning": "c\nd"}]},
    ),
    "no reasoning": (
        {"messages": CHAT, "reasoning_content": None, "metadata": {"reasoning_content": ""}},
        {"messages": CHAT},
    ),
    "reasoning in a completion and in a column": (
        {"prompt": "a", "completion": "<think>c</think>b", "reasoning_content": "c"},
        {"text": "a", "completion": "<think>c</think>b"},
    ),
    "a text": ({"text": "a", "tools": None}, {"text": "a"}),
    "an empty text": ({"text": ""}, {"text": ""}),
    "tokens": ({"input_ids": [5, 6]}, {"tokens": {"input_ids": [5, 6], "labels": [5, 6]}}),
    "an array of tokens": ({"input_ids": np.array([5, 6])}, {"tokens": {"input_ids": [5, 6], "labels": [5, 6]}}),
    "padding": (
        {"input_ids": [0, 5, 6, 0], "attention_mask": [0, 1, 1, 0], "labels": [0, -100, 6, 0]},
        {"tokens": {"input_ids": [5, 6], "labels": [-100, 6]}},
    ),
    **{
        f"a {name}": (
            {"input_ids": [5, 6, 7], name: [0, 1, 1]},
            {"tokens": {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}},
        )
        for name in ("loss_mask", "completion_mask", "assistant_masks")
    },
    "labels and a mask": (
        {"input_ids": [5, 6, 7], "labels": [5, 6, -100], "loss_mask": (None, 1.0, True)},
        {"tokens": {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}},
    ),
    "documents": (
        {"input_ids": [5, 6, 7], "seq_lengths": [1, 2]},
        {"tokens": {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "seq_lengths": [1, 2]}},
    ),
}
BAD = {
    "no conversation": ({"messages": None}, "'messages' is missing or has nothing in it"),
    "a row of another kind": (
        {"messages": None, "text": "a"},
        "'messages' has nothing in it, but 'text' has. All rows must",
    ),
    "an empty one": ({"conversations": []}, "'conversations' is missing or has nothing in it"),
    "JSON": ({"messages": json.dumps(CHAT)}, "'messages' is the text .* parse it: .*json.loads"),
    "JSON as a prompt": (
        {"prompt": json.dumps([U]), "completion": "b"},
        "'prompt' is a text with messages, .* parse it: .*json.loads",
    ),
    "JSON as a completion": ({"prompt": "[a", "completion": json.dumps([A])}, "'completion' is a text with messages"),
    "a number": ({"messages": 5}, "'messages' is 5, but must be a list of messages"),
    "lists of two lengths": ({"messages": {"role": ["user"], "content": []}}, "but must be a list of messages"),
    "nothing among them": ({"messages": [U, None]}, "message 1 of 'messages' is None"),
    "a text among them": ({"messages": [U, "b"]}, "message 1 of 'messages' is 'b', but must have role"),
    "no role": ({"messages": [{"content": "a"}]}, "message 0 of 'messages' has no role"),
    "no content": ({"messages": [{"role": "user", "content": None}]}, "message 0 of 'messages' has no content"),
    "an assistant without any": ({"messages": [U, {"role": "assistant"}]}, "message 1 of 'messages' has no content"),
    "a missing answer in the middle": (
        {"messages": [*CHAT, U, {"role": "assistant"}, *CHAT]},
        "message 3 of 'messages' has no content",
    ),
    "another content": (
        {"messages": [{"role": "user", "content": 5}]},
        "the content of message 0 of 'messages' is 5, but must be a text",
    ),
    "a sound": (
        {"messages": [{"role": "user", "content": [{"type": "audio", "audio": "x"}]}]},
        "the content of message 0 of 'messages' has .*audio.* and drafts learn from text and images only",
    ),
    "a column of videos": ({"messages": CHAT, "videos": ["x"]}, "has 'videos', and drafts learn from text and images"),
    "more places than images": (
        {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}, A], "images": ["x"]},
        "messages have 2 places for images, but it has 1 images",
    ),
    "more images than marks": (
        {"messages": [{"role": "user", "content": "<image> a"}, A], "images": ["x", "y"]},
        "messages have 1 places for images, but it has 2 images. .* or marks <image>",
    ),
    "a mark without an image": (
        {"messages": [{**U, "content": "<image> a"}, A], "images": []},
        "messages have 1 places for images, but it has 0 images",
    ),
    "more images than places": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, A], "images": ["x", "y"]},
        "messages have 1 places for images, but it has 2 images",
    ),
    "images twice": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}, A], "images": ["x"]},
        "images in its messages and in a column",
    ),
    "two columns of images": ({"messages": CHAT, "image": "x", "images": ["x"]}, "both 'image' and 'images'"),
    "a part without its image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": None}]}, A]},
        "message 0 of 'messages' has .*image_url.*, which has no image",
    ),
    "images that nobody shows": ({"messages": [A], "images": ["x"]}, "no message of the user to show them in"),
    "images beside tokens": ({"input_ids": [1, 2], "images": ["x"]}, "images beside 'input_ids'"),
    "an unknown speaker": ({"conversations": [{"from": "narrator", "value": "a"}]}, "from 'narrator', .* Rename it"),
    "two system prompts": (
        {"messages": [{"role": "system", "content": "s"}, *CHAT], "system": "t"},
        "two different system prompts, in 'system' and in 'messages'",
    ),
    "two columns of system prompts": (
        {"messages": CHAT, "system": "s", "system_prompt": "t"},
        "two different system prompts, in 'system' and in 'system_prompt'",
    ),
    "tools that are none": ({"messages": CHAT, "tools": "f(city)"}, r"'tools' has 'f\(city\)', which is not JSON"),
    "tools of another type": (
        {"messages": CHAT, "tools": [5]},
        r"'tools' is \[5\], but must be a list of JSON schemas",
    ),
    "tools with a date": (
        {"messages": CHAT, "tools": [{"name": "f", "parameters": {"default": datetime(2026, 1, 2)}}]},
        "'tools' has what JSON does not have: Object of type datetime .*load the column as the type `Json`",
    ),
    "calls with a date": (
        {
            "messages": [
                U,
                {**A, "tool_calls": [{"function": {"name": "f", "arguments": {"day": datetime(2026, 1, 2)}}}]},
            ]
        },
        "a tool call of message 1 of 'messages' has what JSON does not have",
    ),
    "template arguments of another type": (
        {"messages": CHAT, "chat_template_kwargs": [1]},
        r"'chat_template_kwargs' is \[1\], but must be a dictionary",
    ),
    "an argument that is not the template's": (
        {"messages": CHAT, "chat_template_kwargs": {"add_generation_prompt": True}},
        "'chat_template_kwargs' has 'add_generation_prompt', which is set here",
    ),
    "calls of another type": ({"messages": [U, {**A, "tool_calls": ["f"]}]}, "'f' among its tool_calls"),
    "calls that are none": (
        {"messages": [U, {**A, "tool_calls": "f(city)"}]},
        r"tool_calls of message 1 of 'messages'\" has 'f\(city\)', which is not JSON",
    ),
    "no text": ({"text": None}, "'text' is missing or has nothing in it"),
    "a number as text": ({"text": 5}, "'text' is 5, but must be a text"),
    "a system prompt beside a text": (
        {"text": "a", "system": "s"},
        "has 'system' beside a text, but only conversations",
    ),
    "tools beside a text": (
        {"prompt": "a", "completion": "b", "tools": [TOOL]},
        "has 'tools' beside a text, but only",
    ),
    "tools under another name": (
        {"messages": CHAT, "tool_defs": [TOOL]},
        "it has 'tool_defs', but tools are read from 'tools'. Rename the column",
    ),
    "a mask of another kind": (
        {"input_ids": [5, 6, 7], "prompt_mask": [1, 1, 0]},
        r"it has 'prompt_mask', but masks are read from \['attention_mask', .*\]. Rename the column, or remove it",
    ),
    "a mask beside a conversation": ({"messages": CHAT, "loss_mask": [0, 1]}, "'loss_mask' beside 'messages', but"),
    "Alpaca's input": (
        {"prompt": "a", "input": "c", "completion": "b"},
        "it has 'input' beside 'prompt', which does not have it. Write it into",
    ),
    "Dolly's context": (
        {"prompt": "a", "context": "c", "completion": "b"},
        "it has 'context' beside 'prompt', which does not have it",
    ),
    "its history": ({"prompt": "a", "history": [["c", "d"]], "completion": "b"}, "it has 'history' beside 'prompt'"),
    "reasoning in a column": (
        {"messages": [{**U, "content": "c\nd"}, A], "reasoning_content": "c\nd"},
        "it has 'reasoning_content', which is not in its answer, .* Write it into the assistant's message",
    ),
    "reasoning beside a completion": (
        {"prompt": "a", "completion": "b", "reasoning_content": "c"},
        "not in its answer",
    ),
    "reasoning beside messages of a completion": (
        {"prompt": [U], "completion": [A], "reasoning_content": "c"},
        "not in its answer",
    ),
    "reasoning where speculators' script wrote it": (
        {"conversations": SHAREGPT, "metadata": {"idx": 0, "reasoning_content": "c"}},
        "it has 'reasoning_content' in 'metadata', which is not in its answer",
    ),
    "a prompt twice": ({"prompt": [U], "completion": CHAT}, "its completion begins with the prompt again"),
    "two contents": (
        {"messages": [{**U, "value": "c"}, A]},
        "message 0 of 'messages' has two contents, 'a' and 'c'. Remove one",
    ),
    "half an answer": (
        {"messages": [U, {**A, "content": [{"type": "text", "text": "b", "weight": 0}]}]},
        "message 1 of 'messages' is to be learned in part",
    ),
    "characters of an answer": (
        {"messages": [U, {**A, "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}]},
        "message 1 of 'messages' is to be learned in part",
    ),
    "a bad answer": (
        {"prompt": "a", "completion": "b", "label": False},
        r"its 'label' is false, so its answer is a bad example\. Remove such rows \(dataset.filter\(lambda row: row\['label'\]\)\)",
    ),
    "a bad answer in LLaMA-Factory's form": ({"conversations": SHAREGPT, "kto_tag": False}, "its 'kto_tag' is false"),
    "no completion": ({"prompt": "a", "completion": None}, "'completion' is missing or has nothing in it"),
    "half a conversation": ({"prompt": [U], "completion": "b"}, "one of 'prompt' and 'completion' is a text"),
    "a completion of the user": (
        {"prompt": [U], "completion": [{**U, "content": "c"}]},
        "no message of the assistant",
    ),
    "a call that is none": (
        {"conversations": [SHAREGPT[0], {"from": "function_call", "value": "5"}]},
        "message 1 of 'conversations' is '5', but 'function_call' must say a tool call with a name, as JSON",
    ),
    **{
        f"a call that is {'not ' * (1 - learned)}learned beside its text": (
            {"messages": [U, {**A, "loss": not learned}, {**SAID, "loss": bool(learned)}]},
            "message 2 of 'messages', a tool call, is joined to the message before it, which is to be learned in part",
        )
        for learned in (0, 1)
    },
    "two reasonings": (
        {"messages": [U, {**A, "reasoning_content": "c"}, {**SAID, "reasoning_content": "d"}]},
        "message 2 of 'messages', a tool call, is joined to the message before it, and both have 'reasoning_content'",
    ),
    "no tokens": ({"input_ids": []}, "'input_ids' is missing or has nothing in it"),
    "a text as tokens": ({"input_ids": "abc"}, "'input_ids' is 'abc', but must be a list of token ids"),
    "half tokens": ({"input_ids": [5, 6.5]}, "'input_ids' has 6.5, but"),
    "fewer labels": ({"input_ids": [5, 6], "labels": [5]}, "'labels' has 1 entries, but there are 2 tokens"),
    "a longer mask": (
        {"input_ids": [5, 6], "loss_mask": [1, 1, 1]},
        "'loss_mask' has 3 entries, but there are 2 tokens",
    ),
    "a number of tokens": ({"input_ids": 5}, "'input_ids' is 5, but must be a list of token ids"),
    "a number as a mask": (
        {"input_ids": [5, 6], "loss_mask": 1},
        "'loss_mask' is 1, but must be a list of zeros and ones",
    ),
    "-100 in a mask": (
        {"input_ids": [5, 6], "loss_mask": [-100, 1]},
        "has -100, but must be a list of zeros and ones",
    ),
    "texts as a mask": (
        {"input_ids": [5, 6], "loss_mask": ["0", "1"]},
        "has '0', but must be a list of zeros and ones",
    ),
    "documents in a mask": ({"input_ids": [5, 6], "attention_mask": [1, 2]}, "has 2, but must be a list of zeros"),
    "a number as positions": ({"input_ids": [5, 6], "position_ids": 1}, "'position_ids' is 1, but must be a list"),
    "shifted labels": ({"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, "label 0 is 6, but token 0 is 5"),
    "a hole": ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "excludes tokens in the middle"),
    "only padding": ({"input_ids": [0, 0], "attention_mask": [0, 0]}, "excludes tokens in the middle, or all"),
    "documents of another length": ({"input_ids": [5, 6], "seq_lengths": [1]}, "sum to 1, but there are 2 tokens"),
    "documents of less than nothing": (
        {"input_ids": [5, 6], "seq_lengths": [3, -1]},
        "'seq_lengths' has -1, but must",
    ),
    "documents by positions": ({"input_ids": [5, 6], "position_ids": [0, 0]}, "Say where documents end"),
}


@pytest.mark.parametrize("name", GOOD)
def test_rows(name):
    row, expected = GOOD[name]
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


@pytest.mark.parametrize("name", BAD)
def test_rows_that_are_something_else(name):
    row, told = BAD[name]
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

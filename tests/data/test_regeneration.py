import asyncio
import copy
import json

import datasets
import pytest
import torch
from conftest import chat_server, make_gpt2, make_target
from datasets import Dataset, IterableDataset, load_dataset
from messages import assistant, read_answers, user
from seeing import gemma3, make, make_image, make_processor, qwen3_vl, vision_rows
from tokenizers.processors import TemplateProcessing
from trl.chat_template_utils import (
    add_response_schema,
    gemma4_chat_template,
    llama3_1_chat_template,
    qwen3_chat_template,
)

from hf_eagle3.data import ImageReader, RowEncoder, RowError, read_row
from hf_eagle3.data.answers import Output, rows_in
from hf_eagle3.data.conversation import Conversation
from hf_eagle3.data.images import load
from hf_eagle3.data.regeneration import beginnings, has_texts, parse_answer, regenerate_locally
from hf_eagle3.data.server import regenerate_by_server


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FEW = {"max_new_tokens": 2, "do_sample": False}


def regenerate(folder, target, tokenizer, rows, batch_size=1, images=None, **settings):
    """Writes a target's answers to rows, and returns what was written, and the output."""
    output = Output(folder, {})
    pending, kwargs = output.pending(rows), {} if images is None else {"images": images}
    regenerate_locally(target, copy.deepcopy(tokenizer), pending, output, batch_size=batch_size, **kwargs, **settings)
    return (read_answers(folder) if output.done else {}), output


def test_what_a_row_says_goes_into_prompt_request_and_new_row(tmp_path, tokenizer):
    row = {"messages": [user("a")], "system": "s", "tools": [TOOL]}
    row["chat_template_kwargs"] = {"think": 1, "other": None}
    messages = [{"role": "system", "content": "s"}, user("a"), assistant("yes")]
    template_kwargs = {"think": 0, "style": "brief"}
    output = Output(tmp_path / "server", {})
    with chat_server(lambda *args: "yes") as (url, requests):
        pending = output.pending([row], template_kwargs=template_kwargs)
        asyncio.run(regenerate_by_server(url, "m", pending, output, concurrency=1))
    (_, payload), written = requests[0], next(rows_in((tmp_path / "server").glob("*.jsonl")))
    assert payload["messages"] == messages[:2] and payload["tools"] == [TOOL]
    assert payload["chat_template_kwargs"] == written["chat_template_kwargs"] == {"think": 1, "style": "brief"}
    assert written["messages"] == messages and json.loads(written["tools"]) == [TOOL]
    tokenizer, seen = copy.deepcopy(tokenizer), []
    tokenizer.chat_template = "{% if tools %}t{{ think }}{{ style }}{% endif %}" + tokenizer.chat_template
    target, output = make_target("llama"), Output(tmp_path / "target", {})
    generate = target.generate
    target.generate = lambda input_ids, **settings: seen.append(input_ids) or generate(input_ids, **settings)
    pending = output.pending([row], template_kwargs=template_kwargs)
    regenerate_locally(target, tokenizer, pending, output, batch_size=1, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(seen[0][0]) == "t1briefU:s|U:a|A:"
    written = next(rows_in((tmp_path / "target").glob("*.jsonl")))
    assert json.loads(written["tools"]) == [TOOL] and written["chat_template_kwargs"]["think"] == 1


def test_rows_that_a_target_cannot_answer_are_left_out(tmp_path, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token = None
    refusing = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('never') }}{% endif %}"
    without_system = "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}"
    tokenizer.chat_template = refusing + without_system + tokenizer.chat_template
    target = make_gpt2(n_positions=16)
    rows = [{"messages": [user(text)]} for text in ("ab", "no", "abcdefghijklm", "c")]
    rows.append({"messages": [{"role": "system", "content": "s"}, user("a")]})
    written, output = regenerate(tmp_path, target, tokenizer, rows, 2, max_new_tokens=4, do_sample=False)
    assert sorted(written) == [0, 3]
    assert "the chat template refuses it: never" in output.left_out[1]
    assert "more than the target's table of 16 positions" in output.left_out[2]
    assert "the chat template refuses it: it leaves out messages of 'system'" in output.left_out[4]


def test_texts_longer_than_the_target_was_made_for(tmp_path, tokenizer, caplog):
    """Of rotary positions any number can be computed."""
    target, rows = make_target("llama", max_position_embeddings=12), [{"prompt": "a" * n} for n in (10, 11, 12)]
    written, _ = regenerate(tmp_path, target, tokenizer, rows, 2, **FEW)
    assert len(written) == 3 and caplog.text.count("the target was made for") == 1
    assert "Row 1, and maybe others, has 13 tokens with `max_new_tokens=2`, more than 12" in caplog.text


def test_a_tokenizer_of_another_target(tmp_path, tokenizer):
    """Whose tokens would be looked up beyond the end of the embedding."""
    rows = [{"prompt": text} for text in ("abc", "aaa", "9")]
    written, output = regenerate(tmp_path, make_target("llama", vocab_size=30), tokenizer, rows, 2, **FEW)
    told = "token 38, but the target's vocabulary ends at 29. It is '9', of the tokenizer's 96 tokens"
    assert sorted(written) == [0, 1] and told in output.left_out[2]


def test_answers_that_are_missing_are_asked_for(tmp_path, tokenizer):
    """The old ones are not read. The target may return dictionaries."""
    target = make_target("llama")
    target.generation_config.return_dict_in_generate = True
    rows = [{"messages": [user("ab"), {"role": "assistant", "content": None}]}]
    assert sorted(regenerate(tmp_path, target, tokenizer, rows, **FEW)[0]) == [0]


def test_answers_of_a_target_are_what_it_generates(tmp_path, tokenizer):
    target = make_target("llama")
    target.generation_config.eos_token_id = [1, 2, *range(50, 60)]  # so that some answers end
    rows = [{"messages": [user("abc" * i), assistant("old"), user("de"), assistant("old")]} for i in range(1, 8)]
    rows.append({"prompt": [user("abc")], "completion": [assistant("old")]})
    settings = {"max_new_tokens": 6, "do_sample": False}
    written, _ = regenerate(tmp_path, target, tokenizer, rows, 3, **settings)
    assert sorted(written) == list(range(8))
    reasons = []
    for row, content in written.items():
        turns = content["messages"]
        assert len(turns) == (2 if row == 7 else 4)
        for index in range(1, len(turns), 2):
            text = tokenizer.apply_chat_template(turns[:index], tokenize=False, add_generation_prompt=True)
            prompt = tokenizer(text, return_tensors="pt")["input_ids"]
            alone = target.generate(prompt, pad_token_id=0, **settings)[0, prompt.shape[1] :]
            ended = [i for i, token in enumerate(alone.tolist()) if token in target.generation_config.eos_token_id]
            expected = tokenizer.decode(alone[: ended[0]] if ended else alone)
            assert turns[index] == assistant(expected)
            reasons.append("stop" if ended else "length")
    assert set(reasons) == {"stop", "length"}


def test_prompts_of_similar_length_are_answered_together(tmp_path, tokenizer, monkeypatch):
    target, shapes = make_target("llama"), []
    generate = target.generate

    def recorded(**inputs):
        shapes.append((inputs["input_ids"].shape[1], inputs["attention_mask"].sum(dim=1).tolist()))
        return generate(**inputs)

    monkeypatch.setattr(target, "generate", recorded)
    rows = [{"prompt": "a" * (3 if i % 2 else 40)} for i in range(8)]
    assert sorted(regenerate(tmp_path, target, tokenizer, rows, 4, **FEW)[0]) == list(range(8))
    assert len(shapes) == 2
    assert all(lengths == [width] * 4 for width, lengths in shapes), "a batch is padded"


def test_texts_are_continued(tmp_path, tokenizer):
    target, settings = make_target("llama"), {"max_new_tokens": 5, "do_sample": False}
    written, _ = regenerate(tmp_path, target, tokenizer, [{"prompt": "abc", "completion": "old"}], 2, **settings)
    prompt = tokenizer("abc", return_tensors="pt")["input_ids"]
    expected = tokenizer.decode(target.generate(prompt, **settings)[0, 3:])
    assert (written[0]["prompt"], written[0]["completion"]) == ("abc", expected)


def test_special_tokens_of_a_batch_of_texts_and_chats(tmp_path, tokenizer):
    """Are those of each row: a chat template writes its own."""
    target, tokenizer, prompts = make_target("llama"), copy.deepcopy(tokenizer), []
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    generate = target.generate

    def watched(input_ids, attention_mask, **settings):
        prompts.extend(row[seen.bool()].tolist() for row, seen in zip(input_ids, attention_mask))
        return generate(input_ids, attention_mask=attention_mask, **settings)

    target.generate = watched
    regenerate(tmp_path, target, tokenizer, [{"messages": [user("a")]}, {"prompt": "abc"}], 2, **FEW)
    chat = tokenizer.apply_chat_template([user("a")], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert sorted(prompts) == sorted([chat, [1, *tokenizer("abc", add_special_tokens=False)["input_ids"]]])


def test_streams_that_do_not_name_their_columns(tokenizer):
    stream = IterableDataset.from_generator(lambda: ({"text": "abcdef" * i} for i in (1, 2)))
    assert stream.column_names is None and has_texts(stream)
    assert [row["prompt"] for row in beginnings(stream, tokenizer, 4, 2)] == ["abcd"] * 3


@pytest.mark.parametrize(
    "template, answer, is_written",
    [
        (qwen3_chat_template, "<think>\nhm\n</think>\n\nyes", True),
        (gemma4_chat_template, "<|channel>thought\nhm\n<channel|>yes", False),  # only beside tool calls
    ],
)
def test_known_templates_tell_reasoning_from_answers(
    tmp_path, tokenizer, monkeypatch, caplog, template, answer, is_written
):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    monkeypatch.setattr(tokenizer, "decode", lambda *args, **kwargs: answer)
    output = Output(tmp_path, {})
    rows = output.pending([{"messages": [user("a")]}])
    regenerate_locally(make_target("llama"), tokenizer, rows, output, batch_size=1, max_new_tokens=3, do_sample=False)
    answer = read_answers(tmp_path)[0]["messages"][-1]
    assert answer["content"] == "yes" and answer["reasoning_content"] == "hm"
    told = "Training with this chat template cannot learn from row 0, and rows like it: the chat template refuses it: it leaves out"
    assert (told in caplog.text) == (not is_written)


@pytest.mark.parametrize(
    "answers, written, warning",
    [
        (["", "yes"], [("yes", None)], "Row 0 is left out: its answer is empty"),
        (["\n ", "yes"], [("yes", None)], "template reads nothing in its answer"),
        (["<tool_call>\nno json\n</tool_call>", "yes"], [("yes", None)], "cannot be parsed"),
        (["<think>\nhm", "yes"], [("", "hm"), ("yes", None)], ""),
        (["<think>\n", "yes"], [("yes", None)], "template reads nothing in its answer"),
    ],
)
def test_answers_that_are_hard_to_parse(tmp_path, tokenizer, monkeypatch, caplog, answers, written, warning):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = qwen3_chat_template
    texts, target = iter(answers), make_target("llama")
    upcoming = []

    def generate(input_ids, **kwargs):
        upcoming.append(next(texts))
        return torch.cat([input_ids, torch.tensor([[5, 2] if upcoming[-1] else [2, 2]])], dim=1)

    monkeypatch.setattr(target, "generate", generate)
    monkeypatch.setattr(tokenizer, "decode", lambda *args, **kwargs: upcoming[-1])
    output = Output(tmp_path, {})
    rows = output.pending([{"messages": [user(str(i))]} for i in range(2)])
    regenerate_locally(target, tokenizer, rows, output, batch_size=1)
    messages = [row["messages"][-1] for row in read_answers(tmp_path).values()]
    assert [(message["content"], message.get("reasoning_content")) for message in messages] == written
    assert warning in caplog.text


@pytest.mark.parametrize(
    "template, answer, call, reason",
    [
        (llama3_1_chat_template, '{"name": "f", "parameters": {"a": 1}}', {"name": "f", "arguments": {"a": 1}}, None),
        (qwen3_chat_template, '<tool_call>\n{"name": "f"}\n</tool_call>', {"name": "f"}, None),
        (qwen3_chat_template, '<tool_call>\n[{"name": "f"}]\n</tool_call>', None, "without the name of a function"),
    ],
)
def test_tool_calls_of_a_target_in_this_process(tokenizer, monkeypatch, template, answer, call, reason):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    tokenizer = add_response_schema(tokenizer)
    prompt = tokenizer.apply_chat_template([user("a")], tokenize=False, add_generation_prompt=True)
    ending = "<|eot_id|>" if template is llama3_1_chat_template else "<|im_end|>"
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **kwargs: answer + ending * (list(ids)[-1] == 2))
    if reason is not None:
        with pytest.raises(RowError, match=reason):
            parse_answer(tokenizer, [5], 2, prompt)
        return
    message = parse_answer(tokenizer, [5], 2, prompt)
    assert [each["function"] for each in message["tool_calls"]] == [call] and not message["content"]


def test_an_image_that_cannot_be_read_spoils_its_own_row(tmp_path):
    for number, mode in enumerate(("RGB", "CMYK", "RGB")):
        make_image(number).convert(mode).save(tmp_path / f"{number}.jpg")
    (tmp_path / "2.jpg").write_bytes(b"no picture")
    rows = {"image": [str(tmp_path / f"{i}.jpg") for i in range(3)], "messages": [[user("see")]] * 3}
    dataset = Dataset.from_dict(rows).cast_column("image", datasets.Image())
    results = {row.row: row for row in Output(tmp_path / "out", {}).pending(dataset)}
    for row in (0, 1):
        stored = results[row].result()["images"][0]
        assert load(stored).convert("RGB").size == make_image(row).size
    with pytest.raises(RowError, match="cannot be read"):
        results[2].result()


def test_a_conversation_is_not_changed_by_what_is_done_with_it():
    example = {"messages": [user("a"), assistant("old"), user("b")]}
    before = copy.deepcopy(example)
    conversation = Conversation(0, example)
    assert not conversation.answer(assistant("x"), "stop") and conversation.answer(assistant("y"), "stop")
    assert example == before


@pytest.mark.parametrize("family", [gemma3, qwen3_vl])
def test_images_in_this_process(tmp_path, family, caplog):
    target, _ = make(family, 0)
    processor = make_processor(family)
    tokenizer, images = processor.tokenizer, ImageReader(processor)
    output, settings = Output(tmp_path, {}), {"max_new_tokens": 5, "do_sample": False}
    allowed = tokenizer("abcdefgh", add_special_tokens=False)["input_ids"]
    settings["suppress_tokens"] = [token for token in range(len(tokenizer)) if token not in allowed]
    pending = output.pending(vision_rows())
    assert regenerate_locally(target, tokenizer, pending, output, batch_size=3, images=images, **settings) == 1
    written = {row["row"]: row for row in rows_in(tmp_path.glob("rows-*.jsonl"))}
    assert sorted(written) == [0, 1, 2] and not output.left_out and "Row 3 failed: there is no image" in caplog.text
    assert [len(written[row]["images"]) for row in range(3)] == [1, 2, 0]
    encoder = RowEncoder(tokenizer, "messages", images=images)
    for content in written.values():
        encoded, answer = encoder(content), content["messages"][-1]["content"][0]["text"]
        assert tokenizer.decode(encoded["input_ids"]).endswith(f"A:{answer}</s>")
        # The answer is the target's own, of this conversation alone.
        tokens = encoded["input_ids"][: -1 - len(answer)]
        inputs = images.inputs([{**encoded, "input_ids": tokens}], len(tokens))
        alone = target.generate(torch.tensor([tokens]), **inputs, **settings)[0, len(tokens) :]
        assert tokenizer.decode(alone) == answer
    train = load_dataset("json", data_files=str(tmp_path / "rows-*.jsonl"), split="train")
    assert [read_row(row, "messages").messages[-1]["role"] for row in train] == ["assistant"] * 3
    text_only = Output(tmp_path / "texts", {})
    regenerate_locally(target, tokenizer, text_only.pending(vision_rows()), text_only, batch_size=3, **settings)
    assert len(text_only.done) == 1 and "reads text only" in text_only.left_out[0]
    named = [vision_rows()[0], {"images": [], "messages": [user(f"this {processor.image_token}")]}]
    other = Output(tmp_path / "named", {})
    regenerate_locally(target, tokenizer, other.pending(named), other, batch_size=2, images=images, **settings)
    assert len(other.done) == 1 and "has 0 images, but its text has 1 places" in other.left_out[1]

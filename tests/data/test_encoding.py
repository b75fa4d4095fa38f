"""The tokens of a row, and what of them is learned: as TRL's marked templates say it, and without markers."""

import copy
import json
import logging
import re
from functools import partial
from pathlib import Path

import pytest
import trl
from conftest import each_once, make_byte_tokenizer
from datasets import Dataset
from datasets.fingerprint import Hasher
from messages import assistant, learned, user
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from trl.data_utils import apply_chat_template

from hf_eagle3.data import RowEncoder, RowError, encode_rows, encoding
from hf_eagle3.data.encoded import split_documents
from hf_eagle3.data.encoding import has_markers
from hf_eagle3.data.values import UnusableRow
from hf_eagle3.tokenizer import PromptEncoder


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
TOOL = {"name": "weather", "description": "d"}
TOOL["parameters"] = {"type": "object", "properties": {"city": {"type": "string"}}}
RAIN = {"title": "Ulm", "text": "It rains."}
PLAIN = [user("Is it raining?"), assistant("Yes."), user("Thanks"), assistant("Bye.")]
THOUGHTS = [user("Is it?"), assistant("Yes.", reasoning_content="It is."), user("Thanks"), assistant("Bye.")]
QWEN_PROMPT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
RESULT = {"role": "tool", "name": "weather", "content": "rain"}
CALLS = [PLAIN[0], assistant("", tool_calls=[CALL]), RESULT, *PLAIN[1:]]


def byte_tokenizer(template, special=()):
    """A token a byte, and those that look special in a template."""
    special = sorted({"<s>", "</s>", *special, *re.findall(r"<\|[a-z_]+\|>|<[|｜][^<>{}\s]+[|｜]>", template)})
    tokenizer = make_byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": special})
    tokenizer.chat_template = template
    return tokenizer


def unmarked(name):
    return re.sub(r"\{%-? (end)?generation -?%\}", "", TEMPLATES[name])


def answers_of(tokenizer, is_marked=None):
    """An encoder that learns answers, by the tokenizer's own template if `is_marked` is given."""
    encoder = RowEncoder(tokenizer, "messages", assistant_only_loss=True)
    if is_marked is not None:
        encoder.chat_template, encoder.is_marked = None, is_marked
    return encoder


TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8") for path in Path(trl.__file__).parent.glob("chat_templates/*.jinja")
}
MARKED = sorted(name for name, text in TEMPLATES.items() if re.search(r"\{%-? generation -?%\}", text))
# Where a target that is asked by these templates would begin in another way than they write what it has said.
ASKED_IN_ANOTHER_WAY = ("deepseek", "nemotron")


@pytest.mark.parametrize("name", MARKED)
def test_turns_are_found_where_templates_mark_them(name):
    """By rendering a conversation with and without them. What the prompt of an answer holds is not said."""
    tokenizer = byte_tokenizer(TEMPLATES[name])
    marked, found = (answers_of(tokenizer, is_marked)({"messages": PLAIN}) for is_marked in (True, False))
    assert found["input_ids"] == marked["input_ids"]
    if name.startswith(ASKED_IN_ANOTHER_WAY):
        assert found["lost"] == 2 and not learned(tokenizer, found)
        return
    assert found["lost"] == 0
    prompt = tokenizer.apply_chat_template(PLAIN[:1], add_generation_prompt=True, tokenize=False)
    turns = learned(tokenizer, marked), learned(tokenizer, found)
    for of_marks, turn, said in zip(*turns, ("Yes.", "Bye."), strict=True):
        assert said in turn
        before, _, end = of_marks.rpartition(said)
        own, _, own_end = turn.rpartition(said)
        assert before.endswith(own) and prompt.endswith(before.removesuffix(own))
        assert end.strip().startswith(own_end.strip())


@pytest.mark.parametrize("name, conversation, lost", [
    ("qwen3_training", THOUGHTS, 0),  # which keeps reasoning
    ("qwen3", THOUGHTS, 1),  # which drops them from earlier turns
    ("qwen3", PLAIN, 1),  # and adds empty ones to the last
    ("qwen3", PLAIN[:2], 0),
    ("qwen2_5", CALLS, 0),
    ("gptoss", PLAIN, 0),  # the last turn ends with another token than it has in history
    ("phi3", PLAIN, 0),  # ends the text, but not each turn, with EOS
])  # fmt: skip
def test_turns_that_are_not_what_the_target_would_say_are_lost(name, conversation, lost):
    tokenizer = byte_tokenizer(unmarked(name))
    tools = {"tools": [TOOL]} if conversation is CALLS else {}
    encoded = answers_of(tokenizer, is_marked=False)({"messages": conversation, **tools})
    assert encoded["lost"] == lost
    turns = [message for message in conversation if message["role"] == "assistant"][lost:]
    for turn, text in zip(turns, learned(tokenizer, encoded), strict=True):
        assert turn["content"] in text and "user" not in text


UNMARKED = {
    "Llama 2": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} "
        "{{ eos_token }}{% endif %}{% endfor %}",
        [" Yes. </s>", " Bye. </s>"],
    ),
    "Zephyr": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% if loop.last and add_generation_prompt %}"
        "<|assistant|>\n{% endif %}{% endfor %}",
        ["Yes.</s>\n", "Bye.</s>\n"],
    ),
    "SmolLM2": (
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% endif %}",
        ["Yes.<|im_end|>\n", "Bye.<|im_end|>\n"],
    ),
}


@pytest.mark.parametrize("name", UNMARKED)
def test_any_template(name):
    template, expected = UNMARKED[name]
    tokenizer = byte_tokenizer(template)
    encoder = answers_of(tokenizer)
    assert not encoder.is_marked
    assert learned(tokenizer, encoder({"messages": PLAIN})) == expected
    greeting = encoder({"messages": [assistant("Hello."), *PLAIN]}) if name == "SmolLM2" else None
    assert greeting is None or learned(tokenizer, greeting) == expected and greeting["lost"] == 0
    row = {"prompt": PLAIN[:3], "completion": PLAIN[3:]}
    assert learned(tokenizer, RowEncoder(tokenizer, "prompt", assistant_only_loss=True)(row)) == expected[1:]
    assert learned(tokenizer, RowEncoder(tokenizer, "prompt")(row)) == expected[1:]
    everything = RowEncoder(tokenizer, "prompt", completion_only_loss=False)(row)
    assert everything["labels"] == everything["input_ids"]


def test_tokens_that_a_prompt_alone_does_not_have(tokenizer):
    """Where its last token grows together with the answer, the target is never asked for that token."""
    pieces = ["<unk>", "U", "A:", "A", "a", ":", "Ab"]
    model = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex("Ab|A:|U|A|a|:"), "isolated")
    merging = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")
    merging.chat_template = (
        "{% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}A{% endif %}"
    )
    encoder = answers_of(merging)
    assert encoder({"messages": [user("a"), assistant("b")]})["lost"] == 1
    assert encoder({"messages": [user("a"), assistant("a")]})["lost"] == 0
    encoded = encoder({"messages": [user("a"), assistant("ba:"), user("a"), assistant("bA:")]})
    assert encoded["lost"] == 0 and learned(merging, encoded) == ["a :", "A:"]


def test_rows_with_lost_turns_are_counted_and_more_than_a_few_refused(caplog):
    tokenizer = byte_tokenizer(unmarked("qwen3_training") + " ")
    tokenizer.chat_template = TEMPLATES["qwen3"].replace("<think>", "<hm>")  # which TRL does not know
    encoder = answers_of(tokenizer)
    one_turn = [PLAIN[:2]] * 39
    with caplog.at_level(logging.WARNING):
        dataset = encode_rows(Dataset.from_dict({"messages": [*one_turn, PLAIN]}), encoder, "train")
    assert "In 1 of 40 rows of the train data (the first are [39]) assistant turns cannot be found." in caplog.text
    assert len(learned(tokenizer, dataset[39])) == 1
    with pytest.raises(ValueError, match=r"In 3 of 42 rows .*first are \[39, 40, 41\].*`chat_template_path`"):
        encode_rows(Dataset.from_dict({"messages": [*one_turn, PLAIN, PLAIN, PLAIN]}), encoder, "train")
    stream = Dataset.from_dict({"messages": [PLAIN] * 20}).to_iterable_dataset()
    with pytest.raises(ValueError, match="assistant turns cannot be found"):
        list(encode_rows(stream, encoder, "train"))


def test_broken_rows_of_streams_are_counted_and_more_than_a_few_refused(caplog):
    def encoded(texts):
        rows = Dataset.from_dict({"text": texts}).to_iterable_dataset()
        return encode_rows(rows, RowEncoder(byte_tokenizer(""), "text"), "train")

    a_few = ["a", *[None] * 5, *["a"] * 113, None]
    stream = encoded(a_few)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):  # each pass counts anew
            assert len(list(stream)) == 114
    assert [record.getMessage().split()[1] for record in caplog.records] == ["1", "2", "4"] * 3
    with pytest.raises(ValueError, match=r"Row 118 .* 6 of 119 rows so far .*first are \[1, 2, 3\]"):
        list(encoded(a_few[:-2] + [None]))
    told = "Row 0 of the train data cannot be learned from: 'text' is missing or has nothing in it"
    with pytest.raises(ValueError, match=told):
        next(iter(encoded([None, "a"])))
    # Later passes may begin with a broken row.
    rows = Dataset.from_dict({"text": ["a", None, None, "a"]}).to_iterable_dataset().shuffle(seed=1, buffer_size=4)
    stream, first = encode_rows(rows, RowEncoder(byte_tokenizer(""), "text"), "train"), []
    for epoch in range(4):
        rows.set_epoch(epoch)
        stream.set_epoch(epoch)
        first.append(next(iter(rows))["text"])
        assert len(list(stream)) == 2
    assert first[0] == "a" and None in first


def test_rows_that_another_version_has_encoded_are_not_taken_from_the_cache(tokenizer, monkeypatch):
    """`datasets` sees what an encoder holds, but not its code."""
    hashes = [Hasher.hash(RowEncoder(tokenizer, "messages")) for _ in range(2)]
    monkeypatch.setattr(encoding, "__version__", "0.0.1")
    hashes.append(Hasher.hash(RowEncoder(tokenizer, "messages")))
    assert hashes[0] == hashes[1] != hashes[2]


def test_slow_tokenizers():
    """They do not say where their tokens are."""
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}{% else %}A{% generation %}{{ m.content }}</s>"
        "{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    )
    encoder = answers_of(tokenizer)
    assert encoder.is_marked and learned(tokenizer, encoder({"messages": PLAIN})) == ["Yes.</s>", "Bye.</s>"]


def test_templates_of_processors():
    """Write contents only where they are lists of parts, and drop texts in silence."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = byte_tokenizer(template)
    assert learned(tokenizer, answers_of(tokenizer)({"messages": PLAIN})) == ["Yes.", "Bye."]
    assert tokenizer.decode(PromptEncoder(tokenizer).chat(PLAIN[:1])) == "<|user|>Is it raining?<|assistant|>"


SPECIAL = {"nothing": None, "BOS": "<s> $A", "EOS": "$A </s>", "both": "<s> $A </s>"}


@pytest.mark.parametrize("puts", SPECIAL)
@pytest.mark.parametrize("text", ["abc", "<s>abc", "abc</s>", "<s>abc</s>", "abc</s>\n"])
def test_texts_begin_and_end_once(puts, text):
    tokenizer = byte_tokenizer("")
    if SPECIAL[puts] is not None:
        ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
        processor = processors.TemplateProcessing(single=SPECIAL[puts], special_tokens=ids)
        tokenizer.backend_tokenizer.post_processor = processor
    bos = "<s>" if puts in ("BOS", "both") or text.startswith("<s>") else ""
    encode = RowEncoder(tokenizer, "text")
    expected = bos + text.removeprefix("<s>") + ("" if "</s>" in text else "</s>")
    encoded = encode({"text": text})
    assert tokenizer.decode(encoded["input_ids"]) == expected and encoded["labels"] == encoded["input_ids"]
    assert tokenizer.decode(PromptEncoder(tokenizer).text(text)) == bos + text.removeprefix("<s>")
    pair = RowEncoder(tokenizer, "prompt")({"prompt": "ab", "completion": "c"})
    assert learned(tokenizer, pair) == ["c</s>"]


@pytest.mark.parametrize("assistant_only_loss", [False, True])
def test_what_a_template_leaves_out_is_refused(assistant_only_loss):
    prompt, within = "Be brief.", assistant("<think>\nIt is.\n</think>\n\nYes.")
    beside = assistant("I look at the weather.", tool_calls=[CALL])
    for name, row, left_out in (
        ("phi3", {"messages": CALLS, "tools": [TOOL]}, "tool calls"),
        ("phi3", {"messages": [{"role": "tool", "content": prompt}, *PLAIN]}, "messages of 'tool'"),
        ("phi3", {"messages": [{"role": "system", "content": prompt, "tools": [TOOL]}, *PLAIN]}, "tools of a message"),
        ("llama3_1", {"messages": [PLAIN[0], assistant("Yes.", tool_calls=[])]}, None),
        ("gptoss", {"messages": [PLAIN[0], assistant("Yes.", reasoning_content="", tool_calls=[])]}, None),
        ("gptoss", {"messages": [PLAIN[0], assistant("", tool_calls=[CALL, CALL])]}, "tool calls after a message's"),
        ("gptoss", {"messages": [PLAIN[0], assistant("Both.", tool_calls=[CALL, CALL])]}, "tool calls after a mess"),
        ("qwen3", {"messages": [PLAIN[0], assistant("Both.", tool_calls=[CALL, CALL])]}, None),
        *(
            (name, {"messages": [PLAIN[0], beside, *CALLS[2:]]}, what)
            for name, what in (
                ("llama3_1", "the text beside a tool call"),
                ("lfm2", "tool calls"),
                ("muse_glimmer", "the text beside a tool call"),
                ("qwen3", None),
                ("gptoss", None),  # drops it from earlier turns, as the analysis that it is there
            )
        ),
        ("llama3_1", {"messages": [PLAIN[0], assistant(" ", tool_calls=[CALL])]}, None),
        ("llama3_1", {"messages": [PLAIN[0], assistant(json.dumps(CALL), tool_calls=[CALL])]}, None),
        ("phi3", {"messages": [PLAIN[0], assistant(str([CALL, CALL]), tool_calls=[CALL, CALL])]}, None),
        ("qwen3", {"messages": [PLAIN[0], assistant("", tool_calls=[CALL, CALL])]}, None),
        ("phi3", {"messages": PLAIN, "tools": [TOOL]}, "the `tools`"),
        ("phi3", {"messages": PLAIN, "tools": []}, None),
        ("qwen3", {"messages": PLAIN[:2], "chat_template_kwargs": {"documents": [RAIN]}}, "the `documents`"),
        ("phi3", {"messages": THOUGHTS[:2]}, "the assistant's reasoning"),
        ("phi3", {"messages": THOUGHTS}, "the assistant's reasoning"),
        ("qwen3", {"messages": THOUGHTS}, None),  # templates may drop those of earlier turns
        ("deepseekv3", {"messages": [PLAIN[0], within]}, r"the assistant's reasoning \(what is before </think>\)"),
        ("deepseekv3", {"messages": [PLAIN[0], within, *PLAIN[2:]]}, r"the assistant's reasoning \(what is before"),
        ("qwen3", {"messages": [PLAIN[0], within]}, None),
        ("phi3", {"messages": [PLAIN[0], within]}, None),
        ("deepseekv3", {"messages": [PLAIN[0], assistant("<think>\n\n</think>Yes.")]}, None),
        ("qwen3", {"messages": [{"role": "critic", "content": prompt}, *PLAIN]}, "messages of 'critic'"),
        ("qwen3", {"messages": CALLS, "tools": [TOOL]}, None),
        ("qwen2_5", {"messages": [{"role": "system", "content": QWEN_PROMPT}, *PLAIN]}, None),  # the default one
        ("llama3", {"messages": [{"role": "critic", "content": prompt}, *PLAIN]}, None),
        ("llama3", {"messages": [{"role": "system", "content": ""}, *PLAIN]}, None),
    ):
        encoder = RowEncoder(byte_tokenizer(TEMPLATES[name]), "messages", assistant_only_loss=assistant_only_loss)
        if left_out is None:
            assert encoder(row)["lost"] == 0
            continue
        with pytest.raises(RowError, match=f"the chat template refuses it: it leaves out {left_out}"):
            encoder(row)


def test_reasoning_that_a_template_takes_only_in_contents():
    """As TRL's version of DeepSeek-R1's. Regeneration has them apart, and the original leaves both out."""
    tokenizer, apart = byte_tokenizer(TEMPLATES["deepseek_r1_distill"]), assistant("Yes.", reasoning_content="It is.")
    within = assistant("<think>\nIt is.\n</think>\n\nYes.")
    encoder = answers_of(tokenizer)
    assert encoder({"messages": [PLAIN[0], apart]}) == encoder({"messages": [PLAIN[0], within]})
    with pytest.raises(RowError, match="it leaves out the assistant's reasoning"):
        RowEncoder(tokenizer, "messages")({"messages": [PLAIN[0], apart]})
    prompt = PromptEncoder(tokenizer)
    turns = [PLAIN[0], apart, PLAIN[2]]  # to be answered
    text = prompt.render(turns, add_generation_prompt=True)
    assert "It is." not in text and not prompt.check_written(turns, text, add_generation_prompt=True)


@pytest.mark.parametrize("name, assistant_only_loss, drops_reasoning", [
    ("qwen3", False, True),
    ("qwen3", True, False),  # TRL's version writes it
    ("glm4moe", True, True),
    ("lfm2_2_5_v2", True, True),
    ("nemotron_3_nano", True, True),
])  # fmt: skip
def test_reasoning_that_a_template_writes_only_in_the_last_turn_is_counted(
    name, assistant_only_loss, drops_reasoning, caplog
):
    encoder = RowEncoder(byte_tokenizer(TEMPLATES[name]), "messages", assistant_only_loss=assistant_only_loss)
    within = [THOUGHTS[0], assistant("<think>\nIt is.\n</think>\n\nYes."), *THOUGHTS[2:]]
    assert encoder({"messages": within})["drops_reasoning"] == drops_reasoning
    rows = Dataset.from_dict({"messages": [PLAIN[:2], THOUGHTS, THOUGHTS[:2], THOUGHTS]})
    told = "In 2 of 4 rows of the train data (the first are [1, 3]) the chat template leaves out what earlier turns"
    with caplog.at_level(logging.WARNING):
        encode_rows(rows, encoder, "train")
    assert (told in caplog.text) == drops_reasoning
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        list(encode_rows(rows.to_iterable_dataset(), encoder, "train"))
    assert ("In 1 of 2 rows of the train data" in caplog.text) == drops_reasoning


@pytest.mark.parametrize("assistant_only_loss", [False, True])
def test_templates_get_what_those_of_trl_get(assistant_only_loss):
    """Documents are an argument like others, as for retrieval-augmented generation."""
    template = "{{ tools }}{% for each in documents %}{{ each.title }}: {{ each.text }}{% endfor %}{{ style }}"
    tokenizer = byte_tokenizer(template + TEMPLATES["qwen3_training"])
    row = {"messages": PLAIN, "chat_template_kwargs": {"documents": [RAIN, RAIN], "style": "brief"}, "tools": [TOOL]}
    encoder = RowEncoder(tokenizer, "messages", assistant_only_loss=assistant_only_loss)
    assert tokenizer.decode(encoder(row)["input_ids"]) == apply_chat_template(row, tokenizer, tools=[TOOL])["text"]
    row["chat_template_kwargs"] = json.dumps(row["chat_template_kwargs"])
    assert "Ulm: It rains.Ulm: It rains.brief" in tokenizer.decode(encoder(row)["input_ids"])


def test_templates_that_take_arguments_as_text():
    encoder = RowEncoder(byte_tokenizer(TEMPLATES["deepseekv3"]), "messages")
    assert '{"city": "Ulm"}' in encoder.tokenizer.decode(encoder({"messages": CALLS})["input_ids"])


@pytest.mark.parametrize("name, cut", [("gptoss", True), ("qwen3", False)])
def test_prompts_that_a_template_writes_in_another_way_before_an_answer(name, cut):
    """gpt-oss's leaves out what an assistant thought before a call, once it has answered. What the tool said would be learned."""
    thought = [PLAIN[0], {**CALLS[1], "reasoning_content": "Look."}, CALLS[2]]
    encoder = RowEncoder(tokenizer := byte_tokenizer(TEMPLATES[name]), "prompt")
    row = {"prompt": CALLS[:3], "completion": PLAIN[1:2], "tools": [{"type": "function", "function": TOOL}]}
    (said,) = learned(tokenizer, encoder(row))
    assert "Yes." in said and "rain" not in said
    row["prompt"] = thought
    if cut:
        with pytest.raises(UnusableRow, match="writes its prompt in another way if the completion follows"):
            encoder(row)
    else:
        assert "rain" not in learned(tokenizer, encoder(row))[0]


def test_what_cannot_be_encoded():
    tokenizer = byte_tokenizer("{% if messages | length > 2 %}{{ raise_exception('never') }}{% endif %}abc")
    encoder, answers = partial(RowEncoder, tokenizer), answers_of(tokenizer)
    of_another = "ends at 4. It is 'a', of the tokenizer's 258 tokens. Pass the target's own tokenizer"
    for encode, row, told in (
        (encoder("messages"), {"messages": PLAIN}, "the chat template refuses it: never"),
        (answers, {"messages": PLAIN[:1]}, r"no message with the role 'assistant', only \['user'\]"),
        (answers, {"messages": PLAIN[1:2]}, "no assistant turn in it answers anyone"),
        (encoder("text", vocab_size=5), {"text": "abc"}, of_another),
        (encoder("input_ids", vocab_size=5), {"input_ids": [7, 8, 9]}, "ends at 4. Tokenize it for this target"),
        (encoder("text", formatting_func=lambda row: [row["text"]]), {"text": "a"}, "returned list, but gets one row"),
    ):
        with pytest.raises(RowError, match=told):
            encode(row)


def test_rows_that_teach_nothing_are_dropped_and_counted(caplog):
    tokenizer = copy.deepcopy(byte_tokenizer(""))
    rows = {"input_ids": [[5, 6, 7]] * 3, "labels": [[5, 6, 7], [-100] * 3, [-100, -100, 7]]}
    encoder = RowEncoder(tokenizer, "input_ids")
    with caplog.at_level(logging.WARNING):
        assert len(encode_rows(Dataset.from_dict(rows), encoder, "train")) == 2
    assert "1 of 3 rows of the train data have nothing to learn and are dropped (the first are [1])" in caplog.text
    with pytest.raises(ValueError, match="1 of 1 rows of the train data have nothing to learn"):
        encode_rows(Dataset.from_dict(rows).select([1]), encoder, "train")


def test_a_few_conversations_may_have_no_answer(tokenizer, caplog):
    """As in ShareGPT. A stream leaves them out, too."""
    said, asked = [user("a"), assistant("b")], [user("a")]
    rows = Dataset.from_list([{"messages": each} for each in [said] * 57 + [[], asked, [assistant("hello")]]])
    refused = [user("a"), {"role": "assistant", "content": None, "refusal": "No."}]  # as in logs of OpenAI's
    encoder = answers_of(tokenizer)
    with caplog.at_level(logging.WARNING):
        assert len(encode_rows(rows, encoder, "train")) == 58  # the template has markers, which a greeting has, too
    told = "2 of 60 rows of the train data cannot be learned from and are dropped (the first are [57, 58]). Row 57: 'messages' is"
    assert told in caplog.text and "Row 58: it has no message with the role 'assistant'" in caplog.text
    with pytest.raises(ValueError, match=r"2 of 5 rows .* cannot be learned from. Row 2: 'messages' is missing"):
        encode_rows(rows.select(range(55, 60)), encoder, "train")
    mixed = Dataset.from_list([{"messages": said, "text": None}] * 59 + [{"messages": None, "text": "ab"}])
    with pytest.raises(ValueError, match=r"1 of 60 rows .* cannot be learned from. .* but 'text' has"):
        encode_rows(mixed, encoder, "train")
    wrong = Dataset.from_list([{"messages": each} for each in [said] * 58 + [[], [{"role": "user", "content": None}]]])
    with pytest.raises(ValueError, match=r"2 of 60 rows .* cannot be learned from. .* Row 59: message 0 of"):
        encode_rows(wrong, encoder, "train")
    assert len(encode_rows(rows, RowEncoder(tokenizer, "messages"), "train")) == 59
    logged = Dataset.from_list([{"messages": each} for each in [said] * 59 + [refused]])
    assert len(encode_rows(logged, encoder, "train")) == 59


def test_a_template_may_refuse_a_few_conversations(caplog):
    """As one whose roles do not alternate, or whose text beside a tool call the template leaves out."""
    said, cut = PLAIN[:2], [PLAIN[0], assistant("I look.", tool_calls=[CALL]), *CALLS[2:]]
    template = "{% if messages | length > 1 and messages[1].role == 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    tokenizer = byte_tokenizer(template + TEMPLATES["llama3_1"])
    for assistant_only_loss in (False, True):
        encoder = RowEncoder(tokenizer, "messages", assistant_only_loss=assistant_only_loss)
        rows = Dataset.from_list([{"messages": each} for each in [*[said] * 58, cut, [user("a"), user("b")]]])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert len(encode_rows(rows, encoder, "train")) == 58
        told = "2 of 60 rows of the train data cannot be learned from and are dropped (the first are [58, 59]). Row 58: the chat"
        assert told in caplog.text and "it leaves out the text beside a tool call" in caplog.text
        assert "Row 59: the chat template refuses it: roles must alternate" in caplog.text
        with pytest.raises(ValueError, match=r"2 of 20 rows .* Fix or remove them. Up to 5% of such rows are dropped"):
            encode_rows(rows.select(range(40, 60)), encoder, "train")


def test_empty_answers_teach_nothing(tokenizer):
    answers = answers_of(tokenizer)
    for content in ("", " \n"):
        with pytest.raises(UnusableRow, match="its answers are empty"):
            answers({"messages": [user("a"), assistant(content)]})
    row = {"messages": [user("a"), assistant(""), user("b"), assistant("c")]}
    assert learned(tokenizer, answers(row)) == ["c</s>"]
    zephyr = byte_tokenizer(UNMARKED["Zephyr"][0])
    without_markers = answers_of(zephyr)
    assert not without_markers.is_marked and learned(zephyr, without_markers(row)) == ["c</s>\n"]
    takes_calls = answers_of(byte_tokenizer(TEMPLATES["qwen3"]))
    assert takes_calls({"messages": [user("a"), assistant("", tool_calls=[CALL])]})["input_ids"]
    for prompt, completion in (("a", ""), ([user("a")], [assistant("")])):
        with pytest.raises(UnusableRow, match="its completion is empty"):
            RowEncoder(tokenizer, "prompt")({"prompt": prompt, "completion": completion})


def test_a_row_teaches_from_its_third_token_on(tokenizer):
    """A draft reads the state at one token and the next token, and predicts the third. So does each packed document."""
    rows = {"input_ids": [[5], [5, 6], [5, 6, 7], [5, 6, 7]], "labels": [[5], [5, 6], [5, 6, -100], [-100, -100, 7]]}
    encoder = RowEncoder(tokenizer, "input_ids")
    assert encode_rows(Dataset.from_dict(rows), encoder, "train")["input_ids"][:] == [[5, 6, 7]]
    packed = Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 2, "seq_lengths": [[2, 2], [1, 3]]})
    encoded = encode_rows(packed, encoder, "train")
    assert encoded["seq_lengths"][:] == [[1, 3]]
    assert split_documents(encoded, "train")["input_ids"][:] == [[6, 7, 8]]


LOSS_MARKS = ("train", "training", "trainable", "train_on_turn", "loss_mask", "loss", "loss_scale")


@pytest.mark.parametrize(
    "key, value, template",
    [
        ("weight", 0, "marked"),
        ("weight", 0.0, "unmarked"),
        ("masked", True, "marked"),
        *((key, False, template) for key, template in each_once(LOSS_MARKS, ["unmarked", "marked"])),
    ],
)
def test_turns_that_are_not_to_be_learned(template, key, value):
    tokenizer = byte_tokenizer(TEMPLATES["qwen2_5_training"] if template == "marked" else UNMARKED["Zephyr"][0])
    encoder = answers_of(tokenizer)
    assert encoder.is_marked == (template == "marked")
    first, second = learned(tokenizer, encoder({"messages": PLAIN}))
    for other in (None, not value):
        row = {"messages": [PLAIN[0], {**PLAIN[1], key: value}, PLAIN[2], {**PLAIN[3], key: other}]}
        assert learned(tokenizer, encoder(row)) == [second]
    row = {"messages": [{**PLAIN[0], key: value}, PLAIN[1], PLAIN[2], {**PLAIN[3], key: value}]}
    assert learned(tokenizer, encoder(row)) == [first]
    with pytest.raises(RowError, match=f"{key!r}.* all messages are learned. Pass `assistant_only_loss=True`"):
        RowEncoder(tokenizer, "messages")(row)
    pair = {"prompt": row["messages"][:1], "completion": row["messages"][1:2]}
    assert "Yes." in learned(tokenizer, RowEncoder(tokenizer, "prompt")(pair))[0]  # prompts are not learned
    for wrong in ("false", [0, 1]):
        told = re.escape(f"a message has {wrong!r} as {key!r}, but must have a number, true or false")
        with pytest.raises(RowError, match=told):
            encoder({"messages": [PLAIN[0], {**PLAIN[1], key: wrong}]})
    none = {"messages": [PLAIN[0], {**PLAIN[1], key: value}]}
    assert not learned(tokenizer, encoder(none))


def test_a_template_for_tools_without_markers():
    tokenizer = byte_tokenizer(marked := TEMPLATES["qwen2_5_training"])
    tokenizer.chat_template = {"default": marked, "tool_use": unmarked("qwen2_5_training")}
    encoder, row = answers_of(tokenizer), {"messages": CALLS, "tools": [TOOL]}
    assert encoder.is_marked and encoder(row) == answers_of(byte_tokenizer(marked), is_marked=False)(row)


def test_turns_that_are_not_marked_one_by_one():
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    encoder = answers_of(byte_tokenizer(template))
    with pytest.raises(RowError, match="marks 2 of its 1 assistant turns, so those that are not to be"):
        encoder({"messages": [PLAIN[0], {**PLAIN[1], "weight": 0}]})


def test_padding_without_a_mask(tokenizer):
    rows = {"input_ids": [0, 5, 0, 6, 0, 0], "labels": [0, -100, 0, 6, 0, 0]}
    encoded = RowEncoder(tokenizer, "input_ids")(rows)
    assert (encoded["input_ids"], encoded["labels"]) == ([5, 0, 6], [-100, 0, 6])
    rows = {"input_ids": [0, 5, 0], "attention_mask": [1, 1, 1]}
    assert RowEncoder(tokenizer, "input_ids")(rows)["input_ids"] == [0, 5, 0]
    assert RowEncoder(tokenizer, "input_ids")({**rows, "attention_mask": None})["input_ids"] == [5]


@pytest.mark.parametrize("padding, bos, tokens, kept", [
    ("</s>", "<s>", [5, 6, 2], [5, 6, 2]),
    ("</s>", "<s>", [2, 5, 2, 2, 6], [2, 5, 2, 2, 6]),
    ("</s>", "<s>", [2, 2, 5, 6, 2, 2, 2], [5, 6, 2]),
    (None, "<s>", [5, 6, 2, 2], [5, 6, 2]),
    ("</s>", "</s>", [2, 2, 2, 5, 6], [2, 5, 6]),  # as GPT-2's
    ("<unk>", "<s>", [3, 3, 5, 6, 7, 3, 3], [5, 6, 7]),
    ("<unk>", "<s>", [5, 6, 2, 2], [5, 6, 2, 2]),
])  # fmt: skip
def test_padding_that_may_be_text(tokenizer, caplog, padding, bos, tokens, kept):
    """A single EOS ends a text, or the one before it in packed rows. Of a run only the first is learned."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token, tokenizer.bos_token = padding, bos
    tokenizer.add_special_tokens({"unk_token": "<unk>"})
    tokens, kept = ([tokenizer.unk_token_id if token == 3 else token for token in each] for each in (tokens, kept))
    encoder, rows = RowEncoder(tokenizer, "input_ids"), {"input_ids": [[5, 6, 7, 2], tokens], "labels": [None, tokens]}
    for dataset in (Dataset.from_dict(rows), Dataset.from_dict(rows).to_iterable_dataset()):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            encoded = list(encode_rows(dataset, encoder, "train"))
        assert encoded[1:] == [{"input_ids": kept, "labels": kept}]
        told = "1 of 2 rows of the train data (the first are [1]) have no `attention_mask` and begin or end with a run"
        assert (told in caplog.text) == (tokens != kept)
    assert encoder({"input_ids": tokens, "attention_mask": [1] * len(tokens)})["input_ids"] == tokens


def test_markers_are_seen_in_all_ways_of_writing_them():
    for template, expected in (
        ("{%- generation -%}", True),
        ({"default": "{% generation %}"}, True),
        ({"tool_use": "{% generation %}"}, False),
        ("generation", False),
        (None, False),
    ):
        tokenizer = byte_tokenizer("")
        tokenizer.chat_template = template
        assert has_markers(tokenizer) == expected

"""Prompts of tasks, files and folders."""

import json
from unittest.mock import Mock

import pytest
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError
from huggingface_hub.errors import HTTPError
from seeing import IMAGE, NUM_PIECES, gemma3, make_image, make_processor

from hf_eagle3.data import ImageReader
from hf_eagle3.evaluation import TASKS, load_prompts, read_prompts, tasks
from hf_eagle3.evaluation.results import TITLES
from hf_eagle3.evaluation.tasks import GROUPS, OFFLINE, expand, standard_library, task_name


# A row of each task with a form of its own, and the prompt that it makes.
ROWS = {
    "mt_bench": ({"prompt": ["first", "second"]}, "first"),
    "humaneval": ({"prompt": "def f():"}, "Complete this function.\n\ndef f():"),
    "gsm8k": ({"question": "how many"}, "how many"),
    "alpaca": ({"instruction": "add", "input": "1 2"}, "add\n\n1 2"),
    "cnn_dm": ({"article": "a story"}, "Summarize:\n\na story"),
    "math500": ({"problem": "solve"}, "solve"),
}
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def test_every_task_has_a_title():
    assert TITLES.keys() == {name for name in (*TASKS, OFFLINE) if name not in GROUPS["spec_bench"]}


@pytest.mark.parametrize("name", TASKS)
def test_tasks_of_the_hub(name, tokenizer, monkeypatch):
    row, said = ROWS.get(name, ({"prompt": "x y"}, "x y"))
    asked = []

    def load_dataset(path, **kwargs):
        asked.append((path, kwargs))
        return Dataset.from_list([row] * 600)

    monkeypatch.setattr(tasks, "load_dataset", load_dataset)
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    prompts = load_prompts(name, tokenizer)
    assert len(prompts) == {"humaneval": 164, "math500": 500}.get(name, 80)
    expected = tokenizer(f"<user>{said}>", add_special_tokens=False)["input_ids"]
    assert prompts[0] == expected and asked == [(TASKS[name].path, TASKS[name].load)]
    assert len(load_prompts(name, tokenizer, 3)) == 3


def test_a_task_reads_one_split_alone(tmp_path):
    (tmp_path / "3.0.0").mkdir()
    row, _ = ROWS["cnn_dm"]
    Dataset.from_list([row]).to_parquet(tmp_path / "3.0.0" / "test-00000-of-00001.parquet")
    (tmp_path / "3.0.0" / "train-00000-of-00001.parquet").write_text("broken")
    assert tasks.load_dataset(str(tmp_path), **TASKS["cnn_dm"].load)[0] == row


def test_turns_that_follow_an_answer(tokenizer, monkeypatch):
    rows = Dataset.from_list([ROWS["mt_bench"][0]] * 80)
    monkeypatch.setattr(tasks, "load_dataset", lambda path, **kwargs: rows)
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    prompts = load_prompts("mt_bench", tokenizer, 2, answer=lambda prompt: f"said {len(prompt)}")
    first = tokenizer("<user>first>", add_special_tokens=False)["input_ids"]
    dialogue = f"<user>first<assistant>said {len(first)}<user>second>"
    assert prompts == 2 * [first, tokenizer(dialogue, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("error", [DatasetGenerationError("broken"), HTTPError("broken"), RuntimeError("broken")])
def test_a_task_that_cannot_be_loaded(tokenizer, monkeypatch, error):
    """The benchmark leaves it out, whatever the reason."""
    monkeypatch.setattr(tasks, "load_dataset", Mock(side_effect=error))
    with pytest.raises(OSError, match=rf"openai/gsm8k could not be loaded \({type(error).__name__}\): broken"):
        load_prompts("gsm8k", tokenizer)
    monkeypatch.setattr(tasks, "load_dataset", lambda path, **kwargs: Dataset.from_list([ROWS["gsm8k"][0]] * 79))
    with pytest.raises(ValueError, match="has 79 rows, but gsm8k takes 80"):
        load_prompts("gsm8k", tokenizer)


def test_names(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    for name in ("b", "a", "other/b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / ".left_out-00000.jsonl").touch()  # of `recipes/regenerate.py`
    assert expand(["paper", str(tmp_path)]) == [*GROUPS["paper"], str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert expand([str(tmp_path / "other")]) == [str(tmp_path / "other" / "b.jsonl")]
    assert len(expand(["spec_bench"])) == 6 and task_name(str(tmp_path / "a.jsonl")) == "a"
    (tmp_path / "python").mkdir()  # a folder is no reason to take another task than the one of that name
    monkeypatch.chdir(tmp_path)
    assert expand([OFFLINE]) == [OFFLINE]
    (tmp_path / "empty").mkdir()
    for names, told in (
        (["gsm9k"], r"Unknown tasks \['gsm9k'\]"),
        ([str(tmp_path / "empty")], "no JSON Lines files"),
        ([str(tmp_path), str(tmp_path / "other")], "two tasks of the name b. Rename one"),
    ):
        with pytest.raises(ValueError, match=told):
            expand(names)


def test_offline(tokenizer):
    prompts = load_prompts(OFFLINE, tokenizer)
    assert len(prompts) == 20 and all(0 < len(prompt) <= 48 for prompt in prompts)
    assert load_prompts(OFFLINE, tokenizer, 3) == prompts[:3]
    documents, held_out = standard_library()
    assert not any(text[:500] in document for text in held_out[:3] for document in documents)


def test_files(tmp_path, tokenizer, monkeypatch, caplog):
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "b"}]
    path.write_text('\ufeff{"prompt": "a"}\n\n' + json.dumps({"messages": chat}) + "\n", encoding="utf-8")
    assert [row.text or row.messages for row in read_prompts(path)] == ["a", chat] and len(read_prompts(path, 1)) == 1
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    chatted = tokenizer("<user>b>", add_special_tokens=False)["input_ids"]
    assert load_prompts(str(path), tokenizer) == [tokenizer("a")["input_ids"], chatted]
    monkeypatch.setattr(tokenizer, "chat_template", None)
    tasks.logger.warning_once.cache_clear()
    assert load_prompts(str(path), tokenizer) == [tokenizer(text)["input_ids"] for text in "ab"]
    assert "has no chat template" in caplog.text
    answered = [*chat, {"role": "assistant", "content": "c"}]
    path.write_text(json.dumps({"messages": answered}) + "\n" + json.dumps({"messages": answered + chat}))
    assert [row.messages for row in read_prompts(path)] == [chat, answered + chat]  # without the answer at the end
    path.write_text('{"prompt": "a"}\nbroken')
    assert len(read_prompts(path, 1)) == 1  # what is not asked for is not read
    tools = [{"name": "f", "parameters": {"city": {"default": None}}}]
    path.write_text(json.dumps({"messages": chat, "tools": tools}))
    assert read_prompts(path)[0].template_kwargs == {"tools": tools}  # a file has no `null`s of other rows
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(path)


@pytest.mark.parametrize(
    "lines, told",
    [
        (['{"prompt": "a"}', '{"text": "b"}'], "line 2: it has no messages and no prompt"),
        (['{"prompt": "a"}', "", '{"messages": [{"role": "us'], "line 3 is not JSON"),
        (['[{"prompt": "a"}]'], "line 1 is .* but must be an object"),
        (["[", '{"prompt": "a"},', "]"], "line 1 is not JSON"),
        (['{"messages": [{"role": "assistant", "content": "b"}]}'], "line 1: it has the assistant's messages only"),
        (['{"messages": [{"role": "user"}]}'], "line 1: message 0 of 'messages' has no content"),
        (['{"messages": [{"role": "system", "content": "s"}]}'], "line 1: the chat template refuses it: no"),
    ],
)
def test_broken_files(tmp_path, tokenizer, monkeypatch, lines, told):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", refusing + TEMPLATE)
    with pytest.raises(ValueError, match=rf"prompts\.jsonl, {told}"):
        load_prompts(str(path), tokenizer)


def test_what_a_row_gives_its_template(tmp_path, tokenizer, monkeypatch):
    path = tmp_path / "prompts.jsonl"
    row = {"conversations": [{"from": "human", "value": "b"}], "system": "s", "tools": [{"name": "f"}]}
    path.write_text(json.dumps({**row, "chat_template_kwargs": {"think": "k"}}) + "\n" + json.dumps(row) + "\n")
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools | length }}{{ think }}" + TEMPLATE)
    prompts = load_prompts(str(path), tokenizer, chat_template_kwargs={"think": "n"})
    assert prompts == [tokenizer(f"1{letter}<system>s<user>b>")["input_ids"] for letter in "kn"]


def test_prompts_with_images(tmp_path):
    processor = make_processor(gemma3)
    make_image(0).save(tmp_path / "x.png")
    path = tmp_path / "seen.jsonl"
    seen = {"messages": [{"role": "user", "content": "a"}], "images": [str(tmp_path / "x.png")]}
    path.write_text("\n".join(map(json.dumps, (seen, {"prompt": "b"}))))
    with pytest.raises(ValueError, match="line 1: it has images, but the target or its processor reads text only"):
        load_prompts(str(path), processor.tokenizer)
    one, other = load_prompts(str(path), processor.tokenizer, images=ImageReader(processor))
    assert one["input_ids"].count(IMAGE) == NUM_PIECES and one["image_data"] == seen["images"]
    assert other == processor.tokenizer("b")["input_ids"]
    turns = [*seen["messages"], {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
    path.write_text(json.dumps({**seen, "messages": turns}))
    (several,) = load_prompts(str(path), processor.tokenizer, images=ImageReader(processor))
    assert several["input_ids"].count(IMAGE) == NUM_PIECES  # and all turns, as without images
    assert several["image_text"].index("c") < several["image_text"].rindex("d")
    path.write_text(json.dumps({**seen, "images": ["y.png"]}))
    with pytest.raises(ValueError, match="line 1: there is no image y.png"):
        load_prompts(str(path), processor.tokenizer, images=ImageReader(processor))

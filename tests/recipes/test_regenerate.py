"""`recipes/regenerate.py` as users call it, and as they interrupt it."""

import copy
import json
import multiprocessing
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
from accelerate import PartialState
from conftest import RECIPES, chat_server, load_script, make_target, run_in_two_processes
from datasets import DatasetInfo, load_dataset
from forked import run_forked
from huggingface_hub import DatasetCard, DatasetCardData
from messages import assistant, user

from hf_eagle3.data import load_data, loading
from hf_eagle3.data.answers import Output, push_dataset, rows_in
from hf_eagle3.data.loading import features_of
from hf_eagle3.data.nulls import without_nulls


SCRIPT = RECIPES / "regenerate.py"
NUM_ROWS = 30


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "chats.jsonl"
    rows = ({"messages": [user(f"ab{i}"), assistant("old")]} for i in range(NUM_ROWS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_killed_run_loses_nothing_that_was_finished(tmp_path, data):
    def reply(payload, number):
        if number == 12:
            for process in multiprocessing.active_children():
                process.kill()
        time.sleep(0.05)
        return f"{payload['messages'][0]['content']}, said again"

    with chat_server(reply) as (url, requests):
        command = ("--model_name_or_path", "m", "--base_url", url, "--concurrency", 3)
        command += ("--dataset_name", data, "--output_dir", tmp_path / "out")
        assert run_forked(SCRIPT, *command).returncode == signal.SIGKILL
        first = len((tmp_path / "out" / "rows-00000.jsonl").read_text().splitlines())
        assert 6 <= first < NUM_ROWS
        result = run_forked(SCRIPT, *command)
        assert result.returncode == 0, result.stderr[-3000:]
        assert len(requests) <= NUM_ROWS + 6  # in flight, or written half
    rows = load_dataset("json", data_files=str(tmp_path / "out" / "*.jsonl"), split="train")
    assert sorted(rows["row"]) == list(range(NUM_ROWS))
    assert all(row["messages"][1]["content"] == f"ab{row['row']}, said again" for row in rows)


def test_processes_wait_for_the_slowest(tmp_path, data, run_recipe, monkeypatch):
    """By default those that have finished would give up after half an hour."""

    def started(*args, timeout=timedelta(), **kwargs):
        raise TimeoutError(timeout)

    monkeypatch.setattr(torch.distributed, "init_process_group", started)
    monkeypatch.setattr(PartialState, "_shared_state", {})
    process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    for name, value in {**process, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    command = ("--model_name_or_path", "m", "--dataset_name", data, "--output_dir", tmp_path / "out")
    assert "TimeoutError: 7 days" in run_recipe("regenerate.py", *command).stderr


def test_processes_that_extract_wait_for_the_slowest(tmp_path, data, monkeypatch):
    script, seen = load_script("recipes/extract_features.py"), []
    monkeypatch.setattr(script, "make_trainer", lambda _, training_args, *others: seen.append(training_args))
    command = ["extract_features.py", "--model_name_or_path", "m", "--dataset_name", data, "--output_dir", tmp_path]
    monkeypatch.setattr("sys.argv", [*map(str, command), "--features_dir", str(tmp_path), "--use_cpu", "True"])
    with pytest.raises(AttributeError):  # the trainer of this test is none
        script.main()
    assert seen[0].ddp_timeout_delta > timedelta(days=1)


def test_a_process_without_rows(tmp_path, data):
    data.write_text(data.read_text().partition("\n")[0] + "\n")

    def reply(payload, number):
        time.sleep(0.5)  # so that the other process finishes first
        return "new"

    with chat_server(reply) as (url, _):
        command = ("--model_name_or_path", "m", "--base_url", url, "--dataset_name", data)
        result = run_in_two_processes("ddp", tmp_path, SCRIPT, *command, "--output_dir", tmp_path / "out")
    assert result.returncode == 0, result.stderr[-3000:]
    (row,) = load_dataset("json", data_files=str(tmp_path / "out" / "*.jsonl"), split="train")
    assert row["messages"][1]["content"] == "new"


def test_part_of_a_split_in_the_roles_of_sharegpt(tmp_path, run_recipe):
    turns = [{"from": "human", "value": "what"}, {"from": "gpt", "value": "old"}]
    path = tmp_path / "sharegpt.jsonl"
    path.write_text((json.dumps({"conversations": turns}) + "\n") * 6)
    with chat_server(lambda payload, number: f"{payload['messages'][0]['content']} again") as (url, _):
        command = ("--model_name_or_path", "m", "--base_url", url, "--output_dir", tmp_path / "out")
        result = run_recipe("regenerate.py", *command, "--dataset_name", path, "--dataset_train_split", "train[2:5]")
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows-00000.jsonl").read_text().splitlines()]
    assert [row["messages"] for row in rows] == [[user("what"), assistant("what again")]] * 3


def test_a_target_in_the_process(tmp_path, data, tokenizer, run_recipe, caplog, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    make_target("llama").save_pretrained(tmp_path / "target")
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "target")
    command = ("--model_name_or_path", tmp_path / "target", "--dataset_name", data, "--output_dir", tmp_path / "out")
    assert "no chat template. Pass one as `chat_template_path`" in run_recipe("regenerate.py", *command).stderr
    assert not (tmp_path / "out").exists()
    (tmp_path / "chat.jinja").write_text(tokenizer.chat_template)
    command += ("--chat_template_path", tmp_path / "chat.jinja")
    command += ("--dtype", "bfloat16", "--temperature", 0)
    result = run_recipe("regenerate.py", *command, "--max_new_tokens", 5, "--batch_size", 8)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Load the target in float32: `--dtype float32`" in caplog.text
    assert "Rows: " in result.stderr  # in logs, too
    written = len(load_dataset("json", data_files=str(tmp_path / "out" / "*.jsonl"), split="train"))
    assert f"{written} rows written" in result.stdout and written > NUM_ROWS // 2
    # A random target says special tokens, too.
    assert f"{NUM_ROWS - written} were left out" in result.stdout
    if written < NUM_ROWS:
        assert "is left out: its answer has the special tokens" in caplog.text
    result = run_recipe("regenerate.py", *command, "--max_new_tokens", 6)
    assert result.returncode == 1 and "max_new_tokens was 5 before, 6 after" in result.stderr


def test_answers_of_a_server_that_training_would_refuse(tmp_path, data, tokenizer, run_recipe, caplog):
    make_target("llama").config.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")  # its template writes no reasoning
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    for target, is_told in ((tmp_path / "target", True), ("m", False)):
        caplog.clear()
        with chat_server(lambda *args: answer) as (url, _):
            command = ("--model_name_or_path", target, "--base_url", url, "--concurrency", 1, "--dataset_name", data)
            result = run_recipe("regenerate.py", *command, "--output_dir", tmp_path / f"out-{is_told}")
        assert result.returncode == 0, result.stderr[-3000:]
        told = "Training with this chat template cannot learn from row 0, and rows like it: the chat template refuses it: it leaves"
        assert caplog.text.count("cannot learn from row") == caplog.text.count(told) == is_told
        assert caplog.text.count("Answers are not checked against the chat template of m, because") == (not is_told)


def test_an_interrupted_run_says_what_is_written(tmp_path, data, monkeypatch, run_recipe):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_eagle3.data.server.regenerate_by_server", interrupt)
    command = ("--model_name_or_path", "m", "--dataset_name", data, "--base_url", "http://127.0.0.1:9/v1")
    result = run_recipe("regenerate.py", *command, "--output_dir", tmp_path / "out")
    assert result.returncode == 1 and "Interrupted. " in result.stderr and "out has 0 rows." in result.stderr
    assert "Traceback" not in result.stderr


def test_what_is_refused(tmp_path, data, run_recipe):
    command = ("--model_name_or_path", "m", "--dataset_name", data, "--output_dir", tmp_path / "out")
    for option, value in (("--chat_template_path", "x.jinja"), ("--draft_name_or_path", "d")):
        result = run_recipe("regenerate.py", *command, "--base_url", "http://127.0.0.1:9/v1", option, value)
        assert result.returncode == 1 and f"`{option}` would do nothing, because the server" in result.stderr
    result = run_recipe("regenerate.py", *command, "--draft_subfolder", "d")
    assert result.returncode == 2 and "`draft_subfolder` says where the draft is in its repo" in result.stderr
    numbers = {"batch_size": -1, "concurrency": 0, "max_retries": -1, "temperature": -1, "top_p": 2}
    for name, number in numbers.items():
        result = run_recipe("regenerate.py", *command, f"--{name}", number)
        assert result.returncode == 2 and result.stderr.startswith(f"regenerate.py: error: `{name}` must")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("streaming", [False, True])
def test_what_only_later_rows_have(tmp_path, monkeypatch, streaming):
    """`datasets` takes the columns from the first rows that it reads."""
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    monkeypatch.setattr(loading, "load_dataset", partial(load_dataset, chunksize=100))
    output, plain = Output(tmp_path / "out", {}), [user("a" * 100)]
    later = [*plain, assistant("", reasoning_content="hm", tool_calls=[call])]
    for row in range(3):
        output.write(row, {"messages": plain})
    output.write(3, {"messages": later, "tools": "[{}]", "chat_template_kwargs": {"think": True}})
    rows = list(load_data(tmp_path / "out", streaming=streaming)["train"])
    assert without_nulls(rows[0]) == {"row": 0, "messages": plain}
    assert without_nulls(rows[3])["messages"] == later
    assert rows[3]["tools"] == "[{}]" and rows[3]["chat_template_kwargs"] == {"think": True}
    # As on the Hub, where the card says it.
    info = DatasetInfo(features=features_of(rows_in([tmp_path / "out" / "rows-00000.jsonl"])))._to_yaml_dict()
    files = [{"split": "train", "path": "rows-*.jsonl"}]
    configs = [{"config_name": "default", "data_files": files}]
    metadata = DatasetCardData(configs=configs, dataset_info=info)
    (tmp_path / "out" / "README.md").write_text(f"---\n{metadata.to_yaml()}\n---\n")
    pushed = load_dataset(str(tmp_path / "out"), split="train", streaming=streaming, chunksize=100)
    assert without_nulls(list(pushed)[3])["messages"] == later


def test_texts_are_continued_and_pushed(tmp_path, tokenizer, run_recipe, hub):
    make_target("llama").save_pretrained(tmp_path / "target")
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "target")
    texts = [f"{i} times two is {2 * i}, and so on." for i in range(4)]
    lines = [json.dumps({"text": text}) + "\n" for text in (*texts, "")]  # a blank one has nothing to continue
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    command = ("--model_name_or_path", tmp_path / "target", "--dataset_name", tmp_path / "texts.jsonl")
    command += ("--output_dir", tmp_path / "out", "--prompt_tokens", 6, "--max_new_tokens", 5, "--temperature", 0)
    result = run_recipe("regenerate.py", *command, "--base_url", "http://localhost:1/v1")
    assert result.returncode == 1 and "this data has texts. Leave `--base_url` out" in result.stderr
    result = run_recipe("regenerate.py", *command, "--tp_plan", "auto")
    assert result.returncode == 1 and "each process answers its own rows" in result.stderr
    result = run_recipe("regenerate.py", *command, "--push_to_hub", "me/own", "--private")
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"{hub.url}/datasets/me/own/commit/" in result.stdout and "datasets/me/own" in hub.private
    commits = hub.repos["datasets/me/own"]["main"]
    files = commits[-1]
    assert files.keys() == {"rows-00000.jsonl", "README.md", ".settings.json"}
    rows = [json.loads(line) for line in files["rows-00000.jsonl"].splitlines()]
    prompts = []
    for text in texts:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompts += [tokenizer.decode(tokens[i : i + 6]) for i in range(0, len(tokens) - 5, 6 + 5)]
    assert len(prompts) > len(texts)
    assert [(row["row"], row["prompt"]) for row in rows] == list(enumerate(prompts))
    assert all(row["completion"] and row["finish_reasons"] in (["stop"], ["length"]) for row in rows)
    card = DatasetCard(files["README.md"].decode())
    assert card.data.configs[0]["data_files"] == [{"split": "train", "path": "rows-*.jsonl"}]
    assert f"{len(prompts)} rows of texts.jsonl" in card.text and str(tmp_path) not in card.text
    # A card that someone has written stays.
    commits.append({**files, "README.md": b"mine"})
    result = run_recipe("regenerate.py", *command, "--push_to_hub", "me/own")
    assert result.returncode == 0 and commits[-1]["README.md"] == b"mine"
    # But where it lists the columns, it lists new ones, too.
    commits.append(files)
    with (tmp_path / "out" / "rows-00000.jsonl").open("a") as file:
        file.write('{"row": 99, "new": 1}\n')
    push_dataset(tmp_path / "out", "me/own")
    card = DatasetCard(commits[-1]["README.md"].decode())
    assert "new" in [column["name"] for column in card.data.dataset_info["features"]]
    # Rows of something else are neither overwritten nor mixed with these.
    commits.append({**files, "rows-00001.jsonl": b"{}"})
    with pytest.raises(ValueError, match=r"me/own has rows-00001\.jsonl"):
        push_dataset(tmp_path / "out", "me/own")
    for settings in ({}, {".settings.json": b'{"model": "another"}'}):
        hub.repos["datasets/me/other"] = {"main": [{"rows-00000.jsonl": b"{}", **settings}]}
        with pytest.raises(ValueError, match=r"me/other has rows-00000\.jsonl"):
            push_dataset(tmp_path / "out", "me/other")
    assert commits[-1]["rows-00001.jsonl"] == b"{}"

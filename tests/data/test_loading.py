"""Data sets as recipes and Python users load them: files, folders, mixtures, and parts of splits."""

import gzip
import json
import lzma
import re
from datetime import datetime
from functools import partial
from unittest.mock import Mock

import datasets
import pytest
import yaml
from accelerate import PartialState
from conftest import RECIPES
from datasets import Dataset, DatasetDict, IterableDatasetDict
from messages import assistant, user
from trl import DatasetMixtureConfig

from hf_eagle3.data import load_data, loading, read_row, rows_of
from hf_eagle3.data.loading import load_mixture
from hf_eagle3.data.nulls import aligned, without_nulls


# The bytes become the tests' names. Without `mtime=0` they hold the time, and pytest's processes would collect different tests.
@pytest.mark.parametrize(
    "file, content, error",
    [
        ("texts.xlsx", b'{"text": "what is up"}\n', "is not one of"),
        ("none.jsonl", b"", "is empty"),
        ("blank.jsonl", b"\n \n", "blank.jsonl is empty"),
        ("cut.jsonl", b'{"text": "ab"}\n{"text": "cd', r"cut.jsonl, line 2 is not JSON"),
        ("half.jsonl", b'{"text": "ab"}\n{"text": "\\ud83d"}\n', r"half.jsonl, line 2 .* surrogates"),
        ("twice.jsonl", b'{"text": "a", "text": "b"}\n', "twice.jsonl cannot be read: JSON parse error: .* twice"),
        (
            "cut.jsonl.gz",
            gzip.compress(b'{"text": "ab"}\n{"text": ab}\n', mtime=0),
            "cut.jsonl.gz, line 2 is not JSON",
        ),
        ("latin.jsonl", '{"text": "caf\xe9"}\n'.encode("latin-1"), "latin.jsonl, line 1 is not in UTF-8"),
        ("latin.txt", b"\xe9t\xe9\n", "latin.txt cannot be read: .*utf-8"),
        ("texts.jsonl.gz", gzip.compress(b'{"text": "what is up"}\n', mtime=0), None),
        ("none.jsonl.gz", gzip.compress(b"", mtime=0), "none.jsonl.gz is empty"),
        ("cut.gz", gzip.compress(b"ab", mtime=0)[:-9], "is not one of"),
        ("texts.jsonl.xz", lzma.compress(b'{"text": "what is up"}\n'), None),
        ("texts.csv", b'text,id\n"what is up",1\n', None),
    ],
)
def test_files(tmp_path, file, content, error):
    (tmp_path / file).write_bytes(content)
    if error is not None:
        with pytest.raises(ValueError, match=error):
            load_data(tmp_path / file)
    else:
        assert load_data(tmp_path / file)["train"]["text"][:] == ["what is up"]


def test_a_missing_folder_is_named(monkeypatch):
    """Which the Hub was asked for."""
    monkeypatch.setattr(
        loading, "load_dataset", Mock(side_effect=ConnectionError("Couldn't reach 'chatz' on the Hub"))
    )
    with pytest.raises(OSError, match="no file or folder chatz .* Hub gave none: Couldn't reach"):
        load_data("chatz")
    with pytest.raises(ValueError, match="name of the data set is empty"):
        load_data("")


@pytest.mark.parametrize("is_first", [False, True])
def test_one_process_of_a_machine_checks_a_file(tmp_path, monkeypatch, is_first):
    checked = []
    monkeypatch.setattr(PartialState, "is_local_main_process", is_first)
    monkeypatch.setattr(loading, "check_utf8", checked.append)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    load_data(tmp_path / "a.jsonl")
    assert checked == [str(tmp_path / "a.jsonl")] * is_first


@pytest.mark.parametrize("streaming", [False, True])
def test_saved_splits_stay_apart(tmp_path, streaming):
    """`load_dataset` would join those whose names it does not know."""
    splits = {name: Dataset.from_list([{"text": name}]) for name in ("chats", "held_out")}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    read = load_data(tmp_path / "saved", streaming=streaming)
    assert {name: [row["text"] for row in rows] for name, rows in read.items()} == {name: [name] for name in splits}


@pytest.mark.parametrize(
    "read, unread",
    [
        (["a.jsonl", "b.jsonl"], ["c.parquet"]),
        (["train.jsonl", "test.jsonl"], ["more.jsonl"]),
        (["rows-train.jsonl", "rows-test.jsonl"], []),  # not of `recipes/regenerate.py`
        (["rows-00000.jsonl"], ["old/rows.csv.gz"]),
        (["a.jsonl"], []),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_a_folder_that_are_not_read_are_named(tmp_path, caplog, streaming, read, unread):
    for name in (*read, *unread, ".hidden.jsonl", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    splits = load_data(tmp_path, streaming=streaming)
    assert set(splits) == ({"train", "test"} if any("test" in name for name in read) else {"train"})
    assert sum(len(list(rows)) for rows in splits.values()) == len(read)
    told = f"1 files of {tmp_path} are not read: {', '.join(unread)}. "
    assert (told in caplog.text) == bool(unread) and ("not read" in caplog.text) == bool(unread)


@pytest.mark.parametrize("streaming", [False, True])
def test_names_of_files_are_no_patterns(tmp_path, streaming):
    for name in ("chats [v2]*.jsonl", "chats [v2]-old.jsonl", "chats v-old.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    read = load_data(tmp_path / "chats [v2]*.jsonl", streaming=streaming)["train"]
    assert [row["text"] for row in read] == ["chats [v2]*.jsonl"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["train.jsonl", "train.json", ""])
def test_values_of_files_stay(tmp_path, name, streaming):
    """
    `datasets` stores tools that are alike in all rows as structures, whose `null`s may have been added. It takes texts for dates, integers
    for floats, and in a stream of an array it shows JSON in place of texts.
    """
    tools = [{"name": "f", "parameters": {"default": None, "day": "2026-01-02"}}]
    calls = [[{"function": {"name": "f", "arguments": {"day": "2026-01-02T03:04Z", "n": n}}}] for n in (1, 1.5)]
    texts = ("a", "a" if name == "train.jsonl" else [{"type": "text", "text": "a"}])
    chats = [[user(text), assistant("b", tool_calls=call)] for text, call in zip(texts, calls)]
    rows = [{"messages": chat, "tools": tools, "chat_template_kwargs": {"style": None}} for chat in chats]
    lines = "\n".join(map(json.dumps, rows))
    array = json.dumps(rows, indent=1).replace("\n", "\n\n", 1)
    (tmp_path / (name or "train.json")).write_text(lines if name == "train.jsonl" else array)
    read = load_data(tmp_path / name, streaming=streaming)["train"]
    contents = [read_row(row, "messages", read.features) for row in read]
    assert [row.template_kwargs for row in contents] == [{"tools": tools, "style": None}] * 2
    said = [message for row in contents for message in row.messages]
    assert [message["content"] for message in said] == ["a", "b", "a", "b"]
    assert repr([message["tool_calls"] for message in said[1::2]]) == repr(calls)


@pytest.mark.parametrize("streaming", [False, True])
def test_answers_that_are_dates(tmp_path, streaming):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "When?", "completion": "2026-01-02"}\n' * 2)
    assert [row["completion"] for row in load_data(path, streaming=streaming)["train"]] == ["2026-01-02"] * 2
    path.write_text('{"prompt": "When?", "completion": "2026-01-02"}\n\n')
    with pytest.raises(ValueError, match="a.jsonl, line 2 is empty, .* Remove the line"):
        load_data(path, streaming=streaming)
    # Where `datasets` fails before it could tell the columns.
    tools = [{"name": "a", "parameters": {"x": 1}}], [{"name": "b", "parameters": {"y": [{"z": "w"}]}}, "c"]
    lines = [json.dumps({"messages": [user("a")], "tools": each}) for each in tools]
    path.write_text("\n".join([*lines, "", ""]))
    with pytest.raises(ValueError, match="a.jsonl, line 3 is empty, .* Remove the line"):
        load_data(path, streaming=streaming)
    # Those of other formats are dates.
    (tmp_path / "saved").mkdir()
    row = {"messages": [{**user("a"), "at": datetime(2026, 1, 2)}]}
    Dataset.from_list([row]).to_parquet(tmp_path / "saved" / "train.parquet")
    (tmp_path / "saved" / "dataset_infos.json").write_text("{}")
    assert list(load_data(tmp_path / "saved", streaming=streaming)["train"]) == [row]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("place", ["file", "folder", "compressed"])
def test_columns_of_later_rows(tmp_path, monkeypatch, place, streaming):
    """`datasets` takes the columns from the first rows that it reads, and would fail at the others."""
    chat = [user("a" * 100)]
    monkeypatch.setattr(loading, "load_dataset", partial(datasets.load_dataset, chunksize=100))
    later = [*chat, assistant("b", tool_calls=[{"function": {"name": "f"}}])]
    rows = [{"messages": chat}, {"messages": chat}, {"messages": later, "tools": "[]"}]
    path = tmp_path / ("train.jsonl.gz" if place == "compressed" else "train.jsonl")
    write = (lambda data: path.write_bytes(gzip.compress(data))) if place == "compressed" else path.write_bytes
    write("\n".join(map(json.dumps, rows)).encode())
    name = tmp_path if place == "folder" else path
    assert [without_nulls(row) for row in load_data(name, streaming=streaming)["train"]] == rows
    write(b'{"text": "a"}\n' * 9 + b"{")
    with pytest.raises(ValueError, match=f"{path.name}, line 10 is not JSON"):  # before training
        load_data(name, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixture_of_messages_with_other_keys(tmp_path, streaming):
    """As if only one of the data sets has tool calls."""
    plain = [user("a"), assistant("b")]
    calls = [user("a"), assistant("", tool_calls=[{"function": {"name": "f", "arguments": {"city": "Ulm"}}}])]
    tools = [{"name": "f", "parameters": {"city": {"type": "string"}}}]
    for name, row in {"plain": {"messages": plain}, "calls": {"messages": calls, "tools": tools}}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join([json.dumps(row) + "\n"] * 4))
    data = [{"path": "json", "data_files": str(tmp_path / f"{name}.jsonl")} for name in ("plain", "calls")]

    def mixed(data):
        rows = load_mixture(DatasetMixtureConfig([*data], streaming=streaming))["train"]
        return [read_row(row, "messages", rows.features) for row in rows]

    rows = mixed(data)
    assert [row.messages for row in rows] == [plain] * 4 + [calls] * 4
    assert [row.template_kwargs for row in rows] == [{}] * 4 + [{"tools": tools}] * 4
    shares = [{**each, "fraction": fraction} for each, fraction in zip(data, (1, 3))]
    if streaming:
        with pytest.raises(ValueError, match="`fraction` is not supported with streaming"):
            mixed(shares)
    else:
        assert [row.messages for row in mixed(shares)] == [plain] + [calls] * 4
    with pytest.raises(ValueError, match="`fraction` must be set for either all"):
        mixed([{**data[0], "fraction": 1}, data[1]])


def test_texts_of_a_mixture_stay(tmp_path):
    """As `Json`, a text that is JSON would be read, and written anew."""
    answer = '{"city":"Ulm"}'
    for kind in ("string", "large_string"):
        features = datasets.Features({name: datasets.Value(kind) for name in ("prompt", "completion")})
        rows = Dataset.from_list([{"prompt": "a", "completion": answer}], features=features)
        rows.to_parquet(tmp_path / f"{kind}.parquet")
    data = [{"path": "parquet", "data_files": str(path)} for path in sorted(tmp_path.glob("*.parquet"))]
    with pytest.raises(ValueError, match="string"):
        load_mixture(DatasetMixtureConfig(data))
    parts = [Dataset.from_list([{"prompt": answer, "tools": tools}]) for tools in ("[]", [{"name": "f"}])]
    assert [part[0]["prompt"] for part in aligned(parts)] == [answer] * 2


def test_a_mixture_is_split_the_same_way_every_time(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": str(row)}) + "\n" for row in range(48)))
    data = [{"path": "json", "data_files": str(path), "split": "train"}]
    first, second = (load_mixture(DatasetMixtureConfig([*data], test_split_size=0.25)) for _ in range(2))
    assert first.keys() == {"train", "test"} and first["test"][:] == second["test"][:]
    assert len(first["test"]) < len(first["train"])
    with pytest.raises(ValueError, match="`test_split_size` cannot split streams"):
        load_mixture(DatasetMixtureConfig([*data], test_split_size=0.25, streaming=True))


def test_the_mixture_of_the_docs(tmp_path, monkeypatch):
    page = (RECIPES.parent / "docs" / "data.md").read_text(encoding="utf-8")
    config = yaml.safe_load(re.search(r"```yaml\n(datasets:.*?)```", page, re.S)[1])
    mixture = DatasetMixtureConfig(**config)
    assert [each.path for each in mixture.datasets] == ["HuggingFaceH4/ultrachat_200k", "json"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats").mkdir()
    row = json.dumps({"messages": [user("a"), assistant("b")], "id": 7})
    (tmp_path / "chats" / "train.jsonl").write_text(100 * f"{row}\n")
    mixture.datasets[0] = mixture.datasets[1]  # instead of the Hub's
    dataset = load_mixture(mixture)
    assert {split: len(rows) for split, rows in dataset.items()} == {"train": 198, "test": 2}
    assert dataset["train"].column_names == ["messages"]


def test_parts_of_splits():
    dataset = DatasetDict(train=Dataset.from_dict({"row": range(10)}), test=Dataset.from_dict({"row": range(10, 14)}))
    parts = {
        "train[:3]": [0, 1, 2],
        "test[50%:]": [12, 13],
        "train[8:]+test[:1]": [8, 9, 10],
        "train[20:]+test[:1]": [10],
    }
    parts["test"] = [10, 11, 12, 13]
    assert {part: rows_of(dataset, part)["row"][:] for part in parts} == parts
    streams = IterableDatasetDict(train=dataset["train"].to_iterable_dataset())
    for data, part in ((dataset, "valid[:3]"), (dataset, "train[:3"), (streams, "train[:3]")):
        with pytest.raises(ValueError, match="There is no split"):
            rows_of(data, part)
    with pytest.raises(ValueError, match=r"'train\[10:\]' has no rows. The splits have 10 \(train\), 4 \(test\)"):
        rows_of(dataset, "train[10:]")

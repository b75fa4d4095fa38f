import copy
import errno
import json
import logging
from unittest.mock import Mock

import pytest
from filelock import FileLock
from messages import assistant, read_answers, user

from hf_eagle3.data import answers
from hf_eagle3.data.answers import Output


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    Output(tmp_path, {}).write(0, {"messages": [user("a")]})
    written = (tmp_path / "rows-00000.jsonl").read_text()
    (lock,) = tmp_path.glob(".lock-*")
    with FileLock(lock):  # as another process has it
        with (tmp_path / "rows-00000.jsonl").open("a") as file:
            file.write('{"row": 1')  # the other run is writing
        with pytest.raises(ValueError, match="Another run writes to"):
            Output(tmp_path, {})
        assert (tmp_path / "rows-00000.jsonl").read_text() == written + '{"row": 1'
    assert Output(tmp_path, {}).done == {0}


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "no locks")))
    assert not Output(tmp_path, {}).lock.is_locked and not Output(tmp_path, {}).done


@pytest.mark.parametrize("line", ['{"row": 1, "messages": [}', '{"messages": []}', "[]", "\0\0\0"])
def test_what_somebody_has_broken_is_named(tmp_path, line):
    Output(tmp_path, {}).write(0, {"messages": [user("a")]})
    with (tmp_path / "rows-00000.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ValueError, match="rows-00000.jsonl, line 2 is not a row with its number .* Delete the line"):
        Output(tmp_path, {})
    (tmp_path / ".settings.json").write_text("{")
    with pytest.raises(ValueError, match="settings.json is not valid JSON"):
        Output(tmp_path, {})


def test_a_line_cut_off_by_a_crash_is_written_again(tmp_path):
    output = Output(tmp_path, {"model": "m"})
    output.write(0, {"messages": [user("a")]})
    output.write(1, {"messages": [user("b")]})
    path = tmp_path / "rows-00000.jsonl"
    path.write_text(path.read_text()[:-9])
    assert Output(tmp_path, {"model": "m"}).done == {0}
    other = Output(tmp_path, {"model": "m"}, process_index=1)  # another number of processes
    assert other.done == {0}
    other.write(3, {"messages": [user("c")]})
    with (tmp_path / "rows-00001.jsonl").open("a") as file:
        file.write('{"row": 5, "mess')
    assert Output(tmp_path, {"model": "m"}).done == {0, 3}  # and one process again
    assert len(read_answers(tmp_path)) == 2
    with pytest.raises(ValueError, match="model was 'm' before, 'n' after"):
        Output(tmp_path, {"model": "n"})
    # But with nothing written there is nothing to disagree with.
    Output(tmp_path / "fresh", {"model": "m"}).leave_out(0, "too long for m")
    Output(tmp_path / "fresh", {"model": "m"}, process_index=12).leave_out(12, "too long for m")
    assert Output(tmp_path / "fresh", {"model": "m"}).left_out.keys() == {0, 12}
    fresh = Output(tmp_path / "fresh", {"model": "n"})
    assert not fresh.left_out
    fresh.write(0, {"messages": [user("a")]})
    with pytest.raises(ValueError, match="model was 'n' before, 'm' after"):
        Output(tmp_path / "fresh", {"model": "m"})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "diary.txt").write_text("dear diary")
    with pytest.raises(ValueError, match="not made by this script"):
        Output(tmp_path / "other", {})


def test_rows_that_cannot_be_answered(tmp_path, caplog):
    tool = {"messages": [user("a"), assistant("call"), {"role": "tool", "content": "r"}, assistant("b")]}
    rows = [tool, {"messages": [assistant("a")]}, {"text": "abc"}, {"messages": [{"content": "a"}]}]
    rows += [{"messages": [None]}, {"messages": [user("a")]}]
    output = Output(tmp_path, {})
    with caplog.at_level(logging.WARNING):
        assert [conversation.row for conversation in output.pending(rows)] == [5]
    assert "Row 0 is left out: it has messages of ['tool'], which may depend on" in caplog.text
    assert caplog.text.count("is left out") == 3
    assert output.report().startswith("5 rows were left out. Row 0: it has messages of ['tool']")


def test_an_answer_that_utf8_cannot_hold_is_left_out(tmp_path):
    output = Output(tmp_path, {})
    output.write(0, {"messages": [user("a"), assistant("cut \ud83d")], "finish_reasons": ["length"]})
    output.leave_out(1, "the server refuses to answer: \ud83d")
    output.write(2, {"messages": [user("a"), assistant("\U0001f600")], "finish_reasons": ["length"]})
    assert list(read_answers(tmp_path)) == [2] and output.report().startswith("1 rows have an answer that was cut")
    again = Output(tmp_path, {})
    assert again.done == {2} and again.left_out[0] == r"it has half a character, '\ud83d'"
    assert again.left_out[1] == r"the server refuses to answer: \ud83d"


@pytest.mark.parametrize("edit", ["none", "in front", "removed", "template", "corrected"])
def test_prompts_of_finished_rows_stay(tmp_path, edit):
    """Rows are known by their numbers."""
    rows = [{"messages": [user(text), assistant("old")]} for text in "abc"]
    rows.insert(2, {"messages": [assistant("nothing to answer")]})
    output = Output(tmp_path, {})
    for conversation in output.pending(rows):
        if conversation.row != 3:  # interrupted
            output.write(conversation.row, {"messages": [*conversation.turns, assistant("new")]})
    assert all(row.keys() == {"row", "messages"} for row in map(json.loads, (tmp_path / "rows-00000.jsonl").open()))
    edited, kwargs = copy.deepcopy(rows), {"template_kwargs": {"think": True}} if edit == "template" else {}
    edited[1]["messages"][1]["content"] = "another old answer"
    if edit == "in front":
        edited.insert(0, {"messages": [user("d")]})
    elif edit == "removed":
        del edited[2]
    elif edit == "corrected":
        edited[2] = {"messages": [user("e")]}
    again = Output(tmp_path, {}).pending(edited, **kwargs)
    if edit == "none":
        assert [conversation.row for conversation in again] == [3]
    else:
        row = 2 if edit in ("removed", "corrected") else 0
        with pytest.raises(ValueError, match=f"Row {row} of the data has another prompt .*`--output_dir`"):
            next(again)
    # Of an older version, and without its list of rows that were left out.
    for hidden in (*tmp_path.glob(".prompts-*"), *tmp_path.glob(".left_out-*")):
        hidden.unlink()
    assert [conversation.row for conversation in Output(tmp_path, {}).pending(rows)] == [3]


def test_only_the_first_rows_are_read_by_encoders(tmp_path, monkeypatch):
    """They take time, while a server waits."""
    monkeypatch.setattr(answers, "NUM_CHECKED", 2)
    output, read = Output(tmp_path, {}), []
    output.learners = [read.append]
    for row in range(4):
        output.write(row, {"messages": [user("a")]})
    assert len(read) == 2 and output.done == {0, 1, 2, 3}

"""Answers of a server that the test plays."""

import asyncio
import errno
import json
import time
from datetime import datetime
from itertools import chain
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import chat_server
from messages import assistant, read_answers, user
from seeing import make_image, vision_rows

from hf_eagle3.data.answers import Output, rows_in
from hf_eagle3.data.images import load
from hf_eagle3.data.server import NUM_REFUSED, regenerate_by_server
from hf_eagle3.data.values import date_as_text


def ask(url, rows, output, **arguments):
    settings = {"concurrency": 3, "first_wait": 0.01, **arguments}
    return asyncio.run(regenerate_by_server(url, "m", output.pending(rows), output, **settings))


ONE = [{"messages": [user("a")]}]
DIALOGUE = [{"messages": [user("a"), assistant("old"), user("b")]}]


def questions(num):
    return [{"messages": [user(str(number))]} for number in range(num)]


def only(number, answer):
    """Replies with this to one of the questions."""
    return lambda payload, _: answer if payload["messages"][0]["content"] == str(number) else "fine"


def test_every_turn_of_the_assistant_is_replaced(tmp_path):
    rows = [
        {"messages": [{"role": "system", "content": "s"}, user("a"), assistant("old"), user("b"), assistant("old")]},
        {"messages": [assistant("hello"), user("a"), user("b")]},
        {"messages": [user("a"), assistant("old")], "prompt": "a", "prompt_id": "x"},  # the first prompt, once more
    ]
    with chat_server(lambda payload, number: f"new {len(payload['messages'])}") as (url, requests):
        assert ask(url, rows, Output(tmp_path, {}), temperature=0.5, max_tokens=7) == 0
    written = read_answers(tmp_path)
    contents = [[message["content"] for message in written[row]["messages"]] for row in range(3)]
    assert contents == [["s", "a", "new 2", "b", "new 4"], ["a", "b", "new 2"], ["a", "new 1"]]
    assert written[0]["finish_reasons"] == ["stop", "stop"]
    path, payload = next(each for each in requests if each[1]["messages"][0]["content"] == "s")
    assert path == "/v1/chat/completions"
    assert (payload["model"], payload["temperature"], payload["max_tokens"]) == ("m", 0.5, 7)


def test_dates_of_messages(tmp_path):
    """As in WildChat. JSON has none."""
    rows = [{"messages": [{**user("a"), "timestamp": datetime(2026, 1, 2)}, assistant("old")]}]
    with chat_server(lambda *args: "new") as (url, requests):
        assert ask(url, rows, Output(tmp_path, {})) == 0
    asked, answered = requests[0][1]["messages"], read_answers(tmp_path)[0]["messages"]
    assert asked[0]["timestamp"] == answered[0]["timestamp"] == "2026-01-02 00:00:00"
    assert answered[1] == assistant("new")
    for other in (b"a", np.zeros(2)):
        with pytest.raises(TypeError, match="cannot be written as JSON"):
            date_as_text(other)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_kept_and_goes_back_under_both_of_its_names(tmp_path, name):
    """vLLM reads `reasoning`, SGLang `reasoning_content`."""
    with chat_server(lambda *args: assistant("yes", **{name: "hm"})) as (url, requests):
        ask(url, DIALOGUE, Output(tmp_path, {}))
    kept = assistant("yes", reasoning_content="hm")
    assert requests[1][1]["messages"][1] == {**kept, "reasoning": "hm"}
    assert read_answers(tmp_path)[0]["messages"][1::2] == [kept, kept]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_tried_again(tmp_path, status):
    with chat_server(lambda payload, number: status if number % 3 else "fine") as (url, requests):
        assert ask(url, questions(4), Output(tmp_path, {}), max_retries=9) == 0
    assert len(read_answers(tmp_path)) == 4 and len(requests) > 4


@pytest.mark.parametrize("asked, expected", [("7", 7), ("3600", 60), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)])
def test_a_server_says_how_long_to_wait(tmp_path, monkeypatch, asked, expected):
    waits, sleep = [], asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: waits.append(seconds) or sleep(0))
    with chat_server(lambda payload, number: (429, {"Retry-After": asked}) if number == 1 else "fine") as (url, _):
        assert ask(url, ONE, Output(tmp_path, {})) == 0
    assert max(waits) == pytest.approx(expected, abs=0.02)


def test_failed_rows_are_reported_and_tried_again_by_the_next_run(tmp_path, caplog):
    with chat_server(only(3, 500)) as (url, _):
        assert ask(url, questions(5), Output(tmp_path, {}), max_retries=0) == 1
    assert "Row 3 failed" in caplog.text
    with chat_server(lambda *args: "later") as (url, requests):
        assert ask(url, questions(5), Output(tmp_path, {})) == 0
        assert len(requests) == 1
    assert read_answers(tmp_path)[3]["messages"][-1]["content"] == "later" and len(read_answers(tmp_path)) == 5


@pytest.mark.parametrize("status", [400, 413, 422])
def test_rows_that_a_server_refuses_are_left_out_for_good(tmp_path, caplog, status):
    for num_requests in (5, 0):  # no second try, nor by another run
        with chat_server(only(3, status)) as (url, requests):
            output = Output(tmp_path, {})
            assert ask(url, questions(5), output) == 0
            assert len(requests) == num_requests
        assert list(output.left_out) == [3] and f"Row 3: the server refuses it: {status}" in output.report()
        assert f"delete {tmp_path / '.left_out-*.jsonl'}" in output.report()
    assert sorted(read_answers(tmp_path)) == [0, 1, 2, 4]


@pytest.mark.parametrize("status, num_rows", [(404, 100), (400, 100), (401, 2)])
def test_a_server_that_refuses_everything(tmp_path, status, num_rows):
    output = Output(tmp_path, {})
    with chat_server(lambda *args: status) as (url, requests):
        with pytest.raises(ConnectionRefusedError, match=rf"Row \d: {status} .*--served_model_name"):
            ask(url, questions(num_rows), output)
        assert len(requests) <= min(num_rows, NUM_REFUSED + 3)
    assert not output.left_out


def test_refused_rows_before_the_first_answer(tmp_path):
    """The first rows may be too long, and the server may still be working on the others."""
    rows, num_long = questions(NUM_REFUSED + 3), NUM_REFUSED + 1

    def reply(payload, number):
        if int(payload["messages"][0]["content"]) < num_long:
            return 400
        time.sleep(0.5)
        return "fine"

    with chat_server(reply) as (url, _):
        output = Output(tmp_path, {})
        assert ask(url, rows, output, concurrency=len(rows)) == 0
    assert sorted(output.left_out) == list(range(num_long)) and len(output.done) == 2


def test_a_server_that_refuses_everything_after_an_interruption(tmp_path):
    """Rows of the first run say nothing about the server of the second."""
    with chat_server(lambda *args: "fine") as (url, _):
        ask(url, questions(1), Output(tmp_path, {}))
    refused = pytest.raises(ConnectionRefusedError, match="refuses 1[0-2] requests in succession")
    with chat_server(lambda *args: 400) as (url, _):
        with refused:
            ask(url, questions(100), Output(tmp_path, {}))
        assert ask(url, questions(5), Output(tmp_path, {})) == 4  # too few to tell: another run tries them again
    assert not Output(tmp_path, {}).left_out


@pytest.mark.parametrize("reason", ["abort", "error", "insufficient_system_resource"])
def test_answers_that_are_given_up_are_asked_for_again(tmp_path, reason):
    output = Output(tmp_path, {})
    with chat_server(only(1, assistant("", finish_reason=reason))) as (url, _):
        assert ask(url, questions(3), output) == 1
    assert sorted(read_answers(tmp_path)) == [0, 2] and not output.left_out


@pytest.mark.parametrize(
    "answer, reason",
    [
        (assistant(""), "the server's answer is empty"),
        (assistant(None), "the server's answer is empty"),
        (assistant("", finish_reason="content_filter"), "the server filters the answer"),
        (assistant(None, refusal="I cannot"), "the server refuses to answer: I cannot"),
        (assistant(5), "the content of the server's answer is 5, but must be a text"),
        (assistant(None, tool_calls=["f"]), "the server's answer has 'f' among its tool_calls, but they must be dict"),
        (
            assistant(None, tool_calls=[{"function": {"arguments": "{}"}}]),
            "its answer has a tool call without the name of a function: {'function': {'arguments': {}}}",
        ),
        (
            assistant(None, tool_calls=[{"function": {"name": "f", "arguments": '{"a": '}}], finish_reason="length"),
            "its answer has a tool call whose arguments are no JSON object: {'function': {'name': 'f', 'arguments': '{\"a\": '}}",
        ),
    ],
)
def test_answers_that_nothing_can_be_learned_from_are_none(tmp_path, answer, reason):
    output = Output(tmp_path, {})
    with chat_server(only(1, answer)) as (url, _):
        assert ask(url, questions(3), output) == 0
    assert sorted(read_answers(tmp_path)) == [0, 2]
    assert list(output.left_out) == [1] and output.left_out[1].startswith(reason)


@pytest.mark.parametrize("body", [b'{"error": "overloaded"}', b'{"choices": []}', b"<html>log in</html>", b"[\xff]"])
def test_errors_with_the_status_of_success(tmp_path, caplog, body):
    """Are tried again, and shown."""
    with chat_server(lambda payload, number: body if number == 1 else "fine") as (url, requests):
        assert ask(url, ONE, Output(tmp_path / "later", {})) == 0 and len(requests) == 2
    with chat_server(lambda *args: body) as (url, requests):
        assert ask(url, ONE, Output(tmp_path / "never", {}), max_retries=1) == 1
    told = f"Row 0 failed: ValueError: the response has no answer, but {body.decode(errors='replace')!r}"
    assert len(requests) == 2 and told in caplog.text


def test_answers_in_other_forms(tmp_path):
    answers = {
        "parts": assistant([{"type": "text", "text": "ye"}, {"type": "text", "text": "s"}]),
        "call": assistant(None, tool_calls=[{"function": {"name": "now", "arguments": None}}]),
    }
    with chat_server(lambda payload, number: answers[payload["messages"][0]["content"]]) as (url, _):
        assert ask(url, [{"messages": [user(name)]} for name in answers], Output(tmp_path, {})) == 0
    parts, call = (read_answers(tmp_path)[row]["messages"][1] for row in range(2))
    assert parts["content"] == "yes" and call["tool_calls"] == [{"function": {"name": "now", "arguments": "{}"}}]


@pytest.mark.parametrize("choice", [{}, {"finish_reason": None}])
def test_answers_without_a_finish_reason(tmp_path, choice):
    body = json.dumps({"choices": [{"message": assistant("yes"), **choice}]}).encode()
    with chat_server(lambda *args: body) as (url, _):
        assert ask(url, ONE, Output(tmp_path, {})) == 0
    assert read_answers(tmp_path)[0]["finish_reasons"] == ["stop"]


@pytest.mark.parametrize("reason, drops", [("length", False), ("repetition", True), ("model_length", False)])
def test_answers_that_are_cut(tmp_path, drops, reason):
    output = Output(tmp_path, {}, drops_cut_answers=drops)
    with chat_server(only(1, assistant("cut in the midd", finish_reason=reason))) as (url, _):
        assert ask(url, questions(3), output) == 0
    assert sorted(read_answers(tmp_path)) == ([0, 2] if drops else [0, 1, 2])
    assert "1 rows have an answer that was cut for its length" in output.report()


def test_calls_of_tools_end_a_conversation(tmp_path):
    """What the tool would say is not known."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    with chat_server(lambda *args: message) as (url, _):
        ask(url, DIALOGUE, Output(tmp_path / "new", {}))
    assert read_answers(tmp_path / "new")[0]["messages"] == [user("a"), {**message, "content": ""}]
    older = {**assistant(None), "function_call": call["function"], "finish_reason": "function_call"}
    with chat_server(lambda *args: older) as (url, _):
        ask(url, DIALOGUE, Output(tmp_path / "older", {}))
    written = read_answers(tmp_path / "older")[0]
    assert written["messages"][1]["tool_calls"] == [{"type": "function", "function": call["function"]}]
    assert len(written["messages"]) == 2 and written["finish_reasons"] == ["tool_calls"]


@pytest.mark.parametrize("num_answers", [0, 5])
def test_a_server_that_is_down_ends_the_run(tmp_path, num_answers):
    rows, output = questions(100), Output(tmp_path, {})
    what = "stopped answering" if num_answers else "No server answers at http"
    with chat_server(lambda payload, number: "fine" if number <= num_answers else 503) as (url, requests):
        with pytest.raises(ConnectionError, match=rf"{what}.*Row \d+: ClientResponseError: 503"):
            ask(url, rows, output, max_retries=0)
        # Each of three workers may be asking, and have begun another request.
        assert len(requests) <= num_answers + NUM_REFUSED + 2 * 3
    assert not output.left_out and len(output.done) == num_answers
    nobody = "No server answers at http://127.0.0.1:9/v1: 10 rows in succession failed"
    with pytest.raises(ConnectionError, match=nobody):
        ask("http://127.0.0.1:9/v1", rows, Output(tmp_path, {}), max_retries=0)


def test_a_full_disk_ends_the_run(tmp_path):
    """Or the server would answer all other rows for nothing."""
    output = Output(tmp_path, {})
    output.file = Mock(flush=Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    full = pytest.raises(OSError, match="No space left on device")
    with chat_server(lambda *args: "fine") as (url, requests), full:
        ask(url, questions(30), output)
    assert len(requests) <= 6 and not output.done


def test_an_answer_that_takes_too_long(tmp_path, caplog):
    with chat_server(lambda *args: time.sleep(0.5) or "late") as (url, _):
        assert ask(url, ONE, Output(tmp_path, {}), max_retries=0, timeout=0.1) == 1
    assert "Row 0 failed: TimeoutError: no answer in time. Pass a longer `--timeout`" in caplog.text


def test_texts_are_for_a_target_in_this_process(tmp_path):
    with pytest.raises(ValueError, match="load the target"):
        ask("http://127.0.0.1:9/v1", [{"prompt": "abc"}], Output(tmp_path, {}))


def test_images_for_a_server(tmp_path, caplog):
    with chat_server(lambda payload, number: "new") as (url, requests):
        output = Output(tmp_path, {})
        assert ask(url, vision_rows(), output) == 1
    sent = [payload["messages"] for _, payload in requests]
    contents = chain(*(message["content"] for message in chain(*sent) if isinstance(message["content"], list)))
    urls = {part["image_url"]["url"] for part in contents if part["type"] == "image_url"}
    assert len(urls) == 3 and all(url.startswith("data:image/png;base64,") for url in urls)
    written = {row["row"]: row for row in rows_in(tmp_path.glob("rows-*.jsonl"))}
    assert set(chain(*(row["images"] for row in written.values()))) == urls
    assert "Row 3 failed: there is no image gone.png" in caplog.text and not output.left_out
    assert np.array_equal(np.asarray(load(written[0]["images"][0])), np.asarray(make_image(0)))

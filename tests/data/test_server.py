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


def test_every_turn_of_the_assistant_is_replaced(tmp_path):
    rows = [
        {"messages": [{"role": "system", "content": "s"}, user("a"), assistant("old"), user("b"), assistant("old")]},
        {"messages": [assistant("hello"), user("a"), user("b")]},
    ]
    with chat_server(lambda payload, number: f"new {len(payload['messages'])}") as (url, requests):
        assert ask(url, rows, Output(tmp_path, {}), temperature=0.5, max_tokens=7) == 0
    written = read_answers(tmp_path)
    contents = [[message["content"] for message in written[row]["messages"]] for row in range(2)]
    assert contents == [["s", "a", "new 2", "b", "new 4"], ["a", "b", "new 2"]]
    assert written[0]["finish_reasons"] == ["stop", "stop"]
    path, payload = requests[0]
    assert path == "/v1/chat/completions"
    assert (payload["model"], payload["temperature"], payload["max_tokens"]) == ("m", 0.5, 7)


def test_conversations_with_their_first_prompt_in_a_column_of_its_own(tmp_path):
    rows = [{"prompt": "a", "prompt_id": "x", "messages": [user("a"), assistant("old"), user("b"), assistant("old")]}]
    with chat_server(lambda payload, number: f"new {number}") as (url, _):
        assert ask(url, rows, Output(tmp_path, {})) == 0
    assert [message["content"] for message in read_answers(tmp_path)[0]["messages"]] == ["a", "new 1", "b", "new 2"]


def test_dates_of_messages(tmp_path):
    """As in WildChat. JSON has none."""
    rows = [{"messages": [{**user("a"), "timestamp": datetime(2026, 1, 2)}, assistant("old")]}]
    with chat_server(lambda *args: "new") as (url, requests):
        assert ask(url, rows, Output(tmp_path, {})) == 0
    asked, answered = requests[0][1]["messages"], read_answers(tmp_path)[0]["messages"]
    assert asked[0]["timestamp"] == answered[0]["timestamp"] == "2026-01-02 00:00:00" and answered[1] == assistant(
        "new"
    )
    for other in (b"a", np.zeros(2)):
        with pytest.raises(TypeError, match="cannot be written as JSON"):
            date_as_text(other)


def test_reasoning_is_kept(tmp_path):
    message = {**assistant("yes"), "reasoning_content": "hm"}
    with chat_server(lambda *args: message) as (url, _):
        ask(url, [{"messages": [user("a")]}], Output(tmp_path, {}))
    assert read_answers(tmp_path)[0]["messages"][-1] == message


def test_reasoning_goes_back_under_both_of_its_names(tmp_path):
    """vLLM reads `reasoning`, SGLang `reasoning_content`."""
    with chat_server(lambda *args: {**assistant("yes"), "reasoning": "hm"}) as (url, requests):
        ask(url, [{"messages": [user("a"), assistant("old"), user("b")]}], Output(tmp_path, {}))
    _, payload = requests[1]
    assert payload["messages"][1] == {**assistant("yes"), "reasoning_content": "hm", "reasoning": "hm"}
    assert read_answers(tmp_path)[0]["messages"][1] == {**assistant("yes"), "reasoning_content": "hm"}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_tried_again(tmp_path, status):
    with chat_server(lambda payload, number: status if number % 3 else "fine") as (url, requests):
        assert ask(url, [{"messages": [user(str(i))]} for i in range(4)], Output(tmp_path, {}), max_retries=9) == 0
    assert len(read_answers(tmp_path)) == 4 and len(requests) > 4


@pytest.mark.parametrize("asked, expected", [("7", 7), ("3600", 60), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)])
def test_a_server_says_how_long_to_wait(tmp_path, monkeypatch, asked, expected):
    waits, sleep = [], asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: waits.append(seconds) or sleep(0))
    with chat_server(lambda payload, number: (429, {"Retry-After": asked}) if number == 1 else "fine") as (url, _):
        assert ask(url, [{"messages": [user("a")]}], Output(tmp_path, {})) == 0
    assert max(waits) == pytest.approx(expected, abs=0.02)


def test_failed_rows_are_reported_and_tried_again_by_the_next_run(tmp_path, caplog):
    rows = [{"messages": [user(str(i))]} for i in range(5)]

    def reply(payload, number):
        return 500 if payload["messages"][0]["content"] == "3" else "fine"

    with chat_server(reply) as (url, requests):
        assert ask(url, rows, Output(tmp_path, {}), max_retries=0) == 1
    assert "Row 3 failed" in caplog.text
    with chat_server(lambda *args: "later") as (url, requests):
        assert ask(url, rows, Output(tmp_path, {})) == 0
        assert len(requests) == 1
    assert read_answers(tmp_path)[3]["messages"][-1]["content"] == "later" and len(read_answers(tmp_path)) == 5


@pytest.mark.parametrize("status", [400, 413, 422])
def test_rows_that_a_server_refuses_are_left_out_for_good(tmp_path, caplog, status):
    rows = [{"messages": [user(str(i))]} for i in range(5)]

    def reply(payload, number):
        return status if payload["messages"][0]["content"] == "3" else "fine"

    for num_requests in (5, 0):  # no second try, nor by another run
        with chat_server(reply) as (url, requests):
            output = Output(tmp_path, {})
            assert ask(url, rows, output) == 0
            assert len(requests) == num_requests
        assert list(output.left_out) == [3] and f"Row 3: the server refuses it: {status}" in output.report()
        assert f"delete {tmp_path / '.left_out-*.jsonl'}" in output.report()
    assert sorted(read_answers(tmp_path)) == [0, 1, 2, 4]


@pytest.mark.parametrize("status, num_rows", [(404, 100), (400, 100), (401, 2)])
def test_a_server_that_refuses_everything(tmp_path, status, num_rows):
    rows, output = [{"messages": [user(str(i))]} for i in range(num_rows)], Output(tmp_path, {})
    with chat_server(lambda *args: status) as (url, requests):
        with pytest.raises(ConnectionRefusedError, match=rf"Row \d: {status} .*--served_model_name"):
            ask(url, rows, output)
        assert len(requests) <= min(num_rows, NUM_REFUSED + 3)
    assert not output.left_out


def test_refused_rows_before_the_first_answer(tmp_path):
    """The first rows may be too long, and the server may still be working on the others."""
    rows, num_long = [{"messages": [user(str(i))]} for i in range(NUM_REFUSED + 3)], NUM_REFUSED + 1

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
    rows = [{"messages": [user(str(i))]} for i in range(100)]
    with chat_server(lambda *args: "fine") as (url, _):
        ask(url, rows[:1], Output(tmp_path, {}))
    output = Output(tmp_path, {})
    refused = pytest.raises(ConnectionRefusedError, match="refuses 1[0-2] requests in succession")
    with chat_server(lambda *args: 400) as (url, _):
        with refused:
            ask(url, rows, output)
        assert ask(url, rows[:5], Output(tmp_path, {})) == 4  # too few to tell: another run tries them again
    assert not Output(tmp_path, {}).left_out


@pytest.mark.parametrize(
    "reason, num_failed", [("abort", 1), ("error", 1), ("insufficient_system_resource", 1), ("content_filter", 0)]
)
def test_answers_that_are_given_up_are_none(tmp_path, reason, num_failed):
    answer = {**assistant(""), "finish_reason": reason}
    with chat_server(lambda payload, number: answer if payload["messages"][0]["content"] == "1" else "x") as (url, _):
        output = Output(tmp_path, {})
        assert ask(url, [{"messages": [user(str(i))]} for i in range(3)], output) == num_failed
    assert sorted(read_answers(tmp_path)) == [0, 2] and len(output.left_out) == 1 - num_failed


@pytest.mark.parametrize(
    "answer, reason",
    [
        (assistant(""), "the server's answer is empty"),
        (assistant(None), "the server's answer is empty"),
        ({**assistant(None), "refusal": "I cannot"}, "the server refuses to answer: I cannot"),
        (assistant(5), "the content of the server's answer is 5, but must be a text"),
        (
            assistant(None, tool_calls=["f"]),
            "the server's answer has 'f' among its tool_calls, but they must be dictionaries",
        ),
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
    with chat_server(lambda payload, number: answer if payload["messages"][0]["content"] == "1" else "x") as (url, _):
        output = Output(tmp_path, {})
        assert ask(url, [{"messages": [user(str(i))]} for i in range(3)], output) == 0
    assert sorted(read_answers(tmp_path)) == [0, 2] and output.left_out == {1: reason}


@pytest.mark.parametrize("body", [b'{"error": "overloaded"}', b'{"choices": []}', b"<html>log in</html>", b"[\xff]"])
def test_errors_with_the_status_of_success(tmp_path, caplog, body):
    """Are tried again, and shown."""
    with chat_server(lambda payload, number: body if number == 1 else "fine") as (url, requests):
        assert ask(url, [{"messages": [user("a")]}], Output(tmp_path / "later", {})) == 0 and len(requests) == 2
    with chat_server(lambda *args: body) as (url, requests):
        assert ask(url, [{"messages": [user("a")]}], Output(tmp_path / "never", {}), max_retries=1) == 1
    assert len(requests) == 2
    assert (
        f"Row 0 failed: ValueError: the response has no answer, but {body.decode(errors='replace')!r}" in caplog.text
    )


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
        assert ask(url, [{"messages": [user("a")]}], Output(tmp_path, {})) == 0
    assert read_answers(tmp_path)[0]["finish_reasons"] == ["stop"]


@pytest.mark.parametrize("reason", ["length", "repetition", "model_length"])
@pytest.mark.parametrize("drops", [False, True])
def test_answers_that_are_cut(tmp_path, drops, reason):
    answer = {**assistant("cut in the midd"), "finish_reason": reason}
    with chat_server(lambda payload, number: answer if payload["messages"][0]["content"] == "1" else "x") as (url, _):
        output = Output(tmp_path, {}, drops_cut_answers=drops)
        assert ask(url, [{"messages": [user(str(i))]} for i in range(3)], output) == 0
    assert sorted(read_answers(tmp_path)) == ([0, 2] if drops else [0, 1, 2])
    assert "1 rows have an answer that was cut for its length" in output.report()


def test_calls_of_tools_end_a_conversation(tmp_path):
    """What the tool would say is not known."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    with chat_server(lambda *args: message) as (url, _):
        ask(url, [{"messages": [user("a"), assistant("old"), user("b")]}], Output(tmp_path / "new", {}))
    assert read_answers(tmp_path / "new")[0]["messages"] == [user("a"), {**message, "content": ""}]
    older = {**assistant(None), "function_call": call["function"], "finish_reason": "function_call"}
    with chat_server(lambda *args: older) as (url, _):
        ask(url, [{"messages": [user("a"), assistant("old"), user("b")]}], Output(tmp_path / "older", {}))
    written = read_answers(tmp_path / "older")[0]
    assert written["messages"][1]["tool_calls"] == [{"type": "function", "function": call["function"]}]
    assert len(written["messages"]) == 2 and written["finish_reasons"] == ["tool_calls"]


def test_no_server(tmp_path, caplog):
    assert ask("http://127.0.0.1:9/v1", [{"messages": [user("a")]}], Output(tmp_path, {}), max_retries=1) == 1
    assert "Row 0 failed" in caplog.text


@pytest.mark.parametrize("num_answers", [0, 5])
def test_a_server_that_is_down_ends_the_run(tmp_path, num_answers):
    rows, output = [{"messages": [user(str(i))]} for i in range(100)], Output(tmp_path, {})
    what = "stopped answering" if num_answers else "No server answers at http"
    with chat_server(lambda payload, number: "fine" if number <= num_answers else 503) as (url, requests):
        with pytest.raises(ConnectionError, match=rf"{what}.*Row \d+: ClientResponseError: 503"):
            ask(url, rows, output, max_retries=0)
        # Each of three workers may be asking, and have begun another request.
        assert len(requests) <= num_answers + NUM_REFUSED + 2 * 3
    assert not output.left_out and len(output.done) == num_answers
    with pytest.raises(
        ConnectionError, match="No server answers at http://127.0.0.1:9/v1: 10 rows in succession failed"
    ):
        ask("http://127.0.0.1:9/v1", rows, Output(tmp_path, {}), max_retries=0)


def test_a_full_disk_ends_the_run(tmp_path):
    """Or the server would answer all other rows for nothing."""
    rows, output = [{"messages": [user(str(i))]} for i in range(30)], Output(tmp_path, {})
    output.file = Mock(flush=Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    full = pytest.raises(OSError, match="No space left on device")
    with chat_server(lambda *args: "fine") as (url, requests), full:
        ask(url, rows, output)
    assert len(requests) <= 6 and not output.done


def test_an_answer_that_takes_too_long(tmp_path, caplog):
    with chat_server(lambda *args: time.sleep(0.5) or "late") as (url, _):
        assert ask(url, [{"messages": [user("a")]}], Output(tmp_path, {}), max_retries=0, timeout=0.1) == 1
    assert "Row 0 failed: TimeoutError: no answer in time. Pass a longer `--timeout`" in caplog.text


def test_texts_are_for_a_target_in_this_process(tmp_path):
    with pytest.raises(ValueError, match="load the target"):
        ask("http://127.0.0.1:9/v1", [{"prompt": "abc"}], Output(tmp_path, {}))


def test_images_for_a_server(tmp_path, caplog):
    with chat_server(lambda payload, number: "new") as (url, requests):
        output = Output(tmp_path, {})
        assert ask(url, vision_rows(), output) == 1
    sent = [payload["messages"] for _, payload in requests]
    urls = {
        part["image_url"]["url"]
        for messages in sent
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    }
    assert len(urls) == 3 and all(url.startswith("data:image/png;base64,") for url in urls)
    written = {row["row"]: row for row in rows_in(tmp_path.glob("rows-*.jsonl"))}
    assert set(chain(*(row["images"] for row in written.values()))) == urls
    assert "Row 3 failed: there is no image gone.png" in caplog.text and not output.left_out
    assert np.array_equal(np.asarray(load(written[0]["images"][0])), np.asarray(make_image(0)))

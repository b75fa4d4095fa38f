"""Regenerates answers by an OpenAI-compatible server (vLLM, SGLang)."""

import asyncio
import json
import logging
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import aiohttp

from ..tokenizer import with_arguments_as_text
from .answers import Output, bar_of_rows
from .conversation import Conversation, image_parts
from .images import sendable
from .messages import calls_of, check_calls, read_message, says_something
from .values import RowError, UnreachableError, date_as_text


logger = logging.getLogger(__name__)

# Timeouts, conflicts and rate limits are worth another try. All other 4xx say that the request itself is wrong.
RETRIED_STATUS = {408, 409, 425, 429}
# These may be caused by the row, for example by a prompt that is too long.
ROW_STATUS = {400, 413, 422}
# If so many requests in succession are refused with one status, or get no answer, the rows are not the cause.
NUM_REFUSED = 10
# Finish reasons of answers that the server did not complete: of vLLM, SGLang and DeepSeek.
GIVEN_UP = {"abort", "error", "insufficient_system_resource"}
# Other names of finish reasons. vLLM ends an answer that repeats itself, Mistral one that fills the context.
FINISH_REASONS = {"function_call": "tool_calls", "repetition": "length", "model_length": "length"}


async def regenerate_by_server(
    base_url: str,
    model: str,
    pending: Iterable[Conversation],
    output: Output,
    concurrency: int,
    max_retries: int = 5,
    timeout: float = 600.0,
    api_key: str | None = None,
    first_wait: float = 1.0,
    **sampling: Any,
) -> int:
    """
    Answers with an OpenAI-compatible server (vLLM, SGLang), `concurrency` conversations at a time.

    A request is sent again if its failure may pass (no connection, timeout, rate limit, 5xx), after waits that double, and not
    before the time that the server asks for (`Retry-After`, at most a minute). A row is left out for good if the server refuses
    it for its content (400, 413, 422) or filters the answer, or if the answer is empty.

    Waits are in seconds. `sampling` has more fields of the requests, such as `temperature` and `max_tokens`. Returns the number of
    rows that failed. Another run tries them again.

    Raises:
        ConnectionRefusedError: if the server refuses all of the first requests, or so many later ones that the rows are not the cause.
        ConnectionError: if so many rows in succession get no answer that the server must be down. What is written stays.
        ValueError: if a prompt is a text. Servers answer messages.
    """
    most_failed = max(NUM_REFUSED, concurrency)
    client = ServerClient(base_url, model, iter(pending), output, max_retries, first_wait, sampling, most_failed)
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        timeout=aiohttp.ClientTimeout(total=timeout),
        connector=aiohttp.TCPConnector(limit=concurrency),
        json_serialize=partial(json.dumps, default=date_as_text),
    ) as session:
        await asyncio.gather(*(client.work(session) for _ in range(concurrency)))
    client.check_server(is_end=True)
    client.settle()
    return client.num_failed


@dataclass
class ServerClient:
    """What the workers of [`regenerate_by_server`] share. For the arguments see there."""

    base_url: str
    model: str
    pending: Iterator[Conversation]
    output: Output
    max_retries: int
    first_wait: float
    sampling: dict[str, Any]
    most_failed: int
    num_failed: int = 0
    has_answered: bool = False
    # Rows that got no answer since the last one, and why. The next answer shows that the server is not the cause.
    unanswered: list[tuple[int, Exception]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.progress = bar_of_rows(self.output)

    async def work(self, session: aiohttp.ClientSession) -> None:
        """Answers pending conversations, one after the other."""
        for conversation in self.pending:  # shared: each worker takes the next
            if conversation.text is not None:
                raise ValueError(
                    "A server answers messages, but this data has texts. Leave `--base_url` out, to load the target instead."
                )
            try:
                result = await self.answer(session, conversation)
            except UnreachableError as error:
                self.fail(conversation.row, str(error))
            except RowError as error:
                self.output.leave_out(conversation.row, str(error))
            except Exception as error:
                self.unanswered.append((conversation.row, error))
                self.check_server()
            else:  # a full disk is not a failure of the row, and must end the run
                self.output.write(conversation.row, result)
                self.progress.update()

    async def answer(self, session: aiohttp.ClientSession, conversation: Conversation) -> dict:
        """Asks for the answers of a conversation until it is finished, and returns the new row."""
        is_finished = False
        while not is_finished:
            choice = await self.request(session, conversation)
            self.has_answered = True
            self.settle()
            reason = choice.get("finish_reason") or "stop"
            reason = FINISH_REASONS.get(reason, reason)
            if reason == "content_filter":
                raise RowError("the server filters the answer (finish reason 'content_filter')")
            if reason in GIVEN_UP:
                raise UnreachableError(f"the server gave up on the answer (finish reason {reason!r})")
            is_finished = conversation.answer(message_of(choice), reason)
        return conversation.result()

    def payload(self, conversation: Conversation) -> dict[str, Any]:
        """Returns the body of the request for the next answer."""
        messages = with_image_urls(map(as_sent, conversation.turns), conversation.images)
        payload = {"model": self.model, "messages": messages, **self.sampling}
        kwargs = dict(conversation.template_kwargs)
        if tools := kwargs.pop("tools", None):
            payload["tools"] = tools
        if kwargs:
            payload["chat_template_kwargs"] = kwargs
        return payload

    async def request(self, session: aiohttp.ClientSession, conversation: Conversation) -> dict:
        """Returns the server's choice for the next answer. Sends the request again if its failure may pass."""
        payload = self.payload(conversation)
        url, attempt = f"{self.base_url.rstrip('/')}/chat/completions", 0
        while True:
            try:
                # huggingface_hub's client would reach no server at all with HF_HUB_OFFLINE, not even a local one.
                async with session.post(url, json=payload) as response:
                    if not response.ok:
                        response.reason = (await response.text())[:500]
                    response.raise_for_status()
                    return choice_in(await response.text(errors="replace"))
            except Exception as error:
                if is_refusal(error) or attempt == self.max_retries:
                    raise
                asked = seconds_asked(error)
            await asyncio.sleep(max(asked, self.first_wait * 2**attempt * random.uniform(0.5, 1.0)))
            attempt += 1

    def fail(self, row: int, reason: str) -> None:
        """Counts a row as failed. Another run tries it again."""
        logger.warning(f"Row {row} failed: {reason}")
        self.num_failed += 1

    def settle(self) -> None:
        """Leaves out the rows that the server refused for their content, if it has answered others. The rest failed."""
        for row, error in self.unanswered:
            if self.has_answered and is_of_row(error):
                self.output.leave_out(row, f"the server refuses it: {error.status} {error.message}")
            else:
                self.fail(row, described(error))
        self.unanswered.clear()

    def check_server(self, is_end: bool = False) -> None:
        """Stops the run if too many rows in succession got no answer, for a reason that is not in the rows."""
        refused = [(row, error) for row, error in self.unanswered if is_refusal(error)]
        refuses_all = 0 < len(refused) == len(self.unanswered)
        is_first_run = not (self.has_answered or self.output.done)
        is_stuck = len(self.unanswered) >= self.most_failed or (is_end and is_first_run and refuses_all)
        are_of_rows = self.has_answered and all(is_of_row(error) for _, error in self.unanswered)
        if not is_stuck or are_of_rows:
            return
        if refuses_all:
            row, error = refused[0]
            raise ConnectionRefusedError(
                f"{self.base_url} refuses {len(refused)} requests in succession. Row {row}: {error.status} {error.message}. "
                "Check the address (`--base_url`; most end with /v1), the name of the model (`--served_model_name`), the key "
                "(`--api_key`) and the sampling arguments. No row was left out."
            )
        row, failure = self.unanswered[-1]
        what = f"{self.base_url} stopped answering" if self.has_answered else f"No server answers at {self.base_url}"
        raise ConnectionError(
            f"{what}: {len(self.unanswered)} rows in succession failed. Row {row}: {described(failure)}. Check the address "
            "(`--base_url`) and the server's log. Finished rows are kept: the same command continues."
        )


def is_refusal(error: Exception) -> TypeGuard[aiohttp.ClientResponseError]:
    """Whether the server says that the request itself is wrong."""
    if not isinstance(error, aiohttp.ClientResponseError):
        return False
    return 400 <= error.status < 500 and error.status not in RETRIED_STATUS


def is_of_row(error: Exception) -> TypeGuard[aiohttp.ClientResponseError]:
    """Whether the server refuses a request for a reason that may be in the row."""
    return is_refusal(error) and error.status in ROW_STATUS


def described(error: Exception) -> str:
    """Returns the kind of an error and what it says. A timeout of a whole request says nothing, so a hint stands in."""
    is_timeout = isinstance(error, asyncio.TimeoutError)
    hint = "no answer in time. Pass a longer `--timeout`, or a smaller `--concurrency`" if is_timeout else ""
    return f"{type(error).__name__}: {str(error) or hint}"


def seconds_asked(error: Exception) -> float:
    """Returns the seconds that a server asks to wait (`Retry-After`), at most a minute, or 0."""
    value = (getattr(error, "headers", None) or {}).get("Retry-After", "")
    return min(float(value), 60.0) if value.isdigit() else 0.0


def choice_in(body: str) -> dict:
    """
    Returns the first choice in a server's response, or raises a `ValueError`: some servers report errors with the status 200.
    """
    try:
        choice = json.loads(body)["choices"][0]
        if isinstance(choice["message"], dict):
            return choice
    except (ValueError, LookupError, TypeError):
        pass
    raise ValueError(f"the response has no answer, but {body[:500]!r}")


def message_of(choice: dict) -> dict:
    """
    Returns the message of a server's choice: its content, reasoning and tool calls. Raises `RowError` if it has none of them,
    is a refusal, or cannot be read.
    """
    said = choice["message"]
    if said.get("refusal"):
        raise RowError(f"the server refuses to answer: {said['refusal']!s:.200}")
    read = {"role": "assistant", "content": said.get("content") or "", "tool_calls": calls_of(said) or None}
    read["reasoning_content"] = said.get("reasoning_content") or said.get("reasoning") or None
    message = read_message(read, "the server's answer")  # what cannot be read could not be learned from
    if not says_something(message):  # training would drop it
        raise RowError("the server's answer is empty, or white space alone")
    check_calls(message)
    return message


def as_sent(message: dict) -> dict:
    """Returns a message as servers read it: arguments of tool calls are JSON, and reasoning has both names that servers use."""
    reasoning = message.get("reasoning_content")
    return with_arguments_as_text(message if reasoning is None else {**message, "reasoning": reasoning})


def with_image_urls(messages: Iterable[dict], images: Iterable[Any]) -> list[dict]:
    """Returns messages whose images are in them, as servers read them."""
    upcoming = iter(images)

    def filled(part: dict) -> dict:
        if part["type"] != "image":
            return part
        return {"type": "image_url", "image_url": {"url": sendable(next(upcoming))}}

    return [
        {**message, "content": list(map(filled, message["content"]))} if image_parts(message) else message
        for message in messages
    ]

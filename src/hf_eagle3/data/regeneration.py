"""
On-policy data: the answers of a data set, replaced by the target's own.

A draft is trained to say what its target would say; answers by someone else show it states that the target is seldom
in.
"""

import asyncio
import copy
import json
import logging
import random
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain
from pathlib import Path

import aiohttp
import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, DatasetCard, DatasetCardData, HfApi
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.data.data_collator import pad_without_fast_tokenizer_warning
from trl.chat_template_utils import add_response_schema
from trl.data_utils import get_dataset_column_names

from ..environment import without_paths
from ..remote_code.devices_eagle3 import CUDNN_ATTENTION
from ..tokenizer import PromptEncoder, padding_token
from .prompts import num_positions
from .rows import RowError, read_prompt, summary, without_nulls


logger = logging.getLogger(__name__)

ROLES = {"system", "developer", "user", "assistant"}
# Worth another try: timeouts, conflicts, rate limits. All other 4xx say that the request itself is wrong,
PASSING_STATUS = {408, 409, 425, 429}
# and these that it is so for what the row holds, a prompt that is too long for example.
ROW_STATUS = {400, 413, 422}
# As many requests, one after the other, that are refused for the same reason: then something else is wrong than a row.
NUM_REFUSED = 10
# The server gave an answer up: it is none.
GIVEN_UP = {"abort", "error", "content_filter"}
NUM_NAMED = 3  # of the rows that are left out


# Hidden: `load_dataset` takes them for no data.
SETTINGS, LEFT_OUT = ".settings.json", ".left_out-{:0>5}.jsonl"
CARD = """---
{metadata}
---

# {title}

{num_rows} rows of {dataset}, in which the answers are those of {model} itself: data to train its
[EAGLE-3](https://huggingface.co/papers/2503.01840) draft on, which has to predict what {model} says. Made by
`recipes/regenerate.py` of hf-eagle3 with

```json
{settings}
```

`row` is the number of the row in the source, `finish_reasons` has `stop`, `length` or `tool_calls` for each answer.

```bash
accelerate launch recipes/train.py --model_name_or_path {model} --dataset_name {repo_id} --eval_strategy no
```
"""


class Output:
    """
    A folder of JSON Lines files, one for each process, with a finished row a line. `load_dataset(folder)` reads it. Rows
    that cannot be answered are in hidden files beside these, so that no other run tries them again.

    Args:
        folder (`str` or `Path`)
        settings (`dict`): What the rows were made with; must be the same when a run goes on.
        process_index (`int`): Whose file to write. The first process must come before the others.
        drops_cut_answers (`bool`): Whether rows are left out of which an answer was cut for its length.

    Raises:
        ValueError: if the folder was made with other settings.
    """

    def __init__(self, folder: str | Path, settings: dict, process_index: int = 0, drops_cut_answers: bool = False):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / SETTINGS
        if kept.exists():
            known = json.loads(kept.read_text(encoding="utf-8"))
            if not any(part.stat().st_size for part in folder.glob("rows-*.jsonl")):
                kept.write_text(json.dumps(settings), encoding="utf-8")  # of a run that failed before its first row
            elif known != settings:
                changed = {key: (known.get(key), settings.get(key)) for key in known.keys() | settings.keys()}
                changed = {key: values for key, values in changed.items() if values[0] != values[1]}
                raise ValueError(
                    f"{folder} was begun with other settings (then, now): {changed}. Choose another folder."
                )
        elif any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty, and was not begun by this script. Choose another folder.")
        else:
            kept.write_text(json.dumps(settings), encoding="utf-8")
        path = folder / f"rows-{process_index:05d}.jsonl"
        left_out = LEFT_OUT.format(process_index)
        if process_index == 0:  # before the others begin, and for those that there may have been more of
            for part in (*folder.glob("rows-*.jsonl"), *folder.glob(LEFT_OUT.format("*"))):
                drop_unfinished_line(part)
        self.done = {row["row"] for row in rows_in(folder.glob("rows-*.jsonl"))}
        self.left_out = {row["row"]: row["reason"] for row in rows_in(folder.glob(LEFT_OUT.format("*")))}
        self.num_before, self.num_cut, self.drops_cut_answers = len(self.left_out), 0, drops_cut_answers
        self.file, self.left_out_file = path.open("a", encoding="utf-8"), folder / left_out

    def write(self, row: int, content: dict) -> None:
        """Keeps a finished row."""
        self.num_cut += "length" in content.get("finish_reasons", ())
        if self.drops_cut_answers and "length" in content.get("finish_reasons", ()):
            return self.leave_out(row, "an answer was cut for its length")
        self.file.write(json.dumps({"row": row, **content}, ensure_ascii=False) + "\n")
        self.file.flush()
        self.done.add(row)

    def leave_out(self, row: int, reason: str) -> None:
        """Keeps that a row cannot be answered. The first few are named at once."""
        if len(self.left_out) - self.num_before < NUM_NAMED:
            say_left_out(row, reason)
        self.left_out[row] = reason
        with self.left_out_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"row": row, "reason": reason}, ensure_ascii=False) + "\n")

    def pending(self, dataset: Iterable[dict], *args, **kwargs) -> Iterator["Conversation"]:
        """The [`conversations`] of a data set that are neither written nor left out."""
        known = {*self.done, *self.left_out}
        return conversations(dataset, known, *args, **kwargs, leave_out=self.leave_out)

    def report(self) -> str:
        """What became of the rows that are not as others are, for a message."""
        parts = [f"{self.num_cut} rows have an answer that was cut for its length (finish reason 'length')."] * (
            self.num_cut > 0
        )
        if self.left_out:
            parts.append(f"{len(self.left_out)} rows were left out. {summary(sorted(self.left_out.items()))}")
        return " ".join(parts)


def rows_in(paths: Iterable[Path]) -> Iterator[dict]:
    return (json.loads(line) for path in paths for line in complete_lines(path))


def complete_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        yield from (line for line in file if line.endswith("\n"))


def drop_unfinished_line(path: Path) -> None:
    """What was being written when the process was killed."""
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(content.rfind(b"\n") + 1)


def push_dataset(folder: str | Path, repo_id: str, private: bool | None = None) -> CommitInfo:
    """
    Pushes the rows of an [`Output`] to a data set of the Hub, in one commit, with a card that says what they are. A
    card that is there stays.

    Args:
        folder (`str` or `Path`)
        repo_id (`str`): `<owner>/<name>`; made if it is not there.
        private (`bool`, *optional*): Whether it is private, if it is not there yet.

    Raises:
        ValueError: if there are no rows, or the data set has others, made with other settings.
    """
    folder, api = Path(folder), HfApi()
    settings = without_paths(json.loads((folder / SETTINGS).read_text(encoding="utf-8")))
    files = [path for path in sorted(folder.glob("rows-*.jsonl")) if path.stat().st_size > 0]
    if not files:
        raise ValueError(f"{folder} has no rows to push.")
    operations = [CommitOperationAdd(path.name, path) for path in files]
    repo_id = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True).repo_id
    there = set(api.list_repo_files(repo_id, repo_type="dataset"))
    others = sorted(there - {path.name for path in files} - {"README.md", ".gitattributes", SETTINGS})
    if not others and there & {path.name for path in files}:  # of this folder, at an earlier time?
        known = None
        if SETTINGS in there:
            path = api.hf_hub_download(repo_id, SETTINGS, repo_type="dataset")
            known = json.loads(Path(path).read_text(encoding="utf-8"))
        others = [] if known == settings else [files[0].name]
    if others:
        raise ValueError(f"{repo_id} has {others[0]}, but not of {folder}. Push to another data set, or delete it.")
    operations.append(CommitOperationAdd(SETTINGS, json.dumps(settings, indent=2).encode()))
    if "README.md" not in there:
        source = settings["dataset"] or ", ".join(str(each["path"]) for each in settings["mixture"])
        metadata = DatasetCardData(
            task_categories=["text-generation"],
            tags=["eagle3", "speculative-decoding"],
            configs=[{"config_name": "default", "data_files": [{"split": "train", "path": "rows-*.jsonl"}]}],
        )
        facts = {"title": repo_id.split("/")[-1], "repo_id": repo_id, "model": settings["model"], "dataset": source}
        num_rows = sum(1 for path in files for _ in complete_lines(path))
        shown = json.dumps({name: value for name, value in settings.items() if value not in (None, [])}, indent=2)
        card = DatasetCard(CARD.format(metadata=metadata.to_yaml(), num_rows=num_rows, settings=shown, **facts))
        operations.append(CommitOperationAdd("README.md", str(card).encode()))
    message = "Add answers of the target's own"
    return api.create_commit(repo_id, operations, commit_message=message, repo_type="dataset")


def has_texts(dataset) -> bool:
    """Whether the rows of a `Dataset` or `IterableDataset` are texts, with nothing in them to answer."""
    columns = set(get_dataset_column_names(dataset))
    return "text" in columns and not columns & {"prompt", "messages", "conversations"}


def beginnings(dataset, tokenizer: PreTrainedTokenizerBase, num_tokens: int, num_new_tokens: int):
    """
    Prompts of `num_tokens` tokens out of texts, one for each `num_tokens + num_new_tokens` tokens of a text: continued,
    they are as long as it was. A text has one at least, however short it is.
    """
    apart = num_tokens + num_new_tokens

    def of_rows(rows):
        prompts = []
        texts = [text if isinstance(text, str) else "" for text in rows["text"]]  # of an empty prompt is told later
        for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            starts = [0, *range(apart, len(tokens) - num_tokens + 1, apart)]
            prompts += [tokenizer.decode(tokens[start : start + num_tokens]) for start in starts]
        return {"prompt": prompts}

    return dataset.map(of_rows, batched=True, remove_columns=get_dataset_column_names(dataset))


class Conversation:
    """
    A row on its way: the turns so far, and what others say between the answers that are still to come.

    Args:
        row (`int`): Its number in the data set.
        example (`dict`): See [`~hf_eagle3.data.read_prompt`].
        template_kwargs (`dict`, *optional*): For the chat template, where the row does not say otherwise.

    Raises:
        RowError: if there is nothing to answer, or a role that only the original answer gave rise to (`tool`).
    """

    def __init__(self, row: int, example: dict, template_kwargs: dict | None = None):
        content = read_prompt(example)
        self.row, self.text, self.finish_reasons = row, content.text, []
        self.template_kwargs = {**(template_kwargs or {}), **content.template_kwargs}
        if self.text is not None:
            return
        if unknown := {message["role"] for message in content.messages} - ROLES:
            raise RowError(f"it has messages of {sorted(unknown)}, which depend on the answers that are replaced")
        self.pending, before = [], []
        for message in [*content.messages, {"role": "assistant"}]:
            if message["role"] != "assistant":
                before.append(message)
            elif any(each["role"] == "user" for each in before):
                self.pending.append(before)
                before = []
        if not self.pending:
            raise RowError("it has no user's message to answer")
        self.turns = self.pending.pop(0)

    def answer(self, message: dict, finish_reason: str) -> bool:
        """
        Adds an answer; whether it was the last one. What a tool would say to a call is not known, so that a call is the
        last.
        """
        self.finish_reasons.append(finish_reason)
        if self.text is not None:
            self.completion = message["content"]
            return True
        self.turns.append(message)
        if self.pending and not message.get("tool_calls"):
            self.turns += self.pending.pop(0)
            return False
        return True

    def result(self) -> dict:
        """The row, of the same tools and settings of the template."""
        if self.text is not None:
            return {"prompt": self.text, "completion": self.completion, "finish_reasons": self.finish_reasons}
        kwargs = dict(self.template_kwargs)
        tools = kwargs.pop("tools", None)
        content = {"messages": [with_arguments_as_text(message) for message in self.turns]}
        content |= {"tools": json.dumps(tools, ensure_ascii=False)} if tools else {}
        content |= {"chat_template_kwargs": kwargs} if kwargs else {}
        return {**content, "finish_reasons": self.finish_reasons}


def with_arguments_as_text(message: dict) -> dict:
    """A message whose calls have their arguments as JSON: columns of a data set have one type in all rows."""
    if not message.get("tool_calls"):
        return message
    calls = copy.deepcopy(message["tool_calls"])
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {**message, "tool_calls": calls}


def say_left_out(row: int, reason: str) -> None:
    """Names a row that cannot be answered."""
    logger.warning(f"Row {row} is left out: {reason}.")


def conversations(
    dataset: Iterable[dict],
    done: Container[int],
    process_index: int = 0,
    num_processes: int = 1,
    template_kwargs: dict | None = None,
    leave_out: Callable[[int, str], None] = say_left_out,
) -> Iterator[Conversation]:
    """This process's rows that are not done; `leave_out` is called with the number of each that cannot be answered, and why."""
    for row, example in enumerate(dataset):
        if row % num_processes != process_index or row in done:
            continue
        try:
            yield Conversation(row, example, template_kwargs)
        except RowError as error:
            leave_out(row, str(error))


@torch.no_grad()
def regenerate_locally(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pending: Iterable[Conversation],
    output: Output,
    batch_size: int,
    draft: PreTrainedModel | None = None,
    **generation_kwargs,
) -> None:
    """
    Answers by `target.generate`, `batch_size` conversations at a time. Prompts that are texts are continued as they
    are.

    Args:
        draft ([`Eagle3ForSpeculation`], *optional*): An earlier draft of this target, to make it faster.
        generation_kwargs (*optional*): For `generate`.
    """
    tokenizer.pad_token = padding_token(tokenizer)
    try:
        tokenizer = add_response_schema(tokenizer)  # tells reasoning from answers
    except ValueError:
        logger.info("TRL knows no response template for this chat template: answers are kept as texts.")
    special_ids, encoder = set(tokenizer.all_special_ids), PromptEncoder(tokenizer)
    longest = num_positions(target)

    def prompt_of(conversation: Conversation) -> tuple[str, list[int]]:
        try:
            if conversation.text is not None:
                text, tokens = conversation.text, encoder.text(conversation.text)
            else:
                text = encoder.render(conversation.turns, add_generation_prompt=True, **conversation.template_kwargs)
                tokens = encoder.rendered_tokens(text)
        except Exception as error:
            raise RowError(f"the chat template refuses it: {error or type(error).__name__}") from error
        if not tokens:
            raise RowError("its prompt has no tokens")
        room = generation_kwargs.get("max_new_tokens", 1)
        if longest is not None and len(tokens) + room > longest:
            raise RowError(
                f"its prompt has {len(tokens)} tokens, and with `max_new_tokens={room}` more than the target's table of {longest} "
                "positions"
            )
        return text, tokens

    pending, active = iter(pending), []
    progress = tqdm(desc="Rows", initial=len(output.done), disable=None)
    while True:
        prompts = {}
        for conversation in chain(active, pending):
            try:
                prompts[conversation] = prompt_of(conversation)
            except RowError as error:
                output.leave_out(conversation.row, str(error))
            if len(prompts) >= batch_size:
                break
        active = list(prompts)
        if not active:
            return
        texts = [text for text, _ in prompts.values()]
        prompts = [{"input_ids": tokens} for _, tokens in prompts.values()]
        inputs = pad_without_fast_tokenizer_warning(tokenizer, prompts, return_tensors="pt", padding_side="left")
        inputs = inputs.to(target.device)
        with CUDNN_ATTENTION.off():  # which plans anew for each length of a padded batch
            sequences = target.generate(
                **inputs, assistant_model=draft, pad_token_id=tokenizer.pad_token_id, **generation_kwargs
            )
        stops = target.generation_config.eos_token_id
        stops = {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])}
        remaining = []
        new_tokens = sequences[:, inputs["input_ids"].shape[1] :].tolist()
        for place, (conversation, sequence) in enumerate(zip(active, new_tokens)):
            end = next((i for i, token in enumerate(sequence) if token in stops), None)
            tokens, reason = sequence[:end], "length" if end is None else "stop"
            if conversation.text is not None or not tokens:
                message = {"role": "assistant", "content": tokenizer.decode(tokens)}
            elif getattr(tokenizer, "response_template", None) is not None:
                try:
                    message = {"content": "", **tokenizer.parse_response(tokens, prefix=texts[place])}
                except ValueError as error:
                    output.leave_out(conversation.row, f"its answer cannot be parsed: {error}")
                    continue
            elif special := special_ids & set(tokens):
                names = tokenizer.convert_ids_to_tokens(sorted(special))
                output.leave_out(conversation.row, f"its answer has the special tokens {names}")
                continue
            else:
                message = {"role": "assistant", "content": tokenizer.decode(tokens)}
            if conversation.answer(message, reason):
                output.write(conversation.row, conversation.result())
                progress.update()
            else:
                remaining.append(conversation)
        active = remaining


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
    **sampling,
) -> int:
    """
    Answers by an OpenAI-compatible server (vLLM, SGLang), `concurrency` conversations at a time. A request that fails
    for a reason that may pass (no connection, timeout, rate limit, 5xx) is sent again up to `max_retries` times, after
    waits that double. A row that the server refuses for what it holds (400, 413, 422), or filters, is left out for good.

    Returns:
        `int`: How many rows failed; another run tries them again.

    Raises:
        ConnectionRefusedError: if the first requests are all refused for one reason: it is not that of a row.
    """
    failed, progress = [], tqdm(desc="Rows", initial=len(output.done), disable=None)
    # Rows that were refused since one was answered; whether they are to blame is known when another one is.
    refused: list[tuple[int, aiohttp.ClientResponseError]] = []
    has_answered = bool(output.done)

    async def request(session, conversation):
        payload = {
            "model": model,
            "messages": [with_arguments_as_text(turn) for turn in conversation.turns],
            **sampling,
        }
        kwargs = dict(conversation.template_kwargs)
        if tools := kwargs.pop("tools", None):
            payload["tools"] = tools
        if kwargs:
            payload["chat_template_kwargs"] = kwargs
        for attempt in range(max_retries + 1):
            try:
                # Not huggingface_hub's client, which reaches nothing, local servers included, where HF_HUB_OFFLINE is
                # set.
                async with session.post(url, json=payload) as response:
                    if not response.ok:
                        response.reason = (await response.text())[:500]
                    response.raise_for_status()
                    return (await response.json())["choices"][0]
            except Exception as error:
                if is_refusal(error) or attempt == max_retries:
                    raise
                await asyncio.sleep(first_wait * 2**attempt * random.uniform(0.5, 1.0))

    def settle_refused():
        for row, error in refused:
            if error.status in ROW_STATUS:
                output.leave_out(row, f"the server refuses it: {error.status} {error.message}")
            else:
                fail(row, error)
        refused.clear()

    def fail(row, error):
        logger.warning(f"Row {row} failed: {type(error).__name__}: {error}")
        failed.append(row)

    def stop_if_all_are_refused(is_end: bool = False):
        """Refusals of one kind are not the rows' fault if nothing else comes."""
        statuses = {error.status for _, error in refused}
        is_of_rows = has_answered and statuses <= ROW_STATUS
        if (
            refused
            and not is_of_rows
            and (is_end and not has_answered or len(statuses) == 1 and len(refused) >= NUM_REFUSED)
        ):
            row, error = refused[0]
            raise ConnectionRefusedError(
                f"{base_url} refuses all of the first {len(refused)} requests. Row {row}: {error.status} {error.message}. Check the "
                "name of the model (`--served_model_name`), the key (`--api_key`) and the sampling arguments; nothing was left out."
            )

    async def work(session):
        nonlocal has_answered
        for conversation in pending:  # shared: each takes the next
            if conversation.text is not None:
                raise ValueError(
                    "A server is asked for answers to messages, and this data has texts as prompts: load the target instead."
                )
            try:
                is_finished = False
                while not is_finished:
                    choice = await request(session, conversation)
                    has_answered = True
                    settle_refused()
                    reason = choice["finish_reason"]
                    if reason in GIVEN_UP:
                        break
                    is_finished = conversation.answer(message_of(choice), reason)
                if is_finished:
                    output.write(conversation.row, conversation.result())
                    progress.update()
                elif reason == "content_filter":
                    output.leave_out(
                        conversation.row, "the server filters the answer (finish reason 'content_filter')"
                    )
                else:
                    fail(conversation.row, f"the server gave its answer up (finish reason {reason!r})")
            except Exception as error:
                if is_refusal(error):
                    refused.append((conversation.row, error))
                else:
                    fail(conversation.row, error)
            stop_if_all_are_refused()

    pending, url = iter(pending), f"{base_url.rstrip('/')}/chat/completions"
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        timeout=aiohttp.ClientTimeout(total=timeout),
        connector=aiohttp.TCPConnector(limit=concurrency),
    ) as session:
        await asyncio.gather(*(work(session) for _ in range(concurrency)))
    stop_if_all_are_refused(is_end=True)
    settle_refused()
    return len(failed)


def is_refusal(error: Exception) -> bool:
    """Whether a server says that the request itself is wrong."""
    return 400 <= getattr(error, "status", 0) < 500 and error.status not in PASSING_STATUS


def message_of(choice: dict) -> dict:
    """What an assistant says in a server's choice: its content, its thoughts and its calls of tools."""
    said = choice["message"]
    message = {"role": "assistant", "content": said.get("content") or ""}
    if reasoning := said.get("reasoning_content") or said.get("reasoning"):
        message["reasoning_content"] = reasoning
    if said.get("tool_calls"):
        message["tool_calls"] = without_nulls(said["tool_calls"])
    return message

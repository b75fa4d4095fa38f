"""
On-policy data: the answers of a data set, replaced by the target's own.

A draft is trained to say what its target would say; answers by someone else show it states that the target is seldom
in.
"""

import asyncio
import json
import logging
import random
from collections.abc import Iterable, Iterator
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


logger = logging.getLogger(__name__)

ROLES = {"system", "developer", "user", "assistant"}
# Worth another try: timeouts, conflicts, rate limits. All other 4xx say that the request itself is wrong.
PASSING_STATUS = {408, 409, 425, 429}


SETTINGS = ".settings.json"  # hidden: `load_dataset` takes it for no data
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

`row` is the number of the row in the source, `finish_reasons` has `stop` or `length` for each answer.

```bash
accelerate launch recipes/train.py --model_name_or_path {model} --dataset_name {repo_id} --eval_strategy no
```
"""


class Output:
    """
    A folder of JSON Lines files, one for each process, with a finished row a line. `load_dataset(folder)` reads it.

    Args:
        folder (`str` or `Path`)
        settings (`dict`): What the rows were made with; must be the same when a run goes on.
        process_index (`int`): Whose file to write. The first process must come before the others.

    Raises:
        ValueError: if the folder was made with other settings.
    """

    def __init__(self, folder: str | Path, settings: dict, process_index: int = 0):
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
        if process_index == 0:  # before the others begin, and for those that there may have been more of
            for part in folder.glob("rows-*.jsonl"):
                drop_unfinished_line(part)
        self.done = {json.loads(line)["row"] for part in folder.glob("*.jsonl") for line in complete_lines(part)}
        self.file = path.open("a", encoding="utf-8")

    def write(self, row: int, content: dict) -> None:
        self.file.write(json.dumps({"row": row, **content}, ensure_ascii=False) + "\n")
        self.file.flush()
        self.done.add(row)


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
    return "text" in columns and not columns & {"prompt", "messages"}


def beginnings(dataset, tokenizer: PreTrainedTokenizerBase, num_tokens: int, num_new_tokens: int):
    """
    Prompts of `num_tokens` tokens out of texts, one for each `num_tokens + num_new_tokens` tokens of a text: continued,
    they are as long as it was. A text has one at least, however short it is.
    """
    apart = num_tokens + num_new_tokens

    def of_rows(rows):
        prompts = []
        for tokens in tokenizer(rows["text"], add_special_tokens=False)["input_ids"]:
            starts = [0, *range(apart, len(tokens) - num_tokens + 1, apart)]
            prompts += [tokenizer.decode(tokens[start : start + num_tokens]) for start in starts]
        return {"prompt": prompts}

    return dataset.map(of_rows, batched=True, remove_columns=get_dataset_column_names(dataset))


class Conversation:
    """
    A row on its way: the turns so far, and what others say between the answers that are still to come.

    Args:
        row (`int`): Its number in the data set.
        example (`dict`): With `messages` (of `system`, `user` and `assistant`) or a `prompt`, a text or messages.

    Raises:
        ValueError: if there is nothing to answer, or a role that only the original answer gave rise to (`tool`).
    """

    def __init__(self, row: int, example: dict):
        self.row, self.text, self.finish_reasons = row, None, []
        if not example.get("messages") and isinstance(example.get("prompt"), str):
            self.text = example["prompt"]
            if not self.text:
                raise ValueError("has an empty prompt")
            return
        messages = example.get("messages") or example.get("prompt")
        if not messages:
            raise ValueError(f"has neither messages nor a prompt or text, but {sorted(example)}")
        if unknown := {message["role"] for message in messages} - ROLES:
            raise ValueError(f"has messages of {sorted(unknown)}, which depend on the answers that are replaced")
        self.pending, before = [], []
        for message in [*messages, {"role": "assistant"}]:
            if message["role"] != "assistant":
                before.append({key: value for key, value in message.items() if value is not None})
            elif any(each["role"] == "user" for each in before):
                self.pending.append(before)
                before = []
        if not self.pending:
            raise ValueError("has no user's message to answer")
        self.turns = self.pending.pop(0)

    def answer(self, message: dict, finish_reason: str) -> bool:
        """Adds an answer; whether it was the last one."""
        self.finish_reasons.append(finish_reason)
        if self.text is not None:
            self.completion = message["content"]
            return True
        self.turns.append(message)
        if self.pending:
            self.turns += self.pending.pop(0)
            return False
        return True

    def result(self) -> dict:
        if self.text is not None:
            content = {"prompt": self.text, "completion": self.completion}
        else:
            content = {"messages": self.turns}
        return {**content, "finish_reasons": self.finish_reasons}


def conversations(dataset: Iterable[dict], done: set[int], process_index: int = 0, num_processes: int = 1):
    """This process's rows that are not done, as [`Conversation`]s. Rows that cannot be answered are counted and reported."""
    skipped, reason = 0, ""
    for row, example in enumerate(dataset):
        if row % num_processes != process_index or row in done:
            continue
        try:
            yield Conversation(row, example)
        except ValueError as error:
            skipped, reason = skipped + 1, reason or f"row {row} {error}"
    if skipped:
        logger.warning(f"{skipped} rows were left out: {reason}.")


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
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    try:
        tokenizer = add_response_schema(tokenizer)  # tells reasoning from answers
    except ValueError:
        logger.info("TRL knows no response template for this chat template: answers are kept as texts.")
    special_ids = set(tokenizer.all_special_ids)
    pending, active = iter(pending), []
    progress = tqdm(desc="Rows", initial=len(output.done), disable=None)
    while True:
        while len(active) < batch_size and (conversation := next(pending, None)) is not None:
            active.append(conversation)
        if not active:
            return
        texts = [
            conversation.text
            if conversation.text is not None
            else tokenizer.apply_chat_template(conversation.turns, tokenize=False, add_generation_prompt=True)
            for conversation in active
        ]
        # A template writes the special tokens itself.
        prompts = [
            tokenizer(text, add_special_tokens=conversation.text is not None)
            for text, conversation in zip(texts, active)
        ]
        inputs = pad_without_fast_tokenizer_warning(tokenizer, prompts, return_tensors="pt", padding_side="left")
        inputs = inputs.to(target.device)
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
                    logger.warning(f"Row {conversation.row} is left out: its answer cannot be parsed. {error}")
                    continue
            elif special := special_ids & set(tokens):
                names = tokenizer.convert_ids_to_tokens(sorted(special))
                logger.warning(f"Row {conversation.row} is left out: its answer has the special tokens {names}.")
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
    waits that double.

    Returns:
        `int`: How many rows failed; another run tries them again.
    """
    failed = []
    progress = tqdm(desc="Rows", initial=len(output.done), disable=None)

    async def request(session, turns):
        for attempt in range(max_retries + 1):
            try:
                # Not huggingface_hub's client, which reaches nothing, local servers included, where HF_HUB_OFFLINE is
                # set.
                async with session.post(url, json={"model": model, "messages": turns, **sampling}) as response:
                    if not response.ok:
                        response.reason = (await response.text())[:500]
                    response.raise_for_status()
                    return (await response.json())["choices"][0]
            except Exception as error:
                status = getattr(error, "status", 0)
                is_wrong = 400 <= status < 500 and status not in PASSING_STATUS
                if is_wrong or attempt == max_retries:
                    raise
                await asyncio.sleep(first_wait * 2**attempt * random.uniform(0.5, 1.0))

    async def work(session):
        for conversation in pending:  # shared: each takes the next
            if conversation.text is not None:
                raise ValueError(
                    "A server is asked for answers to messages, and this data has texts as prompts: load the target instead."
                )
            try:
                is_finished = False
                while not is_finished:
                    choice = await request(session, conversation.turns)
                    message = {"role": "assistant", "content": choice["message"].get("content") or ""}
                    reasoning = choice["message"].get("reasoning_content") or choice["message"].get("reasoning")
                    if reasoning:
                        message["reasoning_content"] = reasoning
                    is_finished = conversation.answer(message, choice["finish_reason"])
                output.write(conversation.row, conversation.result())
                progress.update()
            except Exception as error:
                logger.warning(f"Row {conversation.row} failed: {type(error).__name__}: {error}")
                failed.append(conversation.row)

    pending, url = iter(pending), f"{base_url.rstrip('/')}/chat/completions"
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        timeout=aiohttp.ClientTimeout(total=timeout),
        connector=aiohttp.TCPConnector(limit=concurrency),
    ) as session:
        await asyncio.gather(*(work(session) for _ in range(concurrency)))
    return len(failed)

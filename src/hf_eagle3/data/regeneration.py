"""
On-policy data: a data set whose answers are replaced by the target's own.

A draft learns to say what its target would say. Answers of other writers show it states that the target rarely has.
"""

import copy
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset, DatasetInfo, Features, IterableDataset
from filelock import FileLock, Timeout
from huggingface_hub import CommitInfo, CommitOperationAdd, DatasetCard, DatasetCardData, HfApi
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.chat_template_utils import add_response_schema
from trl.data_utils import get_dataset_column_names

from ..environment import what_differs, without_paths
from ..files import write_atomically
from ..remote_code.devices_eagle3 import CUDNN_ATTENTION
from ..tokenizer import PromptEncoder, padded_inputs, padding_token, with_text_part
from .images import ImageReader, storable, with_unread_images
from .prompts import num_positions
from .rows import IMAGES, RowError, UnreachableError, read_prompt, summary


logger = logging.getLogger(__name__)

KEPT_ROLES = {"system", "developer", "user", "assistant"}
# How many batches of texts to sort by length at once. Padding to the longest of any length would take most of the time.
BATCHES_SORTED = 8
NUM_NAMED = 3  # rows to name at once when they are left out

# Hidden, so that `load_dataset` does not read them as data.
SETTINGS, LEFT_OUT, LOCK = ".settings.json", ".left_out-*.jsonl", ".lock-*"
CARD = """---
{metadata}
---

# {title}

{num_rows} rows of {dataset}, with answers that {model} wrote. An [EAGLE-3](https://huggingface.co/papers/2503.01840)
draft of {model} trains on them, because it has to predict what {model} says. Made by `recipes/regenerate.py` of
hf-eagle3 with

```json
{settings}
```

`row` is the number of the row in the source. `finish_reasons` has `stop`, `length` or `tool_calls` for each answer.

```bash
accelerate launch recipes/train.py --model_name_or_path {model} --dataset_name {repo_id} --eval_strategy no
```
"""


class Output:
    """
    A folder of JSON Lines files, one for each process, with one finished row a line. `load_dataset(folder)` reads it. Rows
    that cannot be answered are listed in hidden files, so that no later run tries them again.

    Args:
        folder (`str` or `Path`): The folder. It is made, or belongs to an earlier run with the same settings.
        settings (`dict`): What the rows are made with.
        process_index (`int`, *optional*, defaults to 0):
            The process that writes. The first process must open the folder before the others.
        drops_cut_answers (`bool`, *optional*, defaults to `False`):
            Whether to leave out rows with an answer that was cut for its length.

    Raises:
        ValueError: if the folder was made with other settings, or holds something else, or another run writes there.
    """

    def __init__(self, folder: str | Path, settings: dict, process_index: int = 0, drops_cut_answers: bool = False):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / SETTINGS
        if not kept.exists() and any(not part.match(LOCK) for part in folder.iterdir()):
            raise ValueError(f"{folder} is not empty, and was not begun by this script. Choose another folder.")
        self.lock = locked(folder / LOCK.replace("*", f"{process_index:05d}"))  # until this process ends
        known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else None
        if known != settings:
            if any(part.stat().st_size for part in folder.glob("rows-*.jsonl")):
                difference = what_differs(known or {}, settings)
                raise ValueError(f"{folder} was begun with other settings: {difference}. Choose another folder.")
            for part in folder.glob(LEFT_OUT):  # of an earlier run that wrote no row
                part.unlink()
            write_atomically(kept, json.dumps(settings))  # other processes read it
        path = folder / f"rows-{process_index:05d}.jsonl"
        if process_index == 0:  # before the others start; an earlier run may have had more processes
            for part in (*folder.glob("rows-*.jsonl"), *folder.glob(LEFT_OUT)):
                drop_unfinished_line(part)
        self.done = {row["row"] for row in rows_in(folder.glob("rows-*.jsonl"))}
        self.left_out = {row["row"]: row["reason"] for row in rows_in(folder.glob(LEFT_OUT))}
        self.num_before, self.num_cut, self.drops_cut_answers = len(self.left_out), 0, drops_cut_answers
        self.file = path.open("a", encoding="utf-8")
        self.left_out_file = folder / LEFT_OUT.replace("*", f"{process_index:05d}")

    def write(self, row: int, content: dict) -> None:
        """Writes a finished row. Leaves it out if UTF-8 cannot hold it, or if it was cut and such rows are dropped."""
        line = json.dumps({"row": row, **content}, ensure_ascii=False) + "\n"
        try:
            line.encode()
        except UnicodeEncodeError as error:  # an answer may end within a pair of surrogates
            return self.leave_out(row, f"it has half a character, {line[error.start]!r}")
        self.num_cut += "length" in content.get("finish_reasons", ())
        if self.drops_cut_answers and "length" in content.get("finish_reasons", ()):
            return self.leave_out(row, "an answer was cut for its length")
        self.file.write(line)
        self.file.flush()
        self.done.add(row)

    def leave_out(self, row: int, reason: str) -> None:
        """Records that a row cannot be answered. Warns at once of the first few."""
        reason = reason.encode("utf-8", "backslashreplace").decode()  # it may quote a broken answer
        if len(self.left_out) - self.num_before < NUM_NAMED:
            logger.warning(f"Row {row} is left out: {reason}.")
        self.left_out[row] = reason
        with self.left_out_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"row": row, "reason": reason}, ensure_ascii=False) + "\n")

    def pending(
        self,
        dataset: Iterable[dict],
        process_index: int = 0,
        num_processes: int = 1,
        template_kwargs: dict | None = None,
    ) -> Iterator["Conversation"]:
        """Yields this process's rows that are neither written nor left out. Leaves out those that cannot be answered."""
        for row, example in enumerate(with_unread_images(dataset)):
            if row % num_processes != process_index or row in self.done or row in self.left_out:
                continue
            try:
                yield Conversation(row, example, template_kwargs)
            except RowError as error:
                self.leave_out(row, str(error))

    def report(self) -> str:
        """Returns a message about rows that were left out or have cut answers. Empty if there are none."""
        parts = [f"{self.num_cut} rows have an answer that was cut for its length (finish reason 'length')."] * (
            self.num_cut > 0
        )
        if self.left_out:
            parts.append(f"{len(self.left_out)} rows were left out. {summary(sorted(self.left_out.items()))}")
        return " ".join(parts)


def locked(path: Path) -> FileLock:
    """
    Locks a file until the returned lock is gone. This process may lock it again.

    Raises:
        ValueError: if another process has locked it.
    """
    # A soft lock would outlive a killed process.
    lock = FileLock(path, is_singleton=True, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"Another run writes to {path.parent}, and both would answer the same rows. Wait until it has ended, or choose "
            "another folder."
        ) from None
    except (NotImplementedError, OSError) as error:
        logger.debug(f"{path} is in a file system without locks: {error}")
    return lock


def rows_in(paths: Iterable[Path]) -> Iterator[dict]:
    """Yields the rows of JSON Lines files."""
    return (json.loads(line) for path in paths for line in complete_lines(path))


def features_of(paths: Iterable[Path]) -> Features | None:
    """
    Returns the columns, and the keys of messages, of all rows. `load_dataset` takes them from the first 10 MB of a file, and
    fails at the first tool call after that. `None` if one column has values of several types.
    """
    rows, schemas = rows_in(paths), []
    try:
        while batch := list(islice(rows, 1000)):
            schemas.append(pa.schema(pa.array(batch).type))
        return Features.from_arrow_schema(pa.unify_schemas(schemas, promote_options="permissive"))
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None


def complete_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file. Skips a last line that was cut off."""
    with path.open(encoding="utf-8") as file:
        yield from (line for line in file if line.endswith("\n"))


def drop_unfinished_line(path: Path) -> None:
    """Removes a line that was being written when the process was killed."""
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(content.rfind(b"\n") + 1)


def push_dataset(folder: str | Path, repo_id: str, private: bool | None = None) -> CommitInfo:
    """
    Pushes the rows of an [`Output`] to a data set on the Hub, in one commit, with a card. An existing card stays, but learns of
    new columns.

    Args:
        folder (`str` or `Path`): The folder of the [`Output`].
        repo_id (`str`): `<owner>/<name>`. It is made if it does not exist.
        private (`bool`, *optional*): Whether a new data set is private.

    Raises:
        ValueError: if there are no rows, or the data set has rows that were made with other settings.
    """
    folder, api = Path(folder), HfApi()
    settings = without_paths(json.loads((folder / SETTINGS).read_text(encoding="utf-8")))
    files = [path for path in sorted(folder.glob("rows-*.jsonl")) if path.stat().st_size > 0]
    if not files:
        raise ValueError(f"{folder} has no rows to push. Run recipes/regenerate.py until some are written.")
    operations = [CommitOperationAdd(path.name, path) for path in files]
    repo_id = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True).repo_id
    there = set(api.list_repo_files(repo_id, repo_type="dataset"))
    others = sorted(there - {path.name for path in files} - {"README.md", ".gitattributes", SETTINGS})
    if not others and there & {path.name for path in files}:  # an earlier push of this folder?
        known = None
        if SETTINGS in there:
            path = api.hf_hub_download(repo_id, SETTINGS, repo_type="dataset")
            known = json.loads(Path(path).read_text(encoding="utf-8"))
        others = [] if known == settings else [files[0].name]
    if others:
        raise ValueError(
            f"{repo_id} has {others[0]}, which does not come from {folder}. Push to another data set, or delete it."
        )
    operations.append(CommitOperationAdd(SETTINGS, json.dumps(settings, indent=2).encode()))
    features = features_of(files)
    info = None if features is None else DatasetInfo(features=features)._to_yaml_dict()
    if "README.md" in there:
        card = DatasetCard.load(api.hf_hub_download(repo_id, "README.md", repo_type="dataset"))
        if card.data.get("dataset_info") not in (None, info):  # rows may have new columns
            card.data.dataset_info = info
            operations.append(CommitOperationAdd("README.md", str(card).encode()))
    else:
        source = settings["dataset"] or ", ".join(str(each["path"]) for each in settings["mixture"])
        metadata = DatasetCardData(
            task_categories=["text-generation"],
            tags=["eagle3", "speculative-decoding"],
            configs=[{"config_name": "default", "data_files": [{"split": "train", "path": "rows-*.jsonl"}]}],
            dataset_info=info,
        )
        facts = {"title": repo_id.split("/")[-1], "repo_id": repo_id, "model": settings["model"], "dataset": source}
        num_rows = sum(1 for path in files for _ in complete_lines(path))
        shown = json.dumps({name: value for name, value in settings.items() if value not in (None, [])}, indent=2)
        card = DatasetCard(CARD.format(metadata=metadata.to_yaml(), num_rows=num_rows, settings=shown, **facts))
        operations.append(CommitOperationAdd("README.md", str(card).encode()))
    message = "Add the target's own answers"
    return api.create_commit(repo_id, operations, commit_message=message, repo_type="dataset")


def has_texts(dataset: Dataset | IterableDataset) -> bool:
    """Whether the rows of a data set are texts, without prompts or messages to answer."""
    columns = set(get_dataset_column_names(dataset))
    return "text" in columns and not columns & {"prompt", "messages", "conversations"}


def beginnings(
    dataset: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, num_tokens: int, num_new_tokens: int
) -> Dataset | IterableDataset:
    """
    Returns a data set of prompts, which are pieces of texts. There is one for each `num_tokens + num_new_tokens` tokens of
    a text, so the continued prompts are as long as the text. Even a short text has one.

    Args:
        dataset (`Dataset` or `IterableDataset`): With a column `text`.
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        num_tokens (`int`): Length of a prompt.
        num_new_tokens (`int`): Length of its continuation.
    """
    apart = num_tokens + num_new_tokens

    def prompts_of(rows: dict[str, list]) -> dict[str, list[str]]:
        prompts = []
        texts = [text if isinstance(text, str) else "" for text in rows["text"]]  # empty prompts are reported later
        for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            starts = [0, *range(apart, len(tokens) - num_tokens + 1, apart)]
            pieces = (tokenizer.decode(tokens[start : start + num_tokens]) for start in starts)
            prompts += [piece.strip("\ufffd") for piece in pieces]  # parts of characters that were cut
        return {"prompt": prompts}

    return dataset.map(prompts_of, batched=True, remove_columns=get_dataset_column_names(dataset))


class Conversation:
    """
    A row that is being answered: its turns so far, and the messages between the answers that are still missing.

    Args:
        row (`int`): The row's number in the data set.
        example (`dict`): The row. See [`~hf_eagle3.data.read_prompt`].
        template_kwargs (`dict`, *optional*): For the chat template. What the row says itself comes first.

    Raises:
        RowError: if there is nothing to answer, or a message that depends on an original answer (`tool`).
    """

    def __init__(self, row: int, example: dict, template_kwargs: dict | None = None):
        content = read_prompt(example)
        self.row, self.text, self.completion = row, content.text, ""
        # In a data set with images the contents of all messages are lists of parts, so that a column has one type.
        self.may_see = any(name in example for name in IMAGES) or bool(content.images)
        self.all_images = content.images
        self.finish_reasons: list[str] = []
        self.template_kwargs = {**(template_kwargs or {}), **content.template_kwargs}
        if self.text is not None:
            return
        if any(message["role"] == "assistant" and image_parts(message) for message in content.messages):
            raise RowError("a message of the assistant has images, and its answers are replaced by texts")
        if unknown := {message["role"] for message in content.messages} - KEPT_ROLES:
            raise RowError(
                f"it has messages of {sorted(unknown)}, which may depend on the answers that are replaced. Only messages of "
                f"{sorted(KEPT_ROLES)} can be there"
            )
        self.pending: list[list[dict]] = []
        before: list[dict] = []
        for message in [*content.messages, {"role": "assistant"}]:
            if message["role"] != "assistant":
                before.append(message)
            elif any(each["role"] == "user" for each in before):
                self.pending.append(before)
                before = []
        if not self.pending:
            raise RowError("it has no user message to answer")
        self.turns = self.pending.pop(0)

    @property
    def images(self) -> list[Any]:
        """The images in the conversation so far."""
        if self.text is not None:
            return self.all_images
        return self.all_images[: sum(len(image_parts(message)) for message in self.turns)]

    def answer(self, message: dict, finish_reason: str) -> bool:
        """
        Adds an answer. Returns whether it was the last one. A tool call is the last, because the tool's result is unknown.
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
        """Returns the new row, with the tools and template settings of the old one."""
        images = {"images": [storable(image) for image in self.images]} if self.may_see else {}
        if self.text is not None:
            texts = {"prompt": self.text, "completion": self.completion}
            return {**images, **texts, "finish_reasons": self.finish_reasons}
        kwargs = dict(self.template_kwargs)
        tools = kwargs.pop("tools", None)
        turns = [with_text_part(turn) for turn in self.turns] if self.may_see else self.turns
        content: dict[str, Any] = {**images, "messages": [with_arguments_as_text(message) for message in turns]}
        content |= {"tools": json.dumps(tools, ensure_ascii=False)} if tools else {}
        content |= {"chat_template_kwargs": kwargs} if kwargs else {}
        return {**content, "finish_reasons": self.finish_reasons}


def image_parts(message: dict) -> list[dict]:
    """Returns the parts of a message that stand for images."""
    content = message.get("content")
    return [part for part in content if part["type"] == "image"] if isinstance(content, list) else []


def with_arguments_as_text(message: dict) -> dict:
    """Returns a message with JSON as arguments of tool calls, because a column of a data set has one type in all rows."""
    if not message.get("tool_calls"):
        return message
    calls = copy.deepcopy(message["tool_calls"])
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {**message, "tool_calls": calls}


@torch.no_grad()
def regenerate_locally(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pending: Iterable[Conversation],
    output: Output,
    batch_size: int,
    draft: PreTrainedModel | None = None,
    images: ImageReader | None = None,
    **generation_kwargs: Any,
) -> int:
    """
    Answers with `target.generate`, `batch_size` conversations of similar length at a time. Continues prompts that are texts.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        pending (iterable of [`Conversation`]): What to answer.
        output ([`Output`]): Where finished rows go.
        batch_size (`int`): Number of conversations in a batch.
        draft ([`Eagle3ForSpeculation`], *optional*): An earlier draft of this target, which makes it faster.
        images ([`ImageReader`], *optional*): Reads images. Without it rows with images are left out.
        generation_kwargs (*optional*): For `generate`.

    Returns:
        `int`: The number of rows with an image that could not be reached. Another run tries them again.
    """
    tokenizer.pad_token = padding_token(tokenizer)
    try:
        tokenizer = add_response_schema(tokenizer)  # separates reasoning from answers
    except ValueError:
        logger.info("TRL knows no response template for this chat template. Answers are kept as texts.")
    encode = partial(
        encode_prompt,
        encoder=PromptEncoder(tokenizer),
        room=generation_kwargs.get("max_new_tokens", 1),
        positions=num_positions(target),
        images=images,
    )
    at_once = batch_size * (BATCHES_SORTED if images is None else 1)  # images of many rows take much memory
    upcoming, active, num_failed, order = iter(pending), list[Conversation](), 0, random.Random(0)
    progress = tqdm(desc="Rows", initial=len(output.done), disable=None)
    while True:
        prompts, num_unreachable = encode_prompts(chain(active, upcoming), at_once, encode, output)
        num_failed += num_unreachable
        if not prompts:
            return num_failed
        active = []
        for batch in batches_by_length(prompts, batch_size, order):
            inputs = [prompts[conversation] for conversation in batch]
            answers = generate_answers(target, tokenizer, inputs, images, assistant_model=draft, **generation_kwargs)
            for conversation, (tokens, stop) in zip(batch, answers, strict=True):
                prompt = None if conversation.text is not None else prompts[conversation]["prompt"]
                try:
                    message = parse_answer(tokenizer, tokens, stop, prompt)
                    if conversation.answer(message, "length" if stop is None else "stop"):
                        output.write(conversation.row, conversation.result())
                        progress.update()
                    else:
                        active.append(conversation)
                except RowError as error:
                    output.leave_out(conversation.row, str(error))


def encode_prompts(
    conversations: Iterable[Conversation], most: int, encode: Callable[[Conversation], dict[str, Any]], output: Output
) -> tuple[dict[Conversation, dict[str, Any]], int]:
    """
    Returns at most so many prompts by conversation, and the number of rows with an image that could not be reached. Leaves
    out rows that cannot be answered.
    """
    prompts, num_unreachable = {}, 0
    for conversation in conversations:
        try:
            prompts[conversation] = encode(conversation)
        except UnreachableError as error:
            num_unreachable += 1
            logger.warning(f"Row {conversation.row} failed: {error}")
        except RowError as error:
            output.leave_out(conversation.row, str(error))
        if len(prompts) >= most:
            break
    return prompts, num_unreachable


def batches_by_length(
    prompts: dict[Conversation, dict[str, Any]], batch_size: int, order: random.Random
) -> list[list[Conversation]]:
    """Returns batches of conversations with prompts of about the same length, in random order."""
    by_length = sorted(prompts, key=lambda conversation: len(prompts[conversation]["input_ids"]))
    batches = [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)]
    order.shuffle(batches)  # a run that is stopped early then has prompts of all lengths
    return batches


def encode_prompt(
    conversation: Conversation,
    encoder: PromptEncoder,
    room: int,
    positions: int | None,
    images: ImageReader | None = None,
) -> dict[str, Any]:
    """
    Returns the `prompt` of the next answer and its `input_ids`; with images also `image_data` and `image_text`, see
    [`~hf_eagle3.data.RowEncoder`].

    Args:
        conversation ([`Conversation`]): What to answer.
        encoder ([`PromptEncoder`]): Of the target's tokenizer.
        room (`int`): How many tokens the answer may have.
        positions (`int`, *optional*): The size of the target's table of positions, if it has one.
        images ([`ImageReader`], *optional*): Reads images.

    Raises:
        RowError: if the prompt cannot be rendered, is empty, or is too long.
        UnreachableError: if there is no such image, or its server cannot be reached.
    """
    if conversation.images and images is None:
        raise RowError("it has images, but the target or its processor reads text only")
    try:
        if conversation.text is not None:
            text, tokens = conversation.text, encoder.text(conversation.text)
        else:
            text = encoder.render(conversation.turns, add_generation_prompt=True, **conversation.template_kwargs)
            tokens = encoder.rendered_tokens(text)
        if images is not None and conversation.images:
            special = encoder.special_tokens if conversation.text is not None else []
            start = "".join(encoder.tokenizer.convert_ids_to_tokens(special))
            text = text if text.startswith(start) else start + text
            expansion = images.expand(text, conversation.images)
            tokens = encoder.rendered_tokens(expansion.of(text))
    except RowError:
        raise
    except Exception as error:
        raise RowError(f"the chat template refuses it: {error or type(error).__name__}") from error
    if not tokens:
        raise RowError("its prompt has no tokens")
    if positions is not None and len(tokens) + room > positions:
        raise RowError(
            f"its prompt has {len(tokens)} tokens, and with `max_new_tokens={room}` more than the target's table of {positions} "
            "positions"
        )
    seen = {"image_text": text, "image_data": conversation.images} if conversation.images else {}
    return {"prompt": text, "input_ids": tokens, **seen}


def generate_answers(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[dict[str, Any]],
    images: ImageReader | None = None,
    **generation_kwargs: Any,
) -> list[tuple[list[int], int | None]]:
    """Returns for each prompt the new tokens, and the token that ended them. `None` if they were cut for their length."""
    inputs = padded_inputs(target, tokenizer, prompts, images)
    with CUDNN_ATTENTION.off():  # cuDNN plans again for each length of a padded batch
        sequences = target.generate(
            **inputs, pad_token_id=tokenizer.pad_token_id, return_dict_in_generate=False, **generation_kwargs
        )
    stops = target.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])}
    answers = []
    for sequence in sequences[:, inputs["input_ids"].shape[1] :].tolist():
        end = next((i for i, token in enumerate(sequence) if token in stops), None)
        answers.append((sequence[:end], None if end is None else sequence[end]))
    return answers


def parse_answer(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], stop: int | None, prompt: str | None
) -> dict[str, Any]:
    """
    Returns the message in an answer, with its reasoning and tool calls if the tokenizer can parse them.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        tokens (`list[int]`): The answer.
        stop (`int`, *optional*): The token that ended it.
        prompt (`str`, *optional*): The rendered conversation. `None` if the answer continues a text.

    Raises:
        RowError: if it is empty, or cannot be parsed.
    """
    if not tokens:
        raise RowError("its answer is empty")
    if prompt is not None:
        if getattr(tokenizer, "response_template", None) is not None:
            return parse_by_template(tokenizer, tokens, stop, prompt)
        if special := set(tokenizer.all_special_ids) & set(tokens):
            names = tokenizer.convert_ids_to_tokens(sorted(special))
            raise RowError(f"its answer has the special tokens {names}")
    return {"role": "assistant", "content": tokenizer.decode(tokens)}


def parse_by_template(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], stop: int | None, prompt: str
) -> dict[str, Any]:
    """Returns the message in an answer by the tokenizer's response template. For the arguments see [`parse_answer`]."""
    endings = [[], *([] if stop is None else [[stop]])]
    failure, parsed = None, []
    for ending in endings:
        try:
            parsed.append({"content": "", **tokenizer.parse_response(tokens + ending, prefix=prompt)})
        except ValueError as error:
            failure = error
    # The end of a tool call may be the end of the answer (Llama 3). Otherwise a template may take the last token for text.
    message = next((each for each in reversed(parsed) if each.get("tool_calls")), parsed[0] if parsed else None)
    if message is None:
        raise RowError(f"its answer cannot be parsed: {failure}") from failure
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"its answer has a tool call without the name of a function: {call!r:.80}")
    return message

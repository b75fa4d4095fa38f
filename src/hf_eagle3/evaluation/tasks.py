"""Loads prompts: of the papers' tasks, of a file or folder, or of this machine's Python sources."""

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Json, load_dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.images import ImageReader
from ..data.loading import read_json_lines
from ..data.rows import Row, read_prompt
from ..data.values import RowError
from ..tokenizer import PromptEncoder
from .benchmark import Prompt


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Task:
    """
    A data set of the Hub. A benchmark takes its first `num_prompts` rows. `turns_of` returns the user's turns in a row, and
    `load` has arguments of [`~datasets.load_dataset`].
    """

    path: str
    num_prompts: int
    turns_of: Callable[[dict[str, Any]], list[str]]
    load: dict[str, Any] = field(default_factory=lambda: {"split": "test"})


def spec_bench(name: str) -> Task:
    """Returns one of Spec-Bench's six tasks (arXiv 2401.07851), with 80 prompts, from the copy that vLLM measures speculators on."""
    load = {"data_files": f"{name}.jsonl", "split": "train"}
    return Task("RedHatAI/speculator_benchmarks", 80, lambda row: [row["prompt"]], load)


# The EAGLE papers measure MT-Bench, HumanEval, GSM8K, Alpaca and CNN/DailyMail, on at most 80 prompts each.
TASKS = {
    "mt_bench": Task("HuggingFaceH4/mt_bench_prompts", 80, lambda row: row["prompt"], {"split": "train"}),
    "humaneval": Task("openai/openai_humaneval", 164, lambda row: [f"Complete this function.\n\n{row['prompt']}"]),
    "gsm8k": Task("openai/gsm8k", 80, lambda row: [row["question"]], {"name": "main", "split": "test"}),
    "alpaca": Task(
        "tatsu-lab/alpaca",
        80,
        lambda row: ["\n\n".join(part for part in (row["instruction"], row["input"]) if part)],
        {"split": "train"},
    ),
    "cnn_dm": Task(
        "abisee/cnn_dailymail",
        80,
        lambda row: [f"Summarize:\n\n{row['article']}"],
        # By its name, `datasets` would download the much larger training data, too.
        {"data_files": "3.0.0/test-*", "split": "train"},
    ),
    "math500": Task("HuggingFaceH4/MATH-500", 500, lambda row: [row["problem"]]),
    "spec_bench/mt_bench": spec_bench("question"),
    "spec_bench/translation": spec_bench("translation"),
    "spec_bench/summarization": spec_bench("summarization"),
    "spec_bench/qa": spec_bench("qa"),
    "spec_bench/math": spec_bench("math_reasoning"),
    "spec_bench/rag": spec_bench("rag"),
}
GROUPS = {
    "paper": ["mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm"],
    "spec_bench": [name for name in TASKS if name.startswith("spec_bench/")],
}
OFFLINE = "python"  # the sources of Python's standard library, which every machine has


def expand(names: list[str]) -> list[str]:
    """Replaces groups by their tasks, and folders by their JSON Lines files."""
    expanded = []
    for name in names:
        if name not in {*TASKS, *GROUPS, OFFLINE} and Path(name).is_dir():
            files = sorted(map(str, Path(name).glob("[!.]*.jsonl")))  # some are hidden
            if not files:
                raise ValueError(f"There are no JSON Lines files (*.jsonl) in {name}.")
            expanded += files
        else:
            expanded += GROUPS.get(name, [name])
    unknown = [name for name in expanded if name not in TASKS and name != OFFLINE and not Path(name).is_file()]
    if unknown:
        known = ", ".join([*TASKS, *GROUPS, OFFLINE])
        raise ValueError(f"Unknown tasks {unknown}: neither files nor folders, nor one of {known}.")
    names = list(map(task_name, expanded))
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"There are two tasks of the name {', '.join(sorted(twice))}. Rename one of the files.")
    return expanded


def task_name(name: str) -> str:
    return (Path(name).stem if Path(name).is_file() else name).replace("|", "-")  # which would end a cell of a table


def load_prompts(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int | None = None,
    chat_template_kwargs: dict | None = None,
    answer: Callable[[list[int]], str] | None = None,
    images: ImageReader | None = None,
) -> list[Prompt]:
    """
    Returns the tokenized prompts of a task. User turns and a file's `messages` go through the chat template, if the
    tokenizer has one. A file's `prompt` is taken as it is. A task of several turns (MT-Bench) has a prompt for each turn,
    with the earlier turns and their answers.

    Args:
        name (`str`): A task, or a JSON Lines file; see [`read_prompts`].
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        num_prompts (`int`, *optional*): How many prompts or conversations are taken, from the first on.
        chat_template_kwargs (`dict`, *optional*):
            Arguments of the template, such as `{"enable_thinking": False}`. Those in a row of a file take precedence.
        answer (`Callable`, *optional*):
            Returns the target's answer to a prompt. Without it, conversations end with their first turn.
        images ([`ImageReader`], *optional*): Reads the images of a file's prompts.

    Returns:
        `list[Prompt]`: Tokens of each prompt. A prompt with images is a dictionary: `input_ids`, `image_text`, `image_data`.

    Raises:
        OSError: if a data set of the Hub cannot be loaded.
        ValueError: if there are no prompts, or a row is malformed, or has images that nothing reads.
    """
    if name == OFFLINE:
        _, texts = standard_library()
        return [tokenizer(text[:2000], add_special_tokens=False)["input_ids"][:48] for text in texts[:num_prompts]]
    encoder, kwargs = PromptEncoder(tokenizer), chat_template_kwargs or {}
    if name in TASKS:
        return hub_prompts(name, encoder, num_prompts, kwargs, answer)
    return file_prompts(name, encoder, num_prompts, kwargs, images)


def encode_messages(encoder: PromptEncoder, messages: list[dict], **kwargs: Any) -> list[int]:
    """Returns the tokens of messages, joined as plain text if there is no chat template."""
    if encoder.has_template:
        return encoder.chat(messages, **kwargs)
    logger.warning_once("The tokenizer has no chat template, so the messages of a chat are joined as plain text.")
    return encoder.text("\n\n".join(message["content"] for message in messages))


def hub_prompts(
    name: str,
    encoder: PromptEncoder,
    num_prompts: int | None,
    chat_template_kwargs: dict,
    answer: Callable[[list[int]], str] | None,
) -> list[Prompt]:
    """Returns the prompts of one of `TASKS`. For the arguments see [`load_prompts`]."""
    task, prompts = TASKS[name], list[Any]()
    try:
        rows = load_dataset(task.path, **task.load)
    except Exception as error:  # of many types: of `datasets`, of the Hub's client, and of its HTTP client
        raise OSError(f"{task.path} could not be loaded ({type(error).__name__}): {error}") from error
    if len(rows) < task.num_prompts:
        raise ValueError(f"{task.path} has {len(rows)} rows, but {name} takes {task.num_prompts} of them.")
    for row in rows.select(range(min(num_prompts or task.num_prompts, task.num_prompts))):
        messages: list[dict] = []
        turns = task.turns_of(row)
        for turn in turns if answer is not None else turns[:1]:
            if answer is not None and messages:
                messages.append({"role": "assistant", "content": answer(prompts[-1])})
            messages.append({"role": "user", "content": turn})
            prompts.append(encode_messages(encoder, messages, **chat_template_kwargs))
    return prompts


def encode_with_images(
    encoder: PromptEncoder, row: Row, images: ImageReader | None, chat_template_kwargs: dict
) -> dict[str, Any]:
    """Returns the inputs of a prompt with images. Raises `RowError` if the target does not read them, or the prompt cannot be rendered."""
    if images is None:
        raise RowError("it has images, but the target or its processor reads text only")
    if row.text:
        text = encoder.with_special_tokens(row.text)
    else:
        kwargs = {**chat_template_kwargs, **row.template_kwargs}
        text = encoder.render(row.messages, add_generation_prompt=True, **kwargs)
    tokens = encoder.rendered_tokens(images.expand(text, row.images).of(text))
    return {"input_ids": tokens, "image_text": text, "image_data": row.images}


def file_prompts(
    path: str, encoder: PromptEncoder, num_prompts: int | None, chat_template_kwargs: dict, images: ImageReader | None
) -> list[Prompt]:
    """Returns the prompts of a JSON Lines file. For the arguments see [`load_prompts`]."""
    prompts = list[Any]()
    for number, row in _read_prompts(path, num_prompts):
        try:
            if row.images:
                prompts.append(encode_with_images(encoder, row, images, chat_template_kwargs))
            elif row.text:
                prompts.append(encoder.text(row.text))
            else:
                prompts.append(
                    encode_messages(encoder, row.messages, **{**chat_template_kwargs, **row.template_kwargs})
                )
        except RowError as error:
            raise ValueError(f"{path}, line {number}: {error}.") from None
        except Exception as error:
            raise ValueError(f"{path}, line {number}: the chat template refuses it: {error}") from error
    return prompts


def read_prompts(path: str | Path, num_prompts: int | None = None) -> list[Row]:
    """
    Returns the prompts of a JSON Lines file. Each line is `{"prompt": "..."}` or `{"messages": [...]}`, whose last answer is left
    out. Messages may have `tools` and `chat_template_kwargs`.

    Args:
        path (`str` or `Path`): The file.
        num_prompts (`int`, *optional*): How many prompts are taken, from the first on.

    Raises:
        ValueError: if a line is something else (it names file and line), or if there is none.
    """
    return [row for _, row in _read_prompts(path, num_prompts)]


def _read_prompts(path: str | Path, num_prompts: int | None) -> list[tuple[int, Row]]:
    prompts = []
    for number, content in islice(read_json_lines(path), num_prompts):
        try:
            row = read_prompt(content, dict.fromkeys(content, Json()))
            prompts.append((number, without_answer(row)))
        except RowError as error:
            raise ValueError(f"{path}, line {number}: {error}.") from None
    if not prompts:
        raise ValueError(f"{path} has no prompts.")
    return prompts


def without_answer(row: Row) -> Row:
    """Returns a row without the assistant's messages at its end, so that a line of training data is a prompt, too."""
    asked = [number for number, message in enumerate(row.messages, 1) if message["role"] != "assistant"]
    if row.messages and not asked:
        raise RowError("it has the assistant's messages only, and nothing to answer")
    return replace(row, messages=row.messages[: max(asked, default=0)])


def standard_library(num_held_out: int = 20) -> tuple[list[str], list[str]]:
    """Returns Python's own sources in documents of 2,000 characters, and the second halves of held-out files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}
    files = [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.relative_to(root).parts)]
    sources = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    sources = [source for source in sources if len(source) > 2000]
    held_out = range(0, len(sources), len(sources) // num_held_out)
    documents = [
        source[i : i + 2000]
        for number, source in enumerate(sources)
        if number not in held_out
        for i in range(0, len(source), 2000)
    ]
    # Files begin with the same few words, so the held-out texts begin in the middle.
    return documents, [sources[number][len(sources[number]) // 2 :] for number in held_out][:num_held_out]

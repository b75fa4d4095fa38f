"""The folder that a target's answers are written to, and the data set on the Hub that it becomes."""

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import DatasetInfo
from huggingface_hub import CommitInfo, CommitOperationAdd, DatasetCard, DatasetCardData, HfApi
from tqdm.auto import tqdm

from ..environment import what_differs, without_paths
from ..file_checks import read_json
from ..files import locked, write_atomically
from .conversation import Conversation
from .encoded import MAX_LOST_SHARE
from .images import with_unread_images
from .loading import features_of
from .rows import summary
from .values import RowError, date_as_text


logger = logging.getLogger(__name__)

NUM_NAMED = 3  # rows to name at once when they are left out
NUM_CHECKED = 100  # new rows that encoders read. Each takes as long as in training, while a server waits

# Hidden, so that `load_dataset` does not read them as data.
SETTINGS, LEFT_OUT, PROMPTS, LOCK = ".settings.json", ".left_out-*.jsonl", ".prompts-*", ".lock-*"
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


def bar_of_rows(output: "Output") -> tqdm:
    """Returns a bar of finished rows. In a terminal it moves, and to a log it writes a line each minute."""
    return tqdm(desc="Rows", initial=len(output.done), mininterval=0.1 if sys.stderr.isatty() else 60)


class Output:
    """
    A folder of JSON Lines files, one for each process, with one finished row a line. `load_dataset(folder)` reads it. Rows
    that cannot be answered are listed in hidden files, so that no later run tries them again. Other hidden files have digests of the
    prompts. The first process must open the folder before the others. `drops_cut_answers` leaves out rows with an answer that was cut
    for its length.

    Raises `ValueError` if the folder was made with other `settings`, or holds something else, or another run writes there.
    """

    def __init__(self, folder: str | Path, settings: dict, process_index: int = 0, drops_cut_answers: bool = False):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / SETTINGS
        if not kept.exists() and any(not part.match(LOCK) for part in folder.iterdir()):
            raise ValueError(f"{folder} is not empty, and was not made by this script. Choose another folder.")
        self.lock = locked(folder / LOCK.replace("*", f"{process_index:05d}"))  # until this process ends
        known = read_json(kept) if kept.exists() else None
        if known != settings:
            if any(part.stat().st_size for part in folder.glob("rows-*.jsonl")):
                difference = what_differs(known or {}, settings)
                raise ValueError(f"{folder} was made with other settings: {difference}. Choose another folder.")
            for part in (*folder.glob(LEFT_OUT), *folder.glob(PROMPTS)):  # of an earlier run that wrote no row
                part.unlink()
            write_atomically(kept, json.dumps(settings))  # other processes read it
        path = folder / f"rows-{process_index:05d}.jsonl"
        if process_index == 0:  # before the others start; an earlier run may have had more processes
            for part in (*folder.glob("rows-*.jsonl"), *folder.glob(LEFT_OUT), *folder.glob(PROMPTS)):
                drop_unfinished_line(part)
        self.done = {row["row"] for row in rows_in(folder.glob("rows-*.jsonl"))}
        left_out = list(rows_in(folder.glob(LEFT_OUT)))
        self.left_out = {row["row"]: row["reason"] for row in left_out}
        with_prompts = (*rows_in(folder.glob(PROMPTS)), *left_out)
        # Older folders have none, or only those of later rows.
        self.prompts = {row["row"]: row["digest"] for row in with_prompts if "digest" in row}
        self.num_before, self.num_cut, self.drops_cut_answers = len(self.left_out), 0, drops_cut_answers
        self.learners: Sequence[Callable[[dict], Any]] = ()  # encoders, one of which should take each new row
        self.num_to_check = NUM_CHECKED
        self.file = path.open("a", encoding="utf-8")
        self.left_out_file, self.prompts_file = (
            folder / hidden.replace("*", f"{process_index:05d}") for hidden in (LEFT_OUT, PROMPTS)
        )

    def write(self, row: int, content: dict) -> None:
        """Writes a finished row. Leaves it out if UTF-8 cannot hold it, or if it was cut and such rows are dropped."""
        line = json.dumps({"row": row, **content}, ensure_ascii=False, default=date_as_text) + "\n"
        try:
            line.encode()
        except UnicodeEncodeError as error:  # an answer may end within a pair of surrogates
            return self.leave_out(row, f"it has half a character, {line[error.start]!r}")
        self.num_cut += "length" in content.get("finish_reasons", ())
        if self.drops_cut_answers and "length" in content.get("finish_reasons", ()):
            return self.leave_out(row, "an answer was cut for its length")
        if row in self.prompts:
            append_line(self.prompts_file, {"row": row, "digest": self.prompts[row]})
        self.file.write(line)
        self.file.flush()
        self.done.add(row)
        if self.num_to_check and "messages" in content and not content.get("images"):  # which are not read again
            self.warn_of_refusal(row, content)

    def warn_of_refusal(self, row: int, content: dict) -> None:
        """Warns once if no encoder takes one of the first new rows. TRL's templates take more than others."""
        reason, self.num_to_check = None, self.num_to_check - 1
        for learner in self.learners:
            try:
                learner(content)
                return
            except RowError as error:
                reason = str(error)
        if reason is not None:
            self.learners = ()
            logger.warning(
                f"Training with this chat template cannot learn from row {row}, and rows like it: {reason}. It stops if more than "
                f"{MAX_LOST_SHARE:.0%} of the rows are like that. Train with another template (`chat_template_path`), or remove them."
            )

    def leave_out(self, row: int, reason: str) -> None:
        """Records that a row cannot be answered. Warns at once of the first few."""
        reason = reason.encode("utf-8", "backslashreplace").decode()  # it may quote a broken answer
        if len(self.left_out) - self.num_before < NUM_NAMED:
            logger.warning(f"Row {row} is left out: {reason}.")
        self.left_out[row] = reason
        digest = {"digest": self.prompts[row]} if row in self.prompts else {}
        append_line(self.left_out_file, {"row": row, "reason": reason, **digest})

    def pending(
        self,
        dataset: Iterable[dict],
        process_index: int = 0,
        num_processes: int = 1,
        template_kwargs: dict | None = None,
    ) -> Iterator[Conversation]:
        """
        Yields this process's rows that are neither written nor left out. Leaves out those that cannot be answered. Raises `ValueError`,
        before the first, if a row that is written or left out had another prompt then.
        """
        dataset = with_unread_images(dataset)
        features = getattr(dataset, "features", None)  # a list of rows has none
        finished = {row for row in (*self.done, *self.left_out) if row in self.prompts}
        for row, example in enumerate(islice(dataset, max(finished, default=-1) + 1)):
            if row in finished and self.prompts[row] != prompt_digest(example, template_kwargs, features):
                raise ValueError(
                    f"Row {row} of the data has another prompt than when it was answered or left out in {self.left_out_file.parent}. Rows are "
                    "known by their numbers, so no row may be added, removed or changed. Pass the data as it was, or another folder "
                    "(`--output_dir`)."
                )
        for row, example in enumerate(dataset):
            if row % num_processes != process_index or row in self.done or row in self.left_out:
                continue
            self.prompts[row] = prompt_digest(example, template_kwargs, features)
            try:
                yield Conversation(row, example, template_kwargs, features)
            except RowError as error:
                self.leave_out(row, str(error))

    def report(self) -> str:
        """Returns a message about rows that were left out or have cut answers. Empty if there are none."""
        parts = [f"{self.num_cut} rows have an answer that was cut for its length (finish reason 'length')."] * (
            self.num_cut > 0
        )
        if self.left_out:
            parts.append(f"{len(self.left_out)} rows were left out. {summary(sorted(self.left_out.items()))}")
            parts.append(f"To try them again, delete {self.left_out_file.parent / LEFT_OUT} and run the same command.")
        return " ".join(parts)


def prompt_digest(example: dict, template_kwargs: dict | None = None, features: Any = None) -> str:
    """Returns a digest of a row's prompt. Empty if there is nothing to answer."""
    try:
        return Conversation(0, example, template_kwargs, features).digest()
    except RowError:
        return ""


def append_line(path: Path, content: dict) -> None:
    """Appends an object to a JSON Lines file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content, ensure_ascii=False) + "\n")


def rows_in(paths: Iterable[Path]) -> Iterator[dict]:
    """Yields the rows of an [`Output`]'s files. Raises `ValueError`, naming file and line, if somebody has broken one."""
    for path in paths:
        for number, line in enumerate(complete_lines(path), start=1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or "row" not in row:
                raise ValueError(
                    f"{path}, line {number} is not a row with its number (`row`), as regenerate.py wrote it. Delete the line, and the "
                    "row is answered again."
                )
            yield row


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
    Pushes the rows of an [`Output`] to a data set on the Hub (`<owner>/<name>`, made if it does not exist), in one commit,
    with a card. An existing card stays, but new columns are added to it. Raises `ValueError` if there are no rows, or the data set has
    rows that were made with other settings.
    """
    folder, api = Path(folder), HfApi()
    settings = without_paths(read_json(folder / SETTINGS))
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
            known = read_json(path)
        others = [] if known == settings else [files[0].name]
    if others:
        raise ValueError(
            f"{repo_id} has {others[0]}, which does not come from {folder}. Push to another data set, or delete it."
        )
    operations.append(CommitOperationAdd(SETTINGS, json.dumps(settings, indent=2).encode()))
    features = features_of(rows_in(files))
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

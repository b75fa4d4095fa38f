"""Finds checkpoints that training can resume from: those whose files are all as they were written."""

import json
import math
import zlib
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from transformers.utils import logging

from ..files import UNFINISHED, write_atomically


logger = logging.get_logger(__name__)

# The list of a checkpoint's files. It is written after them, and before `Trainer` writes its state.
CHECKPOINT_FILES = "checkpoint_files.json"
# `enable_jit_checkpoint` has this file while it saves, and removes it after.
JIT_MARKER = "checkpoint-is-incomplete.txt"


def list_files(folder: str | Path) -> None:
    """Writes the list of a checkpoint's files, with the size and CRC-32 of each."""
    folder = Path(folder)
    files = {name: size_and_checksum(folder / name) for name in files_of(folder)}
    write_atomically(folder / CHECKPOINT_FILES, json.dumps(files, indent=2) + "\n")


def files_of(folder: Path) -> list[str]:
    """Returns the files that resuming may read: all but code and cards."""
    others = (".md", ".py", ".pyc", UNFINISHED)
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in others)
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    return [name for name in names if name not in (CHECKPOINT_FILES, JIT_MARKER, TRAINER_STATE_NAME)]


def size_and_checksum(path: Path) -> list[int]:
    """Returns the size of a file, in bytes, and its CRC-32."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return [path.stat().st_size, checksum]


def what_is_broken(folder: str | Path) -> str | None:
    """Returns why training cannot resume from a checkpoint, or `None` if it can."""
    folder = Path(folder)
    if not folder.is_dir():
        return "there is no such folder"
    content = {}
    for name in (TRAINER_STATE_NAME, CHECKPOINT_FILES):
        try:
            content[name] = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            other = " (checkpoints of `save_only_model` have none)" if name == CHECKPOINT_FILES else ""
            return f"it has no {name}{other}"
        except ValueError:
            return f"its {name} is cut off"
    for name, expected in content[CHECKPOINT_FILES].items():
        if not (folder / name).is_file():
            return f"its {name} is missing"
        if size_and_checksum(folder / name) != expected:
            return f"its {name} has changed since it was written"
    return None


def last_whole_checkpoint(folder: str | Path, may_be_none: bool = False) -> str | None:
    """
    Returns the newest whole checkpoint in a training's output folder. Warns of newer ones that it skips. If there is
    none, raises `ValueError`, or returns `None` if it `may_be_none` and none was ever completed.
    """
    skipped = ""
    for checkpoint in reversed(sort_checkpoints(folder)):
        if (reason := what_is_broken(checkpoint)) is None:
            return str(checkpoint)
        logger.warning(f"{checkpoint} is skipped: {reason}.")
        skipped += f" {Path(checkpoint).name}: {reason}."
    if may_be_none and not list(Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")):
        return None
    advice = (
        "Start again, in another folder."
        if skipped
        else "Correct `output_dir`, or leave out `resume_from_checkpoint`."
    )
    raise ValueError(f"There is no checkpoint to resume from in {folder}.{skipped} {advice}")


def checkpoint_to_resume(checkpoint: str | bool | None, output_dir: str | Path) -> str | None:
    """Returns the checkpoint that training resumes from. Raises `ValueError` if it is not intact, or there is none."""
    if checkpoint is True or checkpoint == "auto":
        return agreed_last_checkpoint(output_dir, may_be_none=checkpoint == "auto")
    if not checkpoint:
        return None
    if (reason := what_is_broken(checkpoint)) is not None:
        raise ValueError(
            f"Training cannot resume from {checkpoint}: {reason}. Pass `resume_from_checkpoint=True` to resume from the last intact "
            "checkpoint, or start a new training with its draft (`model`)."
        )
    return str(checkpoint)


def agreed_last_checkpoint(folder: str | Path, may_be_none: bool) -> str | None:
    """Returns the [`last_whole_checkpoint`] that the main process finds, because only one reads the gigabytes."""
    found: str | Exception | None = None
    if PartialState().is_main_process:
        try:
            found = last_whole_checkpoint(folder, may_be_none)
        except Exception as error:  # the other processes wait, and must raise it, too
            found = error
    (found,) = broadcast_object_list([found])
    if isinstance(found, Exception):
        raise found
    return found


def place_in_stream(checkpoint: str | Path, batches_per_step: int) -> tuple[int, int]:
    """
    Returns the pass over a stream in which a checkpoint was written, and how many batches of the pass came before it. `Trainer`
    does not know how long a stream is, takes all steps for one pass, and would begin a later pass anew.
    """
    state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
    epoch = state.epoch or 0.0  # the number of passes, and a share of all steps for the steps of the last one
    passes = max(math.ceil(epoch) - 1, 0)  # a whole number is the end of a pass
    return passes, round((epoch - passes) * state.max_steps) * batches_per_step

"""Finds checkpoints that training can go on from: those whose files are all as they were written."""

import json
import zlib
from pathlib import Path

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
    """Returns why training cannot go on from a checkpoint, or `None` if it can."""
    folder = Path(folder)
    content = {}
    for name in (TRAINER_STATE_NAME, CHECKPOINT_FILES):
        try:
            content[name] = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            other = " (checkpoints of `save_only_model` have none)" if name == CHECKPOINT_FILES else ""
            return f"it has no {name}{other}"
        except ValueError:
            return f"its {name} is cut off"
        if not isinstance(content[name], dict):
            return f"its {name} is not a JSON object"
    for name, expected in content[CHECKPOINT_FILES].items():
        if not (folder / name).is_file():
            return f"its {name} is missing"
        if size_and_checksum(folder / name) != expected:
            return f"its {name} has changed since it was written"
    return None


def last_whole_checkpoint(folder: str | Path, may_be_none: bool = False) -> str | None:
    """
    Returns the newest whole checkpoint in a training's output folder. Warns of newer ones that it skips.

    Args:
        folder (`str` or `Path`): The folder.
        may_be_none (`bool`, *optional*, defaults to `False`): Whether to return `None` if none was written to its end.

    Raises:
        ValueError: if there is none.
    """
    skipped = ""
    for checkpoint in reversed(sort_checkpoints(folder)):
        if (reason := what_is_broken(checkpoint)) is None:
            return str(checkpoint)
        logger.warning(f"{checkpoint} is skipped: {reason}.")
        skipped += f" {Path(checkpoint).name}: {reason}."
    if may_be_none and not list(Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")):
        return None
    raise ValueError(f"There is no checkpoint to go on from in {folder}.{skipped} Begin anew, in another folder.")

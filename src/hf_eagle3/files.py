"""Writing files completely or not at all, and by one run at a time."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from filelock import FileLock

logger = logging.getLogger(__name__)

UNFINISHED = ".unfinished"


def write_atomically(path: str | Path, content: str | Callable[[Path], object]) -> None:
    """
    Writes a file completely or not at all, in a folder that may not exist yet: to `<path>.unfinished`, which is then renamed. A
    killed process leaves that file, and the next one overwrites it. `content` is the text, or a function that writes a file at the
    path that it gets.
    """
    unfinished = Path(f"{path}{UNFINISHED}")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        unfinished.write_text(content, encoding="utf-8")
    else:
        content(unfinished)
    unfinished.replace(path)


def locked(path: Path, folder: str | Path | None = None) -> "FileLock":
    """
    Locks a file until the returned lock is gone. This process may lock it again. Raises `ValueError` if another process has. The
    lock is for `folder`, or else for that of the file. Needs `filelock`.
    """
    from filelock import FileLock, Timeout

    # A soft lock would outlive a killed process.
    lock = FileLock(path, is_singleton=True, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"Another run writes to {folder or path.parent}. Wait until it has ended, or choose another folder."
        ) from None
    except (NotImplementedError, OSError) as error:
        logger.debug(f"{path} is in a file system without locks: {error}")
    return lock

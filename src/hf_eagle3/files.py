"""Writing files completely or not at all."""

from collections.abc import Callable
from pathlib import Path


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

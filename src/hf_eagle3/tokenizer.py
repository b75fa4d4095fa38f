"""The target's tokenizer."""

from pathlib import Path

from transformers import AutoTokenizer


def load_tokenizer(name: str | Path, **kwargs):
    """
    `AutoTokenizer.from_pretrained`, which misses a package where a folder has no tokenizer.

    Raises:
        FileNotFoundError: if it has none.
    """
    if Path(name).is_dir():
        files = [path.name for path in Path(name).iterdir()]
        if not any("token" in file or "vocab" in file or file.endswith((".model", ".tiktoken")) for file in files):
            raise FileNotFoundError(
                f"{name} has no tokenizer. Save the target's there by `tokenizer.save_pretrained({str(name)!r})`."
            )
    return AutoTokenizer.from_pretrained(name, **kwargs)

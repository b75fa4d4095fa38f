"""The target's tokenizer."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedConfig


# What only drafts have in their config.json: ours and those of `speculators`, and those of other projects.
OF_DRAFTS = {"speculators_model_type", "draft_vocab_size", "eagle_config"}


def check_is_target(name: str | Path, **kwargs) -> None:
    """
    Says that a draft is no target, before anything else does.

    Raises:
        ValueError: if it is a draft.
    """
    try:
        content, _ = PreTrainedConfig.get_config_dict(name, **kwargs)
    except OSError:  # whoever loads it says what it lacks
        return
    if OF_DRAFTS & content.keys():
        raise ValueError(f"{name} is a draft, not a target. Pass the model that it was made for as the target.")


def load_tokenizer(name: str | Path, **kwargs):
    """
    `AutoTokenizer.from_pretrained`, which misses a package where a folder has no tokenizer.

    Raises:
        FileNotFoundError: if it has none.
        ValueError: if it is a draft.
    """
    check_is_target(name, **kwargs)
    if Path(name).is_dir():
        files = [path.name for path in Path(name).iterdir()]
        if not any("token" in file or "vocab" in file or file.endswith((".model", ".tiktoken")) for file in files):
            raise FileNotFoundError(
                f"{name} has no tokenizer. Save the target's there by `tokenizer.save_pretrained({str(name)!r})`."
            )
    return AutoTokenizer.from_pretrained(name, **kwargs)

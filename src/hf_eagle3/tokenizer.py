"""The target's tokenizer, and how texts and conversations become tokens."""

import json
import re
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file


# What only drafts have in their config.json: ours and those of `speculators`, and those of other projects.
OF_DRAFTS = {"speculators_model_type", "draft_vocab_size", "eagle_config"}
# Where the templates of processors are that were saved before templates had a file of their own, which tokenizers read.
PROCESSOR_FILES = ("chat_template.json", "processor_config.json")


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
    `AutoTokenizer.from_pretrained`, which misses a package where a folder has no tokenizer, and chat templates that are
    saved with the processor.

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
    tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _template_of_processor(name, **kwargs)
    return tokenizer


def _template_of_processor(name: str | Path, **kwargs) -> str | None:
    of_hub = {key: value for key, value in kwargs.items() if key not in ("trust_remote_code", "code_revision")}
    for file in PROCESSOR_FILES:
        try:
            content = json.loads(Path(cached_file(name, file, **of_hub)).read_text(encoding="utf-8"))
        except OSError:
            continue
        if content.get("chat_template"):
            return content["chat_template"]
    return None


def read_template(path: str | Path) -> str:
    """
    A chat template from a Jinja file.

    Args:
        path (`str` or `Path`): The file, in UTF-8.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not in UTF-8.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {path} (`chat_template_path`).")
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8: {error}. Save the chat template in UTF-8.") from None


def padding_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """A token to pad with: where there is none for it, any one, because padding is masked."""
    return tokenizer.pad_token or tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)


def has_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template marks what the assistant says, by `{% generation %}`."""
    template = tokenizer.chat_template
    template = template.get("default", "") if isinstance(template, dict) else template or ""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


class PromptEncoder:
    """
    Texts and conversations as the target reads them.

    A text begins with the tokenizer's special tokens, once, and does not end with any: what ends is not continued. A
    conversation has those that the chat template writes.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        chat_template (`str`, *optional*): In place of the tokenizer's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None):
        self.tokenizer, self.chat_template = tokenizer, chat_template
        with_special, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
        starts = range(len(with_special) - len(plain) + 1)
        start = next((start for start in starts if with_special[start : start + len(plain)] == plain), 0)
        self.special_tokens = with_special[:start]
        self.takes_parts = self.has_template and self._drops_texts()

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return (self.chat_template or self.tokenizer.chat_template) is not None

    def _drops_texts(self) -> bool:
        """Whether the template writes the content of messages only where it is a list of parts, as processors have it."""
        probe = "3.14159"
        try:
            return probe not in self.render([{"role": "user", "content": probe}], with_parts=False) and (
                probe in self.render([{"role": "user", "content": probe}], with_parts=True)
            )
        except Exception:  # a template that refuses the probe is asked about the rows themselves
            return False

    def render(self, messages: list[dict], with_parts: bool | None = None, **kwargs) -> str:
        """
        The text that the chat template makes of a conversation.

        Args:
            messages (`list[dict]`): The conversation.
            with_parts (`bool`, *optional*): Whether contents are handed over as lists of parts; by default where the template needs it.
            kwargs (*optional*): For the template, such as `tools` and `add_generation_prompt`.
        """
        messages = self.as_taken(messages, with_parts)
        return self.tokenizer.apply_chat_template(messages, chat_template=self.chat_template, tokenize=False, **kwargs)

    def as_taken(self, messages: list[dict], with_parts: bool | None = None) -> list[dict]:
        """Messages as the chat template takes them."""
        if self.takes_parts if with_parts is None else with_parts:
            return [with_text_part(message) for message in messages]
        return messages

    def rendered_tokens(self, text: str) -> list[int]:
        """The tokens of a text that has all its special tokens in it."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, text: str) -> list[int]:
        """The tokens of a text that goes on."""
        tokens = self.rendered_tokens(text)
        if self.special_tokens and tokens[: len(self.special_tokens)] == self.special_tokens:
            return tokens  # a text with a BOS token of its own
        return [*self.special_tokens, *tokens]

    def chat(self, messages: list[dict], **kwargs) -> list[int]:
        """The tokens of a conversation and of what comes before the answer to it."""
        return self.rendered_tokens(self.render(messages, add_generation_prompt=True, **kwargs))


def with_text_part(message: dict) -> dict:
    """A message whose content is a list of parts."""
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}

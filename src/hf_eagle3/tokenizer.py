"""Loading the target's tokenizer, and turning texts and conversations into tokens."""

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, BatchFeature, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.data.data_collator import pad_without_fast_tokenizer_warning

from .environment import is_missing_folder
from .file_checks import check_is_fetched, check_is_object, read_json
from .remote_code.configuration_eagle3 import DRAFT_KEYS
from .tensor_names import HUB_ARGUMENTS, LENIENT, check_is_reachable, find


if TYPE_CHECKING:
    from .data.images import ImageReader


# Keys of what an assistant thinks before it answers.
REASONING = ("reasoning_content", "reasoning", "thinking")
# Arguments of chat templates that bring texts of their own.
CONTEXT = {"documents", "tools"}
# Older processors store their chat template here, where `AutoTokenizer` does not read it.
PROCESSOR_FILES = ("chat_template.json", "processor_config.json")


def check_is_target(name: str | Path, **kwargs: Any) -> None:
    """
    Raises `ValueError` if a model is a draft or an adapter, or its config.json is not an object, `FileNotFoundError` if it is a path
    that does not exist, and `OSError` if the Hub cannot be asked for it. `kwargs` are for `PreTrainedConfig.get_config_dict`.
    """
    if is_missing_folder(str(name)):
        raise FileNotFoundError(f"There is no folder {name}. Pass the folder of the target, or a Hub id (owner/name).")
    if "gguf_file" not in kwargs:  # each file takes half a minute without a connection
        check_is_reachable(
            name, "config.json", **{key: value for key, value in kwargs.items() if key in HUB_ARGUMENTS}
        )
    check_is_object(name, **kwargs)
    try:
        content, _ = PreTrainedConfig.get_config_dict(name, **kwargs)
    except OSError:  # the code that loads the model reports what is missing
        return
    if DRAFT_KEYS & content.keys():
        raise ValueError(f"{name} is a draft, not a target. Pass the model that it was made for as the target.")
    if not content and (adapter := _json_file(name, "adapter_config.json", **kwargs)) is not None:
        raise ValueError(
            f"{name} is an adapter of {adapter.get('base_model_name_or_path')}, not a whole model. Merge it into that model "
            "(`merge_and_unload` of peft), save the result with its tokenizer, and pass that as the target."
        )
    if not content and (models := sorted(path.parent.name for path in Path(name).glob("*/config.json"))):
        raise ValueError(
            f"{name} has no config.json, but some of its folders have one: {models[:5]}. Pass one of them."
        )


def load_tokenizer(name: str | Path, **kwargs: Any) -> PreTrainedTokenizerBase:
    """
    Returns the tokenizer of a target (a folder or Hub id), with the chat template of its processor if it has none of its own.

    Raises:
        FileNotFoundError: if the folder has no tokenizer. (`AutoTokenizer` asks for a missing package instead.)
        ValueError: if it is a draft, or a file of the tokenizer is broken.
    """
    check_is_target(name, **kwargs)
    if Path(name).is_dir():
        paths = [path for path in Path(name).iterdir() if path.is_file()]
        marks = ("tekken", "token", "vocab", ".model", ".tiktoken")
        if not (held := [path for path in paths if any(mark in path.name for mark in marks)]):
            raise FileNotFoundError(
                f"{name} has no tokenizer. Save the target's there by `tokenizer.save_pretrained({str(name)!r})`."
            )
        for path in held:
            check_is_fetched(path)
    try:
        tokenizer = load_with_template(AutoTokenizer, name, **kwargs)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"A file of the tokenizer of {name} is not valid JSON: {error}. Download it again."
        ) from error
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _processor_template(name, **kwargs)
    return tokenizer


def load_with_template(auto_class: Any, name: str | Path, **kwargs: Any) -> Any:
    """
    Returns a tokenizer or processor of transformers. Where mistral-common is installed (by vLLM, for example), auto classes prefer its
    tokenizers for some targets.
    """
    loaded = auto_class.from_pretrained(name, **kwargs)
    return auto_class.from_pretrained(name, mistral_format=False, **kwargs) if takes_no_template(loaded) else loaded


def takes_no_template(processing_class: Any) -> bool:
    """Whether a tokenizer, or that of a processor, is of mistral-common, which takes no chat template."""
    tokenizers = processing_class, getattr(processing_class, "tokenizer", None)
    return any(type(tokenizer).__name__ == "MistralCommonBackend" for tokenizer in tokenizers)


def _processor_template(name: str | Path, **kwargs: Any) -> str | None:
    contents = (_json_file(name, file, **kwargs) or {} for file in PROCESSOR_FILES)
    return next((content["chat_template"] for content in contents if content.get("chat_template")), None)


def _json_file(name: str | Path, file: str, **kwargs: Any) -> dict | None:
    """Returns the content of a model's file, or `None` if there is no such file."""
    hub_kwargs = {key: value for key, value in kwargs.items() if key not in ("trust_remote_code", "code_revision")}
    path = find(name, file, **hub_kwargs, **LENIENT)
    return None if path is None else read_json(path)


def read_template(path: str | Path) -> str:
    """
    Returns the chat template in a Jinja file. Raises `FileNotFoundError` or `ValueError` if it is missing or not in UTF-8.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {path}. `chat_template_path` must be a Jinja file.")
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # some editors begin files with a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8: {error}. Save the chat template in UTF-8.") from None


def padding_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> str:
    """
    Returns a token to pad with. Any token will do if the tokenizer has none for it, or added one that the target's table of
    `vocab_size` tokens does not have, because padding is masked.
    """
    tokens = (token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)
    return tokenizer.convert_ids_to_tokens(next(token for token in tokens if token < vocab_size))


def padded_inputs(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[list[int] | dict[str, Any]],
    images: "ImageReader | None" = None,
) -> BatchFeature:
    """
    Returns the inputs of a target's `generate` for `B` prompts, padded on the left: `input_ids` and `attention_mask` `(B, L)`,
    and what the target reads of images, in its dtype. A row is its tokens, or a dict of `input_ids` and, with images,
    `image_text` and `image_data`.
    """
    examples = [row if isinstance(row, dict) else {"input_ids": row} for row in rows]
    tokens = [{"input_ids": example["input_ids"]} for example in examples]
    padded = pad_without_fast_tokenizer_warning(tokenizer, tokens, padding_side="left", return_tensors="pt")
    inputs = dict(padded)
    if images is not None:
        inputs |= images.inputs(examples, inputs["input_ids"].shape[1], padding_side="left")
    return BatchFeature(inputs).to(target.device, target.dtype)  # casts floats only


def has_call(content: Any, call: dict) -> bool:
    """Whether a content has the names of a tool call's function and arguments, so that it may have the call as text."""
    function = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = function.get("arguments")
    names = [function.get("name"), *(arguments if isinstance(arguments, dict) else ())]
    return isinstance(content, str) and all(isinstance(name, str) and name in content for name in names)


def parts_of(message: dict) -> Iterator[tuple[str, Any, list[list[dict]]]]:
    """
    Yields what a chat template must write of a message: its name for errors, the text that shows it (`None` if it has other
    forms), and what may stand for this message without it: lists of messages.
    """
    role, content, calls = message["role"], message["content"], message.get("tool_calls") or []
    if message.get("tools"):
        without = {name: value for name, value in message.items() if name != "tools"}
        yield "tools of a message. Write them into the column `tools`", None, [[without]]
    if content and role not in ("user", "assistant"):
        yield f"messages of {role!r}", content, [[]]
    if role != "assistant":
        return
    if calls and not has_call(content, calls[0]):
        yield "tool calls", None, [[{**message, "tool_calls": []}]]
        if content.strip() if isinstance(content, str) else content:  # Llama 3.1's template leaves it out
            yield "the text beside a tool call", content, [[{**message, "content": ""}]]
    if len(calls) > 1 and not has_call(content, calls[1]):  # gpt-oss's template leaves it out
        yield "tool calls after a message's first", None, [[{**message, "tool_calls": calls[:1]}]]
    if reasoning := next((message[name] for name in REASONING if isinstance(message.get(name), str)), None):
        # Not without any: some templates write other white space then (Nemotron 3).
        other = {name: "3.14159" if name in REASONING else value for name, value in message.items()}
        yield "the assistant's reasoning", reasoning, [[other]]
    within, mark, answer = content.partition("</think>") if isinstance(content, str) else ("", "", "")
    if mark and (within := within.replace("<think>", "").strip()):  # DeepSeek-R1's template leaves it out
        # Some templates also drop the lines between reasoning and answer (Qwen3, LFM2.5).
        instead = [[{**message, "content": each}] for each in (answer, answer.lstrip())]
        yield "the assistant's reasoning (what is before </think>)", within, instead


class PromptEncoder:
    """
    Turns texts and conversations into the tokens that the target reads. A `chat_template` replaces the tokenizer's own.

    A text begins with the tokenizer's special tokens, once. It does not end with any, because the target would not continue
    it. A conversation has the special tokens that the chat template writes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None):
        self.tokenizer, self.chat_template = tokenizer, chat_template
        with_special, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
        starts = range(len(with_special) - len(plain) + 1)
        start = next((start for start in starts if with_special[start : start + len(plain)] == plain), 0)
        self.special_tokens = with_special[:start]
        self.takes_parts = self.takes_text_arguments = self.takes_reasoning_in_content = False
        self.takes_parts = self.has_template and self._drops_texts()
        self.takes_text_arguments = (
            self.has_template and self._takes_call('{"a": 1}') and not self._takes_call({"a": 1})
        )
        self.takes_reasoning_in_content = self.has_template and self._takes_reasoning_in_content()
        # What the template was asked to write, and whether it writes that only in the last turn.
        self.written: dict[tuple[str | bool, ...], bool] = {}

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return (self.chat_template or self.tokenizer.chat_template) is not None

    def _drops_texts(self) -> bool:
        """Whether the template writes contents only if they are lists of parts, as processors pass them."""
        probe = "3.14159"
        try:
            return probe not in self.render([{"role": "user", "content": probe}], with_parts=False) and (
                probe in self.render([{"role": "user", "content": probe}], with_parts=True)
            )
        except Exception:  # the template refuses the probe; rows themselves will show what it takes
            return False

    def _takes_call(self, arguments: Any) -> bool:
        """Whether the template takes a tool call with these arguments. Some take only JSON (DeepSeek)."""
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        try:
            self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}])
        except Exception:
            return False
        return True

    def _takes_reasoning_in_content(self) -> bool:
        """Whether the target's answers begin with reasoning that the template takes only in contents (DeepSeek-R1 in TRL's version)."""
        question, probe = {"role": "user", "content": "a"}, "3.14159"
        answer = {"role": "assistant", "content": "b", "reasoning_content": probe}
        try:
            is_opened = self.render([question], add_generation_prompt=True).rstrip().endswith("<think>")
            return is_opened and (
                probe not in self.render([question, answer])
                and probe in self.render([question, with_reasoning_in_content(answer)])
            )
        except Exception:  # the template refuses the probe
            return False

    def check_written(self, messages: list[dict], text: str, **kwargs: Any) -> bool:
        """
        Checks that the chat template writes messages of all roles, tool calls, texts beside these, reasoning, tools and
        documents. Many templates silently leave out what they do not know. `text` is what [`~PromptEncoder.render`] makes
        of the messages. Raises `ValueError` if the template leaves something out.

        In a prompt (`add_generation_prompt`), the assistant's turns may be shortened, because the target is asked like that.

        Returns whether the template leaves out something of an earlier turn (reasoning, usually) that it writes in the last one.
        """
        cuts_earlier = False
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and kwargs.get("add_generation_prompt"):
                continue
            before, after = messages[:number], messages[number + 1 :]
            for what, shown, instead in parts_of(message):
                # It counts as written even if only the template's own prompt says the same.
                if isinstance(shown, str) and shown.strip() in text:
                    continue
                place = what, not after, *filter(message.get, message)
                if place not in self.written:
                    is_cut = any(self._renders(text, [*before, *without, *after], **kwargs) for without in instead)
                    is_last = message["role"] != "assistant" or not after
                    alone = [[*before, *without] for without in instead]
                    if is_cut and (is_last or self._leaves_out([*before, message], alone, **kwargs)):
                        raise ValueError(f"it leaves out {what}. Remove or rename them, or pass another template")
                    self.written[place] = is_cut
                cuts_earlier |= self.written[place]
        for name in filter(kwargs.get, CONTEXT):
            if (name,) in self.written:
                continue
            if self._renders(text, messages, **{key: value for key, value in kwargs.items() if key != name}):
                raise ValueError(f"it leaves out the `{name}`. Remove them, or pass another template")
            self.written[name,] = False
        return cuts_earlier

    def _leaves_out(self, messages: list[dict], others: list[list[dict]], **kwargs: Any) -> bool:
        """Whether the template makes the same text of a conversation and one of some others. It may refuse them."""
        try:
            text = self.render(messages, **kwargs)
        except Exception:
            return False
        return any(self._renders(text, each, **kwargs) for each in others)

    def _renders(self, text: str, messages: list[dict], **kwargs: Any) -> bool:
        """Whether the template makes this text of messages. It may refuse them."""
        try:
            return self.render(messages, **kwargs) == text
        except Exception:
            return False

    def render(self, messages: list[dict], with_parts: bool | None = None, **kwargs: Any) -> str:
        """
        Returns the text that the chat template makes of a conversation. `kwargs` are for the template (`tools`,
        `add_generation_prompt`). Contents are passed as lists of parts if the template needs it, or as `with_parts` says.
        """
        messages = self.as_expected(messages, with_parts)
        return self.tokenizer.apply_chat_template(messages, chat_template=self.chat_template, tokenize=False, **kwargs)

    def as_expected(self, messages: list[dict], with_parts: bool | None = None) -> list[dict]:
        """Returns messages in the form that the chat template expects."""
        if self.takes_text_arguments:
            messages = [with_arguments_as_text(message) for message in messages]
        if self.takes_reasoning_in_content:
            messages = [with_reasoning_in_content(message) for message in messages]
        if self.takes_parts if with_parts is None else with_parts:
            return [with_text_part(message) for message in messages]
        return messages

    def rendered_tokens(self, text: str) -> list[int]:
        """Returns the tokens of a text that already contains its special tokens."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, text: str) -> list[int]:
        """Returns the tokens of a text to continue."""
        tokens = self.rendered_tokens(text)
        if self.special_tokens and tokens[: len(self.special_tokens)] == self.special_tokens:
            return tokens  # the text contains its BOS token
        return [*self.special_tokens, *tokens]

    def with_special_tokens(self, text: str) -> str:
        """Returns a text to continue with its special tokens, once, as a processor reads them."""
        start = "".join(self.tokenizer.convert_ids_to_tokens(self.special_tokens))
        return text if text.startswith(start) else start + text

    def chat(self, messages: list[dict], **kwargs: Any) -> list[int]:
        """Returns the tokens of a conversation, up to where the answer begins."""
        return self.rendered_tokens(self.render(messages, add_generation_prompt=True, **kwargs))


def with_arguments_as_text(message: dict) -> dict:
    """Returns a message with JSON as arguments of tool calls."""
    if not message.get("tool_calls"):
        return message
    calls = copy.deepcopy(message["tool_calls"])
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**message, "tool_calls": calls}


def with_reasoning_in_content(message: dict) -> dict:
    """Returns a message with its reasoning before its text, as models write them."""
    reasoning = next((message[name] for name in REASONING if message.get(name)), None)
    if reasoning is None or not isinstance(message["content"], str):
        return message
    others = {name: value for name, value in message.items() if name not in REASONING}
    return {**others, "content": f"<think>\n{reasoning}\n</think>\n\n{message['content']}"}


def with_text_part(message: dict) -> dict:
    """Returns the message with its content as a list of parts."""
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}

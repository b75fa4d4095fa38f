"""Turning rows into tokens and labels."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from datasets import Features
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.data_utils import common_prefix_length

from .. import __version__
from ..tokenizer import PromptEncoder
from .images import Expansion, ImageReader
from .messages import is_learned, says_something, unlearned_by
from .rows import IMAGES, SAYS_WHAT_IS_LEARNED, Row, read_images, read_row
from .values import RowError, UnusableRow


Span = tuple[int, int]  # where a part of a text or of its tokens begins and ends


def has_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template marks the assistant's turns with `{% generation %}`."""
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    return template is not None and has_generation_markers(template)


def training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """
    Returns TRL's version of the tokenizer's chat template, which marks the assistant's turns. `None` if the template already
    has markers, or TRL knows no such version.
    """
    if has_markers(tokenizer):
        return None
    try:
        return get_training_chat_template(tokenizer)
    except Exception:  # TRL knows no marked version, or this template cannot render its probes
        return None


def check_tokens(tokens: list[int], vocab_size: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raises `RowError` if a token is not among the target's `vocab_size`. A `tokenizer` made them, or the data has them."""
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < vocab_size:
            advice = "Tokenize it for this target"
            if tokenizer is not None:
                text = tokenizer.convert_ids_to_tokens(token)
                advice = f"It is {text!r}, of the tokenizer's {len(tokenizer)} tokens. Pass the target's own tokenizer"
            raise RowError(f"it has token {token}, but the target's vocabulary ends at {vocab_size - 1}. {advice}")


class RowEncoder(PromptEncoder):
    """
    Turns rows into `input_ids` and `labels`.

    A text begins with the tokenizer's special tokens and ends with EOS, each once. A conversation has the special tokens
    that the chat template writes.

    The template's `{% generation %}` markers show what the assistant says. A template without markers renders the
    conversation twice for each of the assistant's turns: up to where the turn begins, and up to its end. The turn is the
    difference. This works only if the tokens of both are a prefix of the whole conversation's. One token may join the end of the
    prompt and the beginning of the turn. It is not learned.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        kind (`str`): The kind of the rows. See [`~hf_eagle3.data.kind_of`].
        vocab_size (`int`, *optional*): The target's vocabulary size. Tokens beyond it are refused.
        assistant_only_loss (`bool`, *optional*, defaults to `False`): Whether to learn only what the assistant says.
        completion_only_loss (`bool`, *optional*):
            Whether to learn only the completions of rows with prompts and completions.
        formatting_func (`Callable`, *optional*): Makes a text from a row.
        images ([`ImageReader`] or `str`, *optional*): Reads images, or says why rows with images are refused.
        features (`Features`, *optional*): The types of the data set's columns; see [`~hf_eagle3.data.read_row`].
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kind: str,
        vocab_size: int | None = None,
        assistant_only_loss: bool = False,
        completion_only_loss: bool | None = None,
        formatting_func: Callable[[dict], str] | None = None,
        images: ImageReader | str = "and there is no processor to read them",
        features: Features | None = None,
    ):
        template = training_template(tokenizer) if assistant_only_loss else None
        super().__init__(tokenizer, template)
        self.kind, self.vocab_size, self.formatting_func = kind, vocab_size, formatting_func
        self.assistant_only_loss, self.completion_only_loss = assistant_only_loss, completion_only_loss is not False
        self.learns_a_part = bool(assistant_only_loss or completion_only_loss)
        self.is_marked = template is not None or has_markers(tokenizer)
        self.images, self.features = images, features
        self.version = __version__  # or `datasets` would take rows from its cache that another version has encoded

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """
        Reads and encodes a row.

        Args:
            row (`dict`): A row of the data set.

        Returns:
            `dict`: `input_ids`, `labels`, and `seq_lengths` if the row has them. `lost` is the number of assistant turns that
            could not be found, `drops_reasoning` whether the template leaves out the reasoning of an earlier turn, and `is_unpadded`
            whether tokens were removed that are taken for padding, but may have been text. If there is an [`ImageReader`], also
            `image_data`, the images; `image_text`, the text that the processor reads with them, empty without images; and `image_end`,
            the number of tokens up to the end of the last image.

        Raises:
            RowError: if the row cannot be learned from.
        """
        content = self._read(row)
        encoded: dict[str, Any] = {"lost": 0, "drops_reasoning": False, "is_unpadded": False}
        if content.tokens is not None:
            is_masked = row.get("attention_mask") is not None or "seq_lengths" in content.tokens
            encoded |= content.tokens if is_masked else self._without_padding(content.tokens)
        elif content.messages:
            encoded |= self.encode_chat(content)
        else:
            encoded |= self.encode_text(content.text or "", content.completion, content.images)
        if isinstance(self.images, ImageReader):
            encoded = {"image_text": "", "image_end": 0, "image_data": content.images} | encoded
        if self.vocab_size is not None:
            check_tokens(encoded["input_ids"], self.vocab_size, None if content.tokens else self.tokenizer)
        return encoded

    def _read(self, row: dict[str, Any]) -> Row:
        """Reads a row, or the text that `formatting_func` makes of it. Refuses images that cannot be read."""
        if self.formatting_func is None:
            content = read_row(row, self.kind, self.features)
            if content.tokens and self.learns_a_part and all(row.get(name) is None for name in SAYS_WHAT_IS_LEARNED):
                raise RowError(
                    "it has no 'labels' and no mask of what is learned, so it would be learned whole in spite of `assistant_only_loss` or "
                    "`completion_only_loss`. Add them, remove the row, or leave the option out"
                )
        else:
            text = self.formatting_func(row)
            if not isinstance(text, str):
                raise RowError(
                    f"`formatting_func` returned {type(text).__name__}, but gets one row and must return its text"
                )
            content = Row(text=text, images=read_images(row))
        if content.images and isinstance(self.images, str):
            raise RowError(f"it has images, {self.images}")
        if content.images and any(name in row for name in IMAGES) and not read_images(row):
            raise RowError("it has images in its messages, but the data has a column for images. Use one of them")
        return content

    def _without_padding(self, tokens: dict[str, list[int]]) -> dict[str, Any]:
        """
        Removes padding tokens at both ends of a row without an attention mask. If they may be something else (EOS, usually), only a run
        of them is padding, except for one that begins or ends the text.
        """
        bos, eos, unk = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, self.tokenizer.unk_token_id
        padding = eos if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        places = [place for place, token in enumerate(tokens["input_ids"]) if token != padding] or [0]
        start, end, length = places[0], places[-1] + 1, len(tokens["input_ids"])
        may_be_text = padding in (bos, eos, unk)
        if may_be_text:
            start = start - (padding == bos) if start > 1 else 0
            end = end + (padding == eos) if end < length - 1 else length
        kept = {name: values[start:end] for name, values in tokens.items()}
        return {**kept, "is_unpadded": may_be_text and end - start < length}

    def encode_text(self, prompt: str, completion: str | None = None, images: Sequence[Any] = ()) -> dict[str, Any]:
        """Encodes a text, or a prompt and its completion."""
        text, eos = prompt + (completion or ""), self.tokenizer.eos_token
        after = "" if eos is None or text.rstrip().endswith(eos) else eos
        whole = self.with_special_tokens(text) + after
        expansion = self._expansion(whole, images)
        tokens = self.text(expansion.of(text))
        if after:
            tokens = [*tokens, self.tokenizer.eos_token_id]
        num_given = 0
        if completion is not None and self.completion_only_loss:
            if not completion.strip():
                raise UnusableRow("its completion is empty, or white space alone")
            num_given = common_prefix_length(self.text(expansion.of(prompt)), tokens)
        encoded = {"input_ids": tokens, "labels": [-100] * num_given + tokens[num_given:]}
        return self._with_images(encoded, whole, expansion)

    def _expansion(self, text: str, images: Sequence[Any]) -> Expansion:
        return self.images.expand(text, list(images)) if isinstance(self.images, ImageReader) else Expansion()

    def _with_images(self, encoded: dict[str, Any], text: str, expansion: Expansion) -> dict[str, Any]:
        """
        Adds the columns from which a batch gets its images. Tokens that stand for images are not learned, because no target writes
        them.
        """
        if not expansion.replacements:
            return encoded
        if expansion.input_ids != encoded["input_ids"]:
            raise RowError("the processor has other tokens for it than the tokenizer")
        labels = [-100 if kind else label for label, kind in zip(encoded["labels"], expansion.kinds)]
        return encoded | {"labels": labels, "image_text": text, "image_end": expansion.end}

    def encode_chat(self, row: Row) -> dict[str, Any]:
        """Encodes a conversation, or a prompt and its completion that are messages."""
        rendered, spans, drops_reasoning = self._render(row)
        expansion = self._expansion(rendered, row.images)
        text = expansion.of(rendered)
        tokens = self.rendered_tokens(text)
        if self.assistant_only_loss:
            if spans is not None:
                spans = [
                    (len(expansion.of(rendered[:start])), len(expansion.of(rendered[:end]))) for start, end in spans
                ]
            ranges, lost = self._learned_turns(row, text, tokens, spans, expansion)
        else:
            for message in row.messages[row.num_given or 0 :]:
                if (key := unlearned_by(message)) is not None:
                    raise RowError(
                        f"a message has {message[key]} as {key!r}, but all messages are learned. Pass `assistant_only_loss=True`, or "
                        "remove the key"
                    )
            ranges, lost = [(0, len(tokens))], 0
        num_given = 0
        if row.num_given is not None and self.completion_only_loss:
            if not any(
                message["role"] == "assistant" and says_something(message) for message in row.messages[row.num_given :]
            ):
                raise UnusableRow("its completion is empty, or white space alone")
            num_given = self._num_given(row, expansion, tokens)
        labels = [-100] * len(tokens)
        for start, end in ranges:
            start = max(start, num_given)
            labels[start:end] = tokens[start:end]
        encoded = {"input_ids": tokens, "labels": labels, "lost": lost, "drops_reasoning": drops_reasoning}
        return self._with_images(encoded, rendered, expansion)

    def _learned_turns(
        self, row: Row, text: str, tokens: list[int], spans: list[Span] | None, expansion: Expansion
    ) -> tuple[list[Span], int]:
        """Returns the assistant's turns that are learned, as spans of tokens, and how many could not be found."""
        turns = [message for message in row.messages if message["role"] == "assistant"]
        if not turns:
            roles = sorted({message["role"] for message in row.messages})
            raise UnusableRow(
                f"it has no message with the role 'assistant', only {roles}. With `assistant_only_loss=True` it has nothing to learn"
            )
        are_learned, have_no_key = list(map(is_learned, turns)), [unlearned_by(turn) is None for turn in turns]
        if any(have_no_key) and not any(are_learned):
            raise UnusableRow("its answers are empty. With `assistant_only_loss=True` it has nothing to learn")
        if spans is not None and len(spans) == len(turns):
            spans = list(compress(spans, are_learned))
        elif spans is not None and not all(have_no_key):
            raise RowError(
                f"the chat template marks {len(spans)} of its {len(turns)} assistant turns, so those that are not to be learned "
                "(`weight` and the like) cannot be left out. Remove the row or the key"
            )
        if not any(are_learned):
            return [], 0
        return self._turns(row, text, tokens, expansion) if spans is None else self._marked(text, tokens, spans)

    def _render(self, row: Row) -> tuple[str, list[Span] | None, bool]:
        """
        Renders a conversation, and returns its text, the spans between markers, and whether something of an earlier turn is left out.
        The spans are `None` if the template has no markers.
        """
        try:
            kwargs = {**self.tokenizer.special_tokens_map, **row.template_kwargs}
            tools = kwargs.pop("tools", None)
            template = self.tokenizer.get_chat_template(self.chat_template, tools)
            # A tokenizer's template for tools may have no markers where its default has.
            if not (self.assistant_only_loss and self.is_marked and has_generation_markers(template)):
                text = self.render(row.messages, **row.template_kwargs)
                return text, None, self.check_written(row.messages, text, **row.template_kwargs)
            # `apply_chat_template` gives the spans only as a mask of tokens, and only for fast tokenizers.
            texts, spans = render_jinja_template(
                conversations=[self.as_expected(row.messages)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **kwargs,
            )
            return texts[0], spans[0], self.check_written(row.messages, texts[0], **row.template_kwargs)
        except Exception as error:
            raise UnusableRow(f"the chat template refuses it: {error or type(error).__name__}") from error

    def _num_given(self, row: Row, expansion: Expansion, tokens: list[int]) -> int:
        """Returns how many tokens of a conversation are of its prompt, up to where the completion begins."""
        asked = self.rendered_tokens(self._prompt(row, expansion, add_generation_prompt=True))
        num_asked = common_prefix_length(asked, tokens)
        if num_asked == len(asked):
            return num_asked
        # The target may be asked for the completion in another way than it is written, such as with a beginning of its reasoning.
        num_alone = self._num_tokens(self._prompt(row, expansion), tokens)
        if num_alone is None:
            raise UnusableRow(
                "the chat template writes its prompt in another way if the completion follows, such as without the reasoning of earlier "
                "turns, so it is not known where the completion begins. Write the prompt like that, or pass another template"
            )
        return max(num_asked, num_alone)

    def _prompt(self, row: Row, expansion: Expansion, **kwargs: Any) -> str:
        """Returns the text of a prompt of messages."""
        try:
            return expansion.of(self.render(row.messages[: row.num_given], **row.template_kwargs, **kwargs))
        except Exception as error:
            raise UnusableRow(f"the chat template refuses its prompt: {error or type(error).__name__}") from error

    def _marked(self, text: str, tokens: list[int], spans: list[Span]) -> tuple[list[Span], int]:
        """Returns the ranges of tokens between markers, and how many could not be found."""
        if not spans:
            raise RowError("the chat template marks no assistant turn in it")
        if not self.tokenizer.is_fast:  # it has no offsets
            bounds = [[self._num_tokens(text[:place], tokens) for place in span] for span in spans]
            found = [(start, end) for start, end in bounds if start is not None and end is not None]
            return found, len(spans) - len(found)
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        ranges, place = [], 0
        for start, end in spans:
            inside = []
            while place < len(offsets) and offsets[place][0] < end:
                if offsets[place][1] > start:
                    inside.append(place)
                place += 1
            if inside:
                ranges.append((inside[0], inside[-1] + 1))
        return ranges, 0

    def unlearned_end(self, row: dict[str, Any]) -> str | None:
        """Returns the special token that ends the first of a row's marked turns and is not learned, or `None`."""
        if not self.is_marked:
            return None
        try:
            encoded = self(row)
        except RowError:  # reported when all rows are encoded
            return None
        tokens, learned = encoded["input_ids"], [label != -100 for label in encoded["labels"]]
        ends = (place for place in range(1, len(tokens)) if learned[place - 1] and not learned[place])
        special = self.tokenizer.get_added_vocab().values()
        if (end := next(ends, None)) is None or tokens[end] not in special:
            return None
        # A template may mark a line break behind the end of a turn, too.
        last = next((token for token in reversed(tokens[:end]) if self.tokenizer.decode(token).strip()), None)
        return None if last in special else self.tokenizer.decode(tokens[end])

    def _num_tokens(self, beginning: str, tokens: list[int]) -> int | None:
        """Returns how many tokens of a text belong to its beginning, or `None` if the beginning alone has other tokens."""
        alone = self.rendered_tokens(beginning)
        num_tokens = common_prefix_length(alone, tokens)
        # White space at the end may be another token than before more text, and some templates end a text with EOS.
        rest = self.tokenizer.decode(alone[num_tokens:], skip_special_tokens=True) if num_tokens < len(alone) else ""
        return None if rest.strip() else num_tokens

    def _turns(self, row: Row, text: str, tokens: list[int], expansion: Expansion) -> tuple[list[Span], int]:
        """Returns the ranges of tokens of the assistant's turns, and how many turns could not be found."""
        ranges, lost = [], 0
        for number, message in enumerate(row.messages):
            answers = any(each["role"] != "system" for each in row.messages[:number])
            # A target is never asked for a greeting.
            if message["role"] != "assistant" or not answers or not is_learned(message):
                continue
            try:
                before = self.render(row.messages[:number], add_generation_prompt=True, **row.template_kwargs)
                after = self.render(row.messages[: number + 1], **row.template_kwargs)
                before, after = expansion.of(before), expansion.of(after)
            except Exception:
                lost += 1
                continue
            asked, end = self.rendered_tokens(before), self._num_tokens(after, tokens)
            # Line breaks at the end of the prompt and the beginning of the answer may be one token.
            joined = common_prefix_length(asked, tokens) == len(asked) - 1 and text.startswith(before)
            if end is None or end <= len(asked) or not (joined or tokens[: len(asked)] == asked):
                lost += 1
            else:
                ranges.append((len(asked), end))
        if not ranges and not lost:
            raise UnusableRow(
                "no assistant turn in it answers anyone. With `assistant_only_loss=True` it has nothing to learn"
            )
        return ranges, lost

"""
On-policy data: a data set whose answers are replaced by the target's own.

A draft learns to say what its target would say. Answers of other writers show it states that the target rarely has.
"""

import logging
import random
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.chat_template_utils import add_response_schema
from trl.data_utils import get_dataset_column_names

from ..remote_code.devices_eagle3 import CUDNN_ATTENTION
from ..tokenizer import PromptEncoder, padded_inputs, padding_token
from .answers import Output, bar_of_rows
from .conversation import Conversation
from .encoding import RowEncoder, check_tokens
from .images import ImageReader
from .messages import check_calls
from .prompts import num_positions, trained_length
from .values import RowError, UnreachableError


logger = logging.getLogger(__name__)

# How many batches of texts to sort by length at once. Padding to the longest of any length would take most of the time.
BATCHES_SORTED = 8


def has_texts(dataset: Dataset | IterableDataset) -> bool:
    """Whether the rows of a data set are texts, without prompts or messages to answer."""
    columns = set(get_dataset_column_names(dataset))
    return "text" in columns and not columns & {"prompt", "messages", "conversations"}


def beginnings(
    dataset: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, num_tokens: int, num_new_tokens: int
) -> Dataset | IterableDataset:
    """
    Returns a data set of prompts, which are pieces of texts. There is one for each `num_tokens + num_new_tokens` tokens of a
    text, so the continued prompts are as long as the text. Even a short text has one.
    """
    apart = num_tokens + num_new_tokens

    def prompts_of(rows: dict[str, list]) -> dict[str, list[str]]:
        prompts = []
        texts = [text if isinstance(text, str) else "" for text in rows["text"]]  # empty prompts are reported later
        for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            starts = [0, *range(apart, len(tokens) - num_tokens + 1, apart)]
            pieces = (tokenizer.decode(tokens[start : start + num_tokens]) for start in starts)
            prompts += [piece.strip("\ufffd") for piece in pieces]  # parts of characters that were cut
        return {"prompt": prompts}

    return dataset.map(prompts_of, batched=True, remove_columns=get_dataset_column_names(dataset))


@torch.no_grad()
def regenerate_locally(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pending: Iterable[Conversation],
    output: Output,
    batch_size: int,
    draft: PreTrainedModel | None = None,
    images: ImageReader | None = None,
    **generation_kwargs: Any,
) -> int:
    """
    Answers with `target.generate`, `batch_size` conversations of similar length at a time. Continues prompts that are texts.
    An earlier draft of the target makes it faster. Without a reader of images, rows with images are left out. Returns the
    number of rows with an image that could not be reached. Another run tries them again.
    """
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    # Mllama's table has a token for images that its configuration does not count.
    vocab_size = max(vocab_size, getattr(target.get_input_embeddings(), "num_embeddings", 0))
    tokenizer.pad_token = padding_token(tokenizer, vocab_size)
    try:
        tokenizer = add_response_schema(tokenizer)  # separates reasoning from answers
    except ValueError:
        logger.info("TRL knows no response template for this chat template. Answers are kept as texts.")
    encode = partial(
        encode_prompt,
        encoder=PromptEncoder(tokenizer),
        room=generation_kwargs.get("max_new_tokens", 1),
        positions=num_positions(target),
        vocab_size=vocab_size,
        images=images,
    )
    at_once = batch_size * (BATCHES_SORTED if images is None else 1)  # images of many rows take much memory
    limit, room = trained_length(target), generation_kwargs.get("max_new_tokens", 1)
    upcoming, active, num_failed, order = iter(pending), list[Conversation](), 0, random.Random(0)
    output.learners = learners_of(tokenizer)
    progress = bar_of_rows(output)
    while True:
        prompts, num_unreachable = encode_prompts(chain(active, upcoming), at_once, encode, output)
        num_failed += num_unreachable
        if not prompts:
            return num_failed
        for conversation, inputs_of_row in prompts.items():
            if limit is not None and (length := len(inputs_of_row["input_ids"]) + room) > limit:
                logger.warning(
                    f"Row {conversation.row}, and maybe others, has {length} tokens with `max_new_tokens={room}`, more than {limit}, the "
                    "longest texts that the target was made for (`max_position_embeddings`). Its answer may be useless. Remove long rows."
                )
                limit = None  # one warning is enough
        active = []
        for batch in batches_by_length(prompts, batch_size, order):
            inputs = [prompts[conversation] for conversation in batch]
            answers = generate_answers(target, tokenizer, inputs, images, assistant_model=draft, **generation_kwargs)
            for conversation, (tokens, stop) in zip(batch, answers, strict=True):
                prompt = None if conversation.text is not None else prompts[conversation]["prompt"]
                try:
                    message = parse_answer(tokenizer, tokens, stop, prompt)
                    if conversation.answer(message, "length" if stop is None else "stop"):
                        output.write(conversation.row, conversation.result())
                        progress.update()
                    else:
                        active.append(conversation)
                except RowError as error:
                    output.leave_out(conversation.row, str(error))


def learners_of(tokenizer: PreTrainedTokenizerBase) -> list[RowEncoder]:
    """Returns the encoders that training may read new rows with: of the assistant's tokens, and of all."""
    return [RowEncoder(tokenizer, "messages", assistant_only_loss=only) for only in (True, False)]


def encode_prompts(
    conversations: Iterable[Conversation], most: int, encode: Callable[[Conversation], dict[str, Any]], output: Output
) -> tuple[dict[Conversation, dict[str, Any]], int]:
    """
    Returns at most so many prompts by conversation, and the number of rows with an image that could not be reached. Leaves
    out rows that cannot be answered.
    """
    prompts, num_unreachable = {}, 0
    for conversation in conversations:
        try:
            prompts[conversation] = encode(conversation)
        except UnreachableError as error:
            num_unreachable += 1
            logger.warning(f"Row {conversation.row} failed: {error}")
        except RowError as error:
            output.leave_out(conversation.row, str(error))
        if len(prompts) >= most:
            break
    return prompts, num_unreachable


def batches_by_length(
    prompts: dict[Conversation, dict[str, Any]], batch_size: int, order: random.Random
) -> list[list[Conversation]]:
    """Returns batches of conversations with prompts of about the same length, in random order."""
    by_length = sorted(prompts, key=lambda conversation: len(prompts[conversation]["input_ids"]))
    batches = [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)]
    order.shuffle(batches)  # a run that is stopped early then has prompts of all lengths
    return batches


def encode_prompt(
    conversation: Conversation,
    encoder: PromptEncoder,
    room: int,
    positions: int | None,
    images: ImageReader | None = None,
    vocab_size: int | None = None,
) -> dict[str, Any]:
    """
    Returns the `prompt` of the next answer and its `input_ids`; with images also `image_data` and `image_text`, see
    [`~hf_eagle3.data.RowEncoder`]. The answer may have `room` tokens. `positions` is the size of the target's table, if it has one.
    Raises `RowError` if the prompt cannot be rendered, is empty, is too long, or has tokens beyond the target's `vocab_size`, or an image
    is missing (`UnreachableError`).
    """
    if conversation.images and images is None:
        raise RowError("it has images, but the target or its processor reads text only")
    try:
        if conversation.text is not None:
            text, tokens = conversation.text, encoder.text(conversation.text)
        else:
            text = encoder.render(conversation.turns, add_generation_prompt=True, **conversation.template_kwargs)
            encoder.check_written(conversation.turns, text, add_generation_prompt=True, **conversation.template_kwargs)
            tokens = encoder.rendered_tokens(text)
        if images is not None:
            if conversation.text is not None:
                text = encoder.with_special_tokens(text)
            expansion = images.expand(text, conversation.images)
            if conversation.images:
                tokens = encoder.rendered_tokens(expansion.of(text))
    except RowError:
        raise
    except Exception as error:
        raise RowError(f"the chat template refuses it: {error or type(error).__name__}") from error
    if not tokens:
        raise RowError("its prompt has no tokens")
    if vocab_size is not None:
        check_tokens(tokens, vocab_size, encoder.tokenizer)
    if positions is not None and len(tokens) + room > positions:
        raise RowError(
            f"with `max_new_tokens={room}` it has {len(tokens) + room} tokens, more than the target's table of {positions} positions"
        )
    seen = {"image_text": text, "image_data": conversation.images} if conversation.images else {}
    return {"prompt": text, "input_ids": tokens, **seen}


def generate_answers(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[dict[str, Any]],
    images: ImageReader | None = None,
    **generation_kwargs: Any,
) -> list[tuple[list[int], int | None]]:
    """Returns for each prompt the new tokens, and the token that ended them. `None` if they were cut for their length."""
    inputs = padded_inputs(target, tokenizer, prompts, images)
    with CUDNN_ATTENTION.off():  # cuDNN plans again for each length of a padded batch
        sequences = target.generate(
            **inputs, pad_token_id=tokenizer.pad_token_id, return_dict_in_generate=False, **generation_kwargs
        )
    stops = target.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])}
    answers = []
    for sequence in sequences[:, inputs["input_ids"].shape[1] :].tolist():
        end = next((i for i, token in enumerate(sequence) if token in stops), None)
        answers.append((sequence[:end], None if end is None else sequence[end]))
    return answers


def parse_answer(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], stop: int | None, prompt: str | None
) -> dict[str, Any]:
    """
    Returns the message in an answer, with its reasoning and tool calls if the tokenizer can parse them. `stop` is the token
    that ended it. Without a `prompt`, the rendered conversation, it continues a text. Raises `RowError` if it is empty, or
    cannot be parsed.
    """
    if not tokens:
        raise RowError("its answer is empty")
    if prompt is not None:
        if getattr(tokenizer, "response_template", None) is not None:
            return parse_by_template(tokenizer, tokens, stop, prompt)
        if special := set(tokenizer.all_special_ids) & set(tokens):
            names = tokenizer.convert_ids_to_tokens(sorted(special))
            raise RowError(f"its answer has the special tokens {names}")
    content = tokenizer.decode(tokens)
    if not content.strip():  # training would drop it
        raise RowError("its answer is white space alone")
    return {"role": "assistant", "content": content}


def parse_by_template(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], stop: int | None, prompt: str
) -> dict[str, Any]:
    """Returns the message in an answer by the tokenizer's response template. For the arguments see [`parse_answer`]."""
    endings = [[], *([] if stop is None else [[stop]])]
    failure, parsed = None, []
    for ending in endings:
        try:
            parsed.append({"content": "", **tokenizer.parse_response(tokens + ending, prefix=prompt)})
        except ValueError as error:
            failure = error
    # The end of a tool call may be the end of the answer (Llama 3). Otherwise a template may take the last token for text.
    message = next((each for each in reversed(parsed) if each.get("tool_calls")), parsed[0] if parsed else None)
    if message is None:
        raise RowError(f"its answer cannot be parsed: {failure}") from failure
    if not any(value for key, value in message.items() if key != "role"):  # such as text of gpt-oss without a channel
        raise RowError("the tokenizer's response template reads nothing in its answer")
    check_calls(message)
    return message

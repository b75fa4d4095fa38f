"""Images of training data: loading them, and what a target's processor makes of them."""

import os
import re
from base64 import b64encode
from dataclasses import dataclass, field
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets import Dataset, IterableDataset
from PIL.Image import Image
from transformers import PreTrainedConfig, ProcessorMixin
from transformers.image_utils import httpx, load_image

from .messages import CONVERSATIONS, IMAGE_PARTS
from .rows import IMAGES
from .values import RowError, UnreachableError


# In a batch the names of what the target reads of images begin with this.
IMAGE_INPUT = "image_input_"
URLS = ("http://", "https://", "data:")
ROWS_LOOKED_AT = 64
SECONDS = 60  # that a server of images may be silent


def sees_images(config: PreTrainedConfig) -> bool:
    """Returns whether a target with this configuration reads images beside its text."""
    return getattr(config, "vision_config", None) is not None


def shows_images(dataset: Any) -> bool:
    """
    Returns whether a data set has a column for images, or an image in the messages of its first rows.

    Args:
        dataset (`Dataset` or `IterableDataset`, *optional*): The data. Anything else shows no images.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        return False
    if not set(IMAGES).isdisjoint(columns_of(dataset)):
        return True
    rows: list[dict[str, Any]] = list(islice(with_unread_images(dataset.with_format(None)), ROWS_LOOKED_AT))
    names = *CONVERSATIONS, "prompt"
    turns = [turn for row in rows for name in names for turn in row.get(name) or [] if isinstance(turn, dict)]
    parts = [part for turn in turns if isinstance(turn.get("content"), list) for part in turn["content"]]
    return any(isinstance(part, dict) and part.get("type") in IMAGE_PARTS for part in parts)


def without_images(dataset: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """Returns the data set without its columns of images, so that reading a row opens no file."""
    columns = columns_of(dataset)
    return dataset.remove_columns([column for column in IMAGES if column in columns])


def columns_of(dataset: Dataset | IterableDataset) -> list[str]:
    """Returns the columns of a data set, which a stream may show only in its first row. An empty one has none."""
    return list(next(iter(dataset), {})) if dataset.column_names is None else dataset.column_names


def with_unread_images(dataset: Any) -> Any:
    """Returns the data set with images as bytes or paths, so that one that cannot be read spoils only its own row."""
    if not isinstance(dataset, Dataset | IterableDataset) or dataset.features is None:
        return dataset
    for column, feature in dataset.features.items():
        if (other := unread(feature)) != feature:
            dataset = dataset.cast_column(column, other)
    return dataset


def unread(feature: Any) -> Any:
    """Returns the feature of a column with its images as bytes or paths."""
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, dict):  # messages have parts, and these images
        return {name: unread(each) for name, each in feature.items()}
    return datasets.List(unread(feature.feature)) if isinstance(feature, datasets.List) else feature


def load(image: Any) -> Image:
    """
    Loads an image, in RGB. It may be a PIL image, its path, URL or data URL, or a dictionary of `bytes` and `path` as in `datasets`.
    Raises `RowError` if it cannot be read, or `UnreachableError` if there is no such file or its server cannot be reached.
    """
    is_file = isinstance(image, str) and not image.startswith(URLS)
    # `Path.is_file` raises an error for strings that are too long for a path.
    if is_file and not os.path.isfile(image):
        raise UnreachableError(
            f"there is no image {image:.200} (from the folder {Path.cwd()}). Correct the path, or remove the row"
        )
    try:
        if isinstance(image, str) and image.startswith(("http://", "https://")):
            # The `load_image` below waits for ever, and takes the page of an error for an image.
            answer = httpx.get(image, timeout=SECONDS, follow_redirects=True).raise_for_status()
            image = {"bytes": answer.content}
        if isinstance(image, dict) and image.keys() <= {"bytes", "path"}:
            image = datasets.Image().decode_example({"bytes": None, "path": None, **image})
        if isinstance(image, str | Image):
            return load_image(image)  # without alpha, and turned as its EXIF says, whatever form it has
    except httpx.HTTPError as error:
        raise UnreachableError(f"the image {image:.200} cannot be reached: {str(error):.200}") from error
    except Exception as error:
        raise RowError(f"an image cannot be read: {str(error):.200}") from error  # it may have a whole data URL
    raise RowError(f"an image is {image!r:.80}, but must be a PIL image, a path or a URL")


def storable(image: Any) -> str:
    """Returns the path or URL of an image, or a data URL that holds it."""
    if isinstance(image, str):
        return image
    file = BytesIO()
    load(image).save(file, format="PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def sendable(image: Any) -> str:
    """Returns a URL from which any server can read an image: its own, or a data URL that holds it."""
    return image if isinstance(image, str) and image.startswith(URLS) else storable(load(image))


@dataclass
class Expansion:
    """What a processor writes in place of the images of a text."""

    token: str = ""  # stands for an image in the text
    replacements: list[str] = field(default_factory=list)  # what the processor writes for each image
    input_ids: list[int] = field(default_factory=list)  # the processor's tokens of the whole text
    kinds: list[int] = field(default_factory=list)  # 0 for each token of text, and not 0 for those of images

    @property
    def end(self) -> int:
        """The number of tokens up to the end of the last image."""
        # Some mark no token (Ovis 2): then all are taken for an image.
        return max((place + 1 for place, kind in enumerate(self.kinds) if kind), default=len(self.kinds))

    def of(self, text: str) -> str:
        """Returns the text, or a beginning of it, with all that the processor writes for images."""
        if not self.replacements:
            return text
        replacements = iter(self.replacements)
        return re.sub(re.escape(self.token), lambda _: next(replacements), text)


class ImageReader:
    """
    Turns images into what a target reads.

    Args:
        processor (`ProcessorMixin`): The target's processor.
    """

    def __init__(self, processor: ProcessorMixin):
        self.processor = processor

    def expand(self, text: str, images: list[Any]) -> Expansion:
        """
        Returns what the processor writes in place of the images of a text, which has its `image_token` for each. Raises `RowError`
        if an image cannot be loaded, or there are more or fewer of them than the text has places for. A target counts the places
        in a whole batch, so a text without images must have none.
        """
        token: Any = getattr(self.processor, "image_token", None)
        name = type(self.processor).__name__
        if images and token is None:
            raise RowError(f"it has images, and {name} has no `image_token` that stands for one in a text")
        if (num_places := text.count(token) if token else 0) != len(images):
            raise RowError(
                f"it has {len(images)} images, but its text has {num_places} places for them ({token!r}). Correct the row, or "
                "pass a chat template that writes one for each image"
            )
        if not images:
            return Expansion()
        try:
            read = self._process(
                [text],
                [images],
                images_kwargs={"return_tensors": "pt"},  # some processors count on tensors (Ovis 2)
                return_text_replacement_offsets=True,
                return_mm_token_type_ids=True,
            )
        except RowError:
            raise
        except Exception as error:
            raise RowError(f"{name} refuses it: {error or type(error).__name__}") from error
        if "text_replacement_offsets" not in read:
            raise RowError(f"it has images, and {name} does not tell what it writes in place of one")
        kinds = read["mm_token_type_ids"] if "mm_token_type_ids" in read else read["token_type_ids"]
        replacements = [each["replacement"] for each in read["text_replacement_offsets"][0]]
        return Expansion(token, replacements, list(read["input_ids"][0]), list(kinds[0]))

    def inputs(self, rows: list[dict[str, Any]], length: int, padding_side: str = "right") -> dict[str, torch.Tensor]:
        """
        Returns all that the processor makes of `B` encoded rows, and the target reads beside the tokens: pixels, positions of
        patches, kinds of tokens. What has an entry for each token is `(B, length)`. Longer rows are cut.
        """
        places = [place for place, row in enumerate(rows) if row.get("image_text")]
        if not places:
            return {}
        texts, images = zip(*((rows[place]["image_text"], rows[place]["image_data"]) for place in places))
        images = tuple(each if isinstance(each, list) else [each] for each in images)
        read = self._process(list(texts), list(images), padding=True, padding_side="right", return_tensors="pt")
        input_ids = read.pop("input_ids")
        del read["attention_mask"]
        spans = []  # of each row in the batch
        for place, tokens in zip(places, input_ids.tolist()):
            known = rows[place]["input_ids"][:length]
            spans.append((length - len(known), length) if padding_side == "left" else (0, len(known)))
            if tokens[: len(known)] != known:
                raise ValueError(
                    f"{type(self.processor).__name__} reads the row {rows[place]['image_text']!r:.80} in another way than when it "
                    "was prepared, so the image or the processor has changed since. Save the image under another name, or let "
                    "`datasets` prepare all rows again, in a new folder for its cache (the environment variable HF_DATASETS_CACHE)."
                )
        inputs = {}
        for name, value in read.items():
            if value.shape == input_ids.shape:
                spread = value.new_zeros(len(rows), length)
                for place, (start, end), values in zip(places, spans, value):
                    spread[place, start:end] = values[: end - start]
                value = spread
            inputs[name] = value
        return inputs

    def _process(self, texts: list[str], images: list[list[Any]], **kwargs: Any) -> dict[str, Any]:
        loaded = [[load(image) for image in each] for each in images]
        return dict(self.processor(text=texts, images=loaded, add_special_tokens=False, **kwargs))


class ImageCollator:
    """Collates rows with another collator, and adds what the target reads of their images, with `image_input_` before each name."""

    def __init__(self, collator: Any, images: ImageReader):
        self.collator, self.images = collator, images

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.collator(examples)
        inputs = self.images.inputs(examples, batch["input_ids"].shape[1])
        return {**batch, **{f"{IMAGE_INPUT}{name}": value for name, value in inputs.items()}}

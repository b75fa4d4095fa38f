"""
Loading data sets of the Hub, of local files, and mixtures of these.

Local JSON needs care: Arrow reads strings as dates, the nulls that it adds look like those of the file (nulls.py), and `datasets` takes
the columns from the first rows alone.
"""

import bz2
import glob
import gzip
import json
import lzma
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from accelerate import PartialState
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    ReadInstruction,
    concatenate_datasets,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError
from transformers.utils import logging
from trl import DatasetMixtureConfig, get_dataset

from .nulls import aligned, with_json
from .values import shown


logger = logging.get_logger(__name__)

FILE_FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
ABOUT_DATA = ("dataset_info.json", "dataset_infos.json")  # written by `datasets`
OPENERS: dict[str, Any] = {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}  # those of Python's own library
COMPRESSED = (".bz2", ".gz", ".lz4", ".xz", ".zst")  # `load_dataset` reads these


READ_AS_LINES = tuple(ending + compressed for ending in (".json", ".jsonl") for compressed in ("", *OPENERS))


def opened(path: str | Path) -> BinaryIO:
    """Opens a file, which may be compressed, to read bytes."""
    return OPENERS.get(Path(path).suffix, open)(path, "rb")


def load_data(
    name: str | Path, config: str | None = None, split: str = "train", streaming: bool = False
) -> DatasetDict:
    """
    Loads a data set as `recipes/train.py` does, and returns all its splits. Unlike `load_dataset` it keeps the strings of
    prompts, completions and messages in local JSON files if they look like dates, and reads files whose later rows have other columns.

    Args:
        name (`str` or `Path`):
            A Hub id; a JSON Lines, JSON, Parquet, CSV or text file, which may be compressed; a folder with `train.jsonl` and
            `test.jsonl`; or what `save_to_disk` or `recipes/regenerate.py` wrote.
        config (`str`, *optional*): Which configuration of a data set on the Hub.
        split (`str`, *optional*, defaults to `"train"`):
            The name of the only split of files that have none. The brackets of a part of a split (`train[:1000]`) are ignored. See
            [`~hf_eagle3.data.rows_of`].
        streaming (`bool`, *optional*, defaults to `False`): Whether rows are read one by one when they are needed.

    Returns:
        `DatasetDict`: The splits by their names.

    Raises:
        ValueError: if a file cannot be read. For JSON Lines the message names the line.
        FileNotFoundError: if there is no such file.
        OSError: if there is no such folder, and the Hub has no such data set.
    """
    name = str(name)
    if not name:
        raise ValueError("The name of the data set is empty. Is a variable of the shell not set?")
    split = split.partition("[")[0]
    if (saved := load_saved(name, split, streaming)) is not None:
        return saved
    suffix = Path(Path(name).stem if name.endswith(COMPRESSED) else name).suffix
    files = find_files(name, suffix)
    lines = files or sorted(map(str, Path(name).glob("*.jsonl*")))
    lines = [file for file in lines if file.endswith(READ_AS_LINES)]

    def load(features: Features | None = None) -> DatasetDict:
        kwargs = {"streaming": streaming, "features": features}
        if files:
            data_files = {split: list(map(glob.escape, files))}  # brackets and the like are parts of names
            return load_dataset(FILE_FORMATS.get(suffix, "json"), data_files=data_files, **kwargs)
        return load_dataset(name, name=config, **kwargs)

    def load_first() -> DatasetDict:
        try:
            return load()
        except ValueError:  # `datasets` found values of several types, and beside them an empty line
            for file in lines:
                check_no_line_is_empty(file)
            raise

    def features_of_lines() -> Features | None:  # or the error says which line is broken
        return features_of(row for file in lines for _, row in read_json_lines(file))

    try:
        try:
            # A stream would fail in the middle of training, at the first row with other columns.
            of_all = features_of_lines() if streaming and suffix != ".json" else None
            loaded = load_first()
            first = next(iter(loaded.values()))
            if PartialState().is_local_main_process:
                for file in lines:
                    check_utf8(file)
                if config is None and Path(name).is_dir():
                    warn_of_unread_files(name, files)
            if first.info.builder_name != "json" or not Path(name).exists():
                return loaded
            if (features := first.features) is None:  # of a stream of an array, which is read whole in any case
                whole = load_data(name, config, split)
                return DatasetDict({each: rows.to_iterable_dataset() for each, rows in whole.items()})
            wanted = with_json(features)
            if streaming:
                changed = {each: wanted[each] for each in wanted if wanted[each] != features[each]}
                wanted = Features({**with_json(of_all or features, is_stream=True), **changed})
            if wanted == features:
                return loaded
            for file in lines:
                check_no_line_is_empty(file)
            return load(wanted)
        except DatasetGenerationError:
            if (features := features_of_lines()) is None:
                raise
            return load(with_json(features))
    except DatasetGenerationError as error:
        if not Path(name).exists():  # it is on the Hub
            raise
        cause = error.__cause__ or error
        raise ValueError(f"{name} cannot be read: {cause}. Correct the file (`--dataset_name`).") from error
    except OSError as error:
        if Path(name).exists():
            raise
        raise OSError(
            f"There is no file or folder {name} (`--dataset_name`), and the Hub gave none: {error}"
        ) from error


def rows_of(dataset: DatasetDict, split: str) -> Dataset | IterableDataset:
    """
    Returns the rows of a split, or of a part of one.

    Args:
        dataset (`DatasetDict`): What [`~hf_eagle3.data.load_data`] returned.
        split (`str`): Its name, or a part such as `train[:1000]`, `train[50%:]` or `train[8:]+test[:1]`. Streams have no parts.

    Raises:
        ValueError: if there is no such split, it has no parts, or the part has no rows.
    """
    if split in dataset:
        return dataset[split]
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in dataset.items()})
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"There is no split {split!r}. Choose one of {sorted(dataset)}, or a part of one (`train[:1000]`) if it is not streamed, by "
            "`--dataset_train_split` and, for evaluation, `--dataset_test_split`. Local data has a test split if it is a folder "
            "with `train.jsonl` and `test.jsonl`. `--eval_strategy no` needs none."
        ) from error
    parts = [part for part in parts if part.from_ < part.to]
    if not parts:
        raise ValueError(
            f"{split!r} has no rows. The splits have {', '.join(f'{len(rows):,} ({name})' for name, rows in dataset.items())}."
        )
    return concatenate_datasets([dataset[part.splitname].select(range(part.from_, part.to)) for part in parts])


def load_saved(name: str, split: str, streaming: bool) -> DatasetDict | None:
    """Returns what `save_to_disk` wrote to a folder, which is one split, or several with names. `None` for anything else."""
    if Path(name, "state.json").is_file():  # by `Dataset.save_to_disk`
        splits = {split: load_from_disk(name)}
    elif Path(name, "dataset_dict.json").is_file():  # by `DatasetDict.save_to_disk`
        splits = load_from_disk(name)
    else:
        return None
    if streaming:
        splits = {each: rows.to_iterable_dataset() for each, rows in splits.items()}
    return DatasetDict(splits)


def find_files(name: str, suffix: str) -> list[str]:
    """
    Returns a local file, or the files that `recipes/regenerate.py` wrote to a folder. Empty for anything else, whose files `load_dataset`
    finds.
    """
    if suffix in FILE_FORMATS and not Path(name).is_file():
        raise FileNotFoundError(f"There is no file {name} (`--dataset_name`).")
    written = sorted(Path(name).glob("rows-[0-9]*.jsonl"))
    if written or not Path(name).is_file():
        return list(map(str, written))
    if suffix not in FILE_FORMATS:
        raise ValueError(f"The ending of {name} is not one of {sorted(FILE_FORMATS)} (`--dataset_name`).")
    try:
        with opened(name) as file:
            is_blank = not file.read(2**16).strip() and not file.read(1)
    except (EOFError, lzma.LZMAError, OSError):  # `load_dataset` says what is wrong with it
        is_blank = False
    if is_blank:
        raise ValueError(f"{name} is empty. Pass a file with rows (`--dataset_name`).")
    return [name]


def warn_of_unread_files(folder: str, read: list[str]) -> None:
    """Warns of files of data in a folder that are not `read`, by default by `load_dataset`."""
    if not read:
        data_files = load_dataset_builder(folder).config.data_files or {}
        read = [file for files in data_files.values() for file in files]
    known, unread = {Path(file).resolve() for file in read}, []
    for path in sorted(Path(folder).rglob("*")):
        place = path.relative_to(folder)
        suffix = Path(path.stem if path.name.endswith(COMPRESSED) else path.name).suffix
        is_hidden = any(part.startswith((".", "__")) for part in place.parts)
        is_data = suffix in FILE_FORMATS and path.is_file() and path.name not in ABOUT_DATA
        if is_data and not is_hidden and path.resolve() not in known:
            unread.append(str(place))
    if unread:
        shown_names = ", ".join(unread[:5]) + (", ..." if len(unread) > 5 else "")
        logger.warning_once(  # a stream may be loaded twice
            f"{len(unread)} files of {folder} are not read: {shown_names}. Of a folder only files of one format are read, and only those "
            "named after a split (`train.jsonl`) if there are any. Convert or rename them, or move them away."
        )


def load_mixture(mixture: DatasetMixtureConfig) -> DatasetDict:
    """
    Returns the rows of a mixture, and its test split if it has one. TRL does not concatenate conversations whose messages have other keys,
    as if only some data sets have tool calls. Raises `ValueError` if streams are to be split.
    """
    if mixture.streaming and mixture.test_split_size is not None:
        raise ValueError(
            "`test_split_size` cannot split streams, whose rows are not counted. Leave out `streaming` (`--dataset_streaming`), or "
            "`test_split_size` and the evaluation (`--eval_strategy no`)."
        )
    dataset = _concatenated(replace(mixture, test_split_size=None))
    if mixture.test_split_size is None:
        return dataset
    # TRL splits without a seed. Processes, and a run that goes on after an interruption, must agree about the rows.
    return dataset["train"].train_test_split(test_size=mixture.test_split_size, seed=0)


def _concatenated(mixture: DatasetMixtureConfig) -> DatasetDict:
    try:
        return get_dataset(mixture)
    except ValueError:
        shares = [each.fraction for each in mixture.datasets if each.fraction is not None]
        alone = [replace(mixture, datasets=[replace(each, fraction=None)]) for each in mixture.datasets]
        parts = aligned([get_dataset(each)["train"] for each in alone])
        if parts is None or 0 < len(shares) < len(parts) or (mixture.streaming and shares):
            raise
        if shares:
            num_rows = min(len(part) / share for part, share in zip(parts, shares) if share)
            parts = [part.select(range(round(share * num_rows))) for part, share in zip(parts, shares)]
        return DatasetDict(train=concatenate_datasets(parts))


def features_of(rows: Iterator[dict]) -> Features | None:
    """
    Returns the columns, and the keys of messages, of all rows. `load_dataset` takes them from the first 10 MB of a file, and
    fails at the first tool call after that. `None` if one column has values of several types, or there are no rows.
    """
    schemas = []
    try:
        while batch := list(islice(rows, 1000)):
            schemas.append(pa.schema(pa.array(batch).type))
        schema = pa.unify_schemas(schemas, promote_options="permissive") if schemas else None
        return None if schema is None else Features.from_arrow_schema(schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None


def check_utf8(path: str | Path) -> None:
    """Raises `ValueError` if a line of a file is not in UTF-8. Arrow says so only when it reads the row, without the file's name."""
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeError as error:
                raise ValueError(
                    f"{path}, line {number} is not in UTF-8: {error}. Rewrite the line in UTF-8."
                ) from None


def check_no_line_is_empty(path: str | Path) -> None:
    """
    Raises `ValueError` if a line of a file is empty, unless the file is an array. `datasets` cannot read columns of type `Json` beside an
    empty line.
    """
    with opened(path) as file:
        if next(filter(bytes.strip, file), b"").lstrip().startswith(b"["):
            return
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if not line.strip():
                raise ValueError(
                    f"{path}, line {number} is empty, and `datasets` would not read nulls and dates as they are. Remove the line."
                )


def read_json_lines(path: str | Path) -> Iterator[tuple[int, dict]]:
    """
    Yields the objects of a JSON Lines file with the numbers of their lines, from 1.

    Args:
        path (`str` or `Path`): The file, in UTF-8.

    Raises:
        ValueError: if a line is not a JSON object. The message names the file and the line.
    """
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))  # Windows begins files with a byte order mark
                json.dumps(row, ensure_ascii=False).encode()  # fails for a lone surrogate, which tokenizers refuse
            except UnicodeError as error:
                raise ValueError(
                    f"{path}, line {number} is not in UTF-8: {error}. Rewrite the line in UTF-8."
                ) from None
            except ValueError as error:
                beginning = line.decode("utf-8").rstrip()[:80]
                raise ValueError(
                    f"{path}, line {number} is not JSON ({error}): {beginning!r}. Expected one object a line, such as "
                    '{"messages": [...]}. Rewrite a file that holds one array, or objects over several lines.'
                ) from None
            if not isinstance(row, dict):
                raise ValueError(
                    f'{path}, line {number} is {shown(row)}, but must be an object, such as {{"messages": [...]}}. Write the '
                    "objects of an array one a line."
                )
            yield number, row

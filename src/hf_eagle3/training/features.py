"""Stores the target's states on the training data in a folder, and reads them from it."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from datasets import Dataset, load_from_disk
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.checks import row_lengths
from ..environment import public_name
from ..file_checks import read_json
from ..files import UNFINISHED, locked, write_atomically
from ..remote_code.draft_model_eagle3 import fingerprint
from ..remote_code.target_eagle3 import device_of, is_sharded, table_of
from .arguments import Eagle3TrainingArguments
from .record import is_same_table, target_digest
from .target_states import PADDING_ON_CPU, TargetStates


if TYPE_CHECKING:
    from .trainer import Eagle3Trainer

logger = logging.get_logger(__name__)

FORMAT_VERSION = 2
FP8 = torch.float8_e4m3fn
LOCK = ".lock"
STATE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, FP8)  # integers would keep no fractions


def describe(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, aux_layer_ids: list[int]) -> dict:
    """Returns the target, tokenizer and layers that features belong to."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    config, digest = target.config.get_text_config(decoder=True), target_digest(target)
    return {
        "target": target.config._name_or_path,
        "fingerprint": fingerprint(table_of(target)),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "tokenizer": hashlib.sha256(vocabulary).hexdigest(),
        "aux_layer_ids": list(aux_layer_ids),
        **({} if digest is None else {"weights_digest": digest}),
    }


def fixed_arguments(args: Eagle3TrainingArguments) -> dict:
    """Returns the arguments that say what the rows of a store hold, and which of their tokens are learned."""
    return {
        "assistant_only_loss": args.assistant_only_loss,
        "completion_only_loss": args.completion_only_loss is not False,
        "chat_template_path": public_name(args.chat_template_path),
        "truncation_mode": args.truncation_mode,
    }


def check_store_arguments(store: FeatureStore, args: Eagle3TrainingArguments) -> None:
    """Raises `ValueError` if arguments ask for other rows than those of a store, which are packed and cut when they are extracted."""
    if args.packing:
        raise ValueError("Rows of a feature store are packed when they are extracted. Leave `packing` out.")
    longest = row_lengths(store.rows).max()
    if args.max_length is not None and longest > args.max_length:
        raise ValueError(
            f"The longest row in {store.folder} has {longest} tokens, more than `max_length={args.max_length}`. Pass `max_length={longest}`, "
            "or extract the features again with a smaller one, into another folder."
        )


def warn_of_other_target(folder: Path, before: str, now: str) -> None:
    """Warns if a target has another name than when features were extracted. A fine-tune may have the same embeddings."""
    if before and now and Path(before).name != Path(now).name:  # it may have moved to another folder
        logger.warning(
            f"The features in {folder} were extracted from {before}, and the target is {now}. Extract a fine-tune's own features."
        )


class FeatureStore:
    """
    A folder of tokenized rows and the target's states on them. [`Eagle3Trainer.extract_features`] writes it, and
    [`Eagle3Trainer`] takes it as a data set. States are read memory-mapped.

    - `rows/`: the prepared data set (`input_ids`, `labels`, and `seq_lengths` if packed), without its images.
    - `index.json`: the target, tokenizer and layers of the features, the arguments that the rows were prepared with, and how
      the features are stored.
    - `features-00000.safetensors`, ...: the states of `rows_per_shard` rows each, `T` tokens together.
      `states` `(T, n_aux + 1, H)` has the rows one after the other; the last of the `n_aux + 1` is the input of
      the target's head. `best_tokens` `(T,)` are the most probable tokens, and `log_sums` `(T,)` the log-sum-exp of the target's
      logits. `offsets` `(rows + 1,)` has the ends of rows. With fp8 there are `scales` `(T, n_aux + 1)`.

    Args:
        folder (`str` or `Path`): The folder.

    Raises:
        FileNotFoundError: if the folder is not a store.
        ValueError: if the store is not complete, or has another version of the format.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / "index.json").exists():
            raise FileNotFoundError(
                f"{folder} has no index.json: it is not a folder of features. Extract them by `extract_features`."
            )
        self.index = read_json(self.folder / "index.json")
        if (version := self.index.get("version")) != FORMAT_VERSION:
            raise ValueError(
                f"{folder} has version {version} of the format, not {FORMAT_VERSION}. Extract the features again, into another folder."
            )
        missing = missing_shards(self.folder, self.index)
        if missing:
            raise ValueError(
                f"{folder} is not complete: {len(missing)} of {self.num_shards} shards are missing or cut off, the first of them "
                f"{shard_path(self.folder, missing[0]).name}. Run the extraction again: it continues where it stopped."
            )
        self.rows = load_from_disk(str(self.folder / "rows"))
        self._open_shards: dict[int, tuple[Any, list[int]]] = {}

    def __getstate__(self) -> dict[str, Any]:  # workers of a data loader open the files again
        return {**self.__dict__, "_open_shards": {}}

    @property
    def num_shards(self) -> int:
        """The number of files with states."""
        return num_shards(self.index)

    def dataset(self) -> Dataset:
        """Returns the rows, each with its number as `feature_row`."""
        return self.rows.add_column("feature_row", list(range(len(self.rows))))

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        """Returns what is stored of a row: `states` `(L, n_aux + 1, H)`, `best_tokens` and `log_sums` `(L,)`."""
        shard, place = divmod(row, self.index["rows_per_shard"])
        if shard not in self._open_shards:
            file = safe_open(shard_path(self.folder, shard), framework="pt")
            self._open_shards[shard] = file, file.get_tensor("offsets").tolist()
        file, offsets = self._open_shards[shard]
        tokens = slice(offsets[place], offsets[place + 1])
        names = set(file.keys()) - {"offsets"}
        return as_read({name: file.get_slice(name)[tokens] for name in names})

    def check(self, description: dict, arguments: dict | None = None) -> None:
        """
        Checks whether the features belong to a target, a tokenizer and layers, and to these arguments.

        Args:
            description (`dict`): The target, tokenizer and layers, as `hf_eagle3.training.features.describe` returns them.
            arguments (`dict`, *optional*):
                The output of `hf_eagle3.training.features.fixed_arguments`.

        Raises:
            ValueError: if they belong to others.
        """
        for name, value in description.items():
            stored = self.index["description"].get(name, value)  # older stores have no digest of the weights
            is_same = is_same_table(stored, value) if name == "fingerprint" else stored == value
            if name != "target" and not is_same:  # the target may have moved to another folder
                is_digest = name in ("fingerprint", "tokenizer", "weights_digest")
                shown = "" if is_digest else f" ({stored} there, {value} here)"
                raise ValueError(
                    f"The features in {self.folder} were extracted from {self.index['description']['target'] or 'a target'} with "
                    f"another {name}{shown}. Extract them again for this target and tokenizer, into another folder."
                )
        warn_of_other_target(self.folder, self.index["description"]["target"], description["target"])
        for name, value in (arguments or {}).items():
            stored = self.index["arguments"][name]
            if stored != value:
                raise ValueError(
                    f"The features in {self.folder} were extracted with `{name}={stored!r}`, and this training has "
                    f"`{name}={value!r}`. Pass the same arguments, or extract the features again, into another folder."
                )


class FeatureCollator:
    """
    Collates rows of a [`FeatureStore`] with another collator, and adds their `states` `(B, L, n_aux + 1, H)`, `best_tokens` and
    `log_sums` `(B, L)`.
    """

    def __init__(self, collator: Callable, store: FeatureStore):
        self.collator, self.store = collator, store

    def __call__(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        batch = self.collator(examples)
        if "feature_row" not in examples[0]:  # evaluation runs the target
            return batch
        rows = [self.store[example["feature_row"]] for example in examples]
        for name in rows[0]:
            values = [row[name] for row in rows]
            if len(batch["input_ids"]) != len(examples):  # without padding all examples are in one row
                values = [torch.cat(values)]
            shape = *batch["input_ids"].shape, *values[0].shape[1:]
            # Padding has no probability in the draft vocabulary.
            batch[name] = values[0].new_full(shape, torch.inf if name == "log_sums" else 0)
            for padded, each in zip(batch[name], values):
                padded[: len(each)] = each
        return batch


def state_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Returns a dtype to store states in, given itself or its name. Raises `ValueError` if it would not keep them."""
    by_name = {str(each).removeprefix("torch."): each for each in STATE_DTYPES}
    if (name := str(dtype).removeprefix("torch.")) not in by_name:
        raise ValueError(f"`dtype` is {dtype}, but states can only be stored in one of {list(by_name)}.")
    return by_name[name]


def start_store(
    folder: str | Path, rows: Dataset, description: dict, rows_per_shard: int, dtype: torch.dtype, arguments: dict
) -> FileLock:
    """
    Writes rows and index of a [`FeatureStore`], or checks that they are there already. Returns the lock of the folder. Raises
    `ValueError` if the folder holds something else, another run writes to it, or the disk has too little space.
    """
    folder = Path(folder)
    unfinished = folder / f"rows{UNFINISHED}"  # of a run that was killed
    is_begun = (folder / "index.json").exists()
    if not is_begun and folder.exists() and {path.name for path in folder.iterdir()} - {LOCK, unfinished.name}:
        raise ValueError(f"{folder} is not empty and holds no features. Choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    lock = locked(folder / LOCK)
    images = images_digest(rows)
    rows = rows.remove_columns([column for column in rows.column_names if column.startswith("image_")])
    index = {
        "version": FORMAT_VERSION,
        "description": description,
        "arguments": arguments,
        "num_rows": len(rows),
        "num_tokens": int(row_lengths(rows).sum()),
        "rows_per_shard": rows_per_shard,
        "dtype": str(dtype).removeprefix("torch."),
        **({} if images is None else {"images": images}),
    }
    if (folder / "index.json").exists():
        check_same_store(folder, index, rows)
        return lock
    check_space(folder, index, dtype)
    shutil.rmtree(unfinished, ignore_errors=True)
    rows.save_to_disk(str(unfinished))
    unfinished.rename(folder / "rows")
    write_atomically(folder / "index.json", json.dumps(index, indent=2))
    return lock


def check_space(folder: Path, index: dict, dtype: torch.dtype) -> None:
    """Logs the bytes that the states of a new store take. Raises `ValueError` if the disk has less."""
    num_tokens, description = index["num_tokens"], index["description"]
    size_of_token = (len(description["aux_layer_ids"]) + 1) * description["hidden_size"] * dtype.itemsize
    needed, free = num_tokens * size_of_token / 1e9, shutil.disk_usage(folder).free / 1e9
    logger.info(f"The states of {num_tokens:,} tokens take {needed:,.2f} GB in {folder}.")
    if needed > free:
        raise ValueError(
            f"The states of {num_tokens:,} tokens take {needed:,.2f} GB, and the disk of {folder} has {free:,.2f} GB left. Choose another "
            "folder, extract fewer rows (`--dataset_train_split 'train[:5%]'`), or store the states in fp8 "
            "(`dtype='float8_e4m3fn'`, or `--feature_dtype float8_e4m3fn`)."
        )


def check_same_store(folder: Path, index: dict, rows: Dataset) -> None:
    """Raises `ValueError` if a folder has another index, or other rows. Its target may have moved to another folder."""
    known = read_json(folder / "index.json")
    description = index["description"]
    before, now = known["description"]["target"], description["target"]
    # Older stores have no digest of the weights.
    known["description"] = {name: known["description"].get(name, description[name]) for name in description}
    known["description"]["target"] = now
    ours, theirs = (each.with_format("arrow")[:] for each in (rows, load_from_disk(str(folder / "rows"))))
    if known != index or ours.column_names != theirs.column_names or not ours.equals(theirs):
        raise ValueError(
            f"{folder} holds features of other rows or another target, or stored in another way. Choose another folder, or "
            "the arguments of its first run. If the chat template writes today's date, pass one with the date of the first run "
            "(`--chat_template_path`)."
        )
    warn_of_other_target(folder, before, now)


def images_digest(rows: Dataset) -> str | None:
    """Returns a digest of the images of prepared rows (of their paths, if they are paths), or `None` without images."""
    if "image_data" not in rows.column_names:
        return None
    digest = hashlib.sha256()
    for table in rows.select_columns("image_data").with_format("arrow").iter(batch_size=100):
        digest.update(repr(table["image_data"].to_pylist()).encode())
    return digest.hexdigest()


def write_shard(
    folder: Path | None,
    shard: int,
    target_states: TargetStates,
    batches: Iterable[tuple[dict[str, torch.Tensor], list[int]]],
    dtype: torch.dtype,
) -> None:
    """
    Writes a shard completely or not at all, from collated batches and the lengths of the rows in each. Without a folder another
    process writes, and this one only takes part in the target's forward.
    """
    rows, lengths = list[dict[str, torch.Tensor]](), [0]
    for batch, batch_lengths in batches:
        aux, last = target_states(batch)
        states = torch.cat([aux, last], dim=-1).unflatten(-1, (-1, last.shape[-1]))  # (B, L, n_aux + 1, H)
        if len(states) != len(batch_lengths):  # without padding all rows are in one
            states = states[0].split(batch_lengths + [states.shape[1] - sum(batch_lengths)])
        of_batch = [as_stored(each[:length], dtype) for each, length in zip(states, batch_lengths)]
        for row in of_batch:  # of what training will read, which may be rounded
            last = as_read(row)["states"][None, :, -1].to(last.device, target_states.target.dtype)
            best, log_sums = target_states.summary(F.pad(last, (0, 0, 0, -last.shape[1] % PADDING_ON_CPU)))
            length = last.shape[1]
            row |= {"best_tokens": best[0, :length].cpu(), "log_sums": log_sums[0, :length].cpu()}
        if folder is not None:
            rows, lengths = rows + of_batch, lengths + batch_lengths
    if folder is None:
        return
    tensors = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    tensors["offsets"] = torch.tensor(lengths).cumsum(0)
    write_atomically(shard_path(folder, shard), lambda unfinished: save_file(tensors, unfinished))


def as_stored(states: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """
    Returns the states of a row as they are stored, on the CPU. A whole shard in float32 may not fit there. Raises `ValueError`
    if the states are not finite, or the dtype cannot hold them.
    """
    if not states.isfinite().all():
        raise ValueError(
            "Some of the target's states are not finite. Load the target in float32 or bfloat16 (`dtype`)."
        )
    if dtype == FP8:
        scales = (states.float().abs().amax(-1) / torch.finfo(FP8).max).clamp(min=1e-12)
        return {"states": (states.float() / scales[..., None]).to("cpu", FP8), "scales": scales.cpu()}
    cast = states.to("cpu", dtype)
    if not cast.isfinite().all():
        raise ValueError(
            f"The target's states reach {states.float().abs().max():.3g}, which {dtype} cannot hold. Store them in bfloat16 or "
            "float8_e4m3fn (`dtype`)."
        )
    return {"states": cast}


def as_read(row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns what is stored of a row, with states that were scaled for fp8 as they were before."""
    if (scales := row.get("scales")) is None:
        return row
    states = row["states"].float() * scales[..., None]
    return {name: states if name == "states" else each for name, each in row.items() if name != "scales"}


def extract(
    trainer: Eagle3Trainer, folder: str | Path, rows_per_shard: int, dtype: torch.dtype | str | None
) -> FeatureStore:
    """Writes the features of a trainer's data. See [`~Eagle3Trainer.extract_features`]."""
    target, rows = trainer.target_model, trainer.train_dataset
    if not isinstance(rows, Dataset):
        raise ValueError(
            "Features of a stream cannot be extracted, because its rows are not numbered. Load the data whole."
        )
    if trainer.target_states.is_fsdp:
        raise ValueError(
            "A target sharded by FSDP gives no last states to store. Spread it by `device_map` or tensor parallelism."
        )
    if rows_per_shard < 1:
        raise ValueError(f"`rows_per_shard` must be at least 1, got {rows_per_shard}.")
    dtype, state, lock = state_dtype(dtype or target.dtype), PartialState(), None
    if state.is_main_process:
        description = describe(target, trainer.processing_class, trainer.aux_layer_ids)
        lock = start_store(folder, rows, description, rows_per_shard, dtype, fixed_arguments(trainer.args))
    state.wait_for_everyone()
    write_shards(trainer, Path(folder), rows, dtype)
    state.wait_for_everyone()
    del lock
    return FeatureStore(folder)


def write_shards(trainer: Eagle3Trainer, folder: Path, rows: Dataset, dtype: torch.dtype) -> None:
    """Writes this process's share of the shards of a store that are missing after [`start_store`]."""
    index = read_json(folder / "index.json")
    rows_per_shard, batch_size = index["rows_per_shard"], trainer.args.per_device_train_batch_size
    target, device = trainer.target_model, device_of(trainer.target_model.get_input_embeddings())
    missing = missing_shards(folder, index)
    state, runs_together = PartialState(), is_sharded(target)
    state.wait_for_everyone()  # all have to list the same shards, so none may write before that
    if not runs_together:
        missing = missing[state.process_index :: state.num_processes]
    written_to = folder if state.is_main_process or not runs_together else None

    def batches(shard: int) -> Iterator[tuple[dict[str, torch.Tensor], list[int]]]:
        end = min((shard + 1) * rows_per_shard, len(rows))
        for start in range(shard * rows_per_shard, end, batch_size):
            examples = [rows[row] for row in range(start, min(start + batch_size, end))]
            batch = trainer.data_collator(examples)
            batch = {key: value.to(device) for key, value in batch.items() if isinstance(value, torch.Tensor)}
            yield batch, [len(example["input_ids"]) for example in examples]

    for shard in tqdm(missing, desc="Shards", disable=not state.is_main_process):
        write_shard(written_to, shard, trainer.target_states, batches(shard), dtype)


def num_shards(index: dict) -> int:
    return math.ceil(index["num_rows"] / index["rows_per_shard"])


def missing_shards(folder: Path, index: dict) -> list[int]:
    """Returns the shards that are not there, or not whole: a machine that crashes may cut off a file that it has written."""
    return [shard for shard in range(num_shards(index)) if not is_whole(shard_path(folder, shard))]


def is_whole(path: Path) -> bool:
    """Whether there is a file of safetensors with as many bytes as its header says."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (FileNotFoundError, SafetensorError):
        return False


def shard_path(folder: Path, shard: int) -> Path:
    return folder / f"features-{shard:05d}.safetensors"

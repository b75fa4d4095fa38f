"""The target's states and distributions that a draft learns from, computed in training or read from a folder."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset, load_from_disk
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import BatchFeature, PreTrainedModel, PreTrainedTokenizerBase, masking_utils
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging
from transformers.utils.generic import is_flash_attention_requested

from ..data.answers import locked
from ..data.images import IMAGE_INPUT
from ..environment import public_name
from ..files import UNFINISHED, write_atomically
from ..remote_code.devices_eagle3 import CUDNN_ATTENTION
from ..remote_code.loading_eagle3 import fingerprint
from ..remote_code.outputs_eagle3 import aux_hidden_states, select_hidden_states
from ..remote_code.target_eagle3 import device_of, is_sharded, table_of, unpack
from .arguments import Eagle3TrainingArguments
from .losses import log_sum_exp
from .models import without_adapter
from .ttt import documents_of


logger = logging.get_logger(__name__)

# The states that a draft reads, and the target's distributions: logits, mass and most probable tokens.
Features = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

FORMAT_VERSION = 1
FP8 = torch.float8_e4m3fn
LOCK = ".lock"
STATE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, FP8)  # integers would keep no fractions
# Older transformers (5.17) counts attention chunks from the beginning of the row, not of the document.
COUNTS_CHUNKS_BY_DOCUMENT = hasattr(masking_utils, "remap_positions_for_packed_sequence")


class TargetStates:
    """
    Runs a target on collated batches of `B` sequences of `L` tokens. Returns the states that a draft reads,
    `(B, L, n_aux * H)`, and the last states, which the target's head reads, `(B, L, H)`. Targets that FSDP shards return
    their logits instead of the last states.

    Under tensor parallelism each process holds a part of every layer. The processes run the target together, on the
    batch of one process after the other.

    Packed documents (`position_ids` that begin again at 0) do not see each other. Some targets do not keep them apart:
    they pass no `position_ids` to their masks, or have convolutional or recurrent states. These get each document in a
    row of its own. Flash attention keeps the documents of one row apart, so it gets all rows as one.

    Args:
        target (`PreTrainedModel`): The target.
        aux_layer_ids (`list[int]`): The layers whose states the draft reads.
    """

    def __init__(self, target: PreTrainedModel, aux_layer_ids: list[int]):
        self.target = without_adapter(target)
        base = self.target.base_model
        # Llama 4's text model has the name of its own base, so transformers takes it for the base.
        self.base_model = self.target.model if base is self.target else base
        self.aux_layer_ids = aux_layer_ids
        # FSDP runs only the whole model, because its hooks gather the last norm and the head together.
        self.is_fsdp = isinstance(self.target, FSDPModule)
        self.is_tensor_parallel = (self.target.tp_size or 1) > 1
        self.num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        # LLaVA and Aria pass the selection on to the layers of their images, and then read this one.
        of_images = getattr(target.config, "vision_feature_layer", None) or []
        self.selected = [*aux_layer_ids, *(of_images if isinstance(of_images, list) else [of_images])]
        self.keeps_documents_apart: bool | None = None  # unknown until a batch is packed
        unpack(self.target)  # training runs only its base

    @torch.no_grad()
    def __call__(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        documents = documents_of(batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids"))
        if "position_ids" in batch:
            if self.keeps_documents_apart is None:  # all processes ask at once
                self.keeps_documents_apart = self._keeps_documents_apart()
            if self.is_fsdp and not self.keeps_documents_apart:
                raise ValueError(
                    f"{type(self.target).__name__} does not keep packed documents apart. A row per document takes different "
                    "numbers of forwards in each process, and a target sharded by FSDP cannot do that. Leave out `packing`."
                )
            if not self.keeps_documents_apart and documents.max() > 1:
                return self._document_by_document(batch["input_ids"], documents)
            return self._packed(batch["input_ids"], batch["position_ids"])
        images = {key.removeprefix(IMAGE_INPUT): value for key, value in batch.items() if key.startswith(IMAGE_INPUT)}
        texts = {key: batch[key] for key in ("input_ids", "attention_mask") if key in batch}
        return self._forward(**texts, **images)

    def _packed(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs packed rows without an attention mask. With one, transformers would not look for documents."""
        if not is_flash_attention_requested(self.target.config.get_text_config(decoder=True)):
            return self._forward(input_ids=input_ids, position_ids=position_ids)
        aux, last = self._forward(input_ids=input_ids.reshape(1, -1), position_ids=position_ids.reshape(1, -1))
        return aux.view(*input_ids.shape, -1), last.view(*input_ids.shape, -1)

    def _forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        model, device = self.target if self.is_fsdp else self.base_model, inputs["input_ids"].device
        in_dtype = BatchFeature(inputs).to(self.target.dtype)  # casts floats only, such as pixels
        with CUDNN_ATTENTION.off():  # it may fail at the masks of padded and packed batches
            states = select_hidden_states(self.selected)
            outputs = model(**in_dtype, output_hidden_states=states, use_cache=False, return_dict=True)
        last = outputs.logits if self.is_fsdp else outputs.last_hidden_state
        return aux_hidden_states(outputs, self.aux_layer_ids, self.num_layers).to(device), last.to(device)

    def _keeps_documents_apart(self) -> bool:
        """Whether a document has the same states after different documents."""
        length, device = 8, device_of(self.target.get_input_embeddings())
        config = self.target.config.get_text_config(decoder=True)
        if getattr(config, "attention_chunk_size", None) is not None and not COUNTS_CHUNKS_BY_DOCUMENT:
            return False
        tokens = torch.randint(config.vocab_size, (3, length), generator=torch.Generator().manual_seed(0)).to(device)
        position_ids = torch.arange(length, device=device).repeat(2)[None]
        first, second = (
            self._forward(input_ids=torch.cat([before, tokens[2]])[None], position_ids=position_ids)[1][0, length:]
            for before in tokens[:2]
        )
        # Not exactly equal, because experts may be summed in another order.
        return bool((first - second).norm() < 0.02 * first.norm())

    def _document_by_document(
        self, input_ids: torch.Tensor, documents: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs each document in a row of its own, and puts its states where its tokens are."""
        numbered = [(row, number) for row in range(len(documents)) for number in documents[row].unique().tolist()]
        places = [(row, (documents[row] == number).nonzero()[:, 0]) for row, number in numbered if number >= 0]
        places.sort(key=lambda place: -len(place[1]))
        outputs: list[torch.Tensor] = []
        while places:  # no group has more tokens than the batch
            num_rows = documents.numel() // len(places[0][1])
            group, places = places[:num_rows], places[num_rows:]
            tokens = [input_ids[place] for place in group]
            padded = pad_sequence(tokens, batch_first=True)
            attention_mask = pad_sequence(list(map(torch.ones_like, tokens)), batch_first=True)
            states = self._forward(input_ids=padded, attention_mask=attention_mask)
            outputs = outputs or [each.new_zeros(*documents.shape, each.shape[-1]) for each in states]
            for output, of_group in zip(outputs, states):
                for place, each in zip(group, of_group):
                    output[place] = each[: len(place[1])]
        aux, last = outputs  # a batch has documents
        return aux, last

    @torch.no_grad()
    def logits(self, last_hidden_state: torch.Tensor) -> torch.Tensor:
        """Returns the target's logits `(B, L, V)` of states `(B, L, H)`, with its scales and soft caps."""
        if self.is_fsdp:
            return last_hidden_state
        last_hidden_state = last_hidden_state.to(device_of(self.target.get_output_embeddings()))
        with replaced_forward(self.base_model, StoredOutput(last_hidden_state=last_hidden_state)):
            # Only the shape and device of `inputs_embeds` are read.
            return self.target(inputs_embeds=last_hidden_state, use_cache=False, return_dict=True).logits

    @torch.no_grad()
    def distributions(
        self, last_hidden_state: torch.Tensor, draft_token_ids: torch.Tensor, rows_at_a_time: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Returns the target's distributions as a draft learns them.

        Args:
            last_hidden_state (`torch.Tensor` of shape `(B, L, H)`): The target's last states.
            draft_token_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`): The draft vocabulary.
            rows_at_a_time (`int`, *optional*):
                Positions, of all sequences together, whose logits of the whole vocabulary are in memory at once. By default
                256 on a CPU, and 1,024 elsewhere, where each piece costs kernel launches.

        Returns:
            `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: The logits of the draft's tokens
            `(B, L, draft_vocab_size)`, their total probability `(B, L)`, and the most probable tokens of the whole
            vocabulary `(B, L)`.
        """
        pieces, device, num_rows = [], last_hidden_state.device, last_hidden_state.shape[:2].numel()
        if is_sharded(self.target):  # all processes must run the head equally often
            rows_at_a_time = num_rows
        elif rows_at_a_time is None:
            rows_at_a_time = 256 if device.type == "cpu" else 1024
        for states in last_hidden_state.flatten(0, 1).split(rows_at_a_time):
            logits = self.logits(states[None]).to(device)  # a CPU would copy the head's weight for a slice's strides
            if len(draft_token_ids) == logits.shape[-1]:
                draft_logits, mass = logits, torch.ones(logits.shape[:2], device=device)
            else:
                draft_logits = logits[..., draft_token_ids]
                mass = (log_sum_exp(draft_logits) - log_sum_exp(logits)).exp()
            pieces.append((draft_logits, mass, logits.max(dim=-1).indices))  # argmax is slow in bfloat16
        return tuple(torch.cat(each, dim=1).unflatten(1, last_hidden_state.shape[:2])[0] for each in zip(*pieces))

    def features(self, batch: dict[str, torch.Tensor], draft_token_ids: torch.Tensor) -> Features:
        """Returns the states that a draft reads of a collated batch, and its [`~TargetStates.distributions`]."""
        if not self.is_tensor_parallel:
            return self._features(batch, draft_token_ids)
        device = batch["input_ids"].device
        mine: Features | None = None
        cpu_batch = {key: value.cpu() for key, value in batch.items() if isinstance(value, torch.Tensor)}
        for process, other in enumerate(gather_object([cpu_batch])):
            other = {key: value.to(device) for key, value in other.items()}
            features = self._features(other, draft_token_ids)
            if process == PartialState().process_index:
                mine = features
        assert mine is not None  # one of the batches is this process's
        return mine

    def _features(self, batch: dict[str, torch.Tensor], draft_token_ids: torch.Tensor) -> Features:
        if "states" in batch:
            aux, last = batch["states"][:, :, :-1].flatten(2), batch["states"][:, :, -1].to(self.target.dtype)
        else:
            aux, last = self(batch)
        return aux, *self.distributions(last, draft_token_ids)


class StoredOutput(BaseModelOutputWithPast):
    """The output of a base model that has only its last states."""

    def __getattr__(self, name: str) -> None:  # some heads read router logits, image features and the like
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@contextmanager
def replaced_forward(module: torch.nn.Module, output: BaseModelOutputWithPast) -> Iterator[None]:
    """Lets a module return `output` for a while."""
    before = module.__dict__.get("forward")  # accelerate puts one on the instance
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def describe(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, aux_layer_ids: list[int]) -> dict:
    """Returns the target, tokenizer and layers that features belong to."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    config = target.config.get_text_config(decoder=True)
    return {
        "target": target.config._name_or_path,
        "fingerprint": fingerprint(table_of(target)),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "tokenizer": hashlib.sha256(vocabulary).hexdigest(),
        "aux_layer_ids": list(aux_layer_ids),
    }


def fixed_arguments(args: Eagle3TrainingArguments) -> dict:
    """Returns the arguments that say what the rows of a store hold, and which of their tokens are learned."""
    return {
        "assistant_only_loss": args.assistant_only_loss,
        "completion_only_loss": args.completion_only_loss is not False,
        "chat_template_path": public_name(args.chat_template_path),
        "truncation_mode": args.truncation_mode,
    }


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
      the target's head. `offsets` `(rows + 1,)` has the ends of rows. With fp8 there are `scales` `(T, n_aux + 1)`.

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
        self.index = json.loads((self.folder / "index.json").read_text(encoding="utf-8"))
        if self.index["version"] != FORMAT_VERSION:
            raise ValueError(
                f"{folder} has version {self.index['version']} of the format, not {FORMAT_VERSION}. Extract the features again."
            )
        missing = missing_shards(self.folder, self.index)
        if missing:
            raise ValueError(
                f"{folder} is not complete: {len(missing)} of {self.num_shards} shards are missing or cut off, the first of them "
                f"{shard_path(self.folder, missing[0]).name}. Run the extraction again: it goes on where it stopped."
            )
        self.rows = load_from_disk(str(self.folder / "rows"))
        self._open_shards: dict[int, tuple[Any, list[int]]] = {}

    def __getstate__(self) -> dict[str, Any]:  # workers of a data loader open the files again
        return {**self.__dict__, "_open_shards": {}}

    @property
    def num_shards(self) -> int:
        """The number of files with states."""
        return -(-self.index["num_rows"] // self.index["rows_per_shard"])

    def dataset(self) -> Dataset:
        """Returns the rows, each with its number as `feature_row`."""
        return self.rows.add_column("feature_row", list(range(len(self.rows))))

    def __getitem__(self, row: int) -> torch.Tensor:
        """Returns the states of a row, `(L, n_aux + 1, H)`."""
        shard, place = divmod(row, self.index["rows_per_shard"])
        if shard not in self._open_shards:
            file = safe_open(shard_path(self.folder, shard), framework="pt")
            self._open_shards[shard] = file, file.get_tensor("offsets").tolist()
        file, offsets = self._open_shards[shard]
        tokens = slice(offsets[place], offsets[place + 1])
        states = file.get_slice("states")[tokens]
        if states.dtype == FP8:
            states = states.float() * file.get_slice("scales")[tokens][..., None]
        return states

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
            stored = self.index["description"][name]
            if name != "target" and stored != value:  # the target may have moved to another folder
                shown = "" if name in ("fingerprint", "tokenizer") else f" ({stored} there, {value} here)"
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
    """Collates rows of a [`FeatureStore`] with another collator, and adds their `states` `(B, L, n_aux + 1, H)`."""

    def __init__(self, collator: Callable, store: FeatureStore):
        self.collator, self.store = collator, store

    def __call__(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        batch = self.collator(examples)
        if "feature_row" not in examples[0]:  # evaluation runs the target
            return batch
        states = [self.store[example["feature_row"]] for example in examples]
        if any(len(each) != len(example["input_ids"]) for each, example in zip(states, examples)):
            raise ValueError(
                f"Rows and features in {self.store.folder} have different lengths. Extract them again, into another folder."
            )
        if len(batch["input_ids"]) != len(examples):  # without padding all examples are in one row
            states = [torch.cat(states)]
        padded = states[0].new_zeros(*batch["input_ids"].shape, *states[0].shape[1:])
        for row, each in enumerate(states):
            padded[row, : len(each)] = each
        return {**batch, "states": padded}


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
    Writes rows and index of a [`FeatureStore`], or checks that they are there already. Returns the lock of the folder.

    Args:
        folder (`str` or `Path`): The folder.
        rows (`Dataset`): The prepared data.
        description (`dict`): The output of [`describe`].
        rows_per_shard (`int`): Rows per file.
        dtype (`torch.dtype`): The dtype of stored states.
        arguments (`dict`): The output of [`fixed_arguments`].

    Raises:
        ValueError: if the folder holds something else, or another run writes to it.
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
        "num_tokens": sum(map(len, rows["input_ids"])),
        "rows_per_shard": rows_per_shard,
        "dtype": str(dtype).removeprefix("torch."),
        **({} if images is None else {"images": images}),
    }
    if (folder / "index.json").exists():
        known = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        ours, theirs = (each.with_format("arrow")[:] for each in (rows, load_from_disk(str(folder / "rows"))))
        before, now = known["description"]["target"], description["target"]
        description = {**description, "target": before}  # it may have moved to another folder
        if (
            known != {**index, "description": description}
            or ours.column_names != theirs.column_names
            or not ours.equals(theirs)
        ):
            raise ValueError(
                f"{folder} holds features of other rows or another target, or stored in another way. Choose another folder, or "
                "the arguments of its first run."
            )
        warn_of_other_target(folder, before, now)
        return lock
    shutil.rmtree(unfinished, ignore_errors=True)
    rows.save_to_disk(str(unfinished))
    unfinished.rename(folder / "rows")
    write_atomically(folder / "index.json", json.dumps(index, indent=2))
    return lock


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
    Writes one shard completely or not at all.

    Args:
        folder (`Path`, *optional*):
            The folder. `None` if another process writes, and this one only takes part in the target's forward.
        shard (`int`): The number of the shard.
        target_states ([`TargetStates`]): The target.
        batches (iterable of `tuple[dict, list[int]]`): Collated batches, and the lengths of the rows in each.
        dtype (`torch.dtype`): The dtype of stored states.

    Raises:
        ValueError: if the states are not finite, or the dtype cannot hold them.
    """
    rows, lengths = list[dict[str, torch.Tensor]](), [0]
    for batch, batch_lengths in batches:
        aux, last = target_states(batch)
        if folder is None:
            continue
        states = torch.cat([aux, last], dim=-1).unflatten(-1, (-1, last.shape[-1]))  # (B, L, n_aux + 1, H)
        if len(states) != len(batch_lengths):  # without padding all rows are in one
            states = states[0].split(batch_lengths + [states.shape[1] - sum(batch_lengths)])
        rows += [stored(each[:length], dtype) for each, length in zip(states, batch_lengths)]
        lengths += batch_lengths
    if folder is None:
        return
    tensors = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    tensors["offsets"] = torch.tensor(lengths).cumsum(0)
    write_atomically(shard_path(folder, shard), lambda unfinished: save_file(tensors, unfinished))


def stored(states: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """
    Returns the states of a row as they are stored, on the CPU. A whole shard in float32 may not fit there.

    Raises:
        ValueError: if the states are not finite, or the dtype cannot hold them.
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


def extract(
    folder: str | Path,
    rows: Dataset,
    target_states: TargetStates,
    collator: Callable,
    batch_size: int,
    dtype: torch.dtype,
) -> None:
    """
    Writes this process's share of the shards of a store that are missing after [`start_store`], `batch_size` rows at a time.
    """
    folder = Path(folder)
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    rows_per_shard, device = index["rows_per_shard"], device_of(target_states.target.get_input_embeddings())
    missing = missing_shards(folder, index)
    state, runs_together = PartialState(), is_sharded(target_states.target)
    state.wait_for_everyone()  # all have to list the same shards, so none may write before that
    if not runs_together:
        missing = missing[state.process_index :: state.num_processes]
    written_to = folder if state.is_main_process or not runs_together else None

    def batches(shard: int) -> Iterator[tuple[dict[str, torch.Tensor], list[int]]]:
        end = min((shard + 1) * rows_per_shard, len(rows))
        for start in range(shard * rows_per_shard, end, batch_size):
            examples = [rows[row] for row in range(start, min(start + batch_size, end))]
            batch = collator(examples)
            batch = {key: value.to(device) for key, value in batch.items() if isinstance(value, torch.Tensor)}
            yield batch, [len(example["input_ids"]) for example in examples]

    for shard in tqdm(missing, desc="Shards", disable=not state.is_main_process):
        write_shard(written_to, shard, target_states, batches(shard), dtype)


def missing_shards(folder: Path, index: dict) -> list[int]:
    """Returns the shards that are not there, or not whole: a machine that crashes may cut off a file that it has written."""
    num_shards = -(-index["num_rows"] // index["rows_per_shard"])
    return [shard for shard in range(num_shards) if not is_whole(shard_path(folder, shard))]


def is_whole(path: Path) -> bool:
    """Whether there is a file of safetensors with as many bytes as its header says."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (FileNotFoundError, SafetensorError):
        return False


def shard_path(folder: Path, shard: int) -> Path:
    return folder / f"features-{shard:05d}.safetensors"

"""What a draft learns from: the target's states and distributions, computed as training goes or read from a folder."""

import hashlib
import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset, load_from_disk
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, masking_utils
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..remote_code.cuda_eagle3 import CUDNN_ATTENTION
from ..remote_code.loading_eagle3 import fingerprint
from ..remote_code.outputs_eagle3 import aux_hidden_states, select_hidden_states
from ..remote_code.target_eagle3 import is_sharded
from .losses import log_sum_exp
from .ttt import documents_of


FORMAT_VERSION = 1
FP8 = torch.float8_e4m3fn
# Older transformers (5.17) count the chunks that a row's tokens attend to from where the row begins.
COUNTS_CHUNKS_BY_DOCUMENT = hasattr(masking_utils, "remap_positions_for_packed_sequence")


class TargetStates:
    """
    Runs a target on collated batches, and returns for `B` sequences of `L` tokens the states that a draft reads, of
    shape `(B, L, n_aux * H)`, and the target's last ones, which its head reads, `(B, L, H)`. Targets that FSDP shards
    give their logits in place of the latter.

    Where processes hold shares of the target's layers (tensor parallelism), they run it together, on the batch of one
    process after the other.

    Packed documents (`position_ids` that begin again at 0) are read apart from each other. Targets that do not tell
    them apart themselves (they pass no `position_ids` to their masks, or have convolutional or recurrent states) get
    each document in a row of its own.
    """

    def __init__(self, target: PreTrainedModel, aux_layer_ids: list[int]):
        # PEFT's wrapper calls the whole model its base.
        self.target = target.get_base_model() if hasattr(target, "get_base_model") else target
        base = self.target.base_model
        # Llama 4's text model is its own base by the name that transformers goes by.
        self.base_model = self.target.model if base is self.target else base
        self.aux_layer_ids = aux_layer_ids
        # FSDP runs the whole model or nothing: its hooks gather the last norm and the head together.
        self.is_fsdp = isinstance(self.target, FSDPModule)
        self.is_tensor_parallel = (getattr(self.target, "tp_size", None) or 1) > 1
        self.num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        self.keeps_documents_apart = None

    @torch.no_grad()
    def __call__(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        documents = documents_of(batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids"))
        if "position_ids" in batch:
            if self.keeps_documents_apart is None:  # asked by all processes at once, whatever their rows have
                self.keeps_documents_apart = self._keeps_documents_apart()
            if self.is_fsdp and not self.keeps_documents_apart:
                raise ValueError(
                    f"{type(self.target).__name__} does not keep packed documents apart. Reading each in a row of its own "
                    "takes a number of forwards that differs between processes, which a target sharded by FSDP cannot "
                    "do. Leave out `packing`."
                )
            if not self.keeps_documents_apart and documents.max() > 1:
                return self._document_by_document(batch["input_ids"], documents)
        return self._forward(
            **{key: batch[key] for key in ("input_ids", "attention_mask", "position_ids") if key in batch}
        )

    def _forward(self, **inputs):
        model, device = self.target if self.is_fsdp else self.base_model, inputs["input_ids"].device
        with CUDNN_ATTENTION.off():  # which may fail at the masks of padded and packed batches
            outputs = model(**inputs, output_hidden_states=select_hidden_states(self.aux_layer_ids), use_cache=False)
        last = outputs.logits if self.is_fsdp else outputs.last_hidden_state
        return aux_hidden_states(outputs, self.aux_layer_ids, self.num_layers).to(device), last.to(device)

    def _keeps_documents_apart(self) -> bool:
        """Whether a document's states are those it has alone, whatever the ones before it say."""
        length, device = 8, self.target.get_input_embeddings().weight.device
        config = self.target.config.get_text_config(decoder=True)
        if getattr(config, "attention_chunk_size", None) is not None and not COUNTS_CHUNKS_BY_DOCUMENT:
            return False
        tokens = torch.randint(config.vocab_size, (3, length), generator=torch.Generator().manual_seed(0)).to(device)
        position_ids = torch.arange(length, device=device).repeat(2)[None]
        first, second = (
            self._forward(input_ids=torch.cat([before, tokens[2]])[None], position_ids=position_ids)[1][0, length:]
            for before in tokens[:2]
        )
        # Not equality: experts may add up in another order.
        return (first - second).norm() < 0.02 * first.norm()

    def _document_by_document(self, input_ids, documents):
        aux, last, budget = None, None, documents.numel()
        rows = [(row, number) for row in range(len(documents)) for number in documents[row].unique().tolist()]
        masks = [documents[row] == number for row, number in rows if number >= 0]
        rows = [row for row, number in rows if number >= 0]
        order = sorted(range(len(masks)), key=lambda index: -int(masks[index].sum()))
        while order:  # as many at once as take no more tokens than the batch
            longest = int(masks[order[0]].sum())
            group, order = order[: max(budget // longest, 1)], order[max(budget // longest, 1) :]
            tokens = [input_ids[rows[index], masks[index]] for index in group]
            padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
            lengths = torch.tensor([len(each) for each in tokens], device=padded.device)
            attention_mask = (torch.arange(longest, device=padded.device) < lengths[:, None]).long()
            group_aux, group_last = self._forward(input_ids=padded, attention_mask=attention_mask)
            if aux is None:
                aux = group_aux.new_zeros(*documents.shape, group_aux.shape[-1])
                last = group_last.new_zeros(*documents.shape, group_last.shape[-1])
            for place, index in enumerate(group):
                aux[rows[index], masks[index]] = group_aux[place, : lengths[place]]
                last[rows[index], masks[index]] = group_last[place, : lengths[place]]
        return aux, last

    @torch.no_grad()
    def logits(self, last_hidden_state: torch.Tensor) -> torch.Tensor:
        """The target's logits `(B, L, V)`, by its own head and whatever it does to them (scales, soft caps)."""
        if self.is_fsdp:
            return last_hidden_state
        last_hidden_state = last_hidden_state.to(self.target.get_output_embeddings().weight.device)
        with replaced_forward(self.base_model, StoredOutput(last_hidden_state=last_hidden_state)):
            # What is read is only its shape and device.
            return self.target(inputs_embeds=last_hidden_state, use_cache=False).logits

    @torch.no_grad()
    def distributions(
        self, last_hidden_state: torch.Tensor, draft_token_ids: torch.LongTensor, rows_at_a_time: int = 256
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        What a draft with this vocabulary is to learn from states `(B, L, H)`. Logits of the target's whole vocabulary
        stand in memory for `rows_at_a_time` positions of all sequences together.

        Returns:
            `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: Logits of the draft's tokens `(B, L, draft_vocab_size)`,
            their probability `(B, L)`, and the most probable tokens of the whole vocabulary `(B, L)`.
        """
        pieces, device, num_rows = [], last_hidden_state.device, last_hidden_state.shape[:2].numel()
        if is_sharded(self.target):  # all processes take part in each forward of the head: the same number of them
            rows_at_a_time = num_rows
        for states in last_hidden_state.flatten(0, 1).split(rows_at_a_time):
            logits = self.logits(states[None]).to(device)  # strides of a slice would make a CPU copy the head's weight
            if len(draft_token_ids) == logits.shape[-1]:
                draft_logits, mass = logits, torch.ones(logits.shape[:2], device=device)
            else:
                draft_logits = logits[..., draft_token_ids]
                mass = (log_sum_exp(draft_logits) - log_sum_exp(logits)).exp()
            pieces.append((draft_logits, mass, logits.max(dim=-1).indices))  # argmax is slow in bfloat16
        return tuple(torch.cat(each, dim=1).unflatten(1, last_hidden_state.shape[:2])[0] for each in zip(*pieces))

    def features(self, batch: dict[str, torch.Tensor], draft_token_ids: torch.LongTensor) -> tuple[torch.Tensor, ...]:
        """The states that a draft reads of a collated batch, and its [`~TargetStates.distributions`]."""
        if not self.is_tensor_parallel:
            return self._features(batch, draft_token_ids)
        device, mine = batch["input_ids"].device, None
        cpu_batch = {key: value.cpu() for key, value in batch.items() if isinstance(value, torch.Tensor)}
        for process, other in enumerate(gather_object([cpu_batch])):
            other = {key: value.to(device) for key, value in other.items()}
            features = self._features(other, draft_token_ids)
            if process == PartialState().process_index:
                mine = features
        return mine

    def _features(self, batch, draft_token_ids):
        if "states" in batch:
            aux, last = batch["states"][:, :, :-1].flatten(2), batch["states"][:, :, -1].to(self.target.dtype)
        else:
            aux, last = self(batch)
        return aux, *self.distributions(last, draft_token_ids)


class StoredOutput(BaseModelOutputWithPast):
    """What a base model returns, with nothing but its last states."""

    def __getattr__(self, name):  # some heads look for routers, images and the like
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@contextmanager
def replaced_forward(module: torch.nn.Module, output):
    before = module.__dict__.get("forward")  # accelerate's, or none on the instance
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def describe(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, aux_layer_ids: list[int]) -> dict:
    """What features belong to."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    config = target.config.get_text_config(decoder=True)
    return {
        "target": target.config._name_or_path,
        "fingerprint": fingerprint(target.get_input_embeddings().weight),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "tokenizer": hashlib.sha256(vocabulary).hexdigest(),
        "aux_layer_ids": list(aux_layer_ids),
    }


class FeatureStore:
    """
    A folder of tokenized rows and the target's states on them, written by [`Eagle3Trainer.extract_features`] and read
    memory-mapped: pass it to [`Eagle3Trainer`] as a data set.

    - `rows/`: the prepared data set (`input_ids`, `labels`, and `seq_lengths` if packed).
    - `index.json`: what the features belong to, and how they are stored.
    - `features-00000.safetensors`, ...: for `rows_per_shard` rows each, one after the other in `T` tokens, `states`
      `(T, n_aux + 1, H)`, the last being what the target's head reads; `offsets` `(rows + 1,)`; with fp8 also `scales`
      `(T, n_aux + 1)`.

    Args:
        folder (`str` or `Path`): The folder.

    Raises:
        FileNotFoundError: if there is no such store.
        ValueError: if it is not complete, or of another version of the format.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / "index.json").exists():
            raise FileNotFoundError(f"{folder} has no index.json: it is not a folder of features.")
        self.index = json.loads((self.folder / "index.json").read_text(encoding="utf-8"))
        if self.index["version"] != FORMAT_VERSION:
            raise ValueError(
                f"{folder} has version {self.index['version']} of the format; this one reads {FORMAT_VERSION}."
            )
        missing = missing_shards(self.folder, self.index)
        if missing:
            raise ValueError(
                f"{folder} is not complete: {len(missing)} of {self.num_shards} shards are missing, the first of them "
                f"{shard_path(self.folder, missing[0]).name}. Run the extraction again; it goes on where it stopped."
            )
        self.rows = load_from_disk(str(self.folder / "rows"))
        self._open_shards = {}

    def __getstate__(self):  # open files do not travel to the workers of a data loader
        return {**self.__dict__, "_open_shards": {}}

    @property
    def num_shards(self) -> int:
        """How many files the states are in."""
        return -(-self.index["num_rows"] // self.index["rows_per_shard"])

    def dataset(self) -> Dataset:
        """The rows, each with its number as `feature_row`."""
        return self.rows.add_column("feature_row", list(range(len(self.rows))))

    def __getitem__(self, row: int) -> torch.FloatTensor:
        """The states of a row, `(L, n_aux + 1, H)`."""
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

    def check(self, description: dict) -> None:
        """
        Checks what the features belong to.

        Args:
            description (`dict`): The target, tokenizer and layers that they are to be used with.

        Raises:
            ValueError: if the features belong to another target, tokenizer or choice of layers.
        """
        for name, value in description.items():
            stored = self.index["description"][name]
            if name != "target" and stored != value:  # a target may lie in another folder today
                shown = "" if name in ("fingerprint", "tokenizer") else f" ({stored} there, {value} here)"
                raise ValueError(
                    f"The features in {self.folder} were extracted from {self.index['description']['target'] or 'a target'} with "
                    f"another {name}{shown}. Extract them again for this pairing, into another folder."
                )


class FeatureCollator:
    """
    Adds the states of a [`FeatureStore`] to what `collator` makes of its rows: `states` of shape
    `(B, L, n_aux + 1, H)`.
    """

    def __init__(self, collator: Callable, store: FeatureStore):
        self.collator, self.store = collator, store

    def __call__(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        batch = self.collator(examples)
        if "feature_row" not in examples[0]:  # evaluation runs the target
            return batch
        states = [self.store[example["feature_row"]] for example in examples]
        if any(len(each) != len(example["input_ids"]) for each, example in zip(states, examples)):
            raise ValueError(f"Rows and features in {self.store.folder} have different lengths.")
        if len(batch["input_ids"]) != len(examples):  # without padding, all in one row
            states = [torch.cat(states)]
        padded = states[0].new_zeros(*batch["input_ids"].shape, *states[0].shape[1:])
        for row, each in enumerate(states):
            padded[row, : len(each)] = each
        return {**batch, "states": padded}


def stacked(aux: torch.FloatTensor, last: torch.FloatTensor) -> torch.FloatTensor:
    """What [`TargetStates`] returns as `states` `(B, L, n_aux + 1, H)`, the last being what the target's head reads."""
    return torch.cat([aux, last], dim=-1).unflatten(-1, (-1, last.shape[-1]))


def start_store(folder: str | Path, rows: Dataset, description: dict, rows_per_shard: int, dtype: torch.dtype) -> None:
    """
    Writes rows and index of a [`FeatureStore`], or checks that those there are the same.

    Raises:
        ValueError: if the folder holds something else.
    """
    folder = Path(folder)
    index = {
        "version": FORMAT_VERSION,
        "description": description,
        "num_rows": len(rows),
        "num_tokens": sum(map(len, rows["input_ids"])),
        "rows_per_shard": rows_per_shard,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if (folder / "index.json").exists():
        known = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        ours, theirs = (each.with_format("arrow")[:] for each in (rows, load_from_disk(str(folder / "rows"))))
        if known != index or ours.column_names != theirs.column_names or not ours.equals(theirs):
            raise ValueError(
                f"{folder} holds features of other rows, of another target, or stored otherwise. Choose another folder, "
                "or go on with the arguments of its first run."
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty, and holds no features. Choose another folder.")
    rows.save_to_disk(str(folder / "rows"))
    write_atomically(
        folder / "index.json", lambda path: path.write_text(json.dumps(index, indent=2), encoding="utf-8")
    )


def write_shard(folder: Path | None, shard: int, target_states: TargetStates, batches, dtype: torch.dtype) -> None:
    """
    Writes one shard, all or nothing.

    Args:
        folder (`Path`, *optional*):
            None where another process writes, and this one only takes part in the target's forward.
        batches (iterable of `tuple[dict, list[int]]`): Collated batches, and the lengths of the rows in each.
    """
    rows, lengths = [], [0]
    for batch, batch_lengths in batches:
        states = stacked(*target_states(batch))
        if len(states) != len(batch_lengths):  # without padding, all in one row
            states = states[0].split(batch_lengths + [states.shape[1] - sum(batch_lengths)])
        rows += [each[:length].cpu() for each, length in zip(states, batch_lengths)]
        lengths += batch_lengths
    if folder is None:
        return
    states = torch.cat(rows)
    tensors = {"offsets": torch.tensor(lengths).cumsum(0)}
    if dtype == FP8:
        tensors["scales"] = (states.float().abs().amax(-1) / torch.finfo(FP8).max).clamp(min=1e-12)
        states = states.float() / tensors["scales"][..., None]
    tensors["states"] = states.to(dtype)
    if dtype != FP8 and not tensors["states"].isfinite().all():
        raise ValueError(
            f"The target's states reach {states.float().abs().max():.3g}, which {dtype} does not hold. Store them in bfloat16 or "
            "float8_e4m3fn."
        )
    write_atomically(shard_path(folder, shard), lambda unfinished: save_file(tensors, unfinished))


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    write(unfinished)
    unfinished.replace(path)


def extract(
    folder: str | Path,
    rows: Dataset,
    target_states: TargetStates,
    collator: Callable,
    batch_size: int,
    dtype: torch.dtype,
    process_index: int = 0,
    num_processes: int = 1,
) -> None:
    """Writes this process's share of the shards that are missing from a store begun by [`start_store`]."""
    folder = Path(folder)
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    rows_per_shard, device = index["rows_per_shard"], target_states.target.get_input_embeddings().weight.device
    missing = missing_shards(folder, index)
    writes, takes_part_in_all = True, is_sharded(target_states.target)
    if takes_part_in_all:
        writes = process_index == 0
    else:
        missing = missing[process_index::num_processes]

    def batches(shard):
        end = min((shard + 1) * rows_per_shard, len(rows))
        for start in range(shard * rows_per_shard, end, batch_size):
            examples = [rows[row] for row in range(start, min(start + batch_size, end))]
            batch = collator(examples)
            batch = {key: value.to(device) for key, value in batch.items() if isinstance(value, torch.Tensor)}
            yield batch, [len(example["input_ids"]) for example in examples]

    for shard in tqdm(missing, desc="Shards", disable=process_index != 0):
        write_shard(folder if writes else None, shard, target_states, batches(shard), dtype)


def missing_shards(folder: Path, index: dict) -> list[int]:
    num_shards = -(-index["num_rows"] // index["rows_per_shard"])
    return [shard for shard in range(num_shards) if not shard_path(folder, shard).exists()]


def shard_path(folder: Path, shard: int) -> Path:
    return folder / f"features-{shard:05d}.safetensors"

"""The target's states and distributions that a draft learns from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.utils import gather_object
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchFeature, PreTrainedModel, masking_utils
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import is_flash_attention_requested

from ..data.images import IMAGE_INPUT
from ..making import unpack
from ..remote_code.devices_eagle3 import CUDNN_ATTENTION
from ..remote_code.outputs_eagle3 import aux_hidden_states, select_hidden_states
from ..remote_code.target_eagle3 import device_of, is_sharded
from .losses import log_sum_exp
from .models import without_adapter
from .ttt import documents_of


# The states that a draft reads, and the target's distributions: logits, mass and most probable tokens.
Features = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# The most probable token of the whole vocabulary, and the log-sum-exp of its logits, at each position.
Summary = tuple[torch.Tensor, torch.Tensor]

# In bfloat16 on a CPU, torch compiles a kernel for each new shape of a product, which takes longer than the product. So rows have a
# multiple of so many tokens.
PADDING_ON_CPU = 64

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
        self.treats_tokens_alike: bool | None = None  # unknown until the logits of some tokens are wanted
        unpack(self.target)  # training runs only its base

    @torch.no_grad()
    def __call__(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if "position_ids" not in batch:
            texts = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
            images = {name.removeprefix(IMAGE_INPUT): batch[name] for name in batch if name.startswith(IMAGE_INPUT)}
            return self._forward(**texts, **images)
        if self.keeps_documents_apart is None:  # all processes ask at once
            self.keeps_documents_apart = self._keeps_documents_apart()
        if self.is_fsdp and not self.keeps_documents_apart:
            raise ValueError(
                f"{type(self.target).__name__} does not keep packed documents apart. A row per document takes different "
                "numbers of forwards in each process, and a target sharded by FSDP cannot do that. Leave out `packing`."
            )
        documents = documents_of(batch)
        if not self.keeps_documents_apart and documents.max() > 1:
            return self._document_by_document(batch["input_ids"], documents)
        return self._packed(batch["input_ids"], batch["position_ids"])

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
        places = [
            (row, (numbers == number).nonzero()[:, 0])
            for row, numbers in enumerate(documents)
            for number in numbers.unique().tolist()
            if number >= 0  # the others are padding
        ]
        places.sort(key=lambda place: len(place[1]), reverse=True)
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
        output = StoredOutput(last_hidden_state=last_hidden_state)
        with replaced_forward(self.base_model, lambda *args, **kwargs: output):
            # Only the shape and device of `inputs_embeds` are read.
            return self.target(inputs_embeds=last_hidden_state, use_cache=False, return_dict=True).logits

    def _in_pieces(self, rows_at_a_time: int | None, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yields the target's logits `(R, V)` of the first of some tensors `(B, L, ...)`, the last states, and the others `(R, ...)`."""
        last_hidden_state, device = tensors[0], tensors[0].device
        if is_sharded(self.target):  # all processes must run the head equally often
            rows_at_a_time = last_hidden_state.shape[:2].numel()
        elif rows_at_a_time is None:
            rows_at_a_time = 256 if device.type == "cpu" else 1024
        for states, *others in zip(*(each.flatten(0, 1).split(rows_at_a_time) for each in tensors), strict=True):
            # As one sequence: a CPU would copy the head's weight for the strides of a slice of several.
            yield self.logits(states[None])[0].to(device), *others

    @torch.no_grad()
    def summary(self, last_hidden_state: torch.Tensor) -> Summary:
        """Returns the [`Summary`] of the target's distributions, given the last states `(B, L, H)`."""
        pieces = [summary_of(logits) for (logits,) in self._in_pieces(None, last_hidden_state)]
        best, log_sums = (torch.cat(each).unflatten(0, last_hidden_state.shape[:2]) for each in zip(*pieces))
        return best, log_sums

    @torch.no_grad()
    def distributions(
        self,
        last_hidden_state: torch.Tensor,
        draft_token_ids: torch.Tensor,
        summary: Summary | None = None,
        rows_at_a_time: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Returns the target's distributions as a draft learns them, given the last states `(B, L, H)`: the logits of the draft's tokens
        `(B, L, draft_vocab_size)`, their total probability `(B, L)`, and the most probable tokens of the whole vocabulary `(B, L)`. If
        their `summary` `(B, L)` is known, the head computes the draft's tokens only, where it can.

        Logits of the whole vocabulary are in memory for `rows_at_a_time`, positions of all sequences together. By default these are
        256 on a CPU, and 1,024 elsewhere, where each piece costs kernel launches.
        """
        pieces, shape = [], last_hidden_state.shape[:2]
        selects = summary is not None and self._may_select(len(draft_token_ids), last_hidden_state)
        with self._selected_head(draft_token_ids) if selects else nullcontext():
            for logits, *known in self._in_pieces(rows_at_a_time, last_hidden_state, *(summary or ())):
                if len(draft_token_ids) == logits.shape[-1] and not selects:  # the whole vocabulary
                    best = known[0] if known else best_tokens(logits)
                    pieces.append((logits, torch.ones(len(logits), device=logits.device), best))
                    continue
                best, log_sums = known or summary_of(logits)
                draft_logits = logits if selects else logits[..., draft_token_ids]
                pieces.append((draft_logits, (log_sum_exp(draft_logits) - log_sums).exp(), best))
        return tuple(torch.cat(each).unflatten(0, shape) for each in zip(*pieces))

    def _may_select(self, num_tokens: int, last_hidden_state: torch.Tensor) -> bool:
        """Whether the target's head can compute the logits of `num_tokens` alone. Tried with the first of the last states."""
        head = self.target.get_output_embeddings()
        # Neither quantized nor sharded.
        is_plain = type(head) is torch.nn.Linear and type(head.weight) is torch.nn.Parameter
        if not is_plain or head.weight.is_meta or num_tokens == head.out_features:  # offloaded, or not needed
            return False
        if self.treats_tokens_alike is None:  # some targets change the logits of certain tokens after the head
            states = last_hidden_state[:1, :1]
            forward, expected = head.forward, self.logits(states)
            with replaced_forward(head, lambda states: forward(states).flip(-1)):
                self.treats_tokens_alike = torch.equal(self.logits(states).flip(-1), expected)
        return self.treats_tokens_alike

    @contextmanager
    def _selected_head(self, token_ids: torch.Tensor) -> Iterator[None]:
        """Lets [`~TargetStates.logits`] return those of some tokens for a while."""
        head = self.target.get_output_embeddings()
        token_ids = token_ids.to(head.weight.device)
        weight, bias = head.weight[token_ids], None if head.bias is None else head.bias[token_ids]
        with replaced_forward(head, lambda states: F.linear(states, weight, bias)):
            yield

    def features(self, batch: dict[str, torch.Tensor], draft_token_ids: torch.Tensor) -> Features:
        """Returns the states that a draft reads of a collated batch, and its [`~TargetStates.distributions`]."""
        if not self.is_tensor_parallel:
            return self._features(batch, draft_token_ids)
        device = batch["input_ids"].device
        cpu_batch = {key: value.cpu() for key, value in batch.items() if isinstance(value, torch.Tensor)}
        for process, other in enumerate(gather_object([cpu_batch])):
            other = {key: value.to(device) for key, value in other.items()}
            features = self._features(other, draft_token_ids)
            if process == PartialState().process_index:
                mine = features
        return mine

    def _features(self, batch: dict[str, torch.Tensor], draft_token_ids: torch.Tensor) -> Features:
        if "states" not in batch:
            aux, last = self(batch)
            return aux, *self.distributions(last, draft_token_ids)
        aux, last = batch["states"][:, :, :-1].flatten(2), batch["states"][:, :, -1].to(self.target.dtype)
        return aux, *self.distributions(last, draft_token_ids, (batch["best_tokens"], batch["log_sums"]))


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Returns the most probable tokens `(R,)` of logits `(R, V)`."""
    return logits.max(dim=-1).indices  # argmax is slow in bfloat16


def summary_of(logits: torch.Tensor) -> Summary:
    """Returns the [`Summary`] `(R,)` of logits `(R, V)`."""
    return best_tokens(logits), log_sum_exp(logits)


class StoredOutput(BaseModelOutputWithPast):
    """The output of a base model that has only its last states."""

    def __getattr__(self, name: str) -> None:  # some heads read router logits, image features and the like
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@contextmanager
def replaced_forward(module: torch.nn.Module, forward: Callable) -> Iterator[None]:
    """Lets a module call `forward` for a while."""
    before = module.__dict__.get("forward")  # accelerate puts one on the instance
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before

# SPDX-License-Identifier: Apache-2.0
"""The target's outputs at the nodes of a tree, and what a call returns beside the text: outputs and statistics."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput, output_capturing


# What transformers calls the cache among arguments and outputs. It was another name before 5.24.
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
# Arguments with an entry for each token.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
INPUTS_BY_TOKEN = ("attention_mask", "position_ids", *TOKEN_TYPES)

# Before 5.23 a list passed as `output_hidden_states` counted from the first layer's output instead of the embeddings.
# The outputs look alike, so all states are asked for there.
CAN_SELECT_HIDDEN_STATES = hasattr(output_capturing, "resolve_hidden_states_indices")


class TreeOutputs(NamedTuple):
    """The target's outputs at the nodes of a tree."""

    logits: torch.Tensor  # (B, N, V): for the token after each node
    positions: torch.Tensor  # (B or 1, N): of each node in the text
    states: torch.Tensor | None  # (B, N, n * H): what the proposer reads
    target_outputs: ModelOutput  # all that the target returned
    num_replayed: int = 0  # tokens before the nodes in `target_outputs`


def select_hidden_states(layer_ids: Sequence[int]) -> bool | list[int]:
    """The `output_hidden_states` to pass for [`aux_hidden_states`]: only these layers, if transformers can select."""
    return sorted(set(layer_ids)) if CAN_SELECT_HIDDEN_STATES else True


def aux_hidden_states(outputs: ModelOutput, layer_ids: Sequence[int], num_layers: int) -> torch.Tensor:
    """
    The states that a draft reads, concatenated: `(B, S, n_aux * target_hidden_size)`. Id `k` is the state entering
    decoder layer `k`, `hidden_states[k]`. Raises `ValueError` if the target did not return `num_layers + 1` states, with one for each token.
    """
    states = outputs.hidden_states
    if states is None or len(states) != num_layers + 1:
        raise ValueError(
            f"The target returned {'no' if states is None else len(states)} hidden states. A draft needs "
            f"{num_layers + 1}: one entering each of its {num_layers} layers, and a last one."
        )
    if (last := getattr(outputs, "state_after_last_layer", None)) is not None:
        states = (*states[:num_layers], last)
    if len(shape := states[layer_ids[0]].shape) != 3:
        raise ValueError(
            f"The target's hidden states have shape {tuple(shape)}: several for each token. A draft reads "
            "one, so this target cannot have a draft."
        )
    return torch.cat([states[layer_id].to(states[layer_ids[0]].device) for layer_id in layer_ids], dim=-1)


@contextmanager
def keep_state_after_last_layer(target: PreTrainedModel) -> Iterator[None]:
    """
    Adds a `state_after_last_layer` to the target's outputs: the state before the final norm. The last of its
    `hidden_states` is the state after it. Raises `ValueError` if its layers are not found, or the last one is not called.
    """
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    lists = (each for each in target.get_decoder().modules() if isinstance(each, torch.nn.ModuleList))
    layers = next((each for each in lists if len(each) == num_layers), None)
    if layers is None:
        raise ValueError(
            f"The draft reads the state after the last layer, but {type(target).__name__} has no list of its "
            f"{num_layers} layers. Use a draft that reads other layers."
        )
    # Other threads, which may be in the middle of a forward, have no `state` here: the hooks do nothing in them. Dynamo
    # compiles this, but not `threading.get_ident`.
    kept = threading.local()
    kept.state = None

    def keep(module: torch.nn.Module, args: tuple, output: Any) -> None:
        if hasattr(kept, "state"):
            kept.state = output[0] if isinstance(output, tuple) else output

    def hand_over(module: torch.nn.Module, args: tuple, outputs: Any) -> None:
        if not hasattr(kept, "state"):
            return
        if kept.state is None:
            raise ValueError(
                f"The draft reads the state after the last layer, but a forward of {type(target).__name__} did not call that "
                "layer as a module. Do not compile the target before the call, or use a draft that reads other layers."
            )
        outputs.state_after_last_layer, kept.state = kept.state, None

    handles = layers[-1].register_forward_hook(keep), target.register_forward_hook(hand_over)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class ReturnedOutputs:
    """Collects the outputs that `return_dict_in_generate` asks for, one entry per token as in `_sample`."""

    def __init__(self, config: GenerationConfig, batch_size: int):
        self.wants_dict, self.wants_hidden_states = config.return_dict_in_generate, config.output_hidden_states
        optional = ("scores", "logits", "hidden_states") if self.wants_dict else ()
        names = [name for name in optional if getattr(config, f"output_{name}")]
        # A list of entries for each row.
        self.collected: dict[str, list[list]] = {name: [[] for _ in range(batch_size)] for name in names}
        self.scores_of_batch: list[torch.Tensor] = []  # the scores of all rows together

        if type(self.wants_hidden_states) is int:
            self.wants_hidden_states = [self.wants_hidden_states]
        if isinstance(self.wants_hidden_states, list) and not CAN_SELECT_HIDDEN_STATES:
            raise ValueError(
                f"`output_hidden_states` is {self.wants_hidden_states}, but EAGLE-3 decoding takes a list only from "
                "transformers 5.23 on. Pass True instead."
            )

    def hidden_states_with(self, layer_ids: Sequence[int]) -> bool | list[int]:
        """The `output_hidden_states` to pass to the target: the caller's choice and `layer_ids`."""
        if self.wants_hidden_states is True:
            return True
        return select_hidden_states([*(self.wants_hidden_states or []), *layer_ids])

    def all_scores(self) -> tuple[torch.Tensor, ...] | None:
        """The scores that stopping criteria and the caller get: `(B, vocab_size)` for each token."""
        if (rows := self.collected.get("scores")) is None:
            return None
        for i in range(len(self.scores_of_batch), len(rows[0])):
            self.scores_of_batch.append(join_rows([entries[i] for entries in rows]))
            for row, entries in enumerate(rows):  # views, to keep them once
                entries[i] = self.scores_of_batch[i][row : row + 1]
        return tuple(self.scores_of_batch)

    def add(self, row: int, outputs: TreeOutputs, logits: torch.Tensor, scores: torch.Tensor, node: int) -> None:
        """Adds the token that a row picked at a node. Of forwards without drafted nodes all positions are added."""
        new: dict[str, Any] = {"scores": scores, "logits": logits}
        if "hidden_states" in self.collected:
            first, is_plain = outputs.num_replayed, outputs.logits.shape[1] == 1
            nodes = slice(first, None) if is_plain else slice(first + node, first + node + 1)
            states = outputs.target_outputs.hidden_states
            if self.wants_hidden_states is not True:
                num = len(states)
                wanted = {index % num for index in self.wants_hidden_states if -num <= index < num}
                states = [state if index in wanted else None for index, state in enumerate(states)]
            states = (None if state is None else state[row : row + 1, nodes] for state in states)
            # A view would keep the states of the whole tree.
            new["hidden_states"] = tuple(state if state is None or is_plain else state.clone() for state in states)
        for name, rows in self.collected.items():
            rows[row].append(new[name])

    def finish(self, sequences: torch.Tensor, cache: Cache) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """What `generate` returns."""
        if not self.wants_dict:
            return sequences
        outputs: dict[str, Any] = {CACHE: cache, "scores": self.all_scores()}
        for name in self.collected.keys() - {"scores"}:
            outputs[name] = tuple(join_rows(entries) for entries in zip(*self.collected[name]))
        return GenerateDecoderOnlyOutput(sequences=sequences, **outputs)


def join_rows(entries: Sequence[Any]) -> Any:
    """Returns the entries of all rows as one batch: tensors, or tuples of tensors and `None`."""
    if len(entries) == 1 or entries[0] is None:
        return entries[0]
    if isinstance(entries[0], tuple):
        return tuple(join_rows(layer) for layer in zip(*entries))
    return torch.cat(list(entries))


@dataclass
class Eagle3Step:
    """
    One step of a call. Each list has an entry for each row that was still in the batch.

    Args:
        source (`str`): What proposed the tree: `"draft"`, `"lookup"`, or `"target"` if there was nothing to verify.
        rows (`list[int]`): The rows of the call.
        tokens (`list[list[int]]`): The tree's tokens. The first is the root, the last token written before.
        parents (`list[list[int]]`): Index of each node's parent; the root's is 0.
        accepted (`list[list[int]]`): The accepted nodes below the root, from the top down.
        new_tokens (`list[list[int]]`): The written tokens: those of accepted nodes, then the target's own. Padding is left out.
    """

    source: str
    rows: list[int]
    tokens: list[list[int]]
    parents: list[list[int]]
    accepted: list[list[int]]
    new_tokens: list[list[int]]


@dataclass(repr=False)
class Eagle3GenerationStats:
    """
    Statistics of one call of `generate`.

    Args:
        new_tokens (`int`): Generated tokens of all rows. Each row's first comes from the forward over the prompt.
        target_forwards (`int`): Forwards of the target, with the prompt's. Plain `generate` takes one for each token of the longest text.
        accepted_lengths (`list[int]`): Tokens that each forward after the prompt's wrote in each unfinished row.
        plain_steps (`int`): How many of those forwards had no token to verify, mostly because drafting did not pay.
        lookup_steps (`int`): How many of them verified tokens that were looked up in the text instead of drafted.
        drafted_lengths (`list[int]`): Those `accepted_lengths` that come from drafted trees.
        draft_seconds (`float`):
            Seconds that the host spent on drafting. An accelerator may take longer: waiting for it would slow down the call.
        steps (`list[Eagle3Step]`):
            Each step, the prompt's first, if the call or the assistant's generation config has `output_steps=True`. The
            list grows during the call.
    """

    new_tokens: int = 0
    target_forwards: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    plain_steps: int = 0
    lookup_steps: int = 0
    drafted_lengths: list[int] = field(default_factory=list)
    draft_seconds: float = field(default=0.0, compare=False)
    steps: list[Eagle3Step] = field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(new_tokens={self.new_tokens}, target_forwards={self.target_forwards}, "
            f"plain_steps={self.plain_steps}, lookup_steps={self.lookup_steps}, "
            f"acceptance_length={self.acceptance_length:.2f})"
        )

    @property
    def acceptance_length(self) -> float:
        """τ: tokens per verification forward and row; 0 if there was none."""
        return sum(self.accepted_lengths) / len(self.accepted_lengths) if self.accepted_lengths else 0.0

    def origins(self, row: int = 0) -> list[tuple[str, int]]:
        """
        Returns where each new token of a `row` of the call came from. `("draft", 2)` was drafted at the second level of a tree,
        `("lookup", 5)` was the fifth that was looked up, and `("target", 0)` is the target's own. Raises `ValueError` if the
        call kept no steps.
        """
        if self.new_tokens and not self.steps:
            raise ValueError(
                "This call kept no steps: set `output_steps=True` in the call, or the draft's generation config."
            )
        origins = []
        for step in self.steps:
            if row in step.rows:
                i = step.rows.index(row)
                num_accepted = len(step.accepted[i])
                origins += [(step.source, depth) for depth in range(1, 1 + num_accepted)]
                origins += [("target", 0)] * (len(step.new_tokens[i]) - num_accepted)
        return origins

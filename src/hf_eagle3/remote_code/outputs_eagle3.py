# SPDX-License-Identifier: Apache-2.0
"""The target's outputs beside its logits: states that a draft reads, and those that `return_dict_in_generate` asks for."""

import threading
from contextlib import contextmanager

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import output_capturing


# What transformers calls the cache among arguments and outputs: before 5.24, and since.
CACHE = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"

# Before 5.23 a list passed as `output_hidden_states` counted from the first layer's output instead of the embeddings.
# What comes back looks alike, so there all states are asked for.
CAN_SELECT_HIDDEN_STATES = hasattr(output_capturing, "resolve_hidden_states_indices")


def select_hidden_states(layer_ids) -> bool | list[int]:
    """The `output_hidden_states` to pass for [`aux_hidden_states`]: just these, where transformers can."""
    return sorted(set(layer_ids)) if CAN_SELECT_HIDDEN_STATES else True


def aux_hidden_states(outputs, layer_ids, num_layers: int) -> torch.FloatTensor:
    """
    The states a draft reads, concatenated. Id `k` is the stream entering decoder layer `k`, `hidden_states[k]`.

    Args:
        outputs (`ModelOutput`): The target's.
        layer_ids (`list[int]`): `eagle_aux_hidden_state_layer_ids`.
        num_layers (`int`): The target's number of decoder layers.

    Returns:
        `torch.FloatTensor` of shape `(batch_size, sequence_length, n_aux * target_hidden_size)`.
    """
    states = outputs.hidden_states
    if states is None or len(states) != num_layers + 1:
        raise ValueError(
            f"The target returned {'no' if states is None else len(states)} hidden states, but one entering each of its "
            f"{num_layers} layers and a last one are needed to tell which is which."
        )
    if (last := getattr(outputs, "state_after_last_layer", None)) is not None:
        states = (*states[:num_layers], last)
    return torch.cat([states[layer_id].to(states[layer_ids[0]].device) for layer_id in layer_ids], dim=-1)


@contextmanager
def keep_state_after_last_layer(target):
    """
    Within it a target's outputs have a `state_after_last_layer`, before the final norm. The last of `hidden_states` is
    after it.

    Args:
        target (`PreTrainedModel`): The target.

    Raises:
        ValueError: if its layers are not found.
    """
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    lists = (each for each in target.get_decoder().modules() if isinstance(each, torch.nn.ModuleList))
    layers = next((each for each in lists if len(each) == num_layers), None)
    if layers is None:
        raise ValueError(
            f"The draft reads the state after the last layer, but {type(target).__name__} has no list of layers."
        )
    kept = threading.local()

    def keep(module, args, output):
        kept.state = output[0] if isinstance(output, tuple) else output

    def hand_over(module, args, outputs):
        outputs.state_after_last_layer = kept.state

    handles = layers[-1].register_forward_hook(keep), target.register_forward_hook(hand_over)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def without_first(outputs, num_tokens: int):
    """A target's outputs as if it had not been asked about the first tokens of its input again."""
    outputs.logits = outputs.logits[:, num_tokens:]
    if (layers := outputs.get("hidden_states")) is not None:  # of each layer (B, R, H)
        outputs.hidden_states = tuple(layer if layer is None else layer[:, num_tokens:] for layer in layers)
    if (last := getattr(outputs, "state_after_last_layer", None)) is not None:
        outputs.state_after_last_layer = last[:, num_tokens:]
    return outputs


class ReturnedOutputs:
    """The outputs that `return_dict_in_generate` asks for, one entry a token as in `_sample`."""

    def __init__(self, config, batch_size):
        self.wants_dict = config.return_dict_in_generate
        self.wants_hidden_states = config.output_hidden_states

        def collect(wanted):  # a list of entries for each row
            return [[] for _ in range(batch_size)] if self.wants_dict and wanted else None

        self.scores, self.logits = collect(config.output_scores), collect(config.output_logits)
        self.hidden_states = collect(self.wants_hidden_states)
        self.scores_of_batch = []  # the same, of all rows together

        if isinstance(self.wants_hidden_states, int) and not isinstance(self.wants_hidden_states, bool):
            self.wants_hidden_states = [self.wants_hidden_states]
        if isinstance(self.wants_hidden_states, list) and not CAN_SELECT_HIDDEN_STATES:
            raise ValueError(
                "EAGLE-3 decoding takes a list as `output_hidden_states` from transformers 5.23 on. Pass True instead."
            )

    @property
    def collects(self) -> bool:
        """Whether anything is kept of each token."""
        return any(each is not None for each in (self.scores, self.logits, self.hidden_states))

    @property
    def wants_states(self) -> bool:
        """Whether states of the target's forwards are kept, which compiled forwards overwrite."""
        return self.hidden_states is not None

    def hidden_states_with(self, layer_ids):
        """The `output_hidden_states` to pass: the caller's choice and `layer_ids`."""
        if self.wants_hidden_states is True or not layer_ids:
            return self.wants_hidden_states
        return select_hidden_states([*(self.wants_hidden_states or []), *layer_ids])

    def all_scores(self):
        """The scores that stopping criteria get, and the caller: an entry `(B, vocab_size)` a token."""
        if self.scores is None:
            return None
        for i in range(len(self.scores_of_batch), len(self.scores[0])):
            self.scores_of_batch.append(stack([entries[i] for entries in self.scores]))
            for row, entries in enumerate(self.scores):  # kept once
                entries[i] = self.scores_of_batch[i][row : row + 1]
        return tuple(self.scores_of_batch)

    def add(self, row, outputs, logits, scores, node):
        """
        Adds the token that a row picked at a node. A forward without drafted nodes is plain, and all of its positions
        go in.
        """
        if not self.wants_dict:
            return
        is_plain = outputs.logits.shape[1] == 1
        rows, nodes = slice(row, row + 1), slice(None) if is_plain else slice(node, node + 1)
        if self.scores is not None:
            self.scores[row].append(scores)
        if self.logits is not None:
            self.logits[row].append(logits)
        if self.hidden_states is not None:
            states = outputs.of_target.hidden_states
            if self.wants_hidden_states is not True:
                wanted = {index % len(states) for index in self.wants_hidden_states}
                states = [state if index in wanted else None for index, state in enumerate(states)]
            # A view would keep the states of the whole tree.
            states = (None if state is None else state[rows, nodes] for state in states)
            self.hidden_states[row].append(
                tuple(state if state is None or is_plain else state.clone() for state in states)
            )

    def finish(self, sequences, cache):
        if not self.wants_dict:
            return sequences

        def by_token(rows):
            return None if rows is None else tuple(stack(entries) for entries in zip(*rows))

        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self.all_scores(),
            logits=by_token(self.logits),
            hidden_states=by_token(self.hidden_states),
            **{CACHE: cache},
        )


def stack(entries):
    """One entry of all rows: tensors, or tuples of tensors and `None`."""
    if len(entries) == 1 or entries[0] is None:
        return entries[0]
    if isinstance(entries[0], tuple):
        return tuple(stack(layer) for layer in zip(*entries))
    return torch.cat(entries)

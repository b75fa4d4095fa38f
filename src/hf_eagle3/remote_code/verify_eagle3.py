# SPDX-License-Identifier: Apache-2.0
"""The target's side of a step: the prompt and trees that it reads, and what its cache keeps of them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .cache_eagle3 import (
    ReplayCache,
    TreeCache,
    copy_into,
    is_unused_static,
    recurrent_layers,
    tree_attention_mask,
    with_room,
)
from .outputs_eagle3 import CACHE, ReturnedOutputs, aux_hidden_states, without_first
from .ragged_eagle3 import align_right, on_device
from .target_eagle3 import position_table_size, rotary_switches, takes_trees, text_positions
from .text_eagle3 import Text
from .tree_eagle3 import DraftTree, Plan


# Arguments with an entry for each token that `generate` extends.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
INPUTS_BY_TOKEN = ("attention_mask", "position_ids", *TOKEN_TYPES)


class Outputs(NamedTuple):
    """
    What the target says of the nodes of a tree.

    Args:
        logits (`torch.FloatTensor` of shape `(B, N, V)`): Of the token after each node.
        positions (`torch.LongTensor` of shape `(B or 1, N)`): Of the nodes in the text.
        states (`torch.FloatTensor` of shape `(B, N, n * H)`, *optional*): What the proposer reads.
        of_target (`ModelOutput`): All that the target returned.
    """

    logits: torch.FloatTensor
    positions: torch.LongTensor
    states: torch.FloatTensor | None
    of_target: object


class Verifier:
    """
    The target during one call: its cache, and the inputs of its next forward.

    Args:
        target (`PreTrainedModel`): The target.
        generation_config (`GenerationConfig`), model_kwargs (`dict`): What `_sample` is called with.
        layer_ids (`list[int]`): Which of its hidden states the proposer reads.
        returned (`ReturnedOutputs`): Which of them the caller wants.
        num_nodes (`int`): The most that a tree may have below its root.
        may_replay (`bool`): Whether its recurrent states, if it has any, may be rolled back.
    """

    def __init__(self, target, generation_config, model_kwargs, layer_ids, returned, num_nodes, may_replay):
        self.target = self.forward = target
        self.generation_config, self.inputs = generation_config, model_kwargs
        self.config = target.config.get_text_config(decoder=True)
        self.layer_ids, self.num_nodes, self.may_replay, self.num_forwards = layer_ids, num_nodes, may_replay, 0
        self.inputs["output_hidden_states"] = returned.hidden_states_with(layer_ids)
        self.unused_cache, given_cache = None, model_kwargs.get(CACHE)
        if given_cache is not None and is_unused_static(given_cache):
            self.unused_cache = given_cache
            # As long as the longest so far, so that what was compiled for it fits.
            max_length = max(generation_config.max_length - 1, getattr(target, "_previous_max_cache_length", 0))
            self.inputs[CACHE] = with_room(given_cache, max_length, num_nodes)

    def prefill(self, input_ids: torch.LongTensor) -> tuple[Outputs, torch.LongTensor, torch.FloatTensor | None]:
        """
        Reads the prompts.

        Returns:
            `tuple`: The outputs at their last tokens, and the positions `(B or 1, S)` and states `(B, R, n * H)` of as
            many tokens as it read last: a prompt that comes with a cache, in chunks or as embeddings shows only its end.
        """
        of_target = self.target._prefill(input_ids, self.generation_config, self.inputs)
        self.num_forwards += 1
        cache = getattr(of_target, CACHE, None)
        is_recurrent = cache is not None and bool(recurrent_layers(cache))
        cache_class = ReplayCache if is_recurrent else TreeCache
        self.cache = cache_class(cache, 1 + self.num_nodes, self.may_replay, takes_trees(self.target))
        self.prompt_length = self.cache.length
        if len(input_ids) > 1 and self.inputs.get("attention_mask") is None:  # there will be padding
            self.inputs["attention_mask"] = input_ids.new_ones(len(input_ids), self.cache.length)
        positions, states = text_positions(self.inputs), self._states_of(of_target)
        last = Outputs(of_target.logits[:, -1:], positions[:, -1:], None, of_target)
        return last, positions, states

    def _states_of(self, of_target):
        if not self.layer_ids:
            return None
        return aux_hidden_states(of_target, self.layer_ids, self.config.num_hidden_layers)

    def limited(self, plan: Plan, text: Text) -> Plan:
        """The plan, cut where a larger tree would be useless or would not be the target's text."""
        cache, config = self.cache, self.config
        depth, branching_factor = min(plan.depth, plan.num_nodes), plan.branching_factor
        if not cache.is_static:
            depth = min(depth, text.max_length - text.shortest - 1)
        elif cache.capacity - cache.length < 1 + self.num_nodes:
            depth = 0
        switches, table = rotary_switches(config), position_table_size(config)
        newest = int(self.inputs["position_ids"].max()) if switches or table is not None else 0
        for rope_type, switch in switches:
            # A tree must not reach over the switch, and dynamic scaling, which goes on changing, allows none beyond it.
            room = switch - 1 - newest
            if room >= -1 or rope_type != "longrope":
                depth = min(depth, max(room, 0))
        if table is not None:  # plain decoding may well end before it does
            depth = min(depth, table - 1 - newest)
        # In older transformers (5.17) Phi-3 loses its cache at that switch and goes on without: no tree hangs from that.
        if cache.length < text.longest - 1 or not cache.may_read_tree:
            depth = 0
        # Llama 4 scales queries by their index in the input, which is their position only in a chain.
        if getattr(config, "attn_temperature_tuning", False):
            first, last = cache.length + 1, cache.length + 1 + plan.num_nodes
            if first // config.floor_scale != last // config.floor_scale:
                branching_factor = 1
        if cache.is_chain:
            branching_factor = 1
        limited = plan._replace(depth=max(depth, 0), branching_factor=branching_factor)
        if limited.depth == 0 or (
            cache.is_static and limited != plan._replace(depth=min(plan.depth, plan.num_nodes))
        ):  # one shape, or none
            return Plan()
        return limited

    def verify(self, tree: DraftTree, text: Text) -> Outputs:
        """One forward of the target over all nodes of a tree."""
        inputs, positions = self._inputs_for(tree, text)
        if self.forward is not self.target:  # compiled: a tree's shape is fixed, which makes better kernels than any
            mark_static(inputs, tree.num_nodes)
        num_replayed = self.cache.num_replayed
        of_target = self.forward(**inputs, return_dict=True)
        self.num_forwards += 1
        if of_target.logits.shape[1] != num_replayed + tree.num_nodes:
            raise ValueError(
                f"{type(self.target).__name__} returned logits of {of_target.logits.shape[1]} of the {num_replayed + tree.num_nodes} "
                "tokens that it was given, and a tree needs those of all. Leave `assistant_model` out, or let `forward` return them."
            )
        if num_replayed > 0:
            of_target = without_first(of_target, num_replayed)
        self.cache.track(of_target[CACHE], tree.num_nodes)
        states = self._states_of(of_target)
        return Outputs(
            of_target.logits[:, -tree.num_nodes :],
            positions if positions.dim() == 2 else positions[0],
            None if states is None else states[:, -tree.num_nodes :],
            of_target,
        )

    def _inputs_for(self, tree: DraftTree, text: Text) -> tuple[dict, torch.LongTensor]:
        """The arguments of a forward over the nodes of a tree, after tokens to be replayed; and the nodes' positions."""
        target, cache, inputs = self.target, self.cache, self.inputs
        newest = inputs["position_ids"][..., -1:]
        if tree.num_nodes == 1 and cache.num_replayed == 0:  # nothing drafted: exactly a step of `_sample`
            ids = text.newest(text.longest)
            return target.prepare_inputs_for_generation(ids, next_sequence_length=1, **inputs), newest
        tree, attention_mask = tree.to(newest.device), inputs.get("attention_mask")
        if not cache.is_chain:
            attention_mask = tree_attention_mask(
                self.config, cache.cache, cache.length, tree.ancestors, tree.depths, attention_mask
            )
        elif attention_mask is not None:  # the target's own causal mask will do
            attention_mask = F.pad(attention_mask, (0, tree.num_nodes - 1), value=1)
        node_positions = newest + tree.depths
        by_token = {"input_ids": tree.tokens, "position_ids": node_positions}
        for name in TOKEN_TYPES:
            if (types := inputs.get(name)) is not None:  # nodes are of the newest token's type
                by_token[name] = types[:, -1:].expand(-1, tree.num_nodes)
        by_token = dict(cache.prepare(by_token))
        tokens, positions = by_token.pop("input_ids"), by_token["position_ids"]
        tree_inputs = {**inputs, **by_token, "attention_mask": attention_mask}
        if isinstance(attention_mask, dict):  # which it passes on for dynamic caches only
            tree_inputs["attention_mask"] = next(iter(attention_mask.values()))
        prepared = target.prepare_inputs_for_generation(tokens, **tree_inputs)
        prepared[CACHE] = cache.cache
        if isinstance(attention_mask, dict) and prepared.get("attention_mask") is not None:
            device = prepared["attention_mask"].device  # newer transformers (5.24) takes a prompt of another device
            prepared["attention_mask"] = {kind: mask.to(device) for kind, mask in attention_mask.items()}
        if "logits_to_keep" in prepared:
            prepared["logits_to_keep"] = 0  # all
        passed = prepared.get("position_ids")
        positions = positions if passed is None else positions.to(passed.device)
        if (
            passed is None
            or not (passed.is_set_to(positions) or torch.equal(passed, positions))
            or (attention_mask is not None and prepared.get("attention_mask") is None)
        ):
            raise ValueError(
                f"{type(target).__name__}.prepare_inputs_for_generation does not pass on the positions and the mask that it "
                "is given, which a tree needs. Leave `assistant_model` out."
            )
        return prepared, node_positions

    def extend(self, outputs: Outputs, counts: list[int], growth: int) -> None:
        """Extends the inputs as `_sample` does after each token, for rows that advanced by `counts`, the longest by `growth`."""
        self.inputs = extended_inputs(self.target, outputs.of_target, self.inputs, counts, growth)

    def select(self, rows: list[int], excess: int) -> None:
        """Goes on with some rows, without the `excess` positions at the left that only others had."""
        self.cache.select(rows, excess)
        self.inputs = dict(self.inputs)
        for name in INPUTS_BY_TOKEN:
            if (entries := self.inputs.get(name)) is not None:  # (..., B, L); positions may be given once for all rows
                self.inputs[name] = entries[..., rows if entries.shape[-2] > 1 else [0], excess:]

    def finish(self, returned: ReturnedOutputs, of_target):
        """Leaves the cache as plain `generate` does, where anybody sees it, and returns it."""
        if returned.wants_dict or getattr(self.cache.cache, "_is_user_defined", False):
            num_replayed = self.cache.num_replayed
            self.cache.finish(self.target, self.forward, self.inputs)
            self.num_forwards += num_replayed > 0
        cache = of_target[CACHE]
        if returned.wants_dict and self.unused_cache is not None:  # as large as plain `generate`'s
            copy_into(self.unused_cache, cache, self.prompt_length, self.cache.length)
            cache = self.unused_cache
        return cache


def mark_static(inputs: dict, num_nodes: int) -> None:
    """Tells `torch.compile` that the inputs of a tree come in one shape, though those of a plain step have another."""
    if num_nodes == 1:
        return
    for value in inputs.values():
        for tensor in value.values() if isinstance(value, dict) else (value,):
            if isinstance(tensor, torch.Tensor):
                torch._dynamo.mark_static(tensor)


def extended_inputs(target, of_target, inputs: dict, counts: list[int], growth: int) -> dict:
    """
    The inputs of the next forward.

    Args:
        target (`PreTrainedModel`), of_target (`ModelOutput`): The target, and what it returned last.
        inputs (`dict`): Of that forward; those of `INPUTS_BY_TOKEN` have an entry for each token `(..., B, L)`.
        counts (`list[int]`): By how many tokens each row advanced.
        growth (`int`): By how many the longest row did.
    """
    token_types, most = inputs.get("token_type_ids"), max(counts)
    inputs = target._update_model_kwargs_for_generation(
        of_target, inputs, is_encoder_decoder=False, num_new_tokens=most
    )
    if token_types is not None:  # token by token, the last is repeated
        inputs["token_type_ids"] = torch.cat([token_types, token_types[:, -1:].expand(-1, most)], dim=-1)
    if set(counts) == {growth}:
        return inputs
    for name in INPUTS_BY_TOKEN:  # all rows were extended by as much as one
        if (entries := inputs.get(name)) is not None:
            length = entries.shape[-1]
            ends = length - most + on_device(counts, entries.device)
            inputs[name] = align_right(entries, ends, length - most + growth)
    return inputs

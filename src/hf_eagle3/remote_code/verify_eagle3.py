# SPDX-License-Identifier: Apache-2.0
"""The target during a call: its inputs, its outputs at the nodes of trees, and limits of trees."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Cache, PreTrainedModel
from transformers.utils import ModelOutput

from .attention_eagle3 import PACKED_HEADS, tree_attention_mask
from .auto_eagle3 import logger
from .cache_eagle3 import (
    ReplayCache,
    TreeCache,
    copy_into,
    is_unused_static,
    is_user_defined,
    recurrent_layers,
    with_room,
)
from .devices_eagle3 import CUDNN_ATTENTION, on_device, reads_without_sync
from .outputs_eagle3 import CACHE, INPUTS_BY_TOKEN, TOKEN_TYPES, ReturnedOutputs, TreeOutputs, aux_hidden_states
from .target_eagle3 import has_own_code, is_compiled, is_of, position_limits, takes_trees, text_positions
from .text_eagle3 import SampleArguments, Text, align_right
from .tree_eagle3 import DraftTree, Plan


# Arguments of a forward that depend on its tokens. Trees have their own, or [`Verifier._try_own_code`] finds that they matter.
OF_TOKENS = {
    *INPUTS_BY_TOKEN,
    CACHE,
    "cache_position",
    "input_ids",
    "inputs_embeds",
    "logits_to_keep",
    "num_logits_to_keep",
}


class Verifier:
    """The target during one call, with its cache and the inputs of its next forward."""

    cache: TreeCache
    takes_single_tokens = False  # the target's code cannot read several tokens, or was not tried

    def __init__(
        self,
        target: PreTrainedModel,
        arguments: SampleArguments,
        layer_ids: list[int],
        returned: ReturnedOutputs,
        num_nodes: int,  # maximum below a root
        may_replay: bool,
    ):
        self.target = self.forward = target
        self.generation_config, self.inputs = arguments.generation_config, arguments.model_kwargs
        self.config = target.config.get_text_config(decoder=True)
        self.layer_ids, self.num_nodes, self.may_replay, self.num_forwards = layer_ids, num_nodes, may_replay, 0
        if layer_ids:  # else the caller's choice is there, if any
            self.inputs["output_hidden_states"] = returned.hidden_states_with(layer_ids)
        self.unused_cache, given_cache = None, self.inputs.get(CACHE)
        if is_unused_static(given_cache):
            self.unused_cache = given_cache
            # As long as the longest so far, to avoid recompilation.
            previous = getattr(target, "_previous_max_cache_length", 0)
            max_length = max(self.generation_config.max_length - 1, previous)
            self.inputs[CACHE] = with_room(given_cache, max_length, num_nodes)

    def prefill(self, input_ids: torch.Tensor) -> TreeOutputs:
        """
        Reads the prompts. Returns the logits of their last tokens, and positions and states of the last forward's tokens. With
        a cache, chunks or embeddings, that forward does not read the whole prompt.
        """
        target_outputs = self.target._prefill(input_ids, self.generation_config, self.inputs)
        self.num_forwards += 1
        cache = target_outputs.get(CACHE)
        cache_class = ReplayCache if cache is not None and recurrent_layers(cache) else TreeCache
        self.cache = cache_class(cache, 1 + self.num_nodes, self.may_replay, takes_trees(self.target))
        self.prompt_length = self.cache.length
        if len(input_ids) > 1 and self.inputs.get("attention_mask") is None:  # rows will need padding
            self.inputs["attention_mask"] = input_ids.new_ones(len(input_ids), self.cache.length)
        # A target that cannot take a tree is refused before anything is written.
        self._check_own_inputs(input_ids)
        self.has_own_code = has_own_code(self.target)
        if not self.cache.is_chain:
            self._inputs_for(DraftTree.chain(input_ids.new_zeros(len(input_ids), 2)))
        if self.has_own_code:
            with CUDNN_ATTENTION.off():
                self._try_own_code(input_ids, target_outputs)
        positions = text_positions(self.inputs)
        return TreeOutputs(target_outputs.logits[:, -1:], positions, self._states_of(target_outputs), target_outputs)

    def _check_own_inputs(self, input_ids: torch.Tensor) -> None:
        """
        Raises `ValueError` if the target has code that prepares other arguments for another number of tokens. It would get the
        tokens of a tree, and in `_sample` all of the text.
        """
        prepare = self.target.prepare_inputs_for_generation
        if is_of(prepare, ("transformers.",)):
            return
        passed, newest, mask = [], self.inputs["position_ids"][..., -1:], self.inputs.get("attention_mask")
        for num_tokens in (1, 2):
            tokens = torch.arange(num_tokens, device=input_ids.device).expand(len(input_ids), -1)
            inputs = {**self.inputs, "position_ids": newest + tokens[:1]}
            if mask is not None:
                inputs["attention_mask"] = F.pad(mask, (0, num_tokens - 1), value=1)
            passed.append(prepare(tokens, **inputs))
        one, two = passed
        for name in sorted({*one, *two} - OF_TOKENS):
            if not are_same(one.get(name), two.get(name)):
                raise ValueError(
                    f"{type(self.target).__name__}.prepare_inputs_for_generation passes on another `{name}` for other tokens, so the text "
                    "may change if a forward has several. Leave `assistant_model` out."
                )

    def _try_own_code(self, input_ids: torch.Tensor, outputs: ModelOutput) -> None:
        """
        Tries whether the target's code reads trees and chains as it reads single tokens. If it refuses or ignores trees, the draft
        proposes chains. If it reads chains differently, too, it proposes nothing.
        """
        cache, given = self.cache, self.inputs
        token = input_ids[:, -1:].clamp(min=0) if input_ids.shape[1] > 0 else input_ids.new_ones(len(input_ids), 1)
        # Below the root a chain, and a sibling of its first node. With fewer nodes rounding in bfloat16 hides what they see.
        parents = on_device([[0, *range(9), 0]], token.device)
        tokens, parents = token.expand(-1, parents.shape[1]), parents.expand(len(token), -1)
        if self._room(num_read=1) < 9 or (cache.is_static and cache.capacity - cache.length < tokens.shape[1]):
            self.takes_single_tokens = True  # there is no room to try
            return
        cache.record()
        cache.prepare({"input_ids": tokens})  # saves recurrent states
        update = functools.partial(self.target._update_model_kwargs_for_generation, is_encoder_decoder=False)
        self.inputs = inputs = update(outputs, dict(given))
        expected = []
        try:
            for count in (1, 2):
                self.num_forwards += 1
                text = torch.cat([input_ids, tokens[:, :count]], dim=1)
                prepared = self.target.prepare_inputs_for_generation(text, next_sequence_length=1, **inputs)
                try:
                    outputs = self.target(**prepared, return_dict=True)
                except RuntimeError:
                    if count == 1:
                        raise
                    break  # transformers 5.17 cannot record two tokens behind a window one by one
                expected.append(outputs.logits[:, -1].float())
                inputs = update(outputs, dict(inputs))
            tree, chain = DraftTree.from_parents(tokens, parents), DraftTree.chain(tokens)
            name = type(self.target).__name__
            if not cache.is_chain and (reason := self._try(tree, expected)) is not None:
                cache.is_chain = True
                logger.warning_once(f"{name} cannot read a tree, so the draft proposes chains: {reason}")
            if cache.is_chain and (reason := self._try(chain, expected)) is not None:
                self.takes_single_tokens = True
                logger.warning_once(f"{name} cannot read several tokens, so the draft proposes nothing: {reason}")
        finally:
            self.inputs = given
            cache.roll_back()
            cache.release()

    def _try(self, tree: DraftTree, expected: list[torch.Tensor]) -> str | None:
        """
        Why the target does not predict what is `expected` at the root and its child, or the same for siblings with the same token; or
        `None`.
        """
        self.cache.roll_back()
        self.num_forwards += 1
        try:
            logits = self.target(**self._inputs_for(tree)[0], return_dict=True).logits.float()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return str(error)
        self._check_logits(logits, tree.num_nodes)
        differences = [logits[:, node] - each for node, each in enumerate(expected)]
        if not self.cache.is_chain:
            differences.append(logits[:, 1] - logits[:, -1])
        rounding = torch.stack(expected).abs().max() * torch.finfo(self.target.dtype).eps ** 0.5
        is_same = torch.stack(differences).abs().max() <= rounding
        return None if is_same else "it ignores its mask or its positions"

    def _states_of(self, target_outputs: ModelOutput) -> torch.Tensor | None:
        if not self.layer_ids:
            return None
        return aux_hidden_states(target_outputs, self.layer_ids, self.config.num_hidden_layers)

    def _room(self, num_read: int = 0) -> int:
        """
        How many more positions a tree may have, after `num_read` more tokens. It must not cross a switch, or the end of a table
        (plain decoding may stop before it). Beyond its switch dynamic scaling changes at each position, so trees are off.
        """
        limits, most = position_limits(self.config), torch.iinfo(torch.long).max
        if not limits:  # reading positions forces a sync
            return most
        newest = int(self.inputs["position_ids"].max()) + num_read
        rooms = (length - 1 - newest for kind, length in limits if newest <= length or kind != "longrope")
        return min(rooms, default=most)

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether trees must have one shape: forwards over another one would be compiled or captured again."""
        is_eager = self.forward is self.target and not is_compiled(self.target)
        return self.cache.is_static and not (is_eager and reads_without_sync(self.target.device))

    def limit(self, plan: Plan, text: Text) -> Plan:
        """The plan, reduced if a larger tree would be useless or change the text."""
        cache, config = self.cache, self.config
        plan = plan._replace(depth=min(plan.depth, plan.num_nodes))
        depth, branching_factor = plan.depth, plan.branching_factor
        if not self.has_fixed_shapes:
            depth = min(depth, text.max_length - text.shortest - 1)
        if cache.is_static and cache.capacity - cache.length < 1 + self.num_nodes:
            depth = 0
        depth = min(depth, self._room())
        # In transformers 5.17 Phi-3 drops its cache at the switch and loses the past, which trees need.
        if self.takes_single_tokens or cache.length < text.longest - 1 or cache.num_replayed > TreeCache.MOST_REPLAYED:
            depth = 0
        # Llama 4 scales queries by their index in the input. That is the position only in a chain.
        if getattr(config, "attn_temperature_tuning", False):
            first, last = cache.length + 1, cache.length + 1 + plan.num_nodes
            if first // config.floor_scale != last // config.floor_scale:
                branching_factor = 1
        if cache.is_chain:
            branching_factor = 1
        limited = plan._replace(depth=depth, branching_factor=branching_factor)
        return Plan() if depth <= 0 or (self.has_fixed_shapes and limited != plan) else limited

    def verify(self, tree: DraftTree, text: Text) -> TreeOutputs:
        """Runs one forward of the target over all nodes of a tree."""
        if tree.num_nodes == 1 and self.cache.num_replayed == 0:  # a plain step, as in `_sample`
            ids, positions = text.newest(text.longest), self.inputs["position_ids"][..., -1:]
            inputs = self.target.prepare_inputs_for_generation(ids, next_sequence_length=1, **self.inputs)
        else:
            inputs, positions = self._inputs_for(tree)
        if self.forward is not self.target and tree.num_nodes > 1:  # static shapes have faster kernels
            for value in inputs.values():
                for tensor in value.values() if isinstance(value, dict) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        torch._dynamo.mark_static(tensor)
        num_replayed, num_nodes = self.cache.num_replayed, tree.num_nodes
        with PACKED_HEADS.on(num_nodes > 1 and not self.has_own_code):
            target_outputs = self.forward(**inputs, return_dict=True)
        self.num_forwards += 1
        self._check_logits(target_outputs.logits, num_replayed + num_nodes)
        self.cache.track(target_outputs[CACHE], num_nodes)
        states = self._states_of(target_outputs)
        return TreeOutputs(
            target_outputs.logits[:, -num_nodes:],
            positions if positions.dim() == 2 else positions[0],
            None if states is None else states[:, -num_nodes:],
            target_outputs,
            num_replayed,
        )

    def _check_logits(self, logits: torch.Tensor, num_tokens: int) -> None:
        if logits.shape[1] != num_tokens:
            raise ValueError(
                f"{type(self.target).__name__} returned logits of {logits.shape[1]} of the {num_tokens} tokens that it was given, but a "
                "tree needs those of all. Let `forward` return them, or leave `assistant_model` out."
            )

    def _inputs_for(self, tree: DraftTree) -> tuple[dict[str, Any], torch.Tensor]:
        """The arguments of a forward over the tokens to replay and the nodes of a tree, and the nodes' positions."""
        cache, newest = self.cache, self.inputs["position_ids"][..., -1:]
        tree, attention_mask = tree.to(newest.device), self.inputs.get("attention_mask")
        if not cache.is_chain:
            attention_mask = tree_attention_mask(
                self.config, cache.cache, cache.length, tree.ancestors, tree.depths, attention_mask
            )
        elif attention_mask is not None:  # a chain takes the target's own causal mask
            attention_mask = F.pad(attention_mask, (0, tree.num_nodes - 1), value=1)
        node_positions = newest + tree.depths
        by_token = {"input_ids": tree.tokens, "position_ids": node_positions}
        for name in TOKEN_TYPES:
            if (token_types := self.inputs.get(name)) is not None:  # nodes get the newest token's type
                by_token[name] = token_types[:, -1:].expand(-1, tree.num_nodes)
        return self._prepared(dict(cache.prepare(by_token)), attention_mask), node_positions

    def _prepared(self, by_token: dict[str, Any], attention_mask: Any) -> dict[str, Any]:
        """
        The arguments of a forward, as the target's `prepare_inputs_for_generation` makes them, but with what that changes for single
        tokens put back. Raises `ValueError` if it does not pass on positions and mask.
        """
        target, tokens, positions = self.target, by_token.pop("input_ids"), by_token["position_ids"]
        by_type = attention_mask if isinstance(attention_mask, dict) else None
        if by_type is not None:  # dicts are passed on for dynamic caches only
            attention_mask = next(iter(by_type.values()))
        tree_inputs = {**self.inputs, **by_token, "attention_mask": attention_mask}
        prepared = target.prepare_inputs_for_generation(tokens, **tree_inputs)
        prepared[CACHE] = self.cache.cache
        mask, passed = prepared.get("attention_mask"), prepared.get("position_ids")
        if by_type is not None and mask is not None:  # transformers 5.24 may have moved it to the model
            prepared["attention_mask"] = {layer_type: each.to(mask.device) for layer_type, each in by_type.items()}
        if "logits_to_keep" in prepared:
            prepared["logits_to_keep"] = 0  # all
        if self.inputs.get("output_router_logits", getattr(self.config, "output_router_logits", False)):
            # Nobody gets them, and the loss of experts takes no mask of a tree.
            prepared["output_router_logits"] = False
        positions = positions if passed is None else positions.to(passed.device)
        has_positions = passed is not None and (passed.is_set_to(positions) or torch.equal(passed, positions))
        if not has_positions or (attention_mask is not None and mask is None):
            raise ValueError(
                f"{type(target).__name__}.prepare_inputs_for_generation does not pass on the positions and the mask that "
                "it is given, which a tree needs. Leave `assistant_model` out."
            )
        return prepared

    def extend(self, outputs: TreeOutputs, counts: list[int], batch_growth: int) -> None:
        """Extends the inputs as `_sample` does. Row `b` wrote `counts[b]` tokens, and the longest row grew by `batch_growth`."""
        token_types, most = self.inputs.get("token_type_ids"), max(counts)
        self.inputs = inputs = self.target._update_model_kwargs_for_generation(
            outputs.target_outputs, self.inputs, is_encoder_decoder=False, num_new_tokens=most
        )
        if token_types is not None:  # each token repeats the last type
            inputs["token_type_ids"] = torch.cat([token_types, token_types[:, -1:].expand(-1, most)], dim=-1)
        if set(counts) == {batch_growth}:
            return
        for name in INPUTS_BY_TOKEN:  # all rows were extended by `most`
            if (entries := inputs.get(name)) is not None:
                length = entries.shape[-1]
                ends = length - most + on_device(counts, entries.device)
                inputs[name] = align_right(entries, ends, length - most + batch_growth)

    def select(self, rows: list[int], excess: int) -> None:
        """Keeps only these rows, and drops the `excess` leftmost positions, which only other rows used."""
        self.cache.select(rows, excess)
        self.inputs = dict(self.inputs)
        for name in INPUTS_BY_TOKEN:
            if (entries := self.inputs.get(name)) is not None:  # (..., B or 1, L)
                if entries.shape[-2] > 1:
                    entries = entries.index_select(-2, on_device(rows, entries.device))
                self.inputs[name] = entries[..., excess:]

    def replay(self) -> None:
        """Reads the tokens that wait to be replayed, and nothing else."""
        cache = self.cache
        if cache.num_replayed == 0:
            return
        inputs = {**self.inputs, **cache.replayed}
        if inputs.get("attention_mask") is not None:
            inputs["attention_mask"] = inputs["attention_mask"][..., : cache.length]
        tokens = inputs.pop("input_ids")
        self.forward(**self.target.prepare_inputs_for_generation(tokens, **inputs), return_dict=True)
        self.num_forwards += 1
        cache.end_replay()

    def finish(self, returned: ReturnedOutputs) -> Cache:
        """Returns the cache. If the caller can see it, it is as plain `generate` leaves it."""
        cache = self.cache.cache
        if returned.wants_dict or is_user_defined(cache):
            self.replay()
        if not returned.wants_dict or self.unused_cache is None:
            return cache
        copy_into(self.unused_cache, cache, self.prompt_length, self.cache.length)
        return self.unused_cache  # as large as plain `generate`'s


def are_same(one: Any, other: Any) -> bool:
    """Whether two arguments of a forward are equal. Objects that hold no numbers count as equal."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(are_same, one, other))
    return type(one) is type(other) and (not isinstance(one, (int, float, str)) or one == other)

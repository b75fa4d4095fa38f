# Copyright 2026 The hf-eagle3 authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Lossless tree decoding behind `target.generate(..., assistant_model=draft)`."""

import functools
import inspect
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import output_capturing
from transformers.utils.generic import is_flash_attention_requested

from .tree_eagle3 import DraftTree, grow_tree


# Longest path below the root; children tried per node, and nodes expanded per level; nodes verified per step at most; and
# the probability, by the draft, that a path must have to be verified. Names are those of OpenVINO GenAI and transformers.
# They live in the draft's generation config, and a call may bring others in the `GenerationConfig` given to `generate`.
DEFAULT_TREE_SETTINGS = {
    "tree_depth": 6,
    "branching_factor": 8,
    "num_assistant_tokens": 24,
    "assistant_confidence_threshold": 0.0,
}


# Before 5.23 a list passed as `output_hidden_states` counts from the first layer's output, and nothing tells it from the
# list that counts from the embeddings but a draft that is off by one layer: there, everything is captured.
CAN_SELECT_HIDDEN_STATES = hasattr(output_capturing, "resolve_hidden_states_indices")


@dataclass
class Eagle3GenerationStats:
    """
    How one call of `generate` went.

    Args:
        new_tokens (`int`): Tokens generated. The first comes from the prompt's own forward.
        target_forwards (`int`): Forward passes of the target, the prompt's included; plain `generate` takes `new_tokens`.
        accepted_lengths (`list[int]`): Tokens that each verification forward emitted.
    """

    new_tokens: int = 0
    target_forwards: int = 0
    accepted_lengths: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """τ: tokens emitted per verification forward; 0 if there was none."""
        return sum(self.accepted_lengths) / len(self.accepted_lengths) if self.accepted_lengths else 0.0


@torch.no_grad()
def eagle3_decoding(
    draft,
    target,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    synced_gpus=False,
    streamer=None,
    inputs_tensor=None,
    tokenizer=None,
    assistant_tokenizer=None,
    **model_kwargs,
):
    r"""
    Decodes as `GenerationMixin._sample` does, several tokens per target forward.

    At each node of the verified tree the next token is picked from the target's own processed scores, as `_sample`
    picks it. If a child carries that token the walk descends, else the token ends the step. The draft only decides which
    nodes exist, so greedy text is the target's greedy text, samples follow the target's distribution, and a seed gives
    the sample it gives without a draft.

    Arguments and return value are those of `GenerationMixin._assisted_decoding`. Leaves [`Eagle3GenerationStats`] in
    `draft.last_generation`.

    Raises:
        ValueError: if the draft was made for another target, or the call asks for what a tree cannot do.
    """
    draft.validate_target(target)
    _check_call(target, input_ids, generation_config, synced_gpus, model_kwargs)
    settings = tree_settings(draft.generation_config, generation_config)
    stats = Eagle3GenerationStats()
    aux_layer_ids = draft.resolve_aux_layer_ids(target)
    returned = _ReturnedOutputs(target, generation_config)
    model_kwargs["output_hidden_states"] = returned.hidden_states_with(aux_layer_ids)

    # The prompt's forward ends at the root of a tree that has no other nodes.
    outputs = target._prefill(input_ids, generation_config, model_kwargs)
    stats.target_forwards += 1
    model_kwargs = target._update_model_kwargs_for_generation(outputs, model_kwargs)
    cache = _TreeCache(outputs.past_key_values)
    drafter = _Drafter(draft, target.get_input_embeddings())
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    features = aux_hidden_states(outputs, aux_layer_ids, num_layers)  # (1, S, n_aux * H)
    tree, root_row = DraftTree.root_only(input_ids[:, -1:]), outputs.logits.shape[1] - 1

    with target._optimize_model_for_decode():
        while True:
            # Walk down the tree until no child carries the target's choice, or it is time to stop.
            children, node, path, is_done = tree.children(), 0, [], False
            while node is not None and not is_done:
                path.append(node)
                logits = outputs.logits[:, root_row + node].to(copy=True, dtype=torch.float32, device=input_ids.device)
                scores = logits_processor(input_ids, logits)
                returned.add(outputs, logits, scores, path, tree.num_nodes)
                if generation_config.do_sample:
                    next_token = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
                else:
                    next_token = torch.argmax(scores, dim=-1)
                input_ids = torch.cat([input_ids, next_token[:, None]], dim=-1)
                is_done = bool(stopping_criteria(input_ids, returned.scores).all())
                if streamer is not None:
                    streamer.put(next_token.cpu())
                node = children.get((node, int(next_token)))
            stats.new_tokens += len(path)

            # Keep the path in the cache and forget the other nodes.
            if stats.target_forwards > 1:
                stats.accepted_lengths.append(len(path))
                cache.keep_path(path, tree.num_nodes)
                features = features[:, path]
                model_kwargs = target._update_model_kwargs_for_generation(
                    outputs, model_kwargs, num_new_tokens=len(path)
                )
            if is_done:
                break

            # Draft a tree below the newest token, and verify it in one forward.
            drafter.observe(features, input_ids, model_kwargs)
            limits = _step_limits(target, settings, cache.length, model_kwargs, stopping_criteria, input_ids)
            tree = drafter.grow(input_ids[:, -1:], **limits)
            outputs = _verify(target, tree, input_ids, cache, model_kwargs)
            stats.target_forwards += 1
            cache.track(outputs.past_key_values)
            features = aux_hidden_states(outputs, aux_layer_ids, num_layers)[:, -tree.num_nodes :]
            root_row = outputs.logits.shape[1] - tree.num_nodes

    if streamer is not None:
        streamer.end()
    cache.release()
    draft.last_generation = stats
    return returned.finish(input_ids, outputs.past_key_values)


def tree_settings(draft_config: GenerationConfig, call_config: GenerationConfig | None = None) -> dict[str, float]:
    """
    The tree's shape: what the call's generation config says, else the draft's, else the default.

    `generate` fills `num_assistant_tokens` and `assistant_confidence_threshold` of every call with transformers' own
    defaults (20 and 0.4), so that a call which asks for exactly these cannot be told from one which does not ask; set
    them on the draft instead.

    Raises:
        ValueError: if a setting is out of range.
    """
    filled_in = GenerationConfig._get_default_generation_params()
    settings = {}
    for name, default in DEFAULT_TREE_SETTINGS.items():
        value = getattr(call_config, name, None)
        if value is None or value == filled_in.get(name):
            value = getattr(draft_config, name, None)
        settings[name] = default if value is None else value
        if name == "assistant_confidence_threshold":
            if not 0 <= settings[name] < 1:
                raise ValueError(f"`{name}` must be in [0, 1), got {settings[name]!r}.")
        elif isinstance(settings[name], bool) or not isinstance(settings[name], int) or settings[name] < 1:
            raise ValueError(f"`{name}` must be a positive integer, got {settings[name]!r}.")
    return settings


def tree_attention_mask(config, cache, past_length, visible, query_depths, key_depths, padding_mask=None):
    """
    Additive masks for tree rows that follow a linear past. Distances are those of positions in the text: siblings lie
    at different cache indices but at one position, which is what windows and chunks count.

    Args:
        config (`PreTrainedConfig`): Text configuration of the model that attends.
        cache (`Cache`): Its cache, before the forward.
        past_length (`int`): Number of positions before the tree.
        visible (`torch.BoolTensor` of shape `(B, Q, T)`):
            Which of `T` tree rows each of `Q` queries attends to. The queries are the last `Q` of the tree rows, the
            others are in the cache.
        query_depths (`torch.LongTensor` of shape `(B, Q)`), key_depths (`torch.LongTensor` of shape `(B, T)`):
            Depths below the root.
        padding_mask (`torch.Tensor` of shape `(B, >= past_length)`, *optional*): Zeros on padding.

    Returns:
        `torch.FloatTensor` of shape `(B, 1, Q, K)`, or a dict of those by layer type if the model's layers differ, as
        `transformers.masking_utils.create_masks_for_generate` does.
    """
    batch_size, num_queries, num_tree_rows = visible.shape
    device = visible.device
    left_padding = 0
    if padding_mask is not None:
        padding_mask = padding_mask[:, :past_length].bool()
        left_padding = (~padding_mask).sum(dim=1)[:, None, None]

    def mask_for(layer_type, layer):
        num_past = layer.keys.shape[-2] - (num_tree_rows - num_queries)
        allowed = torch.nn.functional.pad(visible, (num_past, 0), value=True)
        if padding_mask is not None:
            allowed[..., :num_past] &= padding_mask[:, None, past_length - num_past :]
        if layer_type != "full_attention":
            past = torch.arange(past_length - num_past, past_length, device=device)
            query = (past_length + query_depths)[:, :, None]
            key = torch.cat([past.expand(batch_size, -1), past_length + key_depths], dim=1)[:, None]
            if layer_type == "sliding_attention":
                allowed &= query - key < config.sliding_window
            else:
                chunk = config.attention_chunk_size
                allowed &= (query - left_padding) // chunk == (key - left_padding) // chunk
        # Additive: eager attention would add a boolean mask to the scores.
        mask = torch.zeros(allowed.shape, dtype=layer.keys.dtype, device=device)
        return mask.masked_fill_(~allowed, torch.finfo(mask.dtype).min)[:, None]

    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        if getattr(config, "sliding_window", None) is not None:
            layer_type = "sliding_attention"
        elif getattr(config, "attention_chunk_size", None) is not None:
            layer_type = "chunked_attention"
        else:
            layer_type = "full_attention"
        return mask_for(layer_type, cache.layers[0])
    first_layers = {}
    for layer_type, layer in zip(layer_types, cache.layers):
        if getattr(layer, "keys", None) is not None:  # layers that share another one's keys store none
            first_layers.setdefault(layer_type, layer)
    return {layer_type: mask_for(layer_type, layer) for layer_type, layer in first_layers.items()}


def select_hidden_states(layer_ids) -> bool | list[int]:
    """What to pass as `output_hidden_states` for [`aux_hidden_states`]: just these, where transformers can."""
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
    return torch.cat([states[layer_id].to(states[layer_ids[0]].device) for layer_id in layer_ids], dim=-1)


def install_generation_hook() -> None:
    """
    Lets an assistant bring its own decoding: `generate` calls `assistant_model.assisted_decoding(target, ...)` where it
    exists, and `assistant_model.validate_target(target)` before anything else; other assistants are untouched.
    Installing twice, or from several copies of this file, changes nothing.
    """
    if getattr(GenerationMixin._assisted_decoding, "_asks_the_assistant", False):
        return
    assisted_decoding, validate_mode = GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode

    @functools.wraps(assisted_decoding)
    def _assisted_decoding(self, *args, assistant_model=None, **kwargs):
        own = getattr(assistant_model, "assisted_decoding", None)
        if own is not None:
            return own(self, *args, **kwargs)
        return assisted_decoding(self, *args, assistant_model=assistant_model, **kwargs)

    @functools.wraps(validate_mode)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        own = getattr(generation_mode_kwargs.get("assistant_model"), "validate_target", None)
        if own is not None:
            own(self)
        return validate_mode(self, generation_mode, generation_config, generation_mode_kwargs)

    _assisted_decoding._asks_the_assistant = True
    GenerationMixin._assisted_decoding = _assisted_decoding
    GenerationMixin._validate_generation_mode = _validate_generation_mode


class _Drafter:
    """
    The draft during one call: its cache, and where in the text it stands. What it computes never leaves the call, so
    that it can do so in inference mode, whose operators cost less than those of `no_grad`.
    """

    def __init__(self, draft, embedding):
        self.draft, self.embedding = draft, embedding
        self.layer_config = draft.config.transformer_layer_config
        self.cache = DynamicCache()

    def step(self, tokens, hidden_states, position_ids, attention_mask=None, logits_to_keep=0):
        return self.draft(
            inputs_embeds=self.draft.embed(tokens, self.embedding),
            hidden_states=hidden_states,
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=self.cache,
            logits_to_keep=logits_to_keep,
        )

    @torch.inference_mode()
    def observe(self, features, input_ids, model_kwargs):
        """Reads the newest tokens `(1, S)` with the target's own states `(1, R, n_aux * H)` at the positions before."""
        # A prompt that came with a cache, in chunks or as embeddings shows only its end; padding is not read at all.
        rows = min(features.shape[1], input_ids.shape[1])
        attention_mask = model_kwargs.get("attention_mask")
        if attention_mask is not None:
            rows = min(rows, int(attention_mask[:, -rows - 1 : -1].sum()))
        parameter = self.draft.lm_head.weight
        hidden_states = self.draft.combine_hidden_states(features[:, -rows:].to(parameter))
        positions = model_kwargs["position_ids"][:, -rows - 1 : -1].to(parameter.device)
        mask, observed = None, self.cache.get_seq_length()
        if observed > 0:  # a chain below what was read before; the first time the attention's own causal mask will do
            chain = torch.ones(1, rows, rows, dtype=torch.bool, device=parameter.device).tril()
            depths = torch.arange(rows, device=parameter.device)[None]
            mask = tree_attention_mask(self.layer_config, self.cache, observed, chain, depths, depths)
        outputs = self.step(input_ids[:, -rows:], hidden_states, positions, mask, logits_to_keep=1)
        self.logits, self.hidden_states = outputs.logits[:, -1], outputs.last_hidden_state[:, -1]
        self.position = positions[:, -1:]

    @torch.inference_mode()
    def grow(self, root_tokens, tree_depth, **settings) -> DraftTree:
        """Drafts a tree below `root_tokens` `(1, 1)` from what was observed, and forgets its own rows again."""
        if tree_depth == 0:
            return DraftTree.root_only(root_tokens)
        observed = self.cache.get_seq_length()

        def advance(tokens, hidden_states, level, visible):
            batch_size, width = tokens.shape
            depths = torch.arange(1, level + 1, device=tokens.device).repeat_interleave(width).expand(batch_size, -1)
            mask = tree_attention_mask(self.layer_config, self.cache, observed, visible, depths[:, -width:], depths)
            outputs = self.step(tokens, hidden_states, (self.position + level).expand(-1, width), mask)
            return outputs.logits, outputs.last_hidden_state

        tree = grow_tree(
            root_tokens.to(self.logits.device),
            self.logits,
            self.hidden_states,
            advance,
            self.draft.d2t,
            tree_depth,
            **settings,
        )
        self.cache.crop(observed - self.cache.get_seq_length())
        return tree


class _TreeCache:
    """The target's cache, from which a step removes the nodes it did not accept."""

    def __init__(self, cache):
        self.cache = None
        self.track(cache)

    def track(self, cache):
        """Takes the cache of the target's outputs, which a target may exchange (Phi-3 at its rotary switch)."""
        if cache is self.cache:
            return
        check_cache(cache)
        self.cache = cache
        self.sliding_layers = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
        self.were_recording = [layer.record_past for layer in self.sliding_layers]
        # From here on sliding layers keep what a step may have to roll back to.
        cache.activate_past_recording()
        cache.crop(0)

    @property
    def length(self) -> int:
        return self.cache.get_seq_length()

    def keep_path(self, path: list[int], num_nodes: int) -> None:
        """Keeps the nodes of `path`, ascending, of the last `num_nodes` entries."""
        if path != list(range(len(path))):
            for layer in self.cache.layers:
                if getattr(layer, "keys", None) is None:
                    continue
                for states in (layer.keys, layer.values):
                    nodes = states[..., -num_nodes:, :]
                    nodes[..., : len(path), :] = nodes[..., path, :]
        self.cache.crop(len(path) - num_nodes)

    def release(self) -> None:
        """Leaves the cache as plain `generate` does."""
        for layer, was_recording in zip(self.sliding_layers, self.were_recording):
            layer.record_past = was_recording


class _ReturnedOutputs:
    """What `return_dict_in_generate` asks for, one entry a token as in `_sample`."""

    def __init__(self, target, config):
        self.text_config = target.config.get_text_config(decoder=True)
        self.wants_dict = config.return_dict_in_generate
        self.wants_hidden_states = config.output_hidden_states
        self.wants_attentions = config.output_attentions

        def collect(wanted):
            return () if self.wants_dict and wanted else None

        self.scores, self.logits = collect(config.output_scores), collect(config.output_logits)
        self.hidden_states, self.attentions = collect(self.wants_hidden_states), collect(self.wants_attentions)

        if isinstance(self.wants_hidden_states, int) and not isinstance(self.wants_hidden_states, bool):
            self.wants_hidden_states = [self.wants_hidden_states]
        if isinstance(self.wants_hidden_states, list) and not CAN_SELECT_HIDDEN_STATES:
            raise ValueError(
                "EAGLE-3 decoding takes a list as `output_hidden_states` from transformers 5.23 on. Pass True instead."
            )

    def hidden_states_with(self, layer_ids):
        """What to pass as `output_hidden_states`: the caller's choice and `layer_ids`."""
        if self.wants_hidden_states is True:
            return True
        return select_hidden_states([*(self.wants_hidden_states or []), *layer_ids])

    def add(self, outputs, logits, scores, path, num_nodes):
        """Adds the token picked at the last node of `path`. A forward without drafted nodes is plain, and goes in whole."""
        if not self.wants_dict:
            return
        node = path[-1]
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if self.hidden_states is not None:
            states = outputs.hidden_states
            if self.wants_hidden_states is not True:
                wanted = {index % len(states) for index in self.wants_hidden_states}
                states = tuple(state if index in wanted else None for index, state in enumerate(states))
            if num_nodes > 1:
                states = tuple(None if state is None else state[:, node : node + 1] for state in states)
            self.hidden_states += (states,)
        if self.attentions is not None:
            attentions = outputs.attentions
            if num_nodes > 1:
                attentions = tuple(self._attention_of(weights, i, path) for i, weights in enumerate(attentions))
            self.attentions += (attentions,)

    def _attention_of(self, weights, layer_idx, path):
        """The row `(1, heads, 1, K)` that a forward over the path alone would have returned."""
        if weights is None:
            return None
        num_past = weights.shape[-1] - weights.shape[-2]
        columns = [*range(num_past), *(num_past + node for node in path)]
        config = self.text_config
        layer_types = getattr(config, "layer_types", None)
        layer_type = None if layer_types is None else layer_types[layer_idx]
        if layer_type in (None, "sliding_attention") and getattr(config, "sliding_window", None) is not None:
            columns = columns[-config.sliding_window :]
        elif layer_type in (None, "chunked_attention") and getattr(config, "attention_chunk_size", None) is not None:
            columns = columns[-config.attention_chunk_size :]
        return weights[:, :, path[-1] : path[-1] + 1, columns]

    def finish(self, sequences, past_key_values):
        if not self.wants_dict:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self.scores,
            logits=self.logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
            past_key_values=past_key_values,
        )


def _verify(target, tree, input_ids, cache, model_kwargs):
    """One forward of the target over all nodes of the tree; logits of shape `(1, num_nodes, vocab_size)`."""
    if tree.num_nodes == 1:  # nothing drafted: exactly a step of `_sample`
        inputs = target.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **model_kwargs)
    else:
        tree_kwargs = {
            **model_kwargs,
            "position_ids": model_kwargs["position_ids"][:, -1:] + tree.depths.to(input_ids.device),
            "attention_mask": tree_attention_mask(
                target.config.get_text_config(decoder=True),
                cache.cache,
                cache.length,
                tree.ancestors.to(input_ids.device),
                tree.depths.to(input_ids.device),
                tree.depths.to(input_ids.device),
                model_kwargs.get("attention_mask"),
            ),
        }
        inputs = target.prepare_inputs_for_generation(tree.tokens.to(input_ids.device), **tree_kwargs)
        inputs["past_key_values"] = cache.cache
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 0  # all
    return target(**inputs, return_dict=True)


def _step_limits(target, settings, past_length, model_kwargs, stopping_criteria, input_ids):
    """The tree settings of one step, cut where a larger tree would be useless or would not be the target's text."""
    limits = dict(settings)
    max_length = getattr(stopping_criteria, "max_length", None)
    if max_length is not None:
        limits["tree_depth"] = min(limits["tree_depth"], max_length - input_ids.shape[1] - 1)

    config = target.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        # These change all frequencies of a forward with its largest position, so that a tree must not reach over the
        # switch, and dynamic scaling, which goes on changing them, allows no tree beyond it.
        rope_type = parameters.get("rope_type", "default")
        if rope_type != "longrope" and "dynamic" not in rope_type:
            continue
        switch = config.max_position_embeddings
        if rope_type == "longrope":
            switch = parameters.get("original_max_position_embeddings") or config.original_max_position_embeddings
        room = switch - 1 - int(model_kwargs["position_ids"].max())
        if room >= -1 or rope_type != "longrope":
            limits["tree_depth"] = min(limits["tree_depth"], max(room, 0))
    # In older transformers (5.17) Phi-3 loses its cache at that switch and goes on without: no tree hangs from that.
    if past_length < input_ids.shape[1] - 1:
        limits["tree_depth"] = 0
    limits["tree_depth"] = max(limits["tree_depth"], 0)

    # Llama 4 scales queries by their index in the input, which is their position only in a chain.
    if getattr(config, "attn_temperature_tuning", False):
        first, last = past_length + 1, past_length + 1 + settings["num_assistant_tokens"]
        if first // config.floor_scale != last // config.floor_scale:
            limits["branching_factor"] = 1
    return limits


def _check_call(target, input_ids, generation_config, synced_gpus, model_kwargs):
    """The checks of `GenerationMixin._assisted_decoding`, and those a tree adds."""
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"EAGLE-3 decoding takes one sequence a call, got a batch of {input_ids.shape[0]}. Call `generate` for each, "
            "or leave `assistant_model` out."
        )
    if not model_kwargs.get("use_cache", True):
        raise ValueError("EAGLE-3 decoding requires `use_cache=True`.")
    if synced_gpus:
        raise ValueError("EAGLE-3 decoding does not support `synced_gpus=True` (ZeRO-3 and FSDP sharded targets).")
    if getattr(generation_config, "assistant_ensemble_weight", None) is not None:
        raise ValueError("`assistant_ensemble_weight` changes the text; EAGLE-3 decoding is lossless. Leave it unset.")
    if is_flash_attention_requested(target.config):
        raise ValueError(
            f"Flash attention takes no tree mask. Load {type(target).__name__} with attn_implementation='sdpa', or call "
            "target.set_attn_implementation('sdpa')."
        )
    if "position_ids" not in inspect.signature(target.forward).parameters:
        raise ValueError(
            f"{type(target).__name__} takes no `position_ids`, so that siblings in a tree cannot share a position. "
            "EAGLE-3 decoding needs a target with explicit positions."
        )
    position_ids = model_kwargs.get("position_ids")
    if position_ids is None or position_ids.dim() != 2:
        raise ValueError(
            f"EAGLE-3 decoding needs `position_ids` of shape (1, sequence_length); {type(target).__name__} has "
            f"{None if position_ids is None else tuple(position_ids.shape)}. Leave `assistant_model` out for this target."
        )
    if model_kwargs.get("past_key_values") is not None:
        check_cache(model_kwargs["past_key_values"])


def check_cache(cache) -> None:
    """Refuses caches from which the nodes of a tree cannot be taken out again."""
    if cache is None:
        raise ValueError("EAGLE-3 decoding needs a target that returns `past_key_values`.")
    for layer in getattr(cache, "layers", [cache]):
        stores_nothing = type(layer).__name__ == "DummyLayer"  # layers that share another one's keys
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) and not stores_nothing:
            raise ValueError(
                f"EAGLE-3 decoding cannot roll back a {type(cache).__name__} with {type(layer).__name__} layers. Use the "
                "default `DynamicCache` (no `cache_implementation`); targets with recurrent layers are not supported."
            )

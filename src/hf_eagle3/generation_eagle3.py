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

import copy
import functools
import inspect
import math
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import output_capturing
from transformers.utils.generic import is_flash_attention_requested

from .policy_eagle3 import tree_policy
from .tree_eagle3 import DraftTree, grow_tree


# Longest path below the root; children tried per node, and nodes expanded per level; nodes verified per step at most; the
# probability, by the draft, that a path must have to be verified; and whether steps may be smaller if that is faster. Names are those of OpenVINO GenAI and transformers.
# They live in the draft's generation config, and a call may bring others in the `GenerationConfig` given to `generate`.
DEFAULT_TREE_SETTINGS = {
    "tree_depth": 6,
    "branching_factor": 8,
    "num_assistant_tokens": 24,
    "assistant_confidence_threshold": 0.0,
    "tree_policy": "auto",
}


# Logits processors that keep a state for each row of a batch.
STATEFUL_PROCESSORS = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)

# Arguments with an entry for each token that `generate` extends.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")

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


# How the last call of each draft went, by thread; `None` is the last of any. Kept off the draft, whose threads share it.
_LAST_CALLS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def last_generation(draft) -> Eagle3GenerationStats | None:
    """Statistics of the last call with a draft: this thread's, or any thread's if this one made none."""
    calls = _LAST_CALLS.get(draft, {})
    return calls.get(threading.get_ident(), calls.get(None))


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

    The rows of a batch advance at their own pace. Logits processors and stopping
    criteria that are not transformers' own get the whole batch for each token of each row, and what they say of that row
    counts.

    Arguments and return value are those of `GenerationMixin._assisted_decoding`. Leaves [`Eagle3GenerationStats`] in
    `draft.last_generation`.

    Raises:
        ValueError: if the draft was made for another target, or the call asks for what a tree cannot do.
    """
    draft.validate_target(target)
    _check_call(target, input_ids, generation_config, synced_gpus, model_kwargs, stopping_criteria, logits_processor)
    settings = tree_settings(draft.generation_config, generation_config)
    policy = tree_policy(
        settings.pop("tree_policy"),
        settings.pop("num_assistant_tokens"),
        target,
        draft,
        batch_size=input_ids.shape[0],
        do_sample=generation_config.do_sample,
        **settings,
    )
    stats = Eagle3GenerationStats()
    aux_layer_ids = draft.resolve_aux_layer_ids(target)
    returned = _ReturnedOutputs(target, generation_config, batch_size=input_ids.shape[0])
    model_kwargs["output_hidden_states"] = returned.hidden_states_with(aux_layer_ids)
    text = _Text(input_ids, logits_processor, stopping_criteria, generation_config, returned, streamer)

    # The prompt's forward ends at the root of a tree that has no other nodes.
    outputs = target._prefill(input_ids, generation_config, model_kwargs)
    stats.target_forwards += 1
    cache = _TreeCache(outputs.past_key_values)
    if cache.is_chain and text.batch_size > 1:
        raise ValueError(
            f"{type(target).__name__} keeps convolutional states, whose rows cannot come to different lengths. Call "
            "`generate` for each row, or leave `assistant_model` out."
        )
    if text.batch_size > 1 and model_kwargs.get("attention_mask") is None:  # there will be padding
        model_kwargs["attention_mask"] = input_ids.new_ones(text.batch_size, cache.length)
    drafter = _Drafter(draft, target.get_input_embeddings())
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    features = aux_hidden_states(outputs, aux_layer_ids, num_layers)  # (B, S, n_aux * H)
    tree, root_row = DraftTree.root_only(input_ids[:, -1:]), outputs.logits.shape[1] - 1
    start, num_nodes, is_typical = time.perf_counter(), 0, False

    with target._optimize_model_for_decode():
        while True:
            # Each row walks down its tree until no child carries the target's choice, or it is time to stop.
            longest, were_finished = text.longest, list(text.is_finished)
            paths = text.walk(tree, outputs, root_row)
            growth = text.longest - longest

            # Keep the paths in the cache and forget the other nodes.
            counts = [len(path) for path in paths]
            emitted = [count for count, done in zip(counts, were_finished) if count and not done]
            stats.new_tokens += sum(emitted)
            if stats.target_forwards > 1:
                stats.accepted_lengths += emitted
                if emitted and is_typical:
                    policy.record(num_nodes, sum(emitted) / len(emitted), time.perf_counter() - start)
                cache.keep_paths(paths, tree.num_nodes, growth)
                features = _take_paths(features, paths)
            model_kwargs = target._update_model_kwargs_for_generation(
                outputs, model_kwargs, num_new_tokens=max(counts)
            )
            _align_rows(model_kwargs, counts, growth)
            text.stream()
            if text.is_complete:
                break

            # Draft a tree below the newest token, and verify it in one forward.
            start, num_nodes = time.perf_counter(), policy.choose()
            limits = _step_limits(target, settings, num_nodes, cache, model_kwargs, text)
            is_typical = limits["tree_depth"] == min(settings["tree_depth"], num_nodes)
            drafter.remember(features, counts, text, model_kwargs)
            tree = DraftTree.root_only(text.newest(1))
            if limits["tree_depth"] > 0:
                drafter.observe(text, model_kwargs)
                tree = text.foresee_padding(drafter.grow(text.newest(1), **limits), **limits)
            outputs = _verify(target, tree, text, cache, model_kwargs)
            stats.target_forwards += 1
            cache.track(outputs.past_key_values)
            features = aux_hidden_states(outputs, aux_layer_ids, num_layers)[:, -tree.num_nodes :]
            root_row = outputs.logits.shape[1] - tree.num_nodes

    if streamer is not None:
        streamer.end()
    cache.release()
    calls = _LAST_CALLS.setdefault(draft, {})
    calls[threading.get_ident()] = calls[None] = stats
    return returned.finish(text.ids[:, : text.longest].clone(), outputs.past_key_values)


def tree_settings(
    draft_config: GenerationConfig, call_config: GenerationConfig | None = None
) -> dict[str, float | str]:
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
        elif name != "tree_policy" and (
            isinstance(settings[name], bool) or not isinstance(settings[name], int) or settings[name] < 1
        ):
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
        allowed = F.pad(visible, (num_past, 0), value=True)
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
            # Several sequences a prompt are a batch, which transformers' own assistants cannot serve.
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1
        return validate_mode(self, generation_mode, generation_config, generation_mode_kwargs)

    _assisted_decoding._asks_the_assistant = True
    GenerationMixin._assisted_decoding = _assisted_decoding
    GenerationMixin._validate_generation_mode = _validate_generation_mode


class _Text:
    """
    The text as it grows. The rows of a batch advance at their own pace, and a finished row goes on as in `_sample`: with
    padding, up to the length of the longest.
    """

    # How far a row may run ahead of the slowest; noise is kept for the rows in between.
    MAX_LEAD = 64

    def __init__(self, input_ids, logits_processor, stopping_criteria, generation_config, returned, streamer):
        self.batch_size, self.prompt_length = input_ids.shape
        self.ids = input_ids  # (B, capacity), of which each row has written its length
        self.lengths = [self.prompt_length] * self.batch_size
        self.is_finished = [False] * self.batch_size
        self.logits_processor, self.stopping_criteria, self.returned = logits_processor, stopping_criteria, returned
        self.max_length = getattr(stopping_criteria, "max_length", None) or torch.iinfo(torch.long).max
        self.do_sample, self.pad_token = generation_config.do_sample, generation_config._pad_token_tensor
        self.pads_finished_rows = any(hasattr(criteria, "eos_token_id") for criteria in stopping_criteria)
        self.noise = [deque() for _ in range(self.batch_size)]
        self.streamer, self.num_streamed = streamer, self.prompt_length

    @property
    def shortest(self) -> int:
        return min(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def room(self) -> torch.LongTensor:
        """How many tokens each row may still take, `(B, 1)`; deeper nodes are never reached, and need no position."""
        return torch.tensor([[max(self.max_length - length, 0)] for length in self.lengths])

    @property
    def is_complete(self) -> bool:
        return all(self.is_finished) and self.shortest == self.longest

    def newest(self, num_tokens: int) -> torch.LongTensor:
        """The last tokens of every row, `(B, num_tokens)`; shorter rows begin with zeros."""
        if self.shortest == self.longest:
            return self.ids[:, self.longest - num_tokens : self.longest]
        index = torch.arange(num_tokens) - num_tokens + torch.tensor(self.lengths)[:, None]
        index = index.to(self.ids.device)
        return self.ids.gather(1, index.clamp(min=0)).masked_fill(index < 0, 0)

    def walk(self, tree: DraftTree, outputs, root_row: int) -> list[list[int]]:
        """
        Picks tokens for as long as the tree has them. Returns for each row the nodes at which they were picked.
        """
        children, walking = tree.children(), list(range(self.batch_size))
        nodes, paths = [0] * self.batch_size, [[] for _ in walking]
        while walking := [row for row in walking if nodes[row] is not None and self._may_advance(row)]:
            equally_long = {}
            for row in walking:
                paths[row].append(nodes[row])
                equally_long.setdefault(self.lengths[row], []).append(row)
            for rows in equally_long.values():
                tokens = self._advance(rows, paths, outputs, root_row, tree.num_nodes)
                for row, token in zip(rows, tokens):
                    nodes[row] = children[row].get((nodes[row], token))
        return paths

    def _may_advance(self, row: int) -> bool:
        if self.is_finished[row]:
            return self.lengths[row] < self.longest
        return self.lengths[row] < self.shortest + self.MAX_LEAD

    def _advance(self, rows: list[int], paths: list[list[int]], outputs, root_row: int, num_nodes: int) -> list[int]:
        """Picks the next token of rows that are equally long, at the last node of each one's path."""
        length, device = self.lengths[rows[0]], self.ids.device
        if len(rows) == self.batch_size and len({paths[row][-1] for row in rows}) == 1:
            logits = outputs.logits[:, root_row + paths[0][-1]].to(copy=True, dtype=torch.float32, device=device)
        else:
            logits = outputs.logits[rows, [root_row + paths[row][-1] for row in rows]].float().to(device)
        scores = self._process(rows, length, logits)
        next_tokens = self._pick(rows, scores)
        if length == self.ids.shape[1]:
            self.ids = F.pad(self.ids, (0, max(length, 256)))
        self.ids[rows, length] = next_tokens
        for i, row in enumerate(rows):
            self.returned.add(row, outputs, logits[i : i + 1], scores[i : i + 1], paths[row], num_nodes)
            self.lengths[row] += 1
        for row, is_done in zip(rows, self._are_to_stop(rows, length + 1)):
            self.is_finished[row] |= is_done
        return next_tokens.tolist()

    def _process(self, rows: list[int], length: int, logits: torch.FloatTensor) -> torch.FloatTensor:
        if len(rows) == self.batch_size:
            return self.logits_processor(self.ids[:, :length], logits)
        scores = logits
        for processor in self.logits_processor:
            if _is_row_wise(processor):
                scores = processor(self.ids[rows, :length], scores)
            else:
                everyone = scores.new_zeros(self.batch_size, scores.shape[1])
                everyone[rows] = scores
                scores = processor(self._cut(length), everyone)[rows]
        return scores

    def _are_to_stop(self, rows: list[int], length: int) -> list[bool]:
        scores = self.returned.scores_of(rows)
        if len(rows) == self.batch_size:
            return self.stopping_criteria(self.ids[:, :length], scores).tolist()
        is_done = torch.zeros(len(rows), dtype=torch.bool)
        for criteria in self.stopping_criteria:
            if _is_row_wise(criteria):
                is_done |= torch.as_tensor(criteria(self.ids[rows, :length], scores)).cpu()
            else:
                is_done |= torch.as_tensor(criteria(self._cut(length), scores)).cpu().expand(self.batch_size)[rows]
        return is_done.tolist()

    def _cut(self, length: int) -> torch.LongTensor:
        """All rows in their places, for what may know them by number; longer ones are cut, shorter ones end with zeros."""
        index = torch.arange(length, device=self.ids.device)
        lengths = torch.tensor(self.lengths, device=self.ids.device)
        return self.ids[:, :length].masked_fill(index >= lengths[:, None], 0)

    def _pick(self, rows: list[int], scores: torch.FloatTensor) -> torch.LongTensor:
        """The next tokens of rows, as `_sample` picks them."""
        if not self.do_sample:
            next_tokens = torch.argmax(scores, dim=-1)
        elif self.batch_size == 1:
            next_tokens = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            # What `torch.multinomial` does, with the noise it would have drawn for all rows at this position.
            probs = torch.softmax(scores, dim=-1)
            if not (torch.isfinite(probs).all() and (probs >= 0).all()):
                raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
            if any(not self.noise[row] for row in rows):  # then all of them, which are equally long
                draw = probs.new_empty(self.batch_size, probs.shape[-1]).exponential_()
                for queue, noise in zip(self.noise, draw):
                    queue.append(noise.clone())
            next_tokens = torch.argmax(probs / torch.stack([self.noise[row].popleft() for row in rows]), dim=-1)
        if self.pads_finished_rows and any(self.is_finished):
            finished = torch.tensor([self.is_finished[row] for row in rows], device=next_tokens.device)
            next_tokens = next_tokens.masked_fill(finished, int(self.pad_token))
        return next_tokens

    def foresee_padding(self, tree: DraftTree, tree_depth: int, **settings) -> DraftTree:
        """Replaces the trees of rows whose next tokens are known to be padding by chains of it."""
        if tree.num_nodes == 1 or not (self.pads_finished_rows and any(self.is_finished)):
            return tree
        tokens, parents = tree.tokens.clone(), tree.parents.clone()
        tokens[self.is_finished, 1:] = int(self.pad_token)
        parents[self.is_finished, 1:] = torch.arange(tree.num_nodes - 1, device=parents.device).clamp(
            max=tree_depth - 1
        )
        return DraftTree.from_parents(tokens, parents)

    def stream(self) -> None:
        """Hands out what all rows have."""
        if self.streamer is None:
            return
        while self.num_streamed < self.shortest:
            self.streamer.put(self.ids[:, self.num_streamed].cpu())
            self.num_streamed += 1


def _is_row_wise(processor) -> bool:
    """Whether a logits processor or stopping criterion treats each row of a batch as if it were alone."""
    return (
        type(processor).__module__.startswith("transformers.generation.")
        and not isinstance(processor, PrefixConstrainedLogitsProcessor)
        and getattr(processor, "prompt_ignore_length", None) is None
    )


class _Drafter:
    """
    The draft during one call: its cache, and where in the text it stands. What it computes never leaves the call, so
    that it can do so in inference mode, whose operators cost less than those of `no_grad`.
    """

    def __init__(self, draft, embedding):
        self.draft, self.embedding = draft, embedding
        self.layer_config = draft.config.transformer_layer_config
        self.cache = DynamicCache()
        self.lengths = None  # of each row in the cache, which ends at its right
        self.padding_mask = None  # (B, past_length), in batches
        self.unread: list[tuple[torch.FloatTensor, list[int]]] = []  # states of the target, and how many of each row

    def step(self, tokens, hidden_states, position_ids, attention_mask=None, logits_to_keep=0):
        return self.draft(
            inputs_embeds=self.draft.embed(tokens, self.embedding),
            hidden_states=hidden_states,
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=self.cache,
            logits_to_keep=logits_to_keep,
        )

    def remember(self, features, counts, text, model_kwargs):
        """Takes the target's own states `(B, R, n_aux * H)` at the newest `counts` positions of each row, or the prompt's."""
        if not self.unread and self.cache.get_seq_length() == 0:
            # A prompt that came with a cache, in chunks or as embeddings shows only its end; padding is not read at all.
            num_seen = min(features.shape[1], text.shortest)
            counts, attention_mask = [num_seen] * text.batch_size, model_kwargs.get("attention_mask")
            if attention_mask is not None:
                counts = attention_mask[:, -num_seen - 1 : -1].sum(dim=1).tolist()
        self.unread.append((features[:, -max(counts) :], counts))

    @torch.inference_mode()
    def observe(self, text, model_kwargs):
        """Reads the newest tokens with what was remembered of the positions before them."""
        past_length = self.cache.get_seq_length()
        features, counts = self.unread[0]
        if len(self.unread) > 1:
            rows, begin = [[] for _ in range(text.batch_size)], 0
            for block, block_counts in self.unread:
                begin += block.shape[1]
                for row, count in zip(rows, block_counts):
                    row += range(begin - count, begin)
            features = _take_paths(torch.cat([block for block, _ in self.unread], dim=1), rows)
            counts = [len(row) for row in rows]
        self.unread = []
        num_rows, parameter = max(counts), self.draft.lm_head.weight
        hidden_states = self.draft.combine_hidden_states(features.to(parameter))
        positions = text_positions(model_kwargs)[:, -num_rows - 1 : -1].to(parameter.device)
        is_batch, device = text.batch_size > 1, parameter.device
        index = (
            torch.arange(num_rows, device=device) - num_rows + torch.tensor(counts, device=device)[:, None]
        )  # (B, R)
        if past_length > 0:  # a chain below what was read before
            chain = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril() & (index >= 0)[:, None]
            depths = index.clamp(min=0)
            mask = tree_attention_mask(
                self.layer_config, self.cache, past_length, chain, depths, depths, self.padding_mask
            )
        else:  # the attention's own causal mask will do
            mask = (index >= 0).long() if is_batch else None
        outputs = self.step(text.newest(num_rows).to(device), hidden_states, positions, mask, logits_to_keep=1)
        self.logits, self.hidden_states = outputs.logits[:, -1], outputs.last_hidden_state[:, -1]
        self.position = positions[:, -1:]
        if is_batch:
            lengths = counts if self.lengths is None else [a + b for a, b in zip(self.lengths, counts)]
            growth = max(lengths) - max(self.lengths or [0])
            _keep_rows(self.cache, [list(range(num_rows - count, num_rows)) for count in counts], num_rows, growth)
            self.lengths = lengths
            left_padding = max(lengths) - torch.tensor(lengths, device=device)[:, None]
            self.padding_mask = torch.arange(max(lengths), device=device) >= left_padding

    @torch.inference_mode()
    def grow(self, root_tokens, tree_depth, **settings) -> DraftTree:
        """Drafts a tree below `root_tokens` `(B, 1)` from what was observed, and forgets its own rows again."""
        observed = self.cache.get_seq_length()

        def advance(tokens, hidden_states, level, visible):
            batch_size, width = tokens.shape
            depths = torch.arange(1, level + 1, device=tokens.device).repeat_interleave(width).expand(batch_size, -1)
            mask = tree_attention_mask(
                self.layer_config, self.cache, observed, visible, depths[:, -width:], depths, self.padding_mask
            )
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
        # States that each token updates can be rolled back to along one path only.
        self.is_chain = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
        self.recording_layers = [layer for layer in cache.layers if hasattr(layer, "record_past")]
        self.were_recording = [layer.record_past for layer in self.recording_layers]
        # From here on sliding layers and convolutions keep what a step may have to roll back to.
        cache.activate_past_recording()
        cache.crop(0)

    @property
    def length(self) -> int:
        return self.cache.get_seq_length()

    def keep_paths(self, paths: list[list[int]], num_nodes: int, growth: int) -> None:
        """Keeps each row's path, ascending, of the last `num_nodes` entries. The cache becomes longer by `growth`."""
        path = paths[0]
        if any(other != path for other in paths) or len(path) != growth:
            _keep_rows(self.cache, paths, num_nodes, growth)
            return
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
        for layer, was_recording in zip(self.recording_layers, self.were_recording):
            layer.record_past = was_recording


class _ReturnedOutputs:
    """What `return_dict_in_generate` asks for, one entry a token as in `_sample`."""

    def __init__(self, target, config, batch_size):
        self.text_config = target.config.get_text_config(decoder=True)
        self.batch_size = batch_size
        self.wants_dict = config.return_dict_in_generate
        self.wants_hidden_states = config.output_hidden_states

        def collect(wanted):  # a list of entries for each row
            return [[] for _ in range(batch_size)] if self.wants_dict and wanted else None

        self.scores, self.logits = collect(config.output_scores), collect(config.output_logits)
        self.hidden_states, self.attentions = collect(self.wants_hidden_states), collect(config.output_attentions)

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

    def scores_of(self, rows):
        """What stopping criteria get: an entry `(len(rows), vocab_size)` a token."""
        return (
            None if self.scores is None else tuple(_stack(entries) for entries in zip(*(self.scores[r] for r in rows)))
        )

    def add(self, row, outputs, logits, scores, path, num_nodes):
        """
        Adds the token that a row picked at the last node of `path`. A forward without drafted nodes is plain, and all of
        its positions go in.
        """
        if not self.wants_dict:
            return
        rows, nodes = slice(row, row + 1), slice(None) if num_nodes == 1 else slice(path[-1], path[-1] + 1)
        if self.scores is not None:
            self.scores[row].append(scores)
        if self.logits is not None:
            self.logits[row].append(logits)
        if self.hidden_states is not None:
            states = outputs.hidden_states
            if self.wants_hidden_states is not True:
                wanted = {index % len(states) for index in self.wants_hidden_states}
                states = [state if index in wanted else None for index, state in enumerate(states)]
            self.hidden_states[row].append(tuple(None if state is None else state[rows, nodes] for state in states))
        if self.attentions is not None:
            entries = self.attentions[row]
            # A shorter row has more padding before it than in `_sample`.
            num_keys = self.prompt_keys + len(entries) if entries and self.batch_size > 1 else None
            entries.append(
                tuple(
                    weights if weights is None else self._attention_of(weights[rows], i, path, num_nodes, num_keys)
                    for i, weights in enumerate(outputs.attentions)
                )
            )
            if len(entries) == 1:
                self.prompt_keys = max(weights.shape[-1] for weights in entries[0] if weights is not None)

    def _attention_of(self, weights, layer_idx, path, num_nodes, num_keys):
        """The row `(1, heads, 1, K)` that a forward over the path alone would have returned."""
        if num_nodes == 1:
            return weights if num_keys is None else weights[..., -num_keys:]
        num_past = weights.shape[-1] - weights.shape[-2]
        columns = [*range(num_past), *(num_past + node for node in path)]
        config = self.text_config
        layer_types = getattr(config, "layer_types", None)
        layer_type = None if layer_types is None else layer_types[layer_idx]
        if layer_type in (None, "sliding_attention") and getattr(config, "sliding_window", None) is not None:
            columns = columns[-config.sliding_window :]
        elif layer_type in (None, "chunked_attention") and getattr(config, "attention_chunk_size", None) is not None:
            columns = columns[-config.attention_chunk_size :]
        if num_keys is not None:
            columns = columns[-num_keys:]
        return weights[:, :, path[-1] : path[-1] + 1, columns]

    def finish(self, sequences, past_key_values):
        if not self.wants_dict:
            return sequences

        def stack(rows):
            return None if rows is None else tuple(_stack(entries) for entries in zip(*rows))

        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=stack(self.scores),
            logits=stack(self.logits),
            attentions=stack(self.attentions),
            hidden_states=stack(self.hidden_states),
            past_key_values=past_key_values,
        )


def _stack(entries):
    """One entry of all rows: tensors, or tuples of tensors and `None`."""
    if len(entries) == 1 or entries[0] is None:
        return entries[0]
    if isinstance(entries[0], tuple):
        return tuple(_stack(layer) for layer in zip(*entries))
    return torch.cat(entries)


def _keep_rows(cache, kept: list[list[int]], num_new: int, growth: int) -> None:
    """
    Of the last `num_new` entries of each row of a cache, keeps the ascending ones in `kept`. Rows may keep different
    numbers: all end at the cache's right, like a batch that is padded on the left. The cache becomes longer by `growth`,
    which is what its longest row does.
    """
    length = cache.get_seq_length() - num_new + growth
    counts = torch.tensor([len(indices) for indices in kept])[:, None]
    most = int(counts.max())
    table = torch.tensor([[0] * (most - len(indices)) + indices for indices in kept])  # (B, most), at the right
    sources = {}
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            continue
        num_past = layer.keys.shape[-2] - num_new
        if num_past not in sources:
            from_right = torch.arange(min(length, num_past + most)).flip(0)  # (S,)
            past = num_past - 1 - (from_right - counts)
            new = num_past + table.gather(1, (most - 1 - from_right).clamp(min=0).expand(len(kept), -1))
            sources[num_past] = torch.where(from_right < counts, new, past).clamp(min=0).to(layer.keys.device)
        source = sources[num_past][:, None, :, None]  # (B, 1, S, 1)
        layer.keys = layer.keys.gather(-2, source.expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3]))
        layer.values = layer.values.gather(-2, source.expand(-1, layer.values.shape[1], -1, layer.values.shape[3]))
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = length
    cache.crop(0)  # to what sliding layers need


def _take_paths(features, paths):
    """The rows `(B, R, ...)` of the nodes on each path; shorter paths are at the right."""
    if len(paths) == 1:
        return features[:, paths[0]]
    most = max(map(len, paths))
    index = torch.tensor([[0] * (most - len(path)) + path for path in paths], device=features.device)
    return features.gather(1, index[..., None].expand(-1, -1, features.shape[-1]))


def _align_rows(model_kwargs, counts: list[int], growth: int) -> None:
    """
    Moves what has an entry for each token to where the rows end: they were all extended by the largest of `counts`, but
    advanced by their own.
    """
    if len(set(counts)) == 1 and counts[0] == growth:
        return
    for name in ("attention_mask", "position_ids", *TOKEN_TYPES):
        entries = model_kwargs.get(name)  # (..., B, L)
        if entries is None:
            continue
        excess = max(counts) - torch.tensor(counts, device=entries.device)[:, None]
        source = torch.arange(entries.shape[-1], device=entries.device) - excess  # (B, L)
        moved = entries.gather(-1, source.clamp(min=0).expand_as(entries)).masked_fill(source < 0, 0)
        model_kwargs[name] = moved[..., max(counts) - growth :]


def text_positions(model_kwargs) -> torch.LongTensor:
    """Positions `(B, L)` in the text, of position ids that may have more dimensions than that one."""
    position_ids = model_kwargs["position_ids"]
    return position_ids if position_ids.dim() == 2 else position_ids[0]


def _verify(target, tree, text, cache, model_kwargs):
    """One forward of the target over all nodes of the tree; logits of shape `(B, num_nodes, vocab_size)`."""
    if tree.num_nodes == 1:  # nothing drafted: exactly a step of `_sample`
        input_ids = text.newest(text.longest)
        inputs = target.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **model_kwargs)
    else:
        device = model_kwargs["position_ids"].device
        depths, attention_mask = tree.depths.to(device), model_kwargs.get("attention_mask")
        if not cache.is_chain:
            attention_mask = tree_attention_mask(
                target.config.get_text_config(decoder=True),
                cache.cache,
                cache.length,
                tree.ancestors.to(device),
                depths,
                depths,
                attention_mask,
            )
        elif attention_mask is not None:  # the target's own causal mask will do
            attention_mask = F.pad(attention_mask, (0, tree.num_nodes - 1), value=1)
        positions = model_kwargs["position_ids"][..., -1:] + torch.minimum(depths, text.room.to(device))
        tree_kwargs = {**model_kwargs, "position_ids": positions, "attention_mask": attention_mask}
        for name in TOKEN_TYPES:
            if tree_kwargs.get(name) is not None:  # nodes are of the newest token's type
                tree_kwargs[name] = tree_kwargs[name][:, -1:].expand(-1, tree.num_nodes)
        inputs = target.prepare_inputs_for_generation(tree.tokens.to(device), **tree_kwargs)
        inputs["past_key_values"] = cache.cache
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 0  # all
    return target(**inputs, return_dict=True)


def _step_limits(target, settings, num_nodes, cache, model_kwargs, text):
    """The tree settings of one step, cut where a larger tree would be useless or would not be the target's text."""
    limits = {**settings, "num_assistant_tokens": num_nodes}
    limits["tree_depth"] = min(limits["tree_depth"], num_nodes, text.max_length - text.shortest - 1)

    config = target.config.get_text_config(decoder=True)
    for rope_type, switch in _rotary_switches(config):
        # A tree must not reach over the switch, and dynamic scaling, which goes on changing, allows none beyond it.
        room = switch - 1 - int(model_kwargs["position_ids"].max())
        if room >= -1 or rope_type != "longrope":
            limits["tree_depth"] = min(limits["tree_depth"], max(room, 0))
    # In older transformers (5.17) Phi-3 loses its cache at that switch and goes on without: no tree hangs from that.
    if cache.length < text.longest - 1:
        limits["tree_depth"] = 0
    limits["tree_depth"] = max(limits["tree_depth"], 0)

    # Llama 4 scales queries by their index in the input, which is their position only in a chain.
    if getattr(config, "attn_temperature_tuning", False):
        first, last = cache.length + 1, cache.length + 1 + num_nodes
        if first // config.floor_scale != last // config.floor_scale:
            limits["branching_factor"] = 1
    if cache.is_chain:
        limits["branching_factor"] = 1
    return limits


def _rotary_switches(config) -> list[tuple[str, int]]:
    """
    Kinds and lengths of rotary scalings that change all frequencies of a forward when its largest position comes to that
    length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    switches = []
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        rope_type = parameters.get("rope_type", "default")
        if rope_type == "longrope":
            length = parameters.get("original_max_position_embeddings") or config.original_max_position_embeddings
            switches.append((rope_type, length))
        elif "dynamic" in rope_type:
            switches.append((rope_type, config.max_position_embeddings))
    return switches


def _check_batch(target, input_ids, model_kwargs, stopping_criteria, logits_processor):
    """Rows that advance at their own pace are not for targets and processors that look across rows."""
    for processor in logits_processor:
        if isinstance(processor, STATEFUL_PROCESSORS):
            raise ValueError(
                f"{type(processor).__name__} follows all rows of a batch at once, but in EAGLE-3 decoding each row advances "
                "at its own pace. Call `generate` for each row, or leave `assistant_model` out."
            )
    config = target.config.get_text_config(decoder=True)
    cache = model_kwargs.get("past_key_values")
    first = (cache.get_seq_length() if cache is not None else 0) + input_ids.shape[1]
    last = getattr(stopping_criteria, "max_length", None) or math.inf
    reason = None
    for rope_type, length in _rotary_switches(config):
        begin = int(text_positions(model_kwargs)[:, -1].min())
        if last >= length and (begin < length or rope_type != "longrope"):
            reason = f"'{rope_type}' rotary scaling changes at {length}"
    if getattr(config, "attn_temperature_tuning", False) and last + 1 >= (first // config.floor_scale + 1) * (
        config.floor_scale
    ):
        reason = f"the scale of its queries changes every {config.floor_scale} tokens"
    if reason is not None:
        raise ValueError(
            f"The rows of a batch come to different lengths in EAGLE-3 decoding, and {type(target).__name__} depends on the "
            f"length of the whole batch: {reason}, within this call. Call `generate` for each row, or set a smaller "
            "`max_new_tokens`."
        )


def _check_call(target, input_ids, generation_config, synced_gpus, model_kwargs, stopping_criteria, logits_processor):
    """The checks of `GenerationMixin._assisted_decoding`, and those a tree adds."""
    if generation_config.num_beams > 1:  # by `custom_generate`; otherwise transformers ignores the draft
        raise ValueError("EAGLE-3 decoding does not search with beams. Leave out `num_beams` or the draft.")
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
    if any(isinstance(module, torch.ao.nn.quantized.dynamic.Linear) for module in target.modules()):
        raise ValueError(
            f"{type(target).__name__} is quantized with one scale for all tokens of a forward, so that what it says of a "
            "token depends on the others in the tree. Quantize weights only, or activations token by token (torchao)."
        )
    if "position_ids" not in inspect.signature(target.forward).parameters:
        raise ValueError(
            f"{type(target).__name__} takes no `position_ids`, so that siblings in a tree cannot share a position. "
            "EAGLE-3 decoding needs a target with explicit positions."
        )
    position_ids = model_kwargs.get("position_ids")
    if position_ids is None:
        raise ValueError(
            f"EAGLE-3 decoding needs `position_ids`, and `generate` makes none for {type(target).__name__}."
        )
    if input_ids.shape[0] > 1:
        _check_batch(target, input_ids, model_kwargs, stopping_criteria, logits_processor)
    if model_kwargs.get("past_key_values") is not None:
        check_cache(model_kwargs["past_key_values"])


def check_cache(cache) -> None:
    """Refuses caches from which the nodes of a tree, or of a chain, cannot be taken out again."""
    if cache is None:
        raise ValueError("EAGLE-3 decoding needs a target that returns `past_key_values`.")
    for layer in getattr(cache, "layers", [cache]):
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            continue
        if type(layer).__name__ == "DummyLayer":  # stores nothing: shares another one's keys
            continue
        records_past = type(layer) is LinearAttentionLayer and hasattr(layer, "activate_past_recording")
        if records_past and not any(layer.is_recurrent_states_initialized.values()):  # only convolutions do
            continue
        raise ValueError(
            f"EAGLE-3 decoding cannot roll back a {type(cache).__name__} with {type(layer).__name__} layers. Use the "
            "default `DynamicCache` (no `cache_implementation`); recurrent states cannot be rolled back."
        )

# SPDX-License-Identifier: Apache-2.0
"""Lossless tree decoding behind `target.generate(..., assistant_model=draft)`."""

import contextlib
import copy
import functools
import threading
import time
import weakref
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import GenerationMixin

from .cache_eagle3 import TreeCache, copy_into, is_unused_static, take_paths, tree_attention_mask, with_room
from .checks_eagle3 import (
    check_call,
    depends_on_length,
    is_sharded,
    may_reread,
    may_select_rows,
    position_table,
    rotary_switches,
    whole_embedding,
)
from .drafter_eagle3 import Drafter
from .lookup_eagle3 import PromptLookup
from .outputs_eagle3 import ReturnedOutputs, aux_hidden_states, without_first
from .policy_eagle3 import tree_policy, tree_settings
from .static_eagle3 import StaticDrafter, compiled
from .text_eagle3 import Text
from .tree_eagle3 import DraftTree


# Arguments with an entry for each token that `generate` extends.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
INPUTS_BY_TOKEN = ("attention_mask", "position_ids", *TOKEN_TYPES)


@dataclass(repr=False)
class Eagle3GenerationStats:
    """
    How one call of `generate` went.

    Args:
        new_tokens (`int`):
            Tokens generated, in all rows together. Each row's first comes from the prompt's own forward.
        target_forwards (`int`):
            Forward passes of the target, the prompt's included. Plain `generate` takes one for each token of the
            longest text.
        accepted_lengths (`list[int]`):
            Tokens that each verification forward emitted for each row that it went on with; the prompt's forward
            verifies nothing and is left out.
        plain_steps (`int`): How many of those forwards had no token to verify, because drafting did not pay.
        lookup_steps (`int`): How many of them verified tokens that were looked up in the text instead of drafted.
        drafted_lengths (`list[int]`): Which of `accepted_lengths` are of trees: not of plain steps, nor looked up.
    """

    new_tokens: int = 0
    target_forwards: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    plain_steps: int = 0
    lookup_steps: int = 0
    drafted_lengths: list[int] = field(default_factory=list)

    def __repr__(self):
        return (
            f"{type(self).__name__}(new_tokens={self.new_tokens}, target_forwards={self.target_forwards}, "
            f"plain_steps={self.plain_steps}, lookup_steps={self.lookup_steps}, "
            f"acceptance_length={self.acceptance_length:.2f})"
        )

    @property
    def acceptance_length(self) -> float:
        """τ: tokens emitted per verification forward and row; 0 if there was none."""
        return sum(self.accepted_lengths) / len(self.accepted_lengths) if self.accepted_lengths else 0.0


# How the last call of each draft went, by thread; `None` is the last of any. Kept off the draft, whose threads share
# it.
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
    picks it. If a child carries that token the walk descends, else the token ends the step. The draft, or the text in
    which tokens are looked up, only decides which nodes exist, so greedy text is the target's greedy text, samples
    follow the target's distribution, and a seed gives the sample it gives without a draft.

    The rows of a batch advance at their own pace, or in step where that could be noticed (see [`Text`]).

    Arguments and return value are those of `GenerationMixin._assisted_decoding`. Leaves [`Eagle3GenerationStats`] in
    `draft.last_generation`.

    Raises:
        ValueError: if the draft was made for another target, or the call asks for what a tree cannot do.
    """
    draft.validate_target(target)
    check_call(draft, target, input_ids, generation_config, synced_gpus, model_kwargs)
    decoding = Eagle3Decoding(
        draft, target, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
    )
    result = decoding.decode()
    if streamer is not None:
        streamer.end()
    calls = _LAST_CALLS.setdefault(draft, {})
    calls[threading.get_ident()] = calls[None] = decoding.stats
    return result


class Eagle3Decoding:
    """
    One call of `generate`: the text, the target's cache and the draft, and the steps by which they go on. Reads the
    prompt.

    Args:
        draft (`Eagle3ForSpeculation`), target (`PreTrainedModel`): The draft, and the target that it is for.
        input_ids (`torch.LongTensor` of shape `(batch_size, prompt_length)`): The prompts.
        logits_processor, stopping_criteria, generation_config, streamer, model_kwargs:
            What `generate` calls its decoding methods with.
    """

    def __init__(
        self,
        draft,
        target,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer,
        model_kwargs,
    ):
        self.target, self.model_kwargs, self.forward = target, model_kwargs, target
        self.settings = settings = tree_settings(draft.generation_config, generation_config)
        policy_name, num_looked_up = settings.pop("tree_policy"), settings.pop("prompt_lookup_num_tokens")
        num_nodes = settings["num_assistant_tokens"]
        given_cache, self.unused_cache = model_kwargs.get("past_key_values"), None
        if given_cache is not None and is_unused_static(given_cache):
            self.unused_cache = given_cache
            # As long as the longest so far, so that what was compiled for it fits.
            max_length = max(generation_config.max_length - 1, getattr(target, "_previous_max_cache_length", 0))
            model_kwargs["past_key_values"] = with_room(given_cache, max_length, num_nodes)
        self.stats = Eagle3GenerationStats()
        self.aux_layer_ids = draft.resolve_aux_layer_ids(target)
        self.num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        self.returned = ReturnedOutputs(target, generation_config, batch_size=input_ids.shape[0])
        model_kwargs["output_hidden_states"] = self.returned.hidden_states_with(self.aux_layer_ids)

        self.outputs = target._prefill(input_ids, generation_config, model_kwargs)
        self.stats.target_forwards += 1
        self.cache = cache = TreeCache(
            getattr(self.outputs, "past_key_values", None), 1 + num_nodes, may_reread=may_reread(target)
        )
        self.prompt_length, self.embedding = cache.length, whole_embedding(target)
        self.text = text = Text(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            self.returned,
            streamer,
            in_step=cache.is_chain or depends_on_length(target, input_ids, cache, model_kwargs, stopping_criteria),
            path_length=1 + min(settings["tree_depth"], num_nodes),
            can_read_padding=0 <= (generation_config.pad_token_id or 0) < self.embedding.weight.shape[0],
            may_retire=may_select_rows(target, cache, model_kwargs, per_token=INPUTS_BY_TOKEN),
        )
        if text.batch_size > 1 and model_kwargs.get("attention_mask") is None:  # there will be padding
            model_kwargs["attention_mask"] = input_ids.new_ones(text.batch_size, cache.length)
        self.make_policy = functools.partial(
            tree_policy,
            # Processes that compute one forward together must agree on its size, and each measures other times.
            "static" if is_sharded(target) else policy_name,
            target,
            draft,
            batch_size=text.batch_size,
            do_sample=generation_config.do_sample,
            has_one_shape=cache.is_static,
            may_retire=text.may_retire,
            # Of a static cache all chains have one shape, too.
            looks_up=num_looked_up >= (num_nodes if cache.is_static else 1),
            **settings,
        )
        self.policy, self.lookup = self.make_policy(text.batch_size), None
        if self.policy.match_calibration is not None:
            num_looked_up = min(num_looked_up, num_nodes)
            self.lookup = PromptLookup(input_ids.tolist(), num_looked_up, self.policy.match_calibration)
        if cache.is_static:
            compile_config = None
            if not self.returned.wants_states and target._valid_auto_compile_criteria(model_kwargs, generation_config):
                compile_config = generation_config.compile_config or target._default_compile_config()
                self.forward = target.get_compiled_call(compile_config)
                cache.keep_path = compiled(cache.keep_path, draft, compile_config)
            self.drafter = StaticDrafter(draft, self.embedding, cache.capacity, settings, compile_config)
        else:
            self.drafter = Drafter(draft, self.embedding)

        self.num_reread = 0  # tokens that the newest forward read again
        # Which tokens recurrent states have forgotten `(B, cache.to_reread)`: the text may have been edited since.
        self.forgotten = input_ids[:, :0]
        # The prompt's forward ends at the root of a tree that has no other nodes, and which nobody planned.
        self.tree, self.plan = DraftTree.root_only(input_ids.new_zeros(text.batch_size, 1)), None
        self._read_outputs()

    def decode(self):
        """Decodes until all rows are finished. Returns what `generate` does."""
        try:
            with self.target._optimize_model_for_decode():
                while True:
                    self.accept()
                    if self.text.is_complete:
                        break
                    self.retire()
                    self.propose()
                    self.verify()
        except BaseException:
            # Whoever passed the cache and catches this finds in it what plain `generate` would have left.
            self.break_off()
            raise
        else:
            if self.returned.wants_dict or getattr(self.cache.cache, "_is_user_defined", False):
                self.reread()
        finally:
            self.cache.release()
            self.text.finish()
        cache = self.outputs.past_key_values
        if self.returned.wants_dict and self.unused_cache is not None:  # as large as plain `generate`'s
            copy_into(self.unused_cache, cache, self.prompt_length, self.cache.length)
            cache = self.unused_cache
        return self.returned.finish(self.text.sequences(), cache)

    def accept(self) -> None:
        """
        Each row walks down its tree until no child carries the target's choice, or it is time to stop. Keeps its path
        and forgets the other nodes.
        """
        text, tree, were_finished = self.text, self.tree, list(self.text.is_finished)
        has_nodes = tree.num_nodes > 1 or (self.cache.is_static and self.plan is not None)  # or had, in a static cache
        if not text.walk(tree, self.outputs, self.root_row, may_take_back=has_nodes):
            self.verify_root()
            text.walk(self.tree, self.outputs, self.root_row)
        self.counts = [len(path) for path in text.paths]
        emitted = [count for count, done in zip(self.counts, were_finished) if count and not done]
        self.stats.new_tokens += sum(emitted)
        if self.plan is not None:
            self.stats.accepted_lengths += emitted
            if self.plan.num_looked_up == 0 and tree.num_nodes > 1:
                self.stats.drafted_lengths += emitted
            self.keep_paths()
            if tree.num_nodes > 1:
                self.features = take_paths(self.features, text.paths)
        self.model_kwargs = _extend_inputs(self.target, self.outputs, self.model_kwargs, self.counts, text.growth)
        if self.plan is not None:
            live = [not is_finished for is_finished in text.is_finished]
            seconds = time.perf_counter() - self.start
            self.plan.record_verification(tree, text.paths, live, text.progress, seconds, self.num_reread)
        if self.lookup is not None:
            self.lookup.extend(text.picked, text.is_finished)

    def keep_paths(self) -> None:
        """Keeps the nodes at which tokens were picked."""
        self.cache.keep_paths(self.text.paths, self.text.growth)
        self.forget(self.text.growth)

    def forget(self, num_nodes: int) -> None:
        """Notes which tokens recurrent states have forgotten, the first nodes of the newest chain among them."""
        if self.cache.recurrent_layers:
            tokens = torch.cat([self.forgotten, self.tree.tokens[:, :num_nodes].to(self.forgotten.device)], dim=1)
            self.forgotten = tokens[:, tokens.shape[1] - self.cache.to_reread :]

    def retire(self) -> None:
        """Finished rows leave the batch, where nobody notices."""
        before = self.text.longest
        if (staying := self.text.retire()) is None:
            return
        excess = before - self.text.longest
        self.cache.select(staying, excess)
        self.drafter.select(staying)
        if self.lookup is not None:
            self.lookup.select(staying)
        self.features, self.counts = self.features[staying], [self.counts[row] for row in staying]
        self.model_kwargs = _select_inputs(self.model_kwargs, staying, excess)
        self.policy = self.make_policy(self.text.batch_size)

    def propose(self) -> None:
        """Drafts a tree below the newest tokens, looks one up, or leaves it at these, as the policy plans."""
        text = self.text
        self.tree = DraftTree.root_only(text.newest(1))
        self.plan = self.policy.plan_step(text.rows_behind, self.lookup)
        self.drafter.remember(self.features, self.counts, text, self.model_kwargs)
        num_looked_up, settings = self.plan.num_looked_up, self.settings
        if num_looked_up > 0:
            settings = {**settings, "tree_depth": num_looked_up, "num_assistant_tokens": num_looked_up}
        elif not self.plan.drafts:
            return
        limits = _step_limits(self.target, settings, self.cache, self.model_kwargs, text)
        if limits["tree_depth"] == 0:
            return
        if num_looked_up > 0:
            tree = self.look_up(limits["tree_depth"])
        else:
            tree = self.drafter.grow(text, self.model_kwargs, self.plan, **limits)
        self.tree = text.foresee_padding(tree, **limits)

    def look_up(self, num_tokens: int) -> DraftTree:
        """A chain of what followed the newest tokens where they stood before."""
        newest = self.tree.tokens
        tokens = newest.new_tensor(self.lookup.next_tokens(num_tokens))  # (B, num_tokens)
        # Where a prompt was read as embeddings, its tokens may be placeholders that have none.
        has_embedding = (tokens >= 0) & (tokens < self.embedding.weight.shape[0])
        return DraftTree.chain(torch.cat([newest, torch.where(has_embedding, tokens, newest)], dim=1))

    def verify(self) -> None:
        """One forward of the target over all nodes of the tree."""
        self.start = time.perf_counter()
        inputs = _verification_inputs(self.target, self.tree, self.forgotten, self.text, self.cache, self.model_kwargs)
        self.num_reread = self.cache.to_reread
        self.cache.prepare(self.tree.num_nodes)
        self.outputs = self.forward(**inputs, return_dict=True)
        if self.num_reread > 0:
            self.outputs = without_first(self.outputs, self.num_reread)
        self.stats.target_forwards += 1
        self.stats.plain_steps += self.tree.num_nodes == 1
        self.stats.lookup_steps += self.tree.num_nodes > 1 and self.plan.num_looked_up > 0
        self.cache.track(self.outputs.past_key_values, self.tree.num_nodes)
        self._read_outputs()

    def verify_root(self) -> None:
        """Takes the tree back and verifies its root alone, as plain decoding does."""
        self.cache.take_back()
        start, self.tree = self.start, DraftTree.root_only(self.text.newest(1))
        self.verify()
        self.start = start

    def break_off(self) -> None:
        """Ends a step in which something was raised, perhaps while tokens were picked, with those that were."""
        text, cache, num_newer = self.text, self.cache, 1
        if cache.is_in_forward:
            cache.leave_forward()
            self.forget(1)
            num_newer = 0
        elif cache.num_new > 0:
            self.keep_paths()
            if cache.to_reread > 0:
                counts = list(map(len, text.paths))
                self.model_kwargs = _extend_inputs(self.target, self.outputs, self.model_kwargs, counts, text.growth)
        if getattr(cache.cache, "_is_user_defined", False):
            with contextlib.suppress(Exception):  # what was raised first tells more
                self.reread(num_newer)

    def reread(self, num_newer: int = 1) -> None:
        """
        Lets recurrent states read what they were put back from, so that the cache is as plain `generate` leaves it.
        The `num_newer` last entries of the inputs are of newer tokens than it holds.
        """
        num_tokens = self.cache.to_reread
        if num_tokens == 0:
            return
        inputs = {name: entries for name, entries in self.model_kwargs.items() if name not in INPUTS_BY_TOKEN}
        for name in INPUTS_BY_TOKEN:
            if (entries := self.model_kwargs.get(name)) is not None:  # (..., B, L)
                end = entries.shape[-1] - num_newer
                inputs[name] = entries[..., 0 if name == "attention_mask" else end - num_tokens : end]
        inputs = self.target.prepare_inputs_for_generation(self.forgotten, **inputs)
        self.forward(**inputs, return_dict=True)
        self.stats.target_forwards += 1
        self.cache.crop(0)
        self.cache.to_reread = 0

    def _read_outputs(self) -> None:
        """Which row of the logits is the root's, and what the draft reads: `features` `(B, N, n_aux * H)`, or the prompt's."""
        self.root_row = self.outputs.logits.shape[1] - self.tree.num_nodes
        self.features = aux_hidden_states(self.outputs, self.aux_layer_ids, self.num_layers)
        if self.plan is not None:
            self.features = self.features[:, -self.tree.num_nodes :]


# Saved with a draft as `custom_generate/generate.py`. Text, so that it travels with a draft that was loaded as remote
# code.
CUSTOM_GENERATE = '''"""
What `target.generate(..., custom_generate="<this repo>", assistant_model=draft, trust_remote_code=True)` calls: EAGLE-3
decoding with no need for transformers to know of it.
"""

from transformers import AutoModel


def generate(*args, model, assistant_model=None, **kwargs):
    """`assistant_model` is a draft, or the folder or Hub id of one."""
    if assistant_model is None:
        raise ValueError("A draft does not generate by itself. Call target.generate(..., assistant_model=draft).")
    if isinstance(assistant_model, str):
        assistant_model = AutoModel.from_pretrained(assistant_model, dtype=model.dtype, trust_remote_code=True)
        assistant_model = assistant_model.to(model.device)
    if not hasattr(assistant_model, "assisted_decoding"):
        raise ValueError(
            f"{type(assistant_model).__name__} is no EAGLE-3 draft. Call target.generate(..., assistant_model=draft), not the "
            "other way round."
        )
    return model.generate(*args, **kwargs, custom_generate=assistant_model.assisted_decoding)
'''


def install_generation_hook() -> None:
    """
    Lets an assistant bring its own decoding: `generate` calls `assistant_model.assisted_decoding(target, ...)` where
    it exists, and `assistant_model.validate_target(target)` before anything else; other assistants are untouched.
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
        assistant = generation_mode_kwargs.get("assistant_model")
        if isinstance(assistant, str):
            raise ValueError(
                f"`assistant_model` is a name: load it, by AutoModel.from_pretrained({assistant!r}, trust_remote_code=True)."
            )
        own = getattr(assistant, "validate_target", None)
        if own is not None:
            own(self)
            # Several sequences a prompt are a batch, which transformers' own assistants cannot serve.
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1
            if self._is_stateful and may_reread(self):  # the others are refused
                self = copy.copy(self)
                self._is_stateful = False
        return validate_mode(self, generation_mode, generation_config, generation_mode_kwargs)

    _assisted_decoding._asks_the_assistant = True
    GenerationMixin._assisted_decoding = _assisted_decoding
    GenerationMixin._validate_generation_mode = _validate_generation_mode


def _extend_inputs(target, outputs, model_kwargs, counts: list[int], growth: int):
    """What `_sample` does after each token, for rows that advanced by `counts`, the longest of them by `growth`."""
    token_types, most = model_kwargs.get("token_type_ids"), max(counts)
    model_kwargs = target._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=most)
    if token_types is not None:  # token by token, the last is repeated
        model_kwargs["token_type_ids"] = torch.cat([token_types, token_types[:, -1:].expand(-1, most)], dim=-1)
    if set(counts) == {growth}:
        return model_kwargs
    # All rows were extended by as much as one: move what has an entry for each token to where the rows end.
    for name in INPUTS_BY_TOKEN:
        entries = model_kwargs.get(name)  # (..., B, L)
        if entries is None:
            continue
        excess = most - torch.tensor(counts, device=entries.device)[:, None]
        source = torch.arange(entries.shape[-1], device=entries.device) - excess  # (B, L)
        shape = (*entries.shape[:-2], *source.shape)  # positions may be given once for all rows
        moved = entries.expand(shape).gather(-1, source.clamp(min=0).expand(shape)).masked_fill(source < 0, 0)
        model_kwargs[name] = moved[..., most - growth :]
    return model_kwargs


def _select_inputs(model_kwargs, rows: list[int], excess: int):
    """The inputs of some rows, without the `excess` positions at the left that only others had."""
    selected = dict(model_kwargs)
    for name in INPUTS_BY_TOKEN:
        if (entries := model_kwargs.get(name)) is not None:  # (..., B, L); positions may be given once for all rows
            selected[name] = entries[..., rows if entries.shape[-2] > 1 else [0], excess:]
    return selected


def _verification_inputs(target, tree, forgotten, text, cache, model_kwargs):
    """What to call the target with for one forward over all nodes of the tree, and what it has forgotten before them."""
    num_reread = cache.to_reread
    if tree.num_nodes == 1 and num_reread == 0:  # nothing drafted: exactly a step of `_sample`
        input_ids = text.newest(text.longest)
        return target.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **model_kwargs)
    tree, attention_mask = tree.to(model_kwargs["position_ids"].device), model_kwargs.get("attention_mask")
    if not cache.is_chain:
        attention_mask = tree_attention_mask(
            target.config.get_text_config(decoder=True),
            cache.cache,
            cache.length,
            tree.ancestors,
            tree.depths,
            tree.depths,
            attention_mask,
        )
    elif attention_mask is not None:  # the target's own causal mask will do
        attention_mask = F.pad(attention_mask, (0, tree.num_nodes - 1), value=1)
    room = text.room_for(tree)
    depths = tree.depths if room is None else torch.minimum(tree.depths, room.to(tree.depths.device))
    known_positions = model_kwargs["position_ids"]
    tokens, positions = tree.tokens, known_positions[..., -1:] + depths
    if num_reread > 0:
        tokens = torch.cat([forgotten.to(tokens.device), tokens], dim=-1)
        positions = torch.cat([known_positions[..., -1 - num_reread : -1], positions], dim=-1)
    tree_kwargs = {**model_kwargs, "position_ids": positions, "attention_mask": attention_mask}
    for name in TOKEN_TYPES:
        if (types := tree_kwargs.get(name)) is not None:  # nodes are of the newest token's type
            newest = types[:, -1:].expand(-1, tree.num_nodes)
            tree_kwargs[name] = torch.cat([types[:, -1 - num_reread : -1], newest], dim=-1)
    if isinstance(attention_mask, dict):  # which it passes on for dynamic caches only
        tree_kwargs["attention_mask"] = next(iter(attention_mask.values()))
    inputs = target.prepare_inputs_for_generation(tokens, **tree_kwargs)
    inputs["past_key_values"] = cache.cache
    if isinstance(attention_mask, dict) and inputs.get("attention_mask") is not None:
        inputs["attention_mask"] = attention_mask
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = 0  # all
    passed = inputs.get("position_ids")
    if (
        passed is None
        or not (_is_view_of(passed, positions) or torch.equal(passed, positions))
        or (attention_mask is not None and inputs.get("attention_mask") is None)
    ):
        raise ValueError(
            f"{type(target).__name__}.prepare_inputs_for_generation does not pass on the positions and the mask that it "
            "is given, which a tree needs. Leave `assistant_model` out."
        )
    return inputs


def _is_view_of(tensor, other) -> bool:
    """Whether a tensor is all of another one: to be told without reading either."""
    return tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape and tensor.stride() == other.stride()


def _step_limits(target, settings, cache, model_kwargs, text):
    """The tree settings of one step, cut where a larger tree would be useless or would not be the target's text."""
    limits, num_nodes = dict(settings), settings["num_assistant_tokens"]
    limits["tree_depth"] = min(limits["tree_depth"], num_nodes)
    whole = dict(limits)
    if not cache.is_static:
        limits["tree_depth"] = min(limits["tree_depth"], text.max_length - text.shortest - 1)
    elif cache.room < 1 + num_nodes:
        limits["tree_depth"] = 0

    config = target.config.get_text_config(decoder=True)
    for rope_type, switch in rotary_switches(config):
        # A tree must not reach over the switch, and dynamic scaling, which goes on changing, allows none beyond it.
        room = switch - 1 - int(model_kwargs["position_ids"].max())
        if room >= -1 or rope_type != "longrope":
            limits["tree_depth"] = min(limits["tree_depth"], max(room, 0))
    if (table := position_table(config)) is not None:  # plain decoding may well end before it does
        room = table - 1 - int(model_kwargs["position_ids"].max())
        limits["tree_depth"] = min(limits["tree_depth"], room)
    # In older transformers (5.17) Phi-3 loses its cache at that switch and goes on without: no tree hangs from that.
    if cache.length < text.longest - 1 or cache.to_reread > cache.MOST_TO_REREAD:
        limits["tree_depth"] = 0
    limits["tree_depth"] = max(limits["tree_depth"], 0)

    # Llama 4 scales queries by their index in the input, which is their position only in a chain.
    if getattr(config, "attn_temperature_tuning", False):
        first, last = cache.length + 1, cache.length + 1 + num_nodes
        if first // config.floor_scale != last // config.floor_scale:
            limits["branching_factor"] = 1
    if cache.is_chain:
        limits["branching_factor"] = 1
    if cache.is_static and limits != whole:  # one shape, or none
        limits["tree_depth"] = 0
    return limits

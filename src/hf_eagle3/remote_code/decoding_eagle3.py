# SPDX-License-Identifier: Apache-2.0
"""Lossless tree decoding behind `target.generate(..., assistant_model=draft)`: the loop."""

import time
from dataclasses import dataclass, field, replace

import torch

from .accept_eagle3 import ROW_WISE, Accepted, Sampler, accept, is_one_of, reads_without_sync
from .cache_eagle3 import compiled
from .cuda_eagle3 import CUDNN_ATTENTION, captures_graphs
from .lookup_eagle3 import PromptLookup
from .outputs_eagle3 import ReturnedOutputs
from .policy_eagle3 import Measured, StaticPolicy, tree_settings
from .proposer_eagle3 import Call
from .target_eagle3 import check_call, depends_on_length, gathered_embedding, is_sharded, may_select_rows
from .text_eagle3 import Text
from .tree_eagle3 import DraftTree, Plan
from .verify_eagle3 import INPUTS_BY_TOKEN, Outputs, Verifier


@dataclass
class Eagle3Step:
    """
    A step, of which each list has an entry for each row that was still in the batch.

    Args:
        source (`str`): What proposed: `"draft"`, `"lookup"`, or `"target"` if nothing was there to verify.
        rows (`list[int]`): Which rows of the call these are.
        tokens (`list[list[int]]`): The tree's tokens. The first is the root: the last token that was already written.
        parents (`list[list[int]]`): Index of each node's parent; the root's is 0.
        accepted (`list[list[int]]`): The nodes below the root whose tokens were written, from the root downwards.
        new_tokens (`list[list[int]]`): What was written: the accepted tokens, and the target's own after them.
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
        steps (`list[Eagle3Step]`):
            Each step, the prompt's first, if the generation config of the call or of the assistant has
            `output_steps=True`. The list grows while the call goes on.
    """

    new_tokens: int = 0
    target_forwards: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    plain_steps: int = 0
    lookup_steps: int = 0
    drafted_lengths: list[int] = field(default_factory=list)
    steps: list[Eagle3Step] = field(default_factory=list)

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

    def origins(self, row: int = 0) -> list[tuple[str, int]]:
        """
        Where each new token of a row came from, by `steps`: `("draft", 2)` was drafted at the second level of a tree,
        `("lookup", 5)` was the fifth that was looked up, and `("target", 0)` is the target's own.

        Args:
            row (`int`, *optional*, defaults to `0`): Of the call.

        Raises:
            ValueError: if the call kept no steps.
        """
        if self.new_tokens and not self.steps:
            raise ValueError(
                "This call kept no steps: set `output_steps=True` in its generation config, or the draft's."
            )
        origins = []
        for step in self.steps:
            if row in step.rows:
                i = step.rows.index(row)
                num_accepted = len(step.accepted[i])
                origins += [(step.source, depth) for depth in range(1, 1 + num_accepted)]
                origins += [("target", 0)] * (len(step.new_tokens[i]) - num_accepted)
        return origins


class TreeDecoding:
    r"""
    One call of `generate` with an assistant: decodes as `GenerationMixin._sample` does, several tokens per forward of
    the target.

    At each node of the verified tree the next token is picked from the target's own processed scores, as `_sample`
    picks it. If a child carries that token the walk descends, else the token ends the step. Proposers only decide which
    nodes exist, so greedy text is the target's greedy text, samples follow the target's distribution, and a seed gives
    the sample it gives without an assistant. The rows of a batch advance at their own pace, or in step where that could
    be noticed (see [`Text`]).

    Args:
        assistant (`AssistantMixin`): What proposes.
        target (`PreTrainedModel`): What verifies.
        input_ids (`torch.LongTensor` of shape `(batch_size, prompt_length)`): The prompts.
        logits_processor, stopping_criteria, generation_config, streamer, model_kwargs:
            What `generate` calls its decoding methods with.

    Raises:
        ValueError: if the call asks for what a tree cannot do.
    """

    def __init__(
        self,
        assistant,
        target,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer,
        model_kwargs,
    ):
        own_config = getattr(assistant, "generation_config", None)
        settings = tree_settings(own_config, generation_config)
        self.outputs_steps = any(getattr(config, "output_steps", False) for config in (generation_config, own_config))
        may_replay = assistant.may_replay(target)
        check_call(target, input_ids, generation_config, model_kwargs, may_replay)
        self.target, self.streamer, self.stats = target, streamer, Eagle3GenerationStats()
        self.whole = Plan(
            "draft", settings["tree_depth"], settings["num_assistant_tokens"], settings["branching_factor"]
        )
        self.returned = ReturnedOutputs(generation_config, batch_size=len(input_ids))
        layer_ids = assistant.resolve_aux_layer_ids(target)
        self.verifier = verifier = Verifier(
            target, generation_config, model_kwargs, layer_ids, self.returned, self.whole.num_nodes, may_replay
        )
        outputs, positions, states = verifier.prefill(input_ids)
        cache, embedding = verifier.cache, gathered_embedding(target)

        # Processors and criteria that are not known to look at each row by itself may compare rows, or edit the text.
        may_be_edited = not all(is_one_of(each, ROW_WISE) for each in [*logits_processor, *stopping_criteria])
        self.can_read_padding = 0 <= (generation_config.pad_token_id or 0) < len(embedding.weight)
        in_step = (
            len(input_ids) == 1
            or streamer is not None  # one that raises finds all rows where plain `generate` leaves them
            or may_be_edited
            or not self.can_read_padding
            or cache.is_chain
            or getattr(cache.cache, "_is_user_defined", False)  # who may catch what broke a call off, and crop it
            or depends_on_length(target, input_ids, cache, model_kwargs, stopping_criteria)
        )
        may_retire = not self.returned.wants_dict and may_select_rows(target, cache, model_kwargs, INPUTS_BY_TOKEN)
        self.text = Text(input_ids, stopping_criteria, generation_config, in_step, may_be_edited, may_retire)
        self.sampler = Sampler(
            self.text, logits_processor, stopping_criteria, generation_config, self.returned, streamer
        )

        compile_config = None
        may_compile = cache.is_static and not self.returned.wants_states  # which compiled forwards overwrite
        if may_compile and target._valid_auto_compile_criteria(verifier.inputs, generation_config):
            compile_config = generation_config.compile_config or target._default_compile_config()
            verifier.forward = target.get_compiled_call(compile_config)
            cache.keep_path = compiled(cache.keep_path, assistant, compile_config)
        num_looked_up = min(settings["prompt_lookup_num_tokens"], self.whole.num_nodes)
        # Processes that compute one forward together must agree on its size, and each measures other times.
        self.measured, self.policy = None, StaticPolicy(self.whole, generation_config.do_sample)
        if settings["tree_policy"] == "auto" and not is_sharded(target):
            # Beside a static cache lookup must fill the one shape of trees. Calls that look up are measured apart, since
            # they leave the harder steps to the draft.
            looks_up = num_looked_up >= (self.whole.num_nodes if cache.is_static else 1)
            kind = {
                "do_sample": generation_config.do_sample,
                "reads_draft": reads_without_sync(target.device) and not cache.is_static,
                "has_one_shape": cache.is_static,
                "may_retire": self.text.may_retire,
                "drafts_whole_trees": captures_graphs(target.device) and not cache.is_chain,
            }
            self.measured = Measured(target, assistant, len(input_ids), looks_up, self.whole, *kind.values())
            self.policy = self.measured.policy(self.whole, **kind)
            num_looked_up *= looks_up
        self.proposers = {
            "draft": assistant.proposer(
                Call(
                    target,
                    embedding,
                    self.whole,
                    settings["assistant_confidence_threshold"],
                    self.policy.calibration,
                    cache.capacity if cache.is_static else None,
                    compile_config,
                )
            )
        }
        if self.measured is not None and num_looked_up > 0:
            self.proposers["lookup"] = PromptLookup(num_looked_up, self.policy.matches, len(embedding.weight))
        try:
            self.read_prompt(outputs, positions, states)
        except BaseException:
            self.sampler.noise.rewind(self.text.length)
            raise

    def read_prompt(self, outputs: Outputs, positions: torch.LongTensor, states: torch.FloatTensor | None) -> None:
        """Picks the first token, below the root of a tree that has no other nodes. Proposers observe the prompt."""
        text, verifier = self.text, self.verifier
        mask = verifier.inputs.get("attention_mask")
        first = accept(text, self.sampler, DraftTree.chain(text.ids.new_zeros(text.batch_size, 1)), outputs)
        verifier.extend(outputs, first.counts, first.growth)
        # A prompt that was healed has positions for what it was; padding is not read at all.
        num_read = min(positions.shape[1], text.shortest, *(() if states is None else states.shape[1:2]))
        counts = [num_read] * text.batch_size
        if mask is not None:
            counts = mask[:, -num_read:].bool().sum(dim=1).clamp(min=1).tolist()
        prompt = replace(
            first,
            tokens=text.newest(num_read),
            counts=counts,
            positions=positions[:, -num_read:].expand(text.batch_size, -1),
            states=None if states is None else states[:, -num_read:],
            new_tokens=text.read(list(range(text.batch_size)), text.longest).tolist(),
        )
        for proposer in self.proposers.values():
            proposer.observe(prompt)
        self.last_outputs = outputs
        self.stats.new_tokens += text.batch_size
        self.stats.target_forwards = verifier.num_forwards
        if self.outputs_steps:
            last = slice(max(text.prompt_length - 1, 0), text.prompt_length)  # none, if the prompt is embeddings
            self.note("target", DraftTree.chain(text.ids[:, last]), first)

    def decode(self):
        """Decodes until all rows are finished. Returns what `generate` does."""
        text, verifier, policy = self.text, self.verifier, self.policy
        try:
            verifier.cache.record()
            with CUDNN_ATTENTION.off(), self.target._optimize_model_for_decode():
                while not text.is_complete:
                    self.retire()
                    behind = text.rows_behind(1 + self.whole.depth)
                    plan = verifier.limited(policy.plan(behind, self.proposers.get("lookup")), text)
                    start, num_replayed = time.perf_counter(), verifier.cache.num_replayed
                    tree = self.propose(plan)
                    proposed = time.perf_counter()
                    tree, accepted = self.verify(tree)
                    seconds = proposed - start, time.perf_counter() - proposed
                    policy.record(plan, tree, accepted, behind, *seconds, num_replayed)
                    self.count(plan, tree, accepted)
                    for proposer in self.proposers.values():
                        proposer.observe(accepted)
        except BaseException:
            # Whoever passed the cache and catches this finds in it what the last whole step left.
            verifier.cache.roll_back()
            raise
        else:
            cache = verifier.finish(self.returned, self.last_outputs.of_target)
        finally:
            verifier.cache.release()
            self.sampler.noise.rewind(text.length)
        if self.measured is not None:
            self.measured.keep(policy)
        self.stats.target_forwards = verifier.num_forwards
        if self.streamer is not None:
            self.streamer.end()
        return self.returned.finish(text.sequences(), cache)

    def retire(self) -> None:
        """Finished rows leave the batch, where nobody notices."""
        longest = self.text.longest
        if (staying := self.text.retire()) is not None:
            self.verifier.select(staying, longest - self.text.longest)
            for proposer in self.proposers.values():
                proposer.select(staying)

    def propose(self, plan: Plan) -> DraftTree:
        """The tree of a step: of the planned proposer, or nothing but the root."""
        text, root_tokens = self.text, self.text.newest(1)
        if plan.proposer is None:
            return DraftTree.chain(root_tokens)
        sampler = self.sampler if self.sampler.do_sample else None
        tree = self.proposers[plan.proposer].propose(plan, root_tokens, sampler).to(root_tokens.device)
        if text.pads_finished_rows and self.can_read_padding:
            tree = tree.with_padded_rows(text.is_finished, text.pad_token, plan.depth)
        return tree

    def verify(self, tree: DraftTree) -> tuple[DraftTree, Accepted]:
        """One forward over all nodes of the tree, of which the cache keeps what is accepted."""
        text, verifier = self.text, self.verifier
        outputs = verifier.verify(tree, text)
        may_discard = tree.num_nodes > 1 or verifier.cache.is_static  # whose slots may hold what another tree left
        accepted = accept(text, self.sampler, tree, outputs, may_discard)
        if accepted is None:  # as plain decoding does
            verifier.cache.discard_tree()
            tree = DraftTree.chain(text.newest(1))
            outputs = verifier.verify(tree, text)
            accepted = accept(text, self.sampler, tree, outputs)
        verifier.cache.keep(accepted.nodes, accepted.growth)
        verifier.extend(outputs, accepted.counts, accepted.growth)
        self.last_outputs = outputs
        return tree, accepted

    def count(self, plan: Plan, tree: DraftTree, accepted: Accepted) -> None:
        """Notes how a step went."""
        emitted = [count for count, done in zip(accepted.counts, accepted.was_finished) if count and not done]
        self.stats.new_tokens += sum(emitted)
        self.stats.accepted_lengths += emitted
        self.stats.target_forwards = self.verifier.num_forwards
        if self.outputs_steps:
            self.note("target" if tree.num_nodes == 1 else plan.proposer, tree, accepted)
        if tree.num_nodes == 1:
            self.stats.plain_steps += 1
        elif plan.proposer == "lookup":
            self.stats.lookup_steps += 1
        else:
            self.stats.drafted_lengths += emitted

    def note(self, source: str, tree: DraftTree, accepted: Accepted) -> None:
        """Keeps a step, for whoever asked."""
        new_tokens = [tokens[len(tokens) - count :] for tokens, count in zip(accepted.new_tokens, accepted.counts)]
        below_root = [[node for node in nodes if node > 0] for nodes in accepted.nodes]
        read, _ = tree.on_host()
        self.stats.steps.append(
            Eagle3Step(source, list(self.text.rows), read.tokens, read.parents, below_root, new_tokens)
        )

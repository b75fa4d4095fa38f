# SPDX-License-Identifier: Apache-2.0
"""Lossless tree decoding behind `target.generate(..., assistant_model=draft)`: the loop."""

import copy
import time
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .accept_eagle3 import ROW_WISE, Sampler, accept, is_one_of
from .cache_eagle3 import is_user_defined
from .configuration_eagle3 import tree_settings
from .devices_eagle3 import CUDNN_ATTENTION, captures_graphs, reads_without_sync
from .lookup_eagle3 import PromptLookup
from .outputs_eagle3 import Eagle3GenerationStats, Eagle3Step, ReturnedOutputs, TreeOutputs
from .policy_eagle3 import CallKind, Policy, Sizing, StaticPolicy, policies_of
from .target_eagle3 import check_call, depends_on_length, gathered_table, is_sharded, may_select_rows, table_of
from .text_eagle3 import SampleArguments, Text, pad_token_of
from .tree_eagle3 import Accepted, DraftTree, GenerationCall, Plan, Proposer, check_tree
from .verify_eagle3 import Verifier


class TreeDecoding:
    r"""
    One call of `generate` with an assistant. Decodes as `GenerationMixin._sample` does, several tokens per forward of
    the target: see [`accept`]. Proposers only decide which nodes exist. So greedy text is the target's greedy text, samples
    follow the target's distribution, and a seed gives the sample that it gives without an assistant. The rows of a batch
    advance at their own pace, or in lockstep where the difference could be noticed (see [`Text`]). Raises `ValueError` if a
    tree cannot do what the call asks for.
    """

    def __init__(self, assistant: Any, target: PreTrainedModel, arguments: SampleArguments):
        self.assistant, self.target, self.arguments = assistant, target, arguments
        input_ids, generation_config = arguments.input_ids, arguments.generation_config
        configs = assistant.generation_config, generation_config
        self.settings = settings = tree_settings(*configs)
        self.outputs_steps = any(getattr(config, "output_steps", False) for config in configs)
        self.max_plan = Plan(
            "draft", settings["tree_depth"], settings["num_assistant_tokens"], settings["branching_factor"]
        )
        self.num_looked_up = min(settings["prompt_lookup_num_tokens"], self.max_plan.num_nodes)
        may_replay = assistant.may_replay(target)
        check_call(target, input_ids, generation_config, arguments.model_kwargs, may_replay)
        self.returned = ReturnedOutputs(generation_config, batch_size=len(input_ids))
        layer_ids, num_nodes = assistant.resolve_aux_layer_ids(target), self.max_plan.num_nodes
        self.verifier = Verifier(target, arguments, layer_ids, self.returned, num_nodes, may_replay)
        self.stats = Eagle3GenerationStats()

    def decode(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decodes until all rows are finished. Returns what `generate` returns."""
        verifier = self.verifier
        prompt = verifier.prefill(self.arguments.input_ids)
        self.embedding = gathered_table(table_of(self.target))
        self.text = text = self._make_text()
        self.sampler = Sampler(text, self.arguments, self.returned, prompt.logits.shape[-1])
        self._compile()
        policy, cache = self._make_policy(), verifier.cache
        self.proposers = self._make_proposers(policy)
        lookup: Any = self.proposers.get("lookup")
        try:
            cache.record()
            self.accept_prompt(prompt)
            del prompt  # its hidden states, and perhaps logits, would take memory until the end
            with CUDNN_ATTENTION.off(), self.target._optimize_model_for_decode():
                while not text.is_complete:
                    self.retire()
                    bottlenecks = text.bottlenecks(reach=1 + self.max_plan.depth)
                    plan = verifier.limit(policy.plan(bottlenecks, lookup), text)
                    start, num_replayed = time.perf_counter(), cache.num_replayed
                    tree = self.propose(plan)
                    proposed = time.perf_counter()
                    tree, accepted = self.verify(tree)
                    seconds = proposed - start, time.perf_counter() - proposed
                    policy.record(plan, tree, accepted, bottlenecks, *seconds, num_replayed)
                    self.update_stats(plan, tree, accepted, draft_seconds=seconds[0])
                    for proposer in self.proposers.values():
                        proposer.observe(accepted)
        except BaseException:
            cache.roll_back()  # the caller may go on with its cache
            raise
        else:
            returned_cache = verifier.finish(self.returned)
            for proposer in self.proposers.values():
                proposer.finish()
        finally:
            cache.release()
            self.sampler.noise.rewind(text.longest_of_call)
        if isinstance(policy, Policy):
            policies_of(self.target, self.assistant)[policy.kind] = policy
        self.stats.target_forwards = verifier.num_forwards
        if self.arguments.streamer is not None:
            self.arguments.streamer.end()
        return self.returned.finish(text.sequences(), returned_cache)

    def _make_text(self) -> Text:
        arguments, cache, inputs = self.arguments, self.verifier.cache, self.verifier.inputs
        # Only these are known to read each row alone. Others may compare rows, and edit or keep ids.
        readers = [*arguments.logits_processor, *arguments.stopping_criteria]
        exposes_ids = not all(is_one_of(each, ROW_WISE) for each in readers)
        self.can_read_padding = 0 <= pad_token_of(arguments.generation_config) < len(self.embedding.weight)
        in_lockstep = (
            len(arguments.input_ids) == 1
            or arguments.streamer is not None  # if it raises, it finds all rows where plain `generate` leaves them
            or exposes_ids
            or not self.can_read_padding
            or cache.is_chain
            or is_user_defined(cache.cache)  # the caller may catch an error and crop it
            or depends_on_length(self.target, arguments.input_ids, cache, inputs, arguments.stopping_criteria)
        )
        may_retire = not self.returned.wants_dict and may_select_rows(self.target, cache, inputs)
        return Text(arguments, in_lockstep, exposes_ids, may_retire)

    def _compile(self) -> None:
        """Compiles the target's forward where `_sample` would."""
        target, verifier, config = self.target, self.verifier, self.arguments.generation_config
        # Asked in any case, because it warns if a `compile_config` has no effect.
        can_compile = target._valid_auto_compile_criteria(verifier.inputs, config)
        # Compiled forwards would overwrite hidden states that are collected.
        if can_compile and verifier.cache.is_static and "hidden_states" not in self.returned.collected:
            verifier.forward = target.get_compiled_call(config.compile_config or target._default_compile_config())

    def _make_policy(self) -> StaticPolicy:
        cache, device, max_plan = self.verifier.cache, self.target.device, self.max_plan
        # Processes that run one forward together must agree on its size, but would measure different times.
        if self.settings["tree_policy"] == "static" or is_sharded(self.target):
            return StaticPolicy(max_plan, self.sampler.do_sample)
        sizing: Sizing = "depth"
        if self.verifier.has_fixed_shapes:
            sizing = "fixed"
        elif reads_without_sync(device):
            sizing = "priced"
        elif self.assistant.drafts_in_one_pass or (captures_graphs(device) and not cache.is_chain):
            sizing = "whole"
        kind = CallKind(
            max_plan,
            num_rows=self.text.num_rows,
            do_sample=self.sampler.do_sample,
            looks_up=self.num_looked_up >= (max_plan.num_nodes if sizing == "fixed" else 1),
            sizing=sizing,
            may_retire=self.text.may_retire,
            drafts_in_one_pass=self.assistant.drafts_in_one_pass,
            exposes_ids=self.text.exposes_ids,
            is_static=cache.is_static,
        )
        known = policies_of(self.target, self.assistant).get(kind)
        return Policy(kind) if known is None else copy.deepcopy(known)

    def _make_proposers(self, policy: StaticPolicy) -> dict[str, Proposer]:
        has_fixed_shapes = self.verifier.has_fixed_shapes
        call = GenerationCall(
            target=self.target,
            embedding=self.embedding,
            max_plan=self.max_plan,
            threshold=0.0 if has_fixed_shapes else self.settings["assistant_confidence_threshold"],
            calibration=policy.calibration,
            capacity=self.verifier.cache.capacity if has_fixed_shapes else None,
        )
        # If the target reads single tokens only, a draft would read the prompt for nothing.
        proposers: dict[str, Proposer] = (
            {} if self.verifier.takes_single_tokens else {"draft": self.assistant.proposer(call)}
        )
        if isinstance(policy, Policy) and policy.kind.looks_up:
            proposers["lookup"] = PromptLookup(self.num_looked_up, policy.matches, len(self.embedding.weight))
        return proposers

    def accept_prompt(self, prompt: TreeOutputs) -> None:
        """Picks the first token at a root without nodes below it. Proposers observe the prompt."""
        text, verifier = self.text, self.verifier
        mask = verifier.inputs.get("attention_mask")
        root = DraftTree.chain(text.ids.new_zeros(text.batch_size, 1))
        first = accept(text, self.sampler, root, prompt._replace(positions=prompt.positions[:, -1:], states=None))
        assert first is not None
        verifier.extend(prompt, first.counts, first.batch_growth)
        # Token healing leaves more positions than tokens. Padding is not read.
        positions, states = prompt.positions, prompt.states
        num_read = min(positions.shape[1], text.shortest, *(() if states is None else states.shape[1:2]))
        counts = [num_read] * text.batch_size
        if mask is not None:
            counts = mask[:, -num_read:].bool().sum(dim=1).clamp(min=1).tolist()
        tokens = text.newest(num_read)
        if states is not None:  # a prompt that was read as embeddings may have placeholders without one
            tokens = tokens.where((tokens >= 0) & (tokens < len(self.embedding.weight)), 0)
        accepted = replace(
            first,
            tokens=tokens,
            counts=counts,
            positions=positions[:, -num_read:].expand(text.batch_size, -1),
            states=None if states is None else states[:, -num_read:],
            new_tokens=text.read(list(range(text.batch_size)), text.longest).tolist(),
        )
        for proposer in self.proposers.values():
            proposer.observe(accepted)
        self.stats.new_tokens += text.batch_size
        if self.outputs_steps:
            last = slice(max(text.prompt_length - 1, 0), text.prompt_length)  # empty if the prompt is embeddings
            self.append_step("target", DraftTree.chain(text.ids[:, last]), first)

    def retire(self) -> None:
        """Removes finished rows from the batch if nothing can notice."""
        longest = self.text.longest
        if (staying := self.text.retire()) is not None:
            self.verifier.select(staying, longest - self.text.longest)
            for proposer in self.proposers.values():
                proposer.select(staying)

    def propose(self, plan: Plan) -> DraftTree:
        """The planned proposer's tree, or the root alone."""
        text, root_tokens = self.text, self.text.newest(1)
        if plan.proposer is None:
            return DraftTree.chain(root_tokens)
        sampler = self.sampler if self.sampler.do_sample else None
        tree = self.proposers[plan.proposer].propose(plan, root_tokens, sampler)
        if plan.proposer == "draft" and not isinstance(self.assistant, PreTrainedModel):
            check_tree(tree, plan, root_tokens)
        tree = tree.to(root_tokens.device)
        if text.pads_finished_rows and self.can_read_padding:
            tree = tree.with_padded_rows(text.is_finished, text.pad_token, plan.depth)
        return tree

    def verify(self, tree: DraftTree, may_discard: bool = True) -> tuple[DraftTree, Accepted]:
        """Runs one forward over all nodes of the tree. The cache keeps what is accepted."""
        text, verifier = self.text, self.verifier
        outputs = verifier.verify(tree, text)
        # Slots may hold another tree's NaNs. Replayed tokens may get those of the root.
        may_discard &= tree.num_nodes > 1 or verifier.cache.is_static or outputs.num_replayed > 0
        accepted = accept(text, self.sampler, tree, outputs, may_discard)
        if accepted is None:  # decode plainly instead
            verifier.cache.discard_tree()
            verifier.replay()
            return self.verify(DraftTree.chain(text.newest(1)), may_discard=False)
        verifier.cache.keep(accepted.nodes, accepted.batch_growth)
        verifier.extend(outputs, accepted.counts, accepted.batch_growth)
        return tree, accepted

    def update_stats(self, plan: Plan, tree: DraftTree, accepted: Accepted, draft_seconds: float) -> None:
        """Updates the statistics."""
        stats, source = self.stats, plan.proposer if plan.proposer and tree.num_nodes > 1 else "target"
        written = [num_written for num_written in accepted.num_written if num_written]
        stats.new_tokens += sum(written)
        stats.accepted_lengths += written
        stats.target_forwards = self.verifier.num_forwards
        if plan.proposer == "draft":
            stats.draft_seconds += draft_seconds
        if source == "target":
            stats.plain_steps += 1
        elif source == "lookup":
            stats.lookup_steps += 1
        else:
            stats.drafted_lengths += written
        if self.outputs_steps:
            self.append_step(source, tree, accepted)

    def append_step(self, source: str, tree: DraftTree, accepted: Accepted) -> None:
        """Appends a step to the statistics."""
        new_tokens = [tokens[:num] for tokens, num in zip(accepted.new_tokens, accepted.num_written)]
        below_root = [path[1:num] for path, num in zip(accepted.nodes, accepted.num_written)]
        tokens, parents, _ = tree.on_host()
        self.stats.steps.append(Eagle3Step(source, list(self.text.rows), tokens, parents, below_root, new_tokens))

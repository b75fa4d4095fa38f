"""
On-policy distillation (Draft-OPD, https://huggingface.co/papers/2605.29343): the draft learns from texts that it and its
target write together, and from what the target says about the nodes of its trees, rejected ones included.

A node counts by the probability that the target, sampling at temperature 1, would come to it. The nodes that it did
come to are text, and count as such.
"""

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..data import documents_of_row, prompt_of
from ..remote_code.assistant_eagle3 import AssistantMixin
from ..remote_code.decoding_eagle3 import TreeDecoding
from ..remote_code.modeling_eagle3 import DraftModel
from ..remote_code.outputs_eagle3 import select_hidden_states
from .losses import log_sum_exp
from .models import default_generation


# Nodes that are less probable are not learned from.
LEAST_PROBABILITY = 0.05


class TreeNodes(NamedTuple):
    """
    Nodes of the trees of a rollout; parents precede children.

    Args:
        rows (`torch.LongTensor` of shape `(N,)`): Whose text they would continue.
        roots (`torch.LongTensor` of shape `(N,)`): The position before that of the token that their tree hangs from.
        depths (`torch.LongTensor` of shape `(N,)`): Distance from that token.
        parents (`torch.LongTensor` of shape `(N,)`): Among these; -1 if that token is the parent.
        tokens (`torch.LongTensor` of shape `(N,)`): Target token ids.
        weights (`torch.FloatTensor` of shape `(N,)`): The target's probability of the path to them; 0 if it went there.
        states (`torch.FloatTensor` of shape `(N, H)`): What the target's head read of them.
    """

    rows: torch.LongTensor
    roots: torch.LongTensor
    depths: torch.LongTensor
    parents: torch.LongTensor
    tokens: torch.LongTensor
    weights: torch.FloatTensor
    states: torch.FloatTensor


class RecordingAssistant(AssistantMixin):
    """
    A draft of which all that is drafted in a call of `generate`, and what the target says about it, is kept.

    Args:
        draft ([`DraftModel`]): What proposes, a whole tree in every step.
    """

    def __init__(self, draft: DraftModel):
        self.draft, self.steps, self.num_nodes = draft, [], 0
        self.generation_config = copy.deepcopy(draft.generation_config)
        self.generation_config.tree_policy, self.generation_config.assistant_confidence_threshold = "static", 0.0
        self.proposer, self.resolve_aux_layer_ids = draft.proposer, draft.resolve_aux_layer_ids
        self.validate_target, self.may_replay = draft.validate_target, draft.may_replay
        self.decoding_class = RecordedDecoding

    def nodes(self) -> TreeNodes | None:
        """What was recorded, if anything that is worth learning from was drafted."""
        return TreeNodes(*map(torch.cat, zip(*self.steps))) if self.num_nodes else None


class RecordedDecoding(TreeDecoding):
    """[`TreeDecoding`] for a [`RecordingAssistant`]."""

    def __init__(self, assistant: RecordingAssistant, target, *args):
        super().__init__(assistant, target, *args)
        self.assistant, verifier = assistant, self.verifier
        verifier.inputs["output_hidden_states"] = select_hidden_states(
            [*verifier.layer_ids, verifier.config.num_hidden_layers]
        )

    def verify(self, tree):
        tree, accepted = super().verify(tree)
        if tree.num_nodes == 1:
            return tree, accepted
        outputs, rows = self.last_outputs, torch.tensor(self.text.rows)[:, None]
        logits, device = outputs.logits, outputs.logits.device
        tree, states = tree.to(device), outputs.of_target.hidden_states[-1][:, -tree.num_nodes :].to(device)
        # What the target says of each node at its parent.
        parents, tokens = tree.parents, tree.tokens.clamp(max=logits.shape[-1] - 1)
        log_probs = logits[torch.arange(len(logits), device=device)[:, None], parents, tokens].float()
        log_probs -= log_sum_exp(logits).gather(1, parents)
        log_probs[:, 0] = 0.0
        weights = (tree.ancestors.float() @ log_probs[..., None]).squeeze(2).exp()  # of paths from the root
        positions = outputs.positions.to(device).expand_as(weights)
        kept = weights >= LEAST_PROBABILITY
        kept[:, 0] = False
        kept[[row for row, done in enumerate(accepted.was_finished) if done]] = False
        for row, nodes in enumerate(accepted.nodes):
            weights[row, nodes] = 0.0
        places = torch.full_like(parents, -1)
        places[kept] = torch.arange(int(kept.sum()), device=device) + self.assistant.num_nodes
        self.assistant.num_nodes += int(kept.sum())
        of_rows = (each.to(device).expand_as(kept) for each in (rows, positions[:, :1] - 1))
        whole = (*of_rows, tree.depths, places.gather(1, parents), tree.tokens, weights, states)
        self.assistant.steps.append([each[kept] for each in whole])
        return tree, accepted


@torch.no_grad()
def roll_out(
    target: PreTrainedModel,
    draft: DraftModel,
    prompts: Sequence[torch.LongTensor],
    pad_token_id: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> tuple[list[torch.LongTensor], TreeNodes | None, list[int]]:
    """
    Continues prompts by `target.generate`, assisted by the draft.

    Args:
        target (`PreTrainedModel`), draft ([`DraftModel`]): The models; of the target's `generation_config` only the tokens
            at which texts end count.
        prompts (sequence of `torch.LongTensor` of shape `(L,)`): Token ids.
        pad_token_id (`int`): For shorter prompts and texts.
        max_new_tokens (`int`): Length of the continuations.
        temperature (`float`): 0 for greedy ones.
        seed (`int`): For others.

    Returns:
        `tuple`: The texts, of different lengths; the nodes; and how many tokens each verification emitted in each row.
    """
    recorder, sampling = RecordingAssistant(draft), {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    input_ids = pad_sequence(prompts, batch_first=True, padding_value=pad_token_id, padding_side="left")
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=input_ids.device)
    mask = torch.arange(-input_ids.shape[1], 0, device=input_ids.device) >= -lengths[:, None]
    was_training = draft.training
    draft.eval()
    with torch.random.fork_rng(), default_generation(target):
        torch.manual_seed(seed)
        try:
            sequences = target.generate(
                input_ids,
                attention_mask=mask.long(),
                assistant_model=recorder,
                max_new_tokens=max_new_tokens,
                pad_token_id=pad_token_id,
                **sampling,
            )
        finally:
            draft.train(was_training)
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    texts = []
    for prompt, new_tokens in zip(prompts, sequences[:, input_ids.shape[1] :].tolist()):
        length = next((index + 1 for index, token in enumerate(new_tokens) if token in ends), len(new_tokens))
        texts.append(torch.cat([prompt, prompt.new_tensor(new_tokens[:length])]))
    return texts, recorder.nodes(), recorder.last_generation.accepted_lengths


def joined(groups: Sequence[tuple[list[int], TreeNodes]]) -> TreeNodes | None:
    """The nodes of several calls of [`roll_out`], each with the numbers that its rows have among all."""
    parts, num_nodes = [], 0
    for rows, nodes in groups:
        numbers = torch.tensor(rows, device=nodes.rows.device)
        parents = torch.where(nodes.parents < 0, -1, nodes.parents + num_nodes)
        parts.append(nodes._replace(rows=numbers[nodes.rows], parents=parents))
        num_nodes += len(nodes.rows)
    return TreeNodes(*map(torch.cat, zip(*parts))) if parts else None


def rollout_batch(rows: Sequence[int], texts, labels, nodes: TreeNodes | None, pad_token_id: int) -> dict:
    """
    Some texts of a rollout as a batch to learn from.

    Args:
        rows (sequence of `int`): Which texts.
        texts, labels (lists of `torch.LongTensor` of shape `(L,)`): All of the rollout.
        nodes (`TreeNodes`, *optional*): All of the rollout.
        pad_token_id (`int`): For shorter texts.

    Returns:
        `dict`: `input_ids`, `attention_mask` and `labels`, padded at the right, and as `tree_levels`, for each level of the
        trees, `tokens`, `parents`, `roots` and `weights` as [`~hf_eagle3.training.ttt.TreeLevel`] has them, and `states`
        `(B, M, H)`.
    """

    def pad(tensors, value):
        return pad_sequence(tensors, batch_first=True, padding_value=value)

    batch = {
        "input_ids": pad([texts[row] for row in rows], pad_token_id),
        "attention_mask": pad([torch.ones_like(texts[row]) for row in rows], 0),
        "labels": pad([labels[row] for row in rows], -100),
        "tree_levels": [],
    }
    if nodes is None:
        return batch
    places = torch.zeros_like(nodes.tokens)
    for depth in range(1, 1 + int(nodes.depths.max())):
        of_rows = [((nodes.depths == depth) & (nodes.rows == row)).nonzero().squeeze(1) for row in rows]
        if not any(map(len, of_rows)):
            break
        for index in of_rows:
            places[index] = torch.arange(len(index), device=index.device)
        index = pad(of_rows, -1)
        is_node, index = index >= 0, index.clamp(min=0)
        parents = nodes.roots[index] if depth == 1 else places[nodes.parents[index].clamp(min=0)]
        level = {"tokens": nodes.tokens[index], "parents": parents, "roots": nodes.roots[index]}
        level = {name: each.masked_fill(~is_node, 0) for name, each in level.items()}
        level |= {"weights": nodes.weights[index].masked_fill(~is_node, 0), "states": nodes.states[index]}
        batch["tree_levels"].append(level)
    return batch


class Rollouts:
    """
    Batches to learn from that the draft of a trainer and its target write, for some optimizer steps at once.

    Args:
        trainer ([`Eagle3Trainer`]): The trainer.
    """

    def __init__(self, trainer):
        self.trainer, self.pending = trainer, []
        self.accepted = torch.zeros(2, dtype=torch.double)  # tokens, and verifications that emitted them

    def in_place_of_some(self, batches: list[dict]) -> list[dict]:
        """
        The batches of an optimizer step, `rollout_share` of them rollouts.

        Args:
            batches (`list[dict]`): Those of the data.
        """
        args, first = self.trainer.args, self.trainer.state.global_step * self.trainer.args.gradient_accumulation_steps
        batches, share = list(batches), args.rollout_share
        for place, number in enumerate(range(first, first + len(batches))):
            if int((number + 1) * share) > int(number * share):
                if not self.pending:
                    self.roll_out(batches[place]["input_ids"].numel())
                batches[place] = self.pending.pop(0)
        return batches

    def roll_out(self, batch_tokens: int) -> None:
        """Writes batches of so many tokens, from prompts of the training data that process and optimizer step choose."""
        trainer, args = self.trainer, self.trainer.args
        process, step = trainer.accelerator.process_index, trainer.state.global_step
        choose = random.Random(f"{args.seed} {step} {process}")
        num_batches = max(round(args.rollout_interval * args.gradient_accumulation_steps * args.rollout_share), 1)
        prompts, labels, batches = [], [], []
        for _ in range(num_batches):
            num_tokens, rows = 0, []
            while num_tokens < batch_tokens:
                documents = documents_of_row(trainer.train_dataset[choose.randrange(len(trainer.train_dataset))])
                document = documents[choose.randrange(len(documents))]
                prompt = prompt_of(document)[0].to(trainer.target_model.device)
                known = prompt.new_tensor(document["labels"][: len(prompt)])
                longest = [length for length in (args.max_length, trainer.num_positions) if length is not None]
                room = min(longest) - args.rollout_max_new_tokens if longest else len(prompt)
                rows.append(len(prompts))
                prompts.append(prompt[-room:])  # what is to be continued is at the end
                labels.append(known[-room:])
                num_tokens += len(prompts[-1]) + args.rollout_max_new_tokens
            batches.append(rows)
        tokenizer = trainer.processing_class
        pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        texts, nodes, draft = [None] * len(prompts), [], trainer._whole_draft()
        # Alike in length, so that there is little padding.
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        for start in range(0, len(order), args.rollout_batch_size):
            group = order[start : start + args.rollout_batch_size]
            of_group, nodes_of_group, accepted_lengths = roll_out(
                trainer.target_model,
                draft,
                [prompts[index] for index in group],
                pad_token_id,
                args.rollout_max_new_tokens,
                args.rollout_temperature,
                seed=choose.randrange(2**32),
            )
            for index, text in zip(group, of_group):
                texts[index] = text
            nodes += [] if nodes_of_group is None else [(group, nodes_of_group)]
            self.accepted += torch.tensor([sum(accepted_lengths), len(accepted_lengths)])
        labels = [torch.cat([known, text[len(known) :]]) for known, text in zip(labels, texts)]
        nodes = joined(nodes)
        self.pending += [rollout_batch(rows, texts, labels, nodes, pad_token_id) for rows in batches]

    def pop_metrics(self) -> dict[str, float]:
        """The acceptance length of rollouts since it was last asked for, over all processes."""
        accelerator = self.trainer.accelerator
        accepted = self.accepted.to(accelerator.device, self.trainer._sum_dtype)
        num_tokens, num_verifications = accelerator.reduce(accepted, "sum").tolist()
        self.accepted.zero_()
        return {"rollout_acceptance_length": num_tokens / num_verifications} if num_verifications else {}

    def forget(self) -> None:
        """Drops what was rolled out and counted."""
        self.pending.clear()
        self.accepted.zero_()

    def save(self, checkpoint: str | Path) -> None:
        """Keeps what is still to be learned from beside a checkpoint."""
        torch.save(self.pending, self.file(checkpoint))

    def load(self, checkpoint: str | Path) -> None:
        """Goes on with what was kept; if a process was not there then, all begin with nothing, and roll out together."""
        if all(gather_object([self.file(checkpoint).exists()])):
            self.pending = torch.load(self.file(checkpoint), map_location="cpu", weights_only=True)

    def file(self, checkpoint: str | Path) -> Path:
        return Path(checkpoint, f"rollouts_{self.trainer.accelerator.process_index}.pt")

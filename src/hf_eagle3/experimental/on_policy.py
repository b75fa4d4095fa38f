"""
On-policy distillation (Draft-OPD, https://huggingface.co/papers/2605.29343): the draft learns from texts that it and its
target write together, and from what the target predicts at the nodes of its trees, rejected ones included.

The weight of a node is the probability that the target, sampling at temperature 1, goes there. Nodes where it did go are
part of the text, and are learned with the text.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel

from ..data import documents_of_row, num_positions, prompt_of
from ..remote_code.modeling_eagle3 import DraftModel
from ..remote_code.target_eagle3 import is_sharded
from ..remote_code.text_eagle3 import take_rows
from ..training import Eagle3Trainer, Eagle3TrainingArguments, FeatureStore
from ..training.arguments import check_integers, check_not_negative, check_shares
from ..training.losses import DraftLoss, LossType, probabilities
from ..training.metrics import sum_dtype
from ..training.ttt import MAX_LOGITS, TreeTTTCache, TTTBatch, TTTCache, TTTOutput, in_pieces, ttt_loss, ttt_unroll
from .recording import TreeNodes, joined, roll_out, rollout_batch


@dataclass
class OnPolicyTrainingArguments(Eagle3TrainingArguments):
    """
    Configuration of [`OnPolicyTrainer`].

    Args:
        rollout_share (`float`, *optional*, defaults to `0.25`): The share of batches that are rollouts.
        rollout_start (`float`, *optional*, defaults to `0.5`): The share of training after which rollouts begin.
        rollout_interval (`int`, *optional*, defaults to `16`):
            Optimizer steps per round of rollouts. Long rounds are faster, and their draft is older.
        rollout_batch_size (`int`, *optional*, defaults to `64`):
            Texts per call of `generate`, at most. Lower it if their cache does not fit into memory.
        rollout_temperature (`float`, *optional*, defaults to `1.0`): The sampling temperature; 0 for greedy texts.
        rollout_max_new_tokens (`int`, *optional*, defaults to `128`):
            The length of continuations. Prompts are cut to what `max_length` leaves.
        rollout_rejected_weight (`float`, *optional*, defaults to `1.0`):
            The weight of rejected nodes, times the target's probability of the path to them; 0 leaves them out.
    """

    FIXED_ON_RESUME = (
        *Eagle3TrainingArguments.FIXED_ON_RESUME,
        "rollout_interval",
        "rollout_max_new_tokens",
        "rollout_rejected_weight",
        "rollout_share",
        "rollout_start",
        "rollout_temperature",
    )

    # Parameters that control rollouts
    rollout_share: float = field(default=0.25, metadata={"help": "The share of batches that are rollouts."})
    rollout_start: float = field(default=0.5, metadata={"help": "The share of training after which rollouts begin."})
    rollout_interval: int = field(default=16, metadata={"help": "Optimizer steps per round of rollouts."})
    rollout_batch_size: int = field(default=64, metadata={"help": "Texts per call of `generate`, at most."})
    rollout_temperature: float = field(
        default=1.0, metadata={"help": "The sampling temperature of rollouts; 0 for greedy texts."}
    )
    rollout_max_new_tokens: int = field(default=128, metadata={"help": "The length of continuations."})
    rollout_rejected_weight: float = field(
        default=1.0,
        metadata={"help": "The weight of rejected nodes, times the target's probability of the path to them."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, rollout_batch_size=1, rollout_interval=1, rollout_max_new_tokens=1)
        check_shares(self, "rollout_share", "rollout_start")
        check_not_negative(self, "rollout_temperature", "rollout_rejected_weight")
        if self.max_length is not None and self.rollout_max_new_tokens >= self.max_length:
            raise ValueError(
                f"`rollout_max_new_tokens` is {self.rollout_max_new_tokens}, which leaves no room for prompts within "
                f"`max_length={self.max_length}`. Lower it, or raise `max_length`."
            )


class OnPolicyTrainer(Eagle3Trainer):
    """
    An [`Eagle3Trainer`] that takes some batches from rollouts. It refuses streams, stored features, and targets that
    several processes share.

    Checkpoints keep batches that are still to be learned in `rollouts_<process>.pt`, so resumed training goes on with
    them. The log has `rollout_acceptance_length`.

    Args:
        args, kwargs: The arguments of [`Eagle3Trainer`], with `args` of class [`OnPolicyTrainingArguments`].
    """

    _args_class = OnPolicyTrainingArguments

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rollouts = Rollouts(self)

    def _image_reader(self, *args: Any) -> str:
        return "but `OnPolicyTrainer` writes rollouts from texts alone. Use `Eagle3Trainer`, or remove the images"

    def _check_sources(
        self,
        args: OnPolicyTrainingArguments,
        target_model: PreTrainedModel,
        train_dataset: Dataset | IterableDataset | FeatureStore | None,
    ) -> None:
        super()._check_sources(args, target_model, train_dataset)
        reason, positions = None, num_positions(target_model)
        if isinstance(train_dataset, FeatureStore):
            reason = "training from stored features does not run the target"
        elif isinstance(train_dataset, IterableDataset):
            reason = "it chooses prompts by their numbers, which the rows of a stream do not have"
        elif is_sharded(target_model):
            reason = "each process writes its own texts, and processes that share a target cannot do that"
        if reason is not None:
            raise ValueError(f"`OnPolicyTrainer` cannot train here: {reason}. Use `Eagle3Trainer`.")
        if positions is not None and args.rollout_max_new_tokens >= positions:
            raise ValueError(
                f"`rollout_max_new_tokens` is {args.rollout_max_new_tokens}, but the target has a table of {positions} "
                "positions, which leaves no room for prompts. Lower it."
            )

    @property
    def learns_from_trees(self) -> bool:
        """Whether the draft unrolls token by token, so that it can be unrolled down a tree."""
        by_tokens = not self.draft.config.is_parallel and not hasattr(self.draft, "unroll")
        return by_tokens and self.args.rollout_rejected_weight > 0

    def _resume(self, checkpoint: str) -> None:
        super()._resume(checkpoint)
        self.rollouts.load(checkpoint)

    def _save_rng_state(self, output_dir: str) -> None:
        self.rollouts.save(output_dir)
        super()._save_rng_state(output_dir)

    def _forget_batches(self) -> None:
        super()._forget_batches()
        self.rollouts.forget()

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict], num_batches: int, device: torch.device
    ) -> tuple[list[dict], torch.Tensor]:
        batches, num_rows = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.progress < self.args.rollout_start:
            return batches, num_rows
        batches = self.rollouts.in_place_of_some(batches)
        return batches, self._get_num_items_in_batch(batches, device)

    def target_features(self, inputs: dict[str, torch.Tensor]) -> "TreeBatch":
        batch = super().target_features(inputs)
        levels, token_ids = inputs.get("tree_levels", ()) if self.learns_from_trees else (), self.draft.draft_token_ids
        tree_levels = []
        for level in levels[: self.num_ttt_steps - 1]:
            logits, mass, _ = self.target_states.distributions(level["states"], token_ids)
            weights = level["weights"] * self.args.rollout_rejected_weight
            tree_levels.append(TreeLevel(level["tokens"], level["parents"], level["roots"], weights, logits, mass))
        return TreeBatch(**vars(batch), tree_levels=tree_levels)

    def _unrolled_loss(self, draft: DraftModel, batch: TTTBatch, steps: int, **shares: Any) -> TTTOutput:
        if not isinstance(batch, TreeBatch) or not batch.tree_levels:
            return super()._unrolled_loss(draft, batch, steps, **shares)
        return on_policy_loss(draft, batch, steps, self.args.loss_type, **shares)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs | self.rollouts.pop_metrics() if "loss" in logs else logs, start_time)


class TreeLevel(NamedTuple):
    """
    Nodes at one depth of the trees of a rollout. The tree below row `t` has the token at `t + 1` as its root.

    Args:
        tokens (`torch.LongTensor` of shape `(B, M)`): Target token ids.
        parents (`torch.LongTensor` of shape `(B, M)`): Places in the level above; in the first level, rows of the text.
        roots (`torch.LongTensor` of shape `(B, M)`): Rows of the text.
        weights (`torch.FloatTensor` of shape `(B, M)`): The weights of their losses; 0 where there is no node.
        target_logits (`torch.FloatTensor` of shape `(B, M, draft_vocab_size)`):
            The target's logits on the draft vocabulary.
        target_mass (`torch.FloatTensor` of shape `(B, M)`): The target's probability of the draft vocabulary.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    roots: torch.Tensor
    weights: torch.Tensor
    target_logits: torch.Tensor
    target_mass: torch.Tensor


@dataclass
class TreeBatch(TTTBatch):
    """
    A [`TTTBatch`] with trees.

    Args:
        tree_levels (sequence of `TreeLevel`, *optional*): The levels of its trees, from the first on.
    """

    tree_levels: Sequence[TreeLevel] = ()


def tree_unroll(
    draft: DraftModel, batch: TreeBatch, hidden_states: torch.Tensor, cache: TTTCache
) -> Iterator[torch.Tensor]:
    """
    Unrolls the draft down the trees of a batch, as it drafted them. Yields the input of its head for each level,
    `(B, M, H)`.

    Args:
        draft ([`DraftModel`]): The draft.
        batch (`TreeBatch`): The batch.
        hidden_states (`torch.FloatTensor` of shape `(B, L, H)`): The draft's states of step 0.
        cache (`TTTCache`): The cache of the text, after step 0.
    """
    tree_cache, masks = TreeTTTCache(cache), dict.fromkeys(draft.config.transformer_layer_config.layer_types)
    for depth, level in enumerate(batch.tree_levels, start=1):
        tree_cache.descend(level.parents, level.roots)
        normed, hidden_states = draft.step(
            inputs_embeds=draft.embed(level.tokens),
            hidden_states=take_rows(hidden_states, level.parents),
            attention_mask=masks,
            position_ids=batch.position_ids.gather(1, level.roots) + depth,
            cache=tree_cache,
        )
        yield normed


def on_policy_loss(
    draft: DraftModel,
    batch: TreeBatch,
    steps: int,
    loss_type: LossType = "kl",
    row_share: float = 1.0,
    num_sampled: int | None = None,
) -> TTTOutput:
    """
    Returns [`~hf_eagle3.training.ttt.ttt_loss`] of the text. The losses of nodes at depth `s` are added to those of step
    `s`, by their weights and over the whole draft vocabulary.
    """
    cache = TTTCache(batch.documents)
    text = ttt_unroll(draft, batch, steps, row_share, cache)
    first = next(text)
    assert first.hidden_states is not None  # `ttt_unroll` yields them
    unroll = chain([first], text)
    output = ttt_loss(draft, batch, steps, loss_type, num_sampled=num_sampled, unroll=unroll)

    def score(head: Callable, states: torch.Tensor, weights: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        return (DraftLoss.apply(head(states), *targets, loss_type) * weights).sum()

    losses = [output.loss_sums.new_zeros(())]
    for level, states in zip(batch.tree_levels, tree_unroll(draft, batch, first.hidden_states, cache)):
        probs, entropy = probabilities(level.target_logits)
        tensors = (states, level.weights, probs, level.target_mass, entropy)
        losses.append(sum(in_pieces(score, MAX_LOGITS, probs.shape[-1], draft.lm_head, *tensors)))
    output.loss_sums = output.loss_sums + F.pad(torch.stack(losses), (0, steps - len(losses)))
    return output


class Rollouts:
    """
    Batches that a trainer's draft and target write, for several optimizer steps at once.

    Args:
        trainer ([`OnPolicyTrainer`]): The trainer.
    """

    def __init__(self, trainer: OnPolicyTrainer):
        self.trainer = trainer
        self.pending: list[dict[str, Any]] = []
        self.accepted = torch.zeros(2, dtype=torch.double)  # emitted tokens, verifications

    def in_place_of_some(self, batches: list[dict]) -> list[dict]:
        """
        Returns the batches of an optimizer step, with `rollout_share` of them replaced by rollouts.

        Args:
            batches (`list[dict]`): Batches of the data.
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
        """
        Writes batches of about `batch_tokens` tokens. The process and the optimizer step choose prompts of the training data.
        """
        trainer, args = self.trainer, self.trainer.args
        process, step = trainer.accelerator.process_index, trainer.state.global_step
        choose = random.Random(f"{args.seed} {step} {process}")
        num_batches = max(round(args.rollout_interval * args.gradient_accumulation_steps * args.rollout_share), 1)
        prompts: list[torch.Tensor] = []
        labels: list[torch.Tensor] = []
        batches: list[list[int]] = []
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
                prompts.append(prompt[-room:])  # the continuation follows the end
                labels.append(known[-room:])
                num_tokens += len(prompts[-1]) + args.rollout_max_new_tokens
            batches.append(rows)
        tokenizer = trainer.processing_class
        pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        texts, draft = list(prompts), trainer.whole_draft()
        nodes: list[tuple[list[int], TreeNodes]] = []
        # Prompts of similar length need little padding.
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
        all_nodes = joined(nodes)
        self.pending += [rollout_batch(rows, texts, labels, all_nodes, pad_token_id) for rows in batches]

    def pop_metrics(self) -> dict[str, float]:
        """Returns the acceptance length of rollouts since the last call, over all processes."""
        accelerator = self.trainer.accelerator
        accepted = self.accepted.to(accelerator.device, sum_dtype(accelerator.device))
        num_tokens, num_verifications = accelerator.reduce(accepted, "sum").tolist()
        self.accepted.zero_()
        return {"rollout_acceptance_length": num_tokens / num_verifications} if num_verifications else {}

    def forget(self) -> None:
        """Drops all batches and counts."""
        self.pending.clear()
        self.accepted.zero_()

    def save(self, checkpoint: str | Path) -> None:
        """Saves the batches that are still to be learned beside a checkpoint."""
        Path(checkpoint).mkdir(parents=True, exist_ok=True)
        torch.save(self.pending, self.file(checkpoint))

    def load(self, checkpoint: str | Path) -> None:
        """
        Loads the batches that [`~Rollouts.save`] wrote. If a process has no file, all begin without batches, so that they
        roll out together.
        """
        if all(gather_object([self.file(checkpoint).exists()])):
            self.pending = torch.load(self.file(checkpoint), map_location="cpu", weights_only=True)

    def file(self, checkpoint: str | Path) -> Path:
        """Returns the file of this process."""
        return Path(checkpoint, f"rollouts_{self.trainer.accelerator.process_index}.pt")

"""
Data echoing (https://huggingface.co/papers/1907.05550): the draft learns several times from a batch, and the target
computes its states once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset, IterableDataset
from torch.utils.data import BatchSampler, RandomSampler, Sampler
from transformers import PreTrainedModel

from ..remote_code.target_eagle3 import is_sharded
from ..training import Eagle3Trainer, Eagle3TrainingArguments, FeatureStore
from ..training.arguments import check_integers
from ..training.features import TargetStates, stacked
from ..training.ttt import TTTBatch


@dataclass
class EchoTrainingArguments(Eagle3TrainingArguments):
    """
    Configuration of [`EchoTrainer`].

    Args:
        echo_factor (`int`, *optional*, defaults to `2`):
            How often the draft learns from each batch. An epoch has this many times the steps.
        echo_buffer_size (`int`, *optional*, defaults to `16`):
            The number of different batches, in each process, before the first of them returns. Until then their states
            are in the host's memory: `(n_aux + 1) * hidden_size` numbers per token.

    Raises:
        ValueError: if `train_sampling_strategy="batch_rebalance"`, which never makes the same batch again.
    """

    FIXED_ON_RESUME = (*Eagle3TrainingArguments.FIXED_ON_RESUME, "echo_factor", "echo_buffer_size")

    # Parameters that control how often a batch returns
    echo_factor: int = field(default=2, metadata={"help": "How often the draft learns from each batch."})
    echo_buffer_size: int = field(
        default=16, metadata={"help": "The number of different batches before the first of them returns."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, echo_factor=1, echo_buffer_size=1)
        if self.train_sampling_strategy == "batch_rebalance":
            raise ValueError(
                "`train_sampling_strategy='batch_rebalance'` never makes the same batch again, so no batch can return. "
                "Leave it out."
            )


class EchoTrainer(Eagle3Trainer):
    """
    An [`Eagle3Trainer`] that learns `echo_factor` times from each batch. It refuses streams, stored features, and targets
    that several processes share.

    Args:
        args, kwargs: The arguments of [`Eagle3Trainer`], with `args` of class [`EchoTrainingArguments`].
    """

    _args_class = EchoTrainingArguments

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.echo = EchoBuffer(self.target_states, self.args.echo_buffer_size)

    def _image_reader(self, *args: Any) -> str:
        return "but `EchoTrainer` remembers batches by their tokens alone. Use `Eagle3Trainer`, or remove the images"

    def _check_sources(
        self,
        args: EchoTrainingArguments,
        target_model: PreTrainedModel,
        train_dataset: Dataset | IterableDataset | FeatureStore | None,
    ) -> None:
        super()._check_sources(args, target_model, train_dataset)
        if isinstance(train_dataset, FeatureStore):
            reason = "stored features can be read in as many epochs as you like (`num_train_epochs`)"
        elif isinstance(train_dataset, IterableDataset):
            reason = "the rows of a stream have no numbers to return by"
        elif is_sharded(target_model):
            reason = "processes that share a target must run it at the same time"
        else:
            return
        raise ValueError(f"`EchoTrainer` cannot train here: {reason}. Use `Eagle3Trainer`.")

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        args = self.args
        num_processes = 1 if args.accelerator_config.split_batches else args.world_size
        batch_size = self._train_batch_size * num_processes
        sampler = super()._get_train_sampler(train_dataset)
        return EchoSampler(sampler, batch_size, args.echo_buffer_size, args.echo_factor, args.data_seed)

    def _forget_batches(self) -> None:
        super()._forget_batches()
        self.echo.forget()

    def target_features(self, inputs: dict[str, torch.Tensor]) -> TTTBatch:
        return super().target_features(self.echo(inputs) if self.draft.training else inputs)


class EchoSampler(Sampler[int]):
    """
    Yields the rows of another sampler. After every `num_batches` batches it repeats them. Unlike trl's `RepeatSampler` it
    leaves no rows out, and its epochs differ, so training can be resumed.

    Args:
        sampler (`Sampler`): The rows, in order.
        batch_size (`int`): Rows of a batch, of all processes together.
        num_batches (`int`): The number of batches before the first of them returns.
        factor (`int`): How often each batch comes.
        data_seed (`int`, *optional*): The seed of a random order, as in accelerate. Each epoch has an order of its own.
    """

    def __init__(self, sampler: Sampler, batch_size: int, num_batches: int, factor: int, data_seed: int | None = None):
        if isinstance(sampler, RandomSampler):  # accelerate would replace it, but does not find it in here
            sampler = SeedableRandomSampler(sampler.data_source, data_seed=data_seed)
        self.sampler, self.batch_size, self.num_batches, self.factor = sampler, batch_size, num_batches, factor

    def __len__(self) -> int:
        return self.factor * len(self.sampler)  # type: ignore[arg-type]  # torch's samplers have it, their base does not

    def __iter__(self) -> Iterator[int]:
        rest: list[int] = []
        all_batches = iter(BatchSampler(self.sampler, self.batch_size, False))
        while batches := list(islice(all_batches, self.num_batches)):
            if len(batches[-1]) < self.batch_size:  # rows after it would shift into other batches
                rest = batches.pop()
            for _ in range(self.factor):
                for batch in batches:
                    yield from batch
        for _ in range(self.factor):
            yield from rest

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class EchoBuffer:
    """
    Keeps the target's states of the newest batches in the host's memory.

    Args:
        target_states ([`TargetStates`]): The target.
        num_batches (`int`): The number of batches.
    """

    def __init__(self, target_states: TargetStates, num_batches: int):
        self.target_states, self.num_batches = target_states, num_batches
        self.states: dict[tuple, torch.Tensor] = {}  # by the input of the target, the oldest first

    def forget(self) -> None:
        """Drops all states."""
        self.states.clear()

    def __call__(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns a collated batch with its `states`, as [`~features.FeatureCollator`] adds those of a store."""
        read = (inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        key = tuple(None if each is None else (*each.shape, each.cpu().numpy().tobytes()) for each in read)
        if key not in self.states:
            if len(self.states) == self.num_batches:
                del self.states[next(iter(self.states))]
            self.states[key] = stacked(*self.target_states(inputs)).cpu()
        return {**inputs, "states": self.states[key].to(inputs["input_ids"].device)}

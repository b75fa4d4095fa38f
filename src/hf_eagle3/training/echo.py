"""Data echoing (https://huggingface.co/papers/1907.05550): a batch that the target has read is learned from several times."""

from collections.abc import Iterator

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler, RandomSampler, Sampler

from .features import TargetStates, stacked


class EchoSampler(Sampler[int]):
    """
    The rows of another sampler, of which some batches come one after the other, and then again. Unlike trl's `RepeatSampler`
    it leaves no rows out, and tells its epochs apart, so that training can be resumed.

    Args:
        sampler (`Sampler`): The rows, in their order.
        batch_size (`int`): Rows of a batch, of all processes together.
        num_batches (`int`): How many batches come before the first of them comes again.
        factor (`int`): How often each batch comes.
        data_seed (`int`, *optional*): For a random order, as accelerate's, which is another in each epoch.
    """

    def __init__(self, sampler: Sampler, batch_size: int, num_batches: int, factor: int, data_seed: int | None = None):
        if isinstance(sampler, RandomSampler):  # which accelerate would exchange, if it were not in here
            sampler = SeedableRandomSampler(sampler.data_source, data_seed=data_seed)
        self.sampler, self.batch_size, self.num_batches, self.factor = sampler, batch_size, num_batches, factor

    def __len__(self) -> int:
        return self.factor * len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        rest = []
        for batches in BatchSampler(BatchSampler(self.sampler, self.batch_size, False), self.num_batches, False):
            if len(batches[-1]) < self.batch_size:  # after which others would be other batches
                rest = batches.pop()
            for _ in range(self.factor):
                for batch in batches:
                    yield from batch
        for _ in range(self.factor):
            yield from rest

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class EchoBuffer:
    """
    The target's states of the newest batches, in the host's memory.

    Args:
        target_states ([`TargetStates`]): The target.
        num_batches (`int`): How many.
    """

    def __init__(self, target_states: TargetStates, num_batches: int):
        self.target_states, self.num_batches = target_states, num_batches
        self.states: dict[tuple, torch.Tensor] = {}  # by what the target reads, the oldest first

    def forget(self) -> None:
        """Drops all states."""
        self.states.clear()

    def __call__(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A collated batch with its `states`, as [`~features.FeatureCollator`] adds those of a store."""
        read = (inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        key = tuple(None if each is None else (*each.shape, each.cpu().numpy().tobytes()) for each in read)
        if key not in self.states:
            if len(self.states) == self.num_batches:
                del self.states[next(iter(self.states))]
            self.states[key] = stacked(*self.target_states(inputs)).cpu()
        return {**inputs, "states": self.states[key].to(inputs["input_ids"].device)}

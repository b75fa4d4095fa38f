# SPDX-License-Identifier: Apache-2.0
"""The noise with which the next tokens are sampled: one stream, by position in the text."""

import torch


class NoiseStream:
    """
    What `torch.multinomial` draws to sample a token for each row of a batch: exponential noise, of which the token
    with the largest `probability / noise` is the sample. It does not depend on the probabilities, so that a draft
    which divides its own by it may guess the very sample (Gumbel coupling: Daliri, Musco and Suresh,
    https://huggingface.co/papers/2408.07978).

    Where nothing else draws between two tokens, noise is drawn ahead, and what was not used is given back at the end
    ([`rewind`]). Elsewhere it is foreseen by a generator of its own and drawn by `torch.multinomial`: setting the
    device's generator instead would take back what other threads draw from it. Where something was drawn in between,
    what was foreseen is forgotten.

    Args:
        num_rows (`int`): Of the batch.
        device (`torch.device`): Where it samples.
        draws_ahead (`bool`): Whether nothing else draws.
    """

    def __init__(self, num_rows: int, device: torch.device, draws_ahead: bool):
        self.num_rows, self.device, self.draws_ahead = num_rows, device, draws_ahead
        self.generator = None if draws_ahead else torch.Generator(device)
        # By position: noise, with the state of the generator before it was drawn.
        self.drawn: dict[int, tuple[torch.FloatTensor, torch.Tensor]] = {}
        self.last_state = None  # of the device's generator, after the last draw
        self.next = None  # position to be drawn next

    def at(self, position: int, first: int, vocab_size: int) -> torch.FloatTensor:
        """
        The noise of a position, `(num_rows, vocab_size)`.

        Args:
            position (`int`): In the text.
            first (`int`): The first position that is not sampled in all rows. What is before it is forgotten.
            vocab_size (`int`): Of the target's logits.
        """
        for old in [old for old in self.drawn if old < first]:
            del self.drawn[old]
        if self.next is None:
            self.next = first
        if not self.draws_ahead:
            state = random_state(self.device)
            if first not in self.drawn or not torch.equal(self.drawn[first][1], state):
                self.drawn.clear()
                self.generator.set_state(state)
                self.next = first
        while self.next <= position:
            self.drawn[self.next] = self._draw(vocab_size)
            self.next += 1
        return self.drawn[position][0]

    def _draw(self, vocab_size):
        noise = torch.empty(self.num_rows, vocab_size, dtype=torch.float32, device=self.device)
        if not self.draws_ahead:
            before = self.generator.get_state()
            return noise.exponential_(generator=self.generator), before
        before = random_state(self.device)
        if self.last_state is not None and not torch.equal(before, self.last_state):
            # Another thread has drawn: where the generator should be at the end nobody can tell.
            self.drawn = {position: (noise, None) for position, (noise, _) in self.drawn.items()}
        noise.exponential_()
        self.last_state = random_state(self.device)
        return noise, before

    def rewind(self, position: int) -> None:
        """Leaves the device's generator as if nothing from `position` on had been drawn, unless others drew since."""
        _, state = self.drawn.get(position, (None, None))
        if self.draws_ahead and state is not None and torch.equal(random_state(self.device), self.last_state):
            set_random_state(self.device, state)


def sample_scores(log_probs: torch.FloatTensor, noise: torch.FloatTensor) -> torch.FloatTensor:
    """
    Scores of which the largest is the best guess of a sample (Gumbel-max).

    Args:
        log_probs (`torch.FloatTensor` of shape `(B, V)` or `(B, K, V)`): What the draft says, up to a constant.
        noise (`torch.FloatTensor` of shape `(B, V)`): With which that row will be sampled.
    """
    return log_probs - (noise if log_probs.dim() == 2 else noise[:, None]).log()


def random_state(device) -> torch.Tensor:
    """The state of a device's default random generator, which the host keeps."""
    module, arguments = _random_module(device)
    return module.get_rng_state(*arguments)


def set_random_state(device, state: torch.Tensor) -> None:
    module, arguments = _random_module(device)
    module.set_rng_state(state, *arguments)


def _random_module(device):
    if device.type == "cpu":
        return torch, ()
    return torch.get_device_module(device), () if device.type == "mps" else (device,)

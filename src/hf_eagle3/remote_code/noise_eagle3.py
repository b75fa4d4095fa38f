# SPDX-License-Identifier: Apache-2.0
"""The noise with which the next tokens will be sampled, before they are."""

from collections import deque

import torch


class SamplingNoise:
    """
    What `torch.multinomial` draws to sample a token for each row of a batch: exponential noise, of which the token
    with the largest `probability / noise` is the sample. It does not depend on the probabilities, so that a draft
    which divides its own by it may guess the very sample (Gumbel coupling: Daliri, Musco and Suresh,
    https://huggingface.co/papers/2408.07978).

    This is for calls in which something else may draw between two tokens; in others the noise itself is drawn ahead
    ([`Text.noise_ahead`]). It is foreseen with a generator of its own, and then drawn by whoever samples: setting the
    device's generator on instead would take back what other threads draw from it. Where anything else draws in
    between, what was foreseen is forgotten.

    Args:
        num_rows (`int`): Of the batch.
        device (`torch.device`): Where it samples.
    """

    def __init__(self, num_rows: int, device: torch.device):
        self.num_rows, self.device, self.generator = num_rows, device, None
        # Noise, with the state of the generator before it is drawn.
        self.foreseen: deque[tuple[torch.Tensor, torch.FloatTensor]] = deque()

    def ahead(self, index: int, vocab_size: int) -> torch.FloatTensor:
        """What the device's generator gives after `index` such draws, `(num_rows, vocab_size)`."""
        state = random_state(self.device)
        # What was drawn since, or is not to be drawn any more.
        while self.foreseen and not torch.equal(self.foreseen[0][0], state):
            self.foreseen.popleft()
        if self.generator is None:
            self.generator = torch.Generator(self.device)
        if not self.foreseen:
            self.generator.set_state(state)
        while index >= len(self.foreseen):
            before = self.generator.get_state()
            noise = torch.empty(self.num_rows, vocab_size, dtype=torch.float32, device=self.device)
            self.foreseen.append((before, noise.exponential_(generator=self.generator)))
        return self.foreseen[index][1]


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

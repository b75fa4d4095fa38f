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
"""The noise with which the next tokens will be sampled, before they are."""

from collections import deque

import torch


class SamplingNoise:
    """
    What `torch.multinomial` draws to sample a token for each row of a batch: exponential noise, of which the token with the
    largest `probability / noise` is the sample. It does not depend on the probabilities, so that a draft which divides its
    own by it may guess the very sample (Gumbel coupling: Daliri, Musco and Suresh, https://huggingface.co/papers/2408.07978).

    Where anything else draws from the device's random generator in between, what was foreseen is forgotten.

    Args:
        num_rows (`int`): Of the batch.
        device (`torch.device`): Where it samples.
    """

    def __init__(self, num_rows: int, device: torch.device):
        self.num_rows, self.device = num_rows, device
        # Noise, with the generator's states before and after it was drawn.
        self.foreseen: deque[tuple[torch.Tensor, torch.FloatTensor, torch.Tensor]] = deque()

    def draw(self, vocab_size: int, dtype: torch.dtype) -> torch.FloatTensor:
        """The noise for one more token of every row `(num_rows, vocab_size)`, which leaves the generator as `torch.multinomial` does."""
        self._forget_others(random_state(self.device))
        if self.foreseen:
            _, noise, state = self.foreseen.popleft()
            if noise.dtype == dtype and noise.shape[-1] == vocab_size:
                set_random_state(self.device, state)
                return noise
            self.foreseen.clear()
        return self._new(vocab_size, dtype)

    def ahead(self, index: int, vocab_size: int) -> torch.FloatTensor:
        """What [`SamplingNoise.draw`] will return after `index` other draws. Leaves the generator as it is."""
        state = random_state(self.device)
        self._forget_others(state)
        if index >= len(self.foreseen):
            try:
                if self.foreseen:
                    set_random_state(self.device, self.foreseen[-1][-1])
                while index >= len(self.foreseen):
                    before, noise = random_state(self.device), self._new(vocab_size, torch.float32)
                    self.foreseen.append((before, noise, random_state(self.device)))
            finally:
                set_random_state(self.device, state)
        return self.foreseen[index][1]

    def _forget_others(self, state: torch.Tensor) -> None:
        while self.foreseen and not torch.equal(self.foreseen[0][0], state):
            self.foreseen.popleft()

    def _new(self, vocab_size: int, dtype: torch.dtype) -> torch.FloatTensor:
        return torch.empty(self.num_rows, vocab_size, dtype=dtype, device=self.device).exponential_()


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

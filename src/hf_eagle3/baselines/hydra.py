"""Hydra (https://huggingface.co/papers/2402.05109): Medusa's heads, which also read the tokens drafted before."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn

from ..training.ttt import TTTBatch, UnrollStep
from .medusa import MedusaConfig, MedusaForSpeculation


@strict
class HydraConfig(MedusaConfig):
    """The configuration of Hydra's draft. See [`MedusaConfig`]."""

    model_type = "hydra"


class HydraForSpeculation(MedusaForSpeculation):
    """
    Hydra's draft. Head `k` reads the target's state at position `t` and the embeddings of the tokens from `t + 1` to
    `t + 1 + k` (section 3), so its prediction depends on the path. Each head has one layer, as in the paper's first form. It
    is trained as Medusa is.

    Args:
        config ([`HydraConfig`]): The configuration.
    """

    config_class = HydraConfig

    @staticmethod
    def input_size(config: MedusaConfig, k: int) -> int:
        return (2 + k) * config.hidden_size

    def inputs_after(self, hidden_states: torch.Tensor, tokens: torch.Tensor, embedding: nn.Embedding) -> torch.Tensor:
        return torch.cat([hidden_states, self.embed(tokens, embedding)], dim=-1)

    def unroll(self, batch: TTTBatch, steps: int) -> Iterator[UnrollStep]:
        """Yields a step for each head, whose states `(B, L, (2 + k) * H)` include the embeddings of the path."""
        states: torch.Tensor = batch.aux_hidden_states
        embeds = self.embed(batch.input_ids)
        for k in range(min(steps, len(self.heads))):
            ahead = min(1 + k, embeds.shape[1])
            states = torch.cat([states, F.pad(embeds[:, ahead:], (0, 0, 0, ahead))], dim=-1)
            yield UnrollStep(states, self.heads[k])

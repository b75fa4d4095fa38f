"""Hydra (https://huggingface.co/papers/2402.05109): Medusa's heads, which also read the tokens drafted before theirs."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict

from ..training.ttt import TTTBatch, UnrollStep
from .medusa import MedusaConfig, MedusaForSpeculation


@strict
class HydraConfig(MedusaConfig):
    """Of the draft of Hydra. See [`MedusaConfig`]."""

    model_type = "hydra"


class HydraForSpeculation(MedusaForSpeculation):
    """
    Head `k` reads the target's state at position `t`, and the embeddings of the tokens from `t + 1` to `t + 1 + k`
    (section 3): what it predicts depends on the path. The heads are those of the paper's first form, one layer each, and
    learn as Medusa's do.

    Args:
        config ([`HydraConfig`]): Of the heads.
    """

    config_class = HydraConfig

    @staticmethod
    def input_size(config, k: int) -> int:
        return (2 + k) * config.hidden_size

    def inputs_after(self, hidden_states, tokens, embedding):
        return torch.cat([hidden_states, self.embed(tokens, embedding)], dim=-1)

    def unroll(self, batch: TTTBatch, steps: int) -> Iterator[UnrollStep]:
        states, embeds = batch.aux_hidden_states, self.embed(batch.input_ids)
        for k in range(min(steps, len(self.heads))):
            ahead = min(1 + k, embeds.shape[1])
            states = torch.cat([states, F.pad(embeds[:, ahead:], (0, 0, 0, ahead))], dim=-1)
            yield UnrollStep(states, self.heads[k])

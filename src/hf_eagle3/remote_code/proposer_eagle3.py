# SPDX-License-Identifier: Apache-2.0
"""Proposers of the trees that a target verifies."""

from typing import Any, NamedTuple

import torch

from .accept_eagle3 import Accepted, Sampler
from .tree_eagle3 import DraftTree, Plan


class Call(NamedTuple):
    """
    One call of `generate`.

    Args:
        target (`PreTrainedModel`): The target.
        embedding (`nn.Embedding`): Its input embedding: as a whole, where processes hold shares of it.
        whole (`Plan`): The largest tree of a step.
        threshold (`float`): Nodes that a proposer is less sure of are not worth proposing.
        calibration (`Calibration`): How sure the draft's words are.
        capacity (`int`, *optional*): How many tokens a row may come to have, if caches are static.
        compile_config (`CompileConfig`, *optional*): If the target is compiled.
    """

    target: Any
    embedding: torch.nn.Embedding
    whole: Plan
    threshold: float
    calibration: Any
    capacity: int | None
    compile_config: Any


class Proposer:
    """
    Proposes next tokens during one call of `generate`. Whatever it proposes, the text is the target's; it decides how
    fast that is written. A subclass implements [`propose`], and [`observe`] if it learns from the text.
    """

    def observe(self, accepted: Accepted) -> None:
        """
        Takes what a step wrote; at first the prompt, with the first new token. Called before each [`propose`].

        Args:
            accepted ([`Accepted`]): What was written.
        """

    def propose(self, plan: Plan, root_tokens: torch.LongTensor, sampler: Sampler | None = None) -> DraftTree:
        """
        Proposes what may follow.

        Args:
            plan (`Plan`): The tree may be `depth` deep and have `num_nodes` nodes below its root, and fewer. With a
                `branching_factor` of 1 it must be a chain.
            root_tokens (`torch.LongTensor` of shape `(B, 1)`): The newest token of each row: where the trees begin.
            sampler (`Sampler`, *optional*): How next tokens will be sampled, for guessing them; `None` if greedily.

        Returns:
            `DraftTree`: One for each row, all of one size. Tokens must be ids of the target's embedding.
        """
        raise NotImplementedError

    def select(self, rows: list[int]) -> None:
        """
        Forgets all rows of the batch but these: the others are finished.

        Args:
            rows (`list[int]`): By their places in the batch so far.
        """

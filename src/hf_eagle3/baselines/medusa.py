"""Medusa (https://huggingface.co/papers/2401.10774): heads on the target's last state, one for each token ahead."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn

from ..remote_code.tree_eagle3 import DraftTree, GenerationCall, Plan, Proposer
from ..training.ttt import RowTargets, TTTBatch, UnrollStep
from .baseline import BaselineConfig, BaselineDraft


@strict
class MedusaConfig(BaselineConfig):
    """
    The configuration of Medusa's draft. See [`BaselineConfig`].

    Args:
        num_heads (`int`, *optional*, defaults to `5`): Number of heads, each one token further ahead (section 2.1.1).
    """

    model_type = "medusa"
    num_heads: int = 5


class MedusaHead(nn.Module):
    """
    Computes `lm_head(x + SiLU(W x))` from the target's last state `x` (section 2.1.1). A new head has `W = 0` and the
    target's `lm_head`. The residual `x` is the beginning of a wider input (Hydra).
    """

    def __init__(self, config: MedusaConfig, input_size: int):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.linear = nn.Linear(input_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.features(states))

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the states that `lm_head` reads."""
        return states[..., : self.hidden_size] + F.silu(self.linear(states))


class MedusaForSpeculation(BaselineDraft):
    """
    Medusa's draft, trained as Medusa-1: the target is not trained. Head `k` reads the target's state at position `t`, and
    predicts the token at `t + 2 + k`, independently of the tokens between. (The target's own head predicts the token at
    `t + 1`.)

    Args:
        config ([`MedusaConfig`]): The configuration.
    """

    config_class = MedusaConfig
    _no_split_modules = ["Linear"]  # accelerate's FSDP2 shards the output embedding of a head alone

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        heads = [MedusaHead(config, self.input_size(config, k)) for k in range(config.num_heads)]
        self.heads: Any = nn.ModuleList(heads)
        self.post_init()
        with torch.no_grad():  # `post_init` made them random
            for head in heads:
                head.linear.weight.zero_()
                head.linear.bias.zero_()

    @staticmethod
    def input_size(config: MedusaConfig, k: int) -> int:
        """Returns the width of the input of head `k`."""
        return config.hidden_size

    def get_output_embeddings(self) -> nn.Linear:
        return self.heads[0].lm_head

    def set_output_embeddings(self, head: nn.Linear) -> None:
        for each in self.heads:
            each.lm_head = copy.deepcopy(head)

    # Proposing ----------------------------------------------------------------------------------------------------

    def inputs_after(self, hidden_states: torch.Tensor, tokens: torch.Tensor, embedding: nn.Embedding) -> torch.Tensor:
        """
        Returns the input of the next head for the children of some nodes, `(B, K, n)`, or `(B, 1, n)` if it is the same for all. These
        have `tokens` `(B, K)`, and were the `hidden_states` `(B, K, m)` for the head before. `embedding` is the target's.
        """
        return hidden_states[:, :1]

    def proposer(self, call: GenerationCall) -> "HeadsProposer":
        """See [`~assistant_eagle3.AssistantMixin.proposer`]."""
        return HeadsProposer(self, call)

    # Training -----------------------------------------------------------------------------------------------------

    @property
    def most_steps(self) -> int:
        """The number of heads."""
        return len(self.heads)

    def unroll(self, batch: TTTBatch, steps: int) -> Iterator[UnrollStep]:
        """Yields a step for each head."""
        for k in range(min(steps, len(self.heads))):
            yield UnrollStep(batch.aux_hidden_states, self.heads[k])

    def row_loss(self, logits: torch.Tensor, targets: RowTargets) -> torch.Tensor:
        """
        Returns the loss of each row `(B, R)`: the cross-entropy with the text (section 2.2.1; `ttt_step_decay=0.8` gives its
        weights λ_k).
        """
        labels = torch.full((self.config.vocab_size,), -100, device=logits.device)
        labels[self.draft_token_ids] = torch.arange(self.config.draft_vocab_size, device=logits.device)
        labels = labels[targets.actual]  # tokens outside of the draft's vocabulary are not learned
        return F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")


class HeadsProposer(Proposer):
    """Proposes trees from the target's newest state, during one call of `generate`: each head predicts one level."""

    def __init__(self, draft: MedusaForSpeculation, call: GenerationCall):
        self.draft, self.call = draft, call
        self.states: Any = None  # (B, H), from the first `observe` on

    def observe(self, accepted: Any) -> None:
        newest = accepted.states[:, -1]  # (B, H)
        if self.states is not None and 0 in accepted.counts:  # some rows accepted nothing: they wait for others
            has_new = torch.tensor(accepted.counts, device=newest.device)[:, None] > 0
            newest = torch.where(has_new, newest, self.states)
        self.states = newest

    def select(self, rows: list[int]) -> None:
        self.states = self.states[rows]

    @torch.no_grad()
    def propose(self, plan: Plan, root_tokens: torch.Tensor, sampler: Any = None) -> DraftTree:
        draft, heads, embedding = self.draft, self.draft.heads, self.call.embedding
        parameter = draft.get_output_embeddings().weight
        root_tokens, states = root_tokens.to(parameter.device), self.states.to(parameter)
        hidden_states = draft.inputs_after(states[:, None], root_tokens, embedding)[:, 0]

        def advance(
            tokens: torch.Tensor, hidden_states: torch.Tensor, level: int, visible: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            hidden_states = draft.inputs_after(hidden_states, tokens, embedding)
            logits = heads[level](hidden_states)
            num_nodes = tokens.shape[1]
            return logits.expand(-1, num_nodes, -1), hidden_states.expand(-1, num_nodes, -1)

        token_ids = None if draft.d2t is None else draft.draft_token_ids
        guess = None if sampler is None else partial(sampler.guess, token_ids=token_ids)
        settings = self.call.threshold, self.call.calibration.power, guess
        plan = plan._replace(depth=min(plan.depth, len(heads)))
        return draft.grow_tree(
            root_tokens, heads[0](hidden_states), hidden_states, advance, token_ids, plan, *settings
        )

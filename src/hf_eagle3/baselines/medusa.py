"""Medusa (https://huggingface.co/papers/2401.10774): heads on the target's last state, each for a token further ahead."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn

from ..remote_code.tree_eagle3 import GenerationCall, Proposer
from ..training.ttt import TTTBatch, TTTOutput, UnrollStep, unroll_loss
from .baseline import BaselineConfig, BaselineDraft, check_steps


@strict
class MedusaConfig(BaselineConfig):
    """
    Of the draft of Medusa. See [`BaselineConfig`].

    Args:
        num_heads (`int`, *optional*, defaults to `5`): How many tokens ahead the heads look (section 2.1.1).
    """

    model_type = "medusa"
    num_heads: int = 5


class MedusaHead(nn.Module):
    """
    `lm_head(x + SiLU(W x))` with `x` the target's last state (section 2.1.1): at first `W` is zero and `lm_head` the
    target's own. Of a wider input, `x` is the beginning (Hydra).
    """

    def __init__(self, config, input_size: int):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.linear = nn.Linear(input_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def forward(self, states):
        return self.lm_head(self.features(states))

    def features(self, states):
        """What `lm_head` reads."""
        return states[..., : self.hidden_size] + F.silu(self.linear(states))


class MedusaForSpeculation(BaselineDraft):
    """
    Medusa-1: the target stays as it is. Head `k` reads the target's state at position `t`, of which the target's own
    head has told the token at `t + 1`, and predicts the token at `t + 2 + k`, whatever those between are.

    Args:
        config ([`MedusaConfig`]): Of the heads.
    """

    config_class = MedusaConfig
    _no_split_modules = ["Linear"]  # FSDP2 in accelerate shards the output embedding, a part of a head, by itself

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        self.heads = nn.ModuleList(MedusaHead(config, self.input_size(config, k)) for k in range(config.num_heads))
        self.post_init()
        with torch.no_grad():  # which draws them at random
            for head in self.heads:
                head.linear.weight.zero_()
                head.linear.bias.zero_()

    @staticmethod
    def input_size(config, k: int) -> int:
        """How wide what head `k` reads is."""
        return config.hidden_size

    def get_output_embeddings(self) -> nn.Linear:
        return self.heads[0].lm_head

    def set_output_embeddings(self, head: nn.Linear) -> None:
        for each in self.heads:
            each.lm_head = copy.deepcopy(head)

    # Proposing ----------------------------------------------------------------------------------------------------

    def inputs_after(self, hidden_states: torch.FloatTensor, tokens: torch.LongTensor, embedding) -> torch.FloatTensor:
        """
        What a head reads below some nodes, `(B, K, n)`, or `(B, 1, n)` if it is the same for all: of what the head
        before read there, or the target's newest state, and their tokens `(B, K)`.
        """
        return hidden_states[:, :1]

    def proposer(self, call: GenerationCall) -> "HeadsProposer":
        return HeadsProposer(self, call)

    # Training -----------------------------------------------------------------------------------------------------

    def unroll(self, batch: TTTBatch, steps: int) -> Iterator[UnrollStep]:
        """Heads are steps."""
        for k in range(min(steps, len(self.heads))):
            yield UnrollStep(batch.aux_hidden_states, self.heads[k])

    def training_loss(self, batch: TTTBatch, steps: int) -> TTTOutput:
        """Cross-entropy with the tokens of the text (section 2.2.1; `ttt_step_decay=0.8` are its weights λ_k)."""
        check_steps(self, steps, len(self.heads))
        return unroll_loss(self, batch, self.unroll(batch, steps), self.row_loss)

    def row_loss(self, logits, targets):
        labels = torch.full((self.config.vocab_size,), -100, device=logits.device)
        labels[self.draft_token_ids] = torch.arange(self.config.draft_vocab_size, device=logits.device)
        labels = labels[targets.actual]  # what the draft's vocabulary has not, it cannot learn
        return F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")


class HeadsProposer(Proposer):
    """
    Asks the heads about the newest state, one a level of the tree.

    Args:
        draft ([`MedusaForSpeculation`]): The heads.
        call ([`GenerationCall`]): The call of `generate`.
    """

    def __init__(self, draft: MedusaForSpeculation, call: GenerationCall):
        self.draft, self.call, self.states = draft, call, None

    def observe(self, accepted: Any) -> None:
        newest = accepted.states[:, -1]  # (B, H)
        if self.states is not None and 0 in accepted.counts:  # of rows that wait for others
            has_new = torch.tensor(accepted.counts, device=newest.device)[:, None] > 0
            newest = torch.where(has_new, newest, self.states)
        self.states = newest

    def select(self, rows):
        self.states = self.states[rows]

    @torch.no_grad()
    def propose(self, plan, root_tokens, sampler=None):
        draft, heads, embedding = self.draft, self.draft.heads, self.call.embedding
        parameter = draft.get_output_embeddings().weight
        root_tokens, states = root_tokens.to(parameter.device), self.states.to(parameter)
        hidden_states = draft.inputs_after(states[:, None], root_tokens, embedding)[:, 0]

        def advance(tokens, hidden_states, level, visible):
            hidden_states = draft.inputs_after(hidden_states, tokens, embedding)
            logits = heads[level](hidden_states)
            return tuple(each.expand(-1, tokens.shape[1], -1) for each in (logits, hidden_states))

        def guess(logits, level):
            return sampler.guess(logits, level, token_ids)

        token_ids = None if draft.d2t is None else draft.draft_token_ids
        settings = self.call.threshold, self.call.calibration.power, None if sampler is None else guess
        plan = plan._replace(depth=min(plan.depth, len(heads)))
        return draft.grow_tree(
            root_tokens, heads[0](hidden_states), hidden_states, advance, token_ids, plan, *settings
        )

# SPDX-License-Identifier: Apache-2.0
"""The three values of a step, [`Plan`], [`DraftTree`] and [`Accepted`]; proposers; and growing trees by confidence."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from .devices_eagle3 import on_device
from .text_eagle3 import take_rows


class Prices(NamedTuple):
    """What parts of a step cost, in tokens that decoding would write in the same time."""

    level: float  # another level of drafting
    nodes: list[float]  # verifying 0, 1, ... nodes below the root; inf for numbers that are not chosen
    rows: list[bool]  # the rows that the batch waits for; only their tokens count
    must_verify: bool = False  # verify at least one node, to measure drafting

    def worth(self, values: torch.Tensor) -> list[float]:
        """The mean probability over the rows that count that each node is accepted, given its log `(B, N)`."""
        return (values if all(self.rows) else values[self.rows]).exp().mean(dim=0).tolist()

    def num_to_expand(self, worth: list[float], worth_above: list[float]) -> int:
        """
        How many nodes of this level to expand; 0 if it does not pay. Assumes that the next level loses the same share of worth as
        this one did.
        """
        share = min(max(sum(worth), 1e-9) / max(sum(worth_above), 1e-9), 1.0)
        node_price = self.nodes[-1] / (len(self.nodes) - 1)
        gains = [share * each - node_price for each in worth if share * each > node_price]
        return max(len(gains), 1) if sum(gains) > self.level else 0

    def num_to_keep(self, values: torch.Tensor) -> int:
        """How many of some nodes to verify, given their `values` `(B, N)` in descending order."""
        worth = itertools.accumulate(self.worth(values), initial=0.0)
        gains = [each - price for each, price in zip(worth, self.nodes)]
        return max(range(min(self.must_verify, len(gains) - 1), len(gains)), key=gains.__getitem__)


class Plan(NamedTuple):
    """
    The plan of a step: who proposes tokens, and how large their tree may be.

    Args:
        proposer (`str`, *optional*): `"draft"`, `"lookup"`, or `None` to decode plainly.
        depth (`int`): The longest path below the root.
        num_nodes (`int`): The most nodes below the root.
        branching_factor (`int`): Children tried per node, and nodes expanded per level. 1 allows chains only.
        prices (`Prices`, *optional*): With these, a confidence-aware proposer may propose less.
    """

    proposer: str | None = None
    depth: int = 0
    num_nodes: int = 0
    branching_factor: int = 1
    prices: Prices | None = None


@dataclass
class DraftTree:
    """
    A tree of tokens to verify. Node 0 is the root, the newest token of the text. Parents precede children.

    Args:
        tokens (`torch.LongTensor` of shape `(batch_size, num_nodes)`): Target token ids.
        parents (`torch.LongTensor` of shape `(batch_size, num_nodes)`): Index of each node's parent; the root's is 0.
        depths (`torch.LongTensor` of shape `(batch_size, num_nodes)`): Distance from the root.
        ancestors (`torch.BoolTensor` of shape `(batch_size, num_nodes, num_nodes)`):
            `ancestors[b, i, j]`: node `j` is node `i` or above it, so `i` attends to `j`.
        depth (`int`): An upper bound on `depths`.
        confidences (`torch.FloatTensor` of shape `(batch_size, num_nodes - 1)`, *optional*):
            The draft's log-probability that a node is accepted if its parent is. The root has none.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    depth: int
    confidences: torch.Tensor | None = None
    _on_host: tuple[Any, ...] | None = None

    @property
    def num_nodes(self) -> int:
        """The number of nodes, with the root."""
        return self.tokens.shape[1]

    @property
    def max_depth(self) -> int:
        """The tighter bound on `depths`: the smaller of `depth` and the nodes below the root."""
        return min(self.depth, self.num_nodes - 1)

    @classmethod
    def from_parents(
        cls,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        confidences: torch.Tensor | None = None,
        depth: int | None = None,
    ) -> "DraftTree":
        """
        Makes a tree from its target token ids `tokens` `(B, N)`, the root's first, and its `parents` `(B, N)`:
        `parents[b, i] < i`, except at 0. See [`DraftTree`] for `confidences` and `depth`.
        """
        batch_size, num_nodes = tokens.shape
        ancestors = torch.eye(num_nodes, dtype=torch.bool, device=tokens.device).repeat(batch_size, 1, 1)
        depth, jump = num_nodes - 1 if depth is None else depth, parents
        # After round r every node knows its 2**r - 1 nearest ancestors, and `jump` leads 2**r nodes up.
        for _ in range(min(depth, num_nodes - 1).bit_length()):
            ancestors = ancestors | ancestors.gather(1, jump[:, :, None].expand_as(ancestors))
            jump = jump.gather(1, jump)
        return cls(tokens, parents, ancestors.sum(-1) - 1, ancestors, depth, confidences)

    @classmethod
    def chain(cls, tokens: torch.Tensor) -> "DraftTree":
        """A tree of one path, or of the root alone, with target token ids `tokens` `(B, N)`, the root's first."""
        depths = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        ancestors = depths[:, :, None] >= depths[:, None]
        return cls(tokens, (depths - 1).clamp(min=0), depths, ancestors, depth=tokens.shape[1] - 1)

    def to(self, device: torch.device) -> "DraftTree":
        """The tree on a device."""
        if self.tokens.device == device:
            return self
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **moved)

    def on_host(self, *others: torch.Tensor) -> tuple[Any, ...]:
        """
        Tokens, parents and confidences (0 if there are none) of the nodes, and `others` `(B, N)`, as lists. All are read
        in one copy, because each copy syncs.
        """
        if self._on_host is not None and not others:
            return self._on_host
        confidences = torch.zeros_like(self.tokens) if self.confidences is None else F.pad(self.confidences, (1, 0))
        unread = confidences, self.tokens, self.parents, *others
        of_draft, *read = torch.stack([each.float() for each in unread]).tolist()
        tokens, parents, *lists = ([list(map(int, row)) for row in rows] for rows in read)  # exact up to 2**24
        self._on_host = tokens, parents, of_draft
        return *self._on_host, *lists

    def children(self) -> list[dict[tuple[int, int], int]]:
        """For each row `{(parent, token): node}`: what a walk from the root looks up."""
        if self.num_nodes == 1:
            return [{}] * len(self.tokens)
        tokens, parents, _ = self.on_host()
        return [{key: node for node, key in enumerate(zip(*row)) if node > 0} for row in zip(parents, tokens)]

    def with_padded_rows(self, rows: list[bool], pad_token: int, depth: int) -> "DraftTree":
        """The tree, in which these rows have a chain of padding, of at most `depth` nodes. They continue with padding."""
        if self.num_nodes == 1 or not any(rows):
            return self
        depth = min(self.depth, depth)
        device = self.tokens.device
        is_padded = on_device(rows, device)[:, None]  # indexing by a list would force a sync
        tokens = torch.cat([self.tokens[:, :1], self.tokens[:, 1:].masked_fill(is_padded, pad_token)], dim=1)
        chain = torch.arange(-1, self.num_nodes - 1, device=device).clamp(min=0, max=depth - 1)
        parents = chain.where(is_padded, self.parents)
        return DraftTree.from_parents(tokens, parents, self.confidences, depth)


@dataclass
class Accepted:
    """
    What a step wrote. The first one is the prompt. In tensors the rows end at the right, and begin with padding.

    Args:
        tokens (`torch.LongTensor` of shape `(B, R)`): The new tokens.
        counts (`list[int]`): How many entries of each row, at the right, are not padding.
        positions (`torch.LongTensor` of shape `(B, R)`): The position before each new token.
        states (`torch.FloatTensor` of shape `(B, R, n * H)`, *optional*):
            The target's hidden states at those positions, of the layers that the proposer reads.
        new_tokens (`list[list[int]]`): The new tokens as lists; all tokens of the prompt.
        nodes (`list[list[int]]`): The node of the tree before each new token.
        batch_growth (`int`): By how many tokens the longest row grew.
        progress (`int`): By how many tokens the slowest unfinished row grew. 1 in plain decoding.
        num_written (`list[int]`): How many tokens each row wrote before its end. After it, rows grow by padding, or not at all.
        is_finished (`list[bool]`): Whether each row is finished.
    """

    tokens: torch.Tensor
    counts: list[int]
    positions: torch.Tensor
    states: torch.Tensor | None
    new_tokens: list[list[int]]
    nodes: list[list[int]]
    batch_growth: int
    progress: int
    num_written: list[int]
    is_finished: list[bool]


class GenerationCall(NamedTuple):
    """
    What a proposer knows of one call of `generate`.

    Args:
        target (`PreTrainedModel`): The target.
        embedding (`nn.Embedding`): The target's input embedding. It is gathered if processes hold shards of it.
        max_plan (`Plan`): The largest tree of a step.
        threshold (`float`): Nodes that the proposer gives a lower probability are not worth proposing.
        calibration (`Calibration`): Its `power` corrects the proposer's probabilities.
        capacity (`int`, *optional*): The most tokens of a row, if all shapes are fixed.
    """

    target: PreTrainedModel
    embedding: torch.nn.Embedding
    max_plan: Plan
    threshold: float
    calibration: Any
    capacity: int | None


class Proposer:
    """
    Proposes next tokens during one call of `generate`. Proposals affect the speed, never the text,
    which is the target's. A subclass implements [`propose`], and [`observe`] if it learns from the text.
    """

    def observe(self, accepted: Accepted) -> None:
        """Called with what each step `accepted`, and first with the prompt and the first new token."""

    def propose(self, plan: Plan, root_tokens: torch.Tensor, sampler: Any = None) -> DraftTree:
        """
        Returns tokens that may follow.

        Args:
            plan (`Plan`): The most that the tree may have: `depth` levels and `num_nodes` nodes below its root. With a
                `branching_factor` of 1 it must be a chain.
            root_tokens (`torch.LongTensor` of shape `(B, 1)`): The newest token of each row, the roots of the trees.
            sampler (`Sampler`, *optional*): Helps to guess samples; `None` if the target decodes greedily.

        Returns:
            `DraftTree`: One for each row, all with the same number of nodes. Tokens must be ids of the target's
            embedding.
        """
        raise NotImplementedError(f"`{type(self).__name__}` must define `propose(plan, root_tokens, sampler)`.")

    def select(self, rows: list[int]) -> None:
        """Called when finished rows leave the batch, with the indices `rows` of those that stay."""

    def finish(self) -> None:
        """Called at the end of the call."""


def check_tree(tree: Any, plan: Plan, root_tokens: torch.Tensor) -> None:
    """Raises `TypeError` or `ValueError` if a tree of somebody's own proposer would change the text. This forces a sync."""
    if not isinstance(tree, DraftTree):
        raise TypeError(f"A proposer must propose a `DraftTree`, not {type(tree).__name__}.")
    if tree.tokens[:, :1].tolist() != root_tokens.tolist():
        raise ValueError("A proposed tree must begin with its root: the newest token of each row, `root_tokens`.")
    depth, num_nodes = int(tree.depths.max()), tree.num_nodes - 1
    if depth > plan.depth or num_nodes > plan.num_nodes:
        raise ValueError(
            f"The plan has room for {plan.num_nodes} nodes below the root, in {plan.depth} levels, but the proposed tree has "
            f"{num_nodes} in {depth}. Propose less, because the target may read a larger tree differently."
        )
    if plan.branching_factor == 1 and int(tree.depths.min(dim=0).values[-1]) != tree.num_nodes - 1:
        raise ValueError("The plan has a `branching_factor` of 1, but the proposed tree is no chain.")


def grow_tree(
    root_tokens: torch.Tensor,  # (B, 1)
    logits: torch.Tensor,  # (B, V): the draft's for the root's children
    hidden_states: torch.Tensor,  # (B, H): what the root's children take
    advance: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    draft_token_ids: torch.Tensor | None,  # (V,): the target's ids of the draft vocabulary, if it differs
    plan: Plan,
    threshold: float = 0.0,  # nodes below this probability are dropped
    power: float | torch.Tensor = 1.0,  # the draft's probabilities are taken to it (see `Calibration`)
    guess: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
) -> DraftTree:
    """
    Expands the most probable nodes level by level, then keeps the most probable nodes of all levels (EAGLE-2,
    https://huggingface.co/papers/2406.16858, sections 4.1 and 4.2). A node's value is the log-probability of the path
    to it.

    `advance(tokens (B, K), hidden_states (B, K, H), level, visible (B, K, T))` is one drafting step for `K` nodes at
    depth `level`. It returns logits `(B, K, V)` and hidden states `(B, K, H)`. `visible` says which of the `T` nodes
    advanced so far, these included, each of them attends to.

    `guess(logits (..., V), level) -> scores (..., V)` replaces the logits for children of nodes at depth `level`, if
    the target samples (see [`~accept_eagle3.sample_scores`]).

    Without prices in the plan all shapes are fixed, `advance` is called `depth - 1` times, and only a `threshold`
    forces a sync. With prices the tree is smaller where the draft is unsure, as in OPT-Tree
    (https://huggingface.co/papers/2406.17276), and each level forces a sync.
    """
    batch_size, device, prices = logits.shape[0], logits.device, plan.prices
    width = min(plan.branching_factor, logits.shape[-1])
    lowest = math.log(threshold) if threshold > 0 else -math.inf

    def best_children(logits: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor]:
        return best_tokens(power * (logits.float() if guess is None else guess(logits, level)), width)

    values, ids = best_children(logits, 0)  # (B, K)
    pool = [Candidates(values, torch.full_like(ids, -1), ids, confidences=values)]
    frontier = torch.arange(width, device=device).expand(batch_size, width)  # where in the pool the next to expand are
    hidden_states = hidden_states[:, None].expand(-1, width, -1)  # (B, K, H)
    above = torch.ones(batch_size, width, 0, dtype=torch.bool, device=device)  # (B, K, T): the ancestors' rows
    worth = [1.0]
    for level in range(1, plan.depth):
        if prices is not None:
            # No child is worth more than its parent. Stop if none could be among the best.
            num_better = (torch.cat([each.values for each in pool], dim=1) >= values[:, :1]).sum(dim=1)
            if not ((values[:, 0] > lowest) & (num_better < plan.num_nodes)).any():
                break
            worth_above, worth = worth, prices.worth(values)
            num_expanded = prices.num_to_expand(worth, worth_above)
            if num_expanded == 0:
                break
            values, ids, frontier, hidden_states, above = (
                entries[:, :num_expanded] for entries in (values, ids, frontier, hidden_states, above)
            )
        itself = torch.eye(ids.shape[1], dtype=torch.bool, device=device).expand(batch_size, -1, -1)
        visible = torch.cat([above, itself], dim=-1)
        tokens = ids if draft_token_ids is None else draft_token_ids[ids]
        logits, hidden_states = advance(tokens, hidden_states, level, visible)
        confidences, child_ids = best_children(logits, level)  # (B, K, K)
        parents = frontier[..., None].expand_as(child_ids)
        children = values[..., None] + confidences, parents, child_ids, confidences
        num_candidates = sum(each.values.shape[1] for each in pool)
        pool.append(Candidates(*(entries.flatten(1) for entries in children)))
        values, best = pool[-1].values.topk(width)  # (B, K)
        ids, parent, frontier = pool[-1].ids.gather(1, best), best // width, num_candidates + best
        hidden_states = take_rows(hidden_states, parent)
        above = visible.gather(1, parent[..., None].expand(-1, -1, visible.shape[-1]))
    return best_tree(root_tokens, pool, plan, threshold, draft_token_ids)


class Candidates(NamedTuple):
    """Nodes of one level. A tree takes the best of them. Each field is `(B, N)`."""

    values: torch.Tensor  # log-probabilities of their paths
    parents: torch.Tensor  # their places among the candidates of all levels; -1 is the root
    ids: torch.Tensor  # of the draft vocabulary
    confidences: torch.Tensor  # log-probabilities that they are accepted if their parents are


def best_tokens(logits: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities and ids `(..., num_tokens)` of the most probable tokens, given their logits `(..., V)`."""
    confidences, ids = logits.log_softmax(dim=-1).topk(num_tokens)
    # No child may outrank its parent, even if a broken draft returns NaN, or floats round.
    return confidences.nan_to_num(nan=-torch.inf).clamp(max=0), ids


def best_tree(
    root_tokens: torch.Tensor,
    pool: list[Candidates],
    plan: Plan,
    threshold: float,
    draft_token_ids: torch.Tensor | None,
) -> DraftTree:
    """
    The tree of the best candidates. `pool` has those of each level. The sort is stable, so a parent comes before a child of
    equal value, and every node is kept with its parent. See [`grow_tree`] for the other arguments.
    """
    values, parents, ids, confidences = (torch.cat(levels, dim=1) for levels in zip(*pool))
    ranked_values, ranking = values.sort(dim=1, descending=True, stable=True)
    num_kept = min(plan.num_nodes, values.shape[1])
    if threshold > 0:
        num_kept = min(num_kept, int((ranked_values >= math.log(threshold)).sum(dim=1).max()))
    if plan.prices is not None:
        num_kept = plan.prices.num_to_keep(ranked_values[:, :num_kept])
    kept = ranking[:, :num_kept].sort(dim=1).values  # parents precede children
    parents = parents.gather(1, kept)
    parents = torch.where(parents < 0, 0, torch.searchsorted(kept, parents) + 1)
    ids = ids.gather(1, kept)
    return DraftTree.from_parents(
        torch.cat([root_tokens, ids if draft_token_ids is None else draft_token_ids[ids]], dim=1),
        torch.cat([torch.zeros_like(root_tokens), parents], dim=1),
        confidences.gather(1, kept),
        depth=len(pool),
    )

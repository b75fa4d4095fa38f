# SPDX-License-Identifier: Apache-2.0
"""The draft tree: its nodes, and growing it by the draft's confidence (EAGLE-2, https://huggingface.co/papers/2406.16858)."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from .ragged_eagle3 import take_rows


class Prices(NamedTuple):
    """
    What parts of a step cost, in tokens that decoding would otherwise write in their time.

    Args:
        level (`float`): Each further level of drafting.
        nodes (`list[float]`): Verifying 0, 1, ... nodes below the root.
        rows (`list[bool]`): Which rows of the batch hold it up: what others accept is worth nothing.
        must_verify (`bool`): Whether to verify at least one node, whatever it costs: only that tells what it brings.
    """

    level: float
    nodes: list[float]
    rows: list[bool]
    must_verify: bool = False


class Plan(NamedTuple):
    """
    What a step does.

    Args:
        proposer (`str`, *optional*): `"draft"`, `"lookup"`, or `None` to decode plainly.
        depth (`int`): Longest path below the root.
        num_nodes (`int`): Nodes below the root, at most.
        branching_factor (`int`): Children tried per node, and nodes expanded per level; 1 allows chains only.
        prices (`Prices`, *optional*): By which a proposer that knows its own confidence may propose less.
    """

    proposer: str | None = None
    depth: int = 0
    num_nodes: int = 0
    branching_factor: int = 1
    prices: Prices | None = None


class TreeOnHost(NamedTuple):
    """
    What the host reads of a tree: lists with an entry for each node of each row.

    Args:
        tokens, parents (`list[list[int]]`): As [`DraftTree`] has them.
        confidences (`list[list[float]]`): Likewise, with 0 for the root; zeros where the tree has none.
    """

    tokens: list[list[int]]
    parents: list[list[int]]
    confidences: list[list[float]]


@dataclass
class DraftTree:
    """
    A tree of tokens to verify. Node 0 is the root, the last token that is already decided; parents precede children.

    Args:
        tokens (`torch.LongTensor` of shape `(batch_size, num_nodes)`): Target token ids.
        parents (`torch.LongTensor` of shape `(batch_size, num_nodes)`): Index of each node's parent; the root's is 0.
        depths (`torch.LongTensor` of shape `(batch_size, num_nodes)`): Distance from the root.
        ancestors (`torch.BoolTensor` of shape `(batch_size, num_nodes, num_nodes)`):
            `ancestors[b, i, j]`: node `j` is node `i` or above it, so `i` attends to `j`.
        confidences (`torch.FloatTensor` of shape `(batch_size, num_nodes - 1)`, *optional*):
            Log-probabilities that nodes are accepted if their parents are, by the draft: of all but the root.
        depth (`int`, *optional*): No node is deeper, if that is known.
    """

    tokens: torch.LongTensor
    parents: torch.LongTensor
    depths: torch.LongTensor
    ancestors: torch.BoolTensor
    confidences: torch.FloatTensor | None = None
    depth: int | None = None
    _on_host: "TreeOnHost | None" = None

    FIXED_POINT: ClassVar[int] = 2**20
    LEAST_CONFIDENCE: ClassVar[float] = -1e6

    @property
    def num_nodes(self) -> int:
        """With the root."""
        return self.tokens.shape[1]

    @classmethod
    def from_parents(
        cls,
        tokens: torch.LongTensor,
        parents: torch.LongTensor,
        confidences: torch.FloatTensor | None = None,
        depth: int | None = None,
    ) -> "DraftTree":
        """
        Works out depths and ancestors.

        Args:
            tokens (`torch.LongTensor` of shape `(batch_size, num_nodes)`): Target token ids, the root's first.
            parents (`torch.LongTensor` of shape `(batch_size, num_nodes)`): `parents[b, i] < i`, but for the root.
            confidences, depth (*optional*): As [`DraftTree`] has them.
        """
        batch_size, num_nodes = tokens.shape
        ancestors = torch.eye(num_nodes, dtype=torch.bool, device=tokens.device).repeat(batch_size, 1, 1)
        jump = parents
        # After round r every node knows its 2**r - 1 nearest ancestors, and `jump` leads 2**r nodes up.
        for _ in range((num_nodes - 1 if depth is None else min(depth, num_nodes - 1)).bit_length()):
            ancestors = ancestors | ancestors.gather(1, jump[:, :, None].expand_as(ancestors))
            jump = jump.gather(1, jump)
        return cls(tokens, parents, ancestors.sum(-1) - 1, ancestors, confidences, depth)

    @classmethod
    def chain(cls, tokens: torch.LongTensor) -> "DraftTree":
        """
        The tree of one path, or of nothing but the root.

        Args:
            tokens (`torch.LongTensor` of shape `(batch_size, num_nodes)`): Target token ids, the root's first.
        """
        num_nodes = tokens.shape[1]
        depths = torch.arange(num_nodes, device=tokens.device).expand_as(tokens)
        ancestors = torch.ones(num_nodes, num_nodes, dtype=torch.bool, device=tokens.device).tril()
        return cls(
            tokens, (depths - 1).clamp(min=0), depths, ancestors.expand(len(tokens), -1, -1), depth=num_nodes - 1
        )

    def to(self, device) -> "DraftTree":
        """The tree on a device."""
        if self.tokens.device == device:
            return self
        confidences = None if self.confidences is None else self.confidences.to(device)
        return DraftTree(
            *(x.to(device) for x in (self.tokens, self.parents, self.depths, self.ancestors)), confidences, self.depth
        )

    @property
    def max_depth(self) -> int:
        """No node is deeper."""
        return self.num_nodes - 1 if self.depth is None else min(self.depth, self.num_nodes - 1)

    def on_host(self, *others: torch.LongTensor) -> tuple[TreeOnHost, list[list[list[int]]]]:
        """
        The tree as lists, and `others` `(B, N)` with it: all in one copy, since each one waits for the device.
        """
        rows = list(others)
        if self._on_host is None:
            rows += [self.tokens, self.parents]
            if self.confidences is not None:  # as numbers with a fixed point, to travel with integers
                fixed = (self.confidences.clamp(min=self.LEAST_CONFIDENCE) * self.FIXED_POINT).round().long()
                rows.append(F.pad(fixed, (1, 0)))
        read = torch.stack(rows).tolist() if rows else []
        if self._on_host is None:
            tokens, parents, *confidences = read[len(others) :]
            unit = 1 / self.FIXED_POINT
            confidences = [[each * unit for each in row] for row in (confidences[0] if confidences else [])]
            self._on_host = TreeOnHost(tokens, parents, confidences or [[0.0] * self.num_nodes] * len(tokens))
        return self._on_host, read[: len(others)]

    def children(self) -> list[dict[tuple[int, int], int]]:
        """For each batch row `{(parent, token): node}`, on the host: what a walk from the root looks up."""
        if self.num_nodes == 1:
            return [{} for _ in self.tokens]
        read, _ = self.on_host()
        return [
            {(parents[node], tokens[node]): node for node in range(1, self.num_nodes)}
            for tokens, parents in zip(read.tokens, read.parents)
        ]

    def with_padded_rows(self, rows: list[bool], pad_token: int, depth: int) -> "DraftTree":
        """Replaces the trees of some rows, whose next tokens are known to be padding, by chains of that: of `depth`, or as
        deep as the others."""
        if self.num_nodes == 1 or not any(rows):
            return self
        depth = depth if self.depth is None else self.depth
        tokens, parents = self.tokens.clone(), self.parents.clone()
        tokens[rows, 1:] = pad_token
        parents[rows, 1:] = torch.arange(self.num_nodes - 1, device=parents.device).clamp(max=depth - 1)
        return DraftTree.from_parents(tokens, parents, self.confidences, depth)


def grow_tree(
    root_tokens: torch.LongTensor,
    logits: torch.FloatTensor,
    hidden_states: torch.FloatTensor,
    advance: Callable[..., tuple[torch.FloatTensor, torch.FloatTensor]],
    draft_token_ids: torch.LongTensor | None,
    plan: Plan,
    threshold: float = 0.0,
    power: float | torch.FloatTensor = 1.0,
    guess: Callable[[torch.FloatTensor, int], torch.FloatTensor] | None = None,
) -> DraftTree:
    """
    Expands the most probable nodes level by level, then keeps the most probable of all of them (EAGLE-2, sections 4.1
    and 4.2). A node's value is the probability of the whole path to it.

    Args:
        root_tokens (`torch.LongTensor` of shape `(B, 1)`): The tokens the trees hang from.
        logits (`torch.FloatTensor` of shape `(B, draft_vocab_size)`): The draft's scores for the root's children.
        hidden_states (`torch.FloatTensor` of shape `(B, H)`): What the root's children take as hidden state.
        advance (`Callable`):
            `advance(tokens (B, K), hidden_states (B, K, H), level, visible (B, K, T)) -> logits (B, K, V),
            hidden_states (B, K, H)`: one drafting step for `K` nodes at depth `level`. `visible` tells which of the
            `T` rows advanced so far, these included, each of them attends to.
        draft_token_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`, *optional*):
            Target ids of the draft vocabulary, if that is another one.
        plan (`Plan`):
            The largest tree: `depth - 1` calls of `advance`. Its prices make it smaller where the draft is unsure, in
            the way of OPT-Tree (https://huggingface.co/papers/2406.17276); then the host reads each level. Without
            them all shapes are fixed, and nothing is read but for a `threshold`.
        threshold (`float`, *optional*, defaults to 0): Nodes of a lower value are not kept.
        power (`float`, *optional*, defaults to 1): The draft's probabilities are taken to it (see `Calibration`).
        guess (`Callable`, *optional*):
            `guess(logits (..., V), level) -> scores (..., V)`: what takes the place of the draft's logits for the
            children of nodes at depth `level`, if the target samples ([`~noise_eagle3.sample_scores`]).
    """
    batch_size, device, prices = logits.shape[0], logits.device, plan.prices
    width = min(plan.branching_factor, logits.shape[-1])
    lowest = math.log(threshold) if threshold > 0 else -math.inf

    def best_children(logits, level):  # (..., V) -> log-probabilities and ids, both (..., K)
        scores = logits.float() if guess is None else guess(logits, level)
        confidences, ids = (power * scores).log_softmax(dim=-1).topk(width)
        # A draft may be broken and floats round: whatever it says, no child outranks its parent.
        return confidences.nan_to_num(nan=-torch.inf).clamp(max=0), ids

    def target_ids(ids):
        return ids if draft_token_ids is None else draft_token_ids.take(ids)

    def expected(values):  # probabilities that nodes are accepted, averaged over the rows that count
        return (values if all(prices.rows) else values[prices.rows]).exp().mean(dim=0).tolist()

    # The pool of all candidates, and the frontier: the K of them that may be expanded next.
    values, ids = best_children(logits, 0)  # (B, K)
    pool_values, pool_ids, pool_confidences = values, ids, [values]
    frontier = torch.arange(width, device=device).expand(batch_size, width)  # as indices into the pool
    expanded: list[torch.LongTensor] = []
    hidden_states = hidden_states[:, None].expand(-1, width, -1)  # (B, K, H)
    # Which of the rows advanced so far are above each of them, (B, K, T).
    above = torch.ones(batch_size, width, 0, dtype=torch.bool, device=device)
    mass_before = 1.0
    for level in range(1, plan.depth):
        if prices is not None:
            # A child is worth at most what its parent is: nothing below would be among the best.
            num_better = (pool_values >= values[:, :1]).sum(dim=1)
            if not ((values[:, 0] > lowest) & (num_better < plan.num_nodes)).any():
                break
            # A level keeps about as much of each node as the one before did. Only nodes that are worth verifying count.
            worth, node_price = expected(values), prices.nodes[-1] / (len(prices.nodes) - 1)
            mass = max(sum(worth), 1e-9)
            kept, mass_before = min(mass / mass_before, 1.0), mass
            gains = [kept * each - node_price for each in worth if kept * each > node_price]
            num_expanded = max(len(gains), 1)
            if sum(gains) <= prices.level:
                break
            if num_expanded < ids.shape[1]:
                values, ids, frontier, hidden_states, above = (
                    entries[:, :num_expanded] for entries in (values, ids, frontier, hidden_states, above)
                )
        expanded.append(frontier)
        itself = torch.eye(ids.shape[1], dtype=torch.bool, device=device).expand(batch_size, -1, -1)
        visible = torch.cat([above, itself], dim=-1)
        logits, hidden_states = advance(target_ids(ids), hidden_states, level, visible)
        confidences, child_ids = best_children(logits, level)  # (B, K, K)
        child_values, child_ids = (values[..., None] + confidences).flatten(1), child_ids.flatten(1)
        pool_confidences.append(confidences.flatten(1))
        values, best = child_values.topk(width)  # (B, K)
        ids, parent = child_ids.gather(1, best), best // width
        frontier = best + pool_values.shape[1]
        pool_values = torch.cat([pool_values, child_values], dim=1)
        pool_ids = torch.cat([pool_ids, child_ids], dim=1)
        hidden_states = take_rows(hidden_states, parent)
        above = visible.gather(1, parent[..., None].expand(-1, -1, visible.shape[-1]))

    # Candidates stand in the pool level by level, so a stable sort puts a parent before a child of equal value, and
    # whatever is kept is kept with its parent. Back in pool order, parents precede children.
    ranked_values, ranking = pool_values.sort(dim=1, descending=True, stable=True)
    num_kept = min(plan.num_nodes, pool_values.shape[1])
    if threshold > 0:
        num_kept = min(num_kept, int((ranked_values >= lowest).sum(dim=1).max()))
    if prices is not None:
        gains = list(itertools.accumulate(expected(ranked_values[:, :num_kept]), initial=0.0))
        gains = [gain - price for gain, price in zip(gains, prices.nodes)]
        least = min(prices.must_verify, num_kept)
        num_kept = max(range(least, len(gains)), key=gains.__getitem__)
    kept = ranking[:, :num_kept].sort(dim=1).values  # (B, N)
    # After the root's come the K children of each node that was expanded, in the order in which that was done.
    parents = torch.cat(expanded or [frontier], dim=1).gather(1, (kept // width - 1).clamp(min=0))
    parents = torch.where(kept < width, 0, torch.searchsorted(kept, parents) + 1)
    return DraftTree.from_parents(
        torch.cat([root_tokens, target_ids(pool_ids.gather(1, kept))], dim=1),
        torch.cat([torch.zeros_like(root_tokens), parents], dim=1),
        torch.cat(pool_confidences, dim=1).gather(1, kept),
        depth=1 + len(expanded),
    )

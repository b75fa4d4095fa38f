"""Static trees: the same ranks of children are verified in every step, whatever the draft's confidence."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch

from ..remote_code.tree_eagle3 import DraftTree, Plan
from ..training.ttt import TTTBatch, counted_rows


# A guess of how often the child of each of eight ranks is right, at each of eight depths.
GUESSED_ACCURACIES = (0.5 ** torch.arange(1, 9, dtype=torch.float64)).expand(8, 8)


def best_static_tree(accuracies: torch.Tensor, num_nodes: int = 64) -> list[list[int]]:
    """
    Returns the tree with the most expected accepted tokens. It grows greedily by the node with the most probable path, and
    treats depths as independent (Medusa, https://huggingface.co/papers/2401.10774, section 2.3.3).

    Args:
        accuracies (`torch.Tensor` of shape `(depth, width)`): How often the child of each rank is right, at each depth.
        num_nodes (`int`, *optional*, defaults to `64`): The most nodes that it may have.

    Returns:
        `list[list[int]]`: The path to each node, as ranks of children. The first `n` entries are the best tree of `n` nodes.
    """
    depth, width = accuracies.shape
    rates = accuracies.double().tolist()
    tree: list[list[int]] = []
    candidates: dict[tuple[int, ...], float] = {(0,): rates[0][0]}
    while candidates and len(tree) < num_nodes:
        path = max(candidates, key=candidates.__getitem__)
        value = candidates.pop(path)
        tree.append(list(path))
        *above, rank = path
        level = len(above)
        if rank + 1 < width and rates[level][rank] > 0:
            sibling = (*above, rank + 1)
            candidates[sibling] = value / rates[level][rank] * rates[level][rank + 1]
        if level + 1 < depth:
            child = (*path, 0)
            candidates[child] = value * rates[level + 1][0]
    return tree


def part_of_tree(tree: list[list[int]], plan: Plan) -> list[tuple[int, ...]]:
    """Returns the nodes that a [`Plan`] has room for, level by level."""
    fits = [path for path in tree if len(path) <= plan.depth and max(path) < plan.branching_factor]
    return sorted(map(tuple, islice(fits, plan.num_nodes)), key=len)


def grow_static_tree(
    tree: list[list[int]],
    root_tokens: torch.Tensor,
    logits: torch.Tensor,
    hidden_states: torch.Tensor,
    advance: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    token_ids: torch.Tensor | None,
    plan: Plan,
    threshold: float = 0.0,
    power: float | torch.Tensor = 1.0,
    guess: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
) -> DraftTree:
    """
    Fills a static `tree` (see [`best_static_tree`]) with the draft's tokens. For the other arguments see
    [`~tree_eagle3.grow_tree`]. `threshold` and `power` have no effect, because the draft's confidence does not count.
    """
    paths = part_of_tree(tree, plan)
    number: dict[tuple[int, ...], int] = {(): 0} | {path: i for i, path in enumerate(paths, start=1)}
    has_children = {path[:-1] for path in paths}
    batch_size, device = logits.shape[0], logits.device
    tokens, parents = [root_tokens], [0, *(number[path[:-1]] for path in paths)]
    frontier: list[tuple[int, ...]] = [()]  # the K nodes of the level above that have children
    logits, hidden_states = logits[:, None], hidden_states[:, None]  # of these, (B, K, ...)
    above = torch.zeros(batch_size, 1, 0, dtype=torch.bool, device=device)  # the advanced rows on each path, (B, K, T)
    for level in range(plan.depth):
        nodes = [path for path in paths if len(path) == level + 1]
        if not nodes:
            break
        scores = logits if guess is None else guess(logits, level)
        place = [frontier.index(path[:-1]) for path in nodes]
        # A small vocabulary may lack a rank. Its last token stands in, and is verified twice.
        ranks = [min(path[-1], scores.shape[-1] - 1) for path in nodes]
        children = scores.topk(max(ranks) + 1, dim=-1).indices[:, place, ranks]  # (B, N)
        children = children if token_ids is None else token_ids[children]
        tokens.append(children)
        expanded = [i for i, path in enumerate(nodes) if path in has_children]
        if not expanded:
            break
        place = [place[i] for i in expanded]
        itself = torch.eye(len(expanded), dtype=torch.bool, device=device).expand(batch_size, -1, -1)
        above = torch.cat([above[:, place], itself], dim=-1)
        logits, hidden_states = advance(children[:, expanded], hidden_states[:, place], level + 1, above)
        frontier = [nodes[i] for i in expanded]
    parent_ids = torch.tensor(parents, device=device).expand(batch_size, -1)
    return DraftTree.from_parents(torch.cat(tokens, dim=1), parent_ids, depth=max([0, *map(len, paths)]))


@torch.no_grad()
def measure_accuracies(
    draft: Any, batches: Iterable[TTTBatch], depth: int, width: int = 8, max_logits: int = 2**25
) -> torch.Tensor:
    """
    Measures on texts how often the draft's child of each rank is the target's most probable token. For
    [`best_static_tree`].

    Args:
        draft (`PreTrainedModel`): The draft.
        batches (`Iterable[TTTBatch]`): Texts, with the target's states.
        depth, width (`int`): How many steps and ranks to measure.
        max_logits (`int`, *optional*, defaults to `2**25`): The most logits to keep in memory at a time.

    Returns:
        `torch.DoubleTensor` of shape `(depth, width)`.
    """
    hits, num_rows = torch.zeros(depth, width, dtype=torch.float64), torch.zeros(depth, 1, dtype=torch.float64)
    was_training = draft.training
    draft.eval()
    for batch in batches:
        for step, (states, head, *_) in enumerate(draft.unroll(batch, depth)):
            rows = counted_rows(batch.labels, batch.documents, step)
            num = rows.shape[1]
            width = min(width, draft.config.draft_vocab_size)
            piece = max(max_logits // (len(states) * draft.config.draft_vocab_size), 1)
            best = [head(rows).topk(width, dim=-1).indices for rows in states[:, :num].split(piece, dim=1)]
            best = draft.draft_token_ids[torch.cat(best, dim=1)]  # (B, R, width)
            is_hit = best == batch.target_tokens[:, 1 + step : 1 + step + num, None]
            hits[step, :width] += (is_hit & rows[..., None]).sum(dim=(0, 1)).cpu()
            num_rows[step] += rows.sum().cpu()
    draft.train(was_training)
    return hits / num_rows.clamp(min=1)

"""Trees of a fixed form: of which children are verified below which nodes does not depend on what the draft says."""

from collections.abc import Iterable
from itertools import islice

import torch

from ..remote_code.tree_eagle3 import DraftTree
from ..training.ttt import TTTBatch, counted_rows


MOST_NODES = 64


def guessed_accuracies(depth: int = 8, width: int = 8) -> torch.Tensor:
    """How often the child of each rank is right, at each depth, where nothing was measured: `(depth, width)`."""
    return (0.5 ** torch.arange(1, width + 1, dtype=torch.float64)).expand(depth, width)


def best_static_tree(accuracies: torch.Tensor, num_nodes: int = MOST_NODES) -> list[list[int]]:
    """
    The tree of so many nodes that is expected to have the most accepted: of all nodes that could be added, always the
    one whose path is the most probable (Medusa, https://huggingface.co/papers/2401.10774, section 2.3.3, where depths
    are taken to be independent).

    Args:
        accuracies (`torch.Tensor` of shape `(depth, width)`): How often the child of each rank is right, at each depth.
        num_nodes (`int`, *optional*, defaults to `64`): How many nodes, at most.

    Returns:
        `list[list[int]]`: The path to each node, as the ranks of children. Its first `n` entries are the best tree of
        `n` nodes.
    """
    depth, width = accuracies.shape
    rates = accuracies.double().tolist()
    tree, candidates = [], {(0,): rates[0][0]}
    while candidates and len(tree) < num_nodes:
        path = max(candidates, key=candidates.get)
        value = candidates.pop(path)
        tree.append(list(path))
        *above, rank = path
        level = len(above)
        if rank + 1 < width and rates[level][rank] > 0:
            candidates[(*above, rank + 1)] = value / rates[level][rank] * rates[level][rank + 1]
        if level + 1 < depth:
            candidates[(*path, 0)] = value * rates[level + 1][0]
    return tree


def part_of_tree(tree: list[list[int]], plan) -> list[tuple[int, ...]]:
    """The nodes that a [`Plan`] has room for, level by level, parents before their children."""
    fits = [path for path in tree if len(path) <= plan.depth and max(path) < plan.branching_factor]
    return sorted(map(tuple, islice(fits, plan.num_nodes)), key=len)


def grow_static_tree(root_tokens, logits, hidden_states, advance, token_ids, plan, tree, guess=None) -> DraftTree:
    """
    Grows a tree of a fixed form.

    Args:
        root_tokens, logits, hidden_states, advance, token_ids, plan, guess: See [`~tree_eagle3.grow_tree`].
        tree (`list[list[int]]`): See [`best_static_tree`].
    """
    paths = part_of_tree(tree, plan)
    number = {(): 0} | {path: i for i, path in enumerate(paths, start=1)}
    has_children = {path[:-1] for path in paths}
    batch_size, device = logits.shape[0], logits.device
    tokens, parents = [root_tokens], [0, *(number[path[:-1]] for path in paths)]
    frontier, logits, hidden_states = [()], logits[:, None], hidden_states[:, None]  # nodes with children, (B, K, ...)
    above = torch.zeros(batch_size, 1, 0, dtype=torch.bool, device=device)  # which rows advanced so far, (B, K, T)
    for level in range(plan.depth):
        nodes = [path for path in paths if len(path) == level + 1]
        if not nodes:
            break
        scores = logits if guess is None else guess(logits, level)
        place = [frontier.index(path[:-1]) for path in nodes]
        # Ranks that a small vocabulary does not have repeat its last token, which is then verified twice.
        ranks = [min(path[-1], scores.shape[-1] - 1) for path in nodes]
        children = scores.topk(max(ranks) + 1, dim=-1).indices[:, place, ranks]  # (B, N)
        children = children if token_ids is None else token_ids.take(children)
        tokens.append(children)
        expanded = [i for i, path in enumerate(nodes) if path in has_children]
        if not expanded:
            break
        place = [place[i] for i in expanded]
        itself = torch.eye(len(expanded), dtype=torch.bool, device=device).expand(batch_size, -1, -1)
        above = torch.cat([above[:, place], itself], dim=-1)
        logits, hidden_states = advance(children[:, expanded], hidden_states[:, place], level + 1, above)
        frontier = [nodes[i] for i in expanded]
    parents = torch.tensor(parents, device=device).expand(batch_size, -1)
    return DraftTree.from_parents(torch.cat(tokens, dim=1), parents, depth=max(map(len, paths), default=0))


@torch.no_grad()
def measure_accuracies(
    draft, batches: Iterable[TTTBatch], depth: int, width: int = 8, max_logits: int = 2**25
) -> torch.Tensor:
    """
    How often the target's most probable token is the draft's of each rank, `depth` steps deep, on text: `(depth,
    width)`, for [`best_static_tree`].

    Args:
        draft (`PreTrainedModel`): The draft.
        batches (`Iterable[TTTBatch]`): Texts, with the target's states.
        depth, width (`int`): Of the tree, at most.
        max_logits (`int`, *optional*, defaults to `2**25`): How many logits stand in memory at a time, at most.
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

"""Grows trees from the distributions of one pass."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ..remote_code.devices_eagle3 import on_device
from ..remote_code.tree_eagle3 import Candidates, DraftTree, Plan, best_tokens, best_tree, grow_tree


def grow_block_tree(
    root_tokens: torch.Tensor,  # (B, 1)
    scores: torch.Tensor,  # (B, D, V): logits of the tokens at each depth
    token_ids: torch.Tensor | None,  # (V,): the target's ids of the draft vocabulary, if it differs
    plan: Plan,
    threshold: float = 0.0,  # less probable paths are left out
) -> DraftTree:
    """
    Returns the most probable paths, where the probability of a path is the product of its tokens' (DDTree,
    https://huggingface.co/papers/2604.12989). JetSpec (https://huggingface.co/papers/2606.18394) scores paths the same
    way; its code calls it `accum_logp`. No other tree with as many nodes has a larger sum of probabilities.

    The distributions are independent: no token of a path conditions the next one.

    The plan's prices make the tree smaller where the draft is unsure. Depth costs nothing, so the price of a level is ignored.
    """
    batch_size, depth, vocab_size = scores.shape
    width, most = min(plan.branching_factor, vocab_size), plan.num_nodes
    confidences, ids = best_tokens(scores, width)  # (B, D, W)
    # The child of rank `j` below the node of rank `i` has `(i + 1) * (j + 1) - 1` nodes of its level before it.
    num_children = [min(width, most // (i + 1)) for i in range(most)]
    pairs = [(i, j) for i, num in enumerate(num_children) for j in range(num)]
    all_above, all_ranks = on_device(pairs, scores.device).T
    values, nodes = scores.new_zeros(batch_size, 1), root_tokens.new_full((batch_size, 1), -1)
    pool: list[Candidates] = []
    num_candidates = 0
    for level in range(depth):
        num_pairs = sum(num_children[: values.shape[1]])
        above, ranks = all_above[:num_pairs], all_ranks[:num_pairs]
        values, best = (values[:, above] + confidences[:, level, ranks]).topk(min(most, num_pairs))  # (B, N)
        parents, ranks = nodes.gather(1, above[best]), ranks[best]
        pool.append(
            Candidates(values, parents, ids[:, level].gather(1, ranks), confidences[:, level].gather(1, ranks))
        )
        nodes = num_candidates + torch.arange(values.shape[1], device=scores.device).expand(batch_size, -1)
        num_candidates += values.shape[1]
    return best_tree(root_tokens, pool, plan, threshold, token_ids)


# How many tokens of a level DSpark's trees try for each row of a batch.
NUM_CANDIDATES = 1024


def grow_markov_tree(
    root_tokens: torch.Tensor,  # (B, 1)
    logits: torch.Tensor,  # (B, D, V): of the tokens at each depth
    # What tokens add to these logits of their children.
    markov_head: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    token_ids: torch.Tensor | None,  # (V,): the target's ids of the draft vocabulary, if it differs
    plan: Plan,
    threshold: float = 0.0,
    power: float | torch.Tensor = 1.0,
    guess: Callable[..., torch.Tensor] | None = None,
) -> DraftTree:
    """
    Returns the tree of a draft whose distributions are corrected by the token before (DSpark,
    https://huggingface.co/papers/2607.05147). The paper drafts a chain. A tree grows level by level as EAGLE-2's,
    without another pass of the draft's layers: see [`~tree_eagle3.grow_tree`], also for `threshold`, `power` and `guess`.

    Only the [`NUM_CANDIDATES`] most probable tokens of a level, before their correction, are corrected and proposed. Their
    probabilities are taken to add up to 1. The paper corrects the whole vocabulary for each parent, which takes far longer on a CPU.
    With a small target as much was accepted.
    """
    num = min(NUM_CANDIDATES * len(logits), logits.shape[-1])
    candidates: list[torch.Tensor] = []  # (C,) of each level, by the target's ids. Rows share them

    def advance(tokens: torch.Tensor, states: torch.Tensor, level: int, visible: torch.Tensor | None = None) -> tuple:
        tokens = candidates[-1][tokens] if candidates else tokens
        ids = logits[:, level].float().log_softmax(dim=-1).amax(dim=0).topk(num).indices  # (C,)
        candidates.append(ids if token_ids is None else token_ids[ids])
        return logits[:, level, ids][:, None] + markov_head(tokens, ids), states

    def guess_among(scores: torch.Tensor, level: int) -> torch.Tensor:
        return scores.float() if guess is None else guess(scores, level, token_ids=candidates[level])

    plan = plan._replace(depth=min(plan.depth, logits.shape[1]))
    states = logits.new_empty(len(logits), 0)  # the head reads none
    of_children, _ = advance(root_tokens, states, 0)  # (B, 1, C)
    tree = grow_tree(root_tokens, of_children[:, 0], states, advance, None, plan, threshold, power, guess_among)
    tokens = torch.stack(candidates)[tree.depths[:, 1:] - 1, tree.tokens[:, 1:]]
    return replace(tree, tokens=torch.cat([root_tokens, tokens], dim=1))

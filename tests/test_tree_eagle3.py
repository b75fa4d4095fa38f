import pytest
import torch

from hf_eagle3.remote_code.tree_eagle3 import DraftTree, Plan, Prices, grow_tree


VOCAB = 11
HIDDEN = 3


class TableDraft:
    """A draft whose next-token scores depend on the whole path, which it carries as hidden state."""

    def __init__(self, seed=0, dtype=torch.float32, scale=3.0, peaked=False):
        self.generator_seed, self.dtype, self.scale, self.peaked = seed, dtype, scale, peaked

    def scores(self, path):
        generator = torch.Generator().manual_seed(hash((self.generator_seed, *path)) % (2**31))
        scores = torch.randn(VOCAB, generator=generator) * self.scale
        if self.peaked:  # log-probabilities of exactly 0 and -inf: every comparison is a tie
            scores = torch.full((VOCAB,), -torch.inf).scatter(0, scores.argmax()[None], 0.0)
        return scores.to(self.dtype)


def naive_tree(draft, depth, width, budget, expanded=None):
    """EAGLE-2 with Python lists: expand the best nodes of each level, by default `width`, keep the best `budget` of all."""
    nodes = []  # (value, path), level by level
    frontier = [(0.0, ())]
    for level in range(depth):
        candidates = []
        for value, path in frontier:
            log_probs = draft.scores(path).float().log_softmax(-1)
            for token in log_probs.topk(width).indices.tolist():
                candidates.append((value + log_probs[token].item(), (*path, token)))
        nodes += candidates
        frontier = sorted(candidates, key=lambda node: -node[0])[: expanded or width]
        assert level == 0 or all(path[:-1] in {p for _, p in nodes} for _, path in frontier)
    return {path for _, path in sorted(nodes, key=lambda node: -node[0])[:budget]}


def grow(draft, depth, width, budget, draft_token_ids=None, threshold=0.0, prices=None):
    """Runs `grow_tree` on a `TableDraft`; the hidden state is an index into the paths seen so far."""
    paths = [()]

    def advance(tokens, hidden_states, level, visible):
        logits, out = [], []
        for slot, token in enumerate(tokens[0].tolist()):
            parent = paths[int(hidden_states[0, slot, 0])]
            paths.append((*parent, token))
            assert visible[0, slot].sum() == level  # itself and its ancestors below the root
            logits.append(draft.scores(paths[-1]))
            out.append([len(paths) - 1.0] * HIDDEN)
        return torch.stack(logits)[None], torch.tensor(out)[None]

    return grow_tree(
        torch.tensor([[99]]),
        draft.scores(())[None],
        torch.zeros(1, HIDDEN),
        advance,
        draft_token_ids,
        Plan("draft", depth, budget, width, prices),
        threshold,
    )


def paths_of(tree):
    paths = [()]
    for node in range(1, tree.num_nodes):
        paths.append((*paths[tree.parents[0, node]], int(tree.tokens[0, node])))
    return paths


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_grow_tree_keeps_the_nodes_that_a_naive_search_keeps(depth, width, budget):
    draft = TableDraft(seed=depth * 100 + width)
    tree = grow(draft, depth, width, budget)
    paths = paths_of(tree)
    assert len(set(paths)) == len(paths)
    assert set(paths[1:]) == naive_tree(draft, depth, width, budget)
    assert int(tree.tokens[0, 0]) == 99


def probability(draft, path):
    log_probs = [draft.scores(path[:i]).float().log_softmax(-1)[token] for i, token in enumerate(path)]
    return torch.stack(log_probs).sum().exp().item()


def priced(level, node, budget=40, **kwargs):
    return Prices(level, [node * size for size in range(budget + 1)], rows=[True], **kwargs)


def test_prices_of_nothing_change_nothing():
    draft = TableDraft(seed=5)
    tree = grow(draft, 4, 4, 40, prices=priced(0.0, 0.0))
    assert set(paths_of(tree)[1:]) == naive_tree(draft, 4, 4, 40)
    rebuilt = DraftTree.from_parents(tree.tokens, tree.parents)
    assert torch.equal(tree.ancestors, rebuilt.ancestors) and torch.equal(tree.depths, rebuilt.depths)


@pytest.mark.parametrize("node", [0.01, 0.1, 0.3])
def test_only_nodes_that_are_worth_their_price_are_verified(node):
    draft = TableDraft(seed=5)
    paths = set(paths_of(grow(draft, 4, 4, 40, prices=priced(0.0, node)))[1:])

    everything = naive_tree(draft, 4, 4, 10**6)
    assert paths == {path for path in everything if probability(draft, path) > node}


def test_levels_have_their_price_and_a_trial_verifies():
    draft = TableDraft(seed=5)
    assert max(map(len, paths_of(grow(draft, 4, 4, 40, prices=priced(10.0, 0.0))))) == 1
    assert grow(draft, 4, 4, 40, prices=priced(0.0, 10.0)).num_nodes == 1
    assert grow(draft, 4, 4, 40, prices=priced(0.0, 10.0, must_verify=True)).num_nodes == 2


@pytest.mark.parametrize("threshold", [0.001, 0.05, 0.9999])
def test_threshold_drops_improbable_nodes_and_no_others(threshold):
    draft = TableDraft(seed=3)
    tree = grow(draft, 4, 4, 64, threshold=threshold)
    kept, everything = set(paths_of(tree)[1:]), naive_tree(draft, 4, 4, 10**6)

    assert kept == {path for path in everything if probability(draft, path) >= threshold}


@pytest.mark.parametrize("draft", [TableDraft(dtype=torch.bfloat16, scale=0.0), TableDraft(peaked=True)])
def test_ties_never_separate_a_node_from_its_parent(draft):
    for budget in range(1, 40):
        tree = grow(draft, 5, 4, budget)
        assert (tree.parents[0, 1:] < torch.arange(1, tree.num_nodes)).all()
        assert len(set(paths_of(tree))) == tree.num_nodes


def test_a_broken_draft_still_gives_a_tree():
    draft = TableDraft()
    draft.scores = lambda path: torch.full((VOCAB,), torch.nan)
    tree = grow(draft, 4, 3, 12)
    assert (tree.parents[0, 1:] < torch.arange(1, tree.num_nodes)).all()


def test_tokens_are_mapped_to_target_ids():
    token_ids = torch.arange(VOCAB) * 3
    draft, mapped = TableDraft(), TableDraft()
    mapped.scores = lambda path: draft.scores(tuple(token // 3 for token in path))
    plain, tree = grow(draft, 3, 4, 20), grow(mapped, 3, 4, 20, draft_token_ids=token_ids)
    assert torch.equal(plain.parents, tree.parents)
    assert torch.equal(plain.tokens[0, 1:] * 3, tree.tokens[0, 1:])


def test_depths_and_ancestors():
    #        0
    #      1   2
    #      3  4 5
    #      6
    tokens, parents = torch.arange(7)[None], torch.tensor([[0, 0, 0, 1, 2, 2, 3]])
    tree = DraftTree.from_parents(tokens, parents)
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 2, 3]]
    expected = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 2, 4}, {0, 2, 5}, {0, 1, 3, 6}]
    assert [set(row.nonzero().flatten().tolist()) for row in tree.ancestors[0]] == expected
    assert tree.children()[0][(2, 5)] == 5 and (1, 5) not in tree.children()


def test_padded_rows_are_as_deep_as_the_others():
    """Not as what was planned: how long drafting took is of the levels that there are."""
    tree = DraftTree.from_parents(torch.tensor([[5, 6, 7, 8]] * 2), torch.tensor([[0, 0, 1, 1]] * 2), depth=2)
    padded = tree.with_padded_rows([False, True], 3, depth=6)
    assert padded.depth == 2 and padded.parents.tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]
    assert padded.tokens.tolist() == [[5, 6, 7, 8], [5, 3, 3, 3]] and padded.depths.tolist()[1] == [0, 1, 2, 2]
    unknown = DraftTree.from_parents(tree.tokens, tree.parents).with_padded_rows([False, True], 3, depth=6)
    assert unknown.depths.tolist()[1] == [0, 1, 2, 3]


def test_long_chain_knows_all_its_ancestors():
    length = 37
    tree = DraftTree.from_parents(torch.arange(length)[None], torch.arange(length).sub(1).clamp(min=0)[None])
    assert torch.equal(tree.ancestors[0], torch.ones(length, length, dtype=torch.bool).tril())
    assert torch.equal(tree.depths[0], torch.arange(length))

"""Static caches on CPUs: trees are those of a dynamic cache, unless the target is compiled."""

import pytest
from conftest import assert_same_text, generate, make_batch, make_draft, make_prompt


STATIC = {"cache_implementation": "static"}
PROMPTS = [make_prompt(5), make_prompt(40)]


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def is_compiled(request, target, monkeypatch):
    if request.param:
        monkeypatch.setattr(target, "_compiled_call_impl", target._call_impl)  # as `target.compile()` does
    return request.param


@pytest.mark.parametrize("batch_size", [1, 2])
def test_draws_the_same_trees(target, verified, batch_size, is_compiled):
    trees, batch = [], make_batch([30, 9][:batch_size])
    draft = make_draft(target, PROMPTS, num_hidden_layers=2)
    draft.generation_config.tree_depth = 6  # deeper, two paths of this text come within 1e-6 of each other
    for cache in ({}, STATIC):
        verified.clear()
        generate(target, batch, assistant_model=draft, max_new_tokens=40, **cache)
        trees.append([(tree.tokens.tolist(), tree.parents.tolist()) for tree in verified])
    sizes = [len(tokens[0]) for tokens, _ in trees[0]]
    assert sizes.count(25) > 10 and set(sizes[-3:]) != {25}  # the text ends before a whole tree would
    # Where shapes are fixed, the last steps draft nothing. Finished rows leave a batch, if its cache is dynamic.
    compared = slice(12 if is_compiled or batch_size > 1 else None)
    assert trees[0][compared] == trees[1][compared]


def test_a_threshold_makes_trees_smaller_unless_they_are_compiled(target, verified, is_compiled):
    draft = make_draft(target, PROMPTS)
    draft.generation_config.assistant_confidence_threshold = 0.05
    assert_same_text(target, draft, PROMPTS[0], ours=STATIC, max_new_tokens=40)
    sizes = {tree.num_nodes for tree in verified}
    assert max(sizes) > 1 and (sizes <= {1, 25}) == is_compiled

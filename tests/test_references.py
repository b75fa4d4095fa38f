"""Masks, caches, inputs and limits of a step, against naive references."""

import random
from types import SimpleNamespace

import pytest
import torch
from conftest import make_target
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_eagle3.remote_code.cache_eagle3 import TreeCache, select_rows, tree_attention_mask
from hf_eagle3.remote_code.ragged_eagle3 import align_right, right_index, stack_right, take_rows
from hf_eagle3.remote_code.tree_eagle3 import DraftTree, Plan
from hf_eagle3.remote_code.verify_eagle3 import Verifier, extended_inputs


@pytest.mark.parametrize("seed", range(10))
def test_rows_that_end_at_the_right(seed):
    random_ = random.Random(seed)
    lengths = [random_.randint(0, 6) for _ in range(random_.randint(1, 4))]
    rows, width = [[random_.randint(1, 99) for _ in range(length)] for length in lengths], random_.randint(1, 8)
    expected = [([0] * width + row)[-width:] for row in rows]
    entries = torch.tensor([row + [-1] * (8 - len(row)) for row in rows])
    for leading in ((), (3,)):
        moved = align_right(entries.expand(*leading, *entries.shape), torch.tensor(lengths), width)
        assert moved.tolist() == (expected if not leading else [expected] * 3)
    assert align_right(torch.arange(1, 9)[None], torch.tensor(lengths), width).tolist() == [
        ([0] * width + list(range(1, length + 1)))[-width:] for length in lengths
    ]
    assert stack_right(rows).tolist() == [[0] * (max(lengths) - len(row)) + row for row in rows]
    index = right_index(torch.tensor(lengths), width).tolist()
    assert index == [[column - width + length for column in range(width)] for length in lengths]
    states, indices = torch.randn(len(rows), 5, 3), torch.randint(5, (len(rows), 4))
    expected = torch.stack([torch.stack([states[b, i] for i in row]) for b, row in enumerate(indices.tolist())])
    assert torch.equal(take_rows(states, indices), expected)


def filled(cache, batch_size, length, num_new):
    """A cache in whose every entry stands its row and its place: `1000 * row + place`."""
    places = torch.arange(length + num_new, dtype=torch.float32) + 1000 * torch.arange(batch_size)[:, None]
    states = places[:, None, :, None].expand(-1, 2, -1, 8).contiguous()
    for i in range(2):
        cache.update(states[..., :length, :], -states[..., :length, :], i)
    tree_cache = TreeCache(cache, path_length=6)
    for i in range(2):
        cache.update(states[..., length:, :], -states[..., length:, :], i)
    tree_cache.track(cache, num_new)
    return tree_cache


def places_in(cache, layer):
    states = cache.cache.layers[layer]
    keys = states.keys[..., : cache.length, :] if cache.is_static else states.keys
    values = states.values[..., : keys.shape[-2], :]
    assert torch.equal(keys, -values) and (keys == keys[:, :1, :, :1]).all()
    return keys[:, 0, :, 0].long().tolist()


def make_cache(kind, capacity=40):
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    config = LlamaConfig(num_hidden_layers=2, **(layers if kind == "sliding" else {}))
    return StaticCache(config=config, max_cache_len=capacity) if kind == "static" else DynamicCache(config=config)


@pytest.mark.parametrize("kind", ["dynamic", "sliding", "static"])
@pytest.mark.parametrize("seed", range(12))
def test_what_is_kept_of_a_cache(kind, seed):
    random_ = random.Random(seed)
    batch_size, length, num_new = random_.choice([1, 1, 3]), random_.randint(1, 14), random_.randint(1, 6)
    cache = filled(make_cache(kind), batch_size, length, num_new)
    same = sorted(random_.sample(range(num_new), random_.randint(1, num_new)))
    kept = [same for _ in range(batch_size)]
    if seed % 3 == 0:  # rows that keep different numbers of nodes
        kept = [sorted(random_.sample(range(num_new), random_.randint(0, num_new))) for _ in range(batch_size)]
        kept[0] = kept[0] or [0]
    growth = max(map(len, kept))
    cache.keep(kept, growth)
    assert cache.length == length + growth == int(cache.cache.get_seq_length())
    for layer in range(2):
        for row, places in enumerate(places_in(cache, layer)):
            expected = [1000 * row + place for place in [*range(length), *(length + node for node in kept[row])]]
            assert places[len(places) - min(len(expected), len(places)) :] == expected[-len(places) :]
            if kind == "sliding" and layer == 0:
                assert len(places) == min(7, length + growth)  # as many as the next token attends to
    cache.release()


@pytest.mark.parametrize("kind", ["dynamic", "sliding", "static"])
@pytest.mark.parametrize("how", ["take_back", "roll_back"])
def test_a_step_that_is_forgotten(kind, how):
    cache = filled(make_cache(kind), 2, 11, 5)
    if how == "roll_back" and kind != "static":  # the last layer had not read anything
        cache.cache.layers[1].crop(-5)
    getattr(cache, how)()
    assert cache.length == int(cache.cache.get_seq_length()) == 11
    for layer in range(2):
        for row, places in enumerate(places_in(cache, layer)):
            assert places == [1000 * row + place for place in range(11)][-len(places) :] and len(places) >= 7


def test_rows_that_stay():
    cache = filled(make_cache("dynamic"), 3, 9, 4)
    cache.keep([[0, 1, 2], [0], [1, 3]], growth=3)
    select_rows(cache.cache, [1, 2], 11, excess=1)
    assert [row[-1] for row in places_in(cache, 0)] == [1009, 2012]
    assert [len(row) for row in places_in(cache, 0)] == [11, 11] and places_in(cache, 0)[1][-2:] == [2010, 2012]


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention", "chunked_attention"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("seed", range(6))
def test_tree_mask(layer_type, kind, seed):
    random_ = random.Random(seed)
    batch_size, past, num_nodes, reach = random_.choice([1, 3]), random_.randint(1, 12), random_.randint(1, 7), 5
    num_queries = random_.randint(1, num_nodes)
    padding = [random_.randint(0, past - 1) for _ in range(batch_size)]
    parents = [[0] + [random_.randrange(node) for node in range(1, num_nodes)] for _ in range(batch_size)]
    tree = DraftTree.from_parents(torch.zeros(batch_size, num_nodes, dtype=torch.long), torch.tensor(parents))
    cache, states = make_cache(kind, capacity=25), torch.zeros(batch_size, 2, past + num_nodes - num_queries, 8)
    cache.update(states, states, 0)
    config = SimpleNamespace(layer_types=[layer_type], sliding_window=reach, attention_chunk_size=reach)
    padding_mask = torch.tensor([[0] * begin + [1] * (past - begin) for begin in padding])
    mask = tree_attention_mask(
        config, cache, past, tree.ancestors[:, -num_queries:], tree.depths[:, -num_queries:], tree.depths, padding_mask
    )[layer_type][:, 0]

    def depth(row, node):
        return 0 if node == 0 else 1 + depth(row, parents[row][node])

    def is_ancestor(row, node, other):
        return node == other or (node > 0 and is_ancestor(row, parents[row][node], other))

    for row in range(batch_size):
        for query, node in enumerate(range(num_nodes - num_queries, num_nodes)):
            at = past + depth(row, node)
            for key in range(mask.shape[-1]):
                if key < past:
                    place, allowed = key, key >= padding[row]
                elif key < past + num_nodes:
                    place, allowed = past + depth(row, key - past), is_ancestor(row, node, key - past)
                else:  # a slot that nothing is in
                    place, allowed = key, False
                if layer_type == "sliding_attention":
                    allowed &= at - place < reach
                if layer_type == "chunked_attention":
                    allowed &= (at - padding[row]) // reach == (place - padding[row]) // reach
                assert (mask[row, query, key] == 0) == allowed


@pytest.mark.parametrize("shape", ["one for all", "of each row", "of three kinds"])
@pytest.mark.parametrize("counts", [[1, 1], [3, 3], [1, 3], [0, 2]])
def test_inputs_are_extended_token_by_token(shape, counts):
    target, length = make_target("llama"), 6
    starts, growth = [2, 0], max(counts)  # where the text begins
    mask = torch.tensor([[0] * start + [1] * (length - start) for start in starts])
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    positions = {"one for all": positions[1:], "of each row": positions, "of three kinds": positions.expand(3, 2, -1)}
    inputs = {"attention_mask": mask, "position_ids": positions[shape], "token_type_ids": mask * 5}
    # Of a batch whose longest row is the second: what the first has less, it has more padding for.
    actual = extended_inputs(target, CausalLMOutputWithPast(), dict(inputs), counts, growth)
    for row, count in enumerate(counts):
        padding = starts[row] + growth - count
        text = length - starts[row] + count
        assert actual["attention_mask"][row].tolist() == [0] * padding + [1] * text
        assert actual["token_type_ids"][row].tolist() == [0] * padding + [5] * text
        ids = actual["position_ids"]
        for each in ids if ids.dim() == 3 else [ids]:
            first = 0 if shape != "one for all" else starts[row]
            assert each[row if len(each) > 1 else 0].tolist()[-text:] == list(range(first, first + text))


WHOLE = Plan("draft", depth=4, num_nodes=10, branching_factor=3)


def limited(plan=WHOLE, room=100, newest=20, config=(), is_static=False, is_chain=False, capacity=100, **cache):
    verifier = Verifier.__new__(Verifier)
    verifier.config, verifier.num_nodes = SimpleNamespace(rope_parameters={"rope_type": "default"}), 10
    vars(verifier.config).update(config)
    verifier.cache = SimpleNamespace(
        **{"is_static": is_static, "is_chain": is_chain, "capacity": capacity, "length": 20, "may_read_tree": True}
        | cache
    )
    verifier.inputs = {"position_ids": torch.tensor([[newest]])}
    return verifier.limited(plan, SimpleNamespace(max_length=21 + room, shortest=21, longest=21))


LONGROPE = {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 30}}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 30}
TABLE = {"rope_parameters": None, "max_position_embeddings": 30}
SCALED = {"attn_temperature_tuning": True, "floor_scale": 32}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, WHOLE),
        ({"plan": WHOLE._replace(depth=20)}, WHOLE._replace(depth=10)),  # no deeper than it has nodes
        ({"room": 3}, WHOLE._replace(depth=2)),  # the last token needs no forward
        ({"room": 1}, Plan()),
        ({"is_chain": True}, WHOLE._replace(branching_factor=1)),
        ({"may_read_tree": False}, Plan()),
        ({"length": 5}, Plan()),  # Phi-3 lost its cache
        ({"is_static": True}, WHOLE),
        ({"is_static": True, "room": 2}, WHOLE),  # of one shape, or none
        ({"is_static": True, "capacity": 30}, Plan()),
        ({"is_static": True, "config": DYNAMIC, "newest": 27}, Plan()),
        ({"config": LONGROPE, "newest": 27}, WHOLE._replace(depth=2)),
        ({"config": LONGROPE, "newest": 29}, Plan()),
        ({"config": LONGROPE, "newest": 31}, WHOLE),
        ({"config": DYNAMIC, "newest": 27}, WHOLE._replace(depth=2)),
        ({"config": DYNAMIC, "newest": 31}, Plan()),  # which goes on changing
        ({"config": TABLE, "newest": 26}, WHOLE._replace(depth=3)),
        ({"config": TABLE, "newest": 29}, Plan()),
        ({"config": SCALED}, WHOLE),
        ({"config": SCALED, "length": 25}, WHOLE._replace(branching_factor=1)),
    ],
)
def test_limits_of_a_step(settings, expected):
    assert limited(**settings) == expected

"""Masks, caches, inputs and limits of a step, against naive references."""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, GenerationMixin, LlamaConfig, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_eagle3.remote_code.attention_eagle3 import tree_attention_mask
from hf_eagle3.remote_code.cache_eagle3 import TreeCache
from hf_eagle3.remote_code.text_eagle3 import align_right, flat_indices, right_index, stack_right, take_rows
from hf_eagle3.remote_code.tree_eagle3 import DraftTree, Plan
from hf_eagle3.remote_code.verify_eagle3 import Verifier


@pytest.mark.parametrize("seed", range(10))
def test_rows_that_end_at_the_right(seed):
    """Everything that rows have entries for is aligned by these, whatever dimensions come first."""
    random_ = random.Random(seed)
    lengths = [random_.randint(0, 6) for _ in range(random_.randint(1, 4))]
    rows, width = [[random_.randint(1, 99) for _ in range(length)] for length in lengths], random_.randint(1, 8)
    entries = torch.tensor([row + [-1] * (8 - len(row)) for row in rows])
    leading = [random_.randint(1, 3) for _ in range(random_.randint(0, 2))]  # dimensions of other numbers each
    offsets = torch.arange(torch.Size(leading).numel()).view(*leading, 1, 1) * 100
    moved = align_right(entries + offsets, torch.tensor(lengths), width)
    assert moved.shape == (*leading, len(rows), width)
    for offset, actual in zip(offsets.flatten().tolist(), moved.reshape(-1, len(rows), width).tolist()):
        assert actual == [([0] * width + [offset + entry for entry in row])[-width:] for row in rows]
    one = torch.arange(1, 9)  # one row, taken for all
    for actual in align_right(one.expand(*leading, 1, 8), torch.tensor(lengths), width).view(-1, len(rows), width):
        assert actual.tolist() == [([0] * width + list(range(1, length + 1)))[-width:] for length in lengths]
    assert stack_right(rows, torch.device("cpu")).tolist() == [[0] * (max(lengths) - len(row)) + row for row in rows]
    index = right_index(torch.tensor(lengths), width).tolist()
    assert index == [[column - width + length for column in range(width)] for length in lengths]


@pytest.mark.parametrize("seed", range(5))
def test_entries_that_are_taken(seed):
    """Flat indices must not mix up rows and heads, whose shapes agree in most models."""
    random_ = random.Random(seed)
    batch_size, num_heads, num_entries = (random_.randint(1, 4) for _ in range(3))
    indices = [[random_.randrange(num_entries) for _ in range(4)] for _ in range(batch_size)]
    states = torch.arange(batch_size * num_heads * num_entries * 3).view(batch_size, num_heads, num_entries, 3)
    listed = states.tolist()
    flat = flat_indices(torch.tensor(indices), states.shape)
    assert states.flatten(0, 2)[flat].tolist() == [
        listed[row][head][i] for row in range(batch_size) for head in range(num_heads) for i in indices[row]
    ]
    taken = take_rows(states[:, 0], torch.tensor(indices)).tolist()
    assert taken == [[listed[row][0][i] for i in indices[row]] for row in range(batch_size)]


def filled(cache, batch_size, length, num_new, readers=(0, 1), is_tracked=True):
    """
    A cache in whose every entry stands its row and its place: `1000 * row + place`. The layers `readers` have read the
    new ones.
    """
    places = torch.arange(length + num_new, dtype=torch.float32) + 1000 * torch.arange(batch_size)[:, None]
    states = places[:, None, :, None].expand(-1, 2, -1, 8).contiguous()
    for i in range(2):
        cache.update(states[..., :length, :], -states[..., :length, :], i)
    tree_cache = TreeCache(cache, most_nodes=6)
    tree_cache.record()
    for i in readers:
        cache.update(states[..., length:, :], -states[..., length:, :], i)
    if is_tracked:
        tree_cache.track(cache, num_new)
    return tree_cache


def random_counts(random_, batch_size, most):
    """How many tokens rows gain, up to `most`, and the longest: those that are behind may gain more than that."""
    counts, lags = ([random_.randint(0, most) for _ in range(batch_size)] for _ in range(2))
    lags[random_.randrange(batch_size)] = 0
    return counts, max(0, *(count - lag for count, lag in zip(counts, lags)))


def places_in(cache, layer):
    """By row. Every layer counts what it has read, and stores what the next token attends to."""
    states = cache.cache.layers[layer]
    keys = states.keys[..., : cache.length, :] if cache.is_static else states.keys
    values = states.values[..., : keys.shape[-2], :]
    assert torch.equal(keys, -values) and (keys == keys[:, :1, :, :1]).all()
    assert cache.length == int(states.get_seq_length())
    is_sliding = isinstance(states, DynamicSlidingWindowLayer)
    assert keys.shape[-2] == (min(7, cache.length) if is_sliding else cache.length)
    return keys[:, 0, :, 0].long().tolist()


def make_cache(kind, capacity=40):
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    config = LlamaConfig(num_hidden_layers=2, **(layers if kind == "sliding" else {}))
    return StaticCache(config=config, max_cache_len=capacity) if kind == "static" else DynamicCache(config=config)


def assert_ends(places, row, kept):
    """That a row ends with these of its places, as far as it has columns: what is in front of them is padding."""
    expected = [1000 * row + place for place in kept][-len(places) :]
    assert places[len(places) - len(expected) :] == expected


@pytest.mark.parametrize("kind", ["dynamic", "sliding", "static"])
@pytest.mark.parametrize("are_ragged", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_what_is_kept_of_a_cache(kind, are_ragged, seed):
    """A node kept in a wrong place would change the text only a little, and only at times."""
    random_ = random.Random(seed)
    batch_size, length, num_new = random_.choice([1, 3]), random_.randint(1, 14), random_.randint(1, 6)
    # No slot is left where a path of fewer nodes than the longest may have could be padded.
    cache = filled(make_cache(kind, capacity=length + num_new), batch_size, length, num_new)
    if are_ragged:
        counts, growth = random_counts(random_, batch_size, num_new)
        kept = [sorted(random_.sample(range(num_new), count)) for count in counts]
    else:
        growth = random_.choice([0, num_new, random_.randint(0, num_new)])
        kept = [sorted(random_.sample(range(num_new), growth))] * batch_size
    cache.keep(kept, growth)
    assert cache.length == length + growth
    for layer in range(2):
        for row, places in enumerate(places_in(cache, layer)):
            assert_ends(places, row, [*range(length), *(length + node for node in kept[row])])
    cache.release()


@pytest.mark.parametrize("kind", ["dynamic", "sliding", "static"])
@pytest.mark.parametrize("length", [3, 11])
@pytest.mark.parametrize("readers", [None, (), (0,), (1,), (0, 1)])
def test_a_step_that_is_forgotten(kind, length, readers):
    """Taken back by choice (None), or rolled back after a forward that only some layers had come to."""
    is_broken_off = readers is not None
    cache = filled(make_cache(kind), 2, length, 5, readers if is_broken_off else (0, 1), is_tracked=not is_broken_off)
    cache.roll_back() if is_broken_off else cache.discard_tree()
    assert cache.length == length
    for layer in range(2):
        for row, places in enumerate(places_in(cache, layer)):
            assert_ends(places, row, range(length))
        if kind == "static" and not is_broken_off:  # where a mask would hide numbers, but not nan
            assert not cache.cache.layers[layer].keys[..., length:, :].any()


@pytest.mark.parametrize("kind", ["dynamic", "sliding"])
@pytest.mark.parametrize("seed", range(6))
def test_rows_that_stay(kind, seed):
    """Rows that leave take the columns with them that only they had."""
    random_ = random.Random(seed)
    length, excess = random_.randint(2, 14), random_.randint(0, 1) * random_.randint(1, 4)
    counts, growth = random_counts(random_, 4, 4)
    kept = [sorted(random_.sample(range(4), count)) for count in counts]
    cache = filled(make_cache(kind), 4, length, 4)
    cache.keep(kept, growth)
    rows, excess = sorted(random_.sample(range(4), 2)), min(excess, length + growth - 1)
    cache.select(rows, excess)
    assert cache.length == length + growth - excess
    for layer in range(2):
        for row, places in zip(rows, places_in(cache, layer), strict=True):
            assert_ends(places, row, [*range(length), *(length + node for node in kept[row])])


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention", "chunked_attention"])
@pytest.mark.parametrize("kind", ["dynamic", "sliding", "static"])
@pytest.mark.parametrize("seed", range(8))
def test_tree_mask(layer_type, kind, seed):
    """Windows and chunks count positions in the text, not entries of the cache."""
    random_ = random.Random(seed)
    reach = 8 if kind == "sliding" else 5  # of a sliding layer, which stores no more
    batch_size, past, num_nodes = random_.choice([1, 3]), random_.randint(1, 18), random_.randint(1, 7)
    padding = [random_.randint(0, past - 1) for _ in range(batch_size)]
    # Text may have holes: they are not attended to, but are no padding that chunks would begin after.
    seen = [
        [place == begin or (place > begin and random_.random() < 0.8) for place in range(past)] for begin in padding
    ]
    has_padding = random_.random() < 0.8
    if not has_padding:
        padding, seen = [0] * batch_size, [[True] * past] * batch_size
    parents = [[0] + [random_.randrange(node) for node in range(1, num_nodes)] for _ in range(batch_size)]
    tree = DraftTree.from_parents(torch.zeros(batch_size, num_nodes, dtype=torch.long), torch.tensor(parents))
    cache, states = make_cache(kind, capacity=25), torch.zeros(batch_size, 2, 25, 8)
    cache.update(states[..., :past, :], states[..., :past, :], 0)
    if kind == "sliding":
        cache.layers[0].activate_past_recording()
    config = SimpleNamespace(
        layer_types=[layer_type],
        sliding_window=reach if layer_type == "sliding_attention" else None,
        attention_chunk_size=reach if layer_type == "chunked_attention" else None,
    )
    padding_mask = torch.tensor(seen).long() if has_padding else None
    mask = tree_attention_mask(config, cache, past, tree.ancestors, tree.depths, padding_mask)
    config.layer_types = None  # of models whose layers are all alike
    assert torch.equal(tree_attention_mask(config, cache, past, tree.ancestors, tree.depths, padding_mask), mask)
    assert mask.shape[1] == 1 and set(mask.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}

    def depth(row, node):
        return 0 if node == 0 else 1 + depth(row, parents[row][node])

    def is_ancestor(row, node, other):
        return node == other or (node > 0 and is_ancestor(row, parents[row][node], other))

    first = max(past - 7, 0) if kind == "sliding" else 0  # position that the layer still has
    num_keys = 25 if kind == "static" else past - first + num_nodes
    assert mask.shape[-1] == num_keys
    for row in range(batch_size):
        for node in range(num_nodes):
            at = past + depth(row, node)
            for key in range(first, first + num_keys):
                if key < past:
                    place, allowed = key, seen[row][key]
                elif key < past + num_nodes:
                    place, allowed = past + depth(row, key - past), is_ancestor(row, node, key - past)
                else:  # a slot that nothing is in
                    place, allowed = key, False
                if layer_type == "sliding_attention":
                    allowed &= at - place < reach
                if layer_type == "chunked_attention":
                    allowed &= (at - padding[row]) // reach == (place - padding[row]) // reach
                assert (mask[row, 0, node, key - first] == 0) == allowed


def test_mask_of_each_type_of_layer():
    """Types differ in how much they store, and a layer that shares another one's keys stores none."""
    cache, states = make_cache("sliding"), torch.zeros(1, 2, 12, 8)
    for i in range(2):
        cache.update(states, states, i)
    cache.layers.insert(0, SimpleNamespace(keys=None))
    config = SimpleNamespace(layer_types=["full_attention", "sliding_attention", "full_attention"], sliding_window=8)
    tree = DraftTree.chain(torch.zeros(1, 3, dtype=torch.long))
    masks = tree_attention_mask(config, cache, 12, tree.ancestors, tree.depths)
    assert {name: mask.shape[-1] for name, mask in masks.items()} == {
        "sliding_attention": 7 + 3,
        "full_attention": 12 + 3,
    }


@pytest.mark.parametrize("shape", ["one for all", "of each row", "of three kinds"])
@pytest.mark.parametrize("seed", range(8))
def test_inputs_are_extended_token_by_token(shape, seed):
    """As many tokens at once must leave what each row would have alone, one by one."""
    random_, target, length = random.Random(seed), GenerationMixin(), 6
    batch_size = random_.randint(1, 4)
    counts, growth = random_counts(random_, batch_size, 4)
    if seed == 0:
        counts, growth = [3] * batch_size, 3  # as in most steps

    def entries(*shape):
        return torch.tensor([random_.randint(1, 99) for _ in range(torch.Size(shape).numel())]).view(shape)

    positions = {"one for all": (1,), "of each row": (batch_size,), "of three kinds": (3, batch_size)}[shape]
    inputs = {name: entries(batch_size, length) for name in ("token_type_ids", "mm_token_type_ids")}
    inputs = {name: value for name, value in inputs.items() if random_.random() < 0.8}
    inputs |= {"attention_mask": entries(batch_size, length) % 2, "position_ids": entries(*positions, length)}
    verifier = Verifier.__new__(Verifier)
    verifier.target, verifier.inputs = target, dict(inputs)
    verifier.extend(SimpleNamespace(target_outputs=CausalLMOutputWithPast()), list(counts), growth)
    actual = verifier.inputs
    assert set(actual) == set(inputs)
    width = length + growth
    for row, count in enumerate(counts):
        alone = {name: value[..., [row if value.shape[-2] > 1 else 0], :] for name, value in inputs.items()}
        for _ in range(count):
            alone = target._update_model_kwargs_for_generation(CausalLMOutputWithPast(), alone)
        for name, value in alone.items():
            of_row = actual[name][..., row if actual[name].shape[-2] > 1 else 0, :]
            expected = [([0] * width + each)[-width:] for each in value.reshape(-1, length + count).tolist()]
            assert of_row.reshape(-1, width).tolist() == expected, name


WHOLE = Plan("draft", depth=4, num_nodes=10, branching_factor=3)


def limited(
    plan=WHOLE, room=100, newest=20, ahead=0, config=(), is_static=False, is_chain=False, capacity=100, **cache
):
    """What is left of a plan where the shortest row has 21 tokens and may have `room` more, and the longest is `ahead`."""
    verifier = Verifier.__new__(Verifier)
    verifier.config, verifier.num_nodes = SimpleNamespace(rope_parameters={"rope_type": "default"}), 10
    vars(verifier.config).update(config)
    verifier.cache = SimpleNamespace(
        **{
            "is_static": is_static,
            "is_chain": is_chain,
            "capacity": capacity,
            "length": 20 + ahead,
            "num_replayed": 0,
        }
        | cache
    )
    verifier.inputs = {"position_ids": torch.tensor([[0], [newest], [1]])}  # of three rows
    verifier.target, verifier.forward = None, print  # it is compiled
    return verifier.limit(plan, SimpleNamespace(max_length=21 + room, shortest=21, longest=21 + ahead))


LONGROPE = {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 30}}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 30}
BY_TYPE = {"rope_parameters": {"full_attention": {**DYNAMIC["rope_parameters"]}}, "max_position_embeddings": 30}
TABLE = {"rope_parameters": None, "max_position_embeddings": 30}
SCALED = {"attn_temperature_tuning": True, "floor_scale": 32}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, WHOLE),
        ({"plan": WHOLE._replace(depth=20)}, WHOLE._replace(depth=10)),  # no deeper than it has nodes
        ({"room": 3}, WHOLE._replace(depth=2)),  # the last token needs no forward
        ({"room": 3, "ahead": 2}, WHOLE._replace(depth=2)),  # of the shortest row
        ({"room": 1}, Plan()),
        ({"room": 0}, Plan()),
        ({"is_chain": True}, WHOLE._replace(branching_factor=1)),
        ({"num_replayed": 16}, WHOLE),
        ({"num_replayed": 17}, Plan()),
        ({"length": 5}, Plan()),  # Phi-3 lost its cache
        ({"length": 19}, Plan()),
        ({"is_static": True}, WHOLE),
        ({"is_static": True, "room": 2}, WHOLE),  # of one shape, or none
        ({"is_static": True, "plan": WHOLE._replace(depth=20)}, WHOLE._replace(depth=10)),
        ({"is_static": True, "capacity": 31}, WHOLE),
        ({"is_static": True, "capacity": 30}, Plan()),
        ({"is_static": True, "config": SCALED, "length": 25}, Plan()),
        ({"is_static": True, "config": DYNAMIC, "newest": 27}, Plan()),
        ({"config": LONGROPE, "newest": 27}, WHOLE._replace(depth=2)),
        ({"config": LONGROPE, "newest": 29}, Plan()),
        ({"config": LONGROPE, "newest": 30}, Plan()),  # the next token may still be before it
        ({"config": LONGROPE, "newest": 31}, WHOLE),
        ({"config": BY_TYPE, "newest": 27}, WHOLE._replace(depth=2)),
        ({"config": DYNAMIC, "newest": 27}, WHOLE._replace(depth=2)),
        ({"config": DYNAMIC, "newest": 31}, Plan()),  # which goes on changing
        ({"config": TABLE, "newest": 26}, WHOLE._replace(depth=3)),
        ({"config": TABLE, "newest": 29}, Plan()),
        ({"config": TABLE, "newest": 35}, Plan()),
        ({"config": SCALED}, WHOLE),
        ({"config": SCALED, "length": 21}, WHOLE._replace(branching_factor=1)),
        ({"config": SCALED, "length": 31}, WHOLE),
        ({"config": SCALED, "length": 25}, WHOLE._replace(branching_factor=1)),
    ],
)
def test_limits_of_a_step(settings, expected):
    """One token too many is another text than plain decoding's; one too few only slower."""
    assert limited(**settings) == expected

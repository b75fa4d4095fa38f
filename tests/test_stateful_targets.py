"""Targets with states that are not keys and values: convolutions, and recurrent layers beside those that attend."""

import pytest
import torch
from conftest import (
    CONVOLUTIONAL,
    INDEXED,
    RECURRENT,
    assert_an_oracle_gives_the_text,
    assert_gives_its_text,
    assert_same_text,
    each_once,
    lookups_of,
    make_batch,
    make_draft,
    make_oracle,
    make_prompt,
    make_target,
    oracle_of,
)
from fuzz_calls import EditsText, Interrupt, InterruptingCriteria
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.remote_code import verify_eagle3
from hf_eagle3.remote_code.cache_eagle3 import ReplayCache
from hf_eagle3.remote_code.outputs_eagle3 import CAN_SELECT_HIDDEN_STATES


SETTINGS = {"max_new_tokens": 20, "do_sample": False}
FAMILIES = [*CONVOLUTIONAL, *INDEXED, *RECURRENT]
# One for each kind of layers in their caches.
KINDS = [
    *CONVOLUTIONAL,
    *[*INDEXED][:1],
    *(each for each in ("qwen3_5", "falcon_h1", "lara_mini") if each in RECURRENT),
]


def assert_same_cache(actual, expected):
    assert actual.get_seq_length() == expected.get_seq_length()
    for layer, expected_layer in zip(actual.layers, expected.layers, strict=True):
        for name in ("keys", "values"):
            if getattr(expected_layer, name, None) is not None:
                torch.testing.assert_close(getattr(layer, name), getattr(expected_layer, name), atol=1e-4, rtol=1e-3)
        for name in ("conv_states", "recurrent_states"):
            for i, states in getattr(expected_layer, name, {}).items():
                if states is not None:
                    torch.testing.assert_close(getattr(layer, name)[i], states, atol=1e-4, rtol=1e-3)


CALLS = [{}, {"repetition_penalty": 1.3}, {"do_sample": True}, {"attention_mask": None}]


@pytest.mark.parametrize(("family", "length", "settings"), each_once(FAMILIES, [2, 40, 17], CALLS))
def test_texts(family, length, settings):
    target, prompt = make_target(family), make_prompt(length)
    call = {"max_new_tokens": 24, **settings}
    if "attention_mask" in settings:  # with a hole
        call["attention_mask"] = torch.arange(length)[None].clamp(max=1)
    oracle = oracle_of(target, prompt, **call)
    oracle.padding += "attention_mask" in call
    lengths = assert_gives_its_text(oracle, target, prompt, **call).accepted_lengths
    assert max(lengths) >= 3 and min(lengths) < 7 and len(oracle.text.unique()) > 8


@pytest.mark.parametrize(("family", "length"), each_once(KINDS, [2, 40]))
def test_own_code_is_tried(family, length, monkeypatch):
    """With a chain. It leaves no trace in the states."""
    monkeypatch.setattr(verify_eagle3, "has_own_code", lambda target: True)
    target, prompt = make_target(family), make_prompt(length)
    call = {**SETTINGS, "return_dict_in_generate": True}
    expected = target.generate(prompt, **call)
    oracle = make_oracle(target, expected.sequences)
    actual = target.generate(prompt, assistant_model=oracle, **call)
    assert torch.equal(actual.sequences, expected.sequences)
    assert_same_cache(actual.past_key_values, expected.past_key_values)
    assert max(oracle.last_generation.accepted_lengths) >= 3


@pytest.mark.parametrize(("family", "policy"), [("qwen3_5", "auto"), ("granitemoehybrid", "static")])
def test_an_untrained_draft(family, policy):
    target, prompt = make_target(family), make_prompt(5)
    draft = make_draft(target, [prompt], num_tokens=12)
    draft.generation_config.tree_policy = policy
    stats = assert_same_text(target, draft, prompt, max_new_tokens=36)
    assert stats.target_forwards - stats.plain_steps > 4


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "granitemoehybrid"])
def test_what_is_looked_up(family):
    target, prompt = make_target(family), make_prompt(9)
    oracle, num_lookups = oracle_of(target, prompt), 0
    oracle.generation_config.tree_policy = "auto"
    for seed in range(3):
        with lookups_of(oracle.text, seed):
            num_lookups += assert_gives_its_text(oracle, target, prompt).lookup_steps
    assert num_lookups > 2


@pytest.mark.parametrize("family", KINDS)
def test_caches_can_be_continued_from(family):
    target, prompt = make_target(family), make_prompt(9)
    oracle = oracle_of(target, prompt)
    settings = {"max_new_tokens": 11, "do_sample": False, "return_dict_in_generate": True}
    texts, caches = [], []
    for assistant in ({}, {"assistant_model": oracle}):
        first = target.generate(prompt, **assistant, **settings)
        longer = torch.cat([first.sequences, make_prompt(4)], dim=1)
        second = target.generate(longer, past_key_values=first.past_key_values, **assistant, **settings)
        third = target.generate(second.sequences, past_key_values=second.past_key_values, **settings)
        texts.append([output.sequences.tolist() for output in (first, second, third)])
        caches.append(third.past_key_values)
    assert texts[0] == texts[1]
    assert_same_cache(caches[1], caches[0])


@pytest.mark.parametrize("family", RECURRENT)
def test_the_cache_after_each_number_of_tokens(family):
    """Wherever a step is cut off, what was rejected is forgotten, and what was accepted is not."""
    target, prompt = make_target(family), make_prompt(7)
    text, num_reread = target.generate(prompt, **SETTINGS), 0
    oracle = make_oracle(target, text)
    for token in text[0, 8:24].unique().tolist()[:2]:
        settings = {**SETTINGS, "eos_token_id": token, "pad_token_id": 0, "return_dict_in_generate": True}
        expected = target.generate(prompt, **settings)
        actual = target.generate(prompt, assistant_model=oracle, **settings)
        assert_same_cache(actual.past_key_values, expected.past_key_values)
        stats = oracle.last_generation
        num_reread += stats.target_forwards - 1 - len(stats.accepted_lengths)
        settings["return_dict_in_generate"] = False  # nobody sees the cache
        assert target.generate(prompt, assistant_model=oracle, **settings).equal(expected.sequences)
        stats = oracle.last_generation
        assert stats.target_forwards == 1 + len(stats.accepted_lengths)
    assert num_reread > 0


@pytest.mark.parametrize("family", ["qwen3_5", "granitemoehybrid"])
def test_what_is_returned(family):
    target, prompt = make_target(family, attn_implementation="eager"), make_prompt(7)
    settings = {**SETTINGS, "return_dict_in_generate": True}
    settings |= {"output_scores": True, "output_hidden_states": True}
    expected = target.generate(prompt, **settings)
    oracle = make_oracle(target, expected.sequences)
    actual = target.generate(prompt, assistant_model=oracle, **settings)
    assert max(oracle.last_generation.accepted_lengths) >= 3
    torch.testing.assert_close(actual.scores, expected.scores, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(actual.hidden_states, expected.hidden_states, atol=1e-4, rtol=1e-3)
    assert_same_cache(actual.past_key_values, expected.past_key_values)


@pytest.mark.parametrize("family", [*CONVOLUTIONAL, "qwen3_5"])
def test_an_interrupted_call_leaves_a_cache_to_go_on_from(family):
    """That of the last whole step."""
    target, prompt = make_target(family), make_prompt(9)
    oracle = oracle_of(target, prompt)
    settings = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
    for length in (14, 19):
        first = target.generate(prompt, **settings)
        cache = first.past_key_values
        interrupts = {"stopping_criteria": [InterruptingCriteria(length - 12)]}
        with pytest.raises(Interrupt):
            target.generate(first.sequences, past_key_values=cache, assistant_model=oracle, **interrupts, **SETTINGS)
        assert length - 9 <= cache.get_seq_length() < length
        known = oracle.text[:, : cache.get_seq_length() + 1]
        # The text may hold the padding token.
        going_on = {**SETTINGS, "return_dict_in_generate": True, "attention_mask": torch.ones_like(known)}
        expected = target.generate(known, **going_on)
        actual = target.generate(known, past_key_values=cache, **going_on)
        assert torch.equal(actual.sequences, expected.sequences)
        assert_same_cache(actual.past_key_values, expected.past_key_values)


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.skipif("lara_mini" not in RECURRENT, reason="needs a newer transformers")
def test_a_plain_step_that_is_interrupted_leaves_a_window_to_go_on_from(num_steps):
    """Sliding layers beside recurrent states keep more than their window until a step ends."""
    target, prompt = make_target("lara_mini", sliding_window=8), make_prompt(12)
    draft, cache = make_draft(target, [prompt]), DynamicCache(config=target.config)
    draft.generation_config.tree_policy = "auto"  # its first steps are plain
    settings = {"past_key_values": cache, "assistant_model": draft, **SETTINGS}
    with pytest.raises(Interrupt):
        target.generate(prompt, stopping_criteria=[InterruptingCriteria(num_steps)], **settings)
    text = target.generate(prompt, **SETTINGS)
    known = text[:, : cache.get_seq_length() + 1]
    rest = {**SETTINGS, "max_new_tokens": text.shape[1] - known.shape[1], "attention_mask": torch.ones_like(known)}
    assert target.generate(known, past_key_values=cache, **rest).tolist() == text.tolist()


@pytest.mark.parametrize(
    ("family", "where"),
    [
        *((family, "at its end") for family in ("llama", "mistral-window", *CONVOLUTIONAL, "qwen3_5", "falcon_h1")),
        *((family, "in the midst") for family in ("mistral-window", "qwen3_5", "falcon_h1")),
    ],
)
def test_a_forward_that_fails(family, where):
    """What it raised comes through, and the cache holds what the text has."""
    target, prompt = make_target(family), make_prompt(20)
    expected = target.generate(prompt, **SETTINGS)
    oracle, calls_left = make_oracle(target, expected), [0]

    def fail(module, inputs, output):
        calls_left[0] -= 1
        if calls_left[0] == 0:
            raise InterruptedError

    for num_forwards in (2, 4):
        cache, calls_left[0] = DynamicCache(config=target.config), num_forwards
        handle = (target if where == "at its end" else target.model.layers[3]).register_forward_hook(fail)
        with pytest.raises(InterruptedError):
            target.generate(prompt, past_key_values=cache, assistant_model=oracle, **SETTINGS)
        handle.remove()
        if where == "at its end" or family in RECURRENT:  # others were broken off as in plain `generate`
            length = cache.get_seq_length()
            text = expected[:, : length + 1]
            rest = {
                **SETTINGS,
                "max_new_tokens": expected.shape[1] - length - 1,
                "attention_mask": torch.ones_like(text),
            }
            actual = target.generate(text, past_key_values=cache, **rest)
            assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["granitemoehybrid", "falcon_h1"])
def test_limited_time_steps_are_refused(family):
    """transformers limits them for several tokens, but not for one."""
    target = make_target(family, time_step_limit=(0.0, 0.05))
    with pytest.raises(ValueError, match="stateful models"):
        target.generate(make_prompt(5), assistant_model=Eagle3ForSpeculation.from_target(target).eval(), **SETTINGS)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("lfm2", {"do_sample": True}),
        ("lfm2", {"eos_token_id": 7, "pad_token_id": 0}),
        ("qwen3_5", {"eos_token_id": 7, "pad_token_id": 0}),
        ("qwen3_next", {"do_sample": True}),
        ("granitemoehybrid", {}),
    ],
)
def test_batches(family, settings):
    oracle = assert_an_oracle_gives_the_text(make_target(family), make_batch([5, 9]), **settings)
    assert max(oracle.last_generation.accepted_lengths) >= 2


def test_how_much_is_read_again():
    """As long as steps are cut short, more and more: at last without a tree."""
    target, prompt = make_target("qwen3_5"), make_prompt(5)
    oracle, lengths = oracle_of(target, prompt, max_new_tokens=80), []
    oracle.text[:, 8::4] = 95 - oracle.text[:, 8::4]
    handle = target.model.embed_tokens.register_forward_hook(
        lambda module, args, output: lengths.append(output.shape[1])
    )
    assert_same_text(target, oracle, prompt, max_new_tokens=80)
    handle.remove()
    most = ReplayCache.MOST_REPLAYED
    assert most < max(lengths[1:]) <= most + 2 * 7
    assert 2 < oracle.last_generation.acceptance_length < 4


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_what_is_read_again_before_states_that_are_no_numbers(family):
    """It is read without them: NaNs pass through the mask of a chunk."""
    target, prompt = make_target(family), make_prompt(9)
    text = target.generate(prompt, **SETTINGS)
    draft = Eagle3ForSpeculation.from_target(target).eval()
    draft.generation_config.tree_policy = "static"
    written = text[0, 9:].tolist()
    bad = next(token for token in written[6:] if token not in text[0, :15])
    target.get_input_embeddings().weight.data[bad] = torch.nan
    settings = {**SETTINGS, "max_new_tokens": written.index(bad) + 3, "return_dict_in_generate": True}
    expected = target.generate(prompt, **settings)
    actual = target.generate(prompt, assistant_model=draft, **settings)
    assert torch.equal(actual.sequences, expected.sequences)
    for layer, expected_layer in zip(actual.past_key_values.layers, expected.past_key_values.layers):
        if getattr(layer, "keys", None) is not None:
            assert not layer.keys[..., :-2, :].isnan().any()
            torch.testing.assert_close(layer.keys, expected_layer.keys, atol=1e-4, rtol=1e-3, equal_nan=True)


def test_states_that_cannot_be_read_again_are_refused():
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48}
    sizes |= {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8}
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model("jamba", **sizes))
    draft = Eagle3ForSpeculation.from_target(target).eval()
    with pytest.raises(ValueError, match="stateful models"):
        target.generate(make_prompt(5), assistant_model=draft, **SETTINGS)
    with pytest.raises(ValueError, match="cannot roll back"):
        target.eval().generate(make_prompt(5), custom_generate=draft.assisted_decoding, **SETTINGS)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "falcon_h1"])
def test_states_beside_static_layers_are_refused(family):
    target, prompt = make_target(family), make_prompt(9)
    draft = oracle_of(target, prompt)
    with pytest.raises(ValueError, match="LinearAttention.*Layer layers. If you chose the cache, use the default"):
        target.generate(prompt, assistant_model=draft, cache_implementation="static", **SETTINGS)


def test_prompts_that_are_longer_than_their_positions(tokenizer):
    """`token_healing` may lengthen a prompt, whose positions stay as they were: targets without any do not mind."""
    for family in ("granitemoehybrid", "kimi_linear"):
        target, prompt = make_target(family), torch.arange(60, 66)[None]
        settings = {**SETTINGS, "token_healing": True, "tokenizer": tokenizer}
        expected = target.generate(prompt, **settings)
        assert expected.shape[1] > prompt.shape[1] + SETTINGS["max_new_tokens"]
        draft = Eagle3ForSpeculation.from_target(target).eval()
        draft.generation_config.tree_policy = "static"
        try:
            assert torch.equal(target.generate(prompt, **settings, assistant_model=draft), expected)
        except ValueError as error:  # older versions (5.17) have a mask, which stays as it was, too
            assert not CAN_SELECT_HIDDEN_STATES and "as after `token_healing`" in str(error)


@pytest.mark.parametrize("family", ["qwen3_5", "granitemoehybrid"])
def test_what_is_read_again_is_what_was_read(family):
    target, batch = make_target(family), make_batch([9, 5])
    settings = {**SETTINGS, "logits_processor": [EditsText(1)], "pad_token_id": 0}
    expected = target.generate(batch["input_ids"].clone(), attention_mask=batch["attention_mask"], **settings)
    draft = Eagle3ForSpeculation.from_target(target).eval()
    draft.generation_config.tree_policy = "static"
    actual = target.generate(
        batch["input_ids"].clone(), attention_mask=batch["attention_mask"], assistant_model=draft, **settings
    )
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("breaks", ["before", "after"])
@pytest.mark.parametrize("family", INDEXED)
def test_a_forward_that_breaks_off_at_an_index(family, breaks, monkeypatch):
    """The keys of a layer are longer than its index, or the other way round."""
    target, prompt = make_target(family), make_prompt(9)
    cache, draft, calls = DynamicCache(config=target.config), make_draft(target, [prompt]), []
    update = cache.layers[1].update_indexer

    def break_off(states):
        calls.append(states.shape[1])
        if len(calls) == 3 and breaks == "before":
            raise MemoryError
        result = update(states)
        if len(calls) == 3:
            raise MemoryError
        return result

    monkeypatch.setattr(cache.layers[1], "update_indexer", break_off)
    with pytest.raises(MemoryError):
        target.generate(prompt, assistant_model=draft, past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert len(calls) == 3 and calls[-1] > 1
    assert {each.indexer_keys.shape[1] for each in cache.layers} == {cache.get_seq_length()}


@pytest.mark.parametrize("num_updates", range(4))
def test_a_forward_that_breaks_off_between_convolutions(num_updates, monkeypatch):
    """Some of a layer's convolutions have read the tree, others have not."""
    if "inkling" not in CONVOLUTIONAL:
        pytest.skip("this transformers has no such target")
    target, prompt = make_target("inkling"), make_prompt(9)
    expected = target.generate(prompt, **SETTINGS)
    cache, draft, lengths = DynamicCache(config=target.config), make_oracle(target, expected), []
    layer = cache.layers[1]
    update = layer.update_conv_state

    def break_off(states, *args, **kwargs):
        if len(lengths) == 4 * 3 + num_updates:
            raise MemoryError
        lengths.append(states.shape[-1])
        return update(states, *args, **kwargs)

    monkeypatch.setattr(layer, "update_conv_state", break_off)
    with pytest.raises(MemoryError):
        target.generate(prompt, assistant_model=draft, past_key_values=cache, **SETTINGS)
    monkeypatch.undo()
    assert max(lengths[4:]) > 1
    text = expected[:, : cache.get_seq_length() + 1]
    rest = {**SETTINGS, "max_new_tokens": expected.shape[1] - text.shape[1], "attention_mask": torch.ones_like(text)}
    assert torch.equal(target.generate(text, past_key_values=cache, **rest), expected)

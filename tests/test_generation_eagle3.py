import copy
import itertools
import math
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from conftest import (
    BASE,
    FAMILIES,
    MOE,
    VOCAB_SIZE,
    assert_an_oracle_gives_the_text,
    assert_same_text,
    default_dtype,
    each_once,
    generate,
    make_batch,
    make_draft,
    make_oracle,
    make_prompt,
    make_target,
    oracle_of,
)
from peft import LoraConfig, get_peft_model
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
)
from transformers.generation import EosTokenCriteria, stopping_criteria
from transformers.generation.streamers import BaseStreamer

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.remote_code.assistant_eagle3 import install_generation_hook
from hf_eagle3.remote_code.auto_eagle3 import logger
from hf_eagle3.remote_code.configuration_eagle3 import tree_settings
from hf_eagle3.remote_code.outputs_eagle3 import (
    CACHE,
    CAN_SELECT_HIDDEN_STATES,
    aux_hidden_states,
    keep_state_after_last_layer,
    select_hidden_states,
)


NEW_TOKENS = 18
GREEDY = [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}]
SAMPLING = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
]


# The text is the target's ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "prompt_length", "settings"), each_once(FAMILIES, [5, 40], [{}, *GREEDY]))
def test_greedy_text_of_every_family(family, prompt_length, settings):
    """And of more families in batches (test_batch_generation.py)."""
    target, prompt = make_target(family), make_prompt(prompt_length)
    oracle = assert_an_oracle_gives_the_text(target, prompt, **settings)
    # Without accepted tokens, and whole branches of them, this would prove nothing.
    lengths = oracle.last_generation.accepted_lengths
    assert max(lengths) >= 5 and sum(lengths) > 1.5 * len(lengths)
    draft = make_draft(target, [prompt], num_tokens=8)
    draft.generation_config.num_assistant_tokens = 72  # all pairs of 8 tokens
    assert generate(target, prompt, assistant_model=draft, **settings).tolist() == oracle.text.tolist()
    assert max(draft.last_generation.accepted_lengths) >= 2


@pytest.mark.parametrize(("family", "settings"), each_once(["llama", "gemma3", "gpt_oss", "llama4"], SAMPLING))
def test_a_seed_gives_the_sample_it_gives_without_a_draft(family, settings):
    target, prompt = make_target(family), make_prompt(40)
    for seed in range(2):
        oracle = assert_an_oracle_gives_the_text(target, prompt, seed, do_sample=True, **settings)
        assert oracle.last_generation.acceptance_length > 1.2


def test_samples_follow_the_targets_distribution():
    target = make_target("llama", vocab_size=6, initializer_range=0.15, pad_token_id=None, bos_token_id=None)
    prompt = torch.tensor([[1, 4, 2, 5]])
    draft = Eagle3ForSpeculation.from_target(target)
    draft.generation_config.update(num_assistant_tokens=12, tree_policy="static")
    triples = list(itertools.product(range(6), repeat=3))
    with torch.no_grad():
        contexts = torch.cat([prompt.expand(len(triples), -1), torch.tensor(triples)], dim=1)
        log_probs = target(contexts).logits.log_softmax(-1)[:, 3:6].gather(-1, torch.tensor(triples)[..., None])
    probs = log_probs.sum(dim=(1, 2)).exp()
    assert abs(probs.sum() - 1) < 1e-4

    num_draws, counts, accepted = 1000, torch.zeros(len(triples)), []
    settings = {"max_new_tokens": 5, "do_sample": True, "top_k": 0, "eos_token_id": None}
    torch.manual_seed(0)
    for num_rows in (1, 49) * (num_draws // 50):
        sequences = target.generate(prompt, num_return_sequences=num_rows, assistant_model=draft, **settings)
        for row in sequences[:, 4:7].tolist():
            counts[triples.index(tuple(row))] += 1
        accepted += draft.last_generation.accepted_lengths
    assert sum(accepted) > 1.5 * len(accepted)
    frequent = probs * num_draws >= 5
    observed = torch.cat([counts[frequent], counts[~frequent].sum()[None]])
    expected = torch.cat([probs[frequent], probs[~frequent].sum()[None]]) * num_draws
    chi_square = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum().item()
    degrees = len(observed) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


def test_every_tree_shape(target):
    prompt = make_prompt(12)
    text, budgets = generate(target, prompt), [1, 5, 64]
    for (i, depth), (j, width) in itertools.product(enumerate([1, 3, 8]), enumerate([1, 4, 16])):
        oracle, budget = make_oracle(target, text), budgets[(i + j) % 3]  # each meets each depth and each width
        oracle.generation_config.update(tree_depth=depth, branching_factor=width, num_assistant_tokens=budget)
        oracle.generation_config.output_steps = True
        assert torch.equal(generate(target, prompt, assistant_model=oracle), text)
        assert max(oracle.last_generation.accepted_lengths) <= min(depth, budget) + 1
        trees = [step.parents[0] for step in oracle.last_generation.steps if step.source == "draft"]
        assert max(map(len, trees)) == 1 + min(budget, width + (depth - 1) * width**2)  # the best of all candidates
        widest = max(parents[1:].count(node) for parents in trees for node in range(len(parents)))
        assert widest <= width and (budget < 64 or widest == width)


def test_layer_types_that_the_model_does_not_read(target):
    """Mistral takes one mask for all layers, whatever else its configuration says."""
    assert_an_oracle_gives_the_text(make_target("mistral", layer_types=["full_attention"] * 4), make_prompt(12))


def test_embeddings_that_are_narrower_than_the_layers():
    """As those of OPT-350m: the draft is as wide as what it takes from the target."""
    oracle = assert_an_oracle_gives_the_text(make_target("opt", word_embed_proj_dim=16), make_prompt(12))
    assert (oracle.config.hidden_size, oracle.config.target_hidden_size) == (16, 32)
    assert oracle.last_generation.acceptance_length > 1.5


def test_low_precision_target_runs():
    target, prompt = make_target("gemma3").to(torch.bfloat16), make_prompt(40)
    draft = make_draft(target, [prompt])
    assert draft.dtype == torch.bfloat16
    assert generate(target, prompt, assistant_model=draft).shape == (1, 40 + NEW_TOKENS)
    assert max(draft.last_generation.accepted_lengths) >= 2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_draft_reads_the_streams_entering_its_layers(family):
    """Off by one, nothing fails: the draft is just worse."""
    target, entering = make_target(family), {}
    for index, layer in enumerate(target.model.layers):
        layer.register_forward_pre_hook(lambda module, args, index=index: entering.update({index: args[0]}))
    layer_ids, num_layers = [0, 2, 3], len(target.model.layers)
    with torch.no_grad():
        outputs = target(make_prompt(7), output_hidden_states=select_hidden_states(layer_ids))
    states = aux_hidden_states(outputs, layer_ids, num_layers).chunk(3, dim=-1)
    for layer_id, state in zip(layer_ids, states):
        assert torch.equal(state, entering[layer_id])
    draft = Eagle3ForSpeculation.from_target(
        target, draft_token_ids=range(10), eagle_aux_hidden_state_layer_ids=layer_ids
    )
    assert draft.config.fc_norm and draft.config.norm_output
    assert draft(make_prompt(7), draft.combine_hidden_states(torch.cat(states, dim=-1))).logits.shape == (1, 7, 10)
    outputs.hidden_states = outputs.hidden_states[1:]
    with pytest.raises(ValueError, match=f"returned {num_layers} hidden states"):
        aux_hidden_states(outputs, layer_ids, num_layers)


def test_threads_that_read_the_state_before_the_final_norm():
    """One call begins while the other's forward is past the last layer."""
    target, prompt = make_target("llama"), make_prompt(5)
    draft = make_draft(target, [prompt], eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    other_decodes, ended, texts = threading.Event(), threading.Event(), []

    class Holding(BaseStreamer):
        def put(self, tokens):
            if len(tokens.view(-1)) == 1:  # not the prompt
                other_decodes.set()
                assert ended.wait(30)

        def end(self):
            pass

    other = threading.Thread(
        target=lambda: texts.append(generate(target, prompt, assistant_model=draft, streamer=Holding()))
    )
    expected, num_forwards = generate(target, prompt), itertools.count(1)

    def begin_other(module, args, output):
        if next(num_forwards) == 3:
            other.start()
            assert other_decodes.wait(30)

    handle = target.model.norm.register_forward_hook(begin_other)
    try:
        texts.append(generate(target, prompt, assistant_model=draft))
    finally:
        handle.remove()
        ended.set()
        other.join()
    assert [text.tolist() for text in texts] == [expected.tolist()] * 2


def test_the_state_before_the_final_norm():
    target = make_target("llama")
    with torch.no_grad(), keep_state_after_last_layer(target):
        outputs = target(make_prompt(5), output_hidden_states=True)
        read = aux_hidden_states(outputs, [4], 4)
        assert torch.equal(target.model.norm(read), outputs.hidden_states[4])
        assert not torch.equal(read, outputs.hidden_states[4])
        hooks = target.model.layers[-1]._forward_hooks  # take ours away, as in code that was compiled before the call
        for key in [key for key, hook in hooks.items() if hook.__module__.endswith("outputs_eagle3")]:
            del hooks[key]
        with pytest.raises(ValueError, match="LlamaForCausalLM did not call that layer"):
            target(make_prompt(5), output_hidden_states=True)


# Where a tree is not what the target sees one token at a time ----------------------------------------------------


@pytest.mark.parametrize(("family", "rope_type"), [("llama", "dynamic"), ("llama", "longrope"), ("phi3", "longrope")])
def test_rotary_frequencies_that_change_on_the_way(family, rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    changes = {"max_position_embeddings": 30}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": 30}
        changes = {"max_position_embeddings": 120, "original_max_position_embeddings": 30}
    target = make_target(family, rope_parameters=rope, **changes)
    oracle = assert_an_oracle_gives_the_text(target, make_prompt(21))  # reaches position 30 on the way
    assert max(oracle.last_generation.accepted_lengths) >= 3
    assert len(set(oracle.text[0, 30:].tolist())) > 3


@pytest.mark.parametrize("floor_scale", [4, 22])
def test_llama4_scales_queries_by_position(floor_scale):
    target = make_target("llama4", floor_scale=floor_scale, attn_scale=3.0)
    oracle = assert_an_oracle_gives_the_text(target, make_prompt(9))
    assert max(oracle.last_generation.accepted_lengths) >= 3


# Stopping ---------------------------------------------------------------------------------------------------------


def test_eos_and_lengths(target):
    prompt = make_prompt(8)
    oracle = oracle_of(target, prompt, max_new_tokens=40)
    said = oracle.text[0, 8:].tolist()
    for eos in (said[3], said[7], [said[5], said[11]]):
        assert_same_text(target, oracle, prompt, eos_token_id=eos, max_new_tokens=40)
        assert_same_text(target, oracle, prompt, eos_token_id=eos, max_new_tokens=40, min_new_tokens=9)
    for length in (1, 2, 3, 6, 10, 11):
        stats = assert_same_text(target, oracle, prompt, max_new_tokens=length)
        assert stats.new_tokens == length
    assert_same_text(target, oracle, prompt, max_new_tokens=None, max_length=19)
    for length in (11.0, 10.5):  # `_sample` takes any number
        assert assert_same_text(target, oracle, prompt, max_new_tokens=length).new_tokens == 11


@pytest.mark.parametrize(
    "criteria",
    [
        [MaxLengthCriteria(20), MaxLengthCriteria(15)],
        [MaxLengthCriteria(15), MaxLengthCriteria(20)],
        [EosTokenCriteria(torch.tensor(3))],
    ],
)
def test_criteria_of_the_callers_own(target, criteria):
    prompt = make_prompt(5)
    oracle = oracle_of(target, prompt, max_new_tokens=30)
    assert_same_text(target, oracle, prompt, max_new_tokens=30, stopping_criteria=criteria)


@pytest.mark.parametrize(
    ("length", "num_new", "do_sample"),
    [(21, 24, False), (21, 24, True), (20, 10, False), (20, 11, True), (20, 12, False), (40, 1, True), (40, 2, False)],
)
def test_texts_that_are_longer_than_the_positions(length, num_new, do_sample, monkeypatch):
    """`MaxLengthCriteria` reminds of it, although it need not be called to end a text."""
    target, prompt, said = make_target("llama", max_position_embeddings=30), make_prompt(length), []
    settings = {"max_new_tokens": num_new, "do_sample": do_sample}
    oracle = oracle_of(target, prompt, **settings)
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", lambda message: said[-1].add(message))
    for assistant in ({}, {"assistant_model": oracle}):
        said.append(set())
        generate(target, prompt, **settings, **assistant)
    assert said[0] == said[1]
    assert len(said[0]) == 1 or num_new < 24


def test_statistics(target):
    stats = assert_an_oracle_gives_the_text(target, make_prompt(8)).last_generation
    assert stats.new_tokens == NEW_TOKENS == 1 + sum(stats.accepted_lengths)
    assert stats.target_forwards == 1 + len(stats.accepted_lengths)
    assert stats.acceptance_length == sum(stats.accepted_lengths) / len(stats.accepted_lengths)


# What generate returns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "prompt_length"), [("llama", 5), ("gemma4-shared-kv", 40)])
def test_returned_dict_is_that_of_plain_generate(family, prompt_length):
    """Of one row, with the prompt's states, which batches do not compare (test_batch_generation.py)."""
    target, prompt = make_target(family), make_prompt(prompt_length)
    target.set_attn_implementation("eager")
    wanted = dict.fromkeys(["output_scores", "output_logits", "output_hidden_states"], True)
    wanted |= {"return_dict_in_generate": True, "repetition_penalty": 1.2}
    expected = generate(target, prompt, **wanted)
    actual = generate(target, prompt, **wanted, assistant_model=make_oracle(target, expected.sequences))
    assert type(actual) is type(expected)
    assert torch.equal(actual.sequences, expected.sequences)
    for name in ("scores", "logits", "hidden_states"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert len(ours) == len(theirs) == NEW_TOKENS
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_selected_hidden_states(target):
    prompt = make_prompt(8)
    if not CAN_SELECT_HIDDEN_STATES:
        with pytest.raises(ValueError, match="from transformers 5.23 on"):
            assistant = Eagle3ForSpeculation.from_target(target)
            generate(target, prompt, output_hidden_states=[1], assistant_model=assistant)
        return
    wanted = {"return_dict_in_generate": True, "output_hidden_states": True}
    everything = generate(target, prompt, **wanted)
    oracle = make_oracle(target, everything.sequences)
    actual = generate(target, prompt, **wanted | {"output_hidden_states": [1, -1, 7, -7]}, assistant_model=oracle)
    for ours, theirs in zip(actual.hidden_states, everything.hidden_states):
        assert [state is None for state in ours] == [True, False, True, True, False]
        torch.testing.assert_close(ours[1], theirs[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "stops"),
    each_once(
        ["llama", "qwen3-window", "gemma3", "llama4", "gemma4-shared-kv", "deepseek_v3"],
        [(1, 7, 17), (7, 17, 1), (17, 1, 7)],
    ),
)
def test_returned_cache_can_be_continued_from(family, stops):
    target, prompt = make_target(family), make_prompt(20)
    whole = generate(target, prompt, max_new_tokens=36)
    oracle = make_oracle(target, whole)
    assistants = [{}, {"assistant_model": oracle}]
    for (first, second), stop in zip(list(itertools.product(assistants, assistants))[1:], stops):
        start = generate(target, prompt, max_new_tokens=stop, return_dict_in_generate=True, **first)
        assert start.past_key_values.get_seq_length() == start.sequences.shape[1] - 1
        end = generate(
            target,
            start.sequences,
            attention_mask=torch.ones_like(start.sequences),  # the text may hold the padding token
            max_new_tokens=36 - stop,
            past_key_values=start.past_key_values,
            **second,
        )
        assert torch.equal(end, whole)


def test_cache_of_a_stop_inside_a_branch(target):
    prompt = make_prompt(8)
    oracle = oracle_of(target, prompt)
    settings = {"eos_token_id": int(oracle.text[0, 14]), "return_dict_in_generate": True}
    stopped = generate(target, prompt, assistant_model=oracle, **settings)
    cache = stopped.past_key_values
    assert cache.get_seq_length() == stopped.sequences.shape[1] - 1
    with torch.no_grad():
        logits = target(stopped.sequences[:, -1:], past_key_values=cache).logits
        expected = target(stopped.sequences).logits
    torch.testing.assert_close(logits[:, -1], expected[:, -1], atol=1e-4, rtol=1e-4)


def test_prompt_in_chunks_and_as_embeddings(target):
    prompt = make_prompt(30)
    oracle = assert_an_oracle_gives_the_text(target, prompt, ours={"prefill_chunk_size": 8})
    embeddings = {"inputs_embeds": target.get_input_embeddings()(prompt)}
    actual = generate(target, embeddings, assistant_model=oracle, output_steps=True)
    assert torch.equal(actual, oracle.text[:, 30:])
    assert sum(len(step.new_tokens[0]) for step in oracle.last_generation.steps) == NEW_TOKENS


def test_user_made_cache(target):
    for each in (target, make_target("gemma3")):
        assert_an_oracle_gives_the_text(each, make_prompt(20), ours={"past_key_values": DynamicCache()})


# Settings ---------------------------------------------------------------------------------------------------------


def test_settings_of_draft_and_call(target):
    prompt = make_prompt(8)
    oracle = oracle_of(target, prompt)
    settings = {"tree_depth": 2, "branching_factor": 3, "num_assistant_tokens": 4, "tree_policy": "static"}
    settings["prompt_lookup_num_tokens"] = 5
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, **settings)
    actual = target.generate(prompt, generation_config=config, assistant_model=oracle)
    assert torch.equal(actual, generate(target, prompt))
    assert max(oracle.last_generation.accepted_lengths) <= 3
    given = GenerationConfig(tree_depth=5, repetition_penalty=1.3)  # arguments come before it, and do not change it
    changed = {"generation_config": given, "tree_depth": 2, "tree_policy": "static", "output_steps": True}
    actual = generate(target, prompt, assistant_model=oracle, **changed)
    assert torch.equal(actual, generate(target, prompt, repetition_penalty=1.3))
    assert max(oracle.last_generation.accepted_lengths) <= 3 and oracle.last_generation.origins()
    assert given.tree_depth == 5 and not hasattr(given, "tree_policy")
    with pytest.raises(ValueError, match="`tree_depth` must be an integer of at least 1, got 0"):
        generate(target, prompt, assistant_model=oracle, tree_depth=0)
    with pytest.raises(ValueError, match="not used by the model: \\['tree_depth'\\]"):
        generate(target, prompt, tree_depth=2)
    generate(target, prompt, assistant_model=oracle)
    assert max(oracle.last_generation.accepted_lengths) > 3

    assert tree_settings(oracle.generation_config, config) == {**settings, "assistant_confidence_threshold": 0.0}
    oracle.generation_config.tree_policy = "auto"
    assert tree_settings(GenerationConfig(), GenerationConfig()) == tree_settings(oracle.generation_config)
    with pytest.raises(ValueError, match="`tree_depth` must be an integer of at least 1, got 0"):
        tree_settings(GenerationConfig(tree_depth=0))
    with pytest.raises(ValueError, match="`prompt_lookup_num_tokens` must be an integer of at least 0, got -1"):
        tree_settings(GenerationConfig(prompt_lookup_num_tokens=-1))
    for configs in ((GenerationConfig(tree_dept=3),), (GenerationConfig(), GenerationConfig(tree_dept=3))):
        with pytest.raises(ValueError, match="`tree_dept`, which does not exist. Did you mean `tree_depth`?"):
            tree_settings(*configs)
    tree_settings(GenerationConfig(my_own_setting=3))
    with pytest.raises(ValueError, match=r"`assistant_confidence_threshold` must be in \[0, 1\), got 2"):
        tree_settings(GenerationConfig(assistant_confidence_threshold=2))
    oracle.generation_config.tree_policy = "fast"
    with pytest.raises(ValueError, match="`tree_policy` must be 'auto' or 'static', got 'fast'"):
        generate(target, prompt, assistant_model=oracle)


def test_settings_beside_a_positional_generation_config(target):
    prompt = make_prompt(8)
    oracle = oracle_of(target, prompt, repetition_penalty=1.3)
    given = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, repetition_penalty=1.3, tree_depth=5)
    before = given.to_dict()
    actual = target.generate(prompt, given, assistant_model=oracle, tree_depth=2)
    assert torch.equal(actual, oracle.text) and max(oracle.last_generation.accepted_lengths) == 3
    assert given.to_dict() == before


def test_settings_beside_other_arguments(target, monkeypatch, said):
    """All arguments count, `None` too, and transformers does not warn that some are beside a `generation_config`."""
    prompt = make_prompt(8)
    oracle = oracle_of(target, prompt)
    monkeypatch.setattr(target, "generation_config", copy.deepcopy(target.generation_config))
    target.generation_config.update(repetition_penalty=1.3, do_sample=True, top_k=3)
    for arguments in ({"temperature": 0.7}, {"top_k": None, "attention_mask": torch.ones_like(prompt)}):
        texts = []
        for extra in ({}, {"assistant_model": oracle, "tree_depth": 2}):
            torch.manual_seed(0)
            texts.append(target.generate(prompt, **arguments, **extra, max_new_tokens=NEW_TOKENS))
        assert torch.equal(*texts) and max(oracle.last_generation.accepted_lengths) <= 3
        if "temperature" in arguments:
            assert not said
    assert not hasattr(target.generation_config, "tree_depth")


@pytest.mark.parametrize("threshold", [0.01, 0.3, 0.99])
def test_confidence_threshold(target, threshold):
    prompt = make_prompt(8)
    oracle = oracle_of(target, prompt)
    oracle.generation_config.assistant_confidence_threshold = threshold
    assert max(assert_same_text(target, oracle, prompt).accepted_lengths) >= 5  # the oracle is sure of itself
    assert_same_text(target, oracle, prompt, do_sample=True)


def test_confidence_threshold_prunes_what_the_draft_doubts(target):
    prompt = make_prompt(8)
    draft = make_draft(target, [generate(target, prompt)])
    assert max(assert_same_text(target, draft, prompt).accepted_lengths) > 1
    draft.generation_config.assistant_confidence_threshold = 0.99  # an untrained draft is never that sure
    assert max(assert_same_text(target, draft, prompt).accepted_lengths) == 1
    # Of a sample it seldom is: the noise may all but decide.
    stats = assert_same_text(target, draft, prompt, do_sample=True, seed=1)
    assert 0.8 * len(stats.accepted_lengths) < stats.plain_steps < len(stats.accepted_lengths)


def test_the_text_can_be_trained_on(target):
    # The draft computes in inference mode, whose tensors autograd refuses.
    prompt = make_prompt(8)
    oracle = oracle_of(target, prompt)
    outputs = generate(target, prompt, assistant_model=oracle, return_dict_in_generate=True, output_logits=True)
    tensors = [outputs.sequences, *outputs.logits]
    tensors += [states for layer in outputs.past_key_values.layers for states in (layer.keys, layer.values)]
    assert not any(tensor.is_inference() for tensor in tensors)
    target = copy.deepcopy(target)
    target(outputs.sequences, labels=outputs.sequences).loss.backward()
    assert all(parameter.grad is not None for parameter in target.parameters())


# The hook ---------------------------------------------------------------------------------------------------------


def test_hook_is_installed_once_and_leaves_others_alone(target):
    hooked = ("generate", "_assisted_decoding", "_validate_generation_mode")
    before = [getattr(GenerationMixin, name) for name in hooked]
    install_generation_hook()
    assert [getattr(GenerationMixin, name) for name in hooked] == before
    prompt = make_prompt(12)
    expected = generate(target, prompt)
    assistant = copy.deepcopy(target)
    assert torch.equal(generate(target, prompt, assistant_model=assistant), expected)
    assert torch.equal(generate(target, prompt, prompt_lookup_num_tokens=4), expected)


# Errors -----------------------------------------------------------------------------------------------------------


def save_and_rename(draft, tmp_path):
    draft.save_pretrained(tmp_path)
    return Eagle3ForSpeculation.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 64}, "vocabulary of 96, but .* one of 64.* resized the target's embeddings"),
        ({"hidden_size": 64}, "states of size 32, but .* size 64"),
        ({"num_hidden_layers": 2}, r"layers \[2, 3, 3\], but .* layers 0 to 1"),
        ({"seed": 1}, "trained for another model"),
        ({"seed": 1, "vocab_size": 100}, "trained for another model"),
    ],
)
def test_wrong_pairings_name_both_sides(tmp_path, target, changes, message):
    target.config._name_or_path = "right/target"
    draft = Eagle3ForSpeculation.from_target(target, eagle_aux_hidden_state_layer_ids=[2, 3, 3])
    target.config._name_or_path = ""
    draft = save_and_rename(draft, tmp_path)
    wrong = make_target("llama", **changes)
    wrong.config._name_or_path = "wrong/target"
    with pytest.raises(ValueError, match=message) as error:
        generate(wrong, make_prompt(5), assistant_model=draft)
    assert all(name in str(error.value) for name in (str(tmp_path), "right/target", "wrong/target"))


def test_the_right_target_in_another_precision_is_recognized(tmp_path, target):
    draft = save_and_rename(Eagle3ForSpeculation.from_target(target), tmp_path)
    draft.validate_target(copy.deepcopy(target).to(torch.bfloat16))
    tuned = copy.deepcopy(target)
    weight = tuned.get_input_embeddings().weight
    weight.data += 0.1 * weight.std() * torch.randn_like(weight)
    draft.validate_target(tuned)


@pytest.mark.parametrize(
    ("num_known", "overrides", "settings"),
    each_once(
        [8, VOCAB_SIZE],
        [{}, {}, {"has_own_embed_tokens": True}],
        [
            {},
            {"do_sample": True, "top_k": 20},
            {"cache_implementation": "static", "do_sample": True},
            {"do_sample": True, "num_return_sequences": 3},
        ],
    ),
)
def test_tokens_that_were_added_to_the_target(num_known, overrides, settings):
    """In prompts and texts. The draft does not know them, but the others are still what they were."""
    target, prompt, batch = make_target("llama"), make_prompt(12), make_batch([12, 7])
    draft = make_draft(target, [prompt], num_known, **overrides)
    if num_known == VOCAB_SIZE:
        draft.set_draft_vocabulary(None, target)
    target.resize_token_embeddings(VOCAB_SIZE + 4, mean_resizing=False)
    said = generate(target, prompt)[0, 12:].unique()[:4]
    with torch.no_grad():  # the target writes them in the place of others
        target.get_output_embeddings().weight[VOCAB_SIZE:] = 1.2 * target.get_output_embeddings().weight[said]
    prompt[0, 3], batch["input_ids"][:, -3:] = VOCAB_SIZE + 2, VOCAB_SIZE + 3
    for policy, inputs in (("static", prompt), ("auto", batch)):
        draft.generation_config.tree_policy = policy
        assert_same_text(target, draft, inputs, **settings)
        assert (generate(target, inputs, **settings)[:, 12:] >= VOCAB_SIZE).any()
    with pytest.raises(NotImplementedError, match="A draft cannot be resized"):
        draft.resize_token_embeddings(VOCAB_SIZE + 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter_to_a_pairing(dtype):
    target = make_target("llama", vocab_size=1000)
    draft = Eagle3ForSpeculation.from_target(target)
    with default_dtype(dtype):
        draft.validate_target(target)
        made = Eagle3ForSpeculation.from_target(target)
    assert made.config.verifier_fingerprint == draft.config.verifier_fingerprint


def test_tokens_that_were_added_and_drafts_that_cannot_tell(target):
    """Without a fingerprint nothing shows that the other tokens are what they were."""
    draft, larger = Eagle3ForSpeculation.from_target(target), copy.deepcopy(target)
    fingerprint = draft.config.verifier_fingerprint
    larger.resize_token_embeddings(VOCAB_SIZE + 1)
    draft.pair_with(larger)
    assert draft.config.verifier_fingerprint == fingerprint
    draft.validate_target(target)
    draft.config.verifier_fingerprint = None
    with pytest.raises(ValueError, match="one of 97. .* make a draft for it after that. Pair "):
        generate(larger, make_prompt(5), assistant_model=draft)


def targets_that(family, treats_trees):
    """The same target with code of its own, as one that came with its checkpoint."""
    target = make_target(family)

    class Careless(type(target)):
        def forward(self, *args, attention_mask=None, position_ids=None, **kwargs):
            if not isinstance(attention_mask, torch.Tensor | None) or (
                attention_mask is not None and attention_mask.dim() == 4
            ):
                if treats_trees == "refuses masks":
                    raise ValueError("the mask must have two dimensions")
                if treats_trees == "runs out of memory":
                    raise torch.OutOfMemoryError("no room for this mask")
                attention_mask = None if treats_trees == "ignores masks" else attention_mask
            position_ids = None if treats_trees == "ignores positions" else position_ids
            return super().forward(*args, attention_mask=attention_mask, position_ids=position_ids, **kwargs)

    target.__class__ = Careless
    return target


@pytest.mark.parametrize(
    ("family", "treats_trees"),
    [("gemma3", "well"), ("llama", "ignores masks"), ("gemma3", "ignores positions"), ("llama", "refuses masks")],
)
def test_targets_with_code_of_their_own(family, treats_trees, warned):
    target = targets_that(family, treats_trees)
    type(logger).warning_once.cache_clear()
    for batch in ({"input_ids": make_prompt(24)}, make_batch([9, 24])):
        settings = {**batch, "max_new_tokens": 18, "do_sample": False, "pad_token_id": 0}
        expected = target.generate(**settings, return_dict_in_generate=True)
        padding = (1 - batch.get("attention_mask", torch.ones_like(batch["input_ids"]))).sum(dim=1, keepdim=True)
        draft = make_oracle(target, expected.sequences, padding=padding)
        draft.generation_config.output_steps = True
        given = DynamicCache(config=target.config)
        for cache in (None, given):
            text = target.generate(**settings, **{CACHE: cache}, assistant_model=draft)
            assert text.tolist() == expected.sequences.tolist()
            trees = [
                max(map(parents.count, parents)) for step in draft.last_generation.steps for parents in step.parents
            ]
            assert (max(trees) > 2) == (treats_trees == "well")  # the root is its own parent
        assert draft.last_generation.new_tokens > draft.last_generation.target_forwards
        for layer, other in zip(given.layers, expected.past_key_values.layers):
            torch.testing.assert_close(layer.keys, other.keys, rtol=1e-3, atol=1e-3)
    assert bool([text for text in warned if "cannot read a tree" in text]) == (treats_trees != "well")


def test_memory_that_runs_out_says_nothing_about_a_target():
    target, prompt = targets_that("llama", "runs out of memory"), make_prompt(9)
    with pytest.raises(torch.OutOfMemoryError, match="no room for this mask"):
        generate(target, prompt, assistant_model=Eagle3ForSpeculation.from_target(target))


def test_a_branching_factor_beyond_the_vocabulary(target, draft):
    """It takes no more memory than the vocabulary is wide."""
    draft = copy.deepcopy(draft)
    draft.generation_config.branching_factor = 10**12
    assert_same_text(target, draft, make_prompt(5))


def test_calls_a_tree_cannot_serve(target, draft):
    prompt = make_prompt(5)
    with pytest.raises(ValueError, match="needs `use_cache=True`"):
        generate(target, prompt, assistant_model=draft, use_cache=False)
    with pytest.raises(ValueError, match="changes the text"):
        generate(target, prompt, assistant_model=draft, assistant_ensemble_weight=0.5)
    with pytest.raises(ValueError, match="dola_layers"):
        generate(target, prompt, assistant_model=draft, dola_layers="low")


def test_beams_ignore_the_assistant_as_transformers_does(target, draft):
    prompt = make_prompt(5)
    expected = generate(target, prompt, num_beams=3)
    draft = copy.deepcopy(draft)
    wrapped = get_peft_model(copy.deepcopy(draft), LoraConfig(target_modules=["fc"]))
    for each in (draft, wrapped):
        generate(target, prompt, assistant_model=each)
        assert each.last_generation is not None
        assert torch.equal(generate(target, prompt, num_beams=3, assistant_model=each), expected)
        assert each.last_generation is None


def test_targets_that_cannot_be_verified_in_a_tree(draft):
    config = AutoConfig.for_model("t5", vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    config.decoder_start_token_id = 0
    seq2seq = AutoModelForSeq2SeqLM.from_config(config).eval()
    with pytest.raises(ValueError, match="encoder-decoder"):
        seq2seq.generate(make_prompt(5), assistant_model=draft)
    with pytest.raises(ValueError, match="decoder-only"):
        Eagle3ForSpeculation.from_target(seq2seq)


@pytest.mark.parametrize(("model_type", "is_decoder", "is_taken"), [
    ("bert", False, False),
    ("bert", True, True),
    ("gpt_neox", False, True),
])  # fmt: skip
def test_targets_that_see_later_tokens(draft, model_type, is_decoder, is_taken):
    sizes = {"hidden_size": draft.config.hidden_size, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCAB_SIZE, "intermediate_size": 48, "is_decoder": is_decoder}
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)).eval()
    with nullcontext() if is_taken else pytest.raises(ValueError, match="it sees later tokens, because `is_decoder`"):
        assert_same_text(target, Eagle3ForSpeculation.from_target(target), make_prompt(5))
    with pytest.raises(ValueError, match="trained for another model" if is_taken else "sees later tokens"):
        target.generate(make_prompt(5), assistant_model=draft)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("bloom", {"n_layer": 3, "n_head": 4}, "takes no `position_ids`.*add the argument"),
        ("cpmant", {"dim_head": 8, "dim_ff": 48}, "takes no `position_ids`"),
        ("deepseek_v4", {**MOE, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2}, "stateful"),
        ("hy_v4", {**MOE, "n_routed_experts": 4}, "several for each token"),
        ("openai-gpt", {}, "returns a cache"),
        ("minimax", {}, "roll back"),
    ],
)
def test_targets_that_take_no_positions_or_cannot_roll_back(model_type, changes, message):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = AutoConfig.for_model(model_type, **{**BASE, **changes})
    target = AutoModelForCausalLM.from_config(config).eval()
    draft = Eagle3ForSpeculation.from_target(target)
    with pytest.raises(ValueError, match=message):
        generate(target, make_prompt(5), assistant_model=draft)


@pytest.mark.parametrize(("family", "bad"), [("llama", math.inf), ("qwen3_5", math.nan)])
def test_drafted_tokens_whose_states_are_no_numbers(family, bad):
    """No mask keeps them from the other nodes: 0 * NaN. Plain decoding never reads them."""
    target, batch, unsaid = make_target(family), make_batch([5, 24]), range(70, VOCAB_SIZE)
    target.lm_head.weight.data[unsaid] = 0
    batch["input_ids"] = batch["input_ids"] % 70
    settings = {"max_new_tokens": 12, "pad_token_id": 0}
    calls = [
        {"do_sample": False},
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": True, "top_k": 20},
        {"do_sample": False, "return_dict_in_generate": True, "output_logits": True},
    ]
    if family != "qwen3_5":
        calls += [{**calls[0], "cache_implementation": "static"}]
    prompts = [{"input_ids": batch["input_ids"][1:]}, batch]
    cases, texts = [(prompts[i % 2], call) for i, call in enumerate([*calls, calls[0]])], []
    for prompt, call in cases:
        torch.manual_seed(0)
        texts.append(target.generate(**prompt, **call, **settings))
    target.get_input_embeddings().weight.data[unsaid] = bad
    # Drafts of which some tokens, and all, are such.
    drafts = [Eagle3ForSpeculation.from_target(target, vocabulary).eval() for vocabulary in (None, unsaid)]
    for (prompt, call), expected in zip(cases, texts):
        for draft in drafts:
            draft.generation_config.tree_policy = "static"
            torch.manual_seed(0)
            actual = target.generate(**prompt, **call, **settings, assistant_model=draft)
            if isinstance(expected, torch.Tensor):
                assert torch.equal(actual, expected)
            else:
                assert torch.equal(actual.sequences, expected.sequences)
                torch.testing.assert_close(actual.logits, expected.logits, atol=1e-3, rtol=1e-3)
            if draft is drafts[1]:
                assert draft.last_generation.plain_steps > 5  # trees were taken back


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_criterion_that_the_prompt_has_met_already(num_rows):
    """Each row takes one token all the same, as in plain `generate`."""
    target, prompt = make_target("llama"), make_prompt(8, batch_size=num_rows)
    draft, criteria = Eagle3ForSpeculation.from_target(target), [MaxLengthCriteria(max_length=8)]
    assert assert_same_text(target, draft, prompt, stopping_criteria=criteria).new_tokens == num_rows


class LaterThanThat(MaxLengthCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return super().__call__(input_ids, scores, **kwargs) & (input_ids[:, -1] % 37 == 0)


@pytest.mark.parametrize(("cache", "seed"), [(None, 0), (None, 1), ("static", 2), ("static", 3)])
def test_a_length_that_somebody_derived_may_be_passed(cache, seed):
    target, prompt = make_target("llama"), make_prompt(8, seed=seed)
    settings = {"max_new_tokens": 40, "cache_implementation": cache, "disable_compile": True}
    draft = oracle_of(target, prompt, max_new_tokens=48)
    assert_same_text(target, draft, prompt, stopping_criteria=[LaterThanThat(max_length=12)], **settings)


def test_hidden_states_are_those_of_the_text_alone():
    target, prompt = make_target("llama"), make_prompt(8)
    settings = {
        "max_new_tokens": 20,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_hidden_states": True,
    }
    outputs = target.generate(prompt, assistant_model=Eagle3ForSpeculation.from_target(target), **settings)
    for states in outputs.hidden_states[1:]:
        assert all(state.untyped_storage().nbytes() == state.numel() * state.element_size() for state in states)


@pytest.mark.parametrize("name", ["hidden_dropout", "router_jitter_noise"])
def test_other_names_for_what_draws_in_training_mode(name):
    target = make_target("llama")
    draft = Eagle3ForSpeculation.from_target(target)
    setattr(target.model.layers[0], name, 0.2)
    with pytest.raises(ValueError, match="drops out at random"):
        target.train().generate(make_prompt(5), assistant_model=draft, max_new_tokens=3)
    assert target.eval().generate(make_prompt(5), assistant_model=draft, max_new_tokens=3).shape[1] <= 8


def test_what_the_target_returned_of_the_prompt_is_not_kept():
    """Its hidden states take memory that the cache of a long text needs. Neither does plain `generate` keep them."""
    target, prompt, states, alive = make_target("llama"), make_prompt(40), [], []
    draft = make_draft(target, [prompt])

    def watch(module, args, outputs):
        alive.append(sum(each() is not None for each in states))
        if not states:
            states.extend(weakref.ref(each) for each in outputs.hidden_states if each is not None)

    handle = target.register_forward_hook(watch)
    target.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=draft)
    handle.remove()
    assert states and len(alive) > 2 and not any(alive)

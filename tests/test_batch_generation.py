"""Batches: each row's text is what plain `generate` writes, though rows accept different numbers of tokens."""

import copy

import pytest
import torch
from conftest import (
    FAMILIES,
    MORE_FAMILIES,
    VOCAB_SIZE,
    assert_an_oracle_gives_the_text,
    assert_same_text,
    each_once,
    generate,
    make_batch,
    make_gpt2,
    make_oracle,
    make_prompt,
    make_target,
    oracle_of,
)
from fuzz_calls import (
    Counts,
    Draws,
    Interrupt,
    Interrupts,
    OfOtherRows,
    OfPairs,
    ReplacesTheNewest,
)
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import stopping_criteria

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.remote_code.text_eagle3 import Text


LENGTHS = [5, 40, 17]
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0] * 4,
    "original_max_position_embeddings": 50,
}


def never_said(text) -> int:
    return next(token for token in range(VOCAB_SIZE) if token not in text)


def assert_same_texts(*args, **kwargs):
    """[`assert_an_oracle_gives_the_text`], which returns the statistics of its call."""
    return assert_an_oracle_gives_the_text(*args, **kwargs).last_generation


@pytest.mark.parametrize(
    ("family", "settings"),
    each_once(FAMILIES | MORE_FAMILIES, [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}]),
)
def test_greedy_text_of_every_family(family, settings):
    stats = assert_same_texts(make_target(family), make_batch(LENGTHS), **settings)
    # Rows went apart, or this would prove nothing. Cohere's tiny targets mostly say what their draft's head says from the start.
    num_lengths = 2 if family.startswith("cohere") else 3
    assert max(stats.accepted_lengths) >= 4 and len(set(stats.accepted_lengths)) >= num_lengths


@pytest.mark.parametrize(
    ("family", "settings"),
    each_once(
        ["llama", "gemma3", "llama4"],
        [{}, {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}],
    ),
)
def test_a_seed_gives_the_samples_it_gives_without_a_draft(family, settings):
    target, batch = make_target(family), make_batch(LENGTHS)
    for seed in range(3):
        assert assert_same_texts(target, batch, seed, do_sample=True, **settings).acceptance_length > 1.2


@pytest.mark.parametrize("do_sample", [False, True])
def test_prompts_of_one_length_without_a_mask(target, do_sample):
    stats = assert_same_texts(target, make_prompt(9, batch_size=3), do_sample=do_sample)
    assert max(stats.accepted_lengths) >= 4


@pytest.mark.parametrize("do_sample", [False, True])
def test_rows_that_finish_early_are_padded(target, do_sample):
    batch = make_batch([5, 9, 17, 3])
    text = generate(target, batch, do_sample=do_sample)
    new = text[:, batch["input_ids"].shape[1] :]
    finished_early = 0
    for token in new.unique().tolist()[::9]:  # each may end the rows that have it
        settings = {"do_sample": do_sample, "eos_token_id": token, "pad_token_id": 0}
        oracle = assert_an_oracle_gives_the_text(target, batch, **settings)
        finished_early += len(set((oracle.text != 0).sum(dim=1).tolist())) > 1
        assert oracle.last_generation.new_tokens <= new.numel()
    assert finished_early > 2


class Columns:
    """A streamer."""

    def __init__(self):
        self.columns, self.is_ended = [], False

    def put(self, value):
        self.columns.append(value)

    def end(self):
        self.is_ended = True


class StopAtLength(StoppingCriteria):
    """Ends rows at lengths that depend on their first token, and not for an end-of-sequence token."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] > 20 + input_ids[:, -1] % 7


def test_rows_finished_by_other_criteria_go_on(target):
    batch = make_batch([5, 9, 17])
    stats = assert_same_texts(target, batch, stopping_criteria=[StopAtLength()], eos_token_id=None)
    assert max(stats.accepted_lengths) > 2


@pytest.mark.parametrize("returns_dict", [False, True])
def test_rows_that_end_without_a_padding_token(target, monkeypatch, returns_dict):
    """As if it were 0. Plain `generate` raises."""
    batch = {"input_ids": make_prompt(5, batch_size=2)}
    text = generate(target, batch)
    token = int(text[0, 10])
    expected = generate(target, batch, eos_token_id=token, pad_token_id=0)
    assert (expected[0, -5:] == 0).all()
    monkeypatch.setattr(target, "generation_config", GenerationConfig())
    settings = {"stopping_criteria": [EosTokenCriteria(token)], "return_dict_in_generate": returns_dict}
    actual = generate(target, batch, assistant_model=make_oracle(target, text), **settings)
    assert (actual.sequences if returns_dict else actual).tolist() == expected.tolist()


@pytest.mark.parametrize("ends_early", [False, True])
def test_padding_that_the_target_has_no_embedding_for(target, ends_early):
    """As where a token was added to the tokenizer only. Plain `generate` needs none for padding at the end."""
    batch = {"input_ids": make_prompt(5, batch_size=2)}
    text = generate(target, batch, max_new_tokens=30, pad_token_id=0)
    settings = {"max_new_tokens": 30, "pad_token_id": 96, "eos_token_id": [never_said(text)]}
    if ends_early:  # one row ends a token before the other
        settings["eos_token_id"].append(int(text[0, -2]))
    expected = generate(target, batch, **settings)
    assert (expected == 96).any() == ends_early
    for seed in range(4):
        assert generate(target, batch, assistant_model=make_oracle(target, text, seed), **settings).equal(expected)


def test_padding_with_an_end_that_the_target_has_no_embedding_for(target, monkeypatch):
    """Without a padding token transformers pads with the first token that ends a text."""
    batch = {"input_ids": make_prompt(5, batch_size=2)}
    text = generate(target, batch, max_new_tokens=30, pad_token_id=0)
    monkeypatch.setattr(target, "generation_config", GenerationConfig())
    settings = {"max_new_tokens": 30, "return_dict_in_generate": True}
    for token in (-1, 96):
        settings["eos_token_id"] = [token, int(text[0, -2])]
        expected = generate(target, batch, **settings).sequences
        assert (expected[0] == token).any()
        for seed in range(4):
            oracle = make_oracle(target, text, seed)
            assert generate(target, batch, assistant_model=oracle, **settings).sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_cache_that_a_raising_streamer_leaves(target, do_sample):
    batch = {"input_ids": make_prompt(12, batch_size=3), "attention_mask": torch.ones(3, 12, dtype=torch.long)}
    settings, found = {"max_new_tokens": 40, "do_sample": do_sample}, []
    for assistant in ({}, {"assistant_model": oracle_of(target, batch, **settings)}):
        cache = DynamicCache(config=target.config)
        with pytest.raises(Interrupt):
            generate(target, batch, past_key_values=cache, streamer=Interrupts(24), **assistant, **settings)
        found.append((cache.layers[-1].keys, torch.get_rng_state()))
    length = found[1][0].shape[-2]  # up to the last whole step
    assert 20 < length <= found[0][0].shape[-2]
    assert torch.allclose(found[0][0][..., :length, :], found[1][0], atol=1e-4)
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_batch_that_is_broken_off_and_tried_again(target, do_sample):
    """With a cache of the caller's, who crops it to the prompt: no row of it may have run ahead."""
    batch, calls_left = make_batch([5, 12, 9]), [0]
    settings = {"max_new_tokens": 60, "do_sample": do_sample}
    oracle = oracle_of(target, batch, **settings)

    def fail(module, inputs, output):
        calls_left[0] -= 1
        if calls_left[0] == 0:
            raise KeyboardInterrupt

    for num_forwards in (3, 5, 8):
        cache, calls_left[0] = DynamicCache(config=target.config), num_forwards
        handle = target.register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            generate(target, batch, past_key_values=cache, assistant_model=oracle, **settings)
        handle.remove()
        cache.crop(11 - cache.get_seq_length())
        assert generate(target, batch, past_key_values=cache, **settings).tolist() == oracle.text.tolist()


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"repetition_penalty": 1.2}], ids=["all", "top-k", "penalty"])
@pytest.mark.parametrize(("row", "length"), [(0, 7), (1, 0), (1, 7)])
def test_the_generator_after_scores_that_are_no_numbers(target, settings, row, length):
    """Of a row that may be ahead of the others: the generator is where plain `generate` leaves it."""
    batch, states = make_batch([9, 5]), []
    oracle = oracle_of(target, batch, do_sample=True)
    position = [9, 5][row] + length - 1

    def spoil(module, args, kwargs, output):
        is_there = kwargs["position_ids"][row, -output.logits.shape[1] :] == position
        output.logits[row, is_there] = torch.nan

    handle = target.register_forward_hook(spoil, with_kwargs=True)
    for assistant in ({}, {"assistant_model": oracle}):
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            generate(target, batch, do_sample=True, **settings, **assistant)
        states.append(torch.get_rng_state())
    handle.remove()
    assert torch.equal(*states)


def test_a_padded_batch_that_is_wholly_in_the_cache(target, draft):
    batch, cache = make_batch([9, 5]), DynamicCache(config=target.config)
    positions = (batch["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        target(**batch, past_key_values=cache, position_ids=positions)
    with pytest.raises(ValueError, match=r"its cache holds the whole prompt, .*cache\.crop\(-1\)"):
        generate(target, batch, past_key_values=cache, assistant_model=draft)
    cache.crop(-1)
    expected = generate(target, batch)
    assert generate(target, batch, past_key_values=cache, assistant_model=draft).tolist() == expected.tolist()


def test_scores_that_criteria_see_are_put_together_once(target):
    seen = []

    class See(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            assert len(scores) == input_ids.shape[1] - 12
            seen.append(scores[0])
            return torch.zeros(len(input_ids), dtype=torch.bool)

    batch = make_batch([5, 12, 9])
    settings = {"output_scores": True, "return_dict_in_generate": True, "stopping_criteria": [See()]}
    output = generate(target, batch, assistant_model=oracle_of(target, batch), **settings)
    assert len(seen) == 18 and all(scores is seen[0] is output.scores[0] for scores in seen)


def test_one_row_runs_far_ahead(target, monkeypatch):
    monkeypatch.setattr(Text, "MAX_LEAD", 20)
    batch = make_batch([5, 9])
    oracle = oracle_of(target, batch, max_new_tokens=50)
    oracle.text[1] = 3  # of the second row it knows nothing
    for do_sample in (False, True):
        settings = {"max_new_tokens": 50, "do_sample": do_sample, "top_k": 2}
        expected = generate(target, batch, **settings)
        oracle.text[0] = expected[0]
        assert generate(target, batch, assistant_model=oracle, **settings).tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3", "gemma4-shared-kv", "llama4", "gpt_oss"])
def test_returned_dict_is_that_of_plain_generate(family):
    target, batch = make_target(family, attn_implementation="eager"), make_batch(LENGTHS)
    text = generate(target, batch)
    eos_token_id = int(text[1, -12])
    settings = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "repetition_penalty": 1.2,
        "eos_token_id": eos_token_id,
    }
    expected = generate(target, batch, **settings)
    oracle = oracle_of(target, batch, text=expected.sequences)
    actual = generate(target, batch, assistant_model=oracle, **settings)
    assert max(oracle.last_generation.accepted_lengths) > 2
    assert actual.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(actual.scores, expected.scores, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(actual.logits, expected.logits, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(actual.hidden_states[1:], expected.hidden_states[1:], atol=2e-4, rtol=1e-4)
    for one, other in zip(actual.hidden_states[0], expected.hidden_states[0], strict=True):
        assert one.shape == other.shape  # what stands on padding is arbitrary

    mask = torch.cat([batch["attention_mask"], torch.ones_like(actual.sequences[:, max(LENGTHS) :])], dim=1)
    token = torch.full((len(LENGTHS), 1), 7)
    inputs = {"attention_mask": torch.cat([mask, mask[:, :0]], dim=1), "position_ids": mask.sum(1, keepdim=True) - 1}
    logits = [target(token, past_key_values=out.past_key_values, **inputs).logits for out in (expected, actual)]
    torch.testing.assert_close(logits[1], logits[0], atol=2e-4, rtol=1e-4)


def test_returned_cache_can_be_continued_from(target):
    batch = make_batch(LENGTHS)
    first = generate(target, batch, return_dict_in_generate=True, max_new_tokens=10, eos_token_id=None)
    oracle = oracle_of(target, batch, eos_token_id=None)
    second = generate(target, batch, assistant_model=oracle, return_dict_in_generate=True, max_new_tokens=10)
    longer = torch.cat([first.sequences, make_prompt(4, batch_size=3)], dim=1)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 14), value=1)
    settings = {"attention_mask": mask, "max_new_tokens": 12}
    texts = [
        generate(target, longer, past_key_values=output.past_key_values, **settings, **assistant).tolist()
        for output, assistant in ((first, {}), (second, {"assistant_model": oracle}))
    ]
    assert texts[0] == texts[1]


def test_untrained_draft_and_small_budgets(target):
    batch = make_batch([5, 9, 17, 3, 8])
    expected = generate(target, batch)
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=expected[:, 20:].unique()[:8])
    for budget in (1, 5, 40):
        draft.generation_config.num_assistant_tokens = budget
        assert_same_text(target, draft, batch)


def test_streamer_gets_whole_columns(target):
    streamer = Columns()
    oracle = assert_an_oracle_gives_the_text(target, make_batch(LENGTHS), ours={"streamer": streamer})
    assert streamer.is_ended
    assert torch.stack(streamer.columns[1:], dim=1).tolist() == oracle.text[:, max(LENGTHS) :].tolist()


def test_logits_processors_and_criteria_may_know_rows_by_number(target):
    class Favour:  # another token in each row
        def __call__(self, input_ids, scores):
            scores = scores.clone()
            for row in range(len(scores)):
                scores[row, 10 + row :: 7] += 4 + (input_ids[row, -1] % 3)
            return scores

    class StopRow(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            lengths = 50 + 4 * torch.arange(len(input_ids))
            return input_ids.shape[1] >= lengths

    def allowed(row, input_ids):
        return list(range(3 + row, 90, 2 + row))

    batch = make_batch(LENGTHS)
    for settings in (
        {"logits_processor": LogitsProcessorList([Favour()])},
        {"prefix_allowed_tokens_fn": allowed},
        {"stopping_criteria": [StopRow()]},
        {"stopping_criteria": [StopRow()], "eos_token_id": None},
    ):
        assert max(assert_same_texts(target, batch, **settings).accepted_lengths) > 2


class FollowsEachRow(OfPairs):
    """As grammars do: a state for each row, which the newest token changes at each call."""

    states = None

    def __call__(self, input_ids, scores):
        if self.states is None:
            self.states = torch.zeros(len(input_ids), dtype=torch.long)
        else:
            self.states = (3 * self.states + input_ids.view(-1)[input_ids.shape[1] - 1 :: input_ids.shape[1]] // 5) % 5
        return scores.masked_fill(torch.arange(scores.shape[1]) % 5 != self.states[:, None], -1e4)


class ChangesTheText(OfPairs):
    def __call__(self, input_ids, scores):
        input_ids[:, 0] += 1
        return scores


class StopAllAt(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return bool(input_ids[0, -1] == self.token)


class StopWhereUnsure(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return scores[-1].softmax(dim=-1).amax(dim=-1) < 0.1


@pytest.mark.parametrize(
    "make_settings",
    [
        *(
            lambda kind=kind: {"logits_processor": LogitsProcessorList([kind(4)])}
            for kind in (Counts, OfOtherRows, Draws, FollowsEachRow, ChangesTheText)
        ),
        lambda: {"stopping_criteria": [ReplacesTheNewest(200)]},
        lambda: {"stopping_criteria": [StopAllAt(3)]},
        lambda: {"stopping_criteria": [StopWhereUnsure()], "return_dict_in_generate": True, "output_scores": True},
        lambda: {"guidance_scale": 1.5},
        lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3), "do_sample": True},
        lambda: {"encoder_repetition_penalty": 1.4},
        lambda: {"encoder_no_repeat_ngram_size": 2},
        lambda: {"repetition_penalty": 1.3, "eos_token_id": 7},  # as fast as before
    ],
    ids=lambda make: ",".join(make()),
)
def test_processors_and_criteria_that_look_across_rows_or_keep_states(target, make_settings):
    batch = make_batch(LENGTHS)

    def generate_with(**kwargs):
        prompts = {name: entries.clone() for name, entries in batch.items()}  # which may be changed
        output = generate(target, prompts, **make_settings(), **kwargs)
        return output if isinstance(output, torch.Tensor) else output.sequences

    expected = generate_with()
    oracle = oracle_of(target, batch, text=expected)
    assert generate_with(assistant_model=oracle).tolist() == expected.tolist()
    if expected.shape[1] > max(LENGTHS) + 4:
        assert max(oracle.last_generation.accepted_lengths) >= 2


@pytest.mark.parametrize("has_eos", [False, True])
def test_time_that_is_over_ends_all_rows_at_once(target, monkeypatch, has_eos):
    class Clock:
        """Time passes with each forward."""

        forwards = 0

        def time(self):
            return self.forwards

    def tick(*args):
        clock.forwards += 1

    batch = make_batch(LENGTHS)
    text = generate(target, batch, max_new_tokens=60, eos_token_id=None)
    oracle = oracle_of(target, batch, text=text.clone())
    oracle.text[1] = 3  # of one row it knows nothing
    clock, timed = Clock(), copy.deepcopy(target)
    timed.register_forward_hook(tick)
    monkeypatch.setattr(stopping_criteria, "time", clock)
    eos_token_id = never_said(text) if has_eos else None
    settings = {"max_time": 8.5, "max_new_tokens": 60, "eos_token_id": eos_token_id, "pad_token_id": 0}
    actual = generate(timed, batch, assistant_model=oracle, **settings)
    assert clock.forwards == 9
    assert actual.tolist() == text[:, : actual.shape[1]].tolist()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 50}),
        ("llama4", {"attn_temperature_tuning": True, "floor_scale": 16}),
        (
            "phi3",
            {"rope_parameters": LONG_ROPE, "max_position_embeddings": 200, "original_max_position_embeddings": 50},
        ),
    ],
)
def test_targets_that_depend_on_the_length_of_the_batch(family, changes):
    target = make_target(family, **changes)
    for lengths in ([5, 9], LENGTHS):
        # Long enough for the rows to come to the next scale, or switch, at different steps.
        assert_same_texts(target, make_batch(lengths), max_new_tokens=24, eos_token_id=7)
        assert_same_texts(target, make_batch(lengths), max_new_tokens=24, do_sample=True, top_k=5)


def test_positions_that_come_to_a_rotary_switch_before_the_text_does():
    changes = {"rope_parameters": LONG_ROPE, "max_position_embeddings": 200, "original_max_position_embeddings": 50}
    target, batch = make_target("phi3", **changes), make_batch([5, 17, 9])
    padding = (1 - batch["attention_mask"]).sum(dim=1, keepdim=True)
    batch["position_ids"] = (batch["attention_mask"].cumsum(dim=1) - 1).clamp(min=0) + 25
    expected = generate(target, batch)
    oracle = make_oracle(target, expected, padding=padding - 25)
    assert generate(target, batch, assistant_model=oracle).tolist() == expected.tolist()
    assert oracle.last_generation.acceptance_length > 1.2


def test_positions_that_are_looked_up_in_a_table():
    target = make_gpt2(n_positions=48)
    batch = {"input_ids": make_prompt(35, batch_size=3), "attention_mask": torch.ones(3, 35, dtype=torch.long)}
    assert max(assert_same_texts(target, batch, max_new_tokens=14).accepted_lengths) >= 3  # as many as there may be
    prompt = {"input_ids": make_prompt(44), "attention_mask": torch.ones(1, 44, dtype=torch.long)}
    token = int(generate(target, prompt, max_new_tokens=3)[0, -1])
    assert_same_texts(target, prompt, max_new_tokens=100, eos_token_id=token)  # ends before the table does


def test_token_types_of_the_prompt():
    target, batch = make_gpt2(), make_batch(LENGTHS)
    batch["token_type_ids"] = torch.randint(2, 90, batch["input_ids"].shape)
    assert max(assert_same_texts(target, batch).accepted_lengths) >= 3


def test_inputs_of_other_types(target):
    batch = make_batch(LENGTHS)
    oracle = oracle_of(target, batch)
    for inputs in (
        {**batch, "attention_mask": batch["attention_mask"].float()},
        {**batch, "attention_mask": 2 * batch["attention_mask"]},
        {**batch, "input_ids": batch["input_ids"].int()},
    ):
        assert_same_text(target, oracle, inputs)
    prompt = {"input_ids": make_prompt(9, batch_size=3), "position_ids": torch.arange(9)[None] + 5}
    assert_same_texts(target, prompt)


def test_holes_in_the_mask():
    target, prompt = make_target("llama4"), make_prompt(40)
    for hole in (slice(5, 12), slice(34, 40)):
        mask = torch.ones_like(prompt)
        mask[:, hole] = 0
        assert_same_texts(target, prompt, attention_mask=mask)


class Witness(ChangesTheText):
    """A logits processor and a streamer, which keep what they get."""

    def __init__(self, seen):
        self.seen = seen

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids)
        assert scores.dtype == torch.float32
        return super().__call__(input_ids, scores)

    def put(self, value):
        self.seen.append(value.clone())
        value.zero_()

    def end(self):
        self.seen.append(torch.zeros(0))


class WitnessingCriteria(ReplacesTheNewest):
    def __init__(self, seen):
        super().__init__(1000)  # which ends nothing
        self.seen = seen

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids)
        return super().__call__(input_ids, scores)


@pytest.mark.parametrize("lengths", [[9], [9, 4]])
def test_processors_criteria_and_streamers_are_called_in_turn(target, lengths):
    oracle, seen = None, []
    for _ in range(2):
        batch, given = make_batch(lengths), []
        witness = Witness(given)
        settings = {
            "logits_processor": LogitsProcessorList([witness]),
            "stopping_criteria": [WitnessingCriteria(given)],
        }
        text = generate(target, batch, streamer=witness, assistant_model=oracle, **settings)
        seen.append([text.tolist(), batch["input_ids"].tolist(), *(each.tolist() for each in given)])
        oracle = oracle or oracle_of(target, make_batch(lengths), text=text)
    assert seen[0] == seen[1] and max(oracle.last_generation.accepted_lengths) > 2

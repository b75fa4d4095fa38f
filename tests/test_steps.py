"""What each step verified and wrote, for users' own analysis."""

import pytest
import torch
from conftest import (
    assert_same_text,
    generate,
    lookups_of,
    make_batch,
    make_draft,
    make_prompt,
    make_target,
    oracle_of,
)
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer


SETTINGS = {"max_new_tokens": 24, "pad_token_id": 0}


def check_steps(stats, texts, prompt_length):
    """They tell the whole text of each row, and how it came about."""
    written = {row: [] for row in range(len(texts))}
    for step in stats.steps:
        for i, row in enumerate(step.rows):
            tokens, parents, path = step.tokens[i], step.parents[i], step.accepted[i]
            assert tokens[0] == [*texts[row][:prompt_length], *written[row]][-1]
            assert [tokens[node] for node in path] == step.new_tokens[i][: len(path)]
            assert [parents[node] for node in path] == [0, *path][: len(path)]
            assert len(step.new_tokens[i]) - len(path) in (0, 1) and (step.source == "target") <= (path == [])
            written[row] += step.new_tokens[i]
    for row, tokens in written.items():
        assert tokens == texts[row][prompt_length : prompt_length + len(tokens)]
        assert len(stats.origins(row)) == len(tokens)
    return written


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}], ids=["T=0", "T"])
@pytest.mark.parametrize("policy", ["static", "auto"])
def test_steps_of_one_row(settings, policy):
    target, prompt = make_target("llama"), make_prompt(9)
    draft = oracle_of(target, prompt, **settings)
    draft.generation_config.tree_policy, draft.generation_config.output_steps = policy, True
    stats = assert_same_text(target, draft, prompt, **settings)
    check_steps(stats, draft.text.tolist(), 9)
    assert len(stats.steps) == stats.target_forwards and stats.steps[0].source == "target"
    assert stats.origins()[0] == ("target", 0) and len(stats.origins()) == stats.new_tokens == 18
    if policy == "static":
        assert ("draft", 2) in stats.origins()
        assert sum(source == "draft" for source, _ in stats.origins()) == sum(len(s.accepted[0]) for s in stats.steps)


@pytest.mark.parametrize("eos", [None, [7, 12, 30, 44]], ids=["long", "ends"])
def test_steps_of_rows_that_leave(eos):
    target, batch = make_target("llama"), make_batch([12, 5, 17])
    config = GenerationConfig(**SETTINGS, do_sample=False, eos_token_id=eos)
    texts = target.generate(**batch, generation_config=config)
    draft = make_draft(target, [make_prompt(12)])
    target.generate(**batch, generation_config=config, assistant_model=draft)
    assert draft.last_generation.steps == []  # nobody asked
    with pytest.raises(ValueError, match="kept no steps: set `output_steps=True`"):
        draft.last_generation.origins()
    config.output_steps = True
    assert torch.equal(target.generate(**batch, generation_config=config, assistant_model=draft), texts)
    written = check_steps(draft.last_generation, texts.tolist(), 17)
    for row, tokens in written.items():
        rest = texts[row, 17 + len(tokens) :].tolist()
        assert not rest or (set(rest) == {0} and tokens[-1] in eos)


@pytest.mark.parametrize(
    "settings",
    [{"return_dict_in_generate": True}, {"logits_processor": [lambda input_ids, scores: scores]}],
    ids=["own pace", "together"],
)
def test_padding_is_not_written(settings):
    """In rows that are finished, but stay in the batch."""
    target, batch = make_target("llama"), make_batch([12, 5, 17])
    long = target.generate(**batch, **SETTINGS, do_sample=False)
    eos = [int(long[0, 22]), int(long[1, 30])]
    texts = target.generate(**batch, **SETTINGS, do_sample=False, eos_token_id=eos)
    ends = [min([i + 1 for i, token in enumerate(row) if token in eos], default=24) for row in long[:, 17:].tolist()]
    assert len(set(ends)) > 1
    draft = oracle_of(target, batch, text=texts)
    draft.generation_config.output_steps = True
    output = target.generate(**batch, **SETTINGS, **settings, do_sample=False, eos_token_id=eos, assistant_model=draft)
    assert torch.equal(getattr(output, "sequences", output), texts)
    stats = draft.last_generation
    for row, end in enumerate(ends):
        written = [token for step in stats.steps for token in step.new_tokens[row]]
        assert written == texts[row, 17 : 17 + end].tolist() and len(stats.origins(row)) == end
    assert stats.new_tokens == sum(ends) == 3 + sum(stats.accepted_lengths)


def test_looked_up_tokens():
    target, prompt = make_target("llama"), make_prompt(9)
    draft, text = make_draft(target, [prompt]), generate(target, prompt, max_new_tokens=60)
    draft.generation_config.tree_policy, draft.generation_config.output_steps = "auto", True
    with lookups_of(text):
        stats = assert_same_text(target, draft, prompt, max_new_tokens=60)
    check_steps(stats, text.tolist(), 9)
    assert sum(step.source == "lookup" for step in stats.steps) == stats.lookup_steps > 0


def test_steps_can_be_watched():
    """Those so far, while the call goes on, and of a call that was interrupted."""
    target, prompt, seen = make_target("llama"), make_prompt(9), []
    draft = make_draft(target, [prompt])
    draft.generation_config.output_steps = True

    class Watcher(BaseStreamer):
        def put(self, value):
            seen.append(len(draft.last_generation.steps) if draft.last_generation else None)
            if len(seen) == 12:
                raise InterruptedError

        def end(self):
            pass

    with pytest.raises(InterruptedError):
        target.generate(prompt, assistant_model=draft, do_sample=False, streamer=Watcher(), **SETTINGS)
    assert seen[-1] > 1 and seen == sorted(seen, key=lambda n: n or 0)
    assert draft.last_generation.target_forwards == len(draft.last_generation.steps)

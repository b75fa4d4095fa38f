"""A draft guesses the very samples, since it knows the noise with which they will be drawn."""

import random
from types import SimpleNamespace

import pytest
import torch
from conftest import OracleDraft, assert_same_text, generate, make_batch, make_target
from transformers import LogitsProcessorList, StoppingCriteriaList, TextStreamer
from transformers.generation.streamers import BaseStreamer

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.remote_code.accept_eagle3 import NoiseStream


CPU = torch.device("cpu")


def sample(probs):
    return torch.multinomial(probs, num_samples=1).squeeze(1)


def make_probs(num_rows=3, vocab_size=50, num_tokens=6):
    return torch.randn(num_tokens, num_rows, vocab_size, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)


@pytest.fixture
def only_others_set_the_generator(monkeypatch):
    """Other threads draw from it, too: what they drew must not be drawn again."""
    monkeypatch.setattr(torch, "set_rng_state", lambda state: pytest.fail("the generator was set back"))


@pytest.mark.parametrize("looks", [[], [0], [3, 1, 0], [0, 0, 5]])
def test_noise_is_what_multinomial_draws(only_others_set_the_generator, looks):
    probs, noise = make_probs(), NoiseStream(3, 50, CPU, draws_ahead=False)
    torch.manual_seed(0)
    expected = [(sample(each), torch.get_rng_state()) for each in probs]
    torch.manual_seed(0)
    for number, (each, (token, state)) in enumerate(zip(probs, expected)):
        for index in looks:
            if number + index < len(probs):
                ahead = noise.of([0, 1, 2], [[number + index]] * 3, number)[:, 0]
                foreseen = (probs[number + index] / ahead).argmax(dim=-1)
                assert torch.equal(foreseen, expected[number + index][0])
        assert torch.equal(sample(each), token)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: torch.rand(700), lambda: torch.manual_seed(3)])
def test_noise_that_is_not_to_come_is_forgotten(only_others_set_the_generator, draw):
    probs, noise = make_probs(), NoiseStream(3, 50, CPU, draws_ahead=False)
    torch.manual_seed(0)
    noise.of([0, 1, 2], [[4]] * 3, 0)
    sample(probs[0])
    draw()
    foreseen = (probs[1] / noise.of([0, 1, 2], [[1]] * 3, 1)[:, 0]).argmax(dim=-1)
    assert torch.equal(sample(probs[1]), foreseen)


class KnowingDraft(OracleDraft):
    """A draft that says of each token of a text what the target says of it."""

    def forward(self, *args, position_ids, inputs_embeds, **kwargs):
        outputs = Eagle3ForSpeculation.forward(
            self, *args, position_ids=position_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        self.find_rows(position_ids[:, -1:], inputs_embeds[:, -1])
        last_read = position_ids[:, -outputs.logits.shape[1] :] + 1 + self.padding[self.rows]
        index = last_read.clamp(max=self.scores.shape[1] - 1)[..., None].expand_as(outputs.logits)
        outputs.logits = self.scores[self.rows].gather(1, index)
        return outputs


def make_knowing_draft(target, text, attention_mask, draft_token_ids=None):
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=draft_token_ids).eval()
    draft.__class__ = KnowingDraft
    attention_mask = torch.nn.functional.pad(attention_mask, (0, text.shape[1] - attention_mask.shape[1]), value=1)
    draft.padding = (attention_mask == 0).sum(dim=1, keepdim=True)
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    scores = target(text, attention_mask=attention_mask, position_ids=positions).logits.detach()
    draft.scores = scores[..., draft.draft_token_ids]
    draft.text, draft.rows, draft.table = text, [], target.get_input_embeddings().weight.detach()
    draft.generation_config.tree_policy = "static"
    draft.generation_config.prompt_lookup_num_tokens = 0
    draft.generation_config.tree_depth = draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.branching_factor = 1
    return draft


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        ({}, [9]),
        ({}, [5, 17, 3]),
        ({"temperature": 1.4, "top_k": 30}, [5, 17, 3]),
        ({"cache_implementation": "static", "temperature": 0.8}, [9]),
        ({"output_scores": True, "return_dict_in_generate": True}, [5, 17, 3]),
        ({"repetition_penalty": 1.0001}, [9]),  # reads the text before each token
        ({"eos_token_id": list(range(2, 10)), "pad_token_id": 0}, [5, 17, 3]),  # rows leave the batch
    ],
    ids=["one", "batch", "warped", "static", "scores", "penalty", "eos"],
)
def test_samples_are_guessed(settings, lengths):
    target, batch = make_target("llama"), make_batch(lengths)
    target.lm_head.weight.data *= 0.5  # far from greedy
    settings = {"max_new_tokens": 40, "do_sample": True, **settings}
    text = generate(target, batch, **{**settings, "return_dict_in_generate": True}).sequences
    state = torch.get_rng_state()
    for draft_token_ids in (None, text.unique().tolist()):
        draft = make_knowing_draft(target, text, batch["attention_mask"], draft_token_ids)
        actual = generate(target, batch, assistant_model=draft, **settings)
        assert torch.equal(getattr(actual, "sequences", actual), text) and torch.equal(torch.get_rng_state(), state)
        # Of five tokens at most; by what is probable alone it would be 1.2 at best.
        assert draft.last_generation.acceptance_length > (2 if "eos_token_id" in settings else 2.6)


@pytest.mark.parametrize("num_logits", [90, 96, 128])
@pytest.mark.parametrize("draft_token_ids", [None, range(10, 96)], ids=["all", "some"])
def test_targets_with_fewer_or_more_logits_than_tokens(num_logits, draft_token_ids):
    target, batch = make_target("llama"), make_batch([9, 5])
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=draft_token_ids).eval()
    target.lm_head.register_forward_hook(
        lambda module, inputs, logits: torch.nn.functional.pad(logits, (0, num_logits - 96), value=-1e4)
    )
    assert_same_text(target, draft, batch, do_sample=True)


def make_sampling_draft(target):
    draft = Eagle3ForSpeculation.from_target(target).eval()
    draft.generation_config.tree_policy = "static"
    draft.generation_config.prompt_lookup_num_tokens = 0
    return draft


@pytest.mark.parametrize("lengths", [[9], [5, 17, 3]], ids=["one", "batch"])
def test_noise_is_drawn_once(monkeypatch, lengths):
    """It takes longer than anything else that sampling does."""
    target, batch, draws = make_target("llama"), make_batch(lengths), []
    draft, draw = make_sampling_draft(target), torch.Tensor.exponential_
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda *args, **kwargs: draws.append(1) or draw(*args, **kwargs))
    target.generate(**batch, max_new_tokens=60, do_sample=True, assistant_model=draft)
    assert 60 <= len(draws) <= 60 + draft.generation_config.tree_depth


@pytest.mark.parametrize(("lengths", "share"), [([9], 1.0), ([5, 17, 3], 0.02)], ids=["one", "batch"])
def test_what_others_draw_is_not_taken_back(monkeypatch, lengths, share):
    """A call sets the generator back behind noise that it did not use, and another thread may have drawn in between."""
    target, batch = make_target("llama"), make_batch(lengths)
    draft, draw, draws = make_sampling_draft(target), torch.Tensor.exponential_, []
    times = random.Random(0)

    def noted_draw(*args, **kwargs):
        draws.append(("noise", torch.get_rng_state()))
        return draw(*args, **kwargs)

    def draw_elsewhere(*args):
        if times.random() < share:
            draws.append(("elsewhere", torch.get_rng_state()))
            torch.rand(1)

    monkeypatch.setattr(torch.Tensor, "exponential_", noted_draw)
    target.register_forward_hook(draw_elsewhere)
    settings = {"do_sample": True, "eos_token_id": [2, 3, 4], "pad_token_id": 0}  # ends before all noise is used
    num_set_back = 0
    for _ in range(6):
        target.generate(**batch, max_new_tokens=30, **settings, assistant_model=draft)
        end = [torch.equal(state, torch.get_rng_state()) for _, state in draws]
        if True in end:
            num_set_back += 1
            assert all(kind == "noise" for kind, _ in draws[end.index(True) :])
        draws.clear()
    assert num_set_back > 0 or share == 1


class DrawingStreamer(BaseStreamer):
    """Draws from the generator whenever it is given a token."""

    def __init__(self):
        self.drawn = []

    def put(self, value):
        self.drawn.append(float(torch.rand(1)))

    def end(self):
        pass


@pytest.mark.parametrize("brings", ["streamer", "patch", "logits_processor", "stopping_criteria"])
def test_callers_may_draw_between_tokens(brings):
    target, batch = make_target("llama"), make_batch([9])
    draft, texts, others = make_sampling_draft(target), [], []

    def draw(*args):
        drawn.append(float(torch.rand(1)))
        return args[-1]

    for assistant in ({}, {"assistant_model": draft}):
        torch.manual_seed(0)
        streamer, drawn = DrawingStreamer(), []
        if brings == "streamer":
            settings, drawn = {"streamer": streamer}, streamer.drawn
        elif brings == "patch":
            streamer = TextStreamer(SimpleNamespace(decode=lambda tokens: " " * len(tokens)))
            streamer.on_finalized_text = lambda text, stream_end=False: draw(text)
            settings = {"streamer": streamer}
        elif brings == "logits_processor":
            settings = {"logits_processor": LogitsProcessorList([draw])}
        else:
            settings = {"stopping_criteria": StoppingCriteriaList([lambda ids, scores: draw(ids[:, -1] < 0)])}
        texts.append(target.generate(**batch, max_new_tokens=30, do_sample=True, **settings, **assistant).tolist())
        others.append((drawn, torch.get_rng_state().tolist()))
    assert texts[0] == texts[1] and others[0] == others[1] and len(others[0][0]) >= 30

"""`assist`: calls of `generate` that somebody else writes."""

import copy
import functools
import threading
from contextlib import nullcontext

import pytest
import torch
from accelerate import dispatch_model
from conftest import make_draft, make_prompt, make_target, make_tokenizer
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaForCausalLM,
    StaticCache,
    pipeline,
)

from hf_eagle3 import Eagle3ForSpeculation, assist, assisting
from hf_eagle3.assisting import other_decoding


SETTINGS = {"max_new_tokens": 20, "do_sample": False}


def num_forwards(target, function):
    """What it returns, and how many forwards of the target that took."""
    forwards = []
    handle = target.register_forward_pre_hook(lambda *args: forwards.append(1))
    result = function()
    handle.remove()
    return result, len(forwards)


@pytest.fixture
def pair():
    target, prompt = make_target("llama"), make_prompt(9)
    return target, make_draft(target, [prompt]), prompt


def test_calls_are_assisted_within_it_and_not_after(pair):
    target, draft, prompt = pair
    attributes = dict(vars(target))
    expected, plain = num_forwards(target, lambda: target.generate(prompt, **SETTINGS))
    with assist(target, draft):
        text, assisted = num_forwards(target, lambda: target.generate(prompt, **SETTINGS))
        assert torch.equal(text, expected) and assisted < plain == 20
    with pytest.raises(KeyboardInterrupt), assist(target, draft):
        raise KeyboardInterrupt
    assert num_forwards(target, lambda: target.generate(prompt, **SETTINGS))[1] == plain
    assert vars(target).keys() == attributes.keys() and "generate" not in vars(target)


def test_what_is_no_draft(pair):
    target, draft, _ = pair
    for wrong in ("folder", target):
        with pytest.raises(TypeError, match="takes a draft that is loaded"), assist(draft, wrong):
            pass


def test_targets_that_are_wrapped(pair):
    target, draft, prompt = pair
    compiled = torch.compile(target, backend="eager")
    with assist(compiled, draft):
        compiled.generate(prompt, **SETTINGS)
    assert draft.last_generation.new_tokens == 20
    for wrong in (
        torch.nn.DataParallel(target),
        pipeline("text-generation", model=target, tokenizer=make_tokenizer()),
    ):
        with pytest.raises(TypeError, match="takes a model that generates"), assist(wrong, draft):
            pass


def test_sampling_and_configurations_of_the_caller(pair):
    target, draft, prompt = pair
    config = GenerationConfig(max_new_tokens=20, do_sample=True, temperature=0.7)
    texts = []
    for context in (torch.no_grad(), assist(target, draft)):
        with context:
            torch.manual_seed(0)
            texts.append(target.generate(prompt, config))  # by position
    assert torch.equal(*texts)
    assert draft.last_generation.new_tokens == 20 and "assistant_model" not in vars(config)


def test_the_innermost_draft_is_used(pair):
    target, draft, prompt = pair
    other = copy.deepcopy(draft)
    with assist(target, draft):
        with assist(target, other):
            target.generate(prompt, **SETTINGS)
            assert other.last_generation is not None and draft.last_generation is None
        target.generate(prompt, **SETTINGS)
    assert draft.last_generation.new_tokens == 20


def test_two_targets(pair):
    target, draft, prompt = pair
    second = make_target("llama", seed=1)
    second_draft = make_draft(second, [prompt])
    with assist(target, draft), assist(second, second_draft):
        target.generate(prompt, **SETTINGS)
        second.generate(prompt, max_new_tokens=7, do_sample=False)
        copy.deepcopy(target).generate(prompt, max_new_tokens=3, do_sample=False)  # another model, of no draft
    assert (draft.last_generation.new_tokens, second_draft.last_generation.new_tokens) == (20, 7)
    with pytest.raises(ValueError, match="trained for another model"), assist(target, second_draft):
        pass


def test_threads(pair):
    """A call in another thread is assisted while it is open; contexts of threads may end in any order."""
    target, draft, prompt = pair
    second, opened, may_close = copy.deepcopy(draft), threading.Event(), threading.Event()

    def hold():
        with assist(target, second):
            opened.set()
            may_close.wait(60)

    thread = threading.Thread(target=hold)
    with assist(target, draft):
        thread.start()
        opened.wait(60)
    target.generate(prompt, **SETTINGS)  # the other thread's is open
    assert second.last_generation.new_tokens == 20
    may_close.set()
    thread.join()
    assert num_forwards(target, lambda: target.generate(prompt, **SETTINGS))[1] == 20


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"use_cache": False}, "use_cache=False"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
        ({"generation_config": GenerationConfig(num_beams=2)}, "num_beams"),
    ],
    ids=["beams", "no cache", "lookup", "ensemble", "config"],
)
@pytest.mark.parametrize("is_model_s", [False, True])
def test_other_ways_are_left_as_they_are(pair, settings, named, is_model_s, monkeypatch):
    target, draft, prompt = pair
    said = []
    monkeypatch.setattr(assisting.logger, "warning_once", said.append)
    if is_model_s:  # what the call leaves open
        config = settings.get("generation_config") or GenerationConfig(**settings)
        target.generation_config, settings = config, {"generation_config": GenerationConfig()}
    expected = target.generate(prompt, **{**SETTINGS, **settings})
    with assist(target, draft):
        assert torch.equal(target.generate(prompt, **{**SETTINGS, **settings}), expected)
    assert draft.last_generation is None
    assert said == [f"A call of `generate` runs without the draft of `assist`. It asks for `{named}`."]


def test_nothing_is_said_of_calls_with_a_draft(pair, monkeypatch):
    target, draft, prompt = pair
    said, own = [], copy.deepcopy(draft)
    monkeypatch.setattr(assisting.logger, "warning_once", said.append)
    with assist(target, draft):
        target.generate(prompt, assistant_model=own, **SETTINGS)
        assert own.last_generation is not None and draft.last_generation is None
        target.generate(prompt, **SETTINGS)
    assert draft.last_generation and said == []


@pytest.mark.parametrize("implementation", ["quantized", "offloaded_static", "offloaded_hybrid", "paged"])
def test_caches_that_cannot_forget_are_left_to_plain_decoding(pair, implementation):
    """They need other packages, a GPU or much memory, so nothing is decoded here."""
    target, draft, _ = pair
    assert other_decoding(target, draft, cache_implementation=implementation)
    assert other_decoding(target, draft, generation_config=GenerationConfig(cache_implementation=implementation))


def test_contrastive_search_is_left_to_its_own_code(pair):
    """Which is on the Hub, and would get the draft as an argument."""
    target, draft, _ = pair
    assert other_decoding(target, draft, penalty_alpha=0.6, top_k=4) == "It asks for `penalty_alpha`."


class Uncroppable(DynamicCache):
    def crop(self, *args):
        raise NotImplementedError


class Evicting(DynamicCache):
    """It keeps the first token and the latest."""

    def update(self, *args, **kwargs):
        states = super().update(*args, **kwargs)
        for layer in self.layers:
            if layer.is_initialized and layer.keys.shape[-2] > 9:
                layer.keys, layer.values = (
                    torch.cat([each[..., :1, :], each[..., -8:, :]], dim=-2) for each in (layer.keys, layer.values)
                )
        return states


@pytest.mark.parametrize(
    ("family", "make_cache", "is_assisted"),
    [
        ("llama", lambda config: DynamicCache(config=config), True),
        ("llama", lambda config: StaticCache(config=config, max_cache_len=64), True),
        ("llama", lambda config: Uncroppable(config=config), False),
        ("llama", lambda config: Evicting(config=config), False),
        ("gemma3", lambda config: StaticCache(config=config, max_cache_len=64), False),
        ("qwen3_5", lambda config: DynamicCache(config=config), True),
    ],
)
def test_caches_that_the_caller_passes(family, make_cache, is_assisted):
    """Those in which tokens cannot be rolled back are left to plain decoding."""
    target, prompt = make_target(family), make_prompt(9)
    draft = make_draft(target, [prompt])
    expected = target.generate(prompt, past_key_values=make_cache(target.config), **SETTINGS)
    with assist(target, draft):
        text = target.generate(prompt, past_key_values=make_cache(target.config), **SETTINGS)
    assert torch.equal(text, expected)
    assert (draft.last_generation is not None) == is_assisted


@pytest.mark.parametrize(
    ("family", "name", "is_assisted"),  # "hybrid" is an old name of "static"
    [("llama", "hybrid", True), ("gemma3", "static", True), ("qwen3_5", "static", False)],
)
def test_static_caches_that_generate_makes(family, is_assisted, name):
    target, prompt, static = make_target(family), make_prompt(9), {"cache_implementation": name}
    draft = make_draft(target, [prompt])
    expected = target.generate(prompt, **static, **SETTINGS)
    with assist(target, draft):
        assert torch.equal(target.generate(prompt, **static, **SETTINGS), expected)
    assert (draft.last_generation is not None) == is_assisted


def test_attentions_are_left_to_plain_decoding(pair):
    target, draft, prompt = pair
    target.set_attn_implementation("eager")
    with assist(target, draft):
        output = target.generate(prompt, return_dict_in_generate=True, output_attentions=True, **SETTINGS)
        assert len(output.attentions) == 20 and draft.last_generation is None
        target.generate(prompt, return_dict_in_generate=True, **SETTINGS)
    assert draft.last_generation.new_tokens == 20


def make_dropout(target):
    return get_peft_model(target, LoraConfig(target_modules=["q_proj"], lora_dropout=0.5, task_type="CAUSAL_LM"))


def make_prompt_tuning(target):
    return get_peft_model(target, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)).eval()


@pytest.mark.parametrize(
    ("adapt", "reason"),
    [(make_dropout, "drops out at random"), (make_prompt_tuning, "`prepare_inputs_for_generation` was replaced")],
)
def test_targets_that_take_no_draft_for_now_are_left_to_plain_decoding(pair, adapt, reason, warned):
    """A trainer generates in training mode, and adapters come and go."""
    target, draft, prompt = pair
    adapted = adapt(copy.deepcopy(target))
    texts = []
    for context in (nullcontext(), assist(adapted, draft)):
        with context:
            torch.manual_seed(0)
            texts.append(adapted.generate(input_ids=prompt, **SETTINGS))
    assert torch.equal(*texts) and draft.last_generation is None
    (message,) = warned
    assert reason.replace("`", "") in message
    with assist(adapted, draft):  # settings of trees do not reach its `forward`
        torch.manual_seed(0)
        assert torch.equal(adapted.generate(input_ids=prompt, tree_depth=2, output_steps=True, **SETTINGS), texts[0])
    with assist(adapted, draft), adapted.disable_adapter():
        text = adapted.eval().generate(input_ids=prompt, **SETTINGS)
    assert torch.equal(text, target.generate(prompt, **SETTINGS)) and draft.last_generation.new_tokens == 20


def test_a_target_whose_embedding_is_offloaded_is_left_to_plain_decoding(pair, warned, tmp_path):
    target, draft, prompt = pair
    expected = target.generate(prompt, **SETTINGS)
    parts = dict.fromkeys(("model.layers", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    offloaded = dispatch_model(target, {**parts, "model.embed_tokens": "disk"}, offload_dir=tmp_path)
    with assist(offloaded, draft):
        assert torch.equal(offloaded.generate(prompt, **SETTINGS), expected)
    (message,) = warned
    assert "The embedding of LlamaForCausalLM, which the draft reads, is offloaded" in message


def test_a_draft_that_drops_out_is_left_out(pair, warned):
    target, draft, prompt = pair
    expected = target.generate(prompt, **SETTINGS)
    with assist(target, draft):
        draft.layers[0].self_attn.attention_dropout = 0.5
        assert torch.equal(target.generate(prompt, **SETTINGS), expected) and draft.last_generation.new_tokens == 20
        draft.train()
        assert torch.equal(target.generate(prompt, **SETTINGS), expected)
    (message,) = warned
    assert "The draft is in training mode" in message


def test_a_target_that_reads_long_texts_otherwise_is_left_to_plain_decoding(warned):
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    target = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("doge", **sizes, **heads, keep_window_size=16)
    ).eval()
    draft, prompt = Eagle3ForSpeculation.from_target(target).eval(), make_prompt(5)
    expected = target.generate(prompt, **SETTINGS)
    with assist(target, draft):
        assert torch.equal(target.generate(prompt, **SETTINGS), expected)
    (message,) = warned
    assert "keep_window_size" in message


class WithoutPositions(LlamaForCausalLM):
    """Like BLOOM, which has no argument for positions."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return super().forward(input_ids, attention_mask, **kwargs)


def test_a_target_without_positions_is_left_to_plain_decoding(pair, warned):
    target, draft, prompt = pair
    target.__class__ = WithoutPositions
    expected = target.generate(prompt, **SETTINGS)
    with assist(target, draft):
        assert torch.equal(target.generate(prompt, **SETTINGS), expected)
    (message,) = warned
    assert "WithoutPositions.forward takes no `position_ids`" in message


def test_a_target_that_is_transformers_own_assistant(pair):
    """Of another target, or of itself with fewer layers: it drafts for somebody else then."""
    target, draft, prompt = pair
    larger = make_target("llama", seed=1)
    for kwargs in ({"assistant_early_exit": 2}, {"assistant_model": target}):
        model = larger if "assistant_model" in kwargs else target
        expected = model.generate(prompt, **SETTINGS)
        with assist(target, draft):
            assert torch.equal(model.generate(prompt, **SETTINGS, **kwargs), expected)
        assert draft.last_generation is None


class OwnGenerate(LlamaForCausalLM):
    def generate(self, *args, **kwargs):
        return args[0]


def test_contexts_in_which_nothing_was_assisted(pair, warned, monkeypatch):
    """They look like others, so it is said: `generate` was bound before, is the model's own, or batches continuously."""
    target, draft, prompt = pair
    stored = functools.partial(GenerationMixin.generate.__wrapped__, target)
    monkeypatch.setattr(target, "generate", stored)
    with assist(target, draft):
        target.generate(prompt, **SETTINGS)
    monkeypatch.undo()
    with assist(target, draft):
        target.generate_batch([])
    target.__class__ = OwnGenerate
    with assist(target, draft):
        target.generate(prompt)
    assert len(warned) == 3 and all("so no draft was used" in message for message in warned)
    target.__class__ = LlamaForCausalLM
    with assist(target, draft), assist(target, copy.deepcopy(draft)):
        target.generate(prompt, **SETTINGS)
    with pytest.raises(KeyboardInterrupt), assist(target, draft):
        raise KeyboardInterrupt
    assert len(warned) == 3


def test_an_argument_that_is_given_twice(pair):
    target, draft, prompt = pair
    with pytest.raises(TypeError, match="multiple values for argument 'inputs'"), assist(target, draft):
        target.generate(prompt, inputs=prompt, **SETTINGS)


def test_a_pipeline_and_an_adapted_target(pair, tokenizer):
    target, draft, prompt = pair
    generate = pipeline("text-generation", model=target, tokenizer=tokenizer)
    chat = [{"role": "user", "content": "what is 3"}]
    expected = generate(chat, **SETTINGS)
    with assist(target, draft):
        assert generate(chat, **SETTINGS) == expected
    assert draft.last_generation.new_tokens > 0

    adapted = get_peft_model(make_target("llama"), LoraConfig(target_modules=["q_proj"])).eval()
    expected = adapted.generate(prompt, **SETTINGS)
    second = copy.deepcopy(draft)
    with assist(adapted, second):
        assert torch.equal(adapted.generate(prompt, **SETTINGS), expected)
    assert second.last_generation.new_tokens == 20


def test_installed_once(pair):
    target, draft, _ = pair
    with assist(target, draft):
        generate = GenerationMixin.generate
        with assist(target, draft):
            assert GenerationMixin.generate is generate

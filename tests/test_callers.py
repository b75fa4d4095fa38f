"""The ways in which people call `generate`."""

import copy
import threading
from contextlib import nullcontext
from functools import partial, update_wrapper, wraps
from pathlib import Path
from types import MethodType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from conftest import (
    assert_gives_its_text,
    assert_same_text,
    default_dtype,
    make_draft,
    make_oracle,
    make_prompt,
    make_target,
    oracle_of,
)
from fuzz_calls import Interrupt, InterruptingCriteria, InterruptingProcessor, Interrupts
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaForCausalLM,
    LogitsProcessorList,
    TextIteratorStreamer,
    TorchAoConfig,
    pipeline,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, repeat_kv

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.remote_code import assistant_eagle3, verify_eagle3
from hf_eagle3.remote_code.outputs_eagle3 import CACHE
from hf_eagle3.remote_code.target_eagle3 import mixes_tokens


SETTINGS = {"max_new_tokens": 18, "do_sample": False}


def lora(model, **kwargs):
    config = LoraConfig(
        init_lora_weights=False, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"], **kwargs
    )
    return get_peft_model(model, config).eval()


@pytest.mark.parametrize(
    ("prompt", "batch_size"), [(["hello", "hello, world"], 2), ([{"role": "user", "content": "hi"}], 1)]
)
def test_pipeline(target, draft, tokenizer, prompt, batch_size):
    texts = []
    for assistant in ({}, {"assistant_model": draft}):
        generator = pipeline("text-generation", target, tokenizer=tokenizer, batch_size=batch_size, **assistant)
        texts.append(generator(prompt, max_new_tokens=16, do_sample=False))
    assert texts[0] == texts[1]
    assert draft.last_generation.new_tokens > 0


@pytest.mark.parametrize("pad_token", [None, 2])
def test_pipelines_of_targets_whose_configurations_name_other_tokens(pad_token, tokenizer):
    """As Qwen's do, or because the caller set a pad token after the draft was made."""
    target = make_target("qwen3", eos_token_id=2, pad_token_id=None)
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = [2, 90], 90
    draft = make_draft(target, [make_prompt(5)])
    target.config.pad_token_id = pad_token
    texts = []
    for assistant in ({}, {"assistant_model": draft}, {"assistant_model": draft, "assistant_tokenizer": tokenizer}):
        generate = pipeline("text-generation", target, tokenizer=tokenizer, **assistant)
        texts.append(generate("hello world", **SETTINGS))
    assert texts[0] == texts[1] == texts[2]
    assert draft.last_generation.new_tokens > 0


def test_pipelines_do_not_load_a_draft_by_its_name(target, draft, tokenizer, tmp_path):
    """They would ask whether to trust its code, which they do not let the caller say; other models load by name."""
    draft.save_pretrained(tmp_path / "draft")
    with pytest.raises(ValueError, match=r"not a draft. Load it: .*from_pretrained\('.*draft', trust"):
        pipeline("text-generation", target, tokenizer=tokenizer, assistant_model=str(tmp_path / "draft"))
    (tmp_path / "flat").mkdir()  # as other projects write them
    for name in ("draft_vocab_size", "eagle_config", "dflash_config"):
        (tmp_path / "flat" / "config.json").write_text(f'{{"model_type": "llama", "{name}": 8}}')
        with pytest.raises(ValueError, match="flat', not a draft"):
            pipeline("text-generation", target, tokenizer=tokenizer, assistant_model=str(tmp_path / "flat"))
    target.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    loaded = pipeline("text-generation", target, tokenizer=tokenizer, assistant_model=str(tmp_path / "small"))
    assert type(loaded.assistant_model) is type(target)


def test_a_draft_that_was_left_on_the_host(target, draft, monkeypatch):
    """Warns once: it is slow, and nothing else would tell why."""
    warnings = []
    monkeypatch.setattr(assistant_eagle3.logger, "warning_once", warnings.append)
    assert_same_text(target, draft, make_prompt(12))
    assert warnings == []
    with monkeypatch.context() as context:
        context.setattr(type(draft), "device", torch.device("xpu"))
        assert_same_text(target, draft, make_prompt(12))
    (warning,) = warnings
    assert "on xpu and the target on cpu" in warning and "draft.to(target.device)" in warning


def test_peft_target(target):
    adapted = lora(copy.deepcopy(target), task_type="CAUSAL_LM")
    prompt = make_prompt(12)
    text = adapted.generate(prompt, **SETTINGS)
    assert text.tolist() != target.generate(prompt, **SETTINGS).tolist()
    oracle = make_oracle(adapted.get_base_model(), text)
    assert max(assert_same_text(adapted, oracle, prompt).accepted_lengths) >= 4


def test_peft_draft(target, tmp_path):
    prompt = make_prompt(12)
    draft = make_draft(target, [prompt], num_tokens=12)
    draft.generation_config.branching_factor = 2  # so that it matters which tokens the draft prefers
    draft.save_pretrained(tmp_path / "draft")
    plain_lengths = assert_same_text(target, draft, prompt).accepted_lengths
    adapted = lora(draft)
    lengths = assert_same_text(target, adapted, prompt).accepted_lengths
    assert max(lengths) >= 2 and lengths != plain_lengths  # the adapter is in use
    adapted.save_pretrained(tmp_path / "adapter")
    reloaded = PeftModel.from_pretrained(
        Eagle3ForSpeculation.from_pretrained(tmp_path / "draft"), tmp_path / "adapter"
    )
    assert assert_same_text(target, reloaded.eval(), prompt).accepted_lengths == lengths


@pytest.mark.parametrize("kind", ["torchao int8", "torchao float8", "bitsandbytes 4 bit"])
def test_quantized_weights(target, tmp_path, kind):
    if kind.startswith("torchao"):
        torchao = pytest.importorskip("torchao.quantization")
        weight_only = torchao.Int8WeightOnlyConfig if kind.endswith("int8") else torchao.Float8WeightOnlyConfig
        config = TorchAoConfig(weight_only())
    else:
        pytest.importorskip("bitsandbytes")
        target = make_target("llama", hidden_size=64, intermediate_size=128, head_dim=16)  # its kernels take blocks
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    target.save_pretrained(tmp_path)
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).eval()
    assert quantized.is_quantized
    prompt = make_prompt(12)
    oracle = make_oracle(target, quantized.generate(prompt, **SETTINGS))
    assert max(assert_same_text(quantized, oracle, prompt).accepted_lengths) >= 4


@pytest.mark.parametrize("draft_token_ids", [None, range(60)])
def test_saving_what_torchao_quantized(target, tmp_path, draft_token_ids):
    """It would not load again with buffers at the top: names without a dot."""
    torchao = pytest.importorskip("torchao.quantization")
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    Eagle3ForSpeculation.from_target(target, draft_token_ids=draft_token_ids).save_pretrained(tmp_path / "draft")
    quantized = Eagle3ForSpeculation.from_pretrained(tmp_path / "draft", quantization_config=config)
    refusal = (
        nullcontext() if draft_token_ids is None else pytest.raises(ValueError, match="torchao changes the names")
    )
    with refusal:
        quantized.save_pretrained(tmp_path / "saved")
        loaded = Eagle3ForSpeculation.from_pretrained(tmp_path / "saved")
        assert_same_text(target, loaded.eval(), make_prompt(12))


class QuantizedWeight(torch.nn.Parameter):
    """Like torchao's: layers compute with it, and it makes no other tensors."""

    def new_zeros(self, *args, **kwargs):
        raise NotImplementedError

    T = property(new_zeros)


@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static", "do_sample": True}])
def test_quantized_head_of_a_draft(target, draft, settings):
    draft = copy.deepcopy(draft)
    draft.lm_head.weight = QuantizedWeight(draft.lm_head.weight.detach())
    assert_same_text(target, draft, make_prompt(12), **settings)


class Packed(torch.nn.Module):
    """An embedding or a head in 8 bits that only its `forward` unpacks: quantized Gemma, GGUF, compressed-tensors and others."""

    def __init__(self, module):
        super().__init__()
        self.scale = module.weight.detach().abs().max() / 127
        self.codes = torch.nn.Parameter((module.weight / self.scale).round().to(torch.int8), requires_grad=False)
        self.in_features = module.weight.shape[1]
        self.scalar_embed_scale = getattr(module, "scalar_embed_scale", 1.0)

    def forward(self, inputs):
        weight = self.codes * self.scale
        if inputs.is_floating_point():
            return torch.nn.functional.linear(inputs, weight)
        return torch.nn.functional.embedding(inputs, weight) * self.scalar_embed_scale


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_packed_embedding_and_head(family):
    """A draft for the whole target fits, and one that is made for the packed one reads what it unpacks."""
    target, prompt = make_target(family), make_prompt(12)
    draft, table, head = make_draft(target, [prompt]), target.get_input_embeddings().weight, target.lm_head.weight
    target.set_input_embeddings(Packed(target.get_input_embeddings()))
    target.lm_head = Packed(target.lm_head)
    assert max(assert_same_text(target, draft, prompt).accepted_lengths) >= 2
    made = Eagle3ForSpeculation.from_target(target, has_own_embed_tokens=True)
    assert (made.embed_tokens.weight - table).abs().max() < table.abs().max() / 127
    assert (made.lm_head.weight - head).abs().max() < head.abs().max() / 127
    assert made.config.verifier_fingerprint != draft.config.verifier_fingerprint
    made.validate_target(make_target(family))


def test_activations_quantized_over_the_whole_forward_are_refused(target, draft):
    with pytest.warns(DeprecationWarning):
        quantized = torch.ao.quantization.quantize_dynamic(target, {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match="depend on all tokens of a forward"):
        quantized.generate(make_prompt(5), assistant_model=draft, **SETTINGS)


def test_lily_is_refused(target, draft):
    """It weighs its experts by the mean of all tokens of a forward."""
    config = pytest.importorskip("peft.tuners.lily").LilyConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    adapted = get_peft_model(copy.deepcopy(target), config).eval()
    with pytest.raises(ValueError, match="depend on all tokens of a forward"):
        adapted.generate(input_ids=make_prompt(5), assistant_model=draft, **SETTINGS)


def test_nvfp4_is_refused(draft):
    """It has 16 bits for one token and 4 for several."""
    target = make_target("llama")
    nvfp4 = type("NVFP4Linear", (torch.nn.Linear,), {"__module__": "transformers.integrations.nvfp4"})
    target.model.layers[1].mlp.up_proj.__class__ = nvfp4
    with pytest.raises(ValueError, match="in NVFP4"):
        target.generate(make_prompt(5), assistant_model=draft, **SETTINGS)


@pytest.mark.parametrize(
    ("strategy", "dynamic", "is_refused"), [("tensor", True, True), ("tensor", False, False), ("token", True, False)]
)
def test_activations_that_compressed_tensors_quantizes(draft, strategy, dynamic, is_refused):
    """Its layers cannot be tried before the first forward, which unpacks their weights."""
    target, args = make_target("llama"), SimpleNamespace(strategy=strategy, dynamic=dynamic)
    scheme = SimpleNamespace(weights=None, input_activations=args, output_activations=None)
    target.model.layers[1].mlp.up_proj.quantization_scheme = scheme
    with pytest.raises(ValueError, match="depend on all tokens of a forward") if is_refused else nullcontext():
        target.generate(make_prompt(5), assistant_model=draft, **SETTINGS)


def quantized_linear(layer, input):
    """Quantizes its input to 8 bits, as layers of Quark and GPTQModel do. It counts its calls."""
    layer.num_calls += 1
    amax = {"tensor": input.abs().amax(), "token": input.abs().amax(-1, keepdim=True), "static": torch.tensor(9.0)}
    scale = amax[layer.scheme] / 127
    return torch.nn.functional.linear((input / scale).round().clamp(-127, 127) * scale, layer.weight)


class OfAnotherLibrary(torch.nn.Linear):
    forward = quantized_linear


@pytest.mark.parametrize("scheme", ["tensor", "token", "static"])
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["class", "wrapped forward"])
def test_layers_of_libraries_that_are_not_known_are_tried(draft, scheme, is_wrapped):
    target = make_target("llama")
    layer = target.model.layers[1].mlp.up_proj
    layer.scheme, layer.num_calls = scheme, 0
    if is_wrapped:  # by compressed-tensors, and accelerate around it
        wrapped = wraps(torch.nn.Linear.forward)(lambda *args: quantized_linear(*args))
        layer.forward = MethodType(wrapped, layer)
        add_hook_to_module(layer, ModelHook())
    else:
        layer.__class__ = OfAnotherLibrary
    if scheme == "tensor":
        with pytest.raises(ValueError, match="depend on all tokens of a forward"):
            target.generate(make_prompt(5), assistant_model=draft, **SETTINGS)
        return
    plain = target.generate(make_prompt(5), **SETTINGS)
    for num_tries in (2, 0):  # with one and with two tokens, and never again
        layer.num_calls = 0
        assert target.generate(make_prompt(5), assistant_model=draft, **SETTINGS).equal(plain)
        assert layer.num_calls == draft.last_generation.target_forwards + num_tries


def test_layers_in_another_precision_are_tried():
    target = make_target("llama").bfloat16()
    layer = target.model.layers[1].mlp.up_proj.float()
    layer.__class__, layer.scheme, layer.num_calls = OfAnotherLibrary, "tensor", 0
    assert mixes_tokens(target)


def test_layers_that_cannot_be_tried(draft):
    """Packed weights have other names, and some are unpacked at the first forward."""
    target = make_target("llama")
    plain, layer = target.generate(make_prompt(5), **SETTINGS), target.model.layers[1].mlp.up_proj
    layer.packed = layer._parameters.pop("weight")
    unpack = target.register_forward_pre_hook(lambda *_: setattr(layer, "weight", layer.packed))
    assert not mixes_tokens(target)
    assert target.generate(make_prompt(5), assistant_model=draft, **SETTINGS).equal(plain)
    unpack.remove()


def test_layers_that_memory_has_no_room_for_are_tried_again():
    target = make_target("llama")
    layer = target.model.layers[1].mlp.up_proj
    layer.__class__, layer.scheme, layer.num_calls = OfAnotherLibrary, "tensor", 0
    layer.forward = Mock(side_effect=torch.OutOfMemoryError("no room"))
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        mixes_tokens(target)
    del layer.forward
    assert mixes_tokens(target)


def test_layers_of_torchao_are_tried(target, draft):
    """Those of its training in 8 bits have one scale for all tokens, and weights in 4 bits none."""
    float8, quantization = pytest.importorskip("torchao.float8"), pytest.importorskip("torchao.quantization")
    config = float8.Float8LinearConfig(emulate=True)
    trained = float8.convert_to_float8_training(copy.deepcopy(target), config=config)
    with pytest.raises(ValueError, match="depend on all tokens of a forward"):
        trained.generate(make_prompt(5), assistant_model=draft, **SETTINGS)
    for granularity in (quantization.PerRow(), quantization.PerTensor()):
        quantized = copy.deepcopy(target)
        config = quantization.Int8DynamicActivationInt8WeightConfig(granularity=granularity)
        quantization.quantize_(quantized, config)
        assert mixes_tokens(quantized) == isinstance(granularity, quantization.PerTensor)
    router = make_target("mixtral")  # whose weights are in no linear layer
    quantization.quantize_(router, quantization.FqnToConfig({r"re:.*mlp\.gate\.weight": config}), filter_fn=None)
    assert mixes_tokens(router)
    plain = copy.deepcopy(target)
    assert not mixes_tokens(plain)
    quantization.quantize_(plain, config)  # after its layers were tried
    assert mixes_tokens(plain)


@pytest.mark.parametrize(
    ("family", "length", "make_settings"),
    [
        ("gemma3", 23, lambda: {"stopping_criteria": [InterruptingCriteria(2)]}),
        ("llama", 26, lambda: {"logits_processor": LogitsProcessorList([InterruptingProcessor(6)])}),
        ("gemma3", 31, lambda: {"streamer": Interrupts(11)}),
    ],
    ids=["criterion", "processor", "streamer"],
)
def test_the_cache_that_is_left_when_something_raises(family, length, make_settings):
    target, prompt = make_target(family), make_prompt(20)
    text = target.generate(prompt, max_new_tokens=40, do_sample=False)
    longer = torch.cat([text[:, :length], make_prompt(3, seed=9)], dim=1)
    found = []
    for assistant in ({}, {"assistant_model": make_oracle(target, text)}):
        cache = DynamicCache(config=target.config)
        with pytest.raises(Interrupt):
            target.generate(prompt, past_key_values=cache, max_new_tokens=40, **assistant, **make_settings())
        seen = cache.get_seq_length()
        found.append((seen, target.generate(longer, past_key_values=cache, **SETTINGS).tolist()))
    assert found[0][0] - 7 <= found[1][0] <= found[0][0]  # up to the last whole step
    assert found[0][1] == found[1][1] == target.generate(longer, **SETTINGS).tolist()


@pytest.mark.parametrize(("family", "do_sample"), [("gemma3", True), ("lfm2", False), ("qwen3_5", True)])
def test_what_raises_at_the_first_token(family, do_sample):
    """The cache does not go on recording, and the generator is as plain `generate` leaves it."""
    target, prompt, found = make_target(family), make_prompt(20), []
    draft = make_draft(target, [prompt])
    for assistant in ({}, {"assistant_model": draft}):
        cache = DynamicCache(config=target.config)
        torch.manual_seed(0)
        with pytest.raises(Interrupt):
            criteria = [InterruptingCriteria(0)]
            target.generate(
                prompt, past_key_values=cache, stopping_criteria=criteria, do_sample=do_sample, **assistant
            )
        found.append(torch.get_rng_state())
        assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    assert torch.equal(*found)


def test_scores_that_are_no_numbers_from_the_first(target, draft):
    """What was drawn ahead to sample from them is given back."""
    prompt, found = make_prompt(9, batch_size=2), []

    def spoil(module, inputs, output):
        output.logits[:] = torch.nan

    handle = target.register_forward_hook(spoil)
    for assistant in ({}, {"assistant_model": draft}):
        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=True, **assistant)
        found.append(torch.get_rng_state())
    handle.remove()
    assert torch.equal(*found)


@pytest.mark.parametrize("family", ["mistral-window", "lfm2", "qwen3_5"])
def test_caches_that_record_their_past_are_refused(family):
    target, prompt = make_target(family), make_prompt(9)
    draft, cache = make_draft(target, [prompt]), DynamicCache(config=target.config)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="its cache records the past"):
        target.generate(prompt, past_key_values=cache, assistant_model=draft, **SETTINGS)
    assert cache.get_seq_length() == 0


def test_caches_that_are_static_in_some_layers_are_refused(target, draft):
    cache = Cache(layers=[StaticLayer(64), *(DynamicLayer() for _ in range(3))])
    with pytest.raises(ValueError, match="cannot roll back a Cache with DynamicLayer layers"):
        target.generate(make_prompt(9), past_key_values=cache, assistant_model=draft, **SETTINGS)


@pytest.mark.parametrize(
    ("make_broken", "message"),
    [
        (lambda target: target.train(), "The target is in training mode"),
        (
            lambda target: get_peft_model(target, LoraConfig(target_modules=["q_proj"], lora_dropout=0.3)),
            "The target is in training mode",  # in its new layers
        ),
        (lambda target: cpu_offload(target, execution_device="cpu"), "embedding of LlamaForCausalLM.* is offloaded"),
        (
            lambda target: get_peft_model(target, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)),
            "as PEFT does for prompt and prefix tuning",
        ),
        (
            lambda target: get_peft_model(target, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)),
            "as PEFT does for prompt and prefix tuning",
        ),
    ],
    ids=["dropout", "dropout of LoRA", "offload", "prompt tuning", "prefix tuning"],
)
def test_targets_of_which_the_draft_sees_something_else_are_refused(draft, make_broken, message):
    target = make_broken(make_target("llama", attention_dropout=0.3))
    with pytest.raises(ValueError, match=message):
        target.generate(input_ids=make_prompt(5), assistant_model=draft, **SETTINGS)


def test_activated_lora_is_refused():
    """It adapts the last tokens of each forward, as many as follow its invocation."""
    target = make_target("llama")
    draft = Eagle3ForSpeculation.from_target(target).eval()
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[7, 8])
    adapted, prompt = get_peft_model(target, config).eval(), torch.tensor([[5, 6, 7, 8, 9]])
    with pytest.raises(ValueError, match="an activated LoRA"):
        adapted.generate(input_ids=prompt, assistant_model=draft, **SETTINGS)
    with adapted.disable_adapter():
        assert_same_text(adapted, draft, make_prompt(12))


def test_a_window_of_the_best_tokens_is_refused_where_it_matters():
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("doge", **sizes, **heads, keep_window_size=16, eos_token_id=None)
    target = AutoModelForCausalLM.from_config(config).eval()
    draft = Eagle3ForSpeculation.from_target(target).eval()
    assert_same_text(target, draft, make_prompt(5), max_new_tokens=8)
    with pytest.raises(ValueError, match="`keep_window_size` of 16"):
        target.generate(make_prompt(5), assistant_model=draft, **{**SETTINGS, "max_new_tokens": 20})


def test_draft_that_drops_out_is_refused(target):
    draft = Eagle3ForSpeculation.from_target(target, attention_dropout=0.5)  # in training mode, as a fresh one is
    with pytest.raises(ValueError, match="The draft is in training mode"):
        target.generate(make_prompt(5), assistant_model=draft, **SETTINGS)
    assert_same_text(target, draft.eval(), make_prompt(12))
    assert_same_text(make_target("llama", attention_dropout=0.3), draft, make_prompt(12))


def test_overridden_inputs_are_refused(target, draft):
    class WithoutPositions(type(target)):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            inputs = super().prepare_inputs_for_generation(*args, **kwargs)
            del inputs["position_ids"]
            return inputs

    other = WithoutPositions(target.config)
    other.load_state_dict(target.state_dict())
    for num_tokens in (2, 30):  # before anything is written
        with pytest.raises(ValueError, match="does not pass on the positions"):
            other.eval().generate(make_prompt(5), assistant_model=draft, max_new_tokens=num_tokens)

    patched, prepare = make_target("llama"), target.prepare_inputs_for_generation
    patched.prepare_inputs_for_generation = lambda *args, **kwargs: prepare(*args, **kwargs)
    with pytest.raises(ValueError, match="prepare_inputs_for_generation was replaced"):
        patched.generate(make_prompt(5), assistant_model=draft, **SETTINGS)


def test_decoding_of_its_own_is_refused(draft):
    class Owner(LlamaForCausalLM):
        def _sample(self, *args, **kwargs):
            return super()._sample(*args, **kwargs)

    target = make_target("llama")
    target.__class__ = Owner
    with pytest.raises(ValueError, match=rf"Owner has a `_sample` of its own.*of `{__name__}`\)"):
        target.generate(make_prompt(5), assistant_model=draft, max_new_tokens=4)


def test_decoding_that_somebody_replaced_is_refused(target, draft, monkeypatch):
    """For all models, as contrastive decoding and compressed caches do."""
    stores = Cache.update, DynamicLayer.update, DynamicSlidingWindowLayer.update

    def sample(*args, **kwargs):
        raise NotImplementedError

    def update(layer, keys, values, *args, store, **kwargs):
        scale = keys.abs().amax(dim=-2, keepdim=True) / 7  # of all new tokens
        return store(layer, (keys / scale).round() * scale, values, *args, **kwargs)

    replaced = [(GenerationMixin, "_sample", sample)]
    for owner, store in zip((Cache, DynamicLayer, DynamicSlidingWindowLayer), stores):
        replaced.append((owner, "update", partial(update, store=store)))
    for owner, name, function in replaced:
        with monkeypatch.context() as context:
            context.setattr(owner, name, wraps(getattr(owner, name))(function))
            replaced_by = rf"somebody (replaced transformers'.*`{__name__}`|\({__name__}\) replaced `update`)"
            with pytest.raises(ValueError, match=replaced_by):
                target.generate(make_prompt(5), assistant_model=draft, max_new_tokens=4)
    # torch's own decorators change nothing.
    monkeypatch.setattr(GenerationMixin, "_sample", torch.no_grad()(GenerationMixin._sample))
    monkeypatch.setattr(DynamicLayer, "update", torch.compiler.disable(DynamicLayer.update))
    assert_same_text(target, draft, make_prompt(5))


class Counter(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, num=0, cache_position=None, **kwargs):
        outputs = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        outputs.logits = outputs.logits.roll(num[0] if isinstance(num, list) else int(num), dims=-1)
        return outputs


class CallCounter(Counter):
    def _update_model_kwargs_for_generation(self, *args, **kwargs):
        updated = super()._update_model_kwargs_for_generation(*args, **kwargs)
        return {**updated, "num": updated.get("num", 0) + 1}


class WrappedCallCounter(CallCounter):
    @wraps(LlamaForCausalLM._update_model_kwargs_for_generation)
    def _update_model_kwargs_for_generation(self, *args, **kwargs):
        return super()._update_model_kwargs_for_generation(*args, **kwargs)


class TokenCounter(Counter):
    """Counts the tokens that it gets, and passes the count on in several forms."""

    form = torch.tensor

    def prepare_inputs_for_generation(self, input_ids, num=None, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        num = self.form(input_ids.shape[1] % 3) if num is None else num
        return {**inputs, "num": num, "constant": 1.5, "cache_position": torch.arange(inputs["input_ids"].shape[1])}


class ListOfCounts(TokenCounter):
    def form(self, count):
        return [count]


@pytest.mark.parametrize(
    ("counter", "message"),
    [
        (CallCounter, "CallCounter has an `_update_model_kwargs_for_generation` of its own"),
        (WrappedCallCounter, "WrappedCallCounter has an `_update_model_kwargs_for_generation` of its own"),
        (TokenCounter, "TokenCounter.prepare_inputs_for_generation passes on another `num`"),
        (ListOfCounts, "ListOfCounts.prepare_inputs_for_generation passes on another `num`"),
    ],
)
def test_arguments_that_count_tokens_are_refused(draft, counter, message):
    target = make_target("llama")
    target.__class__ = counter
    with pytest.raises(ValueError, match=message):
        target.generate(make_prompt(5), assistant_model=draft, max_new_tokens=4)
    if counter is TokenCounter:
        assert_same_text(target, draft, make_prompt(12), num=torch.tensor(1))  # of the caller: the same at each token


def test_attentions_are_refused(target, draft):
    with pytest.raises(ValueError, match="the attentions of a tree"):
        assert_same_text(target, draft, make_prompt(12), return_dict_in_generate=True, output_attentions=True)


@pytest.mark.parametrize(("family", "is_argument"), [("mixtral", False), ("qwen3_moe", True)])
def test_targets_that_return_what_their_router_computes(family, is_argument):
    """As mixtures of experts do that are trained, for a loss of their experts."""
    target, prompt = make_target(family), make_prompt(12)
    draft = make_draft(target, [prompt])
    target.config.output_router_logits = not is_argument
    assert_same_text(target, draft, prompt, **({"output_router_logits": True} if is_argument else {}))


def test_dtypes_of_target_and_draft(target, draft):
    assert_same_text(copy.deepcopy(target).double(), draft, make_prompt(12))
    assert_same_text(target, copy.deepcopy(draft).bfloat16(), make_prompt(12))


def test_target_that_accelerate_dispatches(target, draft):
    """As with `device_map`: every module moves its inputs to its own device."""
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    device_map = dict.fromkeys([*names, *(f"model.layers.{i}" for i in range(6))], "cpu")
    dispatched = dispatch_model(copy.deepcopy(target), device_map, main_device="cpu", force_hooks=True)
    assert hasattr(dispatched.model.layers[0], "_hf_hook")
    assert_same_text(dispatched, draft, make_prompt(12))


def causal(num_queries, num_keys):
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)[None, None]


def without_mask(query, key, value, attn_mask=None, is_causal=False, **kwargs):
    return SDPA(query, key, value, causal(query.shape[2], key.shape[2]), **kwargs)


def without_masks(module, query, key, value, attention_mask, **kwargs):
    mask = causal(query.shape[2], key.shape[2])
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def own_forward(attention, hidden_states, attention_mask=None, **kwargs):
    num_new, num_past = hidden_states.shape[1], kwargs[CACHE].get_seq_length(attention.layer_idx)
    mask = causal(num_new, num_past + num_new)
    return ATTENTION_FORWARD(attention, hidden_states, attention_mask=mask, **kwargs)


class OwnAttention(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, *args, **kwargs):
        return own_forward(self.attention, *args, **kwargs)


class OwnForward:
    def __init__(self, attention):
        self.attention = attention

    def __call__(self, *args, **kwargs):
        return own_forward(self.attention, *args, **kwargs)


SDPA, ATTENTION_FORWARD = torch.nn.functional.scaled_dot_product_attention, LlamaAttention.forward


@pytest.mark.parametrize(
    "what", ["module", "forward", "partial", "object", "class", "wrapped", "decorated", "function", "torch"]
)
def test_attention_that_somebody_replaced(what, warned, monkeypatch):
    """It knows that `generate` needs no mask, so it ignores those of trees. The target's class is transformers' own."""
    target, prompt = make_target("llama"), make_prompt(12)
    oracle = oracle_of(target, prompt)
    if what == "torch":
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", without_mask)
    if what == "function":
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", without_masks)
    if what == "class":
        monkeypatch.setattr(LlamaAttention, "forward", own_forward)
    if what == "wrapped":
        wrapped = wraps(ATTENTION_FORWARD)(lambda *args, **kwargs: own_forward(*args, **kwargs))
        monkeypatch.setattr(LlamaAttention, "forward", wrapped)
    if what == "decorated":
        monkeypatch.setattr(LlamaAttention, "forward", torch.no_grad()(own_forward))
    layer = target.model.layers[3]
    if what == "module":
        layer.self_attn = OwnAttention(layer.self_attn)
    if what == "forward":
        layer.self_attn.forward = partial(own_forward, layer.self_attn)
    if what == "partial":
        layer.self_attn.forward = update_wrapper(partial(own_forward, layer.self_attn), ATTENTION_FORWARD)
    if what == "object":
        layer.self_attn.forward = update_wrapper(OwnForward(layer.self_attn), ATTENTION_FORWARD)
    type(verify_eagle3.logger).warning_once.cache_clear()
    oracle.generation_config.output_steps = True
    steps = assert_same_text(target, oracle, prompt).steps
    assert all(parents == [0, *range(len(parents) - 1)] for step in steps for (parents,) in [step.parents])  # chains
    assert [text for text in warned if "cannot read a tree" in text]


def assert_drafts_nothing(target, oracle, prompt, warned):
    type(verify_eagle3.logger).warning_once.cache_clear()
    assert assert_same_text(target, oracle, prompt).plain_steps == 17
    assert [text for text in warned if "cannot read several tokens, so the draft proposes nothing" in text]


@pytest.mark.parametrize("counts_from_the_first", [True, False])
def test_attention_that_takes_several_tokens_in_a_prompt_only(counts_from_the_first, warned, monkeypatch):
    """Later they see too little (`is_causal=q_len > 1`, which is meant for as many keys), or each other."""

    def attend(query, key, value, attn_mask=None, is_causal=False, **kwargs):
        num_queries, num_keys = query.shape[2], key.shape[2]
        is_causal = num_queries > 1 and (counts_from_the_first or num_queries == num_keys)
        return SDPA(query, key, value, is_causal=is_causal, **kwargs)

    target, prompt = make_target("llama"), make_prompt(12)
    oracle = oracle_of(target, prompt)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    assert_drafts_nothing(target, oracle, prompt, warned)


def test_attention_of_ones_own_that_takes_several_tokens_in_a_prompt_only(warned, monkeypatch):
    """Its name says that it takes no masks, so the draft proposes no trees in any case."""

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        key, value = (repeat_kv(states, module.num_key_value_groups) for states in (key, value))
        output = SDPA(query, key, value, is_causal=query.shape[2] > 1, scale=scaling)
        return output.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "causal_only", attend)
    target, prompt = make_target("llama", attn_implementation="causal_only"), make_prompt(12)
    oracle = oracle_of(target, prompt)
    assert_drafts_nothing(target, oracle, prompt, warned)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "lfm2"])
def test_code_of_ones_own_that_gives_several_tokens_one_position(family, warned):
    """The first of them is read as it should be."""
    target, prompt = make_target(family), make_prompt(9)
    oracle, forward = oracle_of(target, prompt), target.model.forward

    def at_one_position(*args, position_ids, **kwargs):
        if position_ids.min() > 0:  # after the prompt
            position_ids = position_ids[:, :1].expand_as(position_ids)
        return forward(*args, position_ids=position_ids, **kwargs)

    target.model.forward = at_one_position
    assert_drafts_nothing(target, oracle, prompt, warned)


def test_code_of_ones_own_that_refuses_several_tokens(warned):
    target, prompt = make_target("llama"), make_prompt(12)
    oracle, forward = oracle_of(target, prompt), target.model.forward

    def one_by_one(*args, position_ids, **kwargs):
        if position_ids.min() > 0 and position_ids.shape[1] > 1:
            raise KeyError("several")
        return forward(*args, position_ids=position_ids, **kwargs)

    target.model.forward = one_by_one
    assert_drafts_nothing(target, oracle, prompt, warned)


def test_own_code_is_not_tried_beyond_the_last_position(warned, monkeypatch):
    """Plain `generate` never reads there, and on CUDA such an index ends the process. Dynamic frequencies would stay changed."""
    target = make_target("opt", max_position_embeddings=32)
    prompt = make_prompt(24)
    oracle = oracle_of(target, prompt, max_new_tokens=8)
    monkeypatch.setattr(verify_eagle3, "has_own_code", lambda target: True)
    positions = []
    target.register_forward_pre_hook(
        lambda module, args, kwargs: positions.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    assert assert_same_text(target, oracle, prompt, max_new_tokens=8).plain_steps == 7
    assert max(positions) < 31 and not warned


def test_attention_that_somebody_edits_gets_its_own_heads(monkeypatch):
    def attend(*args, **kwargs):
        output = SDPA(*args, **kwargs)
        output[:, -1] = 0  # the last query head
        return output

    target, prompt = make_target("llama"), make_prompt(12)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    oracle = oracle_of(target, prompt)
    oracle.generation_config.num_assistant_tokens = 8  # larger trees are not packed in so small heads
    assert max(assert_same_text(target, oracle, prompt).accepted_lengths) > 1


def test_compiled_forward():
    target, prompt = make_target("llama", num_hidden_layers=1), make_prompt(12)
    draft, expected, calls = make_draft(target, [prompt]), target.generate(prompt, **SETTINGS), []

    def backend(graph, inputs):
        calls.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()  # other tests have compiled the same code
    target.forward = torch.compile(target.forward, backend=backend, dynamic=True)
    with torch._dynamo.config.patch(recompile_limit=3):  # then it goes on without the compiler
        assert torch.equal(target.generate(prompt, assistant_model=draft, **SETTINGS), expected)
    assert calls and max(draft.last_generation.accepted_lengths) >= 2


def test_a_name_is_no_draft(target):
    for name in ("me/draft", Path("me/draft")):
        with pytest.raises(ValueError, match=r"Load it: hf_eagle3.*from_pretrained\('me/draft'\), or"):
            target.generate(make_prompt(5), assistant_model=name)
    with pytest.raises(ValueError, match="the class Eagle3ForSpeculation, not a draft"):
        target.generate(make_prompt(5), assistant_model=Eagle3ForSpeculation)
    draft = Eagle3ForSpeculation.from_target(target)
    for other in ((draft, {}), [draft], draft.state_dict(), draft.config, torch.nn.DataParallel(draft)):
        with pytest.raises(ValueError, match=f"`assistant_model` is a {type(other).__name__}, not a draft"):
            target.generate(make_prompt(5), assistant_model=other)


class LastLogits(LlamaForCausalLM):
    """Whose `forward` knows that `generate` needs no others."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        outputs = super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        outputs.logits = outputs.logits[:, -1:]
        return outputs


def test_targets_that_return_logits_of_the_last_token(draft):
    target, prompt = make_target("llama"), make_prompt(12)
    target.__class__ = LastLogits
    assert target.generate(prompt, **SETTINGS).shape == (1, 30)
    with pytest.raises(ValueError, match="LastLogits returned logits of 1 of the"):
        target.generate(prompt, assistant_model=draft, **SETTINGS)


def test_custom_generate(target):
    prompt = make_prompt(12)
    draft = make_draft(target, [prompt])
    expected = target.generate(prompt, **SETTINGS)
    assert target.generate(prompt, custom_generate=draft.assisted_decoding, **SETTINGS).equal(expected)
    assert draft.last_generation.new_tokens == 18
    with pytest.raises(ValueError, match="beams"):
        target.generate(prompt, custom_generate=draft.assisted_decoding, num_beams=2, **SETTINGS)


def test_a_pair_is_validated_once(target, draft, monkeypatch):
    """Each time compares embeddings, which processes that share them gather."""
    calls = []
    monkeypatch.setattr(type(draft), "validate_target", lambda *pair: calls.append(pair))
    assert_same_text(target, draft, make_prompt(12))
    assert calls == [(draft, target)]


def greedy_search(model, input_ids, assistant_model=None, **kwargs):
    return input_ids


UNUSED = {  # arguments of a call that never asks the draft
    "beams": {"num_beams": 2},
    "configured": {"generation_config": GenerationConfig(num_beams=2, max_new_tokens=4)},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "function": {"custom_generate": greedy_search},
    "folder": {"custom_generate": "folder", "trust_remote_code": True},
    "replaced": {},
}


@pytest.mark.parametrize("case", UNUSED)
def test_a_draft_that_is_never_used_is_told(case, target, draft, tmp_path, warned, monkeypatch):
    settings = {"max_new_tokens": 4, "do_sample": False, "assistant_model": draft, **UNUSED[case]}
    if "generation_config" in settings:
        del settings["max_new_tokens"], settings["do_sample"]
    if case == "folder":
        (tmp_path / "custom_generate").mkdir()
        code = "def generate(model, input_ids=None, assistant_model=None, **kwargs):\n    return input_ids\n"
        (tmp_path / "custom_generate" / "generate.py").write_text(code)
        settings["custom_generate"] = str(tmp_path)
    target.generate(make_prompt(9), assistant_model=draft, max_new_tokens=4)
    if case == "replaced":
        monkeypatch.setattr(type(target), "_assisted_decoding", greedy_search, raising=False)
    target.generate(make_prompt(9), **settings)
    (message,) = warned
    assert draft.last_generation is None  # not what the call before did
    assert "`generate` did not use its `assistant_model`, Eagle3ForSpeculation" in message


def test_a_draft_in_continuous_batching_is_told(target, draft, warned):
    """transformers ignores all but `max_new_tokens` there."""
    target.generate_batch([])
    target.generate_batch([], assistant_model=draft)
    (message,) = warned
    assert message.startswith("`generate_batch` did not use") and "Continuous batching" in message


def test_a_draft_that_is_used_is_not_told_of(target, draft, warned):
    """However it is given; nor assistants of transformers, and calls that raise."""
    prompt, settings = make_prompt(9), {"max_new_tokens": 4, "do_sample": False}
    for _ in range(2):
        target.generate(prompt, assistant_model=draft, **settings)
        target.generate(prompt, None, None, None, None, None, draft, **settings)
    target.generate(prompt, num_beams=2, **settings)
    target.generate(prompt, assistant_model=copy.deepcopy(target), **settings)
    with pytest.raises(ValueError, match="use_cache"):
        target.generate(prompt, assistant_model=draft, use_cache=False, **settings)
    assert warned == [] and draft.last_generation is None
    target.generate(prompt, None, None, None, None, None, draft, num_beams=2, **settings)
    assert len(warned) == 1


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_threads(target, cache):
    """Threads share target and draft, and get what they would get alone."""
    prompts = [make_prompt(5 + n, seed=n) for n in range(3)]
    draft = make_draft(target, prompts)
    alone = []
    for prompt in prompts:
        alone.append((target.generate(prompt, assistant_model=draft, **cache, **SETTINGS), draft.last_generation))
    together, failures = [None] * len(prompts), []
    barrier = threading.Barrier(len(prompts))

    def work(n):
        try:
            barrier.wait()
            for _ in range(2):
                text = target.generate(prompts[n], assistant_model=draft, **cache, **SETTINGS)
                together[n] = (text, draft.last_generation)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for (text, stats), (expected, expected_stats) in zip(together, alone):
        assert text.equal(expected) and stats == expected_stats


def test_statistics_of_another_thread(target, draft):
    """As when text is streamed: one thread generates, another one asks."""
    fresh = copy.deepcopy(draft)
    target.generate(make_prompt(5), assistant_model=fresh, num_beams=2, max_new_tokens=2)  # which does not use it
    assert fresh.last_generation is None
    thread = threading.Thread(target=lambda: target.generate(make_prompt(5), assistant_model=fresh, **SETTINGS))
    thread.start()
    thread.join()
    assert fresh.last_generation.new_tokens == 18


# Prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype(target, dtype):
    draft = make_draft(target, [make_prompt(5)])  # a new one: a policy that has seen it fail may not draft
    draft.generation_config.tree_policy = "auto"
    with default_dtype(dtype):
        assert assert_same_text(target, draft, make_prompt(5)).drafted_lengths


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.1}], ids=["noise is known", "text is read"])
def test_samples_that_transformers_streams(target, tokenizer, settings):
    settings = {"do_sample": True, "max_new_tokens": 24, **settings}
    oracle = oracle_of(target, make_prompt(9), **settings)
    as_it_is = {"clean_up_tokenization_spaces": False}
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, **as_it_is)
    stats = assert_gives_its_text(oracle, target, make_prompt(9), ours={"streamer": streamer}, **settings)
    assert max(stats.accepted_lengths) > 1
    assert "".join(streamer) == tokenizer.decode(oracle.text[0, 9:], **as_it_is)


def test_unusual_prompts(target, draft):
    right_padded = {"attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}
    assert_same_text(target, draft, make_prompt(5), **right_padded)
    assert_same_text(target, draft, {"inputs_embeds": target.get_input_embeddings()(make_prompt(7))})
    assert_same_text(target, draft, {})  # begins with BOS
    for cache in ({}, {"cache_implementation": "static"}):
        assert_same_text(target, draft, make_prompt(5), attention_mask=torch.zeros(1, 5, dtype=torch.long), **cache)
    both = {"tokenizer": object(), "assistant_tokenizer": object()}
    assert_same_text(target, draft, make_prompt(5), ours=both)

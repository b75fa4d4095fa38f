"""The two models of a training: what is loaded, made and refused."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from conftest import make_target, save_with_code
from peft import LoraConfig, PeftModel, get_peft_model
from trainers import TEXTS, losses, make_trainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ProcessorMixin

from hf_eagle3 import Eagle3ForSpeculation, Eagle3Trainer, Eagle3TrainingArguments
from hf_eagle3.checkpoints import load_ends
from hf_eagle3.training import models


def test_names_and_classes_in_place_of_models(tmp_path, tokenizer):
    args = Eagle3TrainingArguments(str(tmp_path / "draft"), use_cpu=True, report_to="none")
    llama = make_target("llama")
    for model, target, reason in (
        (Eagle3ForSpeculation, llama, "`model` is the class Eagle3ForSpeculation, but must be the draft"),
        ({}, llama, "`model` is dict, but must be the draft, its name, or `None`"),
        (None, str(tmp_path / "target"), "There is no folder .*target. Pass the folder of the target"),
    ):
        with pytest.raises((TypeError, FileNotFoundError), match=reason):
            Eagle3Trainer(model, target, args, train_dataset=TEXTS, processing_class=tokenizer)


def test_arguments_of_a_fresh_draft(tmp_path, tokenizer, caplog):
    init = {"model_type": "qwen3", "norm_output": False}
    trainer = make_trainer(tmp_path, tokenizer, draft_vocab_size=20, model_init_kwargs=init)
    assert trainer.draft.config.transformer_layer_config.model_type == "qwen3"
    assert not trainer.draft.config.norm_output and trainer.draft.config.draft_vocab_size == 20
    assert trainer.args.model_init_kwargs == init
    settings = {"draft_form": "classic", "target": make_target("qwen3")}
    config = make_trainer(tmp_path, tokenizer, **settings, model_init_kwargs={"model_type": "llama"}).draft.config
    assert not config.fc_norm and not config.norm_output and config.transformer_layer_config.model_type == "llama"
    assert "classic" not in caplog.text
    make_trainer(tmp_path, tokenizer, **settings, model_init_kwargs={"model_type": "qwen3"})
    assert "{'model_type': 'qwen3'}, so the draft is not quite of the form 'classic'" in caplog.text


def test_an_adapter_of_whatever_is_linear(tmp_path, tokenizer):
    """PEFT's own choice of modules goes by the `model_type`, which a draft's config.json must not have."""
    target, lora = make_target("llama"), LoraConfig(r=2)
    draft = Eagle3ForSpeculation.from_target(target)
    trainer = make_trainer(tmp_path, tokenizer, model=draft, target=target, peft_config=lora, max_steps=1)
    trainer.train()
    adapters = [name.split(".lora_")[0] for name, _ in trainer.model.named_parameters() if "lora_" in name]
    adapted = {name.split(".")[-1] for name in adapters}
    assert {"fc", "q_proj", "down_proj"} <= adapted and "lm_head" not in adapted and lora.target_modules is None
    # Where FSDP shares parameters out, a copy of draft and adapter generates.
    copied, trained = trainer._copy_of_draft(trainer.model.state_dict()).state_dict(), trainer.draft.state_dict()
    assert copied.keys() == trained.keys() and all(copied[name].equal(trained[name]) for name in trained)


def test_a_processor_s_tokenizer(tmp_path, tokenizer):
    class Processor(ProcessorMixin):
        def __init__(self):
            self.tokenizer = tokenizer

    target = make_target("llama")
    processor = Processor()
    assert models.load_target(target, None, processor) == (target, tokenizer, processor)


def test_a_draft_that_is_frozen(tmp_path, tokenizer):
    """Also an adapter as `PeftModel.from_pretrained` loads it."""
    draft = Eagle3ForSpeculation.from_target(target := make_target("llama"))
    draft.save_pretrained(tmp_path / "draft")
    adapted = get_peft_model(copy.deepcopy(draft), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(copy.deepcopy(draft), tmp_path / "adapter")
    for frozen in (loaded, copy.deepcopy(draft).requires_grad_(False)):
        with pytest.raises(ValueError, match="parameters of the draft are frozen.*is_trainable=True"):
            make_trainer(tmp_path / "out", tokenizer, model=frozen, target=target)
    loaded = PeftModel.from_pretrained(draft, tmp_path / "adapter", is_trainable=True)
    make_trainer(tmp_path / "out", tokenizer, model=loaded, target=target, max_steps=1, ttt_steps=1).train()


def test_a_draft_that_is_the_name_of_an_adapter(tmp_path, tokenizer):
    """Transformers loads it into its draft. A `peft_config` would replace it there without a word."""
    Eagle3ForSpeculation.from_target(target := make_target("llama")).save_pretrained(tmp_path / "draft")
    draft, lora = Eagle3ForSpeculation.from_pretrained(tmp_path / "draft"), LoraConfig(target_modules=["q_proj"])
    get_peft_model(draft, lora).save_pretrained(tmp_path / "adapter")
    told = "adapter.* is a draft into which transformers loaded an adapter.*merge it first"
    for peft_config in (None, lora):
        with pytest.raises(ValueError, match=told):
            make_trainer(tmp_path, tokenizer, str(tmp_path / "adapter"), target=target, peft_config=peft_config)
    unnamed = get_peft_model(Eagle3ForSpeculation.from_target(target), LoraConfig(target_modules=["q_proj"]))
    unnamed.save_pretrained(tmp_path / "unnamed")
    with pytest.raises(ValueError, match="unnamed is an adapter that does not name its draft"):
        Eagle3ForSpeculation.from_pretrained(tmp_path / "unnamed")


@pytest.mark.parametrize(
    ("offloaded", "message"),
    [
        ("model.embed_tokens", "The weights of the embeddings of LlamaForCausalLM are offloaded"),
        ("lm_head", "The weights of the head of LlamaForCausalLM are offloaded"),
        ("model.layers.1", None),
    ],
)
def test_offloaded_targets(tmp_path, tokenizer, offloaded, message):
    """As `device_map="auto"` leaves them where memory is short."""
    make_target("llama").save_pretrained(tmp_path / "target")
    few = {"max_steps": 1, "ttt_steps": 1}
    layers = [f"model.layers.{number}" for number in range(4)]
    names = ["model.embed_tokens", *layers, "model.norm", "model.rotary_emb", "lm_head"]
    device_map = {name: "disk" if name == offloaded else "cpu" for name in names}
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map=device_map, offload_folder=tmp_path / "offloaded"
    )
    draft = Eagle3ForSpeculation.from_target(make_target("llama"))
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        assert Eagle3ForSpeculation.from_target(target).device.type == "cpu"
    for model in (None, draft):
        with nullcontext() if message is None else pytest.raises(ValueError, match=message):
            make_trainer(tmp_path / "out", tokenizer, model=model, target=target, **few).train()


def test_a_draft_that_is_trained_further_names_its_new_target(tmp_path, tokenizer):
    """`vllm serve DRAFT` loads the target that the draft names."""
    target, tuned = make_target("llama"), make_target("llama")
    target.config._name_or_path, tuned.config._name_or_path = "org/Base", "org/Tuned"
    with torch.no_grad():
        tuned.get_input_embeddings().weight += 0.01
    draft = Eagle3ForSpeculation.from_target(target)
    proposal = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    draft.config.speculators_config["proposal_methods"] = proposal
    for own, expected in ((0.1, 0.1), (0.0, 0.02)):
        draft.generation_config.assistant_confidence_threshold = own
        trainer = make_trainer(tmp_path, tokenizer, model=draft, target=tuned)
        assert draft.generation_config.assistant_confidence_threshold == expected
    trainer.save_model()
    config = Eagle3ForSpeculation.from_pretrained(tmp_path).config
    assert config.verifier == "org/Tuned" and config.speculators_config["proposal_methods"] == proposal
    assert config.verifier_fingerprint == Eagle3ForSpeculation.from_target(tuned).config.verifier_fingerprint
    tuned.config._name_or_path = ""  # unknown: better the old one than none
    assert make_trainer(tmp_path, tokenizer, model=str(tmp_path), target=tuned).draft.config.verifier == "org/Tuned"


def test_a_target_by_its_name(tmp_path, tokenizer):
    make_target("llama").to(torch.bfloat16).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    settings = {"report_to": "none", "use_cpu": True, "bf16": False, "draft_vocab_size": 20}
    args = Eagle3TrainingArguments(str(tmp_path / "out"), **settings)
    trainer = Eagle3Trainer(None, str(tmp_path / "target"), args, train_dataset=TEXTS)
    assert trainer.target_model.dtype == torch.bfloat16
    assert trainer.processing_class.get_vocab() == tokenizer.get_vocab()
    trainer.save_model(str(tmp_path / "draft"))
    args.target_model_init_kwargs, args.draft_vocab_size = {"dtype": torch.float32}, None
    trainer = Eagle3Trainer(str(tmp_path / "draft"), str(tmp_path / "target"), args, train_dataset=TEXTS)
    assert trainer.target_model.dtype == torch.float32 and trainer.draft.config.draft_vocab_size == 20
    with pytest.raises(ValueError, match="given by its name"):
        Eagle3Trainer(None, trainer.target_model, args, train_dataset=TEXTS)
    with pytest.raises(ValueError, match="saved beside the draft"):
        Eagle3TrainingArguments(str(tmp_path / "out"), target_model_init_kwargs={"token": "hf_mine"}, **settings)


def test_a_target_that_brings_its_code(tmp_path, tokenizer):
    folder = tmp_path / "target"
    save_with_code(make_target("llama"), folder)
    tokenizer.save_pretrained(folder)
    settings = {"report_to": "none", "use_cpu": True, "bf16": False, "max_steps": 1, "ttt_steps": 1}
    args = Eagle3TrainingArguments(str(tmp_path / "out"), trust_remote_code=True, **settings)
    trainer = Eagle3Trainer(None, str(folder), args, train_dataset=TEXTS)
    assert type(trainer.target_model).__name__ == "MineForCausalLM"
    trainer.train()
    assert type(load_ends(folder, trust_remote_code=True)).__name__ == "MineForCausalLM"
    args.trust_remote_code = False
    with pytest.raises(ValueError, match="trust_remote_code"):
        Eagle3Trainer(None, str(folder), args, train_dataset=TEXTS)


def test_the_tokenizer_is_of_the_same_revision(monkeypatch):
    loaded = []
    tokenizer = SimpleNamespace(chat_template="")
    for auto in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(auto, "from_pretrained", lambda name, **kwargs: loaded.append(kwargs) or tokenizer)
    monkeypatch.setattr("hf_eagle3.tokenizer.check_is_reachable", lambda *args, **kwargs: None)
    models.load_target("me/model", {"revision": "v2", "trust_remote_code": True, "dtype": torch.float16})
    config_kwargs, model_kwargs, tokenizer_kwargs = loaded
    model_kwargs.pop("dtype")
    assert tokenizer_kwargs == config_kwargs == model_kwargs == {"revision": "v2", "trust_remote_code": True}


def test_a_target_that_returns_tuples(tmp_path, tokenizer):
    target, few = make_target("llama"), {"max_steps": 1, "ttt_steps": 1}
    expected = losses(make_trainer(tmp_path, tokenizer, target=target, **few))
    target.config.return_dict = False
    assert losses(make_trainer(tmp_path, tokenizer, target=target, **few)) == expected


@pytest.mark.parametrize("depth, expected", [(1, [0]), (2, [0, 1]), (3, [0, 1, 2])])
def test_shallow_targets(tmp_path, tokenizer, depth, expected):
    """Give as many states as differ."""
    target, few = make_target("llama", num_hidden_layers=depth), {"max_steps": 1, "ttt_steps": 1}
    trainer = make_trainer(tmp_path, tokenizer, target=target, **few)
    assert trainer.aux_layer_ids == expected
    trainer.train()

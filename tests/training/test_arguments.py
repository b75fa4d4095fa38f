"""Arguments of training, and what is refused of them, of the launch and of the caller's objects."""

import copy
import json
import pickle
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from conftest import make_target
from datasets import Dataset, DatasetDict
from messages import assistant, user
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from trainers import TEXTS, make_trainer
from transformers import AutoConfig, AutoModelForMaskedLM, BitsAndBytesConfig
from transformers.distributed import DistributedConfig

from hf_eagle3 import Eagle3ForSpeculation, Eagle3Trainer, Eagle3TrainingArguments
from hf_eagle3.training.checks import check_call, check_parallelism
from hf_eagle3.training.parser import Eagle3Parser
from hf_eagle3.training.record import non_defaults


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"eval_packing": True}, "`eval_packing=True` needs `packing=True`"),
        ({"packing": True, "max_length": None}, "fills rows of `max_length` tokens"),
        ({"packing": True, "truncation_mode": "keep_end"}, "keep the beginnings"),
        ({"max_steps": 0}, "so nothing would be trained"),
        ({"max_steps": -1, "num_train_epochs": 0}, "so nothing would be trained"),
    ],
)
def test_arguments_that_do_not_fit_each_other(tmp_path, settings, reason):
    with pytest.raises(ValueError, match=reason):
        Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=False, **settings)


def test_resuming_as_the_command_line_says_it(tmp_path):
    for text, expected in (("false", False), ("True", True), ("a", "a")):
        args = Eagle3TrainingArguments(str(tmp_path), use_cpu=True, resume_from_checkpoint=text)
        assert args.resume_from_checkpoint == expected


def test_an_optimizer_of_another_model(tmp_path, tokenizer):
    """The draft would learn nothing, as one that is frozen."""
    draft = Eagle3ForSpeculation.from_target(target := make_target("llama"))

    def make(model, other, **kwargs):
        trainer_class = partial(Eagle3Trainer, optimizers=(torch.optim.SGD(other.parameters(), lr=0.3), None))
        return make_trainer(tmp_path, tokenizer, model, target=target, trainer_class=trainer_class, **kwargs)

    for model, other in ((None, draft), (draft, target), (draft, copy.deepcopy(draft))):
        with pytest.raises(ValueError, match="The optimizer has .* parameters that are not the draft's"):
            make(model, other)
    # Or one that was made before the adapter: all its parameters are frozen then.
    with pytest.raises(ValueError, match="only frozen parameters.*`optimizer_cls_and_kwargs`"):
        make(draft, draft, peft_config=LoraConfig(target_modules=["q_proj"]))


def test_models_that_fsdp_would_not_save(tmp_path, tokenizer, monkeypatch):
    def with_fsdp(trainer):
        create(trainer)
        trainer.is_fsdp_enabled = True
        monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)

    create = Eagle3Trainer.create_accelerator_and_postprocess
    monkeypatch.setattr(Eagle3Trainer, "create_accelerator_and_postprocess", with_fsdp)
    for kind, refusal in (
        ("SHARDED_STATE_DICT", pytest.raises(ValueError, match="fsdp_state_dict_type: FULL_STATE_DICT")),
        ("FULL_STATE_DICT", nullcontext()),
    ):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        with refusal:
            make_trainer(tmp_path, tokenizer)
    with pytest.raises(ValueError, match="FSDP and DeepSpeed keep in parts"):
        make_trainer(tmp_path, tokenizer, sampled_vocab_size=4)
    plugin.fsdp_version = 1
    with pytest.raises(ValueError, match="Muon needs whole matrices. .*`fsdp_version: 2`"):
        make_trainer(tmp_path, tokenizer)
    plugin.fsdp_version, plugin.cpu_ram_efficient_loading = 2, True
    make_trainer(tmp_path, tokenizer)
    with pytest.raises(ValueError, match="`fsdp_cpu_ram_efficient_loading: true` loads no buffers"):
        make_trainer(tmp_path, tokenizer, draft_vocab_size=20)
    plugin.activation_checkpointing = True
    with pytest.raises(ValueError, match="`fsdp_activation_checkpointing: true` is not supported"):
        make_trainer(tmp_path, tokenizer)


def test_zero_3(tmp_path):
    args = Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=False)
    refused = pytest.raises(ValueError, match="DeepSpeed ZeRO-3 .* Use ZeRO-2, or FSDP2 .*`--fsdp_size`")
    for stage, outcome in ((2, nullcontext()), (3, refused)):
        config = HfDeepSpeedConfig({"zero_optimization": {"stage": stage}})
        args.deepspeed_plugin = SimpleNamespace(hf_ds_config=config)
        with outcome:
            check_call("target", args, {"train_dataset": TEXTS})


def test_a_process_with_several_gpus(tmp_path, tokenizer, caplog):
    args = Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=False)
    args._n_gpu = 2
    target, settings = make_target("llama"), {"train_dataset": TEXTS, "processing_class": copy.deepcopy(tokenizer)}
    trainer = Eagle3Trainer(model=None, target_model=target, args=args, **settings)
    assert trainer.args.n_gpu == 1 and args.n_gpu == 2 and "accelerate launch" in caplog.text
    assert "`device_map` spreads over the GPUs needs one process" in caplog.text


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_bfloat16_on_processors(tmp_path, monkeypatch, has_bfloat16):
    """TRL's default where they have it; by software it takes several times as long."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
    assert Eagle3TrainingArguments(str(tmp_path), use_cpu=True).bf16 is has_bfloat16
    for asked in (True, False):
        arguments = Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=asked)
        assert arguments.bf16 is asked
    assert ("bf16" in non_defaults(arguments)) and "bf16" not in non_defaults(arguments, {"bf16": True})


@pytest.mark.parametrize("asked", [{}, {"bf16": True}, {"bf16": False, "bf16_full_eval": True}])
def test_without_a_gpu(tmp_path, monkeypatch, asked):
    """transformers' error would ask for a setup of bf16."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no GPU here. To train on the CPU, pass `use_cpu=True`"):
        Eagle3TrainingArguments(str(tmp_path), **asked)
    Eagle3TrainingArguments(str(tmp_path), bf16=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_target_in_bfloat16_on_a_processor_without_it(tmp_path, monkeypatch, tokenizer, caplog, dtype):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    make_trainer(tmp_path, tokenizer, target=make_target("llama").to(dtype))
    assert ("Load the target in float32" in caplog.text) is (dtype == torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("lr_scheduler_kwargs", "[1]", "must be a dictionary"),
        ("lr_scheduler_kwargs", [1], "must be a dictionary"),
        ("model_init_kwargs", "dtype=float32", "must be a dictionary.*dtype=float32"),
        ("dataloader_num_workers", -1, "must be an integer"),
        ("learning_rate", -1.0, "must not be negative"),
        ("learning_rate", "1e-4", "is '1e-4', but must be a number. YAML reads"),
        ("warmup_steps", "10", "is '10', but must be a number"),
        ("max_grad_norm", None, "is None, but must be a number"),
        ("max_steps", 2.0, "is 2.0, but must be an integer"),
        ("ttt_steps", 2.5, "is 2.5, but must be an integer"),
        ("gradient_accumulation_steps", 0, "must be .* got 0"),
        ("per_device_train_batch_size", 0, "must be .* got 0"),
        ("ttt_steps", 0, "must be .* got 0"),
        ("draft_vocab_size", -3, "must be .* got -3"),
        ("sampled_vocab_size", 0, "must be an integer of at least 1, got 0"),
        ("max_length", 2, "must be .* got 2"),
        ("eval_max_new_tokens", 0, "must be .* got 0"),
        ("draft_form", "eagle4", "must be one of .*'classic'"),
        ("label_smoothing_factor", 0.1, "has no effect"),
        ("loss_type", "dft", "has no effect"),
        ("neftune_noise_alpha", 5.0, "has no effect"),
        ("use_liger_kernel", True, "has no effect"),
        ("dataset_kwargs", {"add_special_tokens": False}, "would have no effect. Its only key is"),
        ("optim", "adafactor", "has no effect"),
        ("optim_args", "a=1", "has no effect"),
        ("optim_target_modules", "all-linear", "has no effect"),
        ("gradient_checkpointing", True, "is not supported"),
        ("activation_offloading", True, "moves .* where they are already"),
        ("fp16", True, "has no effect on a CPU"),
    ],
)
def test_arguments_that_are_refused(tmp_path, name, value, reason):
    with pytest.raises(ValueError, match=f"`{name}(=True)?` .*{reason}"):
        Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=False, **{name: value})


def test_trackers_that_are_not_there(tmp_path, monkeypatch):
    """Fail before the work, not after all rows are tokenized."""
    monkeypatch.setattr("hf_eagle3.training.arguments.get_available_reporting_integrations", lambda: ["wandb"])
    settings = {"use_cpu": True, "bf16": False}
    for tracker in ("wandb", "comet_ml"):  # Comet may be offline, without a key
        assert Eagle3TrainingArguments(str(tmp_path), report_to=[tracker], **settings).report_to == [tracker]
    for report_to, told in (
        (["wandb", "tensorboard"], r"has \['tensorboard'\], which are not installed. Install .*pip install tensorb"),
        ("wanbd", "wanbd is not supported, only .*wandb"),
    ):
        with pytest.raises(ValueError, match=told):
            Eagle3TrainingArguments(str(tmp_path), report_to=report_to, **settings)
    monkeypatch.delattr("hf_eagle3.training.arguments.get_available_reporting_integrations")  # it imports trackers
    Eagle3TrainingArguments(str(tmp_path), report_to="none", **settings)


def test_arguments_that_are_taken(tmp_path):
    Eagle3Parser([Eagle3TrainingArguments])  # takes `None` out of the types of fields
    arguments = {"max_length": None, "optim": "adafactor", "use_muon": False}
    assert Eagle3TrainingArguments(str(tmp_path), use_cpu=True, **arguments).max_length is None


def test_wrong_arguments(tmp_path, tokenizer):
    target, other = make_target("llama"), make_target("llama", seed=1)
    draft = Eagle3ForSpeculation.from_target(target, draft_token_ids=range(10))
    draft.save_pretrained(tmp_path / "draft")
    larger, bert = copy.deepcopy(target), {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    larger.resize_token_embeddings(100)
    bert = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", vocab_size=96, **bert))
    without_template = copy.deepcopy(tokenizer)
    without_template.chat_template = None
    chats = Dataset.from_dict({"messages": [[user("a"), assistant("b")]]})
    ours = {"model": draft, "target": target}
    windows = {"layer_types": ["sliding_attention"], "use_sliding_window": True, "sliding_window": 8}
    windowed = Eagle3ForSpeculation.from_target(target, model_type="qwen3", **windows)
    for kwargs, error, message in (
        ({"model": other, "target": target}, TypeError, "`model` is LlamaForCausalLM"),
        ({"model": target, "target": draft}, TypeError, "`target_model` is Eagle3ForSpeculation"),
        ({"target": str(tmp_path / "draft")}, ValueError, "draft is a draft, not a target"),
        ({"target": bert}, ValueError, "BertForMaskedLM cannot be an EAGLE-3 target"),
        ({"model": draft, "target": other}, ValueError, "trained for another model"),
        ({"model": draft, "target": larger}, ValueError, "a target with 96 tokens, and this one has 100"),
        ({**ours, "model": windowed}, ValueError, "Only drafts with full attention can be trained"),
        ({**ours, "draft_vocab_size": 20}, ValueError, "vocabulary of 10"),
        ({**ours, "model_init_kwargs": {"model_type": "qwen3"}}, ValueError, "model_init_kwargs"),
        ({**ours, "draft_form": "classic"}, ValueError, "draft_form"),
        ({**ours, "model": torch.compile(draft)}, ValueError, "torch_compile"),
        ({"peft_config": LoraConfig(target_modules=["q_proj"])}, ValueError, "adapter of a fresh one"),
        ({"dataset": DatasetDict(test=TEXTS, train=TEXTS)}, ValueError, r"dataset\['train'\]"),
        ({"dataset": Dataset.from_dict({"text": ["a"] * 5})}, ValueError, "more than two tokens"),
        (
            {"dataset": chats, "tokenizer": without_template},
            ValueError,
            "no chat template. Pass one as `chat_template_",
        ),
    ):
        with pytest.raises(error, match=message):
            make_trainer(tmp_path, **{"tokenizer": tokenizer, **kwargs})
    with pytest.raises(TypeError, match="`target_model` is NoneType"):
        Eagle3Trainer(model=None, target_model=None, train_dataset=TEXTS)
    trainer = make_trainer(tmp_path, tokenizer)
    store = trainer.extract_features(tmp_path / "features")
    with pytest.raises(TypeError, match="The eval data is list"):
        trainer.evaluate(list(TEXTS))
    args = Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=False)
    evaluating = Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=False, eval_strategy="epoch")
    for kwargs, error, message in (
        ({"compute_metrics": len}, ValueError, "`compute_metrics` would have no effect"),
        ({"compute_loss_func": len}, ValueError, "`compute_loss_func` would have no effect"),
        ({"preprocess_logits_for_metrics": len}, ValueError, "`preprocess_logits_for_metrics` would have no effect"),
        ({"quantization_config": object()}, ValueError, "Quantize the target when it is loaded"),
        ({"tokenizer": tokenizer}, TypeError, r"no arguments \['tokenizer'\].*the others are .*'processing_class'"),
        ({"max_seq_length": 64}, TypeError, "no arguments .*Pass those of `Eagle3TrainingArguments` in `args`"),
        ({"train_dataset": list(TEXTS)}, TypeError, "The train data is list.*`Dataset.from_list` makes one"),
        ({"train_dataset": None}, TypeError, "The train data is NoneType"),
        ({"eval_dataset": {"one": "texts.jsonl"}}, TypeError, "The eval data is str"),
        ({"eval_dataset": {}}, ValueError, "`eval_dataset` has no data sets"),
        ({"args": {"eval_strategy": "steps"}}, TypeError, "`args` must be `Eagle3TrainingArguments`, got dict"),
        ({"args": evaluating}, ValueError, "asks for evaluation, but there is no `eval_dataset`"),
        ({"eval_dataset": store}, ValueError, "`eval_dataset` is a feature store"),
        ({"eval_dataset": {"one": store}}, ValueError, "`eval_dataset` is a feature store"),
        ({}, ValueError, "`processing_class`"),
        ({"processing_class": "gpt2"}, TypeError, "`processing_class`"),
    ):
        with pytest.raises(error, match=message):
            Eagle3Trainer(None, target, **{"args": args, "train_dataset": TEXTS, **kwargs})
    for config in (
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
        LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[7]),
    ):
        with pytest.raises(ValueError, match="which training would leave out"):
            make_trainer(tmp_path, tokenizer, target=get_peft_model(make_target("llama"), config))


def test_arguments_stay_the_caller_s(tmp_path, tokenizer):
    """Also where the trainer could not be made."""
    settings = {"draft_vocab_size": 20, "model_init_kwargs": {"fc_norm": False}, "hub_token": "hf_mine"}
    args = Eagle3TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, bf16=False, **settings)
    given = {"model": None, "target_model": make_target("llama"), "args": args, "processing_class": tokenizer}
    with pytest.raises((TypeError, ValueError, AttributeError)):
        Eagle3Trainer(**given, train_dataset=Dataset.from_dict({"text": [3]}))
    assert args.model_init_kwargs == {"fc_norm": False}
    trainer = Eagle3Trainer(**given, train_dataset=TEXTS)
    assert args.model_init_kwargs == trainer.args.model_init_kwargs == {"fc_norm": False}
    assert not trainer.draft.config.fc_norm
    assert trainer.args.hub_token == args.hub_token == "hf_mine" and pickle.loads(pickle.dumps(args)).hub_token is None


def test_processes_wait_while_one_tokenizes(tmp_path):
    """By default those that have nothing to do would give up after half an hour."""
    assert Eagle3TrainingArguments(str(tmp_path), bf16=False).ddp_timeout_delta > timedelta(hours=2)


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("quantization_config", BitsAndBytesConfig(load_in_4bit=True), BitsAndBytesConfig.to_dict),
        ("dtype", torch.bfloat16, lambda _: "bfloat16"),
        ("device_map", {"": torch.device("cpu")}, lambda _: {"": "cpu"}),
        ("max_memory", {0: "1GiB"}, lambda _: {"0": "1GiB"}),
        ("distributed_config", DistributedConfig(tp_plan="auto"), DistributedConfig.to_dict),
    ],
)
def test_arguments_are_json(tmp_path, name, value, expected):
    """Trackers write them at the first log."""
    kwargs = {name: value}
    args = Eagle3TrainingArguments(str(tmp_path), use_cpu=True, bf16=False, target_model_init_kwargs=kwargs)
    written = json.loads(args.to_json_string())["target_model_init_kwargs"]
    assert written == json.loads(json.dumps({name: expected(value)}, default=str)) and args.to_sanitized_dict()
    assert args.target_model_init_kwargs[name] is value


@pytest.mark.parametrize(
    "config, error",
    [
        ({"even_batches": False}, "even_batches=False.*at its default"),
        ({"split_batches": True}, "split_batches=True.*one process"),
    ],
)
def test_batches_that_several_processes_cannot_share(tmp_path, tokenizer, monkeypatch, config, error):
    """They would wait for each other, or count the rows of a step wrongly."""
    make_trainer(tmp_path, tokenizer, accelerator_config=config)
    monkeypatch.setattr(Eagle3TrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match=error):
        make_trainer(tmp_path, tokenizer, accelerator_config=config)


@pytest.mark.parametrize("sizes", [{"cp_size": 2}, {"sp_size": 2}])
def test_rows_that_processes_would_share(tmp_path, tokenizer, monkeypatch, sizes):
    """The last token of a part and the first of the next would not meet."""
    trainer = make_trainer(tmp_path, tokenizer)
    monkeypatch.setattr(type(trainer.accelerator), "parallelism_config", ParallelismConfig(**sizes))
    with pytest.raises(ValueError, match="give each process a part of a row"):
        check_parallelism(trainer)


def test_batches_that_are_not_filled_are_not_all(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="has 3 rows, which `dataloader_drop_last=True` drops"):
        make_trainer(tmp_path, tokenizer, dataset=TEXTS.select(range(3)), dataloader_drop_last=True)
    for evaluated in (TEXTS.select(range(3)), {"long": TEXTS, "short": TEXTS.select(range(3))}):
        with pytest.raises(ValueError, match="eval data has 3 rows, .*`per_device_eval_batch_size`"):
            make_trainer(tmp_path, tokenizer, eval_dataset=evaluated, dataloader_drop_last=True)

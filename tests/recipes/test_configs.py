"""The YAML files of known targets: sizes on the meta device, and steps on tiny models of the same classes."""

import copy
import json

import pytest
import torch
import yaml
from conftest import RECIPES, ROOT, assert_same_text, make_prompt, make_target
from datasets import Dataset, DatasetDict
from messages import assistant, user
from test_multimodal_generation import gemma4, llama4
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template
from trl import chat_template_utils

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.data import rows_of


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads", "head_dim")
LLAMA4 = {"intermediate_size_mlp": 16384, "num_local_experts": 128, "interleave_moe_layer_step": 2}
# Model type, these sizes, and what else the verifiers' own config.json say.
TARGETS = {
    "qwen3_8b": ("qwen3", (151936, 4096, 12288, 36, 32, 8, 128), {}),
    "llama_3_1_8b_instruct": ("llama", (128256, 4096, 14336, 32, 32, 8, 128), {}),
    "llama_4_maverick_17b_128e_instruct": ("llama4_text", (202048, 5120, 8192, 48, 40, 8, 128), LLAMA4),
    "gpt_oss_20b": ("gpt_oss", (201088, 2880, 2880, 24, 64, 8, 64), {"num_local_experts": 32}),
    "smollm2_135m_instruct": ("llama", (49152, 576, 1536, 30, 9, 3, 64), {}),
    "gemma_4_31b_it": ("gemma4_text", (262144, 5376, 21504, 60, 32, 16, 256), {"hidden_size_per_layer_input": 0}),
}
TARGETS = {name: (kind, dict(zip(SIZES, sizes)) | others) for name, (kind, sizes, others) in TARGETS.items()}


def read(name):
    return yaml.safe_load((RECIPES / f"{name}.yaml").read_text())


def make_true_size_draft(name, **overrides):
    model_type, sizes = TARGETS[name]
    config = AutoConfig.for_model(model_type, **sizes, tie_word_embeddings=False)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    recipe = read(name)
    settings = {**recipe["model_init_kwargs"], **overrides}
    return Eagle3ForSpeculation.from_target(target, range(recipe["draft_vocab_size"]), **settings)


def num_bytes(draft):
    return sum(tensor.numel() * tensor.element_size() for tensor in draft.state_dict().values())


def test_every_config_is_tested():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_true_size(name):
    sizes, config = TARGETS[name][1], read(name)
    draft = make_true_size_draft(name)
    width, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
    heads, kv_heads = (sizes[f"num_{kind}_heads"] * sizes["head_dim"] for kind in ("attention", "key_value"))
    vocab_size, mlp = config["draft_vocab_size"], config["model_init_kwargs"]["intermediate_size"]
    expected = 3 * width * width + 3 * width  # fc and its norms
    expected += 2 * width * (heads + 2 * kv_heads) + heads * width + 3 * width * mlp + 3 * width  # the layer
    expected += width + vocab_size * width  # norm and head
    if config["model_init_kwargs"]["model_type"] == "qwen3":
        expected += 2 * sizes["head_dim"]  # norms of queries and keys
    assert sum(parameter.numel() for parameter in draft.parameters()) == expected
    # The mapping of the draft vocabulary: an offset for each of its tokens, a byte for each of the target's.
    assert num_bytes(draft) == 2 * expected + 8 * vocab_size + sizes["vocab_size"]
    assert draft.config.eagle_aux_hidden_state_layer_ids == [2, layers // 2, layers - 3]
    assert config["output_dir"].endswith("-speculator.eagle3")


@pytest.mark.parametrize("name", [name for name in TARGETS if read(name)["eval_strategy"] != "no"])
def test_evaluation_is_small(name):
    """All of the test split would take longer than training, and batches of 8, the default, more memory."""
    config, rows = read(name), Dataset.from_dict({"text": ["abc"] * 600})
    assert len(rows_of(DatasetDict(test_sft=rows), config["dataset_test_split"])) == 512
    assert config["per_device_eval_batch_size"] == config["per_device_train_batch_size"]


def test_the_published_size():
    """RedHatAI/Qwen3-8B-speculator.eagle3 has 2,044,116,968 bytes: tensors, and safetensors' header."""
    draft = make_true_size_draft("qwen3_8b", fc_norm=False, norm_output=False, has_own_embed_tokens=True)
    names = {torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    # In safetensors' order: large elements first.
    for name, tensor in sorted(draft.state_dict().items(), key=lambda item: (-item[1].element_size(), item[0])):
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    header_length = len(json.dumps(header, separators=(",", ":")))
    assert num_bytes(draft) + 8 + header_length + -header_length % 8 == 2_044_116_968


TEMPLATES = {
    "qwen3_8b": chat_template_utils.qwen3_chat_template,
    "gpt_oss_20b": chat_template_utils.gptoss_chat_template,
    "smollm2_135m_instruct": chat_template_utils.qwen2_5_chat_template,  # ChatML, too
}
TINY = {
    "qwen3_8b": lambda: make_target("qwen3"),
    "llama_3_1_8b_instruct": lambda: make_target("llama"),
    "llama_4_maverick_17b_128e_instruct": lambda: llama4()[0],
    "gpt_oss_20b": lambda: make_target("gpt_oss"),
    "smollm2_135m_instruct": lambda: make_target("llama"),
    "gemma_4_31b_it": lambda: gemma4()[0],
}

# Extraction does not depend on the file. Training from features loads the ends of the target: of one for text, and one that sees.
WITH_FEATURES = ("qwen3_8b", "gemma_4_31b_it")


@pytest.mark.parametrize("name", TINY)
def test_steps_on_a_tiny_model_of_the_same_class(name, tmp_path, tokenizer, monkeypatch, run_recipe):
    monkeypatch.chdir(ROOT)  # paths in the files are relative to it
    torch.manual_seed(0)
    TINY[name]().save_pretrained(tmp_path / "target")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATES.get(name)
    tokenizer.save_pretrained(tmp_path / "target")
    answer = assistant("ghi jkl mno")
    rows = [{"messages": [user("abc def"), answer, user(f"a{i}"), answer]} for i in range(16)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--config", RECIPES / f"{name}.yaml", "--model_name_or_path", tmp_path / "target", "--dtype", "float32"]
    common += ["--dataset_name", tmp_path / "chats.jsonl", "--dataset_train_split", "train", "--eval_strategy", "no"]
    common += ["--model_init_kwargs", json.dumps({"model_type": "llama"}), "--draft_vocab_size", 24]
    common += ["--max_length", 512, "--max_steps", 1, "--save_steps", 1, "--output_dir", tmp_path / "draft"]
    common += ["--bf16", "False", "--use_cpu", "True", "--report_to", "none", "--gradient_accumulation_steps", 1]
    common += ["--per_device_train_batch_size", 2, "--ttt_steps", 2, "--ttt_warmup", 0]
    run_recipe("train.py", *common)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    draft = Eagle3ForSpeculation.from_pretrained(tmp_path / "draft")
    assert_same_text(target, draft, make_prompt(12), max_new_tokens=8)
    history = json.loads((tmp_path / "draft" / "checkpoint-1" / "trainer_state.json").read_text())
    assert history["global_step"] == 1

    if name not in WITH_FEATURES:
        return
    # And from features, with a target that has no layers.
    run_recipe("extract_features.py", *common, "--features_dir", tmp_path / "features")
    from_features = [*common, "--features_dir", tmp_path / "features", "--output_dir", tmp_path / "offline"]
    run_recipe("train.py", *from_features)
    ours = Eagle3ForSpeculation.from_pretrained(tmp_path / "offline").state_dict()
    theirs = draft.state_dict()
    assert all(torch.allclose(ours[key].float(), theirs[key].float(), atol=2e-2) for key in theirs)


CHAT = [
    {"role": "system", "content": "Be brief."},
    user(" Hi "),
    assistant("Hello.\n"),
    user("Bye"),
    assistant("Bye."),
]


def render(template, messages, bos_token="<bos>", **settings):
    if not template.startswith("{"):
        template = (RECIPES / "chat_templates" / f"{template}.jinja").read_text()
    return render_jinja_template([messages], chat_template=template, bos_token=bos_token, **settings)[0][0]


@pytest.mark.parametrize("messages, add_generation_prompt", [(CHAT, False), (CHAT[1:4], True), (CHAT[1:], False)])
@pytest.mark.parametrize("name, original", [("gemma4", "gemma4_v5"), ("llama3", "llama3_1")])
def test_templates_say_what_the_targets_say(name, original, messages, add_generation_prompt):
    theirs = getattr(chat_template_utils, f"{original}_chat_template")
    settings = {"add_generation_prompt": add_generation_prompt}
    assert render(name, messages, **settings) == render(theirs, messages, **settings)


def test_the_template_of_llama_4():
    text = render("llama4", CHAT[1:4], "<|begin_of_text|>", add_generation_prompt=True)
    assert text == (
        "<|begin_of_text|><|header_start|>user<|header_end|>\n\nHi<|eot|>"
        "<|header_start|>assistant<|header_end|>\n\nHello.<|eot|>"
        "<|header_start|>user<|header_end|>\n\nBye<|eot|><|header_start|>assistant<|header_end|>\n\n"
    )


@pytest.mark.parametrize("name", ["gemma4", "llama3", "llama4"])
def test_what_the_templates_mark(name, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (RECIPES / "chat_templates" / f"{name}.jinja").read_text()
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "def"}] * 2
    encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"])
    text = tokenizer.decode([token for token, learned in pairs if learned])
    assert text.startswith("def") and "abc" not in text and text.count("def") == 2


def test_what_a_training_will_take(tmp_path, run_experiment):
    others = {"tie_word_embeddings": False, "architectures": ["Qwen3ForCausalLM"]}
    AutoConfig.for_model("qwen3", **TARGETS["qwen3_8b"][1], **others).save_pretrained(tmp_path)
    page = (ROOT / "docs" / "large_runs.md").read_text()
    result = run_experiment("training_cost.py", "--target", tmp_path, "--tokens", 5e8, "--tflops", 989)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = result.stdout.splitlines()
    for line in lines[-2:]:  # GPUs, tokens a second, hours
        num_gpus, tokens, hours = line.split("|")[1:4]
        assert f"|{num_gpus}|{tokens}|{hours}|" in page
    assert "15.1 GFLOP a token" in lines[0] and "9.1 GFLOP a token in 4.20 drafting steps" in lines[1]
    # Forward: two operations a weight, 7.57 billion of them outside of the embeddings.
    weights = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288) + 4096 * 151936
    assert f"{2 * weights / 1e9:.1f}" == "15.1"

"""`recipes/trim_vocabulary.py` as users call it."""

import json

import torch
from conftest import make_target, make_tokenizer
from datasets import Dataset
from hub.test_card import TRAINING
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.checkpoints import export
from hf_eagle3.remote_code.draft_model_eagle3 import weights_digest


def test_trimming(tmp_path, tokenizer, run_recipe, caplog):
    make_target("llama").save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    chat = [{"role": "user", "content": "what is up"}, {"role": "assistant", "content": "not much, not much"}]
    (tmp_path / "chats.jsonl").write_text(2 * (json.dumps({"messages": chat}) + "\n"))
    inputs = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True, return_tensors="pt")
    draft = Eagle3ForSpeculation.from_target(target)
    said = set(tokenizer(chat[1]["content"], add_special_tokens=False)["input_ids"])
    size, small_size = draft.config.draft_vocab_size, len(said) + 2
    draft.save_pretrained(tmp_path / "draft")
    record = {**TRAINING, "draft_weights": weights_digest(draft.state_dict()), "command": "train", "steps": 3}
    (tmp_path / "draft" / "training.json").write_text(json.dumps(record))

    call = ("trim_vocabulary.py", tmp_path / "draft", "--dataset_name", tmp_path / "chats.jsonl", "--draft_vocab_size")
    result = run_recipe(*call, small_size, "--output_dir", tmp_path / "small")
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"{small_size} of {size} tokens, which make up all of the " in result.stdout
    small = Eagle3ForSpeculation.from_pretrained(tmp_path / "small").eval()
    assert len(small.draft_token_ids) == small_size and said <= set(small.draft_token_ids.tolist())
    assert torch.equal(small.lm_head.weight, draft.lm_head.weight[small.draft_token_ids])
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert torch.equal(target.generate(**inputs, do_sample=False, max_new_tokens=12, assistant_model=small), plain)

    copied = json.loads((tmp_path / "small" / "training.json").read_text())
    assert copied["draft_weights"] == weights_digest(small.state_dict())
    assert copied["steps"] == 3 and copied["evaluation"] is None
    assert copied["command"].startswith("train\npython recipes/trim_vocabulary.py")

    (tmp_path / "draft" / "training.json").write_text(json.dumps({**record, "draft_weights": "another draft's"}))
    Dataset.from_dict({"messages": [chat]}).to_parquet(tmp_path / "chats.parquet")
    call = (*call[:3], tmp_path / "chats.parquet", *call[4:])
    result = run_recipe(*call, size - 1, "--output_dir", tmp_path / "unknown")
    assert result.returncode == 0 and "is about other weights" in caplog.text
    assert not (tmp_path / "unknown" / "training.json").exists()

    result = run_recipe(*call, size, "--output_dir", tmp_path / "nowhere")
    assert result.returncode != 0 and f"must be from 1 to {size - 1}" in result.stderr
    result = run_recipe(*call, 4, "--output_dir", tmp_path / "small")
    assert result.returncode != 0 and "is not empty" in result.stderr and not (tmp_path / "nowhere").exists()

    # Flat drafts name no target, and some of them store no head.
    draft = Eagle3ForSpeculation.from_target(target, fc_norm=False, norm_output=False)
    export(draft, tmp_path / "flat", "sglang")
    call = ("trim_vocabulary.py", tmp_path / "flat", *call[2:], 4, "--output_dir", tmp_path / "nowhere")
    result = run_recipe(*call)
    assert result.returncode != 0 and "does not name its target" in result.stderr
    tensors = load_file(tmp_path / "flat" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "flat" / "model.safetensors")
    result = run_recipe(*call, "--target", tmp_path / "target")
    assert result.returncode != 0 and "--to speculators --target" in result.stderr
    assert not (tmp_path / "nowhere").exists()


def test_a_draft_in_a_folder_of_its_repo_and_another_template(tmp_path, run_recipe):
    make_target("llama").save_pretrained(tmp_path / "target")
    tokenizer = make_tokenizer()
    (tmp_path / "chat.jinja").write_text(tokenizer.chat_template)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    Eagle3ForSpeculation.from_target(target).save_pretrained(tmp_path / "drafts" / "small")
    chat = [{"role": "user", "content": "what is up"}, {"role": "assistant", "content": "not much"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    call = ("trim_vocabulary.py", tmp_path / "drafts", "--draft_subfolder", "small", "--draft_vocab_size", 12)
    call += ("--dataset_name", tmp_path / "chats.jsonl", "--output_dir", tmp_path / "trimmed")
    result = run_recipe(*call)
    assert result.returncode == 1 and "chat_template_path" in result.stderr
    result = run_recipe(*call, "--chat_template_path", tmp_path / "chat.jinja")
    assert result.returncode == 0, result.stderr[-3000:]
    assert Eagle3ForSpeculation.from_pretrained(tmp_path / "trimmed").config.draft_vocab_size == 12

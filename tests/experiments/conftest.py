"""A tiny target, texts and prompts, as the scripts take them."""

import json

import pytest
from conftest import make_target


@pytest.fixture
def files(tmp_path, tokenizer):
    target = make_target("llama")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    texts = [f"the {i} of {i * 7}, and so on to {i * i} in the end of all that is" for i in range(40)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts[:2]))
    return tmp_path

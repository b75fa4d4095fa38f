import pytest
import torch
from conftest import make_target

from hf_eagle3.checkpoints.target import load_on_device
from hf_eagle3.environment import is_path, without_paths


def test_paths_are_not_published(tmp_path):
    facts = {"target": str(tmp_path / "model"), "draft": "owner/draft", "tasks": [str(tmp_path)], "seed": 0}
    assert without_paths(facts) == {"target": "model", "draft": "owner/draft", "tasks": [tmp_path.name], "seed": 0}


@pytest.mark.parametrize(
    "path", ["C:\\models\\Llama-8B", "C:/models/Llama-8B", "/models/Llama-8B", "\\\\server\\share\\Llama-8B"]
)
def test_paths_of_another_system_are_not_published(path):
    assert without_paths([path, "meta-llama/Llama-8B", "Q: is a/b right?"]) == [
        "Llama-8B",
        "meta-llama/Llama-8B",
        "Q: is a/b right?",
    ]


def test_long_strings_are_no_paths():
    """Such as the error of a method that a benchmark left out."""
    facts = {"left_out": {"mtp": "x" * 300}}
    assert without_paths(facts) == facts and not is_path("x" * 5000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_processor_without_bfloat16(tmp_path, monkeypatch, caplog, dtype):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    make_target("llama").to(dtype).save_pretrained(tmp_path)
    assert load_on_device(tmp_path, "cpu").dtype == dtype
    assert ("Load the target in float32: `--dtype float32`" in caplog.text) is (dtype == torch.bfloat16)

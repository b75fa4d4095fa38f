"""`experiments/gpu_trained.py`: answers within a time limit."""

from conftest import EXPERIMENTS, load_script
from transformers import AutoModelForCausalLM

from hf_eagle3.tokenizer import load_tokenizer


def test_answering_stops_at_its_time_limit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))  # it imports another part
    gpu_trained = load_script(EXPERIMENTS / "gpu_trained.py")
    name, chats = gpu_trained.tiny_target(tmp_path / "target")
    target, now = AutoModelForCausalLM.from_pretrained(name).eval(), [0]
    generate = target.generate

    def in_a_second(**kwargs):
        now[0] += 1
        return generate(**kwargs)

    target.generate = in_a_second
    monkeypatch.setattr(gpu_trained.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(gpu_trained, "ANSWER", 8)
    arguments = target, load_tokenizer(str(name)), chats
    result = gpu_trained.regenerate(*arguments, tmp_path / "answers", batch_size=4, seconds=1.5, seed=0)
    assert 0 < result["rows"] <= 8 and result["seconds"] == 2
    rest = gpu_trained.regenerate(*arguments, tmp_path / "answers", batch_size=4, seconds=60, seed=0)
    assert result["rows"] < rest["rows"] <= len(chats)

"""`recipes/measurements/random_weights.py` on a tiny configuration."""

import json
import sys

import pytest
from conftest import RECIPES, make_target


def test_correctness_and_times(tmp_path, run_recipe):
    make_target("qwen3", num_hidden_layers=2).config.save_pretrained(tmp_path / "target")
    arguments = ["--target", tmp_path / "target", "--output_dir", tmp_path / "out", "--dtype", "float32"]
    arguments += ["--draft_vocab_size", 24, "--num_prompts", 2, "--prompt_length", 8, "--max_new_tokens", 12]
    arguments += ["--context", 16, "--sizes", 1, 8, "--repeats", 1, "--device", "cpu"]
    arguments += ["--compile", "default", "--backend", "eager"]
    run_recipe("measurements/random_weights.py", *arguments)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["correctness"]["greedy_differing"] == 0 and results["correctness"]["same_samples"] == 2
    assert results["correctness"]["acceptance_length"] > 1
    assert set(results["parts"]["verify"]) == {"1", "8"} and results["parts"]["draft_level"] > 0
    assert set(results["steps"]) == {
        f"{way}, {kind}" for way in ("eager", "compiled") for kind in ("plain", "with the draft")
    }
    table = (tmp_path / "out" / "results.md").read_text()
    assert "2/2 greedy texts are those of plain generate" in table and "| verify |" in table


def test_a_difference_that_is_no_near_tie_is_an_error(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES / "measurements"))
    import random_weights

    rows = iter([{"noise": 0.1, "acceptance_length": 2.0}, {"noise": 0.1, "acceptance_length": 2.0, "gap": 0.5}])
    monkeypatch.setattr(random_weights, "compare", lambda *arguments: next(rows))
    target = make_target("qwen3")
    prompts = target.dummy_inputs["input_ids"][:2, :4] % 90
    draft = random_weights.Eagle3ForSpeculation.from_target(target)
    correctness = random_weights.check(target, draft, prompts, 4)
    assert (correctness["greedy_differing"], correctness["near_ties"], correctness["same_samples"]) == (1, 0, 2)
    with pytest.raises(StopIteration):
        next(rows)
    sys.modules.pop("random_weights")

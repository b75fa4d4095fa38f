import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import make_draft, make_prompt, make_target

from hf_eagle3.evaluation import BenchmarkRow, format_table, read_prompts, run_benchmark


RECIPES = Path(__file__).parents[2] / "recipes"


def test_benchmark_recipe(tmp_path, tokenizer):
    target = make_target("llama")
    make_draft(target, [make_prompt(5)]).save_pretrained(tmp_path / "draft")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "what is 3"}\n{"prompt": "the end"}\n')
    command = [sys.executable, RECIPES / "benchmark.py", "--max_new_tokens", "10", "--repeats", "2"]
    for option, name in (("target", "target"), ("draft", "draft"), ("prompts", "prompts.jsonl"), ("json", "out.json")):
        command += [f"--{option}", tmp_path / name]
    command += ["--plot", tmp_path / "out.png", "--tree_depth", "3"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    results = json.loads((tmp_path / "out.json").read_text())
    rows = {(row["temperature"], row["method"]): row for row in results["results"]}
    assert set(rows) == {(t, m) for t in (0.0, 1.0) for m in ("plain", "prompt-lookup", "eagle3")}
    for temperature in (0.0, 1.0):
        row = rows[temperature, "eagle3"]
        assert row["num_identical"] == row["num_prompts"] == 2
        assert len(row["speedups"]) == 2
        counts = {int(length): count for length, count in row["forwards_by_accepted_length"].items()}
        num_tokens = sum(length * count for length, count in counts.items())
        assert row["acceptance_length"] == pytest.approx(num_tokens / sum(counts.values())) and max(counts) <= 4
        assert num_tokens == 2 * 2 * 9
        assert BenchmarkRow.from_dict(row).to_dict() == {**row, "forwards_by_accepted_length": counts}
    assert results["tree"]["tree_depth"] == 3
    assert (tmp_path / "out.png").stat().st_size > 1000
    assert "| 0 | eagle3 |" in result.stdout and "2/2" in result.stdout


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batches(tokenizer, temperature):
    target = make_target("llama")
    draft = make_draft(target, [make_prompt(5)])
    prompts = ["what is 3", "the end", "a, b"]
    plain, ours = run_benchmark(
        target, tokenizer, draft, prompts, ["plain", "eagle3"], [temperature], 10, 2, batch_size=2
    )
    assert ours.num_identical == ours.num_prompts == 3 and len(ours.speedups) == 2
    assert sum(ours.accepted_lengths) <= 2 * 3 * 9


def test_table():
    rows = [
        BenchmarkRow("plain", 0.0, [10.0, 30.0, 20.0], [1.0, 1.0, 1.0], num_prompts=2),
        BenchmarkRow("eagle3", 0.0, [40.0, 50.0, 60.0], [4.0, 1.5, 3.0], 2.5, [2, 3], 2, 2),
    ]
    assert format_table(rows).splitlines()[2:] == [
        "| 0 | plain | 20 | 1.00 | - | - |",
        "| 0 | eagle3 | 50 | 3.00 (1.50-4.00) | 2.50 | 2/2 |",
    ]


def test_acceptance_by_position():
    row = BenchmarkRow("eagle3", 0.0, accepted_lengths=[1, 4, 2, 2])
    assert row.acceptance_by_position == [0.75, 0.25, 0.25]
    assert BenchmarkRow("plain", 0.0).acceptance_by_position == []


def test_unknown_methods(tokenizer):
    target = make_target("llama")
    with pytest.raises(ValueError, match="medusa"):
        run_benchmark(target, tokenizer, None, ["a"], methods=["plain", "medusa"])
    with pytest.raises(ValueError, match="include 'plain'"):
        run_benchmark(target, tokenizer, None, ["a"], methods=["eagle3"])
    with pytest.raises(ValueError, match="one sequence a call"):
        run_benchmark(target, tokenizer, None, ["a", "b"], batch_size=2)
    with pytest.raises(ValueError, match="LlamaForCausalLM is not an EAGLE-3 draft"):
        run_benchmark(target, tokenizer, target, ["a"])


def test_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert read_prompts(path) == ["a", "b"] and read_prompts(path, 1) == ["a"]
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="line 2: expected"):
        read_prompts(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(path)

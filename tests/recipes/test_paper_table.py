"""The paper's table and the scaling curve, on a tiny target."""

import json
import runpy
from collections import Counter

import pytest
import torch
from conftest import RECIPES, make_draft, make_prompt, make_target
from transformers import AutoModelForCausalLM


@pytest.fixture
def files(tmp_path, tokenizer):
    target = make_target("llama")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    texts = [f"the {i} of {i * 7}, and so on to {i * i} in the end of all that is" for i in range(40)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts[:2]))
    return tmp_path


def arguments_of(files, **settings):
    settings = {
        "target": files / "target",
        "dataset": files / "texts.jsonl",
        "prompts": files / "prompts.jsonl",
        "output_dir": files / "out",
        "draft_vocab_size": 24,
        "max_length": 32,
        "max_new_tokens": 8,
        "repeats": 1,
        **settings,
    }
    return [part for name, value in settings.items() for part in (f"--{name}", value)]


def test_the_table(files, run_recipe):
    methods = ["medusa", "eagle", "eagle-2", "p-eagle", "eagle3-no-lookup", "eagle3"]
    command = ("measurements/paper_table.py", *arguments_of(files, tokens=256), "--methods", *methods)
    result = run_recipe(*command)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = (files / "out" / "table.md").read_text().splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in lines if " | " in line}
    assert {"plain", "prompt-lookup", *methods} <= cells.keys()
    for method in methods:
        # Tokens, and the texts at both temperatures.
        assert cells[method][2] == "256" and (cells[method][5], cells[method][8]) == ("2/2", "2/2")
    assert cells["eagle"][1] == cells["eagle-2"][1] != cells["eagle3"][1]
    tree = json.loads((files / "out" / "medusa" / "config.json").read_text())["static_tree"]
    assert (
        max(map(len, tree)) <= 5
        and tree != json.loads((files / "out" / "eagle" / "config.json").read_text())["static_tree"]
    )
    measured = (files / "out" / "results.jsonl").read_text()
    weights = (files / "out" / "medusa" / "model.safetensors").stat().st_mtime_ns

    result = run_recipe(*command)  # nothing is left to do
    assert result.returncode == 0 and (files / "out" / "table.md").read_text().splitlines() == lines
    assert (files / "out" / "results.jsonl").read_text() == measured
    assert (files / "out" / "medusa" / "model.safetensors").stat().st_mtime_ns == weights
    result = run_recipe("measurements/paper_table.py", *arguments_of(files, tokens=512), "--methods", *methods)
    assert result.returncode != 0 and "made with other arguments: tokens was 256 before, 512 after" in result.stderr
    facts = json.loads(measured.splitlines()[0])
    facts["environment"]["threads"] += 1
    (files / "out" / "results.jsonl").write_text("\n".join([json.dumps(facts), *measured.splitlines()[1:]]) + "\n")
    result = run_recipe(*command)
    assert result.returncode != 0 and "was measured elsewhere: threads was" in result.stderr


def test_scaling(files, run_recipe):
    settings = {"rows": 4, "prompt_tokens": 8, "sampled_tokens": 16, "sampled_at_once": 4}
    command = ("measurements/scaling.py", *arguments_of(files, **settings), "--shares", 1, 2)
    result = run_recipe(*command)
    assert result.returncode == 0, result.stderr[-3000:]
    points = json.loads((files / "out" / "points.json").read_text())
    assert len(points) == 2 * 2 * 2 and {point["share"] for point in points} == {1, 2}
    tokens = {(point["method"], point["share"]): point["tokens"] for point in points}
    assert tokens["eagle-2", 2] >= tokens["eagle-2", 1] > 0
    assert (files / "out" / "scaling.png").stat().st_size > 1000
    rows = [json.loads(line) for line in (files / "out" / "samples" / "rows-00000.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 8
    again = run_recipe(*command)
    assert again.returncode == 0 and json.loads((files / "out" / "points.json").read_text()) == points


def test_selection(files, run_recipe):
    target = AutoModelForCausalLM.from_pretrained(files / "target")
    make_draft(target, [make_prompt(5)]).save_pretrained(files / "draft")
    settings = {"pieces": 4, "prompt_tokens": 8, "max_new_tokens": 12, "candidates": 20, "json": files / "out.json"}
    settings |= {"target": files / "target", "drafts": files / "draft", "epochs": 1}
    settings |= {"dataset": files / "texts.jsonl", "prompts": files / "prompts.jsonl"}
    command = ["measurements/selection.py", *(part for name, each in settings.items() for part in (f"--{name}", each))]
    result = run_recipe(*command, "--budgets", 1, 4, 20)
    assert result.returncode == 0, result.stderr[-3000:]
    results = json.loads((files / "out.json").read_text())
    assert {each["T"] for each in results} == {0.0, 1.0}
    for each in results:
        lengths = list(each["lengths"].values())
        assert len(lengths) == 2 and all(way["1"] <= way["4"] <= way["20"] for way in lengths)
        assert len({way["20"] for way in lengths}) == 1 and lengths[0]["20"] > 1  # with all nodes there is no choice


def test_what_is_accepted_with_fewer_nodes(run_recipe, monkeypatch):
    monkeypatch.syspath_prepend(RECIPES / "measurements")
    selection = runpy.run_path(str(RECIPES / "measurements" / "selection.py"))
    # root -> 1 (0.6) -> 3 (0.55), 4 (0.4); root -> 2 (0.3) -> 5 (0.9)
    log_probs = torch.tensor([0.6, 0.3, 0.55, 0.4, 0.9]).log()
    step = selection["Candidates"]([0, 0, 1, 1, 2], log_probs, None, None, None, [2, 5])
    expected = {1: 1, 2: 1, 3: 2, 4: 3, 5: 3}  # in the order 1, 3, 2, 5, 4
    for budget, length in expected.items():
        assert selection["accepted_with"]([step], [log_probs], budget) == length


def test_ablation_by_time(files, run_recipe):
    settings = {"target": files / "target", "dataset": files / "texts.jsonl", "prompts": files / "prompts.jsonl"}
    settings |= {"json": files / "out.json", "minutes": 0.01, "max_length": 160, "draft_vocab_size": 24}
    settings |= {"max_new_tokens": 8, "seeds": 0}
    arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
    result = run_recipe("measurements/ablation.py", *arguments, "--choices", "batch_1", "rollouts")
    assert result.returncode == 0, result.stderr[-3000:]
    results = {run["choice"]: run for run in json.loads((files / "out.json").read_text())}
    assert results["batch_1"]["tokens"] % 160 == 0 == results["rollouts"]["tokens"] % 640
    assert all(run["acceptance_length_0"] >= 1 and run["tokens"] > 0 for run in results.values())
    result = run_recipe("measurements/ablation.py", *arguments, "--choices", "batch_1", "--minutes", 0.02)
    assert result.returncode != 0 and "minutes was 0.01 before, 0.02 after" in result.stderr


def test_what_share_a_vocabulary_is(files, run_recipe, tokenizer):
    target = AutoModelForCausalLM.from_pretrained(files / "target")
    command = ["--target", files / "target", "--dataset", files / "texts.jsonl", "--prompts", files / "prompts.jsonl"]
    sizes = ["--sizes", 8, target.config.vocab_size, "--max_new_tokens", 8]
    result = run_recipe("measurements/vocabulary_coverage.py", *command, *sizes)
    assert result.returncode == 0, result.stderr[-3000:]
    few, all_of_them = result.stdout.strip().splitlines()[-2:]
    texts = [json.loads(line)["text"] for line in (files / "texts.jsonl").read_text().splitlines()]
    counts = Counter(token for text in texts for token in tokenizer(text)["input_ids"])
    share = sum(number for _, number in counts.most_common(8)) / counts.total()
    shares = [column.strip() for column in few.split("|")[2:-1]]
    assert share < 1 and shares[0] == f"{share:.1%}" and all(float(each[:-1]) < 100 for each in shares)
    assert [column.strip() for column in all_of_them.split("|")[2:-1]] == ["100.0%"] * 3


def test_training_as_others_do(files, run_recipe):
    """But for the speculators package, which takes older transformers only."""
    texts = (files / "texts.jsonl").read_text()
    (files / "texts.jsonl").write_text(texts * 3)
    settings = {"target": files / "target", "dataset": files / "texts.jsonl", "prompts": files / "prompts.jsonl"}
    settings |= {"output_dir": files / "out", "minutes": 0.01, "draft_vocab_size": 24, "max_new_tokens": 8}
    command = [
        "measurements/train_against.py",
        *(part for name, each in settings.items() for part in (f"--{name}", each)),
    ]
    command += ["--max_length", 32, "--methods", "hf-eagle3", "specforge"]
    result = run_recipe(*command)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["hf-eagle3", "specforge"] and all(float(row[3]) >= 1 for row in rows)
    draft = json.loads((files / "out" / "specforge" / "config.json").read_text())
    assert not draft["fc_norm"] and not draft["norm_output"]
    again = run_recipe(*command)  # nothing is left to train
    assert [line for line in again.stdout.splitlines() if line.startswith("| ")][2:] == [
        line for line in result.stdout.splitlines() if line.startswith("| ")
    ][2:]

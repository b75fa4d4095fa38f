"""`experiments/paper_table.py` on a tiny target."""

import json


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


def test_the_table(files, run_experiment):
    methods = ["medusa", "eagle", "eagle-2", "p-eagle", "jetspec", "dspark", "eagle3-no-lookup", "eagle3"]
    command = ("paper_table.py", *arguments_of(files, tokens=256), "--methods", *methods)
    result = run_experiment(*command)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = (files / "out" / "table.md").read_text().splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in lines if " | " in line}
    assert {"plain", "prompt-lookup", *methods} <= cells.keys()
    for method in methods:
        # Tokens, and the texts at both temperatures.
        assert cells[method][2] == "256" and (cells[method][5], cells[method][8]) == ("2/2", "2/2")
    assert cells["eagle"][1] == cells["eagle-2"][1] != cells["eagle3"][1]
    configs = [
        json.loads((files / "out" / name / "config.json").read_text())
        for name in ("jetspec", "dspark", "medusa", "eagle")
    ]
    assert [each.get("dflash_config", each).get("causal_head", False) for each in configs[:2]] == [True, False]
    assert [each["block_size"] for each in configs[:2]] == [16, 15] and configs[1]["markov_rank"] == 256
    trees = [each["static_tree"] for each in configs[2:]]
    assert max(map(len, trees[0])) <= 5 and trees[0] != trees[1]
    measured = (files / "out" / "results.jsonl").read_text()
    weights = (files / "out" / "medusa" / "model.safetensors").stat().st_mtime_ns

    result = run_experiment(*command)  # nothing is left to do
    assert result.returncode == 0 and (files / "out" / "table.md").read_text().splitlines() == lines
    assert (files / "out" / "results.jsonl").read_text() == measured
    assert (files / "out" / "medusa" / "model.safetensors").stat().st_mtime_ns == weights
    result = run_experiment("paper_table.py", *arguments_of(files, tokens=512), "--methods", *methods)
    assert result.returncode != 0 and "made with other arguments: tokens was 256 before, 512 after" in result.stderr
    facts = json.loads(measured.splitlines()[0])
    facts["environment"]["threads"] += 1
    (files / "out" / "results.jsonl").write_text("\n".join([json.dumps(facts), *measured.splitlines()[1:]]) + "\n")
    result = run_experiment(*command)
    assert result.returncode != 0 and "was measured elsewhere: threads was" in result.stderr

"""`experiments/train_against.py` on a tiny target."""

import json


def test_training_as_others_do(files, run_experiment):
    """But for the speculators package, which takes older transformers only."""
    texts = (files / "texts.jsonl").read_text()
    (files / "texts.jsonl").write_text(texts * 3)
    settings = {"target": files / "target", "dataset": files / "texts.jsonl", "prompts": files / "prompts.jsonl"}
    settings |= {"output_dir": files / "out", "minutes": 0.01, "draft_vocab_size": 24, "max_new_tokens": 8}
    command = [
        "train_against.py",
        *(part for name, each in settings.items() for part in (f"--{name}", each)),
    ]
    command += ["--max_length", 32, "--methods", "hf-eagle3", "specforge"]
    result = run_experiment(*command)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["hf-eagle3", "specforge"] and all(float(row[3]) >= 1 for row in rows)
    draft = json.loads((files / "out" / "specforge" / "config.json").read_text())
    assert not draft["fc_norm"] and not draft["norm_output"]
    again = run_experiment(*command)  # nothing is left to train
    assert [line for line in again.stdout.splitlines() if line.startswith("| ")][2:] == [
        line for line in result.stdout.splitlines() if line.startswith("| ")
    ][2:]

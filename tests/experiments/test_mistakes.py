"""What the scripts that pages name say of a mistake: a line, without a traceback."""

import pytest


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("training_cost.py", "--tflops 989"),
        ("vocabulary_coverage.py", "--dataset texts.jsonl --prompts prompts.jsonl"),
        ("low_precision.py", "--draft me/draft --prompts prompts.jsonl"),
        ("paper_table.py", "--dataset texts.jsonl --prompts prompts.jsonl --minutes 1 --output_dir out"),
    ],
)
def test_a_mistyped_folder(script, options, files, run_experiment):
    result = run_experiment(script, "--target", files / "targt", *options.split())
    assert result.returncode == 2 and f"there is no folder {files / 'targt'}" in result.stderr


def test_a_mistyped_file(files, run_experiment):
    data = ("--target", files / "target", "--dataset", files / "texts.jsonl")
    result = run_experiment("vocabulary_coverage.py", *data, "--prompts", files / "promts.jsonl", "--sizes", 8)
    assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith("FileNotFoundError: ")

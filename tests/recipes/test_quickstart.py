import json
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import load_script, make_target
from datasets import Dataset, DatasetDict
from forked import run_forked
from messages import assistant, user

from hf_eagle3.evaluation import BenchmarkResults, tasks


FAST = ["--draft_minutes", 0.003, "--min_steps", 1, "--max_new_tokens", 6, "--batch_size", 2, "--max_length", 64]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.filterwarnings("error:`gradient_checkpointing` is deprecated")
def test_from_nothing_to_a_table_and_again(tmp_path, run_recipe, monkeypatch):
    """Barely trained, but everything that `make quickstart` does; the text must be identical however bad the draft."""
    texts = [path.read_text()[:3000] for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    monkeypatch.setattr(tasks, "standard_library", lambda number: (texts, ["import json", "def main():\n    return"]))
    compared = []
    monkeypatch.setattr(subprocess, "run", lambda command: compared.append(run_forked(*command[1:])) or compared[0])
    # In bfloat16 a tree and a single token round differently, and a target that knows nothing is full of near ties.
    arguments = ["--output_dir", tmp_path, "--target_minutes", 0.002, "--no-bf16", *FAST]
    first = run_recipe("quickstart.py", *arguments)
    assert first.returncode == 0, first.stderr[-3000:]
    results = BenchmarkResults.read(tmp_path / "results.jsonl")
    assert [row.num_identical for row in results.rows if row.method == "eagle3"] == [2, 2]
    assert (tmp_path / "plots" / "speedup.png").exists()
    assert json.loads((tmp_path / "target" / "config.json").read_text())["use_cache"]
    # Whose figures these are, and how it was trained: what a card is made of.
    training = json.loads((tmp_path / "draft" / "training.json").read_text())
    assert training["draft_weights"] == results.run["draft_weights"] and training["steps"] > 0
    assert "Training a draft" in first.stdout and "Without the draft the target writes the same." in compared[0].stdout

    # What comes before the comparison, once more.
    monkeypatch.setattr(subprocess, "run", lambda command: subprocess.CompletedProcess(command, 0))
    trained = (tmp_path / "draft" / "model.safetensors").stat().st_mtime_ns
    second = run_recipe("quickstart.py", *arguments)
    assert second.returncode == 0, second.stderr[-3000:]
    assert "Training" not in second.stdout and "Reusing" in second.stdout
    assert "repeats itself at T=0" in second.stdout and "To publish" not in second.stdout
    assert (tmp_path / "draft" / "model.safetensors").stat().st_mtime_ns == trained

    # A draft is of its target: another one, trained in the place of one that was deleted, gets its own.
    shutil.rmtree(tmp_path / "target")
    third = run_recipe("quickstart.py", *arguments[:2], "--seed", 0, *arguments[2:], "--min_steps", 10_000)
    assert third.returncode == 0 and "is older than its target: it is trained anew" in third.stdout
    assert "these figures mean little" in third.stdout and "To publish" not in third.stdout

    # With too few steps, it says which folder to delete; then a draft may be trained otherwise.
    assert f"delete {tmp_path / 'target'} and run" in third.stdout and "--target_minutes" in third.stdout
    shutil.rmtree(tmp_path / "draft")
    fourth = run_recipe("quickstart.py", *arguments, "--draft_minutes", 0.006, "--learning_rate", 1e-3)
    assert fourth.returncode == 0 and "Training a draft" in fourth.stdout and "a small target" not in fourth.stdout

    for changed in (["--target", "somewhere", "--dataset", "else"], ["--draft_form", "classic"]):
        other = run_recipe("quickstart.py", *arguments, *changed)
        assert other.returncode != 0 and "Choose another --output_dir" in other.stderr
        assert changed[1] in other.stderr
    shutil.rmtree(tmp_path / "target")
    shutil.rmtree(tmp_path / "draft")
    known = (tmp_path / "arguments.json").read_text()  # of what another process may be training
    assert run_recipe("quickstart.py", *arguments, "--dataset", "none").returncode == 1
    assert (tmp_path / "arguments.json").read_text() == known


def test_data_is_what_training_takes(tmp_path):
    quickstart = load_script("recipes/quickstart.py")
    lines = [f"line {number}" for number in range(quickstart.NUM_PROMPTS + 5)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    dataset, held_out = quickstart.local_or_hub_dataset(str(tmp_path / "lines.txt"))
    assert list(dataset["text"]) == lines[:5] and list(held_out) == lines[5:]
    rows = [{"text": text} for text in [*lines[:10], "", None, *lines[10:], ""]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset, held_out = quickstart.local_or_hub_dataset(str(tmp_path / "rows.jsonl"))
    assert list(dataset["text"]) == lines[:5] and list(held_out) == lines[5:]
    # Some have no split of the name `train` (ultrachat_200k).
    DatasetDict(train_sft=Dataset.from_dict({"text": lines})).save_to_disk(tmp_path / "split")
    dataset, held_out = quickstart.local_or_hub_dataset(str(tmp_path / "split"), "train_sft[:23]")
    assert list(dataset["text"]) == lines[:3] and list(held_out) == lines[3:23]


def test_what_does_not_exist_is_told_before_training(tmp_path, run_recipe):
    (tmp_path / "texts.jsonl").write_text('{"text": "what is up with that"}\n' * 30)
    arguments = ["--output_dir", tmp_path / "out", "--target", "me/target", "--dataset", tmp_path / "texts.jsonl"]
    result = run_recipe("quickstart.py", *arguments, "--prompts", tmp_path / "none.jsonl")
    assert result.returncode == 1 and "none.jsonl" in result.stderr and not (tmp_path / "out").exists()


def test_conversations_without_an_answer(tmp_path, tokenizer):
    write_prompts = load_script("recipes/quickstart.py").write_prompts
    asked, greeted = [user("what")], [assistant("hello")]
    write_prompts(tmp_path / "prompts.jsonl", [asked, greeted + asked + greeted], tokenizer)
    prompts = [json.loads(line)["messages"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert prompts == [asked, greeted + asked]


def test_given_target_and_chat_data(tmp_path, tokenizer, run_recipe, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command: run_forked(*command[1:]))
    make_target("llama").bfloat16().save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    # Of a run that failed, nothing is left to disagree with.
    failed = run_recipe("quickstart.py", "--output_dir", tmp_path / "out", "--target", "none", "--dataset", "none")
    assert failed.returncode == 1
    chat = [user("what is up"), assistant("this and that")]
    (tmp_path / "chats").mkdir()  # as `regenerate.py` names its files
    (tmp_path / "chats" / "rows-00000.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 60)
    without_target = run_recipe("quickstart.py", "--output_dir", tmp_path / "none", "--dataset", tmp_path / "chats")
    assert without_target.returncode != 0 and "Pass a --target that can chat" in without_target.stderr
    arguments = ("--target", tmp_path / "target", "--dataset", tmp_path / "chats")
    few = ("--no-bf16", *FAST, "--max_new_tokens", 3)
    result = run_recipe("quickstart.py", "--output_dir", tmp_path / "out", *arguments, *few)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "To publish the draft" in result.stdout
    trained = json.loads((tmp_path / "out" / "draft" / "training.json").read_text())["arguments"]
    # Prompts are learned, too, and the default of packing keeps conversations whole.
    assert "assistant_only_loss" not in trained and "packing_strategy" not in trained
    # Few processors compute in bfloat16, in which most targets are stored.
    assert json.loads((tmp_path / "out" / "draft" / "config.json").read_text())["dtype"] == "float32"
    rows = BenchmarkResults.read(tmp_path / "out" / "results.jsonl").rows
    assert all(row.num_identical == 20 for row in rows if "eagle3" in row.method)
    prompts = (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()
    assert len(prompts) == 20 and json.loads(prompts[0]) == {"messages": chat[:1]}

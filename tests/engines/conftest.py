"""
Engines in environments of their own, which take minutes and gigabytes to make: `make test-engines`.
"""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import RECIPES, load_script
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_eagle3 import Eagle3Trainer, Eagle3TrainingArguments
from hf_eagle3.baselines import BASELINES
from hf_eagle3.evaluation.tasks import standard_library


make_environment = load_script("experiments/engines/environments.py").make_environment
collect_ignore_glob = [] if os.environ.get("HF_EAGLE3_ENGINES") else ["test_*.py"]
OUTPUTS = Path(os.environ.get("HF_EAGLE3_ENGINES") or "outputs/engines").absolute()
MINUTES = 1.5


@pytest.fixture(scope="session")
def python_of():
    """`python_of("vllm")` makes an environment, or takes that of an earlier run, and names its interpreter."""

    def make(engine: str) -> str:
        try:
            return make_environment(engine, OUTPUTS)
        except RuntimeError as error:
            warnings.warn(f"NOT TESTED: {error}", stacklevel=2)
            pytest.skip(f"{engine} cannot be installed")

    return make


@pytest.fixture(scope="session")
def models():
    """A folder with a small target, and drafts of all forms that were trained for it for a moment."""
    folder = OUTPUTS / "models"
    texts, target = folder / "texts.jsonl", folder / "classic" / "target"
    folder.mkdir(parents=True, exist_ok=True)
    documents, _ = standard_library(20)
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    on_target = ["--target", target, "--dataset", texts]
    for form, of_target in (("classic", []), ("eagle3.1", on_target), ("p-eagle", on_target)):
        if (folder / form / "draft").exists():
            continue
        command = [sys.executable, RECIPES / "quickstart.py", "--output_dir", folder / form, "--draft_form", form]
        command += ["--no-bf16", "--target_minutes", MINUTES, "--draft_minutes", MINUTES, "--max_new_tokens", 8]
        subprocess.run([str(part) for part in (*command, *of_target)], check=True)
    return folder


@pytest.fixture(scope="session")
def target(models):
    return AutoModelForCausalLM.from_pretrained(models / "classic" / "target", dtype=torch.float32)


@pytest.fixture
def cached_target(models, tmp_path, monkeypatch):
    """The target's name in a cache of the Hub. From 0.33 on, vLLM loads no target from a folder that a draft names."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    commit, repo = "0" * 40, tmp_path / "models--me--target"
    shutil.copytree(models / "classic" / "target", repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    return "me/target"


@pytest.fixture(scope="session")
def block_draft(models, target):
    """`block_draft("dflash")` is a folder with a block draft, trained for a moment so that some of it is accepted."""

    def make(name: str) -> Path:
        folder = models / name
        if not folder.exists():
            torch.manual_seed(0)
            method = BASELINES[name]
            trainer = Eagle3Trainer(
                model=method.make_draft(target, num_hidden_layers=2, block_size=8),
                target_model=target,
                args=Eagle3TrainingArguments(
                    str(models / f"{name}-run"),
                    max_steps=150,
                    max_length=128,
                    learning_rate=5e-3,
                    use_cpu=True,
                    report_to="none",
                    save_strategy="no",
                    **(method.training | {"ttt_steps": 7}),
                ),
                train_dataset=load_dataset("json", data_files=str(models / "texts.jsonl"), split="train"),
                processing_class=AutoTokenizer.from_pretrained(models / "classic" / "target"),
            )
            trainer.train()
            trainer.draft.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def prompts(models):
    tokenizer = AutoTokenizer.from_pretrained(models / "classic" / "target")
    lines = (models / "classic" / "prompts.jsonl").read_text().splitlines()
    return [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines][:12]

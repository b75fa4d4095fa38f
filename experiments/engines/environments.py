"""Makes an environment for each engine, and runs a draft in an engine or in our own loop."""

import hashlib
import json
import os
import subprocess
import tempfile
import time
import venv
from pathlib import Path

import torch

from hf_eagle3.evaluation.drafts import load_draft


HERE = Path(__file__).parent


def make_environment(engine: str, folder: Path) -> str:
    """
    Installs an engine (`"vllm"`, `"llama_cpp"`, `"openvino"` or `"sglang"`) in its own environment in the folder, unless an earlier call
    did. Returns its interpreter.
    """
    requirements = HERE / f"requirements-{engine}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    environment = Path(folder).absolute() / f"environment-{engine}"
    done, python = environment / "installed", environment / "bin" / "python"
    if not done.exists() or done.read_text() != digest:
        venv.create(environment, clear=True, with_pip=True)
        command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", requirements]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"{engine} cannot be installed: {result.stderr[-1000:]}")
        done.write_text(digest)
    return str(python)


def run_engine(python: str, engine: str, threads: int = 1, **job) -> dict:
    """
    Runs `run_ENGINE.py` by the interpreter of its environment. It decodes prompts greedily, one at a time. The `job` has its
    arguments: `target`, `prompts` (lists of token ids), `max_new_tokens`, `draft`, `num_draft_tokens`, `method` (vLLM's name,
    by default `eagle3`) and more. Returns `tokens`, `forwards` (those that verified something) and `seconds`, with one entry
    for each prompt, and the engine's `version`.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "VIRTUAL_ENV"))
    }
    environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file = Path(folder, "job.json"), Path(folder, "result.json")
        job_file.write_text(json.dumps({"threads": threads, **job}, default=str))
        command = [python, HERE / f"run_{engine}.py", job_file, result_file]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
        if not result_file.exists():
            raise RuntimeError(f"{engine} failed: {result.stdout[-2000:]}{result.stderr[-4000:]}")
        return json.loads(result_file.read_text())


def run_transformers(target, prompts, max_new_tokens: int, draft_dir=None, **tree) -> dict:
    """Returns what [`run_engine`] does, by `generate`: plainly, or with a draft and settings of its tree."""
    draft, assistance = None, {}
    if draft_dir is not None:
        draft = load_draft(str(draft_dir), dtype=target.dtype)
        draft.generation_config.update(**tree)
        assistance = {"assistant_model": draft}
    found = {"tokens": [], "forwards": [], "seconds": []}
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for prompt in prompts:
        prompt = torch.tensor([prompt])
        start = time.perf_counter()
        text = target.generate(prompt, attention_mask=torch.ones_like(prompt), **settings, **assistance)
        found["seconds"].append(time.perf_counter() - start)
        found["tokens"].append(text[0, prompt.shape[1] :].tolist())
        forwards = max_new_tokens - 1 if draft is None else len(draft.last_generation.accepted_lengths)
        found["forwards"].append(forwards)
    return found


def tree(depth: int, branching_factor: int = 1, num_nodes: int | None = None) -> dict:
    """Returns the settings of one tree for every step. By default it is a chain."""
    return {
        "tree_policy": "static",
        "assistant_confidence_threshold": 0.0,
        "tree_depth": depth,
        "branching_factor": branching_factor,
        "num_assistant_tokens": num_nodes or depth,
    }

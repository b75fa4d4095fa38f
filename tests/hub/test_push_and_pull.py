"""The real huggingface_hub client against a Hub on this machine: what is pushed can be pulled, without hf_eagle3 installed."""

import os
import subprocess
import sys

import pytest
from conftest import make_draft, make_prompt, make_target
from loopback_hub import VALIDATES_CARDS_HERE, serve_hub, sha_of


REPO = "me/tiny-speculator.eagle3"

PUSH = """
import sys
from hf_eagle3 import Eagle3ForSpeculation

draft = Eagle3ForSpeculation.from_pretrained(sys.argv[1])
for repo in sys.argv[2:]:
    draft.push_to_hub(repo, commit_message="A draft")
"""

PULL = """
import sys
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
PathFinder.find_spec = staticmethod(
    lambda name, path=None, target=None: None if name.split(".")[0] == "hf_eagle3" else find_spec(name, path, target)
)
import torch
from transformers import AutoModel, AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained(sys.argv[1])
prompt = torch.arange(2, 14)[None]
plain = target.generate(prompt, max_new_tokens=16, do_sample=False)
for revision in sys.argv[3:]:
    draft = AutoModel.from_pretrained(sys.argv[2], trust_remote_code=True, revision=revision)
    assert torch.equal(target.generate(prompt, max_new_tokens=16, do_sample=False, assistant_model=draft), plain)
print(type(draft).__module__, draft.last_generation.acceptance_length)
"""


def run(script, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.skipif(not VALIDATES_CARDS_HERE, reason="older huggingface_hub asks huggingface.co about cards")
def test_push_and_pull(tmp_path):
    target = make_target("llama")
    target.save_pretrained(tmp_path / "target")
    make_draft(target, [make_prompt(5)]).save_pretrained(tmp_path / "draft")
    with serve_hub() as hub:
        # The second is someone else's.
        repos = REPO, "you/tiny-speculator.eagle3"
        result = run(PUSH, tmp_path / "draft", *repos, **hub.environment(tmp_path / "pusher"))
        assert result.returncode != 0 and "403" in result.stderr and "You may not" in result.stderr
        assert repos[1] not in hub.repos
        (_, files) = hub.repos[REPO]["main"]  # one commit after the empty one
        local = {
            path.relative_to(tmp_path / "draft").as_posix(): path
            for path in (tmp_path / "draft").rglob("*")
            if path.is_file()
        }
        assert local.keys() <= files.keys() and "custom_generate/generate.py" in files
        assert all(files[name] == path.read_bytes() for name, path in local.items())

        # By its branch, and pinned by its commit.
        revisions = "main", sha_of(files)
        result = run(PULL, tmp_path / "target", REPO, *revisions, **hub.environment(tmp_path / "stranger"))
        assert result.returncode == 0, result.stderr[-3000:]
        assert result.stdout.startswith("transformers_modules.me.")

"""Whose code a measured draft runs."""

import json
import shutil

import pytest
from conftest import make_draft, make_prompt, make_target

from hf_eagle3 import Eagle3ForSpeculation, __version__
from hf_eagle3.checkpoints import export
from hf_eagle3.evaluation.drafts import code_of, load_draft


INSTALLED = f"hf-eagle3 {__version__}"
# At the end of the code that was saved with a draft.
TELLS = """

def _telling(decode):
    def assisted_decoding(self, *args, **kwargs):
        print("the saved code decodes")
        return decode(self, *args, **kwargs)
    return assisted_decoding


Eagle3ForSpeculation.assisted_decoding = _telling(Eagle3ForSpeculation.assisted_decoding)
"""


@pytest.fixture(scope="module")
def pairing(tmp_path_factory, tokenizer):
    """A folder with a target, prompts, and a draft whose saved code says that it runs."""
    folder, target = tmp_path_factory.mktemp("pairing"), make_target("llama")
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    make_draft(target, [make_prompt(5)]).save_pretrained(folder / "my-draft")
    with open(folder / "my-draft" / "modeling_eagle3.py", "a") as file:
        file.write(TELLS)
    (folder / "prompts.jsonl").write_text('{"prompt": "what is 3"}\n')
    return folder


def arguments(pairing, *others):
    return ["--target", pairing / "target", "--draft", pairing / "my-draft", "--max_new_tokens", 6, *others]


@pytest.mark.parametrize(
    ("script", "few"),
    [
        ("recipes/benchmark.py", "--methods plain eagle3 --temperatures 0 --repeats 1"),
        ("experiments/low_precision.py", "--dtypes float32"),
        (
            "experiments/tree_policy.py",
            "--batch_sizes 1 --temperatures 0 --depths 1 --branching_factors 2 --budgets 4 --finalists 1 --repeats 1",
        ),
    ],
)
def test_the_installed_code_runs_unless_the_saved_is_asked_for(script, few, pairing, tmp_path, run_script):
    command = [*arguments(pairing, "--prompts", pairing / "prompts.jsonl"), *few.split()]
    codes = {}
    for name, options in (("default", []), ("installed", ["--code", "installed"]), ("saved", ["--code", "saved"])):
        file = tmp_path / name
        result = run_script(script, *command, *options, "--json", file)
        assert result.returncode == 0, result.stderr[-3000:]
        assert ("the saved code decodes" in result.stdout) == (name == "saved")
        text = file.read_text()
        run = json.loads(text.splitlines()[0] if script == "recipes/benchmark.py" else text)
        codes[name] = run["environment"]["draft_code"]
        assert f"'draft_code': '{codes[name]}'" in result.stdout
    assert codes["default"] == codes["installed"] == INSTALLED
    assert codes["saved"].startswith("saved with the draft, in my-draft (")
    if script == "recipes/benchmark.py":
        result = run_script(script, "--compare", tmp_path / "installed", tmp_path / "saved")
        assert f"environment: draft_code was '{INSTALLED}' before, '{codes['saved']}' after" in result.stdout
        # Nor does a run of one go on with the other.
        result = run_script(script, *command, "--code", "saved", "--json", tmp_path / "installed")
        assert result.returncode == 1 and "code was 'installed' before, 'saved' after" in result.stderr


def test_saved_code_is_told_apart_by_its_digest(pairing, tmp_path):
    """In folders of other names: a process loads the code of only one folder of a name."""
    Eagle3ForSpeculation.from_pretrained(pairing / "my-draft").save_pretrained(tmp_path / "one")  # not what it tells
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    digests = [
        code_of(load_draft(str(folder), "saved")).removeprefix(f"saved with the draft, in {folder.name} ")
        for folder in (pairing / "my-draft", tmp_path / "one", tmp_path / "two")
    ]
    assert digests[0] != digests[1] == digests[2]


def test_drafts_without_code(pairing, tmp_path):
    export(Eagle3ForSpeculation.from_pretrained(pairing / "my-draft"), tmp_path / "sglang", "sglang")
    assert code_of(load_draft(str(tmp_path / "sglang"))) == INSTALLED
    with pytest.raises(ValueError, match="No code was saved with .*sglang"):
        load_draft(str(tmp_path / "sglang"), "saved")
    with pytest.raises(ValueError, match="No code was saved with .*target"):
        load_draft(str(pairing / "target"), "saved")

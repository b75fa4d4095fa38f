"""A saved draft must work where nothing but torch and transformers is installed."""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import EXPERIMENTS, make_baseline, make_draft, make_prompt, make_target
from loopback_hub import sha_of

import hf_eagle3


NAMES = (
    "accept assistant attention auto cache configuration decoding devices draft_model drafter lookup modeling "
    "outputs policy target text tree verify"
)
TRAVELLING = tuple(f"{name}_eagle3.py" for name in NAMES.split())
SOURCE = Path(hf_eagle3.__file__).parent / "remote_code"

SCRIPT = """
import json, sys
from importlib.machinery import PathFinder

BLOCKED = ("hf_eagle3", "trl", "peft", "datasets", "accelerate", "evaluate")
find_spec = PathFinder.find_spec

def find_unless_blocked(name, path=None, target=None):
    return None if name.split(".")[0] in BLOCKED else find_spec(name, path, target)

PathFinder.find_spec = staticmethod(find_unless_blocked)
import torch
from transformers import AutoModel, AutoModelForCausalLM

target_dir, draft_dir, second_dir, repo, commit, *others = sys.argv[1:]
target = AutoModelForCausalLM.from_pretrained(target_dir)
prompt = torch.tensor([json.loads(sys.stdin.read())])
kwargs = {"max_new_tokens": 24, "do_sample": False}
expected = target.generate(prompt, **kwargs)
for auto_class, folder in ((AutoModel, draft_dir), (AutoModelForCausalLM, draft_dir), (AutoModel, second_dir)):
    draft = auto_class.from_pretrained(folder, trust_remote_code=True)
    assert type(draft).__name__ == "Eagle3ForSpeculation" and type(draft).__module__.startswith("transformers_modules")
    actual = target.generate(prompt, assistant_model=draft, **kwargs)
    assert torch.equal(actual, expected) and max(draft.last_generation.accepted_lengths) > 1
    if folder == draft_dir:
        draft.save_pretrained(second_dir)

class Streamer:
    def __init__(self):
        self.tokens, self.is_ended = [], False
    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()
    def end(self):
        self.is_ended = True

draft = AutoModel.from_pretrained(draft_dir, trust_remote_code=True)
text = target.generate(prompt, streamer=(streamer := Streamer()), assistant_model=draft, **kwargs)
assert torch.equal(text, expected)
assert streamer.tokens == text[0].tolist() and streamer.is_ended
assert draft.last_generation.new_tokens == 24
try:
    draft.generate(torch.tensor([[5]]), assistant_model=target)
except NotImplementedError as error:
    assert "does not generate text by itself" in str(error)
else:
    assert False

def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (ValueError, ImportError) as error:
        return str(error)

load = type(draft).from_pretrained
assert "is not in the speculators format. `pip install hf-eagle3` reads others" in error_of(load, target_dir)
assert "If another project saved it, `pip install hf-eagle3`" in error_of(load, draft_dir, fc_norm=False)
assert "Pairing needs hf_eagle3: pip install 'hf-eagle3'" in error_of(draft.pair_with, target)

for folder in others:
    other = AutoModel.from_pretrained(folder, trust_remote_code=True)
    print(folder.split("/")[-2], getattr(type(other), "OF", "a"))
import huggingface_hub.constants

huggingface_hub.constants.HF_HUB_OFFLINE = False
for revision in ("main", commit):
    pulled = AutoModel.from_pretrained(repo, trust_remote_code=True, revision=revision)
    assert type(pulled).__module__.startswith("transformers_modules.me.")
    assert torch.equal(target.generate(prompt, assistant_model=pulled, **kwargs), expected)
from transformers.pipelines.base import load_assistant_model

target.config.pad_token_id = 7  # not what the draft was saved with
assert load_assistant_model(target, draft, None) == (draft, None)
print(json.dumps(sorted(name for name in BLOCKED if name in sys.modules)))
"""


def code_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*.py")}


def test_saved_draft_generates_without_the_package(tmp_path, hub):
    """
    As it is, as it is saved again by its own code, and as it was pushed. Of several folders of one
    name each runs its own code. All in one process, because importing takes longer.
    """
    target, prompt = make_target("gemma3"), make_prompt(20)
    draft = make_draft(target, [prompt], num_tokens=8)
    target.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    for name in "ab":
        draft.save_pretrained(tmp_path / name / "draft")
    changed = tmp_path / "b" / "draft" / "draft_model_eagle3.py"
    changed.write_text(changed.read_text().replace("    config_class =", '    OF = "b"\n    config_class ='))
    draft.push_to_hub("me/tiny-speculator.eagle3")
    (_, pushed) = hub.repos["me/tiny-speculator.eagle3"]["main"]  # one commit after the empty one
    local = {str(path.relative_to(tmp_path / "draft")): path for path in (tmp_path / "draft").rglob("*.*")}
    assert local.keys() <= pushed.keys() and all(pushed[name] == path.read_bytes() for name, path in local.items())
    environment = {**os.environ, **hub.environment(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    folders = [str(tmp_path / name) for name in ("target", "draft", "second", "a/draft", "b/draft", "a/draft")]
    folders[3:3] = ["me/tiny-speculator.eagle3", sha_of(pushed)]
    command = [sys.executable, "-c", SCRIPT, *folders]
    prompt = json.dumps(prompt[0].tolist())
    result = subprocess.run(command, input=prompt, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    *of_folders, loaded = result.stdout.splitlines()
    assert of_folders[-3:] == ["a a", "b b", "a a"] and json.loads(loaded) == []
    assert code_in(tmp_path / "draft") == code_in(tmp_path / "second") == set(TRAVELLING)
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert config == json.loads((tmp_path / "draft" / "config.json").read_text())


def test_the_travelling_code_is_saved(tmp_path, draft):
    draft.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == set(TRAVELLING)
    for name in TRAVELLING:
        assert (tmp_path / name).read_text() == (SOURCE / name).read_text()


@pytest.mark.parametrize("name", TRAVELLING)
def test_the_travelling_code_imports_only_torch_and_transformers(name):
    for node in ast.walk(ast.parse((SOURCE / name).read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1 and f"{node.module}.py" in TRAVELLING
            continue
        else:
            continue
        for module in modules:
            top = module.split(".")[0]
            assert top in ("torch", "transformers", "huggingface_hub") or top in sys.stdlib_module_names, module


@pytest.mark.parametrize("name", TRAVELLING)
def test_what_it_logs_is_shown_and_silenced_with_transformers(name):
    module = importlib.import_module(f"hf_eagle3.remote_code.{name.removesuffix('.py')}")
    assert not hasattr(module, "logger") or module.logger.name == "transformers.eagle3"


# What the code that comes with a draft uses beyond torch and transformers, and what transformers requires. None of it
# reaches out of the process.
STANDARD_LIBRARY = (
    "base64 contextlib bisect itertools collections.abc copy dataclasses difflib functools hashlib "
    "huggingface_hub.dataclasses huggingface_hub.errors importlib importlib.util inspect json math os pathlib "
    "statistics threading time types typing weakref"
)
# What runs when it is imported, besides definitions and constants.
AT_IMPORT = {
    ("configuration_eagle3.py", "Eagle3Config.register_for_auto_class()"),
    ("modeling_eagle3.py", "Eagle3ForSpeculation.register_for_auto_class('AutoModel')"),
    ("assistant_eagle3.py", "install_generation_hook()"),
}
# Calls that could reach files, other code or processes, by the function that they are in.
REACHING = {
    # Reads what transformers reads, before it does.
    ("draft_model_eagle3.py", "read_config", "cached_file"),
    ("draft_model_eagle3.py", "read_config", "loads"),
    ("auto_eagle3.py", "installed_module", "import_module"),  # the package itself
    ("auto_eagle3.py", "newer_package", "import_module"),  # likewise
}


SUSPECTS = (
    "open exec eval compile __import__ import_module system popen Popen run check_output write_text "
    "write_bytes mkdir unlink rmtree rename urlopen urlretrieve request connect load loads post download "
    "hf_hub_download snapshot_download cached_file"
)


def test_what_the_travelling_code_touches():
    imported, at_import, reaching = set(), set(), set()
    for name in TRAVELLING:
        tree = ast.parse((SOURCE / name).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module)
            elif isinstance(node, (ast.FunctionDef, ast.Lambda)):
                calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
                names = {getattr(call, "attr", getattr(call, "id", None)) for call in calls}
                reaching |= {(name, getattr(node, "name", "lambda"), called) for called in names & {*SUSPECTS.split()}}
        at_import |= {
            (name, ast.unparse(node))
            for node in tree.body
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        }
        kinds = {type(node).__name__ for node in tree.body}
        assert kinds <= {"Import", "ImportFrom", "Assign", "AnnAssign", "ClassDef", "FunctionDef", "Expr"}, kinds
    assert {module for module in imported if module.split(".")[0] not in ("torch", "transformers")} == {
        *STANDARD_LIBRARY.split()
    }
    assert at_import == AT_IMPORT
    assert reaching == REACHING


IMPORT = """
import sys
sys.modules |= dict.fromkeys(["trl", "datasets", "peft", "accelerate", "evaluate", "aiohttp", "matplotlib"])
import torch
from transformers import AutoConfig, AutoModel, AttentionInterface, GenerationMixin, PreTrainedConfig, PreTrainedModel

WATCHED = (GenerationMixin, PreTrainedModel, PreTrainedConfig, AutoModel, AutoConfig, torch.nn.Module)
before = [dict(vars(thing)) for thing in WATCHED]
attentions = dict(AttentionInterface())
reached = []

def audit(event, arguments):
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    kinds = ("socket", "subprocess", "shutil", "urllib")
    acts = ("os.system", "os.exec", "os.fork", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.putenv", "os.chmod")
    if writes or event.split(".")[0] in kinds or event in acts:
        reached.append((event, str(arguments)))

def changed():
    return sorted(
        f"{thing.__name__}.{name}"
        for thing, was in zip(WATCHED, before)
        for name, value in vars(thing).items()
        if was.get(name) is not value
    ) + [name for name, value in AttentionInterface().items() if attentions.get(name) is not value]

def loaded(*names):
    return [name for name in names if name in sys.modules]

folder, experiments = sys.argv[1:]
sys.addaudithook(audit)
import hf_eagle3

assert loaded("hf_eagle3.remote_code", "hf_eagle3.checkpoints") == []
from hf_eagle3 import AssistantMixin

for_assistants = changed()  # without any draft
from hf_eagle3 import Eagle3ForSpeculation

assert changed() == for_assistants
assert loaded("hf_eagle3.training") == []
print(reached, changed())
print(type(AutoModel.from_pretrained(folder)).__name__)
try:
    hf_eagle3.Eagle3Trainer
except ModuleNotFoundError as error:
    print(error)
sys.path.insert(0, experiments)
import gpu_correctness, gpu_steps
"""


def test_importing_it_touches_these_methods_and_needs_torch_and_transformers_alone(tmp_path):
    """As do drafts of other methods, and two parts of the report on GPUs. What training needs is named."""
    make_baseline("jetspec", make_target("llama")).save_pretrained(tmp_path)
    command = [sys.executable, "-c", IMPORT, str(tmp_path), str(EXPERIMENTS)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    touched, draft, missing = result.stdout.strip().splitlines()[-3:]
    assert draft == "DFlashForSpeculation" and "pip install 'hf-eagle3[train]'" in missing
    assert touched == (
        "[] ['AutoConfig.from_pretrained', 'GenerationMixin._assisted_decoding', "
        "'GenerationMixin._validate_generation_mode', 'GenerationMixin.generate', 'GenerationMixin.generate_batch', 'sdpa']"
    )

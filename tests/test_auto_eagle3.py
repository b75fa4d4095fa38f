"""Who reads a draft, and what that code needs of transformers."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import transformers
from conftest import assert_same_text, make_prompt
from packaging.version import Version
from transformers import AutoConfig, AutoModel, GenerationConfig, GenerationMixin, PreTrainedModel

import hf_eagle3
from hf_eagle3 import Eagle3ForSpeculation
from hf_eagle3.remote_code.auto_eagle3 import NEEDS, TESTED, VERSION, advice, check_needs


SOURCE = Path(hf_eagle3.__file__).parent / "remote_code"
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


# What the code needs of transformers ------------------------------------------------------------------------------


def is_set(node) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def private_names() -> set[str]:
    """Attributes with an underscore that the travelling code reads, and neither it nor Python nor torch has."""
    used, own = set(), {"_replace"}  # of named tuples
    for path in SOURCE.glob("*_eagle3.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
                used.add(getattr(node.args[1], "value", ""))
            elif isinstance(node, ast.ClassDef):
                inside = list(ast.walk(node))
                own |= {each.name for each in inside if isinstance(each, ast.FunctionDef)}
                own |= {each.attr for each in inside if ast.unparse(each).startswith("self._") and is_set(each)}
    used |= {"_assisted_decoding", "_validate_generation_mode"}  # by the hook, by name
    of_accelerate = {"_hf_hook"}
    of_torch = {"_buffers", "_compiled_call_impl", "_dynamo", "_forward_hooks", "_forward_pre_hooks", "_version"}
    of_torch |= {
        "_cuda_clearCublasWorkspaces",
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_torchdynamo_orig_callable",
    }
    private = {name for name in used if isinstance(name, str) and re.match("_[a-z]", name)}
    return private - own - of_torch - of_accelerate


# Set by transformers on objects. Each is read with a default, or set before we read it.
OF_OBJECTS = {"_is_user_defined", "_pad_token_tensor", "_previous_max_cache_length"}


def test_every_private_name_is_listed_and_every_listed_one_is_used_and_there():
    listed = {name.partition(".")[2] for name in NEEDS}
    assert {name for name in listed if name.startswith("_")} == private_names() - OF_OBJECTS
    assert all(name in inspect.getsource(GenerationMixin) for name in OF_OBJECTS)
    check_needs()


def test_the_versions_are_those_of_the_package():
    assert hf_eagle3.__version__ == VERSION
    assert f'"transformers>={TESTED[0]}"' in PYPROJECT.read_text()
    newest, here = Version(TESTED[1]), Version(transformers.__version__)
    assert here.is_prerelease or here.release[:2] <= newest.release, "Once all tests pass with it, add it to `TESTED`."


MISSING = {
    "method": (GenerationMixin, "_prefill"),
    "static": (GenerationConfig, "_get_default_generation_params"),
    "public": (PreTrainedModel, "get_compiled_call"),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_named_when_a_draft_is_loaded(case, draft, tmp_path, monkeypatch):
    draft.save_pretrained(tmp_path)
    owner, name = MISSING[case]
    monkeypatch.delattr(owner, name)
    with pytest.raises(ImportError) as error:
        Eagle3ForSpeculation.from_pretrained(tmp_path)
    monkeypatch.delattr(transformers, owner.__name__)  # transformers 4 has no `PreTrainedConfig`
    with pytest.raises(ImportError, match="has no "):
        check_needs()
    message = str(error.value)
    assert f"transformers {transformers.__version__} has no {owner.__name__}.{name}. " in message
    assert f"transformers {TESTED[0]} to {TESTED[1]}. Install such a transformers, or a newer hf-eagle3" in message


def test_an_old_transformers_is_to_be_updated(monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.12.1")
    assert advice().endswith(f"Update it: `pip install -U 'transformers>={TESTED[0]}'`.")


# Who reads a draft ------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path, draft):
    """A draft with its copy of the code."""
    draft.save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def make_older(folder, **files):
    """As if another version had saved it, with these changes of its files."""
    code = folder / "auto_eagle3.py"
    code.write_text(code.read_text().replace(f'VERSION = "{VERSION}"', 'VERSION = "0.0.9"'))
    for name, (old, new) in files.items():
        path = folder / f"{name}_eagle3.py"
        path.write_text(path.read_text().replace(old, new, 1))


def is_copy(thing) -> bool:
    return type(thing).__module__.startswith("transformers_modules.")


GONE = {"cache": ("    Cache,\n", "    Cache,\n    ThatWasRenamed,\n")}
NEEDS_MORE = {"auto": ("NEEDS = (\n", 'NEEDS = (\n    "GenerationMixin._that_was_removed",\n')}


def load(folder, auto_class=AutoModel):
    return auto_class.from_pretrained(folder, trust_remote_code=True)


def test_a_copy_of_the_same_version_reads_its_draft(saved, warned):
    assert is_copy(load(saved)) and is_copy(load(saved, AutoConfig))
    assert not [message for message in warned if "reads this draft" in message]


def test_a_copy_forgets_its_statistics(saved, target):
    """Whatever copy of the code has the hook."""
    draft, prompt = load(saved), make_prompt(9)
    target.generate(prompt, assistant_model=draft, max_new_tokens=4)
    assert is_copy(draft) and draft.last_generation.new_tokens == 4
    target.generate(prompt, assistant_model=draft, max_new_tokens=4, num_beams=2)
    assert draft.last_generation is None


@pytest.mark.parametrize(
    ("changes", "auto_class"),
    [({}, AutoModel), ({}, transformers.AutoModelForCausalLM), (GONE, AutoModel), (NEEDS_MORE, AutoModel)],
    ids=["works", "works for a causal LM", "import", "needs"],
)
def test_a_newer_package_takes_over(saved, warned, changes, auto_class, target, monkeypatch):
    """Whatever transformers has lost that the copy needs; and its code is saved from then on."""
    make_older(saved, **changes)
    version = f"1.{len(auto_class.__name__)}.{len(str(changes))}"  # what was said is not said again
    monkeypatch.setattr(hf_eagle3, "__version__", version)
    for _ in range(2):
        draft = load(saved, auto_class)  # and says so once
        assert type(draft) is Eagle3ForSpeculation and type(draft.config) is type(draft).config_class
    assert [f"hf-eagle3 {version}" in message for message in warned] == [True]
    assert_same_text(target, draft, make_prompt(9))
    draft.save_pretrained(saved.parent / "again")
    assert (saved.parent / "again" / "auto_eagle3.py").read_text() == (SOURCE / "auto_eagle3.py").read_text()


@pytest.mark.parametrize("changes", [{}, GONE, NEEDS_MORE], ids=["works", "import", "needs"])
def test_the_copy_runs_where_the_package_is_older(saved, warned, changes, monkeypatch):
    """Then what the copy lacks is an error."""
    make_older(saved, **changes)
    monkeypatch.setattr(hf_eagle3, "__version__", "0.0.8")
    if not changes:
        draft = load(saved)
        assert is_copy(draft) and is_copy(draft.config) and not warned
        return
    what = "ThatWasRenamed" if changes is GONE else "_that_was_removed"
    with pytest.raises(ImportError, match=f"(?s){what}.*5.17 to .*or a newer hf-eagle3"):
        load(saved)

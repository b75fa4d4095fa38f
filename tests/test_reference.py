"""The API reference: what is public is in it, with all its arguments, and nothing that does not exist."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import pydoc
import re
import typing
from pathlib import Path

import pytest
import yaml

import hf_eagle3


pytest.importorskip("trl")

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference"

_spec = importlib.util.spec_from_file_location("docstrings", PAGES / "docstrings.py")
docstrings = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docstrings)

DOCUMENTED = docstrings.documented()
NAMES = [name for name in DOCUMENTED if not name.startswith("recipes/")]


def is_record(cls) -> bool:
    return dataclasses.is_dataclass(cls) or issubclass(cls, tuple)


def own_fields(cls) -> list[str]:
    """Those that are not inherited: fields of another class are described there."""
    hints = inspect.get_annotations(cls)
    return [name for name, hint in hints.items() if name[0] != "_" and typing.get_origin(hint) is not typing.ClassVar]


def parameters(function) -> dict[str, inspect.Parameter]:
    return {name: each for name, each in inspect.signature(function).parameters.items() if name not in ("self", "cls")}


def callables() -> dict[str, object]:
    found = {}
    for name in NAMES:
        thing = pydoc.locate(name)
        if callable(thing) and all(hasattr(thing, member) for member in DOCUMENTED[name]):
            found[name] = thing
            found |= {f"{name}.{member}": getattr(thing, member) for member in DOCUMENTED[name]}
    return found


CALLABLES = callables()


def test_everything_public_is_in_the_reference():
    packages = [module.name for module in pkgutil.iter_modules(hf_eagle3.__path__) if module.ispkg]
    packages.remove("remote_code")  # whose public names the package itself has
    shown = [pydoc.locate(name) for name in NAMES]
    for module in ("hf_eagle3", *(f"hf_eagle3.{name}" for name in packages)):
        public = importlib.import_module(module)
        for name in public.__all__:
            thing = getattr(public, name)
            by_another_name = callable(thing) and any(thing is other for other in shown)
            assert f"{module}.{name}" in DOCUMENTED or by_another_name, f"{module}.{name} is on no page"


def test_every_recipe_is_in_the_reference():
    commands = {name for name in DOCUMENTED if name.startswith("recipes/")}
    assert commands == {f"recipes/{path.name}" for path in (ROOT / "recipes").glob("*.py")}


@pytest.mark.parametrize(
    "path", [*(ROOT / "recipes").glob("*.py"), *(ROOT / "experiments").rglob("*.py")], ids=lambda path: path.name
)
def test_long_commands_keep_their_lines(path):
    """In a docstring that is not raw, a backslash joins two lines, and `--help` shows the gap between them."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert not re.search(r"\S {4,}-", docstring)


@pytest.mark.parametrize("name", NAMES)
def test_pages_name_what_exists(name):
    thing = pydoc.locate(name)
    assert thing is not None, f"There is no {name}"
    for member in DOCUMENTED[name]:
        assert inspect.getdoc(inspect.getattr_static(thing, member)), f"{name}.{member}"


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_members_of_a_base_class_are_shown(page):
    """mkdocstrings leaves them out, even if they are listed, unless a block asks for inherited members."""
    for name, options in re.findall(r"^::: (hf_eagle3\S+)\n((?: {4}.*\n?)*)", page.read_text(encoding="utf-8"), re.M):
        options = (yaml.safe_load(options) or {}).get("options", {})
        own = vars(thing) if inspect.isclass(thing := pydoc.locate(name)) else dir(thing)
        assert options.get("inherited_members") or {*options.get("members", ())} <= {*own}, name


@pytest.mark.parametrize(("name", "thing"), CALLABLES.items(), ids=lambda each: each if isinstance(each, str) else "")
def test_all_arguments_are_described(name, thing):
    if isinstance(thing, property):
        return
    assert thing.__doc__, f"{name} has no docstring"
    described = docstrings.arguments(thing.__doc__)
    if inspect.isclass(thing) and is_record(thing):
        expected, known = own_fields(thing), {*parameters(thing)}
    else:
        expected = known = {*parameters(thing)}
    takes_others = any(each.kind is each.VAR_KEYWORD for each in parameters(thing).values())
    assert len(described) == len({*described})
    named = {*re.findall(r"`(\w+)`", thing.__doc__)}  # in the text, where that says all
    assert not {*expected} - {*described} - named, f"Args of {name} lack some"
    assert takes_others or not {*described} - known, f"Args of {name} have some that do not exist"


@pytest.mark.parametrize(("name", "thing"), CALLABLES.items(), ids=lambda each: each if isinstance(each, str) else "")
def test_references_lead_somewhere(name, thing):
    for _, target in docstrings.REFERENCE.findall(inspect.getdoc(thing)):
        if docstrings.find(target, name, DOCUMENTED) is None:
            assert pydoc.locate(target) is not None, f"{name} names {target}"


def test_docstrings_as_markdown():
    docstring = """What it does, by [`Config`] and [`~module.Config.read`].

Args:
    first (`dict[str, int]`, *optional*, defaults to `{"a: b": 1}`): One
        and more: of it.
    second (`int` (or `(1, 2)`)), third (*optional*):
        Two. See [`~transformers.Trainer.train`].
    fourth

Returns:
    `tuple[int, int]`: Both.

Raises:
    ValueError: if not.
"""
    known = {"package.Config": ["read"], "package.Other": ["read"]}
    markdown = docstrings.to_markdown(docstring, lambda name: docstrings.find(name, "package.function", known))
    assert (
        markdown
        == """What it does, by [`Config`][package.Config] and [`read`][package.Config.read].

**Arguments**

- **`first`** (`dict[str, int]`, *optional*, defaults to `{"a: b": 1}`): One and more: of it.
- **`second`** (`int` (or `(1, 2)`)), **`third`** (*optional*): Two. See `transformers.Trainer.train`.
- **`fourth`**

**Returns**

`tuple[int, int]`: Both.

**Raises**

- `ValueError`: if not."""
    )
    assert docstrings.arguments(docstring) == ["first", "second", "third", "fourth"]
    with pytest.raises(KeyError):
        docstrings.find("Missing", "package.function", known)
    # Of two members of a name, that of one's own class.
    assert docstrings.find("read", "package.Other.write", known) == "package.Other.read"


def test_the_site_has_all_pages():
    def pages(entry):
        entries = entry.values() if isinstance(entry, dict) else entry
        return [entry] if isinstance(entry, str) else [page for each in entries for page in pages(each)]

    shown = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(shown) == sorted(there | {"index.md", "contributing.md", "changelog.md", "log.md", "security.md"})

"""
The commands of docs/jobs.md, by the parsers of `hf` and of the recipes; those of other pages and of the scripts' help; and
what the heads of recipes ask for.
"""

import argparse
import ast
import functools
import re
import runpy
import shlex
import sys
from importlib.metadata import requires
from pathlib import Path

import click
import pytest
from accelerate.commands.launch import launch_command_parser
from conftest import RECIPES

import hf_eagle3


pytest.importorskip("trl")

ROOT = RECIPES.parent
SOURCES = ROOT / "src"
PAGE = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(line) for block in BLOCKS for line in block.replace("\\\n", "").splitlines()]
HF = [words for words in COMMANDS if words[0] == "hf"]


class Parsed(Exception):
    pass


def parse_hf(words: list[str]) -> dict:
    """What `hf` takes a command for; nothing is run, and nothing sent."""
    from huggingface_hub.cli.hf import app as command

    words = words[1:]
    while isinstance(command, click.Group):
        name, *words = words
        command = command.get_command(click.Context(command), name)
    return command.make_context(name, words).params


def check_recipe(script: str, arguments: list[str], monkeypatch) -> None:
    """Parses arguments by the parser of a recipe, which has each of these options, and goes no further."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_stop(self, *args, **kwargs):
        _, unknown = parse(self, *args, **kwargs)
        options = {word for word in arguments if word.startswith("--")} - {"--config"}
        raise Parsed(unknown, options - {*self._option_string_actions})

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend((ROOT / script).parent)
    with pytest.raises(Parsed) as parsed:
        runpy.run_path(script, run_name="__main__")
    assert parsed.value.args == ([], set())


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:4]))
def test_commands(words, monkeypatch):
    if words[0] == "pip":
        return  # which the packaging of this repository decides
    if words[0] == "python":
        return check_recipe(words[1], words[2:], monkeypatch)
    sent = parse_hf(words)
    if words[:3] == ["hf", "jobs", "run"]:
        folder, mounted = "./recipes", "/recipes"
        assert sent["command"][:2] == ("uv", "run") and f"{folder}:{mounted}" in sent["volume"]
        _, _, script, *arguments = sent["command"]
        return check_recipe(script.replace(mounted, folder), arguments, monkeypatch)
    if words[:4] != ["hf", "jobs", "uv", "run"]:
        return
    script, arguments = sent["script"], sent["script_args"]
    assert [script, *arguments] == words[words.index("--") + 1 :]  # `hf` took nothing of it for itself
    assert sent["timeout"] and (*sent["secrets"], *sent["env"]) == ("HF_TOKEN", "UV_FIND_LINKS=/wheels")
    assert "./dist:/wheels" in sent["volume"]
    if script == "accelerate":
        assert arguments[0] == "launch" and [*sent["with_"]] == ["hf-eagle3[train]"]
        launch = launch_command_parser().parse_args(arguments[1:])
        assert (ROOT / launch.config_file).is_file()
        script, arguments = launch.training_script, launch.training_script_args
    check_recipe(script, arguments, monkeypatch)


PLACES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "jobs.md"),
    *(path for folder in ("recipes", "experiments") for path in sorted((ROOT / folder).rglob("*.py"))),
]
RUNS = re.compile(
    r"^ *(?:\w+=\S+ )*(?:\S*python|accelerate launch(?: --\w+ \S+)*) ((?:recipes|experiments)/.*)$", re.M
)


def scripts_run_by(path: Path) -> list[list[str]]:
    """The scripts that a page or the docstring of a script runs, each with its arguments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        text = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    return [shlex.split(command, comments=True) for command in RUNS.findall(text.replace("\\\n", ""))]


@pytest.mark.parametrize(
    ("place", "words"),
    [(path, words) for path in PLACES for words in scripts_run_by(path)],
    ids=lambda each: each.name if isinstance(each, Path) else " ".join(each[:3]),
)
def test_commands_of_pages_and_help(place, words, monkeypatch):
    monkeypatch.setattr("hf_eagle3.scripts.folder_or_hub_id", str)  # such as outputs/quickstart/draft
    script, *arguments = (word for word in words if word != "...")
    if "chat.yaml" in arguments:  # which the page itself has
        arguments = []
    check_recipe(script, arguments, monkeypatch)


def test_there_are_commands():
    assert {path.name for path in PLACES if scripts_run_by(path)} >= {"README.md", "training.md", "train.py"}
    assert len(HF) == 6 and sum(words[:4] == ["hf", "jobs", "uv", "run"] for words in HF) == 3


def test_scripts_that_travel_alone_import_no_neighbour():
    alone = {part for words in HF if words[2] == "uv" for part in words if part.startswith("recipes/")}
    for script in (part for part in alone if part.endswith(".py")):
        neighbours = {path.stem for path in (ROOT / script).parent.glob("*.py")}
        assert not neighbours & {module.split(".")[0] for module in imports(ROOT / script)}, script


@functools.cache
def imports(path: Path) -> set[str]:
    """The modules that a file imports when it is loaded, and the names that it takes from them."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(SOURCES).parts[: -node.level] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def all_imports(path: Path) -> set[str]:
    """The same, with what our own files among them import."""
    found, files = set(), [path]
    while files:
        for module in imports(files.pop()) - found:
            found.add(module)
            parts = module.split(".")
            if parts[0] == "hf_eagle3" and parts[-1] in hf_eagle3.__all__:  # loads on first use
                parts = getattr(getattr(hf_eagle3, parts[-1]), "__module__", module).split(".")
            for i in range(1, len(parts) + 1):
                places = [folder.joinpath(*parts[:i]) for folder in (SOURCES, path.parent)]
                files += [place / "__init__.py" for place in places if (place / "__init__.py").is_file()]
                files += [place.with_suffix(".py") for place in places if place.with_suffix(".py").is_file()]
    return found


@pytest.mark.parametrize("script", sorted(RECIPES.glob("*.py")), ids=lambda path: path.stem)
def test_heads_ask_for_what_is_imported(script):
    head = re.match(r"# /// script\n# dependencies = (\[.*\])\n# ///\n", script.read_text(encoding="utf-8"))
    if head is None:
        assert script.name not in PAGE
        return
    package, *others = ast.literal_eval(head[1])
    extra = {re.match(r"[\w-]+", each)[0] for each in requires("hf-eagle3") if "extra" in each and "train" in each}
    modules = all_imports(script)
    needs_train = {module.split(".")[0] for module in modules} & (extra - {"hf-eagle3", "huggingface_hub", "torch"})
    # What imports `datasets` and matplotlib when it is used.
    needs_train |= modules & {"hf_eagle3.evaluation.load_prompts", "hf_eagle3.evaluation.plot_all"}
    text = script.read_text(encoding="utf-8")
    extras = "[train]" * bool(needs_train) + "[demo]" * ("import gradio" in text)
    assert package == f"hf-eagle3{extras}", needs_train
    for other in others:
        module = other.partition("[")[0]
        assert re.search(rf"^ *(import|from) {module}\b", text, re.MULTILINE)


@pytest.mark.parametrize("script", sorted(path.name for path in RECIPES.glob("*.py")))
def test_help_needs_no_package_of_one_recipe(script, monkeypatch, run_recipe):
    for package in ("gguf", "gradio", "lm_eval"):
        monkeypatch.setitem(sys.modules, package, None)
    assert run_recipe(script, "--help").returncode == 0
    if script == "from_gguf.py":
        result = run_recipe(script, "model.gguf", "folder")
        assert result.returncode == 2 and "pip install gguf" in result.stderr

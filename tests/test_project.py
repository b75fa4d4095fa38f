"""The files around the code: what a release, a workflow and a citation say fits the package."""

import ast
import re
from importlib.metadata import metadata
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import hf_eagle3


ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(name: str) -> dict[str, dict]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())["jobs"]


def commands(job: dict) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_there_is(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for job in jobs(path.stem).values():
        script = commands(job)
        assert set(re.findall(r"make ([a-z-]+)", script)) <= targets
        for pattern in re.findall(r"tests/\S+", script):
            assert list(ROOT.glob(pattern)), pattern


def test_pythons_that_trl_takes():
    """It needs a newer one than drafts do."""
    pytest.importorskip("trl")  # the oldest packages are tested without
    taken = SpecifierSet(metadata("trl")["Requires-Python"])
    for job in (job for path in WORKFLOWS for job in jobs(path.stem).values()):
        if re.search(r"make test|\[dev\]", commands(job)):
            (setup,) = (
                step["with"]["python-version"] for step in job["steps"] if "python-version" in step.get("with", ())
            )
            versions = job.get("strategy", {}).get("matrix", {}).get("python", [setup])
            assert all(map(taken.contains, versions))


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == hf_eagle3.__version__ and citation["license"] == "Apache-2.0"


def test_the_changelog_is_one_of_versions():
    """https://keepachangelog.com/en/1.1.0: the newest first, each with a date, and changes by their kind."""
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for part in text.split("\n## ")[1:]:
        found = re.findall(r"^### (.*)$", part, re.M)
        assert found and set(found) <= kinds and len(set(found)) == len(found)


@pytest.mark.parametrize("folder", ["src", "recipes"])
def test_texts_are_read_and_written_in_utf_8(folder):
    """Not as the system does by default."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name, keywords = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
            is_text = (
                name.endswith((".read_text", ".write_text")) or "text" in keywords and name.startswith("subprocess.")
            )
            if name == "open" or name.endswith(".open"):
                is_text = not any(isinstance(each, ast.Constant) and "b" in str(each.value) for each in node.args)
            assert not is_text or "encoding" in keywords, f"{path}:{node.lineno}"


def test_types_are_for_those_who_import_the_package():
    assert (Path(hf_eagle3.__file__).parent / "py.typed").exists()

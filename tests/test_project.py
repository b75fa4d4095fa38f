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
def test_workflows_are_valid(path):
    """Each has a name and a trigger (YAML reads `on` as true), and jobs whose steps use a pinned action or run a script."""
    content = yaml.safe_load(path.read_text())
    assert (
        set(content) <= {"name", True, "permissions", "env", "jobs"} and content["name"] == path.stem and content[True]
    )
    for job in content["jobs"].values():
        known = {"needs", "runs-on", "strategy", "timeout-minutes", "environment", "permissions", "steps"}
        assert set(job) <= known and job["runs-on"] == "ubuntu-latest"
        assert {job["needs"]} <= content["jobs"].keys() if "needs" in job else True
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step) and set(step) <= {"uses", "run", "with", "env"}
            assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step.get("uses", "a/b@v1"))


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


def test_what_runs_weekly():
    content = (ROOT / ".github" / "workflows" / "weekly.yml").read_text()
    (schedule,) = re.findall(r'cron: "(.*)"', content)
    assert len(schedule.split()) == 5 and schedule.split()[2:4] == ["*", "*"] and schedule.split()[4].isdigit()
    weekly = jobs("weekly")
    assert "make test-engines" in commands(weekly["engines"]) and "make test-clients" in commands(weekly["clients"])
    script = commands(weekly["transformers-main"])
    assert script.index("git+https://github.com/huggingface/transformers") < script.index("pytest")
    assert ROOT / "tests" / "test_generation_eagle3.py" in ROOT.glob(re.search(r"pytest .*(tests/\S+)", script)[1])


def test_a_release_is_tested_and_published_without_a_password():
    release = jobs("release")
    assert "make test-wheel" in commands(release["build"]) and release["publish"]["needs"] == "build"
    assert release["publish"]["permissions"] == {"id-token": "write"}
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile[makefile.index("\ntest-wheel:") :].split("\n\n")[0]
    steps = ["-m build", "twine check --strict", 'pip install --quiet "$(TORCH)"', "tests/wheel.py"]
    assert [recipe.index(step) for step in steps] == sorted(recipe.index(step) for step in steps)


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


def test_types_are_checked_wherever_tests_run():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("test", "types"):
        assert "-m mypy" in makefile[makefile.index(f"\n{target}:") :].split("\n\n")[0]
    hooks = [
        hook
        for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repo["hooks"]
    ]
    assert next(hook["entry"] for hook in hooks if hook["id"] == "mypy") == "make types"
    assert "make test" in commands(jobs("tests")["pinned"])


@pytest.mark.parametrize("path", sorted((ROOT / ".github").glob("ISSUE_TEMPLATE/*.yml")), ids=lambda path: path.stem)
def test_issue_forms_are_forms(path):
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert (
        form["name"]
        and form["description"]
        and any(each["validations"]["required"] for each in form["body"] if "validations" in each)
    )
    ids = [each["id"] for each in form["body"]]
    assert len(set(ids)) == len(ids)

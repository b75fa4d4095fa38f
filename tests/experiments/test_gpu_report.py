"""`experiments/gpu_report.py`: a rehearsal on a CPU, and what happens to parts that fail, hang or are cut off."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from conftest import EXPERIMENTS, load_script
from forked import processes, run_forked, run_here


SCRIPT = EXPERIMENTS / "gpu_report.py"
PARTS = ("gpu_correctness", "gpu_steps", "gpu_trained", "gpu_training")


@pytest.fixture
def gpu_report(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # it imports its parts when it shows them
    yield load_script(SCRIPT)
    for name in PARTS:
        sys.modules.pop(name, None)


@pytest.fixture
def runs_here(gpu_report, monkeypatch):
    """Parts run in this process: importing everything takes longer than most of them."""

    def run_part(part, argv, seconds, folder, grace):
        try:
            code = gpu_report.main([*argv, "--part", part.module, "--seconds", str(seconds)])
        except SystemExit as error:
            code = error.code
        return "complete" if code == 0 else "incomplete"

    monkeypatch.setattr(gpu_report, "run_part", run_part)


def test_a_rehearsal(gpu_report, runs_here, tmp_path, monkeypatch):
    def compile_nothing(function=None, **kwargs):  # other tests compile, which takes long
        return compile_nothing if function is None else function

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr("gpu_correctness.NEW_TOKENS", 8)
    monkeypatch.setattr("gpu_trained.ANSWER", 12)
    arguments = ["--device", "cpu", "--tiny", "--output_dir", str(tmp_path), "--minutes", "30", "--draft_seconds", "1"]
    # Without those that differ from others by a target, or by a number of nodes.
    some = r"^(?!gemma3|qwen3_5.* batch 4|eager, batch 1, (8|60)|eager, batch 2, 8|.*eager profile|.* with keys|.*every step)"
    assert gpu_report.main([*arguments, "--sections", some]) == 0
    states = json.loads((tmp_path / "states.json").read_text())["states"]
    assert {name: state["state"] for name, state in states.items()} == dict.fromkeys(PARTS, gpu_report.SOME)
    correctness = json.loads((tmp_path / "gpu_correctness.json").read_text())
    assert len(correctness) > 8 and all(check["is_right"] for check in correctness.values())
    accepted = [check["acceptance_length"] for name, check in correctness.items() if "acceptance_length" in check]
    assert sum(length > 1 for length in accepted) > len(accepted) / 2  # or nothing would be tested
    steps = json.loads((tmp_path / "gpu_steps.json").read_text())
    assert {"eager, batch 1, plain", "compiled, batch 1, 24 nodes", "parts of a compiled step"} <= steps.keys()
    trained = json.loads((tmp_path / "gpu_trained.json").read_text())
    for name in ("batch 1, eager", "batch 4, eager", "batch 1, compiled"):
        assert all(not each["differing"] for each in trained[name]["measurements"] if "eagle3" in each["method"])
    report = (tmp_path / "report.md").read_text()
    assert "cannot be shown" not in report and "**NO**" not in report
    # The draft learns for a second: whether any call drafts, and so has acceptance to plot, is left to measured times.
    assert {"steps.png", "speedup.png"} <= {path.name for path in (tmp_path / "plots").iterdir()}
    assert "![steps](plots/steps.png)" in report
    for title in ("Is it right?", "| plain |", "over the floor", "Parts of a step, compiled", "block by block"):
        assert title in report


def parts_of_tests(gpu_report, tmp_path, monkeypatch, **sources):
    """Parts made of some lines of Python each."""
    for name, source in sources.items():
        show = "\n\ndef render(results):\n    return f'{__name__} has {sorted(results)}'\n"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source) + show)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(str(tmp_path))
    return [gpu_report.Part(name, name.title(), 10) for name in sources]


FAILS = """
def measure(args, sections):
    sections.measure("first", dict, a=1)
    sections.measure("second", lambda: 1 / 0)
    raise OSError("a part that fails")
"""
HANGS = """
import time

def measure(args, sections):
    sections.measure("before", dict, a=1)
    sections.measure("never", time.sleep, 600)
"""
WORKS = """
def measure(args, sections):
    sections.measure("wrong", lambda: 1 / 0)
    sections.measure("too long", dict, seconds=1e6)
    sections.measure("good", dict, a=1)
    sections.measure("incorrect", dict, is_right=False)
"""


class Forked:
    """A process as of `subprocess.Popen`, that need not import torch."""

    def __init__(self, command, stdout, stderr):
        self.process = processes.Process(target=run_here, args=(command[1:], {}, stdout.name, stdout.name))
        self.process.start()
        self.kill = self.process.kill

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a part", timeout)
        return self.process.exitcode


def test_parts_that_fail_or_hang(gpu_report, tmp_path, monkeypatch, capsys):
    (tmp_path / "nothing.py").touch()
    run_forked(tmp_path / "nothing.py")  # what others are forked from has begun
    monkeypatch.setattr(subprocess, "Popen", Forked)
    parts = parts_of_tests(gpu_report, tmp_path, monkeypatch, hangs=HANGS, fails=FAILS, works=WORKS)
    folder = tmp_path / "out"
    arguments = ["--output_dir", str(folder), "--device", "cpu", "--minutes", "0.15"]
    assert gpu_report.main(arguments, parts, grace=1) == 1
    states = json.loads((folder / "states.json").read_text())["states"]
    assert "a part that fails" in states["fails"]["state"] and "stopped" in states["hangs"]["state"]
    assert "ZeroDivisionError" in states["fails"]["problems"]["second"]  # though the part ended by another error
    assert states["works"]["state"] == "incomplete"
    problems = states["works"]["problems"]
    assert problems.keys() == {"wrong", "too long", "incorrect"} and "ZeroDivisionError" in problems["wrong"]
    report = (folder / "report.md").read_text()
    for line in ("fails has ['first']", "hangs has ['before']", "works has ['good', 'incorrect']", "division by zero"):
        assert line in report
    assert "hangs has ['before']" in capsys.readouterr().out


def test_a_second_run_measures_what_is_missing(gpu_report, runs_here, tmp_path, monkeypatch):
    log = tmp_path / "measured"
    source = f"""
    import os

    def note(name):
        with open({str(log)!r}, "a") as file:
            file.write(name + " ")
        if name == "two" and not os.path.exists({str(tmp_path / "again")!r}):
            raise SystemExit(1)  # as if it were killed
        return {{"name": name}}

    def measure(args, sections):
        for name in ("one", "two", "three"):
            sections.measure(name, note, name)
    """
    parts = parts_of_tests(
        gpu_report,
        tmp_path,
        monkeypatch,
        cut=source,
        whole=source.replace("'two', 'three'", "'2', 'three'").replace('"two", "three"', '"2", "three"'),
    )
    arguments = ["--output_dir", str(tmp_path / "out"), "--device", "cpu", "--minutes", "1"]
    assert gpu_report.main(arguments, parts) == 1
    assert log.read_text() == "one two one 2 three "
    (tmp_path / "again").touch()
    assert gpu_report.main(arguments, parts) == 0
    assert log.read_text() == "one two one 2 three two three "  # and nothing of the part that was whole
    assert gpu_report.main(arguments, parts) == 0 and log.read_text().endswith("three two three ")
    with pytest.raises(SystemExit):
        gpu_report.main([*arguments, "--tiny"], parts)


def test_some_sections(gpu_report, runs_here, tmp_path, monkeypatch):
    source = """
    def measure(args, sections):
        for name in ("step, plain", "step, tree", "memory"):
            sections.measure(name, dict, a=1)
    """
    parts, folder = parts_of_tests(gpu_report, tmp_path, monkeypatch, part=source), tmp_path / "out"
    arguments = ["--output_dir", str(folder), "--device", "cpu"]
    assert gpu_report.main([*arguments, "--sections", "tree|mem"], parts) == 0
    assert json.loads((folder / "part.json").read_text()).keys() == {"step, tree", "memory"}
    assert "complete in the chosen sections" in (folder / "report.md").read_text()
    assert gpu_report.main(arguments, parts) == 0  # goes on with the others
    assert json.loads((folder / "part.json").read_text()).keys() == {"step, plain", "step, tree", "memory"}


def test_what_an_environment_lacks_skips_only_that_part(gpu_report, runs_here, tmp_path, monkeypatch):
    parts = parts_of_tests(gpu_report, tmp_path, monkeypatch, needy=WORKS, alone="def measure(args, sections): pass")
    parts[0] = parts[0]._replace(needs=("a_package_that_is_not_there",), arguments=("target",))
    folder = tmp_path / "out"
    assert gpu_report.main(["--output_dir", str(folder), "--device", "cpu"], parts) == 0
    report = (folder / "report.md").read_text()
    assert "left out: it needs a_package_that_is_not_there" in report
    states = json.loads((folder / "states.json").read_text())["states"]
    assert states["alone"]["state"] == "complete"

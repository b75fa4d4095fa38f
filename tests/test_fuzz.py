"""A short run of `tests/fuzz.py`, which see; and that it finds what is there to be found."""

import os
import subprocess
import sys
import time
from pathlib import Path

import fuzz
import psutil
import pytest
from forked import run_forked
from fuzz_calls import unknown_fields

from hf_eagle3.remote_code import cache_eagle3, draft_model_eagle3


def findings(kind, numbers, seed=0):
    """One after the other, as they are asked for."""
    return (finding for number in numbers if (finding := fuzz.run_case(kind, seed, number)[1]))


@pytest.mark.parametrize("part", range(4))
def test_calls(part):
    assert list(findings("calls", range(6 * part, 6 * (part + 1)))) == []


@pytest.mark.parametrize("part", range(2))
def test_checkpoints(part):
    assert list(findings("checkpoints", range(30 * part, 30 * (part + 1)))) == []


def test_kills():
    """In a process that has trained nothing before: others cannot be forked from."""
    pytest.importorskip("trl")
    result = run_forked(fuzz.__file__, "--kinds", "kills", "--case", "23")
    assert result.returncode == 0 and result.stdout.endswith("nothing found\n"), result.stdout[-2000:]


def test_workers_end_with_the_process_that_started_them(tmp_path):
    (tmp_path / "torch.py").write_text("def set_num_threads(_):\n    import time\n    print()\n    time.sleep(60)\n")
    start = "import sys, time, fuzz; worker = fuzz.Worker(['calls'], 0, 0, 1, sys.argv[1]); time.sleep(60)"
    folder, log = Path(fuzz.__file__).parent, tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, "-c", start, str(log)], cwd=folder, env=environment) as process:
        for _ in range(1000):
            if log.exists() and log.read_text():
                break
            time.sleep(0.02)
        workers = psutil.Process(process.pid).children()
        process.kill()
        _, alive = psutil.wait_procs(workers, timeout=5)
    for each in alive:
        each.kill()
    assert workers and not alive


def test_every_field_of_a_generation_config_is_tried():
    assert unknown_fields() == set()


def test_what_is_broken_is_found(monkeypatch):
    monkeypatch.setattr(draft_model_eagle3, "check_weights", lambda *args: None)
    assert any(findings("checkpoints", range(40)))
    keep = cache_eagle3.TreeCache.keep
    monkeypatch.setattr(  # what was accepted is not what is kept
        cache_eagle3.TreeCache,
        "keep",
        lambda cache, nodes, growth: keep(cache, [list(range(len(path))) for path in nodes], growth),
    )
    assert any(findings("calls", range(40)))

"""
Tries what nobody would think of: calls of `generate` in any mix, broken checkpoints, and trainings that are killed.

    python tests/fuzz.py --minutes 30 --seed 1               # all kinds, by two processes; before each release
    python tests/fuzz.py --kinds calls --minutes 5
    python tests/fuzz.py --kinds calls --seed 1 --case 1234  # one case again

A case is decided by kind, seed and number. Each finding is printed with the command that shows it again; the exit
status is 1 if there was one. A process that dies or hangs is a finding, too.
"""

import argparse
import contextlib
import importlib
import itertools
import multiprocessing
import os
import queue
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path


KINDS = ("calls", "checkpoints", "kills")
# Of about 100 cases; a kill takes as long as some hundred calls.
SHARES = {"calls": 92, "checkpoints": 8, "kills": 0.3}
MOST_SECONDS = {"calls": 120, "checkpoints": 120, "kills": 600}  # that a case may take


def run_case(kind: str, seed: int, number: int) -> tuple[int, str | None]:
    """How much was tried in a case, and what is wrong, if anything is."""
    module = importlib.import_module(f"fuzz_{kind}")
    rng = random.Random(f"{kind} {seed} {number}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            return module.run(rng, Path(folder))
        except Exception:
            return 1, "the case itself failed: " + traceback.format_exc(limit=-4).replace("\n", " | ")


def end_with_parent():
    """However that ends: no `finally` of it runs if it is killed."""
    multiprocessing.parent_process().join()
    os._exit(1)


def work(kinds, seed, first, step, results, output):
    """Runs every `step`-th case from `first` on, and tells before and after each."""
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)  # warnings of transformers, and the like
    os.dup2(1, 2)
    threading.Thread(target=end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    for number in itertools.count(first, step):
        kind = random.Random(f"{seed} {number}").choices(kinds, [SHARES[kind] for kind in kinds])[0]
        results.put((number, kind, None))
        results.put((number, kind, run_case(kind, seed, number)))


class Worker:
    """A process that runs cases, and what is known of it."""

    def __init__(self, kinds, seed, first, step, output):
        self.arguments, self.output = (kinds, seed, first, step), output
        context = multiprocessing.get_context("spawn")
        self.results = context.Queue()
        self.process = context.Process(
            target=work, args=(kinds, seed, first, step, self.results, output), daemon=False
        )
        self.process.start()
        self.number, self.kind, self.since = first - step, kinds[0], time.monotonic()

    def poll(self):
        """The cases that have ended, with what was found, and whether the worker has to be replaced."""
        ended = []
        with contextlib.suppress(queue.Empty):
            while True:
                self.number, self.kind, result = self.results.get(timeout=0.1)
                self.since = time.monotonic()
                if result is not None:
                    ended.append((self.kind, self.number, *result))
        if not self.process.is_alive() and self.results.empty():
            tail = Path(self.output).read_text(errors="replace")[-300:].replace("\n", " | ")
            return [*ended, (self.kind, self.number, 1, f"the process died ({self.process.exitcode}): {tail}")], True
        if time.monotonic() - self.since > MOST_SECONDS[self.kind]:
            return [*ended, (self.kind, self.number, 1, "did not end")], True
        return ended, False

    def stop(self):
        self.process.kill()
        self.process.join()

    def replaced(self):
        """A worker that goes on behind the case at which this one ended."""
        self.stop()
        kinds, seed, _, step = self.arguments
        return Worker(kinds, seed, self.number + step, step, self.output)


def fuzz(kinds, seed, minutes, processes, report=print) -> tuple[Counter, int]:
    """Runs cases for some minutes. Returns how many there were of each kind, and how many findings."""
    counts, findings, end = Counter(), 0, time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        workers = [Worker(kinds, seed, i, processes, f"{folder}/{i}.log") for i in range(processes)]
        try:
            while time.monotonic() < end:
                for i, worker in enumerate(workers):
                    ended, is_lost = worker.poll()
                    for kind, number, num_tried, finding in ended:
                        counts[kind] += num_tried
                        if finding:
                            findings += 1
                            report(f"python tests/fuzz.py --kinds {kind} --seed {seed} --case {number}  # {finding}")
                    if is_lost:
                        workers[i] = worker.replaced()
        finally:
            for worker in workers:
                worker.stop()
    return counts, findings


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--case", type=int, help="Run this one only, of the kind that is given")
    args = parser.parse_args()
    if args.case is not None:
        _, finding = run_case(args.kinds[0], args.seed, args.case)
        print(finding or "nothing found")
        sys.exit(bool(finding))
    from fuzz_calls import unknown_fields

    if unknown := sorted(unknown_fields()):
        print(f"Fields of GenerationConfig that are not tried: {unknown}")
    start = time.monotonic()
    counts, findings = fuzz(
        args.kinds, args.seed, args.minutes, args.processes, lambda line: print(line[:2000], flush=True)
    )
    tried = ", ".join(f"{counts[kind]} {kind}" for kind in args.kinds)
    print(f"seed {args.seed}: {tried} in {(time.monotonic() - start) / 60:.1f} minutes, {findings} findings")
    sys.exit(bool(findings))


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]
    main()

# /// script
# dependencies = ["hf-eagle3[train]"]
# ///
r"""
Writes one report on a CUDA device: is decoding right there, what does a step cost, what does a draft bring, how fast is
training?

    python experiments/gpu_report.py --minutes 8 --output_dir gpu-report
    python experiments/gpu_report.py --minutes 8 --output_dir gpu-report \
        --target HuggingFaceTB/SmolLM2-135M-Instruct --chats chats.jsonl

Compiling takes minutes: pass `--minutes 15` to have compiled steps in the report. Without `--target` and `--chats` it has
nothing about a trained draft.

The parts run one after the other. Each has its own process and its share of the minutes. A part saves each section in
`<part>.json` as soon as it is measured, and `report.md` is written again after each part. If a part fails or runs out of
time, the report says so, and the next part begins. The same command again measures only what is missing.

    python experiments/gpu_report.py --parts gpu_steps --sections "ceilings|model|compiled" --output_dir gpu-report

measures some sections of a part.

    python experiments/gpu_report.py --device cpu --tiny --output_dir outputs/rehearsal

rehearses every part on a CPU in about two minutes.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hf_eagle3.environment import environment
from hf_eagle3.files import write_atomically


class Part(NamedTuple):
    """
    A part of the report, with its title and its share of 500 seconds. `module` measures by `measure(args, sections)`, and
    `render(results)` returns Markdown. `plot(results, folder)` is optional; it saves plots and returns their paths. A part
    `needs` packages besides torch and transformers, and `arguments` of this script.
    """

    module: str
    title: str
    seconds: float
    needs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


PARTS = (
    Part("gpu_correctness", "Is it right?", 90),
    Part("gpu_steps", "What does a step cost?", 150),
    Part("gpu_trained", "What does a trained draft bring?", 200, ("trl", "datasets", "aiohttp"), ("target", "chats")),
    Part("gpu_training", "How fast is training?", 60, ("trl", "datasets")),
)


class OutOfTime(Exception):
    """Too little time is left for a section."""


class Sections:
    """
    The results of a part, saved to a JSON file after each section. A section that is saved, or whose name the regular
    expression `wanted` is not in, is not measured.
    """

    def __init__(self, path: Path, seconds: float, wanted: str = ""):
        self.path, self.end, self.wanted = path, time.monotonic() + seconds, re.compile(wanted)
        self.results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.problems: dict[str, str] = {}

    def add_problem(self, name: str, problem: str) -> None:
        """Saves it at once: the process may not live to the end of its part."""
        self.problems[name] = problem
        self.path.with_suffix(".problems.json").write_text(json.dumps(self.problems), encoding="utf-8")

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def measure(self, name: str, function: Callable, *args, seconds: float = 0.0, **kwargs) -> object | None:
        """
        Calls a function, saves its result as a section, and returns it. Returns `None` if it failed, or was left out because
        fewer `seconds` are left.
        """
        if name in self.results:
            return self.results[name]
        if not self.wanted.search(name):
            return None
        start = time.monotonic()
        try:
            if self.seconds_left < seconds:
                raise OutOfTime(f"{max(self.seconds_left, 0):.0f} s are left, and it takes about {seconds:.0f}")
            result = function(*args, **kwargs)
        except Exception as error:
            self.add_problem(name, f"{type(error).__name__}: {error}")
            print(f"{name}: {self.problems[name]}", file=sys.stderr, flush=True)
            if not isinstance(error, OutOfTime):
                sys.excepthook(*sys.exc_info())
            return None
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        if isinstance(result, dict) and result.get("is_right") is False:
            self.add_problem(name, f"not right: {result}")
        self.results[name] = result
        write_atomically(self.path, json.dumps(self.results, indent=1))
        return result


def what_is_missing(part: Part, args: argparse.Namespace) -> str | None:
    """Returns why a part cannot run, or `None` if it can."""
    if packages := [name for name in part.needs if importlib.util.find_spec(name) is None]:
        return f"it needs {', '.join(packages)}: pip install 'hf-eagle3[train]'"
    if arguments := [f"--{name}" for name in part.arguments if getattr(args, name) is None]:
        return f"it needs {' and '.join(arguments)}"
    return None


def run_part(part: Part, argv: Sequence[str], seconds: float, folder: Path, grace: float) -> str:
    """Runs a part in its own process, which is killed `grace` seconds after its time. Returns how that went."""
    log = folder / f"{part.module}.log"
    command = [sys.executable, str(Path(__file__)), *argv, "--part", part.module, "--seconds", str(seconds)]
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(seconds + grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"stopped: it was not done {grace:.0f} s after its time of {seconds:.0f} s"
        except BaseException:
            process.kill()
            raise
    if code == 0:
        return "complete"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "incomplete" if code == INCOMPLETE else f"failed (exit code {code}): {lines[-1] if lines else ''}"


INCOMPLETE = 3  # exit code of a part in which sections failed or were left out
SOME = "complete in the chosen sections"


def report(parts: Sequence[Part], folder: Path, states: dict[str, dict], command: str) -> str:
    """Returns the report, as Markdown."""
    blocks = ["# hf-eagle3 on an accelerator", f"    {command}"]
    for part in parts:
        state = states.get(part.module, {"state": "not run yet"})
        blocks.append(f"## {part.title}")
        if "environment" in state:
            blocks.append("; ".join(f"{name} {value}" for name, value in state["environment"].items()))
        if state["state"] != "complete":
            blocks.append(f"This part is {state['state']}.")
        blocks += [f"- {name}: {problem}" for name, problem in state.get("problems", {}).items()]
        path = folder / f"{part.module}.json"
        if path.exists():
            results = json.loads(path.read_text(encoding="utf-8"))
            try:
                module = importlib.import_module(part.module)
                blocks.append(module.render(results))
                if hasattr(module, "plot") and importlib.util.find_spec("matplotlib") is not None:
                    plots = module.plot(results, folder / "plots")
                    blocks += [f"![{plot.stem.replace('_', ' ')}](plots/{plot.name})" for plot in plots]
            except Exception as error:  # an interrupted run may have left too little for a table
                blocks.append(f"The results in {path.name} cannot be shown: {type(error).__name__}: {error}")
    return "\n\n".join(blocks) + "\n"


def measure_part(args: argparse.Namespace, folder: Path) -> int:
    """Measures a part in the current process. Returns the exit code."""
    module = importlib.import_module(args.part)
    torch.manual_seed(args.seed)
    sections = Sections(folder / f"{args.part}.json", args.seconds, args.sections)
    module.measure(args, sections)
    return INCOMPLETE if sections.problems else 0


def main(argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS, grace: float = 10.0) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="For all parts together")
    parser.add_argument("--parts", nargs="+", help="Only these", choices=[part.module for part in parts])
    parser.add_argument("--sections", default="", help="Only sections whose name contains this regular expression")
    parser.add_argument("--target", help="Folder or Hub id of a small chat model to train a draft for")
    parser.add_argument("--chats", nargs="+", help="JSON Lines files with `messages`: what the chat model is asked")
    parser.add_argument(
        "--keep_answers", action="store_true", help="The answers in --chats are the target's own: train on them, too"
    )
    parser.add_argument(
        "--prompts", nargs="+", help="JSON Lines files of prompts to measure with. By default the last chats"
    )
    parser.add_argument("--num_prompts", type=int, default=10, help="How many prompts are measured at batch 1")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["prompt-lookup", "eagle3-chain", "eagle3-no-lookup", "eagle3"],
        help="What is compared with plain generation at batch 1",
    )
    parser.add_argument("--max_new_tokens", type=int, default=96, help="New tokens for each prompt")
    parser.add_argument("--learning_rate", type=float, default=5e-3, help="Learning rate of the draft")
    parser.add_argument(
        "--answer_seconds", type=float, help="Time for the target's answers. By default 15%% of the part's"
    )
    parser.add_argument(
        "--draft_seconds", type=float, help="Time for training the draft. By default 33%% of the part's"
    )
    parser.add_argument(
        "--train_batch_size", type=int, default=16, help="Sequences of 1,024 tokens in a training step"
    )
    parser.add_argument("--config", help="Folder or Hub id of a model. Its size replaces Qwen3-8B's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="Rehearse with tiny models. The figures mean nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if args.part is not None:
        return measure_part(args, folder)

    command = f"python experiments/gpu_report.py {' '.join(argv)}"
    states_file, begun = folder / "states.json", json.dumps([args.tiny, args.config, args.target])
    kept = json.loads(states_file.read_text(encoding="utf-8")) if states_file.exists() else {}
    if kept and kept["begun"] != begun:
        parser.error(f"{folder} holds the report of another --config, --target or --tiny. Choose another folder.")
    states = kept.get("states", {})
    chosen = [part for part in parts if args.parts is None or part.module in args.parts]
    chosen = [part for part in chosen if states.get(part.module, {}).get("state") != "complete"]
    end, share = (
        time.monotonic() + 60 * args.minutes,
        60 * args.minutes / sum(part.seconds for part in chosen or parts),
    )
    for number, part in enumerate(chosen):
        # A rehearsal makes a target if it gets none.
        reason = what_is_missing(part if not args.tiny else part._replace(arguments=()), args)
        later = sum(each.seconds for each in chosen[number + 1 :]) * share
        # Time that earlier parts did not use goes to the later ones.
        seconds = max(end - time.monotonic() - later, 0.0)
        print(f"{part.title} ({part.module}, {seconds:.0f} s)", flush=True)
        problems = folder / f"{part.module}.problems.json"
        problems.unlink(missing_ok=True)
        state = f"left out: {reason}" if reason else run_part(part, argv, seconds, folder, grace)
        if state == "complete" and args.sections:
            state = SOME  # another run may want the others
        states[part.module] = {"state": state, "environment": environment(args.device)}
        if problems.exists():
            states[part.module]["problems"] = json.loads(problems.read_text(encoding="utf-8"))
            problems.unlink()
        states_file.write_text(json.dumps({"begun": begun, "states": states}, indent=1), encoding="utf-8")
        (folder / "report.md").write_text(report(parts, folder, states, command), encoding="utf-8")
        print(f"  {state}", flush=True)
    print((folder / "report.md").read_text(encoding="utf-8") if (folder / "report.md").exists() else "")
    ended = (states.get(part.module, {}).get("state", "") for part in chosen)
    return 0 if all(state.startswith(("complete", "left out")) for state in ended) else 1


if __name__ == "__main__":
    raise SystemExit(main())

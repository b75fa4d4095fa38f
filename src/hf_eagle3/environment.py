"""Versions and machine of a run, names that are safe to publish, what differs between runs, and errors of scripts."""

import argparse
import difflib
import io
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any, TypeGuard

import torch
import transformers
from huggingface_hub.errors import HTTPError, StrictDataclassError

from . import __version__


# What `--dtype` may be on a command line, as in TRL's scripts.
DTYPES = ("auto", "bfloat16", "float16", "float32")


def machine_name(device: torch.device | str) -> str:
    """Returns the name of the accelerator, or of the processor with its number of cores."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{platform.machine()}, {device.type}"
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search("^model name\\s*: (.+)", cpuinfo.read_text(encoding="utf-8"), re.M) if cpuinfo.exists() else None
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"


def emulates_bfloat16(device: torch.device) -> bool:
    """Whether a device computes bfloat16 in software, several times slower than float32."""
    return device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported()


def warn_of_slow_bfloat16(target: transformers.PreTrainedModel, device: torch.device, logger: Any) -> None:
    """Warns if a target is in bfloat16, and the device that it runs on computes that in software."""
    if target.dtype == torch.bfloat16 and emulates_bfloat16(device):
        logger.warning(
            "This processor computes bfloat16 in software, which is several times slower than float32. Load the target in float32: "
            '`--dtype float32`, or `dtype="float32"` (for a trainer in `target_model_init_kwargs`).'
        )


def environment(device: torch.device | str) -> dict[str, str | int]:
    """Returns versions and machine, to store beside a measurement."""
    return {
        "hf_eagle3": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": machine_name(device),
        "threads": torch.get_num_threads(),
    }


def is_path(name: str | None) -> TypeGuard[str]:
    """Whether the name of a model is a path on this machine, or was one where the model was trained."""
    if not name:
        return False
    # `Path.exists` raises an error for strings that are too long for a path, up to Python 3.13.
    is_absolute = Path(name).is_absolute() or PureWindowsPath(name).is_absolute()
    return is_absolute or name.startswith((".", "~")) or os.path.exists(name)


def is_missing_folder(name: str) -> bool:
    """Whether the name of a model can only be that of a folder, which does not exist."""
    return not Path(name).is_dir() and (is_path(name) or name.count("/") > 1)


def folder_or_hub_id(name: str) -> str:
    """Returns the name of a model on a command line (argparse `type`), and refuses a path that does not exist."""
    if not name:
        raise argparse.ArgumentTypeError("the name of a model is empty. Is a variable of the shell not set?")
    if not Path(name).is_dir():
        if is_missing_folder(name):
            raise argparse.ArgumentTypeError(f"there is no folder {name}")
        if Path(name).parent.is_dir():
            print(f"There is no folder {name}. Looking for it on the Hub.", file=sys.stderr)
    return name


def usable_device(text: str) -> str:
    """Returns the name of a device on a command line (argparse `type`), which this machine must have."""
    try:
        torch.empty(0, device=text)
    except (AssertionError, RuntimeError) as error:  # torch without CUDA raises the former
        raise argparse.ArgumentTypeError(f"{text} cannot be used: {str(error).splitlines()[0]}") from None
    return text


def positive_integer(text: str) -> int:
    """Returns a number on a command line (argparse `type`), which must be at least 1."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def unknown_flags(given: Iterable[str], options: Collection[str]) -> list[str]:
    """
    Returns the flags that are neither options nor the beginning of one, which argparse accepts, each with a similar option. What has a
    space is a value to argparse.
    """
    unknown = [flag for flag in given if " " not in flag and not any(option.startswith(flag) for option in options)]
    meant = {flag: difflib.get_close_matches(flag, options, n=1) for flag in unknown}
    return [flag + "".join(f" (did you mean {option}?)" for option in meant[flag]) for flag in unknown]


class ScriptParser(argparse.ArgumentParser):
    """
    The command line of a script. For an unknown flag it suggests a similar one. `--batch-size` is `--batch_size`, as in transformers'
    scripts. The `description` is the script's docstring, which the help shows as it is.
    """

    def __init__(self, description: str | None = None):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, args = self._option_string_actions, list(sys.argv[1:] if args is None else args)
        end = args.index("--") if "--" in args else len(args)
        flags = {place: arg.partition("=")[0] for place, arg in enumerate(args[:end]) if arg.startswith("--")}
        for place, flag in flags.items():
            name = f"--{flag[2:].replace('-', '_')}"
            if flag not in options and any(option.startswith(name) for option in options):
                flags[place], args[place] = name, name + args[place][len(flag) :]
        if unknown := unknown_flags(flags.values(), options):
            self.error(f"unknown arguments: {', '.join(unknown)}")
        return super().parse_known_args(args, namespace)


def add_quantization(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of TRL's scripts that quantize the target. At most one may be given. It is the argument `bits`."""
    group = parser.add_mutually_exclusive_group()
    for bits in (8, 4):
        group.add_argument(
            f"--load_in_{bits}bit",
            action="store_const",
            const=bits,
            dest="bits",
            help=f"Quantize the target to {bits} bits (bitsandbytes)",
        )


def add_place_of_draft(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say where in its repo a draft is. See [`place_of_draft`]."""
    parser.add_argument("--draft_revision", help="Branch, tag or commit of the draft's repo")
    parser.add_argument("--draft_subfolder", help="The draft's folder in its repo, if it is not the root")


def place_of_draft(args: Any) -> dict[str, str]:
    """Returns `draft_revision` and `draft_subfolder` of a script's arguments, as arguments of `from_pretrained`."""
    given = {"revision": args.draft_revision, "subfolder": args.draft_subfolder}
    return {name: value for name, value in given.items() if value is not None}


def public_name(name: str | None) -> str | None:
    """Returns a name that is safe to publish: a Hub id as it is, a path without its parent folders."""
    return PureWindowsPath(name).name if is_path(name) else name  # takes both kinds of slashes


def on_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns a copy of nested dictionaries and lists, with the function applied to all other values in them."""
    if isinstance(value, dict):
        return {key: on_leaves(function, each) for key, each in value.items()}
    return [on_leaves(function, each) for each in value] if isinstance(value, list) else function(value)


def without_paths(facts: Any) -> Any:
    """Returns a copy of a dictionary, list or value, with the `public_name` of each string in it."""
    return on_leaves(lambda fact: public_name(fact) if isinstance(fact, str) and len(fact) < 1000 else fact, facts)


def what_differs(before: Any, after: Any) -> str:
    """Returns the entries of two dicts that differ, or two values that differ, in words. Empty if they are the same."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return "" if before == after else f"{before} before, {after} after"
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return ", ".join(f"{name} was {before.get(name)!r} before, {after.get(name)!r} after" for name in names)


def command_line(arguments: Sequence[str]) -> str:
    """Returns a command for a shell of this system. Those of Windows do not know single quotes."""
    return subprocess.list2cmdline(arguments) if sys.platform == "win32" else shlex.join(arguments)


def in_home(value: Any) -> Any:
    """
    Returns arguments of a command line, or a value of a YAML file, with `~/` expanded. Shells do it only where it begins an
    argument, and not after `--flag=`.
    """

    def expanded(leaf: Any) -> Any:
        is_text = isinstance(leaf, str)
        return re.sub(r"^(--[\w-]+=)?~/", lambda found: f"{found[1] or ''}{Path.home()}/", leaf) if is_text else leaf

    return on_leaves(expanded, value)


def print_any_character() -> None:
    """Prints `?` for characters that the output cannot hold: Windows writes to files and pipes in a code page."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """
    Ends a script with one line, without a traceback, at errors that its user can mend: a package, file or model is missing, the Hub
    cannot be reached, or an argument is wrong.
    """
    try:
        yield
    except (HTTPError, ImportError, OSError, StrictDataclassError, ValueError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}" + unreached_host(error)) from None


def unreached_host(error: Any) -> str:
    """Returns what an error of a connection does not say: which server could not be reached."""
    if not any(base.__name__ == "TransportError" for base in type(error).__mro__):  # of httpx, or of its successor
        return ""
    try:
        return f" (no answer from {error.request.url.host})"
    except RuntimeError:  # it has no request
        return ""


def run_script(main: Callable[[], None]) -> None:
    """Runs the main function of a script, with `~/` expanded in its arguments, and [`errors_in_one_line`]."""
    print_any_character()
    sys.argv[1:] = in_home(sys.argv[1:])
    with errors_in_one_line():
        main()

"""The command lines of scripts: their parser and types, the home folder, and errors in one line."""

import argparse
import difflib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HTTPError, StrictDataclassError

from .environment import is_missing_folder, on_leaves


# What `--dtype` may be on a command line, as in TRL's scripts.
DTYPES = ("auto", "bfloat16", "float16", "float32")
# Values of `device_map` that place a model on several devices.
SPREADING = ("auto", "balanced", "balanced_low_0", "sequential")


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


def usable_device_map(text: str) -> str:
    """Returns a `device_map` on a command line (argparse `type`): a way to spread a model, or a device that this machine must have."""
    return text if text in SPREADING else usable_device(text)


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


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say where the target is loaded: `device` and `device_map` of `load_on_device`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=usable_device, default=device, help="By default a GPU, if there is one")
    parser.add_argument(
        "--device_map",
        type=usable_device_map,
        help="Spread the target over several devices instead, for example by 'auto'. The draft is on one",
    )


def add_trust_remote_code(parser: argparse.ArgumentParser) -> None:
    """Adds the flag for targets that bring code. Code of a draft never runs in the scripts."""
    parser.add_argument("--trust_remote_code", action="store_true", help="Run code from the target's repo")


def add_place_of_draft(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say where in its repo a draft is. See [`place_of_draft`]."""
    parser.add_argument("--draft_revision", help="Branch, tag or commit of the draft's repo")
    parser.add_argument("--draft_subfolder", help="The draft's folder in its repo, if it is not the root")


def place_of_draft(args: Any) -> dict[str, str]:
    """Returns `draft_revision` and `draft_subfolder` of a script's arguments, as arguments of `from_pretrained`."""
    given = {"revision": args.draft_revision, "subfolder": args.draft_subfolder}
    return {name: value for name, value in given.items() if value is not None}


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

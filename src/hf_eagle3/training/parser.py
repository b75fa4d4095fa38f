"""The command line of the recipes that train."""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from trl import TrlParser

from ..environment import on_leaves
from ..scripts import in_home, print_any_character, unknown_flags


def as_number(value: Any) -> Any:
    """Returns a value of a YAML file, as a number if it is one that YAML takes for a text (`1e-5`)."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if is_number else value


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the description as it is."""


class Eagle3Parser(TrlParser):
    """
    TRL's parser of flags and a YAML file (`--config`). Its help shows our own flags first, and inherited ones by their
    class. For an unknown flag or key it suggests a similar one. Fields that a script does not use, whose names begin with a prefix
    in `without`, become no flags. `kwargs` are those of `argparse.ArgumentParser`.
    """

    def __init__(self, dataclass_types: Iterable[type], without: tuple[str, ...] = (), **kwargs: Any):
        kwargs = {
            "usage": "%(prog)s [--config FILE.yaml] [--FLAG VALUE ...]",  # argparse would name every flag, also before each error
            "formatter_class": HelpFormatter,
            **kwargs,
        }
        super().__init__(dataclass_types, **kwargs)  # type: ignore[arg-type]  # a `NewType` that no class has
        for action in [action for action in self._actions if action.dest.startswith(without)]:
            action.help = argparse.SUPPRESS  # the field keeps its default
            for option in action.option_strings:
                del self._option_string_actions[option]
        for action in self._actions:  # a flag alone is true. TRL takes it only if its default is not `None`
            if getattr(action.type, "__name__", None) == "string_to_bool" and action.nargs is None:
                action.nargs, action.const = "?", True
        owners: dict[str, type] = {}
        for dataclass_type in dataclass_types:
            for cls in reversed(dataclass_type.__mro__):  # from the base class on
                for name in vars(cls).get("__dataclass_fields__", {}):
                    owners.setdefault(name, cls)
        (general,) = (group for group in self._action_groups if group.title in ("options", "optional arguments"))
        groups: dict[type, list[argparse.Action]] = {}
        for action in [action for action in general._group_actions if action.dest in owners]:
            general._group_actions.remove(action)
            groups.setdefault(owners[action.dest], []).append(action)
        is_inherited = {cls: cls.__module__.split(".")[0] in ("trl", "transformers") for cls in groups}
        for cls in sorted(groups, key=is_inherited.__getitem__):  # stable
            where = f"inherited from {cls.__module__.split('.')[0]}'s " if is_inherited[cls] else ""
            self.add_argument_group(f"{where}{cls.__name__}")._group_actions += groups[cls]

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Takes the values of the YAML file as defaults. YAML reads `eval_strategy: no` as false, and `1e-5` as a text."""
        kwargs = in_home(kwargs)
        strategies = {key: "no" for key, value in kwargs.items() if value is False and key.endswith("_strategy")}
        nested = {key: on_leaves(as_number, value) for key, value in kwargs.items() if isinstance(value, dict | list)}
        return super().set_defaults_with_config(**kwargs | nested | strategies)

    def parse_args_and_config(self, args: Iterable[str] | None = None, *others: Any, **kwargs: Any) -> tuple:
        """
        Returns an instance of each dataclass. Ends the script if the YAML file cannot be read, a flag or a key of it does not
        exist, or a value is wrong.
        """
        print_any_character()  # TRL's help has a square root
        args = list(sys.argv[1:] if args is None else args)
        args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
        args = [in_home(arg) for arg in args]
        options = {*self._option_string_actions, "--config"}
        given = [arg.partition("=")[0] for arg in args if arg.startswith("--")]
        place = args.index("--config") + 1 if "--config" in args[:-1] else None
        if place is not None:
            path = Path(args[place])
            try:
                content = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (OSError, UnicodeError, yaml.YAMLError) as error:
                self.exit(2, f"{self.prog}: error: {path} cannot be read (`--config`): {error}\n")
            given += [f"--{key}" for key in content or () if key != "env"]
        if unknown := unknown_flags(given, options):
            self.error(f"the command line or the YAML file has unknown arguments: {', '.join(unknown)}")
        try:
            with tempfile.TemporaryDirectory() as folder:
                if place is not None:  # in ASCII, because TRL reads the file in the encoding of the system
                    args[place] = str(Path(folder, "config.yaml"))
                    Path(args[place]).write_text(yaml.safe_dump(content), encoding="ascii")
                return super().parse_args_and_config(args, *others, **kwargs)
        except (TypeError, ValueError) as error:  # also of dataclasses that cannot be made of the file's values
            self.exit(2, f"{self.prog}: error: {error}\n")

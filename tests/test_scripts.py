import argparse
import io
import runpy
import sys
from types import SimpleNamespace

import pytest
from conftest import RECIPES
from huggingface_hub.errors import HTTPError, StrictDataclassError

from hf_eagle3.scripts import ScriptParser, add_device, command_line, run_script


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError, FileNotFoundError, HTTPError, StrictDataclassError, ValueError]
)
def test_errors_of_scripts_are_shown_in_a_line(error):
    def main():
        raise error("what to do")

    with pytest.raises(SystemExit, match=f"^{error.__name__}: what to do$"):
        run_script(main)


def test_places_that_this_machine_does_not_have(capsys):
    parser = argparse.ArgumentParser()
    add_device(parser)
    assert parser.parse_args(["--device_map", "auto"]).device_map == "auto"
    for flag in ("--device", "--device_map"):
        with pytest.raises(SystemExit):
            parser.parse_args([flag, "nowhere:0"])
        assert f"argument {flag}: nowhere:0 cannot be used" in capsys.readouterr().err


def test_a_server_that_cannot_be_reached_is_named():
    class TransportError(HTTPError):
        pass

    class ConnectError(TransportError):
        request = SimpleNamespace(url=SimpleNamespace(host="huggingface.co"))

    def main():
        raise ConnectError("[Errno -2] Name or service not known")

    with pytest.raises(SystemExit, match=r"^ConnectError: .* not known \(no answer from huggingface.co\)$"):
        run_script(main)


@pytest.mark.parametrize("script, arguments, told", [
    ("inspect_draft.py", ("me/draft", "--promt=a"), "--promt (did you mean --prompt?)"),
    ("demo.py", ("--targt", "me/target"), "--targt (did you mean --target?)"),  # although --target is required
    ("inspect_draft.py", ("me/draft", "--targt", "a", "--xyzzy"), "--targt (did you mean --target?), --xyzzy"),
])  # fmt: skip
def test_misspelled_flags(run_recipe, script, arguments, told):
    result = run_recipe(script, *arguments)
    assert result.returncode == 2 and result.stderr.endswith(f"{script}: error: unknown arguments: {told}\n")


def test_flags_with_hyphens():
    """As transformers' scripts take them."""
    parser = ScriptParser("What it does.")
    parser.add_argument("texts", nargs="*")
    parser.add_argument("--batch_size", type=int)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction)
    for arguments in (["--batch-size", "4"], ["--batch-size=4"], ["--batch_size=4"], ["--batch-si", "4"]):
        args = parser.parse_args([*arguments, "--no-bf16", "--", "--batch-size", "--other"])
        assert (args.batch_size, args.bf16, args.texts) == (4, False, ["--batch-size", "--other"])


def test_values_that_begin_with_hyphens():
    """A comment of SQL. argparse takes it as a value, too."""
    parser = ScriptParser("What it does.")
    parser.add_argument("--prompt")
    assert parser.parse_args(["--prompt", "-- Count the users"]).prompt == "-- Count the users"


def test_a_level_that_does_not_exist(run_recipe):
    result = run_recipe("serve.py", "--target", "me/target", "--draft", "me/draft", "--log_level", "loud")
    assert result.returncode == 2 and "invalid choice: 'loud'" in result.stderr


@pytest.mark.parametrize(
    "recipe", ["benchmark", "extract_features", "quickstart", "regenerate", "train", "trim_vocabulary"]
)
def test_recipes_say_what_to_install(recipe, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.syspath_prepend(RECIPES)
    monkeypatch.delitem(sys.modules, "train", raising=False)  # which some of them import
    with pytest.raises(SystemExit, match=r"pip install 'hf-eagle3\[train\]'"):
        runpy.run_path(str(RECIPES / f"{recipe}.py"), run_name="__main__")


def test_the_home_folder(tmp_path, monkeypatch):
    """A shell expands it only where it begins an argument."""
    monkeypatch.setenv("HOME", str(tmp_path))
    given = ["script.py", "~/draft", "--target=~/model", "--output-dir=~/out", "--prompt", "is ~/a"]
    monkeypatch.setattr("sys.argv", given)
    run_script(lambda: None)
    paths = [f"{tmp_path}/draft", f"--target={tmp_path}/model", f"--output-dir={tmp_path}/out"]
    assert sys.argv == ["script.py", *paths, "--prompt", "is ~/a"]


def test_scripts_print_any_character(monkeypatch):
    """Windows writes to files and pipes in a code page."""
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="cp1252", write_through=True))
    run_script(lambda: print("\N{BOX DRAWINGS LIGHT UP AND RIGHT} é"))
    assert printed.getvalue() == "? é\n".encode("cp1252")


@pytest.mark.parametrize("platform, expected", [("linux", r"python 'a b' 'c\d'"), ("win32", r'python "a b" c\d')])
def test_commands_are_for_the_shell_of_the_system(monkeypatch, platform, expected):
    monkeypatch.setattr("sys.platform", platform)
    assert command_line(["python", "a b", r"c\d"]) == expected

"""The pages of the reference, and docstrings in Hugging Face's style as Markdown. Tests read it, too, without mkdocs."""

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import yaml


PAGES = Path(__file__).parent
DIRECTIVE = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", re.MULTILINE)
REFERENCE = re.compile(r"\[`(~?)([\w.]+)`\]")
SECTION = re.compile(r"^(Args|Returns|Raises|Yields):\n((?:[ \t]+.*(?:\n|$)|\n)+)", re.MULTILINE)
# There is nothing to link to: the site is built offline.
OTHER_PACKAGES = ("datasets", "huggingface_hub", "peft", "torch", "transformers", "trl")


def directives(page: str) -> dict[str, list[str]]:
    """What a page documents: names in Python or paths of recipes, each with the members that it shows."""
    found = {}
    for name, block in DIRECTIVE.findall(page + "\n"):
        options = (yaml.safe_load(block) or {}).get("options", {})
        found[name] = options.get("members") or []
    return found


def documented() -> dict[str, list[str]]:
    """The same of all pages."""
    found = {}
    for page in sorted(PAGES.glob("*.md")):
        found |= directives(page.read_text(encoding="utf-8"))
    return found


def split_entry(entry: str) -> tuple[str, str]:
    """`name (type)` and the description after the first colon that is neither in parentheses nor in code."""
    depth, in_code = 0, False
    for i, character in enumerate(entry):
        if character == "`":
            in_code = not in_code
        elif not in_code:
            depth += (character in "([") - (character in ")]")
            if character == ":" and depth == 0:
                return entry[:i], entry[i + 1 :]
    return entry, ""


def entries(section: str) -> list[tuple[str, str]]:
    """The entries of `Args` or `Raises`: names with types, and descriptions."""
    return [split_entry(entry) for entry in re.split(r"\n(?=\S)", textwrap.dedent(section).strip())]


def names(header: str) -> list[str]:
    """The names in `first (type), second (type)`."""
    while (without := re.sub(r"\([^()]*\)", "", header)) != header:
        header = without
    return re.findall(r"\w+", header)


def arguments(docstring: str | None) -> list[str]:
    """All names in `Args`."""
    sections = dict(SECTION.findall(inspect.cleandoc(docstring or "")))
    return [name for header, _ in entries(sections.get("Args", "")) for name in names(header)]


def to_markdown(docstring: str, link: Callable[[str], str | None]) -> str:
    """
    Sections as lists, and what stands for a name as a link to `link(name)`, or as code if that is `None`.
    """

    def section(found):
        title, content = found.groups()
        lines = ["", f"**{'Arguments' if title == 'Args' else title}**", ""]
        if title in ("Returns", "Yields"):
            lines += [textwrap.dedent(content).strip()]
        else:
            for header, description in entries(content):
                if title == "Raises":
                    header = f"`{header}`"
                for name in names(header) if title == "Args" else ():
                    header = re.sub(rf"(^|, ){name}\b", rf"\1**`{name}`**", header, count=1)
                description = textwrap.dedent(description.strip("\n")).strip()
                description = " ".join(description.split()) if "\n\n" not in description else description
                lines += [f"- {header}: {description}".rstrip(": ")]
        return "\n".join([*lines, "", ""])

    def reference(found):
        is_short, name = found.groups()
        target = link(name)
        shown = name.rpartition(".")[2] if is_short and target is not None else name
        return f"`{shown}`" if target is None else f"[`{shown}`][{target}]"

    return re.sub(r"\n{3,}", "\n\n", REFERENCE.sub(reference, SECTION.sub(section, docstring))).strip()


def find(name: str, scope: str, known: dict[str, list[str]]) -> str | None:
    """
    Which documented name a docstring means by `name`: a member of its own class first. Names of other packages are
    `None`.

    Raises:
        KeyError: if there is none.
    """
    if name.split(".")[0] in OTHER_PACKAGES:
        return None
    identifiers = [*known, *(f"{owner}.{member}" for owner, members in known.items() for member in members)]
    tail = re.sub(r"^(?:[a-z_0-9]+\.)+(?=[A-Z])", "", name) if "." in name else name  # without modules
    tail = tail.rpartition(".")[2] if tail[0].islower() else tail
    found = [identifier for identifier in identifiers if identifier.endswith(f".{tail}")]
    owners = scope.split(".")
    of_own_class = [each for each in found if each.split(".")[-2] in owners and each.split(".")[-2][0].isupper()]
    if not found:
        raise KeyError(name)
    return min(of_own_class or found, key=len)

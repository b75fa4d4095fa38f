"""What mkdocs does beside mkdocstrings: the README as front page, links between files, and the help of the recipes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import docstrings  # noqa: F401  (for extension.py, which is loaded without this folder in the path)
from mkdocs.structure.files import File


ROOT = Path(__file__).parents[2]
OUTSIDE_DOCS = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "experiments/LOG.md": "log.md",
}
LINK = re.compile(r"(!?)\[([^\[\]]+)\]\(([^():#\s]+)(#[^()\s]*)?\)")
COMMAND = re.compile(r"^::: (recipes/\S+\.py)$", re.MULTILINE)


def on_files(files, config):
    for name, page in OUTSIDE_DOCS.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, **kwargs):
    sources = {page: name for name, page in OUTSIDE_DOCS.items()}
    source = ROOT / sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def on_site(link):
        is_image, text, path, anchor = link.groups()
        target = (source.parent / path).resolve()
        if not target.exists():
            return link[0]
        name = target.relative_to(ROOT).as_posix()
        name = OUTSIDE_DOCS.get(name, name.removeprefix("docs/") if name.startswith("docs/") else None)
        if name is None:  # code, which the site does not have
            return text
        return f"{is_image}[{text}]({os.path.relpath(name, Path(page.file.src_uri).parent)}{anchor or ''})"

    return COMMAND.sub(lambda command: help_of(command[1]), LINK.sub(on_site, markdown))


def help_of(recipe: str) -> str:
    """What `--help` says, without the line that only names all flags once more."""
    environment = {**os.environ, "COLUMNS": "100", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, recipe, "--help"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
    return f"```text\n{result.stdout.partition(chr(10) * 2)[2].strip()}\n```"

"""Collects the pages from which the site is built, and fills in pages generated from the code.

`python docs/site/site_source.py` writes to `build/site-source`. `make docs` then builds the site.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Final
from unittest.mock import patch

import foredraft
from foredraft.program import commands as all_commands, main as program

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "build" / "site-source"
STYLE: Final = Path(__file__).parent / "site.css"
MARK: Final = re.compile(r"<!-- made from the code: (\w+) -->")
LINK: Final = re.compile(r"\]\(([^)\s:#]+)")
# The site's pages; linked files are copied too. Links are relative, so the layout stays the same.
PAGES: Final = ("README.md", "CHANGELOG.md", "benchmarks/README.md", "docs")
NOT_COPIED: Final = ("node_modules", "__pycache__", "site", "*.pyc")


def main() -> None:
    """Write the source of the site from scratch."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for name in PAGES:
        copy(ROOT / name)
    shutil.copyfile(STYLE, SOURCE / STYLE.name)
    copy_linked()
    for page in SOURCE.rglob("*.md"):
        page.write_text(MARK.sub(lambda found: MAKERS[found[1]](), page.read_text()))
    for folder in ("decisions", "deploy"):
        (SOURCE / "docs" / folder / "index.md").write_text(listing(SOURCE / "docs" / folder))
    link_to_listings()


def copy(original: Path) -> None:
    """Copy a file or a folder of the repository."""
    target = SOURCE / original.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    if original.is_dir():
        shutil.copytree(original, target, ignore=shutil.ignore_patterns(*NOT_COPIED))
    else:
        shutil.copyfile(original, target)


def copy_linked() -> None:
    """Copy the files that pages link to, and the files that copied pages link to."""
    pages = sorted(SOURCE.rglob("*.md"))
    while pages:
        page = pages.pop()
        for link in LINK.findall(page.read_text()):
            linked = (page.parent / link).resolve()
            original = ROOT / linked.relative_to(SOURCE)
            if original.is_file() and not linked.exists():
                copy(original)
                pages += [linked] if linked.suffix == ".md" else []


def listing(folder: Path) -> str:
    """Return a page that lists the files of a folder. Pages are listed by title."""
    names = sorted(path.name for path in folder.iterdir())
    lines = [f"- [{title(folder / name)}]({name})" for name in names]
    return f"# {folder.name.capitalize()}\n\n" + "\n".join(lines) + "\n"


def title(path: Path) -> str:
    """Return the first heading of a page, or the name of any other file."""
    found = re.search(r"^# (.+)$", path.read_text(), re.MULTILINE) if path.suffix == ".md" else None
    return found[1] if found else path.name


def link_to_listings() -> None:
    """Replace links to folders by links to their listings, because a site consists of pages."""
    for page in SOURCE.rglob("*.md"):
        text = re.sub(r"(\]\([^)\s:#]*(?:decisions|deploy)/)\)", r"\1index.md)", page.read_text())
        page.write_text(text)


def commands() -> str:
    """Return the help of every command."""
    outer: list[tuple[str, ...]] = [(name,) for name in all_commands()]
    helps = {words: help_of(words) for words in outer}
    inner = [(*words, each) for words, text in helps.items() for each in inner_commands(text)]
    helps |= {words: help_of(words) for words in inner}
    sections = (
        f"## foredraft {' '.join(words)}\n\n```text\n{text}\n```\n"
        for words, text in sorted(helps.items())
    )
    return "\n".join(sections)


def help_of(words: tuple[str, ...], flag: str = "--help") -> str:
    """Return the output of `--help-all`, or of `--help` if there is no such option, 80 columns."""
    printed = StringIO()
    terminal = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    with (
        patch.dict(os.environ, terminal),
        patch.object(sys, "argv", ["foredraft", *words, flag]),
        redirect_stdout(printed),
    ):
        try:
            program()
        except SystemExit as ended:
            if ended.code:
                raise
    text = printed.getvalue()
    if flag == "--help" and "--help-all" in text:
        return help_of(words, "--help-all")
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def inner_commands(text: str) -> list[str]:
    """Return the names of the commands that a group's help lists."""
    _, _, listed = text.partition("\nCommands:\n")
    return re.findall(r"^  (\w[\w-]*) ", listed.partition("\n\n")[0], re.MULTILINE)


def settings() -> str:
    """Return the output of `foredraft config` with default settings."""
    clean = {name: value for name, value in os.environ.items() if "FOREDRAFT" not in name}
    command = [sys.executable, "-m", "foredraft", "config"]
    done = subprocess.run(command, cwd=ROOT, env=clean, check=True, capture_output=True, text=True)
    return f"```toml\n{done.stdout.strip()}\n```\n"


def wire() -> str:
    """Return the text of the proto files."""
    files = sorted((ROOT / "proto" / "retriever" / "v1").glob("*.proto"), reverse=True)
    return "\n".join(f"## {path.name}\n\n```proto\n{path.read_text()}```\n" for path in files)


def python() -> str:
    """Return a directive for each public name; the site generator reads their docstrings."""
    names = sorted(vars(foredraft)["__all__"], key=str.lower)
    return "\n".join(f"::: foredraft.{name}\n" for name in names if name != "errors")


MAKERS: Final[Mapping[str, Callable[[], str]]] = MappingProxyType(
    {"commands": commands, "settings": settings, "wire": wire, "python": python}
)

if __name__ == "__main__":
    main()

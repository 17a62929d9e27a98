"""Links of the README and the docs lead somewhere, and pages that code names are there."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)\s]+)\)|\b(?:src|href|srcset)=\"([^\"]+)\"")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(
    r"(?<![\w/.\-])((?:docs|benchmarks|examples)/[\w/.\-]+\.(?:md|py|jsonl|json|svg|proto)\b(?:\.gz)?)"
)
ELSEWHERE = ("http://", "https://", "mailto:")


@cache
def tracked() -> list[Path]:
    """Files of the repository; those of a copy without git."""
    try:
        listed = subprocess.check_output(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git here: nothing says which files are ours")
    return [ROOT / line for line in listed.splitlines() if (ROOT / line).is_file()]


def pages() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md"]


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", each).lower() for each in headings)
    return {re.sub(r"[^\w\- ]", "", each).strip().replace(" ", "-") for each in plain}


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in pages()])
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for groups in LINK.findall(FENCED.sub("", path.read_text())):
        link = next(filter(None, groups))
        if link.startswith(ELSEWHERE):
            continue
        target, _, anchor = link.partition("#")
        at = (path.parent / target).resolve() if target else path
        assert at.exists(), f"{page} links to {link}, which is not there"
        assert at == ROOT or ROOT in at.parents, f"{page} links out of the repository: {link}"
        if anchor and at.suffix == ".md":
            assert anchor in anchors(at), f"{page} links to {link}: no such heading"


def test_pages_and_programs_that_are_named_are_there() -> None:
    checked = 0
    for path in tracked():
        if (
            path.suffix not in {".py", ".md", ".toml", ".yml", ".proto"}
            or path.name == "CHANGELOG.md"
        ):
            continue
        if (ROOT / "tests") in path.parents:
            continue
        for name in NAMED.findall(path.read_text()):
            checked += 1
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"
    assert checked > 30


def test_the_readme_has_no_placeholder() -> None:
    text = (ROOT / "README.md").read_text()
    assert not re.search(r"REPOSITORY|TODO|FIXME|example\.(?:com|org)|your-org", text)


def test_the_site_shows_every_page_once() -> None:
    """Its generator would say so as well, but takes a minute."""
    settings = (ROOT / "docs" / "site" / "mkdocs.yml").read_text()
    shown = re.findall(r": (\S+\.md)$", settings, re.MULTILINE)
    of_docs = [path for path in pages() if (ROOT / "docs") in path.parents]
    expected = {
        str(path.relative_to(ROOT)) for path in of_docs if path.parent.name != "decisions"
    } | {"README.md", "CHANGELOG.md", "benchmarks/README.md"}
    assert set(shown) == expected
    assert len(shown) == len(expected)


def test_pages_that_are_made_from_the_code_have_a_maker() -> None:
    source = (ROOT / "docs" / "site" / "site_source.py").read_text()
    marks = [
        mark
        for path in pages()
        for mark in re.findall(r"<!-- made from the code: (\w+) -->", path.read_text())
    ]
    assert sorted(marks) == ["commands", "python", "settings", "wire"]
    for mark in marks:
        assert f'"{mark}": {mark}' in source


def test_folders_of_the_docs_can_be_seen_at_once() -> None:
    counts: dict[Path, int] = {}
    for path in tracked():
        if (ROOT / "docs") in path.parents:
            counts[path.parent] = counts.get(path.parent, 0) + 1
    assert counts
    assert {str(folder): n for folder, n in counts.items() if n > 16} == {}

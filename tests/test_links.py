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
    r"(?<![\w/.\-])((?:docs|benchmarks|examples)/[\w/.\-]+\.(?:md|py|json|svg|proto))"
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

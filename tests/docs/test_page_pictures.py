"""The README as a code host shows it, and the pictures of pages that are kept."""

import struct
from pathlib import Path

import pytest

from docs.site.page_pictures import PICTURES, ROOT, readme_page
from tests.headless import browser_tab, needs_browser

MOST_BYTES = 150_000
NARROWEST = 900


def test_the_readme_becomes_a_page_with_tables_and_pictures() -> None:
    page = readme_page("# T\n\n<img src='a.svg'>\n\n| a | b |\n|---|---|\n| `c` | d |\n")
    assert "<h1>T</h1>" in page
    assert "<td><code>c</code></td>" in page
    assert "<img src='a.svg'>" in page


@needs_browser
def test_the_readme_fits_and_its_pictures_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "readme.html"
    path.write_text(readme_page((ROOT / "README.md").read_text()), encoding="utf-8")
    with browser_tab(tmp_path) as tab:
        for width, dark in ((380, True), (1600, False)):
            tab.show(path.as_uri(), width=width, dark=dark)
            assert tab.value("document.documentElement.scrollWidth") <= width
            shown = tab.value(
                "[...document.images].map(each => each.complete && each.naturalWidth)"
            )
            assert shown
            assert all(shown)
        assert tab.console == []


@pytest.mark.parametrize("name", ["readme", "trace", "status"])
def test_a_kept_picture_is_small_and_wide_enough(name: str) -> None:
    data = (PICTURES / f"{name}.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) < MOST_BYTES
    width, height = struct.unpack(">II", data[16:24])
    assert width >= NARROWEST
    assert height >= 800

import re
import sys

import pytest
from rich.box import SIMPLE_HEAD
from rich.table import Table

from decoder.commands.terminal import print_table

HEADINGS = [f"figure {number}" for number in range(12)]
NUMBERS = [f"{number}234567.89" for number in range(12)]
WORDS = ["some", "words", "of", "text"] * 10


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("name", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    table.add_column("text", overflow="fold")
    table.add_row("a", *NUMBERS, " ".join(WORDS))
    print_table(table)
    return re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


def test_a_table_for_a_file_takes_the_width_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = printed(capsys)
    assert any(line.split() == ["a", *NUMBERS, *WORDS] for line in lines)
    assert any(line.split() == ["name", *" ".join(HEADINGS).split(), "text"] for line in lines)


@pytest.mark.parametrize(("columns", "has_text"), [(40, False), (100, False), (190, True)])
def test_a_terminal_wraps_or_loses_text_but_no_number(
    columns: int,
    has_text: bool,  # noqa: FBT001  a parameter of the test
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = printed(capsys)
    [row] = [line.split() for line in lines if NUMBERS[0] in line]
    assert row[: 1 + len(NUMBERS)] == ["a", *NUMBERS]
    assert any(all(heading in line for heading in HEADINGS) for line in lines)
    assert ("left out because the terminal is narrow: text" in lines) == (not has_text)
    if has_text:
        assert max(map(len, lines)) <= columns
        assert sum(line.count("words") for line in lines) == 10

import io
import time

import pytest
from rich.console import Console

from indexer.build_report import BuildTally
from indexer.commands.progress import BuildProgress


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Have progress shown on a terminal; return all that is written there."""
    written = io.StringIO()
    monkeypatch.setattr(
        "indexer.commands.progress.Console",
        lambda **_: Console(file=written, force_terminal=True, width=80),
    )
    return written


def shown_next(screen: io.StringIO, wanted: str) -> str:
    """Return what is drawn from now on, up to and with the line that has some words."""
    begin, until_s = len(screen.getvalue()), time.monotonic() + 10
    while wanted not in (drawn := screen.getvalue()[begin:]):
        assert time.monotonic() < until_s, drawn
        time.sleep(0.01)
    return drawn


def test_a_share_is_shown_while_reading_and_none_while_sorting(screen: io.StringIO) -> None:
    tally = BuildTally(num_bytes_found=100, num_bytes_read=30)
    with BuildProgress() as progress:
        progress(tally)
        assert "indexing" in shown_next(screen, "30%")
        tally.num_bytes_read = 100
        progress(tally)
        progress(tally)
        shown_next(screen, "sorting")
        drawn = shown_next(screen, "sorting")
        assert "indexing" not in drawn
        assert "%" not in drawn

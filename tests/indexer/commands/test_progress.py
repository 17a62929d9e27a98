import io

import pytest
from rich.console import Console

from indexer.build_report import BuildTally
from indexer.commands.progress import BuildProgress


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> BuildProgress:
    """Return a progress on a terminal, with what it shows in a text."""
    monkeypatch.setattr(
        "indexer.commands.progress.Console",
        lambda **_: Console(file=io.StringIO(), force_terminal=True, width=80),
    )
    return BuildProgress()


def shown(progress: BuildProgress) -> str:
    with progress._console.capture() as captured:
        progress._console.print(progress._bar.get_renderable())
    return captured.get()


def test_a_share_is_shown_while_reading_and_none_while_sorting(progress: BuildProgress) -> None:
    tally = BuildTally(num_bytes_found=100, num_bytes_read=30)
    with progress:
        progress(tally)
        assert "indexing" in shown(progress)
        assert "30%" in shown(progress)
        tally.num_bytes_read = 100
        progress(tally)
        progress(tally)
        assert "sorting" in shown(progress)
        assert "indexing" not in shown(progress)
        assert "%" not in shown(progress)

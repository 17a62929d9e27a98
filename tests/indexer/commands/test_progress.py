import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from indexer.build import build_index
from indexer.build_report import BuildTally
from indexer.commands.progress import BuildProgress, interrupted
from indexer.stages import gathering
from indexer.tokenizer import DEFAULT_MODEL


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


def test_what_is_done_is_shown_from_the_first_and_a_share_while_reading(
    screen: io.StringIO,
) -> None:
    tally = BuildTally(num_bytes_found=100, num_bytes_read=30)
    with BuildProgress() as progress:
        progress(tally.now("finding sources"))
        shown_next(screen, "finding sources")
        progress(tally.now("reading"))
        assert "reading 0.1 KiB" in shown_next(screen, "30%")
        progress(tally.now("sorting"))
        shown_next(screen, "sorting")
        drawn = shown_next(screen, "sorting")
        assert "reading" not in drawn
        assert "%" not in drawn


def test_files_are_counted_as_they_are_found(tmp_path: Path) -> None:
    shown: list[int] = []
    for folder in range(30):
        (tmp_path / "f" / str(folder)).mkdir(parents=True)
        for number in range(100):
            (tmp_path / "f" / str(folder) / f"{number}.txt").write_text(f"{folder} {number}")

    def note(tally: BuildTally) -> None:
        if tally.doing == gathering.FINDING:
            shown.append(tally.num_files_found)

    with monkeypatched_look(0.001):
        build_index([tmp_path / "f"], tmp_path / "index", DEFAULT_MODEL, on_progress=note)
    assert shown == sorted(shown)
    assert len(set(shown)) > 3


def test_without_a_terminal_lines_say_how_much_and_how_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("indexer.commands.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    tally = BuildTally()
    progress = BuildProgress()
    for seconds, said in ((0, ""), (11, ""), (11, "reading"), (15, ""), (251, "")):
        now[0] = seconds
        tally.num_files_found = 70_000
        if said:
            tally.num_bytes_found, tally.num_bytes_read = 1 << 20, 1 << 16
        progress(tally.now(said or tally.doing or "finding sources"))
    assert capsys.readouterr().err.splitlines() == [
        "finding sources",
        "finding sources: 70,000 files",
        "reading 1.0 MiB",
        "reading: 6% 0 tokens/s, 60 min left",
    ]


def test_tasks_that_are_under_way_count_as_far_as_they_have_come(tmp_path: Path) -> None:
    """Of one block that takes long, in this process or another, the share rises all the same."""
    shown: list[tuple[int, int]] = []
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text("some words " * 5_000)
    with monkeypatched_look(0.01):
        build_index(
            [tmp_path],
            tmp_path / "index",
            DEFAULT_MODEL,
            on_progress=lambda tally: shown.append((tally.num_bytes_read, tally.num_tokens)),
        )
    assert shown == sorted(shown)
    assert len(set(shown)) > 3


@contextmanager
def monkeypatched_look(seconds: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gathering, "_LOOK_S", seconds)
        yield


def test_ctrl_c_says_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), interrupted("my.index is as it was"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "interrupted: my.index is as it was\n"

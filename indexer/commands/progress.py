"""Shows the progress of a build: a bar on a terminal, otherwise lines."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from indexer.build_report import BuildTally
from indexer.stages.gathering import FINDING, READING

_INTERVAL_S: Final = 0.1
"""Seconds between updates of the bar. The bar looks smooth, and drawing takes far less time."""

_LINES_S: Final = 10.0
"""Seconds between lines if there is no terminal."""

_LONG_S: Final = 100.0
"""From this many seconds on, the remaining time is shown in minutes."""

_MIB: Final = 2**20


class BuildProgress:
    """Shows a build's progress on stderr: current work, share, tokens per second and time left.

    Use it as a context manager, and call it with the counts whenever they change.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[done]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("beginning", total=None, done="", left="")
        self._doing = ""
        self._begun_s = self._shown_s = self._told_s = time.monotonic()

    def __call__(self, tally: BuildTally) -> None:
        """Show the progress of a build."""
        now_s = time.monotonic()
        if tally.doing != self._doing:
            self._begin(tally, now_s)
        elif now_s - self._shown_s < _INTERVAL_S:
            return
        self._shown_s = now_s
        total = tally.num_bytes_found if self._counts_bytes(tally) else None
        share = min(1.0, tally.num_bytes_read / total) if total else 0.0
        done = ""
        if total:
            rate = tally.num_tokens / max(now_s - self._begun_s, _INTERVAL_S)
            done = f"{share:4.0%} {rate:,.0f} tokens/s"
        elif tally.doing == FINDING and tally.num_files_found:
            done = f"{tally.num_files_found:,} files"
        if self._console.is_terminal:
            left = "left" if total else ""
            completed = tally.num_bytes_read if total else 0
            self._bar.update(self._task, total=total, completed=completed, done=done, left=left)
        elif done and now_s - self._told_s >= _LINES_S:
            self._told_s = now_s
            if share:
                done += f", {_minutes((now_s - self._begun_s) * (1 - share) / share)} left"
            self._console.print(f"{tally.doing}: {done.strip()}", highlight=False)

    def _begin(self, tally: BuildTally, now_s: float) -> None:
        """Show the current work."""
        self._doing, self._begun_s, self._told_s = tally.doing, now_s, now_s
        size = f" {_size(tally.num_bytes_found)}" if self._counts_bytes(tally) else ""
        if self._console.is_terminal:
            self._bar.reset(self._task, description=f"{tally.doing}{size}")
        else:
            self._console.print(f"{tally.doing}{size}")

    @staticmethod
    def _counts_bytes(tally: BuildTally) -> bool:
        return tally.doing == READING and tally.num_bytes_found > 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= _LONG_S else f"{seconds:.0f} s"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB" if num_bytes >= _MIB else f"{num_bytes / 1024:,.1f} KiB"


@contextmanager
def interrupted(kept: str) -> Iterator[None]:
    """If Ctrl-C ends the block, print what the build leaves behind."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print(f"interrupted: {kept}", highlight=False, soft_wrap=True)
        raise

"""The progress of a build: a bar on a terminal, one line elsewhere."""

import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from indexer.build_report import BuildTally

_INTERVAL_S: Final = 0.1
"""Between two updates: smooth to look at, and far longer than drawing the bar takes."""

_MIB: Final = 2**20


class BuildProgress:
    """Shows the counts of a build on stderr: share done, tokens per second, time remaining.

    Used as a context manager, and called with the counts as often as they change.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn("{task.percentage:3.0f}%"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._started = 0.0
        self._shown = 0.0
        self._is_sorting = False

    def __call__(self, tally: BuildTally) -> None:
        """Show how far a build has come."""
        now = time.monotonic()
        if self._task is None:
            self._start(tally, now)
        if self._task is None:
            return
        if not self._is_sorting and tally.num_bytes_read >= tally.num_bytes_found:
            self._begin_sorting()
        if now - self._shown >= _INTERVAL_S:
            self._shown = now
            tokens_per_s = tally.num_tokens / max(now - self._started, _INTERVAL_S)
            rate = f"{tokens_per_s:,.0f} tokens/s"
            self._bar.update(self._task, completed=tally.num_bytes_read, rate=rate)

    def _begin_sorting(self) -> None:
        """Show that all is read; the time of sorting the last segment is unknown."""
        self._is_sorting = True
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task("sorting the last segment", total=None, rate="")

    def _start(self, tally: BuildTally, now: float) -> None:
        if self._started:
            return
        self._started = now
        if self._console.is_terminal:
            self._task = self._bar.add_task("indexing", total=tally.num_bytes_found, rate="")
            self._bar.start()
        else:
            self._console.print(f"indexing {tally.num_bytes_found / _MIB:.1f} MiB of source files")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._bar.stop()

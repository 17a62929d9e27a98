"""Terminal output: text coloured by source, tables and progress."""

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import typer
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.style import Style
from rich.table import Column, Table

from decoder.observation import ObservedPass, Watcher
from decoder.stopping import TextStream
from retriever.operations.design import colours
from retriever.tree import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FEW: Final = {
    Source.UNSPECIFIED: "bright_black",
    Source.CONTEXT: "blue",
    Source.GENERATIONS: "yellow",
    Source.PHRASES: "green",
    Source.CORPUS: "magenta",
    Source.MODEL: "cyan",
    Source.PREDICTIONS: "red",
    Source.SIBLINGS: "bright_yellow",
    Source.GRAMMAR: "bright_green",
}
"""Colours for terminals with 8 or 16 colours, where some sources have the same nearest colour."""

_LINE_EVERY_S: Final = 30.0
"""Seconds between two progress lines if there is no terminal: 120 lines an hour."""

_BAR_CHARACTERS: Final = 16
"""Width of a progress bar that leaves room in 80 columns for the stage and a few words about it."""

_TIME_CHARACTERS: Final = len("0:00:00")


class Palette:
    """Colours text for a terminal, in as many colours as the terminal supports."""

    def __init__(self) -> None:
        name = Console(force_terminal=True, no_color=False).color_system
        self._system = COLOR_SYSTEMS.get(name or "", ColorSystem.STANDARD)
        has_few = self._system in (ColorSystem.STANDARD, ColorSystem.WINDOWS)
        known = colours()
        if has_few:
            known |= {source.label: colour for source, colour in _FEW.items()}
        self._styles = {source: Style.parse(known.get(source.label, "")) for source in Source}

    def painted(self, text: str, source: Source | None) -> str:
        """Return text in the colour of its source; unchanged if no source drafted it."""
        if source is None or not text:
            return text
        # Colours end with each line, so that text added by a pager or log stays uncoloured there.
        style = self._styles[source]
        lines = text.split("\n")
        return "\n".join(style.render(line, color_system=self._system) for line in lines)

    def legend(self, accepted: Counter[Source], num_tokens: int) -> str:
        """Return a line that names the colours, with the number of tokens of each colour.

        Args:
            accepted: number of accepted tokens by source.
            num_tokens: number of all tokens.
        """
        named = [
            self.painted(f"{source.label} {count}", source)
            for source, count in accepted.most_common()
        ]
        own = num_tokens - accepted.total()
        return ", ".join([*named, f"uncoloured: the model's own {own}"])


class Painter:
    """Writes the text of an answer with each token in the colour of its source.

    The text is what the method `text` gets; the passes only determine where colours change. So
    apart from colours, the text is the same as without a painter.

    Args:
        tokenizer: the tokenizer that decodes the tokens.
        write: called with each piece of text.
        palette: the colours; `None` to write pieces uncoloured when they arrive.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        write: Callable[[str], object],
        palette: Palette | None,
    ) -> None:
        self._write = write
        self._palette = palette
        self._stream = TextStream(tokenizer)
        self._lengths: deque[tuple[int, Source | None]] = deque()
        self._waiting = ""
        self._pieces: list[str] = []

    @property
    def painted(self) -> str:
        """All text written so far."""
        return "".join(self._pieces)

    def text(self, piece: str) -> None:
        """Add the text of a pass; the next call of `observe` adds the colours."""
        if self._palette is None:
            self._emit(piece)
        else:
            self._waiting += piece

    def observe(self, step: ObservedPass) -> None:
        """Add a pass, and write its text."""
        if self._palette is None:
            return
        sources = sources_of(step)
        for token, source in zip(step.tokens, sources, strict=True):
            self._lengths.append((len(self._stream.push([token])), source))
        self._flush(self._palette)

    def finish(self) -> None:
        """Write the rest of the text."""
        if self._palette is not None:
            self._flush(self._palette)
            self._emit(self._waiting)
            self._waiting = ""

    def _flush(self, palette: Palette) -> None:
        painted = []
        while self._lengths and self._waiting:
            length, source = self._lengths.popleft()
            part, self._waiting = self._waiting[:length], self._waiting[length:]
            if len(part) < length:  # the rest is held back, as it may become a stop string
                self._lengths.appendleft((length - len(part), source))
            painted.append(palette.painted(part, source))
        self._emit("".join(painted))

    def _emit(self, piece: str) -> None:
        self._pieces.append(piece)
        self._write(piece)


def sources_of(step: ObservedPass) -> list[Source | None]:
    """Return the source of each token of a pass; `None` for the target's own token."""
    drafted = [Source(number) for number in step.tree.sources[step.path].tolist()]
    return [*drafted, *[None] * (len(step.tokens) - len(drafted))]


class _Bar:
    """Shows the current stage as a progress bar, and earlier stages as lines above it.

    A bar for each stage would exceed the height of a terminal and hide the last stages.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._stage, self._told = "", ""
        self._task: TaskID | None = None

    def __call__(self, stage: str, over: float, told: str) -> None:
        """See `Watcher`."""
        if self._task is None or stage != self._stage:
            self._begin(stage)
        self._told = told
        if self._task is not None:
            self._progress.update(self._task, completed=over, told=told)

    def _begin(self, stage: str) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            line = f"{self._stage}, {self._told}"
            self._progress.console.print(line, markup=False, highlight=False)
        self._stage, self._task = stage, self._progress.add_task(stage, total=1.0, told="")


class _Lines:
    """Reports each stage in lines, at its start and every half minute.

    A progress bar would not be visible without a terminal, because it moves the cursor.
    """

    def __init__(self) -> None:
        self._stage, self._unsaid = "", ""
        self._begun = self._said_at = time.monotonic()

    def __call__(self, stage: str, over: float, told: str) -> None:
        """See `Watcher`."""
        now = time.monotonic()
        line = f"{(now - self._begun) / 60:.1f} min: {stage}, {over:.0%}, {told}"
        if stage != self._stage:
            self.finish()
        elif now - self._said_at < _LINE_EVERY_S:
            self._unsaid = line
            return
        self._stage, self._unsaid, self._said_at = stage, "", now
        typer.echo(line, err=True)

    def finish(self) -> None:
        """Report the final state of a stage."""
        if self._unsaid:
            typer.echo(self._unsaid, err=True)
        self._unsaid = ""


@contextmanager
def watching() -> Iterator[Watcher]:
    """Show progress on standard error during the block: a bar on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = _Lines()
        try:
            yield lines
        finally:
            lines.finish()
        return
    columns = (
        TextColumn("{task.description}", table_column=Column()),  # to wrap between words
        BarColumn(_BAR_CHARACTERS, table_column=Column(min_width=_BAR_CHARACTERS)),
        TextColumn("{task.fields[told]}", table_column=Column()),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=_TIME_CHARACTERS)),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bar(progress)


_UNBOUNDED: Final = 100_000
"""Columns of an output line, more than any table needs."""


def print_table(table: Table) -> None:
    """Print a table to standard output; right-aligned columns are never shortened.

    On a terminal the other columns are wrapped; if they still do not fit, the last of them are left
    out. Elsewhere, such as in a file, a table is as wide as it needs to be.

    Args:
        table: the table; it may be modified.
    """
    for column in table.columns:
        if column.justify == "right":
            column.no_wrap = True
            column.min_width = max(cell_len(str(c)) for c in (column.header, *column.cells))
    if not sys.stdout.isatty():
        Console(width=_needed(table).maximum).print(table)
        return
    width, left_out = Console().width, []
    while _needed(table).minimum > width and table.columns[-1].justify != "right":
        left_out.append(str(table.columns.pop().header))
    console = Console(width=max(width, _needed(table).minimum))
    console.print(table)
    if left_out:
        console.print(f"left out because the terminal is narrow: {', '.join(reversed(left_out))}")


def _needed(table: Table) -> Measurement:
    wide = Console(width=_UNBOUNDED)
    return Measurement.get(wide, wide.options, table)

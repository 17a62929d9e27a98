"""Shows the first records of files in readable form: the prompt, and the output or text."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Final

from indexer.build_report import BuildTally
from indexer.errors import SourceError
from indexer.sources.blocks import SourcePiece
from indexer.sources.chats.conversations import (
    Turns,
    conversation_of,
    exchanges_of,
    plain_text,
    turns_of,
)
from indexer.sources.record_reading import records_of
from indexer.sources.recordings import RecordingTally, read_records
from indexer.sources.source_options import SourceOptions

MOST_SAMPLES: Final = 5
"""Most samples to show. Together they fit on one screen."""

_MAX_CHARACTERS: Final = 300


@dataclass(frozen=True, slots=True)
class RecordSample:
    """An output with the end of its prompt, or a text without a prompt.

    Attributes:
        name: name of the record.
        given: end of the prompt, which is all earlier turns; empty for a text without a prompt.
        written: start of the output or text that a build would index.
    """

    name: str
    given: str
    written: str


def given_in(piece: SourcePiece, options: SourceOptions) -> str:
    """Return the prompt of the first selected text of a piece; empty if it has no prompt."""
    return next(_given(piece, options), "")


def _given(piece: SourcePiece, options: SourceOptions) -> Iterator[str]:
    if options.turns != Turns.ASSISTANT:
        return
    for _, record in records_of(piece, options, BuildTally()):
        found = None if isinstance(record, str) else conversation_of(record, options.field)
        if found is not None:
            for number, _ in turns_of(found, "assistant"):
                yield plain_text(found.turns[: number - 1])


def _recorded(path: Path, field: str) -> tuple[list[RecordSample], RecordingTally]:
    """Return the first outputs of a recordings file, and the counts of the records read.

    Raises:
        SourceError: the file cannot be read.
    """
    tally = RecordingTally(field=field)
    samples: list[RecordSample] = []
    for name, record in read_records(path, tally):
        with tally.dropping(name):
            taken = tally.take(record, path, "outputs", exchanges_of)[:1]
            samples += [sample_of(name, plain_text(each.prompt), each.output) for each in taken]
        if len(samples) == MOST_SAMPLES:
            break
    return samples, tally


def sample_of(name: str, given: str, written: str) -> RecordSample:
    """Return a sample, shortened to a few lines."""
    # The end of the prompt matters most, because the output answers it.
    end = " ".join(given[-2 * _MAX_CHARACTERS :].split())
    beginning = shorten(written[: 4 * _MAX_CHARACTERS], _MAX_CHARACTERS, placeholder=" …")
    is_cut = len(end) > _MAX_CHARACTERS or len(given) > 2 * _MAX_CHARACTERS
    return RecordSample(name, f"… {end[-_MAX_CHARACTERS:]}" if is_cut else end, beginning)


def show_recording(path: Path, field: str) -> None:
    """Print the first outputs of a recordings file, and the counts of the records read.

    Raises:
        SourceError: the file cannot be read, or has no output.
    """
    samples, tally = _recorded(path, field)
    if not samples:
        raise SourceError(f"{path} holds no recorded output: {tally.why_nothing()}")
    show_samples(samples)
    print(*tally.describe(), sep="\n")  # noqa: T201  (the output of a command)


def show_samples(samples: Iterable[RecordSample]) -> None:
    """Print samples: prompts dimmed, outputs and texts in green."""
    from rich.console import Console  # noqa: PLC0415  (only for terminals)
    from rich.text import Text  # noqa: PLC0415  (as above)

    text = Text()
    for sample in samples:
        text.append(f"  {sample.name}\n")
        if sample.given:
            text.append("    given:   ").append(f"{sample.given}\n", "dim")
        text.append("    written: " if sample.given else "    text:    ")
        text.append(f"{sample.written}\n", "green")
    Console(highlight=False, soft_wrap=True).print(text, end="")

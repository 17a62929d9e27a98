"""Loading what a command needs, and showing on standard error how far that is."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from indexer.reader import Index
from retriever.encoding import ChatEncoder
from retriever.phrases import ListedPhrases


def listed_phrases(
    paths: list[Path] | None, encoder: ChatEncoder, index: list[Path] | None
) -> ListedPhrases | None:
    """Load listed phrases and say on standard error what was loaded."""
    if not paths:
        return None
    vocabulary = encoder.vocabulary
    if vocabulary is None and index:
        with closing(Index.open(index[0])) as opened:
            vocabulary = opened.vocabulary
    size = vocabulary.size if vocabulary is not None else None
    listed = ListedPhrases.load(paths, encoder.encode_output, size, track=progress)
    for line in listed.summary():
        print(line, file=sys.stderr)  # noqa: T201  (for whoever runs the command)
    return listed


def progress(items: Iterable[Any], doing: str) -> Iterator[Any]:
    """Show progress on a terminal's standard error."""
    console = Console(stderr=True)
    yield from track(items, doing, console=console, disable=not console.is_terminal)


def counted(items: Iterable[Any], total: int, doing: str) -> Iterator[Any]:
    """Show progress as `progress` does, for items that come one by one."""
    console = Console(stderr=True)
    yield from track(items, doing, total=total, console=console, disable=not console.is_terminal)

"""What the commands share: errors in one line, and progress of what is loaded."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from indexer.errors import IndexerError
from indexer.launch import errors_in_one_line
from indexer.reader import Index
from retriever.errors import RetrieverError
from retriever.predict.phrases import ListedPhrases
from retriever.replay.traces import ChatEncoder
from retriever.sessions.options import load_phrases

clear_errors = partial(errors_in_one_line, RetrieverError, IndexerError)
"""Prints an error of ours as one line and ends with status 1; for a block or a command."""


def listed_phrases(
    paths: Sequence[Path], encoder: ChatEncoder, index: Sequence[Path]
) -> ListedPhrases | None:
    """Load listed phrases for an encoder's vocabulary, or else for that of the first index.

    Raises:
        IndexerError: the index cannot be opened.
        PhrasesError: a file cannot be read.
    """
    vocabulary = encoder.vocabulary
    if vocabulary is None and paths and index:
        with closing(Index.open(index[0])) as opened:
            vocabulary = opened.vocabulary
    size = None if vocabulary is None else vocabulary.size
    return load_phrases(paths, encoder.encode_output, size, track=progress)


def progress(items: Iterable[Any], doing: str, total: int | None = None) -> Iterator[Any]:
    """Show progress on a terminal's standard error.

    Args:
        items: are passed through.
        doing: what is done with them.
        total: how many there are, where they come one by one.
    """
    console = Console(stderr=True)
    yield from track(items, doing, total=total, console=console, disable=not console.is_terminal)

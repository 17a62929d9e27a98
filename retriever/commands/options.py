"""Shared parts of the commands: one-line errors and progress."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from indexer.errors import IndexerError
from indexer.launch import errors_in_one_line
from retriever.errors import RetrieverError

clear_errors = partial(errors_in_one_line, RetrieverError, IndexerError)
"""Prints our own error as one line and exits with status 1; wraps a block or a command."""


def progress(items: Iterable[Any], doing: str, total: int | None = None) -> Iterator[Any]:
    """Show progress on standard error if it is a terminal.

    Args:
        items: items to pass through.
        doing: description of the work on them.
        total: number of items, if they come from an iterator.
    """
    from rich.console import Console  # noqa: PLC0415  (not needed for help)
    from rich.progress import track  # noqa: PLC0415  (the same)

    console = Console(stderr=True)
    yield from track(items, doing, total=total, console=console, disable=not console.is_terminal)

"""What the commands share: errors in one line, and progress."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from indexer.errors import IndexerError
from indexer.launch import errors_in_one_line
from retriever.errors import RetrieverError

clear_errors = partial(errors_in_one_line, RetrieverError, IndexerError)
"""Prints an error of ours as one line and ends with status 1; for a block or a command."""


def progress(items: Iterable[Any], doing: str, total: int | None = None) -> Iterator[Any]:
    """Show progress on a terminal's standard error.

    Args:
        items: are passed through.
        doing: what is done with them.
        total: how many there are, where they come one by one.
    """
    from rich.console import Console  # noqa: PLC0415  (help needs none)
    from rich.progress import track  # noqa: PLC0415  (the same)

    console = Console(stderr=True)
    yield from track(items, doing, total=total, console=console, disable=not console.is_terminal)

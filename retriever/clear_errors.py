"""Errors as a command line shows them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from indexer.errors import IndexerError
from retriever.errors import RetrieverError


@contextmanager
def clear_errors() -> Iterator[None]:
    """Print an error of ours as one line and end with status 1."""
    try:
        yield
    except (RetrieverError, IndexerError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  (for whoever gave the command)
        raise typer.Exit(1) from error

"""The error classes for building, opening and checking an index."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Final

_MAX_REASON_CHARACTERS: Final = 500
"""Longest reason to print. Some libraries put a whole file or configuration into a message."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def reason_of(error: BaseException) -> str:
    """Return a library error's message on one line; for a system error, without the path."""
    said = getattr(error, "strerror", None) or str(error)
    text = shorten(said, _MAX_REASON_CHARACTERS, placeholder=" \u2026")
    return text or type(error).__name__


class IndexerError(Exception):
    """Base class of every error that this package raises."""


class MissingPluginError(IndexerError):
    """The request needs a plugin that is not installed."""


class SourceError(IndexerError):
    """A source is missing, or the sources contain nothing that can be indexed."""


class UnusableError(IndexerError):
    """A document, a record or the rest of a file cannot be used. Reading continues after it.

    Args:
        reason: reason under which it is counted; also the error message.
        remedy: what the user can do.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


class RefusedFileError(UnusableError):
    """A file does not have the type that its name implies, or lacks the requested content."""


class TokenizerError(IndexerError):
    """A tokenizer cannot be found, loaded or used."""


class TokenizerMismatchError(IndexerError):
    """An index was built for a different tokenizer."""


class IndexNotFoundError(IndexerError):
    """There is no index at the given path."""


class IndexExistsError(IndexerError):
    """The output path exists and may not be replaced."""


class IndexBusyError(IndexerError):
    """Another process is changing the index."""


class DamagedIndexError(IndexerError):
    """Files of an index are missing, or contain bytes that its builder did not write."""


class FormatVersionError(IndexerError):
    """An index has a format that this version cannot read."""


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """If writing fails inside the block, raise an error that names the path.

    Args:
        path: path that is written.

    Raises:
        IndexerError: the disk is full, or the system denies the write.
    """
    try:
        yield
    except OSError as error:
        advice = ": free space on the disk" if error.errno in _FULL else ""
        raise IndexerError(f"cannot write {path}: {reason_of(error)}{advice}") from error


@contextmanager
def needing_transformers(what: str) -> Iterator[None]:
    """If transformers is missing inside the block, raise an error that says what to install.

    Args:
        what: the feature that needs transformers, named in the error.

    Raises:
        TokenizerError: transformers is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise TokenizerError(
            f"{what} needs transformers: run `pip install 'foredraft[server]'`"
        ) from error

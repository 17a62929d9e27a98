"""The errors of building, opening and checking an index, as one class hierarchy."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Final

_MAX_REASON_CHARACTERS: Final = 500
"""Longest reason: some libraries put a whole file or configuration into a message."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def reason_of(error: BaseException) -> str:
    """Return the message of a library's error on one line; a system error without its path."""
    said = getattr(error, "strerror", None) or str(error)
    text = shorten(said, _MAX_REASON_CHARACTERS, placeholder=" \u2026")
    return text or type(error).__name__


class IndexerError(Exception):
    """Base of every error that this package raises."""


class MissingPluginError(IndexerError):
    """The request needs a plugin that is not part of this installation."""


class SourceError(IndexerError):
    """A source is missing, or the sources hold nothing that can be indexed."""


class UnusableError(IndexerError):
    """A document, a record or the rest of a file cannot be used; everything else still can.

    Args:
        reason: reason under which it is counted; also the message.
        remedy: what to do.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


class RefusedFileError(UnusableError):
    """A file is not what its name says, or has nothing of what was requested."""


class TokenizerError(IndexerError):
    """A tokenizer cannot be found, loaded or used."""


class TokenizerMismatchError(IndexerError):
    """An index was built for another tokenizer than the given one."""


class IndexNotFoundError(IndexerError):
    """There is no index at the given path."""


class IndexExistsError(IndexerError):
    """The output path exists and may not be replaced."""


class IndexBusyError(IndexerError):
    """Another process is changing the index."""


class DamagedIndexError(IndexerError):
    """An index lacks files, or has bytes that its builder did not write."""


class FormatVersionError(IndexerError):
    """An index has another format than this version reads."""


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """If the system refuses something in the block, raise an error that names the path.

    Args:
        path: path that is written.

    Raises:
        IndexerError: the disk is full or refuses.
    """
    try:
        yield
    except OSError as error:
        advice = ": free space on the disk" if error.errno in _FULL else ""
        raise IndexerError(f"cannot write {path}: {reason_of(error)}{advice}") from error


@contextmanager
def needing_transformers(what: str) -> Iterator[None]:
    """If the block does not find transformers, say what to install; most indexes do not need it.

    Args:
        what: what needs transformers.

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

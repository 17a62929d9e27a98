"""The errors of building, opening and checking an index, as one tree."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Final

_MAX_REASON_CHARACTERS: Final = 500
"""Some libraries put a whole file or configuration into a message: a few lines of it suffice."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def reason_of(error: BaseException) -> str:
    """Return the message of a library's error in one line; of a system error without its path."""
    said = getattr(error, "strerror", None) or str(error)
    text = shorten(said, _MAX_REASON_CHARACTERS, placeholder=" \u2026")
    return text or type(error).__name__


class IndexerError(Exception):
    """Base of every error that this package raises."""


class MissingPluginError(IndexerError):
    """What was asked for needs a plugin that is not part of this installation."""


class SourceError(IndexerError):
    """A source is missing, or the sources together hold nothing that could be indexed."""


class UnusableError(IndexerError):
    """A document, a record or the rest of a file cannot be used; it costs itself and no more.

    Args:
        reason: under which it is counted; also the message.
        remedy: what to do.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


class RefusedFileError(UnusableError):
    """A file is not what its name says, or has nothing that was asked for, from the beginning."""


class TokenizerError(IndexerError):
    """A tokenizer cannot be found, loaded or used."""


class TokenizerMismatchError(IndexerError):
    """An index was built for another tokenizer than the one at hand."""


class IndexNotFoundError(IndexerError):
    """There is no index at the given path."""


class IndexExistsError(IndexerError):
    """The output path is taken and was not to be replaced."""


class IndexBusyError(IndexerError):
    """Another process is changing the index."""


class DamagedIndexError(IndexerError):
    """An index lacks files, or holds bytes that its builder did not write."""


class FormatVersionError(IndexerError):
    """An index was written in another format than this version reads."""


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Say what could not be written where the system refuses something in the block.

    Args:
        path: what is written.

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
    """Say what to install where the block does not find transformers; most indexes need none.

    Args:
        what: takes it.

    Raises:
        TokenizerError: transformers is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise TokenizerError(
            f"{what} takes transformers: run `pip install 'foredraft[server]'`"
        ) from error

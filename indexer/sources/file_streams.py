"""Opens files as streams: decompressed, decoded, in lines of bounded length, with clear errors."""

import bz2
import codecs
import gzip
import io
import lzma
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

from indexer.errors import RefusedFileError, SourceError, UnusableError, reason_of
from indexer.format.compression import zstd
from indexer.sources.blocks import (
    Compression,
    FileForm,
    Format,
    SourceFile,
)
from indexer.sources.source_options import (
    NAME_ENCODING,
    NOT_TEXT,
    SourceOptions,
    StdinFormat,
)

BOM_BYTES: Final = 4
"""Number of bytes at the start of a file that determine its encoding."""

COPY_AGAIN: Final = "copy it again, or give it the suffix of its real type"

_DAMAGED: Final = (EOFError, zlib.error, gzip.BadGzipFile, zstd.ZstdError, lzma.LZMAError)
"""Raised while reading a damaged compressed file, after the data before the damage is read."""

# UTF-32 first, because its byte order mark starts with the one of UTF-16.
_MARKS: Final = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_MAGIC: Final = {
    b"\x1f\x8b": ("gzip", "add .gz to its name"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", "add .zst to its name"),
    b"BZh": ("bzip2", "add .bz2 to its name"),
    b"\xfd7zXZ": ("xz", "add .xz to its name"),
    b"PK\x03\x04": ("a zip archive", "unpack it; if it is a spreadsheet, save the table as CSV"),
    b"PAR1": ("Parquet", "end its name in .parquet"),
    b"ARROW1": ("Arrow", "end its name in .arrow"),
    b"SQLite format 3": ("an SQLite database", "export its table as CSV or JSON lines"),
}
"""First bytes of files that are not text, with the file type and what the user can do."""

_MAGIC_BYTES: Final = 16


@contextmanager
def reading(file: SourceFile) -> Iterator[None]:
    """If the file cannot be read, or not to its end, raise an error that says why.

    Raises:
        UnusableError: the file is damaged, is not accessible, or has another encoding.
    """
    try:
        yield
    except _DAMAGED as error:
        kind = file.format.compression
        raise UnusableError(f"unreadable: damaged {kind}", COPY_AGAIN) from error
    except UnicodeError as error:
        raise UnusableError(NOT_TEXT, NAME_ENCODING) from error
    except OSError as error:
        raise UnusableError(f"unreadable: {reason_of(error)}") from error


@contextmanager
def opened(file: SourceFile) -> Iterator[tuple[Any, IO[bytes]]]:
    """Yield a stream of the file's decompressed bytes, and the stream of the file itself.

    Raises:
        OSError: the file cannot be opened.
        RefusedFileError: the file does not have the type that its name implies.
    """
    with file.path.open("rb") as raw:
        if file.format.compression == Compression.NONE:
            _check_kind(raw.peek(_MAGIC_BYTES))
        if file.format.compression == Compression.GZIP:
            yield gzip.GzipFile(fileobj=raw), raw
        elif file.format.compression == Compression.ZSTD:
            yield zstd.ZstdFile(raw), raw
        elif file.format.compression == Compression.BZ2:
            yield bz2.BZ2File(raw), raw
        elif file.format.compression == Compression.XZ:
            yield lzma.LZMAFile(raw), raw  # noqa: SIM115  (its file is closed here)
        else:
            yield raw, raw


def _check_kind(head: bytes) -> None:
    for magic, (kind, remedy) in _MAGIC.items():
        if head.startswith(magic):
            raise RefusedFileError(f"{NOT_TEXT} but {kind}", remedy)


def encoding_of(head: bytes, otherwise: str) -> str:
    """Return a text file's encoding, from its byte order mark.

    Args:
        head: first bytes of the file, `BOM_BYTES` or more.
        otherwise: encoding to return if there is no byte order mark.
    """
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), otherwise)


def has_plain_newlines(encoding: str) -> bool:
    """Return whether the encoding writes a line break as a single ASCII byte."""
    return encoding == "utf-8-sig" or "\n".encode(encoding) == b"\n"


@contextmanager
def decoded(stream: Any, encoding: str) -> Iterator[Any]:
    """Yield a stream of lines: bytes if each line break is a single byte, otherwise text."""
    if has_plain_newlines(encoding):
        yield stream
        return
    text = io.TextIOWrapper(stream, encoding, newline="\n")
    try:
        yield text
    finally:
        text.detach()


def bounded_lines(stream: Any, max_line: int, num_bytes: int) -> Iterator[str | bytes | None]:
    """Yield lines. A line beyond the limit is yielded as None and never held in memory.

    Args:
        stream: stream of lines of text or bytes.
        max_line: most characters or bytes of a line.
        num_bytes: size of all lines to read, or more.

    Yields:
        Lines with their line breaks.

    Raises:
        UnicodeError: the rest of a text stream cannot be decoded.
    """
    while num_bytes > 0 and (line := stream.readline(max_line)):
        num_bytes -= len(line)
        if len(line) < max_line or _ends(line):
            yield line
            continue
        while line and not _ends(line):
            line = stream.readline(max_line)
            num_bytes -= len(line)
        yield None


def _ends(line: str | bytes) -> bool:
    return line.endswith("\n") if isinstance(line, str) else line.endswith(b"\n")


STANDARD_INPUT_NAME: Final = "stdin"
"""File name for standard input."""


def keep_standard_input(scratch: Path | None, options: SourceOptions) -> SourceFile:
    """Copy standard input to a file. Plain text is copied only up to just over the size limit.

    Args:
        scratch: folder for the file; must exist until all blocks are read.
        options: form of standard input, licence, and size limit of a document.

    Raises:
        SourceError: there is no folder, no standard input, or no disk space.
    """
    stream: BinaryIO | None = getattr(sys.stdin, "buffer", None)
    if stream is None or scratch is None:
        missing = "standard input" if stream is None else "folder to keep standard input in"
        raise SourceError(f"there is no {missing}: name a file instead of -")
    path = scratch / STANDARD_INPUT_NAME
    is_text = options.stdin_format == StdinFormat.TEXT
    try:
        with path.open("xb") as kept:
            if is_text:
                kept.write(stream.read(options.max_document_bytes + 1))
            else:
                shutil.copyfileobj(stream, kept)
        num_bytes = path.stat().st_size
    except OSError as error:
        said = reason_of(error)
        raise SourceError(f"cannot keep standard input in {scratch}: {said}") from error
    form = Format(FileForm.TEXT if is_text else FileForm.LINES)
    return SourceFile(path, STANDARD_INPUT_NAME, form, options.licence, num_bytes)

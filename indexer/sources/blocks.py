"""The values that make up a plan: files, pieces of files, blocks of pieces, and documents."""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Final


class FileForm(StrEnum):
    """The form of a file: plain text, a format that contains text, records, or a table."""

    TEXT = "text"
    NOTEBOOK = "notebook"
    PAGE = "page"
    SUBTITLES = "subtitles"
    MAIL = "mail"
    LINES = "JSON lines"
    TEXT_LINES = "lines of text or JSON"
    JSON = "JSON"
    CSV = "CSV"
    PARQUET = "Parquet"
    ARROW = "Arrow"


class Compression(StrEnum):
    """The compression of a file."""

    NONE = ""
    GZIP = "gzip"
    ZSTD = "zstd"
    BZ2 = "bz2"
    XZ = "xz"


@dataclass(frozen=True, slots=True)
class Format:
    """The form and the compression of a file."""

    form: FileForm
    compression: Compression = Compression.NONE

    @property
    def is_table(self) -> bool:
        """Whether the file is read with pyarrow."""
        return self.form in _TABLES.values()

    @property
    def is_text(self) -> bool:
        """Whether the file's records are texts rather than JSON objects or rows."""
        return self.form in _TEXTS


_COMPRESSIONS: Final = {
    ".gz": Compression.GZIP,
    ".zst": Compression.ZSTD,
    ".bz2": Compression.BZ2,
    ".xz": Compression.XZ,
}
_TEXTS: Final = frozenset(
    {FileForm.TEXT, FileForm.NOTEBOOK, FileForm.PAGE, FileForm.SUBTITLES, FileForm.MAIL}
)
_TABLES: Final = {".parquet": FileForm.PARQUET, ".arrow": FileForm.ARROW}
_RECORDS: Final = {
    ".jsonl": FileForm.LINES,
    ".ndjson": FileForm.LINES,
    ".json": FileForm.JSON,
    ".traj": FileForm.JSON,
    ".ipynb": FileForm.NOTEBOOK,
    ".srt": FileForm.SUBTITLES,
    ".vtt": FileForm.SUBTITLES,
    ".mbox": FileForm.MAIL,
    ".eml": FileForm.MAIL,
    ".htm": FileForm.PAGE,
    ".html": FileForm.PAGE,
    ".csv": FileForm.CSV,
    ".tsv": FileForm.CSV,
}
_TEXT_LIST: Final = """
    .adoc .asm .bash .bat .c .cc .cfg .cjs .clj .cmake .conf .cpp .cs .css .csv .cu .cuh .cxx .dart
    .diff .el .erl .ex .exs .f90 .fs .go .gradle .graphql .groovy .h .hh .hpp .hs .htm .html .ini
    .java .jl .js .json .jsx .kt .less .lisp .log .lua .m .markdown .md .mjs .mk .ml .mli
    .nim .patch .php .pl .pm .po .proto .ps1 .py .pyi .pyx .r .rb .rs .rst .s .sass .scala .scm
    .scss .sh .sql .srt .svelte .swift .tcl .tex .text .tf .toml .ts .tsv .tsx .txt .v .vb .vim
    .vue .xml .xsd .xsl .yaml .yml .zig .zsh
"""
_TEXT: Final = frozenset(_TEXT_LIST.split())
_PROSE: Final = frozenset({".adoc", ".markdown", ".md", ".rst", ".text", ".txt"})
_NAMES: Final = frozenset(
    {"authors", "changelog", "copying", "dockerfile", "license", "makefile", "notice", "readme"}
)


def format_of(name: str) -> Format | None:
    """Return the format that a file's name implies, or None if it implies none."""
    inner, compression = _decompressed(name.lower())
    suffix = PurePath(inner).suffix
    if suffix in _RECORDS:
        return Format(_RECORDS[suffix], compression)
    if suffix in _TABLES and not compression:
        return Format(_TABLES[suffix])
    if suffix in _TEXT or inner.partition(".")[0] in _NAMES:
        return Format(FileForm.TEXT, compression)
    return None


def text_format_of(name: str) -> Format:
    """Return the format of a file with any suffix that is known to be text."""
    return Format(FileForm.TEXT, _decompressed(name.lower())[1])


def _decompressed(name: str) -> tuple[str, Compression]:
    path = PurePath(name)
    compression = _COMPRESSIONS.get(path.suffix, Compression.NONE)
    return (path.stem if compression else path.name), compression


def is_code(suffix: str) -> bool:
    """Return whether a suffix, in lower case, belongs to a text file that is not prose."""
    return suffix in _TEXT - _PROSE


# Opening a file takes time even if it is empty, so each file counts as at least this many bytes.
_MIN_WEIGHT_BYTES: Final = 4096


def name_of(path: Path) -> str:
    """Return a path for display, with slashes and with non-UTF-8 bytes replaced."""
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")


HALF_CHARACTER: Final = "half of a character"
_HALF: Final = re.compile("[\ud800-\udfff]")


def whole_characters(text: str) -> str:
    """Return a text in which U+FFFD replaces each lone surrogate.

    JSON allows lone surrogates. A truncated stream ends in one, and Python uses one for an
    undecodable byte.
    """
    return _HALF.sub("\ufffd", text)


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document as found in a source.

    Attributes:
        name: path of the file. In JSON lines, `:` and the line number follow, counted from 1. In
            tables, `:` and the row number follow, counted from 0. For a turn of a conversation, `#`
            and the turn's number follow, counted from 1.
        licence: an SPDX identifier or whatever the source says; empty if unknown.
        text: content of the document. It may be empty, or contain characters that cannot be
            indexed, such as NUL.
    """

    name: str
    licence: str
    text: str


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read.

    Attributes:
        path: path of the file.
        name: path as it appears in document names, with non-UTF-8 bytes replaced.
        format: format of the file.
        licence: licence of documents that do not state their own; empty if unknown.
        num_bytes: size on disk.
    """

    path: Path
    name: str
    format: Format
    licence: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SourcePiece:
    """A file, or a range of its lines or rows.

    Attributes:
        file: the file.
        num_bytes: the piece's share of the file's size on disk.
        start: offset of the first byte. In tables, number of the first row group or record batch.
        end: offset after the last byte. In tables, number after the last row group or record batch.
        first: number of lines or rows of the file that precede the piece.
    """

    file: SourceFile
    num_bytes: int
    start: int = 0
    end: int = sys.maxsize
    first: int = 0


@dataclass(frozen=True, slots=True)
class SourceBlock:
    """The pieces that one task reads. It can be pickled, and depends on no other block."""

    pieces: tuple[SourcePiece, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the pieces on disk."""
        return sum(piece.num_bytes for piece in self.pieces)


def gather(pieces: Iterable[SourcePiece], block_bytes: int) -> Iterator[SourceBlock]:
    """Yield blocks of about `block_bytes`; small pieces share a block, a large one is alone."""
    gathered: list[SourcePiece] = []
    size = 0
    for piece in pieces:
        weight = max(piece.num_bytes, _MIN_WEIGHT_BYTES)
        if gathered and size + weight > block_bytes:
            yield SourceBlock(tuple(gathered))
            gathered, size = [], 0
        gathered.append(piece)
        size += weight
    if gathered:
        yield SourceBlock(tuple(gathered))

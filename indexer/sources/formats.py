"""What the name of a file says about how it is read."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Final


class Form(StrEnum):
    """How documents lie in a file."""

    TEXT = "text"
    LINES = "JSON lines"
    PARQUET = "Parquet"
    ARROW = "Arrow"


class Compression(StrEnum):
    """What a file is to be decompressed with."""

    NONE = ""
    GZIP = "gzip"
    ZSTD = "zstd"


@dataclass(frozen=True, slots=True)
class Format:
    """How a file is read."""

    form: Form
    compression: Compression = Compression.NONE

    @property
    def is_table(self) -> bool:
        """Whether the file has columns."""
        return self.form in _TABLES.values()


_COMPRESSIONS: Final = {".gz": Compression.GZIP, ".zst": Compression.ZSTD}
_TABLES: Final = {".parquet": Form.PARQUET, ".arrow": Form.ARROW}
_LINES: Final = frozenset({".jsonl", ".ndjson"})
_TEXT_LIST: Final = """
    .adoc .asm .bash .bat .c .cc .cfg .cjs .clj .cmake .conf .cpp .cs .css .csv .cu .cuh .cxx .dart
    .diff .el .erl .ex .exs .f90 .fs .go .gradle .graphql .groovy .h .hh .hpp .hs .htm .html .ini
    .ipynb .java .jl .js .json .jsx .kt .less .lisp .log .lua .m .markdown .md .mjs .mk .ml .mli
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
    """Return how a file of that name is read, or None if the name does not say."""
    inner, compression = _decompressed(name.lower())
    suffix = PurePath(inner).suffix
    if suffix in _LINES:
        return Format(Form.LINES, compression)
    if suffix in _TABLES and not compression:
        return Format(_TABLES[suffix])
    if suffix in _TEXT or inner.partition(".")[0] in _NAMES:
        return Format(Form.TEXT, compression)
    return None


def text_format_of(name: str) -> Format:
    """Return how a file is read that is said to be text, whatever its suffix."""
    return Format(Form.TEXT, _decompressed(name.lower())[1])


def _decompressed(name: str) -> tuple[str, Compression]:
    path = PurePath(name)
    compression = _COMPRESSIONS.get(path.suffix, Compression.NONE)
    return (path.stem if compression else path.name), compression


def is_code(suffix: str) -> bool:
    """Return whether a suffix, in lower case, is that of text which is not prose."""
    return suffix in _TEXT - _PROSE

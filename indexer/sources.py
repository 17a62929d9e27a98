"""Finding and reading what is to be indexed: folders, files and JSON lines."""

import gzip
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from indexer.errors import SourceError
from indexer.tally import Tally

DEFAULT_FIELD: Final = "text"
DEFAULT_MAX_DOCUMENT_BYTES: Final = 10 * 2**20

TOO_LARGE: Final = "too large"
NOT_TEXT: Final = "not text"

_LINE_SUFFIXES: Final = (".jsonl", ".jsonl.gz")
_SUFFIX_LIST: Final = """
    .adoc .asm .bash .bat .c .cc .cfg .cjs .clj .cmake .conf .cpp .cs .css .csv .cu .cuh .cxx .dart
    .diff .el .erl .ex .exs .f90 .fs .go .gradle .graphql .groovy .h .hh .hpp .hs .htm .html .ini
    .ipynb .java .jl .js .json .jsx .kt .less .lisp .log .lua .m .markdown .md .mjs .mk .ml .mli
    .nim .patch .php .pl .pm .po .proto .ps1 .py .pyi .pyx .r .rb .rs .rst .s .sass .scala .scm
    .scss .sh .sql .srt .svelte .swift .tcl .tex .text .tf .toml .ts .tsv .tsx .txt .v .vb .vim
    .vue .xml .xsd .xsl .yaml .yml .zig .zsh
"""
_SUFFIXES: Final = frozenset(_SUFFIX_LIST.split())
_NAMES: Final = frozenset(
    {"authors", "changelog", "copying", "dockerfile", "license", "makefile", "notice", "readme"}
)
_SKIPPED_FOLDERS: Final = frozenset({"__pycache__", "node_modules"})

# JSON writes a byte of text with up to six characters; the rest of a line is names and marks.
_ESCAPED_BYTES: Final = 6
_LINE_OVERHEAD_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to be read: where it is, what documents from it are called, and its size."""

    path: Path
    name: str
    num_bytes: int


def find_files(sources: Sequence[Path | str], tally: Tally) -> list[SourceFile]:
    """List the files of all sources: sources as given, folders in order of names, each file once.

    In folders, files are chosen by suffix; hidden files and folders, caches and symbolic links
    are passed over. A file that is named itself is taken whatever its suffix.

    Raises:
        SourceError: a source does not exist or is neither a file nor a folder.
    """
    files: list[SourceFile] = []
    seen: set[str] = set()
    for source in map(Path, sources):
        for path in _paths_of(source, tally):
            identity = os.path.realpath(path)
            if identity in seen:
                tally.skipped["named twice"] += 1
                continue
            seen.add(identity)
            files += _checked(path, tally)
    tally.num_bytes_found = sum(file.num_bytes for file in files)
    return files


def read_documents(
    files: Iterable[SourceFile], field: str, max_document_bytes: int, tally: Tally
) -> Iterator[tuple[str, str]]:
    """Yield name and text of every document, one file after the other.

    What cannot be read is skipped and counted; of a file that breaks off, what came before stays.

    Args:
        files: as `find_files` lists them.
        field: key of the text in a line of JSON.
        max_document_bytes: longer documents are skipped.
        tally: counts what is skipped and how far reading has come.
    """
    for file in files:
        read = tally.num_bytes_read
        try:
            if file.name.lower().endswith(_LINE_SUFFIXES):
                yield from _read_lines(file, field, max_document_bytes, tally)
            else:
                yield from _read_whole(file, max_document_bytes, tally)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            tally.skipped["unreadable: damaged gzip"] += 1
        except OSError as error:
            tally.skipped[f"unreadable: {error.strerror}"] += 1
        tally.num_bytes_read = read + file.num_bytes


def _paths_of(source: Path, tally: Tally) -> Iterator[Path]:
    try:
        mode = source.stat().st_mode
    except OSError as error:
        raise SourceError(f"cannot read the source {source}: {error.strerror}") from error
    if stat.S_ISREG(mode):
        yield source
    elif stat.S_ISDIR(mode):
        yield from _walk(source, tally)
    else:
        raise SourceError(f"the source {source} is neither a file nor a folder")


def _walk(folder: Path, tally: Tally) -> Iterator[Path]:
    def count(error: OSError) -> None:
        tally.skipped[f"unreadable: {error.strerror}"] += 1

    for parent, folders, names in os.walk(folder, onerror=count):
        folders[:] = sorted(name for name in folders if _is_wanted_folder(name))
        for name in sorted(names):
            path = Path(parent, name)
            if name.startswith("."):
                continue
            if not _is_text_name(name):
                tally.skipped["unknown suffix"] += 1
            elif path.is_symlink():
                tally.skipped["symbolic link"] += 1
            else:
                yield path


def _is_wanted_folder(name: str) -> bool:
    return not name.startswith(".") and name not in _SKIPPED_FOLDERS


def _is_text_name(name: str) -> bool:
    lower = name.lower()
    return (
        lower.endswith(_LINE_SUFFIXES)
        or Path(lower).suffix in _SUFFIXES
        or lower.partition(".")[0] in _NAMES
    )


def _checked(path: Path, tally: Tally) -> list[SourceFile]:
    """Return the file if it is one: opening a pipe would wait for ever."""
    try:
        status = path.stat()
    except OSError as error:
        tally.skipped[f"unreadable: {error.strerror}"] += 1
        return []
    if not stat.S_ISREG(status.st_mode):
        tally.skipped["not a regular file"] += 1
        return []
    return [SourceFile(path, path.as_posix(), status.st_size)]


def _read_whole(
    file: SourceFile, max_document_bytes: int, tally: Tally
) -> Iterator[tuple[str, str]]:
    with file.path.open("rb") as stream:
        content = stream.read(max_document_bytes + 1)
    if len(content) > max_document_bytes:
        tally.skip(TOO_LARGE, file.name)
        return
    try:
        yield file.name, content.decode("utf-8-sig")
    except UnicodeDecodeError:
        tally.skip(NOT_TEXT, file.name)


def _read_lines(
    file: SourceFile, field: str, max_document_bytes: int, tally: Tally
) -> Iterator[tuple[str, str]]:
    before = tally.num_bytes_read
    max_line_bytes = _ESCAPED_BYTES * max_document_bytes + _LINE_OVERHEAD_BYTES
    with file.path.open("rb") as raw:
        stream: Any = gzip.GzipFile(fileobj=raw) if file.name.lower().endswith(".gz") else raw
        for number, line in enumerate(_bounded_lines(stream, max_line_bytes), 1):
            tally.num_bytes_read = before + raw.tell()
            name = f"{file.name}:{number}"
            if line is None:
                tally.skip(TOO_LARGE, name)
            elif line.strip():
                yield from _text_of(line, name, field, tally)


def _bounded_lines(stream: BinaryIO, max_bytes: int) -> Iterator[bytes | None]:
    """Yield lines, and None for one that is longer than the limit, without ever holding it."""
    while line := stream.readline(max_bytes):
        if len(line) < max_bytes or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(max_bytes)
        yield None


def _text_of(line: bytes, name: str, field: str, tally: Tally) -> Iterator[tuple[str, str]]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        tally.skip("not JSON", name)
        return
    text = value.get(field) if isinstance(value, dict) else None
    if isinstance(text, str):
        yield name, text
    else:
        tally.skip(f"no text in field {field!r}", name)

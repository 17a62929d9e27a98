"""JSON lines: a document a line, cut at line ends, read from any line on."""

from collections.abc import Iterator
from typing import Any, Final

from indexer.build_report import BuildTally
from indexer.sources.blocks import (
    Compression,
    SourceDocument,
    SourceFile,
    SourcePiece,
    UnusableError,
)
from indexer.sources.envelopes import Record, sessions
from indexer.sources.record_documents import documents_of
from indexer.sources.record_files import json_of, max_record_characters
from indexer.sources.source_options import (
    NAME_ENCODING,
    NOT_TEXT,
    RAISE_LIMIT,
    TOO_LARGE,
    SourceOptions,
)
from indexer.sources.texts import (
    BOM_BYTES,
    STANDARD_INPUT_NAME,
    bounded_lines,
    decoded,
    encoding_of,
    has_plain_newlines,
    opened,
)

_READ_BYTES: Final = 1 << 20


def cut_lines(file: SourceFile, options: SourceOptions) -> list[SourcePiece]:
    """Cut a file at line ends into pieces of a little more than `block_bytes`.

    Compressed files, and files whose line breaks are not single bytes, are not cut.

    Raises:
        OSError: the file cannot be read.
    """
    if file.format.compression != Compression.NONE or file.num_bytes <= options.block_bytes:
        return [SourcePiece(file, file.num_bytes)]
    with file.path.open("rb") as stream:
        encoding = encoding_of(stream.read(BOM_BYTES), options.encoding)
        if not has_plain_newlines(encoding):
            return [SourcePiece(file, file.num_bytes)]
        stream.seek(0)
        cuts = [(0, 0), *_cuts(stream, options.block_bytes)]
    ends = [start for start, _ in cuts[1:]] + [max(file.num_bytes, cuts[-1][0])]
    return [
        SourcePiece(file, end - start, start, end, first)
        for (start, first), end in zip(cuts, ends, strict=True)
        if end > start
    ]


def _cuts(stream: Any, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield offsets of lines, each at least `block_bytes` after the last, and the lines before."""
    offset = num_lines = 0
    target = block_bytes
    while chunk := stream.read(_READ_BYTES):
        counted = 0
        while target <= offset + len(chunk):
            end = chunk.find(b"\n", max(target - offset - 1, 0)) + 1
            if end == 0:
                break
            num_lines += chunk.count(b"\n", counted, end)
            counted = end
            yield offset + end, num_lines
            target = offset + end + block_bytes
        num_lines += chunk.count(b"\n", counted)
        offset += len(chunk)


def read_lines(
    piece: SourcePiece, options: SourceOptions, tally: BuildTally
) -> Iterator[SourceDocument]:
    """Yield the documents of a piece; count the lines that hold none; see `line_records`."""
    for name, record in sessions(line_records(piece, options, tally), options.field):
        try:
            yield from documents_of(record, name, piece.file, options, tally)
        except UnusableError as unusable:
            tally.drop(str(unusable), name, unusable.remedy)


def line_records(piece: SourcePiece, options: SourceOptions, tally: BuildTally) -> Iterator[Record]:
    """Yield the values of the lines of a piece; count the lines that are none; see `text_lines`."""
    for name, text in text_lines(piece, options, tally):
        try:
            yield name, _parsed(text, piece.file)
        except UnusableError as unusable:
            tally.drop(str(unusable), name, unusable.remedy)


def text_lines(
    piece: SourcePiece, options: SourceOptions, tally: BuildTally
) -> Iterator[tuple[str, str]]:
    """Yield the names and the texts of the lines of a piece that hold any; count damaged ones.

    Raises:
        OSError: the file cannot be read.
        UnicodeError: the rest is not text.
        texts.DAMAGED: the rest cannot be decompressed.
    """
    before = tally.num_bytes_read
    with opened(piece.file) as (stream, raw):
        encoding = encoding_of(stream.peek(BOM_BYTES), options.encoding)
        if piece.start:
            stream.seek(piece.start)
        with decoded(stream, encoding) as lines:
            for number, line in _numbered(piece, lines, options):
                tally.num_bytes_read = before + min(raw.tell() - piece.start, piece.num_bytes)
                name = f"{piece.file.name}:{number}"
                try:
                    text = _text_of(line, encoding)
                except UnusableError as unusable:
                    tally.drop(str(unusable), name, unusable.remedy)
                    continue
                if not text.isspace():
                    yield name, text


def _numbered(
    piece: SourcePiece, stream: Any, options: SourceOptions
) -> Iterator[tuple[int, str | bytes | None]]:
    lines = bounded_lines(stream, max_record_characters(options), piece.end - piece.start)
    return enumerate(lines, piece.first + 1)


def _text_of(line: str | bytes | None, encoding: str) -> str:
    if line is None:
        raise UnusableError(TOO_LARGE, RAISE_LIMIT)
    try:
        return line if isinstance(line, str) else line.decode(encoding)
    except UnicodeError:
        raise UnusableError(NOT_TEXT, NAME_ENCODING) from None


def _parsed(line: str, file: SourceFile) -> Any:
    is_kept = file.name == STANDARD_INPUT_NAME
    otherwise = "say --stdin-format text" if is_kept else "name the file .json"
    return json_of(
        line, f"mend or remove such lines; or {otherwise} if a line is no record of its own"
    )

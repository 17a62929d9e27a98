"""Reads the records of files: whole texts, lines, elements of an array, or rows.

`records_of` reads all forms. Only one record at a time is held in memory, however long the file is.
Damage affects only the damaged record, which is counted with its place. Reading continues after it,
or stops if the next record cannot be found.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, TextIO

from indexer.build_report import BuildTally
from indexer.errors import UnusableError
from indexer.sources.blocks import Compression, FileForm, Format, SourceFile, SourcePiece
from indexer.sources.chats.sessions import Record, sessions
from indexer.sources.chats.shapes import found_in
from indexer.sources.columns import record_columns
from indexer.sources.file_streams import (
    BOM_BYTES,
    STANDARD_INPUT_NAME,
    bounded_lines,
    decoded,
    encoding_of,
    has_plain_newlines,
    opened,
    reading,
)
from indexer.sources.source_options import (
    NAME_ENCODING,
    NOT_TEXT,
    RAISE_LIMIT,
    TOO_LARGE,
    Markup,
    SourceOptions,
)
from indexer.sources.tables import cut_table, table_records
from indexer.sources.text_forms import cells_of, letters_in, spoken_in, text_of_letter, text_of_page

_Reader = Callable[[Any, SourcePiece, SourceOptions, BuildTally], Iterator[Record]]


def records_of(piece: SourcePiece, options: SourceOptions, tally: BuildTally) -> Iterator[Record]:
    """Yield the records of a piece, each with its name. A damaged file is read up to the damage.

    Messages in separate records are joined into one record for each session.

    Args:
        piece: piece of a file.
        options: how to read.
        tally: counts unreadable records, and the progress of reading.
    """
    file, before = piece.file, tally.num_bytes_read
    with tally.dropping(file.name), reading(file):
        if file.format.is_table:
            yield from sessions(table_records(piece, options, tally), options.field)
            return
        with opened(file) as (stream, raw):
            found = _READERS[file.format.form](stream, piece, options, tally)
            for record in found if file.format.is_text else sessions(found, options.field):
                tally.num_bytes_read = before + min(raw.tell() - piece.start, piece.num_bytes)
                yield record


def pieces_of(file: SourceFile, options: SourceOptions) -> list[SourcePiece]:
    """Cut a file into pieces. Its name and content determine its form.

    Raises:
        RefusedFileError: the file is a table without a usable column, or pyarrow is missing.
        UnusableError: the file cannot be read.
    """
    with reading(file):
        file = _with_form(file, options)
        if file.format.is_table:
            return cut_table(file, options)
        if file.format.form == FileForm.CSV:
            _check_columns(file, options)
        if file.format.form in {FileForm.LINES, FileForm.TEXT_LINES}:
            return _cut_lines(file, options)
        return [SourcePiece(file, file.num_bytes)]


def max_record_characters(options: SourceOptions) -> int:
    """Return the most characters of a JSON record: as many as the longest document can need."""
    return _ESCAPED_BYTES * options.max_document_bytes + _OVERHEAD_BYTES


# JSON uses up to six characters for a byte of text. The rest of a record is keys and syntax.
_ESCAPED_BYTES: Final = 6
_OVERHEAD_BYTES: Final = 1 << 16


def _text_records(
    stream: Any, piece: SourcePiece, options: SourceOptions, _: BuildTally
) -> Iterator[Record]:
    """Yield the text of a file; for notebooks, HTML pages and the like, the text inside it."""
    file = piece.file
    content = stream.read(options.max_document_bytes + 1)
    if len(content) > options.max_document_bytes:
        raise UnusableError(TOO_LARGE, RAISE_LIMIT)
    text = content.decode(encoding_of(content[:BOM_BYTES], options.encoding))
    if file.format.form == FileForm.NOTEBOOK:
        text = cells_of(text, with_outputs=options.notebook_outputs)
    elif file.format.form == FileForm.SUBTITLES:
        text = spoken_in(text)
    elif file.format.form == FileForm.PAGE and options.html == Markup.TEXT:
        text = text_of_page(text)
    yield file.name, text


def _letters(
    stream: Any, piece: SourcePiece, options: SourceOptions, tally: BuildTally
) -> Iterator[Record]:
    """Yield the messages of a mailbox, numbered from 0."""
    for number, letter in enumerate(letters_in(stream, options.max_document_bytes)):
        name = f"{piece.file.name}:{number}"
        with tally.dropping(name):
            if letter is None:
                raise UnusableError(TOO_LARGE, RAISE_LIMIT)
            yield name, text_of_letter(letter)


_CUT_BYTES: Final = 1 << 20


def _cut_lines(file: SourceFile, options: SourceOptions) -> list[SourcePiece]:
    """Cut a file at line ends into pieces slightly larger than `block_bytes`.

    Compressed files are not cut, nor are files whose line breaks take several bytes.
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
    """Yield offsets of lines at least `block_bytes` apart, each with the number of lines before."""
    offset = num_lines = 0
    target = block_bytes
    while chunk := stream.read(_CUT_BYTES):
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


def _line_records(
    stream: Any, piece: SourcePiece, options: SourceOptions, tally: BuildTally
) -> Iterator[Record]:
    """Yield the values of JSON lines. In prompt files, lines of plain text are also yielded."""
    file = piece.file
    otherwise = f"or {_OTHERWISE.get(file.name, 'name the file .json')} if a line is not"
    remedy = f"mend or remove such lines; {otherwise} a whole record"
    is_plain = file.format.form == FileForm.TEXT_LINES
    if is_plain:
        remedy = "a line that starts with { is a record: mend or remove such lines"
    encoding = encoding_of(stream.peek(BOM_BYTES), options.encoding)
    if piece.start:
        stream.seek(piece.start)
    with decoded(stream, encoding) as lines:
        bounded = bounded_lines(lines, max_record_characters(options), piece.end - piece.start)
        for number, line in enumerate(bounded, piece.first + 1):
            name = f"{file.name}:{number}"
            with tally.dropping(name):
                text = _text_of(line, encoding)
                if text.isspace():
                    continue
                is_text = is_plain and not text.lstrip().startswith("{")
                yield name, text.strip() if is_text else _json_of(text, remedy)


_OTHERWISE: Final = {STANDARD_INPUT_NAME: "say --stdin-format text"}


def _text_of(line: str | bytes | None, encoding: str) -> str:
    if line is None:
        raise UnusableError(TOO_LARGE, RAISE_LIMIT)
    try:
        return line if isinstance(line, str) else line.decode(encoding)
    except UnicodeError:
        raise UnusableError(NOT_TEXT, NAME_ENCODING) from None


NOT_JSON: Final = "not JSON"
_REST_IS_LOST: Final = "the rest of the file was not read: write one record per line, as .jsonl"
_READ_CHARACTERS: Final = 1 << 16
_BETWEEN: Final = re.compile(r"[\s,]*")
_ARRAY: Final = re.compile(r"\[\s*(\[\s*)?\{")
"""Start of an array of objects, or of an array of arrays of objects."""

_TURNS_KEY: Final = re.compile(r'"(messages|conversations?)"\s*:')


def _with_form(file: SourceFile, options: SourceOptions) -> SourceFile:
    """Return a `.json` file with the form of its content: records, JSON lines, or one text.

    The file contains records if it is an array of objects. It also does if it is an object that is
    a document or a conversation, or that has an array of these. Any other file is one text, such as
    a configuration.
    """
    if file.format.form != FileForm.JSON:
        return file
    return replace(file, format=Format(_form(file, options), file.format.compression))


def _form(file: SourceFile, options: SourceOptions) -> FileForm:
    try:
        with _text(file, options) as text:
            head = text.read(_READ_CHARACTERS).lstrip("\ufeff \t\r\n")
    except UnicodeError:
        return FileForm.TEXT
    if _ARRAY.match(head) or head[:1] == "<":  # HTML pages are recognised later, while reading
        return FileForm.JSON
    if head[:1] != "{":
        return FileForm.TEXT
    line, _, rest = head.partition("\n")
    if rest.lstrip()[:1] == "{" and _is_object(line):
        return FileForm.LINES
    if file.num_bytes > options.max_document_bytes or file.format.compression != Compression.NONE:
        return FileForm.JSON if _TURNS_KEY.search(head) else FileForm.TEXT
    return FileForm.JSON if _holds_records(file, options) else FileForm.TEXT


def _holds_records(file: SourceFile, options: SourceOptions) -> bool:
    with _text(file, options) as text:
        content = text.read()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return bool(_TURNS_KEY.search(content[:_READ_CHARACTERS]))
    return found_in(value, options.field) is not None or bool(_inner(value))


def _inner(value: Any) -> list[Any] | None:
    """Return the array of conversations inside an object that is not itself a conversation."""
    if found_in(value) is not None:
        return None
    for inner in value.values() if isinstance(value, Mapping) else ():
        if isinstance(inner, list) and inner and found_in(inner[0]) is not None:
            return inner
    return None


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _json_records(
    stream: Any, piece: SourcePiece, options: SourceOptions, tally: BuildTally
) -> Iterator[Record]:
    """Yield the records of a JSON file, numbered from 0; count damaged ones."""
    number = 0
    with _as_text(stream, options) as text:
        try:
            for value in _values(text, max_record_characters(options)):
                for record in _inner(value) or [value]:
                    yield f"{piece.file.name}:{number}", record
                    number += 1
        except UnusableError as unusable:
            tally.drop(str(unusable), f"{piece.file.name}:{number}", unusable.remedy)


def _values(text: TextIO, max_characters: int) -> Iterator[Any]:
    """Yield the values of an array, or of a sequence of values, one after another.

    Raises:
        UnusableError: a value is too long, or the rest of the file is not JSON.
    """
    decoder = json.JSONDecoder()
    buffer = text.read(_READ_CHARACTERS).lstrip("\ufeff \t\r\n")
    is_array, begin = buffer.startswith("["), int(buffer.startswith("["))
    while True:
        begin = _BETWEEN.match(buffer, begin).end()  # type: ignore[union-attr]  # may be empty
        if is_array and buffer.startswith("]", begin):
            return
        try:
            value, end = decoder.raw_decode(buffer, begin)
        except RecursionError as error:
            raise _not_json(error, "", _REST_IS_LOST) from None
        except json.JSONDecodeError as error:
            if len(buffer) - begin > max_characters:
                raise UnusableError(
                    TOO_LARGE,
                    "the rest of the file was not read: write one record per line, as .jsonl, or "
                    f"{RAISE_LIMIT}",
                ) from None
            further = text.read(max(_READ_CHARACTERS, len(buffer) - begin))
            if not further:
                if begin == len(buffer) and not is_array:
                    return
                raise _not_json(error, buffer[begin:], _REST_IS_LOST) from None
            buffer, begin = buffer[begin:] + further, 0
            continue
        yield value
        begin = end


def _json_of(text: str, remedy: str) -> Any:
    """Return the JSON value of a text.

    Raises:
        UnusableError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_json(error, text, remedy) from None


def _not_json(error: ValueError | RecursionError, text: str, remedy: str) -> UnusableError:
    """Return why a text is not JSON and what to do. For a line, only the column is named."""
    begin = text[:_READ_CHARACTERS].lstrip("\ufeff \t\r\n")
    if begin.startswith("<"):
        said = "it is a page of HTML or XML, as servers send for errors: fetch it again"
        return UnusableError(NOT_JSON, said)
    if "\0" in begin:
        return UnusableError(NOT_TEXT, f"it holds NUL, as UTF-16 does: {NAME_ENCODING}")
    if begin.find("{") > 0 and begin[0] not in '[{"':
        said = "there is something before the first {"
    elif isinstance(error, json.JSONDecodeError):
        said = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
    else:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return UnusableError(NOT_JSON, f"{said}: {remedy}")


def _check_columns(file: SourceFile, options: SourceOptions) -> None:
    """Check that a CSV file has columns with texts or conversations.

    Raises:
        RefusedFileError: no column has texts or conversations.
    """
    try:
        with _text(file, options) as text:
            record_columns(list(_rows(text, options).fieldnames or ()), options)
    except (UnicodeError, csv.Error):
        return  # counted later, when the file is read


def _csv_records(
    stream: Any, piece: SourcePiece, options: SourceOptions, tally: BuildTally
) -> Iterator[Record]:
    """Yield the rows of a CSV file as mappings, numbered from 0; count damaged ones."""
    number, name = -1, piece.file.name
    with _as_text(stream, options) as text:
        try:
            for number, row in enumerate(_rows(text, options)):
                yield f"{name}:{number}", {key: row[key] for key in row if key is not None}
        except csv.Error as error:
            remedy = f"{error}: check its quotes; the rest of the file was not read"
            tally.drop("not CSV", f"{name}:{number + 1}", remedy)


def _rows(text: TextIO, options: SourceOptions) -> "csv.DictReader[str]":
    csv.field_size_limit(max_record_characters(options))
    first = text.readline(_READ_CHARACTERS)
    marks = {mark: first.count(mark) for mark in ",;\t"}
    delimiter = max(marks, key=lambda mark: marks[mark])
    header = next(csv.reader([first], delimiter=delimiter), [])
    return csv.DictReader(text, [name.strip() for name in header], delimiter=delimiter, strict=True)


@contextmanager
def _text(file: SourceFile, options: SourceOptions) -> Iterator[TextIO]:
    """Yield a text stream of a file's content."""
    with opened(file) as (stream, _), _as_text(stream, options) as text:
        yield text


@contextmanager
def _as_text(stream: Any, options: SourceOptions) -> Iterator[TextIO]:
    encoding = encoding_of(stream.peek(BOM_BYTES), options.encoding)
    text = io.TextIOWrapper(stream, encoding, newline="")
    try:
        yield text
    finally:
        text.detach()


_READERS: Final[dict[FileForm, _Reader]] = {
    FileForm.TEXT: _text_records,
    FileForm.NOTEBOOK: _text_records,
    FileForm.PAGE: _text_records,
    FileForm.SUBTITLES: _text_records,
    FileForm.MAIL: _letters,
    FileForm.LINES: _line_records,
    FileForm.TEXT_LINES: _line_records,
    FileForm.JSON: _json_records,
    FileForm.CSV: _csv_records,
}

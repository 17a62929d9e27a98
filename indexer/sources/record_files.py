"""Records in text: arrays and sequences of JSON, and CSV, both streamed.

Of either no more than a record is held, however long the file is.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any, Final, TextIO

from indexer.build_report import BuildTally
from indexer.sources.blocks import (
    Compression,
    FileForm,
    Format,
    SourceDocument,
    SourceFile,
    SourcePiece,
    UnusableError,
)
from indexer.sources.conversations import conversation_of
from indexer.sources.envelopes import Record, sessions
from indexer.sources.record_documents import documents_of, record_columns
from indexer.sources.source_options import (
    NAME_ENCODING,
    NOT_TEXT,
    RAISE_LIMIT,
    TOO_LARGE,
    SourceOptions,
)
from indexer.sources.texts import BOM_BYTES, encoding_of, opened

NOT_JSON: Final = "not JSON"
_REST_IS_LOST: Final = "the rest of the file was not read; one record a line, as .jsonl, is"
# JSON writes a byte of text with up to six characters; the rest of a record is names and marks.
_ESCAPED_BYTES: Final = 6
_OVERHEAD_BYTES: Final = 1 << 16
_READ_CHARACTERS: Final = 1 << 16
_BETWEEN: Final = re.compile(r"[\s,]*")
_ARRAY: Final = re.compile(r"\[\s*(\[\s*)?\{")
"""Begins an array of objects, or of lists of them."""

_TURNS_KEY: Final = re.compile(r'"(messages|conversations?)"\s*:')


def max_record_characters(options: SourceOptions) -> int:
    """Return how long a record of JSON may be: that of a document with the longest text."""
    return _ESCAPED_BYTES * options.max_document_bytes + _OVERHEAD_BYTES


def with_form(file: SourceFile, options: SourceOptions) -> SourceFile:
    """Return a `.json` file with the form that its content has: records, lines of them, or a text.

    A file holds records if it is an array of objects, or an object that is a document or a
    conversation, or holds an array of such. Any other is a text, such as a configuration.

    Raises:
        OSError: the file cannot be read.
        texts.DAMAGED: it cannot be decompressed.
    """
    if file.format.form != FileForm.JSON:
        return file
    return replace(file, format=Format(_form(file, options), file.format.compression))


def _form(file: SourceFile, options: SourceOptions) -> FileForm:
    try:
        with _text(file, options) as (text, _):
            head = text.read(_READ_CHARACTERS).lstrip("\ufeff \t\r\n")
    except UnicodeError:
        return FileForm.TEXT
    if _ARRAY.match(head) or head[:1] == "<":  # pages of HTML are told from JSON in reading
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
    with _text(file, options) as (text, _):
        content = text.read()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return bool(_TURNS_KEY.search(content[:_READ_CHARACTERS]))
    return _is_record(value, options) or bool(_inner(value))


def _is_record(value: Any, options: SourceOptions) -> bool:
    is_text = isinstance(value, Mapping) and isinstance(value.get(options.field), str)
    return is_text or conversation_of(value, options.field) is not None


def _inner(value: Any) -> list[Any] | None:
    """Return the array of conversations that an object wraps, if it does and is none itself."""
    if conversation_of(value) is not None:
        return None
    for inner in value.values() if isinstance(value, Mapping) else ():
        if isinstance(inner, list) and inner and conversation_of(inner[0]) is not None:
            return inner
    return None


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def json_records(piece: SourcePiece, options: SourceOptions, tally: BuildTally) -> Iterator[Record]:
    """Yield the records of a file of JSON, numbered from 0; count damage.

    Raises:
        OSError: the file cannot be read.
        UnicodeError: the rest is not text.
        texts.DAMAGED: the rest cannot be decompressed.
    """
    before, number = tally.num_bytes_read, 0
    with _text(piece.file, options) as (text, raw):
        try:
            for value in _values(text, max_record_characters(options)):
                tally.num_bytes_read = before + min(raw.tell(), piece.num_bytes)
                for record in _inner(value) or [value]:
                    yield f"{piece.file.name}:{number}", record
                    number += 1
        except UnusableError as unusable:
            name = f"{piece.file.name}:{number}"
            tally.drop(str(unusable), name, unusable.remedy)


def _values(text: TextIO, max_characters: int) -> Iterator[Any]:
    """Yield the values of an array, or of a sequence of values, one after another.

    Raises:
        UnusableError: a value is too long, or what follows is no JSON.
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
                    "write one record a line, as .jsonl, is: the rest of the file was not read; or "
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


def json_of(text: str, remedy: str) -> Any:
    """Return the value that a text holds as JSON.

    Raises:
        UnusableError: it holds none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_json(error, text, remedy) from None


def _not_json(error: ValueError | RecursionError, text: str, remedy: str) -> UnusableError:
    """Return why a text is not JSON and what to do; of a line the column alone matters."""
    begin = text[:_READ_CHARACTERS].lstrip("\ufeff \t\r\n")
    if begin.startswith("<"):
        said = "it is a page of HTML or XML, as servers send for errors: fetch it again"
        return UnusableError(NOT_JSON, said)
    if "\0" in begin:
        return UnusableError(NOT_TEXT, f"it holds NUL, as UTF-16 does: {NAME_ENCODING}")
    if begin.find("{") > 0 and begin[0] not in '[{"':
        said = "something stands before the first {"
    elif isinstance(error, json.JSONDecodeError):
        said = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
    else:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return UnusableError(NOT_JSON, f"{said}: {remedy}")


def check_columns(file: SourceFile, options: SourceOptions) -> None:
    """Check that a file of CSV has columns of texts or of conversations.

    Raises:
        TableError: it has none.
        OSError: the file cannot be read.
        texts.DAMAGED: it cannot be decompressed.
    """
    try:
        with _text(file, options) as (text, _):
            record_columns(list(_rows(text, options).fieldnames or ()), options)
    except (UnicodeError, csv.Error):
        return  # counted where it is read


def csv_records(piece: SourcePiece, options: SourceOptions, tally: BuildTally) -> Iterator[Record]:
    """Yield the rows of a file of CSV as mappings, numbered from 0; count damage.

    Raises:
        OSError: the file cannot be read.
        UnicodeError: the rest is not text.
        texts.DAMAGED: the rest cannot be decompressed.
    """
    before, number = tally.num_bytes_read, -1
    name = piece.file.name
    with _text(piece.file, options) as (text, raw):
        try:
            for number, row in enumerate(_rows(text, options)):
                tally.num_bytes_read = before + min(raw.tell(), piece.num_bytes)
                yield f"{name}:{number}", {key: row[key] for key in row if key is not None}
        except csv.Error as error:
            remedy = f"{error}: look at its quotes; the rest of the file was not read"
            tally.drop("not CSV", f"{name}:{number + 1}", remedy)


def _rows(text: TextIO, options: SourceOptions) -> "csv.DictReader[str]":
    csv.field_size_limit(max_record_characters(options))
    first = text.readline(_READ_CHARACTERS)
    marks = {mark: first.count(mark) for mark in ",;\t"}
    delimiter = max(marks, key=lambda mark: marks[mark])
    header = next(csv.reader([first], delimiter=delimiter), [])
    return csv.DictReader(text, [name.strip() for name in header], delimiter=delimiter, strict=True)


def read_json(
    piece: SourcePiece, options: SourceOptions, tally: BuildTally
) -> Iterator[SourceDocument]:
    """Yield the documents of a file of JSON; see `json_records`."""
    return _documents(json_records(piece, options, tally), piece, options, tally)


def read_csv(
    piece: SourcePiece, options: SourceOptions, tally: BuildTally
) -> Iterator[SourceDocument]:
    """Yield the documents of a file of CSV; see `csv_records`."""
    return _documents(csv_records(piece, options, tally), piece, options, tally)


def _documents(
    records: Iterator[Record], piece: SourcePiece, options: SourceOptions, tally: BuildTally
) -> Iterator[SourceDocument]:
    for name, record in sessions(records, options.field):
        try:
            yield from documents_of(record, name, piece.file, options, tally)
        except UnusableError as unusable:
            tally.drop(str(unusable), name, unusable.remedy)


@contextmanager
def _text(file: SourceFile, options: SourceOptions) -> Iterator[tuple[TextIO, IO[bytes]]]:
    """Give a stream of a file's text, and the stream of the file itself.

    Raises:
        OSError: the file cannot be opened.
    """
    with opened(file) as (stream, raw):
        encoding = encoding_of(stream.peek(BOM_BYTES), options.encoding)
        text = io.TextIOWrapper(stream, encoding, newline="")
        try:
            yield text, raw
        finally:
            text.detach()

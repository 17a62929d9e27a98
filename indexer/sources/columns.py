"""The columns of a table that matter, and the values in them."""

from typing import TYPE_CHECKING

from indexer.errors import SourceError
from indexer.sources.blocks import SourceDocument, SourceFile, UnusableError
from indexer.sources.licences import licence_in
from indexer.sources.options import NOT_TEXT, TOO_LARGE, SourceOptions

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch, Scalar, Schema


class TableError(SourceError):
    """A table out of which no document can be read; `reason` is what it is counted under."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}: {remedy}")
        self.reason = reason


def wanted_columns(schema: "Schema", options: SourceOptions) -> list[int]:
    """Return the numbers of the columns of texts and, where there is one, of licences.

    Raises:
        TableError: there is no column of texts.
    """
    names = list(schema.names)
    if options.field not in names:
        listed = ", ".join(map(repr, names)) or "none"
        raise TableError(
            f"no column {options.field!r}", f"name one of these with --field: {listed}"
        )
    wanted = [options.field, options.licence_field] if options.licence_field else [options.field]
    return [names.index(name) for name in wanted if name in names]


class Rows:
    """The rows of a batch as documents.

    Raises:
        pyarrow.ArrowInvalid: the batch is damaged: what is in it would be read from elsewhere.
    """

    def __init__(self, batch: "RecordBatch", file: SourceFile, options: SourceOptions) -> None:
        names = batch.schema.names
        batch.validate()
        self._texts = _checked(batch.column(names.index(options.field)))
        self._licences: Array | None = None
        if options.licence_field in names and not options.licence:
            self._licences = batch.column(names.index(options.licence_field))
            self._licences.validate(full=True)
        self._file = file
        self._options = options

    def document(self, number: int, name: str) -> SourceDocument:
        """Return the document in a row, under a name.

        Raises:
            UnusableError: it holds no text, or too much of it.
        """
        own = "" if self._licences is None else licence_in(self._licences[number].as_py())
        licence = self._options.licence or own or self._file.licence
        return SourceDocument(name, licence, self._text(self._texts[number]))

    def _text(self, scalar: "Scalar") -> str:
        value = getattr(scalar, "value", scalar)  # of what is encoded by a dictionary
        content = value.as_buffer() if hasattr(value, "as_buffer") else None
        if content is None:
            raise UnusableError(f"no text in field {self._options.field!r}")
        if content.size > self._options.max_document_bytes:
            raise UnusableError(TOO_LARGE)
        try:
            return bytes(content).decode(self._options.encoding)
        except UnicodeError:
            raise UnusableError(NOT_TEXT) from None


def _checked(column: "Array") -> "Array":
    """Return a column with sound offsets; strings as bytes, so that each may be wrong alone."""
    import pyarrow as pa  # noqa: PLC0415  (not everybody has tables)

    bytes_of = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
        pa.string_view(): pa.binary_view(),
    }
    if column.type in bytes_of:
        column = column.view(bytes_of[column.type])
    column.validate(full=True)
    return column

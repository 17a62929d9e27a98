"""Files that are one document each."""

from collections.abc import Iterator

from indexer.sources.blocks import SourceDocument, SourcePiece
from indexer.sources.licences import declared_licence
from indexer.sources.options import NOT_TEXT, TOO_LARGE, SourceOptions
from indexer.sources.streams import BOM_BYTES, encoding_of, opened
from indexer.tally import Tally


def read_text(piece: SourcePiece, options: SourceOptions, tally: Tally) -> Iterator[SourceDocument]:
    """Yield the text of a file; count it if it is none, or longer than the limit.

    Raises:
        OSError: the file cannot be read.
        streams.DAMAGED: it cannot be decompressed.
    """
    file = piece.file
    with opened(file) as (stream, _):
        content = stream.read(options.max_document_bytes + 1)
    if len(content) > options.max_document_bytes:
        tally.skip(TOO_LARGE, file.name)
        return
    try:
        text = content.decode(encoding_of(content[:BOM_BYTES], options.encoding))
    except UnicodeError:
        tally.skip(NOT_TEXT, file.name)
        return
    licence = options.licence or declared_licence(text) or file.licence
    yield SourceDocument(file.name, licence, text)

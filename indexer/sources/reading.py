"""Reading a block: its documents one after the other, in whatever process."""

from collections.abc import Callable, Iterator
from typing import Final

from indexer.errors import reason_of
from indexer.sources.blocks import SourceBlock, SourceDocument, SourcePiece
from indexer.sources.columns import TableError
from indexer.sources.formats import Form
from indexer.sources.lines import read_lines
from indexer.sources.options import NOT_TEXT, SourceOptions
from indexer.sources.streams import DAMAGED
from indexer.sources.tables import DamagedTableError, read_table
from indexer.sources.texts import read_text
from indexer.tally import Tally

_Reader = Callable[[SourcePiece, SourceOptions, Tally], Iterator[SourceDocument]]
_READERS: Final[dict[Form, _Reader]] = {
    Form.TEXT: read_text,
    Form.LINES: read_lines,
    Form.PARQUET: read_table,
    Form.ARROW: read_table,
}


def read(block: SourceBlock, options: SourceOptions, tally: Tally) -> Iterator[SourceDocument]:
    """Yield the documents of a block in order; of what breaks off, what came before stays.

    No more is held than a document and a buffer. What cannot be read is skipped and counted. What
    is empty, holds NUL, or is too long once it is decoded is yielded: `usable_texts` counts it.

    Args:
        block: of a plan that was made with the same options.
        options: how to read.
        tally: counts what is skipped, and how far reading has come.
    """
    for piece in block.pieces:
        name = piece.file.name
        read_before = tally.num_bytes_read
        try:
            yield from _READERS[piece.file.format.form](piece, options, tally)
        except DAMAGED:
            tally.skip(f"unreadable: damaged {piece.file.format.compression}", name)
        except DamagedTableError as error:
            tally.skip(f"unreadable: {error}", name)
        except TableError as error:
            tally.skip(error.reason, name)
        except UnicodeError:
            tally.skip(NOT_TEXT, name)
        except OSError as error:
            tally.skip(f"unreadable: {reason_of(error)}", name)
        tally.num_bytes_read = read_before + piece.num_bytes

"""Planning: the files of all sources, cut into blocks of about one size."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from indexer.build_report import BuildTally
from indexer.errors import SourceError, reason_of
from indexer.sources.blocks import (
    FileForm,
    SourceBlock,
    SourceDocument,
    SourceFile,
    SourcePiece,
    gather,
    name_of,
)
from indexer.sources.finding import Finder
from indexer.sources.lines import cut_lines, read_lines
from indexer.sources.record_documents import TableError
from indexer.sources.record_files import check_columns, read_csv, read_json, with_form
from indexer.sources.source_options import NAME_ENCODING, NOT_TEXT, STANDARD_INPUT, SourceOptions
from indexer.sources.tables import DamagedTableError, cut_table, read_table
from indexer.sources.texts import DAMAGED, keep_standard_input, read_text

COPY_AGAIN: Final = "copy it again, or give it the suffix of what it is"

_Reader = Callable[[SourcePiece, SourceOptions, BuildTally], Iterator[SourceDocument]]
_READERS: Final[dict[FileForm, _Reader]] = {
    FileForm.TEXT: read_text,
    FileForm.NOTEBOOK: read_text,
    FileForm.LINES: read_lines,
    FileForm.JSON: read_json,
    FileForm.CSV: read_csv,
    FileForm.PARQUET: read_table,
    FileForm.ARROW: read_table,
}


def read(block: SourceBlock, options: SourceOptions, tally: BuildTally) -> Iterator[SourceDocument]:
    """Yield the documents of a block in order; of a damaged file, those before the damage.

    Holds no more than a document and a buffer. Unreadable files are skipped and counted. Texts that
    are empty, hold NUL, or are too long once decoded are yielded: `usable_texts` counts them.

    Args:
        block: of a plan that was made with the same options.
        options: how to read.
        tally: counts skipped documents and the bytes read.
    """
    for piece in block.pieces:
        name = piece.file.name
        read_before = tally.num_bytes_read
        try:
            yield from _READERS[piece.file.format.form](piece, options, tally)
        except DAMAGED:
            tally.drop(f"unreadable: damaged {piece.file.format.compression}", name, COPY_AGAIN)
        except DamagedTableError as error:
            tally.drop(f"unreadable: {error}", name, COPY_AGAIN)
        except TableError as error:
            tally.drop(error.reason, name, error.remedy)
        except UnicodeError:
            tally.drop(NOT_TEXT, name, NAME_ENCODING)
        except OSError as error:
            tally.drop(f"unreadable: {reason_of(error)}", name)
        tally.num_bytes_read = read_before + piece.num_bytes


def plan(
    sources: Sequence[Path | str],
    options: SourceOptions,
    tally: BuildTally,
    scratch: Path | None = None,
) -> list[SourceBlock]:
    """Cut sources into blocks, in order: sources as given, folders in order of names.

    The blocks depend on the sources and the options alone. JSON lines of more than a block are cut
    at line ends, tables between row groups or record batches; compressed files are not cut.

    Args:
        sources: files and folders; `-` stands for standard input.
        options: how to find, cut and read.
        tally: counts files that are passed over, and the bytes of those that are not.
        scratch: a folder that stays until all is read; needed for standard input.

    Raises:
        SourceError: a source does not exist or is neither a file nor a folder; it consists of
            tables out of which no document can be read; or standard input cannot be kept.
    """
    finder = Finder(options, tally)
    pieces: list[SourcePiece] = []
    standard_input = [source for source in sources if str(source) == STANDARD_INPUT]
    if len(standard_input) > 1:
        raise SourceError("standard input can be read once: name - once")
    for source in sources:
        if source in standard_input:
            files = iter([keep_standard_input(scratch, options)])
        else:
            files = finder.files_of(Path(source))
        pieces += _pieces_of(name_of(Path(source)), files, options, tally)
    tally.num_bytes_found += sum(piece.num_bytes for piece in pieces)
    return list(gather(pieces, options.block_bytes))


def _pieces_of(
    source: str, files: Iterator[SourceFile], options: SourceOptions, tally: BuildTally
) -> Iterator[SourcePiece]:
    """Yield the pieces of a source's files; only unusable tables is an error."""
    num_files = 0
    refused = []
    for file in files:
        num_files += 1
        tally.num_files_found += 1
        try:
            yield from pieces_of_file(file, options)
        except TableError as error:
            refused.append(error)
            tally.drop(error.reason, file.name, error.remedy)
        except DAMAGED:
            tally.drop(f"unreadable: damaged {file.format.compression}", file.name, COPY_AGAIN)
        except DamagedTableError as error:
            tally.drop(f"unreadable: {error}", file.name, COPY_AGAIN)
        except OSError as error:
            tally.drop(f"unreadable: {reason_of(error)}", file.name)
    if refused and len(refused) == num_files:
        raise SourceError(f"{source}: {refused[0]}")


def pieces_of_file(file: SourceFile, options: SourceOptions) -> list[SourcePiece]:
    """Cut a file into pieces, in the form that its name and its content say.

    Raises:
        TableError: it is a table without a column that can be used, or pyarrow is missing.
        DamagedTableError: it is a damaged table.
        texts.DAMAGED: it cannot be decompressed.
        OSError: it cannot be read.
    """
    file = with_form(file, options)
    if file.format.is_table:
        return cut_table(file, options)
    if file.format.form == FileForm.CSV:
        check_columns(file, options)
    if file.format.form == FileForm.LINES:
        return cut_lines(file, options)
    return [SourcePiece(file, file.num_bytes)]

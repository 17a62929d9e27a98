"""Plans the reading: cuts the files of all sources into blocks of similar size."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from indexer.build_report import BuildTally
from indexer.errors import RefusedFileError, SourceError, UnusableError
from indexer.sources.blocks import (
    SourceBlock,
    SourceDocument,
    SourceFile,
    SourcePiece,
    gather,
    name_of,
)
from indexer.sources.file_streams import keep_standard_input
from indexer.sources.finding import Finder
from indexer.sources.record_documents import documents_of
from indexer.sources.record_reading import pieces_of, records_of
from indexer.sources.source_options import STANDARD_INPUT, SourceOptions


def read(block: SourceBlock, options: SourceOptions, tally: BuildTally) -> Iterator[SourceDocument]:
    """Yield the documents of a block in order. A damaged file is read up to the damage.

    Only one document and a buffer are held in memory. Unreadable files are skipped and counted.
    Texts that are empty, contain NUL, or are too long once decoded are yielded. `usable_texts`
    filters and counts them later.

    Args:
        block: block of a plan that was made with the same options.
        options: how to read.
        tally: counts skipped documents and the bytes read.
    """
    for piece in block.pieces:
        read_before = tally.num_bytes_read
        for name, record in records_of(piece, options, tally):
            with tally.dropping(name):
                yield from documents_of(record, name, piece.file, options, tally)
        tally.num_bytes_read = read_before + piece.num_bytes


def plan(
    sources: Sequence[Path | str],
    options: SourceOptions,
    tally: BuildTally,
    scratch: Path | None = None,
) -> list[SourceBlock]:
    """Cut sources into blocks. Sources keep the given order; folders are read in order of names.

    The blocks depend only on the sources and the options. A file of JSON lines that exceeds a block
    is cut at line ends. A table is cut between row groups or record batches. Compressed files are
    not cut.

    Args:
        sources: files and folders; `-` is standard input.
        options: how to find, cut and read.
        tally: counts skipped files, and the bytes of the other files.
        scratch: folder that exists until everything is read; needed for standard input.

    Raises:
        SourceError: a source does not exist, is neither a file nor a folder, or has only tables
            without readable documents; or standard input cannot be stored.
    """
    finder = Finder(options, tally)
    pieces: list[SourcePiece] = []
    standard_input = [source for source in sources if str(source) == STANDARD_INPUT]
    if len(standard_input) > 1:
        raise SourceError("standard input can be read only once: name - once")
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
    """Yield the pieces of a source's files; raise an error if all files are unusable tables."""
    num_files = 0
    refused = []
    for file in files:
        num_files += 1
        tally.num_files_found += 1
        try:
            yield from pieces_of(file, options)
        except UnusableError as unusable:
            tally.drop(str(unusable), file.name, unusable.remedy)
            refused += [unusable] if isinstance(unusable, RefusedFileError) else []
    if refused and len(refused) == num_files:
        raise SourceError(f"{source}: {refused[0]}: {refused[0].remedy}")

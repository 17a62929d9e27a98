"""Changing an index that is there: adding documents, removing them, merging small segments."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from indexer.build import (
    OnProgress,
    chosen_pieces,
    no_document,
    part_tasks,
    read_parts,
    scratch_folder,
)
from indexer.engines import Engine
from indexer.errors import IndexerError, SourceError
from indexer.format import SEGMENTS_FOLDER, TOKENIZER_FILE
from indexer.options import DEFAULTS, BuildOptions
from indexer.parts import Part, kept_runs
from indexer.records import SegmentRecord
from indexer.segments import Piece, gather
from indexer.sources import find_files
from indexer.stages import renewed_phrases, write_segments
from indexer.tally import ChangeReport, Tally
from indexer.writer import IndexWriter, writing


def add_documents(
    path: Path | str,
    sources: Sequence[Path | str],
    options: BuildOptions = DEFAULTS,
    on_progress: OnProgress | None = None,
) -> ChangeReport:
    """Add documents to an index, as new segments; those that it holds already are left out.

    Readers go on with the snapshot that they hold, and find the new one when they look.

    Args:
        path: the index's directory.
        sources: as for `build_index`.
        options: as for `build_index`.
        on_progress: likewise.

    Raises:
        IndexBusyError: somebody else is changing the index.
        SourceError: a source does not exist, or there is no new document.
        IndexerError: the index has no tokenizer, or cannot be written.
    """
    started = time.perf_counter()
    tally = Tally()
    files = find_files(sources, tally)
    with writing(Path(path), "add") as writer, scratch_folder(writer.folder) as scratch:
        contents = writer.contents
        if contents.tokenizer is None:
            raise IndexerError(f"{path} was built of token ids and has no tokenizer: build it anew")
        tokenizer = writer.folder / TOKENIZER_FILE
        tasks = part_tasks(files, scratch, tokenizer, contents.vocabulary, options)
        parts = read_parts(options.engine, tasks, tally, on_progress)
        known = [part.documents().digests for part in _parts_of(writer)]
        pieces = chosen_pieces(parts, known, options, tally)
        if not pieces:
            raise no_document(tally)
        groups = gather(pieces, options.segment_tokens(contents.vocabulary.size))
        added = _segments(options.engine, writer, groups)
        _publish(options.engine, writer, (*contents.segments, *added))
    return ChangeReport(
        str(path),
        "added",
        sum(record.num_documents for record in added),
        sum(record.num_tokens for record in added),
        len(writer.contents.segments),
        time.perf_counter() - started,
        dict(sorted(tally.skipped.items())),
        dict(sorted(tally.skipped_places.items())),
    )


def remove_documents(
    path: Path | str,
    names: Iterable[str] = (),
    patterns: Iterable[str] = (),
    options: BuildOptions = DEFAULTS,
) -> ChangeReport:
    """Remove documents: no file of the index holds anything of them once no reader is left.

    The segments that hold them are written anew, and so are the phrase tables.

    Args:
        path: the index's directory.
        names: of documents, as the index lists them.
        patterns: of such names, as the shell has them: `*`, `?` and `[…]`.
        options: where to run.

    Raises:
        IndexBusyError: somebody else is changing the index.
        SourceError: a name or a pattern is of no document, or no document would be left.
        IndexerError: the index cannot be written.
    """
    started = time.perf_counter()
    choose = _Chooser(names, patterns)
    with writing(Path(path), "remove") as writer:
        pieces, gone = [], []
        for part, record in zip(_parts_of(writer), writer.contents.segments, strict=True):
            documents = part.documents()
            chosen = [choose(documents.name(number)) for number in range(len(documents))]
            kept = ~np.array(chosen, np.bool_)
            pieces.append(Piece(part, tuple(kept_runs(kept))))
            gone.append(replace(record, num_documents=int((~kept).sum())))
        choose.check_all_found()
        segments = _rewritten(options.engine, writer, pieces)
        if not segments:
            raise SourceError("that would leave no document: remove the index's folder instead")
        tokens = writer.contents.num_tokens
        _publish(options.engine, writer, segments)
    return ChangeReport(
        str(path),
        "removed",
        sum(record.num_documents for record in gone),
        tokens - writer.contents.num_tokens,
        len(segments),
        time.perf_counter() - started,
    )


def compact(path: Path | str, options: BuildOptions = DEFAULTS) -> ChangeReport:
    """Merge neighbouring segments that fit into one, and count all of them in the phrase tables.

    Look-ups take less time in fewer segments.

    Args:
        path: the index's directory.
        options: where to run, and the most tokens of a merged segment.

    Raises:
        IndexBusyError: somebody else is changing the index.
        IndexerError: the index cannot be written.
    """
    started = time.perf_counter()
    with writing(Path(path), "compact") as writer:
        most = options.segment_tokens(writer.contents.vocabulary.size)
        groups = _neighbours(_parts_of(writer), most)
        before = len(writer.contents.segments)
        merged = iter(
            _segments(options.engine, writer, [group for group in groups if len(group) > 1])
        )
        old = {
            writer.folder / SEGMENTS_FOLDER / record.name: record
            for record in writer.contents.segments
        }
        segments = [
            next(merged) if len(group) > 1 else old[group[0].part.folder] for group in groups
        ]
        _publish(options.engine, writer, segments, exact=True)
    return ChangeReport(
        str(path), "merged", before - len(segments), 0, len(segments), time.perf_counter() - started
    )


class _Chooser:
    """Tells which documents were named, and which names no document has."""

    def __init__(self, names: Iterable[str], patterns: Iterable[str]) -> None:
        self._unfound = {*names, *patterns}
        self._names, self._patterns = frozenset(names), tuple(patterns)

    def __call__(self, name: str) -> bool:
        found = [pattern for pattern in self._patterns if fnmatchcase(name, pattern)]
        if name in self._names:
            found.append(name)
        self._unfound.difference_update(found)
        return bool(found)

    def check_all_found(self) -> None:
        if self._unfound:
            first, *more = sorted(self._unfound)
            others = f" (and {len(more)} more)" if more else ""
            raise SourceError(
                f"the index has no document {first!r}{others}: nothing was removed; "
                "`python -m indexer documents` lists the names"
            )


def _parts_of(writer: IndexWriter) -> list[Part]:
    folder = writer.folder / SEGMENTS_FOLDER
    return [Part.of_segment(folder / each.name, each) for each in writer.contents.segments]


def _rewritten(engine: Engine, writer: IndexWriter, pieces: Sequence[Piece]) -> list[SegmentRecord]:
    """Return the segments without what is not in pieces; one piece for each, maybe an empty one."""
    is_whole = [piece.runs == ((0, piece.part.num_documents),) for piece in pieces]
    changed = [
        [piece] for piece, whole in zip(pieces, is_whole, strict=True) if piece.runs and not whole
    ]
    written = iter(_segments(engine, writer, changed))
    return [
        record if whole else next(written)
        for record, piece, whole in zip(writer.contents.segments, pieces, is_whole, strict=True)
        if piece.runs
    ]


def _neighbours(parts: Iterable[Part], most: int) -> list[list[Piece]]:
    """Return neighbours together as long as they fit into one segment."""
    groups: list[list[Piece]] = []
    length = most
    for part in parts:
        piece, own = Piece(part, ((0, part.num_documents),)), part.num_tokens + part.num_documents
        if length + own > most:
            groups.append([])
            length = 0
        groups[-1].append(piece)
        length += own
    return groups


def _segments(
    engine: Engine, writer: IndexWriter, groups: Iterable[Sequence[Piece]]
) -> list[SegmentRecord]:
    contents = writer.contents
    return write_segments(
        engine, writer.folder, groups, contents.next_segment, contents.vocabulary.size
    )


def _publish(
    engine: Engine,
    writer: IndexWriter,
    segments: Sequence[SegmentRecord],
    *,
    exact: bool = False,
) -> None:
    """Publish segments, unless they and their phrases are those that are published."""
    next_segment = 1 + max(
        writer.contents.next_segment - 1, *(int(record.name) for record in segments)
    )
    contents = replace(writer.contents, segments=tuple(segments), next_segment=next_segment)
    number = writer.next_number
    phrases = renewed_phrases(engine, writer.folder, number, contents, always=exact)
    contents = replace(contents, phrases=phrases)
    if contents != writer.contents:
        writer.publish(contents)

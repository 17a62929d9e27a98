"""Changes an existing index: adds documents, removes documents, and merges small segments."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Final

from indexer.build_report import BuildTally, ChangeReport
from indexer.change.choosing import Choice
from indexer.change.writer import IndexWriter, writing
from indexer.errors import IndexerError, SourceError, TokenizerError
from indexer.format.names import (
    KEYS_FILE,
    SEGMENTS_FOLDER,
    STARTS_FILE,
    SUFFIXES_FILE,
    TOKENIZER_FILE,
)
from indexer.format.opening import check_file
from indexer.format.records import Contents, SegmentRecord
from indexer.stages.build_options import DEFAULTS, BuildOptions
from indexer.stages.gathering import (
    READING,
    Building,
    OnProgress,
    no_document,
    no_progress,
    planned,
    scratch_folder,
)
from indexer.stages.parts import Part, kept_runs
from indexer.stages.screening import Screening, record_of, screened_as
from indexer.stages.segments import Piece, gather
from indexer.tokenizer import load_core

_log = getLogger(__name__)

_NOT_COPIED: Final = frozenset({SUFFIXES_FILE, STARTS_FILE, KEYS_FILE})


def add_documents(
    path: Path | str,
    sources: Sequence[Path | str],
    options: BuildOptions = DEFAULTS,
    on_progress: OnProgress | None = None,
) -> ChangeReport:
    """Add documents to an index, as new segments. Documents already in the index are left out.

    An indexed document may have the same name as an added one but a different text. It is then
    replaced or counted; see `BuildOptions.replace`. Added documents are screened at least as
    strictly as the indexed ones. Processes that read the index keep their snapshot until they
    reopen it. Texts are stored if the index stores its texts. If the index already has all
    documents, nothing is published.

    Args:
        path: directory of the index.
        sources: as for `build_index`.
        options: as for `build_index`.
        on_progress: as for `build_index`.

    Raises:
        IndexBusyError: another process is changing the index.
        SourceError: a source does not exist, no document could be read, or more records were
            dropped than the options allow.
        IndexerError: the index has no tokenizer, or cannot be written.
    """
    started = time.perf_counter()
    with writing(Path(path), "add") as writer, scratch_folder(writer.folder, READING) as scratch:
        contents, tally, tell = writer.contents, BuildTally(), on_progress or no_progress
        options = replace(
            options, keep_texts=contents.keeps_texts, screen=_screen_of(writer, options.screen)
        ).with_licence(contents.licence, writer.folder)
        _check_tokenizer(writer)
        options = _with_template(options, contents.vocabulary.name)
        blocks = planned(sources, options, tally, tell, scratch)
        options = options.for_blocks(len(blocks))
        building = _building(writer, options, tally, tell)
        parts = building.read(blocks, scratch)
        if not tally.num_documents:
            raise no_document(tally)
        pieces = building.chosen(parts, [part.documents().digests for part in _parts_of(writer)])
        groups = list(gather(pieces, options.most_tokens(contents.vocabulary.size)))
        kept, num_earlier = _without_earlier(writer, pieces)
        if not options.replace:
            kept = [Piece(part, part.whole) for part in _parts_of(writer)]
        segments = _regrouped(building, writer, [*([each] for each in kept if each.runs), *groups])
        _publish(building, writer, replace(contents, segments=segments))
        added = segments[len(segments) - len(groups) :]
        num_tokens = sum(record.num_tokens for record in added)
        report = _report(path, "added", _num_documents(added), num_tokens, writer, started)
        if options.replace:
            return replace(report, tally=tally, num_replaced=num_earlier)
        return replace(report, tally=tally, num_earlier=num_earlier)


def remove_documents(
    path: Path | str,
    names: Iterable[str] = (),
    patterns: Iterable[str] = (),
    options: BuildOptions = DEFAULTS,
) -> ChangeReport:
    """Remove documents. Once nobody reads the old snapshot, no file has any trace of them.

    Segments that contain the documents are rewritten without them. The phrase tables are rewritten,
    too. Files that other processes still have open stay until the next change. The report says so.

    Args:
        path: directory of the index.
        names: names of documents, as the index lists them.
        patterns: patterns of document names, as in the shell: `*`, `?` and `[…]`.
        options: where to run.

    Raises:
        IndexBusyError: another process is changing the index.
        SourceError: a name or a pattern matches no document, or no document would remain.
        DamagedIndexError: files that stay are damaged.
        IndexerError: the index cannot be written.
    """
    started = time.perf_counter()
    choice = Choice(names, patterns)
    with writing(Path(path), "remove") as writer:
        pieces = [Piece(part, tuple(choice.left(part.documents()))) for part in _parts_of(writer)]
        choice.check_all_found()
        groups = [[piece] for piece in pieces if piece.runs]
        if not groups:
            raise SourceError("that would leave no document: remove the index's folder instead")
        before, building = writer.contents, _building(writer, options)
        segments = _regrouped(building, writer, groups)
        _publish(building, writer, replace(before, segments=segments))
        num_documents = _num_documents(before.segments) - _num_documents(segments)
        num_tokens = before.num_tokens - writer.contents.num_tokens
        return _report(path, "removed", num_documents, num_tokens, writer, started)


def compact(path: Path | str, options: BuildOptions = DEFAULTS) -> ChangeReport:
    """Merge adjacent segments that fit into one, and cover all segments in the phrase tables.

    Look-ups are faster with fewer segments. If there is nothing to merge and the phrase tables
    cover everything, nothing is published.

    Args:
        path: directory of the index.
        options: where to run, and the largest number of tokens of a merged segment.

    Raises:
        IndexBusyError: another process is changing the index.
        DamagedIndexError: a segment to merge is damaged.
        IndexerError: the index cannot be written.
    """
    started = time.perf_counter()
    with writing(Path(path), "compact") as writer:
        before, building = writer.contents, _building(writer, options)
        most = options.most_tokens(before.vocabulary.size)
        groups = _neighbours(_parts_of(writer), most)
        segments = _regrouped(building, writer, groups)
        phrases = before.phrases
        if before.num_uncounted_tokens == 0:  # how segments are divided does not change the tables
            phrases = replace(phrases, segments=tuple(record.name for record in segments))
        contents = replace(before, segments=segments, phrases=phrases)
        _publish(building, writer, contents, exact=True)
        num_merged = len(before.segments) - len(segments)
        return _report(path, "merged", num_merged, 0, writer, started)


def _building(
    writer: IndexWriter,
    options: BuildOptions,
    tally: BuildTally | None = None,
    tell: OnProgress = no_progress,
) -> Building:
    vocabulary = writer.contents.vocabulary
    return Building(writer.folder, vocabulary, options, tally or BuildTally(), tell)


def _parts_of(writer: IndexWriter) -> list[Part]:
    folder = writer.folder / SEGMENTS_FOLDER
    return [Part.of_segment(folder / each.name, each) for each in writer.contents.segments]


def _without_earlier(writer: IndexWriter, added: Sequence[Piece]) -> tuple[list[Piece], int]:
    """Return the index without documents named like added ones, and the number of these."""
    names = {
        table.name_bytes(number)
        for piece in added
        for table in (piece.part.documents(),)
        for begin, end in piece.runs
        for number in range(begin, end)
    }
    pieces, num_earlier = [], 0
    for part in _parts_of(writer):
        earlier = part.documents().named(names)
        num_earlier += int(earlier.sum())
        pieces.append(Piece(part, tuple(kept_runs(~earlier))))
    return pieces, num_earlier


def _with_template(options: BuildOptions, name: str) -> BuildOptions:
    """Return the options with the chat template of the index's tokenizer."""
    if not options.needs_template or not name:
        return options
    try:
        return options.with_template_of(load_core(name))
    except TokenizerError as error:
        _log.warning("turns of conversations are joined by empty lines: %s", error)
        return options


def _screen_of(writer: IndexWriter, asked: Screening | None) -> Screening | None:
    """Return the screening of added documents; see `screened_as`."""
    before = writer.contents.screening
    screen = screened_as(before, asked, writer.folder)
    if record_of(screen) != before:
        _log.warning(
            "%s has documents without this screening: `foredraft build --from` screens them "
            "too, if it keeps its texts",
            writer.folder,
        )
    return screen


def _check_tokenizer(writer: IndexWriter) -> None:
    """Check that the index has a stored tokenizer, and check its checksum."""
    if writer.contents.tokenizer is None:
        raise IndexerError(
            f"{writer.folder} was built from token ids and has no tokenizer: build it again"
        )
    check_file(writer.folder / TOKENIZER_FILE, writer.contents.tokenizer)


def _neighbours(parts: Iterable[Part], most: int) -> list[list[Piece]]:
    """Group adjacent parts that fit into one segment."""
    groups: list[list[Piece]] = []
    length = most
    for part in parts:
        if length + part.length > most:
            groups.append([])
            length = 0
        groups[-1].append(Piece(part, part.whole))
        length += part.length
    return groups


def _regrouped(
    building: Building, writer: IndexWriter, groups: Sequence[Sequence[Piece]]
) -> tuple[SegmentRecord, ...]:
    """Return a segment for each group: an existing segment that equals the group, or a new one."""
    folder = writer.folder / SEGMENTS_FOLDER
    records = {folder / record.name: record for record in writer.contents.segments}
    present = [_segment_of(group, records) for group in groups]
    new = [group for group, record in zip(groups, present, strict=True) if record is None]
    for group in new:
        for piece in group:
            if piece.part.folder in records:
                _check_sound(piece.part.folder, records[piece.part.folder])
    written = iter(building.segments(new, writer.contents.next_segment))
    return tuple(next(written) if record is None else record for record in present)


def _segment_of(
    group: Sequence[Piece], records: Mapping[Path, SegmentRecord]
) -> SegmentRecord | None:
    """Return the segment that equals a group, or `None` if there is none."""
    if len(group) == 1 and group[0].runs == group[0].part.whole:
        return records.get(group[0].part.folder)
    return None


def _check_sound(folder: Path, record: SegmentRecord) -> None:
    """Check files before they are copied, because a new checksum would hide damage."""
    for name, file in record.files.items():
        if name not in _NOT_COPIED:
            check_file(folder / name, file)


def _publish(
    building: Building, writer: IndexWriter, contents: Contents, *, exact: bool = False
) -> None:
    """Publish contents with matching phrase tables, unless they are already published."""
    last = max(int(record.name) for record in contents.segments)
    contents = replace(contents, next_segment=max(contents.next_segment, last + 1))
    phrases = building.phrases(writer.next_number, contents, always=exact)
    contents = replace(contents, phrases=phrases)
    if contents != writer.contents:
        writer.publish(contents)


def _num_documents(records: Iterable[SegmentRecord]) -> int:
    return sum(record.num_documents for record in records)


def _report(  # noqa: PLR0913, PLR0917
    path: Path | str,
    verb: str,
    num_changed: int,
    num_tokens: int,
    writer: IndexWriter,
    started: float,
) -> ChangeReport:
    num_segments, seconds = len(writer.contents.segments), time.perf_counter() - started
    return ChangeReport(
        str(path), verb, num_changed, num_tokens, num_segments, writer.num_older, seconds
    )

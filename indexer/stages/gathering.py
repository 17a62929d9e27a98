"""The stages of a build in order, from sources to the contents of a snapshot.

Blocks of sources become parts, parts without duplicates become segments, and the segments' n-grams
become phrase tables. Every stage maps a function over tasks; both can be pickled, so that an engine
may run them anywhere.
"""

import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from indexer.build_report import BuildTally
from indexer.engines import Engine
from indexer.errors import IndexerError, SourceError
from indexer.format.names import (
    DIGEST_BYTES,
    PHRASES_FOLDER,
    SCRATCH_FOLDER,
    SEGMENTS_FOLDER,
    ordinal_name,
    token_dtype,
)
from indexer.format.output import move_folder
from indexer.format.records import Contents, PhrasesRecord, SegmentRecord, checksum_of
from indexer.screening.screen import ScreenOptions
from indexer.sources import SourceBlock, SourceOptions, plan, read
from indexer.stages.build_options import BuildOptions
from indexer.stages.kept_results import (
    forget_result,
    keep_result,
    kept_result,
    key_of,
    own_folder,
    remove_unfinished,
)
from indexer.stages.parts import Part, PartWriter, TokenisedDocument, kept_runs
from indexer.stages.phrase_writer import write_phrases
from indexer.stages.segments import Piece, SegmentTask, sorting_bytes, write_segment
from indexer.stages.tokenise import EMPTY, stored_encoder, tokenise, tokenising_bytes, usable_texts
from indexer.tokenizer import Vocabulary

DUPLICATE: Final = "exact duplicate"

READING: Final = "reading"
SORTING: Final = "sorting"
COUNTING: Final = "counting"
"""Stages of a build, by which reports and folders for temporary files name them."""

_UNCOUNTED_SHARE: Final = 8
"""Phrase tables are rebuilt once more than one token in so many is not counted in them. Counting
takes as long as the whole index is large; continuations that are frequent in seven eighths of it
are frequent in all. With a fixed share, each token is counted a bounded number of times."""

_SCRATCH_NAME_BYTES: Final = 4
_BYTES_PER_VOCABULARY_ENTRY: Final = 16
"""Memory for each entry of `starts` while a segment is written: counts of eight bytes, twice."""


_BYTES_PER_DOCUMENT: Final = 512
"""Memory for each document while a segment is written: its row in the tables, its name twice."""


@dataclass(frozen=True, slots=True)
class PartTask:
    """All that `write_part` needs to know.

    Attributes:
        folder: of the part, to be made.
        block: of the sources.
        tokenizer: the stored tokenizer.
        vocabulary_size: largest token id plus one.
        sources: how they are read.
        screening: phrases and secrets to remove.
        keep_texts: whether texts are stored.
        key: under which the result is kept, or empty; see `kept_results`.
    """

    folder: Path
    block: SourceBlock
    tokenizer: Path
    vocabulary_size: int
    sources: SourceOptions
    screening: ScreenOptions
    keep_texts: bool
    key: str = ""

    @property
    def memory_bytes(self) -> int:
        """How much memory `write_part` takes at most."""
        return tokenising_bytes(self.sources.max_document_bytes)


def write_part(task: PartTask) -> tuple[Part, BuildTally]:
    """Read and tokenise sources; return the part and its counts, or those that are kept."""
    if (kept := kept_result(task.folder, task.key)) is not None:
        return Part.decode(task.folder, kept["part"]), BuildTally.decode(kept["tally"])
    tally = BuildTally()
    documents = read(task.block, task.sources, tally)
    usable = usable_texts(documents, task.sources.max_document_bytes, tally, task.screening)
    dtype = token_dtype(task.vocabulary_size)
    tokenised = tokenise(usable, stored_encoder(task.tokenizer), dtype, tally)
    folder = own_folder(task.folder, task.key)
    counted = _counting(tokenised, task.folder, tally)
    part = gather_part(counted, folder, task.vocabulary_size, keep_texts=task.keep_texts)
    if task.key:
        result = {"part": part.encode(), "tally": tally.encode()}
        keep_result(task.folder, folder, task.key, result)
    return replace(part, folder=task.folder), tally


def gather_part(
    documents: Iterable[TokenisedDocument], folder: Path, vocabulary_size: int, *, keep_texts: bool
) -> Part:
    """Write documents as a part."""
    writer = PartWriter(folder, token_dtype(vocabulary_size), keeps_texts=keep_texts)
    try:
        for document in documents:
            writer.add(document)
    except BaseException:
        writer.discard()
        raise
    return writer.close()


def without_duplicates(
    parts: Sequence[Part], known: Sequence[NDArray[np.uint8]], tally: BuildTally
) -> list[Piece]:
    """Return the documents that neither earlier parts nor known digests hold; count the others.

    Args:
        parts: in order.
        known: uint8[n, DIGEST_BYTES] each, digests of documents that the index holds already.
        tally: counts the duplicates.
    """
    is_first = first_of(np.concatenate([*known, *(part.documents().digests for part in parts)]))
    begin = sum(len(each) for each in known)
    pieces = []
    for part in parts:
        kept = is_first[begin : begin + part.num_documents]
        begin += part.num_documents
        if not kept.all():
            table = part.documents()
            for number in np.flatnonzero(~kept).tolist():
                tally.skip(DUPLICATE, table.name(number))
        if kept.any():
            pieces.append(Piece(part, tuple(kept_runs(kept))))
    return pieces


def first_of(digests: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which of some digests are equal to none before.

    Args:
        digests: uint8[n, DIGEST_BYTES].
    """
    is_first = np.zeros(len(digests), np.bool_)
    keys = np.ascontiguousarray(digests).view(f"V{DIGEST_BYTES}").reshape(-1)
    is_first[np.unique(keys, return_index=True)[1]] = True
    return is_first


@contextmanager
def scratch_folder(folder: Path, stage: str, *, kept: bool = False) -> Iterator[Path]:
    """Give a folder in an index for what a stage writes before it is published.

    It is empty, has a random name that no other process uses, and goes with the block, unless it
    is kept.

    Args:
        folder: the index's directory.
        stage: begins the folder's name.
        kept: the folder stays with what is in it, and is given again the next time.

    Raises:
        IndexerError: the disk is full or refuses.
    """
    name = stage if kept else f"{stage}-{secrets.token_hex(_SCRATCH_NAME_BYTES)}"
    scratch = folder / SCRATCH_FOLDER / name
    try:
        scratch.mkdir(parents=True, exist_ok=kept)
        remove_unfinished(scratch)
    except OSError as error:
        raise IndexerError(f"cannot write {scratch}: {error.strerror}") from error
    try:
        yield scratch
    finally:
        if not kept:
            shutil.rmtree(scratch, ignore_errors=True)
            with suppress(OSError):  # other writers' folders are left, or there was none
                scratch.parent.rmdir()


def write_segments(  # noqa: PLR0913, PLR0917
    engine: Engine,
    folder: Path,
    groups: Iterable[Sequence[Piece]],
    first: int,
    vocabulary_size: int,
    kept_as: str = "",
) -> list[SegmentRecord]:
    """Write a segment for each group of pieces, numbered from `first` on.

    They are moved to their places when all are whole: processes that outlive a killed writer write
    in its scratch folder only.

    Args:
        engine: where to run.
        folder: the index's directory.
        groups: of pieces.
        first: number of the first segment.
        vocabulary_size: largest token id plus one.
        kept_as: if not empty, finished segments are kept, under this and what they hold.
    """
    with scratch_folder(folder, SORTING, kept=bool(kept_as)) as scratch:
        tasks = [
            SegmentTask(
                scratch, ordinal_name(number), tuple(group), vocabulary_size, _key(kept_as, group)
            )
            for number, group in enumerate(groups, first)
        ]
        need = max((_segment_bytes(task) for task in tasks), default=0)
        records = list(engine.map(write_segment, tasks, need))
        place = folder / SEGMENTS_FOLDER
        for record in records:
            if (scratch / record.name).exists():  # an earlier build may have moved it
                move_folder(scratch / record.name, place / record.name)
        if kept_as:
            _remove_others(place, records, scratch)
    return records


def _remove_others(place: Path, records: Sequence[SegmentRecord], scratch: Path) -> None:
    """Remove the segments of an earlier build that was divided otherwise."""
    names = {record.name for record in records}
    for folder in [each for each in place.iterdir() if each.name not in names]:
        forget_result(scratch / folder.name)
        shutil.rmtree(folder, ignore_errors=True)


def _key(kept_as: str, group: Sequence[Piece]) -> str:
    """Return a checksum of the documents of a segment: names, checksums of texts, lengths."""
    if not kept_as:
        return ""
    return key_of(kept_as, [(_documents_key(piece.part), piece.runs) for piece in group])


def _documents_key(part: Part) -> str:
    table = part.documents()
    columns = [checksum_of(array.tobytes()) for array in table.files().values()]
    return key_of(columns, table.licences, part.num_tokens, part.keeps_texts)


def renewed_phrases(
    engine: Engine, folder: Path, number: int, contents: Contents, *, always: bool = False
) -> PhrasesRecord:
    """Return phrase tables for the segments of contents: the present ones if they are good enough.

    They are if they count no removed segment and lack no more than an eighth of the tokens. Tokens
    that were just added are found in the suffixes, and counting takes as long as the whole index
    is large.

    Args:
        engine: where to run.
        folder: the index's directory.
        number: of the snapshot that will be published.
        contents: with the phrase tables of the snapshot before.
        always: rebuild them unless they count exactly the segments.
    """
    live = {record.name for record in contents.segments}
    counts_live = bool(contents.phrases.files) and live.issuperset(contents.phrases.segments)
    most = 0 if always else contents.num_tokens // _UNCOUNTED_SHARE
    if counts_live and contents.num_uncounted_tokens <= most:
        return contents.phrases
    return _write_phrases(engine, folder, ordinal_name(number), contents)


def _write_phrases(engine: Engine, folder: Path, name: str, contents: Contents) -> PhrasesRecord:
    scratch, place = folder / SCRATCH_FOLDER / COUNTING, folder / PHRASES_FOLDER / name
    size = contents.vocabulary.size
    try:
        files = write_phrases(engine, folder, contents.segments, size, scratch, place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return PhrasesRecord(name, tuple(record.name for record in contents.segments), files)


def _segment_bytes(task: SegmentTask) -> int:
    """Return how much memory `write_segment` takes at most."""
    num_documents = sum(end - begin for piece in task.pieces for begin, end in piece.runs)
    num_tokens = sum(_num_tokens(piece) for piece in task.pieces)
    return (
        sorting_bytes(num_tokens, task.vocabulary_size)
        + _BYTES_PER_DOCUMENT * num_documents
        + _BYTES_PER_VOCABULARY_ENTRY * task.vocabulary_size
    )


def _num_tokens(piece: Piece) -> int:
    """Return the length of a piece, separators included."""
    starts = piece.part.documents().starts
    length = piece.part.num_tokens + piece.part.num_documents
    return sum(
        (int(starts[end]) if end < len(starts) else length) - int(starts[begin])
        for begin, end in piece.runs
    )


OnProgress = Callable[[BuildTally], None]
"""Called with the counts so far, of which `doing` says what is done now."""


def no_progress(tally: BuildTally) -> None:
    """Show nothing."""
    del tally


class ReadingTask(Protocol):
    """A task that writes a part.

    Attributes:
        folder: of the part.
    """

    @property
    def folder(self) -> Path: ...  # noqa: D102  (see above)

    @property
    def memory_bytes(self) -> int:
        """How much memory it takes at most."""
        ...


_Task = TypeVar("_Task", bound=ReadingTask)


def planned(
    sources: Sequence[Path | str], options: BuildOptions, tally: BuildTally, scratch: Path
) -> list[SourceBlock]:
    """Return the blocks of all sources.

    Raises:
        SourceError: a source does not exist, or all of them are empty.
    """
    blocks = plan(sources, options.sources, tally, scratch)
    if tally.num_bytes_found == 0:
        num_files = sum(len(block.pieces) for block in blocks)
        tally.skipped.update({EMPTY: num_files} if num_files else {})
        raise no_document(tally)
    return blocks


def part_tasks(  # noqa: PLR0913, PLR0917
    blocks: Sequence[SourceBlock],
    scratch: Path,
    tokenizer: Path,
    vocabulary: Vocabulary,
    options: BuildOptions,
    kept_as: str = "",
) -> list[PartTask]:
    """Return a task for each block.

    Args:
        blocks: of the sources.
        scratch: where the parts go.
        tokenizer: the stored tokenizer.
        vocabulary: of the tokenizer.
        options: how to read.
        kept_as: if not empty, finished parts are kept, under this and what they are made of.
    """
    phrases = options.screen.phrases
    how = (
        (kept_as, options.sources, options.screen, options.keep_texts),
        (phrases.texts, phrases.lines) if phrases is not None else (),
    )
    return [
        PartTask(
            scratch / f"{number:08d}",
            block,
            tokenizer,
            vocabulary.size,
            options.sources,
            options.screen,
            options.keep_texts,
            key_of(how, block, _stamps(block)) if kept_as else "",
        )
        for number, block in enumerate(blocks)
    ]


def _stamps(block: SourceBlock) -> list[tuple[int, int]]:
    """Return sizes and times of a block's files, one of which changes when a file is written to."""
    found = []
    for piece in block.pieces:
        with suppress(OSError):  # reading it will say so
            stat = piece.file.path.stat()
            found.append((stat.st_size, stat.st_mtime_ns))
    return found


def read_parts(
    engine: Engine,
    tasks: Sequence[_Task],
    tally: BuildTally,
    on_progress: OnProgress | None,
    write: Callable[[_Task], tuple[Part, BuildTally]],
) -> list[Part]:
    """Read and tokenise all sources, each task as `write` does; count."""
    parts = []
    need = max((task.memory_bytes for task in tasks), default=0)
    with tally.stage(READING), _watching(tasks, tally.now(READING), on_progress) as finish:
        for task, (part, counted) in zip(tasks, engine.map(write, tasks, need), strict=True):
            finish(task)
            tally.merge(counted)
            tally.num_documents += part.num_documents
            tally.num_tokens += part.num_tokens
            parts.append(part)
    return parts


_LOOK_S: Final = 0.25  # between two looks at how far tasks have come
_Counts = tuple[int, int]


def _counting(
    documents: Iterable[TokenisedDocument], folder: Path, tally: BuildTally
) -> Iterator[TokenisedDocument]:
    """Yield documents, and note now and then how many bytes and tokens have come."""
    num_tokens, noted_s = 0, time.monotonic()
    for document in documents:
        num_tokens += len(document.tokens)
        if time.monotonic() - noted_s > _LOOK_S:
            noted_s = time.monotonic()
            with suppress(OSError):  # it is for show
                _note_of(folder).write_text(f"{tally.num_bytes_read} {num_tokens}")
        yield document


def _noted(folder: Path) -> _Counts:
    with suppress(OSError, ValueError):
        num_bytes, num_tokens = map(int, _note_of(folder).read_text().split())
        return num_bytes, num_tokens
    return 0, 0


def _note_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.counts")


@contextmanager
def _watching(
    tasks: Sequence[_Task], tally: BuildTally, on_progress: OnProgress | None
) -> Iterator[Callable[[_Task], None]]:
    """Show how far tasks have come while they run, those in other processes, too.

    Args:
        tasks: that are going to run.
        tally: has the counts of those that are done.
        on_progress: is told.

    Yields:
        What to call once a task is done.
    """
    if on_progress is None:
        yield lambda _: None
        return
    running, ended = dict.fromkeys(task.folder for task in tasks), Event()
    shown = [0, 0]

    def show() -> None:
        while not ended.wait(_LOOK_S):
            counts = [_noted(folder) for folder in list(running)]
            partly = replace(tally)
            for at, name in enumerate(("num_bytes_read", "num_tokens")):
                now = getattr(tally, name) + sum(each[at] for each in counts)
                shown[at] = max(shown[at], now)  # between a task's end and its counts
                setattr(partly, name, shown[at])
            on_progress(partly)

    def finish(task: _Task) -> None:
        running.pop(task.folder, None)
        _note_of(task.folder).unlink(missing_ok=True)

    on_progress(tally)
    thread = Thread(target=show, name="foredraft-progress", daemon=True)
    thread.start()
    try:
        yield finish
    finally:
        ended.set()
        thread.join()
        on_progress(tally)


def chosen_pieces(
    parts: Sequence[Part],
    known: Sequence[NDArray[np.uint8]],
    options: BuildOptions,
    tally: BuildTally,
) -> list[Piece]:
    """Return the documents of parts that are to be indexed."""
    filled = [part for part in parts if part.num_documents]
    if options.deduplicate and filled:
        return without_duplicates(filled, known, tally)
    return [Piece(part, ((0, part.num_documents),)) for part in filled]


def no_document(tally: BuildTally) -> SourceError:
    """Return the error for sources without a document that can be indexed."""
    reasons = tally.describe_skipped()
    return SourceError("no document to index" + (f": skipped {reasons}" if reasons else ""))

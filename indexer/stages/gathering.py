"""Runs the stages of a build in order, from sources to the contents of a snapshot.

Blocks of sources become parts. Parts without duplicates become segments. The segments' n-grams
become phrase tables. Each stage maps a function over tasks. Both the function and the tasks can be
pickled, so an engine can run them anywhere.
"""

import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import Final

import numpy as np
from numpy.typing import NDArray

from indexer.build_report import BuildTally
from indexer.errors import SourceError, writing_to
from indexer.format.names import (
    DIGEST_BYTES,
    PHRASES_FOLDER,
    SCRATCH_FOLDER,
    SEGMENTS_FOLDER,
    TEXTS_FILE,
    TOKENIZER_FILE,
    ordinal_name,
    token_dtype,
)
from indexer.format.opening import check_file
from indexer.format.output import move_folder
from indexer.format.records import Contents, FileRecord, PhrasesRecord, SegmentRecord, checksum_of
from indexer.sources import DEFAULT_MAX_DOCUMENT_BYTES, SourceBlock, SourceDocument, plan, read
from indexer.stages.build_options import BuildOptions
from indexer.stages.kept_results import forget_result, key_of, map_kept, remove_unfinished
from indexer.stages.parts import Part, PartWriter, TokenisedDocument, kept_runs
from indexer.stages.phrase_writer import write_phrases
from indexer.stages.segments import Piece, SegmentTask, write_segment
from indexer.stages.tokenise import (
    EMPTY,
    UsableText,
    stored_encoder,
    tokenise,
    tokenising_bytes,
    usable_texts,
)
from indexer.tokenizer import Vocabulary

DUPLICATE: Final = "exact duplicate"

FINDING: Final = "finding sources"
READING: Final = "reading"
SORTING: Final = "sorting"
COUNTING: Final = "counting"
"""Names of the build stages, in reports and for temporary folders."""

_UNCOUNTED_SHARE: Final = 8
"""Phrase tables are rebuilt once more than one token in this many is missing from them. Counting
takes time that grows with the whole index. Continuations that are frequent in seven eighths of the
index are frequent in all of it. A fixed share bounds how often each token is counted."""

_SCRATCH_NAME_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class KeptTexts:
    """The texts of a segment, as a block of documents to read.

    Attributes:
        part: the segment as a part.
        file: record of the segment's texts file.
    """

    part: Part
    file: FileRecord

    def documents(self) -> Iterator[SourceDocument]:
        """Yield the documents.

        Raises:
            DamagedIndexError: the texts file is damaged.
        """
        check_file(self.part.folder / TEXTS_FILE, self.file)
        for name, licence, text in self.part.texts():
            yield SourceDocument(name, licence, text)


@dataclass(frozen=True, slots=True)
class GivenTexts:
    """Names and texts from the caller, as a block of documents to read. Cannot be pickled."""

    pairs: Iterable[tuple[str, str]]

    def documents(self) -> Iterator[SourceDocument]:
        """Yield the documents."""
        for name, text in self.pairs:
            yield SourceDocument(name, "", text)


Block = SourceBlock | KeptTexts | GivenTexts


@dataclass(frozen=True, slots=True)
class PartTask:
    """The arguments of `write_part`.

    Attributes:
        folder: folder of the part, to be created.
        block: block of documents to read.
        tokenizer: path of the stored tokenizer.
        vocabulary_size: largest token id plus one.
        options: how to read.
        key: see `kept_results.Task`.
    """

    folder: Path
    block: Block
    tokenizer: Path
    vocabulary_size: int
    options: BuildOptions
    key: str = ""

    @property
    def memory_bytes(self) -> int:
        """Most memory that `write_part` takes. Stored texts count with the default size limit."""
        most = self.options.sources.max_document_bytes
        if isinstance(self.block, KeptTexts):
            most = DEFAULT_MAX_DOCUMENT_BYTES
        return tokenising_bytes(most)

    def documents(self, tally: BuildTally) -> Iterator[UsableText]:
        """Yield the block's documents that can be tokenised; count the others."""
        sources, screen, block = self.options.sources, self.options.screen, self.block
        found = read(block, sources, tally) if isinstance(block, SourceBlock) else block.documents()
        most = sys.maxsize if isinstance(block, KeptTexts) else sources.max_document_bytes
        yield from usable_texts(found, most, tally, screen)
        if isinstance(block, KeptTexts):
            tally.num_bytes_read += block.file.num_bytes


def write_part(task: PartTask) -> tuple[Part, BuildTally]:
    """Read and tokenise documents; return the part and its counts.

    Raises:
        DamagedIndexError: the stored texts of an index are damaged.
        IndexerError: the disk is full, or the system denies the write.
    """
    tally = BuildTally()
    encoder, dtype = stored_encoder(task.tokenizer), token_dtype(task.vocabulary_size)
    tokenised = tokenise(task.documents(tally), encoder, dtype, tally)
    counted = _counting(tokenised, task.folder, tally)
    keep_texts = task.options.keep_texts
    part = gather_part(counted, task.folder, task.vocabulary_size, keep_texts=keep_texts)
    return part, tally


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
    """Return the documents that are new, and count the duplicates.

    Args:
        parts: parts in order. A document is a duplicate if an earlier one has the same digest.
        known: uint8[n, DIGEST_BYTES] each, digests of documents that are already in the index.
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
    """Return a mask of the digests that differ from all earlier digests.

    Args:
        digests: uint8[n, DIGEST_BYTES].
    """
    is_first = np.zeros(len(digests), np.bool_)
    keys = np.ascontiguousarray(digests).view(f"V{DIGEST_BYTES}").reshape(-1)
    is_first[np.unique(keys, return_index=True)[1]] = True
    return is_first


@contextmanager
def scratch_folder(folder: Path, stage: str, *, kept: bool = False) -> Iterator[Path]:
    """Yield a folder inside the index for files that a stage writes before publication.

    The folder is empty and has a random name that no other process uses. It is removed after the
    block, unless `kept` is set.

    Args:
        folder: directory of the index.
        stage: prefix of the folder's name.
        kept: whether the folder stays with its content, and is reused the next time.

    Raises:
        IndexerError: the disk is full, or the system denies the write.
    """
    name = stage if kept else f"{stage}-{secrets.token_hex(_SCRATCH_NAME_BYTES)}"
    scratch = folder / SCRATCH_FOLDER / name
    with writing_to(scratch):
        scratch.mkdir(parents=True, exist_ok=kept)
        remove_unfinished(scratch)
    try:
        yield scratch
    finally:
        if not kept:
            shutil.rmtree(scratch, ignore_errors=True)
            with suppress(OSError):  # it still has other writers' folders, or does not exist
                scratch.parent.rmdir()


OnProgress = Callable[[BuildTally], None]
"""Called with the counts so far; `doing` in the counts describes the current work."""


def no_progress(tally: BuildTally) -> None:
    """Show nothing."""
    del tally


@dataclass(frozen=True, slots=True, eq=False)
class Building:
    """An index that is being built or changed, with the values that all stages need.

    Attributes:
        folder: directory of the index.
        vocabulary: vocabulary of the index's tokenizer.
        options: how to build.
        tally: counts of the build.
        tell: progress callback.
        kept_as: if not empty, results of finished parts and segments are stored for a later build,
            under keys made from this value and their inputs.
    """

    folder: Path
    vocabulary: Vocabulary
    options: BuildOptions
    tally: BuildTally = field(default_factory=BuildTally)
    tell: OnProgress = no_progress
    kept_as: str = ""

    def read(self, blocks: Sequence[Block], scratch: Path) -> list[Part]:
        """Read and tokenise blocks; count their content.

        Raises:
            SourceError: more was unreadable than the options allow.
        """
        tasks = [
            PartTask(
                scratch / f"{number:08d}",
                block,
                self.folder / TOKENIZER_FILE,
                self.vocabulary.size,
                self.options,
                self._key_of(block),
            )
            for number, block in enumerate(blocks)
        ]
        parts = []
        tally = self.tally
        self.tell(tally.now(READING))
        with tally.stage(READING), _watching(tasks, tally, self.tell) as finish:
            done = map_kept(self.options.engine, write_part, tasks)
            for task, (part, counted) in zip(tasks, done, strict=True):
                finish(task)
                tally.merge(counted)
                tally.num_documents += part.num_documents
                tally.num_tokens += part.num_tokens
                parts.append(replace(part, folder=task.folder))
        self.tell(tally)
        self.options.check_dropped(tally)
        return parts

    def _key_of(self, block: Block) -> str:
        if not self.kept_as or not isinstance(block, SourceBlock):
            return ""
        options, screen = self.options, self.options.screen
        how = (options.sources, options.keep_texts, "" if screen is None else screen.key)
        return key_of(self.kept_as, how, block, _stamps(block))

    def chosen(self, parts: Sequence[Part], known: Sequence[NDArray[np.uint8]] = ()) -> list[Piece]:
        """Return the documents to index, from all parts.

        Args:
            parts: parts in order.
            known: uint8[n, DIGEST_BYTES] each, digests of documents that are already in the index.
        """
        filled = [part for part in parts if part.num_documents]
        if not self.options.keep_duplicates and filled:
            return without_duplicates(filled, known, self.tally)
        return [Piece(part, part.whole) for part in filled]

    def segments(self, groups: Iterable[Sequence[Piece]], first: int) -> list[SegmentRecord]:
        """Write a segment for each group of pieces. Segments are numbered from `first`.

        Segments move to their final places once all are complete. So if a writer is killed, its
        surviving processes write only in its scratch folder.
        """
        self.tell(self.tally.now(SORTING))
        kept_as = self.kept_as
        with (
            self.tally.stage(SORTING),
            scratch_folder(self.folder, SORTING, kept=bool(kept_as)) as scratch,
        ):
            tasks = [
                SegmentTask(
                    scratch / ordinal_name(number),
                    ordinal_name(number),
                    tuple(group),
                    self.vocabulary.size,
                    _documents_key(kept_as, group),
                )
                for number, group in enumerate(groups, first)
            ]
            records = list(map_kept(self.options.engine, write_segment, tasks))
            place = self.folder / SEGMENTS_FOLDER
            for record in records:
                if (scratch / record.name).exists():  # an earlier build may have moved it
                    move_folder(scratch / record.name, place / record.name)
            if kept_as:
                _remove_others(place, records, scratch)
        return records

    def phrases(self, number: int, contents: Contents, *, always: bool = False) -> PhrasesRecord:
        """Return phrase tables for the segments. The existing tables are reused if good enough.

        Tables are good enough if they count no removed segment and miss at most an eighth of the
        tokens. Tokens that were just added are found in the suffix arrays, and counting takes time
        that grows with the whole index.

        Args:
            number: number of the snapshot that will be published.
            contents: contents with the phrase tables of the previous snapshot.
            always: whether to rebuild the tables unless they count exactly these segments.
        """
        self.tell(self.tally.now(COUNTING))
        live = {record.name for record in contents.segments}
        counts_live = bool(contents.phrases.files) and live.issuperset(contents.phrases.segments)
        most = 0 if always else contents.num_tokens // _UNCOUNTED_SHARE
        if counts_live and contents.num_uncounted_tokens <= most:
            return contents.phrases
        name, segments = ordinal_name(number), contents.segments
        scratch = self.folder / SCRATCH_FOLDER / COUNTING
        place = self.folder / PHRASES_FOLDER / name
        engine, size = self.options.engine, self.vocabulary.size
        try:
            with self.tally.stage(COUNTING):
                files = write_phrases(engine, self.folder, segments, size, scratch, place)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return PhrasesRecord(name, tuple(record.name for record in segments), files)


def _stamps(block: SourceBlock) -> list[tuple[int, int]]:
    """Return the sizes and times of a block's files. They change when a file is written."""
    found = []
    for piece in block.pieces:
        with suppress(OSError):  # reading the file will report the error
            stat = piece.file.path.stat()
            found.append((stat.st_size, stat.st_mtime_ns))
    return found


def _documents_key(kept_as: str, group: Sequence[Piece]) -> str:
    """Return a checksum of a segment's documents: their names, text checksums and lengths."""
    if not kept_as:
        return ""
    keys: list[object] = []
    for piece in group:
        part, table = piece.part, piece.part.documents()
        columns = [checksum_of(array.tobytes()) for array in table.files().values()]
        keys += [columns, table.licences, part.num_tokens, part.keeps_texts, piece.runs]
    return key_of(kept_as, keys)


def _remove_others(place: Path, records: Sequence[SegmentRecord], scratch: Path) -> None:
    """Remove segments from an earlier build that divided the documents differently."""
    names = {record.name for record in records}
    for folder in [each for each in place.iterdir() if each.name not in names]:
        forget_result(scratch / folder.name)
        shutil.rmtree(folder, ignore_errors=True)


def planned(
    sources: Sequence[Path | str],
    options: BuildOptions,
    tally: BuildTally,
    tell: OnProgress,
    scratch: Path,
) -> list[SourceBlock]:
    """Return the blocks of all sources, and report the number of files found so far.

    Raises:
        SourceError: a source does not exist, or all sources are empty.
    """
    tell(tally.now(FINDING))
    with _looking(lambda: tell(replace(tally)), tell):
        blocks = plan(sources, options.sources, tally, scratch)
    if tally.num_bytes_found == 0:
        num_files = sum(len(block.pieces) for block in blocks)
        tally.skipped.update({EMPTY: num_files} if num_files else {})
        raise no_document(tally)
    return blocks


def no_document(tally: BuildTally) -> SourceError:
    """Return the error for sources without any document that can be indexed."""
    reasons = tally.describe_skipped()
    return SourceError("no document to index" + (f": skipped {reasons}" if reasons else ""))


_LOOK_S: Final = 0.25  # interval between checks of the tasks' progress
_Counts = tuple[int, int]


def _counting(
    documents: Iterable[TokenisedDocument], folder: Path, tally: BuildTally
) -> Iterator[TokenisedDocument]:
    """Yield documents, and regularly record the numbers of bytes and tokens so far."""
    num_tokens, noted_s = 0, time.monotonic()
    for document in documents:
        num_tokens += len(document.tokens)
        if time.monotonic() - noted_s > _LOOK_S:
            noted_s = time.monotonic()
            with suppress(OSError):  # the file is only for the progress display
                _note_of(folder).write_text(f"{tally.num_bytes_read} {num_tokens}")
        yield document


def _noted(folder: Path) -> _Counts:
    with suppress(OSError, ValueError):
        num_bytes, num_tokens = map(int, _note_of(folder).read_text().split())
        return num_bytes, num_tokens
    return 0, 0


def _note_of(folder: Path) -> Path:
    return folder.with_suffix(".counts")  # outside the task's temporary folder


@contextmanager
def _watching(
    tasks: Sequence[PartTask], tally: BuildTally, tell: OnProgress
) -> Iterator[Callable[[PartTask], None]]:
    """Show the progress of tasks while they run, even in other processes.

    Args:
        tasks: tasks that are going to run.
        tally: counts of finished tasks.
        tell: progress callback.

    Yields:
        A function to call when a task is done.
    """
    running = dict.fromkeys(task.folder for task in tasks)
    shown = [0, 0]

    def show() -> None:
        counts = [_noted(folder) for folder in list(running)]
        partly = replace(tally)
        for at, name in enumerate(("num_bytes_read", "num_tokens")):
            now = getattr(tally, name) + sum(each[at] for each in counts)
            shown[at] = max(shown[at], now)  # a task may have ended before its counts are merged
            setattr(partly, name, shown[at])
        tell(partly)

    def finish(task: PartTask) -> None:
        running.pop(task.folder, None)
        with suppress(OSError):
            _note_of(task.folder).unlink()

    with _looking(show, tell):
        yield finish


@contextmanager
def _looking(show: Callable[[], None], tell: OnProgress) -> Iterator[None]:
    """Call a function at regular intervals during the block, if there is a progress display."""
    ended = Event()

    def look() -> None:
        while not ended.wait(_LOOK_S):
            show()

    thread = Thread(target=look, name="foredraft-progress", daemon=True)
    if tell is not no_progress:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()

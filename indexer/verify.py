"""Checking that an index is what its builder wrote, and looking at what it holds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from indexer.consistency import find_inconsistencies, find_wrong_documents
from indexer.engines import Serial
from indexer.errors import DamagedIndexError
from indexer.format import PHRASES_FOLDER, SEGMENTS_FOLDER, TOKENIZER_FILE
from indexer.opening import check_file, open_phrases, open_segment
from indexer.phrase_writer import write_phrases
from indexer.records import Contents, FileRecord, SegmentRecord
from indexer.same_folder import from_same_folder
from indexer.snapshots import hold_latest

DEFAULT_SAMPLES: Final = 10_000


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify_index` found.

    Attributes:
        path: the index's directory.
        num_segments: segments that were looked at.
        findings: what is wrong, a sentence each; empty if nothing is.
    """

    path: str
    num_segments: int
    findings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the result for machines to read."""
        return {
            "path": self.path,
            "ok": not self.findings,
            "segments": self.num_segments,
            "findings": list(self.findings),
        }

    def describe(self) -> str:
        """Return the result for people to read."""
        if not self.findings:
            return f"{self.path}: sound ({self.num_segments} segment(s) checked)"
        return "\n".join([f"{self.path}: DAMAGED", *(f"- {finding}" for finding in self.findings)])


def verify_index(path: Path | str, num_samples: int = DEFAULT_SAMPLES) -> Verification:
    """Check an index: all checksums, all positions, the order of sampled suffixes, the phrases.

    Args:
        path: the index's directory.
        num_samples: neighbours in each suffix array whose order is checked.

    Raises:
        IndexNotFoundError: there is no index.
        FormatVersionError: the index is of another format.
        IndexerError: the folder cannot be opened, or is replaced all the time.
    """
    path = Path(path)
    return from_same_folder(path, lambda: _verify(path, num_samples))


def _verify(path: Path, num_samples: int) -> Verification:
    findings: list[str] = []
    num_segments = 0
    try:
        held = hold_latest(path)
    except DamagedIndexError as error:
        return Verification(str(path), 0, (str(error),))
    try:
        contents = held.contents
        if contents.tokenizer is not None:
            findings += _check_files(path, {TOKENIZER_FILE: contents.tokenizer})
        for record in contents.segments:
            num_segments += 1
            findings += _check_segment(path, record, contents.vocabulary.size, num_samples)
        findings += _check_phrases(path, contents, segments_are_sound=not findings)
    finally:
        held.close()
    return Verification(str(path), num_segments, tuple(findings))


def _check_segment(
    path: Path, record: SegmentRecord, vocabulary_size: int, num_samples: int
) -> Iterator[str]:
    damaged = list(_check_files(path / SEGMENTS_FOLDER / record.name, record.files))
    yield from damaged
    try:
        segment = open_segment(path, record, vocabulary_size)
    except DamagedIndexError as error:
        if not damaged:
            yield str(error)
        return
    for finding in find_inconsistencies(segment, vocabulary_size, num_samples):
        yield f"segment {record.name}: {finding}"
    for finding in find_wrong_documents(segment.documents):
        yield f"segment {record.name}: {finding}"


def _check_phrases(path: Path, contents: Contents, *, segments_are_sound: bool) -> Iterator[str]:
    """Yield what is wrong with the phrase tables; what they count is known of sound segments."""
    record, size = contents.phrases, contents.vocabulary.size
    folder = path / PHRASES_FOLDER / record.name
    damaged = list(_check_files(folder, record.files))
    yield from damaged
    try:
        open_phrases(path, record, size)
    except DamagedIndexError as error:
        if not damaged:
            yield str(error)
        return
    if segments_are_sound and not damaged:
        counted = [each for each in contents.segments if each.name in record.segments]
        with TemporaryDirectory() as name:
            scratch, place = Path(name, "branches"), Path(name, "tables")
            expected = write_phrases(Serial(), path, counted, size, scratch, place)
        if any(FileRecord.of_file(folder / each) != expected[each] for each in expected):
            yield "the phrase tables are not those of the segments"


def _check_files(folder: Path, files: Mapping[str, FileRecord]) -> Iterator[str]:
    for name, expected in files.items():
        try:
            check_file(folder / name, expected)
        except DamagedIndexError as error:
            yield str(error)

"""Verifies an index: checksums, suffix order, document tables and phrase tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.engines import Serial
from indexer.errors import DamagedIndexError
from indexer.format.documents import DocumentTable
from indexer.format.names import (
    PHRASES_FOLDER,
    SEGMENTS_FOLDER,
    TOKENIZER_FILE,
    Tokens,
    separator_of,
)
from indexer.format.opening import check_file, open_phrases, open_segment
from indexer.format.records import Contents, FileRecord, SegmentRecord
from indexer.format.same_folder import from_same_folder
from indexer.format.snapshots import hold_latest
from indexer.reader import Segment
from indexer.stages.phrase_writer import write_phrases
from indexer.stages.segments import first_token_starts, suffix_keys

_STRIDE: Final = 1 << 22
"""Number of elements to check at a time, so that temporary arrays take tens of MB."""

_FIRST_COMPARED: Final = 64
"""Tokens to compare first in two adjacent suffixes. Most pairs differ within them; only the other
pairs are read further."""

_SAMPLING_SEED: Final = 0
"""Fixed seed, so that a second run checks the same pairs of suffixes."""


def find_inconsistencies(segment: Segment, vocabulary_size: int, num_samples: int) -> Iterator[str]:
    """Yield the errors of a segment, in words; nothing if it is intact.

    Args:
        segment: segment whose files have the sizes in the catalog.
        vocabulary_size: largest token id plus one.
        num_samples: number of adjacent suffix pairs whose complete order is checked.
    """
    tokens, suffixes = segment.tokens, segment.suffixes
    is_separator = tokens == separator_of(tokens.dtype)
    if np.any((tokens >= vocabulary_size) & ~is_separator):
        yield "a token is outside the vocabulary"
        return
    if not _parts_documents(is_separator, segment.documents.starts):
        yield "the document table does not list the documents that separators end"
    if not np.array_equal(segment.starts, first_token_starts(tokens, vocabulary_size)):
        yield "the starts are not the counts of the tokens"
    if not _covers_tokens(suffixes, is_separator):
        yield "the suffixes are not every position of a token once"
    elif not _first_tokens_rise(tokens, suffixes):
        yield "the suffixes are not in the order of their first tokens"
    elif not _neighbours_rise(tokens, suffixes, num_samples):
        yield "the suffixes are not in the order of their tokens"
    elif len(segment.keys) and not np.array_equal(
        segment.keys, suffix_keys(tokens, suffixes, vocabulary_size)
    ):
        yield "the suffix keys do not match the suffixes"


def find_wrong_documents(documents: DocumentTable) -> Iterator[str]:
    """Yield the errors in names and licences of documents; nothing if all are readable."""
    for number in range(len(documents)):
        try:
            documents.document(number)
        except DamagedIndexError as error:
            yield str(error)
            return
    if len(documents) and int(documents.name_ends[-1]) != len(documents.names):
        yield "the names of documents are followed by others"


def _parts_documents(is_separator: NDArray[np.bool_], document_starts: NDArray[np.uint32]) -> bool:
    ends = np.flatnonzero(is_separator)
    if len(ends) == 0 or ends[-1] != len(is_separator) - 1:
        return False
    return np.array_equal(document_starts, np.concatenate([[0], ends[:-1] + 1]))


def _covers_tokens(suffixes: NDArray[np.uint32], is_separator: NDArray[np.bool_]) -> bool:
    """Return whether suffixes, whose number equals that of tokens, include each position."""
    seen = is_separator.copy()
    for piece in _pieces(suffixes):
        if np.any(piece >= len(seen)) or np.any(is_separator[piece]):
            return False
        seen[piece] = True
    return bool(seen.all())


def _first_tokens_rise(tokens: Tokens, suffixes: NDArray[np.uint32]) -> bool:
    last = 0
    for piece in _pieces(suffixes):
        firsts = tokens[piece]
        if firsts[0] < last or np.any(firsts[1:] < firsts[:-1]):
            return False
        last = int(firsts[-1])
    return True


def _neighbours_rise(tokens: Tokens, suffixes: NDArray[np.uint32], num_samples: int) -> bool:
    num_pairs = len(suffixes) - 1
    pairs = np.arange(num_pairs)
    if num_samples < num_pairs:
        random = np.random.default_rng(_SAMPLING_SEED)
        pairs = np.sort(random.integers(num_pairs, size=num_samples))
    return all(
        _precedes(tokens, int(suffixes[pair]), int(suffixes[pair + 1])) for pair in pairs.tolist()
    )


def _precedes(tokens: Tokens, first: int, second: int) -> bool:
    """Return whether the suffix at `first` sorts before the suffix at `second`."""
    length = _FIRST_COMPARED
    while max(first, second) < len(tokens):
        left, right = tokens[first : first + length], tokens[second : second + length]
        common = min(len(left), len(right))
        differing = np.flatnonzero(left[:common] != right[:common])
        if len(differing):
            return bool(left[differing[0]] < right[differing[0]])
        first, second, length = first + common, second + common, 2 * length
    return first > second


def _pieces(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for begin in range(0, len(array), _STRIDE):
        yield array[begin : begin + _STRIDE]


DEFAULT_SAMPLES: Final = 10_000
"""Adjacent suffix pairs in each suffix array whose complete order is checked. Checksums detect
damage. This check detects errors of a builder, which appear in far fewer samples."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify_index`.

    Attributes:
        path: directory of the index.
        num_segments: number of checked segments.
        findings: errors, one sentence each; empty for an intact index.
    """

    path: str
    num_segments: int
    findings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "path": self.path,
            "ok": not self.findings,
            "segments": self.num_segments,
            "findings": list(self.findings),
        }

    def describe(self) -> str:
        """Return the result as text."""
        if not self.findings:
            return f"{self.path}: sound ({self.num_segments} segment(s) checked)"
        return "\n".join([f"{self.path}: DAMAGED", *(f"- {finding}" for finding in self.findings)])


def verify_index(path: Path | str, num_samples: int = DEFAULT_SAMPLES) -> Verification:
    """Check an index: all checksums and positions, the order of sampled suffixes, the phrases.

    Args:
        path: directory of the index.
        num_samples: number of adjacent pairs in each suffix array whose order is checked.

    Raises:
        IndexNotFoundError: there is no index.
        FormatVersionError: the index has another format.
        IndexerError: the folder cannot be opened, or is replaced constantly.
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
    """Yield the phrase tables' errors. Counts are compared only if the segments are intact."""
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
            yield "the phrase tables do not match the segments"


def _check_files(folder: Path, files: Mapping[str, FileRecord]) -> Iterator[str]:
    for name, expected in files.items():
        try:
            check_file(folder / name, expected)
        except DamagedIndexError as error:
            yield str(error)

"""Checking that an index is what its builder wrote, and looking at what it holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from indexer.catalog import CatalogReader
from indexer.consistency import find_inconsistencies
from indexer.errors import DamagedIndexError
from indexer.format import (
    CATALOG_FILE,
    CATALOG_FOLDER,
    SEGMENTS_FOLDER,
    SegmentRecord,
)
from indexer.opening import catalog_record, check_file, open_catalog, open_segment
from indexer.same_folder import from_same_folder

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
    """Check an index: all checksums, all positions, and the order of sampled suffixes.

    Args:
        path: the index's directory.
        num_samples: neighbours in each suffix array whose order is checked.

    Raises:
        IndexNotFoundError: there is no index.
        FormatVersionError: the index is of a newer format.
        IndexerError: the folder cannot be opened, or is replaced all the time.
    """
    path = Path(path)
    return from_same_folder(path, lambda: _verify(path, num_samples))


def _verify(path: Path, num_samples: int) -> Verification:
    findings: list[str] = []
    num_segments = 0
    try:
        catalog_file = catalog_record(path)
        # Before it is opened: LMDB trusts its file and may crash on a damaged one.
        check_file(path / CATALOG_FOLDER / CATALOG_FILE, catalog_file)
        with open_catalog(path, catalog_file) as catalog:
            contents = catalog.contents()
            for record in contents.segments:
                num_segments += 1
                findings += _check_segment(
                    path, catalog, record, contents.vocabulary.size, num_samples
                )
    except DamagedIndexError as error:
        findings.append(str(error))
    return Verification(str(path), num_segments, tuple(findings))


def _check_segment(
    path: Path,
    catalog: CatalogReader,
    record: SegmentRecord,
    vocabulary_size: int,
    num_samples: int,
) -> Iterator[str]:
    damaged = list(_check_files(path, record))
    yield from damaged
    try:
        segment = open_segment(path, record, vocabulary_size)
    except DamagedIndexError as error:
        if not damaged:
            yield str(error)
        return
    starts = np.fromiter((document.start for document in catalog.documents(record.name)), np.int64)
    for finding in find_inconsistencies(segment, starts, vocabulary_size, num_samples):
        yield f"segment {record.name}: {finding}"


def _check_files(path: Path, record: SegmentRecord) -> Iterator[str]:
    for name, expected in record.files.items():
        try:
            check_file(path / SEGMENTS_FOLDER / record.name / name, expected)
        except DamagedIndexError as error:
            yield str(error)

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from indexer.build import BuildOptions, build_from_tokens
from indexer.change.verifying import find_inconsistencies, verify_index
from indexer.errors import FormatVersionError, IndexNotFoundError
from indexer.format.documents import DocumentTable, DocumentTableBuilder
from indexer.format.names import KEYS_FILE, PHRASE_FILES, SEGMENT_FILES
from indexer.reader import Document, Index, Segment, Vocabulary
from indexer.stages.segments import suffix_keys

FILES = [
    "catalog/00000000",
    *(f"segments/{number:08d}/{name}" for number in (0, 1) for name in (*SEGMENT_FILES, KEYS_FILE)),
    *(f"phrases/00000000/{name}" for name in PHRASE_FILES),
]


@pytest.fixture
def sound() -> Segment:
    # 1 0 1 2 | 1 0 1
    tokens = np.array([1, 0, 1, 2, 65535, 1, 0, 1, 65535], np.uint16)
    suffixes = np.array([1, 6, 0, 5, 2, 7, 3], np.uint32)
    starts = np.array([0, 2, 6, 7], np.uint32)
    return Segment("00000000", tokens, suffixes, starts, documents_at((0, 5)))


def documents_at(starts: tuple[int, ...]) -> DocumentTable:
    builder = DocumentTableBuilder()
    for start in starts:
        builder.add(Document("x", "", start), bytes(16))
    return builder.table()


def findings_in(segment: Segment) -> list[str]:
    return list(find_inconsistencies(segment, 3, 100))


def test_a_whole_index_is_sound(tiny_index: Path) -> None:
    verification = verify_index(tiny_index)
    assert verification.findings == ()
    assert verification.num_segments == 2


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.3, 0.999])
def test_a_flipped_byte_anywhere_is_found(name: str, place: float, tiny_index: Path) -> None:
    file = tiny_index / name
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 0x10
    file.write_bytes(content)
    findings = verify_index(tiny_index).findings
    assert any(name in finding or "catalog" in finding for finding in findings)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", [True, False])
def test_a_short_or_missing_file_is_found(name: str, *, cut: bool, tiny_index: Path) -> None:
    file = tiny_index / name
    if cut:
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    findings = verify_index(tiny_index).findings
    assert any(name in finding or "no snapshot" in finding for finding in findings)


def test_all_damaged_files_are_named_at_once(tiny_index: Path) -> None:
    for name in FILES[1:]:
        (tiny_index / name).write_bytes(b"")
    findings = verify_index(tiny_index).findings
    assert len(findings) == len(FILES[1:])


@pytest.mark.parametrize("name", [name for name in PHRASE_FILES if name != "starts1"])
def test_phrase_tables_of_other_segments_are_found(
    name: str, tiny_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_index / "phrases/00000000" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2 // 4 * 4] ^= 1
    file.write_bytes(content)
    # As if it had been written so.
    monkeypatch.setattr("indexer.change.verifying.check_file", lambda *_: None)
    (finding,) = verify_index(tiny_index).findings
    assert "phrase tables" in finding or "phrases" in finding


def test_what_is_no_index_is_an_error_and_not_a_finding(tmp_path: Path) -> None:
    with pytest.raises(IndexNotFoundError):
        verify_index(tmp_path)


def test_another_format_is_an_error_and_not_a_finding(
    tiny_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.format.snapshots.FORMAT_VERSION", 0)
    with pytest.raises(FormatVersionError):
        verify_index(tiny_index)


def test_a_sound_segment_has_no_inconsistency(sound: Segment) -> None:
    assert findings_in(sound) == []


@pytest.mark.parametrize(
    ("suffixes", "finding"),
    [
        ([1, 6, 0, 5, 2, 7, 9], "every position"),  # outside the tokens
        ([1, 6, 0, 5, 2, 7, 4], "every position"),  # a separator
        ([1, 6, 0, 5, 2, 2, 3], "every position"),  # twice
        ([1, 6, 0, 5, 2, 3, 7], "first tokens"),
        ([6, 1, 0, 5, 2, 7, 3], "order of their tokens"),
        ([1, 6, 0, 5, 7, 2, 3], "order of their tokens"),
    ],
)
def test_wrong_suffixes_are_found(suffixes: list[int], finding: str, sound: Segment) -> None:
    wrong = replace(sound, suffixes=np.array(suffixes, np.uint32))
    (found,) = findings_in(wrong)
    assert finding in found


def test_wrong_keys_are_found(sound: Segment) -> None:
    keys = suffix_keys(sound.tokens, sound.suffixes, 3)
    assert findings_in(replace(sound, keys=keys)) == []
    (found,) = findings_in(replace(sound, keys=keys + np.uint64(1)))
    assert "keys" in found


def test_wrong_starts_are_found(sound: Segment) -> None:
    for starts in ([0, 2, 5, 7], [0, 2, 6, 6], [1, 2, 6, 7]):
        (found,) = findings_in(replace(sound, starts=np.array(starts, np.uint32)))
        assert "starts" in found


def test_a_token_outside_the_vocabulary_is_found(sound: Segment) -> None:
    tokens = sound.tokens.copy()
    tokens[3] = 3
    (found,) = findings_in(replace(sound, tokens=tokens))
    assert "vocabulary" in found


@pytest.mark.parametrize("starts", [(), (0,), (0, 4), (0, 5, 7)])
def test_a_document_table_that_contradicts_the_separators_is_found(
    starts: tuple[int, ...], sound: Segment
) -> None:
    (found,) = findings_in(replace(sound, documents=documents_at(starts)))
    assert "document table" in found


def test_sampled_order_takes_long_repeats(tmp_path: Path) -> None:
    repeated = [("a", [3, 1] * 5000), ("b", [3, 1] * 5000)]
    options = BuildOptions(keep_duplicates=True)
    build_from_tokens(repeated, tmp_path / "x", Vocabulary(5, "aa"), options)
    assert verify_index(tmp_path / "x", num_samples=500).findings == ()
    with Index.open(tmp_path / "x") as index:
        assert len(index.segments) == 1

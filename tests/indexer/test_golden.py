"""The format, byte for byte: what docs/format.md says and what readers in the field rely on."""

import json
from pathlib import Path
from typing import Any

import lmdb
import pytest

from indexer.build import build_from_tokens
from indexer.reader import Index, Vocabulary

GOLDEN = Path(__file__).parents[1] / "data" / "format_v2.json"
CASES = json.loads(GOLDEN.read_text("utf-8"))


def catalog_records(path: Path) -> dict[str, str]:
    """Return all records of a catalog; keys of documents end in four bytes, shown in hex."""
    records = {}
    with (
        lmdb.open(str(path / "catalog"), readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        for key, value in transaction.cursor():
            shown = (
                key.decode("ascii") if b"/" not in key else f"{key[:-4].decode()}{key[-4:].hex()}"
            )
            records[shown] = value.decode("ascii")
    return records


@pytest.mark.parametrize("case", CASES, ids=[case["claim"] for case in CASES])
def test_built_bytes_are_those_of_the_format(case: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "golden.index"
    vocabulary = Vocabulary(case["vocabulary_size"], case["fingerprint"])
    build_from_tokens([(name, ids) for name, ids in case["documents"]], path, vocabulary)
    segment = path / "segments" / "00000000"
    for name in {"tokens", "suffixes", "starts"} & case.keys():
        assert (segment / name).read_bytes().hex(" ", 4) == case[name], name
    phrases = path / "phrases" / "00000000"
    for name, content in case["phrases"].items():
        assert (phrases / name).read_bytes().hex(" ", 4) == content, name
    assert catalog_records(path) == case["catalog"]
    names = ["catalog", "checksum", "phrases", "segments"]
    assert sorted(entry.name for entry in path.iterdir()) == names
    assert [entry.name for entry in (path / "catalog").iterdir()] == ["data.mdb"]


def test_suffixes_of_the_golden_index_are_readable_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "hand.index"
    build_from_tokens([("a", [1, 0, 1]), ("b", [1])], path, Vocabulary(2, "00"))
    with Index.open(path) as index:
        (segment,) = index.segments
        end = 65535
        assert segment.tokens.tolist() == [1, 0, 1, end, 1, end]
        # 0 1 end 1 end | 1 0 1 end 1 end | 1 end | 1 end 1 end
        assert segment.suffixes.tolist() == [1, 0, 4, 2]
        assert segment.starts.tolist() == [0, 1, 4]


def test_phrases_of_the_golden_index_are_readable_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "hand.index"
    documents = [("a", [1, 0, 1, 0, 1]), ("b", [1, 1, 1]), ("c", [0, 0])]
    build_from_tokens(documents, path, Vocabulary(2, "00"))
    with Index.open(path) as index:
        tables = index.phrases
    assert [counts.tolist() for counts in tables.counts] == [[4, 6], [2, 1, 2, 2], [2], []]
    # 0 1 twice, 0 0 once, 1 0 and 1 1 twice; 0 1 0 and 1 1 1 once, 1 0 1 twice
    assert [tokens.tolist() for tokens in tables.tokens] == [[], [1, 0, 0, 1], [1], []]
    assert [starts.tolist() for starts in tables.starts] == [[0, 2, 4], [0, 0, 0, 1, 1], [0, 0]]
    assert tables.successors([0]) == [(1, 2), (0, 1)]
    assert tables.successors([1]) == [(0, 2), (1, 2)]
    assert tables.successors([1, 0]) == [(1, 2)]

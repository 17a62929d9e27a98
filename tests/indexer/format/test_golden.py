"""The format, byte for byte: docs/reference/format.md, and what readers in the field rely on."""

import json
from pathlib import Path
from typing import Any

import pytest

from indexer.build import build_from_tokens
from indexer.reader import Index, Vocabulary
from tests.indexer.stages.phrase_reading import successors

GOLDEN = Path(__file__).parents[2] / "data" / "format_v4.json"
CASES = json.loads(GOLDEN.read_text("utf-8"))


@pytest.mark.parametrize("case", CASES, ids=[case["claim"] for case in CASES])
def test_built_bytes_are_those_of_the_format(case: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "golden.index"
    vocabulary = Vocabulary(case["vocabulary_size"], case["fingerprint"])
    build_from_tokens([(name, ids) for name, ids in case["documents"]], path, vocabulary)
    files = {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }
    assert files.pop("catalog/00000000").decode("ascii") == case["snapshot"]
    assert files.keys() >= case["files"].keys()  # of larger ones, the snapshot has the checksums
    for name, content in case["files"].items():
        assert files[name].hex(" ", 4) == content, name


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
    assert successors(tables, [0]) == [(1, 2), (0, 1)]
    assert successors(tables, [1]) == [(0, 2), (1, 2)]
    assert successors(tables, [1, 0]) == [(1, 2)]

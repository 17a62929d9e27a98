"""Small indexes, made on the spot."""

from pathlib import Path

import pytest

from indexer.build import BuildOptions, build_from_tokens
from indexer.reader import Index, Vocabulary
from tests.benchmarks.drafting import IndexMaker


@pytest.fixture
def make_index(tmp_path: Path) -> IndexMaker:
    def make(*documents: list[int]) -> Index:
        path = tmp_path / "index"
        named = [(f"document-{i}", document) for i, document in enumerate(documents)]
        options = BuildOptions(deduplicate=False)
        build_from_tokens(named, path, Vocabulary(50, "ab" * 32), options)
        return Index.open(path)

    return make

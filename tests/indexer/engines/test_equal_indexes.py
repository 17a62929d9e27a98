from pathlib import Path

import pytest

from indexer.change.verifying import verify_index
from indexer.engines import Serial
from indexer.engines.processes import ProcessPool
from tests.indexer.engines.corpora import build_and_change, save_byte_tokenizer, write_corpus

GIB = 1 << 30


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return save_byte_tokenizer(tmp_path / "tokenizer")


def test_an_index_and_its_changes_are_the_same_in_one_process_and_in_several(
    tmp_path: Path, tokenizer: Path
) -> None:
    """In two workers, and in one where a stage is a single task."""
    sources = write_corpus(tmp_path / "sources", 6, 900)
    more = write_corpus(tmp_path / "more", 4, 900, seed=1)
    alone = build_and_change(sources, more, tmp_path / "alone", tokenizer, Serial())
    assert sum(name.startswith("built ") and name.endswith("/suffixes") for name in alone) > 3
    pool = ProcessPool(2, 8 * GIB)
    assert build_and_change(sources, more, tmp_path / "pool", tokenizer, pool) == alone
    assert verify_index(tmp_path / "pool").findings == ()

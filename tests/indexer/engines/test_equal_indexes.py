from pathlib import Path

import pytest

from indexer.change.verify import verify_index
from indexer.engines import Engine, Serial
from indexer.engines.processes import ProcessPool
from tests.indexer.engines.corpora import build, build_and_change, save_byte_tokenizer, write_corpus

GIB = 1 << 30


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return save_byte_tokenizer(tmp_path / "tokenizer")


def test_an_index_is_the_same_whatever_the_number_of_workers(
    tmp_path: Path, tokenizer: Path
) -> None:
    sources = write_corpus(tmp_path / "sources", 9, 1500)
    engines: list[Engine] = [Serial(), *(ProcessPool(number, 8 * GIB) for number in (1, 3))]
    first, *others = (
        build(sources, tmp_path / f"{number}", tokenizer, engine)
        for number, engine in enumerate(engines)
    )
    assert len([name for name in first if name.endswith("/suffixes")]) > 3
    assert all(other == first for other in others)


def test_changes_are_the_same_in_one_process_and_in_several(
    tmp_path: Path, tokenizer: Path
) -> None:
    sources = write_corpus(tmp_path / "sources", 6, 1500)
    more = write_corpus(tmp_path / "more", 4, 1500, seed=1)
    alone = build_and_change(sources, more, tmp_path / "alone", tokenizer, Serial())
    pool = ProcessPool(2, 8 * GIB)
    assert build_and_change(sources, more, tmp_path / "pool", tokenizer, pool) == alone
    assert verify_index(tmp_path / "pool").findings == ()

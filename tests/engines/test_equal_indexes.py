from pathlib import Path

from indexer.engines import Engine, Serial
from indexer.engines.processes import ProcessPool
from indexer.verify import verify_index
from tests.engines.corpora import build_and_change, save_byte_tokenizer, write_corpus


def test_an_index_is_the_same_wherever_it_was_built(tmp_path: Path) -> None:
    tokenizer = save_byte_tokenizer(tmp_path / "tokenizer")
    sources = write_corpus(tmp_path / "sources", 9, 1500)
    more = write_corpus(tmp_path / "more", 5, 1500, seed=1)
    engines: list[Engine] = [Serial(), *(ProcessPool(number, 8 << 30) for number in (1, 2, 4))]
    outputs = [tmp_path / f"{number}.index" for number in range(4)]
    first, *others = (
        build_and_change(sources, more, output, tokenizer, engine)
        for output, engine in zip(outputs, engines, strict=True)
    )
    assert len([name for name in first if name.endswith("/suffixes")]) > 12
    for other in others:
        assert other == first
    assert verify_index(outputs[-1]).findings == ()

import gguf
import pytest

from decoder.model.pretrained import SharedReading


def test_a_file_is_read_once_and_only_inside_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(gguf, "GGUFReader", read.append)
    reading = SharedReading()
    for path in ("a", "a", "b"):
        with reading.used():
            gguf.GGUFReader(path)
            gguf.GGUFReader(path)
    assert read == ["a", "b"]
    gguf.GGUFReader("a")
    assert read == ["a", "b", "a"]


def test_an_error_leaves_the_library_as_it_was() -> None:
    own = gguf.GGUFReader
    with pytest.raises(ValueError, match="damaged"), SharedReading().used():
        raise ValueError("damaged")
    assert gguf.GGUFReader is own

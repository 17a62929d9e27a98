import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from decoder.stopping import TextStream

TEXTS = ["plain", "naïve café", "你好、世界", "👩‍💻 and 🎉!", "a\nb\t c  "]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(5))
def test_pieces_join_to_the_text_and_never_break_a_character(
    byte_tokenizer: PreTrainedTokenizerBase, text: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = byte_tokenizer.encode(text)
    stream = TextStream(byte_tokenizer)
    pieces = []
    while tokens:
        size = int(rng.integers(1, 6))
        pieces.append(stream.push(tokens[:size]))
        tokens = tokens[size:]
    assert stream.finish() == ""
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_text_that_ends_within_a_character_shows_it_at_the_end(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    stream = TextStream(byte_tokenizer)
    tokens = byte_tokenizer.encode("a世")
    assert stream.push(tokens[:1]) == "a"
    assert stream.push(tokens[1:-1]) == ""
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_left_out(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    stream = TextStream(byte_tokenizer)
    assert stream.push([*byte_tokenizer.encode("hi"), 0]) == "hi"

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from indexer.format.names import KEY_STRIDE
from indexer.stages.segments import first_token_starts, sort_suffixes, suffix_keys
from tests.suite_parts import cases


def slow_suffixes(tokens: NDArray[np.unsignedinteger]) -> list[int]:
    """Return what `sort_suffixes` must: sorted by comparing the rests of the array."""
    separator = np.iinfo(tokens.dtype).max
    positions = [place for place, token in enumerate(tokens.tolist()) if token != separator]
    return sorted(positions, key=lambda place: tokens[place:].tolist())


def slow_starts(tokens: NDArray[np.unsignedinteger], vocabulary_size: int) -> list[int]:
    firsts = [int(tokens[place]) for place in slow_suffixes(tokens)]
    return [sum(first < token for first in firsts) for token in range(vocabulary_size + 1)]


# Each alphabet meets a boundary: of the widths of sort keys, or of the dtype.
ALPHABETS: dict[type[np.unsignedinteger], list[Sequence[int]]] = {
    np.uint16: [[0], [0, 1], [253, 254], [254, 255, 256], [0, 65533, 65534], range(65535)],
    np.uint32: [
        [0, 1],
        [65533, 65534],
        [65534, 65535, 65536],
        [2**24 - 2, 2**24 - 3, 0],
        [2**24 - 1, 2**24, 1],
        [2**32 - 2, 2**32 - 3, 0],
        [255, 256, 65535, 65536, 2**24],
    ],
}


@pytest.mark.seeds
@pytest.mark.parametrize(
    ("dtype", "alphabet"), [(dtype, each) for dtype, all_ in ALPHABETS.items() for each in all_]
)
def test_suffixes_stand_in_the_order_of_their_tokens(
    dtype: type[np.unsignedinteger], alphabet: Sequence[int]
) -> None:
    rng = random.Random(1)
    separator = int(np.iinfo(dtype).max)
    for _ in range(cases(100, of=400)):
        symbols = [*rng.choices(alphabet, k=4), separator]
        tokens = np.array(rng.choices(symbols, k=rng.randrange(30)), dtype)
        suffixes = sort_suffixes(tokens)
        assert suffixes.dtype == np.uint32
        assert suffixes.tolist() == slow_suffixes(tokens)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), max_size=6))
@settings(max_examples=cases(60, of=300), deadline=None)
def test_suffixes_of_documents_that_repeat_each_other_are_sorted(
    documents: list[list[int]],
) -> None:
    tokens = np.array([token for document in documents for token in [*document, 65535]], np.uint16)
    assert sort_suffixes(tokens).tolist() == slow_suffixes(tokens)


def test_starts_bound_the_suffixes_of_every_token() -> None:
    rng = random.Random(2)
    for _ in range(300):
        size = rng.randrange(1, 12)
        symbols = [*range(size), 65535]
        tokens = np.array(rng.choices(symbols, k=rng.randrange(30)), np.uint16)
        starts = first_token_starts(tokens, size)
        assert starts.dtype == np.uint32
        assert starts.tolist() == slow_starts(tokens, size)


def slow_digits(
    tokens: NDArray[np.unsignedinteger], position: int, num_digits: int, size: int
) -> list[int]:
    """Return what a key holds: the tokens behind a position, `size` for all that is none."""
    separator = np.iinfo(tokens.dtype).max
    behind = [size if token == separator else token for token in tokens[position + 1 :].tolist()]
    return [*behind, *[size] * num_digits][:num_digits]


@pytest.mark.parametrize("dtype", ALPHABETS)
def test_keys_hold_the_tokens_behind_the_first_of_some_suffixes(
    dtype: type[np.unsignedinteger],
) -> None:
    rng = random.Random(3)
    separator = int(np.iinfo(dtype).max)
    num_keys = 0
    for alphabet in [*ALPHABETS[dtype]] * 20:
        size = min(separator, rng.choice([1, 2]) * (max(alphabet) + 1))
        symbols = [*rng.choices(alphabet, k=4), separator]
        tokens = np.array([*rng.choices(symbols, k=rng.randrange(200)), separator], dtype)
        suffixes = sort_suffixes(tokens)
        keys = suffix_keys(tokens, suffixes, size)
        bits = size.bit_length()
        places = range(64 // bits * bits - bits, -1, -bits)
        for key, position in zip(keys.tolist(), suffixes[::KEY_STRIDE].tolist(), strict=True):
            digits = [key >> place & ((1 << bits) - 1) for place in places]
            assert digits == slow_digits(tokens, position, len(places), size)
            num_keys += 1
    assert num_keys > 100


def test_long_repetition_is_sorted() -> None:
    tokens = np.tile(np.array([7, 7, 300], np.uint16), 100_000)
    suffixes = sort_suffixes(tokens)
    # Within each kind of suffix the shorter one, which is a prefix of the longer, comes first.
    expected = [*range(299_997, -1, -3), *range(299_998, 0, -3), *range(299_999, 0, -3)]
    assert suffixes.tolist() == expected

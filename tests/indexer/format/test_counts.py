import itertools

import numpy as np
import pytest

from indexer.format.phrase_tables import COUNT_SCALE, COUNT_VALUES, encode_counts


def nearest_code(count: int) -> int:
    scale = COUNT_SCALE.tolist()
    return min(range(256), key=lambda code: (abs(scale[code] - count), code))


def test_small_counts_are_exact() -> None:
    assert encode_counts(np.arange(17)).tolist() == COUNT_SCALE[:17].tolist() == list(range(17))


def test_counts_above_are_on_a_scale_that_doubles_every_eight_codes() -> None:
    assert COUNT_SCALE[16::8].tolist() == [16 * 2**power for power in range(30)]
    assert COUNT_SCALE[16:25].tolist() == [16, 17, 19, 21, 23, 25, 27, 29, 32]
    for code in range(16, 256):
        assert abs(int(COUNT_SCALE[code]) - 16 * 2 ** ((code - 16) / 8)) <= 0.5
    assert COUNT_SCALE[-1] > 2**32


def test_every_code_comes_back() -> None:
    assert encode_counts(COUNT_SCALE).tolist() == list(range(256))
    assert encode_counts(COUNT_VALUES[:150].astype(np.int64)).tolist() == list(range(150))


def test_a_count_gets_the_nearest_code_and_the_smaller_one_between_two() -> None:
    rng = np.random.default_rng(5)
    counts = [*range(3000), *(2 ** (rng.random(2000) * 34)).astype(int).tolist()]
    for low, high in itertools.pairwise(COUNT_SCALE.tolist()):
        counts += [(low + high) // 2 + step for step in (-1, 0, 1) if low + high + step >= 2]
    assert encode_counts(np.array(counts)).tolist() == [nearest_code(count) for count in counts]
    assert encode_counts(np.array([18, 20, 1488, 1489])).tolist() == [17, 18, 68, 68]


def test_larger_counts_never_get_smaller_codes() -> None:
    counts = np.sort((2 ** (np.random.default_rng(6).random(20_000) * 40)).astype(np.int64))
    codes = encode_counts(counts)
    assert (np.diff(codes.astype(int)) >= 0).all()
    assert codes[-1] == 255
    ratio = COUNT_SCALE[codes] / np.minimum(counts, COUNT_SCALE[-1])
    assert 0.94 < ratio.min() <= ratio.max() < 1.06


def test_values_for_kernels_are_the_scale() -> None:
    assert (COUNT_VALUES.dtype.name, len(COUNT_VALUES)) == ("float32", 256)
    assert np.allclose(COUNT_VALUES, COUNT_SCALE, rtol=1e-7)
    with pytest.raises(ValueError, match="read-only"):
        COUNT_VALUES[3] = 4

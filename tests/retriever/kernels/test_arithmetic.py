"""Fast arithmetic stays as near as it says, over all that scores can be."""

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retriever.kernels.compiling import fast_exp2, fast_log2, octaves_below_one
from tests.retriever.kernels.twins import mixing_twin

HALF_A_STEP = 2.0**-17
"""By which numbers of 128 to 256 are rounded: bits of a number by its largest exponents."""


@njit(nogil=True)
def logarithms(values: NDArray[np.float32]) -> NDArray[np.float32]:
    result = np.empty_like(values)
    for index, value in enumerate(values):
        result[index] = fast_log2(value)
    return result


@njit(nogil=True)
def powers(values: NDArray[np.float32]) -> NDArray[np.float32]:
    result = np.empty_like(values)
    for index, value in enumerate(values):
        result[index] = fast_exp2(value)
    return result


def all_magnitudes(step: int) -> NDArray[np.float32]:
    """Normal floats from the least to the largest, evenly by their bits."""
    bits = np.arange(0x00800000, 0x7F800000, step).astype(np.int32)
    return bits.view(np.float32)


def test_logarithm_is_as_near_as_it_says_and_rises() -> None:
    values = all_magnitudes(1013)
    found = logarithms(values)
    error = found - np.log2(values.astype(np.float64))
    assert -0.09 <= error.min() < -0.08
    assert error.max() <= HALF_A_STEP
    assert (np.diff(found) >= 0).all()


def test_power_is_as_near_as_it_says_and_rises() -> None:
    values = np.linspace(-126, 126.99, 2_000_000).astype(np.float32)
    found = powers(values)
    error = found / np.exp2(values.astype(np.float64)) - 1
    assert np.abs(error).max() < 0.0002
    assert (np.diff(found) >= 0).all()


def test_powers_of_two_are_exact() -> None:
    exponents = np.arange(-126, 127, dtype=np.float32)
    assert powers(exponents).tolist() == [math.ldexp(1, int(e)) for e in exponents]
    exact = np.array([math.ldexp(1, int(e)) for e in exponents], np.float32)
    assert logarithms(exact).tolist() == exponents.tolist()


def test_ends_of_the_range_are_numbers() -> None:
    assert powers(np.array([-127, -1e30, -np.inf], np.float32)).tolist() == [2.0**-126] * 3
    assert logarithms(np.zeros(1, np.float32)).tolist() == [-127.0]


def test_arithmetic_equals_its_twin() -> None:
    values = all_magnitudes(1_000_003)
    expected = [mixing_twin.log2(float(value)) for value in values]
    np.testing.assert_allclose(logarithms(values), expected, rtol=0, atol=HALF_A_STEP)
    exponents = np.linspace(-130, 126, 3000).astype(np.float32)
    expected = [mixing_twin.exp2(float(value)) for value in exponents]
    # Three products and sums, fused or not, and one more: each rounds by 2 ** -24.
    np.testing.assert_allclose(powers(exponents), expected, rtol=4 * 2.0**-23)


def test_octaves_are_counted_up_to_31() -> None:
    for octaves in range(50):
        for within in (1.0, 1.1, 1.999):
            probability = min(1.0, math.ldexp(within, -octaves))
            assert octaves_below_one(probability) == min(31, octaves)
    assert octaves_below_one(0.0) == 31

"""What is packed to a kernel is what it borrows."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel, prefetch
from retriever.kernels.layout import (
    CACHE_LINE,
    NODE,
    STORE_LAYOUT,
    Chains,
    aligned_zeros,
    pack,
    unpack,
    unpack_at,
)
from retriever.predict.context import Context


class Several(NamedTuple):
    """Arrays of several kinds."""

    bytes: NDArray[np.uint8]
    numbers: NDArray[np.float64]
    records: NDArray[Any]
    grid: NDArray[np.int32]
    empty: NDArray[np.int16]


@kernel()
def sums(packed: NDArray[Any]) -> tuple[int, float, int, int, int]:
    """Read everything that was packed, in two dimensions where it has them."""
    several = unpack(packed[0], Several)
    total_bytes, total_numbers, tokens, weighed = 0, 0.0, 0, 0
    for value in several.bytes:
        total_bytes += value
    for number in several.numbers:
        total_numbers += number
    for index in range(several.records.shape[0]):
        tokens += several.records[index].token
    for row in range(several.grid.shape[0]):
        for column in range(several.grid.shape[1]):
            weighed += (row + 1) * (column + 2) * several.grid[row, column]
    return total_bytes, total_numbers, tokens, weighed, several.empty.shape[0]


@kernel()
def write(packed: NDArray[Any], row: int, column: int, value: int) -> None:
    """Write to what was packed."""
    unpack(packed[0], Several).grid[row, column] = value


@kernel()
def look_ahead(array: NDArray[np.int32], index: int) -> int:
    """Ask for an element, and return the first."""
    prefetch(array, index)
    return int(array[0])


def several(rng: np.random.Generator) -> Several:
    records = np.zeros(int(rng.integers(0, 9)), NODE)
    records["token"] = rng.integers(0, 1000, len(records))
    return Several(
        rng.integers(0, 256, int(rng.integers(0, 50))).astype(np.uint8),
        rng.integers(0, 99, 20) / 4.0,
        records,
        rng.integers(-9, 9, rng.integers(1, 9, 2)).astype(np.int32),
        np.empty(0, np.int16),
    )


def test_borrowed_arrays_are_those_that_were_lent() -> None:
    rng = np.random.default_rng(41)
    for _ in range(300):
        arrays = several(rng)
        arrays.bytes.flags.writeable = False
        rows, columns = arrays.grid.shape
        expected = (
            sum(arrays.bytes.tolist()),
            sum(arrays.numbers.tolist()),
            sum(arrays.records["token"].tolist()),
            sum(
                (row + 1) * (column + 2) * int(arrays.grid[row, column])
                for row in range(rows)
                for column in range(columns)
            ),
            0,
        )
        packed = pack(arrays)
        assert sums(packed) == expected
        write(packed, rows - 1, columns - 1, 1234)
        assert arrays.grid[rows - 1, columns - 1] == 1234


def test_arrays_with_gaps_are_not_lent() -> None:
    arrays = several(np.random.default_rng(42))._replace(numbers=np.zeros(9)[::2])
    with pytest.raises(ValueError, match="numbers"):
        pack(arrays)


def test_asking_for_memory_changes_nothing_wherever_it_is() -> None:
    array = np.arange(5, 9, dtype=np.int32)
    assert [look_ahead(array, index) for index in (0, 3, 4, -1, 1 << 40)] == [5] * 5
    assert array.tolist() == [5, 6, 7, 8]


@kernel()
def sum_of(address: int) -> int:
    """Add up the tokens of a store that is packed at an address."""
    chains, total = unpack_at(address, STORE_LAYOUT, Chains), 0
    for position in range(chains.state[0]):
        total += chains.tokens[position]
    return total


def test_a_record_is_unpacked_at_its_address() -> None:
    for size in (0, 1, 5000):
        context = Context(np.arange(size, dtype=np.int32))
        assert sum_of(context.address) == size * (size - 1) // 2


def test_records_begin_at_cache_lines() -> None:
    for shape, dtype in (((3,), NODE), ((1000, 8), np.dtype(np.int64)), ((0,), NODE)):
        array = aligned_zeros(shape, dtype)
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.size == 0 or array.ctypes.data % CACHE_LINE == 0
        assert array.flags.c_contiguous
        assert not array.view(np.uint8).any()
    assert NODE.itemsize == CACHE_LINE

"""Stages of a draft, each by itself, as tests ask for them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retriever.kernels import chains as chains_
from retriever.kernels.compiling import kernel
from retriever.kernels.entries import collect_own
from retriever.kernels.layout import (
    LANE_LAYOUT,
    MAX_MATCH,
    STORE_LAYOUT,
    Chains,
    Found,
    Lane,
    Lanes,
    Orders,
    Scratch,
    unpack,
    unpack_at,
)
from retriever.predict.context import Context


@kernel()
def _of_sequence(store: Any, query: Any, depth: Any, scratch: Any) -> Any:
    chains = unpack_at(store, STORE_LAYOUT, Chains)
    return collect_own(store, chains, query, depth, unpack(scratch[0], Found), 0)


def collect_sequence(context: Context, depth: int, scratch: Scratch) -> int:
    """Write rows of a sequence; return the first free one."""
    return int(_of_sequence(context.address, context.last(MAX_MATCH), depth, scratch.packed))


@kernel()
def _of_store(store: Any, source: Any, query: Any, depth: Any, scratch: Any) -> Any:
    chains, orders = unpack(store[0], Chains), unpack(store[0], Orders)
    found = unpack(scratch[0], Found)
    return chains_.collect_chains(chains, orders, query, source, False, depth, found, 0)


def collect_store(
    packed: NDArray[Any], source: int, query: NDArray[np.int32], depth: int, scratch: Scratch
) -> int:
    """Write rows of a store that is no sequence; return the first free one."""
    return int(_of_store(packed, source, query, depth, scratch.packed))


@kernel()
def collect_running(
    running: Any, lane: Any, source: Any, query: Any, depth: Any, scratch: Any, row: Any
) -> Any:
    """Write rows of running sequences, packed, for one with the lane at an address."""
    return chains_.collect_lanes(
        unpack(running[0], Lanes), unpack(running[0], Orders),
        unpack_at(lane, LANE_LAYOUT, Lane).lane, query, source, depth, unpack(scratch[0], Found),
        row,
    )  # fmt: skip

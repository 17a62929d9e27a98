"""What a drafter has done, in numbers that cost a microsecond a step to keep, and what it holds."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.kernels.entries import count_outcome
from retriever.predict.pool import Pool
from retriever.sessions.session_table import Session
from retriever.tree import MAX_SOURCES, DraftTree

BOUNDS_S: Final = (
    *(float(f"{step}e{power}") for power in range(-5, 0) for step in (1, 1.6, 2.5, 4, 6.3)),
    1.0,
)
"""Upper bounds of the latencies that are counted together, in seconds: from 10 us to 1 s."""

_NOTHING: Final = np.zeros(1, np.int32)


class Latencies:
    """How often something took how long.

    Attributes:
        counts: one for each of `BOUNDS_S`, and one for what took longer.
        total_s: all of them together, in seconds.
    """

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count something that took so long each of so many times."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += times
        self.total_s += seconds * times


class DraftCounts:
    """Counts that only rise. Writers hold the drafter's lock; readers need none.

    `failed_open` is for one thread, the one that answers clients, and takes no lock.

    A node counts once it is known what became of it: with the next step of its session, or its
    end. It came true if the tokens committed next are its path, whether or not whoever verified
    the draft had cut it off: so this is what could be accepted at most.

    Attributes:
        by_source: int64[2, MAX_SOURCES], nodes and those that came true.
        steps: how long steps took, waiting for other drafts included.
        drafts: how long a sequence of a step took on average, counted for each.
        num_bare: drafts of bare contexts among them.
        num_outcomes: drafts of which it is known what became of them.
        num_committed: tokens that were committed after those.
        fail_opens: drafts that clients say they went without, by the reason's number on the wire.
    """

    def __init__(self) -> None:
        self.by_source: NDArray[np.int64] = np.zeros((2, MAX_SOURCES), np.int64)
        self.steps = Latencies()
        self.drafts = Latencies()
        self.num_bare = 0
        self.num_outcomes = 0
        self.num_committed = 0
        self.fail_opens: Counter[int] = Counter()

    def stepped(self, num_drafts: int, seconds: float) -> None:
        """Count a step of so many sequences that took so long."""
        self.steps.add(seconds)
        if num_drafts:
            self.drafts.add(seconds / num_drafts, num_drafts)

    def drafted_bare(self, seconds: float) -> None:
        """Count a draft of a bare context that took so long."""
        self.num_bare += 1
        self.drafts.add(seconds)

    def committed(self, tree: DraftTree, tokens: TokenIds) -> None:
        """Count what became of a draft, with int32[n], the tokens that came next."""
        count_outcome(tree.token_ids, tree.parents, tree.sources, tokens, self.by_source)
        self.num_outcomes += 1
        self.num_committed += len(tokens)

    def failed_open(self, told: Mapping[int, int]) -> None:
        """Count drafts that a client says it went without, by reason."""
        self.fail_opens.update(told)

    def warm(self) -> None:
        """Compile or load the kernel, without counting anything."""
        tree = DraftTree.empty()
        count_outcome(tree.token_ids, tree.parents, tree.sources, _NOTHING, self.by_source)


_BETWEEN_PAUSES: Final = 256
"""Sessions that are counted without a pause: a tenth of a millisecond's work."""

_PAUSE_S: Final = 1e-4
"""Long enough that the interpreter goes to a thread that waits for it."""


@dataclass(frozen=True, slots=True)
class Census:
    """What a drafter holds.

    Attributes:
        sessions: how many are open, by tenant.
        session_tokens: tokens of their sequences.
        session_bytes: memory of the sequences.
        tenants: tenants whose recent outputs are in memory.
        generations_tokens: tokens of these outputs, and one for the end of each.
        generations_bytes: memory of the outputs.
    """

    sessions: Mapping[str, int]
    session_tokens: int
    session_bytes: int
    tenants: int
    generations_tokens: int
    generations_bytes: int


NOTHING_HELD: Final = Census({}, 0, 0, 0, 0, 0)
"""The census of a drafter that is not open yet."""


def census_of(sessions: Sequence[Session], pools: Sequence[Pool], lock: Lock) -> Census:
    """Return what these are together.

    Pauses now and then, so that whoever drafts meanwhile gets the interpreter.

    Args:
        sessions: some that were open a moment ago.
        pools: what is in memory.
        lock: held while a pool is used.
    """
    by_tenant: Counter[str] = Counter()
    num_tokens = num_bytes = 0
    for begin in range(0, len(sessions), _BETWEEN_PAUSES):
        for session in sessions[begin : begin + _BETWEEN_PAUSES]:
            databases = session.databases
            by_tenant[databases.pool.tenant] += 1
            num_tokens += len(databases.context)
            num_bytes += databases.context.num_bytes
        time.sleep(_PAUSE_S)
    return Census(
        sessions=by_tenant,
        session_tokens=num_tokens,
        session_bytes=num_bytes,
        tenants=len(pools),
        generations_tokens=sum(_tokens_of(pool, lock) for pool in pools),
        generations_bytes=sum(pool.generations.num_bytes for pool in pools),
    )


def _tokens_of(pool: Pool, lock: Lock) -> int:
    with lock:
        return pool.generations.num_tokens

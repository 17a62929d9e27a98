"""Counts of drafts and their outcomes (a microsecond a step), and a census of memory."""

import resource
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, Final

from indexer.reader import Index
from retriever.predict.draft import Counted
from retriever.predict.ledger import Ledger
from retriever.predict.pool import Pool
from retriever.sessions.bindings import IndexOutcome
from retriever.sessions.session_table import Session

BOUNDS_S: Final = (
    *(float(f"{step}e{power}") for power in range(-5, 0) for step in (1, 1.6, 2.5, 4, 6.3)),
    1.0,
)
"""Upper bounds of the histogram's buckets, in seconds: a draft takes tens of microseconds, and a
compilation a second."""


class Latencies:
    """A histogram of latencies.

    Attributes:
        counts: one for each of `BOUNDS_S`, and one for longer ones.
        total_s: their sum, in seconds.
    """

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a latency, `times` times."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += times
        self.total_s += seconds * times


class DraftCounts:
    """Counts that only rise. Writers hold the drafter's lock; readers need none.

    `failed_open` takes no lock: only the thread that answers clients calls it.

    A node is counted with the next step of its session, or its end. It counts as accepted if the
    tokens committed next are its path, even if the verifier had cut it off: an upper bound of
    accepted tokens.

    Args:
        counted: what a `Predictor` counts; made here if not given.

    Attributes:
        by_source: int64[2, MAX_SOURCES], nodes and accepted nodes.
        by_accepted: int64[MAX_POSITIONS + 2], drafts with a known outcome by how many of their
            tokens came, `MAX_POSITIONS` for so many and more; the last number are the tokens
            committed after these.
        steps: times of steps, waits for other drafts included.
        drafts: times of steps divided by their sequences, counted for each sequence.
        num_bare: drafts of bare contexts among them.
        fail_opens: missed drafts that clients report, by the reason's number on the wire.
    """

    def __init__(self, counted: Counted | None = None) -> None:
        self.by_source, self.by_accepted = counted or Counted.none()
        self.steps = Latencies()
        self.drafts = Latencies()
        self.num_bare = 0
        self.fail_opens: Counter[int] = Counter()

    def stepped(self, num_drafts: int, seconds: float) -> None:
        """Count a step of `num_drafts` sequences."""
        if num_drafts == 1:  # mostly: the bucket is the same
            bucket, steps, drafts = bisect_left(BOUNDS_S, seconds), self.steps, self.drafts
            steps.counts[bucket] += 1
            drafts.counts[bucket] += 1
            steps.total_s += seconds
            drafts.total_s += seconds
            return
        self.steps.add(seconds)
        if num_drafts:
            self.drafts.add(seconds / num_drafts, num_drafts)

    def drafted_bare(self, seconds: float) -> None:
        """Count a draft of a bare context."""
        self.num_bare += 1
        self.drafts.add(seconds)

    @property
    def num_outcomes(self) -> int:
        """Drafts with a known outcome."""
        return int(self.by_accepted[:-1].sum())

    @property
    def num_committed(self) -> int:
        """Tokens committed after these."""
        return int(self.by_accepted[-1])

    def accepted_at(self) -> list[int]:
        """Return how many drafts had their token accepted at each position, the first one first."""
        from_end = accumulate(reversed(self.by_accepted[1:-1].tolist()))
        return list(from_end)[::-1]

    def failed_open(self, told: Mapping[int, int]) -> None:
        """Count missed drafts that a client reports, by reason."""
        self.fail_opens.update(told)


_BETWEEN_PAUSES: Final = 256
"""Sessions counted without a pause: a tenth of a millisecond."""

_PAUSE_S: Final = 1e-4
"""Long enough for the interpreter to switch to a waiting thread."""


@dataclass(frozen=True, slots=True)
class Census:
    """What a drafter has in memory.

    Attributes:
        sessions: how many are open, by tenant.
        session_tokens: tokens of their sequences.
        session_bytes: memory of the sequences.
        tenants: tenants whose generations are in memory.
        generations_tokens: tokens of the generations, and one for the end of each.
        generations_bytes: memory of the generations.
        reserved_bytes: taken from the ceiling `max_bytes`: of the above and of `recycled_bytes`,
            and of contexts that are read or drafted for just now.
        untouched_bytes: of these, the room for tokens to come, which takes no pages yet.
        base_bytes: what the process had when it became ready, without the above and with the pages
            of files, such as indexes, that are resident now.
        recycled_bytes: memory of what decoders found likely.
    """

    sessions: Mapping[str, int]
    session_tokens: int
    session_bytes: int
    tenants: int
    generations_tokens: int
    generations_bytes: int
    reserved_bytes: int
    untouched_bytes: int
    base_bytes: int = 0
    recycled_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """Memory that the process should have, in bytes."""
        return self.base_bytes + self.reserved_bytes - self.untouched_bytes


NOTHING_HELD: Final = Census({}, 0, 0, 0, 0, 0, 0, 0)
"""The census before the drafter is open."""


@dataclass(frozen=True, slots=True)
class DrafterStats:
    """What a drafter holds, and what it has counted since it was opened.

    Attributes:
        indexes: the shared ones, in their current snapshots.
        missing_indexes: indexes that some tenant is to draft from and that cannot be opened.
        index_outcomes: what came of the nodes that indexes proposed, by the indexes drafted from
            together.
        refresh_failures: failed attempts to open a changed or missing index.
        num_sessions: open sessions.
        draft_counts: of drafts and their outcomes; these go on rising.
        is_logged: whether there is a state directory.
        log_failures: outputs that could not be written to that.
        plugins: what plugins have counted, by name.
        evictions: how often what has made room; see `EVICTED`.
        census: what is in memory; `NOTHING_HELD` where it was not asked for.
    """

    indexes: tuple[Index, ...] = ()
    missing_indexes: Sequence[Path] = ()
    index_outcomes: Sequence[IndexOutcome] = ()
    refresh_failures: int = 0
    num_sessions: int = 0
    draft_counts: DraftCounts = field(default_factory=DraftCounts)
    is_logged: bool = False
    log_failures: int = 0
    plugins: Mapping[str, Any] = field(default_factory=dict)
    evictions: Mapping[str, int] = field(default_factory=dict)
    census: Census = NOTHING_HELD


def census_of(
    sessions: Sequence[Session], pools: Sequence[Pool], ledger: Ledger, lock: Lock
) -> Census:
    """Return the census of sessions and pools.

    Pauses regularly, so that other threads can draft.

    Args:
        sessions: a copy of the open sessions; some may have ended since.
        pools: those in memory.
        ledger: of the memory.
        lock: held while a pool is used.
    """
    by_tenant: Counter[str] = Counter()
    num_tokens = num_bytes = untouched = 0
    for begin in range(0, len(sessions), _BETWEEN_PAUSES):
        for session in sessions[begin : begin + _BETWEEN_PAUSES]:
            databases = session.databases
            by_tenant[databases.pool.tenant] += 1
            num_tokens += len(databases.context)
            num_bytes += databases.num_bytes
            untouched += databases.num_bytes - databases.touched_bytes
        time.sleep(_PAUSE_S)
    return Census(
        sessions=by_tenant,
        session_tokens=num_tokens,
        session_bytes=num_bytes,
        tenants=len(pools),
        generations_tokens=sum(_tokens_of(pool, lock) for pool in pools),
        generations_bytes=sum(pool.num_bytes for pool in pools),
        reserved_bytes=ledger.total,
        untouched_bytes=untouched + sum(_untouched_of(pool, lock) for pool in pools),
    )


def _tokens_of(pool: Pool, lock: Lock) -> int:
    with lock:
        return pool.generations.num_tokens


@dataclass(slots=True)
class TenantUse:
    """What a tenant has used since its first call. Counts only rise; readers need no lock.

    Attributes:
        drafts: trees made for it.
        tokens: tokens read for it: of contexts, prompts and steps.
        nodes: nodes of its trees.
        seconds: time that the service worked for it, in all threads.
        refused: calls and messages that were beyond its share.
    """

    drafts: int = 0
    tokens: int = 0
    nodes: int = 0
    seconds: float = 0.0
    refused: int = 0

    def add(self, other: "TenantUse") -> None:
        """Add what another has used."""
        self.drafts += other.drafts
        self.tokens += other.tokens
        self.nodes += other.nodes
        self.seconds += other.seconds
        self.refused += other.refused


MOST_USES: Final = 1024
"""Tenants counted apart: some 200 bytes each, and a table that people can read."""


class TenantUses:
    """Use by tenant, of those that used most lately. For one writer; `copy` is for other threads.

    Attributes:
        others: of all tenants that are no longer counted apart.
    """

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, TenantUse] = OrderedDict()  # the last used is last
        self.others = TenantUse()

    def of(self, tenant: str) -> TenantUse:
        """Return a tenant's use, to be added to."""
        use = self._by_tenant.get(tenant)
        if use is None:
            use = self._by_tenant[tenant] = TenantUse()
            if len(self._by_tenant) > MOST_USES:
                self.others.add(self._by_tenant.popitem(last=False)[1])
        else:
            self._by_tenant.move_to_end(tenant)
        return use

    def copy(self) -> dict[str, TenantUse]:
        """Return a copy by tenant, the one that was used last the last."""
        return {name: replace(use) for name, use in self._by_tenant.copy().items()}


def _untouched_of(pool: Pool, lock: Lock) -> int:
    with lock:
        return pool.generations.num_bytes - pool.generations.touched_bytes


def resident_bytes() -> tuple[int, int]:
    """Return this process's resident memory, and how much of it are pages of files, in bytes.

    Zeros where that is not known.
    """
    with suppress(OSError):
        _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return resident * resource.getpagesize(), of_files * resource.getpagesize()
    return 0, 0

"""Counts of drafts and their outcomes (a microsecond per step), and a census of memory."""

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
"""Upper bounds of the histogram's buckets, in seconds. A draft takes tens of microseconds, and a
compilation takes a second."""


class Latencies:
    """A histogram of latencies.

    Attributes:
        counts: one count for each bound in `BOUNDS_S`, and one for longer latencies.
        total_s: sum of all latencies, in seconds.
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

    `failed_open` takes no lock, because only the thread that answers clients calls it.

    A node is counted at the next step of its session, or at the session's end. It counts as
    accepted if the tokens committed next follow its path, even if the verifier had truncated the
    draft. So the count is an upper bound of the accepted tokens.

    Args:
        counted: counts of a `Predictor`; created here if not given.

    Attributes:
        by_source: int64[2, MAX_SOURCES], nodes and accepted nodes.
        by_accepted: int64[MAX_POSITIONS + 2], drafts with a known outcome by number of accepted
            tokens, where `MAX_POSITIONS` includes larger numbers; the last entry is the number of
            tokens committed after these drafts.
        steps: times of steps, including waits for other drafts.
        drafts: time of each step divided by its number of sequences, counted for each sequence.
        num_bare: number of drafts in `drafts` that were for bare contexts.
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
        if num_drafts == 1:  # the usual case: both have the same bucket
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
        """Number of drafts with a known outcome."""
        return int(self.by_accepted[:-1].sum())

    @property
    def num_committed(self) -> int:
        """Number of tokens committed after drafts with a known outcome."""
        return int(self.by_accepted[-1])

    def accepted_at(self) -> list[int]:
        """Return for each position, from the first on, how many drafts had their token accepted."""
        from_end = accumulate(reversed(self.by_accepted[1:-1].tolist()))
        return list(from_end)[::-1]

    def failed_open(self, told: Mapping[int, int]) -> None:
        """Count missed drafts that a client reports, by reason."""
        self.fail_opens.update(told)


_BETWEEN_PAUSES: Final = 256
"""Sessions counted between two pauses; they take a tenth of a millisecond."""

_PAUSE_S: Final = 1e-4
"""Length of a pause: enough for the interpreter to switch to a waiting thread."""


@dataclass(frozen=True, slots=True)
class Census:
    """The data that a drafter has in memory.

    Attributes:
        sessions: number of open sessions of each tenant.
        session_tokens: number of tokens in their sequences.
        session_bytes: memory of the sequences.
        tenants: number of tenants whose generations are in memory.
        generations_tokens: number of tokens in the generations, plus one for the end of each.
        generations_bytes: memory of the generations.
        reserved_bytes: memory charged against `max_bytes`: the above, `recycled_bytes`, and
            contexts that are currently read or drafted for.
        untouched_bytes: the part of `reserved_bytes` for future tokens that is not resident yet.
        base_bytes: memory of the process when it became ready, without the above, plus the pages of
            files, such as indexes, that are resident now.
        recycled_bytes: memory of the decoders' findings.
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
        """Expected memory of the process, in bytes."""
        return self.base_bytes + self.reserved_bytes - self.untouched_bytes


NOTHING_HELD: Final = Census({}, 0, 0, 0, 0, 0, 0, 0)
"""The census of a drafter that is not open yet."""


@dataclass(frozen=True, slots=True)
class DrafterStats:
    """The content of a drafter, and its counts since it was opened.

    Attributes:
        indexes: the shared indexes, in their current snapshots.
        missing_indexes: indexes that a tenant should draft from but that cannot be opened.
        index_outcomes: outcomes of the nodes that indexes proposed; one outcome for each set of
            indexes that are drafted from together.
        refresh_failures: number of failed attempts to open a changed or missing index.
        num_sessions: number of open sessions.
        draft_counts: counts of drafts and their outcomes; the object keeps counting.
        is_logged: whether there is a state directory.
        log_failures: number of outputs that could not be written to the state directory.
        plugins: counts of plugins, by name.
        evictions: number of evictions by kind; see `EVICTED`.
        census: what is in memory; `NOTHING_HELD` if it was not requested.
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
        sessions: a copy of the open sessions; some may have ended since then.
        pools: the pools in memory.
        ledger: the memory ledger.
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
    """A tenant's usage since its first call. Counts only rise; readers need no lock.

    Attributes:
        drafts: number of trees made for the tenant.
        tokens: number of tokens read from its contexts, prompts and steps.
        nodes: number of nodes in its trees.
        seconds: time that the service worked for it, in all threads.
        refused: number of calls and messages that exceeded its share.
    """

    drafts: int = 0
    tokens: int = 0
    nodes: int = 0
    seconds: float = 0.0
    refused: int = 0

    def add(self, other: "TenantUse") -> None:
        """Add the usage of another tenant."""
        self.drafts += other.drafts
        self.tokens += other.tokens
        self.nodes += other.nodes
        self.seconds += other.seconds
        self.refused += other.refused


MOST_USES: Final = 1024
"""Most tenants counted separately: each takes about 200 bytes, and people read the table."""


class TenantUses:
    """Usage of the most recently active tenants. For one writer; other threads use `copy`.

    Attributes:
        others: usage of all tenants that are no longer counted separately.
    """

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, TenantUse] = OrderedDict()  # least recently used first
        self.others = TenantUse()

    def of(self, tenant: str) -> TenantUse:
        """Return a tenant's usage, for the caller to add to."""
        use = self._by_tenant.get(tenant)
        if use is None:
            use = self._by_tenant[tenant] = TenantUse()
            if len(self._by_tenant) > MOST_USES:
                self.others.add(self._by_tenant.popitem(last=False)[1])
        else:
            self._by_tenant.move_to_end(tenant)
        return use

    def copy(self) -> dict[str, TenantUse]:
        """Return a copy by tenant; the most recently active tenant is last."""
        return {name: replace(use) for name, use in self._by_tenant.copy().items()}


def _untouched_of(pool: Pool, lock: Lock) -> int:
    with lock:
        return pool.generations.num_bytes - pool.generations.touched_bytes


def resident_bytes() -> tuple[int, int]:
    """Return this process's resident memory, and how much of it is pages of files, in bytes.

    Returns zeros if that is unknown.
    """
    with suppress(OSError):
        _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return resident * resource.getpagesize(), of_files * resource.getpagesize()
    return 0, 0

"""The state of replication: counts, deletions, and the position in the streams."""

import json
import secrets
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, Final, Self

from retriever.plugins.replication.replicated_records import REPLICA_BYTES
from retriever.predict.generations import Scope

BEGINNING: Final = "0-0"
"""The offset before all entries of a stream."""

MAX_TENANT_DELETIONS: Final = 1 << 12
"""Most deletions of sessions stored for a tenant; the oldest are dropped."""

MAX_DELETIONS: Final = 1 << 20
"""Most deletions of all tenants; beyond it, the tenant with the most deletions loses its oldest."""

SKIPPED: Final = (
    "own",
    "repeated",
    "deleted",
    "expired",
    "no-room",
    "damaged",
    "newer",
    "oversized",
    "foreign",
    "vocabulary",
)
"""Reasons for skipping records; see `ReplicationCounts.skipped`."""

_MAX_REPLICAS: Final = 1024  # replicas with their last numbers: at most 58 KB in the log
_EPOCH_BITS: Final = 32  # shift of a number's upper half, the epoch, about seconds since 1970


@dataclass(slots=True)
class ReplicationCounts:
    """Counts since the start; `connected`, `queued` and `unsent_deletions` are current values.

    Attributes:
        published: number of records that the server accepted.
        dropped: number of records that were dropped because the queue was full.
        learned: number of records of other drafters that were added here.
        learned_tokens: number of tokens in these records.
        deletions: number of tenants and sessions deleted on behalf of other drafters.
        skipped: number of records that were not added, by reason: `own`, `repeated`, `deleted`
            (after they were made), `expired`, `no-room` (beyond `max_tenants`, without a state
            directory), `damaged`, `newer` (of a later version), `oversized`, `foreign` (not ours),
            `vocabulary` (with ids outside it).
        failures: number of failed calls to the server.
        connected: whether the last call was answered.
        queued: number of records waiting to be published.
        unsent_deletions: number of deletions waiting to be published.
    """

    published: int = 0
    dropped: int = 0
    learned: int = 0
    learned_tokens: int = 0
    deletions: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    failures: int = 0
    connected: bool = False
    queued: int = 0
    unsent_deletions: int = 0

    def skip(self, reason: str) -> None:
        """Count a skipped record."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


class Deletions:
    """Times of deletion by scope. Thread-safe."""

    def __init__(self) -> None:
        self._tenants: dict[str, float] = {}
        self._sessions: dict[str, OrderedDict[bytes, float]] = {}
        self._num_sessions = 0

    def __len__(self) -> int:
        return len(self._tenants) + self._num_sessions

    def add(self, scope: Scope, time_s: float) -> None:
        """Record that outputs up to this time, in seconds since 1970, are deleted.

        A tenant that deletes many sessions displaces only its own deletions.
        """
        if not scope.origin:
            self._tenants[scope.tenant] = max(time_s, self._tenants.get(scope.tenant, time_s))
            return
        of_tenant = self._sessions.setdefault(scope.tenant, OrderedDict())
        self._num_sessions += scope.origin not in of_tenant
        of_tenant[scope.origin] = max(time_s, of_tenant.get(scope.origin, time_s))
        if len(of_tenant) > MAX_TENANT_DELETIONS:
            self._drop(of_tenant)
        elif self._num_sessions > MAX_DELETIONS:
            self._drop(max(self._sessions.copy().values(), key=len))

    def cover(self, scope: Scope, time_s: float) -> bool:
        """Return whether outputs of this time were deleted, by scope or with the whole tenant."""
        of_tenant = self._sessions.get(scope.tenant)
        of_session = None if of_tenant is None else of_tenant.get(scope.origin)
        times = (self._tenants.get(scope.tenant), of_session)
        return any(deleted is not None and time_s <= deleted for deleted in times)

    def _drop(self, of_tenant: OrderedDict[bytes, float]) -> None:
        of_tenant.popitem(last=False)
        self._num_sessions -= 1


class Surplus:
    """Finds entries of a stream of deletions that exceed a tenant's share."""

    def __init__(self) -> None:
        self._entries: dict[str, deque[str]] = {}

    def add(self, scope: Scope, entry_id: str) -> list[str]:
        """Record an entry, in stream order; return the ids of entries to remove."""
        entries = self._entries.setdefault(scope.tenant, deque())
        entries.append(entry_id)
        return [entries.popleft() for _ in range(len(entries) - MAX_TENANT_DELETIONS)]


@dataclass(slots=True)
class Position:
    """The state that a drafter needs to resume replication.

    Attributes:
        replica: identity of the drafter.
        epoch: number of the process, greater than the numbers of all earlier processes; it is the
            upper half of its records' numbers.
        outputs: id of the last entry read from the stream of outputs; None before the first.
        deletions: id of the last entry read from the stream of deletions; None before the first.
        numbers: highest number read from each other drafter.
        unsent: times of unpublished deletions.
    """

    replica: bytes = field(default_factory=lambda: secrets.token_bytes(REPLICA_BYTES))
    epoch: int = 0
    outputs: str | None = None
    deletions: str | None = None
    numbers: dict[bytes, int] = field(default_factory=dict)
    unsent: dict[Scope, float] = field(default_factory=dict)

    @classmethod
    def resume(cls, kept: bytes | None) -> Self:
        """Return the position for a new process, from stored bytes, or a fresh position."""
        position = cls()
        if kept is not None:
            try:
                position = cls._from_json(json.loads(kept))
            except (ValueError, TypeError, KeyError, AttributeError):
                position = cls()  # a new replica, which reads everything
        position.epoch = max(position.epoch + 1, int(time.time()))
        return position

    def to_bytes(self) -> bytes:
        """Return the bytes that `resume` reads."""
        values = {
            "replica": self.replica.hex(),
            "epoch": self.epoch,
            "outputs": self.outputs,
            "deletions": self.deletions,
            # A snapshot, since other threads change them.
            "numbers": {replica.hex(): number for replica, number in dict(self.numbers).items()},
            "unsent": [
                [tenant, origin.hex(), time_s]
                for (tenant, origin), time_s in dict(self.unsent).items()
            ],
        }
        return json.dumps(values).encode()

    @property
    def first_number(self) -> int:
        """First record number of this process; all earlier processes had lower numbers."""
        return self.epoch << _EPOCH_BITS

    def is_new(self, replica: bytes, number: int) -> bool:
        """Return whether a record is new, and mark it as read."""
        known = self.numbers.pop(replica, -1)
        self.numbers[replica] = max(known, number)  # move to the end
        if len(self.numbers) > _MAX_REPLICAS:
            del self.numbers[next(iter(self.numbers))]
        return number > known

    @classmethod
    def _from_json(cls, values: Any) -> Self:
        numbers = {bytes.fromhex(key): int(value) for key, value in values["numbers"].items()}
        return cls(
            bytes.fromhex(values["replica"]),
            int(values["epoch"]),
            values["outputs"],
            values["deletions"],
            numbers,
            {
                Scope(str(tenant), bytes.fromhex(origin)): float(time_s)
                for tenant, origin, time_s in values["unsent"]
            },
        )

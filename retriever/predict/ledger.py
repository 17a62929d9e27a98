"""The ledger of memory: what each tenant's sequences and outputs take, against ceilings in bytes.

Whatever holds memory for a tenant owns a `Charge`, taken before the memory is: when the owner
leaves memory, so does its charge. Sizes follow from lengths, so that most steps take none.
"""

import resource
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Final, Protocol

from retriever.errors import LimitExceededError
from retriever.limits import RETRY_S, Limits

SHARE: Final = 0.5
"""Part of the memory that the process may use which is for what the service keeps: the rest is for
pages of indexes, messages, and what allocators hold back."""

_CGROUP_FILES: Final = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def default_max_bytes() -> int:
    """Return half of the memory that this process may use.

    That is the least of the machine's, its control group's (version 2 or 1) and what its limit of
    address space leaves.
    """
    page = resource.getpagesize()
    limits = []
    with suppress(OSError, ValueError):
        pages = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(1024 * int(pages["MemTotal"].split()[0]))
    for name in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            limits.append(int(Path(name).read_text()))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        with suppress(OSError, ValueError):
            space -= page * int(Path("/proc/self/statm").read_text().split()[0])
        limits.append(max(0, space))
    return int(SHARE * min(limits)) if limits else 1 << 30


def with_ceilings(limits: Limits) -> Limits:
    """Return limits with the defaults of the ceilings in bytes."""
    max_bytes = limits.max_bytes or default_max_bytes()
    return replace(
        limits, max_bytes=max_bytes, max_tenant_bytes=limits.max_tenant_bytes or max_bytes // 2
    )


class Evictor(Protocol):
    """Makes room where there is none."""

    def __call__(self, tenant: str, num_bytes: int, limit: str, *, is_locked: bool) -> bool:
        """Let something go; return False if there is nothing more that may.

        Args:
            tenant: that needs room.
            num_bytes: how much.
            limit: that is reached.
            is_locked: whether the caller holds the drafter's lock.
        """
        ...


class Charge:
    """Memory of one owner; given back when the owner, and with it this, leaves memory.

    Attributes:
        tenant: whose memory it is.
        num_bytes: how much.
        is_locked: whether its owner holds the drafter's lock when it takes more.
    """

    __slots__ = ("_ledger", "is_locked", "num_bytes", "tenant")

    def __init__(self, ledger: "Ledger", tenant: str, num_bytes: int) -> None:
        self._ledger = ledger
        self.tenant = tenant
        self.num_bytes = num_bytes
        self.is_locked = True

    def add(self, num_bytes: int) -> None:
        """Take more.

        Raises:
            LimitExceededError: there is no room for it.
        """
        self._ledger.reserve(self.tenant, num_bytes, is_locked=self.is_locked)
        self.num_bytes += num_bytes

    def ensure(self, num_bytes: int) -> None:
        """Take what is missing to so many bytes; called without the drafter's lock.

        Raises:
            LimitExceededError: there is no room for it.
        """
        if num_bytes > self.num_bytes:
            self._ledger.reserve(self.tenant, num_bytes - self.num_bytes, is_locked=False)
            self.num_bytes = num_bytes

    def settle(self, num_bytes: int) -> None:
        """State how much it is: less than was taken, or little more."""
        if num_bytes != self.num_bytes:
            self._ledger.release(self.tenant, self.num_bytes - num_bytes)
            self.num_bytes = num_bytes

    def __del__(self) -> None:
        self._ledger.release(self.tenant, self.num_bytes)


class Ledger:
    """Bytes by tenant, below a ceiling for all and one for each tenant. Thread-safe.

    Args:
        max_bytes: of all tenants together.
        max_tenant_bytes: of one tenant.

    Attributes:
        evictor: makes room; None if nothing can.
        max_bytes: as given.
        max_tenant_bytes: as given.
    """

    def __init__(self, max_bytes: int, max_tenant_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.max_tenant_bytes = max_tenant_bytes
        self.evictor: Evictor | None = None
        self._total = 0
        self._of: Counter[str] = Counter()
        self._lock = Lock()
        self._released: deque[tuple[str, int]] = deque()

    @property
    def total(self) -> int:
        """Bytes of all tenants."""
        with self._lock:
            self._settle()
            return self._total

    def of(self, tenant: str) -> int:
        """Return the bytes of a tenant."""
        with self._lock:
            self._settle()
            return self._of[tenant]

    def take(self, tenant: str, num_bytes: int, *, is_locked: bool = False) -> Charge:
        """Return a charge, taken before the memory is.

        Args:
            tenant: whose memory it is.
            num_bytes: how much.
            is_locked: whether the caller holds the drafter's lock.

        Raises:
            LimitExceededError: there is no room for it.
        """
        self.reserve(tenant, num_bytes, is_locked=is_locked)
        return Charge(self, tenant, num_bytes)

    def reserve(self, tenant: str, num_bytes: int, *, is_locked: bool) -> None:
        """Take bytes without a charge, making room if need be.

        Raises:
            LimitExceededError: there is no room for them.
        """
        while limit := self._refused(tenant, num_bytes):
            evict = self.evictor
            if evict is None or not evict(tenant, num_bytes, limit, is_locked=is_locked):
                raise self._refusal(num_bytes, limit)

    def release(self, tenant: str, num_bytes: int) -> None:
        """Give bytes back. Never blocks: the collector of garbage may call it at any place."""
        self._released.append((tenant, num_bytes))
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _refused(self, tenant: str, num_bytes: int) -> str:
        """Take bytes, or return the limit that stands against it."""
        with self._lock:
            self._settle()
            if self._of[tenant] + num_bytes > self.max_tenant_bytes:
                return "max_tenant_bytes"
            if self._total + num_bytes > self.max_bytes:
                return "max_bytes"
            self._of[tenant] += num_bytes
            self._total += num_bytes
            return ""

    def _settle(self) -> None:
        """Note what was given back; called with the lock held."""
        while self._released:
            tenant, num_bytes = self._released.popleft()
            self._total -= num_bytes
            self._of[tenant] -= num_bytes
            if not self._of[tenant]:
                del self._of[tenant]

    def _refusal(self, num_bytes: int, limit: str) -> LimitExceededError:
        most = self.max_tenant_bytes if limit == "max_tenant_bytes" else self.max_bytes
        if num_bytes > most:
            return LimitExceededError(
                f"{num_bytes} bytes are more than there is room for: at most {most} are kept; send "
                f"fewer tokens ({limit})",
                limit=limit,
            )
        whose = "of one tenant" if limit == "max_tenant_bytes" else "of all tenants together"
        return LimitExceededError(
            f"there is no room for {num_bytes} more bytes: at most {most} are kept, {whose}; close "
            f"sessions, or try again in {RETRY_S:g} s ({limit})",
            limit=limit,
            retry_after_s=RETRY_S,
        )

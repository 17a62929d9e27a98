"""The memory ledger: bytes taken by each tenant's sequences and outputs, limited by ceilings.

Every object that holds memory for a tenant owns a `Charge`. The charge is taken before the memory
is allocated, and ends when its owner is freed. Sizes follow from lengths, so most steps need no
charge.
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
"""Share of the process's available memory that the ledger may charge. The rest is for pages of
indexes, messages and allocator overhead."""

_CGROUP_FILES: Final = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def default_max_bytes() -> int:
    """Return half of the memory that this process may use.

    The memory is the minimum of the machine's memory, the control group's limit (version 2 or 1)
    and what is left of the process's address-space limit.
    """
    page = resource.getpagesize()
    limits = []
    with suppress(OSError, ValueError):
        pages = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(1024 * int(pages["MemTotal"].split()[0]))
    for name in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # "max" means no limit
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
    """Makes room by eviction."""

    def __call__(self, tenant: str, num_bytes: int, limit: str, *, is_locked: bool) -> bool:
        """Evict something; return False if nothing more may be evicted.

        Args:
            tenant: tenant that needs room.
            num_bytes: how many bytes it needs.
            limit: the limit that is reached.
            is_locked: whether the caller holds the drafter's lock.
        """
        ...


class Charge:
    """Memory of one owner; returned when the owner, and this object with it, is freed.

    Attributes:
        tenant: the tenant that the memory belongs to.
        num_bytes: size of the charge.
        is_locked: whether its owner holds the drafter's lock when it takes more.
    """

    __slots__ = ("_ledger", "is_locked", "num_bytes", "tenant")

    def __init__(self, ledger: "Ledger", tenant: str, num_bytes: int) -> None:
        self._ledger = ledger
        self.tenant = tenant
        self.num_bytes = num_bytes
        self.is_locked = True

    def add(self, num_bytes: int) -> None:
        """Charge more bytes.

        Raises:
            LimitExceededError: there is no room for them.
        """
        self._ledger.reserve(self.tenant, num_bytes, is_locked=self.is_locked)
        self.num_bytes += num_bytes

    def ensure(self, num_bytes: int) -> None:
        """Raise the charge to at least `num_bytes`; called without the drafter's lock.

        Raises:
            LimitExceededError: there is no room for them.
        """
        if num_bytes > self.num_bytes:
            self._ledger.reserve(self.tenant, num_bytes - self.num_bytes, is_locked=False)
            self.num_bytes = num_bytes

    def settle(self, num_bytes: int) -> None:
        """Set the charge to the actual size, which is smaller or only a little larger."""
        if num_bytes != self.num_bytes:
            self._ledger.release(self.tenant, self.num_bytes - num_bytes)
            self.num_bytes = num_bytes

    def __del__(self) -> None:
        self._ledger.release(self.tenant, self.num_bytes)


class Ledger:
    """Bytes of each tenant, limited by a ceiling for all tenants and one per tenant. Thread-safe.

    Args:
        max_bytes: ceiling for all tenants together.
        max_tenant_bytes: ceiling for one tenant.

    Attributes:
        evictor: makes room; None without eviction.
        max_bytes: ceiling for all tenants together.
        max_tenant_bytes: ceiling for one tenant.
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
        """Return a charge, taken before the memory is allocated.

        Args:
            tenant: the tenant that the memory belongs to.
            num_bytes: size of the charge.
            is_locked: whether the caller holds the drafter's lock.

        Raises:
            LimitExceededError: there is no room for it.
        """
        self.reserve(tenant, num_bytes, is_locked=is_locked)
        return Charge(self, tenant, num_bytes)

    def reserve(self, tenant: str, num_bytes: int, *, is_locked: bool) -> None:
        """Reserve bytes without a `Charge`, making room if necessary.

        Raises:
            LimitExceededError: there is no room for them.
        """
        while limit := self._refused(tenant, num_bytes):
            evict = self.evictor
            if evict is None or not evict(tenant, num_bytes, limit, is_locked=is_locked):
                raise self._refusal(num_bytes, limit)

    def release(self, tenant: str, num_bytes: int) -> None:
        """Return bytes. Never blocks, because the garbage collector may call it at any point."""
        self._released.append((tenant, num_bytes))
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _refused(self, tenant: str, num_bytes: int) -> str:
        """Take bytes and return "", or return the name of the limit that prevents it."""
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
        """Subtract the returned bytes; called with the lock held."""
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
                f"{num_bytes} bytes are more than there is room for: the limit is {most}; send "
                f"fewer tokens ({limit})",
                limit=limit,
            )
        whose = "for one tenant" if limit == "max_tenant_bytes" else "for all tenants together"
        return LimitExceededError(
            f"there is no room for {num_bytes} more bytes: the limit is {most} {whose}; close "
            f"sessions, or try again in {RETRY_S:g} s ({limit})",
            limit=limit,
            retry_after_s=RETRY_S,
        )

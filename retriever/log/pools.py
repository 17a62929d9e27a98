"""The pools of all tenants; each tenant drafts only from its own generations."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Condition, Lock
from typing import Self
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from retriever.errors import LimitExceededError, NotPossibleError
from retriever.limits import Durability, Limits
from retriever.log.generations_log import GenerationsLog
from retriever.log.options import LogOptions
from retriever.predict.generations import (
    POOL_BYTES,
    Generations,
    Output,
    Scope,
    generations_bytes,
    session_origin,
    steady_time,
)
from retriever.predict.ledger import Ledger
from retriever.predict.pool import Entry, Pool
from retriever.predict.stores import GENERATIONS_ALONE, GENERATIONS_LIMITS
from retriever.predict.weights import from_bytes


class Pools:
    """Pools of the most recently used tenants, created or loaded from the log at first use.

    While a tenant's outputs are read from the disk, calls of that tenant wait, but those of other
    tenants do not.

    Beyond `max_tenants` the longest idle pool is evicted. It can be loaded from the log again;
    without a log its outputs are lost. A pool that a session uses is never duplicated.

    Args:
        limits: most tenants, and most tokens of each.
        log: log of the outputs; None to store them only in memory.
        clock: returns seconds since 1970.
        has_corpus: whether a tenant drafts from an index. Without an index, generations are also
            found by shorter matches, which takes more memory.
        ledger: the memory ledger; None without a ceiling.
    """

    def __init__(
        self,
        limits: Limits,
        log: GenerationsLog | None,
        clock: Callable[[], float] = steady_time,
        has_corpus: Callable[[str], bool] = lambda _: False,
        ledger: Ledger | None = None,
    ) -> None:
        self._ledger = ledger
        self._has_corpus = has_corpus
        self._limits = limits
        self._log = log
        self._clock = clock
        self._recent: OrderedDict[str, Pool] = OrderedDict()
        self._in_use: WeakValueDictionary[str, Pool] = WeakValueDictionary()
        self._lock = Lock()
        self._deleting: set[str] = set()
        self._busy: set[str] = set()  # tenants whose outputs are being loaded
        self._idle = Condition(self._lock)  # notified when one of these loads is done

    @classmethod
    def open(  # noqa: PLR0913, PLR0917  (what pools are made of)
        cls,
        limits: Limits,
        state: Path | None,
        fingerprint: str,
        durability: Durability,
        has_corpus: Callable[[str], bool],
        ledger: Ledger | None = None,
    ) -> Self:
        """Return the pools of a state directory; without one, pools that are only in memory.

        Raises:
            StateError: the directory cannot be used.
            VocabularyMismatchError: it holds outputs of another tokenizer than `fingerprint`'s.
        """
        if state is None:
            return cls(limits, None, has_corpus=has_corpus, ledger=ledger)
        options = LogOptions(limits.generations_tokens, limits.generations_age_s, durability)
        log = GenerationsLog(state, fingerprint, options)
        return cls(limits, log, has_corpus=has_corpus, ledger=ledger)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the log's tokenizer; empty if unknown, or without a log."""
        return self._log.fingerprint if self._log is not None else ""

    @property
    def log(self) -> GenerationsLog | None:
        """The log; None without a state directory."""
        return self._log

    @property
    def log_failures(self) -> int:
        """Number of outputs that the log failed to write."""
        return self._log.failures if self._log is not None else 0

    def __len__(self) -> int:
        """Number of evictable tenants in memory."""
        return len(self._recent)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._in_use

    def all(self) -> list[Pool]:
        """Return the pools in memory."""
        with self._lock:
            return list({**self._in_use, **self._recent}.values())

    def get(self, tenant: str) -> Pool:
        """Return the tenant's pool. Loading takes about 0.1 s for a million tokens.

        Raises:
            LimitExceededError: the tenant's data is being deleted, or there is no room.
        """
        with self._lock:
            pool = self._recent.get(tenant)
            if pool is not None and not self._deleting:  # the usual case
                self._recent.move_to_end(tenant)
                pool.last_used_s = time.monotonic()
                return pool
            pool = self._found(tenant)
            if pool is not None:
                self._use(pool)
                return pool
            self._busy.add(tenant)
        try:
            pool = self._load(tenant)
            with self._lock:
                self._use(pool)
        finally:
            with self._lock:
                self._busy.discard(tenant)
                self._idle.notify_all()
        return pool

    def _found(self, tenant: str) -> Pool | None:
        """Return a pool if it is in memory; if it is being loaded, wait for that.

        Called with the lock held.

        Raises:
            LimitExceededError: the tenant's data is being deleted.
        """
        while True:
            self.check_kept(tenant)
            pool = self._in_use.get(tenant)
            if pool is not None or tenant not in self._busy:
                return pool
            self._idle.wait()

    def _use(self, pool: Pool) -> None:
        """Mark a pool as the last used; evict the longest idle pool if there are too many."""
        self._in_use[pool.tenant] = self._recent[pool.tenant] = pool
        self._recent.move_to_end(pool.tenant)
        pool.last_used_s = time.monotonic()
        if len(self._recent) > self._limits.max_tenants:
            self._evict(next(iter(self._recent)))

    def _evict(self, tenant: str) -> None:
        """Drop a pool; it is freed once no session uses it. The next commit writes its weights."""
        pool = self._recent.pop(tenant)
        if self._log is not None and (statistics := pool.unlogged()) is not None:
            self._log.put_statistics(tenant, statistics)

    def find(self, tenant: str) -> Pool | None:
        """Return a tenant's pool if it is in memory."""
        return self._in_use.get(tenant)

    def used_within(self, seconds: float) -> set[str]:
        """Return the tenants whose pools were used within this time."""
        since_s = time.monotonic() - seconds
        return {pool.tenant for pool in list(self._recent.values()) if pool.last_used_s > since_s}

    def evict_idle(self, spared: set[str]) -> bool:
        """Evict the longest idle pool except those of `spared` tenants; return whether it did.

        Never waits: while the pools are locked, nothing is evicted.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            passed_over = spared | self._busy | self._deleting
            tenant = next((each for each in self._recent if each not in passed_over), None)
            if tenant is not None:
                self._evict(tenant)
            return tenant is not None
        finally:
            self._lock.release()

    def check_kept(self, tenant: str) -> None:
        """Refuse a tenant whose data is being deleted.

        Raises:
            LimitExceededError: its data is being deleted.
        """
        if tenant in self._deleting:
            raise LimitExceededError(
                "the tenant's data is being deleted: try again soon", retry_after_s=1.0
            )

    def remember(
        self, pool: Pool, output: NDArray[np.int32], name: str = "", version: int = 0
    ) -> Entry | None:
        """Add an output, int32[n], to a pool; `commit` writes it to the log.

        Args:
            pool: pool of the output's tenant.
            output: token ids.
            name: name of the session.
            version: version of the model that wrote it; 0 if unknown.

        Returns:
            The log's entry; None for an empty output.
        """
        if not len(output):
            return None
        added = Output(output, self._clock(), session_origin(name), version)
        pool.generations.extend([added])
        return self._noted(pool, added)

    def remembering(
        self, pool: Pool, output: NDArray[np.int32], name: str = "", version: int = 0
    ) -> tuple[Entry | None, Iterator[None]]:
        """Do what `remember` does, but the iterator adds the output to the pool in pieces."""
        if not len(output):
            return None, iter(())
        added = Output(output, self._clock(), session_origin(name), version)
        return self._noted(pool, added), pool.generations.adding(added)

    def _noted(self, pool: Pool, output: Output) -> Entry:
        """Queue an output in the log; return its entry, which has weights only after that."""
        if self._log is None:
            return Entry(pool.tenant, output)
        entry = pool.entry(output)
        self._log.append(entry)
        return entry

    def learn(
        self,
        learned: Sequence[tuple[str, Output]],
        note: bytes,
        lock: Lock,
        is_deleted: Callable[[Scope, float], bool],
    ) -> list[tuple[str, Output]]:
        """Add outputs of other drafters to the pools of their tenants.

        Outputs of a tenant that is not in memory go to the log. If there is no log, they do not
        evict other tenants. `commit` writes all of them and the note, or nothing.

        Args:
            learned: tenants and outputs, oldest first.
            note: replaces the previous note.
            lock: held during drafts.
            is_deleted: returns whether outputs of a tenant, origin and time are deleted.

        Returns:
            The entries that were added.
        """
        added: list[tuple[str, Output]] = []
        with self._all_loaded({tenant for tenant, _ in learned}), lock:
            for tenant, output in learned:
                if is_deleted(Scope(tenant, output.origin), output.time_s):
                    continue
                pool = self._in_use.get(tenant) or self._new_pool(tenant)
                if pool is not None:
                    pool.generations.extend([output])
                if pool is not None or self._log is not None:
                    added.append((tenant, output))
            if added and self._log is not None:
                entries = [Entry(tenant, output) for tenant, output in added]
                self._log.append_all([*entries[:-1], replace(entries[-1], note=note)])
        return added

    def commit(self) -> None:
        """Write remembered outputs to the log."""
        if self._log is not None:
            self._log.commit()

    def reserve(self, tenant: str, num_tokens: int, lock: Lock) -> None:
        """Make room in memory for a tenant's tokens before they are learned.

        Args:
            tenant: name of the tenant.
            num_tokens: number of tokens, plus one for each output.
            lock: held during drafts.
        """
        with self._all_loaded({tenant}), lock:
            pool = self._in_use.get(tenant) or self._new_pool(tenant)
            if pool is not None:
                pool.generations.reserve(num_tokens)

    @contextmanager
    def _all_loaded(self, tenants: set[str]) -> Iterator[None]:
        """Hold the lock once no load of these tenants is running."""
        with self._lock:
            while not self._busy.isdisjoint(tenants):
                self._idle.wait()
            yield

    def put_note(self, note: bytes) -> None:
        """Store a note without outputs."""
        if self._log is not None:
            self._log.put_note(note)

    def note(self) -> bytes | None:
        """Return the stored note."""
        return self._log.note() if self._log is not None else None

    def may_hold(self, tenant: str, time_s: float) -> bool:
        """Return whether a tenant may have outputs that ended at or before this time."""
        if self._log is None or self._log.failures:
            with self._lock:
                return tenant in self._in_use
        return any(output.time_s <= time_s for output in self._log.load(tenant).outputs)

    @contextmanager
    def deletion(self, tenant: str) -> Iterator[Pool | None]:
        """Yield a tenant's pool, if it is in memory.

        During the block `get` refuses the tenant, so that deleted outputs are not loaded again.
        Other tenants are not affected.

        Raises:
            LimitExceededError: the tenant's data is already being deleted.
        """
        with self._lock:
            self.check_kept(tenant)
            self._deleting.add(tenant)  # before the wait, so that no further load begins
            while tenant in self._busy:
                self._idle.wait()
            pool = self._in_use.get(tenant)
        try:
            yield pool
        finally:
            with self._lock:
                self._deleting.discard(tenant)

    def evict(self, tenant: str) -> bool:
        """Evict a tenant's pool once no session uses it; return whether it was in memory."""
        with self._lock:
            is_loaded = tenant in self._recent
            if is_loaded:
                self._evict(tenant)
            return is_loaded

    def take_limits(self, limits: Limits) -> None:
        """Change the number of tenants; later calls evict pools beyond it.

        Takes no lock, because callers hold the drafter's lock, which elsewhere is taken second.
        """
        self._limits = limits

    @property
    def is_logged(self) -> bool:
        """Whether outputs are also on disk, so that evicted ones can be loaded again."""
        return self._log is not None

    def snapshot(self, directory: Path, lock: Lock) -> int:
        """Copy the log, with the current weights, to a new state directory; return its bytes.

        Args:
            directory: a path that does not exist yet.
            lock: held during drafts.

        Raises:
            NotPossibleError: there is no log.
            StateError: the disk refuses.
        """
        if self._log is None:
            raise NotPossibleError("this service keeps no state: start it with --state")
        for pool in self.all():
            with lock:
                statistics = pool.unlogged()
            if statistics is not None:
                self._log.put_statistics(pool.tenant, statistics)
        return self._log.snapshot(directory)

    def delete_logged(self, scope: Scope) -> None:
        """Remove the log's records of a tenant, or of one origin.

        Raises:
            StateError: the disk refuses.
        """
        if self._log is None:
            return
        if scope.origin:
            self._log.delete_origin(*scope)
        else:
            self._log.delete(scope.tenant)

    def name_vocabulary(self, fingerprint: str) -> None:
        """Store the fingerprint of the tokenizer, which was unknown until now."""
        if self._log is not None:
            self._log.name_vocabulary(fingerprint)

    def close(self) -> None:
        """Write changed statistics to the log, and close it."""
        with self._lock:
            while self._busy:
                self._idle.wait()
            for tenant in list(self._recent):
                self._evict(tenant)
        if self._log is not None:
            self._log.close()

    def _new_pool(self, tenant: str) -> Pool | None:
        """Return a new pool without a log, if there is room for one more."""
        if self._log is not None or len(self._recent) >= self._limits.max_tenants:
            return None
        try:
            pool = self._load(tenant, is_locked=True)
        except LimitExceededError:
            return None
        self._in_use[tenant] = self._recent[tenant] = pool
        return pool

    def _load(self, tenant: str, *, is_locked: bool = False) -> Pool:
        """Return a new pool with as many of the tenant's records from the log as fit."""
        limits = self._limits
        orders = GENERATIONS_LIMITS if self._has_corpus(tenant) else GENERATIONS_ALONE
        charge = None
        if self._ledger is not None:
            least = generations_bytes(0, orders) + POOL_BYTES
            charge = self._ledger.take(tenant, least, is_locked=is_locked)
            charge.is_locked = is_locked
        generations = Generations(
            limits.generations_tokens,
            limits.generations_age_s,
            self._clock,
            orders,
            charge,
        )
        pool = Pool(tenant, generations)
        if self._log is not None:
            kept = self._log.load(tenant)
            generations.extend(kept.outputs)
            pool.weights = from_bytes(kept.statistics)
        if charge is not None:
            charge.is_locked = True
        return pool

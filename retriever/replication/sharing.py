"""Replication as a drafter uses it: publishing outputs and deletions, start and shutdown."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING, Final, Self

from indexer.reader import Vocabulary
from retriever.errors import ReplicationError
from retriever.limits import Limits
from retriever.log.pools import Pools
from retriever.predict.generations import Scope, steady_time
from retriever.predict.pool import Entry
from retriever.replication.consumer import RecordLearner
from retriever.replication.options import ReplicationOptions
from retriever.replication.publisher import Outbox
from retriever.replication.replication_state import Deletions, Position, ReplicationCounts

if TYPE_CHECKING:
    from retriever.replication.replication_threads import Threads

Forget = Callable[[Scope, Callable[[Scope], None]], None]
"""Deletes a scope; calls a function before, while no output can be added."""

_FLUSH_S: Final = 1.0  # 10 ms suffice where the server answers; bounds the delay of a shutdown


class NoReplication:
    """Replicates nothing.

    Attributes:
        counts: of outputs that are replicated.
    """

    def __init__(self) -> None:
        self.counts = ReplicationCounts()

    def start(self, fingerprint: str, vocabulary: Vocabulary | None) -> None:
        """Replicate outputs of this vocabulary from now on."""

    def hold(self, entry: Entry | None) -> None:
        """Queue a remembered output, to be published once it is stored; takes a microsecond."""

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Publish outputs held before the block after it: the block stores them."""
        yield

    def delete(self, scope: Scope) -> None:
        """Publish a deletion; the caller holds the drafter's lock."""

    def keep_position(self) -> None:
        """Store the position in the log for the next process."""

    def shut_down(self) -> None:
        """Stop the threads; publish queued records for at most a second."""


class Replication(NoReplication):
    """Replicates outputs through a Redis server, from `start` on.

    Args:
        options: already checked.
        pools: of the drafter.
        lock: held during drafts.
        limits: of the drafter.
        forget: deletes a scope in the drafter.
    """

    def __init__(
        self, options: ReplicationOptions, pools: Pools, lock: Lock, limits: Limits, forget: Forget
    ) -> None:
        super().__init__()
        self._options = options
        self._pools = pools
        self._deletions = Deletions()
        self._position = Position.resume(pools.note())
        self._outbox = Outbox(
            self._position, self._deletions, options.max_queued_tokens, self.counts
        )
        self._learner = RecordLearner(
            pools,
            lock,
            limits=limits,
            deletions=self._deletions,
            position=self._position,
            forget=lambda scope: forget(scope, self._outbox.withdraw),
            counts=self.counts,
        )
        self._held: deque[Entry] = deque()
        self._running: Threads | None = None

    @classmethod
    def join(
        cls,
        options: ReplicationOptions | None,
        pools: Pools,
        lock: Lock,
        limits: Limits,
        forget: Forget,
    ) -> NoReplication | Self:
        """Return a replication with these options; `NoReplication` without options."""
        return cls(options, pools, lock, limits, forget) if options is not None else NoReplication()

    def start(self, fingerprint: str, vocabulary: Vocabulary | None) -> None:
        """Replicate outputs of this vocabulary from now on."""
        self.keep_position()
        if vocabulary is not None:
            self._learner.vocabulary_size = vocabulary.size
        with _needing_redis():
            from retriever.replication.replication_threads import Threads  # noqa: PLC0415  (an extra)
        self._running = Threads(
            self._options, fingerprint, self._outbox, self._learner, self._position, self.counts
        )

    def hold(self, entry: Entry | None) -> None:
        """Queue a remembered output, to be published once it is stored; takes a microsecond."""
        if entry is not None:
            self._held.append(entry)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Publish outputs held before the block after it: the block stores them."""
        held: list[Entry] = []
        with suppress(IndexError):
            while True:
                held.append(self._held.popleft())
        yield
        for entry in held:
            self._outbox.offer(entry.tenant, entry.output)

    def delete(self, scope: Scope) -> None:
        """Publish a deletion; the caller holds the drafter's lock."""
        now = steady_time()
        self._deletions.add(scope, now)
        self._outbox.delete(scope, now)

    def keep_position(self) -> None:
        """Store the position in the log for the next process."""
        self._pools.put_note(self._position.to_bytes())

    def shut_down(self) -> None:
        """Stop the threads; publish queued records for at most a second."""
        if self._running is None:
            return
        end = time.monotonic() + _FLUSH_S
        while self.counts.connected and not self._outbox.is_empty() and time.monotonic() < end:
            time.sleep(0.005)
        self._running.stop()
        self._running = None
        self.keep_position()


def check_replication(options: ReplicationOptions | None) -> None:
    """Refuse invalid options.

    Raises:
        ReplicationError: the library redis is missing, or the URL cannot be one of a server.
    """
    if options is not None:
        with _needing_redis():
            from retriever.replication.redis_streams import check_url  # noqa: PLC0415  (an extra)
        check_url(options)


@contextmanager
def _needing_redis() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ReplicationError(
            f"outputs are shared by the library {error.name}, which is missing: "
            "run `pip install 'foredraft[redis]'`"
        ) from error

"""A drafter's part in replication: what it publishes, and what it is told."""

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
"""Forgets what is of a scope; before it does, while nothing is remembered, calls a function."""

_FLUSH_S: Final = 1.0  # some 10 ms are enough where the server answers; and an end is not held up


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
        """Take an output that was remembered, to be published once it is kept; a microsecond."""

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Let what was held before the block be published after it, for the block keeps it."""
        yield

    def delete(self, scope: Scope) -> None:
        """Let the others be told to delete a scope; the caller holds the drafter's lock."""

    def keep_position(self) -> None:
        """Let the log keep what the next process must know."""

    def shut_down(self) -> None:
        """End the threads; what waits to be published has a second left."""


class Replication(NoReplication):
    """Replicates outputs through a Redis server, from `start` on.

    Args:
        options: where, and within what bounds; checked.
        pools: of the drafter.
        lock: held while drafts are made.
        limits: of the drafter.
        forget: forgets what the drafter has of a scope.
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
        """Return what replicates as these options say; `NoReplication` where there are none."""
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
        """Take an output that was remembered, to be published once it is kept; a microsecond."""
        if entry is not None:
            self._held.append(entry)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Let what was held before the block be published after it, for the block keeps it."""
        held: list[Entry] = []
        with suppress(IndexError):
            while True:
                held.append(self._held.popleft())
        yield
        for entry in held:
            self._outbox.offer(entry.tenant, entry.output)

    def delete(self, scope: Scope) -> None:
        """Let the others be told to delete a scope; the caller holds the drafter's lock."""
        now = steady_time()
        self._deletions.add(scope, now)
        self._outbox.delete(scope, now)

    def keep_position(self) -> None:
        """Let the log keep what the next process must know."""
        self._pools.put_note(self._position.to_bytes())

    def shut_down(self) -> None:
        """End the threads; what waits to be published has a second left."""
        if self._running is None:
            return
        end = time.monotonic() + _FLUSH_S
        while self.counts.connected and not self._outbox.is_empty() and time.monotonic() < end:
            time.sleep(0.005)
        self._running.stop()
        self._running = None
        self.keep_position()


def check_replication(options: ReplicationOptions | None) -> None:
    """Refuse options by which nothing can be replicated.

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

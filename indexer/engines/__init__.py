"""Engines that run the stages of a build: this process, a pool of processes, or Ray.

An engine maps a function over tasks. The files that a stage writes do not depend on the engine.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from indexer.engines.memory import bytes_taken, describe_size
from indexer.errors import IndexerError

MAX_RETRIES: Final = 2
"""Of a task whose worker died: a worker killed by chance succeeds then, while a task that takes too
much memory fails soon."""

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


class Engine(Protocol):
    """Runs functions over tasks."""

    @property
    def memory_bytes(self) -> int | None:
        """Memory that all calls may take together, or None for no limit."""
        ...

    def map(
        self, function: Callable[[_Task], _Result], tasks: Sequence[_Task], memory_bytes: int
    ) -> Iterator[_Result]:
        """Yield the results of all tasks, in their order.

        Args:
            function: of a module, so that other processes find it; may run twice for a task.
            tasks: what to call it with.
            memory_bytes: most memory of one call, besides the interpreter's.

        Raises:
            IndexerError: as the function raises it, or because processes cannot be kept alive, or
                because one call does not fit into the engine's memory.
        """
        ...


@dataclass(frozen=True, slots=True)
class Serial:
    """Runs all tasks in this process, one after the other.

    Attributes:
        memory_bytes: that the process may take, or None for no limit.
    """

    memory_bytes: int | None = None

    def map(
        self, function: Callable[[_Task], _Result], tasks: Sequence[_Task], memory_bytes: int
    ) -> Iterator[_Result]:
        """See `Engine.map`."""
        if self.memory_bytes is not None and tasks:
            num_that_fit(self.memory_bytes, bytes_taken(), memory_bytes)
        return map(function, tasks)


def check_workers(workers: int) -> None:
    """Check how many tasks an engine may run at once.

    Raises:
        IndexerError: not one.
    """
    if workers < 1:
        raise IndexerError(f"{workers} workers cannot build anything: choose one at least")


def forbid_threads() -> None:
    """Let tokenizers in this process start no threads: there are as many processes as cores."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")


def num_that_fit(limit: int, fixed: int, each: int) -> int:
    """Return how many times `each` fits into `limit` bytes of memory after `fixed`.

    Raises:
        IndexerError: it does not fit once.
    """
    if (fits := (limit - fixed) // each) < 1:
        raise IndexerError(
            f"{describe_size(limit)} of memory is too little, this build takes "
            f"{describe_size(fixed + each)}: allow more with --memory, or choose fewer "
            "--segment-tokens or --max-document-bytes"
        )
    return fits

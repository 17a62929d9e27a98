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
"""Retries of a task whose worker died. If the worker was killed by chance, a retry succeeds. If the
task takes too much memory, it fails soon."""

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


class Engine(Protocol):
    """Runs functions over tasks."""

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of memory that all calls together may take; None for no limit."""
        ...

    def map(
        self, function: Callable[[_Task], _Result], tasks: Sequence[_Task], memory_bytes: int
    ) -> Iterator[_Result]:
        """Yield the results of all tasks, in their order.

        Args:
            function: module-level function, so that other processes find it. It may run twice for a
                task.
            tasks: arguments of the calls.
            memory_bytes: most memory of one call, in addition to the interpreter's memory.

        Raises:
            IndexerError: the function raised it, worker processes keep dying, or one call does not
                fit into the engine's memory.
        """
        ...


@dataclass(frozen=True, slots=True)
class Serial:
    """Runs all tasks in this process, one after another.

    Attributes:
        memory_bytes: memory that this process may take; None for no limit.
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
    """Check the number of tasks that an engine may run at once.

    Raises:
        IndexerError: the number is below one.
    """
    if workers < 1:
        raise IndexerError(f"{workers} workers cannot build anything: choose at least one")


def forbid_threads() -> None:
    """Stop tokenizers in this process from starting threads, because each core has a process."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")


def num_that_fit(limit: int, fixed: int, each: int) -> int:
    """Return how many calls of `each` bytes fit into `limit` bytes after `fixed` bytes are used.

    Raises:
        IndexerError: not even one call fits.
    """
    if (fits := (limit - fixed) // each) < 1:
        raise IndexerError(
            f"{describe_size(limit)} of memory is too little, this build takes "
            f"{describe_size(fixed + each)}: allow more with --memory, or choose fewer "
            "--segment-tokens or --max-document-bytes"
        )
    return fits

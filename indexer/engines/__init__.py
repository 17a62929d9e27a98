"""Where the stages of a build run: in this process, in a pool of processes, or on Ray.

An engine maps a function over tasks; what a stage does is the same everywhere, and so is what it
writes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


class Engine(Protocol):
    """Runs functions over tasks."""

    def map(
        self, function: Callable[[_Task], _Result], tasks: Sequence[_Task], memory_bytes: int
    ) -> Iterator[_Result]:
        """Yield the results of all tasks, in their order.

        Args:
            function: of a module, so that other processes find it; may run twice for a task.
            tasks: what to call it with.
            memory_bytes: what one call takes at most, beside an interpreter.

        Raises:
            IndexerError: as the function raises it, or because processes cannot be kept alive.
        """
        ...


class Serial:
    """Runs all in this process, one task after the other."""

    def map(
        self, function: Callable[[_Task], _Result], tasks: Sequence[_Task], memory_bytes: int
    ) -> Iterator[_Result]:
        """See `Engine.map`."""
        del memory_bytes
        return map(function, tasks)

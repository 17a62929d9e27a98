"""Runs a build on Ray: the same functions run as remote tasks, which Ray schedules."""

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

from indexer.engines import MAX_RETRIES, check_workers, forbid_threads, num_that_fit
from indexer.engines.memory import bytes_taken
from indexer.errors import IndexerError, reason_of

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_INTERPRETER_BYTES: Final = 128 << 20
"""Estimated memory of a Ray worker that has imported what the tasks need."""

_OBJECT_STORE_BYTES: Final = 80 << 20
"""Size of Ray's object store. Results are small, because large data is in files, but Ray requires
75 MiB."""

_AHEAD: Final = 2
"""Tasks to submit to Ray per task that can run, so that a worker always has a next task."""


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Runs tasks on Ray, on a running cluster or on a new one on this machine; an `Engine`.

    The cluster is the one that the environment variable `RAY_ADDRESS` names, or one that runs on
    this machine. Sources, the index and temporary data are files. Their folders must have the same
    paths on all machines of a cluster, as on a network file system.

    Attributes:
        workers: most concurrent tasks.
        memory_bytes: memory that the workers together may take. On a cluster that is started here,
            it includes this process. Ray's own processes do not count; they take about a gigabyte.
    """

    workers: int
    memory_bytes: int

    def __post_init__(self) -> None:
        check_workers(self.workers)

    def map(
        self, function: Callable[[_Task], _Result], tasks: Sequence[_Task], memory_bytes: int
    ) -> Iterator[_Result]:
        """See `Engine.map`."""
        if not tasks:
            return
        each = memory_bytes + _INTERPRETER_BYTES
        fitting = num_that_fit(self.memory_bytes, bytes_taken(), each)
        ray = _connected(self.workers, self.memory_bytes)
        _check_nodes(ray, each)
        remote = ray.remote(num_cpus=1, memory=each, max_retries=MAX_RETRIES)(_call)
        here = Path.cwd()
        calls = (partial(remote.remote, here, _paths_in(task), function, task) for task in tasks)
        try:
            yield from _in_order(ray, calls, min(self.workers, fitting))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, IndexerError):
                raise error.cause from error
            raise
        except ray.exceptions.RayError as error:
            raise IndexerError(f"Ray could not finish the build: {reason_of(error)}") from error


def _connected(workers: int, memory_bytes: int) -> Any:
    """Return Ray, connected to a cluster. A cluster started here ends with this process."""
    try:
        import ray  # noqa: PLC0415  (an extra, and slow to import)
    except ModuleNotFoundError as error:
        raise IndexerError("Ray is missing: run `pip install 'foredraft[ray]'`") from error
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if not ray.is_initialized():
            ray.init(address="auto", **quiet)
    except ConnectionError as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise IndexerError(f"there is no Ray cluster at RAY_ADDRESS={address}") from error
        sizes = {"_memory": memory_bytes, "object_store_memory": _OBJECT_STORE_BYTES}
        ray.init(address="local", num_cpus=workers, include_dashboard=False, **sizes, **quiet)
    return ray


def _check_nodes(ray: Any, each: int) -> None:
    """Check that a task fits on some machine. Otherwise Ray would wait forever."""
    memory = [node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]]
    num_that_fit(int(max(memory, default=0)), 0, each)


def _in_order(ray: Any, calls: Iterator[Callable[[], Any]], most: int) -> Iterator[Any]:
    """Yield results in order. Ray always has a few more tasks than it can run."""
    started: deque[Any] = deque()
    running: list[Any] = []
    try:
        while True:
            for call in islice(calls, most * _AHEAD - len(running)):
                running.append(call())
                started.append(running[-1])
            if not started:
                return
            _, running = ray.wait(running) if running else ([], [])
            while started and started[0] not in running:
                yield ray.get(started.popleft())
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _paths_in(task: Any) -> tuple[Path, ...]:
    """Return those values of a task that are existing paths."""
    values = [getattr(task, field.name) for field in fields(task)] if is_dataclass(task) else []
    return tuple(value for value in values if isinstance(value, Path) and value.exists())


def _call(
    here: Path, paths: Sequence[Path], function: Callable[[_Task], _Result], task: _Task
) -> _Result:
    """Call a function in a worker, in the sender's folder, so that relative paths are the same."""
    forbid_threads()
    for path in (here, *paths):
        if not (here / path).exists():
            raise IndexerError(
                f"a worker on {socket.gethostname()} cannot see {here / path}: sources and index "
                "must be on a file system that all machines of the cluster mount at the same path"
            )
    os.chdir(here)
    return function(task)

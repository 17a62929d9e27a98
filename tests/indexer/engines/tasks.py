"""What the tests of engines have workers do; a module of its own, so that workers find it."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from indexer.errors import SourceError


@dataclass(frozen=True)
class Task:
    number: int
    folder: Path


def square(task: Task) -> int:
    """Return a square, the later ones sooner."""
    time.sleep(0.2 / (task.number + 1))
    return task.number**2


def fail_at_three(task: Task) -> int:
    if task.number == 3:
        raise SourceError("three")
    return task.number


def die_at_first(task: Task) -> int:
    """Die without a word, as the system kills for memory, when a task is met the first time."""
    with suppress(FileExistsError):
        (task.folder / f"{task.number}").touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)
    return task.number


def die_at_two(task: Task) -> int:
    """Die whenever this is task 2; leave a mark each time."""
    (task.folder / f"{task.number}-{os.getpid()}").touch()
    if task.number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return task.number


def sleep_for_ever(task: Task) -> None:
    """Say which process it is, and hold it."""
    (task.folder / f"{os.getpid()}").touch()
    time.sleep(1000)


def count_running(awaited: int, task: Task) -> int:
    """Return how many tasks run at once, a moment after so many have begun or 20 s."""
    begun, running = task.folder / f"begun-{task.number}", task.folder / f"running-{task.number}"
    running.touch()
    begun.touch()
    end = time.monotonic() + 20
    while len(list(task.folder.glob("begun-*"))) < awaited and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)
    count = len(list(task.folder.glob("running-*")))
    running.unlink()
    return count


def environment(_: Task) -> tuple[str | None, str | None]:
    return os.environ.get("TOKENIZERS_PARALLELISM"), os.environ.get("RAYON_NUM_THREADS")


def numbered(count: int, folder: Path) -> list[Task]:
    return [Task(number, folder) for number in range(count)]

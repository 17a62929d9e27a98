import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from indexer.engines import Serial
from indexer.engines.memory import bytes_taken
from indexer.engines.processes import ProcessPool
from indexer.errors import IndexerError, SourceError
from tests.indexer.engines import tasks
from tests.indexer.engines.process_memory import is_alive, members
from tests.indexer.engines.tasks import numbered
from tests.retriever.warm_interpreter import start

GIB = 1 << 30
ROOT = Path(__file__).parents[3]


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_the_order_of_tasks(workers: int, tmp_path: Path) -> None:
    results = ProcessPool(workers, 8 * GIB).map(tasks.square, numbered(7, tmp_path), 1 << 20)
    assert list(results) == [number**2 for number in range(7)]
    assert list(ProcessPool(workers, 8 * GIB).map(tasks.square, [], 1 << 20)) == []


def test_an_error_of_a_task_is_raised_as_it_is(tmp_path: Path) -> None:
    results = ProcessPool(2, 8 * GIB).map(tasks.fail_at_three, numbered(9, tmp_path), 1 << 20)
    with pytest.raises(SourceError, match=r"^three$"):
        list(results)


def test_as_many_tasks_run_at_once_as_fit_into_the_memory(tmp_path: Path) -> None:
    for need, most in [(1 << 20, 3), (3 * GIB, 2), (5 * GIB, 1)]:
        limit = bytes_taken() + 8 * GIB
        folder = tmp_path / str(most)
        folder.mkdir()
        count = partial(tasks.count_running, most)
        results = ProcessPool(3, limit).map(count, numbered(most + 1, folder), need)
        assert max(results) == most


@pytest.mark.parametrize("engine", [ProcessPool(2, GIB), Serial(GIB)])
def test_what_does_not_fit_is_an_error_that_names_the_options(
    engine: ProcessPool | Serial, tmp_path: Path
) -> None:
    with pytest.raises(IndexerError, match=r"1\.0G of memory is too little.* --memory.*tokens"):
        list(engine.map(tasks.square, numbered(2, tmp_path), GIB))


def test_a_worker_that_dies_is_replaced_and_its_task_runs_again(tmp_path: Path) -> None:
    results = ProcessPool(2, 8 * GIB).map(tasks.die_at_first, numbered(5, tmp_path), 1 << 20)
    assert list(results) == [0, 1, 2, 3, 4]
    assert len(list(tmp_path.iterdir())) == 5


def test_a_task_that_kills_its_worker_three_times_is_an_error(tmp_path: Path) -> None:
    results = ProcessPool(2, 8 * GIB).map(tasks.die_at_two, numbered(5, tmp_path), 1 << 20)
    with pytest.raises(IndexerError, match=r"died 3 times at the same task.*fewer --workers"):
        list(results)
    assert len(list(tmp_path.glob("2-*"))) == 3


def test_tokenizers_start_no_threads_in_workers(tmp_path: Path) -> None:
    (seen,) = ProcessPool(1, 8 * GIB).map(tasks.environment, numbered(1, tmp_path), 1 << 20)
    assert seen == ("false", "1")


@pytest.mark.faults
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_the_process_that_started_them(
    end: signal.Signals, tmp_path: Path
) -> None:
    script = (
        "import signal, sys; from pathlib import Path\n"
        "from indexer.engines.processes import ProcessPool\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts us may ignore it\n"
        "from tests.indexer.engines.tasks import Task, sleep_for_ever\n"
        "tasks = [Task(number, Path(sys.argv[1])) for number in range(9)]\n"
        "list(ProcessPool(2, 1 << 33).map(sleep_for_ever, tasks, 1 << 20))\n"
    )
    started = start("-c", script, tmp_path, cwd=ROOT, leads_session=True)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 60)
    workers = [int(path.name) for path in tmp_path.iterdir()]
    assert all(map(is_alive, workers))
    if end is signal.SIGINT:
        os.killpg(started.pid, end)  # as a terminal sends it: to all
    else:
        started.send_signal(end)
    _, said = started.communicate(timeout=60)
    assert said.count("Traceback") == (end is signal.SIGINT)
    wait_until(lambda: not any(map(is_alive, workers)), 5)
    wait_until(lambda: not members(started.pid), 5)


def test_a_pool_has_a_worker() -> None:
    with pytest.raises(IndexerError, match="choose at least one"):
        ProcessPool(0, GIB)

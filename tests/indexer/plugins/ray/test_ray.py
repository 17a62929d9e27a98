"""Building on Ray; `make test-ray` runs this where Ray is installed."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from indexer.engines import Engine, Serial
from indexer.engines.processes import ProcessPool
from indexer.errors import IndexerError, SourceError
from indexer.plugins.ray.ray_cluster import RayCluster
from tests.indexer.engines import tasks
from tests.indexer.engines.corpora import build_and_change, save_byte_tokenizer, write_corpus
from tests.indexer.engines.tasks import Task, numbered

ray = pytest.importorskip("ray", reason="an extra: `make test-ray`")
GIB = 1 << 30

# Ray leaves sockets and files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    yield RayCluster(2, 4 * GIB)
    ray.shutdown()


def test_results_come_in_the_order_of_tasks(cluster: RayCluster, tmp_path: Path) -> None:
    results = cluster.map(tasks.square, numbered(9, tmp_path), 1 << 20)
    assert list(results) == [number**2 for number in range(9)]
    assert list(cluster.map(tasks.square, [], 1 << 20)) == []


def test_an_error_of_a_task_is_raised_as_it_is(cluster: RayCluster, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"^three$"):
        list(cluster.map(tasks.fail_at_three, numbered(9, tmp_path), 1 << 20))


def test_ray_keeps_to_the_memory(cluster: RayCluster, tmp_path: Path) -> None:
    assert max(cluster.map(partial(tasks.count_running, 1), numbered(5, tmp_path), 2 * GIB)) == 1
    with pytest.raises(IndexerError, match=r"too little.*--memory"):
        list(cluster.map(tasks.square, numbered(2, tmp_path), 5 * GIB))


def test_a_worker_that_dies_is_replaced_and_its_task_runs_again(
    cluster: RayCluster, tmp_path: Path
) -> None:
    assert list(cluster.map(tasks.die_at_first, numbered(4, tmp_path), 1 << 20)) == [0, 1, 2, 3]
    with pytest.raises(IndexerError, match="Ray could not finish the build"):
        list(cluster.map(tasks.die_at_two, numbered(4, tmp_path), 1 << 20))


def test_a_folder_that_workers_cannot_see_is_an_error(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    results = cluster.map(tasks.square, [Task(0, tmp_path / "gone")] * 40, 1 << 20)
    next(results)
    (tmp_path / "gone").rename(tmp_path / "elsewhere")
    with pytest.raises(IndexerError, match=r"cannot see .*gone: .* at the same path"):
        list(results)


def test_an_index_is_the_same_wherever_it_was_built(cluster: RayCluster, tmp_path: Path) -> None:
    tokenizer = save_byte_tokenizer(tmp_path / "tokenizer")
    sources = write_corpus(tmp_path / "sources", 9, 1500)
    more = write_corpus(tmp_path / "more", 5, 1500, seed=1)
    killed: list[int] = []
    threading.Thread(target=_kill_workers, args=(2, killed), daemon=True).start()
    engines: list[Engine] = [cluster, Serial(), ProcessPool(2, 4 * GIB)]
    on_ray, here, in_pool = (
        build_and_change(sources, more, tmp_path / f"{number}.index", tokenizer, engine)
        for number, engine in enumerate(engines)
    )
    assert len(killed) == 2
    assert on_ray == here == in_pool


def _kill_workers(number: int, killed: list[int]) -> None:
    """Kill workers of Ray in the middle of a task of a build, one after the other."""
    while len(killed) < number:
        for pid in _working():
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            break
        time.sleep(0.005)


def _working() -> list[int]:
    """Return the processes of Ray that run one of our tasks, by the name that Ray gives them."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdecimal() and b"ray::_call" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found

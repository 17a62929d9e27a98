import errno
import importlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from numba.core.caching import IndexDataCacheFile

from retriever.kernels import compiling
from tests.retriever.kernels.kept_kernels import keep_in, starts_again

ROOT = Path(__file__).parents[3]

SOURCE = """
from retriever.kernels.compiling import kernel

@kernel()
def successor(number):
    return number + 1
"""


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return keep_in(tmp_path / "caches", monkeypatch)


def test_compiling_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "successors.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    compiling._tell_compiling.cache_clear()
    successor = importlib.import_module("successors").successor
    assert caplog.messages == []
    before = compiling.num_compiled()
    assert (successor(1), successor(2.5)) == (2, 3.5)
    (told,) = caplog.messages
    assert told.startswith(
        "compiling kernels for this machine, which are then cached: up to a minute"
    )
    assert compiling.num_compiled() == before + 2
    caplog.clear()
    compiling._tell_compiling.cache_clear()
    del sys.modules["successors"]
    again = importlib.import_module("successors").successor
    assert (again(1), again(2.5)) == (2, 3.5)
    assert caplog.messages == []
    assert compiling.num_compiled() == before + 2


WITHOUT_A_CACHE = """
import sys
sys.path.insert(0, sys.argv[1])
from successors import successor
print(successor(1), successor(2.0))
"""

READS_ALL_AND_WRITES_NOTHING = [
    *("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"),
    *("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"),
]


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="only root can act as another user, by util-linux's setpriv",
)
@pytest.mark.parametrize("stated", [None, "nowhere"])
def test_kernels_compile_where_nothing_can_be_kept(tmp_path: Path, stated: str | None) -> None:
    """That is said, too, in a program that has set up no logging."""
    (tmp_path / "successors.py").write_text(SOURCE)
    variables = {} if stated is None else {"NUMBA_CACHE_DIR": str(tmp_path / stated)}
    done = subprocess.run(
        [*READS_ALL_AND_WRITES_NOTHING, sys.executable, "-c", WITHOUT_A_CACHE, str(tmp_path)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert (done.returncode, done.stdout) == (0, "2 3.0\n"), done.stderr
    (compiling, line) = done.stderr.splitlines()
    assert compiling == "compiling kernels for this machine: up to a minute of CPU time"
    assert "set NUMBA_CACHE_DIR to a folder" in line


def kept_kernel(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    made: Callable[..., int] = importlib.import_module(name).successor
    return made


def test_a_full_disk_costs_the_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = f"No space left on device {tmp_path}"  # each reason is told once in a process

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, reason)

    successor = kept_kernel(tmp_path, "on_a_full_disk", monkeypatch)
    monkeypatch.setattr(IndexDataCacheFile, "save", full)
    assert successor(1) == 2
    assert successor(1.5) == 2.5
    (message,) = (each for each in caplog.messages if not each.startswith("compiling kernels"))
    assert f"cannot be cached ({reason})" in message


def test_a_damaged_cache_is_compiled_over(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept_kernel(tmp_path, "damaged", monkeypatch)(1) == 2
    damaged = list(kept.glob("*/damaged.*.nb?"))
    assert len(damaged) == 2
    for path in damaged:
        path.write_bytes(b"\x80damaged")
    del sys.modules["damaged"]
    assert kept_kernel(tmp_path, "damaged", monkeypatch)(1) == 2


def test_environments_share_kernels_of_the_same_sources_and_versions(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def successor_in(environment: str) -> Callable[..., int]:
        (tmp_path / environment).mkdir(exist_ok=True)
        with monkeypatch.context() as within:
            within.delitem(sys.modules, "shared", raising=False)
            starts_again()
            return kept_kernel(tmp_path / environment, "shared", within)

    assert successor_in("one")(1) == 2
    with compiling.only_kept():
        assert successor_in("other")(1) == 2  # at another place, at another time
    with monkeypatch.context() as newer:
        newer.setattr(compiling, "_VERSIONS", "a newer numba")
        kernel = successor_in("one")
        with pytest.raises(compiling.NotKeptError), compiling.only_kept():
            kernel(1)
        assert kernel(1) == 2
    with compiling.only_kept():
        assert successor_in("one")(1) == 2  # the newer one has left the older one's
    assert len(list(kept.iterdir())) == 2


def test_kernels_that_nobody_uses_are_removed(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, days in (("old", 90), ("used", 1)):
        (kept / name).mkdir(parents=True)
        at = time.time() - days * 24 * 3600
        os.utime(kept / name, (at, at))
    assert kept_kernel(tmp_path, "fresh", monkeypatch)(1) == 2
    assert not (kept / "old").exists()
    assert (kept / "used").exists()


def test_a_change_of_what_a_kernel_calls_is_compiled(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = "from retriever.kernels.compiling import kernel\n"
    caller = f"{begin}from called import add\n@kernel()\ndef twice(x):\n    return add(add(x))\n"
    (tmp_path / "caller.py").write_text(caller)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = []
    for number in (1, 10):
        (tmp_path / "called.py").write_text(
            f"{begin}@kernel()\ndef add(x):\n    return x + {number}\n"
        )
        starts_again()
        found.append(importlib.import_module("caller").twice(5))
        del sys.modules["caller"], sys.modules["called"]
    assert found == [7, 25]
    assert len([*kept.glob("*/caller.*.nbi")]) == 2


PROBABILITIES = """
import numpy as np
from retriever.predict.context import Context
from retriever.predict.searched_corpus import Corpus, tables_of
from retriever.predict.databases import Databases
from retriever.predict.generations import Generations
from retriever.predict.pool import Pool
from retriever.predict.draft import Predictor

rng = np.random.default_rng(5)
predictor, pool = Predictor(32), Pool("", Generations(0))
corpus = Corpus([], tables_of([]))
for _ in range(20):
    databases = Databases(Context(rng.integers(0, 9, 200).astype(np.int32)), pool, corpus)
    print(predictor.draft(databases, 32, 0.0).probabilities.tobytes().hex())
    predictor.commit(databases, rng.integers(0, 9, 2).astype(np.int32))
print(pool.weights.tobytes().hex())
"""


@pytest.mark.soak
def test_kernels_compute_the_same_compiled_or_kept(tmp_path: Path) -> None:
    """To the last bit: the order of a sum does not depend on where its code comes from."""
    printed = [
        subprocess.run(
            [sys.executable, "-c", PROBABILITIES],
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        for _ in range(2)
    ]
    assert ["compiling kernels" in each.stderr for each in printed] == [True, False]
    assert printed[0].stdout == printed[1].stdout
    assert len(printed[0].stdout.splitlines()) == 21

"""Index files that are cut, overwritten or away while an index is drafted from."""

import gc
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path

import numpy as np
import pytest

from indexer.build import BuildOptions, build_from_tokens
from indexer.errors import DamagedIndexError, IndexerError
from indexer.reader import Index, Vocabulary
from retriever.client.strict import RemoteDrafter
from retriever.sessions.cut_files import watched
from retriever.sessions.embedded import EmbeddedDrafter
from tests.patience import free_port
from tests.retriever.conftest import start_service
from tests.retriever.sessions.random_indexes import VOCABULARY, build, document, is_known
from tests.retriever.warm_interpreter import run, start

ROOT = Path(__file__).parents[3]


CUTTING = """
import json, os, sys, time
from contextlib import suppress
from pathlib import Path
import numpy as np
from retriever.errors import ProvenanceError
from retriever.sessions import cut_files
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.explaining import explain
from tests.retriever.sessions.random_indexes import VOCABULARY, is_known, document

cut, other, name, length = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
drafter = EmbeddedDrafter.open_indexes([cut, other])
assert is_known(drafter, 1) and is_known(drafter, 2)
os.truncate(next(cut.glob(name)), length)
rng, deadline = np.random.default_rng(0), time.monotonic() + 20
while drafter.stats().missing_indexes != [cut] and time.monotonic() < deadline:
    tree = drafter.draft_context(document(1, int(rng.integers(120)))[:30], 16)
    assert all(0 <= token < VOCABULARY.size for token in tree.token_ids.tolist())
    with suppress(ProvenanceError):  # of the index that is closed meanwhile
        explain(drafter, document(1, int(rng.integers(120)))[:30], 4)
print(json.dumps({
    "missing": list(map(str, drafter.stats().missing_indexes)),
    "goes_on": is_known(drafter, 2),
    "left": [str(index.path) for index in drafter.stats().indexes],
}), flush=True)
sys.stdin.readline()
print(json.dumps({"refreshed": drafter.refresh(), "back": is_known(drafter, 1)}))
"""


@pytest.mark.parametrize("name", ["segments/*/suffixes", "segments/*/tokens"])
@pytest.mark.parametrize("length", [0, 20_000])
def test_a_file_that_is_cut_costs_its_index_alone(tmp_path: Path, name: str, length: int) -> None:
    """Before, the process ended by SIGBUS without a line."""
    cut, other = build(tmp_path / "cut"), build(tmp_path / "other", 2)
    shutil.copytree(cut, tmp_path / "kept")
    process = start("-c", CUTTING, cut, other, name, length, cwd=ROOT)
    found = process.stdout.readline()
    shutil.copytree(tmp_path / "kept", cut, dirs_exist_ok=True)  # in place
    output, errors = process.communicate("\n", timeout=60)
    assert process.returncode == 0, errors
    assert json.loads(found) == {"missing": [str(cut)], "goes_on": True, "left": [str(other)]}
    assert json.loads(output) == {"refreshed": True, "back": True}
    assert f"a file of {cut} was cut while it was drafted from" in errors


OVERWRITING = """
import os, sys, ctypes, mmap, resource
from pathlib import Path
from retriever.sessions import cut_files
from retriever.sessions.embedded import EmbeddedDrafter
drafter = EmbeddedDrafter.open_indexes([sys.argv[1]])
file = Path(sys.argv[2])
file.write_bytes(bytes(1 << 16))
mapped = mmap.mmap(os.open(file, os.O_RDONLY), 0, access=mmap.ACCESS_READ)
os.truncate(file, 0)
mapped[0]
"""


def test_a_cut_file_of_others_ends_the_process_with_a_line(tmp_path: Path) -> None:
    done = run("-c", OVERWRITING, build(tmp_path / "i"), tmp_path / "f", cwd=ROOT)
    assert done.returncode == -7
    assert done.stderr.startswith("error: a file that is mapped into memory was cut")
    assert done.stderr.count("\n") == 1


WITHOUT_MEMORY = """
import ctypes, os, sys
from pathlib import Path
from retriever.sessions import cut_files
from retriever.sessions.embedded import EmbeddedDrafter
from tests.retriever.sessions.random_indexes import document
drafter = EmbeddedDrafter.open_indexes([sys.argv[1]])
drafter.draft_context(document(1, 7)[:12], 16)
library = ctypes.CDLL("libseccomp.so.2")
library.seccomp_init.restype = ctypes.c_void_p
rules = ctypes.c_void_p(library.seccomp_init(0x7FFF0000))  # SCMP_ACT_ALLOW
call = library.seccomp_syscall_resolve_name(b"mmap")
assert library.seccomp_rule_add(rules, 0x00050000 | 12, call, 0) == 0  # SCMP_ACT_ERRNO(ENOMEM)
assert library.seccomp_load(rules) == 0
os.truncate(next(Path(sys.argv[1]).glob("segments/*/suffixes")), 0)
drafter.draft_context(document(1, 9)[:12], 16)
"""


@pytest.mark.skipif(find_library("seccomp") is None, reason="libseccomp is not installed")
def test_what_is_not_survived_ends_with_a_line_that_names_the_index(tmp_path: Path) -> None:
    path = build(tmp_path / "index")
    done = run("-c", WITHOUT_MEMORY, path, cwd=ROOT)
    assert done.returncode == -7
    assert done.stderr == (
        f"error: a file of the index {path} was cut while it was drafted from, and there was no "
        "memory to continue: restore the index and start again\n"
    )


def test_the_handler_before_is_called_for_what_is_no_index(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", OVERWRITING]
    arguments = [str(build(tmp_path / "index")), str(tmp_path / "file")]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == -7
    assert done.stderr.startswith("Fatal Python error: Bus error")


def test_a_file_that_is_cut_below_its_last_page_is_not_read_behind_its_end(tmp_path: Path) -> None:
    path = build(tmp_path / "index")
    with Index.open(path) as index:
        for array in index.mapped_arrays():
            assert array.nbytes >= 1 << 16
        assert {array.dtype.itemsize for array in index.mapped_arrays()} >= {2, 4}


def test_what_is_watched_ends_with_who_draws_on_it(tmp_path: Path) -> None:
    path = build(tmp_path / "index")
    gc.collect()
    before = watched()
    assert before is not None
    for _ in range(2):
        drafter = EmbeddedDrafter.open_indexes([path])
        build_from_tokens([("d", [1, 2])], path, VOCABULARY, BuildOptions(overwrite=True))
        build(tmp_path / "again").rename(tmp_path / "moved")
        assert drafter.refresh()
        shutil.rmtree(path)
        (tmp_path / "moved").rename(path)
        assert drafter.refresh()
        during = watched()
        assert during is not None
        assert during.num_told == before.num_told + 1
        assert during.num_maps > before.num_maps
        drafter.shut_down()
        del drafter
        gc.collect()
    assert watched() == before


def cut(path: Path) -> None:
    os.truncate(next(path.glob("segments/*/tokens")), 4096)


def take_away(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def put_back(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    build(path)


@pytest.mark.parametrize("damage", [cut, take_away])
def test_an_index_that_cannot_be_opened_can_be_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    path, other = build(tmp_path / "index"), build(tmp_path / "other", 2)
    damage(path)
    with pytest.raises(IndexerError):
        EmbeddedDrafter.open_indexes([path, other])
    drafter = EmbeddedDrafter.open_indexes([path, other], skip_missing=True)
    assert drafter.stats().missing_indexes == [path]
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert str(path) in record.getMessage()
    assert is_known(drafter, 2)
    assert not drafter.refresh()
    assert drafter.stats().refresh_failures == 1
    put_back(path)
    assert drafter.refresh()
    assert drafter.stats().missing_indexes == []
    assert [index.path for index in drafter.stats().indexes] == [path, other]
    assert is_known(drafter, 1)
    assert is_known(drafter, 2)
    drafter.shut_down()


def test_without_a_vocabulary_one_index_must_open(tmp_path: Path) -> None:
    with pytest.raises(IndexerError, match="there is no index"):
        EmbeddedDrafter.open_indexes([tmp_path / "a", tmp_path / "b"], skip_missing=True)


def test_what_is_missing_at_first_must_be_of_the_same_tokenizer(tmp_path: Path) -> None:
    other = build(tmp_path / "other", 2)
    drafter = EmbeddedDrafter.open_indexes([tmp_path / "i", other], skip_missing=True)
    build_from_tokens([("d", [1, 2])], tmp_path / "i", Vocabulary(1000, "cd" * 32))
    assert not drafter.refresh()
    assert drafter.stats().missing_indexes == [tmp_path / "i"]
    drafter.shut_down()


def test_an_index_that_is_held_outlives_its_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = build(tmp_path / "index")
    mapped = EmbeddedDrafter.open_indexes([path])
    with caplog.at_level("INFO"):
        held = EmbeddedDrafter.open_indexes([path], hold_indexes=True)
    assert caplog.messages[0] == f"reading {path} into memory"
    assert caplog.messages[1].startswith(f"{path} is held in memory: ")
    assert not list(held.stats().indexes[0].mapped_arrays())
    before = [mapped.draft_context(document(1, n)[:12], 16) for n in range(20)]
    mapped.shut_down()
    for file in path.rglob("*"):
        if file.is_file():
            os.truncate(file, 0)
    for number, expected in enumerate(before):
        tree = held.draft_context(document(1, number)[:12], 16)
        for name in ("token_ids", "parents", "probabilities", "sources"):
            np.testing.assert_array_equal(getattr(tree, name), getattr(expected, name))
    held.shut_down()


def test_all_who_hold_a_file_share_one_copy(tmp_path: Path) -> None:
    path = build(tmp_path / "index")
    with Index.open(path, hold=True) as one, Index.open(path, hold=True) as two:
        first, second = one.segments[0].suffixes, two.segments[0].suffixes
        assert first.ctypes.data == second.ctypes.data
        with one.reopened() as again:
            assert again.is_held
            assert again.segments[0] is one.segments[0]
        with pytest.raises(ValueError, match="read-only"):
            first[0] = 1


def test_a_file_that_is_cut_before_it_is_held_is_refused(tmp_path: Path) -> None:
    path = build(tmp_path / "index")
    cut(path)
    with pytest.raises(DamagedIndexError, match="has 4096 bytes"):
        Index.open(path, hold=True)


def metric(port: str, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"foredraft_{name} "))


def test_a_service_drafts_on_without_an_index_and_says_so(tmp_path: Path) -> None:
    """One is away at the start, the other is cut while it serves; both come back."""
    away, cut_later = tmp_path / "away", build(tmp_path / "cut", 2)
    shutil.copytree(cut_later, tmp_path / "kept")
    port = str(free_port())
    process, address = start_service(
        *("--address", "127.0.0.1:0", "--metrics-address", port, "--refresh", "0.2"),
        *("--index", str(away), "--index", str(cut_later), "--missing-indexes", "skip"),
    )
    with RemoteDrafter(address, timeout_s=10) as remote:
        assert metric(port, "indexes_missing") == 1
        assert metric(port, "ready") == 1
        for file in cut_later.glob("segments/*/*"):
            os.truncate(file, 0)
        deadline = time.monotonic() + 30
        while metric(port, "indexes_missing") != 2:
            remote.draft_context(document(2, 3)[:12], 16)
            assert time.monotonic() < deadline
        shutil.copytree(tmp_path / "kept", cut_later, dirs_exist_ok=True)
        shutil.copytree(tmp_path / "kept", away)
        while metric(port, "indexes_missing") != 0:
            assert time.monotonic() < deadline
        assert len(remote.list_indexes()) == 2
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"error drafts go without {away}" in errors
    assert f"error a file of {cut_later} was cut while it was drafted from" in errors

"""Which parts of the suite run, with how many cases, and what is said of those left out.

`--part NAME` runs one part, `--part all` everything; by default all run but those that
`tests.suite_parts` names. A test that is named with `::` runs in any case.
"""

import errno
import fcntl
import gc
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
from hypothesis import settings

from tests.deletion.absent_plugins import absent, needed_by
from tests.needed_programs import missing_packages
from tests.suite_parts import PARTS, SEEDS, draw_all_cases, draws_all_cases

ROOT: Final = Path(__file__).parent.parent
ENGINES: Final = ("tests/decoder/engines/", "tests/decoder/plugins/")
ALL: Final = "all"
LEAST_ROOM: Final = 1 << 30
"""Bytes of the folder for temporary files; a run of all tests wrote 0.6 GB at most."""

# Tiny models and kernels compute in one thread: with one worker a core, more threads only wait.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        os.environ.setdefault(_variable, "1")

# No deadline: a case that takes long says that the machine is busy. Few cases are the same in each
# run, so that the same tree passes or fails each time; all cases are new ones in each run.
settings.register_profile("few", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("all", deadline=None, max_examples=100, print_blob=True)

_left_out: Final = pytest.StashKey[Counter[str]]()
_warming: Final = pytest.StashKey["subprocess.Popen[bytes]"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names a part."""
    parser.addoption(
        "--part",
        choices=(*PARTS, SEEDS, ALL),
        help="run this part of the suite alone; all: every part (default: what is of no part)",
    )


class WithoutPlugin(pytest.Module):
    """A file of tests of which none can run, because a plugin is not there."""

    def collect(self) -> NoReturn:
        """Skip all of it."""
        pytest.skip(f"needs {needed_by(self.path)}, which is absent", allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Skip files of tests that need a plugin that is not there."""
    if needed_by(module_path) is None:
        return None
    return WithoutPlugin.from_parent(parent, path=module_path)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a plugin that is not there, or all of them."""
    for marker in item.iter_markers("plugin"):
        missing = absent().intersection(marker.args) if marker.args else absent()
        if missing:
            pytest.skip(f"needs {', '.join(sorted(missing))}, which is absent")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the tests and the number of cases, before any test's module is loaded."""
    if not hasattr(config, "workerinput"):
        _check_room()
    os.environ.setdefault("FOREDRAFT_CACHE", str(ROOT / ".cache" / "foredraft"))
    for part, content in PARTS.items():
        config.addinivalue_line("markers", f"{part}: {content} (--part {part})")
    config.addinivalue_line("markers", "plugin(*names): needs plugins; without names, every one")
    config.addinivalue_line("markers", f"{SEEDS}: draws cases at random; --part {SEEDS} draws all")
    config.stash[_left_out] = Counter()
    part = config.getoption("part")
    if part in {SEEDS, ALL}:
        draw_all_cases()
    settings.load_profile("all" if draws_all_cases() else "few")
    logging.getLogger("asyncio").addFilter(_is_no_closing_queue)
    named = any("::" in argument for argument in config.args)
    if part == ALL or config.option.markexpr or (named and part is None):
        return
    config.option.markexpr = part or f"not ({' or '.join(PARTS)})"


def _check_room() -> None:
    """End at once if the disk is too full for the files of tests."""
    try:
        folder = Path(tempfile.gettempdir())  # it tries to write there
    except FileNotFoundError as error:
        raise pytest.UsageError(f"{error}: name one that is by TMPDIR=FOLDER") from error
    if folder == Path.cwd():
        raise pytest.UsageError("no folder for temporary files can be written: name one by TMPDIR")
    free = shutil.disk_usage(folder).free
    if free < LEAST_ROOM:
        raise pytest.UsageError(
            f"{folder} has {free >> 20} MiB left, and tests write up to {LEAST_ROOM >> 20}: free "
            "some, or name another folder by TMPDIR=FOLDER"
        )


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """What is written can be read at once; that it lasts matters where the power fails alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which still is an error where nothing is open
        yield


def _is_no_closing_queue(record: logging.LogRecord) -> bool:
    """Leave out that a loop of one test found the queue closed that all of a process share.

    grpcio closes it with the last server or channel, from whichever thread collects that, and a
    loop in another thread then reads a closed descriptor: harmless, and no test's own doing.
    """
    error = record.exc_info and record.exc_info[1]
    return not (isinstance(error, OSError) and error.errno == errno.EBADF)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage in what tests load, which stays, and is millions of objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Count what hypothesis draws for to the part of seeds."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(SEEDS)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Note what does not run, by part."""
    for item in items:
        left_out = item.config.stash[_left_out]
        left_out.update(part for part in PARTS if item.get_closest_marker(part))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note what runs with a few cases only."""
    if not draws_all_cases():
        drawn = sum(item.get_closest_marker(SEEDS) is not None for item in session.items)
        session.config.stash[_left_out][SEEDS] = drawn


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that started this worker what was left out."""
    left_out = session.config.stash[_left_out]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a worker says: every one collects all tests, so that one is enough."""
    left_out = getattr(node, "workeroutput", {}).get("left_out", {})
    counted = node.config.stash[_left_out]
    counted |= Counter(left_out)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what was left out, and which command runs it."""
    left_out = config.stash[_left_out]
    skipped = terminalreporter.stats.get("skipped", [])
    engines = sum(report.nodeid.startswith(ENGINES) for report in skipped)
    absent = missing_packages()
    if absent:
        terminalreporter.section("tests were skipped because programs are missing")
        terminalreporter.write_line(f"not installed: {', '.join(absent)}")
        terminalreporter.write_line(f"apt-get install {' '.join(absent.values())}")
    lines = [
        f"make test-{part:9} {left_out[part]:5} tests: {content}"
        for part, content in PARTS.items()
        if left_out[part]
    ]
    if left_out[SEEDS]:
        lines.append(
            f"make test-{SEEDS:9} {left_out[SEEDS]:5} tests: ran with a few of their random cases"
        )
    if engines:
        lines.append(f"make test-{'engines':9} {engines:5} tests: engines that are not installed")
    if lines:
        terminalreporter.section("left out: a release runs all, by `make test-all`")
        for line in lines:
            terminalreporter.write_line(line)


# Kernels are compiled once, beside the workers that load the tests: else each worker, and each
# process that its first tests start, would compile them for itself.


def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin to compile kernels where workers will run the tests."""
    config = session.config
    workers = getattr(config.option, "numprocesses", None)
    if not workers or hasattr(config, "workerinput") or config.option.collectonly:
        return
    lock = ROOT / ".cache" / "kernels.lock"
    lock.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.retriever.kernels.warm_kernels", str(lock)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # it holds the lock
    config.stash[_warming] = process


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Wait, in a worker, until the kernels are compiled."""
    lock = ROOT / ".cache" / "kernels.lock"
    if hasattr(session.config, "workerinput") and lock.exists():
        with lock.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH)
    return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the compiler, should it still run."""
    process = config.stash.get(_warming, None)
    if process is not None:
        process.terminate()
        process.communicate()

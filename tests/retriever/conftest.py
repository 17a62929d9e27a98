"""A small vocabulary, an index on it, and a service in a process of its own."""

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from indexer.build import build_from_tokens
from indexer.reader import Vocabulary
from retriever.operations.logs import JsonLines, TextLines
from retriever.sessions.embedded import EmbeddedDrafter
from tests.retriever.warm_interpreter import WarmProcess, start

VOCABULARY_SIZE = 50
_started: list[WarmProcess] = []


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary(VOCABULARY_SIZE, "ab" * 32)


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory, vocabulary: Vocabulary) -> Path:
    """Forty documents that repeat one another in parts."""
    rng = np.random.default_rng(7)
    phrases = [rng.integers(0, VOCABULARY_SIZE, 12).tolist() for _ in range(15)]
    documents = [
        (f"document-{i}", [t for j in rng.integers(0, 15, 6) for t in phrases[j]])
        for i in range(40)
    ]
    path = tmp_path_factory.mktemp("index") / "corpus"
    build_from_tokens(documents, path, vocabulary)
    return path


@pytest.fixture
def drafter(index: Path) -> Iterator[EmbeddedDrafter]:
    made = EmbeddedDrafter.open_indexes([index])
    yield made
    made.shut_down()


def start_service(*arguments: str) -> tuple[WarmProcess, str]:
    """Start `foredraft serve` and return the process and its address.

    Unless told otherwise it ends without waiting for open sessions.
    """
    process = start("-m", "retriever", "serve", "--drain-s", "0", *arguments)
    _started.append(process)
    line = process.stdout.readline()
    if not line.startswith("serving on "):
        _, errors = process.communicate(timeout=60)
        raise AssertionError(f"the service did not start: {line}{errors}")
    return process, line.removeprefix("serving on ").strip()


def stop_service(process: "WarmProcess | subprocess.Popen[str]") -> None:
    process.terminate()
    process.communicate(timeout=60)


def num_started() -> int:
    """Return how many services were started so far."""
    return len(_started)


def end_services(since: int = 0) -> None:
    """Kill what still runs of the services that were started after so many, paused ones too."""
    for process in _started[since:]:
        process.kill()
        process.wait()


@pytest.fixture(scope="session", autouse=True)
def _no_services_left() -> Iterator[None]:
    """Whatever tests failed, no service outlives them."""
    yield
    end_services()
    _started.clear()


@pytest.fixture(autouse=True)
def _nothing_logs_on() -> Iterator[None]:
    """A service that began in this process would go on to log to what is no longer captured."""
    yield
    for name in (None, "indexer", "retriever"):
        logger = logging.getLogger(name)
        for handler in [*logger.handlers]:
            if isinstance(handler.formatter, (JsonLines, TextLines)):
                logger.removeHandler(handler)
                logger.propagate = True
                logger.setLevel(logging.NOTSET if name else logging.WARNING)


@pytest.fixture(scope="module")
def service(index: Path) -> Iterator[str]:
    """The address of a running service on the index."""
    process, address = start_service("--index", str(index), "--address", "127.0.0.1:0")
    yield address
    stop_service(process)

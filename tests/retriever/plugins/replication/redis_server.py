"""A real Redis server on a free port, in a folder of its own, and drafters that share it."""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from indexer.reader import Vocabulary
from retriever.limits import Limits
from retriever.plugins.replication.options import ReplicationOptions
from retriever.plugins.replication.replication_state import ReplicationCounts
from retriever.sessions.embedded import EmbeddedDrafter
from tests.patience import free_port

PROGRAM = shutil.which("redis-server")
VOCABULARY = Vocabulary(1 << 20, "cd" * 32)
OUTPUTS = f"foredraft:{{{VOCABULARY.fingerprint}}}:outputs"
DELETIONS = f"foredraft:{{{VOCABULARY.fingerprint}}}:deletions"

needs_redis = pytest.mark.skipif(PROGRAM is None, reason="the program redis-server is missing")


@dataclass
class RedisServer:
    """A server that can be killed, started again and paused."""

    folder: Path
    arguments: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(PROGRAM or "redis-server", "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--dir", str(self.folder), "--save", "", "--appendonly", "no"),
                *("--rdbcompression", "no", *self.arguments),
            ],
            stdout=subprocess.DEVNULL,
        )
        soon(self.answers)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def answers(self) -> bool:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self.port)) != 0:
                return False
            probe.sendall(b"PING\r\n")
            return bool(probe.recv(16))

    @contextmanager
    def client(self) -> Iterator[Any]:
        with redis.Redis(port=self.port, protocol=2) as client:
            yield client


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    started = RedisServer(folder)
    started.start()
    yield started
    started.kill()


@contextmanager
def sharing(
    url: str,
    state: Path | None = None,
    limits: Limits | None = None,
    vocabulary: Vocabulary = VOCABULARY,
    **options: Any,
) -> Iterator[EmbeddedDrafter]:
    drafter = EmbeddedDrafter(
        vocabulary=vocabulary,
        state=state,
        limits=limits or Limits(generations_tokens=1 << 14),
        plugins=[ReplicationOptions(url, **{"timeout_s": 1.0, "max_backoff_s": 0.2, **options})],
    )
    try:
        yield drafter
    finally:
        drafter.shut_down()


def soon(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait until it holds."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "it does not hold in time"
        time.sleep(0.01)


def counts(drafter: EmbeddedDrafter) -> ReplicationCounts:
    """What the replication of a drafter has counted."""
    found: ReplicationCounts = drafter.stats().plugins["replication"]
    return found

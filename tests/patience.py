"""Claims about time, on machines that do other things as well, and ports that nobody else takes."""

import os
import socket
from collections.abc import Callable
from functools import wraps
from itertools import count
from typing import Any, Final

import pytest

from tests.retriever.conftest import end_services, num_started

ROUNDS: Final = 5
"""Under a load of four on two cores about one round in ten has a step that comes late."""


def can_be_kept(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test again whose assertions did not hold: one of five rounds must show that they can.

    For what a busy machine may break, such as steps that end at a deadline of 0.1 s. What must
    hold whatever the machine does is checked with `must_hold`, which no further round forgives.
    """

    @wraps(test)
    def in_rounds(**given: Any) -> None:
        folder = given.get("tmp_path")
        for number in range(1, ROUNDS + 1):
            if folder is not None:
                given["tmp_path"] = folder / str(number)
                given["tmp_path"].mkdir()
            started = num_started()
            try:
                test(**given)
            except (AssertionError, TimeoutError):
                end_services(started)
                if number == ROUNDS:
                    raise
            else:
                return

    return in_rounds


def must_hold(holds: bool, what: str) -> None:  # noqa: FBT001  (as `assert`)
    """Fail the test at once where something does not hold."""
    if not holds:
        pytest.fail(what)


# Below the ports that the system gives to whoever asks for any (32,768 and up on Linux), and each
# worker has a range of its own: a port that is free now is free when the service starts.
_FIRST_PORT, _PORTS_EACH, _MOST_WORKERS = 20_000, 1500, 8
_worker: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_numbers: Final = count(os.getpid())


def free_port() -> int:
    """Return a port on 127.0.0.1 that nobody listens on, and that nobody is given by chance."""
    while True:
        offset = next(_numbers) % _PORTS_EACH
        port = _FIRST_PORT + _worker % _MOST_WORKERS * _PORTS_EACH + offset
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def free_address() -> str:
    """Return an address that a service can be started on, again after it was killed as well."""
    return f"127.0.0.1:{free_port()}"

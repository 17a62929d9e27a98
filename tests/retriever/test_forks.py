"""What clients do in a process that is forked off, and when somebody copies or pickles them."""

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from decoder.drafters.following import NoDrafter
from decoder.drafters.fusion import FusedDrafter
from retriever.client.asynchronous import AsyncResilientDrafter
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import RemoteDrafter
from retriever.follower import DraftLimits
from retriever.sessions.embedded import EmbeddedDrafter
from tests.retriever.service.decodes import wait_until

BEGINNING: Final = """
import asyncio, os, sys
import numpy as np
from retriever.client.asynchronous import AsyncResilientDrafter
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest
from retriever.errors import DrafterUnavailableError, NotPossibleError

prompt = np.arange(40, dtype=np.int32) % 7


def step(name, length=41):
    return [DraftRequest(name, np.array([(length - 1) % 7], np.int32), length, 8)]


async def on_a_loop():
    drafter = AsyncResilientDrafter(sys.argv[1], local=False)
    assert await drafter.wait(60)
    await drafter.shut_down()


def end(child):
    assert os.waitpid(child, 0)[1] == 0
"""

STRICT: Final = """
drafter = RemoteDrafter(sys.argv[1], timeout_s=20)
drafter.open("shared", prompt)
assert len(drafter.draft(step("shared"))[0]) >= 7
child = os.fork()
if child == 0:
    drafter.open("own", prompt)
    assert len(drafter.draft(step("own"))[0]) >= 7
    try:
        drafter.draft(step("shared", 42))
    except DrafterUnavailableError as error:
        assert "forked" in str(error)
    else:
        raise AssertionError("the parent's session is drafted for")
    drafter.close("shared")
    os._exit(0)
end(child)
assert len(drafter.draft(step("shared", 42))[0]) >= 7
"""

ON_A_LOOP: Final = """
asyncio.run(on_a_loop())
child = os.fork()
if child == 0:
    try:
        asyncio.run(on_a_loop())
    except NotPossibleError as error:
        assert "spawn" in str(error)
        os._exit(0)
end(child)
asyncio.run(on_a_loop())
"""

FIRST_IN_A_CHILD: Final = """
child = os.fork()
if child == 0:
    asyncio.run(on_a_loop())
    os._exit(0)
end(child)
asyncio.run(on_a_loop())
"""


@pytest.mark.parametrize("script", [STRICT, ON_A_LOOP, FIRST_IN_A_CHILD])
def test_a_client_made_before_a_fork_goes_on_or_says_why_not(service: str, script: str) -> None:
    command = [sys.executable, "-c", BEGINNING + script, service]
    done = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


OUTLIVING: Final = """
from pathlib import Path
from retriever.client.resilient import ResilientDrafter
from retriever.sessions.embedded import EmbeddedDrafter

drafters = [
    RemoteDrafter(sys.argv[1], timeout_s=20),
    ResilientDrafter(sys.argv[1], deadline_s=20),
    EmbeddedDrafter(),
]
for drafter in drafters:
    drafter.open("before", prompt)
    assert len(drafter.draft(step("before"))[0]) >= 7
parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:
        pass
    sizes = []
    for drafter in drafters:
        drafter.open("own", prompt)
        sizes.append(len(drafter.draft(step("own"))[0]))
        drafter.close("own")
    Path(sys.argv[2] + ".part").write_text(str(sizes))
    os.rename(sys.argv[2] + ".part", sys.argv[2])
os._exit(0)
"""


@pytest.mark.faults
def test_a_child_that_outlives_its_parent_goes_on(service: str, tmp_path: Path) -> None:
    found = tmp_path / "sizes"
    command = [sys.executable, "-c", BEGINNING + OUTLIVING, service, str(found)]
    environment = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "1"}
    with subprocess.Popen(command, env=environment) as process:
        assert process.wait(timeout=120) == 0
    assert wait_until(found.exists)
    assert min(json.loads(found.read_text())) >= 7


NOWHERE: Final = "unix:/nowhere"
MADE: Final[dict[str, Callable[[], Any]]] = {
    "EmbeddedDrafter": EmbeddedDrafter,
    "FusedDrafter": lambda: FusedDrafter([NoDrafter()], DraftLimits(50, 50)),
    "RemoteDrafter": lambda: RemoteDrafter(NOWHERE),
    "ResilientDrafter": lambda: ResilientDrafter(NOWHERE),
    "AsyncResilientDrafter": lambda: AsyncResilientDrafter(NOWHERE),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused_with_what_to_do_instead(
    name: str, copied: Callable[[Any], Any]
) -> None:
    with pytest.raises(TypeError, match=f"{name} belongs .* make one in each process"):
        copied(MADE[name]())

"""Revocations at once, while a service runs: whether one is lost, and when the service notices.

    python -m benchmarks.serving.revocation --rounds 50 --json

In each round six processes revoke a token each at the same moment, and two others add one. Rounds
go through the modes that a service accepts for its access file, and through who writes it. Where
root runs this, the service runs as another user, and files are written by root and by that user,
also in a folder that it cannot write. Meanwhile every token calls, by unary calls and on an open
stream; and a stream of each revoked one waits and says its next word a second after the revocation.
No revoked token may be served then, and no other one may be refused at any time.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Final

import grpc
import typer
from grpc import aio

from benchmarks.comparison import circumstances
from retriever.security.access import add_token, name_of, read_access, remove
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub

WITHIN_S: Final = 1.0
"""What is promised: within this time a revocation counts, in seconds."""

_OTHER: Final = 10001
_NUM_REVOKED: Final = 6
_NUM_ADDED: Final = 2
_PERIOD_S: Final = 0.05  # of each caller: some 400 calls a second in all
_REFUSED: Final = grpc.StatusCode.UNAUTHENTICATED
_numbers: Final = count()


@dataclass(frozen=True, slots=True)
class Case:
    """Whose a file is, and who writes it.

    Attributes:
        writer: number of the user that revokes.
        owner: number of the file's user.
        mode: of the file.
        folder_mode: of its folder, which is root's where root runs this.
    """

    writer: int
    owner: int
    mode: int
    folder_mode: int = 0o777

    @property
    def name(self) -> str:
        """The case in words."""
        place = "" if self.folder_mode & 0o2 else ", in a folder that it cannot write"
        return f"user {self.writer} writes user {self.owner}'s {self.mode:04o}{place}"


def cases(user: int) -> list[Case]:
    """Return all that there are for a service of a user."""
    own = os.geteuid()
    modes = (0o600, 0o640, 0o400, 0o440)
    if own == user:
        return [Case(own, own, mode) for mode in modes]
    return [
        *(Case(0, 0, mode) for mode in (0o640, 0o440)),  # readable for the service by its group
        *(Case(writer, user, mode) for writer in (0, user) for mode in modes),
        *(Case(user, user, mode, 0o755) for mode in (0o600, 0o640)),
    ]


@dataclass(slots=True)
class Measured:
    """What was seen.

    Attributes:
        last_served_s: for each revoked token, when it was answered for the last time, in seconds
            after its revocation was reported.
        served_late: answers to calls of revoked tokens that began more than `WITHIN_S` after it.
        refused: refusals of tokens that are valid.
        calls: answers to valid tokens.
        wrong: what else went wrong.
    """

    last_served_s: list[float] = field(default_factory=list)
    served_late: int = 0
    refused: int = 0
    calls: int = 0
    wrong: list[str] = field(default_factory=list)


def _work(user: int, calls: Connection) -> None:
    """Make changes as another user, each at the time that is told."""
    if user != os.geteuid():
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    while (told := calls.recv()) is not None:
        at_s, path, revoked = told
        time.sleep(max(0.0, at_s - time.monotonic()))
        try:
            done = remove(path, revoked).name if revoked else add_token(path, "added")
        except Exception as error:  # noqa: BLE001  (reported by who counts)
            done = f"{type(error).__name__}: {error}"
        calls.send((time.monotonic(), done))


@contextmanager
def _workers(user: int, number: int) -> Iterator[list[Connection]]:
    """Run processes of a user during the block."""
    context, ours, processes = get_context("fork"), [], []  # nothing runs here yet
    for _ in range(number):
        here, there = context.Pipe()
        processes.append(context.Process(target=_work, args=(user, there)))
        processes[-1].start()
        ours.append(here)
    try:
        yield ours
    finally:
        for connection in ours:
            connection.send(None)
        for process in processes:
            process.join()


@contextmanager
def _service(access: Path, folder: Path, python: Path, user: int) -> Iterator[str]:
    """Run a service as a user; give its address."""
    command = [python, "-m", "retriever", "serve", "--address", "127.0.0.1:0", "--access", access]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path])),
    }
    is_other = user != os.geteuid()
    if is_other:
        (cache := folder / "cache").mkdir()
        os.chown(cache, user, user)
        variables |= {"HOME": str(cache), "NUMBA_CACHE_DIR": str(cache)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=variables,
            user=user if is_other else None,
            group=user if is_other else None,
            extra_groups=[] if is_other else None,
        )
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line.startswith("serving on "):
            raise SystemExit(f"the service did not start: {(folder / 'log').read_text()}")
        yield line.removeprefix("serving on ").strip()
    finally:
        process.terminate()
        process.communicate(timeout=30)


class Caller:
    """Calls with a token, again and again, and notes when it was answered.

    Attributes:
        answered: begin and end of each call that was answered, in seconds.
        refused: calls that were refused for their credentials.
    """

    def __init__(self, channel: aio.Channel, token: str) -> None:
        self._stub: Any = RetrieverServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {token}"),)
        self.answered: list[tuple[float, float]] = []
        self.refused = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, *, waits: bool) -> Callable[[], Awaitable[None]]:
        """Call from now on, until the token is refused; give what speaks on a stream that waits."""
        self._tasks = [asyncio.create_task(self._call()), asyncio.create_task(self._step())]
        if not waits:
            return _nothing
        step = await self._opened()

        async def speak() -> None:
            with suppress(aio.AioRpcError):
                await self._timed(step)

        await speak()
        return speak

    async def end(self) -> None:
        """Stop calling."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def is_admitted(self) -> bool:
        """Make one call."""
        try:
            await self._stub.ListIndexes(pb.ListIndexesRequest(), metadata=self._metadata)
        except aio.AioRpcError as error:
            if error.code() is not _REFUSED:
                raise
            return False
        return True

    async def _timed(self, call: Callable[[], Awaitable[Any]]) -> None:
        began_s = time.monotonic()
        try:
            await call()
        except aio.AioRpcError as error:
            if error.code() is not _REFUSED:
                raise
            self.refused += 1
            raise
        self.answered.append((began_s, time.monotonic()))

    async def _call(self) -> None:
        with suppress(aio.AioRpcError):
            while True:
                request = pb.DraftRequest(context=[1, 2, 3])
                await self._timed(lambda: self._stub.Draft(request, metadata=self._metadata))  # noqa: B023
                await asyncio.sleep(_PERIOD_S)

    async def _step(self) -> None:
        with suppress(aio.AioRpcError):
            step = await self._opened()
            while True:
                await self._timed(step)
                await asyncio.sleep(_PERIOD_S)

    async def _opened(self) -> Callable[[], Awaitable[Any]]:
        """Open a session on a stream of its own; give its steps."""
        stream, name, at = self._stub.DraftStream(metadata=self._metadata), f"s{next(_numbers)}", 0
        opening = [pb.OpenSessionRequest(session_id=name, prompt=[1, 2, 3])]

        async def step() -> None:
            nonlocal at
            message = pb.DraftStreamRequest(
                sequence_number=at + 1,
                openings=[] if at else opening,
                steps=[pb.SessionStep(session_id=name, length=3, budget_nodes=4)],
            )
            at += 1
            with suppress(asyncio.InvalidStateError):  # the stream has ended: read why
                await stream.write(message)
            response = await stream.read()
            if response is aio.EOF:
                raise aio.AioRpcError(
                    await stream.code(), aio.Metadata(), aio.Metadata(), await stream.details()
                )
            if response.statuses:
                raise RuntimeError(f"a step was refused: {response.statuses}")

        return step


async def _nothing() -> None:
    """Stand for a stream that does not wait."""


class Trial:
    """Rounds against a running service.

    Args:
        access: its file.
        channel: to it.
        writers: processes by their user.
        user: of the service.
    """

    def __init__(
        self, access: Path, channel: aio.Channel, writers: dict[int, list[Connection]], user: int
    ) -> None:
        self.measured = Measured()
        self._user = user
        self._access = access
        self._channel = channel
        self._writers = writers
        self._valid = [add_token(access, f"valid-{at}") for at in range(3)]

    async def run(self, rounds: int) -> None:
        """Run rounds through all cases."""
        kept = [Caller(self._channel, token) for token in self._valid]
        await self._await_admission(self._valid)
        for caller in kept:
            await caller.begin(waits=False)
        found = cases(self._user)
        for at in range(rounds):
            await self._round(found[at % len(found)])
        for caller in kept:
            await caller.end()
            self.measured.calls += len(caller.answered)
            self.measured.refused += caller.refused

    async def _round(self, case: Case) -> None:
        tokens = [add_token(self._access, f"revoked-{at}") for at in range(_NUM_REVOKED)]
        self._set(case)
        await self._await_admission(tokens)
        callers = [Caller(self._channel, token) for token in tokens]
        speak = [await caller.begin(waits=True) for caller in callers]
        await asyncio.sleep(3 * _PERIOD_S)
        names = [name_of(token) or "" for token in tokens]
        done = await self._change(case, [*names, *[""] * _NUM_ADDED])
        for name, (_, said) in zip(names, done, strict=False):
            if said != name:
                self.measured.wrong.append(f"{case.name}: {said}")
        await asyncio.sleep(max(0.0, max(at_s for at_s, _ in done) + WITHIN_S - time.monotonic()))
        await asyncio.gather(*(each() for each in speak))
        await asyncio.sleep(4 * _PERIOD_S)
        for caller, (at_s, _) in zip(callers, done, strict=False):
            await caller.end()
            last_s = max((end for _, end in caller.answered), default=at_s)
            self.measured.last_served_s.append(last_s - at_s)
            late = [began for began, _ in caller.answered if began >= at_s + WITHIN_S]
            self.measured.served_late += len(late)
            if await caller.is_admitted():
                self.measured.served_late += 1
        added = [said for _, said in done[_NUM_REVOKED:]]
        self._check(case, {*names}, added)
        for token in added:
            if not await Caller(self._channel, token).is_admitted():
                self.measured.refused += 1
        self._valid += added

    def _set(self, case: Case) -> None:
        """Give the file its owner and mode."""
        if os.geteuid() == 0:
            os.chown(self._access, case.owner, self._user)
        self._access.chmod(case.mode)
        self._access.parent.chmod(case.folder_mode)

    async def _change(self, case: Case, revoked: list[str]) -> list[tuple[float, str]]:
        """Have processes revoke and add at one moment; return when each was done, and what."""
        at_s = time.monotonic() + 0.05
        writers = self._writers[case.writer]
        for writer, name in zip(writers, revoked, strict=True):
            writer.send((at_s, self._access, name))
        done: list[tuple[float, str]] = await asyncio.gather(
            *(asyncio.to_thread(each.recv) for each in writers)
        )
        return done

    async def _await_admission(self, tokens: list[str]) -> None:
        """Wait until the service knows tokens."""
        for token in tokens:
            caller, until_s = Caller(self._channel, token), time.monotonic() + 5
            while not await caller.is_admitted():
                if time.monotonic() > until_s:
                    raise SystemExit("the service does not admit a token that was added")
                await asyncio.sleep(_PERIOD_S)

    def _check(self, case: Case, revoked: set[str], added: list[str]) -> None:
        """Check the file after a round."""
        found, listed = self._access.stat(), read_access(self._access, by_operator=True).tokens
        names = {name_of(token) or "" for token in (*self._valid, *added)}
        if revoked & set(listed):
            self.measured.wrong.append(f"{case.name}: a revoked token stays in the file")
        if names - set(listed):
            self.measured.wrong.append(f"{case.name}: a valid token is lost")
        if (found.st_uid, found.st_mode & 0o777) != (case.owner, case.mode):
            self.measured.wrong.append(f"{case.name}: {found.st_uid} {found.st_mode:o} afterwards")


def revoked(rounds: int, python: Path, user: int) -> dict[str, Any]:
    """Return what rounds of revocations show."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (access := folder / "files" / "access.jsonl").parent.mkdir()
        access.touch(0o600)
        if user != os.geteuid():
            os.chown(access, user, user)
        with ExitStack() as stack:
            writers = {
                writer: stack.enter_context(_workers(writer, _NUM_REVOKED + _NUM_ADDED))
                for writer in sorted({case.writer for case in cases(user)})
            }
            address = stack.enter_context(_service(access, folder, python, user))
            measured = asyncio.run(_tried(access, address, writers, user, rounds))
    times = sorted(measured.last_served_s)
    return {
        **circumstances(),
        "rounds": rounds,
        "revoked": len(times),
        "cases": [case.name for case in cases(user)],
        "last_served_s": {
            "p50": round(statistics.median(times), 3),
            "max": round(times[-1], 3),
        },
        "served_after_1s": measured.served_late,
        "answers_to_valid": measured.calls,
        "valid_refused": measured.refused,
        "wrong": measured.wrong,
    }


async def _tried(
    access: Path, address: str, writers: dict[int, list[Connection]], user: int, rounds: int
) -> Measured:
    async with aio.insecure_channel(address) as channel:
        trial = Trial(access, channel, writers, user)
        await trial.run(rounds)
    return trial.measured


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of six revocations at once.")] = 50,
    python: Annotated[
        Path,
        typer.Option(help="Runs the service; as root, one that another user may run, too."),
    ] = Path(sys.executable),
    user: Annotated[
        int | None,
        typer.Option(help="Number of the service's user. Default: 10001 for root, else one's own."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on one line.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
) -> None:
    """Revoke tokens of a running service; exit with 1 if one is served or a valid one refused."""
    own = os.geteuid()
    figures = revoked(rounds, python, (own or _OTHER) if user is None else user)
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=None if as_json else 1))
    failed = figures["served_after_1s"] or figures["valid_refused"] or figures["wrong"]
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    typer.run(main)

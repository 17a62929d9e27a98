"""Processes that start warm: forked off one that has imported the packages and loaded the kernels.

A command of ours imports for a second or two before it does anything, and a service loads its
kernels for another one. Its process is as good if it is forked behind all that: it has signals,
descriptors, memory and an end of its own, at which it leaves what it has in memory to the system
instead of taking each object apart, which takes longer than most commands. What is tested of the
start itself (imports, variables that libraries read, compilation, limits) takes an interpreter of
its own, by `subprocess`.
"""

import atexit
import gc
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import import_module
from json import dumps, loads
from pathlib import Path
from select import select
from threading import Lock
from time import monotonic
from typing import IO, Final, Self

ROOT: Final = Path(__file__).parents[2]
_NUMBER: Final = struct.Struct("i")
_LENGTH: Final = struct.Struct("q")


class WarmProcess:
    """A process that started warm; as `subprocess.Popen` of text.

    Attributes:
        args: its command line, as Python is given it.
        pid: its number.
        stdin: what it reads.
        stdout: what it writes.
        stderr: what it writes of errors.
        returncode: its status, the negative number of the signal that ended it; None so far.
    """

    def __init__(self, args: tuple[str, ...], ends: tuple[int, int, int], status: int) -> None:
        self.args = args
        self.stdin: IO[str] = os.fdopen(ends[0], "w", encoding="utf-8")
        self.stdout: IO[str] = os.fdopen(ends[1], encoding="utf-8")
        self.stderr: IO[str] = os.fdopen(ends[2], encoding="utf-8")
        self.returncode: int | None = None
        self._status = status
        self.pid: int = _NUMBER.unpack(os.read(status, _NUMBER.size))[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.wait()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        for each in (self.stdin, self.stdout, self.stderr):
            with suppress(BrokenPipeError):
                each.close()

    def poll(self) -> int | None:
        """Return the status where it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the status, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it runs on after so many seconds.
        """
        if self.returncode is None:
            if not select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            (status,) = _NUMBER.unpack(os.read(self._status, _NUMBER.size))
            os.close(self._status)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def communicate(self, given: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Return what it writes until it ends, on standard output and as errors."""
        end = None if timeout is None else monotonic() + timeout
        with ThreadPoolExecutor(2) as readers:
            outputs = [readers.submit(each.read) for each in (self.stdout, self.stderr)]
            with suppress(BrokenPipeError):
                self.stdin.write(given)
                self.stdin.close()
            try:
                self.wait(None if end is None else end - monotonic())
            except subprocess.TimeoutExpired:
                self.kill()  # or its readers would wait on
                raise
            out, err = (each.result() for each in outputs)
        self._close()
        return out, err

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def start(
    *arguments: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    leads_session: bool = False,
) -> WarmProcess:
    """Start what `python ARGUMENTS` would: `-m MODULE`, `-c CODE` or a file, and its arguments.

    Args:
        arguments: the command line behind the interpreter.
        env: all its variables; None for those of this process.
        cwd: where it runs; None for where this process does.
        leads_session: whether it leads a session of its own; what it starts is of its group.
    """
    words = tuple(map(str, arguments))
    asked = dumps(
        [words, dict(os.environ if env is None else env), str(cwd or Path.cwd()), leads_session]
    )
    pipes = [os.pipe() for _ in range(4)]
    theirs = [pipes[0][0], *(pipe[1] for pipe in pipes[1:])]
    ours = pipes[0][1], pipes[1][0], pipes[2][0]
    with _starting:
        content = asked.encode()
        socket.send_fds(_template(), [_LENGTH.pack(len(content))], theirs)
        _template().sendall(content)
    for each in theirs:
        os.close(each)
    return WarmProcess(words, ours, pipes[3][0])


def run(
    *arguments: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    given: str = "",
    timeout_s: float = 300,
) -> "subprocess.CompletedProcess[str]":
    """Run what `python ARGUMENTS` would to its end."""
    process = start(*arguments, env=env, cwd=cwd)
    out, err = process.communicate(given, timeout_s)
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


_starting: Final = Lock()


@cache
def _template() -> socket.socket:
    """Start the process that others are forked off; it ends with this one."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.retriever.warm_interpreter", str(theirs.fileno())],
        cwd=ROOT,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# What follows runs in the template, and in what is forked off it.


def _warm() -> None:
    """Import what commands need, and load the kernels, without starting a thread."""
    from retriever.commands import app  # noqa: F401, PLC0415  (the names of all commands)
    from retriever.sessions.cold_start import warm_drafts, warm_rare  # noqa: PLC0415

    for name in ("serve", "config", "health", "info", "access", "explain"):
        import_module(f"retriever.commands.{name}_command")
    for name in ("admin", "replay"):
        with suppress(ModuleNotFoundError):  # a plugin may be absent
            import_module(f"retriever.plugins.{name}.{name}_command")
    import_module("indexer.commands")
    import_module("foredraft.program")
    import_module("grpc.experimental")
    warm_drafts([2])
    warm_rare()
    gc.collect()
    gc.freeze()  # or the first collection in each child copies every page


def _serve(asked: socket.socket) -> Callable[[], None]:
    """Fork off what is asked for; return, in each such process, what it is to do."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    while True:
        head, descriptors, _, _ = socket.recv_fds(asked, _LENGTH.size, 4)
        if not head:
            os._exit(0)
        (length,) = _LENGTH.unpack(head)
        content = b""
        while len(content) < length:
            content += asked.recv(length - len(content))
        if os.fork() == 0:
            asked.close()
            if (act := _kept(content, descriptors)) is not None:
                return act
            os._exit(0)
        for each in descriptors:
            os.close(each)


def _kept(content: bytes, descriptors: list[int]) -> Callable[[], None] | None:
    """Fork once more; tell the number and the status of the child, which gets what it does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, status = descriptors
    if pid := os.fork():
        for each in standard:
            os.close(each)
        os.write(status, _NUMBER.pack(pid))
        _, ended = os.waitpid(pid, 0)
        os.write(status, _NUMBER.pack(ended))
        return None
    os.close(status)
    for number, each in enumerate(standard):
        os.dup2(each, number)
        os.close(each)
    words, variables, folder, leads_session = loads(content)
    if leads_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    return lambda: _interpret_to_the_end(words)


def _interpret_to_the_end(words: list[str]) -> None:
    """Run a command line and end: threads are awaited and what is registered for the end is done.

    Where something is left to be said (a traceback, a text as status, output that cannot be
    written, Ctrl-C), the interpreter ends as ever.
    """
    status = 0
    try:
        _interpret(words)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        status = ended.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for each in (sys.stdout, sys.stderr):
            each.flush()
    except (OSError, ValueError):
        sys.exit(status)
    os._exit(status & 0xFF)


def _interpret(words: list[str]) -> None:
    """Run a command line as the interpreter would."""
    kind, *rest = words
    folder = {"-c": "", "-m": str(Path.cwd())}
    sys.path[0] = folder.get(kind, str(Path(kind).parent))
    if kind == "-m":
        sys.argv = rest
        sys.modules.pop(rest[0], None)  # it was not imported, but is run
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)  # noqa: S102  (a test's own)
    else:
        sys.argv = words
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _warm()
    _serve(socket.socket(fileno=int(sys.argv[1])))()

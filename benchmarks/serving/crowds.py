"""A service and its crowds: thousands of tenants, connections that say nothing, indexes attached.

Each checkout has a service of its own. A victim drafts all the time; told are its times alone and
beside each crowd, what the crowd itself took, and the service's memory. Other checkouts are
measured by `--against`, one after the other: a crowd takes the whole machine.
"""

import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import grpc
import numpy as np
import typer

from benchmarks.comparison import circumstances

HERE: Final = Path(__file__).resolve().parents[2]
_TOKENS: Final = 6_000_000  # of the index that is attached: some 50 MB
_VOCABULARY: Final = 32_000
_SERVING: Final = "serving on "
_FEW: Final = 50  # tokens in an access file while it is made
_AT_ONCE: Final = 16
_LONG_S: Final = 120.0


def _indexes(folder: Path) -> None:
    """Make a small index, and the one that is attached."""
    from indexer.build import build_from_tokens  # noqa: PLC0415  (of the checkout that is measured)
    from indexer.reader import Vocabulary  # noqa: PLC0415

    rng, vocabulary = np.random.default_rng(1), Vocabulary(_VOCABULARY, "0" * 64)
    for name, num_tokens in (("small", 100_000), ("large", _TOKENS)):
        documents = rng.zipf(1.3, (num_tokens // 1000, 1000)) % _VOCABULARY
        named = ((str(at), each) for at, each in enumerate(documents.astype(np.int32)))
        build_from_tokens(named, folder / name, vocabulary)


def _access(folder: Path, num_tenants: int) -> list[str]:
    """Write an access file; return the tokens of its tenants."""
    from retriever.security.access import Scope, add_token  # noqa: PLC0415

    tokens: list[str] = []
    lines = bytearray()
    for begin in range(0, num_tenants, _FEW):
        part = folder / f"part-{begin}"
        tokens += [add_token(part, f"tenant-{begin + at}") for at in range(_FEW)]
        lines += part.read_bytes()
        part.unlink()
    operator = folder / "operator"
    tokens.append(add_token(operator, "", [Scope.ADMIN]))
    access = folder / "access"
    access.touch(0o600)
    access.write_bytes(bytes(lines) + operator.read_bytes())
    return tokens


class Measured:
    """A service, and what is asked of it."""

    def __init__(self, folder: Path, tokens: list[str], address: str, process_id: int) -> None:
        from retriever.v1 import retriever_pb2 as pb  # noqa: PLC0415
        from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub  # noqa: PLC0415

        self._folder = folder
        self._tokens = tokens
        self._address = address
        self._process_id = process_id
        self._pb: Any = pb
        self._channel = grpc.insecure_channel(address)
        self._stub: Any = RetrieverServiceStub(self._channel)
        self._context = np.random.default_rng(2).integers(0, _VOCABULARY, 200).tolist()

    def alone(self) -> dict[str, float]:
        """Return the victim's times with nobody else."""
        return self._beside(lambda: time.sleep(5.0))

    def tenants(self) -> dict[str, float]:
        """Have each tenant open a session and close it with an output."""

        def one(number: int) -> float:
            credential = self._metadata(self._tokens[number])
            began_s = time.perf_counter()
            prompt = self._context[:100]
            asked = self._pb.OpenSessionRequest(session_id="s", prompt=prompt)
            self._stub.OpenSession(asked, metadata=credential, timeout=_LONG_S)
            ended = self._pb.CloseSessionRequest(session_id="s", new_token_ids=prompt)
            self._stub.CloseSession(ended, metadata=credential, timeout=_LONG_S)
            return time.perf_counter() - began_s

        times: list[float] = []

        def crowd() -> None:
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                times.extend(threads.map(one, range(1, len(self._tokens) - 1)))

        found = self._beside(crowd)
        return found | {"crowd_ms": round(1e3 * statistics.median(times), 2)}

    def half_open(self, count: int) -> dict[str, float]:
        """Hold connections that say nothing."""
        host, _, port = self._address.rpartition(":")
        held: list[socket.socket] = []

        def crowd() -> None:
            held.extend(socket.create_connection((host, int(port))) for _ in range(count))
            time.sleep(5.0)

        found = self._beside(crowd)
        for each in held:
            each.close()
        return found

    def attached(self) -> dict[str, float]:
        """Attach and detach 50 MB beside sixteen that draft all the time."""
        from retriever.v1 import admin_pb2 as admin  # noqa: PLC0415
        from retriever.v1.admin_pb2_grpc import AdminServiceStub  # noqa: PLC0415

        times: list[float] = []
        path = str(self._folder / "large")
        operator = self._metadata(self._tokens[-1])
        with grpc.insecure_channel(f"unix:{self._folder}/admin") as channel:
            stub: Any = AdminServiceStub(channel)

            def crowd() -> None:
                with self._drafting(_AT_ONCE):
                    time.sleep(2.0)
                    for _ in range(5):
                        began_s = time.perf_counter()
                        stub.AttachIndex(admin.AttachIndexRequest(path=path), metadata=operator)
                        times.append(time.perf_counter() - began_s)
                        stub.DetachIndex(admin.DetachIndexRequest(path=path), metadata=operator)

            found = self._beside(crowd)
        slowest = round(max(times), 2)
        return found | {"attach_s": round(statistics.median(times), 2), "slowest_s": slowest}

    def close(self) -> None:
        """Leave the service."""
        self._channel.close()

    def _beside(self, crowd: Callable[[], None]) -> dict[str, float]:
        """Return the victim's times while a crowd does something, and the memory afterwards."""
        is_over, times = threading.Event(), list[float]()
        victim = threading.Thread(target=self._draft, args=[0, is_over, times])
        victim.start()
        began_s = time.perf_counter()
        crowd()
        took_s = time.perf_counter() - began_s
        is_over.set()
        victim.join()
        median, tail = np.quantile(times, (0.5, 0.99)) * 1e3
        status = Path(f"/proc/{self._process_id}/status").read_text()
        kilobytes = int(status.partition("VmRSS:")[2].split()[0])
        return {
            "p50_ms": round(float(median), 2),
            "p99_ms": round(float(tail), 2),
            "took_s": round(took_s, 2),
            "resident_mb": round(kilobytes / 1e3, 1),
        }

    @contextmanager
    def _drafting(self, count: int) -> Iterator[None]:
        is_over = threading.Event()
        with ThreadPoolExecutor(count) as threads:
            for number in range(count):
                threads.submit(self._draft, 1 + number, is_over, list[float]())
            try:
                yield
            finally:
                is_over.set()

    def _draft(self, number: int, is_over: threading.Event, times: list[float]) -> None:
        credential = self._metadata(self._tokens[number])
        asked = self._pb.DraftRequest(context=self._context, budget_nodes=32)
        while not is_over.is_set():
            began_s = time.perf_counter()
            self._stub.Draft(asked, metadata=credential, timeout=_LONG_S)
            times.append(time.perf_counter() - began_s)
            time.sleep(0.002)

    @staticmethod
    def _metadata(token: str) -> tuple[tuple[str, str]]:
        return (("authorization", f"Bearer {token}"),)


def measure(num_tenants: int, num_connections: int) -> None:
    """Measure the checkout that is first on the path, and print what was found."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        _indexes(folder)
        tokens = _access(folder, num_tenants)
        command = [sys.executable, "-m", "foredraft", "serve", "--address", "127.0.0.1:0"]
        command += ["--index", str(folder / "small"), "--access", str(folder / "access")]
        command += ["--admin-address", f"unix:{folder}/admin"]
        service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.callback(service.wait)
        stack.callback(service.terminate)
        lines: Any = service.stdout
        address = next(line for line in lines if line.startswith(_SERVING))
        measured = Measured(folder, tokens, address.removeprefix(_SERVING).strip(), service.pid)
        stack.callback(measured.close)
        measured.alone()
        found = {
            "alone": measured.alone(),
            f"{num_tenants} tenants": measured.tenants(),
            f"{num_connections} half-open": measured.half_open(num_connections),
            "attaching 50 MB": measured.attached(),
            "alone again": measured.alone(),
        }
    print(json.dumps(found))


def main(
    against: Annotated[Path | None, typer.Option(help="Root of another checkout.")] = None,
    tenants: Annotated[int, typer.Option(help="How many.")] = 5000,
    connections: Annotated[int, typer.Option(help="How many say nothing.")] = 10_000,
    output: Annotated[Path | None, typer.Option(help="Where to write JSON.")] = None,
) -> None:
    """Measure a service beside its crowds."""
    found: dict[str, Any] = dict(circumstances())
    for name, root in {"ours": HERE, "against": against}.items():
        if root is None:
            continue
        done = subprocess.run(
            [sys.executable, __file__, "measure", str(tenants), str(connections)],
            env=os.environ | {"PYTHONPATH": str(root.resolve())},
            cwd=root,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        found[name] = json.loads(done.stdout.splitlines()[-1])
        for crowd, figures in found[name].items():
            print(name, crowd, figures, flush=True)
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(int(sys.argv[2]), int(sys.argv[3]))
    else:
        typer.run(main)

"""Send very many messages to a service that no well-meaning client would send.

    python -m tests.oracles.fuzz.fuzz_service --messages 1000000

Ends with status 1 at the first call that ends without a gRPC status, or whose answer holds a token
of another tenant; the seed that is printed sends the same messages again. One message in a hundred
goes over a socket as well, as raw bytes, to a server in another process.
"""

import asyncio
import subprocess
import sys
import time
from collections import Counter
from typing import Annotated

import grpc
import typer

from retriever.sessions.embedded import EmbeddedDrafter
from tests.oracles.fuzz.fuzzing import CrashError, Fuzzer, LeakError
from tests.oracles.fuzz.raw_bytes import send_raw, send_to_socket

_PART = 10_000


def main(
    messages: Annotated[int, typer.Option(min=1, help="How many to send.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Of what is sent.")] = 0,
) -> None:
    """Send messages to a servicer in this process, and raw bytes to a server in another."""
    began = time.monotonic()
    drafter = EmbeddedDrafter()
    drafter.warm()
    fuzzer = Fuzzer(drafter, seed)
    raw: Counter[str] = Counter()
    process, address = _started()
    try:
        for first in range(0, messages, _PART):
            part = min(_PART, messages - first)
            asyncio.run(fuzzer.send(part))
            raw += send_raw(address, part // 100, seed + first)
            raw += send_to_socket(address, part // 1000, seed + first)
            _check_runs(process)
            print(f"{first + part:>12,} messages, {time.monotonic() - began:.0f} s", flush=True)
    except (CrashError, LeakError, grpc.RpcError) as error:
        print(f"seed {seed}: {type(error).__name__}: {error} ({error.__cause__!r})")
        raise typer.Exit(1) from error
    finally:
        process.terminate()
        process.wait(30)
    _print("in process", fuzzer.outcomes)
    _print("raw bytes over a socket", raw)


def _check_runs(process: "subprocess.Popen[str]") -> None:
    if process.poll() is not None:
        raise CrashError(f"the server ended with {process.returncode}")


def _started() -> tuple["subprocess.Popen[str]", str]:
    command = [sys.executable, "-m", "retriever", "serve", "--address", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    if process.stdout is None:
        raise CrashError("the server says nothing")
    return process, process.stdout.readline().removeprefix("serving on ").strip()


def _print(what: str, outcomes: Counter[str]) -> None:
    print(f"{what}: {sum(outcomes.values()):,}")
    for outcome, count in outcomes.most_common():
        print(f"  {outcome:24}{count:>12,}")


if __name__ == "__main__":
    typer.run(main)

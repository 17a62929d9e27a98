"""The cost of a draft service over loopback: compared with an echo, in large steps, under load.

Everything runs on this machine, in processes of their own: the service, an echo of the same
messages, and this client. Sequences are synthetic: phrases that recur, with other tokens between.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, Final

import grpc
import numpy as np
import typer
from grpc import aio
from numpy.typing import NDArray

from benchmarks.comparison import circumstances
from retriever.client.resilient import ResilientDrafter
from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire.messages import PACKED, add_step

_PROMPT: Final = 400
_ROUNDS: Final = 10
_PATIENCE_S: Final = 5.0


def text(seed: int, length: int) -> TokenIds:
    """Return int32[length]: phrases of twelve tokens that recur, and others between them."""
    rng = np.random.default_rng(seed)
    phrases = rng.integers(0, 32_000, (20, 12))
    parts = [
        phrases[rng.integers(20)] if rng.random() < 0.8 else rng.integers(0, 32_000, 5)  # noqa: PLR2004
        for _ in range(length // 5 + 1)
    ]
    return np.concatenate(parts)[:length].astype(np.int32)


@contextmanager
def _process(*command: str) -> Iterator[str]:
    """Run a server; give the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        yield line.removeprefix("serving on ").strip()
    finally:
        process.terminate()
        process.communicate(timeout=30)


class Asker:
    """Steps of some sequences, one token at a time."""

    def __init__(self, num_sequences: int, num_steps: int, budget: int, first: int = 0) -> None:
        self._texts = {
            f"s{at}": text(at, _PROMPT + num_steps) for at in range(first, first + num_sequences)
        }
        self._budget = budget
        self._length = _PROMPT

    @property
    def prompts(self) -> dict[str, TokenIds]:
        """By session."""
        return {name: tokens[:_PROMPT] for name, tokens in self._texts.items()}

    def step(self) -> list[DraftRequest]:
        """Return the next step."""
        at, self._length = self._length, self._length + 1
        return [
            DraftRequest(name, tokens[at : at + 1], at + 1, self._budget)
            for name, tokens in self._texts.items()
        ]


class Stub:
    """A stream with nothing around it: a message out, a message in."""

    def __init__(self, address: str) -> None:
        self._outbox: SimpleQueue[pb.DraftStreamRequest | None] = SimpleQueue()
        self._channel = grpc.insecure_channel(address)
        stub = RetrieverServiceStub(self._channel)
        self._call = stub.DraftStream(iter(self._outbox.get, None))

    def ask(self, message: pb.DraftStreamRequest) -> float:
        """Exchange a message; return how long it took, in seconds."""
        began_s = time.perf_counter()
        self._outbox.put(message)
        answer = next(self._call)
        took_s = time.perf_counter() - began_s
        if answer.statuses:
            raise SystemExit(f"refused: {answer.statuses[0].message}")
        return took_s

    def end(self) -> None:
        """End the stream."""
        self._outbox.put(None)
        self._channel.close()


def beside_echo(service: str, echo: str, num_steps: int, budget: int) -> dict[str, Any]:
    """Time one-sequence steps, one after the other in four ways.

    Drafted in this process; the messages alone, to a bare echo and to the service, over the same
    stub; and as an engine asks, by the client that fails open.
    """
    took: dict[str, list[float]] = {"draft": [], "echo": [], "round_trip": [], "client": []}
    drafter, bare, real = EmbeddedDrafter(), Stub(echo), Stub(service)
    drafter.warm()
    asker = Asker(1, num_steps, budget)
    ((name, prompt),) = asker.prompts.items()
    opening = pb.OpenSessionRequest(session_id=name, prompt=prompt.tolist())
    real.ask(pb.DraftStreamRequest(sequence_number=1, openings=[opening]))
    with ResilientDrafter(service, deadline_s=_PATIENCE_S) as client:
        client.wait(_PATIENCE_S)
        drafter.open(name, prompt)
        client.open(name, prompt)
        for number in range(2, num_steps + 2):
            step = asker.step()
            message = _stepping(number, step, [name])
            took["draft"].append(_time(drafter, step))
            took["echo"].append(bare.ask(message))
            took["round_trip"].append(real.ask(message))
            took["client"].append(_time(client, step))
        failed = client.fail_opens.total()
    bare.end()
    real.end()
    medians = {way: _us(np.array(times)[num_steps // 10 :]) for way, times in took.items()}
    least = medians["echo"]["median_us"] + medians["draft"]["median_us"]
    ratios = {
        f"{way}_over_echo_and_draft": round(medians[way]["median_us"] / least, 3)
        for way in ("round_trip", "client")
    }
    return {**medians, **ratios, "failed": failed}


def _time(drafter: Drafter, step: Sequence[DraftRequest]) -> float:
    began_s = time.perf_counter()
    drafter.draft(step)
    return time.perf_counter() - began_s


def large_steps(service: str, num_sequences: int, num_steps: int, budget: int) -> dict[str, Any]:
    """Time steps of many sequences in one message, client and service on this machine."""
    times_s, nodes = [], 0
    with ResilientDrafter(service, deadline_s=_PATIENCE_S) as remote:
        remote.wait(_PATIENCE_S)
        asker = Asker(num_sequences, num_steps, budget)
        for name, prompt in asker.prompts.items():
            remote.open(name, prompt)
        for _ in range(num_steps):
            step = asker.step()
            began_s = time.perf_counter()
            trees = remote.draft(step)
            times_s.append(time.perf_counter() - began_s)
            nodes += sum(map(len, trees))
        failed = remote.fail_opens.total()
    kept = np.array(times_s)[num_steps // 10 :]
    return {
        "sequences": num_sequences,
        "nodes_per_draft": round(nodes / num_steps / num_sequences, 1),
        **_us(kept),
        "sequence_drafts_per_s": round(num_sequences * len(kept) / float(kept.sum())),
        "failed": failed,
    }


async def many_streams(
    service: str, num_streams: int, seconds: float, budget: int, width: int = 1
) -> dict[str, Any]:
    """Time steps of `width` sequences on streams that all ask without a pause."""
    until_s = time.perf_counter() + seconds
    streams = [
        _stream(service, width, 1000 * width * (at + 1), budget, until_s)
        for at in range(num_streams)
    ]
    done = await asyncio.gather(*streams)
    times_s = np.concatenate([np.array(times) for times, _ in done])
    figures = _us(times_s)
    return {
        "streams": num_streams,
        "sequences": width,
        "seconds": seconds,
        "steps": len(times_s),
        **figures,
        "p99_over_median": round(figures["p99_us"] / figures["median_us"], 2),
        "errors": sum(errors for _, errors in done),
    }


def beside_wide(service: str, seconds: float, budget: int, num_wide: int = 4) -> dict[str, Any]:
    """Time one-sequence steps while another process asks for 64 sequences at once, on streams."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        wide = pool.submit(_run_wide, service, num_wide, seconds + 2, budget)
        time.sleep(1.5)
        alone = asyncio.run(many_streams(service, 1, seconds, budget))
        return {**alone, "wide": wide.result()}


def _run_wide(service: str, num_streams: int, seconds: float, budget: int) -> dict[str, Any]:
    return asyncio.run(many_streams(service, num_streams, seconds, budget, width=64))


async def _stream(
    service: str, num_sequences: int, first: int, budget: int, until_s: float
) -> tuple[list[float], int]:
    """Ask on one stream until the time is up; return how long each step took, and errors."""
    times_s: list[float] = []
    errors = 0
    async with aio.insecure_channel(service) as channel:
        stub: Any = RetrieverServiceStub(channel)
        call = stub.DraftStream()
        number, asker = 0, Asker(num_sequences, 0, budget, first)
        while time.perf_counter() < until_s:
            number += 1
            if number % 1000 == 1:  # sequences end, and others begin
                asker = Asker(num_sequences, 1000, budget, first)
                message = _opening(number, asker.prompts, is_first=number == 1)
            else:
                message = _message(number, asker.step())
            began_s = time.perf_counter()
            await call.write(message)
            answer = await call.read()
            if message.steps:
                times_s.append(time.perf_counter() - began_s)
            errors += len(answer.statuses)
        await call.done_writing()
    return times_s, errors


def _opening(number: int, prompts: dict[str, TokenIds], *, is_first: bool) -> pb.DraftStreamRequest:
    """Return a message that begins sequences; the same ones that began before are ended first."""
    generation = number // 1000
    closings = [pb.CloseSessionRequest(session_id=f"{name}/{generation - 1}") for name in prompts]
    openings = [
        pb.OpenSessionRequest(session_id=f"{name}/{generation}", prompt=prompt.tolist())
        for name, prompt in prompts.items()
    ]
    return pb.DraftStreamRequest(
        sequence_number=number, openings=openings, closings=[] if is_first else closings
    )


def _message(number: int, step: Sequence[DraftRequest]) -> pb.DraftStreamRequest:
    generation = (number - 1) // 1000
    return _stepping(number, step, [f"{request.session}/{generation}" for request in step])


def _stepping(
    number: int, step: Sequence[DraftRequest], names: Sequence[str]
) -> pb.DraftStreamRequest:
    message = pb.DraftStreamRequest(sequence_number=number, tree_form=PACKED)
    for request, name in zip(step, names, strict=True):
        add_step(message, request, name, request.new_tokens.tobytes())
    return message


def _us(times_s: NDArray[np.float64]) -> dict[str, float]:
    median, p99 = np.percentile(times_s, [50, 99]) * 1e6
    return {"median_us": round(float(median), 1), "p99_us": round(float(p99), 1)}


def main(  # noqa: PLR0913  (a command has as many options as it has)
    *,
    index: Annotated[list[Path] | None, typer.Option(help="Indexes to serve. Repeatable.")] = None,
    budget: Annotated[int, typer.Option(help="Nodes in each tree.")] = 16,
    steps: Annotated[int, typer.Option(help="One-sequence steps compared with an echo.")] = 3000,
    streams: Annotated[int, typer.Option(help="Concurrent streams.")] = 64,
    seconds: Annotated[float, typer.Option(help="How long they ask.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on one line.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the figures here, too.")] = None,
) -> None:
    """Print what the service costs."""
    indexes = [word for path in index or [] for word in ("--index", str(path))]
    serve = ("retriever", "serve", "--address", "127.0.0.1:0", *indexes)
    with (
        _process(*serve) as service,
        _process("benchmarks.serving.service_echo", str(budget)) as echo,
    ):
        figures = {
            **circumstances(),
            "budget_nodes": budget,
            "one_sequence": beside_echo(service, echo, steps, budget),
            "large_steps": large_steps(service, 64, max(50, steps // _ROUNDS), budget),
            "alone": asyncio.run(many_streams(service, 1, seconds / 4, budget)),
            "beside_wide": beside_wide(service, seconds / 4, budget),
            "streams": asyncio.run(many_streams(service, streams, seconds, budget)),
        }
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=None if as_json else 1))


if __name__ == "__main__":
    typer.run(main)

"""Kills a process that remembers outputs, again and again, and looks for what was lost.

    python benchmarks/serving/durability.py --kills 1000 --json

A child remembers outputs and acknowledges each in a pipe. It is killed (SIGKILL) at a random
moment: while it opens the log, copies it, writes, deletes a tenant, or closes it. Then the log is
opened again. It must hold every output that was acknowledged, whole and in order, up to the log's
capacity, and at most one that was not acknowledged: the one that was being written. The next child
goes on from it.
"""

import json
import os
import platform
import signal
import struct
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer

from retriever.drafter import DraftRequest, TokenIds
from retriever.limits import Durability, Limits
from retriever.log.generations_log import GenerationsLog
from retriever.log.options import LogOptions
from retriever.predict.generations import Output
from retriever.sessions.embedded import EmbeddedDrafter

CAPACITY: Final = 1 << 13
"""Tokens that the log keeps: a few dozen outputs, so that every life of a child removes some."""

_ACKNOWLEDGEMENT: Final = struct.Struct("<Q")
_MAX_OUTPUT_TOKENS: Final = 400
_NEIGHBOUR: Final = "neighbour"
_WORDS: Final = 1 << 10
_MAX_LIFE_S: Final = 0.04


@dataclass(slots=True)
class Counts:
    """What the kills came to.

    Attributes:
        kills: processes killed.
        acknowledged: outputs acknowledged by them.
        while_opening: kills before the first acknowledgement.
        unacknowledged: outputs that were written but not acknowledged, which is no fault.
        lost: acknowledged outputs that were gone.
        torn: outputs that were not as they were written, or out of order.
        damaged: logs that were found damaged.
    """

    kills: int = 0
    acknowledged: int = 0
    while_opening: int = 0
    unacknowledged: int = 0
    lost: int = 0
    torn: int = 0
    damaged: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost and nothing half-read."""
        return self.lost == self.torn == self.damaged == 0


def output_of(number: int) -> TokenIds:
    """Return the output of this number: the number in two tokens, then random ones."""
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, 1 << 17, int(rng.integers(2, _MAX_OUTPUT_TOKENS)), np.int32)
    tokens[:2] = number // _WORDS, number % _WORDS
    return tokens


def number_of(output: TokenIds) -> int:
    """Return the number that an output says to have."""
    return int(output[0]) * _WORDS + int(output[1]) if len(output) > 1 else -1


def check(outputs: list[Output], acknowledged: int, counts: Counts) -> int:
    """Compare what a log holds with what it must hold.

    Args:
        outputs: of the log, oldest first.
        acknowledged: outputs acknowledged in all, numbered from 0.
        counts: written.

    Returns:
        The number of the next output.
    """
    numbers = [number_of(output.tokens) for output in outputs]
    end = numbers[-1] + 1 if numbers else 0
    counts.lost += max(0, acknowledged - end)
    counts.unacknowledged += max(0, end - acknowledged)
    counts.torn += max(0, end - acknowledged - 1)
    first, room = end, CAPACITY
    while first > 0 and room > 0:
        first -= 1
        room -= len(output_of(first)) + 1
    expected = list(range(first, end))
    counts.lost += len(set(expected) - set(numbers))
    counts.torn += sum(
        number not in expected or not np.array_equal(output.tokens, output_of(number))
        for number, output in zip(numbers, outputs, strict=True)
    )
    counts.torn += numbers != sorted(set(numbers))
    return max(end, acknowledged)


def live(state: Path, number: int, pipe: int, durability: Durability, seed: int) -> None:
    """Remember outputs from `number` on until killed, in every way that there is."""
    rng = np.random.default_rng(seed)
    limits = Limits(generations_tokens=CAPACITY)
    drafter = EmbeddedDrafter(limits=limits, state=state, durability=durability)
    while True:
        output = output_of(number)
        if rng.random() < 0.5:  # noqa: PLR2004
            drafter.remember(output)
        else:
            drafter.open("s", output[:0])
            drafter.draft([DraftRequest("s", output[:-1], len(output) - 1, 0)])
            drafter.close("s", output[-1:])
        os.write(pipe, _ACKNOWLEDGEMENT.pack(number))
        number += 1
        if rng.random() < 0.02:  # noqa: PLR2004
            drafter.remember(output, tenant=_NEIGHBOUR)
            drafter.delete(_NEIGHBOUR)
        if rng.random() < 0.02:  # noqa: PLR2004
            drafter.shut_down()
            drafter = EmbeddedDrafter(limits=limits, state=state, durability=durability)


def kill_once(
    state: Path, number: int, durability: Durability, rng: np.random.Generator, counts: Counts
) -> int:
    """Let a child live for a moment, check what it leaves, and return the next output's number."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            live(state, number, writing, durability, int(rng.integers(1 << 30)))
        finally:
            os._exit(1)
    os.close(writing)
    begun = b"" if rng.random() < 0.2 else os.read(reading, _ACKNOWLEDGEMENT.size)  # noqa: PLR2004
    time.sleep(rng.uniform(0, _MAX_LIFE_S))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise RuntimeError("a child ended before it was killed")
    acknowledged = number + _read_all(reading, begun) // _ACKNOWLEDGEMENT.size
    counts.kills += 1
    counts.acknowledged += acknowledged - number
    counts.while_opening += acknowledged == number
    return _reopen(state, acknowledged, rng, counts)


def _read_all(pipe: int, begun: bytes) -> int:
    """Return how many bytes came through a pipe, and close it."""
    num_bytes = len(begun)
    while chunk := os.read(pipe, 1 << 16):
        num_bytes += len(chunk)
    os.close(pipe)
    return num_bytes


def _reopen(state: Path, acknowledged: int, rng: np.random.Generator, counts: Counts) -> int:
    log = GenerationsLog(state, options=LogOptions(CAPACITY))
    kept = log.load("")
    log.close()
    counts.torn += kept.num_damaged
    counts.damaged = len(list(state.glob("generations.damaged-*")))
    if rng.random() < 0.5:  # noqa: PLR2004
        (state / "generations.seal").unlink()  # the next child finds it as a kill leaves it
    return check(kept.outputs, acknowledged, counts)


def run(
    kills: Annotated[int, typer.Option(min=1, help="How many processes to kill.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the moments of the kills.")] = 0,
    durability: Annotated[Durability, typer.Option(help="As for `foredraft serve`.")] = "process",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Kill processes that remember outputs; end with status 1 if anything was lost or torn."""
    rng, counts, number = np.random.default_rng(seed), Counts(), 0
    EmbeddedDrafter().warm()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as state:
        for _ in range(kills):
            number = kill_once(Path(state), number, durability, rng, counts)
    figures = {
        **asdict(counts),
        "durability": durability,
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
    }
    print(json.dumps(figures) if as_json else "\n".join(f"{k}: {v}" for k, v in figures.items()))
    if not counts.is_clean:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(run)

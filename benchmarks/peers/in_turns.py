"""Replaying the same recordings with several drafters in turns, so that noise meets all of them."""

import gc
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np

from benchmarks.peers.peer import Peer
from retriever.drafter import TokenIds
from retriever.errors import RetrieverError
from retriever.traces.traces import Trace

PARTS: Final = 5
"""Parts of a run that a ratio of times is also taken in: how far it can be trusted."""

_SEED: Final = 0


class Turns(StrEnum):
    """When the next drafter has its turn."""

    STEP = "step"
    TRACE = "trace"


class TooManyNodesError(RetrieverError):
    """A draft has more nodes than were asked for."""


@dataclass(slots=True)
class Tally:
    """What was counted and timed of one drafter.

    Attributes:
        steps: decoding steps that a verifier would have made.
        tokens: tokens committed.
        nodes: nodes drafted.
        draft_us: microseconds of each draft, the tokens of the step before taken in.
        open_us: microseconds of each opening.
        close_us: microseconds of each end.
        parts: index of the first of `draft_us` of each trace.
    """

    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    draft_us: list[float] = field(default_factory=list)
    open_us: list[float] = field(default_factory=list)
    close_us: list[float] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Mean, the model's own token included."""
        return self.tokens / max(1, self.steps)

    def medians(self) -> list[float]:
        """Return the median draft of each fifth of the traces, in microseconds."""
        traces = np.array_split(np.arange(len(self.parts)), PARTS)
        ends = [*self.parts, len(self.draft_us)]
        spans = [(ends[each[0]], ends[each[-1] + 1]) for each in traces if len(each)]
        return [float(np.median(self.draft_us[a:b])) for a, b in spans if b > a]


def replay_in_turns(
    peers: Mapping[str, Peer], traces: Sequence[Trace], budget: int, turns: Turns
) -> dict[str, Tally]:
    """Replay every trace with every drafter; return what was counted, by name.

    Whose turn it is follows from a shuffle in each round, the same in every run: none always comes
    after the same other.

    Raises:
        TooManyNodesError: a drafter answers with more nodes than the budget.
    """
    tallies = {name: Tally() for name in peers}
    order = random.Random(_SEED)  # noqa: S311  not for secrets
    gc.collect()
    gc.freeze()  # or every collection would go through what all drafters hold
    try:
        for trace in traces:
            running = {
                name: _steps(peer, trace, budget, tallies[name]) for name, peer in peers.items()
            }
            while running:
                for name in order.sample(sorted(running), len(running)):
                    if turns is Turns.TRACE:
                        _exhaust(running[name])
                    if next(running[name], None) is None:
                        del running[name]
    finally:
        gc.unfreeze()
    return tallies


def _exhaust(steps: Iterator[int]) -> None:
    for _ in steps:
        pass


def _steps(peer: Peer, trace: Trace, budget: int, tally: Tally) -> Iterator[int]:
    """Replay one trace; give the tokens committed after each step."""
    output: TokenIds = trace.output
    tally.parts.append(len(tally.draft_us))
    with _timed(tally.open_us):
        peer.open(trace.prompt, len(output))
    committed, done = output[:0], 0
    while done < len(output):
        began = time.perf_counter()
        proposed = peer.propose(committed, budget)
        tally.draft_us.append((time.perf_counter() - began) * 1e6)
        tree = peer.tree(proposed)
        if len(tree) > budget:
            raise TooManyNodesError(f"a draft has {len(tree)} nodes where {budget} were asked for")
        committed = output[done : done + len(tree.follow(output[done:])) + 1]
        done += len(committed)
        tally.steps += 1
        tally.nodes += len(tree)
        yield done
    with _timed(tally.close_us):
        peer.close(committed)
    tally.tokens += done


class _timed:  # noqa: N801  a context manager, used as a function
    """Appends the microseconds that its block takes."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._times.append((time.perf_counter() - self._began) * 1e6)

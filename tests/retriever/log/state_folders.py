"""Drafters and logs on a state directory, and outputs that are told from one another."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.serving.durability import output_of
from indexer.reader import Vocabulary
from retriever.drafter import TokenIds
from retriever.limits import Limits
from retriever.log.generations_log import GenerationsLog
from retriever.log.options import LogOptions
from retriever.predict.generations import Output
from retriever.predict.pool import Entry
from retriever.sessions.embedded import EmbeddedDrafter

NUM_OUTPUTS = 120


def output(number: int, length: int = 20) -> TokenIds:
    """An output that nothing else equals in two tokens that follow one another."""
    return np.arange(100 * number, 100 * number + length, dtype=np.int32)


@contextmanager
def drafter_on(
    state: Path | None, limits: Limits | None = None, vocabulary: Vocabulary | None = None
) -> Iterator[EmbeddedDrafter]:
    drafter = EmbeddedDrafter(state=state, limits=limits or Limits(), vocabulary=vocabulary)
    try:
        yield drafter
    finally:
        drafter.shut_down()


@contextmanager
def log_on(
    state: Path, options: LogOptions | None = None, clock: Callable[[], float] = lambda: 0.0
) -> Iterator[GenerationsLog]:
    log = GenerationsLog(state, options=options, clock=clock)
    try:
        yield log
    finally:
        log.close()


def keep(log: GenerationsLog, tokens: TokenIds, tenant: str = "", time_s: float = 0.0) -> None:
    log.append(Entry(tenant, Output(tokens, time_s)))
    log.commit()


def kept(log: GenerationsLog, tenant: str = "") -> list[list[int]]:
    return [output.tokens.tolist() for output in log.load(tenant).outputs]


def knows(drafter: EmbeddedDrafter, number: int, tenant: str = "") -> bool:
    tree = drafter.draft_context(output(number)[:8], 4, tenant=tenant)
    return np.array_equal(tree.token_ids, output(number)[8:12])


def tree_of(drafter: EmbeddedDrafter, context: TokenIds) -> list[list[float]]:
    tree = drafter.draft_context(context, 24)
    return [tree.token_ids.tolist(), tree.parents.tolist(), tree.probabilities.tolist()]


def fill(state: Path, num_outputs: int = NUM_OUTPUTS) -> None:
    """Write a log of outputs that say their numbers, and close it."""
    log = GenerationsLog(state)
    for number in range(num_outputs):
        log.append(Entry("", Output(output_of(number), 0.0)))
        log.commit()
    log.close()

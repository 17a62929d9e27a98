"""What a drafter holds at one moment."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

from retriever.pool import Pool
from retriever.sessions import Session

_BETWEEN_PAUSES: Final = 256
_PAUSE_S: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Census:
    """What a drafter holds.

    Attributes:
        sessions: how many are open, by tenant.
        session_tokens: tokens of their sequences.
        session_bytes: memory of the sequences.
        tenants: tenants whose recent outputs are in memory.
        generations_tokens: tokens of these outputs, and one for the end of each.
        generations_bytes: memory of the outputs.
    """

    sessions: Mapping[str, int]
    session_tokens: int
    session_bytes: int
    tenants: int
    generations_tokens: int
    generations_bytes: int


NOTHING_HELD: Final = Census({}, 0, 0, 0, 0, 0)
"""The census of a drafter that is not open yet."""


def census_of(sessions: Sequence[Session], pools: Sequence[Pool], lock: Lock) -> Census:
    """Return what these are together.

    Pauses now and then, so that whoever drafts meanwhile gets the interpreter.

    Args:
        sessions: some that were open a moment ago.
        pools: what is in memory.
        lock: held while a pool is used.
    """
    by_tenant: Counter[str] = Counter()
    num_tokens = num_bytes = 0
    for begin in range(0, len(sessions), _BETWEEN_PAUSES):
        for session in sessions[begin : begin + _BETWEEN_PAUSES]:
            databases = session.databases
            by_tenant[databases.pool.tenant] += 1
            num_tokens += len(databases.context)
            num_bytes += databases.context.num_bytes
        time.sleep(_PAUSE_S)
    return Census(
        sessions=by_tenant,
        session_tokens=num_tokens,
        session_bytes=num_bytes,
        tenants=len(pools),
        generations_tokens=sum(_tokens_of(pool, lock) for pool in pools),
        generations_bytes=sum(pool.generations.num_bytes for pool in pools),
    )


def _tokens_of(pool: Pool, lock: Lock) -> int:
    with lock:
        return pool.generations.num_tokens

"""What a drafter holds at one moment."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from retriever.pools import Pool
from retriever.sessions import Session


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


def census_of(sessions: Iterable[Session], pools: Iterable[tuple[Pool, int]]) -> Census:
    """Return what these are together; each pool comes with its number of tokens."""
    contexts = [(each.databases.pool.tenant, each.databases.context) for each in sessions]
    held = list(pools)
    return Census(
        sessions=Counter(tenant for tenant, _ in contexts),
        session_tokens=sum(len(context) for _, context in contexts),
        session_bytes=sum(each.nbytes for _, context in contexts for each in context.chains),
        tenants=len(held),
        generations_tokens=sum(num_tokens for _, num_tokens in held),
        generations_bytes=sum(pool.generations.num_bytes for pool, _ in held),
    )

"""Which of several servers a session is drafted by."""

from collections.abc import Iterable
from hashlib import blake2b


def ranked(session: str, addresses: Iterable[str]) -> list[str]:
    """Return the servers in the order in which a session prefers them.

    Rendezvous hashing: every client finds the same order by itself, a server that is added or
    lost moves only the sessions that prefer it, and the others share them evenly.

    Source: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", IEEE/ACM
    Transactions on Networking, 1998.
    """
    return sorted(addresses, key=lambda address: _score(session, address), reverse=True)


def _score(session: str, address: str) -> bytes:
    key = blake2b(address.encode(), digest_size=16).digest()
    return blake2b(session.encode(errors="surrogatepass"), digest_size=8, key=key).digest()

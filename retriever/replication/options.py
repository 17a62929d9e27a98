"""Options of replication."""

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

MAX_RECORD_TOKENS: Final = 4096
"""Tokens in a record at most: longer outputs are split."""

PAGE: Final = 64
"""Entries that are read at once: parsing them holds up other threads for half a millisecond."""


@dataclass(frozen=True, slots=True)
class ReplicationOptions:
    """How a drafter replicates its outputs.

    Attributes:
        url: of the Redis server: `redis://`, `rediss://` (TLS) or `unix://`. Never shown: it may
            hold a password. Name and password default to the environment variables
            `FOREDRAFT_REDIS_USERNAME` and `FOREDRAFT_REDIS_PASSWORD`.
        max_records: approximate number of records that the server keeps, newest ones; each has up
            to `MAX_RECORD_TOKENS` tokens of 2 or 4 bytes.
        max_queued_tokens: tokens of queued outputs; beyond it the oldest are dropped.
        timeout_s: longest wait for an answer of the server, in seconds.
        max_backoff_s: longest pause before the server is tried again, in seconds.
    """

    url: str = field(repr=False)
    max_records: int = 1 << 16
    max_queued_tokens: int = 1 << 20
    timeout_s: float = 5.0
    max_backoff_s: float = 5.0


def without_credentials(url: str) -> str:
    """Return a server's URL without name, password and query, for display."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "a URL that cannot be read"
    if not parts.scheme:  # possibly a bare password
        return "a URL that cannot be read"
    # A password that is not percent-encoded.
    if "@" in parts.path + parts.query + parts.fragment:
        return f"{parts.scheme}://"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

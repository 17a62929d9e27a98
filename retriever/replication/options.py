"""Where outputs are replicated, and within what bounds."""

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

MAX_RECORD_TOKENS: Final = 4096
"""Tokens in a record at most: longer outputs travel in several."""

PAGE: Final = 64
"""Entries that are read at once: parsing them holds up other threads for half a millisecond."""


@dataclass(frozen=True, slots=True)
class ReplicationOptions:
    """How a drafter shares what it has generated.

    Attributes:
        url: of the Redis server: `redis://`, `rediss://` (TLS) or `unix://`. Never shown: it may
            hold a password. Name and password that it lacks are taken from the environment,
            `FOREDRAFT_REDIS_USERNAME` and `FOREDRAFT_REDIS_PASSWORD`.
        max_records: outputs that the server keeps, about; the oldest go first. Of up to
            `MAX_RECORD_TOKENS` tokens each, in 2 or 4 bytes a token.
        max_queued_tokens: outputs that wait to be published, in tokens; the oldest are dropped.
        timeout_s: how long the server may take to answer, in seconds.
        max_backoff_s: longest wait before the server is tried again, in seconds.
    """

    url: str = field(repr=False)
    max_records: int = 1 << 16
    max_queued_tokens: int = 1 << 20
    timeout_s: float = 5.0
    max_backoff_s: float = 5.0


def without_credentials(url: str) -> str:
    """Return a server's URL as it may be shown: without name, password and query."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "a URL that cannot be read"
    if not parts.scheme:  # perhaps a password alone
        return "a URL that cannot be read"
    # A password that was not written as it must be.
    if "@" in parts.path + parts.query + parts.fragment:
        return f"{parts.scheme}://"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

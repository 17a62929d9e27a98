"""Options of replication."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from retriever.sessions.drafter_plugins import DrafterPlugin
from retriever.sessions.drafter_state import DrafterState

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

    def check(self) -> None:
        """Check library and URL; a server that is down is no error.

        Raises:
            ReplicationError: the library redis is missing, or the URL cannot be one of a server.
        """
        _sharing().check(self)

    def attach(self, state: DrafterState) -> DrafterPlugin:
        """Return the replication of a drafter's outputs."""
        plugin: DrafterPlugin = _sharing().Replication(self, state)
        return plugin


def _sharing() -> Any:
    return import_module("retriever.plugins.replication.sharing")  # it imports this module

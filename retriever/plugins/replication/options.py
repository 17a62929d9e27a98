"""Options of replication."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from retriever.sessions.drafter_plugins import DrafterPlugin
from retriever.sessions.drafter_state import DrafterState

MAX_RECORD_TOKENS: Final = 4096
"""Most tokens in a record; longer outputs are split."""

PAGE: Final = 64
"""Entries read at once; parsing them blocks other threads for half a millisecond."""


@dataclass(frozen=True, slots=True)
class ReplicationOptions:
    """How a drafter replicates its outputs.

    Attributes:
        url: URL of the Redis server: `redis://`, `rediss://` (TLS) or `unix://`. Never shown,
            because it may contain a password. Name and password default to the environment
            variables `FOREDRAFT_REDIS_USERNAME` and `FOREDRAFT_REDIS_PASSWORD`.
        max_records: approximate number of newest records that the server keeps; each has up to
            `MAX_RECORD_TOKENS` tokens of 2 or 4 bytes.
        max_queued_tokens: most tokens of queued outputs; beyond it, the oldest are dropped.
        timeout_s: longest wait for an answer from the server, in seconds.
        max_backoff_s: longest pause before the next attempt, in seconds.
    """

    url: str = field(repr=False)
    max_records: int = 1 << 16
    max_queued_tokens: int = 1 << 20
    timeout_s: float = 5.0
    max_backoff_s: float = 5.0

    def check(self) -> None:
        """Check the library and the URL; a server that is down is not an error.

        Raises:
            ReplicationError: the library redis is missing, or the URL is invalid.
        """
        _sharing().check(self)

    def attach(self, state: DrafterState) -> DrafterPlugin:
        """Return the replication of a drafter's outputs."""
        plugin: DrafterPlugin = _sharing().Replication(self, state)
        return plugin


def _sharing() -> Any:
    return import_module("retriever.plugins.replication.sharing")  # which imports this one

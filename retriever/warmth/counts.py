"""What became of the outputs that drafters share."""

from dataclasses import dataclass, field
from typing import Final

SKIPPED: Final = (
    "own",
    "repeated",
    "deleted",
    "expired",
    "no-room",
    "damaged",
    "newer",
    "oversized",
    "foreign",
    "vocabulary",
)
"""Why records are not remembered; see `WarmthCounts.skipped`."""


@dataclass(slots=True)
class WarmthCounts:
    """Counts since the start; `connected`, `queued` and `unsent_deletions` are as of now.

    Attributes:
        published: records that the server took.
        dropped: records that were not sent, because too many waited.
        learned: records of other drafters that were remembered.
        learned_tokens: tokens in them.
        deletions: of tenants and sessions, because another drafter was told to.
        skipped: records that were not remembered, by reason: `own`, `repeated`, `deleted` (after
            they were made), `expired`, `no-room` (beyond `max_tenants`, without
            a state directory), `damaged`, `newer` (of a later version), `oversized`, `foreign`
            (none of ours), `vocabulary` (ids outside of it).
        failures: how often the server was away, or refused.
        connected: whether it answered when it was last asked.
        queued: records that wait to be published.
        unsent_deletions: those that the server does not know of yet.
    """

    published: int = 0
    dropped: int = 0
    learned: int = 0
    learned_tokens: int = 0
    deletions: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    failures: int = 0
    connected: bool = False
    queued: int = 0
    unsent_deletions: int = 0

    def skip(self, reason: str) -> None:
        """Count a record that was not remembered."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

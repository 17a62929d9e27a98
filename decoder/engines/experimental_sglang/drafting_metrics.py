"""What SGLang's own metrics cannot tell: acceptance by position and by whose token it was.

SGLang counts accepted drafts of a request and of a batch under its own names, ours among them. What
is added here has names of our own, in the registry that SGLang exposes.
"""

from collections.abc import Mapping
from typing import Any, Final

from decoder.observation import Statistics
from retriever.tree import Source

_MOST_POSITIONS: Final = 64
"""Positions that are told apart; later ones count with the last."""


class DraftingMetrics:
    """Counters of merged drafts, with SGLang's `--enable-metrics`; to be made in its scheduler.

    Args:
        registry: where they are registered; that of the process if not given.
    """

    def __init__(self, registry: Any = None) -> None:
        from prometheus_client import REGISTRY, Counter  # noqa: PLC0415  (SGLang sets its folder)

        def counter(name: str, documentation: str, *labels: str) -> Any:
            return Counter(
                f"foredraft:spec_{name}", documentation, labels, registry=registry or REGISTRY
            )

        self._drafts = counter("drafts", "Verified drafts, one for each request of a step.")
        self._accepted_at = counter(
            "accepted_tokens_per_pos", "Drafts whose token at a position came true.", "position"
        )
        self._accepted_of = counter(
            "accepted_tokens", "Drafted tokens that came true, by who drafted them.", "source"
        )
        self._drafted_of = counter(
            "draft_tokens", "Drafted tokens that were verified, by who drafted them.", "source"
        )
        self._steps = counter(
            "steps", "Steps, by whether SGLang's drafter was run or skipped.", "drafter"
        )
        self._asked = self._skipped = 0

    def add(self, counts: Statistics, num_asked: int, num_skipped: int) -> None:
        """Add what was counted since the last call.

        Args:
            counts: since then.
            num_asked: steps in which SGLang's drafter was run, from the start.
            num_skipped: those in which it was not.
        """
        self._drafts.inc(counts.num_passes)
        for position, count in enumerate(counts.accepted_per_position()):
            self._accepted_at.labels(str(min(position, _MOST_POSITIONS - 1))).inc(count)
        _add(self._accepted_of, counts.accepted)
        _add(self._drafted_of, counts.drafted)
        self._steps.labels("run").inc(num_asked - self._asked)
        self._steps.labels("skipped").inc(num_skipped - self._skipped)
        self._asked, self._skipped = num_asked, num_skipped


def _add(counter: Any, counts: Mapping[Source, int]) -> None:
    for source, count in counts.items():
        counter.labels("drafter" if source == Source.MODEL else source.label).inc(count)

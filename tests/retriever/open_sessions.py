"""A drafter whose open sessions a test can look at."""

from collections.abc import Sequence
from typing import Unpack
from weakref import WeakValueDictionary

from retriever.predict.draft import Predictor
from retriever.sequences import SessionKey
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.options import DEFAULT_LIMITS, DrafterOptions
from retriever.sessions.refreshed_corpora import IndexState
from retriever.sessions.session_table import Session


class WatchedDrafter(EmbeddedDrafter):
    """Drafts as usual, and knows each session that it has begun as long as something else does.

    Attributes:
        predictor: of its drafts.
    """

    def __init__(
        self, indexes: Sequence[IndexState] = (), **options: Unpack[DrafterOptions]
    ) -> None:
        self._begun: WeakValueDictionary[SessionKey, Session] = WeakValueDictionary()
        limits = options.get("limits", DEFAULT_LIMITS)
        self.predictor = options.get("predictor") or Predictor(
            limits.max_budget_nodes, num_threads=options.get("threads", 1)
        )
        options["predictor"] = self.predictor
        super().__init__(indexes, **options)
        begin, begun = self.state.begin, self._begun

        def noting(key: SessionKey, prepared: Session) -> None:
            begin(key, prepared)
            begun[key] = prepared

        self.state.begin = noting  # type: ignore[method-assign]

    def session(self, name: str) -> Session:
        """Return the session that was last begun under a name."""
        return self._begun[SessionKey("", name)]

    def open_sessions(self) -> list[Session]:
        """Return the sessions that are open, the first one first."""
        return [each for each in self._begun.values() if each.is_open]

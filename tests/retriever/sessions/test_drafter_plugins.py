"""Plugins are told of all that a drafter keeps and deletes, in an order that they can rely on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from indexer.reader import Vocabulary
from retriever.drafter import Findings
from retriever.errors import InvalidRequestError, NotPossibleError
from retriever.limits import Limits
from retriever.predict.generations import Scope
from retriever.predict.pool import Entry
from retriever.sessions import drafter_plugins
from retriever.sessions.drafter_plugins import DrafterPlugin, FindingsKeeper
from retriever.sessions.drafter_state import DrafterState
from retriever.sessions.embedded import EmbeddedDrafter
from tests.retriever.token_ids import ids

VOCABULARY = Vocabulary(1000, "ab" * 32)


class Noting(DrafterPlugin):
    """Notes what it is told, and what was there at that moment."""

    name = "noting"

    def __init__(self, state: DrafterState) -> None:
        self.counts: list[tuple[object, ...]] = []
        self._state = state

    def on_vocabulary(self, fingerprint: str, vocabulary: Vocabulary | None) -> None:
        self.counts.append(("vocabulary", fingerprint, vocabulary == VOCABULARY))

    def on_remembered(self, entry: Entry) -> None:
        self.counts.append(("remembered", entry.tenant, entry.output.tokens.tolist()))

    @contextmanager
    def storing(self) -> Iterator[None]:
        self.counts.append(("storing",))
        yield
        self.counts.append(("stored",))

    def on_deleting(self, scope: Scope) -> None:
        self.counts.append(("deleting", scope.tenant, self._state.lock.locked(), self._tokens()))

    def on_deleted(self, scope: Scope) -> None:
        self.counts.append(("deleted", scope.tenant, self._state.lock.locked(), self._tokens()))

    def settle(self) -> None:
        self.counts.append(("settled",))

    def evict_idle(self, may_go: Callable[[str], bool]) -> bool:
        self.counts.append(("evict", may_go("big")))
        return False

    def shut_down(self) -> None:
        self.counts.append(("shut down", self._state.pools.is_logged))

    def _tokens(self) -> int:
        pool = self._state.pools.find("acme")
        return 0 if pool is None else pool.generations.num_tokens


class Attaching:
    """Options of a plugin."""

    def __init__(self, problem: str = "") -> None:
        self._problem = problem
        self.made: list[Noting] = []

    def check(self) -> None:
        if self._problem:
            raise InvalidRequestError(self._problem)

    def attach(self, state: DrafterState) -> Noting:
        self.made.append(Noting(state))
        return self.made[-1]


def test_a_plugin_is_told_of_what_is_kept_and_deleted(tmp_path: Path) -> None:
    options = Attaching()
    drafter = EmbeddedDrafter(vocabulary=VOCABULARY, state=tmp_path / "s", plugins=[options])
    drafter.remember(ids(1, 2, 3), tenant="acme")
    drafter.delete("acme")
    found = drafter.stats().plugins
    drafter.shut_down()
    [noting] = options.made
    assert list(found) == ["noting"]
    assert noting.counts == [
        ("vocabulary", VOCABULARY.fingerprint, True),
        ("remembered", "acme", [1, 2, 3]),
        ("storing",),
        ("stored",),
        ("deleting", "acme", True, 4),
        ("deleted", "acme", False, 0),
        ("settled",),
        ("storing",),
        ("stored",),
        ("shut down", True),
    ]


def test_a_plugin_that_cannot_be_attached_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="not today"):
        EmbeddedDrafter(
            vocabulary=VOCABULARY, state=tmp_path / "s", plugins=[Attaching("not today")]
        )
    EmbeddedDrafter(vocabulary=VOCABULARY, state=tmp_path / "s").shut_down()


def test_a_plugin_is_asked_first_where_room_is_short() -> None:
    options = Attaching()
    limits = Limits(max_bytes=1 << 20, generations_tokens=1024)
    drafter = EmbeddedDrafter(vocabulary=VOCABULARY, limits=limits, plugins=[options])
    for number in range(200):
        drafter.remember(ids(*range(100)), tenant=f"tenant-{number}")
    drafter.shut_down()
    [noting] = options.made
    assert ("evict", True) in noting.counts
    assert drafter.stats(census=False).evictions["pools"] > 0


def test_without_its_plugin_findings_are_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafter_plugins, "is_installed", lambda _: False)
    drafter = EmbeddedDrafter(vocabulary=VOCABULARY)
    assert type(drafter.state.findings) is FindingsKeeper
    some = Findings(
        np.array([7], np.int64), np.zeros((1, 8), np.int32), np.zeros((1, 8), np.float32)
    )
    for call in (
        lambda: drafter.state.share_findings("ab", some),
        lambda: drafter.state.fetch_findings("ab"),
    ):
        with pytest.raises(NotPossibleError, match=r"retriever\.plugins\.findings, which is not"):
            call()
    drafter.delete("")
    assert drafter.state.census().recycled_bytes == 0
    drafter.shut_down()

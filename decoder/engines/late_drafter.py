"""A drafter that becomes available later, because its kernels compile while the engine starts."""

from collections.abc import Callable, Sequence
from logging import getLogger
from threading import Event, Lock, Thread
from typing import Final

from numpy.typing import ArrayLike

from indexer.reader import Vocabulary
from retriever.drafter import (
    DEFAULT,
    Drafter,
    DraftRequest,
    OfOneProcess,
    Prediction,
    SequenceOptions,
)
from retriever.errors import DrafterUnavailableError
from retriever.sessions import cold_start
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree

_log = getLogger(__name__)

_LOOK_S: Final = 0.1
_COMPILING: Final = "kernels are being compiled for this machine: drafts start after that"


def without_waiting(drafter: Drafter) -> Drafter:
    """Return a drafter that never waits for a compiler: the given one if its kernels are cached.

    Args:
        drafter: any drafter; only a drafter in this process needs kernels.
    """
    if not isinstance(drafter, EmbeddedDrafter):
        return drafter
    if not cold_start.are_kept(drafter.state.token_widths):
        return LateDrafter(lambda: drafter, drafter.vocabulary)
    cold_start.defer_rare()
    return drafter


class LateDrafter(OfOneProcess):
    """Refuses all calls until its kernels are compiled, then passes calls to the opened drafter.

    Until then the engine decodes without drafts, as when a service is down.

    Args:
        open_drafter: function that opens the drafter; called in a thread of this object.
        vocabulary: vocabulary of the engine's tokenizer, if it is known.

    Attributes:
        vocabulary: vocabulary of the engine's tokenizer, if it is known.
        keeps_tenants: whether tenants are kept apart; see `Drafter`.
    """

    keeps_tenants = True

    def __init__(
        self, open_drafter: Callable[[], EmbeddedDrafter], vocabulary: Vocabulary | None = None
    ) -> None:
        self.vocabulary = vocabulary
        self._open = open_drafter
        self._drafter: EmbeddedDrafter | None = None
        self._is_shut_down = Event()
        self._opening = Lock()
        _log.warning(_COMPILING)
        self._thread = Thread(target=self._come, name="foredraft-compile", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether the drafter is open and its kernels are compiled."""
        return self._drafter is not None

    def open(self, session: str, prompt: ArrayLike, options: SequenceOptions = DEFAULT) -> None:
        """Begin a sequence; see `EmbeddedDrafter.open`.

        Raises:
            DrafterUnavailableError: kernels are still being compiled.
        """
        self._ready().open(session, prompt, options)

    def add_predictions(self, session: str, predictions: Sequence[Prediction]) -> None:
        """Add texts that a sequence is expected to contain; see `open`."""
        self._ready().add_predictions(session, predictions)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Commit new tokens and draft; see `open`."""
        return self._ready().draft(requests)

    def close(
        self, session: str, new_tokens: ArrayLike | None = None, *, remember: bool = True
    ) -> None:
        """End a sequence; see `open`."""
        self._ready().close(session, new_tokens, remember=remember)

    def shut_down(self) -> None:
        """Stop compiling; close the drafter if it is open."""
        self._is_shut_down.set()
        with self._opening:
            if self._drafter is not None:
                self._drafter.shut_down()

    def _ready(self) -> EmbeddedDrafter:
        if self._drafter is None:
            raise DrafterUnavailableError(_COMPILING)
        return self._drafter

    def _come(self) -> None:
        try:
            if not self._compile(()):
                return
            with self._opening:
                if self._is_shut_down.is_set():
                    return
                drafter = self._open()
            if not self._compile(drafter.state.token_widths):
                drafter.shut_down()
                return
            drafter.warm()
            cold_start.defer_rare()
            with self._opening:
                if self._is_shut_down.is_set():
                    drafter.shut_down()
                    return
                self._drafter = drafter
        except Exception:  # noqa: BLE001  (the engine continues without drafts)
            _log.exception("no drafts from now on: the drafter cannot be opened")
            return
        _log.warning("kernels are compiled: drafts are made from now on")

    def _compile(self, widths: Sequence[int] | set[int]) -> bool:
        """Compile kernels in another process; return whether to continue."""
        process = cold_start.begin_compiling(widths)
        try:
            while process.poll() is None:
                if self._is_shut_down.wait(_LOOK_S):
                    return False
        finally:
            process.kill()
        return True

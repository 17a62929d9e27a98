"""A service of several of one model, in this process."""

from retriever.limits import Limits
from retriever.operations.observer import ServiceObserver
from retriever.service.serving import start
from tests.patience import free_address
from tests.retriever.open_sessions import WatchedDrafter
from tests.retriever.security.in_process import on_loop


class Replica:
    """A service in this process that can drain, end and begin again at its address."""

    def __init__(self, limits: Limits = Limits()) -> None:  # noqa: B008  (it is frozen)
        self.limits = limits
        self.address = free_address()
        self.drafter = WatchedDrafter(limits=limits)
        self.begin()

    def begin(self) -> None:
        self._observer = ServiceObserver()
        self._server, _ = on_loop(start(self.drafter, self.address, self._observer))

    def drain(self) -> None:
        on_loop(self._observer.lifecycle.drain(lambda: True, 0))

    def end(self) -> None:
        on_loop(self._server.stop(0))

    def shut_down(self) -> None:
        on_loop(self._server.stop(0))
        self.drafter.shut_down()

    @property
    def num_sessions(self) -> int:
        return len(self.drafter.state.sessions)

    @property
    def generated_tokens(self) -> int:
        return self.drafter.state.census().generations_tokens

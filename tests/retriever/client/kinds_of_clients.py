"""Every client of a service, with one face: of the asynchronous one each call is awaited."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final, Self

import pytest
from numpy.typing import ArrayLike

from retriever.client.asynchronous import AsyncResilientDrafter
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DEFAULT, DraftRequest, Prediction, SequenceOptions
from retriever.tree import DraftTree
from tests.retriever.security.in_process import on_loop

LONG_S: Final = 30.0
"""Beyond what any draft takes on a busy machine."""


class Awaited:
    """The asynchronous client, each call awaited on an event loop."""

    def __init__(self, addresses: str, **options: Any) -> None:
        async def made() -> AsyncResilientDrafter:
            return AsyncResilientDrafter(addresses, **options)

        self.drafter = on_loop(made())

    def open(self, session: str, prompt: ArrayLike, options: SequenceOptions = DEFAULT) -> None:
        on_loop(self.drafter.open(session, prompt, options))

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return on_loop(self.drafter.draft(requests))

    def draft_ahead(
        self, requests: Sequence[DraftRequest], timeout_s: float
    ) -> list[list[DraftTree]]:
        return on_loop(self.drafter.draft_ahead(requests, timeout_s))

    def add_predictions(self, session: str, predictions: Sequence[Prediction]) -> None:
        on_loop(self.drafter.add_predictions(session, predictions))

    def close(self, session: str, new_tokens: ArrayLike | None = None) -> None:
        on_loop(self.drafter.close(session, new_tokens))

    def wait(self, timeout_s: float) -> bool:
        return on_loop(self.drafter.wait(timeout_s))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        on_loop(self.drafter.shut_down())


Client = Callable[..., Any]
both = pytest.mark.parametrize("client", [ResilientDrafter, Awaited])

CLIENTS: Final = MappingProxyType[str, Callable[[str], Any]](
    {
        "strict": lambda address: RemoteDrafter(address, timeout_s=LONG_S),
        "resilient": lambda address: ResilientDrafter(address, deadline_s=LONG_S, local=False),
        "async": lambda address: Awaited(address, deadline_s=LONG_S, local=False),
        "parts": lambda address: ResilientDrafter(
            address, deadline_s=LONG_S, local=False, are_parts=True
        ),
    }
)
clients = pytest.mark.parametrize("connect", CLIENTS.values(), ids=CLIENTS)


def ready(drafter: Any) -> Any:
    """Return a client once it is connected."""
    if hasattr(drafter, "wait"):
        assert drafter.wait(LONG_S)
    return drafter

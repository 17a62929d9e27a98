"""Findings of decoders, shared through one service or one of several."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Final, Self, TypeVar

from retriever.client.credentials import Credentials
from retriever.client.strict import RemoteDrafter
from retriever.drafter import Findings, FoundPage
from retriever.errors import DrafterUnavailableError

_TIMEOUT_S: Final = 2.0

_Result = TypeVar("_Result")


class SharedFindings:
    """A `FindingsStore` at one or several services; all decoders of a model use the same service.

    Rendezvous hashing orders the services by model and address, and the first is used. If it does
    not answer, the next one is called.

    Args:
        addresses: addresses of the services; those separated by commas are replicas.
        vocabulary_fingerprint: fingerprint of the model's tokenizer; a service for another
            tokenizer refuses.
        credentials: credentials to send and to verify the servers with; None for services that need
            none.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        vocabulary_fingerprint: str = "",
        credentials: Credentials | None = None,
    ) -> None:
        single = {each.strip() for address in addresses for each in address.split(",")}
        self._services = {
            address: RemoteDrafter(
                address,
                timeout_s=_TIMEOUT_S,
                vocabulary_fingerprint=vocabulary_fingerprint,
                credentials=credentials,
            )
            for address in sorted(single)
        }

    def share_findings(self, model: str, findings: Findings) -> None:
        """Store findings at a service; see `FindingsStore.share_findings`."""
        self._first(model, lambda service: service.share_findings(model, findings))

    def fetch_findings(self, model: str, before: int = 0) -> FoundPage:
        """Return a page of a model's findings at a service; see `FindingsStore.fetch_findings`."""
        return self._first(model, lambda service: service.fetch_findings(model, before))

    def shut_down(self) -> None:
        """Close the connections."""
        for service in self._services.values():
            service.shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def _first(self, model: str, ask: Callable[[RemoteDrafter], _Result]) -> _Result:
        """Call the services in turn until one answers or refuses.

        Raises:
            DrafterUnavailableError: no service answers; the first service's error is raised.
            RetrieverError: the refusal of the service.
        """
        failure: DrafterUnavailableError | None = None
        for address in sorted(self._services, key=lambda each: _rank(each, model)):
            try:
                return ask(self._services[address])
            except DrafterUnavailableError as error:
                failure = failure or error
        raise failure or DrafterUnavailableError("no service is named")


def _rank(address: str, model: str) -> bytes:
    return sha256(f"{address}\0{model}".encode()).digest()

"""The client that some addresses ask for."""

from collections.abc import Sequence
from typing import Final

from retriever.client.credentials import Credentials
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import DEFAULT_TIMEOUT_S, RemoteDrafter
from retriever.errors import InvalidRequestError

DEFAULT_DEADLINE_S: Final = 0.02
"""How long a step waits for several services, in seconds: longer keeps late evidence, shorter
bounds the delay of a step by a slow one."""


def connect(
    addresses: str | Sequence[str],
    *,
    deadline_s: float = DEFAULT_DEADLINE_S,
    vocabulary_fingerprint: str = "",
    credentials: Credentials | None = None,
) -> RemoteDrafter | ResilientDrafter:
    """Return a client of one service, of several that each hold a part of a corpus, or of replicas.

    Args:
        addresses: of the services; a string is the address of one. Addresses with commas between
            them, in one string, are replicas: each session is at one of them.
        deadline_s: longest wait of a step for one of several, in seconds.
        vocabulary_fingerprint: of the caller's tokenizer; empty if unknown.
        credentials: to send and to verify the server with; None for services that need none.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
        InvalidRequestError: no address, a duplicate, or replicas of a part of a corpus.
    """
    listed = [addresses] if isinstance(addresses, str) else addresses
    are_replicas = any("," in each for each in listed)
    if are_replicas and len(listed) > 1:
        raise InvalidRequestError(
            "parts of a corpus have no replicas: name one service for each part, or the replicas "
            "of a whole corpus in one address, with commas"
        )
    if len(listed) == 1 and not are_replicas:
        return RemoteDrafter(
            listed[0], vocabulary_fingerprint=vocabulary_fingerprint, credentials=credentials
        )
    drafter = ResilientDrafter(
        [each.strip() for each in listed[0].split(",")] if are_replicas else listed,
        deadline_s=deadline_s,
        are_parts=not are_replicas,
        vocabulary_fingerprint=vocabulary_fingerprint,
        credentials=credentials,
    )
    drafter.wait(DEFAULT_TIMEOUT_S)
    return drafter

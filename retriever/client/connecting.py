"""Chooses the client for a list of addresses."""

from collections.abc import Sequence
from logging import getLogger
from typing import Final

from retriever.client.credentials import Credentials
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import DEFAULT_TIMEOUT_S, RemoteDrafter
from retriever.errors import InvalidRequestError

_log = getLogger(__name__)

DEFAULT_DEADLINE_S: Final = 0.02
"""Longest wait of a step for several services, in seconds. A longer wait uses more late drafts; a
shorter one reduces the delay by a slow service."""


def named_services(addresses: Sequence[str]) -> tuple[list[str], bool]:
    """Return the services that the addresses name, and whether each holds a part of a corpus.

    Args:
        addresses: address of one service, or addresses of several services that hold parts. A
            single address with commas in it names replicas.

    Raises:
        InvalidRequestError: the addresses name replicas of a part of a corpus.
    """
    if len(addresses) == 1:
        return [each.strip() for each in addresses[0].split(",")], False
    if any("," in each for each in addresses):
        raise InvalidRequestError(
            "parts of a corpus have no replicas: name one service for each part, or the replicas "
            "of a whole corpus in one address, with commas"
        )
    return list(addresses), True


def connect(
    addresses: str | Sequence[str],
    *,
    deadline_s: float = DEFAULT_DEADLINE_S,
    vocabulary_fingerprint: str = "",
    credentials: Credentials | None = None,
) -> RemoteDrafter | ResilientDrafter:
    """Return a client of one service, of several that each hold a part of a corpus, or of replicas.

    Args:
        addresses: addresses of the services; a string is the address of one. Addresses separated by
            commas in one string are replicas: each session is at one of them.
        deadline_s: longest wait of a step for one of several services, in seconds.
        vocabulary_fingerprint: fingerprint of the caller's tokenizer; empty if unknown.
        credentials: credentials to send and to verify the server with; None for services that need
            none.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
        InvalidRequestError: there is no address, a duplicate, or replicas of a part of a corpus.
    """
    listed, are_parts = named_services([addresses] if isinstance(addresses, str) else addresses)
    if len(listed) == 1:
        return RemoteDrafter(
            listed[0], vocabulary_fingerprint=vocabulary_fingerprint, credentials=credentials
        )
    drafter = ResilientDrafter(
        listed,
        deadline_s=deadline_s,
        are_parts=are_parts,
        vocabulary_fingerprint=vocabulary_fingerprint,
        credentials=credentials,
    )
    drafter.wait(DEFAULT_TIMEOUT_S)
    for address in listed:
        if not drafter.is_up(address):
            _log.warning("drafting continues without %s, which cannot be used now", address)
    return drafter

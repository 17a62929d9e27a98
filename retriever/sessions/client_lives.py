"""The clients of each tenant, and which life of each is the current one."""

from collections import OrderedDict
from typing import Final, NamedTuple

from retriever.errors import InvalidRequestError, StaleClientError
from retriever.limits import MAX_NAME_BYTES, shown

MAX_CLIENTS: Final = 1024
"""Names remembered of one tenant, the latest: more than it runs engines, and half a megabyte."""

MAX_TENANTS: Final = 4096
"""Tenants whose clients are remembered, the latest."""


class Client(NamedTuple):
    """A client that can come back: an engine's process.

    Attributes:
        name: within the tenant; outlives the process.
        incarnation: higher in each later life.
    """

    name: str
    incarnation: int = 0


def check_client(client: Client) -> None:
    """Refuse an invalid name of a client.

    Raises:
        InvalidRequestError: the name is empty or too long.
    """
    if not 0 < len(client.name.encode(errors="replace")) <= MAX_NAME_BYTES:
        raise InvalidRequestError(f"a client's name has 1 to {MAX_NAME_BYTES} bytes")


class ClientLives:
    """The highest incarnation of each client so far. Not thread-safe: callers hold a lock."""

    def __init__(self) -> None:
        self._of_tenant: OrderedDict[str, OrderedDict[str, int]] = OrderedDict()

    def begins(self, tenant: str, client: Client) -> bool:
        """Note a client; return whether this is the first that is heard of this life.

        Raises:
            StaleClientError: a later incarnation has been noted.
        """
        known = self._of_tenant.get(tenant)
        if known is None:
            known = self._of_tenant[tenant] = OrderedDict()
        latest = known.get(client.name, -1)
        if client.incarnation < latest:
            raise StaleClientError(
                f"client {shown(client.name)} has come back as incarnation {latest}, which took "
                f"the sessions of incarnation {client.incarnation} over: end this one, or give "
                "clients that run side by side names of their own"
            )
        known[client.name] = client.incarnation
        known.move_to_end(client.name)
        self._of_tenant.move_to_end(tenant)
        if len(known) > MAX_CLIENTS:
            known.popitem(last=False)
        if len(self._of_tenant) > MAX_TENANTS:
            self._of_tenant.popitem(last=False)
        return client.incarnation > latest

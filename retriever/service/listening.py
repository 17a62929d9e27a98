"""Addresses of a service: checks and binding."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from grpc import aio

from retriever.errors import AddressInUseError
from retriever.security.protection import ServerTls

UNIX: Final = "unix:"
"""Prefix of the addresses of unix sockets."""

_MAX_PORT: Final = 65535
_NOBODY_ELSE: Final = 0o177


def check_address(address: str) -> None:
    """Refuse invalid addresses, also those that gRPC misreads: it takes ports modulo 65536.

    Raises:
        AddressInUseError: the address is taken or cannot be bound.
    """
    if address.startswith(UNIX):
        _check_socket_is_free(Path(address.removeprefix(UNIX)))
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > _MAX_PORT:
        raise AddressInUseError(
            f"cannot listen on {address}: an address is HOST:PORT, with a port from 0 to "
            f"{_MAX_PORT}, or unix:/PATH"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError as error:
        raise AddressInUseError(
            f"cannot listen on {address}: {error.strerror or error}; choose another --address"
        ) from error


def _check_socket_is_free(path: Path) -> None:
    """Refuse a unix socket in use: binding would take it over."""
    if not path.parent.is_dir():
        raise AddressInUseError(f"cannot listen on {path}: there is no folder {path.parent}")
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return  # left by a server that has ended
    raise AddressInUseError(f"a service listens on {path} already: choose another --address")


def listen(server: aio.Server, address: str, tls: ServerTls | None) -> int:
    """Bind a server; return the port. A unix socket has the mode 0600 from its creation.

    Raises:
        AddressInUseError: the address is taken or cannot be bound.
    """
    try:
        with _private_sockets():
            if tls is not None:
                return server.add_secure_port(address, tls.credentials())
            return server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressInUseError(
            f"cannot listen on {address}: it is taken or not an address of this machine; "
            "choose another with --address"
        ) from error


@contextmanager
def _private_sockets() -> Iterator[None]:
    """Make files created in the block readable and writable by this user only."""
    before = os.umask(_NOBODY_ELSE)
    try:
        yield
    finally:
        os.umask(before)

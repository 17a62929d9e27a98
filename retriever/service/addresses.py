"""Addresses that a service listens on: checks before binding, and access to unix sockets."""

import grp
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from grpc import aio

from retriever.errors import AddressInUseError, SettingsError
from retriever.operations.resolving import without_password
from retriever.security.protection import ServerTls

UNIX: Final = "unix:"
"""Prefix of addresses of unix sockets."""

_MAX_PORT: Final = 65535
_NOBODY_ELSE: Final = 0o177
_OWNER_ALONE: Final = 0o600


@dataclass(frozen=True, slots=True)
class SocketAccess:
    """Who may connect to a unix socket.

    Attributes:
        mode: permission bits; users who may write may connect.
        group: number of the socket's group; None for the group of the process.
    """

    mode: int = _OWNER_ALONE
    group: int | None = None

    @classmethod
    def of(cls, mode: str, group: str | None) -> Self:
        """Return the access that the settings define.

        Args:
            mode: octal digits.
            group: name or number of a group that this process can give files to.

        Raises:
            SettingsError: there is no such group, or this process is not a member of it.
        """
        if not group:
            return cls(int(mode, 8))
        number = _number_of(group)
        if number not in (os.getegid(), *os.getgroups()) and os.geteuid() != _ROOT:
            raise SettingsError(
                f"--socket-group {group}: this process runs as a user who is not in it: add "
                "the user to the group, or name one of its own"
            )
        return cls(int(mode, 8), number)


OWNER_ALONE: Final = SocketAccess()

_ROOT: Final = 0


def _number_of(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        if group.isascii() and group.isdigit() and int(group) < _NO_GROUP:
            return int(group)
        raise SettingsError(
            f"--socket-group {group}: there is no such group: `getent group` lists them"
        ) from error


_NO_GROUP: Final = (1 << 32) - 1  # chown(2): leave unchanged


def check_address(address: str, setting: str = "--address") -> None:
    """Refuse an address that cannot be bound, or that gRPC misreads by taking ports modulo 65536.

    Args:
        address: address to listen on.
        setting: name of its setting, for messages.

    Raises:
        AddressInUseError: the address is in use or cannot be bound.
    """
    if address.startswith(UNIX):
        _check_socket_is_free(Path(address.removeprefix(UNIX)), setting)
        return
    host, _, port = address.rpartition(":")
    shown = without_password(address)
    if not host or not port.isascii() or not port.isdigit() or int(port) > _MAX_PORT:
        raise AddressInUseError(
            f"cannot listen on {shown}: an address is HOST:PORT, with a port from 0 to "
            f"{_MAX_PORT}, or unix:/PATH"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError as error:
        raise AddressInUseError(
            f"cannot listen on {shown}: {error.strerror or error}; choose another {setting}"
        ) from error


def _check_socket_is_free(path: Path, setting: str) -> None:
    """Refuse a unix socket on which another process serves: binding would replace it."""
    if not path.parent.is_dir():
        raise AddressInUseError(f"cannot listen on {path}: there is no folder {path.parent}")
    try:
        if not path.is_socket():
            return
    except OSError as error:
        raise AddressInUseError(
            f"cannot listen on {path}: {error.strerror or error}; choose another {setting}"
        ) from error
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return  # left over from a dead server
    raise AddressInUseError(f"another process serves on {path} already: choose another {setting}")


def listen(server: aio.Server, address: str, tls: ServerTls | None, access: SocketAccess) -> int:
    """Have a server listen; return the port.

    A unix socket is created for only its owner and then opened to those that `access` allows. At no
    moment is it open to others.

    Raises:
        AddressInUseError: the address is in use or cannot be bound, or a socket cannot be opened to
            its group.
    """
    try:
        with _private_sockets():
            if tls is not None:
                port = server.add_secure_port(address, tls.credentials())
            else:
                port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressInUseError(
            f"cannot listen on {address}: it is in use or not an address of this machine; "
            "choose another with --address"
        ) from error
    if address.startswith(UNIX) and access != OWNER_ALONE:
        _open_up(Path(address.removeprefix(UNIX)), access)
    return port


def _open_up(path: Path, access: SocketAccess) -> None:
    """Set the group of a socket, then its mode, so that the previous group gets no access.

    This works on the descriptor, so a file that another user puts in its place meanwhile is not
    changed.
    """
    if not hasattr(os, "O_PATH"):
        raise AddressInUseError("--socket-mode and --socket-group need Linux: leave them out")
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISSOCK(found.st_mode):
                raise AddressInUseError(f"{path} was replaced while it was made: try again")
            itself = f"/proc/self/fd/{descriptor}"  # fchmod(2) does not take an O_PATH descriptor
            if access.group not in (None, found.st_gid):  # a systemd unit may forbid chown(2)
                os.chown(itself, -1, access.group)
            Path(itself).chmod(access.mode)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise AddressInUseError(
            f"{path} cannot be opened to --socket-mode {access.mode:04o}"
            + (f" and --socket-group {access.group}" if access.group is not None else "")
            + f": {error.strerror or error}"
        ) from error


@contextmanager
def _private_sockets() -> Iterator[None]:
    """Create files with permissions for only this user during the block."""
    before = os.umask(_NOBODY_ELSE)
    try:
        yield
    finally:
        os.umask(before)

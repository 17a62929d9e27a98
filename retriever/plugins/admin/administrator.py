"""The client of a service's admin plane, and the messages of its contract."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from retriever.client.credentials import Credentials, open_channel
from retriever.errors import DrafterUnavailableError, RetrieverError
from retriever.v1 import admin_pb2 as messages
from retriever.v1.admin_pb2_grpc import AdminServiceStub
from retriever.wire.channels import CLIENT_OPTIONS
from retriever.wire.statuses import error_of

__all__ = ["administering", "messages"]


@contextmanager
def administering(address: str, credentials: Credentials | None = None) -> Iterator[Any]:
    """Yield the calls of a service's admin contract; their errors become ours within the block.

    Args:
        address: address of the admin plane: HOST:PORT or unix:PATH.
        credentials: credentials to send and to verify the server with; None for a unix socket that
            needs none.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
        DrafterUnavailableError: there is no answer, or not in time.
        NotPossibleError: the service cannot do this in its current state.
        UnknownIndexError: there is no such index, or it is not attached.
        RetrieverError: the service refused the call.
    """
    with open_channel(address, credentials, CLIENT_OPTIONS) as channel:
        try:
            yield AdminServiceStub(channel)
        except grpc.RpcError as error:
            raise _error_of(error, address) from error


def _error_of(error: Any, address: str) -> RetrieverError:
    code = error.code()
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return DrafterUnavailableError(
            f"{address} is not for operators: give the address that the service has as "
            "--admin-address"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DrafterUnavailableError(
            f"{address} did not answer in time; the operation continues there: give a longer "
            "--timeout-s, or check the service's log"
        )
    return error_of(error)

"""`python -m retriever.operations.health [ADDRESS]`: ends with 0 if a service there takes calls.

For health checks of containers: it loads only gRPC and starts in a fraction of a second.
The default address is FOREDRAFT_ADDRESS, as for the service. TLS credentials come from the
environment, as for every client. `foredraft health` does the same, with flags.
"""

import os
import sys
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from retriever.client.credentials import Credentials, open_channel
from retriever.errors import CredentialsError
from retriever.wire.statuses import advice

SERVICE: Final = "retriever.v1.RetrieverService"
TIMEOUT_S: Final = 4.0  # below the usual 5 s of a container's health check
_VARIABLE: Final = "FOREDRAFT_ADDRESS"


def why_not_serving(
    address: str, timeout_s: float = TIMEOUT_S, credentials: Credentials | None = None
) -> str:
    """Return in one line why a service takes no calls; empty if it takes calls.

    Args:
        address: HOST:PORT or unix:PATH.
        timeout_s: how long it may take to answer, in seconds.
        credentials: for TLS; None for an unencrypted connection.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
    """
    with open_channel(address, credentials, ()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"no answer from {address}: {_reason_of(error)}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"the service at {address} takes no calls now: it starts, or is about to end"


def _reason_of(error: Any) -> str:
    details = str(error.details() or "")
    return advice(details) or f"{error.code().name}, {' '.join(details.split())}"


def _main(arguments: list[str]) -> str:
    address = (arguments or [os.environ.get(_VARIABLE, "")])[0]
    if not address or len(arguments) > 1:
        return f"usage: python -m retriever.operations.health ADDRESS (default: ${_VARIABLE})"
    try:
        return why_not_serving(address, credentials=Credentials.from_environment())
    except CredentialsError as error:
        return f"error: {error}"


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]) or 0)

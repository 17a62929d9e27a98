"""`python -m retriever.operations.health [--live] [ADDRESS]`: exits with 0 if a service is healthy.

Healthy means that the service takes calls or, with `--live`, that it answers, even while it starts
or drains. This module is for container health checks: it loads only gRPC and starts in a fraction
of a second.

The default address is FOREDRAFT_ADDRESS, as for the service. TLS credentials come from the
environment, as for every client. If the environment sets none but the service's own
FOREDRAFT_CERTIFICATE, that certificate is trusted, under one of its names. No token is needed.
`foredraft health` does the same, with flags.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from retriever.client.credentials import Credentials, open_channel
from retriever.errors import CredentialsError
from retriever.security.private_files import read_file
from retriever.wire.statuses import error_of

SERVICE: Final = "retriever.v1.RetrieverService"
LIVENESS: Final = "liveness"
TIMEOUT_S: Final = 4.0  # below the usual 5 s of a container's health check
_VARIABLE: Final = "FOREDRAFT_ADDRESS"
_CERTIFICATE: Final = "FOREDRAFT_CERTIFICATE"
_LIVE: Final = "--live"


def why_not_serving(
    address: str,
    timeout_s: float = TIMEOUT_S,
    credentials: Credentials | None = None,
    *,
    live: bool = False,
) -> str:
    """Return in one line why a service does not take calls; empty if it does.

    Args:
        address: HOST:PORT or unix:PATH.
        timeout_s: how long the service may take to answer, in seconds.
        credentials: credentials for TLS; None for an unencrypted connection.
        live: whether it is enough that the service answers, even while it starts or drains.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
    """
    with open_channel(address, credentials, ()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            asked = health_pb2.HealthCheckRequest(service=LIVENESS if live else SERVICE)
            answer = stub.Check(asked, timeout=timeout_s)
        except grpc.RpcError as error:
            return str(error_of(error, address))
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return (
        f"the service at {address} takes no calls now: it is starting, draining, or cannot read "
        "its credential files"
    )


def own_credentials(environment: Mapping[str, str] = os.environ) -> Credentials | None:
    """Return credentials from the environment, else for the service configured there, if any.

    Raises:
        CredentialsError: a file cannot be used.
    """
    given = Credentials.from_environment(environment)
    path = Path(environment.get(_CERTIFICATE, ""))
    if given is not None or path == Path():
        return given
    # gRPC trusts a certificate that is given as an authority, no matter who signed it.
    from retriever.security import certificates  # noqa: PLC0415  (an extra)

    identities = certificates.certified(read_file(path)).identities
    name = next((each for each in identities if each.startswith(("DNS:", "IP:", "CN:"))), "")
    return Credentials(ca=path, server_name=name.partition(":")[2].replace("*", "any"))


def _main(arguments: list[str]) -> str:
    addresses = [each for each in arguments if each != _LIVE]
    address = (addresses or [os.environ.get(_VARIABLE, "")])[0]
    if not address or len(addresses) > 1 or address.startswith("-"):
        return (
            f"usage: python -m retriever.operations.health [{_LIVE}] ADDRESS (default: "
            f"${_VARIABLE})"
        )
    try:
        return why_not_serving(address, credentials=own_credentials(), live=_LIVE in arguments)
    except CredentialsError as error:
        return f"error: {error}"


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]) or 0)

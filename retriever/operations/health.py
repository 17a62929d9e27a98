"""`python -m retriever.operations.health ADDRESS`: ends with 0 if a service there takes calls.

For health checks of containers: it starts quickly, as it loads nothing but gRPC.
"""

import sys
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE: Final = "retriever.v1.RetrieverService"
TIMEOUT_S: Final = 4.0


def is_serving(address: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Ask whether a service takes calls, without encryption; no answer is a no."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    if len(sys.argv) != 2:  # noqa: PLR2004  (the module and the address)
        sys.exit("usage: python -m retriever.operations.health ADDRESS")
    sys.exit(0 if is_serving(sys.argv[1]) else 1)

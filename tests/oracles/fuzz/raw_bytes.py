"""Raw bytes for a service: in the place of messages, and in that of gRPC itself."""

import random
import socket
from collections import Counter
from contextlib import suppress
from typing import Any, Final

import grpc

from retriever.v1 import retriever_pb2 as pb
from tests.oracles.fuzz.fuzzing import CrashError

_TIMEOUT_S: Final = 10.0
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["RetrieverService"]
_HTTP2: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def send_raw(address: str, num_messages: int, seed: int) -> Counter[str]:
    """Call every method with bytes that are mostly no message; return what calls ended with.

    Raises:
        CrashError: a call ended with the status that no server answers.
    """
    chance = random.Random(seed)
    outcomes: Counter[str] = Counter()
    with grpc.insecure_channel(address) as channel:
        for _ in range(num_messages):
            method = chance.choice(_SERVICE.methods)
            content = chance.randbytes(chance.choice((0, 1, 5, 50, 500)))
            outcome = outcome_of(channel, method.name, content)
            if outcome in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}:
                raise CrashError(f"{method.name} with {content.hex()}: {outcome}")
            outcomes[outcome] += 1
    return outcomes


def send_to_socket(address: str, num_connections: int, seed: int) -> Counter[str]:
    """Write bytes to a TCP socket that are no gRPC; return how many connections that were.

    Raises:
        OSError: the server no longer listens.
    """
    chance = random.Random(seed)
    host, _, port = address.rpartition(":")
    for _ in range(num_connections):
        with socket.create_connection((host, int(port)), _TIMEOUT_S) as connection:
            begin = chance.choice((_HTTP2, b""))
            with suppress(ConnectionError):
                connection.sendall(begin + chance.randbytes(chance.choice((1, 9, 100, 3000))))
    return Counter({"connections": num_connections})


def outcome_of(channel: Any, method: str, content: bytes) -> str:
    """Return the name of the status that a call with these bytes as its message ends with."""
    path = f"/{_SERVICE.full_name}/{method}"
    try:
        if method == "DraftStream":
            for _ in channel.stream_stream(path)(iter([content]), timeout=_TIMEOUT_S):
                pass
        else:
            channel.unary_unary(path)(content, timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"

"""gRPC channel options of clients and services."""

from typing import Final

from retriever.limits import MAX_MESSAGE_BYTES

CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

ENABLE_PROXY: Final = "grpc.enable_http_proxy"

_KEEPALIVE: Final = (
    # A vanished peer is noticed within 15 s, and its sessions end.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # gRPC's default is a minute
)

CLIENT_OPTIONS: Final = (
    *CHANNEL_OPTIONS,
    *_KEEPALIVE,
    # A new client to the same address must not wait for gRPC's connection back-off.
    ("grpc.use_local_subchannel_pool", 1),
    # Draft services are called directly; `http_proxy` is for the web. `Credentials.proxy` is for
    # services that are reached through a proxy.
    (ENABLE_PROXY, 0),
)


def server_options(max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    """Return the channel options of a server."""
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        *_KEEPALIVE,
        # Pings without an active call are allowed: clients send them to keep idle connections open.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.so_reuseport", 0),
    )

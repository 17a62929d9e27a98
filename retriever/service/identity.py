"""Who is calling."""

from typing import Any

from grpc import aio


def tenant_of(context: aio.ServicerContext[Any, Any]) -> str:
    """Return the tenant whose call this is; the empty name is that of whoever gives none."""
    del context
    return ""

"""What is deleted together: all that a tenant has, or what came of sessions of one name."""

from hashlib import sha256
from typing import NamedTuple, Self


class Scope(NamedTuple):
    """What is deleted, or what an output is deleted with.

    Attributes:
        tenant: its name.
        origin: of outputs, see `session_origin`; empty for all that the tenant has.
    """

    tenant: str
    origin: bytes = b""

    def covers(self, other: Self) -> bool:
        """Tell whether to delete this deletes that."""
        return self.tenant == other.tenant and self.origin in {b"", other.origin}


def session_origin(name: str) -> bytes:
    """Return what tells a session's outputs from others, and does not tell its name."""
    return sha256(name.encode()).digest()[:16] if name else b""

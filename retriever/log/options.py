"""Options of the log of generations."""

from dataclasses import dataclass
from typing import Final

from retriever.limits import DEFAULT_DURABILITY, Durability, Limits

_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of a log.

    Attributes:
        capacity: tokens to keep of each tenant, as `Generations` counts them.
        max_age_s: outputs older than this are removed, in seconds.
        durability: what an acknowledged output survives.
        max_bytes: largest size of the file. The default holds 4,096 tenants' full rings at 4 bytes
            a token.
    """

    capacity: int = _LIMITS.generations_tokens
    max_age_s: float = _LIMITS.generations_age_s
    durability: Durability = DEFAULT_DURABILITY
    max_bytes: int = 16 << 30

"""Options of the log of generations."""

from dataclasses import dataclass
from typing import Final

from retriever.limits import DEFAULT_DURABILITY, Durability, Limits

_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of a log.

    Attributes:
        capacity: number of tokens to store per tenant, as `Generations` counts them.
        max_age_s: outputs older than this are removed, in seconds.
        durability: the kind of failure that an acknowledged output survives.
        max_bytes: largest size of the file. The default holds the full rings of 4,096 tenants at
            4 bytes per token.
    """

    capacity: int = _LIMITS.generations_tokens
    max_age_s: float = _LIMITS.generations_age_s
    durability: Durability = DEFAULT_DURABILITY
    max_bytes: int = 16 << 30

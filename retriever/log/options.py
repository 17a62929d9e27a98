"""How a log of generations is kept."""

from dataclasses import dataclass
from typing import Final, Literal

from retriever.limits import Limits

Durability = Literal["process", "disk"]
"""What an acknowledged output survives: the end of the process, or that of the machine too."""

DEFAULT_DURABILITY: Final[Durability] = "process"

_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How a log is kept.

    Attributes:
        capacity: tokens to keep of each tenant, as `Generations` counts them.
        max_age_s: outputs older than this are removed, in seconds.
        durability: what an acknowledged output survives.
        max_bytes: what the file may grow to. With the default capacity 4,096 tenants' full rings,
            at 4 bytes a token.
    """

    capacity: int = _LIMITS.generations_tokens
    max_age_s: float = _LIMITS.generations_age_s
    durability: Durability = DEFAULT_DURABILITY
    max_bytes: int = 16 << 30

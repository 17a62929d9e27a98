"""Who a drafter is among the others, and how far it has read: what outlives its process."""

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Final, Self

from retriever.scopes import Scope
from retriever.warmth.records import REPLICA_BYTES

BEGINNING: Final = "0-0"
"""The offset that everything in a stream comes after."""

_MAX_REPLICAS: Final = 1024
_EPOCH_BITS: Final = 32


@dataclass(slots=True)
class Position:
    """What a drafter must know to go on where it was.

    Attributes:
        replica: who it is.
        epoch: of its life as a process, above all before; the upper half of its records' numbers.
        outputs: id of the last entry read of the stream of outputs; None before it has read any.
        deletions: the same of the stream of deletions.
        numbers: highest number read of each other drafter.
        unsent: times of deletions that the server does not know of yet.
    """

    replica: bytes = field(default_factory=lambda: secrets.token_bytes(REPLICA_BYTES))
    epoch: int = 0
    outputs: str | None = None
    deletions: str | None = None
    numbers: dict[bytes, int] = field(default_factory=dict)
    unsent: dict[Scope, float] = field(default_factory=dict)

    @classmethod
    def resume(cls, kept: bytes | None) -> Self:
        """Return the position of a life after the one that kept these bytes, or of a first one."""
        position = cls()
        if kept is not None:
            try:
                position = cls._from_json(json.loads(kept))
            except (ValueError, TypeError, KeyError, AttributeError):
                position = cls()  # of another version: a new drafter, which reads all
        position.epoch = max(position.epoch + 1, int(time.time()))
        return position

    def to_bytes(self) -> bytes:
        """Return what `resume` reads."""
        values = {
            "replica": self.replica.hex(),
            "epoch": self.epoch,
            "outputs": self.outputs,
            "deletions": self.deletions,
            # Copied at once, for other threads change them.
            "numbers": {replica.hex(): number for replica, number in dict(self.numbers).items()},
            "unsent": [
                [tenant, origin.hex(), time_s]
                for (tenant, origin), time_s in dict(self.unsent).items()
            ],
        }
        return json.dumps(values).encode()

    @property
    def first_number(self) -> int:
        """Of this life's records, above those of all lives before."""
        return self.epoch << _EPOCH_BITS

    def is_new(self, replica: bytes, number: int) -> bool:
        """Whether a record was not read before; from now on it was."""
        known = self.numbers.pop(replica, -1)
        self.numbers[replica] = max(known, number)  # now the last one
        if len(self.numbers) > _MAX_REPLICAS:
            del self.numbers[next(iter(self.numbers))]
        return number > known

    @classmethod
    def _from_json(cls, values: Any) -> Self:
        numbers = {bytes.fromhex(key): int(value) for key, value in values["numbers"].items()}
        return cls(
            bytes.fromhex(values["replica"]),
            int(values["epoch"]),
            values["outputs"],
            values["deletions"],
            numbers,
            {
                Scope(str(tenant), bytes.fromhex(origin)): float(time_s)
                for tenant, origin, time_s in values["unsent"]
            },
        )

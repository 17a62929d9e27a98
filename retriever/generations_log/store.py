"""What a log of generations holds, in an LMDB environment: outputs and statistics by tenant."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import lmdb

from retriever.generations import Output
from retriever.generations_log import records
from retriever.stores import ring_capacity

Durability = Literal["process", "disk"]
"""What an acknowledged output survives: the end of the process, or that of the machine too."""

_INITIAL_MAP_BYTES: Final = 1 << 24
_MAX_EXTENTS: Final = 1 << 12
_MODE: Final = 0o600  # what users were told is nobody else's
_AFTER_NUMBERS: Final = b"\xff" * 9


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How a log is kept.

    Attributes:
        capacity: tokens to keep of each tenant, as `Generations` counts them.
        max_age_s: outputs older than this are removed, in seconds.
        durability: what an acknowledged output survives.
        max_bytes: what the file may grow to.
    """

    capacity: int = 1 << 20
    max_age_s: float = math.inf
    durability: Durability = "process"
    max_bytes: int = 16 << 30


@dataclass(frozen=True, slots=True)
class Entry:
    """An output to be written, and the statistics and the note to be written with it."""

    tenant: str
    output: Output
    statistics: bytes | None = None
    note: bytes | None = None


@dataclass(slots=True)
class Remembered:
    """What the log holds of a tenant.

    Attributes:
        outputs: oldest first.
        statistics: as they were put last.
        num_damaged: records that are not as they were written.
    """

    outputs: list[Output] = field(default_factory=list)
    statistics: bytes | None = None
    num_damaged: int = 0


@dataclass(frozen=True, slots=True)
class _Extent:
    """Tokens of a tenant's outputs, with one for the end of each, and the next output's number."""

    num_tokens: int = 0
    next_number: int = 0


class LogStore:
    """Reads and writes the records; callers hold a lock. All methods may raise lmdb.Error.

    Args:
        path: the LMDB file.
        options: how the log is kept.
        writable: whether to make it and write to it.
    """

    def __init__(self, path: Path, options: LogOptions, *, writable: bool = True) -> None:
        self._options = options
        self._capacity = ring_capacity(options.capacity)
        self._extents: dict[str, _Extent] = {}
        # Whoever opens it holds the directory's lock, so LMDB needs none of its own.
        self._environment = lmdb.open(
            str(path),
            subdir=False,
            lock=False,
            readonly=not writable,
            create=writable,
            sync=options.durability == "disk",
            map_size=min(_INITIAL_MAP_BYTES, options.max_bytes),
            mode=_MODE,
        )

    def record(self, key: bytes) -> bytes | None:
        """Return what was put under a key; None where nothing was, or it is damaged."""
        with self._environment.begin() as transaction:
            return _content(transaction, key)

    def put(self, contents: dict[bytes, bytes]) -> None:
        """Write records in one transaction."""

        def put_all(transaction: Any) -> None:
            for key, content in contents.items():
                transaction.put(key, records.seal(key, content))

        self._write(put_all)

    @property
    def is_empty(self) -> bool:
        """Whether there is no record at all."""
        return int(self._environment.stat()["entries"]) == 0

    def has_outputs(self) -> bool:
        """Whether there is an output of any tenant."""
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            return next(_keys(cursor, records.OUTPUTS), None) is not None

    def read(self, tenant: str, now_s: float) -> Remembered:
        """Return what there is of a tenant."""
        found = Remembered()
        prefix = records.output_prefix(tenant)
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            for key in _keys(cursor, prefix):
                content = records.unseal(key, cursor.value())
                output = None if content is None else records.decode_output(content)
                if output is None:
                    found.num_damaged += 1
                elif now_s - output.time_s <= self._options.max_age_s:
                    found.outputs.append(self._aging(output, now_s))
            self._extents[tenant] = _extent(cursor, prefix)
            found.statistics = _content(transaction, records.statistics_key(tenant))
        return found

    def append(self, entries: Sequence[Entry], now_s: float) -> None:
        """Write outputs and what goes with them, and remove what is over, in one transaction."""
        extents: dict[str, _Extent] = {}

        def append_all(transaction: Any) -> None:
            extents.clear()
            for entry in entries:
                known = extents.get(entry.tenant) or self._extents.get(entry.tenant)
                extents[entry.tenant] = self._append(transaction, entry, known, now_s)

        self._write(append_all)
        if len(self._extents) > _MAX_EXTENTS:  # of tenants that were let go while sessions last
            self._extents.clear()
        self._extents.update(extents)

    def delete(self, tenant: str) -> None:
        """Remove all that there is of a tenant."""

        def delete_all(transaction: Any) -> None:
            with transaction.cursor() as cursor:
                for _ in _keys(cursor, records.output_prefix(tenant), delete=True):
                    pass
            transaction.delete(records.statistics_key(tenant))

        # To remove something takes some pages too, even where no more may be added.
        self._write(delete_all, 2 * self._options.max_bytes)
        self.let_go(tenant)

    def delete_origin(self, tenant: str, origin: bytes) -> int:
        """Remove the outputs of an origin; return how many these were."""
        num_removed = 0

        def delete_all(transaction: Any) -> None:
            nonlocal num_removed
            num_removed = 0
            with transaction.cursor() as cursor:
                prefix = records.output_prefix(tenant)
                found = cursor.set_range(prefix)
                while found and cursor.key().startswith(prefix):
                    is_meant = records.origin_of(cursor.value()) == origin
                    num_removed += is_meant
                    found = cursor.delete() and bool(cursor.key()) if is_meant else cursor.next()

        self._write(delete_all, 2 * self._options.max_bytes)
        self.let_go(tenant)
        return num_removed

    def let_go(self, tenant: str) -> None:
        """Keep nothing of a tenant in memory."""
        self._extents.pop(tenant, None)

    def remove_expired(self, now_s: float) -> int:
        """Remove the outputs of all tenants that are too old; return how many these were."""
        if self._options.max_age_s == math.inf:
            return 0

        def remove(transaction: Any) -> None:
            with transaction.cursor() as cursor:
                found = cursor.set_range(records.OUTPUTS)
                while found and cursor.key().startswith(records.OUTPUTS):
                    prefix = records.tenant_prefix_of(cursor.key())
                    self._trim(cursor, prefix, 0, now_s)
                    found = cursor.set_range(prefix + _AFTER_NUMBERS)

        before = int(self._environment.stat()["entries"])
        self._write(remove, 2 * self._options.max_bytes)
        self._extents.clear()
        return before - int(self._environment.stat()["entries"])

    def copy(self, path: Path) -> None:
        """Write all records, and nothing that was removed, to a new file and sync it."""
        self._environment.copy(str(path), compact=True)
        with path.open("rb+") as file:
            os.fchmod(file.fileno(), _MODE)
            os.fsync(file.fileno())

    def sync(self) -> None:
        """Wait until all that was written is on disk."""
        self._environment.sync(True)

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _append(
        self, transaction: Any, entry: Entry, known: _Extent | None, now_s: float
    ) -> _Extent:
        prefix = records.output_prefix(entry.tenant)
        with transaction.cursor() as cursor:
            extent = known or _extent(cursor, prefix)
            key = records.output_key(prefix, extent.next_number)
            output = replace(entry.output, tokens=entry.output.tokens[1 - self._capacity :])
            cursor.put(key, records.seal(key, records.encode_output(output)))
            held = extent.num_tokens + len(output.tokens) + 1
            held = self._trim(cursor, prefix, held, now_s)
        if entry.statistics is not None:
            key = records.statistics_key(entry.tenant)
            transaction.put(key, records.seal(key, entry.statistics))
        if entry.note is not None:
            transaction.put(records.NOTE_KEY, records.seal(records.NOTE_KEY, entry.note))
        return _Extent(held, extent.next_number + 1)

    def _aging(self, output: Output, now_s: float) -> Output:
        """Return an output that ages from now on, should a clock that was ahead have dated it."""
        if output.time_s <= now_s or self._options.max_age_s == math.inf:
            return output
        return replace(output, time_s=now_s)

    def _trim(self, cursor: Any, prefix: bytes, num_tokens: int, now_s: float) -> int:
        """Remove the oldest outputs that no ring holds any more; return what tokens are left."""
        found = cursor.set_range(prefix)
        while found and cursor.key().startswith(prefix):
            time_s, length = records.measure_output(cursor.value())
            if time_s > now_s and self._options.max_age_s < math.inf:
                _date_back(cursor, prefix, now_s)
                cursor.set_range(prefix)
                time_s, length = records.measure_output(cursor.value())
                time_s = time_s if time_s <= now_s else -math.inf  # damaged: nobody can read it
            expired = now_s - time_s > self._options.max_age_s
            if not expired and num_tokens - length - 1 < self._capacity:
                break
            num_tokens -= length + 1
            cursor.delete()
            found = bool(cursor.key())
        return num_tokens

    def _write(self, action: Callable[[Any], None], max_bytes: int | None = None) -> None:
        """Do something in one transaction, in a larger map where this one is full."""
        max_bytes = max_bytes or self._options.max_bytes
        while True:
            try:
                with self._environment.begin(write=True) as transaction:
                    action(transaction)
            except lmdb.MapFullError:
                size = int(self._environment.info()["map_size"])
                if size >= max_bytes:
                    raise
                self._environment.set_mapsize(min(2 * size, max_bytes))
            else:
                return


def _keys(cursor: Any, prefix: bytes, *, delete: bool = False) -> Iterator[bytes]:
    """Move through the keys that begin with a prefix, and remove them if wanted."""
    found = cursor.set_range(prefix)
    while found and cursor.key().startswith(prefix):
        yield cursor.key()
        found = (cursor.delete() and bool(cursor.key())) if delete else cursor.next()


def _date_back(cursor: Any, prefix: bytes, now_s: float) -> None:
    """Date the outputs of a tenant now that are of the future: they age from now on."""
    for key in _keys(cursor, prefix):
        content = records.unseal(key, cursor.value())
        output = None if content is None else records.decode_output(content)
        if output is not None and output.time_s > now_s:
            dated = records.encode_output(replace(output, time_s=now_s))
            cursor.put(key, records.seal(key, dated))


def _content(transaction: Any, key: bytes) -> bytes | None:
    value = transaction.get(key)
    return None if value is None else records.unseal(key, value)


def _extent(cursor: Any, prefix: bytes) -> _Extent:
    """Count a tenant's outputs."""
    num_tokens, next_number = 0, 0
    for key in _keys(cursor, prefix):
        num_tokens += records.measure_output(cursor.value())[1] + 1
        next_number = records.number_of(key) + 1
    return _Extent(num_tokens, next_number)

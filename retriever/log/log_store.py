"""The records of a log of generations in LMDB: outputs and statistics of each tenant.

Every value starts with the CRC-32 (u32, little-endian) of its key and the rest of the value.

| key | rest of the value |
|---|---|
| `format` | format version, u8 |
| `fingerprint` | fingerprint of the tokenizer, UTF-8; empty while unknown |
| `note` | position in the streams of replication, opaque |
| `o`, length of the tenant's name (u16, big-endian), name, number (u64, big-endian) | an output |
| `s`, length of the tenant's name (u16, big-endian), name | statistics, opaque |
| `r`, length of the tenant's name (u16, big-endian), name, number (u64, big-endian) | findings |

The fields of an output are little-endian: its time in seconds since 1970 (f64); the bytes per token
(u8: 2 or 4, plus 128 if an origin follows, plus 64 if a version follows); the origin that it is
deleted by (16 bytes); the version of the model that wrote it (u64); and its tokens (u16 or u32). A
tenant's outputs have ascending numbers, and the oldest is removed first. Findings are a time (f64),
the length of their model's fingerprint (u8), the fingerprint, and the findings themselves, opaque
here.
"""

import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import lmdb
import numpy as np

from retriever.log.options import LogOptions
from retriever.predict.generations import Output
from retriever.predict.pool import Entry
from retriever.predict.stores import ring_capacity

_Result = TypeVar("_Result")

FORMAT_VERSION: Final = 1
FORMAT_KEY: Final = b"format"
FINGERPRINT_KEY: Final = b"fingerprint"
NOTE_KEY: Final = b"note"

OUTPUTS: Final = b"o"
STATISTICS: Final = b"s"
FINDINGS: Final = b"r"
_FINDINGS_HEAD: Final = struct.Struct("<dB")
_CHECKSUM: Final = struct.Struct("<I")
_NAME_LENGTH: Final = struct.Struct(">H")
_NUMBER: Final = struct.Struct(">Q")
_OUTPUT_HEAD: Final = struct.Struct("<dB")
_WIDTHS: Final = (2, 4)
_HAS_ORIGIN: Final = 0x80
_ORIGIN_BYTES: Final = 16
_HAS_VERSION: Final = 0x40
_VERSION_OF: Final = struct.Struct("<Q")
_MAX_U16: Final = 0xFFFF


def tenant_key(kind: bytes, tenant: str) -> bytes:
    """Return the key of a tenant's statistics, or the key prefix of its outputs or findings.

    It is not a prefix of any other tenant's keys.
    """
    name = tenant.encode()
    return kind + _NAME_LENGTH.pack(len(name)) + name


def numbered_key(prefix: bytes, number: int) -> bytes:
    """Return the key of an output or of findings; `prefix` is the key prefix of their tenant."""
    return prefix + _NUMBER.pack(number)


def number_of(key: bytes) -> int:
    """Return the number at the end of a key, which may be damaged."""
    return int.from_bytes(key[-_NUMBER.size :], "big")


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """Findings of a model.

    Attributes:
        number: number within the tenant; newer findings have higher numbers.
        time_s: when they were stored, in seconds since 1970.
        model: fingerprint of the model.
        content: the findings, opaque here.
    """

    number: int
    time_s: float
    model: str
    content: bytes

    def encode(self) -> bytes:
        """Return the content of the record."""
        name = self.model.encode()
        return _FINDINGS_HEAD.pack(self.time_s, len(name)) + name + self.content

    @classmethod
    def decode(cls, number: int, content: bytes | None) -> "FoundRecord | None":
        """Return findings from the content of their record; None if its format is unknown."""
        if content is None or len(content) < _FINDINGS_HEAD.size:
            return None
        time_s, length = _FINDINGS_HEAD.unpack_from(content)
        begin = _FINDINGS_HEAD.size + length
        model = content[_FINDINGS_HEAD.size : begin].decode("ascii", "replace")
        return cls(number, time_s, model, content[begin:])


def seal(key: bytes, content: bytes) -> bytes:
    """Return a value with its checksum."""
    return _CHECKSUM.pack(zlib.crc32(content, zlib.crc32(key))) + content


def unseal(key: bytes, value: bytes) -> bytes | None:
    """Return the content of a sealed value, or None if the key or the value is damaged."""
    content = value[_CHECKSUM.size :]
    if len(value) < _CHECKSUM.size:
        return None
    (checksum,) = _CHECKSUM.unpack_from(value)
    return content if checksum == zlib.crc32(content, zlib.crc32(key)) else None


def encode_output(output: Output) -> bytes:
    """Return the content of an output."""
    width = _WIDTHS[0] if int(output.tokens.max(initial=0)) <= _MAX_U16 else _WIDTHS[1]
    form = width | (_HAS_ORIGIN if output.origin else 0) | (_HAS_VERSION if output.version else 0)
    head = _OUTPUT_HEAD.pack(output.time_s, form) + output.origin
    if output.version:
        head += _VERSION_OF.pack(output.version)
    return head + output.tokens.astype(f"<u{width}").tobytes()


def decode_output(content: bytes) -> Output | None:
    """Return an output from its content; None if the format is unknown."""
    head = _head(content)
    if head is None:
        return None
    width, begin = head.width, head.size
    if width not in _WIDTHS or len(content) < begin or (len(content) - begin) % width:
        return None
    tokens = np.frombuffer(content, f"<u{width}", offset=begin)
    return Output(tokens.astype(np.int32), head.time_s, head.origin, head.version)


def measure_output(value: bytes) -> tuple[float, int]:
    """Return an output's time and its number of tokens; its sealed value may be damaged."""
    head = _head(value[_CHECKSUM.size :])
    if head is None:
        return 0.0, 0
    return head.time_s, max(0, len(value) - _CHECKSUM.size - head.size) // max(1, head.width)


def origin_of(value: bytes) -> bytes:
    """Return an output's origin from a sealed value; empty if it has none."""
    head = _head(value[_CHECKSUM.size :])
    return b"" if head is None else head.origin


class _Head(NamedTuple):
    """The header before an output's tokens.

    Attributes:
        time_s: see `Output`.
        width: number of bytes per token.
        origin: see `Output`.
        version: see `Output`.
        size: offset of the tokens.
    """

    time_s: float
    width: int
    origin: bytes
    version: int
    size: int


def _head(content: bytes) -> _Head | None:
    """Return the header before an output's tokens; None if it is truncated."""
    if len(content) < _OUTPUT_HEAD.size:
        return None
    time_s, form = _OUTPUT_HEAD.unpack_from(content)
    size = _OUTPUT_HEAD.size
    origin = content[size : size + _ORIGIN_BYTES] if form & _HAS_ORIGIN else b""
    size += _ORIGIN_BYTES if form & _HAS_ORIGIN else 0
    version = 0
    if form & _HAS_VERSION:
        stated = content[size : size + _VERSION_OF.size]
        version = _VERSION_OF.unpack(stated)[0] if len(stated) == _VERSION_OF.size else 0
        size += _VERSION_OF.size
    return _Head(time_s, form & ~(_HAS_ORIGIN | _HAS_VERSION), origin, version, size)


_INITIAL_MAP_BYTES: Final = 1 << 24  # 16 MiB of address space; the map doubles when full
_READ_AT_ONCE: Final = 1 << 20  # bytes read at a time, about 2 ms, during which commits wait
_MAX_EXTENTS: Final = 1 << 12
_MODE: Final = 0o600  # prompts and outputs are private
_NO_NUMBER: Final = 1 << 63  # only damaged keys have this number or a higher one
_AFTER_NUMBERS: Final = b"\xff" * 9


@dataclass(slots=True)
class Remembered:
    """A tenant's records in the log.

    Attributes:
        outputs: the outputs, oldest first.
        statistics: the last statistics stored.
        num_damaged: number of damaged records, which are skipped.
    """

    outputs: list[Output] = field(default_factory=list)
    statistics: bytes | None = None
    num_damaged: int = 0


@dataclass(frozen=True, slots=True)
class _Extent:
    """Tokens of a tenant's outputs, plus one for the end of each, and the next output's number."""

    num_tokens: int = 0
    next_number: int = 0


class LogStore:
    """Reads and writes the records; callers hold a lock. All methods may raise lmdb.Error.

    Args:
        path: the LMDB file.
        options: options of the log.
        writable: whether to create it and write to it.
    """

    def __init__(self, path: Path, options: LogOptions, *, writable: bool = True) -> None:
        self._options = options
        self._capacity = ring_capacity(options.capacity)
        self._extents: dict[str, _Extent] = {}
        # The caller holds the directory's lock, so LMDB's own lock is off.
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
        """Return the record of a key; None if it is missing or damaged."""
        with self._environment.begin() as transaction:
            return _content(transaction, key)

    def put(self, contents: dict[bytes, bytes]) -> None:
        """Write records in one transaction."""

        def put_all(transaction: Any) -> None:
            for key, content in contents.items():
                _put(transaction, key, content)

        self._write(put_all)

    @property
    def is_empty(self) -> bool:
        """Whether there are no records."""
        return int(self._environment.stat()["entries"]) == 0

    def has_outputs(self) -> bool:
        """Whether there is an output of any tenant."""
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            return next(_keys(cursor, OUTPUTS), None) is not None

    def read(self, tenant: str, now_s: float, found: Remembered, first: int = 0) -> int | None:
        """Read a tenant's records in parts of about `_READ_AT_ONCE` bytes.

        Args:
            tenant: the tenant whose records are read.
            now_s: seconds since 1970.
            found: receives the outputs of this part, and the statistics with the last part.
            first: number of the first output of this part.

        Returns:
            The number of the next part's first output; None after the last part.
        """
        prefix, num_bytes = tenant_key(OUTPUTS, tenant), 0
        length = len(prefix) + _NUMBER.size  # a damaged key may be longer or shorter
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            for key in _keys(cursor, prefix, first):
                if num_bytes >= _READ_AT_ONCE and len(key) == length:
                    return number_of(key)
                num_bytes += len(cursor.value())
                content = unseal(key, cursor.value()) if len(key) == length else None
                output = None if content is None else decode_output(content)
                if output is None:
                    found.num_damaged += 1
                elif now_s - output.time_s <= self._options.max_age_s:
                    found.outputs.append(self._aging(output, now_s))
            self._extents[tenant] = _extent(cursor, prefix)
            found.statistics = _content(transaction, tenant_key(STATISTICS, tenant))
        return None

    def append(self, entries: Sequence[Entry], now_s: float) -> int:
        """Write entries, and remove outputs beyond the capacity, in one transaction.

        Returns:
            The number of entries written, which is all of them.
        """
        extents: dict[str, _Extent] = {}

        def append_all(transaction: Any) -> None:
            extents.clear()
            for entry in entries:
                known = extents.get(entry.tenant) or self._extents.get(entry.tenant)
                extents[entry.tenant] = self._append(transaction, entry, known, now_s)

        self._write(append_all)
        if len(self._extents) > _MAX_EXTENTS:  # evicted tenants are among them
            self._extents.clear()
        self._extents.update(extents)
        return len(entries)

    def delete(self, tenant: str, origin: bytes = b"") -> int:
        """Remove all records of a tenant, or its outputs of an origin and all its findings.

        Findings of several sessions are merged, so those of one session cannot be removed.

        Returns:
            The number of removed records.
        """
        outputs, findings = tenant_key(OUTPUTS, tenant), tenant_key(FINDINGS, tenant)

        def delete_all(transaction: Any) -> int:
            with transaction.cursor() as cursor:
                keys = [
                    key
                    for key in _keys(cursor, outputs)
                    if not origin or origin_of(cursor.value()) == origin
                ]
                keys.extend(_keys(cursor, findings))
            if not origin:
                keys.append(tenant_key(STATISTICS, tenant))
            return sum(transaction.delete(key) for key in keys)

        # Removal needs some free pages too, even at the size limit.
        num_removed = self._write(delete_all, 2 * self._options.max_bytes)
        self._extents.pop(tenant, None)
        return num_removed

    def findings(self, tenant: str) -> tuple[list[FoundRecord], list[int]]:
        """Return a tenant's findings, oldest first, and the numbers of damaged records."""
        found, damaged = [], []
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            for key in _keys(cursor, tenant_key(FINDINGS, tenant)):
                number = number_of(key)
                record = FoundRecord.decode(number, unseal(key, cursor.value()))
                if record is None:
                    damaged.append(number)
                else:
                    found.append(record)
        return found, damaged

    def found(self, tenant: str, number: int) -> FoundRecord | None:
        """Return the findings with a number; None if they are missing or damaged."""
        key = numbered_key(tenant_key(FINDINGS, tenant), number)
        return FoundRecord.decode(number, self.record(key))

    def put_findings(
        self, tenant: str, added: Sequence[FoundRecord], removed: Sequence[int]
    ) -> None:
        """Write some findings of a tenant and remove others, in one transaction."""
        prefix = tenant_key(FINDINGS, tenant)

        def put_all(transaction: Any) -> None:
            for number in removed:  # first, so that writes can reuse their pages
                transaction.delete(numbered_key(prefix, number))
            for each in added:
                _put(transaction, numbered_key(prefix, each.number), each.encode())

        self._write(put_all)

    def remove_expired(self, now_s: float) -> int:
        """Remove expired outputs and findings of all tenants; return their number."""
        if self._options.max_age_s == math.inf:
            return 0

        def remove(transaction: Any) -> None:
            with transaction.cursor() as cursor:
                found = cursor.set_range(OUTPUTS)
                while found and cursor.key().startswith(OUTPUTS):
                    # A damaged key may be too short; then use the prefix of all outputs.
                    prefix = cursor.key()[: -_NUMBER.size] or OUTPUTS
                    self._trim(cursor, prefix, 0, now_s)
                    found = cursor.set_range(prefix + _AFTER_NUMBERS)
                for key in [
                    key
                    for key in _keys(cursor, FINDINGS)
                    if now_s - _time_of_findings(cursor.value()) > self._options.max_age_s
                ]:
                    transaction.delete(key)

        before = int(self._environment.stat()["entries"])
        self._write(remove, 2 * self._options.max_bytes)
        self._extents.clear()
        return before - int(self._environment.stat()["entries"])

    def copy(self, path: Path) -> None:
        """Write all records to a new file, without removed bytes and without syncing it."""
        self._environment.copy(str(path), compact=True)
        path.chmod(_MODE)

    def sync(self) -> None:
        """Wait until all writes are on disk."""
        self._environment.sync(True)

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _append(
        self, transaction: Any, entry: Entry, known: _Extent | None, now_s: float
    ) -> _Extent:
        prefix = tenant_key(OUTPUTS, entry.tenant)
        with transaction.cursor() as cursor:
            extent = known or _extent(cursor, prefix)
            if len(entry.output.tokens):
                output = entry.output._replace(tokens=entry.output.tokens[1 - self._capacity :])
                _put(transaction, numbered_key(prefix, extent.next_number), encode_output(output))
                num_tokens = extent.num_tokens + len(output.tokens) + 1
                num_tokens = self._trim(cursor, prefix, num_tokens, now_s)
                extent = _Extent(num_tokens, extent.next_number + 1)
        if entry.statistics is not None:
            _put(transaction, tenant_key(STATISTICS, entry.tenant), entry.statistics)
        if entry.note is not None:
            _put(transaction, NOTE_KEY, entry.note)
        return extent

    def _aging(self, output: Output, now_s: float) -> Output:
        """Return an output dated no later than now, because its clock may have been ahead."""
        if output.time_s <= now_s or self._options.max_age_s == math.inf:
            return output
        return output._replace(time_s=now_s)

    def _trim(self, cursor: Any, prefix: bytes, num_tokens: int, now_s: float) -> int:
        """Remove the oldest outputs beyond a ring's capacity; return the remaining tokens."""
        found = cursor.set_range(prefix)
        while found and cursor.key().startswith(prefix):
            time_s, length = measure_output(cursor.value())
            if time_s > now_s and self._options.max_age_s < math.inf:
                _date_back(cursor, prefix, now_s)
                cursor.set_range(prefix)
                time_s, length = measure_output(cursor.value())
                time_s = time_s if time_s <= now_s else -math.inf  # damaged: unreadable
            expired = now_s - time_s > self._options.max_age_s
            if not expired and num_tokens - length - 1 < self._capacity:
                break
            num_tokens -= length + 1
            cursor.delete()
            found = bool(cursor.key())
        return num_tokens

    def _write(self, action: Callable[[Any], _Result], max_bytes: int | None = None) -> _Result:
        """Run an action in one transaction and return its result; grow the map if it is full."""
        max_bytes = max_bytes or self._options.max_bytes
        while True:
            try:
                with self._environment.begin(write=True) as transaction:
                    return action(transaction)
            except lmdb.MapFullError:
                size = int(self._environment.info()["map_size"])
                if size >= max_bytes:
                    raise
                self._environment.set_mapsize(min(2 * size, max_bytes))


def _time_of_findings(value: bytes) -> float:
    """Return when findings were stored; their sealed value may be damaged."""
    if len(value) < _CHECKSUM.size + _FINDINGS_HEAD.size:
        return 0.0
    time_s: float = _FINDINGS_HEAD.unpack_from(value, _CHECKSUM.size)[0]
    return time_s


def _keys(cursor: Any, prefix: bytes, first: int = 0) -> Iterator[bytes]:
    """Iterate over the keys with a prefix, from a number on; the cursor is at the current key."""
    found = cursor.set_range(numbered_key(prefix, first) if first else prefix)
    while found and cursor.key().startswith(prefix):
        yield cursor.key()
        found = cursor.next()


def _date_back(cursor: Any, prefix: bytes, now_s: float) -> None:
    """Set the time of a tenant's outputs to now if it is in the future."""
    for key in _keys(cursor, prefix):
        content = unseal(key, cursor.value())
        output = None if content is None else decode_output(content)
        if output is not None and output.time_s > now_s:
            _put(cursor, key, encode_output(output._replace(time_s=now_s)))


def _put(writer: Any, key: bytes, content: bytes) -> None:
    """Write a record in a transaction, or with its cursor, which then points at the record."""
    writer.put(key, seal(key, content))


def _content(transaction: Any, key: bytes) -> bytes | None:
    value = transaction.get(key)
    return None if value is None else unseal(key, value)


def _extent(cursor: Any, prefix: bytes) -> _Extent:
    """Count a tenant's outputs."""
    num_tokens, next_number = 0, 0
    for key in _keys(cursor, prefix):
        num_tokens += measure_output(cursor.value())[1] + 1
        if number_of(key) < _NO_NUMBER:
            next_number = number_of(key) + 1
    return _Extent(num_tokens, next_number)

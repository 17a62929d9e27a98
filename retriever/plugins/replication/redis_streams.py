"""Two streams on a Redis server for each vocabulary: outputs and deletions.

Keys are `foredraft:{FINGERPRINT}:outputs` and `foredraft:{FINGERPRINT}:deletions`. Every entry has
one field, `r`, with a record. The braces make a cluster store both keys on the same node.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, parse_url
from redis.retry import Retry

from retriever.errors import ReplicationError
from retriever.plugins.replication.options import PAGE, ReplicationOptions
from retriever.plugins.replication.replication_state import MAX_DELETIONS

REFUSALS: Final = (redis.RedisError, OSError)
"""Errors of the server and the connection."""

_PARTS: Final = frozenset(
    {"host", "port", "db", "path", "username", "password", "connection_class"}
)
_URLS: Final = (
    "the URL of the Redis server cannot be used: it is redis://HOST:PORT/DATABASE, rediss:// for "
    "TLS, or unix://PATH, with only ssl_* options; / and @ in a password are written %2F and %40"
)
_FIELD: Final = b"r"

# Removed entries stay in a stream's memory until their whole node is removed; a copy drops them.
_COPY: Final = """
local last
local about = redis.call('XINFO', 'STREAM', KEYS[1])
for i = 1, #about, 2 do
  if about[i] == 'last-generated-id' then last = about[i + 1] end
end
redis.call('DEL', KEYS[2])
local from, num_copied = '-', 0
repeat
  local page = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', 500)
  for _, entry in ipairs(page) do
    redis.call('XADD', KEYS[2], entry[1], unpack(entry[2]))
    from = '(' .. entry[1]
  end
  num_copied = num_copied + #page
until #page == 0
if num_copied > 0 then
  redis.call('XSETID', KEYS[2], last)
  redis.call('RENAME', KEYS[2], KEYS[1])
end
"""


class StreamEntry(NamedTuple):
    """An entry of a stream: its id and its record; None if it has no record."""

    entry_id: str
    data: bytes | None


class Streams:
    """The streams of one vocabulary. All methods may raise the errors in `REFUSALS`.

    Args:
        options: options with the server's address.
        fingerprint: fingerprint of the vocabulary.

    Attributes:
        outputs: key of the stream of outputs.
        deletions: key of the stream of deletions.

    Raises:
        ReplicationError: the URL is not one of a Redis server.
    """

    def __init__(self, options: ReplicationOptions, fingerprint: str) -> None:
        self.outputs = f"foredraft:{{{fingerprint}}}:outputs".encode()
        self.deletions = f"foredraft:{{{fingerprint}}}:deletions".encode()
        self._max_records = options.max_records
        self._pool = ConnectionPool(**_connection(options))
        self._redis: Any = redis.Redis(connection_pool=self._pool)

    def append_outputs(self, records: Sequence[bytes]) -> None:
        """Append records to the stream of outputs, all or none."""
        with self._redis.pipeline(transaction=True) as pipeline:
            for data in records:
                pipeline.xadd(self.outputs, {_FIELD: data}, maxlen=self._max_records)
            pipeline.execute()

    def append_deletion(self, record: bytes) -> None:
        """Append a record to the stream of deletions."""
        self._redis.xadd(self.deletions, {_FIELD: record}, maxlen=MAX_DELETIONS)

    def read(
        self, outputs: str, deletions: str, block_ms: int
    ) -> tuple[list[StreamEntry], list[StreamEntry]]:
        """Return the outputs and deletions after these ids; wait if there are none yet."""
        offsets = {self.deletions: deletions, self.outputs: outputs}
        answer = self._redis.xread(offsets, count=PAGE, block=block_ms)
        found: dict[bytes, list[StreamEntry]] = {key: _entries(page) for key, page in answer or ()}
        return found.get(self.outputs, []), found.get(self.deletions, [])

    def backwards(self) -> Iterator[StreamEntry]:
        """Yield the outputs, newest first."""
        newest = "+"
        while page := _entries(self._redis.xrevrange(self.outputs, newest, "-", count=PAGE)):
            yield from page
            newest = f"({page[-1].entry_id}"

    def forwards(self, stream: bytes) -> Iterator[list[StreamEntry]]:
        """Yield pages of a stream, oldest first."""
        oldest = "-"
        while page := _entries(self._redis.xrange(stream, oldest, "+", count=PAGE)):
            yield page
            oldest = f"({page[-1].entry_id}"

    def last_id(self, stream: bytes) -> str | None:
        """Return the highest id that a stream ever had; None if it never had any."""
        try:
            return str(self._redis.xinfo_stream(stream)["last-generated-id"].decode())
        except redis.ResponseError as error:
            if "no such key" in str(error):
                return None
            raise

    def remove_outputs(self, entry_ids: Sequence[str]) -> None:
        """Remove entries, and free their memory on the server."""
        if entry_ids and self._redis.xdel(self.outputs, *entry_ids):
            self._redis.eval(_COPY, 2, self.outputs, self.outputs + b":copy")

    def remove_deletions(self, entry_ids: Sequence[str]) -> None:
        """Remove entries of the stream of deletions."""
        if entry_ids:
            self._redis.xdel(self.deletions, *entry_ids)

    def close(self) -> None:
        """Close the connections; this ends the waits of other threads."""
        self._pool.disconnect()


def check_url(options: ReplicationOptions) -> None:
    """Refuse an invalid server URL.

    Raises:
        ReplicationError: it is invalid.
    """
    _connection(options)


def _connection(options: ReplicationOptions) -> dict[str, Any]:
    """Return the arguments of a connection pool."""
    return _parsed(options.url) | {
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": options.timeout_s,
        "socket_connect_timeout": options.timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "retry_on_error": [],
    }


def _parsed(url: str) -> dict[str, Any]:
    """Return the parts of a URL, completed from the environment."""
    try:
        parsed: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
        for name in ("username", "password"):
            value = os.environ.get(f"FOREDRAFT_REDIS_{name.upper()}")
            if value:
                parsed.setdefault(name, value)
        is_known = all(name in _PARTS or name.startswith("ssl_") for name in parsed)
        kind = parsed.get("connection_class", Connection)
        kind(**{name: value for name, value in parsed.items() if name != "connection_class"})
    except (ValueError, TypeError, redis.RedisError):
        is_known = False
    if not is_known:
        # The cause is not shown: it may contain a part of the password.
        raise ReplicationError(_URLS) from None
    return parsed


def _entries(page: Any) -> list[StreamEntry]:
    return [StreamEntry(entry_id.decode(), (fields or {}).get(_FIELD)) for entry_id, fields in page]

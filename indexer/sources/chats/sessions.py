"""Joins one-message lines of agent and chat sessions into records of conversations."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from indexer.sources.chats.shapes import SESSION, named

Record = tuple[str, Any]
"""A record's name and its value. The value comes from JSON, a table or a text."""

_NOTES: Final = frozenset(
    {
        "compacted",
        "event_msg",
        "file-history-snapshot",
        "queue-operation",
        "session_meta",
        "summary",
        "system",
        "turn_context",
    }
)
"""Types of session lines without a turn, in Claude Code and Codex."""


_KEYS: Final = frozenset({"message", "payload", "role"})
"""Keys of a line that is or contains a message."""

_NO_MESSAGE: Final = frozenset({"messages", "prompt", "choices"})
"""Keys of a record that has a role but is more than a message."""

MOST_TURNS: Final = 8192
"""Most turns of a session or a conversation. A session is held in memory as a whole. Each answer
has all earlier turns as its prompt; for this many turns, that takes 130 MB of references."""


def sessions(records: Iterable[Record], field: str = "") -> Iterator[Record]:
    """Yield records, with the one-message lines of a session joined into one record.

    A session ends if a line names another session, if a system message follows, if it is too long,
    or if another kind of record follows. The record has the name of the session's first line.

    Args:
        records: records in order.
        field: expression; a record in which it names something is not part of a session.
    """
    session = _Session()
    for place, record in records:
        line = _line(record, field)
        if line is None:
            if session.messages and _is_note(record):
                continue
            yield from session.ended()
            if not _is_note(record) or {"messages", "text", "prompt"} & record.keys():
                yield place, record
            continue
        of, message = line
        if session.ends_before(of, message):
            yield from session.ended()
        session.add(place, of, message)
    yield from session.ended()


class _Session:
    """Collects the messages of one session."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self._place = ""
        self._of: Any = None
        self._last_id: Any = None

    def ends_before(self, of: Any, message: Mapping[str, Any]) -> bool:
        """Return whether a message belongs to another session."""
        is_system = message.get("role") == "system"
        begins = is_system and any(each.get("role") != "system" for each in self.messages)
        return of != self._of or begins or len(self.messages) >= MOST_TURNS

    def add(self, place: str, of: Any, message: Mapping[str, Any]) -> None:
        """Add a message, or another part of the last message."""
        if not self.messages:
            self._place, self._of = place, of
        own_id, content = message.get("id"), message.get("content")
        last = self.messages[-1] if self.messages else {}
        is_part = own_id is not None and own_id == self._last_id
        if is_part and isinstance(content, list) and isinstance(last.get("content"), list):
            self.messages[-1] = {**last, "content": [*last["content"], *content]}
        else:
            self.messages.append(message)
        self._last_id = own_id

    def ended(self) -> Iterator[Record]:
        """Yield the session as a record, if it has messages, and start a new session."""
        if self.messages:
            yield self._place, {SESSION: self.messages}
            self.messages = []


def _is_note(record: Any) -> bool:
    """Return whether a record is a session line without a message."""
    kind = record.get("type") if isinstance(record, dict) else None
    return isinstance(kind, str) and kind in _NOTES


def _line(record: Any, field: str) -> tuple[Any, Mapping[str, Any]] | None:
    """Return the session and the message of a one-message record; None for other records."""
    if not isinstance(record, dict) or _KEYS.isdisjoint(record):
        return None
    if named(record, field) is not None:
        return None
    kind, message, payload = record.get("type"), record.get("message"), record.get("payload")
    if kind in ("user", "assistant") and isinstance(message, dict) and "content" in message:
        return (record.get("sessionId"), record.get("isSidechain")), {"role": kind, **message}
    if kind == "response_item" and isinstance(payload, dict):
        return None, payload
    has_turn = isinstance(record.get("role"), str) and "content" in record
    if has_turn and _NO_MESSAGE.isdisjoint(record) and kind != "message":
        keys = ("session_id", "sessionId", "conversation_id", "thread_id", "conversation")
        return next((record[key] for key in keys if key in record), None), record
    return None

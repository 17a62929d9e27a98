"""Sessions of agents and chats: one message a line, put together as records of conversations."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from indexer.sources.chats.shapes import SESSION, named

Record = tuple[str, Any]
"""A record's name, and the value that JSON, a table or a text has there."""

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
"""Lines of sessions that hold no turn: of Claude Code, and of Codex."""


def sessions(records: Iterable[Record], field: str = "") -> Iterator[Record]:
    """Yield records; those of one message a line together, as one record with all their messages.

    A session ends where lines name another, where a system speaks, and where a record of another
    kind comes. It has the name of its first line.

    Args:
        records: in order.
        field: a record in which it names anything is none of a session.
    """
    name, session, messages, last_id = "", None, list[Any](), None
    for place, record in records:
        line = _line(record) if named(record, field) is None else None
        if line is None:
            if messages and isinstance(record, Mapping) and record.get("type") in _NOTES:
                continue
            if messages:
                yield name, {SESSION: messages}
            messages = []
            if not (isinstance(record, Mapping) and _is_bare_note(record)):
                yield place, record
            continue
        of, message = line
        begins = message.get("role") == "system" and any(
            each.get("role") != "system" for each in messages
        )
        if messages and (of != session or begins):
            yield name, {SESSION: messages}
            messages = []
        if not messages:
            name, session = place, of
        own_id = message.get("id")
        if messages and own_id is not None and own_id == last_id and _joins(messages[-1], message):
            messages[-1] = {
                **messages[-1],
                "content": [*messages[-1]["content"], *message["content"]],
            }
        else:
            messages.append(message)
        last_id = own_id
    if messages:
        yield name, {SESSION: messages}


def _joins(before: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Return whether two lines hold parts of one message."""
    return isinstance(before.get("content"), list) and isinstance(message.get("content"), list)


def _is_bare_note(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a line of a session that begins with it."""
    return record.get("type") in _NOTES and not {"messages", "text", "prompt"} & record.keys()


def _line(record: Any) -> tuple[Any, Mapping[str, Any]] | None:
    """Return the session and the message of a record that is a single message; None for others."""
    if not isinstance(record, Mapping):
        return None
    kind, message, payload = record.get("type"), record.get("message"), record.get("payload")
    if kind in {"user", "assistant"} and isinstance(message, Mapping) and "content" in message:
        return (record.get("sessionId"), record.get("isSidechain")), {"role": kind, **message}
    if kind == "response_item" and isinstance(payload, Mapping):
        return None, payload
    has_turn = isinstance(record.get("role"), str) and "content" in record
    if has_turn and not {"messages", "prompt", "choices"} & record.keys() and kind != "message":
        keys = ("session_id", "sessionId", "conversation_id", "thread_id", "conversation")
        return next((record[key] for key in keys if key in record), None), record
    return None

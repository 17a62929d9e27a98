"""Selects which columns of a table to read."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from textwrap import shorten
from typing import Any, Final

from indexer.errors import RefusedFileError
from indexer.sources.chats.dialects import are_turns
from indexer.sources.chats.shapes import OUTPUTS, PROMPTS, SYSTEM, TURN_LISTS, is_expression
from indexer.sources.source_options import SourceOptions

_MAX_KEYS: Final = 12
"""Most keys that a message names. Log records have about ten keys, wide tables have hundreds."""

_MAX_KEY_CHARACTERS: Final = 40
_MAX_FIELDS: Final = 3
_MAX_PATH: Final = 6
"""Most levels of nested keys to search for texts."""


def record_columns(names: Sequence[str], options: SourceOptions) -> list[str]:
    """Return the columns of a table to read: those with texts, conversations or licences.

    All columns are read if a field expression could name any column, or if whole records are
    needed.

    Raises:
        RefusedFileError: no column has texts or conversations.
    """
    if options.field in names:
        wanted = [options.field]
    elif is_expression(options.field):
        return list(names)
    else:
        wanted = _conversation_columns(names, with_outputs=not options.whole_records)
    if not wanted:
        listed = listed_keys(names)
        raise RefusedFileError(
            f"no column {options.field!r}", f"name one of these with --field: {listed}"
        )
    if options.whole_records:
        return list(names)
    licence = options.licence_field
    return [*wanted, licence] if licence in names and licence not in wanted else wanted


def _conversation_columns(names: Collection[str], *, with_outputs: bool = True) -> list[str]:
    """Return the columns that contain conversations; empty if there are none."""
    is_log = "request" in names and "response" in names
    has_output = not with_outputs or any(key in names for key in (*OUTPUTS, "chosen"))
    has_pair = has_output and any(key in names for key in PROMPTS)
    if not (is_log or has_pair or any(key in names for key in TURN_LISTS)):
        return []
    known = {*TURN_LISTS, *PROMPTS, *OUTPUTS, *SYSTEM, "request", "body", "params", "chosen"}
    return [name for name in names if name in known]


def listed_keys(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Return the keys as a list in words; if there are many, only the first ones are named."""
    shown = [
        repr(shorten(str(name), _MAX_KEY_CHARACTERS, placeholder="…"))
        for name in list(names)[:_MAX_KEYS]
    ]
    more = [f"{len(names) - _MAX_KEYS} more"] if len(names) > _MAX_KEYS else []
    return ", ".join(shown + more) or "none"


def with_fields(record: Mapping[str, Any]) -> str:
    """Return values to suggest for `--field`: the record's texts and turns, longest first."""
    found = sorted(_paths(record, "", 0), key=lambda each: -each[1])[:_MAX_FIELDS]
    paths = ", ".join(f"'{path}'" for path, _ in found)
    return f", such as {paths}" if found else ""


def _paths(value: Any, path: str, depth: int) -> Iterator[tuple[str, int]]:
    """Yield expressions that name texts or turns, each with the length of its value."""
    if isinstance(value, str):
        if len(value.split()) > 1:
            yield path, len(value)
    elif are_turns(value):
        yield path, len(str(value))
    elif isinstance(value, list) and value and depth < _MAX_PATH:
        yield from _paths(value[0], f"{path}[]", depth + 1)
    elif isinstance(value, Mapping) and depth < _MAX_PATH:
        for key, inner in islice(value.items(), 10 * _MAX_KEYS):
            plain = re.fullmatch(r"[A-Za-z_]\w*", str(key))
            name = str(key) if plain or not depth else f'"{key}"'
            yield from _paths(inner, f"{path}.{name}" if path else name, depth + 1)

"""Showing settings: as TOML that can be kept, or as JSON."""

import json
import math
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pydantic import SecretStr

from retriever.operations.resolving import Resolved
from retriever.operations.settings import ServerUrl

_MASK = "********"


def as_toml(resolved: Resolved[Any]) -> str:
    """Return a line for each setting, with where it came from; secrets are masked."""
    lines = []
    for name, origin in resolved.origins.items():
        value = shown(getattr(resolved.settings, name))
        line = f"# {name}: not set" if value is None else f"{name} = {_literal(value)}"
        lines.append(f"{line}  # {origin}")
    return "\n".join(lines)


def as_json(resolved: Resolved[Any]) -> str:
    """Return an object that has each setting's `value` and `origin`; no limit is `"inf"`."""
    found = {
        name: {"value": _finite(shown(getattr(resolved.settings, name))), "origin": origin}
        for name, origin in resolved.origins.items()
    }
    return json.dumps(found, indent=2)


def shown(value: Any) -> Any:
    """Return a value as numbers, text and lists, without secrets and passwords in addresses."""
    if isinstance(value, ServerUrl):
        return value.shown()
    if isinstance(value, SecretStr):
        return _MASK
    if isinstance(value, list):
        return [shown(each) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return _without_password(str(value))


def _without_password(text: str) -> str:
    if "://" not in text or "@" not in text:
        return text
    try:
        parts = urlsplit(text)
    except ValueError:
        return _MASK
    return urlunsplit(parts._replace(netloc=f"{_MASK}@{parts.netloc.rpartition('@')[2]}"))


def _literal(value: Any) -> str:
    """Return TOML; its text is JSON's but for one character."""
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _finite(value: Any) -> Any:
    return "inf" if isinstance(value, float) and math.isinf(value) else value

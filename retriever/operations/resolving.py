"""Settings from a file, the environment and flags; later sources override earlier ones.

This module does not use pydantic-settings, which does not report where a value comes from and
ignores unknown environment variables. pydantic checks types and bounds.
"""

import ipaddress
import json
import logging
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar, get_args, get_origin
from urllib.parse import urlsplit, urlunsplit

from pydantic import BaseModel, SecretStr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from indexer.flags import expected_by, flag_of, is_secret
from retriever.client import credentials
from retriever.errors import CredentialsError, SettingsError
from retriever.operations.settings import ServerUrl
from retriever.security.private_files import read_file

PREFIX: Final = "FOREDRAFT_"
"""Prefix of the environment variables."""

FILE_VARIABLE: Final = "FOREDRAFT_CONFIG"
"""Environment variable that names the settings file if no flag does."""

_SHOWN: Final = 80  # most characters of a refused value in a message: one line
_LIST: Final = "`foredraft config`"
_OTHERS: Final = frozenset(
    {
        FILE_VARIABLE,
        "FOREDRAFT_CACHE",
        "FOREDRAFT_REDIS_USERNAME",
        "FOREDRAFT_REDIS_PASSWORD",
        *credentials.VARIABLES,
    }
)

_logger = logging.getLogger(__name__)

Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Resolved(Generic[Schema]):
    """Settings and their origins.

    Attributes:
        settings: validated settings.
        origins: origins by name: `default`, `--flag`, an environment variable or a file.
    """

    settings: Schema
    origins: Mapping[str, str]


def resolve(
    schema: type[Schema],
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    file: Path | None = None,
) -> Resolved[Schema]:
    """Return the settings in force.

    Args:
        schema: schema of the settings.
        flags: flags by name, already validated; None if a flag was not given.
        environment: environment variables; an empty variable counts as not set.
        file: TOML file; None for the one that `FOREDRAFT_CONFIG` names, if set.

    Raises:
        SettingsError: a key or variable is unknown, or a value is invalid. The message names the
            nearest setting or the expected values.
    """
    fields = schema.model_fields
    values: dict[str, object] = {}
    origins = dict.fromkeys(fields, "default")
    named = environment.get(FILE_VARIABLE)
    path = file or (Path(named) if named else None)
    if path is not None:
        values |= _from_file(path, fields)
        origins |= dict.fromkeys(values, str(path))
    variables = _from_environment(environment, fields)
    given = {
        name: _checked(flag_of(name), fields[name], value, TypeAdapter.validate_python)
        for name, value in flags.items()
        if value is not None
    }
    origins |= {name: variable_of(name) for name in variables}
    origins |= {name: flag_of(name) for name in given}
    return Resolved(schema.model_validate(values | variables | given), origins)


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


def _type_of(field: FieldInfo) -> Any:
    """Return a setting's type with its bounds."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def _from_file(path: Path, fields: Mapping[str, FieldInfo]) -> dict[str, object]:
    found = _read(path)
    written = {name: name for name in fields}
    for name in found:
        if name not in fields:
            raise SettingsError(f"{path}: {name} is not a setting{_nearest(name, written)}")
    return {
        name: _checked(f"{path}: {name}", fields[name], value, _strictly)
        for name, value in found.items()
    }


def _strictly(adapter: TypeAdapter[Any], value: Any) -> Any:
    """Check a TOML value by JSON rules, under which text can be a path but not a number."""
    return adapter.validate_json(json.dumps(value, default=str), strict=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_file(path).decode())
    except CredentialsError as error:
        raise SettingsError(f"settings cannot be read: {error}") from error
    except ValueError as error:  # invalid UTF-8, syntax, or a number with too many digits
        raise SettingsError(f"{path} is not TOML: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"{path} is TOML that is nested too deeply") from error


def _from_environment(
    environment: Mapping[str, str], fields: Mapping[str, FieldInfo]
) -> dict[str, object]:
    found = {
        variable: value
        for variable, value in environment.items()
        if variable.startswith(PREFIX) and variable not in _OTHERS and value
    }
    written = {name: variable_of(name) for name in fields}
    values: dict[str, object] = {}
    for variable, value in found.items():
        name = variable.removeprefix(PREFIX).lower()
        if written.get(name) != variable and _is_of_a_platform(variable, value):
            _logger.debug("%s comes from Kubernetes or Docker, and is not a setting", variable)
            continue
        if written.get(name) != variable:
            others = {other.removeprefix(PREFIX).lower(): other for other in _OTHERS}
            raise SettingsError(f"{variable} is not a setting{_nearest(name, written | others)}")
        parts = _parts(fields[name], value)
        values[name] = _checked(variable, fields[name], parts, TypeAdapter.validate_python)
    return values


def _is_host(value: str) -> bool:
    """Return whether a value is the address of a Service; Kubernetes gives addresses, not names."""
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


_NAMES: Final = re.escape(PREFIX) + "(?:[A-Z0-9_]+_)?"
_PORT_AT: Final = "PORT_[0-9]{1,5}_(?:TCP|UDP|SCTP)"
_NUMBER: Final = re.compile("[0-9]{1,5}")
_URL: Final = re.compile(r"(?:tcp|udp|sctp)://\S+:[0-9]{1,5}", re.IGNORECASE)

_PLATFORM: Final[tuple[tuple[re.Pattern[str], Callable[[str], object]], ...]] = tuple(
    (re.compile(name), check)
    for name, check in (
        (f"{_NAMES}SERVICE_HOST", _is_host),
        (f"{_NAMES}SERVICE_PORT(?:_[A-Z0-9_]+)?", _NUMBER.fullmatch),
        (f"{_NAMES}PORT", _URL.fullmatch),
        (f"{_NAMES}{_PORT_AT}(?:_START|_END)?", _URL.fullmatch),
        (f"{_NAMES}{_PORT_AT}_PROTO", re.compile("tcp|udp|sctp", re.IGNORECASE).fullmatch),
        (f"{_NAMES}{_PORT_AT}_PORT(?:_START|_END)?", _NUMBER.fullmatch),
        (f"{_NAMES}{_PORT_AT}_ADDR", _is_host),
        (f"{PREFIX}NAME", re.compile("/.+/.+").fullmatch),
        (f"{PREFIX}ENV_.+", lambda _: True),
    )
)
"""Variables that Kubernetes sets for a Service and Docker for a link, and the form of their values.

Sources: kubelet's pkg/kubelet/envvars (for a Service `foredraft` or `foredraft-NAME`), and Docker's
legacy links, whose NAME and ENV_ refer to the linked container. A value of any other form belongs
to a misspelt setting: a port of ours would be a number, not a URL."""


def _is_of_a_platform(variable: str, value: str) -> bool:
    return any(name.fullmatch(variable) and check(value) for name, check in _PLATFORM)


def _parts(field: FieldInfo, value: str) -> Any:
    """Return the value of a variable; lists are separated as in `PATH`."""
    return value.split(os.pathsep) if get_origin(field.annotation) is list else value


def _checked(
    where: str, field: FieldInfo, value: Any, validate: Callable[[TypeAdapter[Any], Any], Any]
) -> object:
    """Return a value converted to the type of its setting, or raise with the expected values."""
    if _is_path(field) and "" in (value if isinstance(value, list) else [value]):
        raise SettingsError(f"{where} is empty: name a path, or leave it out")
    try:
        checked: object = validate(TypeAdapter(_type_of(field)), value)
    except ValidationError as error:
        given = without_password(value) if isinstance(value, str) else value
        shown = "a secret value" if is_secret(field) else _shortened(repr(given))
        raise SettingsError(f"{where} is {shown}: {expected_by(error)}") from error
    return checked


def _is_path(field: FieldInfo) -> bool:
    kinds = (field.annotation, *get_args(field.annotation))
    return any(isinstance(kind, type) and issubclass(kind, Path) for kind in kinds)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}\u2026"


def _nearest(name: str, written: Mapping[str, str]) -> str:
    """Return a hint for an unknown name: the nearest setting, spelt as in the mapping."""
    near = get_close_matches(name.replace("-", "_"), written, n=1)
    return f": did you mean {written[near[0]]}?" if near else f": {_LIST} lists them"


_MASK = "********"


def as_toml(resolved: Resolved[Any]) -> str:
    """Return one line per setting, with its origin; secrets are masked."""
    lines = []
    for name, origin in resolved.origins.items():
        value = shown(getattr(resolved.settings, name))
        line = f"# {name}: not set" if value is None else f"{name} = {_literal(value)}"
        lines.append(f"{line}  # {origin}")
    return "\n".join(lines)


def to_json(resolved: Resolved[Any]) -> str:
    """Return an object with the `value` and `origin` of each setting; infinity is `"inf"`."""
    found = {
        name: {"value": _finite(shown(getattr(resolved.settings, name))), "origin": origin}
        for name, origin in resolved.origins.items()
    }
    return json.dumps(found, indent=2)


def shown(value: Any) -> Any:
    """Return a value as numbers, text and lists, without secrets and passwords in URLs."""
    if isinstance(value, ServerUrl):
        return value.shown()
    if isinstance(value, SecretStr):
        return _MASK
    if isinstance(value, list):
        return [shown(each) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return without_password(str(value))


def without_password(text: str) -> str:
    """Return a text; if it is a URL, its name and password are masked."""
    if "://" not in text or "@" not in text:
        return text
    try:
        parts = urlsplit(text)
    except ValueError:
        return _MASK
    return urlunsplit(parts._replace(netloc=f"{_MASK}@{parts.netloc.rpartition('@')[2]}"))


def _literal(value: Any) -> str:
    """Return a TOML literal; strings are written as in JSON except for one character."""
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _finite(value: Any) -> Any:
    return "inf" if isinstance(value, float) and math.isinf(value) else value

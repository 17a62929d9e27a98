"""Settings of a running service: those in force, and those that a reload changes.

The settings that can change are listed here. Any other setting needs a restart, so a new setting is
safe until someone implements how to apply it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final

from retriever.errors import NotPossibleError
from retriever.limits import CHANGEABLE_LIMITS
from retriever.operations.logs import log_to_standard_error
from retriever.operations.resolving import Resolved, shown
from retriever.operations.settings import Settings
from retriever.plugins.admin.administration import Administration

_LOGS: Final = frozenset({"log_level", "log_format"})
_INDEXES: Final = frozenset({"index", "tenant_index"})

CHANGEABLE: Final = _LOGS | CHANGEABLE_LIMITS | {"refresh"}
"""Settings that a reload can change."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting whose value differs from the one in force.

    Attributes:
        name: name of the setting.
        before: value in force so far, as `shown` returns it.
        after: new value, in the same form.
        origin: origin of the new value.
    """

    name: str
    before: Any
    after: Any
    origin: str


class LiveSettings:
    """The settings in force. Thread-safe.

    Args:
        resolved: settings with which the service started.
        resolve_again: reads file, environment and flags again.
    """

    def __init__(
        self, resolved: Resolved[Settings], resolve_again: Callable[[], Resolved[Settings]]
    ) -> None:
        self._resolved = resolved
        self._resolve_again = resolve_again
        self._lock = Lock()

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._resolved.settings

    @property
    def origins(self) -> Mapping[str, str]:
        """The origin of each setting."""
        return self._resolved.origins

    def reload(
        self, administration: Administration, *, check_only: bool = False
    ) -> list[SettingChange]:
        """Read the settings again and apply those that can change; return the differences.

        Args:
            administration: administration of the drafter.
            check_only: change nothing.

        Raises:
            SettingsError: a setting is unknown or its value is invalid; nothing is changed.
            NotPossibleError: a setting that cannot change differs; nothing is changed.
        """
        with self._lock:
            newer = self._resolve_again()
            changes = _differences(self._resolved, newer)
            _refuse_fixed(changes, newer.settings, administration)
            if not check_only:
                _apply({each.name for each in changes}, newer.settings, administration)
                self._resolved = newer
            return changes


def _differences(before: Resolved[Settings], after: Resolved[Settings]) -> list[SettingChange]:
    return [
        SettingChange(
            name,
            shown(getattr(before.settings, name)),
            shown(getattr(after.settings, name)),
            origin,
        )
        for name, origin in after.origins.items()
        if getattr(before.settings, name) != getattr(after.settings, name)
    ]


def _refuse_fixed(
    changes: list[SettingChange], newer: Settings, administration: Administration
) -> None:
    """Refuse changes that need a restart; it is fine to list the indexes attached now."""
    fixed = [each.name for each in changes if each.name not in CHANGEABLE]
    if _INDEXES.intersection(fixed) and _named_indexes(newer) == _attached_indexes(administration):
        fixed = [name for name in fixed if name not in _INDEXES]
    if not fixed:
        return
    todo = [name for name in fixed if name not in _INDEXES]
    advice = [f"restart the service for {', '.join(todo)}"] if todo else []
    if len(todo) < len(fixed):
        names = ", ".join(name for name in fixed if name in _INDEXES)
        advice.append(
            f"first attach and detach what {names} should list (`foredraft admin attach`, `detach`)"
        )
    raise NotPossibleError(
        f"nothing was changed, because {', '.join(fixed)} cannot change by a reload: "
        f"{', and '.join(advice)}; or put the old value back"
    )


def _apply(names: set[str], newer: Settings, administration: Administration) -> None:
    """Apply changed settings, which are already checked."""
    if limits := names & CHANGEABLE_LIMITS:
        administration.change_limits({name: getattr(newer, name) for name in limits})
    if "refresh" in names:
        administration.refresh_every(newer.refresh)
    if names & _LOGS:
        log_to_standard_error(newer.log_format, newer.log_level)


def _named_indexes(settings: Settings) -> set[tuple[str | None, Path]]:
    shared = {(None, path.resolve()) for path in settings.index}
    bound = (each.partition("=") for each in settings.tenant_index)
    return shared | {(tenant, Path(path).resolve()) for tenant, _, path in bound}


def _attached_indexes(administration: Administration) -> set[tuple[str | None, Path]]:
    return {(each.tenant, each.index.path.resolve()) for each in administration.indexes()}


def as_json(value: Any) -> str:
    """Return a shown value as JSON; infinity is "inf"."""
    return json.dumps("inf" if value == float("inf") else value, ensure_ascii=False)

"""What a request of SGLang tells its drafter: `custom_params` of its sampling parameters.

SGLang carries scalars and lists of scalars there, so each field is a key of its own.
"""

from collections.abc import Mapping
from logging import getLogger
from typing import Any, Final

from decoder.engines.request_fields import (
    NOT_DRAFTED,
    PLAIN,
    PREFIX,
    SHAPING,
    Complaints,
    FieldReader,
    RequestFields,
)

_log = getLogger(__name__)

_SHAPING: Final = tuple(f"{PREFIX}_{name}" for name in SHAPING)


class CustomParams:
    """Reads what requests state; nothing that they state is an error.

    A field that shapes drafts and has no possible value is left out. Where tenant, `remember` or
    `drafts` have none, or a field is unknown, which may be one of these misspelt, the request is
    not drafted for and leaves nothing behind. Both are logged.

    Args:
        fields: reads the fields; without tenants and a tokenizer if not given.
    """

    def __init__(self, fields: FieldReader | None = None) -> None:
        self._fields = fields or FieldReader()
        self._complaints = Complaints(_log)

    def of(self, request: Any) -> RequestFields:
        """Return what a request of SGLang states; never raises."""
        stated = getattr(getattr(request, "sampling_params", None), "custom_params", None)
        if not isinstance(stated, Mapping):
            return PLAIN
        try:
            fields, ignored = self._fields.read(stated)
        except Exception:  # noqa: BLE001  (its server would end; a tokenizer raises its own errors)
            fields, ignored = self._usable(stated)
        if ignored:
            self._complaints.add(str(getattr(request, "rid", "without a name")), ignored)
        return fields

    def _usable(self, stated: Mapping[str, Any]) -> tuple[RequestFields, str]:
        """Return what can be used where a field cannot, and what is not followed."""
        usable = {name: value for name, value in stated.items() if name not in _SHAPING}
        try:
            fields, ignored = self._fields.read(usable)
        except Exception as error:  # noqa: BLE001  (as above)
            return NOT_DRAFTED, f"{error}; it is not drafted for"
        wrong = []
        for name in [name for name in _SHAPING if name in stated]:
            more = {**usable, name: stated[name]}
            try:
                fields, ignored = self._fields.read(more)
            except Exception as error:  # noqa: BLE001  (as above)
                wrong.append(f"{error}; it goes on without {name}")
            else:
                usable = more
        return fields, "; ".join([*wrong, *filter(None, [ignored])])

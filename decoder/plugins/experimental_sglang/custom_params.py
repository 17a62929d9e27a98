"""Fields for the drafter in a request of SGLang: `custom_params` of its sampling parameters.

SGLang allows only scalars and lists of scalars there, so each field is a separate key.
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
    """Reads the fields of requests; an invalid field never raises.

    Invalid fields that only shape drafts are left out. If `tenant`, `remember` or `drafts` is
    invalid, the request gets no drafts, and nothing of it is stored. The same holds for an unknown
    field, which may be one of these misspelt. Both cases are logged.

    Args:
        fields: reader of the fields; the default allows no tenants and has no tokenizer.
    """

    def __init__(self, fields: FieldReader | None = None) -> None:
        self._fields = fields or FieldReader()
        self._complaints = Complaints(_log)

    def of(self, request: Any) -> RequestFields:
        """Return the fields of a request of SGLang; never raises."""
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
        """Return the usable fields if some field is invalid, and a message about the others."""
        usable = {name: value for name, value in stated.items() if name not in _SHAPING}
        try:
            fields, ignored = self._fields.read(usable)
        except Exception as error:  # noqa: BLE001  (as above)
            return NOT_DRAFTED, f"{error}; it gets no drafts"
        wrong = []
        for name in [name for name in _SHAPING if name in stated]:
            more = {**usable, name: stated[name]}
            try:
                fields, ignored = self._fields.read(more)
            except Exception as error:  # noqa: BLE001  (as above)
                wrong.append(f"{error}; it continues without {name}")
            else:
                usable = more
        return fields, "; ".join([*wrong, *filter(None, [ignored])])

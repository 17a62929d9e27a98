"""Reads options for the drafter from the fields that an engine allows in requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from logging import Logger
from typing import Any, Final

import numpy as np

from indexer.reader import Vocabulary
from retriever.drafter import DEFAULT, Prediction, SequenceOptions, TokenIds, predictions_of
from retriever.errors import InvalidRequestError
from retriever.limits import check_tenant_name
from retriever.predict.phrases import Encode
from retriever.sequences import TokenSequence, checked_options

PREFIX: Final = "foredraft"
"""Name of the mapping of fields in a request. Single keys `foredraft_NAME` are read too, because
requests to OpenAI-compatible servers cannot contain mappings."""

ANY_TENANT: Final = "*"
"""Stands for any tenant in the settings."""

_MOST_COMPLAINTS: Final = 20
"""Most requests whose invalid fields are logged, because a faulty client repeats its mistake in
every request."""

_MOST_CHARACTERS: Final = 1 << 20
"""Most characters in a request's predictions: a step waits while they are encoded, a few
milliseconds per hundred thousand characters."""


@dataclass(frozen=True, slots=True)
class RequestFields:
    """How to draft for one request.

    Attributes:
        drafts: whether to draft. If not, no drafter sees the request, and nothing of it is stored.
        budget: most tokens to propose in a step, within the engine's limit. With 0 none are
            proposed, but the output is stored. `None` for the engine's limit.
        options: options for the drafter.
    """

    drafts: bool = True
    budget: int | None = None
    options: SequenceOptions = DEFAULT

    def most(self, room: int) -> int:
        """Return the most tokens to propose, given how many tokens the engine has room for."""
        most = room if self.budget is None else min(self.budget, room)
        return max(most, 0) if self.drafts else 0

    def begin(self, tokens: TokenIds, num_prompt: int) -> TokenSequence:
        """Return a sequence with a copy of int32[n] tokens, `num_prompt` of them the prompt."""
        return TokenSequence(tokens, num_prompt, self.options)


PLAIN: Final = RequestFields()
"""Fields of a request that sets none."""

NOT_DRAFTED: Final = RequestFields(drafts=False, options=SequenceOptions(remember=False))
"""Fields of a request whose own fields cannot be followed: nothing of it is stored, for privacy."""

_OPTIONS: Final = tuple(each.name for each in fields(SequenceOptions))
_NAMES: Final = ("drafts", "budget", *_OPTIONS, "vocabulary")

_LATE: Final = "predictions"
SHAPING: Final = (
    *(each for each in _NAMES if each not in {"drafts", "tenant", "remember", _LATE}),
    _LATE,
)
"""Fields that affect only what is drafted, and neither the tenant nor what is stored. A field that
depends on other fields comes after them."""


class FieldReader:
    """Reads and checks the fields of requests; reports errors and fields that are left out.

    Args:
        tenants: tenants that requests may name; with `ANY_TENANT`, requests may name any tenant.
        most_tokens: most tokens of a sequence that the engine verifies.
        encode: function that encodes text with the engine's tokenizer, without special tokens;
            `None` if the tokenizer is unknown.
        vocabulary: vocabulary of that tokenizer; `None` if it is unknown.
    """

    def __init__(
        self,
        tenants: Sequence[str] = (),
        most_tokens: int | None = None,
        encode: Encode | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._tenants = frozenset(tenants)
        self._most_tokens = most_tokens
        self._encode = encode
        self._vocabulary = vocabulary

    def read(self, carried: Mapping[str, Any] | None) -> tuple[RequestFields, str]:
        """Return a request's fields, and a text about fields that are not followed, or "".

        Args:
            carried: all extra fields of the request, including fields for other software.

        Raises:
            InvalidRequestError: a field is unknown or invalid, or the tenant is not in the
                settings; the message names the field.
        """
        stated = _stated(carried)
        if not stated:
            return PLAIN, ""
        budget, too_much = self._budget(stated.get("budget"))
        predictions, left_out = self._predictions(stated)
        options: dict[str, Any] = {name: stated[name] for name in _OPTIONS if name in stated}
        options |= {
            "remember": _switch("remember", stated.get("remember", True)),
            "tenant": self._tenant(stated.get("tenant", "")),
            "predictions": (),  # already checked; invalid predictions were left out
        }
        checked = checked_options(SequenceOptions(**options), keeps_tenants=True)
        found = RequestFields(
            drafts=_switch("drafts", stated.get("drafts", True)),
            budget=budget,
            options=replace(checked, predictions=predictions),
        )
        return found, "; ".join(each for each in (too_much, left_out) if each)

    def _budget(self, stated: object) -> tuple[int | None, str]:
        if stated is None:
            return None, ""
        if isinstance(stated, bool) or not isinstance(stated, int) or stated < 0:
            raise InvalidRequestError(f"{PREFIX}_budget: {stated!r} is not a number of tokens")
        if self._most_tokens is not None and stated > self._most_tokens:
            return self._most_tokens, (
                f"{PREFIX}_budget: {stated} tokens are beyond the engine's {self._most_tokens}, "
                "which is the most that is proposed"
            )
        return stated, ""

    def _tenant(self, stated: object) -> str:
        if not isinstance(stated, str):
            raise InvalidRequestError(f"{PREFIX}_tenant: {stated!r} is not a name")
        check_tenant_name(stated)
        if stated and not self._tenants & {stated, ANY_TENANT}:
            raise InvalidRequestError(
                f"{PREFIX}_tenant: {stated!r} is not among the tenants of the settings"
            )
        return stated

    def _predictions(self, stated: Mapping[str, Any]) -> tuple[tuple[Prediction, ...], str]:
        """Return the predictions, and the reason if they are left out."""
        given = stated.get("predictions")
        if not given:
            return (), ""
        try:
            if isinstance(given, list) and all(_is_id(each) for each in given):
                return (self._of_ids(given, stated.get("vocabulary")),), ""
            return self._of_texts(given), ""
        except _LeftOutError as reason:
            return (), f"{PREFIX}_predictions: {reason}"

    def _of_ids(self, ids: list[int], fingerprint: object) -> Prediction:
        own = self._vocabulary
        if fingerprint is not None and own is not None and fingerprint != own.fingerprint:
            raise _LeftOutError(
                f"their tokenizer ({fingerprint}) is not the engine's ({own.describe()})"
            )
        if min(ids) < 0 or (own is not None and max(ids) >= own.size):
            raise _LeftOutError("a token is not the engine's: they may be another tokenizer's")
        return Prediction(np.array(ids, np.int32), "prediction")

    def _of_texts(self, given: object) -> tuple[Prediction, ...]:
        texts = given if isinstance(given, list) else [given]
        if self._encode is None:
            raise _LeftOutError("the engine's tokenizer is not known: give token ids")
        if sum(len(each) for each in texts if isinstance(each, str)) > _MOST_CHARACTERS:
            raise _LeftOutError(f"they have more than {_MOST_CHARACTERS} characters")
        found: list[Prediction] = []
        for text in texts:
            whole = {"type": "content", "content": text} if isinstance(text, str) else text
            try:
                found += predictions_of(whole, self._encode)
            except ValueError as error:
                raise InvalidRequestError(f"{PREFIX}_predictions: {error}") from error
        return tuple(each for each in found if len(each.tokens))


class Complaints:
    """Logs which fields of the first requests are not followed, as no error may reach a client.

    Args:
        log: logger of the adapter.
    """

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._num = 0

    def add(self, request: str, reason: str) -> None:
        """Log which fields of a request are not followed.

        Args:
            request: name of the request.
            reason: the reason, a sentence without a full stop.
        """
        self._num += 1
        if self._num <= _MOST_COMPLAINTS:
            self._log.warning("request %s: %s", request, reason)
        if self._num == _MOST_COMPLAINTS:
            self._log.warning("fields of further requests are not logged")


class _LeftOutError(Exception):
    """Predictions cannot be used; the request continues without them."""


def _stated(carried: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return foredraft's fields in a request, by name without the prefix."""
    if not carried:
        return {}
    whole = carried.get(PREFIX, {})
    if not isinstance(whole, Mapping):
        raise InvalidRequestError(f"{PREFIX}: {whole!r} is not a mapping of fields")
    stated = dict(whole)
    for key, value in carried.items():
        if isinstance(key, str) and key.startswith(f"{PREFIX}_"):
            stated[key.removeprefix(f"{PREFIX}_")] = value
    for name in stated:
        if name not in _NAMES:
            raise InvalidRequestError(
                f"{PREFIX}_{name} is not a field of a request; there are {', '.join(_NAMES)}"
            )
    return stated


_SWITCHES: Final = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}


def _switch(name: str, stated: object) -> bool:
    """Return a field's value as a boolean; servers turn booleans into numbers or texts."""
    found = _SWITCHES.get(str(stated).lower())
    if found is None:
        raise InvalidRequestError(f"{PREFIX}_{name}: {stated!r} is neither true nor false")
    return found


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

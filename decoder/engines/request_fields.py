"""What a request tells its drafter, in the fields that an engine lets a request carry."""

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
"""Fields are read from the mapping `foredraft`, and from `foredraft_NAME` each: requests of
OpenAI-compatible servers carry no mappings."""

ANY_TENANT: Final = "*"
"""Stands for every tenant in the settings."""

_MOST_COMPLAINTS: Final = 20
"""Requests whose wrong fields are logged: a client that is wrong is wrong with every request."""

_MOST_CHARACTERS: Final = 1 << 20
"""Characters of a request's predictions: they are encoded while a step waits, some milliseconds for
each hundred thousand."""


@dataclass(frozen=True, slots=True)
class RequestFields:
    """How one request is drafted for.

    Attributes:
        drafts: whether it is at all. If not, no drafter is told of it, and nothing of it is kept.
        budget: most tokens that are proposed in a step, within the engine's own; 0 proposes none
            but keeps the output. `None` for the engine's.
        options: what its drafter is told of it.
    """

    drafts: bool = True
    budget: int | None = None
    options: SequenceOptions = DEFAULT

    def most(self, room: int) -> int:
        """Return the most tokens of a proposal, given how many the engine has room for."""
        most = room if self.budget is None else min(self.budget, room)
        return max(most, 0) if self.drafts else 0

    def begin(self, tokens: TokenIds, num_prompt: int) -> TokenSequence:
        """Return the request's sequence of int32[n], copied, of which so many are the prompt."""
        return TokenSequence(tokens, num_prompt, self.options)


PLAIN: Final = RequestFields()
"""Of a request that states nothing."""

NOT_DRAFTED: Final = RequestFields(drafts=False, options=SequenceOptions(remember=False))
"""Of a request whose fields cannot be honoured: what it meant to keep apart stays apart."""

_OPTIONS: Final = tuple(each.name for each in fields(SequenceOptions))
_NAMES: Final = ("drafts", "budget", *_OPTIONS, "vocabulary")

_LATE: Final = "predictions"
SHAPING: Final = (
    *(each for each in _NAMES if each not in {"drafts", "tenant", "remember", _LATE}),
    _LATE,
)
"""Fields that say what is drafted, and not for whom, nor what is kept; one that needs others comes
after them."""


class FieldReader:
    """Reads requests' fields; says what is wrong with one, and what is left out.

    Args:
        tenants: that requests may name; `ANY_TENANT` among them for any.
        most_tokens: that the engine verifies of a sequence.
        encode: the engine's tokenizer, without special tokens; `None` where it is not known.
        vocabulary: of that tokenizer; `None` where it is not known.
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
        """Return a request's fields, and what of them is not followed, empty where all is.

        Args:
            carried: what the engine let the request carry, others' fields included.

        Raises:
            InvalidRequestError: a field is unknown or has no possible value, or the tenant is not
                one of the settings'; the message names it.
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
            "predictions": (),  # checked already, where a wrong one is left out
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
            raise InvalidRequestError(f"{PREFIX}_budget: {stated!r} is no number of tokens")
        if self._most_tokens is not None and stated > self._most_tokens:
            return self._most_tokens, (
                f"{PREFIX}_budget: {stated} tokens are beyond the engine's {self._most_tokens}, "
                "which are proposed at most"
            )
        return stated, ""

    def _tenant(self, stated: object) -> str:
        if not isinstance(stated, str):
            raise InvalidRequestError(f"{PREFIX}_tenant: {stated!r} is no name")
        check_tenant_name(stated)
        if stated and not self._tenants & {stated, ANY_TENANT}:
            raise InvalidRequestError(
                f"{PREFIX}_tenant: {stated!r} is not among the tenants of the settings"
            )
        return stated

    def _predictions(self, stated: Mapping[str, Any]) -> tuple[tuple[Prediction, ...], str]:
        """Return what is predicted; what cannot be drafted from is left out, and said."""
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
            raise _LeftOutError("a token is none of the engine's: they seem another tokenizer's")
        return Prediction(np.array(ids, np.int32), "prediction")

    def _of_texts(self, given: object) -> tuple[Prediction, ...]:
        texts = given if isinstance(given, list) else [given]
        if self._encode is None:
            raise _LeftOutError("the engine's tokenizer is not known: state token ids")
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
    """Logs what is not followed of requests, of the first ones, where no error may reach a client.

    Args:
        log: of the adapter.
    """

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._num = 0

    def add(self, request: str, reason: str) -> None:
        """Log what is not followed of a request.

        Args:
            request: its name.
            reason: a sentence without a full stop.
        """
        self._num += 1
        if self._num <= _MOST_COMPLAINTS:
            self._log.warning("request %s: %s", request, reason)
        if self._num == _MOST_COMPLAINTS:
            self._log.warning("fields of further requests are not logged")


class _LeftOutError(Exception):
    """Predictions cannot be drafted from; the request goes on without them."""


def _stated(carried: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return our fields of what a request carries, by their names without the prefix."""
    if not carried:
        return {}
    whole = carried.get(PREFIX, {})
    if not isinstance(whole, Mapping):
        raise InvalidRequestError(f"{PREFIX}: {whole!r} is no mapping of fields")
    stated = dict(whole)
    for key, value in carried.items():
        if isinstance(key, str) and key.startswith(f"{PREFIX}_"):
            stated[key.removeprefix(f"{PREFIX}_")] = value
    for name in stated:
        if name not in _NAMES:
            raise InvalidRequestError(
                f"{PREFIX}_{name} is no field of a request; there are {', '.join(_NAMES)}"
            )
    return stated


_SWITCHES: Final = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}


def _switch(name: str, stated: object) -> bool:
    """Return a yes or no; servers turn them into numbers or texts."""
    found = _SWITCHES.get(str(stated).lower())
    if found is None:
        raise InvalidRequestError(f"{PREFIX}_{name}: {stated!r} is neither true nor false")
    return found


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

"""Sequences that are being decoded: their tokens, and open sessions by name.

All code that stores the tokens of a sequence uses a `TokenSequence`. Within a process the object is
shared: followers track positions in it and copy no tokens.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from retriever.drafter import (
    DEFAULT,
    DraftRequest,
    OutputConstraint,
    Prediction,
    SequenceOptions,
    TokenIds,
)
from retriever.errors import (
    InvalidConstraintError,
    InvalidRequestError,
    LimitExceededError,
    OutOfSequenceError,
    SessionExistsError,
    UnknownSessionError,
)
from retriever.limits import (
    MAX_CONSTRAINT_BYTES,
    MAX_NAME_BYTES,
    Limits,
    check_group_name,
    check_predictions,
    check_tenant_name,
    checked_tokens,
    shown,
)

_ROOM: Final = 512
"""Free places for tokens in a new buffer. Most outputs are shorter, so the buffer rarely grows."""


class TokenSequence:
    """The committed tokens of one sequence, the prompt first, in one buffer that grows.

    Args:
        tokens: int32[n], the initial tokens; copied, with room for the output.
        num_prompt: length of the prompt at their beginning; all tokens if not given.
        options: the checked options with which the sequence is opened.

    Attributes:
        num_prompt: as passed to the constructor.
        options: as passed to the constructor, without the predictions.
        predictions: all predictions so far, in the order in which they came, each text once.
    """

    __slots__ = ("_buffer", "_length", "num_prompt", "options", "predictions")

    def __init__(
        self,
        tokens: TokenIds,
        num_prompt: int | None = None,
        options: SequenceOptions = DEFAULT,
    ) -> None:
        self._buffer = np.empty(len(tokens) + _ROOM, np.int32)
        self._buffer[: len(tokens)] = tokens
        self._length = len(tokens)
        self.num_prompt = len(tokens) if num_prompt is None else num_prompt
        self.options = options.without_predictions
        self.predictions = list(options.predictions)

    def __len__(self) -> int:
        return self._length

    @property
    def num_predicted(self) -> int:
        """Number of tokens in all predictions."""
        return sum(len(each.tokens) for each in self.predictions)

    def expect(self, predictions: Iterable[Prediction]) -> None:
        """Add checked predictions, except those with the same tokens as earlier ones.

        Raises:
            LimitExceededError: the predictions would be too many, or too long in total.
        """
        self.predictions = checked_predictions([*self.predictions, *predictions])

    @property
    def tokens(self) -> TokenIds:
        """int32[n], all tokens: a view that stays valid unless the sequence is shortened."""
        return self._buffer[: self._length]

    @property
    def prompt(self) -> TokenIds:
        """int32[num_prompt], a view."""
        return self._buffer[: self.num_prompt]

    @property
    def output(self) -> TokenIds:
        """int32[m], the tokens after the prompt: a view."""
        return self._buffer[self.num_prompt : self._length]

    def since(self, begin: int) -> TokenIds:
        """Return int32[n - begin], a copy of the tokens from a position on."""
        return self._buffer[begin : self._length].copy()

    def bytes_since(self, begin: int) -> bytes:
        """Return the tokens from a position on, 4 bytes each."""
        return self._buffer[begin : self._length].tobytes()

    def begins(self, tokens: TokenIds) -> bool:
        """Return whether this sequence is a prefix of int32[n]; compares all tokens."""
        length = self._length
        return len(tokens) >= length and bool((self.tokens == tokens[:length]).all())

    def extend(self, tokens: ArrayLike) -> None:
        """Append integers[m], token ids of 31 bits."""
        new = np.asarray(tokens, np.int32)
        length = self._length + len(new)
        if length > len(self._buffer):
            grown = np.empty(2 * length, np.int32)
            grown[: self._length] = self.tokens
            self._buffer = grown
        self._buffer[self._length : length] = new
        self._length = length

    def shorten(self, length: int) -> None:
        """Remove the tokens beyond a length."""
        self._length = min(length, self._length)

    def clear(self) -> None:
        """Overwrite all tokens with zeros, so that an ended sequence leaves nothing in memory."""
        self._buffer[:] = 0
        self.predictions.clear()

    @property
    def num_bytes(self) -> int:
        """Memory of the tokens, in bytes."""
        return self._buffer.nbytes


class SessionKey(NamedTuple):
    """Key of a session if several callers choose names.

    Attributes:
        namespace: namespace of the caller; equal names in different namespaces are different keys.
        name: name of the session that the caller uses.
    """

    namespace: str
    name: str


_Key = TypeVar("_Key", str, SessionKey)
_Session = TypeVar("_Session")


class OpenSessions(Generic[_Key, _Session]):
    """Sessions by name, least recently used first. All errors about names are raised here.

    Attributes:
        by_name: the sessions.
    """

    def __init__(self) -> None:
        self.by_name: OrderedDict[_Key, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self.by_name)

    def __contains__(self, name: object) -> bool:
        return name in self.by_name

    def __iter__(self) -> Iterator[_Key]:
        return iter(self.by_name)

    def values(self) -> list[_Session]:
        """Return the sessions, least recently used first."""
        return list(self.by_name.values())

    def items(self) -> list[tuple[_Key, _Session]]:
        """Return names and sessions, least recently used first."""
        return list(self.by_name.items())

    def check_free(self, name: _Key) -> None:
        """Refuse a name that is taken.

        Raises:
            SessionExistsError: the name is taken.
        """
        if name in self.by_name:
            raise SessionExistsError(f"session {_shown(name)} is open already")

    def add(self, name: _Key, session: _Session) -> None:
        """Begin a session.

        Raises:
            SessionExistsError: the name is taken.
        """
        self.check_free(name)
        self.by_name[name] = session

    def find(self, name: _Key) -> _Session | None:
        """Return the session of this name, or None if there is none."""
        return self.by_name.get(name)

    def get(self, name: _Key) -> _Session:
        """Return a session.

        Raises:
            UnknownSessionError: no open session has this name.
        """
        session = self.by_name.get(name)
        if session is None:
            raise UnknownSessionError(f"no session {_shown(name)} is open: open it first")
        return session

    def use(self, name: _Key) -> _Session:
        """Return a session and mark it as used last.

        Raises:
            UnknownSessionError: no open session has this name.
        """
        session = self.by_name.get(name)
        if session is None:
            return self.get(name)
        self.by_name.move_to_end(name)
        return session

    def remove(self, name: _Key) -> _Session:
        """End a session and return it.

        Raises:
            UnknownSessionError: no open session has this name.
        """
        session = self.get(name)
        del self.by_name[name]
        return session


_DEFAULT_LIMITS: Final = Limits()


def checked_predictions(
    predictions: Iterable[Prediction],
    vocabulary_size: int | None = None,
    limits: Limits = _DEFAULT_LIMITS,
) -> list[Prediction]:
    """Return the predictions of a session, each text once, with tokens as int32[n].

    Args:
        predictions: all predictions of the session.
        vocabulary_size: token ids must be below it; None if unknown.
        limits: the limits in force.

    Raises:
        InvalidRequestError: a prediction is empty, has a token outside the vocabulary, or has a
            label that is too long.
        LimitExceededError: the predictions are too many, or too long in total.
    """
    distinct: dict[bytes, Prediction] = {}
    for each in predictions:
        check_predictions([len(each.tokens)], limits)  # before it is copied
        prediction = _checked_prediction(each, vocabulary_size)
        distinct.setdefault(blake2b(prediction.tokens.tobytes()).digest(), prediction)
    check_predictions([len(each.tokens) for each in distinct.values()], limits)
    return list(distinct.values())


def _checked_prediction(prediction: Prediction, vocabulary_size: int | None) -> Prediction:
    if len(prediction.label.encode(errors="replace")) > MAX_NAME_BYTES:
        raise InvalidRequestError(f"a prediction's label has at most {MAX_NAME_BYTES} bytes")
    try:
        tokens = checked_tokens(prediction.tokens, vocabulary_size)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{prediction.shown}: {error}") from error
    if len(tokens) == 0:
        raise InvalidRequestError(f"{prediction.shown} has no tokens: leave it out")
    return Prediction(tokens, prediction.label)


def check_step(request: DraftRequest, num_known: int, num_new: int) -> None:
    """Refuse a request whose stated length does not match its sequence.

    Raises:
        OutOfSequenceError: a step was lost or repeated.
    """
    check_stated_length(request.session, num_known, num_new, request.length)


def check_stated_length(session: str, num_known: int, num_new: int, stated: int) -> None:
    """Refuse a stated length that differs from the session's length with the new tokens.

    Raises:
        OutOfSequenceError: a step was lost or repeated.
    """
    if num_known + num_new != stated:
        raise OutOfSequenceError(
            f"session {shown(session)} has {num_known} tokens and the request brings "
            f"{num_new}, but states a length of {stated}: a step was lost or repeated; "
            "close the session and open it again"
        )


_LAST_VERSION: Final = 1 << 62


def checked_options(
    options: SequenceOptions,
    vocabulary_size: int | None = None,
    limits: Limits = _DEFAULT_LIMITS,
    *,
    keeps_tenants: bool = False,
) -> SequenceOptions:
    """Return the checked options of a sequence, with predictions from `checked_predictions`.

    Args:
        options: options as given by the caller.
        vocabulary_size: token ids must be below it; None if unknown.
        limits: the limits in force.
        keeps_tenants: whether the drafter keeps tenants apart.

    Raises:
        InvalidConstraintError: the constraint does not state exactly one form.
        InvalidRequestError: a prediction or the name of the group or tenant is invalid, or a
            version is not a number from 0 on. Or there is a tenant, but the drafter does not keep
            tenants apart.
        LimitExceededError: the predictions are too many, or too long in total.
    """
    if options is DEFAULT:
        return options
    if options.group:
        check_group_name(options.group)
    _check_versions(options)
    if options.constraint is not None:
        _check_constraint(options.constraint)
    if options.tenant:
        check_tenant_name(options.tenant)
        if not keeps_tenants:
            raise refused_tenant(options.tenant)
    if not options.predictions:
        return options
    predictions = checked_predictions(options.predictions, vocabulary_size, limits)
    return replace(options, predictions=tuple(predictions))


def refused_tenant(tenant: str) -> InvalidRequestError:
    """Return the refusal of a tenant's sequence by a drafter that does not keep tenants apart."""
    return InvalidRequestError(
        f"a sequence of tenant {tenant!r} is refused: this drafter does not keep tenants apart; "
        "a service takes the tenant from the client's credentials"
    )


def _check_constraint(constraint: OutputConstraint) -> None:
    given = [constraint.json_schema, constraint.regular_expression, constraint.choices or None]
    if sum(each is not None for each in given) != 1:
        raise InvalidConstraintError(
            "a constraint is one of a JSON schema, a regular expression and choices: give one"
        )
    if constraint.num_bytes > MAX_CONSTRAINT_BYTES:
        raise LimitExceededError(
            f"a constraint of {constraint.num_bytes} bytes is beyond the limit of "
            f"{MAX_CONSTRAINT_BYTES}: leave out descriptions, or divide it"
        )


def _check_versions(options: SequenceOptions) -> None:
    for version in (options.policy_version, options.oldest_version):
        is_number = isinstance(version, (int, np.integer)) and not isinstance(version, bool)
        if version is not None and not (is_number and 0 <= version < _LAST_VERSION):
            raise InvalidRequestError(
                f"{version!r} is not a version: versions are numbers from 0 on"
            )
    if options.oldest_version and options.policy_version is None:
        raise InvalidRequestError(
            "an oldest version counts for a sequence of a version alone: state policy_version, too"
        )


def check_batch(requests: Sequence[DraftRequest], limits: Limits) -> None:
    """Refuse steps with too many sequences or nodes, or with one sequence twice.

    Raises:
        LimitExceededError: there are more than `max_batch` sequences or `max_step_nodes` nodes.
        InvalidRequestError: two requests name the same session.
    """
    num = len(requests)
    if num > limits.max_batch:
        raise LimitExceededError(
            f"a step of {num} sequences is beyond the limit of {limits.max_batch} (max_batch)",
            limit="max_batch",
        )
    if num == 1:  # the usual case: a sum would cost half a microsecond
        num_nodes = requests[0].num_nodes
    else:
        num_nodes = sum(request.num_nodes for request in requests)
    if num_nodes > limits.max_step_nodes:
        raise LimitExceededError(
            f"a step of {num_nodes} nodes is beyond the limit of {limits.max_step_nodes} "
            "(max_step_nodes)",
            limit="max_step_nodes",
        )
    if num > 1:
        check_named_once(requests)


def check_named_once(requests: Sequence[DraftRequest]) -> None:
    """Refuse a step that names a session twice.

    Raises:
        InvalidRequestError: a name occurs twice.
    """
    num = len(requests)
    if num > 1 and len({request.session for request in requests}) != num:
        raise InvalidRequestError("a step names one session twice")


def _shown(name: str | SessionKey) -> str:
    return shown(name if isinstance(name, str) else name[-1])

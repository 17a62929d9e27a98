"""Long lists of token ids, taken out of a message before it is parsed.

Parsing a list of a million ids takes 10 to 20 ms, and converting it 40 to 60 ms more, all of it
with the interpreter held. Here the bytes of a long list are cut out of the message, which is then
parsed without it, and converted by a kernel, without the interpreter. Source: the
encoding of Protocol Buffers (protobuf.dev/programming-guides/encoding): a packed list is one field
of varints.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.errors import InvalidRequestError
from retriever.wire.varints import AT, COUNT, read_varints

LONG_LIST: Final = 1 << 14
"""Bytes from which a list is cut out: some 6,000 ids, which take half a millisecond to convert."""

_MOST_FIELDS: Final = 4096
"""Fields that are looked at, a microsecond each; a message with more of them is parsed whole."""

_AT_ONCE: Final = 1 << 20
"""Bytes that are converted in one piece: a millisecond or two."""

_LENGTH_DELIMITED: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_MAX_VARINT: Final = 10
_GROUP: Final = 7  # bits of a byte of a varint
_MAX_TOKEN_ID: Final = (1 << 31) - 1

_TOKENS: Final = -1
_Plan = Mapping[int, Any]

_PREDICTION: Final[_Plan] = {1: _TOKENS}
_OPENING: Final[_Plan] = {2: _TOKENS, 5: _PREDICTION}
_STEP: Final[_Plan] = {2: _TOKENS}
_ADDITION: Final[_Plan] = {2: _PREDICTION}

_PLANS: Final[dict[str, _Plan]] = {
    "retriever.v1.DraftRequest": {1: _TOKENS, 5: _PREDICTION},
    "retriever.v1.ExplainRequest": {1: _TOKENS, 6: _PREDICTION},
    "retriever.v1.OpenSessionRequest": _OPENING,
    "retriever.v1.AddPredictionsRequest": _ADDITION,
    "retriever.v1.CloseSessionRequest": {2: _TOKENS},
    "retriever.v1.StepRequest": {1: _STEP},
    "retriever.v1.DraftStreamRequest": {
        1: _STEP,
        3: _OPENING,
        4: {2: _TOKENS},
        8: _ADDITION,
    },
}
"""Where lists of token ids are: field numbers of a message, and of the messages in it."""

Path = tuple[int, ...]
"""Where a list was: empty in a message itself; else field number and place in that field, of each
message down to the one that has it."""

STEPS: Final = 1
OPENINGS: Final = 3
CLOSINGS: Final = 4
ADDITIONS: Final = 8


def lists_within(lists: Mapping[Path, memoryview], *path: int) -> Mapping[Path, memoryview]:
    """Return the lists of a message within another, by their places in it."""
    if not lists:
        return lists
    size = len(path)
    return {each[size:]: content for each, content in lists.items() if each[:size] == path}


@dataclass(frozen=True, slots=True)
class LongMessage:
    """A message without its long lists of token ids.

    Attributes:
        message: parsed; its long lists are empty.
        lists: bytes of these lists, by place.
    """

    message: Any
    lists: Mapping[Path, memoryview]

    def __getattr__(self, name: str) -> Any:
        """Return a field of the message, for observers between gRPC and the servicer."""
        return getattr(self.message, name)


class _UnusualError(Exception):
    """A message is not as encoders write it, and is parsed whole."""


def parsed(content: bytes, parse: Callable[[bytes], Any], name: str) -> Any:
    """Return a message, or a `LongMessage` if it has a long list of token ids.

    Args:
        content: of the message.
        parse: of its class.
        name: of its class, in full.

    Raises:
        google.protobuf.message.DecodeError: these bytes are no message.
    """
    plan = _PLANS.get(name)
    if plan is None or len(content) < LONG_LIST:
        return parse(content)
    lists: dict[Path, memoryview] = {}
    try:
        rest = _Cutter(lists).cut(memoryview(content), plan, ())
    except _UnusualError:
        return parse(content)
    return LongMessage(parse(rest), lists) if lists else parse(content)


def opened(message: Any) -> tuple[Any, Mapping[Path, memoryview]]:
    """Return a message and the bytes of its long lists."""
    if isinstance(message, LongMessage):
        return message.message, message.lists
    return message, {}


class _Cutter:
    """Cuts long lists out of a message.

    Args:
        lists: gets them.
    """

    def __init__(self, lists: dict[Path, memoryview]) -> None:
        self._lists = lists
        self._num_fields = 0

    def cut(self, content: memoryview, plan: _Plan, path: Path) -> bytes:
        """Return a message without its long lists."""
        kept: list[memoryview | bytes] = []
        counts: dict[int, int] = {}
        at = kept_to = 0
        while at < len(content):
            self._num_fields += 1
            if self._num_fields > _MOST_FIELDS:
                raise _UnusualError
            begin = at
            key, at = _varint(content, at)
            number, kind = key >> 3, key & 7
            at, body = _end_of(content, at, kind)
            inner = plan.get(number)
            if inner is None:
                continue
            place = counts[number] = counts.get(number, -1) + 1
            if inner == _TOKENS:
                if place or (kind != _LENGTH_DELIMITED and len(content) >= LONG_LIST):
                    raise _UnusualError  # a list in parts, which follow one another
                if at - body < LONG_LIST:
                    continue
                self._lists[path] = content[body:at]
                kept.append(content[kept_to:begin])
            elif at - body < LONG_LIST:
                continue
            else:
                part = self.cut(content[body:at], inner, (*path, number, place))
                kept += [content[kept_to:begin], _to_varint(key), _to_varint(len(part)), part]
            kept_to = at
        kept.append(content[kept_to:])
        return b"".join(kept)


def _end_of(content: memoryview, at: int, kind: int) -> tuple[int, int]:
    """Return where a field's value ends, and where its content begins."""
    if kind == _LENGTH_DELIMITED:
        length, at = _varint(content, at)
        end = at + length
    elif kind == 0:
        end = _varint(content, at)[1]
    else:
        end = at + _FIXED_BYTES.get(kind, len(content) + 1)
    if end > len(content):
        raise _UnusualError
    return end, at


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_MAX_VARINT):
        if at >= len(content):
            raise _UnusualError
        byte = content[at]
        at += 1
        value |= (byte & 127) << (_GROUP * place)
        if byte < 128:  # noqa: PLR2004  (its highest bit says that more follow)
            return value, at
    raise _UnusualError


def _to_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:  # noqa: PLR2004
        out.append((value & 127) | 128)
        value >>= _GROUP
    out.append(value)
    return bytes(out)


def converting_list(content: memoryview) -> Generator[None, None, NDArray[np.uint32]]:
    """Return uint32[n], the numbers of a packed list; yield after each piece.

    Raises:
        InvalidRequestError: these bytes are no list of numbers.
    """
    raw = np.frombuffer(content, np.uint8)
    numbers = np.empty(len(raw), np.uint32)  # takes pages for those that there are
    state = np.zeros(2, np.int64)
    while state[AT] < len(raw):
        if state[AT]:
            yield
        if not read_varints(raw, state, _AT_ONCE, numbers):
            raise InvalidRequestError("token ids are not a packed list of numbers")
    return numbers[: state[COUNT]]


def warm() -> None:
    """Compile or load the kernel now, so that no message waits for it."""
    for _ in converting_list(memoryview(b"\1")):
        pass


def converting_long_tokens(content: memoryview) -> Generator[None, None, TokenIds]:
    """Return int32[n], the token ids of a packed list; yield after each piece.

    Raises:
        InvalidRequestError: an id is beyond 31 bits, or these bytes are no list.
    """
    numbers = yield from converting_list(content)
    highest = int(numbers.max())
    if highest > _MAX_TOKEN_ID:
        raise InvalidRequestError(f"token id {highest} is beyond 31 bits")
    return numbers.view(np.int32)


def name_of(message: object) -> str:
    """Return the full name of a message or of its class; empty if it is none."""
    descriptor = getattr(message, "DESCRIPTOR", None)
    return "" if descriptor is None else str(descriptor.full_name)

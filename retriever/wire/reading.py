"""From the bytes of a request to its message: what is refused before it is worked on.

gRPC for asyncio would answer UNKNOWN with the name of a Python class where bytes are not a message,
and log a traceback each time.
"""

from functools import cache
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from retriever.errors import InvalidRequestError, LimitExceededError
from retriever.limits import check_memory

MOST_NUMBERS: Final = 1 << 16
"""Token ids that a message may hold as numbers: reading them takes a millisecond, in which nothing
else is answered. Bytes are copied 50 times as fast."""

_LONG_MESSAGE: Final = MOST_NUMBERS
"""Bytes of a message whose numbers are counted: each takes one at least."""

_MOST_FIELDS: Final = 4096
"""Fields that are looked at, half a microsecond each."""

_SMALL_PART: Final = 1 << 10
"""Bytes of a message within another that is not looked into."""

_PARSING_BYTES: Final = 16
"""Memory for parsing a byte of a message: a token takes 4 bytes and may have one, lists double as
they grow, and blocks of memory with them. protobuf's parser crashes where it cannot have that."""

_NO_MESSAGE: Final = "the request is not a message of this call: see the contract for its form"

_UINT32: Final = FieldDescriptor.TYPE_UINT32
_LENGTH_DELIMITED: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_GROUP: Final = 7  # bits of a byte of a varint
_MORE: Final = 128  # set in each byte of a varint but the last
_MAX_VARINT: Final = 10


def read(content: bytes, message: type[Message]) -> Any:
    """Return the message that some bytes are.

    Raises:
        InvalidRequestError: they are none, or one of an earlier contract.
        LimitExceededError: it has too many numbers, or there is no memory for it.
    """
    long = None
    if len(content) > _LONG_MESSAGE:
        check_memory(_PARSING_BYTES * len(content))
        long = _check_numbers(content, message.DESCRIPTOR)
    try:
        parsed = message.FromString(content if long is None else long.cut_from(content))
    except DecodeError as error:
        raise InvalidRequestError(_NO_MESSAGE) from error
    _check_reserved(parsed)
    return parsed if long is None else _InPlace(parsed, content, long)


class _Long(NamedTuple):
    """Where a long field of bytes stands in a message: its name, key, content and end."""

    name: str
    key: int
    begin: int
    end: int

    def cut_from(self, content: bytes) -> bytes:
        """Return the message without the field."""
        return content[: self.key] + content[self.end :]


class _InPlace:
    """A message of which one field of bytes is that of what was received.

    protobuf copies such a field twice, of a million ids a millisecond each time, in which nothing
    else of the process runs.
    """

    __slots__ = ("_content", "_message", "_name")

    def __init__(self, message: Message, content: bytes, long: _Long) -> None:
        self._message = message
        self._name = long.name
        self._content = memoryview(content)[long.begin : long.end]

    def __getattr__(self, name: str) -> Any:
        return self._content if name == self._name else getattr(self._message, name)


class _Fields(NamedTuple):
    """What a message may hold: lists of numbers and bytes, by their names, and other messages."""

    numbers: dict[int, str]
    bytes: dict[int, str]
    messages: dict[int, Descriptor]


@cache
def _stated(descriptor: Descriptor) -> DescriptorProto:
    """Return a message's description; its own attributes change their names with versions."""
    stated = DescriptorProto()
    descriptor.CopyToProto(stated)
    return stated


@cache
def _fields_of(descriptor: Descriptor) -> _Fields:
    lists = {each.number: each.name for each in _stated(descriptor).field if _is_list(each)}
    fields = descriptor.fields_by_number
    return _Fields(
        {at: name for at, name in lists.items() if fields[at].type == _UINT32},
        {
            at: each.name
            for at, each in fields.items()
            if each.type == FieldDescriptor.TYPE_BYTES and at not in lists
        },
        {at: each.message_type for at, each in fields.items() if each.message_type is not None},
    )


def _is_list(field: FieldDescriptorProto) -> bool:
    return field.label == FieldDescriptorProto.LABEL_REPEATED


def _check_numbers(content: bytes, descriptor: Any) -> _Long | None:
    """Refuse a long message of too many numbers, or of so many parts that nobody can tell.

    What is no message is left to the parser.

    Returns:
        A field of bytes of its own that is long and stands there once.
    """
    counter = _Counter()
    try:
        long = counter.count(memoryview(content), descriptor)
    except ValueError:
        return None
    if counter.num_numbers > MOST_NUMBERS:
        raise LimitExceededError(
            f"a message holds at most {MOST_NUMBERS} token ids as numbers, and this one has more, "
            f"in {counter.where}: send bytes, 4 for each, in the field whose name ends in _bytes"
        )
    if counter.num_fields > _MOST_FIELDS:
        raise LimitExceededError(
            f"a message of {len(content)} bytes has more than {_MOST_FIELDS} parts: send several"
        )
    return long


class _Counter:
    """Counts the numbers and the fields of a message, up to what is refused.

    Source: protobuf.dev/programming-guides/encoding. A list of numbers is one field of varints.
    """

    def __init__(self) -> None:
        self.num_numbers = self.num_fields = 0
        self.where = ""

    def count(self, content: memoryview, descriptor: Descriptor) -> _Long | None:
        """Count those of a message; return its long field of bytes, if there is one.

        Raises:
            ValueError: it is none.
        """
        numbers, of_bytes, messages = _fields_of(descriptor)
        at, size = 0, len(content)
        found: list[_Long] = []
        seen: set[int] = set()
        while at < size and self.num_fields <= _MOST_FIELDS and self.num_numbers <= MOST_NUMBERS:
            self.num_fields += 1
            begin = at
            key, at = _varint(content, at)
            number, kind = key >> 3, key & 7
            end, at = _value_of(content, at, kind)
            if number in numbers:
                self.num_numbers += _num_varints(content[at:end])
                self.where = numbers[number]
            elif kind == _LENGTH_DELIMITED and number in messages and end - at > _SMALL_PART:
                self.count(content[at:end], messages[number])
            elif kind == _LENGTH_DELIMITED and number in of_bytes:
                if end - at > _LONG_MESSAGE and number not in seen:
                    found.append(_Long(of_bytes[number], begin, at, end))
                elif number in seen:  # of several the last one counts, as the parser knows
                    found = [each for each in found if each.name != of_bytes[number]]
                seen.add(number)
            at = end
        return found[0] if found else None


def _value_of(content: memoryview, at: int, kind: int) -> tuple[int, int]:
    """Return where a field's value ends, and where its content begins."""
    if kind == _LENGTH_DELIMITED:
        length, at = _varint(content, at)
        end = at + length
    elif kind == 0:
        end = _varint(content, at)[1]
    else:
        end = at + _FIXED_BYTES.get(kind, len(content) + 1)
    if end > len(content):
        raise ValueError
    return end, at


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    """Return the number that begins at a place, and the place after it."""
    value = 0
    for place, byte in enumerate(content[at : at + _MAX_VARINT]):
        value |= (byte & (_MORE - 1)) << (_GROUP * place)
        if byte < _MORE:
            return value, at + place + 1
    raise ValueError


def _num_varints(content: memoryview) -> int:
    return int(np.count_nonzero(np.frombuffer(content, np.uint8) < _MORE))


class _Reserved(NamedTuple):
    """Numbers of a message that were once in use, and the fields whose messages have such, too."""

    numbers: frozenset[int]
    within: tuple[tuple[str, bool], ...]  # names, and whether they are lists


@cache
def _reserved_of(descriptor: Descriptor) -> _Reserved:
    stated = _stated(descriptor)
    within = tuple(
        (each.name, _is_list(each))
        for each in stated.field
        if _has_reserved(descriptor.fields_by_name[each.name].message_type)
    )
    ranges = [range(each.start, each.end) for each in stated.reserved_range]
    return _Reserved(frozenset(chain.from_iterable(ranges)), within)


def _has_reserved(descriptor: Descriptor | None) -> bool:
    return descriptor is not None and any(_reserved_of(descriptor))


def _check_reserved(message: Message) -> None:
    """Refuse a message that sets a field which was once in use: it would be misunderstood."""
    numbers, within = _reserved_of(message.DESCRIPTOR)
    if numbers:
        fields: Any = UnknownFieldSet(message)
        for field in fields:
            if field.field_number in numbers:
                raise InvalidRequestError(
                    f"field {field.field_number} of {message.DESCRIPTOR.name} is no longer in use: "
                    "this client was made for an earlier contract. Install the foredraft of this "
                    "service, or make stubs again from `foredraft proto --output DIR`"
                )
    for name, is_list in within:
        if is_list:
            for part in getattr(message, name):
                _check_reserved(part)
        elif message.HasField(name):
            _check_reserved(getattr(message, name))

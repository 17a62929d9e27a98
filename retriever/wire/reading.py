"""Parsing of request bytes into messages, with the checks that come before any work.

For bytes that are not a message, gRPC for asyncio would answer UNKNOWN with the name of a Python
class, and log a traceback each time.
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
"""Most token ids that a message may hold as numbers. Parsing that many takes a millisecond, during
which no other call is answered. Bytes are copied 50 times as fast."""

_LONG_MESSAGE: Final = MOST_NUMBERS
"""Numbers are counted only in messages longer than this, in bytes: a number takes at least one
byte."""

_MOST_FIELDS: Final = 4096
"""Most fields that are inspected; each takes half a microsecond."""

_SMALL_PART: Final = 1 << 10
"""Nested messages up to this size, in bytes, are not inspected."""

_PARSING_BYTES: Final = 16
"""Memory needed to parse one byte of a message, in bytes. A token id takes 4 bytes in memory and as
little as one on the wire, and both lists and memory blocks double as they grow. protobuf's parser
crashes if it cannot allocate this memory."""

_NO_MESSAGE: Final = "the request is not a message of this call: see the contract for its form"

_UINT32: Final = FieldDescriptor.TYPE_UINT32
_LENGTH_DELIMITED: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_GROUP: Final = 7  # bits of a byte of a varint
_MORE: Final = 128  # set in each byte of a varint but the last
_MAX_VARINT: Final = 10


def read(content: bytes, message: type[Message]) -> Any:
    """Return the message that is encoded in some bytes.

    Raises:
        InvalidRequestError: the bytes are not a message, or are a message of an earlier contract.
        LimitExceededError: the message has too many numbers, or there is not enough memory for it.
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
    """A long bytes field of a message: its name and the offsets of its key, content and end."""

    name: str
    key: int
    begin: int
    end: int

    def cut_from(self, content: bytes) -> bytes:
        """Return the message without the field."""
        return content[: self.key] + content[self.end :]


class _InPlace:
    """A message with one bytes field that refers to the received buffer.

    protobuf copies such a field twice. For a million ids each copy takes a millisecond, during
    which nothing else in the process runs.
    """

    __slots__ = ("_content", "_message", "_name")

    def __init__(self, message: Message, content: bytes, long: _Long) -> None:
        self._message = message
        self._name = long.name
        self._content = memoryview(content)[long.begin : long.end]

    def __getattr__(self, name: str) -> Any:
        return self._content if name == self._name else getattr(self._message, name)


class _Fields(NamedTuple):
    """The fields of a message type: lists of numbers and bytes, by name, and nested messages."""

    numbers: dict[int, str]
    bytes: dict[int, str]
    messages: dict[int, Descriptor]


@cache
def _stated(descriptor: Descriptor) -> DescriptorProto:
    """Return the proto of a message type; the attributes of its descriptor vary by version."""
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
    """Refuse a long message that has too many numbers, or too many parts to count them.

    Invalid messages are left to the parser.

    Returns:
        A long bytes field of the outer message that occurs once, if there is one.
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
    """Counts the numbers and the fields of a message, up to the limits.

    Source: protobuf.dev/programming-guides/encoding. A list of numbers is encoded as one field of
    varints.
    """

    def __init__(self) -> None:
        self.num_numbers = self.num_fields = 0
        self.where = ""

    def count(self, content: memoryview, descriptor: Descriptor) -> _Long | None:
        """Count the numbers and fields of a message; return its long bytes field, if there is one.

        Raises:
            ValueError: the content is not a message.
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
                elif number in seen:  # of several, the last one counts: left to the parser
                    found = [each for each in found if each.name != of_bytes[number]]
                seen.add(number)
            at = end
        return found[0] if found else None


def _value_of(content: memoryview, at: int, kind: int) -> tuple[int, int]:
    """Return the offsets at which a field's value ends and its content begins."""
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
    """Return the varint at an offset, and the offset after it."""
    value = 0
    for place, byte in enumerate(content[at : at + _MAX_VARINT]):
        value |= (byte & (_MORE - 1)) << (_GROUP * place)
        if byte < _MORE:
            return value, at + place + 1
    raise ValueError


def _num_varints(content: memoryview) -> int:
    return int(np.count_nonzero(np.frombuffer(content, np.uint8) < _MORE))


class _Reserved(NamedTuple):
    """Reserved field numbers of a message type, and its fields with messages that have some."""

    numbers: frozenset[int]
    within: tuple[tuple[str, bool], ...]  # field names, and whether they are lists


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
    """Refuse a message that sets a reserved field: it would be misunderstood."""
    numbers, within = _reserved_of(message.DESCRIPTOR)
    if numbers:
        fields: Any = UnknownFieldSet(message)
        for field in fields:
            if field.field_number in numbers:
                raise InvalidRequestError(
                    f"field {field.field_number} of {message.DESCRIPTOR.name} is no longer in use: "
                    "this client was made for an earlier contract. Install the foredraft of this "
                    "service, or regenerate stubs from `foredraft proto --output DIR`"
                )
    for name, is_list in within:
        if is_list:
            for part in getattr(message, name):
                _check_reserved(part)
        elif message.HasField(name):
            _check_reserved(getattr(message, name))

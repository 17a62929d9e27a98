"""Messages that no well-meaning client would send, and a servicer that must bear them.

A tenant, the victim, has outputs with tokens that no other tenant ever sends. Others send generated
messages, and damaged ones, under names that the victim uses as well. Every answer must be a
response or a gRPC status, and hold none of the victim's tokens.
"""

import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from retriever.drafter import SequenceOptions
from retriever.errors import RetrieverError
from retriever.sequences import SessionKey
from retriever.service.servicer import RetrieverServicer
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.reading import read
from retriever.wire.statuses import status_of

VICTIM: Final = "victim"
SECRETS: Final = range(1 << 20, (1 << 20) + 1000)
"""Token ids that the victim alone uses."""

_SECRETS: Final = frozenset(SECRETS)

SESSION: Final = "s0"
"""A name that sessions of all tenants use."""

_PREFIX: Final = list(range(12))
_OTHERS: Final = ("a", "b")
_METHODS: Final = pb.DESCRIPTOR.services_by_name["RetrieverService"].methods
_INTEGERS: Final = (0, 1, 2, 5, 9, 16, 32, 255, 256, 257, 65536, (1 << 31) - 1, (1 << 32) - 1)
_FLOATS: Final = (0.0, 0.1, 1.0, -1.0, 2.0, float("nan"), float("inf"), -float("inf"))
_ENUMS: Final = (0, 1, 8, 9, -1, (1 << 31) - 1)
_CHOICES: Final[dict[int, Sequence[Any]]] = {
    FieldDescriptor.CPPTYPE_FLOAT: _FLOATS,
    FieldDescriptor.CPPTYPE_ENUM: _ENUMS,
}
_TEXTS: Final = (SESSION, "s1", "s2", "", "x" * 256, "x" * 257, "\0", "\u00e4" * 200)
_MAX_DEPTH: Final = 3


class LeakError(Exception):
    """An answer to one tenant holds what another generated."""


class CrashError(Exception):
    """A call ended neither with a response nor with a status."""


@dataclass
class Fuzzer:
    """Sends messages to a servicer in this process, as gRPC would.

    Args:
        drafter: what answers; it gets a victim.
        seed: of what is sent.

    Attributes:
        outcomes: how often calls ended with each status; "unreadable" stands for bytes that are no
            message, which do not come so far.
    """

    drafter: EmbeddedDrafter
    seed: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._servicer = RetrieverServicer(self.drafter)
        self._make_victim()

    async def send(self, num_messages: int) -> None:
        """Send so many messages.

        Raises:
            LeakError: an answer holds a token of the victim's.
            CrashError: a call ended without a status.
        """
        for number in range(num_messages):
            method = self._random.choice(_METHODS)
            try:
                await self._call(method)
            except DecodeError:
                self.outcomes["unreadable"] += 1
            except RetrieverError as refusal:
                check_words(str(refusal))
                self.outcomes[status_of(refusal).name] += 1
            except LeakError:
                raise
            except Exception as error:
                raise CrashError(f"{method.name}, message {number} of seed {self.seed}") from error
            else:
                self.outcomes["OK"] += 1
            if number % 1000 == 0:
                self._check_victim()
        self._check_victim()

    async def _call(self, method: Any) -> None:
        type_ = getattr(pb, method.input_type.name)
        call = _Call(self._random.choice(_OTHERS), type_)
        behaviour = getattr(self._servicer, method.name)
        if method.name == "DraftStream":
            messages = [self._message(type_) for _ in range(self._random.randint(1, 4))]
            self._number(messages)
            contents = [message.SerializeToString() for message in messages]
            async for response in behaviour(_each(contents), call):
                check(response)
        else:
            check(await behaviour(self._message(type_), call))

    def _number(self, messages: list[Any]) -> None:
        """Mostly number the messages of a stream, so that what they ask is done."""
        if self._happens(0.8):
            for number, message in enumerate(messages, 1):
                message.sequence_number = number

    def _message(self, type_: type[Message]) -> Any:
        message = type_()
        self._fill(message, 0)
        if self._happens(0.3):
            message = type_.FromString(self._damaged(message.SerializeToString()))
        return type_() if not _SECRETS.isdisjoint(integers_in(message)) else message

    def _fill(self, message: Message, depth: int) -> None:
        for descriptor in message.DESCRIPTOR.fields:
            if self._happens(0.25):
                continue
            if descriptor.message_type is not None:
                self._fill_messages(message, descriptor, depth)
            elif descriptor.is_repeated:
                getattr(message, descriptor.name).extend(self._values(descriptor))
            else:
                setattr(message, descriptor.name, self._value(descriptor))
        self._choose(message)

    def _choose(self, message: Message) -> None:
        """Mostly leave out what would have nearly every message refused."""
        for descriptor in message.DESCRIPTOR.fields:
            is_second = descriptor.name.endswith("_bytes") and any(
                isinstance(value, int) for value in integers_in(message)
            )
            if (is_second or descriptor.name == "constraint") and self._happens(0.9):
                message.ClearField(descriptor.name)

    def _fill_messages(self, message: Message, descriptor: Any, depth: int) -> None:
        if depth >= _MAX_DEPTH:
            return
        if descriptor.is_repeated:
            for _ in range(self._random.choice((0, 1, 1, 2, 5))):
                self._fill(getattr(message, descriptor.name).add(), depth + 1)
        else:
            self._fill(getattr(message, descriptor.name), depth + 1)

    def _values(self, descriptor: Any) -> list[Any]:
        if descriptor.cpp_type == FieldDescriptor.CPPTYPE_UINT32 and self._happens(0.7):
            return _PREFIX[: self._random.randint(0, len(_PREFIX))]
        length = self._random.choice((0, 1, 3, 20, 300))
        return [self._value(descriptor) for _ in range(length)]

    def _value(self, descriptor: Any) -> Any:
        kind = descriptor.cpp_type
        if descriptor.name == "vocabulary_fingerprint" and self._happens(0.95):
            return ""  # else most messages would be refused for it
        if kind in {FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64}:
            return self._random.choice((*_INTEGERS, self._random.randint(0, 40)))
        if kind in _CHOICES:
            return self._random.choice(_CHOICES[kind])
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self._happens(0.5)
        if descriptor.type == FieldDescriptor.TYPE_BYTES:
            return self._bytes(of_ids=descriptor.name.endswith("_bytes"))
        return self._random.choice(_TEXTS)

    def _bytes(self, *, of_ids: bool) -> bytes:
        if of_ids and self._happens(0.8):
            return np.array(_PREFIX[: self._random.randint(0, 12)], np.int32).tobytes()
        return self._random.randbytes(9)

    def _happens(self, probability: float) -> bool:
        return self._random.random() < probability

    def _damaged(self, content: bytes) -> bytes:
        """Return bytes that were cut, changed, doubled, or are others altogether."""
        damaged = bytearray(content or b"\0")
        at = self._random.randrange(len(damaged))
        match self._random.randrange(4):
            case 0:
                del damaged[at:]
            case 1:
                damaged[at] ^= 1 << self._random.randrange(8)
            case 2:
                damaged[at:at] = damaged
            case _:
                damaged = bytearray(self._random.randbytes(self._random.randrange(64)))
        return bytes(damaged)

    def _make_victim(self) -> None:
        drafter = self.drafter
        secret = np.array([*_PREFIX, *SECRETS[:40]], np.int32)
        drafter.remember(secret, tenant=VICTIM)
        drafter.state.begin(
            SessionKey(VICTIM, SESSION),
            drafter.state.prepare(secret, SequenceOptions(tenant=VICTIM)),
        )

    def _check_victim(self) -> None:
        """See that the victim is served as if it were alone."""
        tree = self.drafter.draft_context(_PREFIX, 8, tenant=VICTIM)
        if _SECRETS.isdisjoint(tree.token_ids.tolist()):
            raise LeakError("the victim's own outputs are gone")
        sessions = dict(self.drafter.state.sessions.items())
        if SessionKey(VICTIM, SESSION) not in sessions:
            raise LeakError("the victim's session is gone")


def check(response: Message) -> None:
    """See that a response holds none of the victim's tokens.

    Raises:
        LeakError: it does.
    """
    leaked = _SECRETS.intersection(integers_in(response))
    if leaked:
        raise LeakError(f"another tenant's tokens {sorted(leaked)[:3]} in {response}")


def integers_in(message: Message) -> Iterator[int]:
    """Yield all integers in a message."""
    for descriptor, value in message.ListFields():
        for each in value if descriptor.is_repeated else [value]:
            if isinstance(each, Message):
                yield from integers_in(each)
            elif isinstance(each, int):
                yield each
            elif isinstance(each, bytes):  # token ids, and a tree's come first
                yield from np.frombuffer(each[: len(each) // 4 * 4], np.int32).tolist()


def check_words(text: str) -> None:
    """See that the words of a refusal tell nothing of the victim.

    Raises:
        LeakError: they do.
    """
    if "\n" in text or any(str(secret) in text for secret in SECRETS[:40]):
        raise LeakError(text)


@dataclass(frozen=True)
class _Call:
    """What the servicer needs of a call; see `Call` of the gate."""

    tenant: str
    message: type[Message]
    left_s: float | None = None

    async def read(self, content: bytes) -> Any:
        return read(content, self.message)


async def _each(messages: list[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message

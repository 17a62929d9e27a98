"""Strings that a grammar forces at a place of an output, as bytes.

Under flexible whitespace a grammar forces little by itself. So where only one byte may follow apart
from whitespace, that byte is taken, behind the whitespace that this output, or the last one, had in
such a place. Where a few ways are open (an enumeration, a key that may be left out, the end of a
string or number), each is followed, with the share that it had before.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_BYTES: Final = 96
"""Of a forced string: more than a pass verifies."""

_MOST_WAYS: Final = 4
"""Of a choice that is drafted: enumerations, booleans, and keys that may be left out."""

_MOST_ENDS: Final = 2
"""Marks that may end a number or a word, if they are drafted."""

_CONTEXT_BYTES: Final = 24
"""Before a choice, by which it is known again: some of a key, and marks."""

_MOST_KEPT: Final = 1024
"""Contexts of choices that are kept for a tenant, and places: less than half a megabyte each."""

_OPENING: Final = b"{[,"
"""Behind which an element begins."""

_WHITESPACE: Final = b" \t\n\r"
_QUOTE: Final = ord('"')
_COLON: Final = ord(":")
_END: Final = 256
"""The end of the output, in a vocabulary of bytes."""

MARKS: Final = b"\"!#$%&'()*,/:;<=>?@[\\]^`{|}~"
"""What may stand behind a number or a word, but is part of neither."""

_SPECIAL: Final = re.compile(rb'["\\]')


class _Bytes:
    """A vocabulary of single bytes, as llguidance takes one."""

    eos_token_id = _END
    bos_token_id = None
    tokens: Sequence[bytes] = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids: Sequence[int] = (_END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(1)
def byte_tokenizer() -> "LLTokenizer":
    """Return the tokenizer of single bytes."""
    from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415  (an optional extra)

    return LLTokenizer(TokenizerWrapper(_Bytes()))


@dataclass(slots=True)
class Habits:
    """How outputs of a grammar were written: their whitespace, and which ways they went.

    Attributes:
        spaces: whitespace by the byte before, the byte after, and the depth of brackets; and by the
            bytes alone, at the depth -1.
        indent: of a level, where elements stand in lines of their own; else empty.
        choices: which ways were gone, by the bytes before.
        found: what was forced at places that outputs came to, with this whitespace.
    """

    spaces: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    indent: bytes = b""
    choices: dict[bytes, dict[bytes, float]] = field(default_factory=dict)
    found: dict[tuple[object, ...], "_Found"] = field(default_factory=dict)

    def between(self, before: int, after: int, depth: int) -> bytes:
        """Return the whitespace that is to be expected between two bytes."""
        kind = _class_of(after)
        found = self.spaces.get((before, kind, depth))
        if found is None and self.indent and (before in _OPENING or after in b"}]"):
            return b"\n" + self.indent * (depth - (after in b"}]"))
        if found is None:
            found = self.spaces.get((before, kind, -1))
        return (b" " if before in b",:" else b"") if found is None else found

    def learn_space(self, before: int, after: int, depth: int, whitespace: bytes) -> None:
        """Note whitespace that came."""
        if self.between(before, after, depth) != whitespace:
            self.found.clear()
        kind = _class_of(after)
        self.spaces[before, kind, depth] = self.spaces[before, kind, -1] = whitespace
        if before in _OPENING and after not in b"}]":
            inner = whitespace.removeprefix(b"\n")
            self.indent = inner[: len(inner) // max(depth, 1)] if inner != whitespace else b""

    def shares(self, context: bytes, ways: Sequence[bytes]) -> list[float]:
        """Return how likely each of a few ways is, by how often they were gone before."""
        known = self.choices.get(context, {})
        counts = [known.get(way.strip(), 0.0) + 1 / len(ways) for way in ways]
        return [count / sum(counts) for count in counts]

    def share_of_end(self, end: "_End") -> float:
        """Return how likely a string or number ends here: by its key, and by its length alone."""
        came, missed = self._counts(end.by_length, end.mark)
        rate = (came + 0.3) / (came + missed + 4.0)
        came, missed = self._counts(end.by_key, end.mark)
        return (came + 2 * rate) / (came + missed + 2)

    def learn_way(self, way: "Way", *, came: bool) -> None:
        """Note whether a way was gone that was drafted; old counts fade."""
        if way.end is None:
            text = way.text.strip()
            known = self._known(way.context)
            known[text] = known.get(text, 0.0) * 0.9 + came
            return
        for context in (way.end.by_key, way.end.by_length):
            known = self._known(context)
            for each in (way.end.mark, _NO_END):
                known[each] = known.get(each, 0.0) * 0.95
            known[way.end.mark if came else _NO_END] += 1.0

    def _known(self, context: bytes) -> dict[bytes, float]:
        if len(self.choices) >= _MOST_KEPT:
            self.choices.clear()
        return self.choices.setdefault(context, {})

    def _counts(self, context: bytes, mark: bytes) -> tuple[float, float]:
        known = self.choices.get(context)
        return (known.get(mark, 0.0), known.get(_NO_END, 0.0)) if known else (0.0, 0.0)


_NO_END: Final = b""


def _class_of(byte: int) -> int:
    """Return a byte that stands for others that are spaced alike: digits and letters."""
    return ord("0") if 48 <= byte <= 57 or byte == 45 else ord("a") if byte >= 97 else byte  # noqa: PLR2004


@dataclass(slots=True)
class Place:
    """Where in JSON, or similar text, an output has come to.

    Attributes:
        in_string: whether between quotes.
        is_escaped: whether behind a backslash there.
        depth: of brackets.
        last: byte that is no whitespace, 0 before the first.
        whitespace: behind it.
        inside: bytes of the string, number or word that has begun.
        word: the last of them, of what is open or was last.
        keys: for each open bracket the last key behind it.
        tail: the last bytes of all.
    """

    in_string: bool = False
    is_escaped: bool = False
    depth: int = 0
    last: int = 0
    whitespace: bytes = b""
    inside: int = 0
    word: bytes = b""
    keys: tuple[bytes, ...] = ()
    tail: bytes = b""

    def behind(self, text: bytes) -> "Place":
        """Return the place behind some bytes."""
        place = Place(
            self.in_string,
            self.is_escaped,
            self.depth,
            self.last,
            self.whitespace,
            self.inside,
            self.word,
            self.keys,
            self.tail,
        )
        if text:
            place.read(text)
        return place

    def read(self, text: bytes, habits: Habits | None = None) -> None:
        """Go on over bytes, and learn their whitespace if told where."""
        at = 0
        self.tail = (self.tail + text)[-_CONTEXT_BYTES:]
        while at < len(text):
            if self.in_string:
                at = self._read_string(text, at)
                continue
            byte = text[at]
            at += 1
            if byte in _WHITESPACE:
                self.whitespace += text[at - 1 : at]
                self.inside = 0
                continue
            if habits is not None and self.last:
                habits.learn_space(self.last, byte, self.depth, self.whitespace)
            if byte in MARKS:
                self._read_mark(byte)
            else:
                self.word = (self.word if self.inside else b"") + text[at - 1 : at]
                self.inside += 1
            self.last, self.whitespace = byte, b""

    def _read_mark(self, byte: int) -> None:
        self.inside = 0
        if byte == _QUOTE:
            self.in_string, self.word = True, b""
        elif byte in b"{[":
            self.depth += 1
            self.keys = (*self.keys, b"")
        elif byte in b"}]":
            self.depth -= 1
            self.keys = self.keys[:-1]
        elif byte == _COLON and self.keys:
            self.keys = (*self.keys[:-1], self.word)

    def _read_string(self, text: bytes, at: int) -> int:
        """Read within a string up to its next quote or backslash, and return the place behind."""
        if self.is_escaped:
            self.is_escaped, self.inside = False, self.inside + 1
            return at + 1
        special = _SPECIAL.search(text, at)
        end = len(text) if special is None else special.start()
        self.inside += end - at
        self.word = (self.word + text[at:end])[-_CONTEXT_BYTES:]
        if special is None:
            return end
        if text[end] == _QUOTE:
            self.in_string, self.last, self.inside = False, _QUOTE, 0
        else:
            self.is_escaped = True
        return end + 1

    @property
    def is_open(self) -> bool:
        """Whether a string, number or word has begun."""
        return self.in_string or self.inside > 0

    def as_free(self) -> tuple[object, ...]:
        """Return by what the place is known again within a string or number of any content."""
        return self.keys, self.in_string

    def as_exact(self) -> tuple[object, ...]:
        """Return by what the place is known again; brackets, keys and marks tell most."""
        word = self.word if self.is_open else b""
        if not self.keys:
            return self.last, self.tail
        return self.keys, self.last, self.whitespace, self.in_string, word


class _End(NamedTuple):
    """Where a string or number may end: contexts by which that is known again, and the mark."""

    by_key: bytes
    by_length: bytes
    mark: bytes


class _Open(NamedTuple):
    """A way that is open somewhere: its bytes, the mark if it is an end, and what it forces."""

    text: bytes
    mark: bytes
    further: "Forced"


class _Found(NamedTuple):
    """What is forced at a place, and the ways behind that."""

    string: "Forced"
    place: Place
    ways: list[_Open]

    @property
    def is_free(self) -> bool:
        """Whether the place is within a string, number or word that may go on in many ways."""
        return not self.string.text and any(way.mark for way in self.ways)


class Way(NamedTuple):
    """One of a few ways: the context of the choice, the bytes, its share, and if it is an end."""

    context: bytes
    text: bytes
    share: float
    end: _End | None = None


class Forced(NamedTuple):
    """A forced string.

    Attributes:
        text: the bytes.
        guessed_from: the first byte that depends on guessed whitespace.
        ends: whether the output ends behind it.
        way: that was taken in it, if one was.
        chosen_from: the byte at which it was taken.
    """

    text: bytes
    guessed_from: int
    ends: bool
    way: Way | None = None
    chosen_from: int = 0

    def through(self, way: Way, further: "Forced") -> "Forced":
        """Return the string that goes on by a way, and by what is forced behind that."""
        before = len(self.text) + len(way.text)
        guessed = min(self.guessed_from, before + further.guessed_from)
        text = self.text + way.text + further.text
        return Forced(text, guessed, further.ends, way, len(self.text))


class ForcedStrings:
    """What a grammar forces in one output.

    Args:
        letters: the grammar's state before the output, over single bytes; it is changed.
        habits: of outputs of this grammar.

    Attributes:
        place: where the output has come to.
    """

    def __init__(self, letters: "LLMatcher", habits: Habits) -> None:
        self._letters, self._habits = letters, habits
        self.place = Place()
        self._unread = b""  # of the output, by `_letters`

    @property
    def is_known(self) -> bool:
        """Whether no limit of the library was met."""
        return not self._letters.is_error()

    def follow(self, text: bytes) -> None:
        """Go on behind bytes that were committed."""
        self._unread += text
        self.place.read(text, self._habits)

    def next(self, *, is_new: bool = False) -> list[Forced]:
        """Return the forced string that comes next, and it with each of the ways that it ends in.

        Strings without bytes that end nothing are left out.

        Args:
            is_new: whether to work it out even if it was found at such a place before. That is
                mostly right, but the grammar may forbid it.
        """
        return self._strings(self._at(self.place, b"", is_new=is_new))

    def behind(self, text: bytes) -> list[Forced]:
        """Return the forced string behind some bytes, which the grammar allows."""
        if self.place.in_string and _QUOTE not in text:
            return []  # within the same string nothing is forced
        string = self._at(self.place.behind(text), text, is_new=False).string
        return [string] if string.text or string.ends else []

    def _strings(self, found: _Found) -> list[Forced]:
        string, place, opens = found
        strings = [string] if string.text or string.ends else []
        if not opens:
            return strings
        if opens[0].mark:
            length = self.place if not string.text else place
            by_length = bytes([length.in_string, length.inside.bit_length()])
            by_key = (place.keys[-1] if place.keys else place.tail) + by_length
            for text, mark, further in opens:
                end = _End(by_key, by_length, mark)
                way = Way(b"", text, self._habits.share_of_end(end), end)
                strings.append(string.through(way, further))
            return strings
        context = place.tail if string.text else self.place.tail
        shares = self._habits.shares(context, [each.text for each in opens])
        for (text, _, further), share in zip(opens, shares, strict=True):
            strings.append(string.through(Way(context, text, share), further))
        return strings

    def _at(self, place: Place, text: bytes, *, is_new: bool) -> _Found:
        """Return what is forced at a place behind some bytes that come next, as kept or found."""
        kept, exact = self._habits.found, place.as_exact()
        free = place.as_free() if place.is_open and place.keys else exact
        found = None if is_new else kept.get(free) or kept.get(exact)
        if found is None:
            self._letters.consume_tokens(list(self._unread + text))
            self._unread = b""
            found = self._find(place.behind(b""))
            self._back(text)
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            kept[free if found.is_free else exact] = found
        return found

    def _find(self, place: Place) -> _Found:
        """Find what is forced at a place, where `_letters` stand."""
        string, allowed = self._read_on(place)
        ways = [] if not allowed else self._ways(place, allowed)
        opened = []
        for text, mark in ways:
            if self._letters.validate_tokens(list(text)) == len(text):
                self._letters.consume_tokens(list(text))
                further, _ = self._read_on(place.behind(text))
                self._back(text + further.text)
                opened.append(_Open(text, mark, further))
        self._back(string.text)
        return _Found(string, place, opened)

    def _back(self, text: bytes) -> None:
        if text:
            self._letters.rollback(len(text))

    def _read_on(self, place: Place) -> tuple[Forced, bytes]:
        """Read the bytes that come behind a place, where `_letters` stand, and go on over them.

        Returns:
            The forced string; and which bytes may come behind it, empty if none, or if it is long.
        """
        letters, text, guessed_from = self._letters, b"", 2 * MOST_BYTES
        while len(text) < MOST_BYTES:
            forced = letters.compute_ff_bytes()
            if not forced:
                if letters.is_stopped():
                    return Forced(text, guessed_from, True), b""
                allowed = letters.compute_logit_bias()
                only, may_end = _others(allowed, 1), allowed[_END]
                if not only or may_end:
                    ends = bool(may_end) and only == b""
                    return Forced(text, guessed_from, ends), b"" if ends else allowed
                may_space = _may_space(allowed)
                forced = self._space(place, only[0], may_space=may_space) + only
                if len(forced) > 1 and letters.validate_tokens(list(forced)) < len(forced):
                    return Forced(text, guessed_from, False), b""  # whitespace that may not come
                if may_space and not place.in_string:
                    guessed_from = min(guessed_from, len(text))
            letters.consume_tokens(list(forced))
            place.read(forced)
            text += forced
        return Forced(text, guessed_from, False), b""

    def _ways(self, place: Place, allowed: bytes) -> list[tuple[bytes, bytes]]:
        """Return the ways that an output may go on, if they are but a few, and marks of ends."""
        others, may_space = _others(allowed, _MOST_WAYS), _may_space(allowed)
        if others is None and place.is_open:
            marks = b'"' if place.in_string else MARKS
            ends = [byte for byte in marks if allowed[byte]]
            if len(ends) > _MOST_ENDS:
                return []
            return [
                (self._space(place, byte, may_space=may_space) + bytes([byte]), bytes([byte]))
                for byte in ends
            ]
        if not others or allowed[_END] or len(others) == 1 or (place.in_string and may_space):
            return []
        return [
            (self._space(place, byte, may_space=may_space) + bytes([byte]), b"") for byte in others
        ]

    def _space(self, place: Place, byte: int, *, may_space: bool) -> bytes:
        """Return the whitespace that is to be expected before a byte."""
        if not may_space or place.in_string:
            return b""
        expected = self._habits.between(place.last, byte, place.depth)
        come = place.whitespace  # of which a part stands there already
        return expected[len(come) :] if expected.startswith(come) else b""


def _others(allowed: bytes, most: int) -> bytes | None:
    """Return the bytes that may come, apart from whitespace and the end; None if over `most`.

    Args:
        allowed: for each byte and the end, not 0 if it may come.
        most: bytes to be returned.
    """
    if len(allowed) - allowed.count(0) > most + len(_WHITESPACE) + 1:
        return None
    found = bytearray()
    rest = allowed[:_END].lstrip(b"\0")
    while rest:
        byte = _END - len(rest)
        if byte not in _WHITESPACE:
            found.append(byte)
        rest = rest[1:].lstrip(b"\0")
    return bytes(found) if len(found) <= most else None


def _may_space(allowed: bytes) -> bool:
    """Return whether whitespace may come."""
    return bool(allowed[32] or allowed[10] or allowed[9] or allowed[13])

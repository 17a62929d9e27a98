"""Byte strings that a grammar forces at a given point of the output.

A grammar that allows flexible whitespace forces few bytes on its own. So where only one byte other
than whitespace may follow, we take that byte. We put before it the whitespace that this output, or
the previous output, had in such a place. Where a few alternatives are possible, we follow each one
and weight it by its share so far. Examples are an enumeration, an optional key, and the end of a
string or number.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_BYTES: Final = 96
"""Longest forced string, in bytes. One pass does not verify more."""

_MOST_WAYS: Final = 4
"""Most alternatives of a drafted choice: enumerations, booleans and optional keys."""

_MOST_ENDS: Final = 2
"""Most end marks for which the end of a number or word is drafted."""

_CONTEXT_BYTES: Final = 24
"""Bytes before a choice that identify it: part of a key, and punctuation."""

_MOST_KEPT: Final = 1024
"""Most contexts of choices, and most places, stored per tenant: under half a megabyte each."""

_OPENING: Final = b"{[,"
"""Bytes after which an element starts."""

_WHITESPACE: Final = b" \t\n\r"
_QUOTE: Final = ord('"')
_COLON: Final = ord(":")
_END: Final = 256
"""The token for the end of the output in the byte vocabulary."""

MARKS: Final = b"\"!#$%&'()*,/:;<=>?@[\\]^`{|}~"
"""Bytes that may follow a number or a word, but are part of neither."""

_SPECIAL: Final = re.compile(rb'["\\]')


class _Bytes:
    """A vocabulary of single bytes, in the form that llguidance takes."""

    eos_token_id = _END
    bos_token_id = None
    tokens: Sequence[bytes] = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids: Sequence[int] = (_END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(1)
def byte_tokenizer() -> "LLTokenizer":
    """Return the tokenizer whose tokens are single bytes."""
    from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415  (an optional extra)

    return LLTokenizer(TokenizerWrapper(_Bytes()))


@dataclass(slots=True)
class Habits:
    """The style of a grammar's outputs: their whitespace, and the alternatives they chose.

    Attributes:
        spaces: whitespace, by the byte before, the byte after and the bracket depth. Depth -1 holds
            the whitespace for the two bytes at any depth.
        indent: whitespace of one indentation level if each element has its own line; else empty.
        choices: how often each alternative was chosen, by the bytes before the choice.
        found: the forced strings found at places that outputs reached, given this whitespace.
    """

    spaces: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    indent: bytes = b""
    choices: dict[bytes, dict[bytes, float]] = field(default_factory=dict)
    found: dict[tuple[object, ...], "_Found"] = field(default_factory=dict)

    def between(self, before: int, after: int, depth: int) -> bytes:
        """Return the whitespace that is expected between two bytes."""
        kind = _class_of(after)
        found = self.spaces.get((before, kind, depth))
        if found is None and self.indent and (before in _OPENING or after in b"}]"):
            return b"\n" + self.indent * (depth - (after in b"}]"))
        if found is None:
            found = self.spaces.get((before, kind, -1))
        return (b" " if before in b",:" else b"") if found is None else found

    def learn_space(self, before: int, after: int, depth: int, whitespace: bytes) -> None:
        """Record the whitespace that an output had."""
        if self.between(before, after, depth) != whitespace:
            self.found.clear()
        kind = _class_of(after)
        self.spaces[before, kind, depth] = self.spaces[before, kind, -1] = whitespace
        if before in _OPENING and after not in b"}]":
            inner = whitespace.removeprefix(b"\n")
            self.indent = inner[: len(inner) // max(depth, 1)] if inner != whitespace else b""

    def shares(self, context: bytes, ways: Sequence[bytes]) -> list[float]:
        """Return the probability of each alternative, from how often each was chosen before."""
        known = self.choices.get(context, {})
        counts = [known.get(way.strip(), 0.0) + 1 / len(ways) for way in ways]
        return [count / sum(counts) for count in counts]

    def share_of_end(self, end: "_End") -> float:
        """Return the probability that a string or number ends here, from its key and its length."""
        came, missed = self._counts(end.by_length, end.mark)
        rate = (came + 0.3) / (came + missed + 4.0)
        came, missed = self._counts(end.by_key, end.mark)
        return (came + 2 * rate) / (came + missed + 2)

    def learn_way(self, way: "Way", *, came: bool) -> None:
        """Record whether the output chose a drafted alternative; old counts decay."""
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
    """Return one byte for all bytes with the same spacing: digits are a group, letters another."""
    return ord("0") if 48 <= byte <= 57 or byte == 45 else ord("a") if byte >= 97 else byte  # noqa: PLR2004


@dataclass(slots=True)
class Place:
    """The current position of an output in JSON or similar text.

    Attributes:
        in_string: whether the position is between quotes.
        is_escaped: whether the last byte is a backslash in a string.
        depth: number of open brackets.
        last: the last byte that is not whitespace; 0 before the first.
        whitespace: the whitespace after `last`.
        inside: bytes so far of the unfinished string, number or word.
        word: the last bytes of the current or the latest string, number or word.
        keys: the latest key in each open bracket.
        tail: the last bytes of the whole output.
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
        """Return the place after some more bytes."""
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
        """Move on over some bytes; record their whitespace in `habits` if given."""
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
        """Read a string up to its next quote or backslash, and return the index after it."""
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
        """Whether the place is inside a string, number or word."""
        return self.in_string or self.inside > 0

    def as_free(self) -> tuple[object, ...]:
        """Return the lookup key of a place inside a string or number with any content."""
        return self.keys, self.in_string

    def as_exact(self) -> tuple[object, ...]:
        """Return the lookup key of the place; brackets, keys and punctuation matter most."""
        word = self.word if self.is_open else b""
        if not self.keys:
            return self.last, self.tail
        return self.keys, self.last, self.whitespace, self.in_string, word


class _End(NamedTuple):
    """A possible end of a string or number: its end mark, and the contexts that identify it."""

    by_key: bytes
    by_length: bytes
    mark: bytes


class _Open(NamedTuple):
    """An alternative: its bytes, its end mark if it is an end, and the string forced after it."""

    text: bytes
    mark: bytes
    further: "Forced"


class _Found(NamedTuple):
    """The forced string at a place, and the alternatives after that string."""

    string: "Forced"
    place: Place
    ways: list[_Open]

    @property
    def is_free(self) -> bool:
        """Whether the place is in a string, number or word that can continue in many ways."""
        return not self.string.text and any(way.mark for way in self.ways)


class Way(NamedTuple):
    """One of a few alternatives: the context of the choice, its bytes, its share, and its end."""

    context: bytes
    text: bytes
    share: float
    end: _End | None = None


class Forced(NamedTuple):
    """A forced string.

    Attributes:
        text: the bytes.
        guessed_from: index of the first byte that depends on guessed whitespace.
        ends: whether the output ends after this string.
        way: the alternative chosen in this string, if any.
        chosen_from: index of the first byte of that alternative.
    """

    text: bytes
    guessed_from: int
    ends: bool
    way: Way | None = None
    chosen_from: int = 0

    def through(self, way: Way, further: "Forced") -> "Forced":
        """Return this string, extended by an alternative and by the string forced after it."""
        before = len(self.text) + len(way.text)
        guessed = min(self.guessed_from, before + further.guessed_from)
        text = self.text + way.text + further.text
        return Forced(text, guessed, further.ends, way, len(self.text))


class ForcedStrings:
    """The strings that a grammar forces in one output.

    Args:
        letters: the grammar's state over single bytes, before the output; this object changes it.
        habits: the style of this grammar's outputs.

    Attributes:
        place: the current position of the output.
    """

    def __init__(self, letters: "LLMatcher", habits: Habits) -> None:
        self._letters, self._habits = letters, habits
        self.place = Place()
        self._unread = b""  # bytes of the output that `_letters` did not read yet

    @property
    def is_known(self) -> bool:
        """Whether the library hit none of its limits, so that its state is valid."""
        return not self._letters.is_error()

    def follow(self, text: bytes) -> None:
        """Move on over committed bytes."""
        self._unread += text
        self.place.read(text, self._habits)

    def next(self, *, is_new: bool = False) -> list[Forced]:
        """Return the next forced string, alone and extended by each alternative at its end.

        Empty strings are omitted, except one that ends the output.

        Args:
            is_new: whether to compute the string even if a similar place has one stored. A stored
                string is usually right, but the grammar may forbid it.
        """
        return self._strings(self._at(self.place, b"", is_new=is_new))

    def behind(self, text: bytes) -> list[Forced]:
        """Return the string forced after some further bytes, which the grammar allows."""
        if self.place.in_string and _QUOTE not in text:
            return []  # inside one string, the grammar forces nothing
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
        """Return what is forced at a place after some further bytes, stored or newly found."""
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
        """Find what is forced at a place; `_letters` must be in the state of that place."""
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
        """Read the bytes forced after a place, and advance `_letters` and the place over them.

        Returns:
            The forced string, and the bytes allowed after it. Those are empty if none is allowed or
            if the string has its full length.
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
                    return Forced(text, guessed_from, False), b""  # whitespace is not allowed
                if may_space and not place.in_string:
                    guessed_from = min(guessed_from, len(text))
            letters.consume_tokens(list(forced))
            place.read(forced)
            text += forced
        return Forced(text, guessed_from, False), b""

    def _ways(self, place: Place, allowed: bytes) -> list[tuple[bytes, bytes]]:
        """Return the alternatives and their end marks, if there are only a few alternatives."""
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
        """Return the whitespace that is expected before a byte."""
        if not may_space or place.in_string:
            return b""
        expected = self._habits.between(place.last, byte, place.depth)
        come = place.whitespace  # the part of the whitespace that is already there
        return expected[len(come) :] if expected.startswith(come) else b""


def _others(allowed: bytes, most: int) -> bytes | None:
    """Return the allowed bytes, without whitespace and the end; None if there are over `most`.

    Args:
        allowed: one value for each byte and for the end; not 0 if it is allowed.
        most: most bytes to return.
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
    """Return whether whitespace is allowed."""
    return bool(allowed[32] or allowed[10] or allowed[9] or allowed[13])

"""Rules that stop a sequence before its token limit: stop tokens, and strings in its text."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import ahocorasick

from decoder.errors import StopStringError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_MAX_NEW_TOKENS: Final = 256
"""One or two paragraphs, so that generation ends soon if no limit is given."""

INCOMPLETE: Final = "\ufffd"
"""Tokenizers decode a character that lacks some of its bytes to this one."""


class TextStream:
    """Decodes a growing sequence and holds back incomplete characters.

    A token may end in the middle of a character, and its text may depend on the token before it. So
    each piece of text is the difference between two decodings that start at the same earlier token.

    Args:
        tokenizer: decodes the tokens; special tokens are left out.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0
        self._shown = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that can no longer change; it may be empty."""
        self._tokens.extend(tokens)
        text = self._pending()
        if text.endswith(INCOMPLETE):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text

    def finish(self) -> str:
        """Return the text held back so far, even with an incomplete character."""
        text = self._pending()
        self._start = self._shown = len(self._tokens)
        return text

    def _pending(self) -> str:
        shown = plain_text(self._tokenizer, self._tokens[self._start : self._shown])
        return plain_text(self._tokenizer, self._tokens[self._start :])[len(shown) :]


def plain_text(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int]) -> str:
    """Return the exact text of tokens, without special tokens."""
    return str(
        tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


class StopRule(Protocol):
    """Decides where a sequence ends."""

    def num_kept(self, tokens: Sequence[int]) -> int | None:
        """Add the next accepted tokens.

        Args:
            tokens: ids of the next accepted tokens, at least one; none of them follows a stop
                token.

        Returns:
            If the sequence ends within these tokens, how many of them it keeps, at least one;
            `None` if it continues.
        """
        ...


def first_stop(
    tokens: Sequence[int], stop_ids: Collection[int], rule: StopRule | None
) -> int | None:
    """Return how many of the tokens the sequence keeps if it ends there; `None` if it continues."""
    end = next((at for at, token in enumerate(tokens, 1) if token in stop_ids), None)
    kept = None if rule is None else rule.num_kept(tokens[:end])
    return end if kept is None else kept


class StopStrings:
    """Strings that end a text; one scan of the text searches for all of them.

    Uses the automaton of Aho and Corasick (1975, doi:10.1145/360825.360855).

    Args:
        strings: the stop strings, possibly none, or a single stop string.

    Raises:
        StopStringError: a string is empty or not valid text.
    """

    def __init__(self, strings: str | Sequence[str] = ()) -> None:
        strings = [strings] if isinstance(strings, str) else strings
        self.strings = tuple(dict.fromkeys(map(_checked, strings)))
        self._max_length = max(map(len, self.strings), default=0)
        self._automaton = ahocorasick.Automaton()
        for string in self.strings:
            self._automaton.add_word(string, string)
        self._automaton.make_automaton()

    def __len__(self) -> int:
        return len(self.strings)

    def first(self, text: str) -> tuple[int, str | None]:
        """Return where the first match ends, and its string, the longest that ends there."""
        end, string = next(self._automaton.iter(text), (-1, None)) if self.strings else (-1, None)
        return end + 1, string

    def num_open(self, text: str) -> int:
        """Return the length of the longest suffix of a text that is a prefix of a stop string."""
        longest = min(len(text), self._max_length - 1)
        return next((n for n in range(longest, 0, -1) if self._automaton.match(text[-n:])), 0)


class StopSearch:
    """Shows a growing text without any part of a stop string.

    A suffix that may become a stop string is held back and searched again with the next piece. Text
    that was shown is never searched again.

    Args:
        strings: the stop strings.
        include: whether the stop string itself is shown.

    Attributes:
        found: the stop string that ended first, the longest if several end together.
    """

    def __init__(self, strings: StopStrings, *, include: bool = False) -> None:
        self._strings = strings
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Add text and return the part that cannot belong to a stop string; it may be empty."""
        if self.found is not None:
            return ""
        self._held += piece
        end, self.found = self._strings.first(self._held)
        if self.found is None:
            return self._show(len(self._held) - self._strings.num_open(self._held))
        return self._show(end if self._include else end - len(self.found))

    def finish(self) -> str:
        """Return the text held back so far; call this when the text ends without a stop string."""
        return "" if self.found is not None else self._show(len(self._held))

    def _show(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        return shown


class StoppableText:
    """A `StopRule` that collects a sequence's text and ends it at the first stop string.

    Args:
        tokenizer: decodes the tokens; special tokens are left out.
        strings: the stop strings. The token that completes one is the last token kept.
        include: whether the text includes the stop string at its end.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", strings: StopStrings, *, include: bool = False
    ) -> None:
        self._stream = TextStream(tokenizer)
        self._search = StopSearch(strings, include=include)
        self._has_strings = len(strings) > 0
        self._ready = ""

    @property
    def found(self) -> str | None:
        """The stop string that ended the text."""
        return self._search.found

    def num_kept(self, tokens: Sequence[int]) -> int | None:
        """Add tokens; see `StopRule`."""
        if not self._has_strings:
            self._ready += self._stream.push(tokens)
            return None
        for count, token in enumerate(tokens, 1):
            self._ready += self._search.push(self._stream.push([token]))
            if self.found is not None:
                return count
        return None

    def take(self) -> str:
        """Return the text that became certain since the last call."""
        ready, self._ready = self._ready, ""
        return ready

    def finish(self) -> str:
        """Return the rest of the text, including incomplete characters."""
        rest = self._search.push(self._stream.finish())
        return self.take() + rest + self._search.finish()


def check_stop_strings(strings: StopStrings, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuse stop strings that can never occur in text that the tokenizer decodes.

    A string that survives encoding and decoding is allowed. Otherwise each of its characters must
    be in the text of some token, or be composed of byte tokens.

    Raises:
        StopStringError: one of the strings can never occur.
    """
    doubtful = [string for string in strings.strings if not _returns(tokenizer, string)]
    missing = {c for c in "".join(doubtful) if not _returns(tokenizer, c)}
    if missing:
        # Decode each token twice: a tokenizer may put text, such as a space, between two tokens.
        missing.difference_update(*(plain_text(tokenizer, [i, i]) for i in range(len(tokenizer))))
    for string in doubtful:
        if lacking := sorted(missing.intersection(string)):
            raise StopStringError(
                f"the stop string {string!r} can never occur: no token of the model's tokenizer "
                f"holds {', '.join(map(repr, lacking))}"
            )


def special_ids(strings: StopStrings, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the ids of stop strings that are special tokens, which decoded text leaves out."""
    known = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    return [known[string] for string in strings.strings if known.get(string) in special]


def _checked(string: str) -> str:
    if not isinstance(string, str):
        raise StopStringError(f"the stop string {string!r} is not text")
    if not string:
        raise StopStringError("a stop string is empty: give at least one character")
    if INCOMPLETE in string or any("\ud800" <= character <= "\udfff" for character in string):
        raise StopStringError(f"the stop string {string!r} is not text: it must be valid Unicode")
    return string


def _returns(tokenizer: "PreTrainedTokenizerBase", text: str) -> bool:
    """Return whether a text is unchanged after encoding and decoding."""
    return text in plain_text(tokenizer, tokenizer.encode(text, add_special_tokens=False))

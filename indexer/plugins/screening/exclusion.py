"""Finds the lines of a text that contain a listed phrase, in one pass for all phrases."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self
from unicodedata import normalize

import ahocorasick

from indexer.errors import IndexerError, reason_of

_COMMENT: Final = "#"
_ESCAPED_HASH: Final = re.compile(r"\\+#")
_BREAKS: Final = {"\r": "a carriage return: end lines with a line feed", "\0": "a NUL"}


@dataclass(frozen=True, slots=True)
class ExcludedPhrases:
    """Phrases and their lines in the list. Reports name lines, because a phrase may be secret.

    Attributes:
        texts: phrases; none is empty or has a line break.
        lines: line number of each phrase in the file, from 1.
    """

    texts: tuple[str, ...] = field(repr=False)
    lines: tuple[int, ...] = field(repr=False)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        r"""Read a list: UTF-8, one phrase per line. White space around a phrase is ignored.

        Blank lines and lines that start with `#` are skipped. A phrase that starts with `#` is
        written `\#`, a phrase that starts with `\#` is written `\\#`, and so on. Other backslashes
        have no special meaning.

        Raises:
            IndexerError: the file or a line cannot be read, or the file lists nothing. A list is
                loaded completely or not at all, because missing phrases would go unnoticed.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise IndexerError(f"cannot read the phrases in {path}: {reason_of(error)}") from error
        listed = dict(_phrases_of(content.removeprefix(b"\xef\xbb\xbf"), path))
        if not listed:
            raise IndexerError(f"{path} lists no phrase: write one on each line")
        return cls(tuple(listed.values()), tuple(listed))


def _phrases_of(content: bytes, path: Path | str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(content.split(b"\n"), 1):
        place = f"line {number} of {path}"
        try:
            phrase = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise IndexerError(f"{place} is not UTF-8: fix it; nothing was excluded") from error
        for character, what in _BREAKS.items():
            if character in phrase:
                raise IndexerError(f"{place} holds {what}; nothing was excluded")
        if phrase and not phrase.startswith(_COMMENT):
            yield number, phrase[1:] if _ESCAPED_HASH.match(phrase) else phrase


Span = tuple[int, int]
Hits = dict[int, set[int]]

_END: Final = "\n"


class PhraseFinder:
    """An Aho-Corasick automaton (Aho and Corasick, 1975) of all phrases.

    A phrase matches if it is equal to a part of the text, either literally or in Unicode's normal
    form C. In form C, it does not matter whether an accent is a separate character. If case is
    ignored, both are folded first, as Unicode defines it (The Unicode Standard, D145: canonical
    caseless matching). Most text is already normalised and is scanned once.

    Args:
        phrases: phrases to look for.
        ignore_case: whether upper and lower case letters are equal.
    """

    def __init__(self, phrases: ExcludedPhrases, *, ignore_case: bool) -> None:
        self._ignore_case = ignore_case
        self._automaton: Any = ahocorasick.Automaton(ahocorasick.STORE_INTS)
        for text, line in zip(phrases.texts, phrases.lines, strict=True):
            for form in _forms(text, ignore_case=ignore_case):
                if form not in self._automaton:
                    self._automaton.add_word(form, line)
        self._automaton.make_automaton()

    def find(self, text: str) -> Hits:
        """Return the lines with a phrase, numbered from 0, with the numbers of the phrases in each.

        A line ends with a line feed. The time is proportional to the length of the text and of the
        matches.
        """
        hits: Hits = {}
        for form in _forms(text, ignore_case=self._ignore_case):
            line, counted = 0, 0
            for last, phrase in self._automaton.iter(form):
                line += form.count(_END, counted, last)
                counted = last
                hits.setdefault(line, set()).add(phrase)
        return hits


def spans_of(text: str, hits: Hits) -> list[Span]:
    """Return the start and end, in the text, of each line with hits, including line feeds."""
    return [span for line, span in enumerate(_lines(text)) if line in hits] if hits else []


def _lines(text: str) -> Iterator[Span]:
    start = 0
    for line in text.split(_END):
        end = start + len(line) + 1
        yield start, min(end, len(text))
        start = end


def _forms(text: str, *, ignore_case: bool) -> set[str]:
    """Return the forms in which texts and phrases are compared, as one character per UTF-8 byte.

    No form adds or removes a line feed. The automaton searches a node's children one by one. That
    is fast for 256 bytes, but slow for all characters of Unicode.
    """
    if text.isascii():
        return {text.lower() if ignore_case else text}
    if ignore_case:
        forms = {text.casefold(), normalize("NFC", normalize("NFD", text).casefold())}
    else:
        forms = {text, normalize("NFC", text)}
    return {form.encode("utf-8", "surrogatepass").decode("latin-1") for form in forms}

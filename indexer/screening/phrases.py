"""The list of phrases that keep a document, or a line, out of an index."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from indexer.errors import IndexerError, reason_of

_COMMENT: Final = "#"
_ESCAPED_HASH: Final = re.compile(r"\\+#")
_BREAKS: Final = {"\r": "a carriage return: end lines with a line feed", "\0": "a NUL"}


@dataclass(frozen=True, slots=True)
class ExcludedPhrases:
    """Phrases, and where they are listed; a report names the line, for a phrase may be secret.

    Attributes:
        texts: the phrases, none of them empty or with a line break in it.
        lines: for each, the number of its line in the file, from 1.
    """

    texts: tuple[str, ...] = field(repr=False)
    lines: tuple[int, ...] = field(repr=False)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        r"""Read a list: UTF-8, a phrase a line, white space at its ends not counted.

        Blank lines and lines that begin with `#` are left out. A phrase that begins with `#` is
        written `\#`, one that begins with `\#` is written `\\#`, and so on; no other backslash
        means anything.

        Raises:
            IndexerError: the file cannot be read, a line of it cannot, or it lists nothing. A list
                is loaded whole or not at all: what a part of it leaves in, nobody would notice.
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
            raise IndexerError(f"{place} is not UTF-8: mend it; nothing was excluded") from error
        for character, what in _BREAKS.items():
            if character in phrase:
                raise IndexerError(f"{place} holds {what}; nothing was excluded")
        if phrase and not phrase.startswith(_COMMENT):
            yield number, phrase[1:] if _ESCAPED_HASH.match(phrase) else phrase

"""Extracts the text of notebooks, HTML pages, subtitles and mail."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from email import message_from_bytes
from email.policy import default
from html.parser import HTMLParser
from typing import Any, Final

from indexer.errors import UnusableError, reason_of

_UNSEEN: Final = frozenset({"head", "script", "style", "template", "noscript"})
"""HTML elements whose text is not visible."""

_BLOCK_LIST: Final = """
    address article aside blockquote body div dl fieldset figure footer form h1 h2 h3 h4 h5 h6
    header hr main nav ol p pre section table ul
"""
_BLOCKS: Final = frozenset(_BLOCK_LIST.split())
"""HTML block elements."""

_LINES: Final = frozenset({"br", "dd", "dt", "figcaption", "li", "tr"})
"""HTML elements that start a new line."""

_CUE_TIMES: Final = re.compile(r"^[\d:.,]+ --> .*$")
_CUE_NOTES: Final = ("WEBVTT", "NOTE", "STYLE", "REGION")
_MARKUP: Final = re.compile(r"</?[a-z][^<>]*>")
_BEGINS: Final = b"From "


def cells_of(text: str, *, with_outputs: bool = False) -> str:
    """Return the source of a notebook's cells, separated by empty lines.

    The format is described at https://nbformat.readthedocs.io. Before version 4, cells were in
    worksheets.

    Args:
        text: content of the notebook.
        with_outputs: whether to add, after each cell, the texts that its code printed or returned.

    Raises:
        UnusableError: the text is not a notebook.
    """
    try:
        notebook = json.loads(text)
        sheets = notebook.get("worksheets") or [notebook]
        cells = [cell for sheet in sheets for cell in sheet.get("cells", ())]
        found = [cell.get("source", cell.get("input", "")) for cell in cells]
        if with_outputs:
            told = [map(_told, cell.get("outputs", ())) for cell in cells]
            pairs = zip(found, told, strict=True)
            found = [each for source, outputs in pairs for each in (source, *outputs)]
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise UnusableError("notebook that is not JSON", "save it again") from error
    return "\n\n".join(each for each in map(_joined, found) if each.strip())


def _told(output: Mapping[str, Any]) -> Any:
    """Return the text of a cell output; empty for an image."""
    return output.get("text") or output.get("data", {}).get("text/plain", "")


def _joined(value: Any) -> str:
    return "".join(map(str, value)) if isinstance(value, list) else str(value)


def spoken_in(text: str) -> str:
    """Return the speech in subtitles (SubRip, WebVTT), without numbers, times and markup."""
    spoken: list[str] = []
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        lines = block.strip("\ufeff\n").split("\n")
        timed = next((n for n, line in enumerate(lines) if _CUE_TIMES.match(line.strip())), None)
        if timed is not None:
            spoken += lines[timed + 1 :]
        elif not lines[0].startswith(_CUE_NOTES):
            spoken += lines
    return _MARKUP.sub("", "\n".join(spoken))


class _Page(HTMLParser):
    """Collects the visible text of an HTML page, in lines."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self._written: list[str] = []
        self._unseen: list[str] = []
        self._num_kept = 0

    def handle_starttag(self, tag: str, _attributes: object) -> None:
        if tag in _UNSEEN:
            self._unseen.append(tag)
        elif tag == "body":  # in case the head was not closed
            self._unseen.clear()
        self._num_kept += tag == "pre"
        if tag in _BLOCKS | _LINES:
            self._break()

    def handle_endtag(self, tag: str) -> None:
        if tag in self._unseen:
            del self._unseen[self._unseen.index(tag) :]
        self._num_kept = max(self._num_kept - (tag == "pre"), 0)
        if tag in _BLOCKS:
            self._break()

    def handle_data(self, data: str) -> None:
        if self._unseen:
            return
        if not self._num_kept:
            data = re.sub(r"\s+", " ", data)
            data = data.lstrip() if self._at_start else data
        if data:
            self._written.append(data)

    def close(self) -> None:
        super().close()
        lines = "".join(self._written).split("\n")
        self.text = re.sub(r"\n{3,}", "\n\n", "\n".join(map(str.rstrip, lines))).strip("\n")

    @property
    def _at_start(self) -> bool:
        return not self._written or self._written[-1].endswith("\n")

    def _break(self) -> None:
        if not self._unseen:
            self._written.append("\n")


def text_of_page(text: str) -> str:
    """Return the text of an HTML page: one line per block, without scripts and styles."""
    page = _Page()
    page.feed(text)
    page.close()
    return page.text


def letters_in(lines: Iterable[bytes], max_bytes: int) -> Iterator[bytes | None]:
    """Yield each message of a mailbox in mbox format, or the single message of a file.

    Args:
        lines: lines of the mailbox.
        max_bytes: most bytes of a message; a longer message is yielded as None.
    """
    held: list[bytes] = []
    num_bytes, was_blank = 0, True
    for line in lines:
        if was_blank and line.startswith(_BEGINS):
            if num_bytes:
                yield b"".join(held) if num_bytes <= max_bytes else None
            held, num_bytes = [], 0
        else:
            num_bytes += len(line)
            if num_bytes <= max_bytes:
                held.append(line)
        was_blank = not line.strip()
    if num_bytes:
        yield b"".join(held) if num_bytes <= max_bytes else None


def text_of_letter(letter: bytes) -> str:
    """Return the body of a mail message, without headers and attachments; empty if it has no text.

    Raises:
        UnusableError: the message is malformed.
    """
    try:
        message: Any = message_from_bytes(letter, policy=default)
        body = message.get_body(("plain", "html"))
        text = "" if body is None else str(body.get_content())
    # Raised for unknown encodings, and for headers that the library does not accept.
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise UnusableError("mail that cannot be read", reason_of(error)) from error
    is_page = body is not None and body.get_content_subtype() == "html"
    return text_of_page(text) if is_page else text

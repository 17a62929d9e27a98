"""Finds the secrets in a text: by a library's rules, by our own rules, and by repetition."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import ahocorasick
import numpy as np
from numpy.typing import NDArray

from indexer.errors import IndexerError

EMAIL_ADDRESS: Final = "email-address"

Finder = Callable[[str], Iterator[tuple[int, int]]]
"""Yields the start and end of each secret in a text, in order."""

# RFC 7468, section 2, and RFC 4880, section 6.2, define the blocks; RFC 1421, section 4.6, defines
# the headers. The library requires 64 characters and an end line. This pattern also matches short
# and truncated blocks. In source code, line breaks are often escaped.
_PRIVATE_KEY: Final = re.compile(
    r"-----BEGIN (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:(?:\s|\\[nr])*+[A-Za-z][A-Za-z0-9-]*+:[^\n\\]*+)*+"
    r"(?:[A-Za-z0-9+/=\s]|\\[nr])*+"
    r"(?:-----END (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----)?"
)

# RFC 3986, section 3.2.1: user, colon, password, before the host. An unescaped @ in the password is
# common, so the password ends at the last @. `${NAME}`, `{name}` and `%s` are placeholders.
_URL_PASSWORD: Final = re.compile(
    r""":(?:\\?/){2}[^\s/\\?#"'<>@:]*+:(?!(?:\$?\{[^{}\s]*\}|%s)@)([^\s/\\?#"'<>]+)@"""
)

# AWS IAM User Guide, "IAM identifiers": unique ID prefixes of permanent and temporary access keys.
# The library requires the secret key next to the identifier.
_AWS_KEY: Final = re.compile(r"A(?:KIA|SIA)(?<![A-Za-z0-9].{4})[A-Z0-9]{16}(?![A-Za-z0-9])")

# RFC 5322, section 3.2.3: a dot-atom of at most 64 characters (RFC 5321, section 4.5.3.1.1). Other
# scripts are allowed (RFC 6531, section 3.3). "/" is not, because it precedes addresses in paths,
# nor is the backtick, which quotes. Punctuation at the ends belongs to the text. Matched backwards.
_LOCAL_PART: Final = re.compile(r"[\w+-](?:[\w.!#$%&'*+=?^{|}~-]*\w)?")
_MAX_LOCAL_PART: Final = 64
# RFC 1034, section 3.5: labels and dots. A public domain ends with letters or is encoded.
_DOMAIN: Final = re.compile(r"@(?:\w(?:[\w-]*\w)?\.)+(?:xn--[a-z0-9-]+|[^\W\d_]{2,63})(?![\w-])")


def private_keys(text: str) -> Iterator[tuple[int, int]]:
    """Find private-key blocks, complete or truncated."""
    if "PRIVATE KEY" in text:
        yield from (found.span() for found in _PRIVATE_KEY.finditer(text))


def url_passwords(text: str) -> Iterator[tuple[int, int]]:
    """Find passwords in URLs of any scheme."""
    yield from (found.span(1) for found in _URL_PASSWORD.finditer(text))


def aws_access_key_ids(text: str) -> Iterator[tuple[int, int]]:
    """Find the identifiers of AWS access keys."""
    if "AKIA" in text or "ASIA" in text:
        yield from (found.span() for found in _AWS_KEY.finditer(text))


def email_addresses(text: str) -> Iterator[tuple[int, int]]:
    """Find e-mail addresses, from each @ forwards to the domain and backwards to the name.

    Text before the host of a URL is a password, not a name.
    """
    passwords = {end for _, end in url_passwords(text)}
    before = 0
    for domain in _DOMAIN.finditer(text):
        at = domain.start()
        name = _LOCAL_PART.match(text[max(before, at - _MAX_LOCAL_PART) : at][::-1])
        before = domain.end()
        if name is not None and at not in passwords:
            yield at - name.end(), before


OWN_RULES: Final[dict[str, Finder]] = {
    "private-key": private_keys,
    "url-password": url_passwords,
    "aws-access-key-id": aws_access_key_ids,
    EMAIL_ADDRESS: email_addresses,
}


PLACEHOLDER: Final = "[REDACTED]"

WINDOW_BYTES: Final = 1 << 17
"""Size of the text windows that the library scans. It bounds the time on hostile text."""

OVERLAP_BYTES: Final = 1 << 14
"""Overlap of the windows. A secret up to this long is always whole in one window."""

# UTF-8 (RFC 3629, section 3): all bytes of a character but its first have these leading bits.
_LEAD_BITS: Final = 0xC0
_CONTINUATION: Final = 0x80

# A shorter value, or a word, counts as a secret only where it was found, because it has other
# meanings elsewhere. Addresses and key blocks are recognised by their form anywhere.
_MIN_REPEATED: Final = 6
_MAX_REPEATED: Final = 4096


@dataclass(frozen=True, slots=True, order=True)
class Secret:
    """A secret's place in a text, as a slice of its characters, and its kind."""

    start: int
    end: int
    kind: str


class SecretFinder:
    """Finds keys, tokens, private-key blocks, passwords in URLs and e-mail addresses, offline.

    Most rules come from Kingfisher. No key is checked online for validity.

    Args:
        window_bytes: bytes of text that the library scans at a time.
        overlap_bytes: overlap of these windows.

    Raises:
        IndexerError: Kingfisher is not installed.
    """

    def __init__(
        self, window_bytes: int = WINDOW_BYTES, overlap_bytes: int = OVERLAP_BYTES
    ) -> None:
        self._window_bytes, self._overlap_bytes = window_bytes, overlap_bytes
        try:
            library: Any = import_module("kingfisher_sdk")
        except ImportError as error:
            raise IndexerError(
                "redaction needs the library Kingfisher: pip install 'foredraft[redact]'"
            ) from error
        self._scanner = library.Scanner(library.Rules(confidence="low"))

    def find(self, text: str) -> list[Secret]:
        """Return the secrets of a text in order; none overlap.

        The time is proportional to the length of the text. The memory is sixty times the size of
        its secrets.
        """
        found = _merged([*self._by_library(text), *_by_own_rules(text)])
        return _merged([*found, *_repeated(text, found)]) if found else found

    def _by_library(self, text: str) -> Iterator[Secret]:
        encoded = text.encode("utf-8", "surrogatepass")
        spans = {
            (start + finding.location["start_offset"], start + finding.location["end_offset"]): (
                finding.rule_id
            )
            for start, window in _windows(encoded, self._window_bytes, self._overlap_bytes)
            for finding in self._scanner.scan(window)
        }
        if not spans:
            return
        begun = _characters_begun(encoded)
        for (start, end), rule in spans.items():
            if start < end:
                yield Secret(int(begun[start]) - 1, int(begun[end - 1]), _kind_of(rule))


def redacted(text: str, secrets: Iterable[Secret], removed: Iterable[tuple[int, int]] = ()) -> str:
    """Return the text with a placeholder for each secret and without the removed spans.

    If a secret extends beyond a removed span, its placeholder stays.
    """
    edits = [(secret.start, secret.end, PLACEHOLDER) for secret in secrets]
    edits += [(start, end, "") for start, end in removed]
    pieces, done = [], 0
    for start, end, replacement in sorted(edits, key=lambda edit: (edit[0], edit[2])):
        if end > done:
            pieces += [text[done:start], replacement]
            done = end
    return "".join([*pieces, text[done:]])


def _by_own_rules(text: str) -> Iterator[Secret]:
    for kind, find in OWN_RULES.items():
        yield from (Secret(start, end, kind) for start, end in find(text))


def _repeated(text: str, found: list[Secret]) -> Iterator[Secret]:
    """Yield further occurrences of the secrets that were found, in any context."""
    automaton: Any = ahocorasick.Automaton()
    for secret in found:
        value = text[secret.start : secret.end]
        by_form = secret.kind == EMAIL_ADDRESS or len(value) > _MAX_REPEATED
        if len(value) >= _MIN_REPEATED and not by_form and not _is_word(value):
            automaton.add_word(value, (len(value), secret.kind))
    if len(automaton):
        automaton.make_automaton()
        for last, (length, kind) in automaton.iter_long(text):
            yield Secret(last + 1 - length, last + 1, kind)


def _is_word(value: str) -> bool:
    return value.isalpha() and value in {value.lower(), value.upper(), value.capitalize()}


def _merged(secrets: Iterable[Secret]) -> list[Secret]:
    """Join overlapping secrets. The first one determines the kind; on a tie, the longest one."""
    merged: list[Secret] = []
    for secret in sorted(secrets, key=lambda found: (found.start, -found.end, found.kind)):
        if merged and secret.start < merged[-1].end:
            last = merged.pop()
            merged.append(Secret(last.start, max(last.end, secret.end), last.kind))
        else:
            merged.append(secret)
    return merged


def _windows(encoded: bytes, size: int, overlap: int) -> Iterator[tuple[int, bytes]]:
    """Cut bytes into overlapping windows, each with its offset."""
    for start in range(0, max(len(encoded) - overlap, 1), size - overlap):
        yield start, encoded[start : start + size]


def _characters_begun(encoded: bytes) -> NDArray[np.int32]:
    """Return int32[bytes], the number of characters that begin at or before each byte."""
    lead_bits = np.frombuffer(encoded, np.uint8) & _LEAD_BITS
    return np.cumsum(lead_bits != _CONTINUATION, dtype=np.int32)


def _kind_of(rule_id: str) -> str:
    """Return a rule's name without the name of its collection."""
    return rule_id.rpartition("/")[2].rpartition(".")[2]

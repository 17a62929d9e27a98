"""Secrets that the library leaves: each rule is public, and takes linear time on any text."""

import re
from collections.abc import Callable, Iterator
from typing import Final

EMAIL_ADDRESS: Final = "email-address"

Finder = Callable[[str], Iterator[tuple[int, int]]]
"""Yields where secrets begin and end in a text, in order."""

# RFC 7468, section 2, and RFC 4880, section 6.2 for blocks; RFC 1421, section 4.6 for headers. The
# library wants 64 characters and an end; this takes short blocks, and what is left of cut ones.
# In source code, line breaks are often spelt.
_PRIVATE_KEY: Final = re.compile(
    r"-----BEGIN (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:(?:\s|\\[nr])*+[A-Za-z][A-Za-z0-9-]*+:[^\n\\]*+)*+"
    r"(?:[A-Za-z0-9+/=\s]|\\[nr])*+"
    r"(?:-----END (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----)?"
)

# RFC 3986, section 3.2.1: user, colon, password, before the host. An unescaped @ in the password
# is common, so it ends at the last one; `${NAME}`, `{name}` and `%s` are places for a password.
_URL_PASSWORD: Final = re.compile(
    r""":(?:\\?/){2}[^\s/\\?#"'<>@:]*+:(?!(?:\$?\{[^{}\s]*\}|%s)@)([^\s/\\?#"'<>]+)@"""
)

# AWS IAM User Guide, "IAM identifiers", unique ID prefixes: of access keys and temporary ones. The
# library wants the secret key beside it.
_AWS_KEY: Final = re.compile(r"A(?:KIA|SIA)(?<![A-Za-z0-9].{4})[A-Z0-9]{16}(?![A-Za-z0-9])")

# RFC 5322, section 3.2.3: dot-atom of at most 64 characters (RFC 5321, section 4.5.3.1.1), other
# scripts allowed (RFC 6531, section 3.3), but "/", which stands before addresses in paths, and the
# backtick, which quotes. Marks at its ends are taken for the text's. To be matched backwards.
_LOCAL_PART: Final = re.compile(r"[\w+-](?:[\w.!#$%&'*+=?^{|}~-]*\w)?")
_MAX_LOCAL_PART: Final = 64
# RFC 1034, section 3.5: labels and dots; a domain of the net ends with letters or is coded.
_DOMAIN: Final = re.compile(r"@(?:\w(?:[\w-]*\w)?\.)+(?:xn--[a-z0-9-]+|[^\W\d_]{2,63})(?![\w-])")


def private_keys(text: str) -> Iterator[tuple[int, int]]:
    """Find private-key blocks, whole or cut off."""
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
    """Find e-mail addresses: from each @ on to the domain, and back to where the name begins.

    What stands before the host of a URL is a password, not a name.
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

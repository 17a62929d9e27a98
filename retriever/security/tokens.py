"""Bearer tokens: made, hashed, and compared in constant time.

A token is `fdt_`, 16 hexadecimal digits that name it, `_`, and 256 random bits in base64url. Nobody
chooses one, so there is nothing to guess from a dictionary, and a slow hash would protect nothing:
it would only cost every call. At rest a token is HMAC-SHA-256 of itself, keyed with a salt of its
own, so that equal hashes tell nothing and a file that is read by others lets nobody in.
"""

import hmac
import re
import secrets
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Self

_TOKEN: Final = re.compile(r"fdt_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")
_HASH: Final = re.compile(r"([0-9a-f]{16}):([0-9a-f]{32}):([0-9a-f]{64})")
_LONGEST: Final = 128


@dataclass(frozen=True, slots=True)
class TokenHash:
    """What is kept of a token.

    Attributes:
        name: of the token; no secret.
        salt: 16 random bytes.
        digest: 32 bytes.
    """

    name: str
    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, token: str) -> Self:
        """Return the hash of a token, with a new salt.

        Raises:
            ValueError: this is no token.
        """
        name = name_of(token)
        if name is None:
            raise ValueError("this is no token")
        salt = secrets.token_bytes(16)
        return cls(name, salt, _digest(salt, token))

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Return the hash that `str` wrote.

        Raises:
            ValueError: this is none.
        """
        found = _HASH.fullmatch(text)
        if found is None:
            raise ValueError("this is no hash of a token")
        return cls(found[1], bytes.fromhex(found[2]), bytes.fromhex(found[3]))

    def __str__(self) -> str:
        return f"{self.name}:{self.salt.hex()}:{self.digest.hex()}"

    def fits(self, token: str) -> bool:
        """Tell whether it is this token's, in the same time whether it is or not."""
        return hmac.compare_digest(self.digest, _digest(self.salt, token))


def new_token() -> str:
    """Return a token that nobody can guess."""
    return f"fdt_{secrets.token_hex(8)}_{secrets.token_urlsafe(32)}"


def nobody() -> TokenHash:
    """Return a hash that no token has, to compare unknown ones with."""
    return TokenHash("", secrets.token_bytes(16), secrets.token_bytes(32))


def name_of(token: str) -> str | None:
    """Return what names a token, None for what is none."""
    found = _TOKEN.fullmatch(token)
    return found[1] if found is not None else None


def _digest(salt: bytes, token: str) -> bytes:
    return hmac.digest(salt, token[:_LONGEST].encode("utf-8", "replace"), sha256)

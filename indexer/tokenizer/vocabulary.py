"""The properties of a tokenizer that an index depends on: its size and a fingerprint."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from indexer.errors import TokenizerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_VOCABULARY: Final = 2**31 - 1
"""Largest vocabulary. Token ids are signed integers of four bytes, as in every engine."""

# The probe covers case, accents, digits, runs of spaces, code, several scripts and emoji. In these,
# normalisers, pre-tokenizers and merges of otherwise similar tokenizers differ. The probe is part
# of every fingerprint: changing it makes every index unreadable.
PROBE: Final = (
    "The quick brown fox can't jump over 13 lazy dogs; Caf\u00e9 na\u00efve \u00c5ngstr\u00f6m "
    "\ufb01ne \uff21\uff22 3.14159 1234567890\n\n\tdef f(x: int) -> str:\n        "
    "return f'{x!r:>10}'  # noqa\r\n\u4f60\u597d\u3001\u4e16\u754c \u041f\u0440\u0438\u0432"
    "\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 "
    "\U0001f469\u200d\U0001f4bb \u2014 \u201cquoted\u201d   trailing  "
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer of an index: its size and its fingerprint.

    Attributes:
        size: largest token id plus one; from 1 to `MAX_VOCABULARY`.
        fingerprint: 64 hexadecimal digits; equal for tokenizers that give equal ids.
        name: name that the tokenizer was loaded by, as for `load_tokenizer`; empty if unknown.
            Vocabularies with different names and equal fingerprints are equal.

    Raises:
        TokenizerError: the size is out of range.
    """

    size: int
    fingerprint: str
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_VOCABULARY:
            raise TokenizerError(
                f"a vocabulary of {self.size} tokens is not supported: it needs at least one, and "
                "ids must fit into signed integers of four bytes, as in engines"
            )

    def describe(self) -> str:
        """Return the name, the size and the start of the fingerprint, for messages."""
        named = f"{self.name}, " if self.name else ""
        return f"{named}vocabulary {self.size}, fingerprint {self.fingerprint[:12]}\u2026"


class TextTokenizer(Protocol):
    """What an index needs from a tokenizer, either of transformers or a `CoreTokenizer`."""

    @property
    def all_special_ids(self) -> Any:
        """Ids of special tokens."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's ids."""
        ...


def recorded_name(tokenizer: object) -> str:
    """Return a tokenizer's name as an index records it; empty if it has none.

    Local files are recorded by their absolute path, which is valid in any working folder.
    """
    name = str(getattr(tokenizer, "name_or_path", None) or "")
    path = Path(name).expanduser()
    return str(path.resolve()) if name and path.exists() else name


def vocabulary_of(
    tokenizer: "TextTokenizer | PreTrainedTokenizerBase", name: str | None = None
) -> Vocabulary:
    """Return the size of a tokenizer's vocabulary and its fingerprint.

    The fingerprint is the SHA-256 of compact ASCII JSON with three values: the pairs of id and
    token in order of id, the sorted ids of special tokens, and the ids of a fixed probe text. The
    pairs define what ids mean. The probe captures normaliser, pre-tokenizer and merges by their
    effect, not by how a library version writes them.

    Args:
        tokenizer: tokenizer to describe.
        name: name that the tokenizer was loaded by; `None` for the tokenizer's own name.

    Raises:
        TokenizerError: the tokenizer has no tokens.
    """
    tokens = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    if not tokens:
        raise TokenizerError("the tokenizer's vocabulary is empty")
    special = sorted({int(token_id) for token_id in tokenizer.all_special_ids})
    probe = list(tokenizer.encode(PROBE, add_special_tokens=False))
    content = json.dumps([tokens, special, probe], separators=(",", ":"))
    size = max(tokens[-1][0], *special, *probe, 0) + 1
    named = recorded_name(tokenizer) if name is None else name
    return Vocabulary(size, hashlib.sha256(content.encode("ascii")).hexdigest(), named)

"""The names and numbers of the on-disk format, which docs/reference/format.md specifies.

Code that writes or reads an index shares these values. `indexer.format.records` defines the JSON of
records.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION: Final = 4

CATALOG_FOLDER: Final = "catalog"
LOCK_FILE: Final = "writer.lock"
SCRATCH_FOLDER: Final = ".scratch"
TOKENIZER_FILE: Final = "tokenizer"
SEGMENTS_FOLDER: Final = "segments"
PHRASES_FOLDER: Final = "phrases"

TOKENS_FILE: Final = "tokens"
SUFFIXES_FILE: Final = "suffixes"
STARTS_FILE: Final = "starts"
KEYS_FILE: Final = "suffix_keys"
DOCUMENT_STARTS_FILE: Final = "document_starts"
NAMES_FILE: Final = "document_names"
NAME_ENDS_FILE: Final = "document_name_ends"
LICENCES_FILE: Final = "document_licences"
DIGESTS_FILE: Final = "document_digests"
TEXTS_FILE: Final = "texts"
DOCUMENT_FILES: Final = (
    DOCUMENT_STARTS_FILE,
    NAMES_FILE,
    NAME_ENDS_FILE,
    LICENCES_FILE,
    DIGESTS_FILE,
)
SEGMENT_FILES: Final = (TOKENS_FILE, SUFFIXES_FILE, STARTS_FILE, *DOCUMENT_FILES)
OPTIONAL_SEGMENT_FILES: Final = (KEYS_FILE, TEXTS_FILE)
PHRASE_FILES: Final = (
    *("counts1", "starts1"),
    *("tokens2", "counts2", "starts2"),
    *("tokens3", "counts3", "starts3"),
    *("tokens4", "counts4"),
)

POSITION_DTYPE: Final = np.dtype("<u4")
"""Dtype of suffixes and starts. A segment has fewer than 2**32 tokens."""

KEY_DTYPE: Final = np.dtype("<u8")
"""Dtype of suffix keys. A key packs the tokens after a suffix's first token."""

KEY_STRIDE: Final = 32
"""Distance between suffixes that have a key. Keys take a quarter of a byte per token."""

MIN_KEYED_SUFFIXES: Final = 1 << 20
"""Fewest suffixes of a segment that has keys. Smaller segments need few search steps and fit in the
cache."""

OFFSET_DTYPE: Final = np.dtype("<u8")
"""Dtype of offsets into the names of documents."""

LICENCE_DTYPE: Final = np.dtype("<u4")
"""Dtype of documents' licences: indices into the list in the segment's record."""

COUNT_DTYPE: Final = np.dtype("u1")
"""Dtype of counts in the phrase tables; see `indexer.format.phrase_tables`."""

MAX_POSITIONS: Final = 2**32 - 1
"""Most positions of a segment. The number of positions must fit `POSITION_DTYPE` as well."""

MAX_ORDER: Final = 4
"""Length of the longest n-grams in the phrase tables, in tokens."""

DIGEST_BYTES: Final = 16
"""Size of a document's digest: BLAKE2b of its UTF-8 text, or of its tokens if it has no text."""

Tokens = NDArray[np.uint16] | NDArray[np.uint32]


def token_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """Return the dtype of tokens: two bytes if ids and the separator fit, otherwise four."""
    return np.dtype("<u2") if vocabulary_size <= np.iinfo(np.uint16).max else np.dtype("<u4")


def key_bits(vocabulary_size: int) -> int:
    """Return the bits per token in a key. The vocabulary size itself stands for a separator."""
    return vocabulary_size.bit_length()


def separator_of(dtype: np.dtype[Any]) -> int:
    """Return the separator, which ends every document: the largest value of the dtype."""
    return int(np.iinfo(dtype).max)


def ordinal_name(ordinal: int) -> str:
    """Return the name of the folder or file with number `ordinal`."""
    return f"{ordinal:08d}"


def is_ordinal_name(name: str) -> bool:
    """Return whether `ordinal_name` can produce this name."""
    return name.isascii() and name.isdecimal() and name == ordinal_name(int(name))

"""Export forms, the documents of an index as token ids, and atomic files."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

import numpy as np

from indexer.errors import DamagedIndexError, reason_of
from indexer.reader import Index
from retriever.drafter import TokenIds
from retriever.errors import ExportError


class ExportForm(StrEnum):
    """A form in which an index can be written."""

    SGLANG_CORPUS = "sglang-corpus"
    EXLLAMAV3 = "exllamav3"


def token_documents(index: Index) -> Iterator[TokenIds]:
    """Yield the tokens of each document, int32[n], in order; one document is in memory.

    Raises:
        DamagedIndexError: the index lists a document at an impossible place, or holds a token
            outside its vocabulary.
    """
    documents = index.documents()
    for segment in index.segments:
        for start in segment.documents.starts.tolist():
            _document, num_tokens = next(documents)
            tokens = np.array(segment.tokens[start : start + num_tokens], np.int32)
            if len(tokens) != num_tokens or not _is_of(tokens, index.vocabulary.size):
                raise DamagedIndexError(
                    f"{index.path} holds an invalid document at {start} of segment "
                    f"{segment.name}: copy or build the index again"
                )
            yield tokens


def _is_of(tokens: TokenIds, vocabulary_size: int) -> bool:
    return len(tokens) > 0 and bool(tokens.min() >= 0 and tokens.max() < vocabulary_size)


@contextmanager
def whole_file(path: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """Yield a file to write to, and move it to `path` if the block ends without an error.

    Until then it is a hidden file in the same folder. So readers of `path` see the old file or the
    complete new file.

    Raises:
        ExportError: the path exists, or cannot be written to.
    """
    if path.is_dir():
        raise ExportError(f"{path} is a folder: name a file")
    if path.exists() and not overwrite:
        raise ExportError(f"{path} exists already: pass --overwrite to replace it")
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with hidden.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {reason_of(error)}") from error
    finally:
        with suppress(OSError):
            hidden.unlink()

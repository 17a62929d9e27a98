"""Files that appear when they are whole."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from indexer.errors import reason_of
from retriever.errors import ExportError


@contextmanager
def whole_file(path: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """Give a file to write to, and put it at `path` when the block ends without an error.

    It is a hidden sibling until then, so that whoever reads `path` finds what was there or all of
    the new.

    Raises:
        ExportError: the path is taken, or cannot be written to.
    """
    if path.is_dir():
        raise ExportError(f"{path} is a folder: name a file")
    if path.exists() and not overwrite:
        raise ExportError(f"{path} is there already: pass --overwrite to replace it")
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

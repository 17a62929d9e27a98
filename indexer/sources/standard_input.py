"""Standard input as a source: kept in a file, because blocks are read in any order and process."""

import shutil
import sys
from pathlib import Path
from typing import BinaryIO, Final

from indexer.errors import SourceError, reason_of
from indexer.sources.blocks import SourceFile
from indexer.sources.formats import Form, Format
from indexer.sources.options import SourceOptions, StdinFormat

_NAME: Final = "stdin"


def keep_standard_input(scratch: Path | None, options: SourceOptions) -> SourceFile:
    """Copy standard input to a file; of plain text no more than shows that it is too long.

    Args:
        scratch: the folder for the file, which must stay until all blocks are read.
        options: what is on standard input, the licence, and the longest document.

    Raises:
        SourceError: there is no folder, no standard input, or no room.
    """
    stream: BinaryIO | None = getattr(sys.stdin, "buffer", None)
    if stream is None or scratch is None:
        missing = "standard input" if stream is None else "folder to keep standard input in"
        raise SourceError(f"there is no {missing}: name a file instead of -")
    path = scratch / _NAME
    is_text = options.stdin_format == StdinFormat.TEXT
    try:
        with path.open("xb") as kept:
            if is_text:
                kept.write(stream.read(options.max_document_bytes + 1))
            else:
                shutil.copyfileobj(stream, kept)
        num_bytes = path.stat().st_size
    except OSError as error:
        said = reason_of(error)
        raise SourceError(f"cannot keep standard input in {scratch}: {said}") from error
    form = Format(Form.TEXT if is_text else Form.LINES)
    return SourceFile(path, _NAME, form, options.licence, num_bytes)

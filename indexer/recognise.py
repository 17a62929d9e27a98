"""Telling an index from any other folder, by the names of what it holds."""

import os
from pathlib import Path
from typing import Final, NoReturn

from indexer.format import (
    CATALOG_FILE,
    CATALOG_FOLDER,
    CATALOG_LOCK_FILE,
    CHECKSUM_FILE,
    PHRASE_FILES,
    PHRASES_FOLDER,
    SEGMENT_FILES,
    SEGMENTS_FOLDER,
    is_segment_name,
)

_REQUIRED_FILES: Final = ((CHECKSUM_FILE,), (CATALOG_FOLDER, CATALOG_FILE))
_FILES: Final = (*_REQUIRED_FILES, (CATALOG_FOLDER, CATALOG_LOCK_FILE))
_FOLDERS: Final = ((CATALOG_FOLDER,), (SEGMENTS_FOLDER,), (PHRASES_FOLDER,))
_NUMBERED: Final[dict[tuple[str, ...], tuple[str, ...]]] = {
    (SEGMENTS_FOLDER,): SEGMENT_FILES,
    (PHRASES_FOLDER,): PHRASE_FILES,
}


def why_not_index(folder: Path) -> str | None:
    """Say what keeps a folder from being an index, or None where it is one and nothing besides.

    An index may lack segments and phrase tables, as one does that was copied half, but neither
    its catalog nor the checksum. It holds no entry of another name or kind, and no links.

    Raises:
        OSError: the folder cannot be read.
    """
    for place, folders, files in os.walk(folder, onerror=_fail):
        parts = Path(place).relative_to(folder).parts
        for names, is_known in ((folders, _is_folder_of_index), (files, _is_file_of_index)):
            for name in sorted(names):
                if not is_known((*parts, name)) or Path(place, name).is_symlink():
                    return f"it holds {Path(*parts, name)}"
    for required in _REQUIRED_FILES:
        if not folder.joinpath(*required).exists():
            return f"it has no {Path(*required)}"
    return None


def _is_folder_of_index(parts: tuple[str, ...]) -> bool:
    return parts in _FOLDERS or _is_numbered(parts)


def _is_numbered(parts: tuple[str, ...]) -> bool:
    """Tell whether this is the folder of a segment or of phrase tables."""
    return bool(parts) and parts[:-1] in _NUMBERED and is_segment_name(parts[-1])


def _is_file_of_index(parts: tuple[str, ...]) -> bool:
    if parts in _FILES:
        return True
    return _is_numbered(parts[:-1]) and parts[-1] in _NUMBERED[parts[:-2]]


def _fail(error: OSError) -> NoReturn:
    raise error

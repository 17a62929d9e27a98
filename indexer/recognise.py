"""Telling an index from any other folder, by the names of what it holds."""

import os
from pathlib import Path
from typing import Final, NoReturn

from indexer.format import (
    CATALOG_FOLDER,
    LOCK_FILE,
    OPTIONAL_SEGMENT_FILES,
    PHRASE_FILES,
    PHRASES_FOLDER,
    SCRATCH_FOLDER,
    SEGMENT_FILES,
    SEGMENTS_FOLDER,
    TOKENIZER_FILE,
    is_ordinal_name,
)

_OLDER_FILES: Final = (("checksum",), (CATALOG_FOLDER, "data.mdb"), (CATALOG_FOLDER, "lock.mdb"))
"""Of versions 1 and 2, which are replaced likewise."""

_FILES: Final = ((LOCK_FILE,), (TOKENIZER_FILE,), *_OLDER_FILES)
_FOLDERS: Final = ((CATALOG_FOLDER,), (SEGMENTS_FOLDER,), (PHRASES_FOLDER,))
_NUMBERED: Final[dict[tuple[str, ...], tuple[str, ...]]] = {
    (SEGMENTS_FOLDER,): (*SEGMENT_FILES, *OPTIONAL_SEGMENT_FILES),
    (PHRASES_FOLDER,): PHRASE_FILES,
}


def why_not_index(folder: Path) -> str | None:
    """Say what keeps a folder from being an index, or None where it is one and nothing besides.

    An index may lack segments and phrase tables, as one does that was copied half, but not its
    snapshots. It holds no entry of another name or kind, and no links.

    Raises:
        OSError: the folder cannot be read.
    """
    for place, folders, files in os.walk(folder, onerror=_fail):
        parts = Path(place).relative_to(folder).parts
        if not parts and SCRATCH_FOLDER in folders:
            folders.remove(SCRATCH_FOLDER)
        for names, is_known in ((folders, _is_folder_of_index), (files, _is_file_of_index)):
            for name in sorted(names):
                if not is_known((*parts, name)) or Path(place, name).is_symlink():
                    return f"it holds {Path(*parts, name)}"
    return None if _has_snapshot(folder) else "it has no snapshot in its catalog"


def _has_snapshot(folder: Path) -> bool:
    if all(folder.joinpath(*parts).exists() for parts in _OLDER_FILES[:2]):
        return True
    catalog = folder / CATALOG_FOLDER
    return catalog.is_dir() and any(is_ordinal_name(each.name) for each in catalog.iterdir())


def _is_folder_of_index(parts: tuple[str, ...]) -> bool:
    return parts in _FOLDERS or _is_numbered(parts)


def _is_numbered(parts: tuple[str, ...]) -> bool:
    """Tell whether this is the folder of a segment or of phrase tables."""
    return bool(parts) and parts[:-1] in _NUMBERED and is_ordinal_name(parts[-1])


def _is_file_of_index(parts: tuple[str, ...]) -> bool:
    if parts in _FILES or (parts[:-1] == (CATALOG_FOLDER,) and _is_snapshot_name(parts[-1])):
        return True
    return _is_numbered(parts[:-1]) and parts[-1] in _NUMBERED[parts[:-2]]


def _is_snapshot_name(name: str) -> bool:
    return is_ordinal_name(name) or name.startswith(".partial-")


def _fail(error: OSError) -> NoReturn:
    raise error

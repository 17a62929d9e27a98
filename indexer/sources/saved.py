"""Datasets that the `datasets` library saved to disk: which of their files hold rows.

`Dataset.save_to_disk` writes Arrow files, `state.json`, which lists them, and `dataset_info.json`;
caches of the library may lie beside them. `DatasetDict.save_to_disk` writes one such folder for
each split, and `dataset_dict.json`, which lists those.
"""

import json
from collections.abc import Collection
from pathlib import Path, PurePath
from typing import Any, Final, TypeGuard

STATE_FILE: Final = "state.json"
INFO_FILE: Final = "dataset_info.json"
SPLITS_FILE: Final = "dataset_dict.json"


def is_saved_dataset(names: Collection[str]) -> bool:
    """Return whether a folder with these files is a dataset."""
    return STATE_FILE in names and INFO_FILE in names


def data_files(folder: Path) -> list[str]:
    """Return the names of a dataset's Arrow files, in order.

    Raises:
        OSError: `state.json` cannot be read.
        ValueError: it is not what the library writes.
    """
    listed = _entry(folder / STATE_FILE, "_data_files")
    names = [file.get("filename") for file in listed if isinstance(file, dict)]
    return [name for name in names if _is_plain(name)]


def split_folders(folder: Path) -> list[str]:
    """Return the names of the folders of a dataset's splits, in order.

    Raises:
        OSError: `dataset_dict.json` cannot be read.
        ValueError: it is not what the library writes.
    """
    return [name for name in _entry(folder / SPLITS_FILE, "splits") if _is_plain(name)]


def _entry(path: Path, key: str) -> list[Any]:
    try:
        value = json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError(path.name) from error
    entry = value.get(key) if isinstance(value, dict) else None
    if not isinstance(entry, list):
        raise ValueError(path.name)  # noqa: TRY004  (of the file, not of an argument)
    return entry


def _is_plain(name: object) -> TypeGuard[str]:
    """Return whether a name leads nowhere else than into its folder."""
    return isinstance(name, str) and name == PurePath(name).name and name not in {"", ".", ".."}

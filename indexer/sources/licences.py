"""Finds the licences of documents, and the files of saved datasets, which also state a licence.

A document's licence is the one declared at the top of its file. If there is none, it is the licence
in the nearest licence file at or above its folder.

In a dataset saved by the `datasets` library, only some files contain rows. `Dataset.save_to_disk`
writes Arrow files, a `state.json` that lists these files, and `dataset_info.json`. The library's
caches may be in the same folder. `DatasetDict.save_to_disk` writes one such folder for each split,
and a `dataset_dict.json` that lists the splits.
"""

import json
import os
import re
from collections.abc import Collection
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Any, Final, TypeGuard

from identify.identify import license_id

from indexer.sources.blocks import is_code

STATE_FILE: Final = "state.json"
INFO_FILE: Final = "dataset_info.json"
SPLITS_FILE: Final = "dataset_dict.json"


def is_saved_dataset(names: Collection[str]) -> bool:
    """Return whether a folder with these file names is a saved dataset."""
    return STATE_FILE in names and INFO_FILE in names


def data_files(folder: Path) -> list[str]:
    """Return the names of a dataset's Arrow files, in order.

    Raises:
        OSError: `state.json` cannot be read.
        ValueError: `state.json` is not in the library's format.
    """
    listed = _entry(folder / STATE_FILE, "_data_files")
    names = [file.get("filename") for file in listed if isinstance(file, dict)]
    return [name for name in names if _is_plain(name)]


def split_folders(folder: Path) -> list[str]:
    """Return the names of the folders of a dataset's splits, in order.

    Raises:
        OSError: `dataset_dict.json` cannot be read.
        ValueError: `dataset_dict.json` is not in the library's format.
    """
    return [name for name in _entry(folder / SPLITS_FILE, "splits") if _is_plain(name)]


def _entry(path: Path, key: str) -> list[Any]:
    try:
        value = json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError(path.name) from error
    entry = value.get(key) if isinstance(value, dict) else None
    if not isinstance(entry, list):
        raise ValueError(path.name)  # noqa: TRY004  (about the file, not an argument)
    return entry


def _is_plain(name: object) -> TypeGuard[str]:
    """Return whether a name stays within its folder."""
    return isinstance(name, str) and name == PurePath(name).name and name not in {"", ".", ".."}


_HEAD_CHARACTERS: Final = 2048
"""Number of characters to search for an SPDX tag: about forty lines at the top of the file."""

_TAG: Final = "SPDX-License-Identifier:"
# An expression ends where no operator follows, so the end of the comment is not part of it.
_EXPRESSION: Final = re.compile(
    rf"{_TAG}[ \t]*([\w.+:()-]+(?:[ \t]+(?:AND|OR|WITH)[ \t]+[\w.+:()-]+)*)"
)
_LICENCE_FILE: Final = re.compile(r"(?:(?:un)?licen[cs]e|copying)(?:[-_.].+)?", re.IGNORECASE)
_MAX_LICENCE_BYTES: Final = 1 << 17
"""Larger files are not licence texts. The GPL, a long one, has 35 KB."""


def declared_licence(text: str) -> str:
    """Return the SPDX expression in the first lines of a text; empty if there is none."""
    head = text[:_HEAD_CHARACTERS]
    found = _EXPRESSION.search(head) if _TAG in head else None
    return found[1].rstrip("-") if found else ""


def licence_in(value: object) -> str:
    """Return the licence in a field that holds one or several texts; empty if there is none."""
    if isinstance(value, list):
        return ", ".join(item for item in value if item and isinstance(item, str))
    return value if isinstance(value, str) else ""


class LicenceFiles:
    """Finds the nearest licence file at or above a folder, but not above the source.

    The nearest file counts, even if its text is not recognised. If a folder has several licence
    files, all recognised licences are returned, because only a person can tell how they combine.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._found: dict[Path, str] = {}
        self._recognised: dict[bytes, str] = {}

    def of(self, folder: Path) -> str:
        """Return SPDX identifiers for the files in a folder of the source; empty if unknown."""
        passed = []
        while (licence := self._own(folder)) is None:
            passed.append(folder)
            folder = folder.parent
        self._found.update(dict.fromkeys(passed, licence))
        return licence

    def _own(self, folder: Path) -> str | None:
        if folder not in self._found:
            own = self._licence_in(folder)
            if own is None and folder != self._source:
                return None
            self._found[folder] = own or ""
        return self._found[folder]

    def _licence_in(self, folder: Path) -> str | None:
        """Return the licences whose texts are in a folder; None if there is no licence file."""
        try:
            names = sorted(path.name for path in folder.iterdir())
        except OSError:
            return None
        if is_saved_dataset(names):
            return _licence_of_dataset(folder)
        named = [folder / name for name in names if _is_licence_file(name)]
        texts = [path for path in named if os.path.isfile(path)]  # noqa: PTH113  (an unreadable one counts as absent)
        if not texts:
            return None
        return ", ".join(dict.fromkeys(filter(None, map(self._recognise, texts))))

    def _recognise(self, path: Path) -> str:
        """Return the SPDX identifier of a licence text. Recognition takes milliseconds."""
        try:
            if path.stat().st_size > _MAX_LICENCE_BYTES:
                return ""
            digest = blake2b(path.read_bytes()).digest()
            if digest not in self._recognised:
                self._recognised[digest] = license_id(os.fspath(path)) or ""
        except (OSError, ValueError):
            return ""
        return self._recognised[digest]


def _is_licence_file(name: str) -> bool:
    return bool(_LICENCE_FILE.fullmatch(name)) and not is_code(PurePath(name).suffix.lower())


def _licence_of_dataset(folder: Path) -> str | None:
    try:
        info = json.loads((folder / INFO_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return licence_in(info.get("license")) or None if isinstance(info, dict) else None

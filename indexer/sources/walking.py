"""Listing what lies below a folder: in plain folders, in repositories, in saved datasets."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from indexer.errors import SourceError, reason_of
from indexer.format import CATALOG_FOLDER, SEGMENTS_FOLDER
from indexer.sources.blocks import name_of
from indexer.sources.git import GitError, TrackedFiles, is_repository
from indexer.sources.options import Git
from indexer.sources.patterns import EXCLUDED, Patterns
from indexer.sources.saved import SPLITS_FILE, data_files, is_saved_dataset, split_folders
from indexer.tally import Tally

_SKIPPED_FOLDERS: Final = frozenset({"__pycache__", "node_modules"})


def is_passed_over(folder: str) -> bool:
    """Return whether a folder of that name is hidden or a cache."""
    return folder.startswith(".") or folder in _SKIPPED_FOLDERS


class Walk:
    """Lists the files below a folder.

    In plain folders they come in order of names, those of a folder before those of its folders;
    in repositories in git's order; in saved datasets as these list them.
    """

    def __init__(self, patterns: Patterns, git: Git, tally: Tally) -> None:
        self._patterns = patterns
        self._git = TrackedFiles() if git == Git.AUTO else None
        self._tally = tally

    def below(self, source: Path) -> Iterator[str]:
        """Yield the files' paths below a folder, with slashes.

        Raises:
            SourceError: the folder is a repository, and git does not list its files.
        """
        waiting = [""]
        while waiting:  # not os.walk: before Python 3.12 it fails on a thousand levels
            prefix = waiting.pop()
            place = source / prefix
            names = self._tracked_in(place, is_source=not prefix)
            if names is None:
                folders, names = self._untracked_in(place)
                entered = [name for name in folders if self._enters(source, prefix + name)]
                waiting += [f"{prefix}{name}/" for name in reversed(entered)]
            yield from map(prefix.__add__, names)

    def _untracked_in(self, folder: Path) -> tuple[list[str], list[str]]:
        """Return the folders in a folder that matter, and its files."""
        folders, names = self._scanned(folder)
        if is_saved_dataset(names):
            return [], self._listed(folder, data_files)
        if SPLITS_FILE in names:
            return [name for name in self._listed(folder, split_folders) if name in folders], []
        return sorted(folders), sorted(names)

    def _scanned(self, folder: Path) -> tuple[list[str], list[str]]:
        """Return the names of a folder's folders, links to some left out, and of all else."""
        folders, names = [], []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if not entry.is_dir():
                        names.append(entry.name)
                    elif not entry.is_symlink():
                        folders.append(entry.name)
        except OSError as error:
            self._tally.skip(f"unreadable: {reason_of(error)}", name_of(folder))
        return folders, names

    def _tracked_in(self, folder: Path, *, is_source: bool) -> list[str] | None:
        """Return the tracked files of a repository; None if the folder is to be walked."""
        if self._git is None or not is_repository(folder) or not self._git.is_available(folder):
            return None
        try:
            return list(self._git.below(folder))
        except GitError as error:
            if is_source:
                raise SourceError(
                    f"git does not list the files of {name_of(folder)}: {error}: "
                    "mend that, or read it as a plain folder with --git never"
                ) from error
            self._tally.skip("unreadable: git does not list the files", name_of(folder))
            return []

    def _enters(self, source: Path, path: str) -> bool:
        if is_passed_over(path.rpartition("/")[2]):
            return False
        if self._patterns.excludes_folder(path):
            self._tally.skip(EXCLUDED, name_of(source / path))
            return False
        if _is_index(source / path):
            self._tally.skip("an index", name_of(source / path))
            return False
        return True

    def _listed(self, folder: Path, listing: Callable[[Path], list[str]]) -> list[str]:
        """Return what a saved dataset lists, or nothing if its list is damaged."""
        try:
            return listing(folder)
        except (OSError, ValueError):
            self._tally.skip("unreadable: damaged dataset", name_of(folder))
            return []


def _is_index(folder: Path) -> bool:
    """Tell whether a folder is an index: none is a source."""
    return (folder / CATALOG_FOLDER).is_dir() and (folder / SEGMENTS_FOLDER).is_dir()

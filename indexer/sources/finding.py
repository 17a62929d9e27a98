"""Finding the files of a source: in folders, in repositories, in saved datasets."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from indexer.errors import SourceError, reason_of
from indexer.sources.blocks import SourceFile
from indexer.sources.formats import Format, format_of, text_format_of
from indexer.sources.git import GitError, TrackedFiles, is_repository
from indexer.sources.licences import LicenceFiles
from indexer.sources.options import Git, SourceOptions
from indexer.sources.patterns import EXCLUDED, Patterns
from indexer.sources.saved import SPLITS_FILE, data_files, is_saved_dataset, split_folders
from indexer.tally import Tally

_SKIPPED_FOLDERS: Final = frozenset({"__pycache__", "node_modules"})


def name_of(path: Path) -> str:
    """Return a path as it is shown: with slashes, and with what is not UTF-8 replaced."""
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")


class Finder:
    """Finds files source by source, each file once; counts those that it passes over.

    In folders, files are chosen by suffix or by pattern; hidden files and folders, caches and
    symbolic links are passed over. A file that is named itself is taken whatever it is called.
    """

    def __init__(self, options: SourceOptions, tally: Tally) -> None:
        self._options = options
        self._patterns = Patterns(options.include, options.exclude)
        self._git = TrackedFiles()
        self._tally = tally
        self._seen: set[str] = set()

    def files_of(self, source: Path) -> Iterator[SourceFile]:
        """Yield the files of a source: in folders in order of names, in repositories in git's.

        Raises:
            SourceError: the source does not exist, or is neither a file nor a folder, or git does
                not list the files of the repository that it is.
        """
        try:
            mode = source.stat().st_mode
        except (OSError, ValueError) as error:
            said = reason_of(error)
            raise SourceError(f"cannot read the source {name_of(source)}: {said}") from error
        if stat.S_ISREG(mode):
            named = format_of(source.name) or text_format_of(source.name)
            yield from self._checked(source, named, "")
        elif stat.S_ISDIR(mode):
            yield from self._files_in(source)
        else:
            raise SourceError(f"the source {name_of(source)} is neither a file nor a folder")

    def _files_in(self, source: Path) -> Iterator[SourceFile]:
        licences = LicenceFiles(source)
        for path in self._candidates(source):
            if (form := self._wanted(path, source)) is not None:
                licence = self._options.licence or licences.of(path.parent)
                yield from self._checked(path, form, licence)

    def _candidates(self, source: Path) -> Iterator[Path]:
        for parent, folders, names in os.walk(source, onerror=self._count_error):
            place = Path(parent)
            tracked = self._tracked_in(place, source)
            if tracked is not None:
                folders.clear()
                yield from tracked
            elif is_saved_dataset(names):
                folders.clear()
                yield from (place / name for name in self._listed(place, data_files))
            elif SPLITS_FILE in names:
                folders[:] = [
                    name for name in self._listed(place, split_folders) if name in folders
                ]
            else:
                folders[:] = sorted(name for name in folders if self._enters(place / name, source))
                yield from (place / name for name in sorted(names))

    def _tracked_in(self, folder: Path, source: Path) -> list[Path] | None:
        """Return the tracked files of a repository; None if the folder is to be walked."""
        if self._options.git == Git.NEVER or not is_repository(folder):
            return None
        if not self._git.is_available(folder):
            return None
        try:
            return [folder / path for path in self._git.below(folder)]
        except GitError as error:
            if folder == source:
                raise SourceError(
                    f"git does not list the files of {name_of(folder)}: {error}: "
                    "mend that, or read it as a plain folder with --git never"
                ) from error
            self._tally.skip("unreadable: git does not list the files", name_of(folder))
            return []

    def _enters(self, folder: Path, source: Path) -> bool:
        if _is_passed_over(folder.name):
            return False
        if self._patterns.excludes_folder(folder.relative_to(source).as_posix()):
            self._tally.skip(EXCLUDED, name_of(folder))
            return False
        return True

    def _wanted(self, path: Path, source: Path) -> Format | None:
        """Return how a file is read, or None if a rule is against it."""
        relative = path.relative_to(source)
        if relative.name.startswith(".") or any(map(_is_passed_over, relative.parts[:-1])):
            return None
        form = format_of(path.name)
        if form is None and self._patterns.choose:
            form = text_format_of(path.name)
        objection = self._patterns.objection(relative.as_posix())
        if objection is None and form is None:
            objection = "unknown suffix"
        if objection is None and path.is_symlink():
            objection = "symbolic link"
        if objection is not None:
            self._tally.skip(objection, name_of(path))
            return None
        return form

    def _checked(self, path: Path, form: Format, licence: str) -> Iterator[SourceFile]:
        """Yield the file if it is one and is new: opening a pipe would wait for ever."""
        name = name_of(path)
        identity = os.path.realpath(path)
        if identity in self._seen:
            self._tally.skip("named twice", name)
            return
        self._seen.add(identity)
        try:
            status = path.stat()
        except OSError as error:
            self._tally.skip(f"unreadable: {reason_of(error)}", name)
            return
        if stat.S_ISREG(status.st_mode):
            yield SourceFile(path, name, form, self._options.licence or licence, status.st_size)
        else:
            self._tally.skip("not a regular file", name)

    def _listed(self, folder: Path, listing: Callable[[Path], list[str]]) -> list[str]:
        """Return what a saved dataset lists, or nothing if its list is damaged."""
        try:
            return listing(folder)
        except (OSError, ValueError):
            self._tally.skip("unreadable: damaged dataset", name_of(folder))
            return []

    def _count_error(self, error: OSError) -> None:
        place = name_of(Path(os.fsdecode(error.filename or "")))
        self._tally.skip(f"unreadable: {reason_of(error)}", place)


def _is_passed_over(folder: str) -> bool:
    return folder.startswith(".") or folder in _SKIPPED_FOLDERS

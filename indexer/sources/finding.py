"""Finds the files of a source: walks folders, asks git, and applies patterns and suffixes."""

import codecs
import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from indexer.build_report import BuildTally
from indexer.errors import IndexerError, SourceError, reason_of
from indexer.format.names import CATALOG_FOLDER, SEGMENTS_FOLDER
from indexer.sources.blocks import Format, SourceFile, format_of, name_of, text_format_of
from indexer.sources.licences import (
    SPLITS_FILE,
    LicenceFiles,
    data_files,
    is_saved_dataset,
    split_folders,
)
from indexer.sources.source_options import EXCLUDED, NOT_INCLUDED, Git, Patterns, SourceOptions

_UNKNOWN_SUFFIX: Final = "not text by its first bytes"
_SYMBOLIC_LINK: Final = "symbolic link"
_REMEDIES: Final = {
    NOT_INCLUDED: "add a pattern with --include",
    _SYMBOLIC_LINK: "name the file that it points to",
}
_SUBMODULE_MODE: Final = b"160000"
_POINTERS: Final = frozenset(
    {
        "GIT_COMMON_DIR",
        "GIT_DIR",
        "GIT_INDEX_FILE",
        "GIT_NAMESPACE",
        "GIT_OBJECT_DIRECTORY",
        "GIT_PREFIX",
        "GIT_WORK_TREE",
    }
)
"""Environment variables that point git to a different repository, for instance inside a hook."""

_logger = logging.getLogger(__name__)


class GitError(IndexerError):
    """Git failed to list the tracked files."""


def is_repository(folder: Path) -> bool:
    """Return whether a folder is the top of a git work tree."""
    inner = folder / ".git"
    return os.path.isfile(inner) or os.path.lexists(inner / "HEAD")  # noqa: PTH113  (an unreadable folder is no error here)


class TrackedFiles:
    """Asks git for tracked files; logs once if git is not installed."""

    def __init__(self) -> None:
        self._program = shutil.which("git")
        self._noted = False

    def is_available(self, folder: Path) -> bool:
        """Return whether git is installed. If not, log that untracked files are read as well."""
        if self._program is None and not self._noted:
            self._noted = True
            _logger.warning(
                "git is not installed: untracked files of %s are read as well", folder.as_posix()
            )
        return self._program is not None

    def below(self, folder: Path) -> Iterator[str]:
        """Yield the tracked files of a repository and of its checked-out submodules.

        Yields:
            Paths relative to the folder, in git's order, which compares bytes.

        Raises:
            GitError: git reports an error, or the repository is damaged.
        """
        modes: dict[str, bytes] = {}
        for entry in self._listed(folder).split(b"\0"):
            mode, _, path = entry.partition(b"\t")
            if path:  # during a merge conflict, a path is listed several times
                modes[os.fsdecode(path)] = mode
        for name, mode in modes.items():
            if not mode.startswith(_SUBMODULE_MODE):
                yield name
            elif is_repository(folder / name):
                yield from (f"{name}/{inner}" for inner in self.below(folder / name))

    def _listed(self, folder: Path) -> bytes:
        # A repository's configuration can name a program to run as file system monitor.
        command = [self._program or "git", "-C", os.fspath(folder), "-c", "core.fsmonitor=false"]
        try:
            done = subprocess.run(  # noqa: S603  (git, on a folder that the user named)
                [*command, "ls-files", "-z", "--cached", "--stage"],
                capture_output=True,
                check=True,
                env=_environment(folder),
                stdin=subprocess.DEVNULL,
            )
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip().splitlines()
            raise GitError(said[0] if said else f"git ended with {error.returncode}") from error
        except OSError as error:
            raise GitError(reason_of(error)) from error
        return done.stdout


def _environment(folder: Path) -> dict[str, str]:
    """Return an environment in which git looks for a repository only in this folder."""
    kept = {key: value for key, value in os.environ.items() if key not in _POINTERS}
    return kept | {"LC_ALL": "C", "GIT_CEILING_DIRECTORIES": os.path.realpath(folder.parent)}


_SKIPPED_FOLDERS: Final = frozenset({"__pycache__", "node_modules"})


def is_passed_over(folder: str) -> bool:
    """Return whether a folder's name marks it as hidden or as a cache."""
    return folder.startswith(".") or folder in _SKIPPED_FOLDERS


class Walk:
    """Lists the files below a folder.

    In a plain folder, files come in order of names, before the files of subfolders. In a
    repository, files come in git's order. In a saved dataset, files come in their listed order.
    """

    def __init__(self, patterns: Patterns, git: Git, tally: BuildTally) -> None:
        self._patterns = patterns
        self._git = TrackedFiles() if git == Git.AUTO else None
        self._tally = tally

    def below(self, source: Path) -> Iterator[str]:
        """Yield the paths of files below a folder, with slashes.

        Raises:
            SourceError: the folder is a repository, and git cannot list its files.
        """
        waiting = [""]
        while waiting:  # not os.walk, which fails at a thousand levels before Python 3.12
            prefix = waiting.pop()
            place = source / prefix
            names = self._tracked_in(place, is_source=not prefix)
            if names is None:
                folders, names = self._untracked_in(place)
                entered = [name for name in folders if self._enters(source, prefix + name)]
                waiting += [f"{prefix}{name}/" for name in reversed(entered)]
            yield from map(prefix.__add__, names)

    def _untracked_in(self, folder: Path) -> tuple[list[str], list[str]]:
        """Return the subfolders of a folder that may have source files, and the folder's files."""
        folders, names = self._scanned(folder)
        if is_saved_dataset(names):
            return [], self._listed(folder, data_files)
        if SPLITS_FILE in names:
            return [name for name in self._listed(folder, split_folders) if name in folders], []
        return sorted(folders), sorted(names)

    def _scanned(self, folder: Path) -> tuple[list[str], list[str]]:
        """Return the names of subfolders that are not links, and the names of all files."""
        folders, names = [], []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if not entry.is_dir():
                        names.append(entry.name)
                    elif not entry.is_symlink():
                        folders.append(entry.name)
        except OSError as error:
            self._tally.drop(f"unreadable: {reason_of(error)}", name_of(folder))
        return folders, names

    def _tracked_in(self, folder: Path, *, is_source: bool) -> list[str] | None:
        """Return the tracked files of a repository, or None if the folder should be walked."""
        if self._git is None or not is_repository(folder) or not self._git.is_available(folder):
            return None
        try:
            return list(self._git.below(folder))
        except GitError as error:
            if is_source:
                raise SourceError(
                    f"git does not list the files of {name_of(folder)}: {error}: "
                    "fix that, or read it as a plain folder with --git never"
                ) from error
            self._tally.drop("unreadable: git does not list the files", name_of(folder))
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
        """Return the entries that a saved dataset lists, or nothing if its list is damaged."""
        try:
            return listing(folder)
        except (OSError, ValueError):
            self._tally.drop("unreadable: damaged dataset", name_of(folder))
            return []


def _is_index(folder: Path) -> bool:
    """Return whether a folder is an index, which is never a source."""
    return all(map(os.path.isdir, (folder / CATALOG_FOLDER, folder / SEGMENTS_FOLDER)))


_LOOKED_AT_BYTES: Final = 8000
"""Bytes to check in a file with unknown suffix, as git does; text is UTF-8 without NUL."""


def _looks_like_text(path: Path) -> bool:
    """Return whether a regular file starts with text; false if it is unreadable."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        with path.open("rb") as file:
            head = file.read(_LOOKED_AT_BYTES)
    except OSError:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


class Finder:
    """Finds the files of all sources, each file once, and counts skipped files.

    In folders, suffixes or patterns select files. Hidden files and folders, caches and symbolic
    links are skipped. A file that the user names directly is always read.
    """

    def __init__(self, options: SourceOptions, tally: BuildTally) -> None:
        self._licence = options.licence
        self._patterns = Patterns(options.include, options.exclude)
        self._walk = Walk(self._patterns, options.git, tally)
        self._tally = tally
        self._seen: set[str] = set()
        self._real: dict[Path, str] = {}

    def files_of(self, source: Path) -> Iterator[SourceFile]:
        """Yield the files of a source.

        Raises:
            SourceError: the source does not exist, is neither a file nor a folder, or is a
                repository whose files git cannot list.
        """
        try:
            mode = source.stat().st_mode
        except (OSError, ValueError) as error:
            said = reason_of(error)
            raise SourceError(f"cannot read the source {name_of(source)}: {said}") from error
        if stat.S_ISREG(mode):
            named = format_of(source.name) or text_format_of(source.name)
            if self._is_new(source, os.path.realpath(source)):
                yield from self._checked(source, named, self._licence)
        elif stat.S_ISDIR(mode):
            yield from self._files_in(source)
        else:
            raise SourceError(f"the source {name_of(source)} is neither a file nor a folder")

    def _files_in(self, source: Path) -> Iterator[SourceFile]:
        licences = LicenceFiles(source)
        for relative in self._walk.below(source):
            path = source / relative
            form = self._wanted(path, relative)
            if form is not None and self._is_new(path, self._identity(path)):
                yield from self._checked(path, form, self._licence or licences.of(path.parent))

    def _wanted(self, path: Path, relative: str) -> Format | None:
        """Return the format of a file, or None if a rule excludes the file."""
        *folders, name = relative.split("/")
        if name.startswith(".") or any(map(is_passed_over, folders)):
            return None
        form = format_of(name)
        if form is None and self._patterns.choose:
            form = text_format_of(name)
        objection = self._patterns.objection(relative)
        if objection is None and form is None:
            if _looks_like_text(path):
                self._tally.by_content[path.suffix or name] += 1
                form = text_format_of(name)
            else:
                objection = _UNKNOWN_SUFFIX
        if objection is None and os.path.islink(path):  # noqa: PTH114  (an unreadable folder is no error here)
            objection = _SYMBOLIC_LINK
        if objection is not None:
            self._tally.skip(objection, name_of(path), _REMEDIES.get(objection, ""))
            return None
        return form

    def _identity(self, path: Path) -> str:
        """Return the real path of a file that is not itself a symbolic link."""
        folder = path.parent
        if folder not in self._real:
            self._real[folder] = os.path.realpath(folder)
        return os.path.join(self._real[folder], path.name)  # noqa: PTH118  (a tenth of the time)

    def _is_new(self, path: Path, identity: str) -> bool:
        if identity in self._seen:
            self._tally.skip("named twice", name_of(path))
            return False
        self._seen.add(identity)
        return True

    def _checked(self, path: Path, form: Format, licence: str) -> Iterator[SourceFile]:
        """Yield the file if it is a regular file. Opening a pipe could block forever."""
        name = name_of(path)
        try:
            status = path.stat()
        except OSError as error:
            self._tally.drop(f"unreadable: {reason_of(error)}", name)
            return
        if stat.S_ISREG(status.st_mode):
            yield SourceFile(path, name, form, licence, status.st_size)
        else:
            self._tally.skip("not a regular file", name)

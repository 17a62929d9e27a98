"""Finding the files of a source: which of those that are there are wanted."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from indexer.errors import SourceError, reason_of
from indexer.sources.blocks import SourceFile, name_of
from indexer.sources.formats import Format, format_of, text_format_of
from indexer.sources.licences import LicenceFiles
from indexer.sources.options import SourceOptions
from indexer.sources.patterns import Patterns
from indexer.sources.walking import Walk, is_passed_over
from indexer.tally import Tally


class Finder:
    """Finds files source by source, each file once; counts those that it passes over.

    In folders, files are chosen by suffix or by pattern; hidden files and folders, caches and
    symbolic links are passed over. A file that is named itself is taken whatever it is called.
    """

    def __init__(self, options: SourceOptions, tally: Tally) -> None:
        self._licence = options.licence
        self._patterns = Patterns(options.include, options.exclude)
        self._walk = Walk(self._patterns, options.git, tally)
        self._tally = tally
        self._seen: set[str] = set()
        self._real: dict[Path, str] = {}

    def files_of(self, source: Path) -> Iterator[SourceFile]:
        """Yield the files of a source.

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
        """Return how a file is read, or None if a rule is against it."""
        *folders, name = relative.split("/")
        if name.startswith(".") or any(map(is_passed_over, folders)):
            return None
        form = format_of(name)
        if form is None and self._patterns.choose:
            form = text_format_of(name)
        objection = self._patterns.objection(relative)
        if objection is None and form is None:
            objection = "unknown suffix"
        if objection is None and path.is_symlink():
            objection = "symbolic link"
        if objection is not None:
            self._tally.skip(objection, name_of(path))
            return None
        return form

    def _identity(self, path: Path) -> str:
        """Return the real path of a file that is no symbolic link itself."""
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
        """Yield the file if it is one: opening a pipe would wait for ever."""
        name = name_of(path)
        try:
            status = path.stat()
        except OSError as error:
            self._tally.skip(f"unreadable: {reason_of(error)}", name)
            return
        if stat.S_ISREG(status.st_mode):
            yield SourceFile(path, name, form, licence, status.st_size)
        else:
            self._tally.skip("not a regular file", name)

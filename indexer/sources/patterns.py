"""Which files of a folder are wanted, by patterns on the command line."""

from collections.abc import Sequence
from typing import Final

from pathspec import GitIgnoreSpec

from indexer.errors import SourceError

EXCLUDED: Final = "excluded by a pattern"
NOT_INCLUDED: Final = "not included by a pattern"


class Patterns:
    """What to include and to exclude, in the patterns of `.gitignore`.

    Raises:
        SourceError: a pattern is none.
    """

    def __init__(self, include: Sequence[str], exclude: Sequence[str]) -> None:
        self._include = _compiled("--include", include) if include else None
        self._exclude = _compiled("--exclude", exclude)

    @property
    def choose(self) -> bool:
        """Whether files are taken because a pattern says so, not because of their suffix."""
        return self._include is not None

    def excludes_folder(self, path: str) -> bool:
        """Return whether nothing below a folder is wanted.

        Args:
            path: below the source, with slashes.
        """
        return self._exclude.match_file(f"{path}/")

    def objection(self, path: str) -> str | None:
        """Return why a file is not wanted, or None if it is."""
        if self._exclude.match_file(path):
            return EXCLUDED
        if self._include is not None and not self._include.match_file(path):
            return NOT_INCLUDED
        return None


def _compiled(option: str, patterns: Sequence[str]) -> GitIgnoreSpec:
    try:
        return GitIgnoreSpec.from_lines(patterns)
    except ValueError as error:
        raise SourceError(
            f"{option}: {error}: give patterns like those in .gitignore, such as '*.md' or 'docs/'"
        ) from error

"""Which files of a git repository are tracked."""

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from indexer.errors import IndexerError, reason_of

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
"""Variables that point git to another repository than that of the folder, as in a hook."""

_logger = logging.getLogger(__name__)


class GitError(IndexerError):
    """Git does not say which files are tracked."""


def is_repository(folder: Path) -> bool:
    """Return whether a folder is the top of a work tree: its `.git` is a file or has a head."""
    inner = folder / ".git"
    return inner.is_file() or os.path.lexists(inner / "HEAD")


class TrackedFiles:
    """Asks git which files are tracked; notes once if there is no git to ask."""

    def __init__(self) -> None:
        self._program = shutil.which("git")
        self._noted = False

    def is_available(self, folder: Path) -> bool:
        """Return whether git is installed; notes that untracked files are read as well if not."""
        if self._program is None and not self._noted:
            self._noted = True
            _logger.warning(
                "git is not installed: of %s untracked files are read as well", folder.as_posix()
            )
        return self._program is not None

    def below(self, folder: Path) -> Iterator[str]:
        """Yield the tracked files of a repository and of its submodules that are checked out.

        Yields:
            Paths below the folder, in git's order: that of their bytes.

        Raises:
            GitError: git refuses, or the repository is damaged.
        """
        modes: dict[str, bytes] = {}
        for entry in self._listed(folder).split(b"\0"):
            mode, _, path = entry.partition(b"\t")
            if path:  # while a merge is in conflict, a path is listed several times
                modes[os.fsdecode(path)] = mode
        for name, mode in modes.items():
            if not mode.startswith(_SUBMODULE_MODE):
                yield name
            elif is_repository(folder / name):
                yield from (f"{name}/{inner}" for inner in self.below(folder / name))

    def _listed(self, folder: Path) -> bytes:
        # A repository's own configuration could name a program to be run as its monitor.
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
    """Return an environment in which git looks at the folder, and not at those above it."""
    kept = {key: value for key, value in os.environ.items() if key not in _POINTERS}
    return kept | {"LC_ALL": "C", "GIT_CEILING_DIRECTORIES": os.path.realpath(folder.parent)}

"""Starting a command line before its package is imported, and finding plugins.

This module uses only the standard library, so that it can say which package to install. A plugin is
a folder in `plugins` of its package, and an installation may lack it. Core code imports no plugin
directly: it asks for one by name if a request needs it.
"""

import errno
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from indexer.errors import MissingPluginError

INTERRUPTED: Final = 130
"""Exit status of a command that Ctrl-C ended, as in shells: 128 plus the signal's number."""

TERMINATED: Final = 143
"""The same for SIGTERM, which `kill`, a supervisor or a shutdown sends."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PACKAGES: Final = ("indexer", "retriever", "decoder")


class Flag(NamedTuple):
    """In the annotation of a setting: it is a command-line flag; see `indexer.flags`.

    Attributes:
        help: help text, in sentences.
        metavar: placeholder of its value.
        least: lower bound of a number.
        most: upper bound of a number.
    """

    help: str
    metavar: str | None = None
    least: float | None = None
    most: float | None = None


FIELD_HELP: Final = (
    "Where a record has its text or its turns: a key or column, or an expression of JMESPath, such "
    "as 'data.answer' or '{prompt: data.question, output: data.answer}'. Records without it are "
    "read in the shapes that are known."
)
"""Help of `--field` in all commands that read records."""


class Command(NamedTuple):
    """A command, as known before anything is loaded.

    Attributes:
        name: word after `foredraft`.
        group: group in the help.
        module: module with a function `main` that runs the command in `sys.argv`.
        extra: extra to install if a library is missing.
        help: one-line description.
        plugins: packages of plugins that it requires.
    """

    name: str
    group: str
    module: str
    extra: str
    help: str
    plugins: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """The package that contains the command."""
        return self.module.partition(".")[0]

    def absent(self) -> str | None:
        """Return a required plugin that is not installed; `None` if all are."""
        return _first_absent(self.plugins)


def is_installed(plugin: str) -> bool:
    """Return whether a plugin's package, `decoder.plugins.trace`, exists, without loading it."""
    try:
        found = find_spec(plugin)
    except ModuleNotFoundError:  # not even the folder of plugins exists
        return False
    return found is not None and found.origin is not None  # an empty folder has no origin


def _first_absent(plugins: Iterable[str]) -> str | None:
    return next((each for each in plugins if not is_installed(each)), None)


def plugged(module: str, asked: str, *, needs: tuple[str, ...] = ()) -> Any:
    """Load a module of a plugin.

    Args:
        module: full name of the module, `decoder.plugins.trace.trace`.
        asked: option or argument that needs it, for the error.
        needs: further plugins that it needs.

    Raises:
        MissingPluginError: the plugin, or one that it needs, is not part of this installation.
    """
    absent = _first_absent((".".join(module.split(".")[:3]), *needs))
    if absent is not None:
        raise MissingPluginError(f"{asked} needs {absent}, which is not part of this installation")
    return import_module(module)


def launch(module: str, extra: str) -> None:
    """Import commands and run them; Ctrl-C ends them at any time without a message.

    `--version` by itself is answered here, immediately and even if libraries are missing. Log
    messages of the packages from INFO up go to standard error, one line each.

    Args:
        module: module with a function `main`.
        extra: extra to install if a library is missing.
    """
    # Not an exception: libraries turn exceptions into their own errors while they are imported.
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    _silence_libraries()
    if sys.argv[1:] == ["--version"]:
        print(version_line())  # noqa: T201  (the output of a command)
        return
    try:
        commands = import_module(module)
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is missing: run `pip install 'foredraft[{extra}]'`")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    show_messages()
    try:
        with whole_output():
            commands.main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _silence_libraries() -> None:
    """Suppress warnings that libraries print for developers, so that they do not mix with answers.

    `python -W`, `PYTHONWARNINGS` and `TRANSFORMERS_VERBOSITY` turn them on again.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        os.environ["PYTHONWARNINGS"] = "ignore"  # for child processes
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@contextmanager
def whole_output() -> Iterator[None]:
    """Exit with status 1 if any output of the block cannot be written, up to its last line.

    A reader that is gone, such as `head`, is not reported as an error.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # None if it was closed from the start
                sys.stdout.flush()
    except OSError as error:
        is_gone = isinstance(error, BrokenPipeError)
        if not is_gone and (error.errno not in _FULL or error.filename is not None):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or exit fails too
        sys.exit(1 if is_gone else f"error: the output cannot be written: {error.strerror}")


def version_line() -> str:
    """Return the program's name and version, as `--version` prints them."""
    try:
        return f"foredraft {version('foredraft')}"
    except PackageNotFoundError:
        return "foredraft, not installed: run `pip install .`"


def show_messages() -> None:
    """Print log messages of the packages from INFO up to standard error."""
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers = [_StandardError()]


@contextmanager
def errors_in_one_line(*foreseen: type[BaseException]) -> Iterator[None]:
    """Exit with status 1 if the block, or the decorated function, raises a foreseen error.

    Args:
        foreseen: errors that say what to do; each is printed to standard error as one line.
    """
    try:
        yield
    except foreseen as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)  # noqa: T201  (as above)
        raise SystemExit(1) from error


class _StandardError(logging.Handler):
    """Prints to the current `sys.stderr`, which a progress bar may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)  # noqa: T201  (the output of a command)

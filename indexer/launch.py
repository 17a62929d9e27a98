"""Starts a command line before its package is imported, and finds plugins.

This module uses only the standard library. So it can say which package to install if one is
missing. A plugin is a folder in its package's `plugins` folder. An installation may lack it, so the
core never imports a plugin directly. It loads a plugin by name when a request needs it.
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
"""Exit status after Ctrl-C, as in shells: 128 plus the signal's number."""

TERMINATED: Final = 143
"""Exit status after SIGTERM, which `kill`, a supervisor or a shutdown sends."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PACKAGES: Final = ("indexer", "retriever", "decoder")


class Flag(NamedTuple):
    """Marks a setting as a command-line flag, in its annotation; see `indexer.flags`.

    Attributes:
        help: help text, in sentences.
        metavar: placeholder of the value.
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
    "read in one of the known shapes."
)
"""Help of `--field` in all commands that read records."""


class Command(NamedTuple):
    """A command's description, available before its module is loaded.

    Attributes:
        name: word after `foredraft`.
        group: group in the help.
        module: module with a function `main`, which runs the command in `sys.argv`.
        extra: extra to install if a library is missing.
        help: one-line description.
        plugins: packages of the plugins that the command requires.
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
        """Return a required plugin that is not installed, or `None` if all are."""
        return _first_absent(self.plugins)


def is_installed(plugin: str) -> bool:
    """Return whether a plugin's package exists, without loading it: `decoder.plugins.trace`."""
    try:
        found = find_spec(plugin)
    except ModuleNotFoundError:  # not even the `plugins` folder exists
        return False
    return found is not None and found.origin is not None  # an empty folder has no origin


def _first_absent(plugins: Iterable[str]) -> str | None:
    return next((each for each in plugins if not is_installed(each)), None)


def plugged(module: str, asked: str, *, needs: tuple[str, ...] = ()) -> Any:
    """Load a module of a plugin.

    Args:
        module: full name of the module: `decoder.plugins.trace.trace`.
        asked: option or argument that needs the plugin, named in the error.
        needs: further plugins that it needs.

    Raises:
        MissingPluginError: the plugin, or another one that it needs, is not installed.
    """
    absent = _first_absent((".".join(module.split(".")[:3]), *needs))
    if absent is not None:
        raise MissingPluginError(f"{asked} needs {absent}, which is not part of this installation")
    return import_module(module)


def launch(module: str, extra: str) -> None:
    """Import a command's module and run it. Ctrl-C ends it at any time without a message.

    `--version` alone is answered here. That is immediate and works even if libraries are missing.
    Log messages of level INFO and above go to standard error, one line each.

    Args:
        module: module with a function `main`.
        extra: extra to install if a library is missing.
    """
    # Not an exception: while a library is imported, it may turn exceptions into its own errors.
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
    """Suppress library warnings meant for developers, so that they do not mix with the output.

    `python -W`, `PYTHONWARNINGS` and `TRANSFORMERS_VERBOSITY` turn them on again.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        os.environ["PYTHONWARNINGS"] = "ignore"  # for child processes
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@contextmanager
def whole_output() -> Iterator[None]:
    """Exit with status 1 if any of the block's output, up to the last line, cannot be written.

    If the process that reads the output has ended, as `head` does early, no error is printed.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # None if it was closed before the start
                sys.stdout.flush()
    except OSError as error:
        is_gone = isinstance(error, BrokenPipeError)
        if not is_gone and (error.errno not in _FULL or error.filename is not None):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise exit fails too
        sys.exit(1 if is_gone else f"error: the output cannot be written: {error.strerror}")


def version_line() -> str:
    """Return the program's name and version, as `--version` prints them."""
    try:
        return f"foredraft {version('foredraft')}"
    except PackageNotFoundError:
        return "foredraft, not installed: run `pip install .`"


def show_messages() -> None:
    """Print the packages' log messages of level INFO and above to standard error."""
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers = [_StandardError()]


@contextmanager
def errors_in_one_line(*foreseen: type[BaseException]) -> Iterator[None]:
    """Exit with status 1 if the block, or the decorated function, raises an expected error.

    Args:
        foreseen: expected errors, whose messages say what to do. Each is printed as one line on
            standard error.
    """
    try:
        yield
    except foreseen as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)  # noqa: T201  (as above)
        raise SystemExit(1) from error


class _StandardError(logging.Handler):
    """Prints to the current value of `sys.stderr`, which a progress bar may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)  # noqa: T201  (the output of a command)

"""Starting a command line before the package that does the work is imported, and finding plugins.

Loads the standard library only, so that it can tell which package to install. A plugin is a folder
in `plugins` of its package that an installation may lack. Core imports none: it asks for one by
name where a user's wish needs it.
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
"""The status of a command that Ctrl-C ended, as shells give it: 128 plus the signal's number."""

TERMINATED: Final = 143
"""The same for the signal that `kill`, a supervisor or a shutdown sends."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PACKAGES: Final = ("indexer", "retriever", "decoder")


class Flag(NamedTuple):
    """In the annotation of a setting: it is a flag of commands; see `indexer.flags`.

    Attributes:
        help: what it says, in sentences.
        metavar: the placeholder of its value.
        least: bound of a number.
        most: the same.
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
"""What `--field` says, wherever records are read."""


class Command(NamedTuple):
    """A command, as the program knows it before it loads anything.

    Attributes:
        name: the word after `foredraft`.
        group: under which the help shows it.
        module: has a function `main` that runs the command that `sys.argv` names.
        extra: what to install where a library is missing.
        help: what it does, in a line.
        plugins: packages of plugins that it can't do without.
    """

    name: str
    group: str
    module: str
    extra: str
    help: str
    plugins: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """The package that has it."""
        return self.module.partition(".")[0]

    def absent(self) -> str | None:
        """Return the plugin that it needs and that is not installed; `None` if all are."""
        return _first_absent(self.plugins)


def is_installed(plugin: str) -> bool:
    """Return whether a plugin's package, `decoder.plugins.trace`, is there, without loading it."""
    try:
        found = find_spec(plugin)
    except ModuleNotFoundError:  # not even the folder that holds the plugins
        return False
    return found is not None and found.origin is not None  # an empty folder has none


def _first_absent(plugins: Iterable[str]) -> str | None:
    return next((each for each in plugins if not is_installed(each)), None)


def plugged(module: str, asked: str, *, needs: tuple[str, ...] = ()) -> Any:
    """Load a module of a plugin.

    Args:
        module: its full name, `decoder.plugins.trace.trace`.
        asked: the option or argument that needs it, for the error.
        needs: plugins that it needs itself.

    Raises:
        MissingPluginError: the plugin, or one that it needs, is not part of this installation.
    """
    absent = _first_absent((".".join(module.split(".")[:3]), *needs))
    if absent is not None:
        raise MissingPluginError(f"{asked} needs {absent}, which is not part of this installation")
    return import_module(module)


def launch(module: str, extra: str) -> None:
    """Import commands and run them; Ctrl-C ends them at any time without a message.

    `--version` alone is answered here, at once and even if libraries are missing. Log messages of
    the packages from INFO on go to standard error, a line each.

    Args:
        module: has a function `main`.
        extra: what to install where a library is missing.
    """
    # Not an exception: libraries turn those into errors of their own while they are imported.
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
    """Keep warnings that libraries print for developers from landing in an answer.

    `python -W`, `PYTHONWARNINGS` and `TRANSFORMERS_VERBOSITY` bring them back.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        os.environ["PYTHONWARNINGS"] = "ignore"  # in processes that this one starts
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@contextmanager
def whole_output() -> Iterator[None]:
    """End with status 1 where what the block prints cannot be written, to its last line.

    A reader that has gone, as `head` does, is no error to be told.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # it is where it was closed from the start
                sys.stdout.flush()
    except OSError as error:
        is_gone = isinstance(error, BrokenPipeError)
        if not is_gone and (error.errno not in _FULL or error.filename is not None):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or it fails again at exit
        sys.exit(1 if is_gone else f"error: the output cannot be written: {error.strerror}")


def version_line() -> str:
    """Return the program's name and version, as `--version` prints them."""
    try:
        return f"foredraft {version('foredraft')}"
    except PackageNotFoundError:
        return "foredraft, not installed: run `pip install .`"


def show_messages() -> None:
    """Print log messages of the packages from INFO on to standard error."""
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers = [_StandardError()]


@contextmanager
def errors_in_one_line(*foreseen: type[BaseException]) -> Iterator[None]:
    """End with status 1 where the block, or the function that this decorates, fails as foreseen.

    Args:
        foreseen: errors that say what to do; they go to standard error, each as a line.
    """
    try:
        yield
    except foreseen as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)  # noqa: T201  (as above)
        raise SystemExit(1) from error


class _StandardError(logging.Handler):
    """Prints to the present `sys.stderr`, which a progress bar may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)  # noqa: T201  (the output of a command)

"""Starting a command line, before the package that does the work is imported.

Loads the standard library only, so that it can tell which package to install.
"""

import errno
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Final

INTERRUPTED: Final = 130
"""The status of a command that Ctrl-C ended, as shells give it: 128 plus the signal's number."""

TERMINATED: Final = 143
"""The same for the signal that `kill`, a supervisor or a shutdown sends."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PACKAGES: Final = ("indexer", "retriever", "decoder")


def launch(package: str, extra: str) -> None:
    """Import a package's commands and run them; Ctrl-C ends them at any time without a message.

    `--version` alone is answered here, at once and even if libraries are missing. Log messages of
    the packages from INFO on go to standard error, a line each.

    Args:
        package: has a module `commands` with a function `main`.
        extra: what to install where a library is missing.
    """
    # Not an exception: libraries turn those into errors of their own while they are imported.
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    _silence_libraries()
    if sys.argv[1:] == ["--version"]:
        print(version_line())  # noqa: T201  (the output of a command)
        return
    try:
        commands = import_module(f"{package}.commands")
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

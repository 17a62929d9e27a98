"""Writes plots to files with matplotlib."""

from pathlib import Path
from typing import Any, Final

from decoder.errors import PlotError

SUFFIXES: Final = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Refuse a plot that cannot be drawn, before the work starts.

    Raises:
        PlotError: the file's suffix is not in `SUFFIXES`, or the folder or matplotlib is missing.
    """
    if path.suffix not in SUFFIXES:
        raise PlotError(
            f"--plot {path}: a plot is drawn as {' or '.join(SUFFIXES)}: use one of these suffixes"
        )
    if not path.parent.is_dir():
        raise PlotError(f"--plot {path}: there is no folder {path.parent}: create it first")
    figure_class()


def figure_class() -> Any:
    """Return matplotlib's figure class.

    Raises:
        PlotError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (optional, and takes a second)
    except ModuleNotFoundError as error:
        raise PlotError(
            f"--plot: {error.name} is missing: run `pip install 'foredraft[bench]'`"
        ) from error
    return Figure


def save(figure: Any, path: Path) -> None:
    """Write a matplotlib figure to a file.

    Raises:
        PlotError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise PlotError(f"{path} cannot be written: {error.strerror}") from error

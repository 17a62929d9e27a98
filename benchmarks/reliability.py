"""Draws how often nodes of each probability were accepted, from reports of replays.

The reports are what `foredraft replay TRACES --calibration --json` prints. Where
probabilities mean what they say, a line lies on the diagonal.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from numpy.typing import NDArray

from retriever.errors import RetrieverError

_LEAST: Final = 1e-3
_FIGURES: Final = ("probability", "accepted", "nodes")


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What is drawn of a report.

    Attributes:
        ece: expected calibration error.
        points: float64[bins, 3], mean probability, share accepted and nodes of each bin.
    """

    ece: float
    points: NDArray[np.float64]


class ReportError(RetrieverError):
    """A file is not the report of a replay with its calibration."""


def main(
    report: Annotated[
        list[str], typer.Argument(help="NAME=FILE, what a replay printed with --calibration.")
    ],
    output: Annotated[Path, typer.Option(help="Where to draw.")] = Path("reliability.png"),
) -> None:
    """Draw a reliability diagram, a line for each report."""
    try:
        draw(dict(map(_named, report)), output)
    except RetrieverError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    print(output)


def _named(text: str) -> tuple[str, Calibrated]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise ReportError(f"a report is NAME=FILE, not {text!r}")
    return name, read(Path(path))


def read(path: Path) -> Calibrated:
    """Return the calibration of a report.

    Raises:
        ReportError: the file cannot be read or has none.
    """
    try:
        calibration = json.loads(path.read_text())["calibration"]
        points = [[each[name] for name in _FIGURES] for each in calibration["bins"]]
        return Calibrated(float(calibration["ece"]), np.array(points, float).reshape(-1, 3))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(
            f"{path} has no calibration ({error!r}): it takes what "
            "`foredraft replay TRACES --calibration --json` prints"
        ) from error


def draw(calibrations: Mapping[str, Calibrated], path: Path) -> None:
    """Draw share accepted against mean probability, by name, with how many nodes there are below.

    Raises:
        ReportError: the picture cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  (loading it takes a second)

    figure = Figure(figsize=(6, 7), layout="constrained")
    axes, counts = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    axes.plot([_LEAST, 1], [_LEAST, 1], color="grey", linestyle=":")
    for name, calibration in calibrations.items():
        given, accepted, nodes = calibration.points.T
        axes.plot(given, accepted, marker="o", label=f"{name}, error {calibration.ece:.4f}")
        counts.plot(given, nodes, marker=".")
    axes.set(xscale="log", yscale="log", ylabel="share accepted", ylim=(_LEAST, 1.1))
    counts.set(yscale="log", xlabel="mean probability", ylabel="nodes")
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} cannot be written: {error}") from error


if __name__ == "__main__":
    typer.run(main)

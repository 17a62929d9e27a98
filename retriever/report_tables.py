"""A replay's report as tables for people."""

from collections.abc import Iterator

from rich.table import Table

from retriever.calibration import Bin, Calibration, Group
from retriever.replay import ReplayReport


def tables(report: ReplayReport) -> Iterator[Table]:
    """Give the figures, then their calibration if it was asked for."""
    yield _figures(report)
    if report.calibration is not None:
        yield _calibration(report.calibration)


def _figures(report: ReplayReport) -> Table:
    table = Table("figure", "value", title=f"{report.traces} traces replayed")
    for name, value in report.as_json().items():
        if name == "calibration":
            continue
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, number in parts:
            text = f"{number:.3f}" if isinstance(number, float) else str(number)
            table.add_row(f"{name} {part}".strip(), text)
    return table


def _calibration(calibration: Calibration) -> Table:
    table = Table("nodes", "number", "mean probability", "accepted", "error")
    table.title = f"expected calibration error {calibration.ece():.4f}"
    for each in calibration.bins():
        table.add_row(f"given {each.start:g} to {each.end:g}", *_cells(each))
    for what, groups in (("source", calibration.by_source()), ("depth", calibration.by_depth())):
        table.add_section()
        for name, group in groups.items():
            table.add_row(f"{what} {name}", *_cells(group), f"{group.ece:.4f}")
    return table


def _cells(counted: Bin | Group) -> tuple[str, str, str]:
    return str(counted.nodes), f"{counted.probability:.4f}", f"{counted.accepted:.4f}"

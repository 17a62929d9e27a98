"""Printing tables whose numbers stay whole."""

import sys
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_UNBOUNDED: Final = 100_000


def print_table(table: Table) -> None:
    """Print a table to standard output; columns aligned to the right are never shortened.

    On a terminal the others are wrapped, and the last of them are left out where there is no
    room even so. Elsewhere, as in a file, a table takes the width that it needs.

    Args:
        table: may be changed.
    """
    for column in table.columns:
        if column.justify == "right":
            column.no_wrap = True
            column.min_width = max(cell_len(str(c)) for c in (column.header, *column.cells))
    if not sys.stdout.isatty():
        Console(width=_needed(table).maximum).print(table)
        return
    width, left_out = Console().width, []
    while _needed(table).minimum > width and table.columns[-1].justify != "right":
        left_out.append(str(table.columns.pop().header))
    console = Console(width=max(width, _needed(table).minimum))
    console.print(table)
    if left_out:
        console.print(f"left out, as the terminal is narrow: {', '.join(reversed(left_out))}")


def _needed(table: Table) -> Measurement:
    wide = Console(width=_UNBOUNDED)
    return Measurement.get(wide, wide.options, table)

"""The suite's parts: what `make test` runs, and what takes so long that a release runs it alone.

A test without a marker is of the part that always runs. The others are named here, and `make test`
says at its end what it left out.
"""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

PARTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "faults": "services and writers killed, stopped, cut off or late; full disks, set clocks",
        "soak": "what is held in memory, and what it costs, after many rounds or with large data",
        "programs": "README, examples and the Node.js client as programs; core without plugins",
        "training": "heads that are taught, from recording to judging",
        "bench": "the commands of benchmarks: help, some with little to do, and how they judge",
    }
)
"""Parts that run only where they are asked for, by name, with what is in each."""

SEEDS: Final = "seeds"
"""Marks tests that draw cases at random: a few of them always, all where this part is asked for."""

# Read by processes that tests start; names with FOREDRAFT_ are settings.
_VARIABLE: Final = "SEEDED_TEST_CASES"


def draw_all_cases() -> None:
    """Have `cases` return all from now on: call it before any test's module is loaded."""
    os.environ[_VARIABLE] = "all"


def draws_all_cases() -> bool:
    """Return whether the part of all seeds runs."""
    return os.environ.get(_VARIABLE) == "all"


def cases(few: int, of: int) -> int:
    """Return how many random cases a test takes: a few, or all where the part of seeds runs.

    Args:
        few: cases that find a planted error within a second or so.
        of: all cases.
    """
    return of if draws_all_cases() else few

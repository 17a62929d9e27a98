"""What is recorded, by section."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tests.golden.record import Step


@dataclass(frozen=True, slots=True)
class Scope:
    """How much is recorded, and where.

    Attributes:
        scratch: an empty folder.
        small: whether only what `make test` has time for is recorded.
        rounding: whether bytes are recorded without the floats in them.
        traces: a folder of recordings to replay as well, `None` for none.
    """

    scratch: Path
    small: bool = False
    rounding: bool = False
    traces: Path | None = None

    @property
    def is_portable(self) -> bool:
        """Whether bytes hold nothing that another processor computes otherwise."""
        return self.small or self.rounding


MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "trees": "recorded_trees",
        "index": "recorded_index",
        "state": "recorded_state",
        "wire": "recorded_wire",
        "outputs": "recorded_outputs",
        "commands": "recorded_commands",
    }
)
"""The sections, and the module beside this one that records each."""


def recorded(section: str, scope: Scope) -> Iterator[Step]:
    """Yield the steps of a section; their names begin with it."""
    steps: Callable[[Scope], Iterator[Step]]
    steps = import_module(f"tests.golden.{MODULES[section]}").steps
    names: set[str] = set()
    for step in steps(scope):
        assert step.section == section, step.name
        assert step.name not in names, f"{step.name} is recorded twice"
        names.add(step.name)
        yield step

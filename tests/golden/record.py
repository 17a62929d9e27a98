"""A record of what the project does, step by step, and how two records are compared.

A step has a name, such as `trees/edits/32 nodes/0/at 57`, whose first part is its section, and a
value. Between two commits on one machine all values are equal, bit for bit, unless a commit changed
them. Sums of floats depend on the processor, the compiler and the order of operations; records of
two machines, or of commits between which kernels compute otherwise, are compared up to rounding:
texts, bytes and shapes are equal, trees agree in every node that rounding cannot move, and outputs
up to the first token that rounding could have changed.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from retriever.tree import ROOT, DraftTree

PROBABILITY_TOLERANCE: Final = 1e-3
"""Relative. Float32 sums of at most some hundred terms and polynomials for exp and log differ by
1e-5 at most between processors; learning carries that on from step to step."""

MARGIN_TOLERANCE: Final = 1e-3
"""Five times what `tests.decoder.rounding` allows for logits of the tiny models: three layers of 64
in single precision, values up to 10."""

RATE_TOLERANCE: Final = 1e-3
"""Relative, of tokens per step."""

_NEVER_DRAFTED: Final = 1e-6
"""Nodes less probable than this are in no tree."""

_WHOLE: Final = ("trees", "index", "state", "wire")
"""Sections in which a group of steps is all of something: messages of a conversation, files of an
index. A step more in one is a difference; in others, cases may be added to a group."""


class Kind(StrEnum):
    """How values of a step are compared up to rounding."""

    EXACT = "exact"
    TREE = "tree"
    OUTPUT = "output"
    RATE = "rate"


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded value.

    Attributes:
        name: unique within a record; parts are divided by `/`.
        kind: of the value.
        value: JSON.
    """

    name: str
    kind: Kind
    value: Any

    @property
    def section(self) -> str:
        """The first part of the name."""
        return self.name.partition("/")[0]

    @property
    def group(self) -> str:
        """The name without its last part."""
        return self.name.rpartition("/")[0]

    @property
    def replay(self) -> str:
        """The first three parts of the name: what learns from one step for the next."""
        return "/".join(self.name.split("/")[:3])

    def is_equal(self, other: "Step") -> bool:
        """Return whether two values are the same, to the last bit."""
        return json.dumps(self.value, sort_keys=True) == json.dumps(other.value, sort_keys=True)


def exact(name: str, value: Any) -> Step:
    """Return a step of text, bytes, numbers or a shape: equal on every machine."""
    return Step(name, Kind.EXACT, value)


def tree_step(name: str, tree: DraftTree, budget: int) -> Step:
    """Return a step of a draft.

    Args:
        name: of the step.
        tree: with probabilities.
        budget: most nodes that it could have.
    """
    value = {
        "budget": budget,
        "tokens": tree.token_ids.tolist(),
        "parents": tree.parents.tolist(),
        "sources": tree.sources.tolist(),
        "probabilities": tree.probabilities.tolist(),
    }
    return Step(name, Kind.TREE, value)


def output_step(name: str, tokens: Sequence[int], margins: Sequence[float] | None = None) -> Step:
    """Return a step of generated tokens.

    Args:
        name: of the step.
        tokens: of the output.
        margins: by how much each was chosen before the next best; `None` where that is not known,
            and then nothing can be said of the output on another machine.
    """
    return Step(name, Kind.OUTPUT, {"tokens": list(tokens), "margins": margins and list(margins)})


def rate_step(name: str, num_tokens: int, num_steps: int) -> Step:
    """Return a step of tokens per step."""
    return Step(name, Kind.RATE, num_tokens / num_steps)


@dataclass(frozen=True, slots=True)
class Difference:
    """A step that differs.

    Attributes:
        name: of the step.
        reason: what differs, in a sentence without a full stop.
        before: the value in the older record, or what of it differs.
        after: the same in the newer one.
    """

    name: str
    reason: str
    before: Any = None
    after: Any = None


def differences(
    before: Iterable[Step], after: Iterable[Step], *, rounding: bool = False
) -> Iterator[Difference]:
    """Yield what differs, in the order of the older record.

    Steps that only the newer record has are differences within a group that is all of something;
    elsewhere they are cases that were added.

    Args:
        before: the older record.
        after: the newer record.
        rounding: whether values may differ by rounding.
    """
    known, found = list(before), {step.name: step for step in after}
    moved: set[str] = set()  # replays in which a tree differs by a bit
    for old in known:
        new = found.get(old.name)
        if new is None:
            # Rounding may have ended an earlier draft sooner; later steps then have other names.
            if not (rounding and old.kind is Kind.TREE and old.replay in moved):
                yield Difference(old.name, "the step is no longer there", old.value)
        elif new.kind is not old.kind:
            yield Difference(old.name, "the kind of the step changed", old.kind, new.kind)
        elif not old.is_equal(new):
            moved.add(old.replay)
            yield from _difference_of_values(old, new, rounding=rounding)
    names, groups = {step.name for step in known}, {step.group for step in known}
    for new in found.values():
        is_part = new.section in _WHOLE and new.group in groups and new.name not in names
        if is_part and not (rounding and new.kind is Kind.TREE and new.replay in moved):
            yield Difference(new.name, "the step is new", None, new.value)


def added(before: Iterable[Step], after: Iterable[Step]) -> Counter[str]:
    """Return how many steps only the newer record has, by section."""
    known = {step.name for step in before}
    return Counter(step.section for step in after if step.name not in known)


def _difference_of_values(old: Step, new: Step, *, rounding: bool) -> Iterator[Difference]:
    if rounding and old.kind is Kind.TREE:
        reason = _tree_difference(old.value, new.value)
        if reason:
            yield Difference(old.name, reason, old.value, new.value)
    elif rounding and old.kind is Kind.OUTPUT:
        yield from _output_difference(old, new)
    elif rounding and old.kind is Kind.RATE:
        if abs(new.value / old.value - 1) > RATE_TOLERANCE:
            yield Difference(old.name, "tokens per step changed", old.value, new.value)
    else:
        yield Difference(old.name, "the value changed", *_narrowed(old.value, new.value))


def _narrowed(old: Any, new: Any) -> tuple[Any, Any]:
    """Return the parts of two values that differ, as far down as their shapes agree."""
    while True:
        if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
            keys: list[Any] = [key for key in old if old[key] != new[key]]
        elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            keys = [key for key in range(len(old)) if old[key] != new[key]]
        else:
            return old, new
        if len(keys) != 1:
            return {key: old[key] for key in keys[:3]}, {key: new[key] for key in keys[:3]}
        old, new = {keys[0]: old[keys[0]]}, {keys[0]: new[keys[0]]}
        if not isinstance(old[keys[0]], dict | list):
            return old, new
        old, new = old[keys[0]], new[keys[0]]


def _tree_difference(old: Any, new: Any) -> str:
    """Return what rounding does not explain between two trees; empty if nothing."""
    if old["budget"] != new["budget"]:
        return "another budget was asked for"
    paths = _paths(old), _paths(new)
    for one, other, place in ((paths[0], paths[1], "newer"), (paths[1], paths[0], "older")):
        is_full = len(other) == old["budget"]
        cut = min(value for value, _ in other.values()) if is_full and other else _NEVER_DRAFTED
        for path, (probability, source) in one.items():
            if path not in other:
                if probability > cut * (1 + PROBABILITY_TOLERANCE):
                    return f"the {place} tree lacks a node of {probability:.6f}, behind {path[-4:]}"
                continue
            there, its_source = other[path]
            if abs(there - probability) > PROBABILITY_TOLERANCE * max(there, probability):
                return f"a node of {probability:.6f} has {there:.6f} in the {place} tree"
            if source != its_source:
                return f"a node is of source {source}, of {its_source} in the {place} tree"
    return ""


def _paths(tree: Any) -> dict[tuple[int, ...], tuple[float, int]]:
    """Return the probability and the source of each node by the tokens that lead to it."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree["tokens"], tree["parents"], strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    return dict(zip(paths, zip(tree["probabilities"], tree["sources"], strict=True), strict=True))


def _output_difference(old: Step, new: Step) -> Iterator[Difference]:
    """Compare outputs up to the first token that rounding could have changed."""
    margins, one, other = old.value["margins"], old.value["tokens"], new.value["tokens"]
    if margins is None and bool(one) == bool(other):  # drawn, or in half precision
        return
    if margins is not None:
        unsure = [at for at, margin in enumerate(margins) if margin <= MARGIN_TOLERANCE]
        one, other = one[: min(unsure, default=None)], other[: min(unsure, default=None)]
    if one != other:
        longest = range(max(len(one), len(other)))
        at = next(n for n in longest if one[n : n + 1] != other[n : n + 1])
        yield Difference(old.name, f"token {at} changed", one[at : at + 8], other[at : at + 8])


@dataclass(frozen=True, slots=True)
class Record:
    """Steps in order, and where they were recorded.

    Attributes:
        circumstances: commit, machine and versions of libraries.
        steps: all of them.
    """

    circumstances: dict[str, str]
    steps: list[Step]

    def write(self, path: Path) -> None:
        """Write a line of JSON for the circumstances and for each step."""
        with path.open("w", encoding="utf-8") as file:
            file.write(f"{json.dumps(self.circumstances)}\n")
            for step in self.steps:
                row = {"name": step.name, "kind": step.kind, "value": step.value}
                file.write(f"{json.dumps(row, ensure_ascii=False)}\n")

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Read what `write` wrote."""
        with path.open(encoding="utf-8") as file:
            circumstances = json.loads(next(file))
            rows = [json.loads(line) for line in file]
        return cls(circumstances, [Step(r["name"], Kind(r["kind"]), r["value"]) for r in rows])

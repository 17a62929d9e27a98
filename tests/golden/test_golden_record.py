"""What the project does is what was recorded, and a comparison finds what is not.

After a change that is meant: `python -m tests.golden record --small --output
tests/data/golden.jsonl`, with the reason in the commit.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.golden.record import (
    Kind,
    Record,
    Step,
    added,
    differences,
    exact,
    output_step,
    rate_step,
)
from tests.golden.recorded_wire import OPENING
from tests.golden.sections import MODULES, Scope, recorded

KEPT = Path(__file__).parents[1] / "data" / "golden.jsonl"


@pytest.mark.plugin
@pytest.mark.parametrize("section", MODULES)
def test_what_is_done_is_what_was_recorded(section: str, tmp_path: Path) -> None:
    before = [step for step in Record.read(KEPT).steps if step.section == section]
    after = list(recorded(section, Scope(tmp_path, small=True)))
    found = list(differences(before, after, rounding=True))
    assert not found, (
        f"{len(found)} of {len(before)} steps differ, first {found[0]}; if they should: "
        "python -m tests.golden record --small --output tests/data/golden.jsonl"
    )
    assert not added(before, after)


def test_the_recorded_opening_states_every_field() -> None:
    """But for those that are another form of one, and what is recorded apart."""
    stated = {field.name for field, _ in OPENING.ListFields()}
    every = {field.name for field in OPENING.DESCRIPTOR.fields}
    assert every - stated == {"prompt_bytes", "forget", "constraint"}


def tree(**changes: list[Any]) -> Step:
    """A tree of four nodes that is full, so that its last node may give way to another."""
    value = {
        "budget": 4,
        "tokens": [5, 6, 7, 8],
        "parents": [-1, 0, -1, 1],
        "sources": [1, 1, 2, 1],
        "probabilities": [0.9, 0.5, 0.05, 0.02],
    }
    return replace(exact("trees/a/8 nodes/0/at 0", value | changes), kind=Kind.TREE)


@pytest.mark.parametrize(
    "changes",
    [
        {"probabilities": [0.9003, 0.5, 0.05, 0.02]},
        {
            "tokens": [5, 6, 7, 9],
            "parents": [-1, 0, -1, 2],
            "probabilities": [0.9, 0.5, 0.05, 0.02],
        },
        {
            "tokens": [5, 7, 6, 8],
            "parents": [-1, -1, 0, 2],
            "sources": [1, 2, 1, 1],
            "probabilities": [0.9, 0.05, 0.5, 0.02],
        },
    ],
    ids=["a digit", "a node at the cut", "another order"],
)
def test_what_rounding_explains_differs_bit_for_bit_alone(changes: dict[str, Any]) -> None:
    assert list(differences([tree()], [tree(**changes)]))
    assert not list(differences([tree()], [tree(**changes)], rounding=True))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (tree(), tree(probabilities=[0.91, 0.5, 0.05, 0.02]), "has 0.91"),
        (tree(), tree(tokens=[5, 6, 9, 8]), r"lacks a node of 0.05.*, behind \(7,\)"),
        (
            tree(),
            tree(tokens=[5, 6], parents=[-1, 0], sources=[1, 1], probabilities=[0.9, 0.5]),
            "lacks a node",
        ),
        (tree(), tree(sources=[2, 1, 2, 1]), "of source 1, of 2 in the newer"),
        (exact("wire/a/0", {"x": [1, 2]}), exact("wire/a/0", {"x": [1, 3]}), "the value changed"),
        (exact("wire/a/0", 1), exact("wire/b/0", 1), "no longer there"),
        (tree(), exact("trees/a/8 nodes/1/at 0", 0), "no longer there"),
        (exact("a/0", 1), exact("a/0", True), "the value changed"),
        (exact("a/0", 0.0), exact("a/0", -0.0), "the value changed"),
        (output_step("a/0", [3], [1.0]), output_step("a/0", [3, 9], [1.0]), "token 1"),
        (output_step("a/0", [3]), output_step("a/0", []), "value|token 0"),
        (exact("a/0", [3]), output_step("a/0", [3]), "the kind of the step"),
        (output_step("a/0", [3, 4, 5], [1.0, 0.1, 1.0]), output_step("a/0", [3, 5]), "token 1"),
        (rate_step("a/0", 2000, 1000), rate_step("a/0", 2003, 1000), "tokens per step"),
    ],
)
def test_what_rounding_does_not_explain_is_found(before: Step, after: Step, reason: str) -> None:
    for rounding in (False, True):
        (found,) = differences([before], [after], rounding=rounding)
        assert found.name == before.name
    assert re.search(reason, found.reason)


def test_a_part_more_is_found_where_a_group_is_whole() -> None:
    for name in ("wire/strict/02 asked Draft", "index/merged/segments/new"):
        before = [exact(f"{name.rpartition('/')[0]}/first", 1)]
        (found,) = differences(before, [*before, exact(name, 2)])
        assert (found.name, found.reason) == (name, "the step is new")
    before = [exact("commands/build/a folder", 1)]
    assert not list(differences(before, [*before, exact("commands/build/a file", 2)]))


def test_rounding_explains_other_steps_only_behind_a_tree_that_it_changed() -> None:
    later = replace(tree(), name="trees/a/8 nodes/0/at 3")
    moved = replace(tree(), name="trees/a/8 nodes/0/at 4")
    assert len(list(differences([tree(), later], [tree(), moved], rounding=True))) == 2
    touched = tree(probabilities=[0.9003, 0.5, 0.05, 0.02])
    assert not list(differences([tree(), later], [touched, moved], rounding=True))


def test_an_output_is_compared_up_to_the_first_token_that_rounding_may_change() -> None:
    before = output_step("a/0", [3, 4, 5], [1.0, 1e-5, 1.0])
    assert not list(differences([before], [output_step("a/0", [3, 9, 9])], rounding=True))
    assert list(differences([before], [output_step("a/0", [2, 4, 5])], rounding=True))

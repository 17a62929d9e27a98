"""Replays in several processes come to what they come to one after the other."""

import os
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from decoder.budget.costs import CostSurface
from decoder.plugins.contenders.drafting_rules import DraftingRule, drafting_rules
from decoder.plugins.contenders.prompt_lookup import PromptLookup
from decoder.plugins.estimate import side_by_side
from decoder.plugins.estimate.cost_curve import CostCurve
from decoder.plugins.estimate.projection import ProjectedOutcome, Replay, project
from decoder.plugins.estimate.side_by_side import outcomes_of
from decoder.plugins.estimate.token_log import token_log
from retriever.errors import RetrieverError
from retriever.traces.traces import Trace

Rows = list[tuple[Trace, dict[str, Any]]]
BUDGETS = (15, 3)
WIDTHS = (1, 8, 32)
CURVE = CostCurve(CostSurface((0,), WIDTHS, (tuple(1 + each / 8 for each in WIDTHS),)), "by hand")


def rows() -> Rows:
    """Outputs that repeat their prompts and one another."""
    rng = np.random.default_rng(3)
    texts = [np.tile(rng.integers(0, 40, 12), 4).astype(np.int32) for _ in range(6)]
    return [(Trace(a[:20], np.concatenate([a[20:], b[:30]])), {}) for a, b in pairwise(texts)]


def counted(outcome: ProjectedOutcome) -> tuple[str, object, int, int, int]:
    tally = outcome.tally()
    return outcome.drafter, outcome.nodes, tally.tokens, tally.steps, tally.nodes


@pytest.mark.parametrize("processors", [1, 2])
def test_outcomes_are_those_of_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, processors: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(processors))
    monkeypatch.setattr(side_by_side, "_WORTH_TOKENS", 0)
    own = DraftingRule("only here", lambda _: nullcontext(PromptLookup()))
    rules = [*drafting_rules(), own]
    seen = Counter[tuple[str, object]]()
    with token_log(rows()) as log:
        expected = [counted(each) for each in project(log, rules, BUDGETS, CURVE)][1:]
        replays = [Replay(rule, nodes, CURVE, 31) for rule in rules for nodes in BUDGETS]
        found = outcomes_of(
            log, replays, lambda each, num: seen.update({(each.drafter, each.nodes): num})
        )
        assert [counted(each) for each in found] == expected
    assert set(seen.values()) == {len(rows())}
    assert len({steps for _, _, _, steps, _ in expected}) > 2  # budgets and rules differ


def _refusing(_max_nodes: int) -> Any:
    raise RetrieverError("not today")


def test_what_is_refused_in_another_process_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    monkeypatch.setattr(side_by_side, "_WORTH_TOKENS", 0)
    rules = [*drafting_rules(), DraftingRule("refusing", _refusing)]
    with token_log(rows()) as log, pytest.raises(RetrieverError, match="not today"):
        outcomes_of(log, [Replay(rule, 3, CURVE, 31) for rule in rules], lambda *_: None)

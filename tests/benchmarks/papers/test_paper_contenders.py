"""All rules in the decoding loop: what they write, and what a replay of it counts."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks import papers
from benchmarks.papers.contenders import DRAFTERS
from benchmarks.papers.rasd import RasdDrafter
from decoder.budget.costs import CostSurface
from decoder.drafters.options import DraftOptions
from decoder.errors import ContradictoryOptionsError
from decoder.model.pretrained import LanguageModel, ModelOptions, load_model
from decoder.plugins.contenders.contender import UNDRAFTED
from decoder.plugins.contenders.drafting_rules import DraftingRule, opened
from decoder.plugins.contenders.registry import ENTRIES, Contest, Setting, chosen, known_entries
from decoder.plugins.estimate.cost_curve import CostCurve
from decoder.plugins.estimate.projection import project
from decoder.plugins.estimate.token_log import LoggedRecord
from indexer.build import build_from_texts
from retriever.traces.traces import Trace

NODES = 12
TEXTS = ["a b c a b", "c c d", "b a b a", "d e d"] * 2
"""Twice, to be drafted from answers."""


@pytest.fixture
def language_model(tiny_model: Path) -> LanguageModel:
    return load_model(ModelOptions(str(tiny_model)))


@pytest.fixture
def drafts(tiny_model: Path, tmp_path: Path) -> DraftOptions:
    index = tmp_path / "index"
    build_from_texts([("a", "a b c " * 9), ("b", "c b d e")], index, str(tiny_model))
    return DraftOptions(index=[index], draft_model=str(tiny_model))


def test_every_rule_writes_what_decoding_without_drafts_writes_and_is_replayed_as_it_decodes(
    language_model: LanguageModel, drafts: DraftOptions
) -> None:
    contest = Contest(language_model, [UNDRAFTED, *DRAFTERS], drafts, max_new_tokens=40)
    prompts = [language_model.encode(text) for text in TEXTS]
    with contest.opened(Setting(NODES)) as lineup:
        runs = {
            name: [way([prompt], remember=True) for prompt in prompts]
            for name, way in lineup.ways.items()
        }
        assert isinstance(lineup.drafting["rasd"].decoder.drafter, RasdDrafter)
    plain = [run.token_ids for run in runs[UNDRAFTED]]
    for name in DRAFTERS:
        assert [run.token_ids for run in runs[name]] == plain, name
        assert sum(len(run.token_ids) - run.num_passes for run in runs[name]) > 2, name
    log = [
        LoggedRecord(str(n), Trace(np.array(prompt, np.int32), np.array(output, np.int32)))
        for n, (prompt, output) in enumerate(zip(prompts, plain, strict=True))
    ]
    curve = CostCurve(CostSurface.flat((1, 65), (1.0, 1.0)), "flat")
    for name, rule in papers.DRAFTERS.items():
        replayed = DraftingRule(
            name, partial(opened, rule, drafts.index, language_model.vocabulary)
        )
        _, outcome = project(log, [replayed], [NODES], curve)
        for number, run in enumerate(runs[name]):
            tally = outcome.tally(str(number))
            assert (tally.tokens, tally.steps) == (len(run.token_ids) - 1, run.num_passes - 1), name


def test_rules_are_known_by_their_names_and_by_their_path() -> None:
    known, missing = known_entries()
    assert list(known) == [*ENTRIES, *DRAFTERS]
    assert not missing
    assert all(known[name].paper for name in DRAFTERS)
    by_name, by_path = chosen(["rest", "benchmarks.papers:rest"])
    assert by_path.summary == by_name.summary


def test_rasd_is_refused_without_a_model(language_model: LanguageModel) -> None:
    with pytest.raises(ContradictoryOptionsError, match="give it --draft-model or --speculator"):
        Contest(language_model, ["rasd"], DraftOptions(), 4)

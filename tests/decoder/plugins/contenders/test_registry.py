"""All contenders in the decoding loop: what they write, and what a replay of it counts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from decoder.budget.costs import CostSurface
from decoder.drafters.following import states_of
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.options import DraftOptions
from decoder.errors import ContradictoryOptionsError, InvalidSettingsError
from decoder.model.pretrained import LanguageModel
from decoder.plugins.contenders import registry
from decoder.plugins.contenders.contender import FOREDRAFT, PLAIN, PROMPT_LOOKUP, UNDRAFTED
from decoder.plugins.contenders.drafting_rules import PROMPT_LOOKUP as LOOKUP_RULE, drafting_rules
from decoder.plugins.contenders.registry import DEFAULT, ENTRIES, Contest, Setting, chosen, possible
from decoder.plugins.estimate.cost_curve import CostCurve
from decoder.plugins.estimate.projection import project
from decoder.plugins.estimate.token_log import LoggedRecord
from decoder.plugins.speculators.eagle import Eagle1Head, EagleConfig
from decoder.plugins.speculators.head_files import HeadTarget, save_head
from indexer.build import build_from_texts
from retriever.commands.factories import OWN
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.traces.traces import Trace
from tests.decoder.decoding import SIZES
from tests.suite_parts import cases

PROMPTS = ["abc abc abc", "one two one two one", "b"]
LIBRARY = (PLAIN, PROMPT_LOOKUP)
NEW_TOKENS = 10

pytestmark = pytest.mark.bench


@pytest.fixture(scope="module")
def drafts(
    language_model: LanguageModel, model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> DraftOptions:
    """An index, the model itself as a draft model, and a head: all that a contender may need."""
    folder = tmp_path_factory.mktemp("contest")
    index, head = folder / "index", folder / "head"
    build_from_texts([("a", "abc one two " * 9), ("b", "two one abc")], index, str(model_directory))
    torch.manual_seed(0)
    size = language_model.vocabulary.size
    layer = LlamaConfig(**SIZES, vocab_size=size, num_hidden_layers=1, max_position_embeddings=128)
    target = HeadTarget.of(language_model.model, "tiny", language_model.vocabulary)
    save_head(head, Eagle1Head(EagleConfig.eagle(layer)), target.origin())
    return DraftOptions(index=[index], draft_model=str(model_directory), speculator=head)


def answers(
    language_model: LanguageModel, drafts: DraftOptions, setting: Setting
) -> dict[str, list[list[int]]]:
    """What each contender writes to the prompts, one after the other."""
    names = list(ENTRIES)
    assert possible(drafts)[: len(names)] == names
    contest = Contest(language_model, names, drafts, NEW_TOKENS)
    with contest.opened(setting) as lineup:
        assert list(lineup.ways) == names
        return {
            name: [way([language_model.encode(text)], remember=True).token_ids for text in PROMPTS]
            for name, way in lineup.ways.items()
        }


@pytest.mark.parametrize("nodes", [1, 40])
def test_every_contender_writes_what_plain_decoding_writes(
    language_model: LanguageModel, drafts: DraftOptions, nodes: int
) -> None:
    found = answers(language_model, drafts, Setting(nodes))
    assert any(len(answer) > 5 for answer in found[PLAIN])
    for name, written in found.items():
        assert written == found[PLAIN], name


@pytest.mark.seeds
@pytest.mark.parametrize(
    "setting", [Setting(40), Setting(12, 0.9, 1), Setting(1)][: cases(2, of=3)]
)
def test_in_parallel_contenders_write_what_undrafted_decoding_writes_one_by_one(
    language_model: LanguageModel, drafts: DraftOptions, setting: Setting
) -> None:
    names = [name for name in ENTRIES if ENTRIES[name].takes_many]
    assert set(ENTRIES) - set(names) == {PROMPT_LOOKUP}
    prompts = [language_model.encode(text) for text in [*PROMPTS, PROMPTS[0]]]
    with Contest(language_model, [UNDRAFTED], drafts, NEW_TOKENS).opened(setting) as lineup:
        (*_, late) = lineup.ways[UNDRAFTED]([prompts[0]], remember=False).token_ids[:5]
    stopping = replace(language_model, stop_ids=(*language_model.stop_ids, late))
    contest = Contest(stopping, names, drafts, NEW_TOKENS)
    with contest.opened(setting) as lineup:
        alone = [lineup.ways[UNDRAFTED]([prompt], remember=False).token_ids for prompt in prompts]
        assert {len(each) for each in alone} != {NEW_TOKENS}  # some stop
        for name, way in lineup.ways.items():
            run = way(prompts, 3, remember=True)
            if name != PLAIN or not setting.temperature:
                assert run.outputs == alone, name
            assert run.account[1:] == (
                len(run.token_ids),
                run.num_passes - len(prompts),
                len(run.token_ids) - len(prompts),
            )


@pytest.mark.seeds
@pytest.mark.parametrize("seed", range(cases(1, of=2)))
def test_of_a_seed_every_contender_draws_what_decoding_without_drafts_draws(
    language_model: LanguageModel, drafts: DraftOptions, seed: int
) -> None:
    found = answers(language_model, drafts, Setting(16, temperature=0.9, seed=seed))
    for name in set(found) - set(LIBRARY):
        assert found[name] == found[UNDRAFTED], name
    with Contest(language_model, [UNDRAFTED], drafts, NEW_TOKENS).opened(Setting(16)) as lineup:
        way = lineup.ways[UNDRAFTED]
        greedy = [way([language_model.encode(text)], remember=True).token_ids for text in PROMPTS]
    assert found[UNDRAFTED] != greedy


def test_a_seed_is_another_draw_and_the_order_of_prompts_is_not(
    language_model: LanguageModel, drafts: DraftOptions
) -> None:
    contest = Contest(language_model, [UNDRAFTED], drafts, max_new_tokens=24)
    prompts = [language_model.encode(text) for text in PROMPTS]
    written = []
    for seed, order in ((0, prompts), (0, prompts[::-1]), (1, prompts)):
        with contest.opened(Setting(4, temperature=1.0, seed=seed)) as lineup:
            way = lineup.ways[UNDRAFTED]
            written.append({tuple(p): way([p], remember=True).token_ids for p in order})
    assert written[0] == written[1] != written[2]


@pytest.mark.parametrize("name", [LOOKUP_RULE, OWN])
@pytest.mark.parametrize("nodes", [1, 12])
def test_a_replay_counts_the_passes_of_the_loop(
    language_model: LanguageModel, drafts: DraftOptions, name: str, nodes: int
) -> None:
    """At equal nodes, for each prompt, exactly; prompts come twice, to be drafted from answers.

    The replay takes an output's first token as given, as the prompt's pass brings it, and its last
    as the model's own. So does the loop: it verifies no deeper than its limit allows, and a node
    that ends the sequence is that last token.
    """
    contender = "foredraft-retrieval" if name == OWN else name
    contest = Contest(language_model, [contender], drafts, max_new_tokens=40)
    texts = [*PROMPTS, "a longer one, with one two abc", "x"]
    prompts = [language_model.encode(text) for text in texts * 2]
    with contest.opened(Setting(nodes)) as lineup:
        runs = [lineup.ways[contender]([prompt], remember=True) for prompt in prompts]
    assert sum(len(run.token_ids) - run.num_passes for run in runs) > 2
    log = [
        LoggedRecord(str(n), Trace(np.array(prompt, np.int32), np.array(run.token_ids, np.int32)))
        for n, (prompt, run) in enumerate(zip(prompts, runs, strict=True))
    ]
    rules = drafting_rules(drafts.index, language_model.vocabulary)
    own = [rule for rule in rules if rule.name == name]
    curve = CostCurve(CostSurface.flat((1, 65), (1.0, 1.0)), "flat")
    _, replayed = project(log, own, [nodes], curve)
    for number, run in enumerate(runs):
        tally = replayed.tally(str(number))
        assert (tally.tokens, tally.steps) == (len(run.token_ids) - 1, run.num_passes - 1)


def test_a_contender_without_its_means_is_refused_with_what_to_give(
    language_model: LanguageModel,
) -> None:
    with pytest.raises(ContradictoryOptionsError, match=r"--contender model .* --draft-model"):
        Contest(language_model, ["model"], DraftOptions(), 4)
    with pytest.raises(InvalidSettingsError, match=r"there is no such contender.* plain, "):
        chosen([FOREDRAFT, "nobody"])


def test_contenders_of_other_modules_are_known_by_their_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules_of_mine.py").write_text("DRAFTERS = {'one': lambda *_: None}")
    [entry] = chosen(["rules_of_mine:one"])
    assert (entry.name, entry.summary, entry.takes_many) == ("rules_of_mine:one", "", True)
    with pytest.raises(InvalidSettingsError, match=r"no drafter 'two': choose from one$"):
        chosen(["rules_of_mine:two"])
    with pytest.raises(InvalidSettingsError, match=r"absent names no drafters .* MODULE:NAME"):
        chosen(["absent:one"])


def test_without_a_checkout_the_contenders_are_those_of_this_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "PAPERS", "absent.papers")
    assert possible(DraftOptions()) == [name for name in ENTRIES if not ENTRIES[name].needs]
    assert chosen(DEFAULT)
    with pytest.raises(InvalidSettingsError, match=r"; absent\.papers names .* in a checkout"):
        chosen(["rest"])


def test_parts_of_ours_have_no_model_and_models_alone_no_tables(
    language_model: LanguageModel, drafts: DraftOptions
) -> None:
    names = ["foredraft-tables", "foredraft-retrieval", "speculator", "model", FOREDRAFT]
    contest = Contest(language_model, names, drafts, max_new_tokens=4)
    with contest.opened(Setting(8)) as lineup:
        drafters = {name: way.decoder.drafter for name, way in lineup.drafting.items()}
    assert {name for name, each in drafters.items() if states_of(each)} == {FOREDRAFT, "speculator"}
    assert isinstance(drafters["foredraft-retrieval"], EmbeddedDrafter)
    assert type(drafters["model"]) is FusedDrafter


def test_the_default_contenders_can_be_chosen() -> None:
    assert [entry.name for entry in chosen([*DEFAULT, FOREDRAFT])] == list(DEFAULT)

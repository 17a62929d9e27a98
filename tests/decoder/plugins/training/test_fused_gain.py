from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from decoder.budget.budget import FixedBudget
from decoder.drafters.options import DraftOptions
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel
from decoder.model.target import Target
from decoder.plugins.contenders.contender import FOREDRAFT, OwnContender
from decoder.plugins.contenders.registry import TABLES, Lineup, Setting
from decoder.plugins.speculators.head_files import HeadTarget, save_head
from decoder.plugins.training import fused_gain
from decoder.plugins.training.fused_gain import MAX_NEW_TOKENS, fused_gains
from retriever.drafter import Drafter
from retriever.tree import DraftTree
from tests.decoder.decoding import ScriptedDrafter, plainly, tiny_llama, tree_of
from tests.decoder.plugins.training.teaching import StepClock, drawn_head, prompts_of

pytestmark = pytest.mark.training

PROMPTS = prompts_of([12, 9, 15])


@pytest.fixture
def drafts(language_model: LanguageModel, tmp_path: Path) -> DraftOptions:
    """Return drafts with a head of random weights: it takes nodes, and is seldom right."""
    target = HeadTarget.of(language_model.model, language_model.name, language_model.vocabulary)
    save_head(tmp_path, drawn_head(language_model, 64), target.origin(("nothing",)))
    return DraftOptions(speculator=tmp_path)


def knowing(model: PreTrainedModel, num_nodes: int) -> Drafter:
    """Return a drafter that knows so many of the tokens to come."""
    texts = [[*each.tolist(), *plainly(model, each.tolist(), MAX_NEW_TOKENS)] for each in PROMPTS]

    def guess(tokens: list[int], _: int) -> DraftTree:
        text = next(each for each in texts if each[: len(tokens)] == tokens)
        coming = text[len(tokens) : len(tokens) + num_nodes]
        return tree_of([(place - 1, token) for place, token in enumerate(coming)])

    return ScriptedDrafter(guess)


class Prepared:
    """A contest whose ways of decoding a test has made."""

    def __init__(self, lineup: Lineup) -> None:
        self.lineup = lineup

    @contextmanager
    def opened(self, setting: Setting) -> Iterator[Lineup]:
        assert setting == Setting(5)
        yield self.lineup


def test_a_gain_is_the_ratio_of_tokens_per_pass(
    language_model: LanguageModel, drafts: DraftOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 47 tokens behind the prompt's pass, two a pass make 24 passes, four a pass 12."""
    model = tiny_llama()
    target = Target(model)
    ways = {
        name: OwnContender(Decoder(target, knowing(model, known), FixedBudget(5)), MAX_NEW_TOKENS)
        for name, known in ((TABLES, 1), (FOREDRAFT, 3))
    }
    seen = list[tuple[int, float, str]]()
    contest = Prepared(Lineup(dict(ways), target, None))
    monkeypatch.setattr(fused_gain, "Contest", lambda *_: contest)
    monkeypatch.setattr(fused_gain, "NODES", (5,))
    (gain,) = fused_gains(language_model, drafts, PROMPTS, lambda *told: seen.append(told))
    assert gain.without == pytest.approx([47 / 24] * 3)
    assert gain.with_head == pytest.approx([47 / 12] * 3)
    assert gain.ratio == pytest.approx([2.0] * 3)
    assert gain.num_prompts == 3
    assert gain.draft_share == gain.draft_ms / gain.pass_ms > 0
    assert seen == [(5, 1 / 3, "1 prompt"), (5, 2 / 3, "2 prompts"), (5, 1.0, "3 prompts")]


def test_a_head_is_asked_at_every_number_of_nodes(
    language_model: LanguageModel, drafts: DraftOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_gain, "NODES", (4, 12))
    monkeypatch.setattr(fused_gain, "MAX_NEW_TOKENS", 20)
    gains = fused_gains(language_model, drafts, PROMPTS, lambda *_: None)
    assert [each.nodes for each in gains] == [4, 12]
    for gain in gains:
        assert 1 <= gain.with_head[0] <= gain.nodes + 1
        assert gain.ratio[0] == pytest.approx(gain.with_head[0] / gain.without[0])
        assert gain.draft_ms > 0


def test_what_takes_long_goes_on_with_fewer_prompts(
    language_model: LanguageModel, drafts: DraftOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_gain, "time", StepClock(40.0))
    monkeypatch.setattr(fused_gain, "NODES", (5,))
    monkeypatch.setattr(fused_gain, "MAX_NEW_TOKENS", 20)
    (gain,) = fused_gains(language_model, drafts, PROMPTS, lambda *_: None)
    assert gain.num_prompts == 1
    assert gain.ratio[1:] == (None, None)

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from decoder.assembly import DrafterSettings
from decoder.contenders import fused_gain
from decoder.contenders.contender import FOREDRAFT
from decoder.contenders.fused_gain import MAX_NEW_TOKENS, NODES, fused_gains
from decoder.contenders.registry import TABLES, Contest, Setting
from decoder.model.pretrained import LanguageModel
from decoder.speculators.head_files import HeadTarget, save_head
from tests.decoder.decoding import VOCABULARY, evaluated, tiny_llama
from tests.decoder.training.teaching import drawn_head, language_model_of, prompts_of

PROMPTS = prompts_of([12, 9, 15])


@pytest.fixture
def language_model(byte_tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    return language_model_of(evaluated(tiny_llama()), byte_tokenizer)


@pytest.fixture
def drafts(language_model: LanguageModel, tmp_path: Path) -> DrafterSettings:
    """Return drafts with a head of random weights: it takes nodes, and is seldom right."""
    target = HeadTarget.of(language_model.model, language_model.name, language_model.vocabulary)
    save_head(tmp_path, drawn_head(language_model, VOCABULARY), target.origin(("nothing",)))
    return DrafterSettings(speculator=tmp_path)


def test_a_gain_is_that_of_the_contest_at_the_same_nodes(
    language_model: LanguageModel, drafts: DrafterSettings
) -> None:
    """As if each prompt were decoded by the contenders, one after the other."""
    seen = list[tuple[int, float, str]]()
    gains = fused_gains(language_model, drafts, PROMPTS, lambda *told: seen.append(told))
    assert [each.nodes for each in gains] == list(NODES)
    contest = Contest(language_model, [TABLES, FOREDRAFT], drafts, MAX_NEW_TOKENS)
    for gain in gains:
        paces = {}
        with contest.opened(Setting(gain.nodes)) as lineup:
            for name in (TABLES, FOREDRAFT):
                runs = [lineup.ways[name](each.tolist(), remember=True) for each in PROMPTS]
                tokens = sum(len(run.token_ids) - 1 for run in runs)
                paces[name] = tokens / sum(run.num_passes - 1 for run in runs)
        assert gain.without[0] == pytest.approx(paces[TABLES])
        assert gain.with_head[0] == pytest.approx(paces[FOREDRAFT])
        assert gain.ratio[0] == pytest.approx(paces[FOREDRAFT] / paces[TABLES])
        assert gain.num_prompts == len(PROMPTS)
        assert 0 < gain.draft_ms < 1e3
        assert gain.draft_share == gain.draft_ms / gain.pass_ms > 0
    assert [over for nodes, over, _ in seen if nodes == 5] == pytest.approx([1 / 3, 2 / 3, 1])


def test_what_takes_long_goes_on_with_fewer_prompts(
    language_model: LanguageModel, drafts: DrafterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_gain, "_MOST_SECONDS", 0.0)
    monkeypatch.setattr(fused_gain, "NODES", (5,))
    (gain,) = fused_gains(language_model, drafts, PROMPTS, lambda *_: None)
    assert gain.num_prompts == 1
    assert gain.ratio == [gain.ratio[0]] * 3

"""Heads draft in the decoding loop: their drafts are accepted, and the output stays the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from decoder.assembly import check_drafts, connect_drafter, draft_readers
from decoder.budget.budget import FixedBudget
from decoder.drafters.asking import StepCosts
from decoder.drafters.following import NoDrafter, states_of
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.options import DraftOptions
from decoder.errors import ContradictoryOptionsError, HeadFileError, HeadMismatchError
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel
from decoder.model.states import FINAL
from decoder.model.target import Target
from decoder.plugins.speculators.eagle import (
    Eagle1Head,
    Eagle3Head,
    EagleConfig,
    EagleHead,
    EagleKind,
)
from decoder.plugins.speculators.head_files import HeadTarget, save_head
from decoder.plugins.speculators.speculator import load_speculator
from indexer.build import build_from_tokens
from retriever.drafter import Drafter
from retriever.follower import DraftLimits
from retriever.tree import Source
from tests.decoder.decoding import (
    SIZES,
    VOCABULARY,
    decoded,
    decoder_with,
    plainly,
    prompt_of,
    tiny_llama,
)
from tests.decoder.plugins.speculators.drafted_sequences import parts_of
from tests.decoder.plugins.speculators.published_heads import official_eagle, official_eagle3

FREE = StepCosts(target_s=1.0, pass_s=0.0)
LIMITS = DraftLimits(VOCABULARY, VOCABULARY)
NEW_TOKENS = 40


def fused(folder: Path, model: PreTrainedModel) -> FusedDrafter:
    reader = load_speculator(folder, model)
    return FusedDrafter([NoDrafter()], LIMITS, readers=[reader], costs=FREE)


def decoder_of(model: PreTrainedModel, drafter: Drafter) -> Decoder:
    return Decoder(Target(model, states=states_of(drafter)), drafter, FixedBudget(64))


def trained(head: EagleHead, model: PreTrainedModel, tokens: list[int]) -> None:
    """Teach a head one sequence: pairs of true states and next tokens, by the target's choices."""
    loaded: Any = model
    target = parts_of(model, tokens)
    features = torch.cat([target.states[number] for number in head.config.states], dim=-1)
    columns = head.columns if isinstance(head, Eagle3Head) else None
    wanted = loaded(torch.tensor([tokens])).logits[0, 1:].detach()
    wanted = (wanted if columns is None else wanted[:, columns]).softmax(-1)
    embedded = loaded.model.embed_tokens(torch.tensor([tokens[1:]])).detach()
    positions = torch.arange(len(tokens) - 1)[None]
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(150):
        hidden = head.step(embedded, head.project(features[None]), positions)
        logits = head.logits(hidden, loaded.lm_head)[0]
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


@pytest.mark.parametrize("kind", EagleKind)
def test_what_a_head_has_learned_is_drafted_and_accepted(kind: EagleKind, tmp_path: Path) -> None:
    """The whole way: training, writing, reading, drafting, verifying."""
    torch.manual_seed(0)
    model, prompt = tiny_llama(layers=3), prompt_of(12)
    output = plainly(model, prompt, NEW_TOKENS)
    layer = LlamaConfig(**SIZES, vocab_size=VOCABULARY, num_hidden_layers=1)
    if kind is EagleKind.EAGLE3:
        tokens = sorted({*output, *range(8)})
        shape = EagleConfig(
            kind=kind, layer=layer, states=(0, 1, 2), target_size=32, draft_vocabulary=len(tokens)
        )
        head: EagleHead = Eagle3Head(shape)
        assert isinstance(head, Eagle3Head)
        head.keep(torch.tensor(tokens))
    else:
        head = Eagle1Head(EagleConfig.eagle(layer))
    folder = tmp_path / "head"

    def passes() -> int:
        save_head(folder, head, HeadTarget.of(model).origin())
        decoder = decoder_of(model, fused(folder, model))
        generation = decoder.generate(prompt, NEW_TOKENS)
        assert [token for step in generation for token in step] == output
        return generation.statistics.num_passes

    untrained = passes()
    trained(head, model, [*prompt, *output])
    assert passes() < 0.75 * untrained


def test_a_target_is_asked_for_the_states_alone_that_a_head_takes(tmp_path: Path) -> None:
    model = tiny_llama(layers=3)
    assert fused(official_eagle3().write(tmp_path / "3"), model).states == {0, 1, 2}
    assert fused(official_eagle().write(tmp_path / "1"), model).states == {FINAL}


def test_a_target_that_keeps_no_states_is_noticed(tmp_path: Path) -> None:
    model = tiny_llama(layers=3)
    decoder = decoder_with(model, fused(official_eagle3().write(tmp_path), model))
    with pytest.raises(ValueError, match="states=states_of"):
        decoded(decoder, prompt_of(5), 4)


@pytest.fixture
def head_folder(language_model: LanguageModel, tmp_path: Path) -> Path:
    """A head for the tiny model on disk, in EAGLE-1's layout."""
    torch.manual_seed(0)
    config: Any = language_model.model.config
    layer = LlamaConfig(
        **SIZES, vocab_size=config.vocab_size, num_hidden_layers=1, max_position_embeddings=128
    )
    target = HeadTarget.of(language_model.model, "tiny", language_model.vocabulary)
    save_head(tmp_path / "head", Eagle1Head(EagleConfig.eagle(layer)), target.origin())
    return tmp_path / "head"


def test_settings_name_a_head(language_model: LanguageModel, head_folder: Path) -> None:
    settings = DraftOptions(speculator=head_folder)
    check_drafts(settings)
    assert f"speculator {head_folder}" in settings.describe()
    (reader,) = draft_readers(settings, language_model)
    assert reader.states == {FINAL}
    assert reader.source == Source.MODEL
    assert len(reader.columns) == language_model.vocabulary.size
    prompt = language_model.encode("a prompt")
    with connect_drafter(settings, language_model) as drafter:
        found = decoded(decoder_of(language_model.model, drafter), prompt, 24)
    assert found == plainly(language_model.model, prompt, 24)


def test_a_head_drafts_the_frequent_tokens_of_an_index(
    language_model: LanguageModel, head_folder: Path, tmp_path: Path
) -> None:
    index = tmp_path / "index"
    build_from_tokens([("a", [7, 7, 7, 9, 9, 5] * 4)], index, language_model.vocabulary)
    settings = DraftOptions(speculator=head_folder, draft_vocabulary=2, index=[index])
    (reader,) = draft_readers(settings, language_model)
    assert reader.columns.tolist() == sorted({7, 9, *language_model.stop_ids})
    with pytest.raises(ContradictoryOptionsError, match="give one with --index"):
        DraftOptions(speculator=head_folder, draft_vocabulary=2)
    with pytest.raises(ContradictoryOptionsError, match="--draft-model or --speculator"):
        DraftOptions(draft_vocabulary=2, index=[index])


def test_settings_refuse_what_is_no_head_before_a_model_loads(
    language_model: LanguageModel, head_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(HeadFileError, match="no such speculator"):
        check_drafts(DraftOptions(speculator=tmp_path / "nowhere"))
    weights = head_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(HeadFileError, match="not a complete safetensors file"):
        check_drafts(DraftOptions(speculator=head_folder))
    other = DraftOptions(speculator=official_eagle().write(tmp_path / "other"))
    check_drafts(other)
    with pytest.raises(HeadMismatchError, match="does not fit"):
        draft_readers(other, language_model)

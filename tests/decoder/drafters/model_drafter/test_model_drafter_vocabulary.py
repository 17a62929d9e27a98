"""Draft models with trimmed heads, with other vocabularies, and with no room left."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from decoder.assembly import (
    DrafterSettings,
    DraftModelOptions,
    load_draft_model,
)
from decoder.drafters.draft_model import DraftModel, has_plain_head
from decoder.drafters.drawn_trees import Draws
from decoder.drafters.model_drafter import DraftingOptions, ModelDrafter
from decoder.errors import ContradictoryOptionsError, UncroppableCacheError
from decoder.model.pretrained import ModelOptions, load_model
from decoder.sampling.verification import SampledTree
from indexer.build import build_from_tokens
from retriever.drafter import DraftRequest
from retriever.errors import (
    DrafterUnavailableError,
    OutOfSequenceError,
    SessionExistsError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from tests.decoder.commands.command_line import run
from tests.decoder.decoding import (
    SIZES,
    VOCABULARY,
    decoder_with,
    evaluated,
    plainly,
    prompt_of,
    tiny_gemma,
    tiny_llama,
)
from tests.decoder.drafters.model_drafter.draft_models import (
    FREE,
    distribution,
    drafted,
    llama,
    next_draft,
    paths,
)

KEPT = np.array([3, 7, 8, 20, 21, 40, 41, 47], np.int32)
NOTHING = np.empty(0, np.int32)


@pytest.mark.parametrize("tied", [False, True])
def test_trimmed_model_drafts_frequent_tokens_by_their_shares(tied: bool) -> None:  # noqa: FBT001
    model, prompt = llama(tied=tied), prompt_of(9)
    drafter = ModelDrafter(model, DraftingOptions(costs=FREE), kept=KEPT[::-1])
    tree = drafted(drafter, prompt, 16)
    assert set(tree.token_ids.tolist()) <= set(KEPT.tolist())
    for path, probability in paths(tree).items():
        expected = 1.0
        for depth, token in enumerate(path):
            shares = distribution(model, [*prompt, *path[:depth]])
            expected *= shares[token] / shares[KEPT].sum()
        assert probability == pytest.approx(expected, rel=1e-5)


def test_trimmed_proposals_are_zero_elsewhere() -> None:
    options = DraftingOptions(draws=Draws(), costs=FREE)
    tree = drafted(ModelDrafter(llama(), options, kept=KEPT), prompt_of(9), 16)
    assert isinstance(tree, SampledTree)
    assert tree.proposals.sum(1).numpy() == pytest.approx(1.0, abs=1e-5)
    assert not np.delete(tree.proposals.numpy(), KEPT, axis=1).any()


def test_head_that_is_not_plain_is_not_trimmed(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = CohereConfig(**SIZES, vocab_size=VOCABULARY, num_hidden_layers=2, logit_scale=0.5)
    cohere = evaluated(CohereForCausalLM(config), torch.float64)
    assert not has_plain_head(cohere)
    assert has_plain_head(tiny_gemma())
    prompt = prompt_of(9)
    trimmed = drafted(ModelDrafter(cohere, DraftingOptions(costs=FREE), kept=KEPT), prompt, 16)
    assert "drafts with its whole vocabulary" in caplog.text
    whole = drafted(ModelDrafter(cohere, DraftingOptions(costs=FREE)), prompt, 16)
    assert paths(trimmed) == paths(whole)


def test_padded_embeddings_are_never_drafted() -> None:
    model, prompt = llama(), prompt_of(9, vocabulary=30)
    drafter = ModelDrafter(model, DraftingOptions(costs=FREE), vocabulary_size=30)
    tree = drafted(drafter, prompt, 40)
    assert tree.token_ids.max() < 30


def test_model_with_too_few_embeddings_is_refused() -> None:
    with pytest.raises(VocabularyMismatchError, match=r"48 embeddings.*vocabulary 50"):
        ModelDrafter(llama(), vocabulary_size=50)
    with pytest.raises(VocabularyMismatchError, match="some of its 48"):
        DraftModel(llama(), kept=np.array([48], np.int32))


def test_model_with_recurrent_state_is_refused() -> None:
    mamba: Any = MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)
    )
    with pytest.raises(UncroppableCacheError, match="MambaForCausalLM cannot be a draft model"):
        ModelDrafter(mamba)


def limited(limit: int, model: Any = None) -> ModelDrafter:
    model = model or llama()
    model.config.max_position_embeddings = limit
    return ModelDrafter(model, DraftingOptions(costs=FREE))


def test_drafts_end_at_the_models_limit() -> None:
    model = llama()
    drafter, prompt = limited(16, model), prompt_of(14)
    positions: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda _module, _args, given: positions.append(int(given["position_ids"].max())),
        with_kwargs=True,
    )
    assert drafted(drafter, prompt, 40).depths().max() == 3
    assert max(positions) == 15


def test_sequence_beyond_the_limit_is_refused_once_and_goes_on() -> None:
    drafter = limited(16)
    tokens = prompt_of(15)
    drafter.open("a", np.array(tokens, np.int32))
    assert len(next_draft(drafter, "a", [], 15, 8)) == 8
    with pytest.raises(DrafterUnavailableError, match="at most 16 tokens"):
        next_draft(drafter, "a", [1, 2], 17, 8)
    drafter.close("a")
    drafter.open("b", np.array([*tokens, 1, 2], np.int32))
    assert len(next_draft(drafter, "b", [], 17, 8)) == 0
    assert len(next_draft(drafter, "b", [3], 18, 8)) == 0


def test_output_goes_on_beyond_the_draft_models_limit() -> None:
    target, prompt = tiny_llama(), prompt_of(12)
    generation = decoder_with(target, limited(24)).generate(prompt, 50)
    assert [token for step in generation for token in step] == plainly(target, prompt, 50)
    assert generation.statistics.num_failures >= 1


def test_protocol_is_kept() -> None:
    drafter = ModelDrafter(llama(), DraftingOptions(costs=FREE))
    prompt = np.array(prompt_of(5), np.int32)
    drafter.open("a", prompt)
    with pytest.raises(SessionExistsError):
        drafter.open("a", prompt)
    with pytest.raises(OutOfSequenceError, match="a step was lost"):
        drafter.draft([DraftRequest("a", NOTHING, 6, 8)])
    with pytest.raises(UnknownSessionError):
        drafter.draft([DraftRequest("b", NOTHING, 5, 8)])
    drafter.open("b", prompt)
    first, second = drafter.draft([DraftRequest(name, NOTHING, 5, 8) for name in "ab"])
    assert paths(first) == paths(second)
    assert len(drafter.draft([DraftRequest("a", NOTHING, 5, 0)])[0]) == 0
    drafter.close("a", np.array([1], np.int32))
    with pytest.raises(UnknownSessionError):
        drafter.close("a")


def test_memory_that_does_not_suffice_costs_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = ModelDrafter(llama(), DraftingOptions(costs=FREE))
    drafter.open("a", np.array(prompt_of(5), np.int32))

    def fail(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(DraftModel, "expand", fail)
        with pytest.raises(DrafterUnavailableError, match="memory did not suffice"):
            next_draft(drafter, "a", [], 5, 8)
    fresh = drafted(ModelDrafter(llama(), DraftingOptions(costs=FREE)), prompt_of(5), 8)
    assert paths(next_draft(drafter, "a", [], 5, 8)) == paths(fresh)


@pytest.fixture(scope="module")
def other_directory(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a tokenizer that means other tokens by the same ids."""
    directory = tmp_path_factory.mktemp("other")
    for path in model_directory.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    words = {f"w{number}": number for number in range(257)}
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(models.BPE(vocab=words, merges=[]))
    )
    tokenizer.save_pretrained(directory)
    return directory


def test_draft_model_of_another_tokenizer_is_refused_before_its_weights_are_read(
    model_directory: Path, other_directory: Path
) -> None:
    for weights in other_directory.glob("*.safetensors"):
        weights.unlink()
    target = load_model(ModelOptions(str(model_directory)))
    with pytest.raises(VocabularyMismatchError) as refused:
        load_draft_model(DraftModelOptions(str(other_directory)), target)
    assert str(model_directory) in str(refused.value)
    assert str(other_directory) in str(refused.value)


def test_vocabulary_is_trimmed_by_an_index(model_directory: Path, tmp_path: Path) -> None:
    target = load_model(ModelOptions(str(model_directory)))
    index = tmp_path / "index"
    build_from_tokens([("a", [5, 6, 5, 6, 5, 9])], index, target.vocabulary)
    options = DraftModelOptions(str(model_directory), num_tokens=2)
    drafter = load_draft_model(options, target, [index])
    assert drafter.model.columns.tolist() == [0, 5, 6]  # and the token that ends a sequence
    with pytest.raises(ContradictoryOptionsError, match="--index"):
        load_draft_model(options, target)
    with pytest.raises(ContradictoryOptionsError, match="--index"):
        DrafterSettings(draft_model=str(model_directory), draft_vocabulary=2)
    with pytest.raises(ContradictoryOptionsError, match="--draft-model"):
        DrafterSettings(draft_vocabulary=2)


def test_generate_takes_a_draft_model(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(model_directory)
    arguments = (
        "generate",
        "--model",
        model,
        "--prompt",
        "abab",
        "--max-new-tokens",
        "12",
        "--json",
    )
    assert run(monkeypatch, *arguments) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run(monkeypatch, *arguments, "--draft-model", model) == 0
    drafted_by_model = json.loads(capsys.readouterr().out)
    assert drafted_by_model["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize("draws", [None, Draws()])
def test_model_that_computes_no_numbers_drafts_nothing(draws: Draws | None) -> None:
    model = llama()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        head.weight[3].fill_(torch.nan)
    drafter = ModelDrafter(model, DraftingOptions(draws=draws, costs=FREE))
    assert len(drafted(drafter, prompt_of(5), 8)) == 0

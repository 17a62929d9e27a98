"""Draft models: trimmed heads, other vocabularies, and caches that follow what is committed."""

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

from decoder.assembly import load_draft_reader
from decoder.drafters.draft_model import DraftModel, ModelReader, has_plain_head
from decoder.drafters.drawing import Draws
from decoder.drafters.options import DraftOptions
from decoder.errors import ContradictoryOptionsError, UncroppableCacheError
from decoder.model.pretrained import ModelOptions, load_model
from decoder.sampling.verification import SampledTree
from indexer.build import build_from_tokens
from retriever.errors import VocabularyMismatchError
from retriever.sequences import TokenSequence
from tests.decoder.commands.command_line import run
from tests.decoder.decoding import (
    MODELS,
    SIZES,
    VOCABULARY,
    decoder_with,
    evaluated,
    prompt_of,
    random_tree,
    tiny_gemma,
    tiny_llama,
)
from tests.decoder.drafters.draft_models import alone, distribution, drafted, llama
from tests.decoder.rounding import Rounding

KEPT = np.array([3, 7, 8, 20, 21, 40, 41, 47], np.int32)


@pytest.mark.parametrize("tied", [False, True])
def test_a_trimmed_model_gives_frequent_tokens_their_shares(tied: bool) -> None:  # noqa: FBT001
    model, prompt = llama(tied=tied), prompt_of(9)
    trimmed = DraftModel(model, kept=KEPT[::-1])
    assert trimmed.columns.tolist() == KEPT.tolist()
    logits = ModelReader(trimmed).follow(TokenSequence(np.array(prompt, np.int32))).begin()
    assert logits is not None
    shares = distribution(model, prompt)[KEPT]
    assert torch.softmax(logits[0], -1).numpy() == pytest.approx(shares / shares.sum(), rel=1e-5)
    assert set(drafted(alone(model, kept=KEPT), prompt, 16).token_ids.tolist()) <= set(KEPT)


def test_trimmed_proposals_are_zero_elsewhere() -> None:
    tree = drafted(alone(llama(), draws=Draws(), kept=KEPT), prompt_of(9), 16)
    assert isinstance(tree, SampledTree)
    assert tree.proposals.sum(1).numpy() == pytest.approx(1.0, abs=1e-5)
    assert not np.delete(tree.proposals.numpy(), KEPT, axis=1).any()


def test_a_head_that_is_not_plain_is_not_trimmed(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = CohereConfig(**SIZES, vocab_size=VOCABULARY, num_hidden_layers=2, logit_scale=0.5)
    cohere = evaluated(CohereForCausalLM(config), torch.float64)
    assert not has_plain_head(cohere)
    assert has_plain_head(tiny_gemma())
    assert len(DraftModel(cohere, kept=KEPT).columns) == VOCABULARY
    assert "drafts with its whole vocabulary" in caplog.text


def test_padded_embeddings_are_never_drafted() -> None:
    tree = drafted(alone(llama(), vocabulary=30), prompt_of(9, vocabulary=30), 40)
    assert len(tree) > 0
    assert tree.token_ids.max() < 30


def test_a_model_with_too_few_embeddings_is_refused() -> None:
    with pytest.raises(VocabularyMismatchError, match=r"48 embeddings.*vocabulary has 50"):
        DraftModel(llama(), vocabulary_size=50)
    with pytest.raises(VocabularyMismatchError, match="all below 48"):
        DraftModel(llama(), kept=np.array([48], np.int32))


def test_a_model_with_recurrent_state_is_refused() -> None:
    mamba: Any = MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)
    )
    with pytest.raises(UncroppableCacheError, match="MambaForCausalLM cannot be a draft model"):
        DraftModel(mamba)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_keeps_step_with_whatever_is_committed(name: str, attention: str) -> None:
    """All, a part or none of a tree is committed, and then some."""
    rng = np.random.default_rng(3)
    model = MODELS[name](attention, torch.float64)
    rounding = Rounding.of(model, dtype=torch.float32 if attention == "eager" else torch.float64)
    sequence = TokenSequence(np.array(prompt_of(6), np.int32))
    reading = ModelReader(DraftModel(model)).follow(sequence)
    for _ in range(12):
        logits = reading.begin()
        assert logits is not None
        said = torch.log_softmax(logits[0].double(), -1)
        rounding.check(said, np.log(distribution(model, sequence.tokens.tolist())))
        tree = random_tree(rng, 12)
        reading.read(tree.token_ids.tolist(), tree.parents.tolist())
        path = tree.token_ids[tree.path_to(int(rng.integers(12)))].tolist()
        jump = rng.integers(VOCABULARY, size=1 if rng.random() < 0.7 else 9).tolist()
        sequence.extend([*path[: int(rng.integers(len(path) + 1))], *jump])


def test_what_came_true_is_not_read_again() -> None:
    model, prompt = llama(), prompt_of(10)
    widths: list[int] = []
    model.register_forward_pre_hook(
        lambda _module, _args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    sequence = TokenSequence(np.array(prompt, np.int32))
    reading = ModelReader(DraftModel(model)).follow(sequence)
    reading.begin()
    reading.read([5, 6, 7], [-1, 0, 1])
    widths.clear()
    sequence.extend([5, 6, 3])
    reading.begin()
    assert widths == [1]


def test_a_target_as_its_own_draft_model_is_nearly_always_right() -> None:
    target = tiny_llama()
    generation = decoder_with(target, alone(target)).generate(prompt_of(12), 120)
    assert sum(map(len, generation)) == 120
    assert generation.statistics.tokens_per_pass > 4


@pytest.mark.parametrize("draws", [None, Draws()])
def test_a_model_that_computes_no_numbers_drafts_nothing(draws: Draws | None) -> None:
    model = llama()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        head.weight[3].fill_(torch.nan)
    assert len(drafted(alone(model, draws=draws), prompt_of(5), 8)) == 0


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
        load_draft_reader(str(other_directory), target)
    assert str(model_directory) in str(refused.value)
    assert str(other_directory) in str(refused.value)


def test_vocabulary_is_trimmed_by_an_index(model_directory: Path, tmp_path: Path) -> None:
    target = load_model(ModelOptions(str(model_directory)))
    index = tmp_path / "index"
    build_from_tokens([("a", [5, 6, 5, 6, 5, 9])], index, target.vocabulary)
    drafter = load_draft_reader(str(model_directory), target, [index], num_tokens=2)
    assert drafter.model.columns.tolist() == [0, 5, 6]  # and the token that ends a sequence
    with pytest.raises(ContradictoryOptionsError, match="--index"):
        load_draft_reader(str(model_directory), target, num_tokens=2)
    with pytest.raises(ContradictoryOptionsError, match="--index"):
        DraftOptions(draft_model=str(model_directory), draft_vocabulary=2)
    with pytest.raises(ContradictoryOptionsError, match="--draft-model"):
        DraftOptions(draft_vocabulary=2)


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

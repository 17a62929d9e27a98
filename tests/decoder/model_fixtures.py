import gzip
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from decoder.budget import pass_timing
from decoder.model import user_model
from decoder.model.pretrained import LanguageModel, ModelOptions, load_model
from indexer.tokenizer import CACHE_VARIABLE, DEFAULT_MODEL
from tests.decoder.decoding import SIZES, DoubleNorm, prompt_of

STOP = "<end>"


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> None:
    """Compute in one thread: tiny models wait for a second one longer than they compute."""
    torch.set_num_threads(2 if "real_model" in request.fixturenames else 1)


@pytest.fixture(autouse=True)
def _no_costs_from_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "none")


@pytest.fixture(autouse=True)
def _own_norms_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let passes of models with the norms of these tests be captured."""
    known = (*user_model.KNOWN_CODE, f"{DoubleNorm.__module__}.")
    monkeypatch.setattr(user_model, "KNOWN_CODE", known)


@pytest.fixture(scope="module")
def kept_costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("costs")


@pytest.fixture
def costs_of_earlier_tests(
    _no_costs_from_other_runs: None, kept_costs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure what passes cost once for a module that uses this, or in few rounds at least."""
    monkeypatch.setenv(CACHE_VARIABLE, str(kept_costs))
    monkeypatch.setattr(pass_timing, "_MOST_ROUNDS", 2)


@pytest.fixture
def prompt() -> list[int]:
    return prompt_of(12)


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token for each byte, so that most characters outside ASCII take several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {STOP: 0, **{byte: number for number, byte in enumerate(alphabet, start=1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: PreTrainedTokenizerBase = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=STOP
    )
    return fast


@pytest.fixture(scope="session")
def model_directory(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: PreTrainedTokenizerBase
) -> Path:
    """A whole tiny model on disk, as `save_pretrained` leaves it."""
    torch.manual_seed(3)
    config = LlamaConfig(
        **SIZES,
        vocab_size=len(byte_tokenizer),
        num_hidden_layers=1,
        max_position_embeddings=128,
        eos_token_id=0,
        bos_token_id=0,
    )
    directory = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(directory)
    byte_tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def language_model(model_directory: Path) -> LanguageModel:
    """That model, once for each file of tests: some change what they load."""
    return load_model(ModelOptions(str(model_directory)))


@pytest.fixture(scope="session")
def real_model() -> LanguageModel:
    """The default model, in float32."""
    return load_model(ModelOptions(DEFAULT_MODEL))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl.gz"
    rows = [
        {"question_id": number, "category": category, "turns": [f"{category} {number}", "more"]}
        for category in ("poems", "sums")
        for number in range(3)
    ]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return path

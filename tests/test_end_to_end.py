"""Decoding with drafts from a real service in another process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from decoder.budget.budget import FixedBudget
from decoder.loop import Decoder
from decoder.model.target import Target
from indexer.build import build_from_tokens
from indexer.reader import Vocabulary
from retriever.client.strict import RemoteDrafter
from retriever.tree import Source
from tests.decoder.decoding import VOCABULARY, plainly, prompt_of, tiny_llama
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.warm_interpreter import WarmProcess

NUM_TOKENS = 60
Service = tuple[WarmProcess, str]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="module")
def index(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus that holds what the model will write, among other things."""
    written = plainly(model, prompt_of(12), NUM_TOKENS)
    documents = [("answer", written[10:]), ("other", prompt_of(500, seed=5))]
    path = tmp_path_factory.mktemp("index") / "corpus"
    build_from_tokens(documents, path, Vocabulary(VOCABULARY, "ef" * 32))
    return path


@pytest.fixture
def service(index: Path) -> Iterator[Service]:
    process, address = start_service("--index", str(index), "--address", "127.0.0.1:0")
    yield process, address
    if process.poll() is None:
        stop_service(process)


def test_output_with_served_drafts_is_the_models_own(
    model: PreTrainedModel, service: Service
) -> None:
    with RemoteDrafter(service[1], vocabulary_fingerprint="ef" * 32) as drafter:
        decoder = Decoder(Target(model), drafter, FixedBudget(16))
        for seed in range(3):
            generation = decoder.generate(prompt_of(12, seed), NUM_TOKENS)
            tokens = [token for step in generation for token in step]
            assert tokens == plainly(model, prompt_of(12, seed), NUM_TOKENS)
            if seed == 0:
                assert generation.statistics.accepted[Source.CORPUS] > 10


def test_service_killed_in_the_middle_costs_drafts_and_no_tokens(
    model: PreTrainedModel, service: Service
) -> None:
    process, address = service
    with RemoteDrafter(address, timeout_s=2.0) as drafter:
        generation = Decoder(Target(model), drafter, FixedBudget(16)).generate(
            prompt_of(12), NUM_TOKENS
        )
        tokens: list[int] = []
        for step in generation:
            tokens.extend(step)
            if len(tokens) > 5 and process.poll() is None:
                process.kill()
                process.communicate(timeout=60)
    assert tokens == plainly(model, prompt_of(12), NUM_TOKENS)
    assert generation.statistics.num_failures > 0

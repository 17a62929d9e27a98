"""Drafts from a service inside `model.generate`, whatever becomes of the service."""

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from decoder.engines.transformers.assisted import assisted_generate
from decoder.engines.transformers.custom_generate import Foredraft
from decoder.model.pretrained import LanguageModel
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import RemoteDrafter
from retriever.errors import VocabularyMismatchError
from tests.decoder.decoding import plainly, prompt_of, tiny_llama
from tests.engines.transformers.generating import NEW_TOKENS, Killing, foredraft, generated
from tests.retriever.conftest import start_service, stop_service

Service = tuple["subprocess.Popen[str]", str]
PATIENCE_S = 20.0
FEW_TOKENS = 16


@pytest.fixture
def service() -> Iterator[Service]:
    process, address = start_service("--address", "127.0.0.1:0")
    yield process, address
    if process.poll() is None:
        stop_service(process)


def test_the_service_may_die_in_the_middle_of_a_tree_decode(service: Service) -> None:
    process, address = service
    model, prompt = tiny_llama(), prompt_of(12)
    truth = [prompt + plainly(model, prompt, NEW_TOKENS)]
    with ResilientDrafter(address, deadline_s=1.0, local=False) as drafter:
        assert drafter.wait(PATIENCE_S)
        plugin = foredraft(model, drafter)
        generated(model, prompt, custom_generate=plugin)
        warm = _passes(plugin, model, prompt)
        assert not drafter.fail_opens
        killing = Killing(process, after=1)
        output = generated(model, prompt, custom_generate=plugin, on_tokens=killing)
        assert killing.has_killed
        assert output.tolist() == truth
        assert drafter.fail_opens
        assert _passes(plugin, model, prompt) == NEW_TOKENS > 2 * warm


def test_the_service_may_die_in_the_middle_of_a_chain_decode(service: Service) -> None:
    process, address = service
    model, prompt = tiny_llama(), prompt_of(12)
    truth = [prompt + plainly(model, prompt, NEW_TOKENS)]
    with ResilientDrafter(address, deadline_s=1.0) as drafter:
        assert drafter.wait(PATIENCE_S)
        options: dict[str, Any] = {"custom_generate": assisted_generate, "drafter": drafter}
        killing = Killing(process, after=4)
        output = generated(model, prompt, streamer=killing, **options)
        assert killing.has_killed
        assert output.tolist() == generated(model, prompt, **options).tolist() == truth
        assert drafter.fail_opens


@pytest.mark.faults
def test_a_real_model_writes_the_same_though_its_service_dies(
    service: Service, real_model: LanguageModel
) -> None:
    process, address = service
    model, prompt = real_model.model, real_model.encode("Count from one to ten, twice.")
    truth = [prompt + plainly(model, prompt, FEW_TOKENS)]
    fingerprint = real_model.vocabulary.fingerprint
    with ResilientDrafter(
        address, deadline_s=1.0, local=False, vocabulary_fingerprint=fingerprint
    ) as drafter:
        assert drafter.wait(PATIENCE_S)
        plugin = foredraft(model, drafter)
        assert (
            generated(model, prompt, max_new_tokens=FEW_TOKENS, custom_generate=plugin).tolist()
            == truth
        )
        assert not drafter.fail_opens
        killing = Killing(process, after=1)
        options = {"max_new_tokens": FEW_TOKENS, "on_tokens": killing}
        output = generated(model, prompt, custom_generate=plugin, **options)
        assert killing.has_killed
        assert output.tolist() == truth
        assert drafter.fail_opens


def test_a_client_that_fails_costs_drafts_alone(service: Service) -> None:
    process, address = service
    model, prompt = tiny_llama(), prompt_of(12)
    with RemoteDrafter(address) as drafter:
        plugin = foredraft(model, drafter)
        killing = Killing(process, after=4)
        output = generated(model, prompt, custom_generate=plugin, on_tokens=killing)
        assert output.tolist() == [prompt + plainly(model, prompt, NEW_TOKENS)]
        assert plugin.statistics.num_failures


def test_a_service_for_another_tokenizer_is_refused_before_decoding(service: Service) -> None:
    _, address = service
    model, prompt = tiny_llama(), prompt_of(12)
    with RemoteDrafter(address, vocabulary_fingerprint="ab" * 32) as drafter:
        generated(model, prompt, custom_generate=foredraft(model, drafter))
    with RemoteDrafter(address, vocabulary_fingerprint="cd" * 32) as drafter:
        plugin = foredraft(model, drafter)
        told: list[Any] = []
        with pytest.raises(VocabularyMismatchError, match="fingerprint abab"):
            generated(model, prompt, custom_generate=plugin, on_tokens=told.append)
        assert not told


def _passes(plugin: Foredraft, model: Any, prompt: list[int]) -> int:
    before = plugin.statistics.num_passes
    generated(model, prompt, custom_generate=plugin)
    return plugin.statistics.num_passes - before

"""Drafts from a service inside `model.generate`, whatever becomes of it, or of an index."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decoder.engines.transformers.custom_generate import Foredraft
from decoder.model.pretrained import LanguageModel
from indexer.build import BuildOptions, build_from_texts
from indexer.tokenizer import load_tokenizer
from retriever.client.credentials import Credentials
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import RemoteDrafter
from retriever.errors import VocabularyMismatchError
from retriever.security import admission, private_files
from retriever.security.access import add_certificate, add_token, name_of, remove
from retriever.security.protection import Protection, ProtectionFiles
from retriever.sessions.embedded import EmbeddedDrafter
from tests.decoder.decoding import plainly, prompt_of, tiny_llama
from tests.decoder.engines.transformers.generating import NEW_TOKENS, Killing, foredraft, generated
from tests.indexer.engines.corpora import save_byte_tokenizer
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.security.authorities import signed
from tests.retriever.security.in_process import serving
from tests.retriever.warm_interpreter import WarmProcess

Service = tuple[WarmProcess, str]
PATIENCE_S = 20.0
FEW_TOKENS = 16


@pytest.fixture
def service() -> Iterator[Service]:
    process, address = start_service("--address", "127.0.0.1:0")
    yield process, address
    if process.poll() is None:
        stop_service(process)


@pytest.mark.faults
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


class Once:
    """Does something when it is told of tokens for the second time."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self.num_told = 0

    def __call__(self, _tokens: list[int]) -> None:
        self.num_told += 1
        if self.num_told == 2:
            self._act()


def assert_lost_in_the_middle(drafter: ResilientDrafter, lose: Callable[[], object]) -> None:
    """Decode while a service begins to refuse: the output is the same, and drafts are missed."""
    model, prompt = tiny_llama(), prompt_of(12)
    assert drafter.wait(PATIENCE_S)
    plugin, losing = foredraft(model, drafter), Once(lose)
    output = generated(model, prompt, custom_generate=plugin, on_tokens=losing)
    assert losing.num_told >= 2
    assert output.tolist() == [prompt + plainly(model, prompt, NEW_TOKENS)]
    assert drafter.fail_opens


def test_a_token_may_be_revoked_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "LOOK_EVERY_S", 0.0)
    access = tmp_path / "access"
    token = add_token(access, "acme")
    protection = Protection.of(ProtectionFiles(access=access))
    with (
        serving(EmbeddedDrafter(), f"unix:{tmp_path}/s", protection) as address,
        ResilientDrafter(
            address, deadline_s=1.0, local=False, credentials=Credentials(token=token)
        ) as drafter,
    ):
        assert_lost_in_the_middle(drafter, lambda: remove(access, name_of(token) or ""))


def test_a_certificate_may_expire_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock that the service looks at goes on by two hours."""
    later = SimpleNamespace(time=lambda: time.time() + 7200, monotonic=time.monotonic)
    authority = signed(tmp_path, "authority")
    server = signed(tmp_path, "server", authority)
    short = signed(tmp_path, "short", authority, hours=(-1, 1))
    access = tmp_path / "access"
    add_certificate(access, "acme", "CN:short")
    protection = Protection.of(
        ProtectionFiles(
            certificate=server.certificate,
            key=server.key,
            client_ca=authority.certificate,
            access=access,
        )
    )
    shown = Credentials(authority.certificate, short.certificate, short.key)
    with (
        serving(EmbeddedDrafter(), protection=protection) as address,
        ResilientDrafter(address, deadline_s=1.0, local=False, credentials=shown) as drafter,
    ):
        assert_lost_in_the_middle(drafter, lambda: monkeypatch.setattr(admission, "time", later))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_index_may_change_in_the_middle(tmp_path: Path) -> None:
    model, prompt = tiny_llama(), prompt_of(12)
    name = str(save_byte_tokenizer(tmp_path / "tokenizer"))
    index = tmp_path / "index"
    truth = plainly(model, prompt, NEW_TOKENS)
    written = str(load_tokenizer(name).decode(prompt[-4:] + truth))
    build_from_texts([("other", "nothing of it")], index, name)

    def passes(*, change: bool) -> int:
        drafter = EmbeddedDrafter.open_indexes([index])

        def act() -> None:
            if change:
                overwriting = BuildOptions(overwrite=True)
                build_from_texts([("it", written)], index, name, overwriting)
                assert drafter.refresh()

        plugin = foredraft(model, drafter)
        output = generated(model, prompt, custom_generate=plugin, on_tokens=Once(act))
        drafter.shut_down()
        assert output.tolist() == [prompt + truth]
        assert not plugin.statistics.num_failures
        return plugin.statistics.num_passes

    unchanged = passes(change=False)
    assert passes(change=True) < unchanged


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

"""The engine is checked at start for what the adapter stands on."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from decoder.errors import UnsupportedEngineError
from decoder.plugins.experimental_sglang.conformance import changes
from decoder.plugins.experimental_sglang.plugin import worker_class


@pytest.fixture(autouse=True)
def _engine(ngram_worker: Any) -> None:
    assert ngram_worker


def test_the_installed_engine_is_made_as_expected() -> None:
    assert changes() == []


def with_another_batch(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.ngram_worker import NGRAMWorker  # noqa: PLC0415

    def prepare(self: Any, requests: Any) -> Any:
        return self, requests

    patch.setattr(NGRAMWorker, "_prepare_draft_tokens", prepare)


def without_lookup(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus  # noqa: PLC0415

    patch.delattr(NgramCorpus, "batch_get")


def with_more_of_the_corpus(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus  # noqa: PLC0415

    def batch_put(_self: Any, tokens: Any, weights: Any) -> Any:
        return tokens, weights

    patch.setattr(NgramCorpus, "batch_put", batch_put)


def with_new_calls(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import ngram_worker  # noqa: PLC0415

    class NGRAMWorker:
        def __init__(
            self, server_args: Any, gpu_id: Any, nccl_port: Any, target_worker: Any
        ) -> None:
            self.ngram_corpus: Any = (server_args, gpu_id, nccl_port, target_worker)

        def _prepare_draft_tokens(self, batch: Any) -> None:
            self.ngram_corpus.forecast(batch)

    patch.setattr(ngram_worker, "NGRAMWorker", NGRAMWorker)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_another_batch, "NGRAMWorker._prepare_draft_tokens takes no `batch`"),
        (with_another_batch, "NGRAMWorker._prepare_draft_tokens needs `requests`"),
        (without_lookup, "NgramCorpus.batch_get is not there"),
        (with_more_of_the_corpus, "NgramCorpus.batch_put has a new parameter `weights`"),
        (with_new_calls, "NGRAMWorker calls `forecast` of its corpus, which is new"),
    ],
)
def test_another_engine_is_refused_with_what_has_changed(
    change: Callable[[pytest.MonkeyPatch], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    assert any(said in sentence for sentence in changes())
    with pytest.raises(UnsupportedEngineError, match="install sglang >=") as caught:
        worker_class(SimpleNamespace())
    assert said in str(caught.value)

"""The engine is checked at start for what the adapters stand on."""

from collections.abc import Callable
from typing import Any

import pytest

from decoder.engines.experimental_sglang.conformance import changes, check_engine


@pytest.fixture(autouse=True)
def _engine(ngram_worker: Any) -> None:
    assert ngram_worker


@pytest.mark.parametrize("drafts_with", ["NGRAM", "EAGLE"])
def test_the_installed_engine_is_made_as_expected(drafts_with: str) -> None:
    assert changes(drafts_with) == []
    check_engine(drafts_with, "0.5.23", ">=0.5.23,<0.5.24")


def without_verify(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2  # noqa: PLC0415

    patch.delattr(EAGLEWorkerV2, "verify")


def with_another_draft(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker  # noqa: PLC0415

    def draft(self: Any, batch: Any, plan: Any) -> Any:
        return self, batch, plan

    patch.setattr(EagleDraftWorker, "draft", draft)


def without_a_field(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.eagle_info import EagleVerifyInput  # noqa: PLC0415

    known = dict(EagleVerifyInput.__dataclass_fields__)
    del known["spec_steps"]
    patch.setattr(EagleVerifyInput, "__dataclass_fields__", known)


def with_other_scores(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import eagle_worker_v2  # noqa: PLC0415

    def organize(scores: Any, tokens: Any) -> Any:
        return scores, tokens

    patch.setattr(eagle_worker_v2, "organize_draft_results", organize)


def with_more_of_the_corpus(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus  # noqa: PLC0415

    def batch_put(_self: Any, tokens: Any, weights: Any) -> Any:
        return tokens, weights

    patch.setattr(NgramCorpus, "batch_put", batch_put)


@pytest.mark.parametrize(
    ("drafts_with", "change", "said"),
    [
        ("EAGLE", without_verify, "there is no EAGLEWorkerV2.verify"),
        ("EAGLE", with_another_draft, "EagleDraftWorker.draft takes no with_topology"),
        ("EAGLE", with_another_draft, "EagleDraftWorker.draft also needs plan"),
        ("EAGLE", without_a_field, "EagleVerifyInput has no spec_steps"),
        ("EAGLE", with_other_scores, "organize_draft_results takes no score_list"),
        ("NGRAM", with_more_of_the_corpus, "NgramCorpus.batch_put takes 2 arguments instead of 1"),
    ],
)
def test_another_engine_is_refused_with_what_has_changed(
    drafts_with: str,
    change: Callable[[pytest.MonkeyPatch], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(monkeypatch)
    assert any(said in sentence for sentence in changes(drafts_with))
    with pytest.raises(ValueError, match=r"SGLang 0\.9 differs"):
        check_engine(drafts_with, "0.9", ">=0.5.23,<0.5.24")

"""The engine is checked at start for what the adapters stand on."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from decoder.engines.experimental_sglang.conformance import changes
from decoder.engines.experimental_sglang.plugin import over_class, worker_class
from decoder.errors import UnsupportedEngineError


@pytest.fixture(autouse=True)
def _engine(ngram_worker: Any) -> None:
    assert ngram_worker


@pytest.mark.parametrize("drafts_with", ["NGRAM", "EAGLE", "DFLASH"])
def test_the_installed_engine_is_made_as_expected(drafts_with: str) -> None:
    assert changes(drafts_with) == []


def without_verify(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2  # noqa: PLC0415

    patch.delattr(EAGLEWorkerV2, "verify")


def with_another_draft(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker  # noqa: PLC0415

    def draft(self: Any, batch: Any, plan: Any) -> Any:
        return self, batch, plan

    patch.setattr(EagleDraftWorker, "draft", draft)


def lacking(patch: pytest.MonkeyPatch, module: Any, name: str, field: str) -> None:
    known = dataclasses.fields(getattr(module, name))
    kept = [(each.name, each.type, None) for each in known if each.name != field]
    patch.setattr(module, name, dataclasses.make_dataclass(name, kept))


def without_a_field(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import eagle_info  # noqa: PLC0415

    lacking(patch, eagle_info, "EagleVerifyInput", "spec_steps")


def with_other_scores(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import eagle_worker_v2  # noqa: PLC0415

    def organize(scores: Any, tokens: Any) -> Any:
        return scores, tokens

    patch.setattr(eagle_worker_v2, "organize_draft_results", organize)


def with_another_block(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import dflash_worker_v2  # noqa: PLC0415

    lacking(patch, dflash_worker_v2, "DFlashVerifyInput", "draft_token")


def without_links(patch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import dflash_worker_v2  # noqa: PLC0415

    patch.delattr(dflash_worker_v2, "GrammarTree")


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
    ("drafts_with", "change", "said"),
    [
        ("EAGLE", without_verify, "EAGLEWorkerV2.verify is not there"),
        ("EAGLE", with_another_draft, "EagleDraftWorker.draft takes no `with_topology`"),
        ("EAGLE", with_another_draft, "EagleDraftWorker.draft needs `plan`"),
        ("EAGLE", without_a_field, "EagleVerifyInput has no parameter `spec_steps`"),
        ("EAGLE", with_other_scores, "organize_draft_results takes no `score_list`"),
        ("DFLASH", with_another_block, "DFlashVerifyInput has no parameter `draft_token`"),
        ("DFLASH", without_links, "GrammarTree.from_linear_chain is not there"),
        ("NGRAM", with_more_of_the_corpus, "NgramCorpus.batch_put has a new parameter `weights`"),
        ("NGRAM", with_new_calls, "NGRAMWorker calls `forecast` of its corpus, which is new"),
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
    with pytest.raises(UnsupportedEngineError, match="install sglang >=") as caught:
        started(drafts_with)
    assert said in str(caught.value)


def started(drafts_with: str) -> type:
    """What SGLang asks for before it loads a model."""
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2  # noqa: PLC0415
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2  # noqa: PLC0415

    options = SimpleNamespace(
        pp_size=1,
        attn_dp_size=1,
        enable_mixed_chunk=False,
        speculative_use_rejection_sampling=False,
    )
    if drafts_with == "NGRAM":
        return worker_class(options)
    return over_class(DFlashWorkerV2 if drafts_with == "DFLASH" else EAGLEWorkerV2, options)

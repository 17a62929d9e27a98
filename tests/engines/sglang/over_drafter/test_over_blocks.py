"""Retrieval on top of DFlash, with the engine's own step from the block's draft to acceptance."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decoder.engines.engine_sessions import DrafterSessions
from decoder.engines.experimental_sglang.custom_params import CustomParams
from decoder.errors import UnsupportedEngineError
from retriever.client.local import LocalDrafter
from retriever.tree import Source
from tests.engines.sglang.over_drafter.dflash_engine import BLOCK, DFlashEngine
from tests.engines.sglang.over_drafter.eagle_engine import EagleRequest
from tests.engines.sglang.over_drafter.merged_outputs import PROMPTS, Broken, check_exact
from tests.engines.sglang.sglang_decoding import NUM_TOKENS, plain

Made = Callable[..., DFlashEngine]


@pytest.fixture
def make(ngram_worker: Any, monkeypatch: pytest.MonkeyPatch) -> Made:
    """An engine whose worker has retrieval on top, or none where the drafter is "none"."""
    assert ngram_worker
    from sglang.srt.speculative import dflash_worker_v2  # noqa: PLC0415

    from decoder.engines.experimental_sglang import over_blocks  # noqa: PLC0415  (loads the engine)
    from decoder.engines.experimental_sglang.merged_requests import MergedRequests  # noqa: PLC0415
    from decoder.engines.experimental_sglang.merged_steps import Parts  # noqa: PLC0415

    def made(top1: float = 0.7, *, drafter: Any = None, **options: Any) -> DFlashEngine:
        base = dflash_worker_v2.DFlashWorkerV2
        if drafter == "none":
            return DFlashEngine(monkeypatch, base, top1, **options)
        engine = DFlashEngine(monkeypatch, over_blocks.over(base), top1, **options)
        for name in ("GrammarTree", "DFlashVerifyInput"):  # put back at the end
            monkeypatch.setattr(dflash_worker_v2, name, getattr(dflash_worker_v2, name))
        sessions = DrafterSessions(drafter or LocalDrafter())
        requests = MergedRequests(sessions, CustomParams(), NUM_TOKENS)
        engine.worker.merging = over_blocks.BlockMerging(engine.worker, Parts(requests))
        return engine

    return made


def decoded(
    engine: DFlashEngine, num_tokens: int = 80, *, has_grammar: bool = False, **fields: Any
) -> tuple[list[list[int]], int]:
    """Outputs, and how many steps they took."""
    requests = [EagleRequest.of(str(at), prompt, **fields) for at, prompt in enumerate(PROMPTS)]
    steps = 0
    while min(len(each.tokens) for each in requests) < num_tokens:
        engine.step(requests, has_grammar=has_grammar)
        steps += 1
    return [each.tokens for each in requests], steps


@pytest.mark.parametrize("lags", [True, False])
@pytest.mark.parametrize("has_grammar", [True, False])
def test_merged_blocks_take_fewer_steps_and_change_no_token(
    make: Made, *, has_grammar: bool, lags: bool
) -> None:
    alone, alone_steps = decoded(make(drafter="none", lags=lags), 200, has_grammar=has_grammar)
    engine = make(lags=lags)
    merged, steps = decoded(engine, 200, has_grammar=has_grammar)
    check_exact(alone)
    check_exact(merged)
    assert steps < alone_steps
    assert engine.num_drafts == steps == engine.worker.merging.requests.trained.num_asked
    assert engine.worker.merging.num_errors == 0


def test_grammars_are_led_along_the_tokens_that_are_verified(make: Made) -> None:
    engine = make()
    decoded(engine, 200, has_grammar=True)
    assert len(engine.linked) == len(engine.verified)
    for linked, verified in zip(engine.linked, engine.verified, strict=True):
        assert torch.equal(linked, verified)


def test_both_parts_are_verified_and_accepted(make: Made) -> None:
    engine = make()
    decoded(engine, 200)
    counts = engine.worker.merging.requests.counts
    assert counts.accepted[Source.MODEL] > 0
    assert len(counts.accepted) > 1
    assert counts.num_accepted == sum(counts.accepted_per_position())


def test_every_block_is_full_and_follows_the_last_token(make: Made) -> None:
    engine = make()
    request = EagleRequest.of("a", PROMPTS[0])
    for _ in range(20):
        last = request.tokens[-1]
        engine.step([request])
        block = engine.verified[-1][0]
        assert len(block) == BLOCK
        assert block[0] == last
        assert 0 <= int(block.min()) <= int(block.max()) < NUM_TOKENS


def test_an_error_of_ours_leaves_the_engines_own_blocks(
    make: Made, caplog: pytest.LogCaptureFixture
) -> None:
    alone, alone_steps = decoded(make(drafter="none"))
    with caplog.at_level(logging.ERROR):
        engine = make(drafter=Broken(1))
        assert decoded(engine) == (alone, alone_steps)
    assert engine.worker.merging.num_errors == 1
    assert caplog.text.count("its own drafter") == 1


def test_an_error_in_the_midst_changes_no_token(make: Made) -> None:
    engine = make(drafter=Broken(5))
    check_exact(decoded(engine)[0])
    assert engine.worker.merging.num_errors == 1


def test_a_buffer_that_is_not_the_workers_is_left_alone(make: Made) -> None:
    """Else tokens would be accepted that were not verified."""
    alone, alone_steps = decoded(make(drafter="none"))
    engine = make()
    merging = engine.worker.merging
    merging._worker = SimpleNamespace(_draft_block_tokens_buf=torch.zeros(1))
    assert decoded(engine) == (alone, alone_steps)
    assert merging.num_errors == alone_steps


def test_requests_without_drafts_keep_the_engines_own(make: Made) -> None:
    alone, steps = decoded(make(drafter="none"))
    engine = make()
    assert decoded(engine, foredraft_drafts=False) == (alone, steps)
    assert len(engine.worker.merging.requests) == 0


def test_requests_come_and_go(make: Made) -> None:
    engine = make()
    requests = [EagleRequest.of(str(at), PROMPTS[at % 3]) for at in range(6)]
    for at in range(20):
        engine.step(requests[at // 5 : at // 5 + 3])
        assert len(engine.worker.merging.requests) == 3
    for request in requests:
        prompt = list(request.origin_input_ids_unpadded)
        assert request.tokens[len(prompt) :] == plain(prompt, len(request.tokens) - len(prompt))
    engine.worker.merging.requests.end_all()
    assert len(engine.worker.merging.requests) == 0


def test_ranks_verify_the_tokens_of_the_first(make: Made) -> None:
    sent: list[Any] = []
    first = make()
    first.worker.merging._share = lambda array: sent.append(array.copy())
    first_outputs, _ = decoded(first)
    second = make(0.2)  # whatever its own drafter says
    second.worker.merging.requests = None
    taken = iter(sent)

    def receive(array: Any) -> None:
        array[:] = next(taken)

    second.worker.merging._share = receive
    assert decoded(second)[0] == first_outputs
    for mine, theirs in zip(second.verified, first.verified, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("head", ["selector", "lilicorr"])
def test_heads_that_draw_tokens_are_refused(make: Made, head: str) -> None:
    from decoder.engines.experimental_sglang import over_blocks  # noqa: PLC0415  (loads the engine)

    worker = make(drafter="none").worker
    over_blocks.check_made(worker)
    worker.__dict__[head] = object()
    with pytest.raises(ValueError, match="drawn"):
        over_blocks.check_made(worker)


def test_a_worker_that_is_made_otherwise_is_refused(make: Made) -> None:
    from decoder.engines.experimental_sglang import over_blocks  # noqa: PLC0415  (as above)

    worker = make(drafter="none").worker
    del worker.__dict__["lilicorr"]
    worker.__dict__["_target_worker"] = SimpleNamespace()
    with pytest.raises(UnsupportedEngineError, match="lilicorr"):
        over_blocks.check_made(worker)

"""Retrieval on top of a trained drafter, with the engine's own drafting, trees and verification."""

import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from decoder.engines.engine_options import OVER_DRAFTER
from decoder.engines.engine_sessions import DrafterSessions
from decoder.engines.experimental_sglang.custom_params import CustomParams
from retriever.client.local import LocalDrafter
from retriever.tree import Source
from tests.engines.sglang.conftest import Kernels
from tests.engines.sglang.over_drafter.eagle_engine import EagleEngine, EagleRequest, masks, paths
from tests.engines.sglang.over_drafter.merged_outputs import PROMPTS, Broken, check_exact
from tests.engines.sglang.sglang_decoding import NUM_TOKENS, plain

TREE, CHAIN = (4, 4, 12), (1, 5, 6)
Made = Callable[..., tuple[EagleEngine, Any]]


@pytest.fixture
def make(ngram_worker: Any, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Made:
    """An engine, and its worker with retrieval on top."""
    assert ngram_worker
    from sglang.srt.speculative import eagle_worker_v2  # noqa: PLC0415

    from decoder.engines.experimental_sglang import over_trained  # noqa: PLC0415  (loads the engine)
    from decoder.engines.experimental_sglang.merged_requests import MergedRequests  # noqa: PLC0415
    from decoder.engines.experimental_sglang.merged_steps import Parts  # noqa: PLC0415

    def made(shape: tuple[int, int, int], top1: float = 0.7, **options: Any) -> Any:
        drafter = options.pop("drafter", None) or LocalDrafter()
        engine = EagleEngine(monkeypatch, kernels, *shape, top1, **options)
        original = eagle_worker_v2.organize_draft_results
        monkeypatch.setattr(eagle_worker_v2, "organize_draft_results", original)
        monkeypatch.setattr(over_trained, "_max_rows", lambda: 8)
        worker = SimpleNamespace(
            draft_worker=engine.draft_worker,
            target_worker=engine.target_worker,
            verify=engine.verify,
        )
        if drafter != "none":
            requests = MergedRequests(DrafterSessions(drafter), CustomParams(), NUM_TOKENS)
            merging = over_trained.Merging(worker, Parts(requests))
            worker.merging, verify = merging, engine.verify

            def verifying(batch: Any) -> Any:
                result = verify(batch)
                merging.note(batch, result)
                return result

            worker.verify = verifying
        return engine, worker

    return made


def decoded(
    engine: EagleEngine, worker: Any, num_tokens: int = 80, **fields: Any
) -> tuple[list[list[int]], int]:
    """Outputs, and how many steps they took."""
    requests = [EagleRequest.of(str(at), prompt, **fields) for at, prompt in enumerate(PROMPTS)]
    steps = 0
    while min(len(each.tokens) for each in requests) < num_tokens:
        engine.step(worker, requests)
        steps += 1
    return [each.tokens for each in requests], steps


@pytest.mark.parametrize("shape", [TREE, CHAIN])
@pytest.mark.parametrize("lags", [True, False])
def test_merged_drafts_take_fewer_steps_and_change_no_token(
    make: Made, shape: tuple[int, int, int], *, lags: bool
) -> None:
    alone, alone_steps = decoded(*make(shape, drafter="none", lags=lags), 200)
    engine, worker = make(shape, lags=lags)
    worker.merging.requests.trained.asks = lambda _: True  # so that time changes nothing
    merged, steps = decoded(engine, worker, 200)
    check_exact(alone)
    check_exact(merged)
    assert steps < alone_steps


@pytest.mark.parametrize("shape", [TREE, CHAIN])
def test_every_verified_tree_is_whole_and_its_siblings_differ(
    make: Made, shape: tuple[int, int, int]
) -> None:
    engine, worker = make(shape)
    decoded(engine, worker)
    deepest = 0
    for verify_input, lengths, contexts in engine.verified:
        assert verify_input.draft_token_num == shape[2]
        tokens = verify_input.draft_token.view(len(lengths), shape[2])
        assert tokens.min() >= 0
        assert tokens.max() < NUM_TOKENS
        positions = verify_input.positions.view(len(lengths), shape[2])
        for row, mask in enumerate(masks(verify_input, lengths)):
            assert tokens[row, 0] == contexts[row][-1]
            ways = paths(verify_input, lengths, row)
            assert len({tuple(path) for path in ways}) == shape[2]  # so siblings differ
            depths = mask.sum(1) - 1
            assert positions[row].tolist() == (int(lengths[row]) + depths).tolist()
            assert mask.diagonal().all()
            assert not np.triu(mask, 1).any()
            for node, path in enumerate(ways[1:], 1):  # what a node sees is its parent and above
                assert tuple(path[:-1]) in {tuple(way) for way in ways[:node]}
            deepest = max(deepest, int(depths.max()))
    assert deepest > 4 or shape is CHAIN  # deeper than the drafter's own trees


def test_both_parts_are_verified_and_accepted(make: Made) -> None:
    engine, worker = make(TREE)
    decoded(engine, worker)
    counts = worker.merging.requests.counts
    assert counts.accepted[Source.MODEL] > 0
    accepted_at = counts.accepted_per_position()
    assert counts.num_accepted == sum(accepted_at)
    assert len(counts.accepted) > 1
    assert accepted_at == sorted(accepted_at, reverse=True)


def test_the_drafter_is_not_run_where_retrieval_is_sure(make: Made) -> None:
    engine, worker = make(TREE, top1=0.05)
    trained = worker.merging.requests.trained
    note = trained.note_asked
    trained.note_asked = lambda _: note(3600.0)  # as slow as can be
    outputs, steps = decoded(engine, worker, 200)
    check_exact(outputs)
    assert engine.num_drafts < steps
    assert engine.num_drafts == trained.num_asked
    assert trained.num_skipped == steps - engine.num_drafts


@pytest.mark.parametrize("shape", [TREE, CHAIN])
def test_an_error_of_ours_leaves_the_engines_own_drafts(
    make: Made, shape: tuple[int, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    alone, alone_steps = decoded(*make(shape, drafter="none"))
    with caplog.at_level(logging.ERROR):
        engine, worker = make(shape, drafter=Broken(1))
        outputs, steps = decoded(engine, worker)
    assert outputs == alone
    assert steps == alone_steps
    assert worker.merging.num_errors == 1  # the requests that ran are left alone
    assert caplog.text.count("its own drafter") == 1


@pytest.mark.parametrize("shape", [TREE, CHAIN])
def test_an_error_in_the_midst_changes_no_token(make: Made, shape: tuple[int, int, int]) -> None:
    engine, worker = make(shape, drafter=Broken(5))
    check_exact(decoded(engine, worker)[0])
    assert worker.merging.num_errors == 1


def test_a_tree_that_cannot_be_built_leaves_the_engines_own(
    make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    from decoder.engines.experimental_sglang import over_trained  # noqa: PLC0415

    module: Any = over_trained
    build, failed = module.build_eagle_verify_input, []

    def failing(*arguments: Any, **options: Any) -> Any:
        if options["num_steps"] == module.DEPTH:
            failed.append(build(*arguments, **options))  # what it was built in is overwritten
            raise RuntimeError("planted")
        return build(*arguments, **options)

    monkeypatch.setattr(over_trained, "build_eagle_verify_input", failing)
    alone, _ = decoded(*make(TREE, drafter="none"))
    outputs, _ = decoded(*make(TREE))
    assert failed
    assert outputs == alone


def test_requests_without_drafts_keep_the_engines_own(make: Made) -> None:
    alone, steps = decoded(*make(TREE, drafter="none"))
    engine, worker = make(TREE)
    assert decoded(engine, worker, foredraft_drafts=False) == (alone, steps)
    assert len(worker.merging.requests) == 0


def test_requests_come_and_go(make: Made) -> None:
    engine, worker = make(TREE)
    requests = [EagleRequest.of(str(at), PROMPTS[at % 3]) for at in range(6)]
    for at in range(20):
        engine.step(worker, requests[at // 5 : at // 5 + 3])
        assert len(worker.merging.requests) == len(requests[at // 5 : at // 5 + 3])
    for request in requests:
        prompt = list(request.origin_input_ids_unpadded)
        assert request.tokens[len(prompt) :] == plain(prompt, len(request.tokens) - len(prompt))
    worker.merging.requests.end_all()
    assert len(worker.merging.requests) == 0


def test_a_request_whose_tokens_are_others_than_ours_is_left_to_the_engine(make: Made) -> None:
    engine, worker = make(TREE)
    request = EagleRequest.of("a", PROMPTS[0])
    for _ in range(4):
        engine.step(worker, [request])
    worker.merging.requests.trained.asks = lambda _: True
    worker.merging._outcomes.clear()  # a step that we were not told of, and one that was none
    worker.merging.requests._followed["a"].merged.sequence.extend([NUM_TOKENS - 1])
    engine.step(worker, [request])
    assert len(worker.merging.requests) == 0
    for _ in range(4):
        engine.step(worker, [request])
    prompt = PROMPTS[0]
    assert request.tokens[len(prompt) :] == plain(prompt, len(request.tokens) - len(prompt))


def test_ranks_verify_the_nodes_of_the_first(make: Made) -> None:
    sent: list[np.ndarray[Any, Any]] = []
    first, first_worker = make(TREE)
    first_worker.merging._share = lambda array: sent.append(array.copy())
    first_outputs, _ = decoded(first, first_worker)
    second, second_worker = make(TREE, top1=0.2)  # whatever its own drafter says
    second_worker.merging.requests = None
    taken = iter(sent)

    def receive(array: Any) -> None:
        array[:] = next(taken)

    second_worker.merging._share = receive
    outputs, _ = decoded(second, second_worker)
    assert outputs == first_outputs
    merged = [each[0].draft_token.tolist() for each in first.verified]
    assert [each[0].draft_token.tolist() for each in second.verified] == merged


def test_the_engines_probabilities_are_those_of_its_tree(make: Made) -> None:
    engine, worker = make(TREE)
    requests = [EagleRequest.of("a", PROMPTS[0])]
    engine.step(worker, requests)
    stated = worker.merging._scores.rows(1, TREE[2] - 1)[0]
    assert len(stated) == TREE[2] - 1
    assert 0 < min(stated) < max(stated) < 1
    first = engine.runner.logits([*PROMPTS[0], plain(PROMPTS[0], 1)[0]]).softmax(-1)
    assert max(stated) == pytest.approx(float(first.max()), rel=1e-5)


@pytest.fixture
def hooked(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang with our hook, which is taken away again."""
    from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: PLC0415
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: PLC0415

    monkeypatch.setenv(OVER_DRAFTER, "1")
    original = SpeculativeAlgorithm.create_worker
    monkeypatch.setattr(SpeculativeAlgorithm, "create_worker", original)
    assert plugin.is_over()
    plugin._hook()
    HookRegistry.apply_hooks()
    yield SpeculativeAlgorithm
    HookRegistry.reset()


class Arguments(SimpleNamespace):
    """Resolved arguments of a server."""

    def __init__(self, **changed: Any) -> None:
        super().__init__(
            **{
                "pp_size": 1,
                "attn_dp_size": 1,
                "enable_mixed_chunk": False,
                "enable_multi_layer_eagle": False,
                "speculative_use_rejection_sampling": False,
            }
            | changed
        )


@pytest.fixture
def _arguments(monkeypatch: pytest.MonkeyPatch, ngram_worker: Any) -> None:
    assert ngram_worker
    from sglang.srt.arg_groups import overrides  # noqa: PLC0415
    from sglang.srt.speculative import spec_info  # noqa: PLC0415

    for module in (overrides, spec_info):
        monkeypatch.setattr(module, "resolving_view", lambda arguments: arguments)


@pytest.mark.usefixtures("_arguments")
@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH"])
def test_sglang_makes_our_worker_of_its_own(hooked: Any, name: str) -> None:
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2  # noqa: PLC0415
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2  # noqa: PLC0415

    made = hooked.from_string(name).create_worker(Arguments())
    assert issubclass(made, DFlashWorkerV2 if name == "DFLASH" else EAGLEWorkerV2)
    assert made.__name__.startswith("ForedraftOver")


@pytest.mark.usefixtures("_arguments")
@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("EAGLE3", {"pp_size": 2}, "--pp-size"),
        ("EAGLE3", {"attn_dp_size": 2}, "--enable-dp-attention"),
        ("EAGLE", {"enable_mixed_chunk": True}, "--enable-mixed-chunk"),
        ("EAGLE", {"speculative_use_rejection_sampling": True}, "rejection-sampling"),
        ("NGRAM", {}, "NGRAMWorker"),
        ("DSPARK", {}, "DSpark"),
    ],
)
def test_what_is_not_supported_is_refused_at_start(
    hooked: Any, name: str, changed: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        hooked.from_string(name).create_worker(Arguments(**changed))


def test_the_variable_is_zero_or_one(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, is_over in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv(OVER_DRAFTER, value)
        assert plugin.is_over() == is_over
    monkeypatch.setenv(OVER_DRAFTER, "EAGLE3")
    with pytest.raises(ValueError, match="0 or 1"):
        plugin.is_over()
    assert OVER_DRAFTER in os.environ

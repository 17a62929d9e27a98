"""Many sequences in one pass: each has the output that it has alone, and what fails fails alone."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from decoder.budget.budget import FixedBudget
from decoder.drafters.following import NoDrafter
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.recycling import RecycledLogits
from decoder.errors import (
    DeadEndError,
    DecoderBusyError,
    InvalidPromptError,
    InvalidSettingsError,
    OutOfMemoryError,
)
from decoder.loop import Decoder, Generation, Request
from decoder.model import target as target_module
from decoder.model.packed import PackedPasses
from decoder.model.passes import Reading
from decoder.model.target import Target
from decoder.observation import ObservedPass
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import PassContext
from retriever.follower import DraftLimits
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from tests.decoder.decoding import (
    VOCABULARY,
    Guess,
    ScriptedDrafter,
    decoder_with,
    oracle_tree,
    plainly,
    prompt_of,
    random_tree,
    tiny_gemma,
    tiny_llama,
)
from tests.suite_parts import cases

NEW_TOKENS = 24
PROMPTS = [prompt_of(length, seed=length) for length in (3, 90, 11, 1, 40, 17, 29, 6, 70)]


def right_and_wrong(truths: dict[tuple[int, ...], list[int]]) -> Guess:
    """Draft what comes in some steps, and anything in the others."""
    rng = np.random.default_rng(3)

    def guess(tokens: list[int], _: int) -> DraftTree:
        for prompt, truth in truths.items():
            if tuple(tokens[: len(prompt)]) == prompt and rng.random() < 0.7:
                return oracle_tree(rng, truth[len(tokens) - len(prompt) :], 12)
        return random_tree(rng, int(rng.integers(0, 16)))

    return guess


def outputs(
    decoder: Decoder, requests: Iterable[Request], parallel: int
) -> dict[int, tuple[list[int], Generation]]:
    """Return the tokens of each request, by its number."""
    tokens: dict[int, list[int]] = {}
    found: dict[int, Generation] = {}
    for generation, new in decoder.generate_many(requests, parallel):
        assert not (generation.is_over and generation.number in found and new)
        tokens.setdefault(generation.number, []).extend(new)
        if generation.is_over:
            found[generation.number] = generation
    assert found.keys() == tokens.keys()
    return {number: (tokens[number], found[number]) for number in sorted(tokens)}


@cache
def llama() -> PreTrainedModel:
    return tiny_llama()


@cache
def truths_of(model: PreTrainedModel) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): plainly(model, prompt, NEW_TOKENS) for prompt in PROMPTS}


@pytest.mark.seeds
@pytest.mark.parametrize("seed", range(cases(1, of=4)))
def test_orders_stops_limits_and_aborts_change_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = tiny_gemma()
    truths = truths_of(model)
    stop = int(rng.integers(VOCABULARY))
    decoder = decoder_with(model, ScriptedDrafter(right_and_wrong(truths)), stop_ids=[stop])
    order = rng.permutation(len(PROMPTS)).tolist()
    limits = rng.integers(0, NEW_TOKENS + 1, len(PROMPTS)).tolist()
    aborted = set(rng.choice(len(PROMPTS), 2, replace=False).tolist())
    tokens: dict[int, list[int]] = {}
    requests = [Request(PROMPTS[at], limits[at]) for at in order]
    for generation, new in decoder.generate_many(requests, 4):
        tokens.setdefault(generation.number, []).extend(new)
        if generation.number in aborted and len(tokens[generation.number]) > 5:
            generation.stop()
    for number, at in enumerate(order):
        truth = truths[tuple(PROMPTS[at])][: limits[at]]
        truth = truth[: truth.index(stop) + 1] if stop in truth else truth
        if number in aborted:
            assert tokens[number] == truth[: len(tokens[number])]
        else:
            assert tokens[number] == truth


def test_each_sequence_has_its_own_rule() -> None:
    model = tiny_llama(dtype=torch.float64)
    rules = [accept_rule(SamplingSettings(1.0, seed=seed)) for seed in range(len(PROMPTS))]
    requests = [Request(p, 10, accept=r) for p, r in zip(PROMPTS, rules, strict=True)]
    requests[2] = replace(requests[2], accept=None)
    decoder = Decoder(Target(model), NoDrafter(), FixedBudget(0))
    found = outputs(decoder, requests, 4)
    alone = outputs(Decoder(Target(model), NoDrafter(), FixedBudget(0)), requests, 1)
    assert [tokens for tokens, _ in found.values()] == [tokens for tokens, _ in alone.values()]
    assert found[2][0] == plainly(model, PROMPTS[2], 10)


def test_what_fails_fails_alone() -> None:
    """A prompt that is refused, a rule, a stop rule and an observer that raise."""
    model = llama()

    def dead_end(tree: DraftTree, logits: torch.Tensor, context: PassContext) -> Any:
        if len(context.generated) > 4:
            raise DeadEndError("no token may come next")
        return accept(tree, logits, context)

    class Stumbling:
        def num_kept(self, _tokens: Sequence[int]) -> int | None:
            raise RuntimeError("a stop rule")

    def upset(_: ObservedPass) -> None:
        raise RuntimeError("an observer")

    accept = accept_rule()
    requests = [Request(prompt, NEW_TOKENS) for prompt in PROMPTS]
    requests[1] = Request([VOCABULARY], NEW_TOKENS)
    requests[3] = replace(requests[3], accept=dead_end)
    requests[4] = replace(requests[4], stop_rule=Stumbling())
    requests[6] = replace(requests[6], observer=upset)
    requests[7] = replace(requests[7], max_new_tokens=-1)
    drafter = ScriptedDrafter(right_and_wrong(truths_of(model)))
    found = outputs(decoder_with(model, drafter), requests, 3)
    kinds = {number: type(generation.error) for number, (_, generation) in found.items()}
    assert kinds == {
        **dict.fromkeys((0, 2, 5, 8), type(None)),
        1: InvalidPromptError,
        3: DeadEndError,
        4: RuntimeError,
        6: RuntimeError,
        7: InvalidSettingsError,
    }
    for number in (0, 2, 5, 8):
        assert found[number][0] == truths_of(model)[tuple(PROMPTS[number])]
    assert len(found[3][0]) > 0
    assert not drafter.open_sessions


def test_leaving_in_the_middle_ends_all_sessions() -> None:
    drafter = ScriptedDrafter(lambda _tokens, _budget: DraftTree.empty())
    decoder = decoder_with(tiny_llama(), drafter)
    many: Any = decoder.generate_many([Request(prompt, NEW_TOKENS) for prompt in PROMPTS], 4)
    for _ in range(10):
        next(many)
    with pytest.raises(DecoderBusyError):
        next(decoder.generate_many([Request([1])]))
    many.close()
    assert not drafter.open_sessions
    assert len(drafter.closed) >= 3
    assert outputs(decoder, [Request(PROMPTS[0], 2)], 2)


def test_requests_are_taken_when_a_place_is_free() -> None:
    taken = []

    def requests() -> Iterable[Request]:
        for number, prompt in enumerate(PROMPTS):
            taken.append(number)
            yield Request(prompt, 2 + number)

    decoder = Decoder(Target(tiny_llama()), NoDrafter(), FixedBudget(0))
    most = num_over = 0
    for generation, _ in decoder.generate_many(requests(), 3):
        num_over += generation.is_over
        most = max(most, len(taken) - num_over)
    assert most == 3
    assert num_over == len(PROMPTS)


def watched_pieces(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int]]:
    """Note how much of each prompt every pass reads, and how many others go on in it."""
    monkeypatch.setattr(target_module, "num_shared", lambda _, __: 0)
    seen: list[tuple[list[int], int]] = []
    read = target.read

    def watched(readings: Sequence[Reading]) -> Any:
        pieces = [len(each.tokens) for each in readings if each.tree is None]
        seen.append((pieces, len(readings) - len(pieces)))
        return read(readings)

    monkeypatch.setattr(target, "read", watched)
    return seen


def test_prompts_are_read_in_pieces_beside_those_that_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_gemma()
    target = Target(model)
    passes = watched_pieces(target, monkeypatch)
    decoder = Decoder(target, NoDrafter(), FixedBudget(0))
    prompts = [PROMPTS[0], *(prompt_of(200, seed=seed) for seed in range(4)), *PROMPTS[1:4]]
    limits = [NEW_TOKENS, 9, 2, 12, 5, 3, 9, 4]
    found = outputs(decoder, list(map(Request, prompts, limits)), 4)
    for prompt, limit, (tokens, _) in zip(prompts, limits, found.values(), strict=True):
        assert tokens == plainly(model, prompt, limit)
    assert sum(sum(pieces) for pieces, _ in passes) == sum(map(len, prompts))
    assert all(sum(pieces) <= 512 for pieces, _ in passes)
    beside = [pieces for pieces, num_others in passes if pieces and num_others]
    assert all(sum(pieces) <= 64 * len(pieces) for pieces in beside)
    assert max(map(max, beside)) == 64


@pytest.mark.parametrize("seed", range(6))
def test_room_is_divided_evenly(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first pass, in which nobody goes on: whose piece is cut has as much as any other."""
    rng = np.random.default_rng(seed)
    wanted = rng.integers(1, 250, int(rng.integers(5, 12))).tolist()
    target = Target(tiny_llama())
    passes = watched_pieces(target, monkeypatch)
    decoder = Decoder(target, NoDrafter(), FixedBudget(0))
    requests = [Request(prompt_of(length, seed=at), 1) for at, length in enumerate(wanted)]
    outputs(decoder, requests, len(requests))
    shares, _ = passes[0]
    assert sum(wanted) > 512  # as much as a pass reads
    assert sum(shares) == 512
    assert all(share <= own for share, own in zip(shares, wanted, strict=True))
    cut = [share for share, own in zip(shares, wanted, strict=True) if share < own]
    assert all(share <= min(cut) + 1 for share in shares)
    assert sum(sum(pieces) for pieces, _ in passes) == sum(wanted)


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    decoder = Decoder(Target(tiny_llama()), NoDrafter(), FixedBudget(0))
    prompts = [prompt_of(length, seed=length) for length in (6, 200, 210, 220, 7)]
    requests = [Request(prompt, NEW_TOKENS) for prompt in prompts]
    order = [generation.number for generation, tokens in decoder.generate_many(requests, 5)]
    assert {order[0], order[1]} == {0, 4}


def test_where_memory_runs_out_the_latest_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    truths = truths_of(model)
    target = Target(model)
    read = target.read
    refused = []

    def limited(readings: Sequence[Reading]) -> Any:
        if len(readings) > 2:
            refused.append(len(readings))
            raise OutOfMemoryError("no memory for more than two")
        return read(readings)

    monkeypatch.setattr(target, "read", limited)
    drafter = ScriptedDrafter(right_and_wrong(truths))
    decoder = Decoder(target, drafter, FixedBudget(8))
    found = outputs(decoder, [Request(prompt, NEW_TOKENS) for prompt in PROMPTS], 5)
    for prompt, (tokens, generation) in zip(PROMPTS, found.values(), strict=True):
        assert tokens == truths[tuple(prompt)]
        assert generation.error is None
    assert refused


def test_what_does_not_fit_alone_is_refused_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Target(tiny_llama())
    read = target.read
    long = PROMPTS[1]

    def limited(readings: Sequence[Reading]) -> Any:
        for each in readings:
            ends = long[-len(each.tokens) :]
            if each.tree is None and len(ends) > 1 and each.tokens.tolist() == ends:
                raise OutOfMemoryError("no memory for the end of a long prompt")
        return read(readings)

    monkeypatch.setattr(target, "read", limited)
    decoder = Decoder(target, NoDrafter(), FixedBudget(0))
    found = outputs(decoder, [Request(prompt, 5) for prompt in PROMPTS], 3)
    failed = [number for number, (_, generation) in found.items() if generation.error]
    assert failed == [1]
    assert all(len(tokens) == 5 for number, (tokens, _) in found.items() if number != 1)


def test_times_of_shared_passes_add_up_to_what_they_took() -> None:
    decoder = decoder_with(tiny_llama(), ScriptedDrafter(right_and_wrong({})))
    found = outputs(decoder, [Request(prompt, NEW_TOKENS) for prompt in PROMPTS], 4)
    for _, generation in found.values():
        statistics = generation.statistics
        assert 0 < statistics.prompt_s < statistics.target_s < statistics.total_s
        assert statistics.host_s > 0


def test_at_least_one_at_a_time() -> None:
    decoder = Decoder(Target(tiny_llama()), NoDrafter(), FixedBudget(0))
    with pytest.raises(InvalidSettingsError, match="parallel must be 1 or more, not 0"):
        next(decoder.generate_many([], 0))


def test_fused_drafts_of_many_are_asked_for_with_one_call() -> None:
    class Counted(EmbeddedDrafter):
        calls: list[int] = []  # noqa: RUF012  of this test alone

        def draft(self, requests: Any) -> Any:
            self.calls.append(len(requests))
            return super().draft(requests)

    drafter = FusedDrafter([Counted()], DraftLimits(VOCABULARY), recycled=RecycledLogits())
    model = llama()
    decoder = Decoder(Target(model), drafter, FixedBudget(8))
    found = outputs(decoder, [Request(prompt, NEW_TOKENS) for prompt in PROMPTS], 4)
    for prompt, (tokens, _) in zip(PROMPTS, found.values(), strict=True):
        assert tokens == truths_of(model)[tuple(prompt)]
    assert max(Counted.calls) == 4


def _rows_mixed_up(self: PackedPasses, parts: Any) -> Any:
    read = READ(self, parts)
    return (
        read
        if len(read) < 2 or read[0][0].shape != read[1][0].shape
        else [read[1], read[0], *read[2:]]
    )


READ = PackedPasses.read


def _commits_of_a_neighbour(self: Target, paths: Any) -> None:
    COMMIT(self, [(place, path[:0] if place else path) for place, path in paths])


COMMIT = Target.commit_all


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (PackedPasses, "read", _rows_mixed_up),
        (Target, "commit_all", _commits_of_a_neighbour),
    ],
)
def test_a_planted_error_is_found(
    owner: Any, name: str, planted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes behind the first passes, of which a target itself checks that they can be shared."""
    model = llama()
    truths = truths_of(model)
    decoder = decoder_with(model, ScriptedDrafter(right_and_wrong(truths)))
    for is_right in (True, False):
        found = outputs(decoder, [Request(prompt, NEW_TOKENS) for prompt in PROMPTS], 4)
        assert ([tokens for tokens, _ in found.values()] == list(truths.values())) == is_right
        monkeypatch.setattr(owner, name, planted)

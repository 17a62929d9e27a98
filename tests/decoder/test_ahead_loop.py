"""Drafts that are answered while a pass runs change no output, whatever they hold."""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from decoder.budget.budget import FixedBudget
from decoder.drafters.following import PendingPass
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.kernels.recycled import write_rows
from decoder.drafters.recycling import RecycledLogits
from decoder.errors import InvalidSettingsError
from decoder.loop import Decoder, Request
from decoder.model.target import Target
from decoder.observation import ObservedPass
from retriever import follower as follower_module
from retriever.backoff import Backoff
from retriever.client.strict import RemoteDrafter
from retriever.drafter import Drafter, DraftRequest
from retriever.errors import DrafterUnavailableError
from retriever.follower import FIRST_PATIENCE_S, DraftLimits, Followers
from retriever.limits import MAX_OUTCOMES, Limits
from retriever.sequences import TokenSequence
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from tests.decoder.decoding import (
    PATIENT_S,
    VOCABULARY,
    AheadDrafter,
    Guess,
    by_tokens,
    decoded,
    decoder_ahead,
    decoder_with,
    fused,
    plainly,
    prompt_of,
    tiny_llama,
)
from tests.retriever.security.in_process import serving

NEW_TOKENS = 16
PROMPTS = [prompt_of(length, seed=length) for length in (3, 90, 11, 1, 40, 17)]


@cache
def llama() -> PreTrainedModel:
    return tiny_llama(layers=3)


@cache
def known_texts() -> list[tuple[list[int], list[int]]]:
    """Return the prompts, each with what follows it."""
    return [(prompt, plainly(llama(), prompt, NEW_TOKENS)) for prompt in PROMPTS]


def outputs(decoder: Decoder, requests: Sequence[Request], parallel: int) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in requests]
    for generation, new in decoder.generate_many(requests, parallel):
        assert generation.error is None
        tokens[generation.number] += new
    return tokens


def test_every_tree_is_the_one_after_the_tokens_that_came() -> None:
    """A tree of another outcome is seen: it is not what the drafter says after these tokens."""
    model = llama()
    prompt = PROMPTS[2]
    truth = plainly(model, prompt, 40)
    guess = by_tokens([(prompt, truth)], 0.8)
    decoder = decoder_ahead(model, AheadDrafter(guess))
    known = list(prompt)
    seen: list[tuple[list[int], DraftTree]] = []

    def observer(observed: ObservedPass) -> None:
        seen.append((list(known), observed.drafted))
        known.extend(observed.tokens)

    output = [token for step in decoder.generate(prompt, 40, observer=observer) for token in step]
    assert output == truth
    for tokens, tree in seen[1:]:
        expected = guess(tokens, 8 + 16)
        assert tree.token_ids.tolist() == expected.token_ids.tolist()[: len(tree)]
    followers = decoder.followers
    assert followers.num_ahead > 5
    assert followers.num_ahead + followers.num_asked >= len(seen) - 2


@pytest.mark.parametrize("parallel", [1, 4])
def test_members_of_a_fused_drafter_answer_ahead(parallel: int) -> None:
    model = llama()
    requests = [Request(prompt, NEW_TOKENS) for prompt in PROMPTS]
    known = known_texts()
    truths = [truth for _, truth in known]
    drafter = fused(EmbeddedDrafter(), AheadDrafter(by_tokens(known, 0.9)))
    decoder = decoder_ahead(model, drafter)
    for _ in range(2):  # in the second one, generations are drafted from
        assert outputs(decoder, requests, parallel) == truths
    assert all(followers.num_ahead > 10 for followers in drafter.followers)


def never_resting(
    drafter: Drafter, limits: DraftLimits, patience_s: float = FIRST_PATIENCE_S
) -> Followers:
    """Return followers that ask again at once after what failed or came late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follower_module, "Backoff", lambda *_, **__: Backoff(0.0, 0.0))
        return Followers(drafter, limits, backoff=Backoff(0.0, 0.0), patience_s=patience_s)


class Faulty(AheadDrafter):
    """Fails, hangs for a moment or answers wrongly ahead, in turn."""

    def __init__(self, guess: Guess) -> None:
        super().__init__(guess)
        self._turns = count()

    def draft_ahead(
        self, requests: Sequence[DraftRequest], timeout_s: float = math.inf
    ) -> list[list[DraftTree]]:
        turn = next(self._turns) % 4
        if turn == 0:
            raise DrafterUnavailableError("away")
        answers = super().draft_ahead(requests, timeout_s)
        if turn == 1:
            time.sleep(0.01)
        return [answers, [], answers, answers[:-1]][turn]


@pytest.mark.parametrize("parallel", [1, 4])
def test_a_drafter_that_fails_ahead_costs_drafts_and_no_token(parallel: int) -> None:
    model = llama()
    truths = known_texts()
    drafter = Faulty(by_tokens(truths, 0.7))
    decoder = Decoder(Target(model), drafter, FixedBudget(8), num_ahead=16)
    decoder.followers = never_resting(drafter, decoder.followers.limits)
    for _ in range(2):
        requests = [Request(prompt, NEW_TOKENS) for prompt in PROMPTS]
        assert outputs(decoder, requests, parallel) == [truth for _, truth in truths]
    assert decoder.followers.num_failures > 2
    assert drafter.open_sessions == {}


def test_sequences_that_stop_or_are_left_are_closed_with_what_came() -> None:
    model = llama()
    truths = known_texts()
    drafter = AheadDrafter(by_tokens(truths, 0.8))
    decoder = decoder_ahead(model, drafter, stop_ids=[truths[0][1][9]])
    stopped = decoded(decoder, PROMPTS[0], NEW_TOKENS)
    assert stopped == truths[0][1][: len(stopped)]
    assert drafter.closed == [PROMPTS[0] + stopped]
    came: list[int] = []
    left: Any = iter(decoder.generate(PROMPTS[1], NEW_TOKENS))
    for _ in range(3):
        came += next(left)
    left.close()
    assert drafter.closed[1] == PROMPTS[1] + came
    assert drafter.open_sessions == {}


@pytest.mark.parametrize("num_ahead", [-1, MAX_OUTCOMES + 1])
def test_a_number_of_outcomes_that_no_service_takes_is_refused(num_ahead: int) -> None:
    with pytest.raises(InvalidSettingsError, match="num_ahead"):
        decoder_with(tiny_llama(layers=3), EmbeddedDrafter(), num_ahead=num_ahead)


def test_trees_are_never_asked_for_beyond_what_a_service_allows() -> None:
    model = llama()
    most = Limits().max_budget_nodes
    truth = known_texts()[1][1]
    for nodes in (most - 1, most):
        decoder = decoder_ahead(model, EmbeddedDrafter(), nodes=nodes)
        assert decoded(decoder, PROMPTS[1], NEW_TOKENS) == truth
        assert decoder.followers.num_failures == 0
        assert decoder.followers.num_asked > 0


@pytest.mark.faults
@pytest.mark.parametrize("is_back", [False, True])
def test_a_service_that_dies_in_the_middle_costs_drafts_and_no_token(is_back: bool) -> None:  # noqa: FBT001
    model = llama()
    prompt = PROMPTS[1]
    truth = plainly(model, prompt, 50)
    with ExitStack() as services, ExitStack() as first:
        address = first.enter_context(serving(EmbeddedDrafter()))
        drafter = services.enter_context(RemoteDrafter(address, timeout_s=0.5))
        for each in range(3):  # so that it knows what comes
            drafter.open(f"{each}", np.array(prompt, np.int32))
            drafter.close(f"{each}", np.array(truth, np.int32))
        decoder = decoder_ahead(model, drafter, nodes=4)
        decoder.followers = never_resting(drafter, decoder.followers.limits, PATIENT_S)
        output: list[int] = []
        for number, tokens in enumerate(decoder.generate(prompt, 50)):
            output += tokens
            if number == 5:
                assert decoder.followers.num_ahead > 0
                first.close()
            if number == 7 and is_back:
                services.enter_context(serving(EmbeddedDrafter(), address))
    assert output == truth
    assert decoder.followers.num_failures > 0


def test_members_are_asked_for_what_the_target_found_likely() -> None:
    member, recycled = AheadDrafter(lambda _tokens, _budget: DraftTree.empty()), RecycledLogits()
    drafter = FusedDrafter([member], DraftLimits(VOCABULARY, VOCABULARY), recycled=recycled)
    sequence = TokenSequence(np.array([3, 4, 5], np.int32))
    following = drafter.follow(sequence)
    likely, empty = np.arange(20, 28, dtype=np.int32)[None], DraftTree.empty()
    context = np.array([[5, 4, 3]], np.int32)
    write_rows(recycled.table, context, likely, np.ones_like(likely, np.float32), 1)
    pending = PendingPass(sequence.tokens, empty, empty, 8, 9)
    drafter.ask_ahead([(following, 4, pending)], 1.0)
    following.close()
    assert {tuple(each.tolist()) for each in member.outcomes} == {(token,) for token in likely[0]}


class SlowTarget:
    """Waits outside of the interpreter in every pass, as a pass on a device does."""

    def __init__(self, decoder: Decoder, pass_s: float) -> None:
        self._read = decoder.target.read
        self._pass_s = pass_s

    def read(self, *arguments: Any) -> Any:
        time.sleep(self._pass_s)
        return self._read(*arguments)


def test_a_drafter_answers_while_the_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts that are waited for are fewer than those that were answered meanwhile."""
    model = llama()
    prompt = PROMPTS[2]
    truth = plainly(model, prompt, 30)
    decoder = decoder_ahead(model, AheadDrafter(by_tokens([(prompt, truth)], 1.0)), nodes=2)
    monkeypatch.setattr(decoder.target, "read", SlowTarget(decoder, 0.03).read)
    assert decoded(decoder, prompt, 30) == truth
    assert decoder.followers.num_ahead > decoder.followers.num_asked


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.inference_mode():
        yield

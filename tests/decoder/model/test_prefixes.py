"""What a sequence shares with earlier ones is read once, and nothing else changes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from decoder.budget.budget import FixedBudget
from decoder.drafters.following import NoDrafter
from decoder.loop import Decoder, Request
from decoder.model import target as target_module
from decoder.model.cache import Prefix, PrefixStore, num_shared
from decoder.model.passes import Reading
from decoder.model.target import Target
from retriever.drafter import FORGOTTEN
from tests.decoder.decoding import (
    MODELS,
    ScriptedDrafter,
    at_random,
    decoded,
    plainly,
    prompt_of,
    tiny_convolution,
    tiny_llama,
    tiny_mamba,
)

NEW_TOKENS = 12


class Counted:
    """Counts the tokens of prompts that a target reads."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_read = 0
        read = target.read

        def watched(readings: Sequence[Reading]) -> Any:
            self.num_read += sum(len(each.tokens) for each in readings if each.tree is None)
            return read(readings)

        monkeypatch.setattr(target, "read", watched)

    def take(self) -> int:
        count, self.num_read = self.num_read, 0
        return count


@pytest.mark.parametrize("name", MODELS)
def test_the_turns_of_a_conversation_read_what_is_new(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[name]()
    target = Target(model, reuse_prefixes=True)
    counted = Counted(target, monkeypatch)
    decoder = Decoder(target, ScriptedDrafter(at_random()), FixedBudget(16))
    conversation = prompt_of(40)
    for turn in range(4):
        output = decoded(decoder, conversation, NEW_TOKENS)
        assert output == plainly(model, conversation, NEW_TOKENS)
        # The last token was never read, and the next turn's own follow.
        assert counted.take() == (40 if turn == 0 else 1 + 5)
        conversation += output + prompt_of(5, seed=turn)


@pytest.mark.parametrize("parallel", [1, 3])
def test_conversations_that_take_turns_find_their_own_prefix(
    parallel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    target = Target(model, reuse_prefixes=True)
    counted = Counted(target, monkeypatch)
    decoder = Decoder(target, NoDrafter(), FixedBudget(0))
    conversations = [prompt_of(50, seed=number) for number in range(3)]
    for turn in range(3):
        outputs: dict[int, list[int]] = {}
        requests = [Request(prompt, NEW_TOKENS) for prompt in conversations]
        for generation, tokens in decoder.generate_many(requests, parallel):
            outputs.setdefault(generation.number, []).extend(tokens)
        assert counted.take() == (150 if turn == 0 else 3 * 6)
        for number, conversation in enumerate(conversations):
            assert outputs[number] == plainly(model, conversation, NEW_TOKENS)
            conversation.extend(outputs[number] + prompt_of(5, seed=turn))


@pytest.mark.parametrize("kept", [0, 39, 40, 60])
def test_a_sequence_goes_on_from_any_part_of_another(kept: int) -> None:
    model = tiny_llama()
    decoder = Decoder(Target(model, reuse_prefixes=True), NoDrafter(), FixedBudget(0))
    first = prompt_of(40)
    whole = first + decoded(decoder, first, 25)
    prompt = [*whole[:kept], *prompt_of(3, seed=7)]
    assert decoded(decoder, prompt, NEW_TOKENS) == plainly(model, prompt, NEW_TOKENS)
    assert decoded(decoder, prompt, NEW_TOKENS) == plainly(model, prompt, NEW_TOKENS)


def test_no_more_is_kept_than_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, bytes
    target = Target(model, reuse_prefixes=True, prefix_bytes=130 * per_token)
    counted = Counted(target, monkeypatch)
    decoder = Decoder(target, NoDrafter(), FixedBudget(0))
    prompts = [prompt_of(60, seed=number) for number in range(4)]
    for prompt in prompts:
        decoded(decoder, prompt, 4)
        assert target._prefixes.num_bytes <= 130 * per_token
    counted.take()
    for prompt in reversed(prompts):  # two fit besides the one in its place
        decoded(decoder, prompt, 4)
    assert counted.take() == 3 * 1 + 60


def test_nothing_is_kept_of_what_shall_not_be_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Target(tiny_llama(), reuse_prefixes=True)
    counted = Counted(target, monkeypatch)
    decoder = Decoder(target, NoDrafter(), FixedBudget(0))
    prompt = prompt_of(40)
    for _ in range(2):
        list(decoder.generate(prompt, 4, FORGOTTEN))
        assert counted.take() == 40
    decoded(decoder, prompt, 4)
    target.forget()
    counted.take()
    decoded(decoder, prompt, 4)
    assert counted.take() == 40


def test_made_up_states_are_no_prefix() -> None:
    model = tiny_llama()
    target = Target(model, reuse_prefixes=True)
    decoder = Decoder(target, NoDrafter(), FixedBudget(0))
    target.pretend(64)
    prompt = [0] * 64 + [5]
    assert decoded(decoder, prompt, 4) == plainly(model, prompt, 4)


@pytest.mark.parametrize("make", [tiny_mamba, tiny_convolution])
def test_models_that_cannot_go_back_read_all(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    decoder = Decoder(Target(model, reuse_prefixes=True), NoDrafter(), FixedBudget(0))
    prompt = prompt_of(40)
    for _ in range(2):
        output = decoded(decoder, prompt, 4)
        assert output == plainly(model, prompt, 4)
        prompt += output


def test_a_planted_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking one token more for shared than is."""
    monkeypatch.setattr(target_module, "num_shared", lambda a, b: min(num_shared(a, b) + 1, len(a)))
    model = tiny_llama()
    decoder = Decoder(Target(model, reuse_prefixes=True), NoDrafter(), FixedBudget(0))
    first = prompt_of(40)
    decoded(decoder, first, 4)
    prompt = [*first[:30], *prompt_of(10, seed=3)]
    assert decoded(decoder, prompt, 8) != plainly(model, prompt, 8)


def prefix_of(tokens: Sequence[int]) -> Prefix:
    states = torch.zeros(1, 1, len(tokens), 2)
    return Prefix(np.array(tokens, np.int32), {0: (states, states)})


def test_the_store_keeps_the_latest_and_drops_what_others_begin_with() -> None:
    store = PrefixStore(max_bytes=16 * 100)
    store.put(prefix_of(range(10)))
    store.put(prefix_of(range(20)))
    assert [len(each.tokens) for each in store] == [20]
    store.put(prefix_of(range(50, 90)))
    assert store.best(np.arange(50, 85, dtype=np.int32), beyond=4) is None
    shared = store.best(np.arange(50, 85, dtype=np.int32), beyond=3)
    assert shared is not None
    assert shared[1] == 35
    assert [each.tokens[0] for each in store] == [0]  # the other goes on in its place
    store.put(prefix_of(range(200, 290)))
    assert [each.tokens[0] for each in store] == [200]
    assert store.best(np.arange(200, 250, dtype=np.int32), beyond=0) is not None
    assert [each.tokens[0] for each in store] == [200]  # most of it would be lost
    assert not store.wants(100, 31, 16)
    assert store.wants(100, 32, 16)
    assert not store.wants(101, 101, 16)
    store.clear()
    assert list(store) == []

"""A head's reading of a sequence: its bounds, its gaps, its failures; and errors are noticed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoder.drafters.following import Verified
from decoder.model.states import FINAL
from decoder.model.tree_rows import TreeRows
from decoder.plugins.speculators.eagle import (
    DraftLayer,
    Eagle3Head,
    EagleHead,
    JoinedKeyValues,
    unrolled_mask,
)
from decoder.plugins.speculators.speculator import (
    RotationTable,
    Speculator,
    TrueStates,
    load_speculator,
)
from retriever.errors import DrafterUnavailableError, VocabularyMismatchError
from retriever.sequences import TokenSequence
from retriever.tree import ROOT, DraftTree
from tests.decoder.decoding import VOCABULARY, prompt_of, tiny_llama
from tests.decoder.plugins.speculators.drafted_sequences import Reading, parts_of, rounding_of
from tests.decoder.plugins.speculators.published_heads import (
    Published,
    eagle3_logits,
    eagle_logits,
    mlp_speculator,
    official_eagle,
    official_eagle3,
    speculators_eagle3,
)
from tests.decoder.rounding import SHOWN

STATES = (2, 1, 0)
MADE = official_eagle3()


@pytest.fixture
def head_folder(tmp_path: Path) -> Path:
    return MADE.write(tmp_path / "head")


def distance(reading: Reading, first: int = 0, made: Published = MADE) -> float:
    """Return how far logits lie from the reference, on all paths: 1 is what rounding explains."""
    read = reading.draft()
    model = tiny_llama(layers=3)
    target = parts_of(model, reading.tokens)
    reference: Callable[..., torch.Tensor] = eagle3_logits
    states: Any = STATES
    if made.config.get("bias"):
        reference, states = eagle_logits, FINAL
    found, wanted = [], []
    for node in range(len(read.tree)):
        chain = read.tree.token_ids[read.path_to(node)].tolist()
        options = {"first": first} if first else {}
        expected = reference(made, target, states, reading.tokens, chain, **options)
        found += [read.root, read.nodes[node]]
        wanted += [expected[0], expected[-1]]
    depth = int(read.tree.depths().max())
    return rounding_of(made, model, depth).apart(torch.stack(found), torch.stack(wanted))


def read_along(folder: Path, prompt_length: int = 11, **bounds: int) -> Reading:
    """Begin a sequence; bounds are those of `Speculator` that are given."""
    model = tiny_llama(layers=3)
    speculator = load_speculator(folder, model)
    for name, most in bounds.items():
        assert getattr(speculator, name) > most
        setattr(speculator, name, most)
    return Reading(speculator, model, prompt_of(prompt_length))


@pytest.mark.parametrize("length", [1, 2, 3, 9, 10])
def test_prompts_are_read_in_pieces(length: int, head_folder: Path) -> None:
    assert distance(read_along(head_folder, length, most_rows=3)) <= 1


def test_states_of_several_passes_are_read_together(head_folder: Path) -> None:
    reading = read_along(head_folder)
    for _ in range(4):
        reading.verify()
    assert distance(reading) <= 1


def test_a_draft_that_is_begun_again_is_the_same(head_folder: Path) -> None:
    reading = read_along(head_folder)
    read = reading.draft()
    again = reading.reader.begin()
    assert again is not None
    assert torch.equal(read.root, again[0])
    children = np.flatnonzero(read.tree.parents == ROOT)
    tokens = read.tree.token_ids[children].tolist()
    logits = reading.reader.read(tokens, [ROOT] * len(tokens))
    rounding_of(MADE, tiny_llama(layers=3), 1).check(logits, read.nodes[children])


def test_only_the_newest_states_are_kept_and_at_their_positions(head_folder: Path) -> None:
    reading = read_along(head_folder, most_states=6)
    assert distance(reading, first=5) <= 1
    reading.verify()
    assert distance(reading, first=5) <= 1
    for _ in range(4):
        reading.verify()
    assert distance(reading, first=len(reading.tokens) - 7) <= 1


def test_a_pass_that_was_not_shown_ends_what_can_be_said(head_folder: Path) -> None:
    reading = read_along(head_folder)
    reading.draft()
    reading.verify(is_shown=False)
    assert reading.reader.begin() is None
    gap = len(reading.tokens) - 1
    reading.verify()
    assert distance(reading, first=gap) <= 1


def test_nothing_is_said_before_the_first_states(head_folder: Path) -> None:
    for folder in (head_folder, mlp_speculator().write(head_folder.parent / "mlp")):
        reader = load_speculator(folder, tiny_llama(layers=3))
        assert reader.follow(TokenSequence(np.arange(5, dtype=np.int32))).begin() is None


def test_a_closed_reading_says_nothing(head_folder: Path) -> None:
    for folder in (head_folder, mlp_speculator().write(head_folder.parent / "mlp")):
        reading = read_along(folder)
        reading.draft()
        reading.reader.close()
        assert reading.reader.begin() is None


def test_beyond_its_positions_a_head_is_not_to_be_had(tmp_path: Path) -> None:
    made = Published(MADE.config | {"max_position_embeddings": 12}, MADE.weights)
    reading = read_along(made.write(tmp_path))
    assert distance(reading) <= 1
    while len(reading.tokens) <= 13:
        reading.verify()
    with pytest.raises(DrafterUnavailableError, match="sequences of at most 12 tokens"):
        reading.reader.begin()


def test_lack_of_memory_costs_a_draft_and_no_more(
    head_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = read_along(head_folder)
    reading.draft()
    reading.verify()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as failing:
        failing.setattr(EagleHead, "step", fail)
        with pytest.raises(DrafterUnavailableError, match="ran out of memory"):
            reading.reader.begin()
    assert reading.reader.begin() is None
    gap = len(reading.tokens) - 1
    reading.verify()
    assert distance(reading, first=gap) <= 1


def test_errors_of_other_kinds_are_raised(
    head_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    reading = read_along(head_folder)
    monkeypatch.setattr(EagleHead, "step", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        reading.reader.begin()


def test_an_mlp_is_as_deep_as_it_was_trained(tmp_path: Path) -> None:
    speculator = load_speculator(mlp_speculator(depths=3).write(tmp_path), tiny_llama(layers=3))
    assert speculator.max_depth == 2
    reading = Reading(speculator, tiny_llama(layers=3), prompt_of(4))
    assert reading.draft(30).tree.depths().max() == 2


@pytest.mark.parametrize("make", [official_eagle, mlp_speculator])
def test_a_cut_vocabulary_drafts_the_same_logits(
    make: Callable[[], Published], tmp_path: Path
) -> None:
    made, model = make(), tiny_llama(layers=3)
    folder = made.write(tmp_path)
    kept = np.array([40, 3, 3, 17], np.int32)
    cut = load_speculator(folder, model, kept=kept)
    whole = load_speculator(folder, model)
    assert cut.columns.tolist() == [3, 17, 40]
    assert whole.columns.tolist() == list(range(VOCABULARY))
    some, every = (Reading(each, model, prompt_of(6)).draft() for each in (cut, whole))
    rounding = rounding_of(made, model, int(some.tree.depths().max()))
    rounding.check(some.root, every.root[[3, 17, 40]])
    rounding.check(some.nodes, every.nodes[:, [3, 17, 40]])
    with pytest.raises(VocabularyMismatchError, match="of the model's 48"):
        load_speculator(folder, model, kept=np.array([48], np.int32))


@pytest.mark.parametrize("make", [official_eagle3, official_eagle, mlp_speculator])
def test_half_precision_is_near_full(make: Callable[[], Published], tmp_path: Path) -> None:
    made = make()
    folder = made.write(tmp_path)
    half, full = tiny_llama(dtype=torch.bfloat16, layers=3), tiny_llama(layers=3)
    exact = Reading(load_speculator(folder, full), full, prompt_of(40)).draft()
    rough = Reading(load_speculator(folder, half), half, prompt_of(40)).draft()
    assert rough.tree.token_ids.tolist() == exact.tree.token_ids.tolist()
    rounding_of(made, half, int(exact.tree.depths().max())).check(rough.nodes, exact.nodes)


def test_rows_unrolled_in_training_see_what_rows_of_a_draft_see(head_folder: Path) -> None:
    model = tiny_llama(layers=3)
    speculator = load_speculator(head_folder, model)
    head: Any = speculator.head
    torch.manual_seed(0)
    length, depths = 9, 3
    rounding = rounding_of(MADE, model, depths)
    features = torch.randn(1, length, 96)
    tokens = torch.randint(0, VOCABULARY, (length + depths + 1,))
    positions = torch.arange(length)[None]
    cache, hidden = [JoinedKeyValues()], head.project(features)
    unrolled = []
    for depth in range(depths):
        embedded = head.embed_tokens(tokens[None, 1 + depth : 1 + depth + length])
        mask = unrolled_mask(length, depth)
        hidden = head.step(embedded, hidden, positions + depth, mask, cache)
        unrolled.append(head.logits(hidden))
    for row in range(length):
        sequence = TokenSequence(tokens[: row + 1].numpy())
        reading: Any = speculator.follow(sequence)
        states = dict(zip(STATES, features[0, : row + 1].chunk(3, dim=-1), strict=True))
        nothing, logits = np.zeros(0, np.int64), torch.zeros(1, VOCABULARY)
        following = int(tokens[row + 1])
        last = int(tokens[row])
        reading.learn(Verified(last, DraftTree.empty(), logits, nothing, following, states))
        sequence.extend(np.array([following], np.int32))
        found = [reading.begin()]
        found += [
            reading.read([int(tokens[row + 1 + depth])], [depth - 2]) for depth in range(1, depths)
        ]
        for depth in range(depths):
            rounding.check(found[depth][0], unrolled[depth][0, row])


def test_gradients_reach_every_weight(tmp_path: Path) -> None:
    options = {"norm_before_fc": True, "norm_output": True, "num_layers": 2}
    made = speculators_eagle3(states=(0, 1, 2), **options)
    head: Any = load_speculator(made.write(tmp_path), tiny_llama(layers=3)).head
    trained = Eagle3Head(head.config)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = trained.project(torch.randn(2, 7, 96))
        embedded = torch.randn(2, 7, 32)
        positions = torch.arange(7)[None].expand(2, -1)
        cache = [JoinedKeyValues(), JoinedKeyValues()]
        first = trained.step(embedded, hidden, positions, None, cache)
        second = trained.step(embedded, first, positions + 1, unrolled_mask(7, 1), cache)
        torch.autograd.backward(trained.logits(second).float().logsumexp(-1).sum())
    without = [
        name
        for name, value in trained.named_parameters()
        if value.grad is None or not value.grad.abs().sum() > 0
    ]
    assert without == ["embed_tokens.weight"]


def _late_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = RotationTable.forward

    def late(self: RotationTable, states: torch.Tensor, positions: torch.Tensor) -> Any:
        goes_on = int(positions[0, 0] > 0)  # behind the prompt
        return turn(self, states, positions + goes_on)

    monkeypatch.setattr(RotationTable, "forward", late)


def _states_of_the_token_after(monkeypatch: pytest.MonkeyPatch) -> None:
    take = TrueStates.take
    monkeypatch.setattr(TrueStates, "take", lambda self: take(self).roll(-1, dims=0))


def _states_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    take = TrueStates.take

    def reversed_states(self: TrueStates) -> torch.Tensor:
        return torch.cat(take(self).chunk(3, dim=-1)[::-1], dim=-1)

    monkeypatch.setattr(TrueStates, "take", reversed_states)


def _rejected_states(monkeypatch: pytest.MonkeyPatch) -> None:
    learn = TrueStates.learn

    def misled(self: TrueStates, verified: Verified, length: int) -> None:
        learn(self, replace(verified, path=np.maximum(verified.path - 1, -1)), length)

    monkeypatch.setattr(TrueStates, "learn", misled)


def _siblings_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    extended = TreeRows.extended

    def all_seen(self: TreeRows, parents: Sequence[int]) -> TreeRows:
        rows = extended(self, parents)
        return replace(rows, visible=np.ones_like(rows.visible))

    monkeypatch.setattr(TreeRows, "extended", all_seen)


def _no_norm_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(self: Any, states: Any, embeddings: Any) -> Any:
        entered = [self.input_layernorm(embeddings), self.input_layernorm(states)]
        return torch.cat(entered, dim=-1), states

    monkeypatch.setattr(DraftLayer, "prepared", prepared)


def _no_norm_before_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Eagle3Head, "outputs", lambda _, hidden: hidden)


PLANTED = {
    "positions late by one": _late_positions,
    "states off by one": _states_of_the_token_after,
    "states in another order": _states_in_another_order,
    "rejected rows kept": _rejected_states,
    "siblings in sight": _siblings_in_sight,
    "the embedding's norm on states": _no_norm_of_the_state,
    "no norm before the output": _no_norm_before_the_output,
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_noticed(
    name: str, head_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTED[name](monkeypatch)
    reading = read_along(head_folder)
    worst = distance(reading)
    for _ in range(3):
        if worst <= SHOWN:
            reading.verify()
            worst = max(worst, distance(reading))
    assert worst > SHOWN


def test_a_speculator_says_what_it_is(head_folder: Path) -> None:
    speculator: Speculator = load_speculator(head_folder, tiny_llama(layers=3))
    assert speculator.name == "the speculator head"
    assert speculator.states == {0, 1, 2}
    assert not speculator.reads_paths

"""Models as sources of fused drafts: what they read, what it changes, and how they fail."""

import logging

import numpy as np
import pytest
import torch

from decoder.drafters.asking import StepCosts
from decoder.drafters.following import NoDrafter, Verified
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.readers import TreeReader
from retriever.drafter import Drafter
from retriever.errors import DrafterUnavailableError, VocabularyMismatchError
from retriever.follower import DraftLimits
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree
from tests.decoder.decoding import MODELS, VOCABULARY, decoder_with, prompt_of
from tests.decoder.drafters.drafted_chains import LIMITS, logits_for, paths_of, saying
from tests.decoder.drafters.scripted_readers import SURE, ScriptedReader, Unavailable, counting

FREE = StepCosts(target_s=1.0, pass_s=0.0)
NEW_TOKENS = 60


def drafted(
    drafters: list[Drafter], readers: list[TreeReader], budget: int = 8, start: int = 3
) -> DraftTree:
    drafter = FusedDrafter(drafters, LIMITS, readers=readers, costs=FREE)
    sequence = drafter.follow(TokenSequence(np.array([start], np.int32)))
    tree = sequence.draft(budget)
    assert len(tree) <= budget
    sequence.close()
    return DraftTree.checked(tree.token_ids, tree.parents, tree.probabilities, tree.sources)


@pytest.mark.parametrize("reads_paths", [False, True])
def test_a_reader_alone_grows_a_tree_of_its_own(*, reads_paths: bool) -> None:
    reader = ScriptedReader(counting, reads_paths=reads_paths)
    paths = paths_of(drafted([NoDrafter()], [reader], 12))
    assert len(paths) == 12
    assert {(4,), (5,), (4, 5), (4, 6), (4, 5, 6), (5, 6)} <= set(paths)
    assert not reader.open


def test_a_reader_reads_what_was_retrieved_and_ranks_it() -> None:
    retrieval = saying(([20, 21, 22], 0.5), ([4, 30], 0.4))
    alone = drafted([retrieval], [], 8)
    read = drafted([retrieval], [ScriptedReader(counting)], 8)
    before = dict(zip(paths_of(alone), alone.probabilities.tolist(), strict=True))
    after = dict(zip(paths_of(read), read.probabilities.tolist(), strict=True))
    assert after[4,] > before[4,]
    assert after.get((20,), 0.0) < before[20,]
    assert (4, 5) in after
    assert (4, 5) not in before


def test_readers_of_paths_read_the_whole_tree_at_once() -> None:
    retrieval = saying(([20, 21, 22], 0.6), ([4, 30], 0.3))
    reader = ScriptedReader(counting, reads_paths=True)
    drafted([retrieval], [reader], 8)
    begun, first, *_ = reader.passes
    assert begun == []
    assert {(20,), (20, 21), (20, 21, 22), (4,), (4, 30)} <= set(first)


def test_others_read_one_depth_after_the_other_and_no_deeper_than_they_can() -> None:
    retrieval = saying(([20, 21, 22, 23, 24, 25], 0.9))
    reader = ScriptedReader(counting, max_depth=2)
    drafted([retrieval], [reader], 8)
    assert [max(map(len, read), default=0) for read in reader.passes] == [0, 1, 2, 2, 2, 2][
        : len(reader.passes)
    ]


def test_reading_ends_where_a_pass_is_not_worth_its_time() -> None:
    numbers = []
    for pass_s in (0.0, 0.2, 5.0):
        reader = ScriptedReader(counting)
        drafter = FusedDrafter([], LIMITS, readers=[reader], costs=StepCosts(1.0, pass_s))
        drafter.follow(TokenSequence(np.array([3], np.int32))).draft(16)
        numbers.append(len(reader.passes))
    assert numbers[0] == 6
    assert numbers[0] > numbers[1] > numbers[2] == 1


def test_a_token_outside_of_a_cut_vocabulary_is_judged_as_unlisted() -> None:
    retrieval = saying(([20], 0.5), ([30], 0.499))
    whole = ScriptedReader(lambda _: {})
    cut = ScriptedReader(
        lambda _: {}, columns=[token for token in range(VOCABULARY) if token != 30]
    )
    even = drafted([retrieval], [whole], 2)
    assert even.probabilities[0] == pytest.approx(even.probabilities[1], rel=0.01)
    assert set(drafted([retrieval], [cut], 2).token_ids.tolist()) == {20, 30}


def taught(reader: TreeReader, retrieved: Drafter, came: int, steps: int = 150) -> DraftTree:
    """Draft after many steps in which one token came each time."""
    drafter = FusedDrafter([retrieved], LIMITS, readers=[reader], costs=FREE)
    sequence = TokenSequence(np.array([1], np.int32))
    fused = drafter.follow(sequence)
    for _ in range(steps):
        tree = fused.draft(4)
        nothing = np.zeros(0, np.int64)
        path = tree.follow(np.array([came]))
        rows = logits_for(*[{came: 9.0}] * (1 + len(tree)))
        fused.learn(Verified(came, tree, rows, nothing if len(path) == 0 else path, came))
        sequence.extend([came])
    return fused.draft(4)


def test_a_good_reader_moves_what_was_retrieved_once_that_is_learned() -> None:
    retrieval = saying(([20], 0.8), ([30], 0.1))
    timid = ScriptedReader(lambda _: {30: SURE, 20: SURE - 0.2})
    before, after = (first_depth(taught(timid, retrieval, 30, steps)) for steps in (0, 150))
    assert max(before, key=before.__getitem__) == 20
    assert max(after, key=after.__getitem__) == 30
    assert after[30] > 0.8
    wrong = ScriptedReader(lambda _: {20: SURE, 30: SURE - 2})
    unheeded = first_depth(taught(wrong, retrieval, 30))
    assert unheeded[30] > 0.8
    assert unheeded.get(20, 0.0) < 0.2


def first_depth(tree: DraftTree) -> dict[int, float]:
    """Return how probable each first token is."""
    shares = zip(paths_of(tree), tree.probabilities.tolist(), strict=True)
    return {path[0]: share for path, share in shares if len(path) == 1}


def test_readers_are_shown_every_pass_and_their_states_are_asked_for() -> None:
    first = ScriptedReader(counting, states=frozenset({2, 7}))
    second = ScriptedReader(counting, states=frozenset({7, 9}))
    drafter = FusedDrafter([], LIMITS, readers=[first, second])
    assert drafter.states == {2, 7, 9}
    model, prompt = MODELS["llama"](), prompt_of(12)
    first.states = second.states = frozenset()
    decoder = decoder_with(model, FusedDrafter([], LIMITS, readers=[first, second], costs=FREE))
    generation = decoder.generate(prompt, 20)
    list(generation)
    assert len(first.learned) == len(second.learned) == generation.statistics.num_passes
    assert not first.open
    assert not second.open


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("pass_number", [0, 1])
def test_a_reader_that_gives_no_numbers_is_dropped_for_good(
    value: float, pass_number: int, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(tokens: list[int]) -> dict[int, float]:
        return {7: value} if len(tokens) == 1 + pass_number else counting(tokens)

    bad, good = ScriptedReader(broken), ScriptedReader(counting)
    retrieval = saying(([20, 21], 0.6))
    drafter = FusedDrafter([retrieval], LIMITS, readers=[bad, good], costs=FREE)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sequence = drafter.follow(TokenSequence(np.array([3], np.int32)))
            tree = sequence.draft(8)
            assert tree.probabilities.max() <= 1.0
            assert {(4,), (4, 5)} <= set(paths_of(tree))
            sequence.close()
    assert sum("not finite" in message for message in caplog.messages) == 1
    assert len(bad.passes) == 1 + pass_number
    assert len(good.passes) > 3
    assert not bad.open


@pytest.mark.parametrize(
    "error", [DrafterUnavailableError("too long"), torch.OutOfMemoryError("no memory")]
)
def test_a_reader_that_is_not_available_is_left_out_of_the_sequence(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Unavailable(3, error)
    drafter = FusedDrafter([saying(([20, 21], 0.6))], LIMITS, readers=[reader], costs=FREE)
    failing = drafter.follow(TokenSequence(np.array([3], np.int32)))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert paths_of(failing.draft(8)) == [(20,), (20, 21)]
    assert len(caplog.messages) == 1
    assert str(error) in caplog.messages[0]
    assert failing.num_failures == 1
    other = drafter.follow(TokenSequence(np.array([5], np.int32)))
    assert (6,) in paths_of(other.draft(8))


def test_tokens_that_readers_do_not_know_are_not_read() -> None:
    retrieval = saying(([40, 41, 5], 0.9), ([20], 0.3))
    for reads_paths in (False, True):
        reader = ScriptedReader(counting, reads_paths=reads_paths, columns=range(30))
        limits = DraftLimits(VOCABULARY, 41)
        drafter = FusedDrafter([retrieval], limits, readers=[reader], costs=FREE)
        drafter.follow(TokenSequence(np.array([3], np.int32))).draft(8)
        read = {path for nodes in reader.passes for path in nodes}
        assert (40,) in read
        assert not any(41 in path for path in read)


def test_a_reader_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(VocabularyMismatchError, match="token 47"):
        FusedDrafter([], DraftLimits(40), readers=[ScriptedReader(counting)])


def test_a_reader_that_is_never_right_is_hardly_asked() -> None:
    reader = ScriptedReader(lambda _: {1: SURE})
    drafter = FusedDrafter([], LIMITS, readers=[reader], costs=StepCosts(1.0, 0.1))
    sequence = TokenSequence(np.array([7], np.int32))
    fused = drafter.follow(sequence)
    for _ in range(300):
        tree = fused.draft(4)
        rows = logits_for(*[{7: 9.0}] * (1 + len(tree)))
        fused.learn(Verified(7, tree, rows, np.zeros(0, np.int64), 7))
        sequence.extend([7])
    assert sum(read == [] for read in reader.passes) < 40

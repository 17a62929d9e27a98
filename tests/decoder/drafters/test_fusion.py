import numpy as np
import pytest
import torch

from decoder.drafters.following import NoDrafter, Verified
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.recycling import RecycledLogits
from decoder.sampling.verification import PassContext, accept_greedy
from decoder.sampling.walk import Acceptance
from retriever.drafter import DEFAULT, Drafter, DraftRequest, SequenceOptions, TokenIds
from retriever.errors import (
    DrafterUnavailableError,
    InvalidRequestError,
    OutOfSequenceError,
    SessionExistsError,
    UnknownSessionError,
)
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree, Source
from tests.decoder.decoding import (
    MODELS,
    VOCABULARY,
    ScriptedDrafter,
    decoded,
    decoder_with,
    every_token,
    plainly,
    prompt_of,
    tiny_llama,
)
from tests.decoder.drafters.drafted_chains import LIMITS, logits_for, paths_of, saying

NEW_TOKENS = 60


def broken() -> Drafter:
    """Return a drafter that is never there."""

    def refuse(_tokens: list[int], _budget: int) -> DraftTree:
        raise DrafterUnavailableError("no service answers")

    return ScriptedDrafter(refuse)


def fused(*drafters: Drafter, budget: int = 16) -> DraftTree:
    drafter = FusedDrafter(drafters, LIMITS)
    drafter.open("a", np.array([1, 2, 3], np.int32))
    [tree] = drafter.draft([DraftRequest("a", np.zeros(0, np.int32), 3, budget)])
    return DraftTree.checked(tree.token_ids, tree.parents, tree.probabilities, tree.sources)


def test_shared_paths_are_one_and_the_rest_is_grafted() -> None:
    first, second = saying(([4, 5, 6], 0.8)), saying(([4, 5, 7, 8], 0.7), ([9], 0.2))
    paths = paths_of(fused(first, second))
    expected = {(4,), (4, 5), (4, 5, 6), (4, 5, 7), (4, 5, 7, 8), (9,)}
    assert set(paths) == expected
    assert len(paths) == len(expected)


def test_three_drafters_and_more_are_fused() -> None:
    drafters = [saying(([token, token + 1], 0.5)) for token in (4, 6, 8, 10)]
    assert set(paths_of(fused(*drafters))) >= {(4, 5), (6, 7), (8, 9), (10, 11)}


def test_what_two_drafters_say_is_more_probable_than_what_one_does() -> None:
    tree = fused(saying(([4], 0.4), ([5], 0.4)), saying(([4], 0.4), ([6], 0.4)))
    assert tree.token_ids[0] == 4


def test_joint_tree_keeps_to_the_budget_and_is_its_best_part() -> None:
    first, second = saying(([4, 5, 6, 7], 0.9)), saying(([8, 9], 0.3))
    whole, cut = fused(first, second, budget=16), fused(first, second, budget=3)
    assert paths_of(cut) == paths_of(whole)[:3]


def test_part_that_fails_costs_its_part_alone() -> None:
    drafter = FusedDrafter([broken(), saying(([4, 5], 0.8))], LIMITS)
    sequence = drafter.follow(TokenSequence(np.array([1], np.int32)))
    assert paths_of(sequence.draft(8)) == [(4,), (4, 5)]
    assert sequence.num_failures > 0
    sequence.close()


class Sharing(ScriptedDrafter):
    """Keeps the very arrays that it is shown."""

    def __init__(self) -> None:
        super().__init__(lambda _tokens, _budget: DraftTree.empty())
        self.prompts: list[TokenIds] = []

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:
        self.prompts.append(prompt)
        super().open(session, prompt, options)


def test_the_loop_and_all_parts_share_one_sequence() -> None:
    first, second = Sharing(), Sharing()
    sequences: list[TokenIds] = []

    def noting(tree: DraftTree, logits: torch.Tensor, context: PassContext) -> Acceptance:
        sequences.append(context.tokens)
        return accept_greedy(tree, logits, context)

    model, prompt = MODELS["llama"](), prompt_of(12)
    drafter = FusedDrafter([first, second], LIMITS, recycled=RecycledLogits(1 << 8))
    decoded(decoder_with(model, drafter, accept=noting), prompt, NEW_TOKENS)
    assert len(sequences) > 2
    for shown in (*first.prompts, *second.prompts, *sequences):
        assert np.shares_memory(shown, sequences[0])
    assert first.closed == second.closed == [prompt + plainly(model, prompt, NEW_TOKENS)]


def test_a_part_that_refuses_a_prompt_leaves_no_session_of_the_others() -> None:
    class Refusing(ScriptedDrafter):
        def open(self, *_: object, **__: object) -> None:
            raise InvalidRequestError("no such token")

    first = ScriptedDrafter(lambda _tokens, _budget: DraftTree.empty())
    drafter = FusedDrafter([first, Refusing(every_token)], LIMITS)
    with pytest.raises(InvalidRequestError, match="no such token"):
        drafter.open("a", np.array([1], np.int32))
    assert not first.open_sessions
    with pytest.raises(UnknownSessionError):
        drafter.close("a")


def test_a_draft_of_earlier_tokens_teaches_nothing() -> None:
    drafter = FusedDrafter([saying(([4], 0.9)), saying(([5], 0.6))], LIMITS)
    taught: list[DraftTree] = []
    sequence = TokenSequence(np.array([1], np.int32))
    fused_sequence = drafter.follow(sequence)
    for _ in range(200):
        if not taught:
            taught.append(fused_sequence.draft(4))
        sequence.extend([5])
        nothing = DraftTree.empty()
        passed = Verified(5, nothing, logits_for({5: 9}), np.zeros(0, np.int64), 5)
        fused_sequence.learn(passed)
    assert fused_sequence.draft(4).token_ids.tolist() == taught[0].token_ids.tolist()


def test_sessions_are_as_the_protocol_says() -> None:
    drafter = FusedDrafter([NoDrafter()], LIMITS)
    drafter.open("a", np.array([1], np.int32))
    with pytest.raises(SessionExistsError):
        drafter.open("a", np.array([1], np.int32))
    with pytest.raises(OutOfSequenceError):
        drafter.draft([DraftRequest("a", np.array([2], np.int32), 3, 8)])
    drafter.close("a")
    with pytest.raises(UnknownSessionError):
        drafter.draft([DraftRequest("a", np.zeros(0, np.int32), 1, 8)])


def test_likely_tokens_come_back_where_their_context_does() -> None:
    drafter = FusedDrafter([], LIMITS, recycled=RecycledLogits(1 << 8))
    drafter.open("a", np.array([1, 2], np.int32))
    drafter.learn(
        "a", Verified(2, DraftTree.empty(), logits_for({7: 9, 8: 5}), np.zeros(0, np.int64), 7)
    )
    [tree] = drafter.draft([DraftRequest("a", np.array([7, 1, 2], np.int32), 5, 4)])
    assert tree.token_ids[0] == 7
    assert tree.probabilities[0] > 0.5
    assert set(tree.sources.tolist()) == {Source.MODEL}


def test_a_token_that_leaves_nothing_to_others_is_kept_as_others_are() -> None:
    recycled = RecycledLogits(1 << 8)
    sure = torch.full((1, VOCABULARY), -torch.inf)
    sure[0, 4] = 90.0
    verified = Verified(3, DraftTree.empty(), sure, np.zeros(0, np.int64), 4)
    recycled.learn(verified, np.array([3, 2, 1], np.int32))
    kept = recycled.table.log_odds[recycled.table.entries["key"] != 0]
    assert np.isfinite(kept).all()
    assert (kept[:, 0] > 6).all()


def test_a_drafter_that_is_always_wrong_loses_its_say() -> None:
    drafter = FusedDrafter([saying(([4], 0.9)), saying(([5], 0.6))], LIMITS)
    drafter.open("a", np.array([1], np.int32))
    length = 1
    for _ in range(300):
        [tree] = drafter.draft(
            [DraftRequest("a", np.full(int(length > 1), 5, np.int32), length, 4)]
        )
        path = tree.follow(np.array([5]))
        drafter.learn("a", Verified(5, tree, logits_for({5: 9}, {5: 9}, {5: 9}), path[:0], 5))
        length += 1
    assert tree.token_ids[0] == 5
    assert tree.probabilities[0] > 0.8
    assert tree.probabilities[tree.token_ids.tolist().index(4)] < 0.2


def test_recycled_logits_save_passes_the_second_time() -> None:
    model, prompt = tiny_llama(layers=3), prompt_of(12)
    decoder = decoder_with(model, FusedDrafter([], LIMITS, recycled=RecycledLogits()))
    passes = []
    for _ in range(2):
        generation = decoder.generate(prompt, NEW_TOKENS)
        list(generation)
        passes.append(generation.statistics.num_passes)
    assert passes[1] < 0.8 * passes[0] < 0.5 * NEW_TOKENS

"""Long commits, closings and outputs in pieces: the same as in one, and right if ended midway."""

from dataclasses import replace

import numpy as np
import pytest

from retriever.drafter import DraftRequest, TokenIds
from retriever.errors import OutOfSequenceError, UnknownSessionError
from retriever.limits import Limits
from retriever.predict.context import context_bytes
from retriever.predict.databases import Databases
from retriever.predict.generations import Generations, Output
from retriever.sequences import SessionKey
from retriever.sessions.draft_counts import Census
from retriever.sessions.drafter_state import finish
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.service_face import ServiceFace
from retriever.sessions.session_table import CheckedRequest

KEY = SessionKey("", "s")
LONG = 60_000
VERY_LONG = 4 * LONG
# Room for one long sequence, with the short one that it grows from, and not for two.
ROOM = context_bytes(LONG + 100) + context_bytes(100) + (1 << 18)


def tokens(num: int, seed: int = 0) -> TokenIds:
    """Return phrases that recur, so that there is something to draft."""
    rng = np.random.default_rng(seed)
    phrases = rng.integers(0, 5000, (200, 11))
    return phrases[rng.integers(0, 200, num // 11 + 1)].ravel()[:num].astype(np.int32)


def drafter_with(prompt: TokenIds) -> EmbeddedDrafter:
    drafter = EmbeddedDrafter()
    drafter.state.begin(KEY, drafter.state.prepare(prompt))
    return drafter


def without_pages(census: Census) -> Census:
    """Return the census without what takes no pages, which depends on where memory lies."""
    assert 0 <= census.untouched_bytes <= census.session_bytes + census.generations_bytes
    return replace(census, untouched_bytes=0)


def begun_commit(drafter: EmbeddedDrafter, known: int, new: TokenIds) -> CheckedRequest:
    (commit,) = ServiceFace(drafter.state).commit_each(
        [DraftRequest("s", new, known + len(new), 32)], ""
    )
    assert isinstance(commit, CheckedRequest)
    assert commit.session.is_committing
    return commit


def finished_commit(drafter: EmbeddedDrafter, known: int, new: TokenIds) -> CheckedRequest:
    commit = begun_commit(drafter, known, new)
    ServiceFace(drafter.state).commit_long(commit)
    assert not commit.session.is_committing
    return commit


@pytest.mark.parametrize("num_prompt", [0, 3000, LONG])
def test_drafts_after_a_long_commit_are_those_of_a_commit_at_once(num_prompt: int) -> None:
    text = tokens(num_prompt + LONG)
    ours, theirs = drafter_with(text[:num_prompt]), EmbeddedDrafter()
    theirs.open("s", text[:num_prompt])
    request = DraftRequest("s", text[num_prompt:], len(text), 32)
    step = finished_commit(ours, num_prompt, text[num_prompt:])
    (one,), (other,) = ServiceFace(ours.state).draft_each([step]), theirs.draft([request])
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.probabilities.tolist() == other.probabilities.tolist()
    assert len(one) == 32
    assert without_pages(ours.state.census()) == without_pages(theirs.state.census())


def test_growth_of_a_long_sequence_is_long_work_too() -> None:
    prompt = tokens(VERY_LONG)
    drafter = drafter_with(prompt)
    known, num_long = VERY_LONG, 0
    for new in np.array_split(tokens(VERY_LONG * 2, 1), 200):
        (step,) = ServiceFace(drafter.state).commit_each(
            [DraftRequest("s", new, known + len(new), 4)], ""
        )
        known += len(new)
        assert isinstance(step, CheckedRequest)
        if step.session.is_committing:
            num_long += 1
            ServiceFace(drafter.state).commit_long(step)
    assert num_long == 1
    assert drafter.state.census().session_tokens == known


def test_other_requests_wait_for_a_long_commit() -> None:
    drafter = drafter_with(tokens(100))
    commit = begun_commit(drafter, 100, tokens(LONG))
    (refused,) = ServiceFace(drafter.state).commit_each(
        [DraftRequest("s", tokens(1), 100 + LONG + 1, 4)], ""
    )
    assert isinstance(refused, OutOfSequenceError)
    assert "one step of a session after the other" in str(refused)
    with pytest.raises(OutOfSequenceError):
        drafter.state.end(KEY)
    ServiceFace(drafter.state).commit_long(commit)
    (step,) = ServiceFace(drafter.state).commit_each(
        [DraftRequest("s", tokens(1), 100 + LONG + 1, 4)], ""
    )
    assert not isinstance(step, OutOfSequenceError)


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_session_that_ends_within_a_long_commit_gives_all_its_tokens_back(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = EmbeddedDrafter(limits=Limits(max_bytes=ROOM, max_tenant_bytes=ROOM))
    session = drafter.state.prepare(tokens(100))
    drafter.state.begin(KEY, session)
    commit = begun_commit(drafter, 100, tokens(LONG))
    face, append = ServiceFace(drafter.state), Databases.append
    if when == "before":
        assert face.discard([(KEY, session)]) == 1
    else:

        def ends_first(databases: Databases, new: TokenIds) -> None:
            assert face.discard([(KEY, sessions.pop())]) == 1
            append(databases, new)

        sessions = [session]
        monkeypatch.setattr(Databases, "append", ends_first)
    with pytest.raises(UnknownSessionError, match="ended while"):
        face.commit_long(commit)
    assert not session.databases.context.last(LONG).any()
    del session, commit  # its memory counts until nobody holds it
    drafter.open("next", tokens(LONG + 100))  # all of the room is there again
    drafter.close("next")
    assert drafter.state.census().session_tokens == 0


def test_a_long_output_is_remembered_in_pieces_as_at_once() -> None:
    text, output = tokens(500), tokens(LONG, 3)
    ours, theirs = drafter_with(text), drafter_with(text)
    theirs.state.end(KEY, output)
    assert len(list(ours.state.ending(KEY, output)[1])) > 4
    for at in (10, LONG // 2, LONG - 40):
        one, other = (
            drafter.draft_context(output[at : at + 9], 24).token_ids.tolist()
            for drafter in (ours, theirs)
        )
        assert one == other
        assert one


def outputs_of(generations: Generations) -> list[list[int]]:
    return [output.tokens.tolist() for output in generations.outputs()]


def test_outputs_that_come_within_a_long_one_follow_it() -> None:
    generations = Generations(1 << 18, clock=lambda: 0.0)
    long = tokens(LONG)
    pieces = generations.adding(Output(long, 0.0, b"long"))
    next(pieces)
    generations.extend([Output(tokens(5, 1), 0.0, b"a")])
    assert list(generations.adding(Output(tokens(7, 2), 0.0, b"b"))) == []
    assert outputs_of(generations) == []
    for _ in pieces:
        pass
    assert outputs_of(generations) == [long.tolist(), tokens(5, 1).tolist(), tokens(7, 2).tolist()]


@pytest.mark.parametrize("origin", [b"long", b"a", b"none"])
def test_deletion_within_a_long_output_deletes_what_is_covered_and_no_more(origin: bytes) -> None:
    generations = Generations(1 << 18, clock=lambda: 0.0)
    generations.extend([Output(tokens(3, 9), 0.0, b"old")])
    long = tokens(LONG)
    pieces = generations.adding(Output(long, 0.0, b"long"))
    next(pieces)
    next(pieces)
    generations.extend([Output(tokens(5, 1), 0.0, b"a")])
    for _ in generations.removing(origin):
        next(pieces, None)
    for _ in pieces:
        pass
    expected = {b"old": tokens(3, 9), b"long": long, b"a": tokens(5, 1)}
    expected.pop(origin, None)
    assert outputs_of(generations) == [each.tolist() for each in expected.values()]


def test_deletion_of_all_within_a_long_output_leaves_nothing() -> None:
    generations = Generations(1 << 18, clock=lambda: 0.0)
    pieces = generations.adding(Output(tokens(LONG), 0.0, b"long"))
    next(pieces)
    next(pieces)
    generations.clear()
    for _ in pieces:
        pass
    assert generations.num_tokens == 0
    generations.extend([Output(tokens(5), 0.0)])
    assert outputs_of(generations) == [tokens(5).tolist()]


@pytest.mark.parametrize("held", [20_000, 65_000])
def test_a_ring_that_grows_or_wraps_in_pieces_holds_the_same(held: int) -> None:
    one, other = Generations(1 << 16, clock=lambda: 0.0), Generations(1 << 16, clock=lambda: 0.0)
    for generations in (one, other):
        for seed in range(held // 1000):
            generations.extend([Output(tokens(999, seed), 0.0)])
    other.extend([Output(tokens(30_000, 77), 0.0)])
    assert len(list(one.adding(Output(tokens(30_000, 77), 0.0)))) > 3
    assert outputs_of(one) == outputs_of(other)
    assert one.num_tokens == other.num_tokens


def test_a_session_is_not_drafted_for_while_its_tokens_are_noted() -> None:
    """Its memory is exchanged meanwhile, without the lock."""
    drafter = drafter_with(tokens(100))
    (step,) = ServiceFace(drafter.state).commit_each([DraftRequest("s", tokens(1), 101, 8)], "")
    assert isinstance(step, CheckedRequest)
    commit = begun_commit(drafter, 101, tokens(LONG))
    assert not len(ServiceFace(drafter.state).draft_each([step])[0])
    ServiceFace(drafter.state).commit_long(commit)
    assert len(ServiceFace(drafter.state).draft_each([commit])[0])


@pytest.mark.parametrize("num_new", [50, LONG])
@pytest.mark.parametrize("deleted", ["session", "tenant"])
def test_a_deletion_before_the_first_piece_deletes_the_output_too(
    num_new: int, deleted: str
) -> None:
    drafter = drafter_with(tokens(100))
    _, pieces = drafter.state.ending(KEY, tokens(num_new, 3))
    if deleted == "tenant":
        drafter.delete("")
    else:
        drafter.state.delete("", KEY)
    finish(pieces)
    assert drafter.state.census().generations_tokens == 0


def test_outputs_that_come_when_an_adder_has_left_are_added_with_its_own() -> None:
    generations = Generations(1 << 17)
    pieces = generations.adding(Output(tokens(LONG), 0.0))
    del pieces
    generations.extend([Output(tokens(5), 1.0)])
    assert outputs_of(generations) == [tokens(LONG).tolist(), tokens(5).tolist()]


def test_what_is_overwritten_midway_is_not_taken_for_what_overwrites_it() -> None:
    generations = Generations(1 << 13, clock=lambda: 0.0)
    for seed in range(4):
        generations.extend([Output(tokens(2000, seed), 0.0, bytes([seed]))])
    pieces = generations.adding(Output(np.full(20_000, 7, np.int32), 0.0, b"c"))
    for _ in pieces:
        assert not any(7 in output.tokens for output in generations.outputs()[:-1])
        found = {output.origin: output.tokens for output in generations.outputs()}
        for seed in range(4):
            kept = found.get(bytes([seed]), tokens(0))
            assert kept.tolist() == tokens(2000, seed)[2000 - len(kept) :].tolist()


def test_a_ring_that_shrinks_keeps_the_end_of_an_output_that_is_too_long() -> None:
    generations = Generations(1 << 14, clock=lambda: 0.0)
    generations.extend([Output(tokens(3000), 0.0), Output(tokens(9000, 1), 0.0)])
    assert generations.shrink()
    (kept,) = outputs_of(generations)
    assert kept == tokens(9000, 1).tolist()[-len(kept) :]
    assert len(kept) > 8000

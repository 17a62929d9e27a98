from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from indexer.build import BuildOptions, build_from_tokens
from indexer.errors import TokenizerMismatchError
from indexer.reader import Vocabulary
from retriever.drafter import FORGOTTEN, DraftRequest, SequenceOptions
from retriever.errors import (
    InvalidRequestError,
    LimitExceededError,
    OutOfSequenceError,
    SessionExistsError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.limits import Limits
from retriever.sequences import SessionKey
from retriever.sessions.draft_counts import NOTHING_HELD
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.service_face import ServiceFace
from retriever.tree import DraftTree, Source
from tests.retriever.kernels.twins.cursor_twin import without_cursor
from tests.retriever.token_ids import ids


def draft(
    drafter: EmbeddedDrafter, session: str, new: Sequence[int], length: int, budget: int = 16
) -> DraftTree:
    return drafter.draft([DraftRequest(session, ids(*new), length, budget)])[0]


def test_context_is_copied_on() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", ids(1, 2, 3, 4, 5, 6, 1, 2))
    tree = draft(drafter, "s", [3], 9)
    assert tree.best_chain(3).token_ids.tolist() == [4, 5, 6]
    assert set(tree.sources.tolist()) == {Source.CONTEXT}


def test_a_loop_goes_on_as_a_loop() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", ids(*[1, 2, 3] * 4))
    chain = draft(drafter, "s", [], 12, budget=64).best_chain(64)
    assert chain.token_ids.tolist()[:30] == [1, 2, 3] * 10


def test_closed_sequences_serve_later_ones() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("first", ids(9))
    draft(drafter, "first", [10, 11], 3)
    drafter.close("first", ids(12, 13))
    drafter.open("second", ids(30, 10, 11))
    tree = draft(drafter, "second", [], 3)
    assert tree.best_chain(2).token_ids.tolist() == [12, 13]
    assert set(tree.sources.tolist()) == {Source.GENERATIONS}


def test_prompts_do_not_join_the_generations() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("first", ids(1, 2, 3, 4))
    drafter.close("first", ids(20))
    drafter.open("second", ids(1, 2))
    assert len(draft(drafter, "second", [], 2)) == 0


def test_sequences_that_opted_out_are_forgotten() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("first", ids(9), FORGOTTEN)
    drafter.close("first", ids(10, 11, 12))
    drafter.open("second", ids(10, 11))
    assert len(draft(drafter, "second", [], 2)) == 0


def test_generations_end_where_their_sequence_ended() -> None:
    drafter = EmbeddedDrafter()
    for output in (ids(10, 11, 12), ids(13, 14, 15)):
        drafter.remember(output)
    drafter.open("s", ids(10, 11))
    assert draft(drafter, "s", [], 2).token_ids.tolist() == [12]


def test_oldest_generations_are_overwritten() -> None:
    drafter = EmbeddedDrafter(limits=Limits(generations_tokens=1024))
    drafter.remember(ids(10, 11, 12))
    drafter.open("s", ids(10, 11))
    assert draft(drafter, "s", [], 2).token_ids.tolist() == [12]
    for start in range(100, 1200, 100):
        drafter.remember(np.arange(start, start + 100, dtype=np.int32))
    assert len(draft(drafter, "s", [], 2)) == 0


def test_corpus_is_drafted_from(index: Path) -> None:
    with_index = EmbeddedDrafter.open_indexes([index])
    document = with_index.stats().indexes[0].segments[0].tokens[:12].astype(np.int32)
    tree = with_index.draft_context(document[:6], budget_nodes=32)
    assert tree.best_chain(6).token_ids.tolist() == document[6:12].tolist()
    assert set(tree.sources.tolist()) == {Source.CORPUS}


def test_a_longer_sequence_than_planned_keeps_its_past() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", ids(1, 2, 3))
    for start in range(10, 5000, 10):
        draft(drafter, "s", list(range(start, start + 10)), 3 + start, budget=0)
    assert draft(drafter, "s", [1, 2], 4995).token_ids.tolist()[0] == 3


def test_drafting_in_steps_equals_drafting_from_the_whole(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is kept between steps, only weights and cursors change what is drafted."""
    without_cursor(monkeypatch)
    rng = np.random.default_rng(11)
    stepped = EmbeddedDrafter.open_indexes([index])
    tokens = stepped.stats().indexes[0].segments[0].tokens
    sequence = tokens[tokens < 50][:400].astype(np.int32)
    stepped.open("s", sequence[:5], FORGOTTEN)
    done = 5
    while done < len(sequence):
        new = sequence[done : done + int(rng.integers(1, 6))]
        done += len(new)
        tree = stepped.draft([DraftRequest("s", new, done, 24)])[0]
        whole = stepped.draft_context(sequence[:done], 24)
        assert tree.token_ids.tolist() == whole.token_ids.tolist()
        assert tree.parents.tolist() == whole.parents.tolist()
        assert tree.probabilities.tolist() == whole.probabilities.tolist()


def test_drafts_are_valid_trees_within_budget(index: Path) -> None:
    rng = np.random.default_rng(13)
    drafter = EmbeddedDrafter.open_indexes([index])
    for _ in range(300):
        budget = int(rng.integers(0, 65))
        context = rng.integers(0, 8, int(rng.integers(0, 60)))
        tree = drafter.draft_context(context, budget, min_probability=0.01)
        checked = DraftTree.checked(
            tree.token_ids, tree.parents, tree.probabilities, tree.sources, vocabulary_size=50
        )
        assert len(checked) <= budget
        assert (tree.probabilities >= np.float32(0.01)).all()


def test_batches_answer_each_sequence_with_its_own_draft() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("a", ids(1, 2, 3, 1, 2))
    drafter.open("b", ids(7, 8, 9, 7, 8))
    trees = drafter.draft([DraftRequest("b", ids(), 5, 1), DraftRequest("a", ids(), 5, 1)])
    assert [tree.token_ids.tolist() for tree in trees] == [[9], [3]]


def test_unknown_session_is_refused() -> None:
    drafter = EmbeddedDrafter()
    with pytest.raises(UnknownSessionError, match="open it first"):
        draft(drafter, "nobody", [], 0)
    with pytest.raises(UnknownSessionError):
        drafter.close("nobody")


def test_session_that_is_open_is_not_opened_again() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", ids(1))
    with pytest.raises(SessionExistsError):
        drafter.open("s", ids(1))


@pytest.mark.parametrize("stated", [0, 4, 6, 100])
def test_step_out_of_sequence_is_refused_and_keeps_nothing(stated: int) -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", ids(1, 2, 3))
    with pytest.raises(OutOfSequenceError, match="lost or repeated"):
        draft(drafter, "s", [4, 5], stated)
    draft(drafter, "s", [4, 5], 5)


def test_refused_request_keeps_nothing_of_its_whole_step() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("a", ids(1))
    drafter.open("b", ids(1))
    good, bad = DraftRequest("a", ids(2), 2, 4), DraftRequest("b", ids(2), 7, 4)
    with pytest.raises(OutOfSequenceError):
        drafter.draft([good, bad])
    drafter.draft([good])


@pytest.mark.parametrize("token", [-1, 50, 1 << 20])
def test_token_outside_the_vocabulary_is_refused(index: Path, token: int) -> None:
    drafter = EmbeddedDrafter.open_indexes([index])
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        drafter.open("s", ids(token))
    drafter.open("s", ids(1))
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        draft(drafter, "s", [token], 2)
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        drafter.draft_context(ids(token), 4)
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        drafter.close("s", ids(token))
    draft(drafter, "s", [2], 2)


@pytest.mark.parametrize("tokens", [[[1, 2]], [0.5], ["a"]])
def test_what_is_no_token_id_is_refused(tokens: list[object]) -> None:
    with pytest.raises(InvalidRequestError, match="integers"):
        EmbeddedDrafter().open("s", tokens)  # type: ignore[arg-type]


def test_limits_are_named_when_exceeded() -> None:
    limits = Limits(max_sessions=1, max_sequence_tokens=4, max_budget_nodes=8, max_batch=1)
    drafter = EmbeddedDrafter(limits=limits)
    with pytest.raises(LimitExceededError, match="max_sequence_tokens"):
        drafter.open("s", ids(1, 2, 3, 4, 5))
    drafter.open("s", ids(1, 2, 3))
    with pytest.raises(LimitExceededError, match="max_sessions"):
        drafter.open("t", ids(1))
    with pytest.raises(LimitExceededError, match="max_sequence_tokens"):
        draft(drafter, "s", [4, 5], 5, budget=8)
    with pytest.raises(LimitExceededError, match="max_budget_nodes"):
        draft(drafter, "s", [4], 4, budget=9)
    request = DraftRequest("s", ids(4), 4, 8)
    with pytest.raises(LimitExceededError, match="max_batch"):
        drafter.draft([request, request])
    drafter.draft([request])


def test_one_session_twice_in_a_step_is_refused() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", ids(1))
    request = DraftRequest("s", ids(), 1, 4)
    with pytest.raises(InvalidRequestError, match="twice"):
        drafter.draft([request, request])


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_session_names_have_a_length(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="1 to 256 bytes"):
        EmbeddedDrafter().open(name, ids(1))


def test_idle_session_ends_when_room_is_needed_and_a_used_one_does_not() -> None:
    now = 0.0
    limits = Limits(max_sessions=2, idle_session_s=60)
    drafter = EmbeddedDrafter(limits=limits, clock=lambda: now)
    for name in ("idle", "used"):
        drafter.open(name, ids(1))
    now = 50.0
    drafter.draft([DraftRequest("used", ids(), 1, 1)])
    with pytest.raises(LimitExceededError, match="max_sessions"):
        drafter.open("new", ids(1))
    now = 61.0
    drafter.open("new", ids(1))
    drafter.draft([DraftRequest("used", ids(), 1, 1)])
    with pytest.raises(UnknownSessionError):
        drafter.draft([DraftRequest("idle", ids(), 1, 1)])


def test_drafter_without_index_serves_one_vocabulary() -> None:
    drafter = EmbeddedDrafter()
    ServiceFace(drafter.state).check_vocabulary("")
    ServiceFace(drafter.state).check_vocabulary("cd")
    ServiceFace(drafter.state).check_vocabulary("ab")  # nothing is kept of the other
    drafter.open("s", ids(1))
    with pytest.raises(VocabularyMismatchError):
        ServiceFace(drafter.state).check_vocabulary("cd")
    ServiceFace(drafter.state).check_vocabulary("ab")


def test_no_tenant_names_the_tokenizer_of_another(tmp_path: Path) -> None:
    """But where an output is kept: a state directory is for one tokenizer."""
    drafter = EmbeddedDrafter(state=tmp_path)
    for tenant, fingerprint in (("wrong", "cd"), ("right", "ab"), ("other", "ab")):
        ServiceFace(drafter.state).check_vocabulary(fingerprint, tenant)
        drafter.state.begin(
            SessionKey(tenant, "s"), drafter.state.prepare(ids(1), SequenceOptions(tenant=tenant))
        )
    with pytest.raises(VocabularyMismatchError):
        ServiceFace(drafter.state).check_vocabulary("ab", "wrong")
    drafter.state.end(SessionKey("wrong", "s"))  # it has no output
    ServiceFace(drafter.state).check_vocabulary("ab", "wrong")
    ServiceFace(drafter.state).check_vocabulary("cd", "wrong")
    drafter.state.end(SessionKey("right", "s"), ids(2, 3))
    drafter.state.flush()
    with pytest.raises(VocabularyMismatchError, match="fingerprint ab"):
        ServiceFace(drafter.state).check_vocabulary("cd", "wrong")
    ServiceFace(drafter.state).check_vocabulary("ab", "other")
    drafter.shut_down()
    again = EmbeddedDrafter(state=tmp_path)
    with pytest.raises(VocabularyMismatchError, match="fingerprint ab"):
        ServiceFace(again.state).check_vocabulary("cd", "wrong")
    again.shut_down()


def test_several_segments_and_indexes_are_drafted_from(
    tmp_path: Path, vocabulary: Vocabulary
) -> None:
    """Drafts from steps, from the whole, and whatever the division into segments, find all."""
    rng = np.random.default_rng(19)
    documents = [(str(i), rng.integers(0, 6, 60).tolist()) for i in range(12)]
    paths = [tmp_path / "one", tmp_path / "other"]
    build_from_tokens(documents[:8], paths[0], vocabulary, BuildOptions(segment_tokens=130))
    build_from_tokens(documents[8:], paths[1], vocabulary)
    drafter = EmbeddedDrafter.open_indexes(paths)
    assert len(drafter.stats().indexes[0].segments) > 2
    for _, document in documents:
        drafter.open("s", ids(*document[:20]))
        for length in range(20, 50, 3):
            tree = draft(drafter, "s", document[length - 3 : length] if length > 20 else [], length)
            whole = drafter.draft_context(document[:length], 16)
            assert tree.token_ids.tolist() == whole.token_ids.tolist()
            assert len(tree.follow(np.array(document[length:]))) > 0
        drafter.close("s")


def test_threads_draft_as_one_would(index: Path) -> None:
    drafter = EmbeddedDrafter.open_indexes([index])
    rng = np.random.default_rng(23)
    contexts = [rng.integers(0, 50, 30) for _ in range(200)]
    alone = [drafter.draft_context(context, 16).token_ids.tolist() for context in contexts]
    with ThreadPoolExecutor(4) as threads:
        together = threads.map(lambda context: drafter.draft_context(context, 16), contexts)
        assert [tree.token_ids.tolist() for tree in together] == alone


@pytest.mark.parametrize("min_probability", [-0.1, 1.1, float("nan")])
def test_threshold_is_a_probability(min_probability: float) -> None:
    with pytest.raises(InvalidRequestError, match="min_probability"):
        EmbeddedDrafter().draft_context(ids(1), 4, min_probability)


def test_negative_budget_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="negative"):
        EmbeddedDrafter().draft_context(ids(1), -1)


def test_empty_prompt_is_drafted_from_nothing() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", ids())
    assert len(draft(drafter, "s", [], 0)) == 0


def test_index_of_another_tokenizer_is_refused(index: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerMismatchError, match="rebuild the index for this one"):
        EmbeddedDrafter.open_indexes([index], vocabulary=Vocabulary(50, "cd" * 32))
    build_from_tokens([("d", [1, 2])], tmp_path / "other", Vocabulary(50, "cd" * 32))
    with pytest.raises(InvalidRequestError, match="same --tokenizer"):
        EmbeddedDrafter.open_indexes([index, tmp_path / "other"])
    with pytest.raises(VocabularyMismatchError, match="model's own tokenizer"):
        ServiceFace(EmbeddedDrafter.open_indexes([index]).state).check_vocabulary("cd" * 32)


def test_it_has_thirteen_members_and_few_attributes() -> None:
    members = {
        *("open_indexes", "open", "add_predictions", "draft", "draft_ahead", "close"),
        *("draft_context", "remember", "delete", "refresh", "warm", "stats", "shut_down"),
    }
    drafter = EmbeddedDrafter()
    shown = {name for name in dir(drafter) if not name.startswith("_")}
    assert shown == members | {"limits", "vocabulary", "state", "keeps_tenants"}
    assert len(members) == 13


def test_looking_often_counts_no_memory() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", ids(1, 2, 3))
    assert drafter.stats(census=False).num_sessions == 1
    assert drafter.stats(census=False).census is NOTHING_HELD
    assert drafter.stats().census.session_tokens == 3

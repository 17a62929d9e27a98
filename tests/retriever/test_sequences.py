"""Sequences keep their tokens, and names are taken, found and freed as they say."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from retriever.drafter import DraftRequest
from retriever.errors import (
    InvalidRequestError,
    OutOfSequenceError,
    SessionExistsError,
    UnknownSessionError,
)
from retriever.sequences import (
    OpenSessions,
    SessionKey,
    TokenSequence,
    check_named_once,
    check_step,
)

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(IDS, st.lists(st.one_of(IDS, st.integers(0, 40)), max_size=12))
def test_a_sequence_is_the_list_of_its_tokens(prompt: list[int], changes: list[object]) -> None:
    sequence, twin = TokenSequence(np.array(prompt, np.int32)), list(prompt)
    for change in changes:
        if isinstance(change, list):
            sequence.extend(change)
            twin.extend(change)
        elif isinstance(change, int) and change >= len(prompt):
            sequence.shorten(change)
            del twin[change:]
        assert sequence.tokens.tolist() == twin
        assert len(sequence) == len(twin)
        assert sequence.prompt.tolist() == prompt
        assert sequence.output.tolist() == twin[len(prompt) :]
        assert sequence.since(len(prompt)).tolist() == twin[len(prompt) :]
        assert (
            sequence.bytes_since(len(prompt)) == np.array(twin[len(prompt) :], np.int32).tobytes()
        )


@given(prompt=IDS, row=IDS, goes_on=st.booleans())
def test_a_row_begins_with_a_sequence_where_all_its_tokens_are_the_first(
    prompt: list[int], row: list[int], *, goes_on: bool
) -> None:
    row = [*prompt, *row] if goes_on else row
    begins = TokenSequence(np.array(prompt, np.int32)).begins(np.array(row, np.int32))
    assert begins == (row[: len(prompt)] == prompt)


def test_views_stay_and_the_prompt_given_is_left_alone() -> None:
    prompt = np.array([1, 2], np.int32)
    sequence = TokenSequence(prompt)
    before = sequence.tokens
    for token in range(100):
        sequence.extend([token])
    assert before.tolist() == prompt.tolist() == [1, 2]
    assert sequence.num_bytes >= 4 * len(sequence)
    sequence.clear()
    assert not sequence.tokens.any()


def test_names_are_taken_once_and_found_until_they_are_freed() -> None:
    sessions: OpenSessions[str, int] = OpenSessions()
    sessions.add("one", 1)
    sessions.add("two", 2)
    with pytest.raises(SessionExistsError, match=r"^session 'one' is open already$"):
        sessions.add("one", 3)
    with pytest.raises(UnknownSessionError, match=r"^no session 'three' is open: open it first$"):
        sessions.get("three")
    assert sessions.use("one") == 1
    assert sessions.values() == [2, 1]
    assert list(sessions) == ["two", "one"]
    assert sessions.find("three") is None
    assert sessions.remove("one") == 1
    assert "one" not in sessions
    assert len(sessions) == 1


def test_names_of_other_namespaces_never_meet_and_errors_show_the_name_alone() -> None:
    sessions: OpenSessions[SessionKey, int] = OpenSessions()
    sessions.add(SessionKey("tenant", "a"), 1)
    with pytest.raises(UnknownSessionError, match=r"^no session 'a' is open"):
        sessions.get(SessionKey("", "a"))


def test_a_lost_step_is_noticed() -> None:
    request = DraftRequest("s", np.array([7], np.int32), 6, 8)
    check_step(request, 5, 1)
    with pytest.raises(OutOfSequenceError, match="has 4 tokens and the request brings 1"):
        check_step(request, 4, 1)
    check_named_once([request])
    with pytest.raises(InvalidRequestError, match="twice"):
        check_named_once([request, request])

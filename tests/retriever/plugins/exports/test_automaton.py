import numpy as np
import pytest

from retriever.plugins.exports.exllamav3 import FrozenAutomaton
from tests.suite_parts import cases

Substring = tuple[int, ...]


def joined(documents: list[list[int]]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array([token for document in documents for token in [*document, -1]], np.int32)


def first_ends(documents: list[list[int]]) -> dict[Substring, int]:
    """Every substring of the documents, and the position of its first occurrence's last token."""
    found: dict[Substring, int] = {}
    begin = 0
    for document in documents:
        for end in range(len(document)):
            for start in range(end + 1):
                found.setdefault(tuple(document[start : end + 1]), begin + end)
        begin += len(document) + 1
    return found


def state_of(automaton: FrozenAutomaton, substring: Substring) -> int | None:
    state = 0
    for token in substring:
        begin, end = automaton.offsets[state : state + 2].tolist()
        edges = {
            int(label): int(target)
            for label, target in zip(
                automaton.labels[begin:end], automaton.targets[begin:end], strict=True
            )
        }
        if token not in edges:
            return None
        state = edges[token]
    return state


@pytest.mark.seeds
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 9])
def test_paths_are_the_substrings_and_know_where_they_first_occurred(num_tokens: int) -> None:
    random = np.random.default_rng(num_tokens)
    for _ in range(cases(12, of=40)):
        lengths = random.integers(1, 14, int(random.integers(1, 6)))
        documents = [random.integers(0, num_tokens, length).tolist() for length in lengths]
        automaton, ends = FrozenAutomaton.of(joined(documents)), first_ends(documents)
        longest: dict[int, int] = {}
        for substring, end in ends.items():
            state = state_of(automaton, substring)
            assert state is not None
            assert automaton.ends[state] == end
            longest[state] = max(longest.get(state, 0), len(substring))
            if tuple(substring[1:]):  # suffix links lead to the state of a shorter suffix
                shorter = state_of(automaton, substring[1:])
                assert shorter in (state, automaton.links[state])
        assert longest == {
            state: length for state, length in enumerate(automaton.lengths.tolist()) if state
        }
        paths = count_paths(automaton)
        assert paths == len(ends)  # and no others


def count_paths(automaton: FrozenAutomaton) -> int:
    """How many strings lead from the root to anywhere: states by falling length, added up."""
    paths = np.zeros(len(automaton.links), np.int64)
    for state in np.argsort(-automaton.lengths).tolist():
        begin, end = automaton.offsets[state : state + 2].tolist()
        paths[state] = sum(1 + int(paths[target]) for target in automaton.targets[begin:end])
    return int(paths[0])


def test_labels_rise_within_a_state_and_sizes_are_bounded() -> None:
    random = np.random.default_rng(1)
    documents = [random.integers(0, 60, 400).tolist() for _ in range(20)]
    tokens = joined(documents)
    automaton = FrozenAutomaton.of(tokens)
    assert len(automaton.links) <= 2 * len(tokens)
    assert len(automaton.labels) <= 3 * len(tokens)
    for begin, end in zip(automaton.offsets[:-1], automaton.offsets[1:], strict=True):
        assert (np.diff(automaton.labels[begin:end]) > 0).all()

import numpy as np
import pytest

from benchmarks.papers.datastore import END, continuations, longest_match, occurrences, sorted_text
from benchmarks.papers.longest_match import most_frequent
from retriever.tree import DraftTree, Source
from tests.benchmarks.drafting import ids, paths
from tests.benchmarks.papers.paper_twins import prefix_counts
from tests.suite_parts import cases


@pytest.mark.seeds
def test_most_frequent_nodes_equal_counted_prefixes() -> None:
    rng = np.random.default_rng(2)
    for _ in range(cases(200, of=1000)):
        rows = rng.integers(0, 4, (int(rng.integers(1, 30)), 5)).astype(np.int32)
        for row in rows:
            row[int(rng.integers(1, 6)) :] = END
        budget = int(rng.integers(1, 20))
        tree = most_frequent(rows, budget, Source.CORPUS)
        counts = prefix_counts([[token for token in row if token >= 0] for row in rows.tolist()])
        DraftTree.checked(tree.token_ids, tree.parents, tree.probabilities, tree.sources)
        assert len(tree) == min(budget, len(counts))
        taken = [counts[path] for path in paths(tree)]
        assert taken == sorted(counts.values(), reverse=True)[:budget]
        assert np.allclose(tree.probabilities, np.array(taken) / len(rows))


@pytest.mark.seeds
def test_occurrences_and_continuations_equal_a_scan() -> None:
    rng = np.random.default_rng(3)
    for _ in range(cases(100, of=500)):
        documents = [rng.integers(0, 3, int(rng.integers(0, 20))) for _ in range(4)]
        text = sorted_text([document.astype(np.int32) for document in documents])
        pattern = rng.integers(0, 3, int(rng.integers(1, 5))).tolist()
        expected = sorted(
            (*after, *[END] * (3 - len(after)))
            for tokens in (document.tolist() for document in documents)
            for begin in range(len(tokens))
            if tokens[begin : begin + len(pattern)] == pattern
            for after in [tokens[begin + len(pattern) :][:3]]
        )
        begin, end = occurrences(text, ids(*pattern))
        assert end - begin == len(expected)
        rows = continuations(text, ids(*pattern), 3, 1000)
        assert sorted(map(tuple, rows.tolist())) == expected
        longest = longest_match(text, ids(*pattern))
        ends = [occurrences(text, ids(*pattern[-k:])) for k in range(1, len(pattern) + 1)]
        assert longest == sum(begin < end for begin, end in ends)


def test_of_many_occurrences_an_even_sample_is_read() -> None:
    text = sorted_text([ids(*[0, 1 + token % 4]) for token in range(400)])
    rows = continuations(text, ids(0), 1, 40)
    assert np.bincount(rows[:, 0]).tolist() == [0, 10, 10, 10, 10]


@pytest.mark.parametrize("outputs", [[], [ids()]])
def test_nothing_is_found_in_nothing(
    outputs: list[np.ndarray[tuple[int], np.dtype[np.int32]]],
) -> None:
    assert longest_match(sorted_text(outputs), ids(1, 2)) == 0

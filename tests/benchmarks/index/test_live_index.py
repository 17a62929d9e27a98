"""A short run of the benchmark, and its judge."""

import json
import math

import pytest

from benchmarks.index.live_index import Settings, measure
from tests.oracles.fuzz.planted_leaks import Life, Seen, judge, merge, planted


@pytest.mark.soak
def test_nothing_fails_and_nothing_wrong_is_drafted_while_an_index_changes() -> None:
    settings = Settings(
        clients=2,
        tokens=20_000,
        turns=2,
        seconds=3,
        elsewhere_s=1,
        quiet_s=1,
        refresh_s=0.2,
        start_s=6,
    )
    report = json.loads(json.dumps(measure(settings)))
    assert report["errors"] == {}
    assert report["wrong"] == 0
    assert report["documents"] > 4
    assert report["changes"]["documents_removed"] > 0
    assert report["changes"]["snapshots_drafted_from"] > 3
    assert report["latency"]["changing"]["drafts"] > 100


@pytest.mark.parametrize(
    ("begin", "end", "wrong"),
    [(0.0, math.inf, 0), (0.0, 9.0, 0), (0.0, 7.0, 1), (6.0, math.inf, 1)],
)
def test_a_pair_is_wrong_where_its_document_was_not_there(
    begin: float, end: float, wrong: int
) -> None:
    pair = (planted(3)[7], planted(3)[8])
    verdict = judge({pair: Seen(5.0, 10.0)}, {3: Life(begin, begin, end)}, 2.0)
    assert (verdict.pairs, verdict.documents, verdict.wrong) == (1, 1, wrong)


def test_a_pair_of_no_document_is_wrong() -> None:
    assert judge({(1, 2): Seen(5.0, 6.0)}, {3: Life(0.0, 0.0)}, 2.0).wrong == 1


def test_what_several_saw_is_merged() -> None:
    merged = merge([{(1, 2): Seen(3.0, 4.0)}, {(1, 2): Seen(1.0, 2.0), (2, 3): Seen(0.0, 0.0)}])
    assert merged == {(1, 2): Seen(1.0, 4.0), (2, 3): Seen(0.0, 0.0)}

"""Drafts ahead are those that would be made, and leave nothing behind."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retriever.drafter import FORGOTTEN, DraftRequest, Prediction, SequenceOptions, TokenIds
from retriever.errors import InvalidRequestError, LimitExceededError
from retriever.limits import MAX_OUTCOMES, Limits
from retriever.predict import databases
from retriever.predict.databases import DatabaseKind
from retriever.predict.phrases import ListedPhrases
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree, Source
from tests.retriever.open_sessions import WatchedDrafter
from tests.retriever.repeating import NUM_TOKENS, index_of_text, text
from tests.retriever.token_ids import ids


def same(one: DraftTree, other: DraftTree) -> bool:
    names = ("token_ids", "parents", "probabilities", "sources")
    return all(getattr(one, name).tolist() == getattr(other, name).tolist() for name in names)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index_of_text(tmp_path_factory.mktemp("ahead") / "index", np.random.default_rng(1))


def of_all_databases(index: Path) -> WatchedDrafter:
    rng = np.random.default_rng(2)
    phrases = ListedPhrases([tuple(text(rng, 30)[:length]) for length in (3, 6, 9, 30)])
    drafter = WatchedDrafter.open_indexes([index], phrases=phrases)
    for seed in (3, 4):
        drafter.open("before", text(np.random.default_rng(seed), 50))
        drafter.close("before", text(np.random.default_rng(seed + 9), 200))
    return drafter


def arrays(drafter: WatchedDrafter, session: str) -> Iterator[tuple[str, Any]]:
    """Yield all that a sequence's databases hold and may read, but for where phrases stand."""
    held = drafter.session(session).databases
    chains, end = held.context.chains, len(held.context)
    yield "end", end
    yield "tokens", chains.tokens[:end].tolist()
    yield "heads", chains.heads.tolist()
    yield "links", chains.links[:, :end].tolist()
    yield "state", chains.state.tolist()
    yield "last", chains.last.tolist()
    yield "cursor", [array.tolist() for array in held.context.cursor]
    yield "weights", held.pool.weights.tobytes()
    yield "generations", held.pool.generations.num_tokens
    if held.predictions is not None:
        yield "predictions", held.predictions.cursors.tolist()


def outcomes_of(rng: np.random.Generator, true: Sequence[int]) -> tuple[TokenIds, ...]:
    """Return what may come, the truth among it."""
    others = [
        ids(*true[: int(rng.integers(0, len(true)))], int(rng.integers(NUM_TOKENS)))
        for _ in range(4)
    ]
    return (*others[:2], ids(*true), *others[2:])


@pytest.mark.parametrize("remember", [False, True])
def test_a_sequence_drafted_ahead_for_stays_what_it_was(index: Path, remember: bool) -> None:  # noqa: FBT001
    """One drafter answers ahead, the other is asked for what came."""
    ahead, plain = of_all_databases(index), of_all_databases(index)
    rng = np.random.default_rng(5)
    tokens = text(np.random.default_rng(3), 400)
    length, new, awaited = 60, list[int](), DraftTree.empty()
    expected = [Prediction(ids(*tokens[100:200])), Prediction(ids(*tokens[60:90], 1))]
    for drafter in (ahead, plain):
        drafter.open(
            "s",
            ids(*tokens[:length]),
            SequenceOptions(remember=remember, predictions=tuple(expected)),
        )
    num_nodes = 0
    while length < 300:
        true = tokens[length : length + int(rng.integers(1, 9))]
        guessed = outcomes_of(rng, true)
        (trees,) = ahead.draft_ahead([DraftRequest("s", ids(*new), length, 24, outcomes=guessed)])
        (tree,) = plain.draft([DraftRequest("s", ids(*new), length, 24)])
        assert dict(arrays(ahead, "s")) == dict(arrays(plain, "s"))
        if len(true) % 2:  # of phrases, too, they draft the same; and learn from the draft of above
            again = DraftRequest("s", ids(), length, 24)
            assert same(*(drafter.draft([again])[0] for drafter in (ahead, plain)))
        assert len(trees) == len(guessed)
        # Where weights are learned, they move between a draft ahead and one that is asked for.
        assert remember or num_nodes == 0 or same(tree, awaited)
        new, length, awaited = true, length + len(true), trees[2]
        num_nodes += len(awaited)
    assert num_nodes > 500
    pools = ahead.state.pool(""), plain.state.pool("")
    assert pools[0].learned == pools[1].learned
    assert (pools[0].learned > 0) == remember
    counted = [each.state.draft_counts.by_source.tolist() for each in (ahead, plain)]
    assert counted[0] == counted[1]
    for drafter in (ahead, plain):
        drafter.close("s", ids(*new))
    assert pools[0].generations.num_tokens == pools[1].generations.num_tokens


def test_every_outcome_is_answered_as_if_it_had_come(index: Path) -> None:
    rng = np.random.default_rng(6)
    drafter = of_all_databases(index)
    for trial in range(40):
        tokens = text(np.random.default_rng(trial), 120)
        length = int(rng.integers(10, 100))
        guessed = outcomes_of(rng, tokens[length : length + int(rng.integers(1, 9))])
        drafter.open("ahead", ids(*tokens[:length]), FORGOTTEN)
        (trees,) = drafter.draft_ahead(
            [DraftRequest("ahead", ids(), length, 24, 0.01, outcomes=guessed)]
        )
        drafter.close("ahead")
        for outcome, tree in zip(guessed, trees, strict=True):
            drafter.open("after", ids(*tokens[:length]), FORGOTTEN)
            drafter.draft([DraftRequest("after", ids(), length, 24)])
            request = DraftRequest("after", outcome, length + len(outcome), 24, 0.01)
            assert same(tree, drafter.draft([request])[0])
            drafter.close("after")


def test_a_repetition_is_only_drafted_for_the_outcome_that_has_it() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", ids(1, 2, 3, 4, 5, 6, 7, 8))
    outcomes = (ids(1, 2), ids(5, 6), ids(30))
    (trees,) = drafter.draft_ahead([DraftRequest("s", ids(), 8, 4, outcomes=outcomes)])
    assert [tree.token_ids[:1].tolist() for tree in trees] == [[3], [7], []]
    assert drafter.draft([DraftRequest("s", ids(30, 1), 10, 4)])[0].token_ids[0] == 2
    drafter.close("s", ids(2, 9))
    drafter.open("later", ids(30, 1, 2))
    assert drafter.draft([DraftRequest("later", ids(), 3, 4)])[0].token_ids[0] == 9


def test_outcomes_without_room_are_not_answered() -> None:
    """Growing a store costs as much as reading the sequence again: a real step does that."""
    drafter = EmbeddedDrafter()
    drafter.open("s", ids(*[1, 2] * 11))
    outcomes = (ids(1), ids(1, 2), ids(1, 2, 1), ids(1))
    request = DraftRequest("s", ids(*[1, 2] * 500), 1022, 4, outcomes=outcomes)
    (trees,) = drafter.draft_ahead([request])
    assert len(trees) == 2
    assert len(drafter.draft([DraftRequest("s", ids(1, 2, 1), 1025, 4)])[0]) == 4


def test_no_outcome_is_answered_after_the_time_is_over() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", ids(*[1, 2, 3] * 9))
    request = DraftRequest("s", ids(1), 28, 4, outcomes=(ids(2), ids(3)))
    assert drafter.draft_ahead([request], timeout_s=0.0) == [[]]
    assert len(drafter.draft([DraftRequest("s", ids(2), 29, 4)])[0]) == 4  # the token was noted


def test_a_database_that_knows_only_what_has_come_ends_drafts_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = DatabaseKind(Source.PHRASES, 1.0, lambda _: OnlyCollects())
    monkeypatch.setattr(databases, "DATABASES", [*databases.DATABASES, kind])
    drafter = EmbeddedDrafter()
    drafter.open("s", ids(*[1, 2, 3] * 9))
    request = DraftRequest("s", ids(), 27, 4, outcomes=(ids(1),))
    assert drafter.draft_ahead([request]) == [[]]


class OnlyCollects:
    def commit(self, tokens: TokenIds) -> None:
        pass

    def collect(self, question: object, row: int) -> int:  # noqa: ARG002
        return row


@pytest.mark.parametrize(
    ("outcomes", "limit"),
    [
        ([ids(1)] * (MAX_OUTCOMES + 1), "max_outcomes"),
        ([ids(*[1] * 18)], "max_budget_nodes"),
        ([ids(1)] * 61, "max_step_nodes"),
    ],
)
def test_too_many_and_too_long_outcomes_are_refused_by_name(
    outcomes: list[TokenIds], limit: str
) -> None:
    limits = Limits(max_budget_nodes=16, max_step_nodes=60 * 16)
    drafter = EmbeddedDrafter(limits=limits)
    drafter.open("s", ids(1, 2))
    nodes = 4 if limit == "max_outcomes" else 16
    request = DraftRequest("s", ids(3), 3, nodes, outcomes=tuple(outcomes))
    with pytest.raises(LimitExceededError, match=f"(?i){limit}") as refused:
        drafter.draft_ahead([request])
    assert refused.value.limit == limit
    drafter.draft([DraftRequest("s", ids(3), 3, 16)])  # nothing of it was kept


@pytest.mark.parametrize("outcome", [ids(), ids(-1), np.array([0.5])])
def test_what_cannot_come_is_refused(outcome: TokenIds) -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", ids(1, 2))
    with pytest.raises(InvalidRequestError):
        drafter.draft_ahead([DraftRequest("s", ids(3), 3, 4, outcomes=(ids(1), outcome))])
    drafter.draft([DraftRequest("s", ids(3), 3, 4)])


def test_what_one_tenant_asks_ahead_for_is_seen_by_no_other_sequence(index: Path) -> None:
    """Drafts for the same tenant's and another one's sequences are those without any ahead."""
    ahead, plain = of_all_databases(index), of_all_databases(index)
    rng = np.random.default_rng(11)
    tokens = text(rng, 300)
    secret = [NUM_TOKENS - 1, NUM_TOKENS - 2, NUM_TOKENS - 1, NUM_TOKENS - 3]
    for drafter in (ahead, plain):
        drafter.open("asking", ids(*tokens[:100]), SequenceOptions(tenant="a"))
        drafter.open("same", ids(*tokens[:50]), SequenceOptions(tenant="a"))
        drafter.open("other", ids(*tokens[:50]), SequenceOptions(tenant="b"))
    for length in range(100, 200, 5):
        new = () if length == 100 else tokens[length - 5 : length]
        outcomes = tuple(ids(*secret[:count], *tokens[:3]) for count in (1, 2, 3, 4))
        request = DraftRequest("asking", ids(*new), length, 16, outcomes=outcomes)
        (trees,) = ahead.draft_ahead([request])
        assert len(trees) == len(outcomes)
        plain.draft([request])
        for name in ("same", "other"):
            told = 50 + (length - 100) // 5
            one = ids() if told == 50 else ids(tokens[told - 1])
            step = [DraftRequest(name, one, told, 32)]
            assert same(*(drafter.draft(step)[0] for drafter in (ahead, plain)))
    for drafter in (ahead, plain):
        drafter.close("asking", ids(*tokens[195:200]))
        drafter.open("later", ids(*secret), SequenceOptions(tenant="a"))
        drafter.open("elsewhere", ids(*secret), SequenceOptions(tenant="b"))
    for name in ("later", "elsewhere"):
        step = [DraftRequest(name, ids(), len(secret), 32)]
        assert same(*(drafter.draft(step)[0] for drafter in (ahead, plain)))

"""A sequence is drafted for from what its caller expects, and no other sequence ever is."""

import gc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from indexer.reader import Vocabulary
from retriever.drafter import DraftRequest, Prediction, SequenceOptions, TokenIds, predictions_of
from retriever.errors import InvalidRequestError, LimitExceededError, UnknownSessionError
from retriever.kernels.chains import SEPARATOR
from retriever.kernels.layout import MAX_MATCH, Scratch
from retriever.limits import MAX_PREDICTIONS, Limits
from retriever.predict.databases import DATABASES, Databases
from retriever.predict.predictions import Predictions
from retriever.predict.question import Question
from retriever.predict.stores import CONTEXT_LIMITS, ChainStore
from retriever.sequences import checked_predictions
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.explaining import explain
from retriever.tree import DraftTree, PredictedPlace, Source
from tests.retriever.kernels.edited_files import (
    AHEAD,
    EDITS,
    NUM_FILES,
    edited,
    random_file,
    rows_in,
)
from tests.retriever.kernels.stages import collect_store
from tests.retriever.kernels.twins.cursor_twin import LONG, TextCursorTwin
from tests.retriever.open_sessions import WatchedDrafter
from tests.retriever.token_ids import ids
from tests.suite_parts import cases

PROMPT = np.array([2000, 2001, 2002], np.int32)


def predicted(*texts: Sequence[int]) -> list[Prediction]:
    """Predictions that are named by their places."""
    return [Prediction(ids(*text), f"text {place}") for place, text in enumerate(texts)]


def draft(
    drafter: EmbeddedDrafter, new: Sequence[int], length: int, session: str = "s", nodes: int = 32
) -> DraftTree:
    return drafter.draft([DraftRequest(session, ids(*new), length, nodes)])[0]


def databases_of(drafter: WatchedDrafter, session: str = "s") -> Databases:
    return drafter.session(session).databases


def test_the_first_draft_is_the_beginning_of_the_prediction() -> None:
    """Before anything agrees with it, and also behind a prompt that repeats itself."""
    drafter = EmbeddedDrafter()
    text = range(100, 200)
    drafter.open("s", PROMPT, SequenceOptions(predictions=tuple(predicted(text))))
    tree = draft(drafter, [], 3, nodes=16)
    assert tree.token_ids.tolist() == list(text[:16])
    assert set(tree.sources.tolist()) == {Source.PREDICTIONS}
    drafter.open("t", [7, 8, 9, 7, 8], SequenceOptions(predictions=tuple(predicted(text))))
    assert len(draft(drafter, [], 5, "t", nodes=16).follow(ids(*text))) >= 6


def test_each_of_several_predictions_may_come_first() -> None:
    drafter = EmbeddedDrafter()
    texts = [range(100 * number, 100 * number + 50) for number in range(1, 5)]
    drafter.open("s", PROMPT, SequenceOptions(predictions=tuple(predicted(*texts))))
    tree = draft(drafter, [], 3)
    assert all(len(tree.follow(ids(*text))) >= 2 for text in texts)
    tree = draft(drafter, [300, 301], 5)
    assert len(tree.follow(ids(*range(302, 350)))) >= 16


@pytest.mark.parametrize("edit", EDITS)
def test_what_was_predicted_is_followed_across_edits(edit: str) -> None:
    """From a text that the prompt does not hold: two or three tokens after most edits."""
    rng = np.random.default_rng(76)
    right = np.zeros((NUM_FILES, 4), np.int64)
    for number in range(NUM_FILES):
        file = random_file(rng)
        before, after = edited(rng, file, edit)
        drafter, output, known = EmbeddedDrafter(), before + after, 0
        drafter.open("s", PROMPT, SequenceOptions(predictions=tuple(predicted(file))))
        trees = []
        for end in [40, *range(90, len(before) + 4)]:
            trees.append(draft(drafter, output[known:end], len(PROMPT) + end))
            known = end
        for later, tree in enumerate(trees[-4:]):
            chain = tree.best_chain(AHEAD)
            right[number, later] = len(chain.follow(np.array(after[later:], np.int32)))
    whole = (right == AHEAD).sum(axis=0)
    assert whole[2] >= 0.6 * NUM_FILES
    assert whole[3] >= 0.9 * NUM_FILES


@pytest.mark.seeds
def test_rows_of_predictions_are_those_of_matches_and_cursors() -> None:
    """Composed from the store's own matches and the twins of cursors, over random edits."""
    rng = np.random.default_rng(77)
    scratch, none_known = Scratch(AHEAD), np.empty(0, np.float32)
    num_agreeing = num_resumed = 0
    for _ in range(cases(40, of=400)):
        texts = [rng.integers(0, 12, int(rng.integers(1, 60))).tolist() for _ in range(3)]
        database = Predictions(predicted(*texts))
        tokens = [token for text in texts for token in [*text, SEPARATOR]]
        starts = np.cumsum([0, *(len(text) + 1 for text in texts)]).tolist()
        store = ChainStore(len(tokens), CONTEXT_LIMITS, Source.PREDICTIONS)
        store.append(ids(*tokens))
        twins = [TextCursorTwin(begin, end, begin, 0, LONG) for begin, end in pairwise(starts)]
        output = [2000]
        source = texts[int(rng.integers(3))]
        for begin in range(0, len(source), 5):
            new = source[begin : begin + 5]
            if rng.random() < 0.3:
                new = [*new[:-1], int(rng.integers(12, 14))]
            database.commit(ids(*new))
            twins = [twin.moved(tokens, new) for twin in twins]
            output += new
            question = Question(ids(*output[-MAX_MATCH:]), none_known, AHEAD, scratch)
            end = collect_store(
                store.packed, int(Source.PREDICTIONS), question.query, AHEAD, scratch
            )
            found = rows_in(scratch, 0, end)
            twins = [twin.set([(place, row.match) for place, row in found]) for twin in twins]
            places = [place for place, _ in found]
            expected = [at for twin in twins if (at := twin.expected()) is not None]
            standing = {place: match for place, match in expected if place in places}
            added = [
                row
                for twin in twins
                if (at := twin.expected()) is None or at[0] not in places
                for row in twin.rows(tokens, question.query.tolist(), AHEAD)
            ]
            rows = rows_in(scratch, 0, database.collect(question, 0))
            assert [row[0] for row in rows] == [*places, *(place for place, _ in added)]
            assert rows[end:] == added
            for (place, row), (_, as_found) in zip(rows[:end], found, strict=True):
                match = max(as_found.match, standing.get(place, 0))
                assert row.match == match
                assert row.count == 1.0
            num_agreeing += len(standing)
            num_resumed += len(added)
    assert min(num_agreeing, num_resumed) > 20


def test_no_other_session_or_tenant_drafts_from_a_prediction() -> None:
    """While its session is open and after it was closed, whatever was drafted and remembered."""
    drafter = EmbeddedDrafter()
    text = list(range(100, 150))
    drafter.open("s", PROMPT, SequenceOptions(predictions=tuple(predicted(text))))
    draft(drafter, text[:3], 6)
    for tenant in ("", "other"):
        drafter.open("beside", text[:9], SequenceOptions(tenant=tenant))
        assert len(draft(drafter, [], 9, "beside")) == 0
        drafter.close("beside")
    drafter.close("s", ids(9, 9, 9))
    drafter.open("later", text[10:19])
    assert len(draft(drafter, [], 9, "later")) == 0
    outputs = [each.tokens.tolist() for each in drafter.state.pool("").generations.outputs()]
    assert outputs == [[*text[:3], 9, 9, 9]]


def test_a_prediction_that_is_added_later_is_drafted_from() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("s", PROMPT, SequenceOptions(predictions=tuple(predicted(range(100, 120)))))
    draft(drafter, [100, 101], 5)
    drafter.add_predictions("s", [Prediction(ids(*range(300, 340)), "later")])
    tree = draft(drafter, [], 5)
    assert len(tree.follow(ids(*range(102, 110)))) == 8  # the first is followed as before
    assert len(tree.follow(ids(*range(300, 310)))) >= 2  # and the new one may begin
    assert len(draft(drafter, range(300, 304), 9).follow(ids(*range(304, 320)))) == 16
    with pytest.raises(UnknownSessionError):
        drafter.add_predictions("none", predicted([1]))


def test_the_same_a_thousand_times_costs_what_it_costs_once() -> None:
    drafter = WatchedDrafter()
    text = predicted(range(1000))
    drafter.open("once", PROMPT, SequenceOptions(predictions=tuple(text)))
    drafter.open(
        "often", PROMPT, SequenceOptions(predictions=tuple([Prediction(ids(*range(1000)))] * 1000))
    )
    once, often = databases_of(drafter, "once"), databases_of(drafter, "often")
    assert once.num_bytes == often.num_bytes
    assert often.predictions is not None
    assert len(often.predictions) == 1
    before = often.predictions
    for _ in range(100):
        drafter.add_predictions("often", text)
    assert databases_of(drafter, "often").predictions is before


def test_predictions_are_bounded_by_the_limits_of_sessions() -> None:
    drafter = EmbeddedDrafter(limits=Limits(max_sequence_tokens=1000))
    many = [Prediction(ids(number)) for number in range(MAX_PREDICTIONS + 1)]
    halves = predicted(range(600), range(600, 1200))
    for wrong, limit in (
        (predicted(range(1001)), "max_sequence_tokens"),
        (halves, "max_sequence_tokens"),
        (many, "max_predictions"),
    ):
        with pytest.raises(LimitExceededError, match="beyond the limit") as refused:
            drafter.open("s", PROMPT, SequenceOptions(predictions=tuple(wrong)))
        assert refused.value.limit == limit
        drafter.open(
            "s", PROMPT, SequenceOptions(predictions=tuple(wrong[:1] if len(wrong) > 1 else []))
        )
        with pytest.raises(LimitExceededError) as refused:
            drafter.add_predictions("s", wrong)
        assert refused.value.limit == limit
        assert len(draft(drafter, [4], 4)) >= 0  # and is open as before
        drafter.close("s")


def test_ten_million_tokens_are_refused_before_they_are_read() -> None:
    drafter = EmbeddedDrafter()
    with pytest.raises(LimitExceededError, match=r"10000000 tokens.*max_sequence_tokens"):
        drafter.open(
            "s", PROMPT, SequenceOptions(predictions=(Prediction(np.zeros(10_000_000, np.int32)),))
        )
    assert drafter.state.census().session_bytes == 0


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (ids(), "prediction 'plan' has no tokens: leave it out"),
        (ids(3, 50), "prediction 'plan': token id 50 is outside the vocabulary of 50"),
        (ids(-1), "prediction 'plan': token id -1 is outside the vocabulary of 50"),
        (np.array([0.5]), "prediction 'plan': token ids must be integers"),
    ],
)
def test_what_is_no_prediction_is_refused_by_name(tokens: TokenIds, reason: str) -> None:
    drafter = EmbeddedDrafter(vocabulary=Vocabulary(50, "ab" * 32))
    with pytest.raises(InvalidRequestError, match=reason):
        drafter.open("s", ids(1), SequenceOptions(predictions=(Prediction(tokens, "plan"),)))
    drafter.open("s", ids(1))
    with pytest.raises(InvalidRequestError, match=reason):
        drafter.add_predictions("s", [Prediction(tokens, "plan")])


def test_a_label_is_bounded() -> None:
    with pytest.raises(InvalidRequestError, match="at most 256 bytes"):
        checked_predictions([Prediction(ids(1), "\u00e4" * 129)])


def test_memory_of_predictions_is_charged_and_given_back() -> None:
    drafter = EmbeddedDrafter(limits=Limits(max_bytes=20 << 20, max_tenant_bytes=10 << 20))
    drafter.open("plain", PROMPT)
    without = drafter.state.census()
    drafter.open("s", PROMPT, SequenceOptions(predictions=tuple(predicted(range(100_000)))))
    held = drafter.state.census()
    assert held.reserved_bytes - without.reserved_bytes > 28 * 100_000
    assert held.session_bytes - without.session_bytes > 28 * 100_000
    with pytest.raises(LimitExceededError) as refused:
        drafter.open("t", PROMPT, SequenceOptions(predictions=tuple(predicted(range(300_000)))))
    assert refused.value.limit == "max_tenant_bytes"
    drafter.close("s", remember=False)
    del refused
    gc.collect()
    assert drafter.state.census().reserved_bytes == without.reserved_bytes


def test_a_deleted_session_leaves_no_prediction_in_memory() -> None:
    drafter = WatchedDrafter()
    drafter.open("s", PROMPT, SequenceOptions(predictions=tuple(predicted(range(100, 200)))))
    databases = databases_of(drafter)
    assert databases.predictions is not None
    tokens = databases.predictions.texts()[0].tokens
    assert 150 in tokens
    drafter.delete(session="s")
    assert not tokens.any()


def test_explanations_name_the_prediction_and_the_place() -> None:
    drafter = EmbeddedDrafter()
    texts = predicted(range(100, 120), range(300, 320))
    explained = explain(drafter, [7, *range(300, 312)], 4, predictions=texts)
    assert explained.tree.token_ids.tolist()[:3] == [312, 313, 314]
    for place, (source, node) in enumerate(
        zip(explained.tree.sources[:3], explained.nodes[:3], strict=True)
    ):
        assert source == Source.PREDICTIONS
        assert node.predictions == (PredictedPlace("text 1", 12 + place),)
        assert node.match_length == 12 + place
    assert explained.as_json()[0]["predictions"] == ({"label": "text 1", "position": 12},)


def test_a_prediction_is_trusted_more_than_a_corpus_from_the_start() -> None:
    trust = {kind.source: kind.trust for kind in DATABASES}
    assert trust[Source.PREDICTIONS] > trust[Source.CORPUS]


def test_drafts_ahead_follow_predictions_and_leave_no_trace() -> None:
    drafter = WatchedDrafter()
    drafter.open(
        "s", PROMPT, SequenceOptions(predictions=tuple(predicted(range(100, 200))), remember=False)
    )
    outcomes = (ids(100, 101), ids(7), ids(100, 9, 101))
    request = DraftRequest("s", ids(), 3, 16, outcomes=outcomes)
    (trees,) = drafter.draft_ahead([request])
    found = databases_of(drafter).predictions
    assert found is not None
    assert found.cursors.tolist() == [[0, 0, LONG]]
    for outcome, tree in zip(outcomes, trees, strict=True):
        drafter.open(
            "t",
            PROMPT,
            SequenceOptions(predictions=tuple(predicted(range(100, 200))), remember=False),
        )
        draft(drafter, [], 3, "t", 16)
        came = draft(drafter, outcome.tolist(), 3 + len(outcome), "t", 16)
        assert came.token_ids.tolist() == tree.token_ids.tolist()
        drafter.close("t")
    assert trees[0].token_ids[0] == 102


def test_what_is_learned_of_predictions_is_kept(tmp_path: Path) -> None:
    """The weights are of the tenant; the text is not among them."""
    drafter = EmbeddedDrafter(state=tmp_path)
    drafter.open("s", PROMPT, SequenceOptions(predictions=tuple(predicted(range(100, 400)))))
    length = 3
    for begin in range(100, 200, 10):
        draft(drafter, range(begin, begin + 10), length + 10)
        length += 10
    drafter.close("s", ids(5))
    learned = drafter.state.pool("").weights["escape"][0, Source.PREDICTIONS].copy()
    drafter.shut_down()
    again = EmbeddedDrafter(state=tmp_path)
    assert np.array_equal(again.state.pool("").weights["escape"][0, Source.PREDICTIONS], learned)
    (output,) = again.state.pool("").generations.outputs()
    assert output.tokens.tolist() == [*range(100, 200), 5]
    again.shut_down()


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("stated", "text"),
    [
        (None, None),
        ({"type": "content", "content": ""}, None),
        ({"type": "content", "content": []}, None),
        ({"type": "content", "content": "ab"}, "ab"),
        ({"type": "content", "content": [{"type": "text", "text": "ab"}]}, "ab"),
        (
            {
                "type": "content",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            "ab",
        ),
    ],
)
def test_the_prediction_of_an_openai_request_is_taken(stated: object, text: str | None) -> None:
    found = predictions_of(stated, encode)
    assert [each.tokens.tolist() for each in found] == ([] if text is None else [encode(text)])
    assert all(each.label == "prediction" for each in found)


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ("text", '"type": "content"'),
        ({"type": "other", "content": "x"}, '"type": "content"'),
        ({"type": "content"}, "a text or a list of parts"),
        ({"type": "content", "content": 3}, "a text or a list of parts"),
        ({"type": "content", "content": ["x"]}, "must have parts"),
        ({"type": "content", "content": [{"type": "image", "text": "x"}]}, "must have parts"),
        ({"type": "content", "content": [{"type": "text", "text": 3}]}, "must have parts"),
    ],
)
def test_other_predictions_of_requests_are_refused(stated: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        predictions_of(stated, encode)

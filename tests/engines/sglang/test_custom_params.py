"""What requests state for their drafts, and what comes of it."""

import logging
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from decoder.engines.engine_sessions import DrafterSessions
from decoder.engines.experimental_sglang.corpus import DrafterCorpus
from decoder.engines.experimental_sglang.custom_params import (
    NO_FIELDS,
    OFF,
    FieldReader,
    RequestFields,
    TenantKin,
    takes_tenants,
)
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import RemoteDrafter
from retriever.drafter import Kin
from retriever.sessions.embedded import EmbeddedDrafter
from tests.engines.sglang.sglang_decoding import Request, step

WIDTH = 8


def stated(**fields: Any) -> Any:
    params = {f"foredraft_{name}": value for name, value in fields.items()}
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=params))


def read(**fields: Any) -> RequestFields:
    reader = FieldReader(
        takes_tenants=True, encode=lambda text: list(text.encode()), vocabulary_size=256
    )
    return reader.of(stated(**fields))


def test_a_request_that_states_nothing_has_no_fields() -> None:
    for request in (
        object(),
        SimpleNamespace(sampling_params=None),
        SimpleNamespace(sampling_params=SimpleNamespace(custom_params=None)),
        SimpleNamespace(sampling_params=SimpleNamespace(custom_params={"temperature": 1})),
    ):
        assert FieldReader().of(request) is NO_FIELDS


def test_fields_are_read() -> None:
    fields = read(budget=5, tenant="a", group="g", predictions=["ab", "c"], remember=False)
    assert fields.budget(8) == 5
    assert fields.budget(3) == 3
    assert fields.kin == TenantKin("g", tenant="a")
    assert [each.tokens.tolist() for each in fields.predictions] == [[97, 98], [99]]
    assert not fields.remember
    assert read(group="g").kin == Kin("g")
    assert read(predictions=[5, 6]).predictions[0].tokens.tolist() == [5, 6]
    assert read(predictions="ab").predictions[0].tokens.tolist() == [97, 98]
    assert read(off=True) is OFF
    assert read(budget=0).budget(8) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"budget": "many"},
        {"budget": -1},
        {"budget": True},
        {"group": 7},
        {"group": "x" * 10_000},
        {"predictions": [300]},  # of another tokenizer
        {"predictions": [-1]},
        {"predictions": 5},
        {"predictions": [["a"]]},
        {"predictions": [1, "a"]},
        {"nothing": 1},
    ],
)
def test_bad_fields_are_ignored_with_a_warning(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(**fields) == NO_FIELDS
    assert "is ignored" in caplog.text


@pytest.mark.parametrize(
    "fields", [{"tenant": 5}, {"tenant": "x" * 10_000}, {"off": "yes"}, {"remember": "no"}]
)
def test_a_request_whose_wish_is_not_understood_gets_no_drafts(fields: dict[str, Any]) -> None:
    assert read(**fields) is OFF


def test_warnings_end() -> None:
    reader = FieldReader()
    for _ in range(100):
        assert reader.of(stated(budget="x")) == NO_FIELDS
    assert reader.num_ignored == 100


def test_only_a_drafter_in_this_process_takes_tenants() -> None:
    assert takes_tenants(EmbeddedDrafter)
    assert not takes_tenants(RemoteDrafter)
    assert not takes_tenants(ResilientDrafter)
    assert FieldReader(takes_tenants=False).of(stated(tenant="a")) is OFF


def request(rid: str, prompt: Sequence[int], **fields: Any) -> Request:
    made = Request(rid, array("q", prompt), array("q", [prompt[0]]))
    made.sampling_params = stated(**fields).sampling_params  # type: ignore[attr-defined]
    return made


def corpus_of(drafter: EmbeddedDrafter) -> DrafterCorpus:
    reader = FieldReader(takes_tenants(drafter))
    return DrafterCorpus(DrafterSessions(drafter), WIDTH, reader=reader)


def drafted(corpus: DrafterCorpus, asked: Request) -> int:
    """How many tokens are drafted."""
    corpus.show([asked])
    tokens = asked.tokens
    _, masks = corpus.batch_get([asked.rid], [tokens[-18:]], [len(tokens)])
    return int(masks.reshape(WIDTH, WIDTH)[:, 0].sum()) - 1


SECRET = [50, 61, 72, 83, 94, 105, 116, 127]


def written(corpus: DrafterCorpus, rid: str, **fields: Any) -> None:
    """A request that writes the secret after a prompt of its own."""
    asked = request(rid, [1, 2, 3], **fields)
    asked.output_ids = array("q", SECRET[:1])
    corpus.show([asked])
    corpus.batch_get([rid], [asked.tokens], [len(asked.tokens)])
    asked.output_ids.extend(SECRET[1:])
    corpus.erase_match_state([rid])


@pytest.mark.parametrize("ours", [{}, {"tenant": "a"}])
@pytest.mark.parametrize("theirs", [{"tenant": "b"}, {"tenant": "c"}])
def test_two_tenants_never_draft_from_one_another(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    drafter = EmbeddedDrafter()
    corpus = corpus_of(drafter)
    written(corpus, "first", **ours)
    other = request("other", [9, 8], **theirs)
    other.output_ids = array("q", SECRET[:4])
    assert drafted(corpus, other) == 0
    same = request("again", [9, 8], **ours)
    same.output_ids = array("q", SECRET[:4])
    assert drafted(corpus, same) > 0
    drafter.shut_down()


@pytest.mark.parametrize("fields", [{"remember": False}, {"off": True}, {"tenant": 1}])
def test_what_is_not_to_be_remembered_is_not(fields: dict[str, Any]) -> None:
    drafter = EmbeddedDrafter()
    corpus = corpus_of(drafter)
    written(corpus, "first", **fields)
    others: list[dict[str, Any]] = [{}, {"tenant": "a"}]
    for later in others:
        asked = request("later", [9, 8], **later)
        asked.output_ids = array("q", SECRET[:4])
        assert drafted(corpus, asked) == 0
    drafter.shut_down()


def test_a_budget_bounds_the_drafts_of_its_request_alone() -> None:
    drafter = EmbeddedDrafter()
    corpus = corpus_of(drafter)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 5, 6, 7]
    stated_by: list[dict[str, Any]] = [
        {},
        {"budget": 2},
        {"budget": 0},
        {"budget": 900},
        {"off": True},
    ]
    counts = [
        drafted(corpus, request(str(at), prompt, **fields)) for at, fields in enumerate(stated_by)
    ]
    drafter.shut_down()
    assert counts[0] == counts[3] > 2
    assert counts[1] == 2
    assert counts[2] == counts[4] == 0


def test_predictions_are_drafted_from() -> None:
    drafter = EmbeddedDrafter()
    corpus = corpus_of(drafter)
    plain, expecting = request("a", [1, 2, 3]), request("b", [1, 2, 3], predictions=SECRET)
    for each in (plain, expecting):
        each.output_ids = array("q", SECRET[:2])
    assert drafted(corpus, plain) == 0
    assert drafted(corpus, expecting) > 0
    drafter.shut_down()


def test_a_group_shares_what_runs_at_once() -> None:
    drafter = EmbeddedDrafter()
    corpus = corpus_of(drafter)
    first = request("a", [1, 2, 3], group="g")
    first.output_ids = array("q", SECRET[:1])
    corpus.show([first])
    corpus.batch_get(["a"], [first.tokens], [len(first.tokens)])
    first.output_ids.extend(SECRET[1:])
    corpus.batch_get(["a"], [first.tokens], [len(first.tokens)])
    same, other = request("b", [4, 5], group="g"), request("c", [4, 5], group="g", tenant="t")
    for each in (same, other):
        each.output_ids = array("q", SECRET[:4])
    assert drafted(corpus, same) > 0
    assert drafted(corpus, other) == 0
    drafter.shut_down()


def test_a_request_that_changes_nothing_decodes_as_before() -> None:
    drafter = EmbeddedDrafter()
    corpus = corpus_of(drafter)
    requests = [Request.of(str(seed), np.arange(seed, seed + 5).tolist()) for seed in range(3)]
    for each in requests:
        each.sampling_params = stated(budget=3, off=each.rid == "1").sampling_params  # type: ignore[attr-defined]
    for _ in range(20):
        step(corpus, requests, WIDTH)
    assert corpus.num_errors == 0
    drafter.shut_down()

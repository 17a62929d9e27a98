"""What requests state for their drafts, and what comes of it."""

import inspect
import logging
import os
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from decoder.engines.engine_options import check_tenants
from decoder.engines.engine_sequences import EngineSequences
from decoder.engines.request_fields import NOT_DRAFTED, PLAIN, FieldReader, RequestFields
from decoder.plugins.experimental_sglang.corpus import DrafterCorpus
from decoder.plugins.experimental_sglang.custom_params import CustomParams
from indexer.reader import Vocabulary
from retriever.client.resilient import ResilientDrafter
from retriever.drafter import SequenceOptions
from retriever.errors import SettingsError
from retriever.sessions.embedded import EmbeddedDrafter
from tests.decoder.plugins.experimental_sglang.sglang_decoding import Request, step

WIDTH = 8
TENANTS = ("a", "b", "c", "t")


def stated(**fields: Any) -> Any:
    params = {f"foredraft_{name}": value for name, value in fields.items()}
    return SimpleNamespace(rid="r", sampling_params=SimpleNamespace(custom_params=params))


def encode(text: str) -> list[int]:
    return list(text.encode())


def reader() -> CustomParams:
    return CustomParams(FieldReader(TENANTS, None, encode, Vocabulary(256, "f" * 32)))


def read(**fields: Any) -> RequestFields:
    return reader().of(stated(**fields))


def test_a_request_that_states_nothing_has_no_fields() -> None:
    for request in (
        object(),
        SimpleNamespace(sampling_params=None),
        SimpleNamespace(sampling_params=SimpleNamespace(custom_params=None)),
        SimpleNamespace(sampling_params=SimpleNamespace(custom_params={"temperature": 1})),
    ):
        assert CustomParams().of(request) is PLAIN


def test_fields_are_read() -> None:
    fields = read(
        budget=5,
        tenant="a",
        group="g",
        policy_version=3,
        oldest_version=2,
        predictions=["ab", "c"],
        remember=False,
    )
    assert fields.budget == 5
    stated = SequenceOptions(
        remember=False, group="g", policy_version=3, oldest_version=2, tenant="a"
    )
    assert fields.options.without_predictions == stated
    assert [each.tokens.tolist() for each in fields.options.predictions] == [[97, 98], [99]]
    assert read(predictions=[5, 6], vocabulary="f" * 32).options.predictions[0].tokens.tolist() == [
        5,
        6,
    ]
    assert not read(drafts=False).drafts


@pytest.mark.parametrize(
    "fields",
    [
        {"budget": "many"},
        {"budget": -1},
        {"budget": True},
        {"group": 7},
        {"group": "x" * 10_000},
        {"oldest_version": 2},  # of no version
        {"predictions": [300]},  # of another tokenizer
        {"predictions": [1 << 40]},
        {"predictions": [-1]},
        {"predictions": [1], "vocabulary": "e" * 32},
        {"predictions": 5},
        {"predictions": [["a"]]},
        {"predictions": [1, "a"]},
    ],
)
def test_a_field_that_shapes_drafts_and_cannot_be_used_is_left_out_and_logged(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    others = {"tenant": "a", "remember": False}
    with caplog.at_level(logging.WARNING):
        assert read(**fields, **others) == RequestFields(
            options=SequenceOptions(tenant="a", remember=False)
        )
    assert "request r: " in caplog.text


def test_what_stands_beside_a_wrong_field_is_used() -> None:
    fields = read(budget="many", group="g", policy_version=1, predictions="ab", tenant="a")
    stated = SequenceOptions(group="g", policy_version=1, tenant="a")
    assert (fields.budget, fields.options.without_predictions) == (None, stated)
    assert [each.tokens.tolist() for each in fields.options.predictions] == [[97, 98]]
    assert read(budget=0, group=7).budget == 0


def test_a_tokenizer_that_fails_costs_predictions_alone() -> None:
    def failing(text: str) -> list[int]:
        raise RuntimeError(text)

    of = CustomParams(FieldReader(TENANTS, None, failing)).of
    assert of(stated(predictions="ab", tenant="a")) == RequestFields(
        options=SequenceOptions(tenant="a")
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"tenant": 5},
        {"tenant": "x" * 10_000},
        {"tenant": "other"},  # than those of the settings
        {"drafts": "maybe"},
        {"remember": "never"},
        {"tennant": "a"},
        {"tenant": 5, "budget": "many"},
    ],
)
def test_a_request_whose_wish_is_not_understood_gets_no_drafts(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(**fields) is NOT_DRAFTED
    assert "it gets no drafts" in caplog.text


def test_warnings_end(caplog: pytest.LogCaptureFixture) -> None:
    each = reader()
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            assert each.of(stated(budget="x")) == PLAIN
    assert caplog.text.count("request r: ") == 20
    assert caplog.text.count("not logged") == 1


def test_only_a_drafter_in_this_process_takes_tenants() -> None:
    check_tenants(["a"], EmbeddedDrafter())
    with ResilientDrafter("127.0.0.1:1", local=False) as service:
        check_tenants([], service)
        with pytest.raises(SettingsError, match="credentials"):
            check_tenants(["a"], service)


def test_tenants_are_those_of_the_settings(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = inspect.getmodule(plugin.worker_class(None))

    def tenant_of(name: str) -> str | None:
        _, opened = module.open_sequences(None)
        fields: RequestFields = opened.of(stated(tenant=name))
        return fields.options.tenant if fields.drafts else None

    assert tenant_of("a") is None
    monkeypatch.setenv("FOREDRAFT_TENANTS", os.pathsep.join(["a", "b"]))
    assert (tenant_of("a"), tenant_of("other")) == ("a", None)
    monkeypatch.setenv("FOREDRAFT_TENANTS", "*")
    assert tenant_of("other") == "other"
    monkeypatch.setenv("FOREDRAFT_SERVER", "127.0.0.1:1")
    assert module.open_sequences(None) is None  # it could not keep them apart


def request(rid: str, prompt: Sequence[int], **fields: Any) -> Request:
    made = Request(rid, array("q", prompt), array("q", [prompt[0]]))
    made.sampling_params = stated(**fields).sampling_params  # type: ignore[attr-defined]
    return made


def corpus_of(drafter: EmbeddedDrafter) -> DrafterCorpus:
    return DrafterCorpus(EngineSequences(drafter), WIDTH, reader=reader())


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


@pytest.mark.parametrize("fields", [{"remember": False}, {"drafts": False}, {"tenant": 1}])
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
        {"drafts": False},
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
        each.sampling_params = stated(budget=3, drafts=each.rid != "1").sampling_params  # type: ignore[attr-defined]
    for _ in range(20):
        step(corpus, requests, WIDTH)
    assert corpus.num_errors == 0
    drafter.shut_down()

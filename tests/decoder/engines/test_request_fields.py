"""What a request may carry, how it is read, and what is said of mistakes."""

import logging
from typing import Any

import pytest

from decoder.engines.request_fields import PLAIN, Complaints, FieldReader, RequestFields
from indexer.reader import Vocabulary
from retriever.drafter import SequenceOptions
from retriever.errors import InvalidRequestError

OWN = Vocabulary(100, "a" * 32)


def encode(text: str) -> list[int]:
    return [ord(each) - ord("a") for each in text]


def reader() -> FieldReader:
    return FieldReader(["a", "b"], 6, encode, OWN)


def test_a_request_without_fields_of_ours_is_drafted_for_as_all_are() -> None:
    assert reader().read(None) == (PLAIN, "")
    assert reader().read({"others": 1, "foredrafts": 2}) == (PLAIN, "")


def test_fields_are_read_one_by_one_and_from_a_mapping() -> None:
    one_by_one, ignored = reader().read(
        {
            "foredraft_budget": 3,
            "foredraft_tenant": "a",
            "foredraft_group": "g",
            "foredraft_policy_version": 2,
            "foredraft_remember": 0,
            "foredraft_predictions": "abc",
        }
    )
    assert ignored == ""
    options = one_by_one.options
    assert one_by_one.budget == 3
    assert options.without_predictions == SequenceOptions(
        remember=False, group="g", policy_version=2, tenant="a"
    )
    assert [each.tokens.tolist() for each in options.predictions] == [[0, 1, 2]]
    nested, _ = reader().read({"foredraft": {"budget": 3, "drafts": "off"}})
    assert (nested.budget, nested.drafts) == (3, False)


@pytest.mark.parametrize(
    ("budget", "room", "most"), [(5, 8, 5), (5, 3, 3), (0, 8, 0), (None, 8, 8), (5, -1, 0)]
)
def test_a_budget_is_within_what_the_engine_takes(budget: int | None, room: int, most: int) -> None:
    assert RequestFields(budget=budget).most(room) == most
    assert RequestFields(budget=budget, drafts=False).most(room) == 0


def test_predictions_are_texts_or_ids() -> None:
    def predicted(value: Any) -> list[list[int]]:
        found, _ = reader().read({"foredraft": {"predictions": value}})
        return [each.tokens.tolist() for each in found.options.predictions]

    assert predicted([1, 2]) == [[1, 2]]
    assert predicted(["ab", "", "c"]) == [[0, 1], [2]]
    assert predicted({"type": "content", "content": [{"type": "text", "text": "b"}]}) == [[1]]
    assert predicted([]) == predicted("") == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"budget": "many"}, "'many' is not a number of tokens"),
        ({"budget": -1}, "-1 is not a number"),
        ({"budget": True}, "True is not a number"),
        ({"drafts": "maybe"}, "'maybe' is neither true nor false"),
        ({"remember": None}, "None is neither"),
        ({"tenant": "z"}, "'z' is not among the tenants of the settings"),
        ({"tenant": 7}, "7 is not a name"),
        ({"group": 7}, "a group's name is a text"),
        ({"policy_version": -1}, "-1 is not a version"),
        ({"predictions": {"type": "image"}}, "prediction must be"),
        ({"predictions": [1.5]}, "prediction must be"),
        ({"tennant": "a"}, "foredraft_tennant is not a field of a request; there are drafts"),
    ],
)
def test_a_wrong_field_is_refused_and_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        reader().read({f"foredraft_{name}": value for name, value in fields.items()})


def test_a_field_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'x' is not a mapping of fields"):
        reader().read({"foredraft": "x"})


def test_every_tenant_may_be_named_where_the_settings_say_so() -> None:
    assert FieldReader(["*"]).read({"foredraft_tenant": "z"})[0].options.tenant == "z"
    with pytest.raises(InvalidRequestError, match="not among"):
        FieldReader().read({"foredraft_tenant": "z"})


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"budget": 7}, "7 tokens are beyond the engine's 6"),
        ({"predictions": [100]}, "another tokenizer's"),
        ({"predictions": [-1]}, "another tokenizer's"),
        ({"predictions": [1], "vocabulary": "b" * 32}, "is not the engine's"),
        ({"predictions": "x" * ((1 << 20) + 1)}, "more than 1048576 characters"),
    ],
)
def test_what_cannot_be_followed_is_left_out_and_said(fields: dict[str, Any], ignored: str) -> None:
    found, said = reader().read({f"foredraft_{name}": value for name, value in fields.items()})
    assert ignored in said
    assert found.drafts
    assert found.options.predictions == ()
    assert found.budget in (None, 6)


def test_ids_of_the_engines_own_tokenizer_are_drafted_from() -> None:
    found, said = reader().read({"foredraft": {"predictions": [1], "vocabulary": "a" * 32}})
    assert len(found.options.predictions) == 1
    assert said == ""
    texts, said = FieldReader().read({"foredraft_predictions": "abc"})
    assert texts.options.predictions == ()
    assert "tokenizer is not known" in said


def test_a_client_that_is_wrong_with_every_request_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    complaints = Complaints(logging.getLogger("an engine's"))
    for number in range(50):
        complaints.add(f"r{number}", "no such field")
    told = [each.message for each in caplog.records]
    assert told[:-1] == [f"request r{number}: no such field" for number in range(20)]
    assert told[-1] == "fields of further requests are not logged"

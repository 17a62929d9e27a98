"""What a request of a real vLLM carries: its budget, tenant, group, predictions, and mistakes."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engine-vllm")

from tests.decoder.plugins.vllm.vllm_jobs import TEXTS, assert_identical, run

STORY = 5  # of TEXTS: an answer that repeats nothing of its prompt
LONG = 48


def asked(prompt: list[int], after: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "after": after,
        "fields": {f"foredraft_{name}": value for name, value in fields.items()},
    }


@pytest.fixture(scope="module")
def done(
    job: dict[str, Any], plain: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Requests of all kinds in one engine, one group of them after the other."""
    story = job["prompts"][STORY]
    kinds: dict[str, list[dict[str, Any]]] = {
        "cold": [asked(story, tenant="a")],
        "warm": [asked(story, tenant="a")],
        "other tenant": [asked(story, tenant="b", remember=False)],
        "no tenant": [asked(story, remember="false")],
        "forgotten": [asked(story, tenant="b")],
        "both at once": [asked(story, tenant="c"), asked(story, after=24, tenant="d")],
        "a group": [
            asked(story, tenant="e", group="g"),
            asked(story, after=24, tenant="e", group="g"),
        ],
        "budget 0": [asked(story, tenant="a", budget=0)],
        "budget 1": [asked(story, tenant="a", budget=1)],
        "off": [asked(story, tenant="a", drafts=False)],
        "too much": [asked(story, tenant="a", budget=99)],
        "unknown tenant": [asked(story, tenant="z")],
        "predicted": [asked(story, tenant="f", predictions=plain[STORY]["tokens"])],
        "wrong tokenizer": [
            asked(story, tenant="g", predictions=plain[STORY]["tokens"], vocabulary="0" * 32)
        ],
        "beyond": [asked(story, tenant="h", predictions=[1 << 30, 5])],
        "malformed": [asked(story, tenant="a", budget="many")],
        "misspelt": [asked(story, tennant="a")],
        "nested": [{"prompt": story, "fields": {"foredraft": {"tenant": "a"}}}],
        "no mapping": [{"prompt": story, "fields": {"foredraft": 5}}],
        "of others": [{"prompt": story, "fields": {"another": [1, 2]}}],
    }
    report: dict[str, Any] = run(
        tmp_path_factory.mktemp("requests"),
        job,
        alone=0,
        carrying=list(kinds.values()),
        num_speculative_tokens=6,
        settings={"tenants": list("abcdefgh"), "measure": False},
    )
    return report | {"by_kind": dict(zip(kinds, report["carrying"], strict=True))}


def steps(done: dict[str, Any], kind: str, at: int = 0) -> int:
    return int(done["by_kind"][kind][at]["num_steps"])


def test_outputs_are_those_of_vllm_alone_whatever_is_carried(
    done: dict[str, Any], plain: Any
) -> None:
    for outputs in done["by_kind"].values():
        assert_identical(outputs, [plain[STORY]] * len(outputs))


def test_a_tenant_drafts_from_its_own_outputs_and_no_other_tenants(done: dict[str, Any]) -> None:
    cold, warm = steps(done, "cold"), steps(done, "warm")
    assert warm < cold / 2
    assert steps(done, "other tenant") == cold
    assert steps(done, "no tenant") == cold
    assert steps(done, "both at once", 1) == cold
    assert steps(done, "nested") <= warm


def test_outputs_that_are_not_to_be_remembered_are_not_drafted_from(done: dict[str, Any]) -> None:
    assert steps(done, "forgotten") == steps(done, "cold")


def test_requests_of_a_group_draft_from_one_another_while_they_run(done: dict[str, Any]) -> None:
    assert steps(done, "a group", 1) < steps(done, "cold") - 4


def test_a_request_has_its_own_budget(done: dict[str, Any]) -> None:
    num_tokens = len(done["by_kind"]["off"][0]["tokens"])
    assert steps(done, "off") == steps(done, "budget 0") == num_tokens
    assert steps(done, "warm") < steps(done, "budget 1") <= num_tokens / 2 + 4
    assert steps(done, "too much") <= steps(done, "warm")
    assert "foredraft_budget: 99 tokens are beyond the engine's 6" in done["log"]


def test_a_prediction_is_drafted_from_in_its_request(done: dict[str, Any]) -> None:
    assert steps(done, "predicted") < steps(done, "cold") / 2
    assert steps(done, "wrong tokenizer") == steps(done, "beyond") == steps(done, "cold")
    assert "is not the engine's" in done["log"]
    assert "they may be another tokenizer's" in done["log"]


def test_a_mistake_costs_the_drafts_of_its_request_and_is_named(done: dict[str, Any]) -> None:
    num_tokens = len(done["by_kind"]["off"][0]["tokens"])
    for kind in ("malformed", "misspelt", "unknown tenant", "no mapping"):
        assert steps(done, kind) == num_tokens, kind
    assert "foredraft_budget: 'many' is not a number of tokens" in done["log"]
    assert "foredraft_tennant is not a field of a request" in done["log"]
    assert "'z' is not among the tenants of the settings" in done["log"]
    assert "5 is not a mapping of fields" in done["log"]
    assert steps(done, "of others") < num_tokens


def test_texts_are_long_enough_to_tell(done: dict[str, Any]) -> None:
    assert TEXTS[STORY]
    assert len(done["by_kind"]["off"][0]["tokens"]) >= LONG - 8

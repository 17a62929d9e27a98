"""Metrics and probes, asked over HTTP."""

import re
import socket
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from retriever.errors import AddressInUseError, SettingsError
from retriever.operations.lifecycle import Phase
from retriever.operations.service_report import reports_of
from retriever.operations.web import Web, WebAddress
from retriever.tree import Source
from tests.retriever.conftest import start_service
from tests.retriever.operations.watched import HIDDEN, asked, watched

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    return {
        (each.name, frozenset(each.labels.items())): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    return found[f"foredraft_{name}", frozenset(labels.items())]


def test_metrics_are_what_the_drafter_did(index: Path, tmp_path: Path) -> None:
    with watched(index, tmp_path) as (service, web):
        status, headers, text = asked(web, "/metrics")
        draft_counts = service.stats().draft_counts
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    found = samples(text)
    assert value(found, "drafts_total", kind="session") == 4
    assert value(found, "outcomes_total") == 3
    assert value(found, "accepted_tokens_total", source="corpus") > 0
    for position, count in enumerate(draft_counts.accepted_at()):
        assert value(found, "accepted_tokens_per_pos_total", position=str(position)) == count
    assert draft_counts.accepted_at()[0] > 0
    for row, name in enumerate(("nodes", "accepted_tokens")):
        for source in (Source.CONTEXT, Source.GENERATIONS, Source.PHRASES, Source.CORPUS):
            counted = value(found, f"{name}_total", source=source.name.lower())
            assert counted == draft_counts.by_source[row, source]
    assert value(found, "step_seconds_bucket", le="+Inf") == 4
    assert value(found, "draft_seconds_count") == 4
    assert value(found, "draft_seconds_bucket", le="1e-05") <= 4
    assert value(found, "sessions") == 1
    assert value(found, "session_tokens") >= 12
    assert value(found, "index_documents", index="corpus") == 40
    assert (
        value(found, "index_snapshot", index="corpus")
        == reports_of(service.stats().indexes)[0].snapshot
    )
    assert 0 < value(found, "index_snapshot_age_seconds", index="corpus") < 3600
    assert value(found, "ready") == 1
    assert value(found, "log_failures_total") == 0
    assert found["process_resident_memory_bytes", frozenset()] > 1e6


def test_refusals_are_counted_by_reason_and_name_nobody(index: Path, tmp_path: Path) -> None:
    with watched(index, tmp_path) as (_, web):
        text = asked(web, "/metrics")[2]
    found, labels = samples(text), {"method": "Draft", "status": "RESOURCE_EXHAUSTED"}
    assert value(found, "refused_total", **labels, reason="max_budget_nodes") == 1
    assert value(found, "calls_total", **labels, reason="max_budget_nodes") == 1
    labels = {"method": "CloseSession", "status": "NOT_FOUND", "reason": ""}
    assert value(found, "refused_total", **labels) == 1
    assert HIDDEN not in text
    assert "alert" not in text


def test_only_reading_is_answered_and_only_by_names_of_this_machine(
    index: Path, tmp_path: Path
) -> None:
    with watched(index, tmp_path) as (service, web):
        assert asked(web, "/metrics", method="POST")[0] == 405
        assert asked(web, "/nothing")[0] == 404
        assert asked(web, "/../metrics")[0] == 404
        for host in ("localhost:1", "127.0.0.1", "[::1]:80", "[::1]"):
            assert asked(web, "/metrics", host=host)[0] == 200
        for host in ("evil.example", "evil.example:80", "", "localhost.evil.example", "["):
            assert asked(web, "/metrics", host=host)[0] == 403
        assert asked(web, "/ready")[0] == 200
        service.observer.lifecycle.phase = Phase.DRAINING
        assert asked(web, "/ready")[0::2] == (503, "draining\n")


def test_who_sends_nothing_keeps_nobody_else_from_an_answer(index: Path, tmp_path: Path) -> None:
    with watched(index, tmp_path) as (_, web):
        idle = [socket.create_connection(("127.0.0.1", web.address.port)) for _ in range(4)]
        assert asked(web, "/ready")[0] == 200
        for each in idle:
            each.sendall(b"GARBAGE\r\n\r\n")
            each.close()
        assert asked(web, "/ready")[0] == 200


@pytest.mark.parametrize("text", ["", "x", "70000", "::", "a:b", "host:", ":::1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises((SettingsError, AddressInUseError)):
        Web(None, WebAddress.parsed(text))  # type: ignore[arg-type]


def test_an_address_that_is_taken_is_a_clear_error(index: Path, tmp_path: Path) -> None:
    with watched(index, tmp_path) as (service, web), pytest.raises(AddressInUseError) as raised:
        Web(service, web.address)
    assert "choose another --metrics-address" in str(raised.value)


def test_a_service_serves_metrics_when_it_is_told_to(index: Path) -> None:
    arguments = ("--index", str(index), "--address", "127.0.0.1:0", "--metrics-address", "0")
    process, _ = start_service(*arguments)
    assert process.stderr is not None
    port = re.search(r'address="127\.0\.0\.1:(\d+)"', process.stderr.readline())
    assert port is not None
    web = type("There", (), {"address": WebAddress("127.0.0.1", int(port[1]))})()
    assert value(samples(asked(web, "/metrics")[2]), "ready") == 1
    process.terminate()
    process.communicate(timeout=60)

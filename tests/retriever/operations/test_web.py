"""Metrics and the status page, asked over HTTP."""

import random
import re
import socket
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from retriever.drafter import DraftRequest, SequenceOptions
from retriever.errors import AddressInUseError, SettingsError
from retriever.operations.lifecycle import Phase
from retriever.operations.observer import ServiceObserver
from retriever.operations.service_report import Service, reports_of
from retriever.operations.status_page import (
    MAX_SAMPLES,
    SAMPLE_S,
    History,
    duration,
    page,
    quantile,
)
from retriever.operations.web import Web, WebAddress
from retriever.sessions.draft_counts import DraftCounts, Latencies
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import Source
from tests.headless import browser_tab, needs_browser
from tests.retriever.conftest import start_service
from tests.retriever.operations.watched import HIDDEN, NASTY, asked, watched

VOID = {"meta", "link", "br", "img", "input", "hr"}
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
    assert value(found, "replication_connected") == value(found, "replication_published_total") == 0
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


class Page(HTMLParser):
    """A page's elements, checked to be closed in order, and the text of those with an id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str | None]] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.cells: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, name in self.open:
            if name and data.strip():
                self.cells.setdefault(name, []).append(data.strip())


def test_the_page_tells_the_state_and_escapes_what_others_wrote(
    index: Path, tmp_path: Path
) -> None:
    with watched(index, tmp_path) as (_, web):
        status, headers, text = asked(web, "/")
        _, _, empty = asked(web, "/", method="HEAD")
    assert (status, empty) == (200, "")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    found = Page(text)
    assert found.cells["tenants"] == ["tenant", "sessions", NASTY, "1"]
    assert found.cells["indexes"][6:8] == ["corpus", "0"]
    assert found.cells["life"] == [f"{Phase.READY.value}, 1 h up, version 0.1.0"]
    assert "max_budget_nodes" in found.cells["errors"]
    assert found.cells["sources"][4:] != []
    assert HIDDEN not in text
    assert not found.tags & {"script", "form", "a", "img", "link", "iframe", "object"}
    assert not any(name.startswith("on") or name == "style" for name in found.attributes)


def test_the_chart_has_an_area_for_each_database(index: Path, tmp_path: Path) -> None:
    with watched(index, tmp_path) as (service, _):
        now = 0.0
        history = History(lambda: service.stats(census=False).draft_counts, lambda: now)
        assert "polygon" not in page(service, history)
        for _ in range(3):
            now += SAMPLE_S
            service.stats().draft_counts.by_source[1] += 20
            history.sample()
        text = page(service, history)
        assert [each.per_second[Source.CORPUS] for each in history.rates()] == [2.0] * 3
    areas = re.findall(r'<polygon points="([^"]+)"', text)
    assert len(areas) == 6
    tops = [min(float(place.split(",")[1]) for place in area.split()) for area in areas]
    # Each upon the last one, up to the upper edge.
    assert tops == [133.3, 106.7, 80.0, 53.3, 26.7, 0.0]
    assert "12 tokens/s" in text


def test_the_history_is_a_ring_of_an_hour() -> None:
    now = 0.0
    history = History(DraftCounts, lambda: now)
    for second in range(4000):
        now = float(second)
        history.sample()
    rates = history.rates()
    assert len(rates) == MAX_SAMPLES - 1
    assert rates[-1].end_s - rates[0].begin_s == 3600


def test_only_reading_is_answered_and_only_by_names_of_this_machine(
    index: Path, tmp_path: Path
) -> None:
    with watched(index, tmp_path) as (service, web):
        assert asked(web, "/", method="POST")[0] == 405
        assert asked(web, "/nothing")[0] == 404
        assert asked(web, "/../metrics")[0] == 404
        for host in ("localhost:1", "127.0.0.1", "[::1]:80", "[::1]"):
            assert asked(web, "/", host=host)[0] == 200
        for host in ("evil.example", "evil.example:80", "", "localhost.evil.example", "["):
            assert asked(web, "/metrics", host=host)[0] == 403
        assert asked(web, "/ready")[0] == 200
        service.observer.lifecycle.phase = Phase.DRAINING
        assert asked(web, "/ready")[0::2] == (503, "draining\n")


def test_the_page_is_off_on_public_addresses_unless_asked(index: Path, tmp_path: Path) -> None:
    with watched(index, tmp_path) as (service, _):
        for wanted, status in ((None, 404), (False, 404), (True, 200)):
            web = Web(service, WebAddress.parsed("0.0.0.0:0"), status_page=wanted)
            assert asked(web, "/", host="service.example")[0] == status
            assert asked(web, "/metrics", host="service.example")[0] == 200
            web.close()
        web = Web(service, WebAddress.parsed("[::1]:0"), status_page=False)
        assert str(web.address) == f"[::1]:{web.address.port}"
        web.close()


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


def test_quantiles_and_durations_are_read_off() -> None:
    latencies = Latencies()
    assert quantile(latencies, 0.5) == 0.0
    latencies.add(3e-5, 98)
    latencies.add(0.5, 2)
    assert (quantile(latencies, 0.5), quantile(latencies, 0.99)) == (4e-5, 0.63)
    spans = (0.4, 61, 7201, 1e6)
    assert [duration(span) for span in spans] == ["0 s", "1 min", "2 h", "11 d"]


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


@needs_browser
def test_a_browser_shows_the_page_and_obeys_its_policy(index: Path, tmp_path: Path) -> None:
    """Its style applies, by its hash; what a tenant is named stays text; and all of it fits."""
    with watched(index, tmp_path) as (service, web), browser_tab(tmp_path) as tab:
        drafter = service.drafter
        assert drafter is not None
        drafter.draft([DraftRequest(HIDDEN, np.empty(0, np.int32), _length(drafter), 8)])
        for width, dark in ((380, True), (1600, False)):
            tab.show(f"http://{web.address}/", width=width, dark=dark)
            assert tab.overflowing() == []
            background = tab.value("getComputedStyle(document.body).backgroundColor")
            assert (background == "rgb(255, 255, 255)") is not dark
        assert tab.value("document.querySelector('#tenants td').textContent") == NASTY
        assert tab.value("document.scripts.length") == 0
        assert tab.console == []
        busy = tmp_path / "busy.html"
        busy.write_text(page(service, busy_history()), encoding="utf-8")
        for width in (380, 1600):
            tab.show(busy.as_uri(), width=width)
            assert tab.overflowing() == []
            boxes = tab.value(
                "[...document.querySelectorAll('polyline, polygon')].map(e => e.getBBox())"
                ".map(b => [b.x, b.y, b.x + b.width, b.y + b.height])"
            )
            assert len(boxes) == 6 + 4  # databases; steps, two latencies and memory
            assert all(
                x >= 0 and y >= 0 and right <= 720 and low <= 160 for x, y, right, low in boxes
            )


def busy_history(num_samples: int = 361, seed: int = 3) -> History:
    """A history of drafts that came true more and more often."""
    counts, rng, now = DraftCounts(), random.Random(seed), 0.0
    history = History(lambda: counts, lambda: now)
    for each in range(1, num_samples):
        now += SAMPLE_S
        counts.by_accepted[1] += 1000
        counts.by_accepted[-1] += 1500 + 4 * each + rng.randint(0, 300)
        counts.drafts.add(4e-5 * rng.uniform(0.5, 3), 980)
        counts.drafts.add(4e-4 * rng.uniform(0.5, 20), 20)
        for source in (Source.CONTEXT, Source.GENERATIONS, Source.PHRASES, Source.CORPUS):
            counts.by_source[1, source] += rng.randint(10, 20 + each)
        history.sample()
    return history


def test_the_history_tells_steps_latencies_and_memory() -> None:
    counts, now = DraftCounts(), 0.0
    history = History(lambda: counts, lambda: now)
    now += SAMPLE_S
    history.sample()
    counts.by_accepted[0], counts.by_accepted[-1] = 4, 10
    counts.drafts.add(3e-5, 98)
    counts.drafts.add(0.5, 2)
    now += SAMPLE_S
    history.sample()
    idle, busy = history.rates()
    assert (idle.tokens_per_step, idle.median_s, idle.tail_s) == (None, None, None)
    assert (busy.tokens_per_step, busy.median_s, busy.tail_s) == (2.5, 4e-5, 0.63)
    assert busy.memory_bytes > 1e6


def test_the_page_tells_what_came_of_each_index(index: Path, tmp_path: Path) -> None:
    with watched(index, tmp_path) as (service, web):
        found = Page(asked(web, "/")[2])
        nodes, accepted = service.stats().draft_counts.by_source[:, Source.CORPUS].tolist()
    assert nodes > 0
    shares = [f"{nodes:,}", f"{accepted:,}", f"{accepted / nodes:.1%}"]
    assert found.cells["outcomes"][5:] == ["corpus", "all", *shares]


def test_the_page_counts_in_words_that_fit_and_says_where_there_is_nothing() -> None:
    drafter = EmbeddedDrafter()
    service = Service(drafter, ServiceObserver(), 0.0)
    empty = Page(page(service, History(DraftCounts)))
    assert [empty.cells[name] for name in ("indexes", "tenants", "errors")] == [["none"]] * 3
    assert "of 0 tenants" in empty.cells["figures"]
    for tenants, counted in ((["acme"], "of 1 tenant"), (["globex"], "of 2 tenants")):
        for tenant in tenants:
            drafter.open(tenant, np.arange(3, dtype=np.int32), SequenceOptions(tenant=tenant))
        shown = Page(page(service, History(DraftCounts)))
        assert counted in shown.cells["figures"]
        assert f"open, {counted}," in shown.cells["sessions"][0]
    assert shown.cells["tenants"] == ["tenant", "sessions", "acme", "1", "globex", "1"]
    drafter.shut_down()


def _length(drafter: EmbeddedDrafter) -> int:
    return drafter.state.census().session_tokens

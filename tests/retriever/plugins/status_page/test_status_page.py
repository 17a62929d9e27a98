"""The status page of a service, asked over HTTP and shown in a browser."""

from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from retriever.drafter import DraftRequest, SequenceOptions
from retriever.operations.lifecycle import Phase
from retriever.operations.observer import ServiceObserver
from retriever.operations.service_report import Service
from retriever.operations.web import Web, WebAddress
from retriever.plugins.status_page.status_page import duration, page, quantile
from retriever.sessions.draft_counts import Latencies
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import Source
from tests.headless import browser_tab, needs_browser
from tests.retriever.operations.watched import HIDDEN, NASTY, asked, watched

VOID = {"meta", "link", "br", "img", "input", "hr"}


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


def test_quantiles_and_durations_are_read_off() -> None:
    latencies = Latencies()
    assert quantile(latencies, 0.5) == 0.0
    latencies.add(3e-5, 98)
    latencies.add(0.5, 2)
    assert (quantile(latencies, 0.5), quantile(latencies, 0.99)) == (4e-5, 0.63)
    spans = (0.4, 61, 7201, 1e6)
    assert [duration(span) for span in spans] == ["0 s", "1 min", "2 h", "11 d"]


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
    empty = Page(page(service))
    assert [empty.cells[name] for name in ("indexes", "tenants", "errors")] == [["none"]] * 3
    assert "of 0 tenants" in empty.cells["figures"]
    for tenants, counted in ((["acme"], "of 1 tenant"), (["globex"], "of 2 tenants")):
        for tenant in tenants:
            drafter.open(tenant, np.arange(3, dtype=np.int32), SequenceOptions(tenant=tenant))
        shown = Page(page(service))
        assert counted in shown.cells["figures"]
        assert f"open, {counted}," in shown.cells["sessions"][0]
    assert shown.cells["tenants"] == ["tenant", "sessions", "acme", "1", "globex", "1"]
    drafter.shut_down()


def _length(drafter: EmbeddedDrafter) -> int:
    return drafter.state.census().session_tokens

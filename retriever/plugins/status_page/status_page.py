"""The status page of a service, for its administrators.

It has no scripts, no forms and no external resources. Changes over time are left to Prometheus. The
page names tenants, but never sessions or tokens. The library that writes the elements escapes all
values.
"""

import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final
from xml.etree.ElementTree import Element, SubElement, tostring

from retriever.operations.design import hash_of, style_of
from retriever.operations.service_report import Service, installed_version, reports_of
from retriever.operations.web import Answer, Rendered
from retriever.sessions.bindings import IndexOutcome
from retriever.sessions.draft_counts import (
    BOUNDS_S,
    Census,
    DraftCounts,
    DrafterStats,
    Latencies,
    resident_bytes,
)
from retriever.tree import Source, drafted_sources

_PERIOD_S: Final = 10  # reload interval of the page
_MILLISECOND: Final = 1e-3


def swatch(source: Source) -> Element:
    """Return a small square in the colour of a database."""
    return Element("span", {"class": f"swatch source-{source.label}"})


_STYLE: Final = style_of("""
body { max-width: 68rem; }
""")
_MAX_TENANTS: Final = 50  # bounds the page; the rest is summed
_MAX_REFUSALS: Final = 30  # bounds the page

_POLICY = (
    f"default-src 'none'; style-src {hash_of(_STYLE)}; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = (
    (
        "Content-Security-Policy",
        _POLICY,
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
)
"""HTTP headers of the page."""


def page_of(service: Service) -> Rendered:
    """Return a function that renders the page of a service."""
    return lambda _: Answer(
        HTTPStatus.OK, "text/html; charset=utf-8", page(service).encode(), HEADERS
    )


def page(service: Service) -> str:
    """Return the page as HTML."""
    html = Element("html", lang="en")
    head, body = SubElement(html, "head"), SubElement(html, "body")
    SubElement(head, "meta", charset="utf-8")
    SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    SubElement(head, "meta", {"http-equiv": "refresh", "content": str(_PERIOD_S)})
    SubElement(head, "title").text = "foredraft"
    SubElement(head, "style").text = _STYLE
    stats = service.stats()
    _life(body, service)
    _figures(body, stats)
    _sources(body, stats.draft_counts)
    _indexes(body, stats)
    _by_index(body, stats.index_outcomes)
    _memory(body, stats)
    _refusals(body, service)
    _say_none(body)
    _label_cells(body)
    return "<!doctype html>\n" + tostring(html, encoding="unicode", method="html")


def _life(body: Element, service: Service) -> None:
    SubElement(body, "h1").text = "foredraft"
    phase = service.observer.lifecycle.phase.value
    up = duration(time.time() - service.began_s)
    life = f"{phase}, {up} up, version {installed_version()}"
    SubElement(body, "p", {"id": "life", "class": "soft"}).text = life


def _figures(body: Element, stats: DrafterStats) -> None:
    counts, census = stats.draft_counts, stats.census
    steps = counts.num_committed / counts.num_outcomes if counts.num_outcomes else 0.0
    tail = _shown(quantile(counts.drafts, 0.99))
    memory = resident_bytes()[0]
    figures = SubElement(body, "dl", {"id": "figures", "class": "figures"})
    for name, value, more in (
        ("tokens per step", f"{steps:.2f}" if steps else "unknown", "since the start"),
        ("drafts", f"{sum(counts.drafts.counts):,}", f"{counts.num_outcomes:,} with an outcome"),
        ("median latency", _shown(quantile(counts.drafts, 0.5)), f"99%: {tail}"),
        ("memory", f"{memory / 1e6:,.0f} MB" if memory else "unknown", "resident"),
        ("sessions", f"{sum(census.sessions.values()):,}", f"of {_tenants(census)}"),
    ):
        figure = SubElement(figures, "div")
        SubElement(figure, "dt").text = name
        amount = SubElement(figure, "dd")
        amount.text = value
        SubElement(amount, "small").text = more


def _sources(body: Element, counts: DraftCounts) -> None:
    SubElement(body, "h2").text = "Acceptance by database"
    nodes, accepted = counts.by_source.tolist()
    rows = _table(body, "sources", "database", "nodes", "accepted", "share")
    for source in drafted_sources():
        share = _share(accepted[source], nodes[source])
        row = _row(rows, "", nodes[source], accepted[source], share)
        row[0].append(swatch(source))
        row[0][0].tail = source.label


def _indexes(body: Element, stats: DrafterStats) -> None:
    SubElement(body, "h2").text = "Indexes"
    rows = _table(body, "indexes", "index", "snapshot", "published", "documents", "tokens", "MB")
    for each in reports_of(stats.indexes):
        ago = f"{duration(each.age_s)} ago"
        megabytes = f"{each.num_bytes / 1e6:,.1f}"
        _row(rows, each.name, each.snapshot, ago, each.num_documents, each.num_tokens, megabytes)
    for path in stats.missing_indexes:
        _row(rows, str(path), "cannot be opened: see the log", "", "", "", "")
    failed = _counted(stats.refresh_failures, "failure")
    SubElement(body, "p", id="refresh").text = f"{failed} to open a changed index"


def _by_index(body: Element, outcomes: Sequence[IndexOutcome]) -> None:
    """Show the acceptance of indexes; indexes that are drafted from together share a row."""
    SubElement(body, "h2").text = "Acceptance by index"
    rows = _table(body, "outcomes", "index", "tenant", "nodes", "accepted", "share")
    for each in outcomes[:_MAX_TENANTS]:
        names = " + ".join(path.name for path in each.indexes)
        whose = "all" if each.tenant is None else each.tenant
        share = _share(each.num_accepted, each.num_drafted)
        _row(rows, names, whose, each.num_drafted, each.num_accepted, share)
    left = outcomes[_MAX_TENANTS:]
    if left:
        drafted = sum(each.num_drafted for each in left)
        accepted = sum(each.num_accepted for each in left)
        _row(rows, _counted(len(left), "other"), "", drafted, accepted, _share(accepted, drafted))


def _memory(body: Element, stats: DrafterStats) -> None:
    census = stats.census
    SubElement(body, "h2").text = "Sessions"
    SubElement(body, "p", id="sessions").text = (
        f"{sum(census.sessions.values()):,} open, of {_tenants(census)}, "
        f"{_counted(census.session_tokens, 'token')}, {census.session_bytes / 1e6:,.1f} MB; "
        f"{_counted(census.generations_tokens, 'token')} of generations, "
        f"{census.generations_bytes / 1e6:,.1f} MB; "
        f"{_counted(stats.log_failures, 'output')} could not be kept on disk"
    )
    rows = _table(body, "tenants", "tenant", "sessions")
    by_count = sorted(census.sessions.items(), key=lambda each: (-each[1], each[0]))
    for tenant, count in by_count[:_MAX_TENANTS]:
        _row(rows, tenant or "(no name)", count)
    left = by_count[_MAX_TENANTS:]
    if left:
        _row(rows, _counted(len(left), "other"), sum(count for _, count in left))


def _refusals(body: Element, service: Service) -> None:
    SubElement(body, "h2").text = "Recent errors"
    rows = _table(body, "errors", "method", "status", "reason", "times", "last")
    for end, count, latest_s in service.observer.calls.refusals()[:_MAX_REFUSALS]:
        ago = f"{duration(time.time() - latest_s)} ago"
        _row(rows, end.method, end.status, end.reason, count, ago)


def _table(body: Element, name: str, *titles: str) -> Element:
    scrolled = SubElement(body, "div", {"class": "scroll", "tabindex": "0", "role": "group"})
    scrolled.set("aria-label", name)
    table = SubElement(scrolled, "table", id=name)
    head = SubElement(SubElement(table, "thead"), "tr")
    for title in titles:
        SubElement(head, "th", scope="col").text = title
    return SubElement(table, "tbody")


def _row(rows: Element, *values: str | int) -> Element:
    row = SubElement(rows, "tr")
    for value in values:
        SubElement(row, "td").text = value if isinstance(value, str) else f"{value:,}"
    return row


def _say_none(body: Element) -> None:
    """Replace tables without rows by a word."""
    for scrolled in body.findall("div[@class='scroll']"):
        if scrolled.find("table/tbody/tr") is None:
            name = scrolled[0].get("id", "")
            scrolled.clear()
            scrolled.tag, scrolled.text = "p", "none"
            scrolled.attrib |= {"id": name, "class": "soft"}


def _label_cells(body: Element) -> None:
    """Add the column title to each cell; narrow windows show it next to the cell."""
    for table in body.iter("table"):
        titles = [each.text or "" for each in table.iter("th")]
        for row in table.findall("tbody/tr"):
            for title, cell in zip(titles, row, strict=True):
                cell.set("data-title", title)


def _tenants(census: Census) -> str:
    """Return the number of tenants with sessions; pools in memory include other tenants, too."""
    return _counted(len(census.sessions), "tenant")


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _share(accepted: int, nodes: int) -> str:
    return f"{accepted / nodes:.1%}" if nodes else "unknown"


def quantile(latencies: Latencies, share: float) -> float:
    """Return the upper bound of a share of the latencies; 0 if there are none."""
    counts = latencies.counts.copy()
    wanted, seen = share * sum(counts), 0
    for bound, count in zip((*BOUNDS_S, float("inf")), counts, strict=True):
        seen += count
        if count and seen >= wanted:
            return bound
    return 0.0


def _shown(seconds: float) -> str:
    if seconds == 0:
        return "unknown"
    if seconds == float("inf"):
        return f"over {BOUNDS_S[-1]:g} s"
    if seconds >= _MILLISECOND:
        return f"within {seconds * 1e3:,.0f} ms"
    return f"within {seconds * 1e6:,.0f} µs"


def duration(seconds: float) -> str:
    """Return a time span in one unit, rounded down."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size):,} {unit}"
    return f"{max(0, int(seconds))} s"

"""The status page of a service, for its administrators.

It has no scripts, no forms and no external resources. Tenants are named, sessions and tokens never;
the library that writes the elements escapes all values.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import log
from typing import Final, Self
from xml.etree.ElementTree import Element, SubElement, tostring

from retriever.operations.design import hash_of, style_of
from retriever.operations.service_report import Service, installed_version, reports_of
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

SAMPLE_S: Final = 10.0  # an hour has 360 samples: a step in the chart every two pixels
MAX_SAMPLES: Final = 361
"""An hour of samples, both ends included."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two samples.

    Attributes:
        begin_s: time of the first, in seconds of the clock.
        end_s: time of the second.
        per_second: accepted tokens a second, by source.
        tokens_per_step: tokens committed for each draft; None without an outcome.
        median_s: median latency of drafts, in seconds; None without a draft.
        tail_s: the 99th percentile of it.
        memory_bytes: resident memory of the process at the end.
    """

    begin_s: float
    end_s: float
    per_second: tuple[float, ...]
    tokens_per_step: float | None
    median_s: float | None
    tail_s: float | None
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class _Sample:
    """Counts at a time; see `DraftCounts`."""

    time_s: float
    accepted: tuple[int, ...]
    num_outcomes: int
    num_committed: int
    drafts: tuple[int, ...]
    memory_bytes: int

    @classmethod
    def of(cls, counts: DraftCounts, now_s: float) -> Self:
        return cls(
            now_s,
            tuple(counts.by_source[1].tolist()),
            counts.num_outcomes,
            counts.num_committed,
            tuple(counts.drafts.counts),
            resident_bytes()[0],
        )

    def until(self, later: "_Sample") -> Rates:
        """Return what happened between this sample and a later one."""
        span_s = later.time_s - self.time_s
        outcomes = later.num_outcomes - self.num_outcomes
        drafts = [after - before for before, after in zip(self.drafts, later.drafts, strict=True)]
        return Rates(
            self.time_s,
            later.time_s,
            tuple((later.accepted[each] - self.accepted[each]) / span_s for each in Source),
            (later.num_committed - self.num_committed) / outcomes if outcomes else None,
            _quantile(drafts, 0.5) or None,
            _quantile(drafts, 0.99) or None,
            later.memory_bytes,
        )


class History:
    """Samples of what drafts came to, and of memory.

    Args:
        draft_counts: returns the counts to sample.
        clock: seconds, monotonic.
    """

    def __init__(
        self, draft_counts: Callable[[], DraftCounts], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._draft_counts = draft_counts
        self._clock = clock
        self._samples: deque[_Sample] = deque(maxlen=MAX_SAMPLES)
        self.sample()

    def sample(self) -> None:
        """Take a sample if the last one is at least `SAMPLE_S` old."""
        now = self._clock()
        if not self._samples or now - self._samples[-1].time_s >= SAMPLE_S:
            self._samples.append(_Sample.of(self._draft_counts(), now))

    def rates(self) -> list[Rates]:
        """Return the rates between samples, oldest first."""
        return [before.until(after) for before, after in pairwise(list(self._samples))]


_WIDTH: Final = 720
_HEIGHT: Final = 160
_MILLISECOND: Final = 1e-3
_FASTEST_S: Final = BOUNDS_S[0]
_SLOWEST_S: Final = BOUNDS_S[-1]


def _accepted(rates: Sequence[Rates]) -> tuple[Element, str]:
    """Return the chart of accepted tokens by database, stacked, and what its height means."""
    drawing = _drawing("accepted", "Accepted tokens a second by database")
    shown = drafted_sources()
    stacked = [list(accumulate((each.per_second[s] for s in shown), initial=0.0)) for each in rates]
    top = max(stack[-1] for stack in stacked) or 1.0
    for layer, source in enumerate(shown):
        places = _outline(rates, stacked, layer, top)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        SubElement(drawing, "polygon", {"points": points, "class": f"area source-{source.label}"})
    return drawing, f"up to {top:,.0f} tokens/s"


def _drawing(name: str, title: str) -> Element:
    attributes = {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "preserveAspectRatio": "none"}
    drawing = Element("svg", {**attributes, "role": "img", "id": name, "class": "chart"})
    SubElement(drawing, "title").text = title
    return drawing


def _add_line(
    drawing: Element, rates: Sequence[Rates], heights: Sequence[float | None], css: str
) -> None:
    """Draw values as steps, with gaps where there is none.

    Args:
        drawing: gets the line.
        rates: tell the times.
        heights: 0 at the lower edge, 1 at the upper one.
        css: classes of the line.
    """
    begin = rates[0].begin_s
    span = rates[-1].end_s - begin
    drawn = zip(rates, heights, strict=True)
    for has_value, run in groupby(drawn, key=lambda each: each[1] is not None):
        if has_value:
            points = " ".join(
                f"{_WIDTH * (time_s - begin) / span:.1f},{_HEIGHT * (1 - (height or 0)):.1f}"
                for each, height in run
                for time_s in (each.begin_s, each.end_s)
            )
            SubElement(drawing, "polyline", {"points": points, "class": css})


def _tokens_per_step(rates: Sequence[Rates]) -> tuple[Element, str]:
    drawing = _drawing("tokens-per-step", "Tokens committed for each draft")
    values = [each.tokens_per_step for each in rates]
    top = max((value for value in values if value is not None), default=1.0) or 1.0
    _add_line(drawing, rates, [None if v is None else 0.95 * v / top for v in values], "line")
    return drawing, f"up to {top:.1f}"


def _latencies(rates: Sequence[Rates]) -> tuple[Element, str]:
    drawing = _drawing("latency", "Latency of drafts: median, and dashed the 99th percentile")
    medians = [_logarithmic(each.median_s) for each in rates]
    _add_line(drawing, rates, medians, "line")
    tails = [_logarithmic(each.tail_s) for each in rates]
    _add_line(drawing, rates, tails, "line dashed")
    return drawing, f"{_FASTEST_S * 1e6:.0f} µs to {_SLOWEST_S:.0f} s, logarithmic"


def _logarithmic(seconds: float | None) -> float | None:
    """Return the height of a latency on a scale from the fastest to the slowest bound."""
    if seconds is None:
        return None
    share = log(min(seconds, _SLOWEST_S) / _FASTEST_S) / log(_SLOWEST_S / _FASTEST_S)
    return 0.02 + 0.96 * share  # within the edges


def _resident(rates: Sequence[Rates]) -> tuple[Element, str]:
    drawing = _drawing("memory", "Resident memory of the process")
    top = max(each.memory_bytes for each in rates) or 1
    _add_line(drawing, rates, [0.95 * each.memory_bytes / top for each in rates], "line")
    return drawing, f"up to {top / 1e6:,.0f} MB"


def _outline(
    rates: Sequence[Rates], stacked: Sequence[Sequence[float]], layer: int, top: float
) -> list[tuple[float, float]]:
    """Return the corners of a layer: the upper edge as steps, then the lower one backwards."""
    begin, end = rates[0].begin_s, rates[-1].end_s

    def x(time_s: float) -> float:
        return _WIDTH * (time_s - begin) / (end - begin)

    def y(value: float) -> float:
        return _HEIGHT * (1 - value / top)

    upper = [
        (x(time), y(stack[layer + 1]))
        for each, stack in zip(rates, stacked, strict=True)
        for time in (each.begin_s, each.end_s)
    ]
    lower = [
        (x(time), y(stack[layer]))
        for each, stack in zip(rates, stacked, strict=True)
        for time in (each.begin_s, each.end_s)
    ]
    return upper + lower[::-1]


def swatch(source: Source) -> Element:
    """Return a small square in the colour of a database."""
    return Element("span", {"class": f"swatch source-{source.label}"})


_STYLE: Final = style_of("""
body { max-width: 68rem; }
.charts {
  display: grid;
  gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr));
}
.charts section { min-width: 0; }
.chart { height: 130px; }
h3 { font-size: .95rem; font-weight: 500; margin: .5rem 0 .25rem; }
svg .dashed { stroke-dasharray: 4 4; }
""")
_MAX_TENANTS: Final = 50  # bounds the page; the rest is summed up
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


def page(service: Service, history: History) -> str:
    """Return the page as HTML."""
    html = Element("html", lang="en")
    head, body = SubElement(html, "head"), SubElement(html, "body")
    SubElement(head, "meta", charset="utf-8")
    SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    SubElement(head, "meta", {"http-equiv": "refresh", "content": f"{SAMPLE_S:.0f}"})
    SubElement(head, "title").text = "foredraft"
    SubElement(head, "style").text = _STYLE
    stats = service.stats()
    _life(body, service)
    _figures(body, stats)
    _charts(body, history.rates())
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


def _charts(body: Element, rates: Sequence[Rates]) -> None:
    SubElement(body, "h2").text = "The last hour"
    if not rates:
        SubElement(body, "p").text = "No samples yet: look again in a moment."
        return
    begin = f"{(rates[-1].end_s - rates[0].begin_s) / 60:.0f} min ago"
    charts = SubElement(body, "div", {"class": "charts"})
    for (drawing, scale), name in (
        (_tokens_per_step(rates), "Tokens per step"),
        (_latencies(rates), "Latency: median, and dashed the 99th percentile"),
        (_accepted(rates), "Accepted tokens a second, by database"),
        (_resident(rates), "Memory"),
    ):
        chart = SubElement(charts, "section")
        SubElement(chart, "h3").text = name
        chart.append(drawing)
        axis = SubElement(chart, "p", {"class": "axis"})
        for text in (begin, scale, "now"):
            SubElement(axis, "span").text = text


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
    """Show the acceptance of indexes; those that are drafted from together have one row."""
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
    """Put a word in the place of tables without rows."""
    for scrolled in body.findall("div[@class='scroll']"):
        if scrolled.find("table/tbody/tr") is None:
            name = scrolled[0].get("id", "")
            scrolled.clear()
            scrolled.tag, scrolled.text = "p", "none"
            scrolled.attrib |= {"id": name, "class": "soft"}


def _label_cells(body: Element) -> None:
    """Have each cell carry its column's title, which narrow windows show next to it."""
    for table in body.iter("table"):
        titles = [each.text or "" for each in table.iter("th")]
        for row in table.findall("tbody/tr"):
            for title, cell in zip(titles, row, strict=True):
                cell.set("data-title", title)


def _tenants(census: Census) -> str:
    """Return how many have sessions; pools in memory also count those that have none."""
    return _counted(len(census.sessions), "tenant")


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _share(accepted: int, nodes: int) -> str:
    return f"{accepted / nodes:.1%}" if nodes else "unknown"


def quantile(latencies: Latencies, share: float) -> float:
    """Return the upper bound of a share of the latencies; 0 without any."""
    return _quantile(latencies.counts.copy(), share)


def _quantile(counts: Sequence[int], share: float) -> float:
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

"""The status page of a service, for its administrators.

It has no scripts, no forms and no external resources. Tenants are named, sessions and tokens never;
the library that writes the elements escapes all values.
"""

import base64
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final
from xml.etree.ElementTree import Element, SubElement, tostring

from retriever.operations.service_report import Service, installed_version
from retriever.sessions.draft_counts import BOUNDS_S, DraftCounts, Latencies
from retriever.tree import Source, drafted_sources

SAMPLE_S: Final = 10.0  # an hour has 360 samples: a step in the chart every two pixels
MAX_SAMPLES: Final = 361
"""An hour of samples, both ends included."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Accepted tokens between two samples.

    Attributes:
        begin_s: time of the first, in seconds of the clock.
        end_s: time of the second.
        per_second: accepted tokens a second, by source.
    """

    begin_s: float
    end_s: float
    per_second: tuple[float, ...]


class History:
    """Samples of accepted tokens by source.

    Args:
        draft_counts: returns the counts to sample.
        clock: seconds, monotonic.
    """

    def __init__(
        self, draft_counts: Callable[[], DraftCounts], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._draft_counts = draft_counts
        self._clock = clock
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=MAX_SAMPLES)
        self.sample()

    def sample(self) -> None:
        """Take a sample if the last one is at least `SAMPLE_S` old."""
        now = self._clock()
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now, tuple(self._draft_counts().by_source[1].tolist())))

    def rates(self) -> list[Rates]:
        """Return the rates between samples, oldest first."""
        samples = list(self._samples)
        return [
            Rates(
                begin,
                end,
                tuple((after[each] - before[each]) / (end - begin) for each in Source),
            )
            for (begin, before), (end, after) in pairwise(samples)
        ]


_WIDTH: Final = 720
_HEIGHT: Final = 160
_MARGIN: Final = 24


def stacked_areas(rates: Sequence[Rates]) -> Element:
    """Return an `svg` of accepted tokens a second by database over time."""
    drawing = Element("svg", viewBox=f"0 0 {_WIDTH} {_HEIGHT + _MARGIN}", role="img", id="accepted")
    SubElement(drawing, "title").text = "Accepted tokens a second by database"
    if not rates:
        _text(drawing, _WIDTH / 2, _HEIGHT / 2, "middle", "No samples yet: look again in a moment.")
        return drawing
    begin, end = rates[0].begin_s, rates[-1].end_s
    shown = drafted_sources()
    stacked = [list(accumulate((each.per_second[s] for s in shown), initial=0.0)) for each in rates]
    top = max(stack[-1] for stack in stacked) or 1.0
    for layer, source in enumerate(shown):
        places = _outline(rates, stacked, layer, top)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        SubElement(drawing, "polygon", points=points, fill=source.colour)
    _text(drawing, 4, 14, "start", f"{top:,.0f} tokens/s")
    _text(drawing, 0, _HEIGHT + 16, "start", f"{(end - begin) / 60:.0f} min ago")
    _text(drawing, _WIDTH, _HEIGHT + 16, "end", "now")
    return drawing


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
    square = Element("svg", width="12", height="12")
    SubElement(square, "rect", width="12", height="12", fill=source.colour)
    return square


def _text(drawing: Element, x: float, y: float, anchor: str, text: str) -> None:
    attributes = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
    SubElement(drawing, "text", attributes).text = text


_STYLE: Final = """
:root { color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif; }
body { max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid #8886; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
svg text { fill: currentColor; font-size: 12px; }
"""
_MAX_TENANTS: Final = 50  # bounds the page; the rest is summed up
_MAX_REFUSALS: Final = 30  # bounds the page

_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
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
    SubElement(head, "meta", {"http-equiv": "refresh", "content": f"{SAMPLE_S:.0f}"})
    SubElement(head, "title").text = "foredraft"
    SubElement(head, "style").text = _STYLE
    _life(body, service)
    _outcomes(body, service, history)
    _indexes(body, service)
    _memory(body, service)
    _refusals(body, service)
    return "<!doctype html>\n" + tostring(html, encoding="unicode", method="html")


def _life(body: Element, service: Service) -> None:
    SubElement(body, "h1").text = "foredraft"
    phase = service.observer.lifecycle.phase.value
    up = duration(time.time() - service.began_s)
    SubElement(body, "p", id="life").text = f"{phase}, {up} up, version {installed_version()}"


def _outcomes(body: Element, service: Service, history: History) -> None:
    counts = service.draft_counts
    SubElement(body, "h2").text = "Drafts"
    steps = counts.num_committed / counts.num_outcomes if counts.num_outcomes else 0.0
    SubElement(body, "p", id="drafts").text = (
        f"{sum(counts.drafts.counts):,} drafts, median {_shown(quantile(counts.drafts, 0.5))}, "
        f"99th percentile {_shown(quantile(counts.drafts, 0.99))}; "
        f"{steps:.2f} tokens committed for each"
    )
    SubElement(body, "h3").text = "Accepted tokens a second"
    body.append(stacked_areas(history.rates()))
    nodes, accepted = counts.by_source.tolist()
    rows = _table(body, "sources", "database", "nodes", "accepted", "share")
    for source in drafted_sources():
        row = _row(rows, "", nodes[source], accepted[source], _share(accepted, nodes, source))
        row[0].append(swatch(source))
        row[0][0].tail = f" {source.label}"


def _indexes(body: Element, service: Service) -> None:
    SubElement(body, "h2").text = "Indexes"
    rows = _table(body, "indexes", "index", "snapshot", "published", "documents", "tokens", "MB")
    for each in service.indexes():
        ago = f"{duration(each.age_s)} ago"
        megabytes = f"{each.num_bytes / 1e6:,.1f}"
        _row(rows, each.name, each.snapshot, ago, each.num_documents, each.num_tokens, megabytes)
    for path in service.missing_indexes:
        _row(rows, str(path), "cannot be opened: see the log", "", "", "", "")
    failures = service.refresh_failures
    SubElement(body, "p", id="refresh").text = f"{failures:,} failures to open a changed index"


def _memory(body: Element, service: Service) -> None:
    census = service.census()
    SubElement(body, "h2").text = "Sessions"
    SubElement(body, "p", id="sessions").text = (
        f"{sum(census.sessions.values()):,} open, {census.session_tokens:,} tokens, "
        f"{census.session_bytes / 1e6:,.1f} MB; {census.tenants:,} tenants with "
        f"{census.generations_tokens:,} tokens of generations, "
        f"{census.generations_bytes / 1e6:,.1f} MB; "
        f"{service.log_failures:,} outputs could not be kept on disk"
    )
    rows = _table(body, "tenants", "tenant", "sessions")
    by_count = sorted(census.sessions.items(), key=lambda each: (-each[1], each[0]))
    for tenant, count in by_count[:_MAX_TENANTS]:
        _row(rows, tenant or "(no name)", count)
    left = by_count[_MAX_TENANTS:]
    if left:
        _row(rows, f"{len(left):,} others", sum(count for _, count in left))


def _refusals(body: Element, service: Service) -> None:
    SubElement(body, "h2").text = "Recent errors"
    rows = _table(body, "errors", "method", "status", "reason", "times", "last")
    for end, count, latest_s in service.observer.calls.refusals()[:_MAX_REFUSALS]:
        ago = f"{duration(time.time() - latest_s)} ago"
        _row(rows, end.method, end.status, end.reason, count, ago)


def _table(body: Element, name: str, *titles: str) -> Element:
    table = SubElement(body, "table", id=name)
    head = SubElement(SubElement(table, "thead"), "tr")
    for title in titles:
        SubElement(head, "th").text = title
    return SubElement(table, "tbody")


def _row(rows: Element, *values: str | int) -> Element:
    row = SubElement(rows, "tr")
    for value in values:
        SubElement(row, "td").text = value if isinstance(value, str) else f"{value:,}"
    return row


def _share(accepted: Sequence[int], nodes: Sequence[int], source: int) -> str:
    return f"{accepted[source] / nodes[source]:.1%}" if nodes[source] else "unknown"


def quantile(latencies: Latencies, share: float) -> float:
    """Return the upper bound of a share of the latencies; 0 without any."""
    counts: Iterable[int] = latencies.counts.copy()
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
    return f"within {seconds * 1e6:,.0f} µs"


def duration(seconds: float) -> str:
    """Return a time span in one unit, rounded down."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size):,} {unit}"
    return f"{max(0, int(seconds))} s"

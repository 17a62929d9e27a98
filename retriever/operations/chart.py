"""A chart of rates as inline SVG: areas upon one another, one for each database."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final
from xml.etree.ElementTree import Element, SubElement

from retriever.operations.history import Rates
from retriever.tree import Source

COLOURS: Final = {
    Source.CONTEXT: "#0072b2",
    Source.GENERATIONS: "#e69f00",
    Source.PHRASES: "#009e73",
    Source.CORPUS: "#cc79a7",
}
"""By database; told apart by the colour-blind as well."""

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
    stacked = [
        list(accumulate((each.per_second[s] for s in COLOURS), initial=0.0)) for each in rates
    ]
    top = max(stack[-1] for stack in stacked) or 1.0
    for layer, colour in enumerate(COLOURS.values()):
        places = _outline(rates, stacked, layer, top)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        SubElement(drawing, "polygon", points=points, fill=colour)
    _text(drawing, 4, 14, "start", f"{top:,.0f} tokens/s")
    _text(drawing, 0, _HEIGHT + 16, "start", f"{(end - begin) / 60:.0f} min ago")
    _text(drawing, _WIDTH, _HEIGHT + 16, "end", "now")
    return drawing


def _outline(
    rates: Sequence[Rates], stacked: Sequence[Sequence[float]], layer: int, top: float
) -> list[tuple[float, float]]:
    """Return the corners of a layer: its upper edge as stairs, and its lower one back."""
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
    SubElement(square, "rect", width="12", height="12", fill=COLOURS[source])
    return square


def _text(drawing: Element, x: float, y: float, anchor: str, text: str) -> None:
    attributes = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
    SubElement(drawing, "text", attributes).text = text

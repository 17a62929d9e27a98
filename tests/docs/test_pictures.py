"""The pictures of the README say what the kept results say, and fit into their frame."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from docs.site.pictures import (
    PICTURES,
    RESULT,
    SHOWN_AT_END_S,
    WIDTH,
    Line,
    chart,
    paces,
    record,
    shortened,
    terminal,
)

SVG = "{http://www.w3.org/2000/svg}"
WIDEST = 9.6  # pixels of a character of 15 pixels, in a wide font


def drawn(picture: str) -> list[ET.Element]:
    return list(ET.fromstring(picture))  # noqa: S314  (our own)


def test_the_kept_picture_is_drawn_from_the_kept_result() -> None:
    assert (PICTURES / "speed.svg").read_text() == chart(json.loads(RESULT.read_text()))


def test_the_chart_shows_every_workload_to_scale() -> None:
    result = json.loads(RESULT.read_text())
    elements = drawn(chart(result))
    widths = {
        kind: [float(e.attrib["width"]) for e in elements if e.get("class") == kind][1:]
        for kind in ("plain", "passes", "drafts")  # the first is the legend's
    }
    rows = paces(result)
    assert len(rows) == len(result["categories"]) == len(widths["plain"])
    scales = [pace.plain / width for pace, width in zip(rows, widths["plain"], strict=True)]
    for pace, passes, drafts, scale in zip(
        rows, widths["passes"], widths["drafts"], scales, strict=True
    ):
        assert scale == pytest.approx(scales[0], rel=0.01)
        assert (passes + drafts) * scale == pytest.approx(pace.drafted, rel=0.01)
    texts = [element.text or "" for element in elements if element.tag == f"{SVG}text"]
    for pace in rows:
        assert pace.workload in texts
        assert any(f"{pace.drafted / pace.plain:.1f}\u00d7" in text for text in texts)


def test_no_text_leaves_the_chart() -> None:
    for element in drawn(chart(json.loads(RESULT.read_text()))):
        if element.tag == f"{SVG}text" and element.get("class") is None:
            width = WIDEST * len(element.text or "")
            x = float(element.attrib["x"])
            start, end = (x - width, x) if element.get("text-anchor") else (x, x + width)
            assert start >= 0, element.text
            assert end <= WIDTH, element.text


def test_a_terminal_shows_every_line_in_order_and_keeps_the_last_in_sight() -> None:
    lines = [Line(0.1, "one"), Line(90.0, "two < 3 & more"), Line(90.1, "x  5.00x")]
    times = shortened(lines)
    assert times == sorted(times)
    assert times[-1] < 10  # the pause is cut short
    picture = terminal(lines)
    texts = [e.text for e in drawn(picture) if e.tag == f"{SVG}text"]
    assert texts[2:] == [line.words for line in lines]
    [length] = set(re.findall(r"animation: a\d+ ([\d.]+)s", picture))
    assert float(length) == pytest.approx(times[-1] + SHOWN_AT_END_S, abs=0.01)
    assert "prefers-reduced-motion" in picture


def test_a_recording_has_errors_and_times_and_a_failure_keeps_nothing(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)\n")
    lines = list(record(["python3", str(script)]))
    assert [line.words for line in lines] == ["out", "err"]
    script.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match="ended with 3"):
        list(record(["python3", str(script)]))

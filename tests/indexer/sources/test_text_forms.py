"""Files that are more than a text: what of them is text, and what damage costs."""

import json
from pathlib import Path

import pytest

from indexer.sources import Markup
from tests.indexer.sources.source_reading import read_all, texts

PAGE = """<!doctype html><html><head><title>Boats</title><style>p { color: red }</style></head>
<body><h1>When   boats leave</h1><script>alert("now")</script>
<p>At <b>nine</b> &amp; ten.</p><ul><li>one<li>two</ul>
<pre>a  b
  c</pre></body></html>
"""


def test_of_a_page_the_source_is_read_or_what_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text(PAGE)
    assert texts(read_all(path)[0]) == {str(path): PAGE}
    seen = "When boats leave\n\nAt nine & ten.\n\none\ntwo\n\na  b\n  c"
    assert texts(read_all(path, html=Markup.TEXT)[0]) == {str(path): seen}


@pytest.mark.parametrize("page", ["<p", "<script>", "</p></b>", "a<!--", "<body>x<head>y", ""])
def test_broken_pages_are_read_as_far_as_they_go(tmp_path: Path, page: str) -> None:
    path = tmp_path / "a.html"
    path.write_text(page)
    assert len(read_all(path, html=Markup.TEXT)[0]) == 1


def test_of_subtitles_what_is_said_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.srt"
    path.write_text(
        "1\r\n00:00:01,000 --> 00:00:02,000\r\n<i>Hello</i>\r\nthere.\r\n\r\n2\n"
        "00:00:03,000 --> 00:00:04,000\n5 < 6\n"
    )
    other = tmp_path / "b.vtt"
    other.write_text("WEBVTT\n\nNOTE nothing\n\nid\n00:01.000 --> 00:02.000 align:start\nNow.\n")
    said = {str(path): "Hello\nthere.\n5 < 6", str(other): "Now."}
    assert {name: text.strip() for name, text in texts(read_all(tmp_path)[0]).items()} == said


LETTER = b"Subject: boats\nContent-Type: text/plain; charset=%s\n\nAt nine.\nFrom here.\n"


def test_of_mail_the_body_of_each_letter_is_read(tmp_path: Path) -> None:
    page = (
        b'Content-Type: multipart/mixed; boundary="b"\n\n--b\nContent-Type: text/html\n\n'
        b"<p>At <i>ten</i>.</p>\n--b\nContent-Type: image/png\n\nAAAA\n--b--\n"
    )
    letters = [LETTER % b"utf-8", page, LETTER % b"martian", b"Subject: none\n\n"]
    (tmp_path / "a.mbox").write_bytes(b"".join(b"From x Mon\n%s\n" % each for each in letters))
    (tmp_path / "b.eml").write_bytes(LETTER % b"utf-8")
    documents, tally = read_all(tmp_path)
    assert {name: text.strip() for name, text in texts(documents).items()} == {
        f"{tmp_path}/a.mbox:0": "At nine.\nFrom here.",
        f"{tmp_path}/a.mbox:1": "At ten.",
        f"{tmp_path}/a.mbox:3": "",
        f"{tmp_path}/b.eml:0": "At nine.\nFrom here.",
    }
    assert tally.skipped_places == {"mail that cannot be read": f"{tmp_path}/a.mbox:2"}


def test_a_letter_that_is_too_long_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.mbox"
    path.write_bytes(b"From x\nA: b\n\n" + b"x" * 99 + b"\n\nFrom y\nA: b\n\nshort\n")
    documents, tally = read_all(path, max_document_bytes=50)
    assert [each.text.strip() for each in documents] == ["short"]
    assert tally.skipped == {"too large": 1}


def test_outputs_of_a_notebook_are_read_where_they_are_asked_for(tmp_path: Path) -> None:
    outputs = [
        {"output_type": "stream", "text": ["1\n", "2"]},
        {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": "<Figure>"}},
        {"output_type": "error", "traceback": ["x"]},
    ]
    cells = [{"cell_type": "code", "source": ["print(1)"], "outputs": outputs}]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert texts(read_all(path)[0]) == {str(path): "print(1)"}
    told = texts(read_all(path, notebook_outputs=True)[0])
    assert told == {str(path): "print(1)\n\n1\n2\n\n<Figure>"}

import pickle
import re
from pathlib import Path
from unicodedata import normalize

import pytest
from hypothesis import given, strategies as st

from indexer.errors import IndexerError
from indexer.plugins.screening.exclusion import ExcludedPhrases, PhraseFinder, spans_of
from indexer.plugins.screening.screen import ExcludeScope, Screen, ScreenOptions

FEW = st.text("aAb\u00e9e\u0301\u00df\u1e9e \u212b\u00c5\u03b1\u0345\u4e00\U0001f600", max_size=4)
LINES = st.lists(FEW, max_size=6).map("\n".join)
PHRASES = st.lists(FEW.filter(bool), min_size=1, max_size=6)


def phrases_of(*texts: str) -> ExcludedPhrases:
    return ExcludedPhrases(texts, tuple(range(1, len(texts) + 1)))


def by_line(*texts: str, ignore_case: bool = False) -> Screen:
    return Screen(ScreenOptions(phrases_of(*texts), ExcludeScope.LINE, ignore_case))


def forms(text: str, *, ignore_case: bool) -> tuple[str, str]:
    if ignore_case:
        return text.casefold(), normalize("NFC", normalize("NFD", text).casefold())
    return text, normalize("NFC", text)


def slowly_found(texts: list[str], line: str, *, ignore_case: bool) -> set[str]:
    """Return the phrases in a line, each in either form, by asking for one after the other."""
    written, normal = forms(line, ignore_case=ignore_case)
    return {
        phrase
        for phrase in texts
        for form in forms(phrase, ignore_case=ignore_case)
        if form in written or form in normal
    }


@given(texts=PHRASES, text=LINES, ignore_case=st.booleans())
def test_lines_with_phrases_are_those_that_a_slow_search_finds(
    *, texts: list[str], text: str, ignore_case: bool
) -> None:
    hits = PhraseFinder(phrases_of(*texts), ignore_case=ignore_case).find(text)
    for number, line in enumerate(text.split("\n")):
        expected = slowly_found(texts, line, ignore_case=ignore_case)
        found = {texts[phrase - 1] for phrase in hits.get(number, set())}
        assert bool(found) == bool(expected)
        assert found <= expected
        if not ignore_case and text.isascii():  # no two phrases are one in another form
            assert found == expected
    spans = spans_of(text, hits)
    assert [text[start:end].removesuffix("\n") for start, end in spans] == [
        line for number, line in enumerate(text.split("\n")) if number in hits
    ]


@given(texts=PHRASES, text=LINES, scope=st.sampled_from(ExcludeScope), ignore_case=st.booleans())
def test_what_is_kept_holds_no_phrase_and_nothing_else_is_lost(
    *, texts: list[str], text: str, scope: ExcludeScope, ignore_case: bool
) -> None:
    screen = Screen(ScreenOptions(phrases_of(*texts), scope, ignore_case))
    screened = screen.screen("", text)
    lines = text.split("\n")
    clean = [line for line in lines if not slowly_found(texts, line, ignore_case=ignore_case)]
    if scope is ExcludeScope.DOCUMENT:
        assert screened == (("", text, "") if len(clean) == len(lines) else None)
        assert screen.tally.num_documents == (screened is None)
    else:
        assert screened is not None
        expected = "".join(line + "\n" for line in clean)
        assert screened.text in {expected, expected[:-1]}
        assert screen.tally.num_lines == len(lines) - len(clean)


def test_case_counts_unless_it_is_ignored() -> None:
    text = "keep\nPROJECT stra\u00dfe\nkeep"
    exact = by_line("project STRASSE").screen("n", text)
    folded = by_line("project STRASSE", ignore_case=True).screen("n", text)
    assert exact is not None
    assert exact.text == text
    assert folded is not None
    assert folded.text == "keep\nkeep"


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("listed", ["NFC", "NFD"])
def test_accents_may_be_composed_or_not(form: str, listed: str) -> None:
    text = "one\n" + normalize(form, "caf\u00e9 cr\u00e8me") + "\ntwo\n"  # type: ignore[arg-type]
    phrase = normalize(listed, "\u00e9 cr\u00e8")  # type: ignore[arg-type]
    screened = by_line(phrase).screen("n", text)
    assert screened is not None
    assert screened.text == "one\ntwo\n"


def test_a_phrase_is_found_as_it_is_written_too() -> None:
    screened = by_line("cafe").screen("n", "one\ncafe\u0301\ncaf\u00e9")
    assert screened is not None
    assert screened.text == "one\ncaf\u00e9"


def test_case_is_folded_between_normal_forms() -> None:
    assert by_line("\u1fb4", ignore_case=True).screen("\u0391\u0345\u0301", "text") is None


@pytest.mark.parametrize("scope", ExcludeScope)
@pytest.mark.parametrize(("name", "licence"), [("in/blue heron/x", ""), ("x", "blue heron only")])
def test_a_phrase_in_a_name_or_licence_keeps_the_document_out(
    scope: ExcludeScope, name: str, licence: str
) -> None:
    screen = Screen(ScreenOptions(phrases_of("other", "blue heron"), scope))
    assert screen.screen(name, "text", licence) is None
    assert screen.tally.documents_by_phrase == {2: 1}
    assert "heron" not in str(screen.tally.to_json()) + screen.tally.describe()
    assert screen.screen("x", "text", "free") == ("x", "text", "free")


def test_tallies_of_parts_add_up_to_that_of_the_whole() -> None:
    texts = ["one a\nb\na b", "b", "c", "a", "none"]
    whole, parts = by_line("a", "b"), by_line("a", "b")
    total = parts.take_tally()
    for number, text in enumerate(texts):
        whole.screen(f"doc{number}", text)
        parts.screen(f"doc{number}", text)
        total.add(pickle.loads(pickle.dumps(parts.take_tally())))  # noqa: S301
    assert total == whole.tally
    assert total.num_lines == 5
    assert total.lines_by_phrase == {1: 3, 2: 3}
    assert total.to_json()["places"] == {"lines with an excluded phrase": ["doc0", "doc1", "doc3"]}


def test_options_can_be_pickled_and_do_not_show_phrases() -> None:
    options = ScreenOptions(phrases_of("blue heron"), ExcludeScope.LINE, redact=True)
    assert pickle.loads(pickle.dumps(options)) == options  # noqa: S301
    assert "heron" not in repr(options)


def test_a_list_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "list"
    lines = ["# a comment", "", "  two words \r", r"\# begins with a hash", r"\\# with both", r"\d"]
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join([*lines, "caf\u00e9"]).encode())
    phrases = ExcludedPhrases.load(path)
    assert phrases.texts == (
        "two words",
        "# begins with a hash",
        r"\# with both",
        r"\d",
        "caf\u00e9",
    )
    assert phrases.lines == (3, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"good\nbad \xff\n", "line 2 of .* is not UTF-8"),
        (b"good\n\nold\rmac\n", "line 3 of .* holds a carriage return"),
        ("wide".encode("utf-16-le"), "line 1 of .* holds a NUL"),
        (b"# nothing\n\n", "lists no phrase"),
    ],
)
def test_a_list_that_cannot_be_read_whole_is_refused(
    content: bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "list"
    path.write_bytes(content)
    with pytest.raises(IndexerError, match=says):
        ExcludedPhrases.load(path)


def test_a_list_that_is_missing_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "none"
    with pytest.raises(IndexerError, match=re.escape(f"cannot read the phrases in {path}")):
        ExcludedPhrases.load(path)
    with pytest.raises(IndexerError, match="directory"):
        ExcludedPhrases.load(tmp_path)

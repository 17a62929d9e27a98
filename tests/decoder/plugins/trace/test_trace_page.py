"""Traces as pages: what is in them, and how a browser shows them."""

import gzip
import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from decoder.errors import CutTraceError, TraceFileError
from decoder.observation import ObservedPass, Times
from decoder.plugins.trace.trace import TracedStep, TraceWriter, read_as_far, read_trace
from decoder.plugins.trace.viewer.trace_page import page_of, written_passes
from decoder.plugins.trace.viewer.traced_documents import DocumentFinder
from indexer.build import build_from_texts, build_from_tokens
from indexer.reader import Index, Vocabulary
from retriever.operations.design import hash_of
from retriever.tree import DocumentOccurrence, DraftTree, Source
from tests.decoder.commands.command_line import generate, run
from tests.decoder.plugins.trace.trace_samples import made_steps
from tests.headless import Tab, browser_tab, needs_browser

pytestmark = pytest.mark.usefixtures("costs_of_earlier_tests")

NASTY = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>&amp;\u2028'\""


def nasty_steps() -> list[TracedStep]:
    """A trace in which everybody says what should be run: model, prompt, source and document."""
    steps = made_steps(40, words=[NASTY])
    place = DocumentOccurrence(NASTY, NASTY, NASTY, 3)
    return [
        replace(
            step,
            prompt_text=NASTY,
            tree=replace(step.tree, sources=[NASTY for _ in step.tree.sources]),
            evidence=[replace(each, documents=[place]) for each in step.evidence],
        )
        for step in steps
    ]


class Parts(HTMLParser):
    """The scripts and styles of a page, and its tags in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inner: dict[str, str] = {}
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        kind = dict(attrs).get("type") or ""
        self._inside = f"{tag} {kind}".strip() if tag in ("script", "style") else ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.inner[self._inside] = self.inner.get(self._inside, "") + data

    def handle_endtag(self, _tag: str) -> None:
        self._inside = ""


def data_of(page: str) -> Any:
    return json.loads(Parts(page).inner["script application/json"])


def test_the_page_holds_the_trace_and_nothing_from_elsewhere() -> None:
    steps = made_steps(50)
    page = page_of(steps, "t.jsonl")
    data = data_of(page)
    texts = data["texts"]
    shown = "".join(texts[piece] for each in data["passes"] for piece in each["pieces"])
    assert shown == "".join(step.text for step in steps)
    for step, each in zip(steps, data["passes"], strict=True):
        assert [texts[text] for text in each["texts"]] == step.tree.texts
        assert [data["sources"][s]["name"] for s in each["sources"]] == step.tree.sources
        assert each["path"] == step.path
        assert [p / 10_000 for p in each["probabilities"]] == step.tree.probabilities
        found = [(e[0], *data["documents"][e[3][0][0]], e[3][0][1]) for e in each["evidence"]]
        named = [(e.node, e.documents[0]) for e in step.evidence]
        assert found == [(n, d.index, d.name, d.licence, d.position) for n, d in named]
    assert "http:" not in re.sub(r"http://www\.w3\.org/2000/svg", "", page)
    assert "https:" not in page


def test_nobodys_text_is_markup_and_the_policy_names_the_script() -> None:
    parts, plain = Parts(page_of(nasty_steps(), NASTY, NASTY)), Parts(page_of(made_steps(5), "t"))
    assert [tag for tag, _ in parts.tags] == [tag for tag, _ in plain.tags]
    assert not any(name.startswith("on") for _, attributes in parts.tags for name in attributes)
    policy = next(a["content"] for _, a in parts.tags if a.get("http-equiv")) or ""
    assert hash_of(parts.inner["script"]) in policy
    assert hash_of(parts.inner["style"]) in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert " " + NASTY in data_of(page_of(nasty_steps(), "t"))["texts"]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_trace_that_was_cut_is_shown_as_far_as_it_goes(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(asdict(step), ensure_ascii=False) + "\n" for step in made_steps(60)]
    whole = "".join(lines).encode()
    data = gzip.compress(whole) if suffix.endswith("gz") else whole
    path, page = tmp_path / f"t.{suffix}", tmp_path / "t.html"
    for kept in (len(data) * 9 // 10, len(data) - 30):
        path.write_bytes(data[:kept])
        steps, note = read_as_far(path)
        assert 0 < len(steps) < len(lines)
        assert f"cut in the middle of line {len(steps) + 1}" in note
        with pytest.raises(CutTraceError):
            list(read_trace(path))
        assert run(monkeypatch, "trace", str(path), "--html", str(page)) == 0
        assert note in capsys.readouterr().err
        assert data_of(page.read_text())["note"] == note
        assert len(data_of(page.read_text())["passes"]) == len(steps)
    path.write_bytes(data)
    assert read_as_far(path)[1] == ""


def test_a_line_that_is_wrong_but_whole_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    line = json.dumps(asdict(made_steps(1)[0]))
    for wrong in ('{"tree": 3}', "words\n", '{"prompt"\n' + line):
        path.write_text(f"{line}\n{wrong}")
        with pytest.raises(TraceFileError) as raised:
            read_as_far(path)
        assert not isinstance(raised.value, CutTraceError)


@pytest.mark.parametrize(("page", "message"), [("/no/such/p.html", "no folder"), ("/", "a folder")])
def test_a_page_that_cannot_be_written_is_refused(
    page: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(asdict(made_steps(1)[0])) + "\n")
    assert run(monkeypatch, "trace", str(path), "--html", page) == 1
    assert message in capsys.readouterr().err


def test_a_page_is_written_without_a_trace_and_after_an_error(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    with written_passes(None, None, byte_tokenizer, []) as none:
        assert none is None
    page = tmp_path / "t.html"
    with suppress(KeyError), written_passes(None, page, byte_tokenizer, []) as writer:
        assert isinstance(writer, TraceWriter)
        nothing = DraftTree.empty()
        seen = ObservedPass(nothing, nothing, np.empty(0, np.int64), [1], Times(0.0, 0.001, 0.0))
        writer.observer(0, "words")(seen)
        raise KeyError
    assert len(data_of(page.read_text())["passes"]) == 1


def test_generate_writes_a_page(
    model_directory: Path,
    tmp_path: Path,
    byte_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By itself, and next to a trace that says the same."""
    page, trace, index = tmp_path / "t.html", tmp_path / "t.jsonl", tmp_path / "abc.index"
    build_from_texts([("letters", "abcabcabc" * 20)], index, byte_tokenizer)
    asked = "abcabc<b>abc"
    arguments = ("--prompt", asked, "--max-new-tokens", "30", "--html", str(page), "--json")
    for more in ((), ("--index", str(index), "--trace", str(trace))):
        assert generate(monkeypatch, model_directory, *arguments, *more) == 0
        report = json.loads(capsys.readouterr().out)
        data = data_of(page.read_text())
        assert len(data["passes"]) == report["num_passes"]
        assert sum(len(each["pieces"]) for each in data["passes"]) == report["num_tokens"]
        assert data["prompts"] == [{"number": 1, "text": asked}]
    assert data_of(page_of(read_trace(trace), page.stem)) == data
    assert generate(monkeypatch, model_directory, "--prompt", "x", "--html", "/no/such/p") == 1
    assert "cannot write the page /no/such/p: there is no folder" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser_tab(tmp_path_factory.mktemp("browser")) as found:
        yield found


def shown(tab: Tab, path: Path, page: str, **size: Any) -> None:
    path.write_text(page, encoding="utf-8")
    tab.show(path.as_uri(), **size)
    tab.wait("document.documentElement.dataset.ready === 'true'")


@needs_browser
@pytest.mark.parametrize("width", [380, 1600])
@pytest.mark.parametrize("num_tokens", [1, 10, 1000])
def test_a_page_fits_its_window(tab: Tab, tmp_path: Path, num_tokens: int, width: int) -> None:
    steps = made_steps(num_tokens)
    shown(tab, tmp_path / "t.html", page_of(steps, "t" * 80), width=width, dark=width == 380)
    assert tab.overflowing() == []
    text = tab.value("[...document.querySelectorAll('.token')].map(t => t.textContent).join('')")
    assert text == "".join(step.text for step in steps)
    assert tab.value("document.querySelectorAll('.token').length") == num_tokens
    for step, option in (
        (steps[-1], "document.querySelector('main section').lastChild.lastChild"),
    ):
        drafted = tab.value(f"[...{option}.querySelectorAll('.drafted')].map(t => t.className)")
        sources = [step.tree.sources[node] for node in step.path]
        assert [re.search(r"source-(\w+)", css)[1] for css in drafted] == sources  # type: ignore[index]
    assert tab.console == []
    assert {address.partition(":")[0] for address in tab.requests} <= {"file", "about"}


@needs_browser
def test_a_page_of_a_long_output_fits_a_narrow_window(tab: Tab, tmp_path: Path) -> None:
    shown(tab, tmp_path / "t.html", page_of(made_steps(10_000), "t" * 80), width=380)
    assert tab.overflowing() == []
    assert tab.value("document.querySelectorAll('.token').length") == 10_000


@needs_browser
def test_text_that_is_a_script_stays_text(tab: Tab, tmp_path: Path) -> None:
    shown(tab, tmp_path / "t.html", page_of(nasty_steps(), NASTY, NASTY), width=380)
    assert tab.value("document.title").startswith(NASTY[:20])
    assert tab.value("document.querySelectorAll('script').length") == 2
    assert tab.value("document.querySelectorAll('img, iframe, a').length") == 0
    assert tab.value("document.getElementById('note').textContent") == NASTY
    assert NASTY in tab.value("document.querySelector('.pass').textContent")
    tab.click(".pass[data-width]")
    assert NASTY[:10] in tab.value("document.querySelector('.chip b').textContent")
    assert tab.overflowing() == []
    assert tab.console == []


@needs_browser
def test_a_pass_is_opened_by_mouse_and_keyboard(tab: Tab, tmp_path: Path) -> None:
    steps = made_steps(300)
    shown(tab, tmp_path / "t.html", page_of(steps, "t.jsonl"), width=380)
    is_open = "getComputedStyle(document.getElementById('panel')).display !== 'none'"
    focused = "document.activeElement.dataset"
    assert not tab.value(is_open)
    at = next(n for n, step in enumerate(steps) if step.evidence and n > 3)
    tab.click(f"[data-pass='{at}']")
    assert tab.value(is_open)
    assert tab.value("document.getElementById('pass-heading').textContent") == f"Pass {at + 1}"
    chips = tab.value("[...document.querySelectorAll('.chip')].length")
    assert chips == len(steps[at].tree.tokens)
    accepted = tab.value(
        "[...document.querySelectorAll('.chip.accepted')].map(c => +c.dataset.node).sort()"
    )
    assert sorted(accepted) == sorted(steps[at].path)
    document = steps[at].evidence[0].documents[0]
    listed = tab.value("document.getElementById('documents').textContent")
    assert document.name in listed
    assert (document.licence or "licence unknown") in listed
    tab.press("Escape")
    assert not tab.value(is_open)
    tab.press("ArrowRight")
    assert tab.value(f"{focused}.pass") == str(at + 1)
    tab.press("Home")
    assert tab.value(f"{focused}.pass") == "0"
    tab.press("ArrowDown")
    assert int(tab.value(f"{focused}.pass")) > 0
    tab.press("ArrowUp", "End", "ArrowRight")
    assert tab.value(f"{focused}.pass") == str(len(steps) - 1)
    assert tab.value("document.querySelectorAll('[role=option][tabindex=\"0\"]').length") == 1
    assert tab.overflowing() == []


@needs_browser
def test_a_tree_is_walked_by_keyboard(tab: Tab, tmp_path: Path) -> None:
    steps = made_steps(300)
    shown(tab, tmp_path / "t.html", page_of(steps, "t.jsonl"))
    at = max(range(len(steps)), key=lambda n: len(steps[n].path))
    tree = steps[at].tree
    assert tab.value("document.querySelector('.pass[aria-selected=true]').dataset.pass") == str(at)
    tab.value("document.querySelector('.pass[aria-selected=true]').focus()")
    tab.press("Enter")
    node = "Number(document.activeElement.dataset.node)"
    assert tab.value(node) == steps[at].path[-1]
    for expected in steps[at].path[-2::-1]:
        tab.press("ArrowLeft")
        assert tab.value(node) == expected
    tab.press("ArrowRight")
    assert tree.parents[tab.value(node)] == steps[at].path[0]
    label = tab.value("document.activeElement.getAttribute('aria-label')")
    assert f"probability {tree.probabilities[tab.value(node)]:.2f}" in label
    tab.press("Escape")
    assert tab.value("document.activeElement.dataset.pass") == str(at)


@needs_browser
def test_an_address_names_a_pass(tab: Tab, tmp_path: Path) -> None:
    path = tmp_path / "named.html"
    path.write_text(page_of(made_steps(60), "t.jsonl"))
    for name, shown_as in (("3", "Pass 3"), ("0", "Pass "), ("x", "Pass ")):
        tab.show(f"{path.as_uri()}?{name}#{name}")
        tab.wait("document.documentElement.dataset.ready === 'true'")
        assert tab.value("document.getElementById('pass-heading').textContent").startswith(shown_as)
    assert tab.console == []


@needs_browser
def test_the_timeline_is_a_slider(tab: Tab, tmp_path: Path) -> None:
    steps = made_steps(300)
    shown(tab, tmp_path / "t.html", page_of(steps, "t.jsonl"))
    tab.value("document.getElementById('timeline').focus()")
    tab.press("Home", "ArrowRight")
    now = "document.getElementById('timeline').getAttribute('aria-valuenow')"
    assert tab.value(now) == "2"
    assert tab.value("document.getElementById('pass-heading').textContent") == "Pass 2"
    tab.press("End")
    assert tab.value(now) == str(len(steps))


TEXTS = [[5, 6, 7, 8, 9, number, 6, 7, 8, number + 1, 9, 5] for number in range(10, 14)]


def test_documents_are_those_that_hold_the_longest_match(tmp_path: Path) -> None:
    """Against a search through all documents by brute force."""
    path, rng = tmp_path / "corpus", random.Random(5)
    build_from_tokens(
        ((f"text-{n}", text) for n, text in enumerate(TEXTS)), path, Vocabulary(50, "ab" * 32)
    )
    with Index.open(path) as opened:
        for _ in range(50):
            context = [rng.randint(5, 14) for _ in range(3)] + rng.choice(TEXTS)[:4]
            drafted = [rng.randint(5, 14) for _ in range(3)]
            tree = DraftTree.checked(
                drafted,
                [-1, 0, 1],
                [0.9, 0.8, 0.7],
                [Source.CORPUS, Source.CONTEXT, Source.PHRASES],
            )
            found = DocumentFinder([opened]).evidence(context, tree)
            expected = [
                (node, *longest)
                for node in (0, 2)
                if (longest := held(context, drafted[: node + 1]))
            ]
            assert [(e.node, e.match_length, e.count) for e in found] == expected
            for each in found:
                ngram = (context + drafted[: each.node + 1])[-each.match_length - 1 :]
                for at in each.documents:
                    text = TEXTS[int(at.name.removeprefix("text-"))]
                    assert text[at.position - each.match_length : at.position + 1] == ngram
        assert DocumentFinder([]).evidence(context, tree) == []


def held(context: list[int], path: list[int]) -> tuple[int, int] | None:
    """Return how much of a context stands before a path in the texts, and how often; if any."""
    for matched in range(len(context), -1, -1):
        ngram = context[len(context) - matched :] + path
        count = sum(
            text[at : at + len(ngram)] == ngram for text in TEXTS for at in range(len(text))
        )
        if count and len(ngram) > 1:
            return len(ngram) - 1, count
    return None

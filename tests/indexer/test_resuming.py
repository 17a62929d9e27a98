"""A build that was killed or failed is gone on with: the same bytes, and nothing made twice."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from indexer.build import BuildOptions, build_from_index, build_from_texts, build_index
from indexer.build_report import BuildReport, BuildTally, ConversationTally, ScreenTally
from indexer.errors import IndexBusyError, IndexerError
from indexer.format.output import new_index_folder
from indexer.plugins.screening.exclusion import ExcludedPhrases
from indexer.plugins.screening.screen import ScreenOptions
from indexer.sources import SourceOptions
from indexer.stages import gathering, segments
from indexer.stages.tokenise import tokenise
from tests.indexer.engines.corpora import save_byte_tokenizer, write_corpus
from tests.indexer.index_files import contents_of
from tests.retriever.warm_interpreter import WarmProcess, start

ROOT = Path(__file__).parents[2]
OPTIONS = BuildOptions(SourceOptions(block_bytes=1 << 14), 12_000, resume=True)

Build = Callable[..., BuildReport]
Start = Callable[..., WarmProcess]


class PlannedError(Exception):
    """Ends a build at a planned moment."""


def fail(*_: object, **__: object) -> None:
    raise PlannedError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts that no test changes."""
    folder = write_corpus(tmp_path_factory.mktemp("texts") / "corpus", 20, 400)
    (folder / "secret.txt").write_text("a secret " * 40)
    return folder


@pytest.fixture
def own_corpus(corpus: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(corpus, tmp_path / "corpus")


@pytest.fixture
def build(corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Build:
    def run(
        name: str = "index", options: BuildOptions = OPTIONS, sources: Path = corpus
    ) -> BuildReport:
        return build_index([sources], tmp_path / name, tokenizer, options)

    return run


@pytest.fixture
def fail_late(build: Build, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a build that fails once all but its phrases is made."""

    def run(options: BuildOptions = OPTIONS, **given: Path) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(gathering, "write_phrases", fail)
            with pytest.raises(PlannedError):
                build(options=options, **given)

    return run


@pytest.fixture(scope="module")
def whole(
    corpus: Path, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """What a build makes that nothing disturbs and that keeps nothing."""
    path = tmp_path_factory.mktemp("whole") / "index"
    build_index([corpus], path, tokenizer, replace(OPTIONS, resume=False))
    return contents_of(path)


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".index."))


@pytest.mark.parametrize("resume", [False, True])
def test_what_fails_is_kept_only_where_it_is_to_be_resumed(
    tmp_path: Path, fail_late: Callable[..., None], *, resume: bool
) -> None:
    fail_late(replace(OPTIONS, resume=resume))
    assert bool(left_over(tmp_path)) == resume
    assert not (tmp_path / "index").exists()


def test_nothing_that_is_done_is_done_again(
    build: Build,
    tmp_path: Path,
    whole: dict[str, bytes],
    fail_late: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_late()
    with monkeypatch.context() as patched:
        patched.setattr(gathering, "tokenise", fail)
        patched.setattr(segments, "sort_suffixes", fail)
        report = build()
    assert contents_of(tmp_path / "index") == whole
    assert left_over(tmp_path) == []
    undisturbed = build("again", replace(OPTIONS, resume=False)).to_json()
    figures = ("documents", "tokens", "segments", "bytes", "skipped", "skipped_places")
    assert {name: report.to_json()[name] for name in figures} == {
        name: undisturbed[name] for name in figures
    }
    assert report.tally.skipped == {"exact duplicate": 1}


def test_a_failure_in_the_middle_of_a_stage_keeps_what_was_done(
    build: Build, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    sort = segments.sort_suffixes

    def failing_third(tokens: Any) -> Any:
        calls.append(len(tokens))
        return fail() if len(calls) == 3 else sort(tokens)

    monkeypatch.setattr(segments, "sort_suffixes", failing_third)
    with pytest.raises(PlannedError):
        build()
    build()
    assert contents_of(tmp_path / "index") == whole
    num_segments = len([name for name in whole if name.endswith("/suffixes")])
    assert num_segments > 3
    assert len(calls) == num_segments + 1


def test_only_what_changed_is_read_again(
    build: Build,
    own_corpus: Path,
    tmp_path: Path,
    fail_late: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_late(sources=own_corpus)
    changed = own_corpus / "007.txt"
    changed.write_text(changed.read_text().upper())  # of the same size
    os.utime(changed, ns=(1, 1))
    tokenised: list[Any] = []

    def counted(*arguments: Any) -> Any:
        tokenised.append(arguments)
        return tokenise(*arguments)

    monkeypatch.setattr(gathering, "tokenise", counted)
    build(sources=own_corpus)
    assert len(tokenised) == 1
    build("fresh", replace(OPTIONS, resume=False), own_corpus)
    assert contents_of(tmp_path / "index") == contents_of(tmp_path / "fresh")


@pytest.mark.parametrize(
    "other",
    [
        replace(OPTIONS, segment_tokens=30_000),
        replace(OPTIONS, keep_texts=True),
        replace(OPTIONS, keep_duplicates=True),
        replace(OPTIONS, screen=ScreenOptions(ExcludedPhrases(("secret",), (1,)))),
        replace(OPTIONS, sources=SourceOptions(block_bytes=1 << 15)),
    ],
    ids=["division", "texts", "duplicates", "phrases", "blocks"],
)
def test_other_options_take_over_nothing_that_depends_on_them(
    build: Build, tmp_path: Path, other: BuildOptions, fail_late: Callable[..., None]
) -> None:
    for options in (other, OPTIONS):
        fail_late(options)
    build(options=other)
    build("fresh", replace(other, resume=False))
    assert contents_of(tmp_path / "index") == contents_of(tmp_path / "fresh")


def test_another_tokenizer_takes_over_nothing(
    corpus: Path,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    fail_late: Callable[..., None],
    whole: dict[str, bytes],
) -> None:
    """As many tokens, with other numbers: what was kept could be read as if it were its own."""
    fail_late()
    stated = json.loads(str(tokenizer.backend_tokenizer.to_str()))
    numbers = stated["model"]["vocab"]
    stated["model"]["vocab"] = {name: len(numbers) - 1 - at for name, at in numbers.items()}
    core = Tokenizer.from_str(json.dumps(stated))
    other: Any = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")  # type: ignore[no-untyped-call]  # noqa: S106
    build_index([corpus], tmp_path / "index", other, OPTIONS)
    build_index([corpus], tmp_path / "fresh", other, replace(OPTIONS, resume=False))
    assert contents_of(tmp_path / "index") == contents_of(tmp_path / "fresh")
    assert contents_of(tmp_path / "index") != whole


def test_a_build_without_resuming_removes_what_was_kept(
    build: Build, tmp_path: Path, whole: dict[str, bytes], fail_late: Callable[..., None]
) -> None:
    fail_late()
    build(options=replace(OPTIONS, resume=False))
    assert left_over(tmp_path) == []
    assert contents_of(tmp_path / "index") == whole


def test_a_build_that_is_under_way_is_not_taken_over(build: Build, tmp_path: Path) -> None:
    with new_index_folder(tmp_path / "index", overwrite=True, resume=True) as folder:
        (folder / "mark").touch()
        with pytest.raises(IndexBusyError, match="is being built by process"):
            build()
        assert [path.name for path in folder.iterdir()] == ["mark"]


def test_damaged_notes_and_leftovers_are_made_again(
    build: Build, tmp_path: Path, whole: dict[str, bytes], fail_late: Callable[..., None]
) -> None:
    fail_late()
    notes = sorted(tmp_path.glob(".index.partial-*/.scratch/*/*.done"))
    assert len(notes) > 4
    for note, content in zip(
        notes, (b"", b"[]", b"{", b'{"key": "0", "result": {}}'), strict=False
    ):
        note.write_bytes(content)
    begun = notes[0].with_name("00000099.abcd")
    begun.mkdir()
    (begun / "tokens").write_bytes(b"begun")
    build()
    assert contents_of(tmp_path / "index") == whole
    assert left_over(tmp_path) == []


def test_an_index_that_is_there_stays_until_the_resumed_one_is_whole(
    build: Build, own_corpus: Path, tmp_path: Path, fail_late: Callable[..., None]
) -> None:
    build(sources=own_corpus)
    before = contents_of(tmp_path / "index")
    (own_corpus / "more.txt").write_text("more " * 50)
    fail_late(replace(OPTIONS, overwrite=True), sources=own_corpus)
    assert contents_of(tmp_path / "index") == {**before, "writer.lock": b""}
    with pytest.raises(IndexerError, match="--overwrite"):
        build(sources=own_corpus)
    build(options=replace(OPTIONS, overwrite=True), sources=own_corpus)
    assert contents_of(tmp_path / "index") != before
    assert left_over(tmp_path) == []


def test_only_builds_of_sources_are_resumed(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, cli: Any
) -> None:
    texts = [("a", "some text"), ("b", "other text")]
    build_from_texts(texts, tmp_path / "index", tokenizer, replace(OPTIONS, keep_texts=True))
    assert not (tmp_path / "index" / ".scratch").exists()
    options = replace(OPTIONS, overwrite=True)
    build_from_index(tmp_path / "index", tmp_path / "again", tokenizer, options)
    assert not (tmp_path / "again" / ".scratch").exists()
    words = ("build", "--from", tmp_path / "index", "--output", tmp_path / "more", "--resume")
    status, _, stderr = cli(*words)
    assert status == 2
    assert "--resume is for sources" in stderr


def test_counts_of_a_task_are_kept_whole() -> None:
    tally = BuildTally(num_bytes=5, num_bytes_read=7)
    tally.drop("not text", "a.txt", "name the encoding")
    tally.skip("empty", "b.txt")
    assert round_trip(tally) == tally
    tally.screened = ScreenTally()
    tally.screened.exclude_document([3], "a")
    tally.screened.exclude_lines([[3], [4]], "b")
    tally.screened.redact(["key"], "c")
    counted = ConversationTally("assistant turns", 3, 2, missing_field="text")
    counted.left_out["image"] += 1
    tally.count_conversation("a.jsonl", "messages", counted)
    assert round_trip(tally) == tally


def round_trip(tally: BuildTally) -> BuildTally:
    form = TypeAdapter(BuildTally)
    return form.validate_json(json.dumps(form.dump_python(tally, mode="json")))


@pytest.fixture
def start_build(tmp_path: Path) -> Start:
    """Starts a build of several blocks and segments in a process of its own."""
    tokenizer = save_byte_tokenizer(tmp_path / "tokenizer")
    corpus = tmp_path / "corpus.jsonl"
    folder = write_corpus(tmp_path / "texts", 40, 6000)
    texts = (path.read_text() for path in sorted(folder.iterdir()))
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = ("-m", "indexer", "build", corpus, "--tokenizer", tokenizer)
    sizes = ("--segment-tokens", "130_000", "--workers", 2)

    def run(name: str, *options: str) -> WarmProcess:
        words = (*command, *sizes, "--output", tmp_path / name, *options)
        return start(*words, cwd=ROOT, leads_session=True)

    return run


@pytest.mark.faults
def test_a_build_killed_in_any_stage_is_gone_on_with(start_build: Start, tmp_path: Path) -> None:
    assert start_build("whole").wait() == 0
    for stage in ("reading", "sorting", "counting"):  # each goes on with what the one before left
        with start_build("index", "--resume") as killed:
            pattern = f".index.partial-*/.scratch/{stage}*/*"
            while not [*tmp_path.glob(pattern)] and killed.poll() is None:
                time.sleep(0.002)
            os.killpg(killed.pid, signal.SIGKILL)
        assert killed.returncode == -signal.SIGKILL, stage
        assert left_over(tmp_path)
        assert not (tmp_path / "index").exists()
    assert start_build("index", "--resume").wait() == 0
    assert contents_of(tmp_path / "index") == contents_of(tmp_path / "whole")
    assert left_over(tmp_path) == []


@pytest.mark.faults
def test_a_build_that_is_killed_again_and_again_comes_to_its_end(
    start_build: Start, tmp_path: Path
) -> None:
    rng = random.Random(0)
    began = time.monotonic()
    assert start_build("whole").wait() == 0
    seconds = time.monotonic() - began
    kills = 0
    status = None
    while status is None:
        with start_build("index", "--resume") as build:
            try:
                status = build.wait(seconds * rng.uniform(0.3, 0.9))
            except subprocess.TimeoutExpired:
                # Half of the time the builder alone: its workers end a moment later.
                kill = os.killpg if rng.random() < 0.5 else os.kill
                kill(build.pid, signal.SIGKILL)
                kills += 1
    assert status == 0
    assert kills >= 1
    assert contents_of(tmp_path / "index") == contents_of(tmp_path / "whole")
    assert left_over(tmp_path) == []

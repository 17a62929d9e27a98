"""Indexes that change while they are drafted from."""

import logging
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from indexer.build import BuildOptions, build_from_tokens
from indexer.reader import Vocabulary
from retriever.client.strict import RemoteDrafter
from retriever.drafter import FORGOTTEN, Drafter, DraftRequest, SequenceOptions
from retriever.kernels.layout import Tables
from retriever.predict.provenance import trace_nodes
from retriever.sessions import explaining, refreshed_corpora
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.explaining import explain
from retriever.tree import DraftTree, Source
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.libraries import LENGTH, NUM_WORDS, Library, document, word_tokenizer

SEEN = 12
"""Tokens of a document that a sequence begins with."""

REFRESH_S = 0.02


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return word_tokenizer()


@pytest.fixture
def library(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Library:
    return Library(tmp_path, tokenizer)


@pytest.fixture
def drafter(library: Library) -> Iterator[EmbeddedDrafter]:
    made = EmbeddedDrafter.open_indexes([library.path])
    yield made
    made.shut_down()


def draft(drafter: Drafter, session: str, new: list[int], length: int) -> DraftTree:
    return drafter.draft([DraftRequest(session, np.array(new, np.int32), length, 16)])[0]


def is_known(tree: DraftTree, number: int, seen: int = SEEN) -> bool:
    """Whether a tree goes on as a document does."""
    return len(tree.follow(np.array(document(number)[seen:]))) > 4


def assert_fresh(tree: DraftTree, tokens: list[int], *paths: Path) -> None:
    """Check that a drafter that was just opened would have drafted the same."""
    fresh = EmbeddedDrafter.open_indexes(paths)
    expected = fresh.draft_context(tokens, 16)
    fresh.shut_down()
    assert len(expected) > 0
    for name in ("token_ids", "parents", "probabilities", "sources"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(expected, name))


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_session_goes_on_across_additions_removals_and_compaction(
    library: Library, drafter: EmbeddedDrafter
) -> None:
    tokens = document(100)
    drafter.open("s", tokens[:SEEN], FORGOTTEN)
    assert not is_known(draft(drafter, "s", [], SEEN), 100)

    library.add(100, 101)
    assert not is_known(draft(drafter, "s", [tokens[SEEN]], SEEN + 1), 100, SEEN + 1)
    assert drafter.refresh()
    tree = draft(drafter, "s", [tokens[SEEN + 1]], SEEN + 2)
    assert is_known(tree, 100, SEEN + 2)
    assert tree.sources[0] == Source.CORPUS
    assert_fresh(tree, tokens[: SEEN + 2], library.path)

    library.compact()
    assert drafter.refresh()
    tree = draft(drafter, "s", tokens[SEEN + 2 : SEEN + 5], SEEN + 5)
    assert is_known(tree, 100, SEEN + 5)
    assert_fresh(tree, tokens[: SEEN + 5], library.path)

    library.remove(100)
    assert drafter.refresh()
    for seen in range(SEEN + 6, LENGTH):
        tree = draft(drafter, "s", [tokens[seen - 1]], seen)
        assert len(tree.follow(np.array(tokens[seen:]))) < 2
    assert_fresh(tree, tokens[:seen], library.path)
    assert not drafter.refresh()
    assert drafter.stats().refresh_failures == 0


def test_a_session_that_matched_nothing_finds_what_is_added(
    library: Library, drafter: EmbeddedDrafter
) -> None:
    """How long a match can be is known from the draft before: not of another corpus."""
    tokens = document(200)
    drafter.open("s", tokens[:40], FORGOTTEN)
    draft(drafter, "s", [], 40)
    library.add(200)
    drafter.refresh()
    tree = draft(drafter, "s", [], 40)
    assert is_known(tree, 200, 40)
    assert_fresh(tree, tokens[:40], library.path)


def test_an_index_that_took_the_place_of_another_is_drafted_from(
    library: Library, drafter: EmbeddedDrafter
) -> None:
    library.build(range(50, 60))
    assert drafter.refresh()
    assert is_known(drafter.draft_context(document(55)[:SEEN], 16), 55)
    assert not is_known(drafter.draft_context(document(5)[:SEEN], 16), 5)
    assert drafter.stats().indexes[0].num_documents == 10


def test_the_old_snapshot_is_let_go_of(library: Library, drafter: EmbeddedDrafter) -> None:
    drafter.open("idle", document(5)[:SEEN])
    draft(drafter, "idle", [], SEEN)
    library.remove(5)
    library.add(100)
    assert 0 in library.snapshots()
    assert "00000000" in library.segments()
    old = weakref.ref(drafter.stats().indexes[0])
    drafter.refresh()
    assert old() is None
    library.add(101)
    assert library.snapshots() == [2, 3]
    assert library.segments() == ["00000001", "00000002", "00000003"]


def test_who_still_uses_the_old_snapshot_keeps_it(
    library: Library, drafter: EmbeddedDrafter
) -> None:
    held = drafter.stats().indexes
    library.remove(5)
    drafter.refresh()
    library.add(100)
    library.add(101)
    assert 0 in library.snapshots()
    assert held[0].document_at(0, 0).name.endswith("document-0.txt")
    del held
    library.add(102)
    assert 0 not in library.snapshots()


def test_what_is_explained_is_the_corpus_that_was_drafted_from(
    library: Library, drafter: EmbeddedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace_late(*arguments: Any) -> Any:
        library.remove(5)
        assert drafter.refresh()
        return trace_nodes(*arguments)

    monkeypatch.setattr(explaining, "trace_nodes", trace_late)
    explanation = explain(drafter, document(5)[:SEEN], 16)
    assert is_known(explanation.tree, 5)
    names = [each.name for node in explanation.nodes for each in node.documents]
    assert any(name.endswith("document-5.txt") for name in names)
    assert not is_known(drafter.draft_context(document(5)[:SEEN], 16), 5)


def tables_of(drafter: EmbeddedDrafter) -> Tables:
    """The phrase tables that a sequence would be drafted from."""
    return drafter.state.prepare(document(8)[:SEEN]).databases.corpus.tables


def test_only_what_changed_is_opened_anew(
    library: Library, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    (tmp_path / "other").mkdir()
    other = Library(tmp_path / "other", tokenizer, range(300, 340))
    drafter = EmbeddedDrafter.open_indexes([library.path, other.path])
    before, tables = drafter.stats().indexes, tables_of(drafter)
    other.add(400)
    assert drafter.refresh()
    assert drafter.stats().indexes[0] is before[0]
    assert drafter.stats().indexes[1].segments[0] is before[1].segments[0]
    assert tables_of(drafter) is tables  # few documents more are not counted at once
    assert is_known(drafter.draft_context(document(400)[:SEEN], 16), 400)
    other.compact()
    library.remove(7)
    assert drafter.refresh()
    assert tables_of(drafter) is not tables
    for number in (8, 320, 400):
        tokens = document(number)[:SEEN]
        tree = drafter.draft_context(tokens, 16)
        assert_fresh(tree, tokens, library.path, other.path)
    drafter.shut_down()


def truncate(library: Library) -> None:
    library.add(100)
    (library.path / "segments" / "00000001" / "tokens").write_bytes(b"\0")


def garble(library: Library) -> None:
    library.add(100)
    (library.path / "catalog" / "00000001").write_bytes(b"{}")


def empty(library: Library) -> None:
    for path in (library.path / "catalog").iterdir():
        path.unlink()


def take_away(library: Library) -> None:
    library.path.rename(library.path.with_name("elsewhere"))


def replace_by_another_vocabulary(library: Library) -> None:
    options = BuildOptions(overwrite=True)
    build_from_tokens([("d", [1, 2])], library.path, Vocabulary(NUM_WORDS, "cd" * 32), options)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What refreshing said; threads of other tests may say something, too."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == refreshed_corpora.__name__
    ]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "has 1 bytes and should have"),
        (garble, "is damaged"),
        (empty, "holds no snapshot"),
        (take_away, "there is no index at"),
        (replace_by_another_vocabulary, "for another tokenizer"),
    ],
)
def test_what_cannot_be_opened_leaves_drafts_as_they_were(
    library: Library,
    drafter: EmbeddedDrafter,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Library], None],
    reason: str,
) -> None:
    drafter.open("s", document(5)[:SEEN], FORGOTTEN)
    before = draft(drafter, "s", [], SEEN)
    damage(library)
    with caplog.at_level(logging.INFO):
        assert not drafter.refresh()
        assert not drafter.refresh()
    assert drafter.stats().refresh_failures == 2
    (message,) = told(caplog)
    assert reason in message
    np.testing.assert_array_equal(draft(drafter, "s", [], SEEN).token_ids, before.token_ids)
    shutil.rmtree(library.path, ignore_errors=True)
    library.build(range(100, 110))
    assert drafter.refresh()
    assert is_known(drafter.draft_context(document(104)[:SEEN], 16), 104)
    assert not drafter.refresh()
    assert drafter.stats().refresh_failures == 2


def test_an_index_that_came_back_is_what_it_was(library: Library, drafter: EmbeddedDrafter) -> None:
    before = drafter.stats().indexes
    take_away(library)
    drafter.refresh()
    library.path.with_name("elsewhere").rename(library.path)
    assert not drafter.refresh()
    assert drafter.stats().refresh_failures == 1
    assert drafter.stats().indexes == before


def test_phrase_tables_that_cannot_be_added_up_leave_drafts_as_they_were(
    library: Library,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "other").mkdir()
    other = Library(tmp_path / "other", tokenizer, range(300, 340))
    drafter = EmbeddedDrafter.open_indexes([library.path, other.path])
    before = drafter.stats().indexes
    other.remove(301)
    starts = other.path / "phrases" / "00000001" / "starts2"
    content = np.fromfile(starts, "<u4")
    content[3:9] = content[3:9][::-1] + np.arange(6, 0, -1, dtype="<u4")
    starts.write_bytes(content.tobytes())
    assert not drafter.refresh()
    assert "phrase tables of an index are damaged" in caplog.text
    assert drafter.stats().indexes == before
    assert is_known(drafter.draft_context(document(301)[:SEEN], 16), 301)
    other.add(400)
    other.add(401)
    assert 1 not in other.snapshots()  # the unusable snapshot is not held
    drafter.shut_down()


def test_threads_draft_while_snapshots_change(library: Library) -> None:
    drafter = EmbeddedDrafter.open_indexes([library.path], refresh_s=REFRESH_S)
    done = threading.Event()

    def keep_drafting(thread: int) -> int:
        num_drafts = 0
        while not done.is_set():
            number = num_drafts % 40  # these stay
            tokens = document(number)
            name = f"{thread}-{num_drafts}"
            drafter.open(name, tokens[:SEEN], SequenceOptions(remember=num_drafts % 3 == 0))
            for seen in range(SEEN + 1, SEEN + 6):
                assert is_known(draft(drafter, name, [tokens[seen - 1]], seen), number, seen)
                num_drafts += 1
            assert len(drafter.draft_context(tokens[:SEEN], 16)) > 0
            drafter.close(name)
        return num_drafts

    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(keep_drafting, thread) for thread in range(3)]
        try:
            for number in range(100, 102):
                change(library, drafter, number)
        finally:
            done.set()
        assert all(each.result() > 10 for each in running)
    assert drafter.stats().refresh_failures == 0
    drafter.shut_down()


def change(library: Library, drafter: EmbeddedDrafter, number: int) -> None:
    """Add, merge and remove, and see each happen in the drafts of another thread's refreshes."""
    tokens = document(number)[:SEEN]
    library.add(number)
    eventually(lambda: is_known(drafter.draft_context(tokens, 16), number))
    library.compact()
    assert is_known(drafter.draft_context(tokens, 16), number)
    library.remove(number)
    eventually(lambda: not is_known(drafter.draft_context(tokens, 16), number))


def refreshing_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "foredraft-refresh"}


def test_no_thread_is_left_after_the_end(library: Library) -> None:
    before = refreshing_threads()
    drafter = EmbeddedDrafter.open_indexes([library.path])
    assert refreshing_threads() == before
    drafter.shut_down()
    drafter = EmbeddedDrafter.open_indexes([library.path], refresh_s=REFRESH_S)
    assert len(refreshing_threads() - before) == 1
    drafter.shut_down()
    assert not refreshing_threads() - before
    library.add(100)
    assert not drafter.refresh()
    library.add(101)
    assert 0 not in library.snapshots()


def test_the_thread_outlives_a_refresh_that_fails(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = EmbeddedDrafter.open_indexes([library.path], refresh_s=REFRESH_S)
    with monkeypatch.context() as patched:
        patched.setattr(refreshed_corpora, "rehearse", lambda *_: 1 // 0)
        library.add(100)
        eventually(lambda: drafter.stats().refresh_failures > 1)
    eventually(lambda: is_known(drafter.draft_context(document(100)[:SEEN], 16), 100))
    assert "ZeroDivisionError" in caplog.text
    drafter.shut_down()
    library.add(101)
    library.add(102)
    assert 1 not in library.snapshots()


def test_a_service_drafts_from_what_its_index_becomes(library: Library) -> None:
    process, address = start_service(
        "--index", str(library.path), "--address", "127.0.0.1:0", "--refresh", str(REFRESH_S)
    )
    tokens = document(100)
    try:
        with RemoteDrafter(address, timeout_s=10) as remote:
            remote.open("s", tokens[:SEEN], FORGOTTEN)
            (before,) = remote.list_indexes()
            library.add(100)
            eventually(lambda: is_known(draft(remote, "s", [], SEEN), 100))
            (after,) = remote.list_indexes()
            assert (before.snapshot, after.snapshot) == (0, 1)
            assert after.num_documents == before.num_documents + 1
            tree = draft(remote, "s", [tokens[SEEN]], SEEN + 1)
            assert_fresh(tree, tokens[: SEEN + 1], library.path)
            library.remove(100)
            eventually(lambda: not is_known(draft(remote, "s", [], SEEN + 1), 100, SEEN + 1))
    finally:
        stop_service(process)

"""What an operator does with a drafter that is at work."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from indexer.build import build_from_tokens
from indexer.errors import IndexerError, IndexNotFoundError, TokenizerMismatchError
from indexer.reader import Index, Vocabulary
from retriever.drafter import DraftRequest, SequenceOptions
from retriever.errors import (
    InvalidRequestError,
    LimitExceededError,
    NotPossibleError,
    StateError,
    UnknownIndexError,
    UnknownSessionError,
)
from retriever.limits import CHANGEABLE_LIMITS, Limits
from retriever.plugins.admin.administration import (
    Administration,
    SessionFilter,
)
from retriever.sessions.bindings import BoundPaths
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.service_face import ServiceFace
from retriever.tree import DraftTree
from retriever.v1 import admin_pb2 as pb

NO_TOKENS = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, vocabulary: Vocabulary) -> list[Path]:
    """Two more indexes of the same vocabulary, each of texts of its own."""
    folder = tmp_path_factory.mktemp("others")
    paths = []
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        phrases = [rng.integers(0, 50, 12).tolist() for _ in range(15)]
        documents = [
            (f"{seed}-{i}", [t for j in rng.integers(0, 15, 6) for t in phrases[j]])
            for i in range(30)
        ]
        paths.append(folder / f"other-{seed}")
        build_from_tokens(documents, paths[-1], vocabulary)
    return paths


def text_of(path: Path) -> np.ndarray:
    with_separators = Index.open(path).segments[0].tokens
    return with_separators[with_separators < 50].astype(np.int32)


def contexts_of(paths: list[Path]) -> list[np.ndarray]:
    return [text_of(path)[at : at + 20] for path in paths for at in range(0, 600, 37)]


def trees(drafter: EmbeddedDrafter, contexts: list[np.ndarray], tenant: str = "") -> list[object]:
    return [form(drafter.draft_context(each, 24, tenant=tenant)) for each in contexts]


def form(tree: DraftTree) -> object:
    return (
        tree.token_ids.tolist(),
        tree.parents.tolist(),
        tree.probabilities.tolist(),
        tree.sources.tolist(),
    )


def reports(drafter: EmbeddedDrafter, **wanted: object) -> list[pb.SessionInfo]:
    chosen = SessionFilter(**wanted)  # type: ignore[arg-type]
    return [each for part in Administration(drafter.state).sessions(chosen) for each in part]


def test_an_attached_index_is_drafted_from_as_one_of_the_start(
    drafter: EmbeddedDrafter, index: Path, others: list[Path]
) -> None:
    contexts = contexts_of([index, *others])
    before = trees(drafter, contexts)
    Administration(drafter.state).attach(str(others[0]))
    Administration(drafter.state).attach(str(others[1]), "acme")
    as_started = EmbeddedDrafter.open_indexes(
        [index, others[0]], bound=BoundPaths({"acme": [others[1]]})
    )
    for tenant in ("", "acme", "other"):
        assert trees(drafter, contexts, tenant) == trees(as_started, contexts, tenant)
    assert trees(drafter, contexts) != before
    assert trees(drafter, contexts, "acme") != trees(drafter, contexts, "other")
    Administration(drafter.state).detach(str(others[0]))
    assert trees(drafter, contexts) == before
    assert trees(drafter, contexts, "acme") != before
    Administration(drafter.state).detach(str(others[1]), "acme")
    assert trees(drafter, contexts, "acme") == before
    as_started.shut_down()


def test_a_shared_index_comes_before_those_of_tenants_for_these_too(
    drafter: EmbeddedDrafter, index: Path, others: list[Path]
) -> None:
    Administration(drafter.state).attach(str(others[1]), "acme")
    Administration(drafter.state).attach(str(others[0]))
    paths = [each.path for each in ServiceFace(drafter.state).indexes_of("acme")]
    assert paths == [index, others[0], others[1]]
    attached = [(each.index.path, each.tenant) for each in Administration(drafter.state).indexes()]
    assert attached == [(index, None), (others[0], None), (others[1], "acme")]
    assert [each.tenant for each in Administration(drafter.state).indexes("other")] == [None, None]


def test_open_sessions_go_on_with_what_is_attached_then(
    drafter: EmbeddedDrafter, others: list[Path]
) -> None:
    text = text_of(others[0])
    drafter.open("s", text[:12])
    (without,) = drafter.draft([DraftRequest("s", NO_TOKENS, 12, 24)])
    Administration(drafter.state).attach(str(others[0]))
    (with_it,) = drafter.draft([DraftRequest("s", NO_TOKENS, 12, 24)])
    assert form(with_it) == form(drafter.draft_context(text[:12], 24)) != form(without)
    Administration(drafter.state).detach(str(others[0]))
    (again,) = drafter.draft([DraftRequest("s", NO_TOKENS, 12, 24)])
    assert form(again) == form(without)


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_a_detached_index_is_closed_once_nothing_drafts_from_it(
    drafter: EmbeddedDrafter, others: list[Path], tenant: str | None
) -> None:
    drafter.open("s", text_of(others[0])[:12], SequenceOptions(tenant=tenant or ""))
    Administration(drafter.state).attach(str(others[0]), tenant)
    drafter.draft([DraftRequest("s", NO_TOKENS, 12, 8)])
    assert held(others[0]) > 0
    Administration(drafter.state).detach(str(others[0]), tenant)
    assert held(others[0]) == 0


def held(index: Path) -> int:
    """Count the descriptors that hold a snapshot of an index."""
    count = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            count += each.readlink().is_relative_to(index)
    return count


def test_what_cannot_be_attached_is_refused_and_changes_nothing(
    drafter: EmbeddedDrafter, index: Path, others: list[Path], tmp_path: Path
) -> None:
    administration = Administration(drafter.state)
    administration.attach(str(others[1]), "acme")
    contexts = contexts_of([index, *others])
    before = trees(drafter, contexts), trees(drafter, contexts, "acme")
    foreign = tmp_path / "foreign"
    build_from_tokens([("d", [1, 2, 3, 4] * 5)], foreign, Vocabulary(50, "cd" * 32))
    damaged = tmp_path / "damaged"
    build_from_tokens([("d", [1, 2, 3, 4] * 5)], damaged, drafter.vocabulary or Vocabulary(0, ""))
    for file in damaged.rglob("tokens"):
        file.write_bytes(file.read_bytes()[:-3])
    refused: list[tuple[Path | str, str | None, type[Exception]]] = [
        (index, None, NotPossibleError),
        (index / ".." / index.name, "acme", NotPossibleError),
        (others[1], "acme", NotPossibleError),
        (others[1], None, NotPossibleError),
        (foreign, None, TokenizerMismatchError),
        (foreign, "new", TokenizerMismatchError),
        (damaged, None, IndexerError),
        (tmp_path / "absent", None, IndexNotFoundError),
        ("relative", None, InvalidRequestError),
        ("", None, InvalidRequestError),
        ("/with\0zero", None, InvalidRequestError),
        (others[0], "x" * 300, InvalidRequestError),
    ]
    for path, tenant, error in refused:
        with pytest.raises(error):
            administration.attach(str(path), tenant)
    for attached, to in ((others[0], None), (others[1], None), (index, "acme"), (index, "new")):
        with pytest.raises(UnknownIndexError):
            administration.detach(str(attached), to)
    assert (trees(drafter, contexts), trees(drafter, contexts, "acme")) == before
    assert len(administration.indexes()) == 2


def test_a_shared_index_that_one_tenant_cannot_have_is_attached_to_none(
    drafter: EmbeddedDrafter, others: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    Administration(drafter.state).attach(str(others[1]), "acme")
    opening = Index.open
    opened: list[object] = []

    def once(path: Path, **options: object) -> Index:
        opened.append(path)
        if len(opened) > 1:
            raise IndexNotFoundError("it went away meanwhile")
        return opening(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Index, "open", once)
    with pytest.raises(IndexNotFoundError):
        Administration(drafter.state).attach(str(others[0]))
    assert [each.index.path for each in Administration(drafter.state).indexes()][1:] == [others[1]]
    assert held(others[0]) == 0


def test_nothing_is_attached_where_the_tokenizer_is_unknown(others: list[Path]) -> None:
    with pytest.raises(NotPossibleError, match="--tokenizer"):
        Administration(EmbeddedDrafter().state).attach(str(others[0]))
    drafter = EmbeddedDrafter(vocabulary=Vocabulary(50, "ab" * 32))
    Administration(drafter.state).attach(str(others[0]))
    assert len(drafter.draft_context(text_of(others[0])[:20], 24)) > 5


@contextmanager
def repeated(*acts: Callable[[], object]) -> Iterator[None]:
    """Do each over and over in a thread of its own during the block; an error of one is raised."""
    ended, pool = threading.Event(), ThreadPoolExecutor(len(acts))

    def until_ended(act: Callable[[], object]) -> None:
        while not ended.is_set():
            act()

    running = [pool.submit(until_ended, act) for act in acts]
    try:
        yield
    finally:
        ended.set()
        pool.shutdown()
    for each in running:
        each.result()


def test_drafts_stay_valid_while_indexes_come_and_go(
    drafter: EmbeddedDrafter, index: Path, others: list[Path]
) -> None:
    """Each draft is, node by node, the one of a set of indexes that is attached at some time."""
    contexts = contexts_of([index, *others])[::4]
    valid: list[set[str]] = [set() for _ in contexts]
    for paths in ([index], [index, others[0]], [index, others[1]], [index, *others]):
        reference = EmbeddedDrafter.open_indexes(paths)
        for at, tree in enumerate(trees(reference, contexts)):
            valid[at].add(str(tree))
        reference.shut_down()

    def come_and_go(path: Path, tenant: str | None) -> None:
        Administration(drafter.state).attach(str(path), tenant)
        time.sleep(0.001)
        Administration(drafter.state).detach(str(path), tenant)

    seen: list[set[str]] = [set() for _ in contexts]
    with repeated(
        lambda: come_and_go(others[0], None),
        lambda: come_and_go(others[1], "acme"),
        drafter.refresh,
    ):
        finish = time.monotonic() + 0.7
        while time.monotonic() < finish or max(map(len, seen)) < 2:
            assert time.monotonic() < finish + 60  # something does come and go
            for at, context in enumerate(contexts):
                for tenant in ("", "acme"):
                    seen[at].add(str(form(drafter.draft_context(context, 24, tenant=tenant))))
    assert all(each <= known for each, known in zip(seen, valid, strict=True))


def test_concurrent_attachments_of_one_index_attach_it_once(
    drafter: EmbeddedDrafter, others: list[Path]
) -> None:
    def attach(_: int) -> str:
        try:
            Administration(drafter.state).attach(str(others[0]))
        except NotPossibleError:
            return "refused"
        return "attached"

    with ThreadPoolExecutor(6) as pool:
        outcomes = sorted(pool.map(attach, range(6)))
    assert outcomes == ["attached", *["refused"] * 5]
    assert len(drafter.stats().indexes) == 2


def test_sessions_are_listed_by_tenant_name_and_idle_time(drafter: EmbeddedDrafter) -> None:
    text = np.arange(20, dtype=np.int32)
    drafter.open("one", text, SequenceOptions(tenant="acme"))
    drafter.open("two", text[:5], SequenceOptions(tenant="acme", remember=False))
    drafter.open("three", text[:7])
    drafter.draft([DraftRequest("one", text[:4], 24, 4)])
    found = reports(drafter)
    assert [(each.tenant, each.session_id) for each in found] == [
        ("acme", "two"),
        ("", "three"),
        ("acme", "one"),
    ]
    last = found[-1]
    assert (last.num_tokens, last.num_prompt_tokens, last.is_kept) == (24, 20, True)
    assert not found[0].is_kept
    assert last.num_bytes > 24 * 4
    assert all(0 <= each.idle_s < 60 for each in found)  # each by the clock of its own report
    assert [each.session_id for each in reports(drafter, tenant="")] == ["three"]
    assert [each.session_id for each in reports(drafter, session="one")] == ["one"]
    assert reports(drafter, session="one", tenant="") == []
    assert reports(drafter, min_idle_s=3600.0) == []
    for wrong in ({"min_idle_s": -1.0}, {"min_idle_s": float("nan")}, {"tenant": "x" * 300}):
        with pytest.raises(InvalidRequestError):
            SessionFilter(**wrong)


@pytest.mark.parametrize("forget", [False, True])
def test_ended_sessions_leave_their_outputs_unless_these_are_to_be_forgotten(
    drafter: EmbeddedDrafter, *, forget: bool
) -> None:
    output = np.array([7, 3, 9, 1, 7, 3, 9, 1, 4, 4, 2], np.int32)
    for name, remember in (("kept", True), ("opened to be forgotten", False)):
        drafter.open(name, output[:2], SequenceOptions(remember=remember))
        drafter.draft([DraftRequest(name, output, 13, 4)])
    drafter.open("another's", output[:2], SequenceOptions(tenant="acme"))
    ended = Administration(drafter.state).end(SessionFilter(tenant=""), forget=forget)
    assert (ended.num_ended, ended.num_kept) == (2, 0 if forget else 1)
    assert [each.session_id for each in reports(drafter)] == ["another's"]
    with pytest.raises(UnknownSessionError):
        drafter.close("kept")
    (of_none,) = [each for each in Administration(drafter.state).tenants() if each.tenant == ""]
    assert of_none.generations_tokens == (0 if forget else len(output) + 1)


def test_ending_many_sessions_lets_others_draft_and_spares_new_ones(index: Path) -> None:
    drafter = EmbeddedDrafter.open_indexes([index], limits=Limits(max_sessions=5000))
    text = text_of(index)
    for number in range(1500):
        drafter.open(f"old-{number}", text[:50])
    drafter.open("victim", text[:50], SequenceOptions(tenant="acme"))
    longest, reopened = 0.0, list[str]()
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(
            Administration(drafter.state).end, SessionFilter(tenant=""), forget=True
        )
        while not ending.done():
            began = time.perf_counter()
            drafter.draft([DraftRequest("victim", NO_TOKENS, 50, 8)])
            longest = max(longest, time.perf_counter() - began)
            if not reopened and len(drafter.state.sessions) < 1000:
                drafter.open("old-0", text[:10])
                reopened.append("old-0")
    assert reopened
    assert {each.session_id for each in reports(drafter)} == {"victim", "old-0"}
    assert longest < 0.25  # two cores may be busy; the lock is held for less than a millisecond
    drafter.shut_down()


def test_a_tenants_pool_leaves_memory_and_its_data_stays(index: Path, tmp_path: Path) -> None:
    drafter = EmbeddedDrafter.open_indexes([index], state=tmp_path / "state")
    output = np.tile(np.array([7, 3, 9, 1, 4], np.int32), 20)
    drafter.remember(output, tenant="acme")
    before = form(drafter.draft_context(output[:6], 16, tenant="acme"))
    drafter.open("s", output[:5], SequenceOptions(tenant="acme"))
    assert Administration(drafter.state).evict("acme", lose=False) == (True, 1)
    assert ServiceFace(drafter.state).is_loaded("acme")
    drafter.close("s", remember=False)
    drafter.draft_context(output[:6], 16)  # the last draft is held until the next
    assert not ServiceFace(drafter.state).is_loaded("acme")
    assert Administration(drafter.state).evict("acme", lose=False) == (False, 0)
    assert all(each.tenant != "acme" for each in Administration(drafter.state).tenants())
    assert form(drafter.draft_context(output[:6], 16, tenant="acme")) == before
    drafter.shut_down()


def test_outputs_in_memory_alone_are_not_evicted_by_accident(drafter: EmbeddedDrafter) -> None:
    drafter.remember(np.arange(20, dtype=np.int32), tenant="acme")
    with pytest.raises(NotPossibleError, match="--state"):
        Administration(drafter.state).evict("acme", lose=False)
    assert ServiceFace(drafter.state).is_loaded("acme")
    assert Administration(drafter.state).evict("acme", lose=True) == (True, 0)
    assert not ServiceFace(drafter.state).is_loaded("acme")


def test_new_limits_count_from_the_next_request(drafter: EmbeddedDrafter) -> None:
    text = np.arange(30, dtype=np.int32)
    change = Administration(drafter.state).change_limits
    for name in "ab":
        drafter.open(name, text)
    change({"max_sessions": 2, "max_sequence_tokens": 40, "max_batch": 1})
    with pytest.raises(LimitExceededError, match="max_sessions"):
        drafter.open("c", text)
    with pytest.raises(LimitExceededError, match="max_sequence_tokens"):
        drafter.draft([DraftRequest("a", text[:11], 41, 8)])
    with pytest.raises(LimitExceededError, match="max_batch"):
        drafter.draft([DraftRequest(name, NO_TOKENS, 30, 8) for name in "ab"])
    drafter.draft([DraftRequest("a", text[:10], 40, 8)])
    change({"max_sessions": 3})
    drafter.open("c", text)
    for fixed in ("generations_tokens", "max_message_bytes", "max_budget_nodes", "no_limit"):
        with pytest.raises(NotPossibleError, match=fixed):
            change({"max_sessions": 1, fixed: 4096})
    assert drafter.limits.max_sessions == 3


@pytest.mark.parametrize(
    "name",
    sorted(
        CHANGEABLE_LIMITS
        - {"idle_session_s", "idle_eviction_s", "max_bytes", "max_tenant_bytes", "max_tenants"}
        - {"max_tenant_work", "max_tenant_waiting", "max_tenant_deletions"}  # a service's
    ),
)
def test_every_limit_that_can_change_counts_at_once(drafter: EmbeddedDrafter, name: str) -> None:
    text = np.arange(30, dtype=np.int32)
    drafter.open("a", text)
    act: Callable[[], object] = partial(drafter.draft, [DraftRequest("a", text[:1], 31, 8)])
    if name.endswith("sessions"):
        act = partial(drafter.open, "b", text)
    Administration(drafter.state).change_limits({name: 0})
    with pytest.raises(LimitExceededError, match=name):
        act()
    Administration(drafter.state).change_limits({name: 1000})
    act()


@pytest.mark.parametrize("name", ["max_bytes", "max_tenant_bytes"])
def test_another_ceiling_counts_from_the_next_request(drafter: EmbeddedDrafter, name: str) -> None:
    text = np.arange(30, dtype=np.int32)
    drafter.open("a", text)
    Administration(drafter.state).change_limits({name: 1})
    with pytest.raises(LimitExceededError, match=name):
        drafter.open("b", text)
    drafter.draft([DraftRequest("a", text[:1], 31, 8)])  # what is open goes on
    Administration(drafter.state).change_limits({name: 0})  # its default
    assert getattr(drafter.limits, name) > 1 << 20
    drafter.open("b", text)


def test_fewer_tenants_stay_in_memory_as_others_come(drafter: EmbeddedDrafter) -> None:
    for tenant in ("x", "y"):
        drafter.remember(np.arange(9, dtype=np.int32), tenant=tenant)
    Administration(drafter.state).change_limits({"max_tenants": 1})
    drafter.remember(np.arange(9, dtype=np.int32), tenant="z")
    assert drafter.state.census().tenants < 4


def test_a_new_idle_time_ends_sessions(drafter: EmbeddedDrafter) -> None:
    drafter.open("s", np.arange(5, dtype=np.int32))
    time.sleep(0.02)
    assert ServiceFace(drafter.state).end_idle() == 0
    Administration(drafter.state).change_limits({"idle_session_s": 0.01})
    assert ServiceFace(drafter.state).end_idle() == 1


def test_the_refresh_can_begin_and_end_while_it_runs(drafter: EmbeddedDrafter) -> None:
    def watching() -> int:
        return sum(each.name == "foredraft-refresh" for each in threading.enumerate())

    assert watching() == 0
    Administration(drafter.state).refresh_every(0.01)
    assert watching() == 1
    Administration(drafter.state).refresh_every(5.0)
    assert watching() == 1
    Administration(drafter.state).refresh_every(0)
    assert watching() == 0


def test_a_snapshot_under_load_opens_as_a_state_and_drafts_as_well(
    index: Path, tmp_path: Path
) -> None:
    state, copies = tmp_path / "state", tmp_path / "copies"
    drafter = EmbeddedDrafter.open_indexes([index], state=state)
    rng = np.random.default_rng(3)
    texts = [np.tile(rng.integers(0, 50, 8).astype(np.int32), 6) for _ in range(40)]
    for text in texts:
        drafter.remember(text, tenant="acme")
    drafter.open("s", texts[0], SequenceOptions(tenant="acme"))
    length = len(texts[0])
    for _ in range(20):  # learns, so that the weights are not those of the prior
        (tree,) = drafter.draft([DraftRequest("s", texts[1][:3], length + 3, 16)])
        length += 3
        del tree
    before = trees(drafter, [text[:10] for text in texts], "acme")
    with repeated(
        lambda: drafter.remember(rng.integers(0, 50, 50).astype(np.int32), tenant="busy")
    ):
        for number in range(5):
            copy = Administration(drafter.state).snapshot(copies, f"copy-{number}")
            assert copy.path == str(copies / f"copy-{number}")
            assert copy.num_bytes == Path(copy.path, "generations.mdb").stat().st_size
    assert {each.stat().st_mode & 0o77 for each in copies.rglob("*")} == {0}
    drafter.shut_down()
    for number in range(5):
        restored = EmbeddedDrafter.open_indexes([index], state=copies / f"copy-{number}")
        assert trees(restored, [text[:10] for text in texts], "acme") == before
        assert restored.stats().log_failures == 0
        restored.shut_down()
    assert not list(copies.rglob("*damaged*"))


def test_copies_that_cannot_be_made_are_refused_and_leave_nothing(
    drafter: EmbeddedDrafter, index: Path, tmp_path: Path
) -> None:
    with pytest.raises(NotPossibleError, match="--state"):
        Administration(drafter.state).snapshot(tmp_path / "copies", "a")
    keeping = EmbeddedDrafter.open_indexes([index], state=tmp_path / "state")
    administration = Administration(keeping.state)
    for name in ("../a", "a/b", ".hidden", "a" * 129, "a\n", "-a", "ä"):
        with pytest.raises(InvalidRequestError):
            administration.snapshot(tmp_path / "copies", name)
    administration.snapshot(tmp_path / "copies", "a")
    with pytest.raises(NotPossibleError, match="another name"):
        administration.snapshot(tmp_path / "copies", "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot be copied"):
        administration.snapshot(tmp_path / "file", "b")
    assert [each.name for each in (tmp_path / "copies").iterdir()] == ["a"]
    assert administration.snapshot(tmp_path / "copies").path.split("/")[-1].startswith("state-20")
    keeping.shut_down()

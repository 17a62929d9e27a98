"""A tenant, and no other, drafts from the indexes and phrases that are bound to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from indexer.build import build_from_tokens
from indexer.reader import Vocabulary
from retriever.client.credentials import Credentials
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest, SequenceOptions
from retriever.errors import InvalidRequestError
from retriever.predict.phrases import ListedPhrases
from retriever.security.access import add_token
from retriever.sequences import SessionKey
from retriever.sessions.bindings import BoundPaths, parsed_bindings
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.explaining import explain
from retriever.sessions.service_face import ServiceFace
from retriever.sessions.session_table import CheckedRequest
from retriever.tree import DraftTree
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.token_ids import ids

VOCABULARY = Vocabulary(1000, "ab" * 32)
COMMON = [1, 2, 3, 4, 5, 6, 7, 8]


def texts(begin: int) -> list[int]:
    return [*COMMON, *range(begin, begin + 20)]


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    made = {"shared": tmp_path / "shared", "a": tmp_path / "a", "b": tmp_path / "b"}
    for begin, path in zip((100, 200, 300), made.values(), strict=True):
        build_from_tokens([(f"{begin}.txt", texts(begin))], path, VOCABULARY)
    return made


@contextmanager
def bound_drafter(paths: dict[str, Path]) -> Iterator[EmbeddedDrafter]:
    bound = BoundPaths({"a": [paths["a"]], "b": [paths["b"]]})
    drafter = EmbeddedDrafter.open_indexes([paths["shared"]], bound=bound)
    yield drafter
    drafter.shut_down()


def drafted(drafter: EmbeddedDrafter, request: DraftRequest, tenant: str) -> DraftTree:
    """Return the draft of a step as a service makes it, which names sessions by tenant."""
    (step,) = ServiceFace(drafter.state).commit_each([request], tenant)
    assert isinstance(step, CheckedRequest)
    return ServiceFace(drafter.state).draft_each([step])[0]


def known_to(drafter: EmbeddedDrafter, tenant: str) -> set[int]:
    """Return the hundreds of the tokens that a tenant is drafted after the common ones."""
    alone = drafter.draft_context(COMMON, 64, tenant=tenant)
    explained = explain(drafter, COMMON, 64, tenant=tenant).tree
    key = SessionKey(tenant, "s")
    drafter.state.begin(key, drafter.state.prepare(COMMON[:6], SequenceOptions(tenant=tenant)))
    tree = drafted(drafter, DraftRequest("s", ids(7, 8), 8, 64), tenant)
    drafter.state.end(key)
    for other in (explained, tree):
        assert set(other.token_ids // 100) == set(alone.token_ids // 100)
    return set((alone.token_ids // 100).tolist()) - {0}


def test_indexes_are_shared_or_bound(paths: dict[str, Path]) -> None:
    with bound_drafter(paths) as drafter:
        assert known_to(drafter, "") == {1}
        assert known_to(drafter, "c") == {1}
        assert known_to(drafter, "a") == {1, 2}
        assert known_to(drafter, "b") == {1, 3}
        names = [index.path.name for index in ServiceFace(drafter.state).indexes_of("a")]
        assert names == ["shared", "a"]
        assert [index.path.name for index in ServiceFace(drafter.state).indexes_of("c")] == [
            "shared"
        ]


def test_short_matches_in_recent_outputs_count_without_an_index(paths: dict[str, Path]) -> None:
    """One token before it is enough; where there are phrase tables, four are needed."""
    bound = BoundPaths({"a": [paths["a"]]})
    drafter = EmbeddedDrafter.open_indexes([], bound=bound, vocabulary=VOCABULARY)
    for tenant in ("a", "c"):
        drafter.remember(ids(*range(500, 520)), tenant=tenant)
        lengths = [
            len(drafter.draft_context(ids(9, *range(510 - n, 510)), 64, tenant=tenant))
            for n in (1, 4)
        ]
        assert lengths[1] >= 10
        assert (lengths[0] >= 10) == (tenant == "c")
    drafter.shut_down()


def test_sessions_keep_to_their_own_when_an_index_changes(paths: dict[str, Path]) -> None:
    with bound_drafter(paths) as drafter:
        for tenant in ("a", "b", "c"):
            drafter.state.begin(
                SessionKey(tenant, "t"),
                drafter.state.prepare(COMMON[:6], SequenceOptions(tenant=tenant)),
            )
        build_from_tokens(
            [("2.txt", texts(200)), ("4.txt", texts(400))], paths["a"].parent / "new", VOCABULARY
        )
        paths["a"].rename(paths["a"].parent / "old")
        (paths["a"].parent / "new").rename(paths["a"])
        assert drafter.refresh()
        for tenant, expected in (("a", {1, 2, 4}), ("b", {1, 3}), ("c", {1})):
            request = DraftRequest("t", ids(7, 8), 8, 64)
            tree = drafted(drafter, request, tenant)
            assert set((tree.token_ids // 100).tolist()) - {0} == expected
            assert known_to(drafter, tenant) == expected


def test_phrases_are_listed_for_all_or_for_a_tenant() -> None:
    def listed(*begins: int) -> ListedPhrases:
        return ListedPhrases(tuple(texts(begin)) for begin in begins)

    bound = BoundPaths(phrases={"a": listed(100, 200)})
    drafter = EmbeddedDrafter.open_indexes([], phrases=listed(100), bound=bound)
    assert known_to(drafter, "a") == {1, 2}
    assert known_to(drafter, "b") == {1}
    drafter.shut_down()


def test_bindings_on_the_command_line_are_checked() -> None:
    assert parsed_bindings(["a=x", "a=y=z", "=w"], "--tenant-index") == {
        "a": [Path("x"), Path("y=z")],
        "": [Path("w")],
    }
    for wrong in ("a", "a=", f"{'x' * 257}=y"):
        with pytest.raises(InvalidRequestError):
            parsed_bindings([wrong], "--tenant-index")


def test_the_command_binds_indexes_to_tenants(paths: dict[str, Path], tmp_path: Path) -> None:
    access = tmp_path / "access"
    tokens = {tenant: add_token(access, tenant) for tenant in ("a", "c")}
    process, address = start_service(
        *("--index", str(paths["shared"]), "--tenant-index", f"a={paths['a']}"),
        *("--access", str(access), "--address", "127.0.0.1:0"),
    )
    try:
        for tenant, names in (("a", ["shared", "a"]), ("c", ["shared"])):
            with RemoteDrafter(address, credentials=Credentials(token=tokens[tenant])) as client:
                assert [index.name for index in client.list_indexes()] == names
                drafted = set(client.draft_context(COMMON, 64).token_ids // 100) - {0}
                assert drafted == ({1, 2} if tenant == "a" else {1})
    finally:
        stop_service(process)

"""What decoders found likely is there after a restart, within its bound, for its tenant alone."""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from indexer.reader import Vocabulary
from retriever.drafter import FINDING_BYTES, Findings, FoundPage, SequenceOptions
from retriever.errors import InvalidRequestError, LimitExceededError, NotPossibleError, StorageError
from retriever.limits import MAX_FINDINGS, Limits
from retriever.log import log_store as records
from retriever.log.generations_log import GenerationsLog
from retriever.log.options import LogOptions
from retriever.log.pools import Pools
from retriever.plugins.admin.administration import Administration
from retriever.plugins.findings.kept_findings import KeptFindings
from retriever.predict.ledger import Ledger
from retriever.sessions.embedded import EmbeddedDrafter
from tests.retriever.findings import MODEL, OTHER, all_of, findings, rows
from tests.retriever.log.state_folders import drafter_on, log_on, output
from tests.retriever.token_ids import ids


def of(drafter: EmbeddedDrafter, tenant: str = "", model: str = MODEL) -> Findings:
    """Return all that is kept of a tenant."""

    class OfTenant:
        def share_findings(self, model: str, findings: Findings) -> None:
            drafter.state.share_findings(model, findings, tenant=tenant)

        def fetch_findings(self, model: str, before: int = 0) -> FoundPage:
            return drafter.state.fetch_findings(model, before, tenant=tenant)

    return all_of(OfTenant(), model)


def in_files(state: Path, found: Findings) -> bool:
    """Tell whether any file has the rows of some findings."""
    content = [path.read_bytes() for path in state.iterdir()]
    assert sum(map(len, content)) > 0
    return any(row.tobytes() in each for row in found.log_odds for each in content)


@pytest.fixture(params=["memory", "disk"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "state" if request.param == "disk" else None


def test_findings_are_there_after_a_restart(tmp_path: Path, vocabulary: Vocabulary) -> None:
    pieces = [findings(100 * number, 60, number) for number in range(4)]
    with drafter_on(tmp_path, vocabulary=vocabulary) as drafter:
        for piece in pieces:
            drafter.state.share_findings(MODEL, piece)
        drafter.state.share_findings(MODEL, findings(0, 10, seed=9))
    assert (tmp_path / "generations.mdb").stat().st_mode & 0o777 == 0o600
    with drafter_on(tmp_path, vocabulary=vocabulary) as drafter:
        expected = {**rows(Findings.joined(pieces)), **rows(findings(0, 10, seed=9))}
        assert rows(all_of(drafter.state)) == expected
        assert not len(all_of(drafter.state, OTHER))
        assert drafter.state.census().recycled_bytes == 0  # they are on disk


def test_pages_come_newest_first_and_hold_everything_once(state: Path | None) -> None:
    with drafter_on(state) as drafter:
        for number in range(5):
            drafter.state.share_findings(MODEL, findings(10_000 * number, MAX_FINDINGS - 7, number))
            drafter.state.share_findings(OTHER, findings(10_000 * number, 3))
        page = drafter.state.fetch_findings(MODEL)
        assert page.findings.contexts[0] == 2 * 40_000 + 1
        assert page.before
        assert len(all_of(drafter.state)) == 5 * (MAX_FINDINGS - 7)
        assert len(all_of(drafter.state, OTHER)) == 15


@pytest.mark.parametrize("size", [37, 3])
def test_the_bound_keeps_the_newest_of_each_context(state: Path | None, size: int) -> None:
    """By bytes, and in few pieces however small they come."""
    most = 400
    limits = Limits(recycled_bytes=most * FINDING_BYTES)
    rng = np.random.default_rng(size)
    said: dict[int, tuple[list[int], list[float]]] = {}
    with drafter_on(state, limits) as drafter:
        for number in range(600):
            piece = findings(int(rng.integers(0, 500)), size, number)
            drafter.state.share_findings(MODEL, piece)
            for context, row in rows(piece).items():
                said.pop(context, None)  # the last stands last
                said[context] = row
            if number % 97 == 0:
                found = all_of(drafter.state)
                assert len(found) <= most
                assert rows(found).items() <= said.items()
        found = all_of(drafter.state)
    assert rows(found).items() <= said.items()
    num_newest = len(rows(found))
    assert num_newest >= most // 3
    newest = list(said)[-num_newest // 2 :]
    assert rows(found).keys() >= set(newest)
    if state is not None:
        with log_on(state) as log:
            assert len(log.findings("")) <= 256
        with drafter_on(state, limits) as drafter:
            assert rows(all_of(drafter.state)) == rows(found)


def test_tenants_are_apart_and_deleted_apart(state: Path | None) -> None:
    with drafter_on(state) as drafter:
        for number, tenant in enumerate(("", "a", "b")):
            drafter.state.share_findings(MODEL, findings(0, 20, number), tenant=tenant)
        for number, tenant in enumerate(("", "a", "b")):
            assert rows(of(drafter, tenant)) == rows(findings(0, 20, number))
        drafter.delete("a")
        assert not len(of(drafter, "a"))
        if state is not None:
            assert in_files(state, findings(0, 20, 0))
            assert not in_files(state, findings(0, 20, 1))
        # Which session they are from is not known, so that of one all go.
        drafter.delete("b", "s")
        assert not len(of(drafter, "b"))
        assert rows(of(drafter)) == rows(findings(0, 20, 0))
        drafter.state.share_findings(MODEL, findings(7, 2), tenant="a")
        assert rows(of(drafter, "a")) == rows(findings(7, 2))
    if state is not None:
        with drafter_on(state) as drafter:
            assert not len(of(drafter, "b"))


def test_nothing_is_shared_or_fetched_during_a_deletion() -> None:
    limits = Limits()
    pools = Pools(limits, None)
    kept = KeptFindings(pools, Ledger(1 << 30, 1 << 30), lambda: limits)
    with pools.deletion("a"):
        with pytest.raises(LimitExceededError, match="being deleted"):
            kept.share("a", MODEL, findings(0), None)
        with pytest.raises(LimitExceededError, match="being deleted"):
            kept.fetch("a", MODEL)
        kept.share("b", MODEL, findings(0), None)


def test_findings_expire_as_outputs_do(tmp_path: Path) -> None:
    limits = Limits(generations_age_s=100.0)
    now_s = 1000.0
    options = LogOptions(max_age_s=limits.generations_age_s)
    log = GenerationsLog(tmp_path, options=options, clock=lambda: now_s)
    pools = Pools(limits, log)
    kept = KeptFindings(pools, Ledger(1 << 30, 1 << 30), lambda: limits, lambda: now_s)
    kept.share("", MODEL, findings(0, 3), None)
    now_s = 1090.0
    kept.share("", MODEL, findings(10, 3), None)
    assert len(kept.fetch("", MODEL).findings) == 6
    now_s = 1101.0
    assert rows(kept.fetch("", MODEL).findings) == rows(findings(10, 3))
    log.remove_expired()
    assert [each.number for each in log.findings("")] == [2]
    pools.close()


def test_findings_make_room_for_what_is_open() -> None:
    """They are worth least, and count against the same ceilings."""
    limits = Limits(
        max_bytes=6 << 20, max_tenant_bytes=3 << 20, generations_tokens=1 << 12, max_sessions=8
    )
    with drafter_on(None, limits) as drafter:
        for tenant in ("a", "b"):
            for number in range(6):
                piece = findings(MAX_FINDINGS * number, MAX_FINDINGS)
                drafter.state.share_findings(MODEL, piece, tenant=tenant)
        assert drafter.state.census().recycled_bytes == 12 * MAX_FINDINGS * FINDING_BYTES
        drafter.open("s", np.zeros(1 << 15, np.int32), SequenceOptions(tenant="b"))
        assert drafter.stats().evictions["recycled"] >= 1
        assert not len(of(drafter, "b"))
        drafter.close("s", ids())
        census = drafter.state.census()
        assert census.recycled_bytes == len(of(drafter, "a")) * FINDING_BYTES
        drafter.delete("a")
        assert drafter.state.census().recycled_bytes == 0


def test_operators_see_findings_and_evict_them(state: Path | None) -> None:
    with drafter_on(state) as drafter:
        drafter.state.share_findings(MODEL, findings(0, 50), tenant="a")
        held = 50 * FINDING_BYTES if state is None else 0
        (use,) = Administration(drafter.state).uses("a")
        assert use.num_bytes == held
        if state is None:
            with pytest.raises(NotPossibleError, match="would be lost"):
                Administration(drafter.state).evict("a", lose=False)
        Administration(drafter.state).evict("a", lose=True)
        assert drafter.state.census().recycled_bytes == 0
        assert bool(len(of(drafter, "a"))) == (state is not None)


def hostile(name: str) -> Findings:
    found = findings(0)
    contexts, tokens, log_odds = found.contexts, found.tokens, found.log_odds
    if name == "token":
        tokens[3, 2] = 50
    elif name == "negative":
        tokens[0, 0] = -1
    elif name == "nan":
        log_odds[4, 7] = math.nan
    elif name == "infinite":
        log_odds[0, 0] = -math.inf
    elif name == "context":
        contexts[1] = 0
    return findings(0, MAX_FINDINGS + 1) if name == "many" else found


@pytest.mark.parametrize("name", ["token", "negative", "nan", "infinite", "context", "many"])
def test_what_cannot_be_findings_is_refused(name: str, vocabulary: Vocabulary) -> None:
    with drafter_on(None, vocabulary=vocabulary) as drafter:
        with pytest.raises(InvalidRequestError):
            drafter.state.share_findings(MODEL, hostile(name))
        assert not len(all_of(drafter.state))


@pytest.mark.parametrize("model", ["", "no", "a" * 129])
def test_a_model_is_known_by_a_fingerprint(model: str) -> None:
    with drafter_on(None) as drafter:
        with pytest.raises(InvalidRequestError, match="hexadecimal"):
            drafter.state.share_findings(model, findings(0))
        with pytest.raises(InvalidRequestError, match="hexadecimal"):
            drafter.state.fetch_findings(model)


def test_with_a_bound_of_nothing_nothing_is_kept() -> None:
    with drafter_on(None, Limits(recycled_bytes=0)) as drafter:
        with pytest.raises(NotPossibleError, match="recycled_bytes"):
            drafter.state.share_findings(MODEL, findings(0))
        with pytest.raises(NotPossibleError, match="recycled_bytes"):
            drafter.state.fetch_findings(MODEL)


def test_many_threads_share_at_once(state: Path | None) -> None:
    with drafter_on(state) as drafter, ThreadPoolExecutor(8) as threads:

        def share(number: int) -> None:
            drafter.state.share_findings(
                MODEL, findings(10 * number, 10, number), tenant=str(number % 2)
            )
            drafter.state.fetch_findings(MODEL, tenant=str(number % 2))

        list(threads.map(share, range(80)))
        found = {**rows(of(drafter, "0")), **rows(of(drafter, "1"))}
    assert found == rows(Findings.joined([findings(10 * n, 10, n) for n in range(80)]))


def test_a_disk_that_refuses_costs_the_keeping_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with drafter_on(tmp_path) as drafter:
        drafter.state.share_findings(MODEL, findings(0))
        with monkeypatch.context() as full:
            full.setattr(records.LogStore, "put_findings", refuse)
            for _ in range(3):
                with pytest.raises(StorageError, match="free space"):
                    drafter.state.share_findings(MODEL, findings(10))
            drafter.remember(output(3))
            tree = drafter.draft_context(output(3)[:8], 4)
            assert tree.token_ids.tolist() == output(3)[8:12].tolist()
            assert rows(all_of(drafter.state)) == rows(findings(0))
        assert len([r for r in caplog.records if "No space" in r.getMessage()]) == 1
        drafter.state.share_findings(MODEL, findings(10))
        assert rows(all_of(drafter.state)) == rows(Findings.joined([findings(0), findings(10)]))


def refuse(*_: object) -> None:
    raise OSError(28, "No space left on device")


def _cut(content: bytearray) -> None:
    del content[len(content) // 2 :]


def _noise(content: bytearray) -> None:
    content[:] = os.urandom(len(content))


@pytest.mark.parametrize("change", [_cut, _noise, lambda content: content.clear()])
def test_a_damaged_file_is_set_aside_and_drafts_start(
    tmp_path: Path, change: Callable[[bytearray], None], caplog: pytest.LogCaptureFixture
) -> None:
    pieces = [findings(1000 * number, 900, number) for number in range(3)]
    with drafter_on(tmp_path) as drafter:
        for piece in pieces:
            drafter.state.share_findings(MODEL, piece)
    data = tmp_path / "generations.mdb"
    content = bytearray(data.read_bytes())
    change(content)
    data.write_bytes(content)
    with drafter_on(tmp_path) as drafter:
        assert rows(all_of(drafter.state)).items() <= rows(Findings.joined(pieces)).items()
        drafter.state.share_findings(MODEL, findings(0))
        assert rows(all_of(drafter.state)).items() >= rows(findings(0)).items()
    assert len(caplog.records) == 1
    assert "damaged" in caplog.text
    with drafter_on(tmp_path) as drafter:
        assert rows(all_of(drafter.state)).items() >= rows(findings(0)).items()
    assert len(caplog.records) == 1


def test_no_damaged_byte_is_ever_drafted_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte changed in any region of a value on disk: records have sums."""
    pieces, damaged = [findings(1000 * n, 300, n) for n in range(3)], dict[bytes, tuple[int, int]]()
    unseal = records.unseal

    def read(key: bytes, value: bytes) -> bytes | None:
        place, flipped = damaged.get(key, (0, 0))
        content = bytearray(value)
        content[place] ^= flipped
        return unseal(key, bytes(content))

    monkeypatch.setattr(records, "unseal", read)
    limits = Limits()
    pools = Pools.open(limits, tmp_path, "", "process", lambda _: False)
    kept, log = KeptFindings(pools, Ledger(1 << 30, 1 << 30), lambda: limits), pools.log
    assert log is not None
    for piece in pieces:
        kept.share("", MODEL, piece, None)
    whole = {each.number: each for each in log.findings("")}
    for number, record in whole.items():
        size = 4 + len(record.encode())
        for place in range(0, size, max(1, size // 40)):
            damaged[records.numbered_key(records.tenant_key(records.FINDINGS, ""), number)] = (
                place,
                0x40,
            )
            others = [each for at, each in enumerate(pieces, 1) if at != number]
            kept.evict("")
            assert rows(kept.fetch("", MODEL).findings) == rows(Findings.joined(others))
            assert [each.number for each in log.findings("")] == sorted({*whole} - {number})
            damaged.clear()
            log.put_findings("", [record], [])
    kept.evict("")
    assert rows(kept.fetch("", MODEL).findings) == rows(Findings.joined(pieces))
    pools.close()


def test_a_copy_of_the_state_has_the_findings(tmp_path: Path) -> None:
    with drafter_on(tmp_path / "state") as drafter:
        drafter.state.share_findings(MODEL, findings(0))
        copy = Administration(drafter.state).snapshot(tmp_path / "copies", "now").path
    with drafter_on(Path(copy)) as drafter:
        assert rows(all_of(drafter.state)) == rows(findings(0))

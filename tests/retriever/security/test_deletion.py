"""What is deleted, too old or not to be kept is neither drafted from nor on disk any more."""

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retriever.client.credentials import Credentials
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest, SequenceOptions, TokenIds
from retriever.errors import UnknownSessionError
from retriever.limits import Limits
from retriever.log.options import LogOptions
from retriever.predict.generations import Generations, Output
from retriever.security.access import TENANT_SCOPES, add_token
from retriever.security.protection import Protection, ProtectionFiles
from retriever.sessions.embedded import EmbeddedDrafter
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.log.state_folders import drafter_on, keep, kept, log_on, output
from tests.retriever.security.in_process import serving
from tests.retriever.token_ids import ids

Clients = dict[str, RemoteDrafter]


@contextmanager
def tenants(drafter: EmbeddedDrafter, folder: Path) -> Iterator[Clients]:
    """Serve two tenants during the block; give a client of each."""
    access = folder / "access"
    shown = {
        tenant: Credentials(token=add_token(access, tenant, TENANT_SCOPES)) for tenant in ("a", "b")
    }
    protection = Protection.of(ProtectionFiles(access=access))
    with (
        serving(drafter, f"unix:{folder}/s", protection) as address,
        ExitStack() as stack,
    ):
        yield {
            tenant: stack.enter_context(RemoteDrafter(address, credentials=each, timeout_s=10))
            for tenant, each in shown.items()
        }


def generate(client: RemoteDrafter, session: str, tokens: TokenIds, **options: bool) -> None:
    client.open(session, ids(9), SequenceOptions(remember=options.get("remember", True)))
    client.close(session, tokens, remember=not options.get("forget", False))


def knows(client: RemoteDrafter, number: int) -> bool:
    tree = client.draft_context(output(number)[:8], 4)
    return np.array_equal(tree.token_ids, output(number)[8:12])


def on_disk(state: Path, number: int) -> bool:
    """Tell whether any file has an output's tokens, as 16 or 32 bits each."""
    tokens = output(number)[4:12]
    forms = [tokens.astype(width).tobytes() for width in ("<u2", "<u4")]
    content = [path.read_bytes() for path in state.iterdir()]
    assert sum(map(len, content)) > 0
    return any(form in each for form in forms for each in content)


def memory_in(value: Any, seen: set[int]) -> Iterator[bytes]:
    """Yield what is in the arrays and blocks of memory that are reached from a value."""
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        yield value.tobytes()
    elif isinstance(value, bytearray | mmap):
        yield bytes(value)
    for each in gc.get_referents(value):
        if type(each).__module__.split(".")[0] not in {"builtins", "retriever", "numpy"} and not (
            isinstance(each, dict | list | tuple | mmap)
        ):
            continue
        if type(each).__name__ not in {"function", "module", "type", "method"}:
            yield from memory_in(each, seen)


def in_memory(drafter: EmbeddedDrafter, number: int) -> bool:
    tokens = output(number)[4:12].astype(np.int32).tobytes()
    return any(tokens in each for each in memory_in(drafter, set()))


def test_a_tenants_data_is_deleted_on_request(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with drafter_on(state) as drafter, tenants(drafter, tmp_path) as clients:
        for number, tenant in enumerate("ab"):
            generate(clients[tenant], "s", output(number))
            assert knows(clients[tenant], number)
            assert on_disk(state, number)
            assert in_memory(drafter, number)
        clients["a"].open("open", ids(9))
        clients["a"].draft([DraftRequest("open", output(3), 21, 4)])
        clients["a"].delete_tenant_data()
        clients["a"].close("open")
        for number in (0, 3):
            assert not knows(clients["a"], number)
            assert not on_disk(state, number)
            assert not in_memory(drafter, number) or number == 3
        assert knows(clients["b"], 1)
        assert on_disk(state, 1)
        clients["a"].delete_tenant_data()  # of nothing
    with drafter_on(state) as drafter, tenants(drafter, tmp_path / "state") as clients:
        assert [knows(clients["b"], number) for number in range(4)] == [False, True, False, False]


@pytest.mark.parametrize("with_state", [True, False])
def test_a_sessions_data_is_deleted_on_request(tmp_path: Path, with_state: bool) -> None:  # noqa: FBT001
    state = tmp_path / "state" if with_state else None
    with drafter_on(state) as drafter, tenants(drafter, tmp_path) as clients:
        for client in clients.values():
            for number in range(4):
                generate(client, f"s{number % 2}", output(number))
        clients["a"].delete_session_data("s1")
        assert [knows(clients["a"], number) for number in range(4)] == [True, False, True, False]
        assert all(knows(clients["b"], number) for number in range(4))
        clients["b"].delete_session_data("s1")
        for number in range(4):
            assert in_memory(drafter, number) == (number % 2 == 0)
            if state is not None:
                assert on_disk(state, number) == (number % 2 == 0)
        clients["a"].open("open", ids(9))
        clients["a"].delete_session_data("open")
        with pytest.raises(UnknownSessionError):
            clients["a"].close("open")
    if state is not None:
        with drafter_on(state) as drafter:
            found = [drafter.draft_context(output(n)[:8], 4, tenant="a") for n in range(4)]
            assert [len(tree) > 0 for tree in found] == [True, False, True, False]


def test_nothing_of_a_forgotten_session_is_anywhere(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with drafter_on(state) as drafter, tenants(drafter, tmp_path) as clients:
        client = clients["a"]
        generate(client, "kept", output(0))
        generate(client, "opened to be forgotten", output(1), remember=False)
        generate(client, "closed to be forgotten", output(2), forget=True)
        for number, kept in enumerate((True, False, False)):
            assert on_disk(state, number) == kept
            assert knows(client, number) == kept


def test_old_outputs_are_no_longer_drafted_from() -> None:
    process, address = start_service(
        "--address", "127.0.0.1:0", "--generations-age-s", "1", "--generations-tokens", "1024"
    )
    try:
        with RemoteDrafter(address) as client:
            generate(client, "s", output(1))
            assert knows(client, 1)
            time.sleep(1.1)
            assert not knows(client, 1)
    finally:
        stop_service(process)


def contents_of(generations: Generations) -> list[tuple[list[int], bytes]]:
    return [(each.tokens.tolist(), each.origin) for each in generations.outputs()]


def test_removing_outputs_leaves_the_others_as_if_they_had_been_alone() -> None:
    rng = np.random.default_rng(3)
    for capacity in (64, 256, 4096):
        outputs = [
            Output(rng.integers(0, 30, 20).astype(np.int32), 0.0, bytes([rng.integers(3)]) * 16)
            for _ in range(30)
        ]
        whole, alone = Generations(capacity), Generations(capacity)
        whole.extend(outputs)
        held = whole.outputs()
        assert [each.tokens.tolist() for each in held[1:]] == [
            each.tokens.tolist() for each in outputs[len(outputs) - len(held) + 1 :]
        ]
        kept = [each for each in held if each.origin[0] != 1]
        assert len(list(whole.removing(bytes([1]) * 16))) > 1
        assert len(kept) < len(held)
        alone.extend(kept)
        assert contents_of(whole) == contents_of(alone)
        assert np.array_equal(whole.live, alone.live)
        assert list(whole.removing(bytes([1]) * 16)) == []


def test_while_outputs_are_removed_new_ones_are_taken_in() -> None:
    rng = np.random.default_rng(4)
    outputs = [
        Output(rng.integers(0, 30, 2000).astype(np.int32), 0.0, bytes([number % 3]) * 16)
        for number in range(12)
    ]
    whole = Generations(1 << 15)
    whole.extend(outputs)
    removing = whole.removing(bytes([1]) * 16)
    next(removing)
    assert whole.num_tokens == 0
    next(removing)
    new = Output(np.arange(40, 60, dtype=np.int32), 1.0)
    whole.extend([new])
    assert len(list(removing)) > 0
    found = [each.tokens.tolist() for each in whole.outputs()]
    assert len(found) == 9
    assert new.tokens.tolist() in found
    assert all((each.tokens.tolist() in found) == (each.origin[0] != 1) for each in outputs)


def test_a_tenant_of_many_is_deleted_while_others_draft(tmp_path: Path) -> None:
    limits = replace(Limits(), generations_tokens=1 << 12)
    with drafter_on(tmp_path / "state", limits) as drafter, tenants(drafter, tmp_path) as clients:
        for number in range(20):
            generate(clients["b"], "s", output(number))
            generate(clients["a"], "s", output(number + 40))
            clients["a"].delete_tenant_data()
            assert knows(clients["b"], number)
            assert not knows(clients["a"], number + 40)


def test_old_outputs_leave_the_file(tmp_path: Path) -> None:
    now = [1000.0]
    with log_on(tmp_path, LogOptions(1 << 12, max_age_s=10), lambda: now[0]) as log:
        for number in range(4):
            keep(log, output(number), "a", time_s=1000.0 + 4 * number)
        now[0] = 1015.0
        log.remove_expired()
        assert [on_disk(tmp_path, number) for number in range(4)] == [False, False, True, True]
        assert kept(log, "a") == [output(2).tolist(), output(3).tolist()]
        now[0] = 1020.0
        log.remove_expired()  # the file is not rewritten within the hour
        assert kept(log, "a") == [output(3).tolist()]
        keep(log, output(5), "a", time_s=1020.0)
        assert log.failures == 0
    with log_on(tmp_path) as log:
        assert kept(log, "a") == [output(3).tolist(), output(5).tolist()]

"""What reads bytes from strangers bears all that its seeds become; faults that are planted show."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from retriever.log.pools import Pools
from retriever.plugins.replication import replicated_records as records
from retriever.predict.pool import Pool
from retriever.security.access import Grant, Scope
from retriever.security.admission import Authenticator
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb
from tests.oracles.fuzz import fuzz_bytes
from tests.oracles.fuzz.byte_calls import METHODS, TENANTS, Call, CalledService, calls_in
from tests.oracles.fuzz.byte_readers import readers
from tests.oracles.fuzz.byte_seeds import seeds
from tests.oracles.fuzz.fuzzing import CrashError, LeakError
from tests.suite_parts import cases

ROUNDS = {
    "calls": cases(30, of=150),
    "headers": cases(60, of=300),
    "records": cases(20, of=100),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CalledService]:
    made = CalledService(tmp_path_factory.mktemp("service"))
    yield made
    made.close()


@pytest.fixture
def all_readers(service: CalledService, tmp_path: Path) -> dict[str, Callable[..., None]]:
    return readers(lambda: service, tmp_path)


def damaged(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        changed[at : at + chance.randint(0, 3)] = chance.randbytes(chance.randint(0, 3))
    return bytes(changed)


@pytest.mark.seeds
@pytest.mark.parametrize("name", fuzz_bytes.READERS)
def test_seeds_are_borne_whole_and_damaged(
    name: str, all_readers: dict[str, Callable[..., None]]
) -> None:
    chance = random.Random(name)
    for seed in seeds()[name]:
        all_readers[name](seed)
    for _ in range(ROUNDS.get(name, cases(200, of=1000))):
        all_readers[name](damaged(chance.choice(seeds()[name]), chance))


@pytest.mark.plugin("retriever.plugins.findings")
def test_every_call_is_reached_by_a_seed(service: CalledService) -> None:
    made = [call for seed in seeds()["calls"] for call in calls_in(seed)]
    assert {call.method for call in made} == set(METHODS)
    assert {call.tenant for call in made} == set(TENANTS)
    answered = {
        call.method
        for call in made
        if service.call(call.method, [call.content], service.headers["a"]).code
        is grpc.StatusCode.OK
    }
    assert len(answered) >= len(METHODS) - 1
    service.run(bytes(Call("DeleteTenantData", "a", b"")))


def test_a_planted_leak_between_pools_is_found(
    service: CalledService, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Pools.get

    def shared(self: Pools, _: str) -> Pool:
        return own(self, "victim")

    monkeypatch.setattr(Pools, "get", shared)
    with pytest.raises(LeakError, match="another tenant's tokens"):
        service.run(seeds()["calls"][0])


def test_a_planted_open_door_is_found(
    all_readers: dict[str, Callable[..., None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Authenticator, "grant", lambda *_: Grant("a", "a", frozenset({Scope.DRAFT}))
    )
    with pytest.raises(LeakError, match="lets in"):
        all_readers["headers"](seeds()["headers"][0])


def test_an_error_that_nobody_expects_is_found(
    service: CalledService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("retriever.service.jobs.tree_to_message", fail)
    with pytest.raises(CrashError, match="INTERNAL"):
        service.run(seeds()["calls"][0])


def test_a_client_that_takes_anything_for_a_tree_is_found(
    all_readers: dict[str, Callable[..., None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def anything(trees: Sequence[pb.DraftTree], _: int) -> list[DraftTree]:
        return [
            DraftTree(
                np.array(each.token_ids, np.int32),
                np.array(each.parents, np.int32),
                np.array(each.probabilities, np.float32),
                np.array(each.sources, np.uint8),
            )
            for each in trees
        ]

    monkeypatch.setattr("retriever.client.conversation.trees_from_messages", anything)
    tree = pb.DraftTree(
        token_ids=[1, 2], parents=[1, 0], probabilities=[0.5, 0.4], sources=[pb.SOURCE_CORPUS] * 2
    )
    reply = pb.DraftStreamResponse(trees=[tree, tree]).SerializeToString()
    with pytest.raises(CrashError, match="for a tree"):
        all_readers["replies"](reply)


def test_a_record_that_is_read_as_another_is_found(
    all_readers: dict[str, Callable[..., None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = records.decode

    def shorter(data: bytes, stream: bytes) -> records.Record:
        record = own(data, stream)
        return replace(record, tokens=record.tokens[1:])

    monkeypatch.setattr(records, "decode", shorter)
    with pytest.raises(CrashError, match="another one"):
        all_readers["records"](seeds()["records"][3])


@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed")
def test_the_fuzzer_tells_what_it_has_done(tmp_path: Path) -> None:
    told = fuzz_bytes.fuzz("explanations", tmp_path, runs=200, seconds=20, seed=1)
    assert told["executions"] >= 200
    assert told["coverage"] > 10
    assert not told["found"]

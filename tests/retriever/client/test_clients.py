"""What both clients that fail open do alike: fail-opens that are told, credentials, padding."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from retriever.client.asynchronous import AsyncResilientDrafter
from retriever.client.conversation import Conversation, FailOpen, SequenceStep
from retriever.client.credentials import Credentials
from retriever.client.resilient import ResilientDrafter
from retriever.drafter import DraftRequest
from retriever.errors import CredentialsError
from retriever.security.access import add_token
from retriever.security.protection import Protection, ProtectionFiles
from retriever.sequences import TokenSequence
from retriever.service.draft_stream import MOST_FAIL_OPENS, bounded_fail_opens
from retriever.sessions.draft_counts import DraftCounts
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import Source
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.messages import pad_request
from tests.patience import can_be_kept, free_address
from tests.retriever.client.kinds_of_clients import Client, both
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.security.authorities import signed
from tests.retriever.security.in_process import serving
from tests.retriever.service.decodes import DEADLINE_S, PROMPT, decode, plain
from tests.retriever.token_ids import ids

DOWN: Final = pb.FAIL_OPEN_REASON_DOWN


def test_both_clients_have_the_same_properties() -> None:
    names = {name for name in vars(ResilientDrafter) if not name.startswith("_")}
    assert names == {name for name in vars(AsyncResilientDrafter) if not name.startswith("_")}


@both
def test_what_a_client_went_without_its_server_is_told_once(client: Client) -> None:
    service, address = EmbeddedDrafter(), free_address()
    with client(address, deadline_s=1, local=False) as drafter:
        drafter.open("s", PROMPT)
        for length in range(len(PROMPT), len(PROMPT) + 5):
            drafter.draft([DraftRequest("s", ids(1) if length > len(PROMPT) else ids(), length, 4)])
        assert drafter.fail_opens == {FailOpen.DOWN: 5}
        with serving(service, address):
            assert drafter.wait(60)
            for length in range(len(PROMPT) + 5, len(PROMPT) + 8):
                drafter.draft([DraftRequest("s", ids(1), length, 4)])
        assert drafter.fail_opens == {FailOpen.DOWN: 5}
    assert (
        service.state.draft_counts.fail_opens[DOWN]
        == service.state.draft_counts.fail_opens.total()
        == 5
    )
    service.shut_down()


def test_what_was_told_on_a_stream_that_broke_is_told_again() -> None:
    conversation = Conversation("a", "")
    sequence = TokenSequence(PROMPT)
    step = SequenceStep(DraftRequest("s", ids(), len(PROMPT), 4), sequence)
    conversation.missed[FailOpen.BUSY] = 3
    told = []
    for _ in range(2):
        conversation.begin()
        message, _ = conversation.ask([step], 0.0, 1.0)
        told.append([(each.reason, each.count) for each in message.fail_opens])
    conversation.settle(pb.DraftStreamResponse(sequence_number=1, trees=[pb.DraftTree()]))
    assert not conversation.ask([step], 0.0, 1.0)[0].fail_opens
    assert told == 2 * [[(pb.FAIL_OPEN_REASON_BUSY, 3)]]


def test_every_reason_has_its_word_on_the_wire() -> None:
    words = [name.removeprefix("FAIL_OPEN_REASON_").lower() for name in pb.FailOpenReason.keys()]  # noqa: SIM118
    assert words == ["unspecified", *FailOpen]


def test_a_client_that_lies_moves_counts_within_bounds() -> None:
    draft_counts = DraftCounts()
    huge = pb.FailOpenCount(reason=DOWN, count=(1 << 32) - 1)
    unknown = pb.FailOpenCount(reason=99, count=7)  # type: ignore[arg-type]
    draft_counts.failed_open(bounded_fail_opens([huge, huge, unknown]))
    assert draft_counts.fail_opens[DOWN] == MOST_FAIL_OPENS
    assert draft_counts.fail_opens[pb.FAIL_OPEN_REASON_UNSPECIFIED] == 7
    assert draft_counts.fail_opens.total() == MOST_FAIL_OPENS + 7


@both
@can_be_kept
def test_credentials_are_shown_and_files_checked_at_once(client: Client, tmp_path: Path) -> None:
    authority = signed(tmp_path, "authority")
    server = signed(tmp_path, "server", authority)
    access = tmp_path / "access.jsonl"
    token = add_token(access, "acme")
    protection = Protection.of(ProtectionFiles(server.certificate, server.key, access=access))
    service = EmbeddedDrafter()
    with serving(service, protection=protection) as address:
        for shown, is_known in ((token, True), ("x" * 40, False)):
            credentials = Credentials(authority.certificate, token=shown)
            with client(address, deadline_s=1, credentials=credentials) as drafter:
                assert drafter.wait(60 if is_known else 0.5) == is_known
                assert decode(drafter, "s", 40).tokens == plain(40)
                assert bool(drafter.fail_opens) != is_known
        with pytest.raises(CredentialsError, match="missing"):
            client(address, credentials=Credentials(tmp_path / "missing.pem"))
    service.shut_down()


def test_messages_of_a_padding_client_have_few_sizes() -> None:
    for length in range(3000):
        message = pb.DraftStreamRequest(
            openings=[pb.OpenSessionRequest(session_id="s" * length)], sequence_number=1
        )
        before = message.ByteSize()
        pad_request(message)
        size = message.ByteSize()
        assert size == max(256, 1 << (size - 1).bit_length())
        assert before <= size <= max(256, 4 * before)


@both
def test_steps_of_a_padding_client_have_one_size(client: Client) -> None:
    service = EmbeddedDrafter()
    sizes = set()

    class Measured(Conversation):
        def ask(self, *arguments: Any) -> Any:
            asked = super().ask(*arguments)
            sizes.add(asked[0].ByteSize())
            return asked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retriever.client.planner.Conversation", Measured)
        with (
            serving(service) as address,
            client(address, deadline_s=5, pad_requests=True) as drafter,
        ):
            assert drafter.wait(60)
            done = decode(drafter, "s", 200)
            assert not drafter.fail_opens
    assert sum(done.accepted) > 100  # steps of one token, and of many
    assert sizes == {256}
    service.shut_down()


@pytest.mark.faults
@both
@can_be_kept
def test_an_own_index_drafts_while_the_server_is_away(client: Client, index: Path) -> None:
    local, address = EmbeddedDrafter.open_indexes([index]), free_address()
    local.warm()
    tokens = local.stats().indexes[0].segments[0].tokens[:16].astype(np.int32)
    process, _ = start_service("--address", address)
    with client(address, deadline_s=DEADLINE_S, local=local) as drafter:

        def sources(length: int) -> set[int]:
            new = tokens[length - 1 : length] if length > 8 else ids()
            (tree,) = drafter.draft([DraftRequest("s", new, length, 8)])
            return set(tree.sources.tolist())

        assert drafter.wait(60)
        drafter.open("s", tokens[:8])
        assert Source.CORPUS not in sources(8)  # the server has no index
        process.kill()
        process.communicate(timeout=60)
        assert Source.CORPUS in sources(9)
        away = decode(drafter, "away", 300)
        assert away.tokens == plain(300)
        assert max(away.waits_s) < 1.2 * DEADLINE_S
        process, _ = start_service("--address", address)
        assert drafter.wait(60)
        failed = drafter.fail_opens.total()
        assert Source.CORPUS not in sources(10)
        assert decode(drafter, "back", 300).tokens == plain(300)
        assert drafter.fail_opens.total() == failed
    stop_service(process)
    local.shut_down()

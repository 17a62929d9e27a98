"""Clients where real networks begin: credentials that rotate, proxies, connections that idle."""

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest

from retriever.client.credentials import Credentials
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest
from retriever.errors import AccessRefusedError, CredentialsError, DrafterUnavailableError
from retriever.security import private_files
from retriever.security.access import add_token, name_of, remove
from retriever.security.protection import Protection, ProtectionFiles
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from tests.patience import can_be_kept, free_port
from tests.retriever.client.kinds_of_clients import Awaited, Client
from tests.retriever.security.authorities import signed
from tests.retriever.security.in_process import serving
from tests.retriever.service.decodes import wait_until
from tests.retriever.token_ids import ids


@pytest.fixture
def drafter() -> Iterator[EmbeddedDrafter]:
    made = EmbeddedDrafter()
    yield made
    made.shut_down()


def step(length: int) -> list[DraftRequest]:
    return [DraftRequest("s", ids(length), length, 4)]


def replace_file(path: Path, text: str) -> None:
    """Replace a file as a rotation does, at once."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


class Rotating:
    """A token file, and an access file that its token is in."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(private_files, "LOOK_EVERY_S", 0.0)
        self.access, self.file = folder / "access", folder / "token"
        self.token = add_token(self.access, "acme")
        self.file.write_text(self.token + "\n")
        self.credentials = Credentials(token_file=self.file)
        self.protection = Protection.of(ProtectionFiles(access=self.access))

    @contextmanager
    def strict(self, drafter: EmbeddedDrafter) -> Iterator[RemoteDrafter]:
        """Serve during the block; give a client that shows the token of the file."""
        socket_path = self.file.with_name("s")
        with (
            serving(drafter, f"unix:{socket_path}", self.protection) as address,
            RemoteDrafter(address, credentials=self.credentials, timeout_s=20) as remote,
        ):
            yield remote

    def rotate(self) -> None:
        """Give the tenant another token in place of its own."""
        before, self.token = self.token, add_token(self.access, "acme")
        remove(self.access, name_of(before) or "")
        replace_file(self.file, self.token)


def test_a_strict_client_shows_the_token_that_its_file_holds_now(
    tmp_path: Path, drafter: EmbeddedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotating = Rotating(tmp_path, monkeypatch)
    with rotating.strict(drafter) as remote:
        remote.open("s", [1, 2])
        remote.draft(step(3))
        rotating.rotate()
        remote.list_indexes()
        with pytest.raises((AccessRefusedError, DrafterUnavailableError)):
            remote.draft(step(4))  # the stream was let in with the token before
        remote.close("s")
        remote.open("s", [1, 2])
        assert len(remote.draft(step(3))) == 1


@pytest.mark.parametrize("client", [ResilientDrafter, Awaited])
@can_be_kept
def test_a_resilient_client_goes_on_with_the_next_token(
    client: Client, tmp_path: Path, drafter: EmbeddedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotating = Rotating(tmp_path, monkeypatch)
    with (
        serving(drafter, f"unix:{tmp_path}/s", rotating.protection) as address,
        client(address, credentials=rotating.credentials, deadline_s=5, local=False) as remote,
    ):
        assert remote.wait(20)
        remote.open("s", ids(1, 2))
        remote.draft(step(3))
        assert not remote.fail_opens
        rotating.rotate()
        length = 3

        def is_drafted_for() -> bool:
            nonlocal length
            length, before = length + 1, remote.fail_opens.total()
            remote.draft(step(length))
            return bool(remote.fail_opens.total() == before)

        is_drafted_for()  # its stream ends
        assert remote.wait(20)
        assert wait_until(is_drafted_for, 20)


def test_an_empty_token_file_is_one_that_is_being_replaced(
    tmp_path: Path, drafter: EmbeddedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotating = Rotating(tmp_path, monkeypatch)
    with rotating.strict(drafter) as remote:
        remote.open("s", [1, 2])
        for text in ("", "\n", "two\nlines"):
            rotating.file.write_text(text)
            assert remote.list_indexes() == []
        rotating.file.unlink()
        assert remote.list_indexes() == []
        rotating.rotate()
        assert remote.list_indexes() == []
    rotating.file.write_text("")
    with pytest.raises(CredentialsError, match=r"token: the token is empty"):
        RemoteDrafter("unix:/nowhere", credentials=rotating.credentials)
    with pytest.raises(CredentialsError, match="leave out one"):
        Credentials(token="a", token_file=rotating.file)  # noqa: S106  (nobody's)


@pytest.mark.parametrize("client", [ResilientDrafter, Awaited])
def test_what_a_person_has_to_mend_is_a_warning_once(
    client: Client,
    tmp_path: Path,
    drafter: EmbeddedDrafter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    add_token(tmp_path / "access", "acme")
    protection = Protection.of(ProtectionFiles(access=tmp_path / "access"))
    wrong = Credentials(token="wrong" * 10)
    with (
        caplog.at_level(logging.INFO),
        serving(drafter, f"unix:{tmp_path}/s", protection) as address,
        client(address, credentials=wrong, deadline_s=0.05, local=False) as remote,
    ):
        assert not remote.wait(1)
    told = [each for each in caplog.records if "no draft" in each.getMessage()]
    warnings = [each for each in told if each.levelno == logging.WARNING]
    assert len(told) > 1
    assert len(warnings) == 1
    assert "credentials" in warnings[0].getMessage()


@pytest.mark.parametrize("client", [RemoteDrafter, ResilientDrafter])
def test_another_authority_is_trusted_once_it_is_in_the_file(
    client: Client, tmp_path: Path, drafter: EmbeddedDrafter
) -> None:
    trusted, port = tmp_path / "ca.pem", free_port()
    authorities = [signed(tmp_path, name) for name in ("first", "second")]
    protections = [
        Protection.of(ProtectionFiles(made.certificate, made.key))
        for made in (
            signed(tmp_path, f"by-{number}", authority)
            for number, authority in enumerate(authorities)
        )
    ]
    trusted.write_bytes(authorities[0].certificate.read_bytes())
    options: dict[str, Any] = {"timeout_s": 20} if client is RemoteDrafter else {"deadline_s": 5}
    with client(f"127.0.0.1:{port}", credentials=Credentials(trusted), **options) as remote:
        with serving(drafter, f"127.0.0.1:{port}", protections[0]):
            remote.open("s", ids(1, 2))
            if client is ResilientDrafter:
                assert remote.wait(20)
            remote.draft(step(3))
        replace_file(trusted, authorities[1].certificate.read_text())
        with serving(drafter, f"127.0.0.1:{port}", protections[1]):
            if client is ResilientDrafter:
                assert remote.wait(20)
                before = remote.fail_opens.total()
                remote.draft(step(4))
                assert remote.fail_opens.total() == before
            else:
                remote.open("t", ids(1, 2))
                remote.close("t")


REFUSAL = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"


@contextmanager
def proxy(answer: bytes = REFUSAL) -> Iterator[tuple[str, list[bytes]]]:
    """Listen as a proxy that refuses all, or says nothing; give its URL and what it was asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def refuse() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                asked.append(connection.recv(4096))
                if answer:
                    with connection:
                        connection.sendall(answer)
                else:
                    silent.append(connection)

        silent: list[socket.socket] = []
        Thread(target=refuse, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
        listening.shutdown(socket.SHUT_RDWR)
        for each in silent:
            each.close()


@pytest.mark.faults
def test_a_proxy_that_never_answers_costs_the_time_that_was_given(
    drafter: EmbeddedDrafter,
) -> None:
    with proxy(b"") as (url, asked), serving(drafter) as address:
        shown = Credentials(proxy=url)
        with RemoteDrafter(address, credentials=shown, timeout_s=1) as remote:
            began = time.monotonic()
            with pytest.raises(DrafterUnavailableError) as raised:
                remote.list_indexes()
            assert time.monotonic() - began < 5
            assert address in str(raised.value)
        with ResilientDrafter(address, credentials=shown) as resilient:
            resilient.open("s", ids(1, 2))
            began = time.monotonic()
            assert len(resilient.draft(step(3))) == 1
            assert time.monotonic() - began < 1
        assert asked


def test_a_service_is_asked_directly_whatever_the_environment_says(
    drafter: EmbeddedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy() as (url, asked), serving(drafter) as address:
        for name in ("http_proxy", "grpc_proxy", "https_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, url)
        monkeypatch.delenv("no_proxy", raising=False)
        for shown in (None, Credentials(token="a")):  # noqa: S106  (nobody's)
            with RemoteDrafter(address, credentials=shown, timeout_s=20) as remote:
                assert remote.list_indexes() == []
        with ResilientDrafter(address) as remote:
            assert remote.wait(20)
        with Awaited(address) as remote:
            assert remote.wait(20)
        assert asked == []


def test_a_proxy_is_used_where_it_is_named_and_messages_name_the_service(
    drafter: EmbeddedDrafter,
) -> None:
    with proxy() as (url, asked), serving(drafter) as address:
        shown = Credentials(proxy=url)
        with (
            RemoteDrafter(address, credentials=shown, timeout_s=20) as remote,
            pytest.raises(DrafterUnavailableError) as raised,
        ):
            remote.list_indexes()
        assert any(address.encode() in each for each in asked)
        assert address in str(raised.value)
        assert url.removeprefix("http://") in str(raised.value)
    with pytest.raises(CredentialsError, match="http://HOST:PORT"):
        Credentials(proxy="proxy:3128")


@pytest.mark.faults
def test_an_idle_connection_is_kept_and_not_refused_for_its_pings() -> None:
    """A client of one's own that pings without a call: gRPC sent GOAWAY for the third ping."""
    drafter = EmbeddedDrafter()
    options = [
        ("grpc.keepalive_time_ms", 6_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    states: list[grpc.ChannelConnectivity] = []
    with serving(drafter) as address, grpc.insecure_channel(address, options) as channel:
        channel.subscribe(states.append)
        stub = RetrieverServiceStub(channel)
        stub.ListIndexes(pb.ListIndexesRequest(), timeout=20)
        time.sleep(32)
        stub.ListIndexes(pb.ListIndexesRequest(), timeout=20)
    drafter.shut_down()
    seen = [each for each in states if each is not grpc.ChannelConnectivity.SHUTDOWN]
    assert seen[-1] is grpc.ChannelConnectivity.READY
    assert seen.count(grpc.ChannelConnectivity.READY) == 1


def test_an_authority_between_is_trusted_through_the_one_above(
    tmp_path: Path, drafter: EmbeddedDrafter
) -> None:
    root = signed(tmp_path, "root")
    between = signed(tmp_path, "between", root, is_authority=True)
    leaf = signed(tmp_path, "leaf", between)
    chain = tmp_path / "chain.pem"
    chain.write_bytes(leaf.certificate.read_bytes() + between.certificate.read_bytes())
    with serving(drafter, protection=Protection.of(ProtectionFiles(chain, leaf.key))) as address:
        shown = Credentials(root.certificate)
        with RemoteDrafter(address, credentials=shown, timeout_s=20) as remote:
            assert remote.list_indexes() == []
    alone = Protection.of(ProtectionFiles(leaf.certificate, leaf.key))
    with (
        serving(drafter, protection=alone) as address,
        RemoteDrafter(address, credentials=shown, timeout_s=20) as remote,
        pytest.raises(DrafterUnavailableError, match="not signed by an authority"),
    ):
        remote.list_indexes()


def test_a_network_of_ipv6_alone_is_served(drafter: EmbeddedDrafter) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with serving(drafter, "[::1]:0") as address, ResilientDrafter(address) as remote:
        assert address.startswith("[::1]:")
        assert remote.wait(20)


class Cutting:
    """A load balancer that passes bytes on, until it cuts all connections."""

    def __init__(self, behind: str) -> None:
        host, _, port = behind.rpartition(":")
        self._behind = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._open: list[socket.socket] = []
        Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Cut all connections; others can be made."""
        connections, self._open = self._open, []
        for each in connections:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut all, and take none any more."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._behind)
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    Thread(target=self._pass_on, args=pair, daemon=True).start()

    @staticmethod
    def _pass_on(from_: socket.socket, to: socket.socket) -> None:
        with from_, suppress(OSError):  # the other way's thread closes the other one
            while data := from_.recv(1 << 16):
                to.sendall(data)
        with suppress(OSError):
            to.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("client", [ResilientDrafter, Awaited])
@can_be_kept
def test_a_stream_that_a_load_balancer_cuts_is_opened_again_with_all_tokens(
    client: Client, drafter: EmbeddedDrafter
) -> None:
    with (
        serving(drafter) as behind,
        closing(Cutting(behind)) as balancer,
        client(balancer.address, deadline_s=5, local=False) as remote,
    ):
        assert remote.wait(20)
        remote.open("s", ids(*[1, 2, 3] * 9))
        remote.draft([DraftRequest("s", ids(1), 28, 4)])
        balancer.cut()
        (tree,) = remote.draft([DraftRequest("s", ids(2), 29, 4)])
        if not len(tree):  # it was cut within this step, or before
            assert remote.wait(20)
            (tree,) = remote.draft([DraftRequest("s", ids(), 29, 4)])
        assert tree.token_ids[0] == 3


@pytest.mark.faults
def test_a_stream_outlives_the_certificate_that_it_began_with(
    tmp_path: Path, drafter: EmbeddedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New connections are refused until the file is renewed; those that are open go on."""
    monkeypatch.setattr(private_files, "LOOK_EVERY_S", 0.0)
    authority = signed(tmp_path, "authority")
    short = signed(tmp_path, "leaf", authority, hours=(-1, 3 / 3600))
    protection = Protection.of(ProtectionFiles(short.certificate, short.key))
    shown = Credentials(authority.certificate)
    with (
        serving(drafter, protection=protection) as address,
        RemoteDrafter(address, credentials=shown, timeout_s=20) as remote,
    ):
        remote.open("s", [1, 2])
        remote.draft(step(3))
        expires_s = short.x509.not_valid_after_utc.timestamp()
        assert wait_until(lambda: time.time() > expires_s, 20)
        remote.draft(step(4))
        with (
            RemoteDrafter(address, credentials=shown, timeout_s=5) as late,
            pytest.raises(DrafterUnavailableError, match="expired"),
        ):
            late.list_indexes()
        renewed = signed(tmp_path, "renewed", authority)
        renewed.key.replace(short.key)
        renewed.certificate.replace(short.certificate)
        with RemoteDrafter(address, credentials=shown, timeout_s=20) as late:
            assert wait_until(lambda: answers(late), 20)
        remote.draft(step(5))


def answers(remote: RemoteDrafter) -> bool:
    try:
        return remote.list_indexes() == []
    except DrafterUnavailableError:
        return False


MOVING = """
import sys
from pathlib import Path
from retriever.client.resilient import ResilientDrafter
from retriever.drafter import DraftRequest
from retriever.sessions.embedded import EmbeddedDrafter
from tests.patience import free_port
from tests.retriever.security.in_process import serving
from tests.retriever.token_ids import ids

hosts, drafter, port = Path(sys.argv[1]), EmbeddedDrafter(), free_port()
with ResilientDrafter(f"drafts.test:{port}", deadline_s=5, local=False) as remote:
    for length, place in enumerate(("127.0.0.2", "127.0.0.3"), 3):
        hosts.write_text(f"{place} drafts.test\\n")
        with serving(drafter, f"{place}:{port}"):
            assert remote.wait(30), place
            if length == 3:
                remote.open("s", ids(1, 2))
            before = remote.fail_opens.total()
            remote.draft([DraftRequest("s", ids(length), length, 4)])
            assert remote.fail_opens.total() == before, place
"""


@pytest.mark.faults
@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode
    != 0,
    reason="no mount of one's own",
)
def test_a_name_that_moves_is_followed(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.touch()
    mounted = 'mount --bind "$1" /etc/hosts && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--mount", "sh", "-c", mounted, "sh", str(hosts), sys.executable, MOVING]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("client", [ResilientDrafter, Awaited])
@can_be_kept
def test_a_socket_that_a_container_makes_again_is_found(
    client: Client, tmp_path: Path, drafter: EmbeddedDrafter
) -> None:
    """A volume that two containers share: the service's ends, and another begins."""
    address = f"unix:{tmp_path}/shared/s"
    (tmp_path / "shared").mkdir()
    with client(address, deadline_s=5, local=False) as remote:
        remote.open("s", ids(1, 2))
        for length in (3, 4):
            with serving(drafter, address):
                assert remote.wait(20)
                before = remote.fail_opens.total()
                remote.draft(step(length))
                assert remote.fail_opens.total() == before
            (tmp_path / "shared" / "s").unlink(missing_ok=True)

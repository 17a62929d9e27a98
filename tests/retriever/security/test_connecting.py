"""Clients and services over TLS, with certificates and tokens: real servers, real handshakes."""

import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import grpc
import pytest
from cryptography.x509 import DNSName

from retriever.client import credentials
from retriever.client.credentials import VARIABLES, Credentials
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest
from retriever.errors import (
    AccessRefusedError,
    CredentialsError,
    DrafterUnavailableError,
    NotPermittedError,
    RetrieverError,
)
from retriever.security import private_files
from retriever.security.access import add_certificate, add_token, name_of, new_token, remove
from retriever.security.protection import Protection, ProtectionFiles
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.security.authorities import Signed, signed
from tests.retriever.security.in_process import on_loop, serving
from tests.retriever.token_ids import ids
from tests.retriever.warm_interpreter import run


@pytest.fixture(scope="module")
def drafter() -> Iterator[EmbeddedDrafter]:
    made = EmbeddedDrafter()
    yield made
    made.shut_down()


def protected(server: Signed, **files: Path) -> Protection:
    return Protection.of(ProtectionFiles(server.certificate, server.key, **files))  # type: ignore[arg-type]


def use(address: str, shown: Credentials | None) -> None:
    """Make a unary call, and a step on a stream."""
    with RemoteDrafter(address, credentials=shown, timeout_s=5) as remote:
        remote.open("s", [1, 2])
        assert len(remote.draft([DraftRequest("s", ids(3), 3, 0)])) == 1
        remote.close("s")


def until_over(certificate: Signed) -> None:
    """Wait until a certificate has expired, which it does at a whole second."""
    time.sleep(max(0.0, certificate.x509.not_valid_after_utc.timestamp() - time.time()) + 0.05)


def refused(address: str, shown: Credentials | None) -> str:
    with pytest.raises(DrafterUnavailableError) as raised:
        use(address, shown)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_over_tls_the_service_is_known_by_its_authority_and_name(
    tmp_path: Path, drafter: EmbeddedDrafter, authority: Signed, server: Signed
) -> None:
    stranger = signed(tmp_path, "stranger")
    named = signed(tmp_path, "named", authority, names=(DNSName("drafts.example"),))
    with serving(drafter, protection=protected(server)) as address:
        use(address, Credentials(authority.certificate))
        assert "not signed by an authority" in refused(address, Credentials(stranger.certificate))
        assert "may want TLS" in refused(address, None)
    with serving(drafter, protection=protected(named)) as address:
        assert "another host name" in refused(address, Credentials(authority.certificate))
        use(address, Credentials(authority.certificate, server_name="drafts.example"))
    with serving(drafter) as address:
        assert "does not encrypt" in refused(address, Credentials(authority.certificate))


def test_a_service_whose_certificate_expires_while_it_runs_is_told_from_others(
    tmp_path: Path, drafter: EmbeddedDrafter, authority: Signed
) -> None:
    short = signed(tmp_path, "short", authority, hours=(-1, 2 / 3600))
    with serving(drafter, protection=protected(short)) as address:
        use(address, Credentials(authority.certificate))
        until_over(short)
        assert "certificate has expired" in refused(address, Credentials(authority.certificate))


def test_a_renewed_certificate_is_used_without_a_restart(
    tmp_path: Path,
    drafter: EmbeddedDrafter,
    server: Signed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private_files, "LOOK_EVERY_S", 0.0)
    successor = signed(tmp_path, "successor")
    renewed = signed(tmp_path, "renewed", successor)
    with serving(drafter, protection=protected(server)) as address:
        refused(address, Credentials(successor.certificate))
        renewed.key.replace(server.key)
        renewed.certificate.replace(server.certificate)
        use(address, Credentials(successor.certificate))


def test_with_mutual_tls_only_certificates_of_the_authority_are_let_in(
    tmp_path: Path,
    drafter: EmbeddedDrafter,
    authority: Signed,
    server: Signed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = signed(tmp_path, "engine", authority, names=(DNSName("engine.example"),))
    access = tmp_path / "access"
    add_certificate(access, "acme", "DNS:engine.example")
    files = {"client_ca": authority.certificate, "access": access}
    shown = Credentials(authority.certificate, engine.certificate, engine.key)
    with serving(drafter, protection=protected(server, **files)) as address:
        use(address, shown)
        assert "client certificate" in refused(address, Credentials(authority.certificate))
        self_made = signed(tmp_path, "self-made")
        other = Credentials(authority.certificate, self_made.certificate, self_made.key)
        assert "client certificate" in refused(address, other)
        with monkeypatch.context() as patched:  # nor does the service let in what has expired
            patched.setattr(credentials, "find_spec", lambda _: None)
            over = signed(tmp_path, "over", authority, hours=(-3, -1))
            expired = Credentials(authority.certificate, over.certificate, over.key)
            assert "client certificate" in refused(address, expired)
        unknown = signed(tmp_path, "unknown", authority)
        with pytest.raises(NotPermittedError, match="no tenant"):
            use(address, Credentials(authority.certificate, unknown.certificate, unknown.key))
    with serving(drafter, protection=protected(server, client_ca=authority.certificate)) as address:
        use(address, shown)


@pytest.mark.faults
def test_a_stream_ends_once_its_certificate_has_expired(
    tmp_path: Path, drafter: EmbeddedDrafter, authority: Signed, server: Signed
) -> None:
    short = signed(tmp_path, "short", authority, hours=(-1, 2 / 3600))
    shown = Credentials(authority.certificate, short.certificate, short.key)
    with (
        serving(drafter, protection=protected(server, client_ca=authority.certificate)) as address,
        RemoteDrafter(address, credentials=shown) as remote,
    ):
        remote.open("s", [1, 2])
        remote.draft([DraftRequest("s", ids(3), 3, 4)])
        until_over(short)
        with pytest.raises(AccessRefusedError):
            remote.draft([DraftRequest("s", ids(4), 4, 4)])


def test_a_clients_own_files_are_checked_before_it_connects(
    tmp_path: Path, authority: Signed
) -> None:
    over = signed(tmp_path, "over", authority, hours=(-3, -1))
    for wrong, reason in (
        (Credentials(authority.certificate, over.certificate, over.key), "expired on"),
        (Credentials(authority.certificate, over.certificate, authority.key), "not the key"),
        (Credentials(over.key), "no readable PEM certificate"),
        (Credentials(tmp_path / "none"), "No such file"),
    ):
        with pytest.raises(CredentialsError, match=reason):
            RemoteDrafter("127.0.0.1:1", credentials=wrong)
    with pytest.raises(CredentialsError, match="give both"):
        Credentials(certificate=over.certificate)
    with pytest.raises(CredentialsError, match="has invalid characters"):
        Credentials(token="a\nb")  # noqa: S106  (no token)


def test_without_a_valid_token_nobody_learns_why(
    tmp_path: Path, drafter: EmbeddedDrafter, authority: Signed, server: Signed
) -> None:
    access = tmp_path / "access"
    token = add_token(access, "acme")
    ca = authority.certificate
    with serving(drafter, protection=protected(server, access=access)) as address:
        use(address, Credentials(ca, token=token))
        texts = set()
        for wrong in (None, new_token(), f"{token[:-5]}AAAAA", "nonsense"):
            with pytest.raises(AccessRefusedError, match="credentials are missing") as raised:
                use(address, Credentials(ca, token=wrong))
            texts.add(str(raised.value))
        assert len(texts) == 1
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(ca.read_bytes())) as channel:
            call = RetrieverServiceStub(channel).DraftStream(iter([pb.DraftStreamRequest()]))
            with pytest.raises(grpc.RpcError) as ended:
                next(call)
            assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_stream_ends_once_its_token_is_revoked(
    tmp_path: Path, drafter: EmbeddedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "LOOK_EVERY_S", 0.0)
    access = tmp_path / "access"
    token = add_token(access, "acme")
    protection = Protection.of(ProtectionFiles(access=access))
    with (
        serving(drafter, f"unix:{tmp_path}/s", protection) as address,
        RemoteDrafter(address, credentials=Credentials(token=token)) as remote,
    ):
        remote.open("s", [1, 2])
        remote.draft([DraftRequest("s", ids(3), 3, 4)])
        remove(access, name_of(token) or "")
        with pytest.raises(AccessRefusedError):
            remote.draft([DraftRequest("s", ids(4), 4, 4)])


def test_asyncio_channels_carry_the_same_credentials(
    tmp_path: Path, drafter: EmbeddedDrafter, authority: Signed, server: Signed
) -> None:
    access = tmp_path / "access"
    shown = Credentials(authority.certificate, token=add_token(access, "acme"))

    async def exchange(address: str) -> int:
        async with shown.aio_channel(address, ()) as channel:
            stub: Any = RetrieverServiceStub(channel)
            await stub.OpenSession(pb.OpenSessionRequest(session_id="s"))
            call = stub.DraftStream()
            steps = [pb.SessionStep(session_id="s")]
            await call.write(pb.DraftStreamRequest(sequence_number=1, steps=steps))
            response = await call.read()
            await stub.CloseSession(pb.CloseSessionRequest(session_id="s"))
            return len(response.trees)

    with serving(drafter, protection=protected(server, access=access)) as address:
        assert on_loop(exchange(address)) == 1


def test_a_unix_socket_is_private_from_the_first(tmp_path: Path, drafter: EmbeddedDrafter) -> None:
    path, modes, ended = tmp_path / "s", set(), Event()

    def look() -> None:
        while not ended.is_set():
            if path.exists():
                modes.add(stat.S_IMODE(path.stat().st_mode))

    watcher = Thread(target=look)
    watcher.start()
    before = os.umask(0)
    try:
        with serving(drafter, f"unix:{path}") as address:
            use(address, None)
            ended.set()
            watcher.join()
    finally:
        os.umask(before)
    assert modes == {0o600}
    assert os.umask(before) == before


def test_credentials_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    token = "abc"  # noqa: S105  (nobody's)
    (tmp_path / "token").write_text(f"{token}\n")
    file = tmp_path / "c.toml"
    file.write_text('ca = "ca.pem"\ntoken_file = "token"\ntls = true\n')
    read = Credentials.from_file(file)
    assert read == Credentials(tmp_path / "ca.pem", token_file=tmp_path / "token", tls=True)
    shown = read.shown_token()
    assert shown is not None
    assert shown() == token
    assert token not in repr(Credentials(token=token))
    variables = {
        "FOREDRAFT_REMOTE_TOKEN_FILE": str(tmp_path / "token"),
        "FOREDRAFT_REMOTE_CA": "/x",
    }
    assert set(variables) < set(VARIABLES)
    found = Credentials.from_environment(variables)
    assert found == Credentials(Path("/x"), token_file=tmp_path / "token")
    assert Credentials.from_environment({}) is None
    for text, reason in (
        ('tokn = "x"', "'tokn': known are ca"),
        ("ca = 1", "must be a text"),
        ("tls = 'no'", "must be true or false"),
        ("[", "cannot be read"),
        ('token = "a"\ntoken_file = "token"', "leave out one"),
        ('token_file = "none"', "No such file"),
    ):
        file.write_text(text)
        with pytest.raises(CredentialsError, match=reason):
            Credentials.from_file(file)


@pytest.mark.plugin("retriever.plugins.replay")
def test_the_commands_serve_and_use_a_protected_service(
    tmp_path: Path, authority: Signed, server: Signed
) -> None:
    access = tmp_path / "access"
    file = tmp_path / "client.toml"
    token = add_token(access, "acme")
    arguments = ["--certificate", server.certificate, "--key", server.key, "--access", access]
    process, address = start_service("--address", "127.0.0.1:0", *map(str, arguments))
    traces = tmp_path / "traces.jsonl"
    traces.write_text('{"prompt_ids": [1, 2, 3], "output_ids": [1, 2, 3, 4]}\n')
    replay = ["replay", str(traces), "--server", address, "--credentials", str(file), "--json"]
    try:
        file.write_text(f'ca = "{authority.certificate}"\ntoken = "{token}"\n')
        done = command(*replay)
        assert done.returncode == 0, done.stderr
        file.write_text(f'ca = "{authority.certificate}"\ntoken = "{new_token()}"\n')
        done = command(*replay)
        assert done.returncode == 1
        assert done.stderr.startswith("error: credentials are missing or not valid")
        assert done.stderr.count("\n") == 1
    finally:
        stop_service(process)


def test_serving_others_without_protection_is_refused_with_the_ways_out() -> None:
    done = command("serve", "--address", "0.0.0.0:0")
    assert done.returncode == 1
    assert done.stderr.startswith("error: 0.0.0.0:0 can be reached")
    assert all(way in done.stderr for way in ("--certificate", "127.0.0.1", "--insecure"))
    assert done.stderr.count("\n") == 1


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run("-m", "foredraft", *arguments)


def test_every_refusal_is_an_error_of_ours() -> None:
    assert issubclass(NotPermittedError, AccessRefusedError)
    assert issubclass(AccessRefusedError, DrafterUnavailableError)
    assert issubclass(CredentialsError, RetrieverError)

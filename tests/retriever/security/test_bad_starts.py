"""What is wrong with files and settings ends a command with one line, without any secret."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.x509 import DNSName

from retriever.security.access import add_token
from tests.retriever.conftest import start_service
from tests.retriever.security.authorities import Signed, signed
from tests.retriever.warm_interpreter import WarmProcess, start

SECRET = "hunter2-hunter2"  # noqa: S105  (nobody's)

_GRPC = re.compile(r"[IWE]\d{4} .* ssl_transport_security\.cc")
"""What gRPC writes itself of a handshake that fails."""


def started(*arguments: object, **variables: str) -> WarmProcess:
    return start("-m", "foredraft", *arguments, env={**os.environ, **variables})


def lines(
    commands: Iterator[tuple[str, WarmProcess]],
) -> Iterator[tuple[str, str]]:
    """What commands that run at once write on standard error, and what that should hold."""
    for expected, process in list(commands):
        output, told = process.communicate(timeout=60)
        errors = "".join(line for line in told.splitlines(keepends=True) if not _GRPC.match(line))
        assert (process.returncode, output) == (1, ""), (expected, output, errors)
        assert errors.startswith("error: "), errors
        assert errors.count("\n") == 1, errors
        assert SECRET not in told
        assert "PRIVATE" not in told
        yield expected, errors


def test_a_service_does_not_start_with_credentials_that_protect_nothing(
    tmp_path: Path, authority: Signed
) -> None:
    server, other = (signed(tmp_path, name, authority) for name in ("server", "other"))
    over = signed(tmp_path, "over", authority, hours=(-3, -1))
    other.key.chmod(0o644)
    access = tmp_path / "access"
    access.touch(0o600)
    access.write_text(f"{SECRET}\n")

    def commands() -> Iterator[tuple[str, WarmProcess]]:
        for expected, certificate, key, rest in (
            ("over.pem expired on", over.certificate, over.key, ()),
            ("mode 0644", other.certificate, other.key, ()),
            ("an authority", server.certificate, server.key, ("--client-ca", server.certificate)),
            ("access, line 1", server.certificate, server.key, ("--access", access)),
        ):
            files = ["--certificate", certificate, "--key", key]
            yield expected, started("serve", "--address", "127.0.0.1:0", *files, *rest)

    for expected, errors in lines(commands()):
        assert expected in errors


@pytest.mark.plugin("retriever.plugins.replication")
def test_settings_that_are_none_are_named_with_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text(f'max_sesions = "{SECRET}"\n')
    binary = tmp_path / "binary.toml"
    binary.write_bytes(bytes(range(256)))

    def commands() -> Iterator[tuple[str, WarmProcess]]:
        for expected, path in (
            ("max_sesions is not a setting: did you mean max_sessions?", file),
            ("is not TOML", binary),
            ("is not a file", Path("/dev/zero")),
        ):
            yield expected, started("serve", "--config", path)
        for expected, variable, value in (
            ("it should be a valid integer", "FOREDRAFT_MAX_SESSIONS", "x" * 100_000),
            ("FOREDRAFT_REDIS_PASSWORD?", "FOREDRAFT_REDIS_PASWORD", SECRET),
            ("URL of the Redis server", "FOREDRAFT_REDIS", SECRET),
        ):
            yield expected, started("serve", "--address", "127.0.0.1:0", **{variable: value})

    for expected, errors in lines(commands()):
        assert expected in errors
        assert len(errors) < 500


def test_a_password_in_the_place_of_a_url_is_not_shown() -> None:
    output, _ = started("config", FOREDRAFT_REDIS=SECRET).communicate(timeout=60)
    assert "redis = " in output
    assert SECRET not in output


@pytest.mark.plugin("retriever.plugins.replay")
def test_clients_are_told_what_is_wrong_with_them_or_with_the_service(
    tmp_path: Path, authority: Signed
) -> None:
    """Against a process of its own; what it logs holds no secret either."""
    server = signed(tmp_path, "server", authority, names=(DNSName("drafts.example"),))
    engine = signed(tmp_path, "engine", authority)
    early = signed(tmp_path, "early", authority, hours=(3, 9))
    stranger = signed(tmp_path, "stranger")
    access = tmp_path / "access"
    token = add_token(access, "acme")
    process, address = start_service(
        *("--address", "127.0.0.1:0", "--log-level", "debug", "--access", str(access)),
        *("--certificate", str(server.certificate), "--key", str(server.key)),
        *("--client-ca", str(authority.certificate)),
    )
    traces = tmp_path / "traces.jsonl"
    traces.write_text('{"prompt_ids": [1, 2, 3], "output_ids": [1, 2, 3, 4]}\n')

    def replaying(
        name: str, by: Signed, ca: Signed, shown: str, host: str = "drafts.example"
    ) -> WarmProcess:
        file = tmp_path / f"{name}.toml"
        file.write_text(
            f'ca = "{ca.certificate}"\ncertificate = "{by.certificate}"\nkey = "{by.key}"\n'
            f'token = "{shown}"\nserver_name = "{host}"\n'
        )
        return started("replay", traces, "--server", address, "--credentials", file, "--json")

    def commands() -> Iterator[tuple[str, WarmProcess]]:
        yield "not signed by an authority", replaying("ca", engine, stranger, token)
        yield "another host name", replaying("host", engine, authority, token, "other.example")
        yield "early.pem is not valid before", replaying("early", early, authority, token)
        yield "client certificate", replaying("stranger", stranger, authority, token)
        yield "credentials are missing or not valid", replaying("token", engine, authority, SECRET)

    try:
        good = replaying("good", engine, authority, token)
        for expected, errors in lines(commands()):
            assert expected in errors
            assert token not in errors
        assert good.communicate(timeout=60)[0].startswith("{")
    finally:
        process.terminate()
        _, logged = process.communicate(timeout=60)
    for hidden in (token, SECRET, "PRIVATE", "Traceback"):
        assert hidden not in logged

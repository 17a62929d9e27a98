"""Certificates that cannot protect a service are refused in one line that says why."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)

from retriever.errors import CredentialsError, InsecureAddressError
from retriever.security import private_files
from retriever.security.protection import (
    Protection,
    ProtectionFiles,
    ServerTls,
    TlsFiles,
    is_local,
    read_tls,
)
from tests.retriever.security.authorities import Signed, signed


def refusal(certificate: Path, key: Path, client_ca: Path | None = None) -> str:
    with pytest.raises(CredentialsError) as raised:
        read_tls(TlsFiles(certificate, key, client_ca))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_is_wrong_with_a_certificate_is_told(
    tmp_path: Path, authority: Signed, server: Signed
) -> None:
    over = signed(tmp_path, "over", authority, hours=(-3, -1))
    early = signed(tmp_path, "early", authority, hours=(3, 9))
    old_authority = signed(tmp_path, "old", hours=(-3, -1))
    nothing = tmp_path / "nothing.pem"
    assert "expired on" in refusal(over.certificate, over.key)
    assert "not valid before" in refusal(early.certificate, early.key)
    assert "is not the key of" in refusal(server.certificate, authority.key)
    assert "No such file" in refusal(nothing, server.key)
    assert "directory" in refusal(tmp_path, server.key)
    assert "is not a file" in refusal(Path("/dev/zero"), server.key)
    assert "no readable PEM certificate" in refusal(server.key, server.key)
    server.certificate.chmod(0o600)
    assert "no readable PEM private key" in refusal(server.certificate, server.certificate)
    files = server.certificate, server.key
    assert "not an authority" in refusal(*files, server.certificate)
    assert "expired on" in refusal(*files, old_authority.certificate)


def test_a_key_that_others_read_or_that_is_encrypted_is_refused(server: Signed) -> None:
    server.key.chmod(0o604)
    assert "chmod 600" in refusal(server.certificate, server.key)
    server.key.chmod(0o640)
    read_tls(TlsFiles(server.certificate, server.key))
    encrypted = server.secret.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    server.key.write_bytes(encrypted)
    assert "is encrypted" in refusal(server.certificate, server.key)


def test_a_certificate_is_warned_of_before_it_expires(
    tmp_path: Path, authority: Signed, caplog: pytest.LogCaptureFixture
) -> None:
    short = signed(tmp_path, "short", authority, hours=(-1, 24 * 20))
    tls = ServerTls(TlsFiles(short.certificate, short.key, authority.certificate))
    now = datetime.now(UTC)
    assert not tls.warn(now)
    assert tls.warn(now + timedelta(days=7))
    assert not tls.warn(now + timedelta(days=7, hours=1))
    assert tls.warn(now + timedelta(days=21))
    assert [f"{short.certificate} expire{end} on" in caplog.text for end in "sd"] == [True, True]


def test_new_files_are_read_and_bad_ones_are_not(
    tmp_path: Path, authority: Signed, server: Signed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "LOOK_EVERY_S", 0.0)
    tls = ServerTls(TlsFiles(server.certificate, server.key))
    before = tls.expires_at
    renewed = signed(tmp_path, "renewed", authority, hours=(-1, 48))
    renewed.certificate.replace(server.certificate)
    assert tls.expires_at == before  # its key is not there yet
    renewed.key.replace(server.key)
    assert tls.expires_at < before
    server.certificate.unlink()
    assert tls.expires_at < before


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("unix:/tmp/x.sock", True),
        ("127.0.0.1:0", True),
        ("127.9.9.9:1", True),
        ("[::1]:0", True),
        ("localhost:0", True),
        ("0.0.0.0:0", False),
        ("0:0", False),
        ("[::]:0", False),
        ("192.0.2.1:1", False),
        ("no.such.host.invalid:1", False),
    ],
)
def test_only_loopback_and_unix_sockets_are_local(address: str, local: bool) -> None:  # noqa: FBT001
    assert is_local(address) == local


def test_listening_for_others_takes_encryption_and_callers_that_are_known(
    tmp_path: Path, authority: Signed, server: Signed, caplog: pytest.LogCaptureFixture
) -> None:
    access = tmp_path / "access"
    access.touch(0o600)
    pair = ProtectionFiles(server.certificate, server.key)
    for unprotected in (ProtectionFiles(), ProtectionFiles(access=access), pair):
        with pytest.raises(InsecureAddressError, match=r"--certificate.*127.0.0.1.*--insecure"):
            Protection.of(unprotected).check("0.0.0.0:1")
        Protection.of(unprotected).check("127.0.0.1:1")
    Protection.of(ProtectionFiles(insecure=True)).check("0.0.0.0:1")
    assert "connections are not encrypted" in caplog.text
    for known in (replace(pair, access=access), replace(pair, client_ca=authority.certificate)):
        Protection.of(known).check("0.0.0.0:1")
    for half in (ProtectionFiles(server.certificate), ProtectionFiles(client_ca=access)):
        with pytest.raises(CredentialsError, match="give"):
            Protection.of(half)

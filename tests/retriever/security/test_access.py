"""Tokens are hashed at rest, and an access file says whose they are."""

import hmac
import json
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retriever.commands import app
from retriever.drafter import SequenceOptions
from retriever.errors import AccessRefusedError, CredentialsError, InvalidRequestError
from retriever.security import access as tokens, private_files
from retriever.security.access import add_certificate, add_token, read_access, remove
from retriever.security.admission import Authenticator, Caller, token_in
from retriever.sessions.embedded import EmbeddedDrafter


def test_a_token_is_its_tenants_and_the_file_does_not_hold_it(access: Path) -> None:
    ours, theirs = add_token(access, "we\u00e4"), add_token(access, "they")
    found = read_access(access)
    assert [getattr(found.grant_of_token(each), "tenant", None) for each in (ours, theirs)] == [
        "we\u00e4",
        "they",
    ]
    assert stat.S_IMODE(access.stat().st_mode) == 0o600
    content = access.read_text()
    for token in (ours, theirs):
        assert token not in content
        assert token.split("_", 2)[2] not in content  # a secret may hold one, too


def test_no_other_token_is_anybodys(access: Path) -> None:
    token = add_token(access, "we")
    found = read_access(access)
    name = tokens.name_of(token)
    wrong = [token[:-1] + ("A" if token[-1] != "A" else "B"), f"fdt_{name}_{'A' * 43}"]
    for other in (*wrong, "", token + "A", f" {token}", token.upper(), "x" * 9999, "\ud800"):
        assert found.grant_of_token(other) is None, other


def test_unknown_and_wrong_tokens_take_the_same_work(
    access: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = add_token(access, "we")
    found = read_access(access)
    work: list[int] = []
    compare = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        work.append(len(one))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for other in (token, f"{token[:-4]}AAAA", tokens.new_token(), "nonsense"):
        found.grant_of_token(other)
    assert work == [32] * 4


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[1]",
        '{"tenant": "a"}',
        '{"tenant": "a", "token": "00", "scopes": ["draft"]}',
        '{"tenant": 1, "certificate": "CN:x", "scopes": ["draft"]}',
        '{"tenant": "a", "certificate": "x", "scopes": ["draft"]}',
        '{"tenant": "a", "certificate": "CN:x"}',
        '{"tenant": "a", "certificate": "CN:x", "scopes": ["draft"], "more": ""}',
        json.dumps({"tenant": "a" * 257, "certificate": "CN:x", "scopes": ["draft"]}),
        '{"tenant": "\\ud800", "certificate": "CN:x", "scopes": ["draft"]}',
        "[" * 100_000,
    ],
)
def test_a_line_that_is_wrong_is_named(access: Path, line: str) -> None:
    access.touch(0o600)
    sound = '{"tenant": "a", "certificate": "CN:y", "scopes": ["draft"]}'
    access.write_text(f"# comment\n\n{sound}\n{line}\n")
    with pytest.raises(CredentialsError, match=r"access, line 4: ") as raised:
        read_access(access)
    assert len(str(raised.value)) < 500


def test_one_credential_has_one_tenant(access: Path) -> None:
    add_certificate(access, "a", "DNS:a.example")
    with pytest.raises(CredentialsError, match="remove it first"):
        add_certificate(access, "b", "DNS:a.example")
    access.write_text(access.read_text() * 2)
    with pytest.raises(CredentialsError, match="twice"):
        read_access(access)
    with pytest.raises(CredentialsError, match="twice"):
        add_token(access, "c")
    with pytest.raises(InvalidRequestError):
        add_token(access, "x" * 257)


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o666])
def test_a_file_that_others_may_read_or_write_is_refused(access: Path, mode: int) -> None:
    add_token(access, "a")
    access.chmod(mode)
    with pytest.raises(CredentialsError, match="chmod 600"):
        read_access(access)


def test_changes_count_within_a_second_and_mistakes_do_not(
    access: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "LOOK_EVERY_S", 0.0)
    first = add_token(access, "a")
    authenticator = Authenticator(access)
    caller = Caller(authenticator, first, None)
    second = add_token(access, "b")
    assert Caller(authenticator, second, None).tenant == "b"
    access.write_text(access.read_text() + "nonsense\n")
    assert caller.tenant == "a"
    access.write_text(access.read_text().replace("nonsense\n", ""))
    assert remove(access, tokens.name_of(first) or "").tenant == "a"
    with pytest.raises(AccessRefusedError):
        assert caller.tenant
    with pytest.raises(AccessRefusedError):
        Caller(authenticator, first, None)
    assert Caller(authenticator, second, None).tenant == "b"
    assert authenticator.refused == 2


def test_tokens_are_found_in_metadata() -> None:
    assert token_in([("x", "y"), ("authorization", "bearer abc")]) == "abc"
    assert token_in([("authorization", b"Bearer abc")]) == "abc"
    assert token_in([("authorization", "Basic abc")]) == ""
    assert token_in([("x", "y")]) is None


def test_the_command_line_makes_lists_and_revokes(access: Path) -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["access", *arguments, "--access", str(access)])
        assert done.exit_code == 0, done.output
        return done.output.strip()

    token = run("token", "acme")
    grant = read_access(access).grant_of_token(token)
    assert grant is not None
    assert grant.tenant == "acme"
    assert run("certificate", "acme", "URI:spiffe://acme/engine").endswith("acts for acme")
    name = tokens.name_of(token) or ""
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    assert [line.split("\t") for line in run("list").splitlines()] == [
        ["KIND", "CREDENTIAL", "TENANT", "SCOPES", "ADDED", "NAME"],
        ["token", name, "acme", "draft", today, ""],
        ["certificate", "URI:spiffe://acme/engine", "acme", "draft", today],
    ]
    assert json.loads(run("list", "--json"))[0]["credential"] == name
    for gone in (name, "URI:spiffe://acme/engine"):
        assert run("revoke", gone) == f"{gone} acts for acme no longer"
    assert access.read_text() == ""


def test_refusals_are_logged_once_in_a_minute_and_without_a_secret(
    access: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    add_token(access, "acme")
    authenticator = Authenticator(access, clock=lambda: now[0])
    wrong = tokens.new_token()
    with caplog.at_level("INFO"):
        for seconds, token in ((0, wrong), (1, None), (2, "x" * 99), (61, None), (122, "x")):
            now[0] = 1000.0 + seconds
            with pytest.raises(AccessRefusedError):
                Caller(authenticator, token, None)
    said = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert said == [
        f"refused the token {tokens.name_of(wrong)}; 0 more since this was logged last",
        "refused a call without a token or certificate; 2 more since this was logged last",
        "refused a token of another form; 0 more since this was logged last",
    ]
    assert wrong not in caplog.text


@pytest.mark.parametrize(
    "tenant", ["../x", "a/../b", "/etc", "a//b", "a\nb", "a\x00b", "a\x1b[2Jb", "..", "a\\..\\b"]
)
def test_tenants_have_names_that_print_and_lead_nowhere(tmp_path: Path, tenant: str) -> None:
    with pytest.raises(InvalidRequestError, match="leave out control characters"):
        add_token(tmp_path / "access", tenant)
    drafter = EmbeddedDrafter()
    with pytest.raises(InvalidRequestError, match="tenant's name"):
        drafter.open("s", [1], SequenceOptions(tenant=tenant))


@pytest.mark.parametrize(
    "tenant", ["acme", "acme/prod", "Müller & Söhne", "a.b-c_d@e", "x..y", "租户"]
)
def test_other_names_of_tenants_are_taken(tmp_path: Path, tenant: str) -> None:
    assert add_token(tmp_path / "access", tenant)
    EmbeddedDrafter().open("s", [1], SequenceOptions(tenant=tenant))

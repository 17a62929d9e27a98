"""What is revoked is gone, whoever writes the access file, however many at once, on any path."""

import asyncio
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from typer.testing import CliRunner

from retriever.commands import app
from retriever.errors import AccessRefusedError, CredentialsError, NotPermittedError
from retriever.security import private_files, rewriting
from retriever.security.access import (
    TENANT_SCOPES,
    Scope,
    add_certificate,
    add_token,
    name_of,
    read_access,
    remove,
    set_scopes,
)
from retriever.security.admission import Authenticator, Caller, scope_for
from retriever.security.private_files import Reloaded
from retriever.security.protection import FileState, Protection, ProtectionFiles
from retriever.security.rewriting import rewrite

IS_ROOT = os.geteuid() == 0
SERVICE = 10001


def named(token: str) -> str:
    return name_of(token) or ""


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640])
@pytest.mark.parametrize("owner", [0, SERVICE] if IS_ROOT else [os.geteuid()])
def test_changes_keep_owner_group_and_mode(access: Path, owner: int, mode: int) -> None:
    gone, kept = add_token(access, "a"), add_token(access, "b")
    if IS_ROOT:
        os.chown(access, owner, SERVICE)
    access.chmod(mode)
    before = access.stat()
    remove(access, named(gone))
    added = add_token(access, "c")
    add_certificate(access, "d", "CN:d")
    set_scopes(access, "CN:d", [Scope.DRAFT, Scope.DELETE])
    after = access.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (
        before.st_uid,
        before.st_gid,
        before.st_mode,
    )
    found = read_access(access, by_operator=True)
    assert set(found.tokens) == {named(kept), named(added)}


def test_changes_at_once_are_all_made(access: Path) -> None:
    gone = [named(add_token(access, f"gone-{at}")) for at in range(6)]
    kept = [named(add_token(access, f"kept-{at}")) for at in range(6)]

    def change(at: int) -> str:
        if at % 2:
            return named(add_token(access, f"added-{at}"))
        remove(access, gone[at // 2])
        return ""

    with ThreadPoolExecutor(12) as threads:
        added = set(threads.map(change, range(12))) - {""}
    assert len(added) == 6
    assert set(read_access(access).tokens) == {*kept, *added}
    assert [path.name for path in access.parent.iterdir()] == [access.name]


def test_a_last_line_without_an_end_stays_a_line(access: Path) -> None:
    first = add_token(access, "a")
    access.write_text(access.read_text().removesuffix("\n"))
    second = add_token(access, "b")
    assert set(read_access(access).tokens) == {named(first), named(second)}
    access.write_text("# ours\n\n" + access.read_text().removesuffix("\n"))
    remove(access, named(first))
    assert access.read_text().startswith("# ours\n\n{")
    assert set(read_access(access).tokens) == {named(second)}


def test_behind_a_link_the_file_is_changed(access: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    behind = tmp_path / "folder" / "real"
    access.symlink_to(behind)
    token = add_token(access, "a")  # made there, too
    remove(access, named(token))
    assert access.is_symlink()
    assert behind.read_text() == ""


def test_a_file_of_two_names_is_not_changed_under_one(access: Path, tmp_path: Path) -> None:
    token = add_token(access, "a")
    (tmp_path / "other").hardlink_to(access)
    with pytest.raises(CredentialsError, match="second name"):
        remove(access, named(token))
    assert named(token) in read_access(access).tokens
    (tmp_path / "other").unlink()
    remove(access, named(token))
    assert not read_access(access).tokens


def test_where_the_folder_cannot_be_written_the_file_is_as_before(
    access: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = add_token(access, "a")

    def refuse(*_: object, **__: object) -> tuple[int, str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    for change in (lambda: remove(access, named(kept)), lambda: add_token(access, "c")):
        with pytest.raises(CredentialsError, match="it is unchanged: run this as a user who may"):
            change()
    assert set(read_access(access).tokens) == {named(kept)}


def test_what_an_editor_writes_meanwhile_is_not_lost(access: Path) -> None:
    add_token(access, "a")
    calls: list[bytes] = []

    def change(content: bytes) -> bytes:
        if not calls:
            access.write_bytes(content + b"# by an editor\n")
        calls.append(content)
        return content + b"# by us\n"

    with pytest.raises(CredentialsError, match="changed by another program: try again"):
        rewrite(access, change)
    assert access.read_bytes().endswith(b"# by an editor\n")
    assert rewrite(access, change).endswith(b"# by an editor\n# by us\n")


def test_who_holds_the_lock_for_too_long_is_named(
    access: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = add_token(access, "a")
    monkeypatch.setattr(rewriting, "WAIT_S", 0.1)
    with access.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CredentialsError, match="locked by another process"):
            remove(access, named(token))
    remove(access, named(token))


def test_a_change_that_did_not_last_is_not_reported_as_made(
    access: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, before = add_token(access, "a"), access.read_bytes()
    sync = os.fsync

    def put_back(descriptor: int) -> None:
        sync(descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):  # once the file has been replaced
            access.write_bytes(before)

    monkeypatch.setattr(os, "fsync", put_back)
    with pytest.raises(CredentialsError, match="is not in it"):
        remove(access, named(token))


@pytest.mark.parametrize("line", ['{"tenant": "b", "tok', "", "{}", "[1]"])
def test_a_damaged_file_is_not_changed_and_the_line_is_named(access: Path, line: str) -> None:
    token = add_token(access, "a")
    access.write_text(access.read_text() + (line or access.read_text()))
    before = access.read_bytes()
    for change in (
        lambda: remove(access, named(token)),
        lambda: add_token(access, "c"),
        lambda: set_scopes(access, named(token), [Scope.DRAFT]),
    ):
        with pytest.raises(CredentialsError, match="access, line 2: "):
            change()
    assert access.read_bytes() == before


def _absent(path: Path) -> None:
    path.unlink()


def _half_written(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _unreadable(path: Path) -> None:
    if not IS_ROOT:
        path.chmod(0)
    else:  # root reads all modes: a file of another user is what it does not read
        os.chown(path, SERVICE, 0)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _large(path: Path) -> None:
    os.truncate(path, 100 << 20)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _latin(path: Path) -> None:
    path.write_bytes(b'{"tenant": "\xe9", "certificate": "CN:x"}\n')


def _link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _open_to_all(path: Path) -> None:
    path.chmod(0o666)


STATES = (
    _absent,
    _half_written,
    _unreadable,
    _folder,
    _large,
    _pipe,
    _latin,
    _link_to_itself,
    _open_to_all,
)


@pytest.mark.parametrize("spoil", STATES)
def test_whatever_becomes_of_the_file_callers_are_let_in_until_the_grace_is_over(
    access: Path,
    spoil: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(private_files, "LOOK_EVERY_S", 0.0)
    token = add_token(access, "a")
    good = access.read_bytes()
    now = [100.0]
    authenticator = Authenticator(access, grace_s=60, clock=lambda: now[0])
    caller = Caller(authenticator, token, None)
    spoil(access)
    assert caller.tenant == "a"
    file = authenticator.files["access"]
    assert file.failing_s == 0
    assert "stays in force for 60 s" in caplog.text
    now[0] = 159.0
    assert Caller(authenticator, token, None).tenant == "a"
    now[0] = 160.0
    for call in (lambda: caller.tenant, lambda: Caller(authenticator, token, None)):
        with pytest.raises(AccessRefusedError, match="missing or not valid") as raised:
            call()
        assert str(access) not in str(raised.value)
    assert caplog.text.count("it admits no caller") == 1
    if access.is_dir():
        access.rmdir()
    access.unlink(missing_ok=True)
    access.touch(0o600)
    access.write_bytes(good)
    assert caller.tenant == "a"
    assert file.failing_s is None


@pytest.mark.parametrize("spoil", STATES)
def test_a_service_does_not_start_with_such_a_file(
    access: Path, spoil: Callable[[Path], None]
) -> None:
    add_token(access, "a")
    spoil(access)
    with pytest.raises(CredentialsError, match=str(access)):
        Authenticator(access)


def test_an_empty_file_lets_nobody_in(access: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_files, "LOOK_EVERY_S", 0.0)
    token = add_token(access, "a")
    authenticator = Authenticator(access)
    caller = Caller(authenticator, token, None)
    access.write_bytes(b"")
    with pytest.raises(AccessRefusedError):
        assert caller.tenant
    with pytest.raises(AccessRefusedError):
        Caller(authenticator, token, None)
    assert authenticator.files["access"].failing_s is None


def test_what_was_in_the_way_of_reading_can_go_by_itself(
    access: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without free descriptors reads again once it has some; the file did not change."""
    monkeypatch.setattr(private_files, "LOOK_EVERY_S", 0.0)
    add_token(access, "a")
    authenticator = Authenticator(access)
    with monkeypatch.context() as patched:

        def refuse(*_: object) -> int:
            raise OSError(24, "Too many open files")

        token = add_token(access, "b")
        patched.setattr(os, "open", refuse)
        authenticator.current()
        assert authenticator.files["access"].failing_s is not None
    assert Caller(authenticator, token, None).tenant == "b"
    assert authenticator.files["access"].failing_s is None


def test_a_file_system_that_does_not_answer_is_as_a_file_that_cannot_be_read(
    access: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(private_files, "PATIENCE_S", 0.1)
    token = add_token(access, "a")
    protection = Protection.of(ProtectionFiles(access=access, grace_s=0.5))
    assert protection.authenticator is not None
    caller, answers = Caller(protection.authenticator, token, None), Event()
    status = Path.stat

    def hang(path: Path, **options: Any) -> os.stat_result:
        assert path != access or answers.wait(20)
        return status(path, **options)

    told: list[FileState] = []

    async def watched() -> None:
        watching = asyncio.create_task(protection.watch(told.extend))
        while not any(not each.admits for each in told):  # noqa: ASYNC110  (no event of it)
            await asyncio.sleep(0.02)
        with pytest.raises(AccessRefusedError):
            caller.check()
        answers.set()
        while not told[-1].admits:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        caller.check()
        watching.cancel()

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", hang)
        asyncio.run(asyncio.wait_for(watched(), 20))


def test_a_change_within_the_clocks_tick_is_noticed(
    access: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writes of one size within a tick of the file system's clock have one stamp."""
    access.write_bytes(b"1")
    unchanged = access.stat()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", lambda *_, **__: unchanged)
        content = Reloaded([access], access.read_bytes)
        access.write_bytes(b"2")
        content.look()
    assert content.current() == b"2"


def test_scopes_say_what_a_credential_is_for(access: Path) -> None:
    both = add_token(access, "both", TENANT_SCOPES)
    ordinary = add_token(access, "new")
    admin = add_token(access, "", [Scope.ADMIN], "ops")
    authenticator = Authenticator(access)
    for token, may in ((both, TENANT_SCOPES), (ordinary, {Scope.DRAFT}), (admin, {Scope.ADMIN})):
        for scope in Scope:
            if scope in may:
                assert Caller(authenticator, token, None, scope).scopes == may
            else:
                with pytest.raises(NotPermittedError, match=f"of the scope {scope}, but"):
                    Caller(authenticator, token, None, scope)
    caller = Caller(authenticator, admin, None, Scope.ADMIN)
    assert (caller.name, caller.tenant) == ("ops", "")
    with pytest.raises(CredentialsError, match="only the scope admin alone"):
        set_scopes(access, "ops", [Scope.DRAFT])
    assert remove(access, "ops").scopes == {Scope.ADMIN}


def test_each_method_takes_its_scope_and_unlisted_ones_the_highest() -> None:
    service = "/retriever.v1.RetrieverService/"
    for method, scope in (
        (f"{service}Draft", Scope.DRAFT),
        (f"{service}DraftStream", Scope.DRAFT),
        (f"{service}GetServerInfo", Scope.DRAFT),
        (f"{service}ShareFindings", Scope.DRAFT),
        (f"{service}FetchFindings", Scope.DRAFT),
        (f"{service}DeleteTenantData", Scope.DELETE),
        (f"{service}DeleteSessionData", Scope.DELETE),
        ("/retriever.v1.AdminService/ListTenants", Scope.ADMIN),
        ("/retriever.v2.Service/Draft", Scope.ADMIN),
        ("nonsense", Scope.ADMIN),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", None),
    ):
        assert scope_for(method) == scope


def test_a_scope_taken_away_ends_what_goes_on(
    access: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "LOOK_EVERY_S", 0.0)
    token = add_token(access, "a", TENANT_SCOPES)
    caller = Caller(Authenticator(access), token, None, Scope.DELETE)
    set_scopes(access, named(token), [Scope.DRAFT])
    with pytest.raises(NotPermittedError, match="delete"):
        caller.check()


@pytest.mark.parametrize(
    "line",
    [
        {"token": "", "scopes": ["admin", "draft"]},
        {"tenant": "a", "certificate": "CN:x"},
        {"tenant": "a", "certificate": "CN:x", "scopes": []},
        {"tenant": "a", "certificate": "CN:x", "scopes": "draft"},
        {"tenant": "a", "certificate": "CN:x", "scopes": ["all"]},
        {"tenant": "a", "certificate": "CN:x", "scopes": [["draft"]]},
        {"tenant": "a", "certificate": "CN:x", "scopes": ["draft"], "name": "a b"},
        {"tenant": "a", "certificate": "CN:x", "scopes": ["draft"], "name": "0" * 16},
        {"tenant": "a", "certificate": "CN:x", "scopes": ["draft"], "name": None},
    ],
)
def test_lines_of_wrong_scopes_or_names_are_named(access: Path, line: dict[str, object]) -> None:
    access.touch(0o600)
    access.write_text(json.dumps(line) + "\n")
    with pytest.raises(CredentialsError, match="access, line 1: "):
        read_access(access)


def test_names_are_one_credentials_each(access: Path) -> None:
    add_token(access, "a", name="engine")
    with pytest.raises(CredentialsError, match="choose another name"):
        add_token(access, "b", name="engine")
    with pytest.raises(CredentialsError, match="is not a valid name"):
        add_token(access, "b", name="an engine")
    line = {"tenant": "b", "certificate": "CN:x", "scopes": ["draft"], "name": "engine"}
    access.write_text(f"{access.read_text()}{json.dumps(line)}\n")
    with pytest.raises(CredentialsError, match="engine is in line 1 as well"):
        read_access(access)


def test_the_command_line_narrows_what_was_made_before(access: Path) -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["access", *arguments, "--access", str(access)])
        assert done.exit_code == 0, done.output
        return done.output.strip()

    token = run("token", "acme", "--scope", "draft", "--scope", "delete", "--name", "engine")
    run("token", "--scope", "admin", "--name", "ops")
    name = named(token)

    def listed() -> dict[str, str]:
        first: dict[str, str] = json.loads(run("list", "--json"))[0]
        return first

    assert listed()["scopes"] == "draft,delete"
    assert run("scopes", "engine", "--scope", "draft") == "engine of acme is for draft"
    assert listed() == {**listed(), "credential": name, "scopes": "draft", "name": "engine"}
    assert run("revoke", "ops") == "ops acts for its operator no longer"
    assert stat.S_IMODE(access.stat().st_mode) == 0o600

"""Unix sockets: who may connect, from the first moment on."""

import grp
import os
import stat
import tempfile
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retriever.client.strict import RemoteDrafter
from retriever.commands import app
from retriever.errors import SettingsError
from retriever.operations.resolving import resolve
from retriever.operations.settings import Settings
from retriever.service.addresses import SocketAccess
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.warm_interpreter import run, start

ANOTHER_GROUP = 54321
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")

CONNECTING = """
import os, socket, sys
os.setgroups([int(group) for group in sys.argv[2:]])
os.setgid(65534)
os.setuid(65534)  # nobody
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except OSError as error:
    print(error.strerror)
else:
    print("connected")
"""


def connected(path: Path, groups: list[int]) -> str:
    """What another user, in some groups, gets who connects to a socket."""
    done = run("-c", CONNECTING, path, *groups)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def open_folder(tmp_path: Path) -> None:
    """Let other users come to a folder of a test."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)


@AS_ROOT
def test_members_of_the_group_connect_and_others_do_not(tmp_path: Path) -> None:
    """Before, the socket was its owner's alone, and there was no setting for it."""
    open_folder(tmp_path)
    path = tmp_path / "draft.sock"
    process, address = start_service(
        *("--address", f"unix:{path}", "--socket-mode", "0660"),
        *("--socket-group", str(ANOTHER_GROUP)),
    )
    try:
        found = path.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, ANOTHER_GROUP)
        assert connected(path, [ANOTHER_GROUP]) == "connected"
        assert connected(path, []) == "Permission denied"
        with RemoteDrafter(address) as remote:
            remote.draft_context([1, 2], 4)
    finally:
        stop_service(process)


def test_without_a_setting_a_socket_is_its_owners_alone(tmp_path: Path) -> None:
    process, _ = start_service("--address", f"unix:{tmp_path}/draft.sock")
    assert stat.S_IMODE((tmp_path / "draft.sock").stat().st_mode) == 0o600
    stop_service(process)


LISTENING = """
import asyncio, os, sys
from retriever.service import addresses
from retriever.service.addresses import SocketAccess, listen
from grpc import aio

def told(name):
    act = getattr(os, name)
    def tell(path, *arguments, **options):
        before = os.stat(path)
        act(path, *arguments, **options)
        after = os.stat(path)
        seen = [x for each in (before, after) for x in (oct(each.st_mode & 0o777), each.st_gid)]
        print(name, *seen)
    setattr(os, name, tell)

async def main():
    os.umask(0)
    told("chown"), told("chmod")
    listen(aio.server(), f"unix:{sys.argv[1]}", None, SocketAccess(0o660, int(sys.argv[2])))

asyncio.run(main())
"""


@AS_ROOT
def test_a_socket_is_never_more_open_than_asked_for(tmp_path: Path) -> None:
    """The group is given before the mode: the group before never had any right."""
    done = run("-c", LISTENING, tmp_path / "s", ANOTHER_GROUP)
    assert done.returncode == 0, done.stderr
    steps = [line.split() for line in done.stdout.splitlines()]
    own = str(tmp_path.stat().st_gid)
    assert steps == [
        ["chown", "0o600", own, "0o600", str(ANOTHER_GROUP)],
        ["chmod", "0o600", str(ANOTHER_GROUP), "0o660", str(ANOTHER_GROUP)],
    ]


def test_wrong_groups_are_named_before_anything_is_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ["serve", "--address", f"unix:{tmp_path}/s", "--socket-group", "no-such-group"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert done.stderr == (
        "error: --socket-group no-such-group: there is no such group: `getent group` lists them\n"
    )
    assert not (tmp_path / "s").exists()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    others = next(g for g in grp.getgrall() if g.gr_gid not in (os.getegid(), *os.getgroups()))
    with pytest.raises(SettingsError, match="is not in it: add the user to the group"):
        SocketAccess.of("0660", others.gr_name)
    assert SocketAccess.of("0660", str(os.getegid())) == SocketAccess(0o660, os.getegid())


@pytest.mark.parametrize("mode", ["0o660", "1777", "rw", "", "0888", "660 ", "-600"])
def test_modes_are_octal_digits(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "service.toml"
    path.write_text(f'socket_mode = "{mode}"')
    with pytest.raises(SettingsError, match="socket_mode is"):
        resolve(Settings, {}, {}, path)
    path.write_text("socket_mode = 0o660")  # a number: 432
    with pytest.raises(SettingsError, match="it should be a valid string"):
        resolve(Settings, {}, {}, path)


def test_what_takes_the_place_of_the_socket_keeps_its_mode(tmp_path: Path) -> None:
    """Another user who can write to the folder gets nothing opened."""
    victim, path = tmp_path / "victim", tmp_path / "draft.sock"
    victim.write_text("secret")
    victim.chmod(0o600)
    done = threading.Event()

    def replace() -> None:
        while not done.is_set():
            if path.is_socket():
                path.unlink()
                path.symlink_to(victim)
                done.set()

    thread = threading.Thread(target=replace)
    thread.start()
    serving = ["-m", "retriever", "serve", "--address", f"unix:{path}"]
    process = start(*serving, "--socket-mode", "0666")
    thread.join(60)
    process.terminate()
    process.communicate(timeout=60)
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600

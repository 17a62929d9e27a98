"""`foredraft admin` against a service in another process, as an operator uses it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from indexer.build import build_from_tokens
from indexer.reader import Index, Vocabulary
from retriever.client.credentials import Credentials
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest
from retriever.plugins.admin.admin_command import app
from retriever.security.access import Scope, add_token
from retriever.sessions.embedded import EmbeddedDrafter
from tests.retriever.conftest import start_service
from tests.retriever.warm_interpreter import WarmProcess, run

ESCAPE = "\x1b[31m"


@dataclass(slots=True)
class Running:
    """A service in another process, and its operator's command."""

    folder: Path
    address: str
    process: WarmProcess
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str) -> Result:
        """Run the command in this process, which takes a tenth of the time of another."""
        named = {"FOREDRAFT_ADMIN_ADDRESS": f"unix:{self.folder}/admin", **self.environment}
        return CliRunner().invoke(app, list(words), env=named)

    def json(self, *words: str) -> Any:
        done = self.run(*words, "--json")
        assert (done.exit_code, done.stderr) == (0, "")
        return json.loads(done.stdout)

    def recorded(self) -> list[dict[str, Any]]:
        lines = (self.folder / "audit.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["stage"] == "ended"]


@contextmanager
def running(folder: Path, index: Path, *options: str) -> Iterator[Running]:
    (folder / "service.toml").write_text("max_sessions = 10\n")
    process, address = start_service(
        *("--config", str(folder / "service.toml"), "--index", str(index)),
        *("--address", "127.0.0.1:0", "--admin-address", f"unix:{folder}/admin"),
        *("--audit-log", str(folder / "audit.jsonl"), "--state", str(folder / "state")),
        *("--snapshots", str(folder / "copies"), *options),
    )
    try:
        yield Running(folder, address, process)
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, index: Path) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service"), index) as found:
        yield found


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory, vocabulary: Vocabulary) -> Path:
    """An index of texts that the service's own has not."""
    rng = np.random.default_rng(11)
    text = [rng.integers(0, 50, 40).tolist() * 3 for _ in range(10)]
    path = tmp_path_factory.mktemp("another") / "index"
    build_from_tokens([(str(at), each) for at, each in enumerate(text)], path, vocabulary)
    return path


def test_sessions_are_shown_and_ended(service: Running) -> None:
    text = np.arange(12, dtype=np.int32)
    with RemoteDrafter(service.address) as drafter:
        drafter.open(f"job {ESCAPE}", text)
        drafter.draft([DraftRequest(f"job {ESCAPE}", text[:3], 15, 4)])
        (listed,) = service.json("sessions")
        assert (listed["num_tokens"], listed["num_prompt_tokens"]) == (15, 12)
        assert listed["session_id"].endswith(ESCAPE)
        shown = service.run("sessions").stdout
        assert "SESSION" in shown
        assert ESCAPE not in shown
        assert "\\x1b[31m" in shown
        assert service.json("sessions", "--idle", "3600") == []
        assert service.run("sessions", "--tenant", "nobody").stdout == "no session is open\n"
        (tenant,) = service.json("tenants")
        assert (tenant["num_sessions"], tenant["session_tokens"]) == (1, 15)
        headings = service.run("tenants").stdout.splitlines()[0].split()
        assert headings[-5:] == ["OF", "MEMORY", "RECYCLED", "OWN", "INDEXES"]
        (use,) = service.json("use")["tenants"]
        assert (use["num_drafts"], use["num_tokens"], use["num_refused"]) == (1, 15, 0)
        assert use["work_s"] > 0
        done = service.run("end")
        assert (done.exit_code, done.stdout) == (1, "")
        assert "--all" in done.stderr or "all" in done.stderr
        ended = service.json("end", "--name", listed["session_id"])
        assert ended == {"num_ended": 1, "num_kept": 1, "num_not_on_disk": 0}
    last = service.recorded()[-1]
    assert (last["call"], last["who"], last["status"]) == ("EndSessions", "unix socket", "OK")
    assert service.run("use").stdout.startswith("TENANT")


def test_an_index_is_attached_and_detached_under_a_drafting_client(
    service: Running, index: Path, another: Path
) -> None:
    text = Index.open(another).segments[0].tokens[:20].astype(np.int32)
    own = EmbeddedDrafter.open_indexes([index])
    both = EmbeddedDrafter.open_indexes([index, another])
    expected = [each.draft_context(text, 16).token_ids.tolist() for each in (own, both, own)]
    assert expected[0] != expected[1]
    drafted = []
    with RemoteDrafter(service.address) as drafter:
        drafter.open("s", text)

        def draft() -> list[int]:
            (tree,) = drafter.draft([DraftRequest("s", text[:0], len(text), 16)])
            return tree.token_ids.tolist()  # type: ignore[no-any-return]

        drafted.append(draft())
        done = service.run("attach", str(another))
        assert (done.exit_code, done.stderr) == (0, "")
        drafted.append(draft())
        listed = service.json("indexes")
        assert [(each["path"], each["tenant"]) for each in listed] == [
            (str(index), None),
            (str(another), None),
        ]
        twice = service.run("attach", str(another))
        assert (twice.exit_code, twice.stdout) == (1, "")
        assert twice.stderr == f"error: all tenants draft from {another} already\n"
        service.json("detach", str(another))
        drafted.append(draft())
        drafter.close("s", remember=False)
    assert drafted == expected
    assert service.run("detach", str(another)).exit_code == 1
    for drafter_ in (own, both):
        drafter_.shut_down()


def test_settings_are_shown_and_reloaded(service: Running) -> None:
    file = service.folder / "service.toml"
    file.write_text("max_sessions = 1\nidle_session_s = 50\n")
    planned = service.json("reload", "--check")
    assert [(each["name"], each["before_json"], each["after_json"]) for each in planned] == [
        ("max_sessions", "10", "1"),
        ("idle_session_s", "600.0", "50.0"),
    ]
    assert service.json("reload") == planned
    shown = {each["name"]: each for each in service.json("settings")}
    assert shown["max_sessions"]["value_json"] == "1"
    assert shown["max_sessions"]["origin"] == str(file)
    assert shown["max_sessions"]["can_change"]
    assert not shown["state"]["can_change"]
    file.write_text('max_sessions = 2\ndurability = "disk"\n')
    refused = service.run("reload")
    assert refused.exit_code == 1
    assert "durability" in refused.stderr
    assert "nothing was changed" in refused.stderr
    file.write_text("max_sesions = 2\n")
    assert "did you mean max_sessions?" in service.run("reload").stderr
    shown = {each["name"]: each["value_json"] for each in service.json("settings")}
    assert shown["max_sessions"] == "1"
    file.write_text("max_sessions = 10\n")
    service.json("reload")


def test_a_copy_opens_as_a_state(service: Running, index: Path) -> None:
    text = np.tile(np.array([7, 3, 9, 1, 4], np.int32), 10)
    with RemoteDrafter(service.address) as drafter:
        drafter.open("s", text[:1])
        drafter.close("s", text)
    copy = service.json("snapshot", "monday")
    assert copy["path"] == str(service.folder / "copies" / "monday")
    restored = EmbeddedDrafter.open_indexes([index], state=Path(copy["path"]))
    assert restored.draft_context(text[:7], 4).token_ids[0] == text[7]
    restored.shut_down()
    again = service.run("snapshot", "monday")
    assert (again.exit_code, "another name" in again.stderr) == (1, True)
    assert service.run("snapshot", "../monday").exit_code == 1
    assert service.run("evict", "").stdout == "it has left memory\n"


def test_it_is_a_command_of_the_program(service: Running) -> None:
    named = {"FOREDRAFT_ADMIN_ADDRESS": f"unix:{service.folder}/admin"}
    done = run("-m", "foredraft", "admin", "sessions", env={**os.environ, **named})
    assert (done.returncode, done.stdout, done.stderr) == (0, "no session is open\n", "")


def test_help_teaches_and_errors_say_what_to_do(service: Running) -> None:
    shown = service.run("--help").stdout
    for word in ("sessions", "--admin-address", "scope admin", "FOREDRAFT_ADMIN_ADDRESS"):
        assert word in " ".join(shown.replace("│", " ").split())
    service.environment["FOREDRAFT_ADMIN_ADDRESS"] = ""
    assert "give --address" in service.run("sessions").stderr
    wrong = service.run("sessions", "--address", service.address)
    assert "--admin-address" in wrong.stderr
    absent = service.run("sessions", "--address", f"unix:{service.folder}/absent")
    assert absent.stderr.startswith("error: no draft service answers")
    assert len(absent.stderr.splitlines()) == 1
    service.environment.clear()
    assert service.run("end", "--idle", "-1").exit_code == 2


def test_with_an_access_file_a_token_of_the_scope_is_needed_and_draining_ends(
    tmp_path: Path, index: Path
) -> None:
    access = tmp_path / "access"
    operator, tenant = (
        add_token(access, "", [Scope.ADMIN], "alice"),
        add_token(access, "acme", [Scope.DRAFT, Scope.DELETE]),
    )
    with running(tmp_path, index, "--access", str(access), "--drain-s", "20") as service:
        for token, answered in (("", False), (tenant, False), (operator, True)):
            service.environment = {"FOREDRAFT_REMOTE_TOKEN": token}
            done = service.run("tenants")
            assert (done.exit_code == 0) is answered, done.stderr
        with RemoteDrafter(service.address, credentials=Credentials(token=tenant)) as drafter:
            drafter.open("s", np.arange(5, dtype=np.int32))
            drafter.draft([DraftRequest("s", np.empty(0, np.int32), 5, 4)])
            assert service.json("drain") == {"was_draining": False, "num_sessions": 1}
            assert service.json("drain")["was_draining"]
            assert service.process.poll() is None  # the session is open
            service.json("end", "--tenant", "acme", "--forget")
        assert service.process.wait(timeout=30) == 0
        assert {each["who"] for each in service.recorded()} == {"credential alice"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--admin-address", "127.0.0.1:0"], "--access"),
        (["--audit-log", "audit.jsonl"], "give --admin-address too"),
        (["--snapshots", "copies"], "give --admin-address too"),
        (["--admin-address", "unix:admin", "--audit-log", "/proc/a"], "--audit-log"),
        (["--admin-address", "unix:/absent/s"], "no folder /absent"),
    ],
)
def test_a_plane_that_could_not_be_trusted_does_not_start(
    index: Path, options: list[str], said: str
) -> None:
    named = {"FOREDRAFT_ADDRESS": "127.0.0.1:0"}
    serving = ["-m", "foredraft", "serve", "--index", index, *options]
    done = run(*serving, env={**os.environ, **named})
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr

"""Settings: which source wins, what is refused and how, and that what is shown can be kept."""

import dataclasses
import json
import math
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr
from typer.main import get_command
from typer.testing import CliRunner

from retriever.client.strict import RemoteDrafter
from retriever.commands import app
from retriever.errors import InvalidRequestError, LimitExceededError, SettingsError
from retriever.limits import Limits
from retriever.operations.resolving import Resolved, as_toml, resolve, to_json
from retriever.operations.settings import DraftSettings, Settings
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.warm_interpreter import run


def resolved(
    tmp_path: Path, toml: str = "", environment: dict[str, str] | None = None, **flags: object
) -> Resolved[Settings]:
    path = tmp_path / "service.toml"
    path.write_text(toml)
    return resolve(Settings, flags, environment or {}, path)


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    found = resolved(
        tmp_path,
        'address = "file:1"\nmax_batch = 2\nmax_tenants = 3\ngenerations_age_s = inf\n',
        {"FOREDRAFT_ADDRESS": "environment:1", "FOREDRAFT_MAX_BATCH": "4", "HOME": "/"},
        address="flag:1",
        max_batch=None,
    )
    settings, origins = found.settings, found.origins
    assert (settings.address, settings.max_batch, settings.max_tenants) == ("flag:1", 4, 3)
    assert settings.max_sessions == Limits().max_sessions
    assert [origins[name] for name in ("address", "max_batch", "max_tenants", "max_sessions")] == [
        "--address",
        "FOREDRAFT_MAX_BATCH",
        str(tmp_path / "service.toml"),
        "default",
    ]


def test_every_limit_is_a_setting_with_the_limit_as_its_default() -> None:
    assert Settings().limits == Limits()
    for field in dataclasses.fields(Limits):
        assert field.name in Settings.model_fields


def test_serve_and_config_have_a_flag_for_every_setting_and_no_other() -> None:
    group: Any = get_command(app)
    for command, own in (
        ("serve", {"config", "help_all"}),
        ("config", {"config", "as_json", "help_all"}),
    ):
        flags = {option.name: option for option in group.get_command(None, command).params}
        assert flags.keys() - own == Settings.model_fields.keys()
        for name, field in Settings.model_fields.items():
            assert flags[name].opts == ["--" + name.replace("_", "-")]
            assert flags[name].help.startswith(field.description)
            assert flags[name].default is None  # so that a file and the environment may say


def test_where_drafts_come_from_is_described_once() -> None:
    group: Any = get_command(app)
    helped: dict[str, set[str]] = {}
    for command in ("serve", "explain"):
        for option in group.get_command(None, command).params:
            helped.setdefault(option.name, set()).add(option.help)
    shared = ("index", "phrases", "tokenizer", "server", "credentials")
    assert [len(helped[name]) for name in shared] == [1] * len(shared)


def test_a_service_drafts_from_what_it_has() -> None:
    for other in ({"index": [Path("i")]}, {"phrases": [Path("p")]}):
        with pytest.raises(InvalidRequestError, match=r"exclude each other: leave out --[ip]"):
            DraftSettings(server=["a:1"], **other)  # type: ignore[arg-type]  # either of two
    assert DraftSettings(server=["a:1", "b:1"]).index == []


def test_explain_shows_listed_phrases_as_such(tmp_path: Path) -> None:
    listed = tmp_path / "phrases.jsonl"
    listed.write_text('{"ids": [1, 2, 3, 4]}')
    arguments = ["explain", "--phrases", str(listed), "--context-ids", "9,1,2", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert [node["source"] for node in json.loads(result.stdout)] == ["phrases"] * 2
    two = CliRunner().invoke(app, ["explain", "--server", "a", "--server", "b", *arguments[3:]])
    assert (two.exit_code, "give one --server" in two.stderr) == (1, True)


def test_a_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "named.toml"
    path.write_text("reflection = true")
    found = resolve(Settings, {}, {"FOREDRAFT_CONFIG": str(path), "FOREDRAFT_CACHE": "x"})
    assert found.settings.reflection
    assert found.origins["reflection"] == str(path)


def test_lists_and_switches_come_from_the_environment(tmp_path: Path) -> None:
    variables = {"FOREDRAFT_INDEX": os.pathsep.join("ab"), "FOREDRAFT_STATUS_PAGE": "false"}
    settings = resolved(tmp_path, "status_page = true", variables).settings
    assert settings.index == [Path("a"), Path("b")]
    assert settings.status_page is False
    assert resolved(tmp_path, environment={"FOREDRAFT_STATE": ""}).settings.state is None


@pytest.mark.parametrize(
    ("toml", "environment", "flags", "message"),
    [
        ("adress = 1", {}, {}, "adress is not a setting: did you mean address?"),
        ("max-batch = 1", {}, {}, "max-batch is not a setting: did you mean max_batch?"),
        ("[limits]\nx = 1", {}, {}, "limits is not a setting"),
        (
            "",
            {"FOREDRAFT_STAT": "x"},
            {},
            "FOREDRAFT_STAT is not a .*did you mean FOREDRAFT_STATE?",
        ),
        ("", {"FOREDRAFT_REDIS_PASWORD": "x"}, {}, "did you mean FOREDRAFT_REDIS_PASSWORD?"),
        ("max_batch = '" + "x" * 5000 + "'", {}, {}, "max_batch is 'x{79}\u2026: it should"),
        ("", {"FOREDRAFT_QQ": "x"}, {}, "FOREDRAFT_QQ is not a setting: `foredraft config`"),
        ("max_batch = 'many'", {}, {}, "max_batch is 'many': it should be a valid integer"),
        ("max_batch = '5'", {}, {}, "max_batch is '5': it should be a valid integer"),
        ("max_batch = true", {}, {}, "max_batch is True: it should be a valid integer"),
        ("max_batch = 0", {}, {}, "max_batch is 0: it should be greater than or equal to 1"),
        ("address = 5", {}, {}, "address is 5: it should be a valid string"),
        ("index = 'a'", {}, {}, "index is 'a': it should be a valid (list|array)"),
        ("refresh = nan", {}, {}, "refresh is nan: it should be a finite number"),
        ("state = 1979-05-27", {}, {}, None),
        ("durability = 'ever'", {}, {}, "it should be 'process' or 'disk'"),
        ("", {"FOREDRAFT_DRAIN_S": "x"}, {}, "FOREDRAFT_DRAIN_S is 'x': it should be a valid numb"),
        ("", {}, {"refresh": math.nan}, "--refresh is nan: it should be a finite number"),
        ("address = ", {}, {}, "is not TOML"),
        ("max_batch = " + "9" * 5000, {}, {}, "is not TOML"),
        ("index = " + "[" * 5000, {}, {}, "is TOML that is nested too deeply"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path,
    toml: str,
    environment: dict[str, str],
    flags: dict[str, object],
    message: str | None,
) -> None:
    if message is None:  # a date that is read as text: odd, and harmless
        assert resolved(tmp_path, toml, environment, **flags).settings.state == Path("1979-05-27")
        return
    with pytest.raises(SettingsError, match=message) as raised:
        resolved(tmp_path, toml, environment, **flags)
    assert "\n" not in str(raised.value)[:200]


@pytest.mark.parametrize("path", ["/dev/zero", "/tmp"])  # noqa: S108  (a folder)
def test_what_is_no_file_is_not_read_without_end(path: str) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        resolve(Settings, {}, {}, Path(path))


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "none.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"none\.toml"):
        resolve(Settings, {}, {}, path)


def test_what_is_shown_can_be_kept_and_gives_the_same(tmp_path: Path) -> None:
    path = tmp_path / "kept.toml"
    found = resolved(tmp_path, 'address = "a\\u007f\\"b"\n', index=[Path("x"), Path("y")])
    path.write_text(as_toml(found), encoding="utf-8")
    assert resolve(Settings, {}, {}, path).settings == found.settings
    shown = json.loads(to_json(found), parse_constant=pytest.fail)
    assert shown["index"] == {"value": ["x", "y"], "origin": "--index"}
    assert shown["generations_age_s"] == {"value": "inf", "origin": "default"}
    assert set(shown) == set(Settings.model_fields)


def test_the_url_of_a_server_is_shown_without_what_lets_one_in(tmp_path: Path) -> None:
    url = "rediss://me:hunter2@host:1/0?ssl_ca_certs=x"
    variables = {"FOREDRAFT_REDIS_PASSWORD": "hunter2", "FOREDRAFT_REDIS_USERNAME": "me"}
    for found in (
        resolved(tmp_path, environment={"FOREDRAFT_REDIS": url}),
        resolved(tmp_path, f'redis = "{url}"', variables),
        resolved(tmp_path, redis=url),
    ):
        assert found.settings.redis is not None
        assert found.settings.redis.get_secret_value() == url
        for text in (as_toml(found), to_json(found)):
            assert "rediss://host:1/0" in text
            assert "hunter2" not in text + repr(found)


class WithSecrets(BaseModel):
    """Settings as they could become."""

    key: SecretStr | None = None
    store: str = ""


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    variables = {"FOREDRAFT_KEY": "hunter2", "FOREDRAFT_STORE": "redis://me:hunter2@host:1/0?x=1"}
    found: Resolved[Any] = resolve(WithSecrets, {}, variables)
    assert found.settings.key.get_secret_value() == "hunter2"
    for text in (as_toml(found), to_json(found)):
        assert "hunter2" not in text
        assert "host:1/0?x=1" in text
        assert "FOREDRAFT_KEY" in text
    path = tmp_path / "secret.toml"
    path.write_text("key = ['hunter2']")
    with pytest.raises(SettingsError) as raised:
        resolve(WithSecrets, {}, {}, path)
    assert "hunter2" not in str(raised.value)


def test_a_service_is_set_by_a_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "service.toml"
    path.write_text(f'address = "unix:{tmp_path}/draft.sock"\nmax_sessions = 1\n')
    monkeypatch.setenv("FOREDRAFT_MAX_SEQUENCE_TOKENS", "5")
    process, address = start_service("--config", str(path))
    assert address == f"unix:{tmp_path}/draft.sock"
    with RemoteDrafter(address) as remote:
        with pytest.raises(LimitExceededError, match="limit of 5"):
            remote.open("s", [1] * 6)
        remote.open("s", [1])
        with pytest.raises(LimitExceededError, match="max_sessions"):
            remote.open("t", [1])
        remote.close("s")
    stop_service(process)


def test_the_command_shows_what_is_in_force(tmp_path: Path) -> None:
    path = tmp_path / "service.toml"
    path.write_text("max_batch = 7\nreflection = true\n")
    command = ["-m", "retriever", "config", "--config", path, "--max-batch", 8]
    done = run(*command, "--no-reflection")
    assert done.returncode == 0, done.stderr
    found = tomllib.loads(done.stdout)
    assert (found["max_batch"], found["reflection"]) == (8, False)
    assert "max_batch = 8  # --max-batch" in done.stdout
    path.write_text("max_bach = 7")
    refused = run(*command)
    assert refused.returncode == 1
    assert refused.stderr == f"error: {path}: max_bach is not a setting: did you mean max_batch?\n"


KUBERNETES = {
    "SERVICE_HOST": "10.96.7.1",
    "SERVICE_PORT": "50051",
    "SERVICE_PORT_GRPC": "50051",
    "SERVICE_PORT_METRICS_2": "9464",
    "PORT": "tcp://10.96.7.1:50051",
    "PORT_50051_TCP": "tcp://10.96.7.1:50051",
    "PORT_50051_TCP_PROTO": "tcp",
    "PORT_50051_TCP_PORT": "50051",
    "PORT_50051_TCP_ADDR": "10.96.7.1",
    "PORT_53_UDP": "udp://[fd00::1]:53",
    "PORT_53_UDP_PROTO": "udp",
    "PORT_53_UDP_ADDR": "fd00::1",
    "METRICS_SERVICE_HOST": "10.96.7.2",  # of a Service foredraft-metrics
    "METRICS_SERVICE_PORT": "9464",
    "METRICS_PORT": "tcp://10.96.7.2:9464",
}
DOCKER = {
    "NAME": "/client/foredraft",
    "PORT_50051_TCP_START": "tcp://172.17.0.5:50051",
    "PORT_50051_TCP_PORT_START": "50051",
    "PORT_50051_TCP_END": "tcp://172.17.0.5:50052",
    "PORT_50051_TCP_PORT_END": "50052",
    "ENV_PATH": "/usr/bin",
}


def test_what_kubernetes_and_docker_inject_is_no_setting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before, a Service called foredraft kept the service of that name from starting."""
    injected = {f"FOREDRAFT_{name}": value for name, value in (KUBERNETES | DOCKER).items()}
    with caplog.at_level("DEBUG"):
        found = resolve(Settings, {}, {**injected, "FOREDRAFT_MAX_BATCH": "4"})
    assert found.settings == Settings.model_validate({"max_batch": 4})
    assert len(caplog.records) == len(injected)
    assert {record.levelname for record in caplog.records} == {"DEBUG"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SERVICE_TENANTS", "4"),
        ("SERVICE", "10.0.0.1"),
        ("SERVICE_HOST", "not an address"),
        ("SERVICE_PORT", "fast"),
        ("PORTS", "50051"),
        ("PORT", "50051"),
        ("METRICS_PORT", "9464"),
        ("PORT_X_TCP", "tcp://10.0.0.1:1"),
        ("PORT_50051_TCP_ADRR", "10.0.0.1"),
        ("NAME", "mine"),
    ],
)
def test_what_is_alike_and_no_such_variable_is_refused(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"FOREDRAFT_{name} is not a setting"):
        resolve(Settings, {}, {f"FOREDRAFT_{name}": value})


def test_a_file_takes_none_of_them(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="service_host is not a setting"):
        resolved(tmp_path, 'service_host = "10.0.0.1"')


@pytest.mark.parametrize("name", ["state", "access", "certificate", "credentials"])
def test_an_empty_path_is_refused_wherever_it_is_written(tmp_path: Path, name: str) -> None:
    """Before, it was the current directory."""
    if name in Settings.model_fields:
        with pytest.raises(SettingsError, match=f"{name} is empty: name a path, or leave it out"):
            resolved(tmp_path, f'{name} = ""')
        done = CliRunner().invoke(app, ["config", f"--{name}", ""])
    else:
        done = CliRunner().invoke(app, ["explain", "--context-ids", "1", f"--{name}", ""])
    assert done.exit_code == 2
    assert "it is empty" in done.output


def test_an_empty_path_in_a_list_is_refused(tmp_path: Path) -> None:
    for toml, environment in (('index = ["a", ""]', {}), ("", {"FOREDRAFT_INDEX": "a::b"})):
        with pytest.raises(SettingsError, match="is empty"):
            resolved(tmp_path, toml, environment)
    assert CliRunner().invoke(app, ["config", "--index", "a", "--index", ""]).exit_code == 2
    shown = CliRunner().invoke(app, ["config", "--index", "a", "--index", "b", "--state", "."])
    assert 'index = ["a", "b"]' in shown.stdout
    assert 'state = "."' in shown.stdout


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("http://host:4317?api_key=hunter2", "http://host:4317"),
        ("https://me:hunter2@host:4317/v1?x=hunter2#hunter2", "https://host:4317/v1"),
        ("hunter2@host:4317", "host:4317"),
        ("host:4317?token=hunter2", "host:4317"),
        ("http://me:hunter2/@host:1", "a URL that cannot be read"),
        ("http://me:hunter?2@host:1", "a URL that cannot be read"),
        ("host:1?x=://hunter2", "host:1"),
    ],
)
def test_where_traces_go_is_shown_without_secrets(
    tmp_path: Path, endpoint: str, shown: str
) -> None:
    """Before, its query was shown."""
    for found in (
        resolved(tmp_path, f'trace_endpoint = "{endpoint}"'),
        resolved(tmp_path, environment={"FOREDRAFT_TRACE_ENDPOINT": endpoint}),
        resolved(tmp_path, trace_endpoint=endpoint),
    ):
        assert found.settings.trace_endpoint is not None
        for text in (as_toml(found), to_json(found)):
            assert f'"{shown}"' in text
            assert "hunter2" not in text + repr(found)


def test_a_refused_value_is_shown_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as raised:
        resolved(tmp_path, 'max_batch = "http://me:hunter2@host"')
    assert "hunter2" not in str(raised.value)

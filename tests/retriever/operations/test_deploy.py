"""The files that a service is run and watched with: whole, and in agreement with the code."""

import json
import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from indexer.launch import is_installed
from indexer.reader import Index
from retriever.operations import health
from retriever.operations.lifecycle import SERVICE
from retriever.operations.metrics import registry_of
from retriever.operations.resolving import PREFIX, resolve
from retriever.operations.settings import Settings
from retriever.security.protection import FileState
from retriever.sessions.embedded import EmbeddedDrafter
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.operations.watched import watched
from tests.retriever.security.authorities import signed
from tests.retriever.warm_interpreter import run

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "docs" / "deploy"
OPERATIONS = ROOT / "docs" / "how-to" / "operations.md"
ADDED_BY_PROMETHEUS = {"instance", "job", "le", "severity"}


@pytest.fixture
def registry(index: Path, tmp_path: Path) -> CollectorRegistry:
    with watched(index, tmp_path) as (service, _):
        service.observer.lifecycle.note_credentials([FileState("access")])
        found = CollectorRegistry()
        families = [*registry_of(service).collect(), *of_replication()]
        found.collect = lambda: families  # type: ignore[method-assign]  # once the service is gone
    return found


def of_replication() -> list[Metric]:
    """What a service shows of replication, where that is installed."""
    if not is_installed("retriever.plugins.replication"):
        return []
    metrics = import_module("retriever.plugins.replication.replication_metrics")
    state = import_module("retriever.plugins.replication.replication_state")
    return list(metrics.metrics_of(state.ReplicationCounts()))


def expressions() -> list[str]:
    """All that the dashboard and the rules ask Prometheus for."""
    alerts = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    rules = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    panels = [each["expr"] for panel in dashboard["panels"] for each in panel["targets"]]
    assert min(len(rules), len(panels)) > 8
    return rules + panels


@pytest.mark.plugin("retriever.plugins.replication")
def test_every_metric_and_label_that_is_asked_for_exists(registry: CollectorRegistry) -> None:
    samples = [each for family in registry.collect() for each in family.samples]
    names = {each.name for each in samples}
    labels = {label for each in samples for label in each.labels} | ADDED_BY_PROMETHEUS
    for text in expressions():
        asked = set(re.findall(r"\b(?:foredraft|process)_\w+", text))
        assert asked <= names, text
        assert asked or text.startswith("up{")
        by = {
            each.strip()
            for found in re.findall(r"by \(([^)]*)\)", text)
            for each in found.split(",")
        }
        assert by | set(re.findall(r"(\w+)=~?\"", text)) <= labels, text


def test_every_metric_is_documented(registry: CollectorRegistry) -> None:
    text = OPERATIONS.read_text()
    ours = {family.name for family in registry.collect() if family.name.startswith("foredraft_")}
    assert ours <= {name.removesuffix("_total") for name in re.findall(r"foredraft_\w+", text)}


def test_every_alert_says_what_is_wrong_and_is_documented() -> None:
    alerts = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    for rule in alerts["groups"][0]["rules"]:
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert f"`{rule['alert']}`" in OPERATIONS.read_text()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_go_off_when_they_should(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "alerts.yml", tmp_path)
    shutil.copy(Path(__file__).with_name("alerts.test.yml"), tmp_path)
    subprocess.run(["promtool", "test", "rules", "alerts.test.yml"], cwd=tmp_path, check=True)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_all_that_the_dashboard_asks_for_can_be_read(tmp_path: Path) -> None:
    asked = [text.replace("$__rate_interval", "5m") for text in expressions()]
    rules = [{"record": f"r{number}", "expr": text} for number, text in enumerate(asked)]
    (tmp_path / "r.yml").write_text(yaml.dump({"groups": [{"name": "g", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", "r.yml"], cwd=tmp_path, check=True)


def unit() -> ConfigParser:
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read(DEPLOY / "foredraft.service")
    return parser


def test_the_unit_and_the_settings_agree() -> None:
    settings = resolve(Settings, {}, {}, DEPLOY / "service.toml").settings
    service = unit()["Service"]
    assert float(service["TimeoutStopSec"]) > settings.drain_s + 5
    assert str(settings.state).startswith(f"/var/lib/{service['StateDirectory']}/")
    assert settings.address.startswith(f"unix:/run/{service['RuntimeDirectory']}/")
    assert service["User"] != "root"
    assert int(settings.socket_mode, 8) & 0o070 == 0o060
    assert int(service["RuntimeDirectoryMode"], 8) & 0o070 == 0o050
    assert settings.socket_group is None or service.get("PrivateUsers") == "no"
    assert service["NoNewPrivileges"] == "yes"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_no_fault_with_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "foredraft.service"
    text = (DEPLOY / copy.name).read_text()
    copy.write_text(text.replace("/opt/foredraft/bin/foredraft", f"{sys.executable} -m foredraft"))
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "foredraft.service" not in done.stdout + done.stderr


_MOST_EXPOSED: Final = 15
"""Tenths of systemd's measure: 1.3 today. What is left is the network, which callers come over."""


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_shut_off() -> None:
    checks = ["--offline=true", f"--threshold={_MOST_EXPOSED}", "--no-pager"]
    command = ["systemd-analyze", "security", *checks, str(DEPLOY / "foredraft.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def _volume(lines: list[str]) -> str:
    return next(line for line in lines if line.startswith("VOLUME "))


def test_the_image_runs_unprivileged_and_says_how_it_is() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    stages = [number for number, line in enumerate(lines) if line.startswith("FROM ")]
    assert len(stages) == 2
    final = lines[stages[1] :]
    assert next(line for line in final if line.startswith("USER ")) != "USER root"
    assert any("retriever.operations.health" in line for line in final if "HEALTHCHECK" in line)
    volumes = re.findall(r'"(/[^"]+)"', _volume(final))
    written = re.findall(r"(?:NUMBA_CACHE_DIR|FOREDRAFT_STATE)=(\S+)", "\n".join(final))
    written += re.findall(r"=unix:(\S+)", "\n".join(final))
    assert len(written) == 3
    assert all(any(path.startswith(volume) for volume in volumes) for path in written)
    made = "\n".join(line for line in final if "install -d -o foredraft" in line)
    assert all(volume in made for volume in volumes)
    for line in lines[: stages[1]]:
        if line.startswith("COPY "):
            assert all((ROOT / source).exists() for source in line.split()[1:-1])
    variables = dict(re.findall(rf"({PREFIX}\w+)=(\S+)", "\n".join(final)))
    settings = resolve(Settings, {}, variables).settings
    assert (settings.log_format, settings.socket_mode) == ("json", "0660")


def manifests() -> dict[str, Any]:
    """The documents of the Kubernetes manifests, by kind."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yml").read_text())
    return {each["kind"]: each for each in documents}


def test_kubernetes_takes_the_manifests() -> None:
    for document in manifests().values():
        assert kubernetes_validate.validate(document, "1.37", strict=True)


def test_the_manifests_agree_with_the_settings_and_with_one_another(tmp_path: Path) -> None:
    found = manifests()
    file = tmp_path / "service.toml"
    file.write_text(found["ConfigMap"]["data"]["service.toml"])
    pod = found["StatefulSet"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    # What the kubelet adds for a Service of our name, and what the manifest sets itself.
    variables = {"FOREDRAFT_SERVICE_HOST": "10.0.0.1", "FOREDRAFT_PORT_50051_TCP_PORT": "50051"}
    variables |= {each["name"]: each["value"] for each in container["env"]}
    settings = resolve(Settings, {}, variables, file).settings
    mounted = [each["mountPath"] for each in container["volumeMounts"]]
    files = (settings.certificate, settings.key, settings.access, settings.state, *settings.index)
    for path in files:
        assert any(str(path).startswith(f"{folder}/") for folder in mounted), path
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert settings.address.endswith(f":{ports['grpc']}")
    assert str(settings.metrics_address).endswith(f":{ports['metrics']}")
    assert pod["spec"]["terminationGracePeriodSeconds"] > settings.drain_s + 5
    for name in ("access", "tls"):
        (secret,) = [each["secret"] for each in pod["spec"]["volumes"] if each["name"] == name]
        assert secret["defaultMode"] == 0o440
    labels = pod["metadata"]["labels"]
    for kind in ("Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"):
        spec = found[kind]["spec"]
        chosen = spec.get("selector", spec.get("podSelector"))
        assert chosen.get("matchLabels", chosen) == labels, kind
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_compose_takes_its_file() -> None:
    command = ["check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = program(*command, str(DEPLOY / "compose.yml"))
    assert done.returncode == 0, done.stdout
    services = yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"]
    settings = resolve(Settings, {}, services["foredraft"]["environment"]).settings
    targets = [each["target"] for each in services["foredraft"]["volumes"]]
    assert str(settings.access) in targets
    (watched_at,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    port = str(settings.metrics_address).rpartition(":")[2]
    assert watched_at["static_configs"] == [{"targets": [f"foredraft:{port}"]}]
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            if volume["type"] == "bind":
                assert (DEPLOY / volume["source"]).is_file()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_its_configuration() -> None:
    command = ["promtool", "check", "config", "prometheus.yml"]
    subprocess.run(command, cwd=DEPLOY, check=True, capture_output=True)


def program(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return run("-m", *arguments, env={**os.environ, **variables})


def test_the_health_check_tells_who_takes_calls() -> None:
    assert health.SERVICE == SERVICE
    checks = ("retriever.operations.health",), ("foredraft", "health")
    process, address = start_service("--address", "127.0.0.1:0")
    live = ("foredraft", "health", "--live")
    healthy = [program(*check, address) for check in (*checks, live)]
    assert [each.returncode for each in healthy] == [0, 0, 0]
    assert [each.stdout for each in healthy] == ["", "ready\n", "alive\n"]
    assert program(*checks[0], FOREDRAFT_ADDRESS=address).returncode == 0
    stop_service(process)
    for check in checks:
        done = program(*check, address)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert f"no draft service answers at {address}" in done.stderr
    assert "usage:" in program(*checks[0]).stderr


def test_the_health_check_goes_over_tls(tmp_path: Path) -> None:
    authority = signed(tmp_path, "authority")
    files = [signed(tmp_path, name, authority) for name in ("server", "client")]
    (server, client), ca = files, str(authority.certificate)
    tls = ["--certificate", str(server.certificate), "--key", str(server.key), "--client-ca", ca]
    process, address = start_service("--address", "127.0.0.1:0", *tls)
    shown = tmp_path / "client.toml"
    shown.write_text(f'ca = "{ca}"\ncertificate = "client.pem"\nkey = "client.key"\n')
    variables = {
        "FOREDRAFT_REMOTE_CA": ca,
        "FOREDRAFT_REMOTE_CERTIFICATE": str(client.certificate),
        "FOREDRAFT_REMOTE_KEY": str(client.key),
    }
    try:
        for argument in ("--credentials", f"--credentials={tmp_path}/none"):
            rest = [argument, str(shown)] if argument == "--credentials" else [argument]
            done = program("foredraft", "health", address, *rest)
            assert done.returncode == (argument != "--credentials"), done.stderr
        assert program("retriever.operations.health", address, **variables).returncode == 0
        done = program("retriever.operations.health", address)
        assert done.returncode == 1
        assert "may want TLS" in done.stderr
    finally:
        stop_service(process)


def backed_up(text: str, tmp_path: Path) -> None:
    """Run a block of the page's commands on folders of ours."""
    for theirs, ours in (
        ("/srv/foredraft", "srv"),
        ("/var/lib/foredraft", "lib"),
        ("/backup", "backup"),
    ):
        text = text.replace(theirs, str(tmp_path / ours))
    text = text.replace("/opt/foredraft/bin/foredraft", f"{sys.executable} -m foredraft")
    kept = [line for line in text.splitlines() if not line.startswith("systemctl ")]
    subprocess.run(["sh", "-euc", "\n".join(kept)], cwd=ROOT, check=True, timeout=120)


def test_back_up_and_restore_bring_back_indexes_and_outputs(index: Path, tmp_path: Path) -> None:
    blocks: list[str] = re.findall(
        r"^```sh\n(.*?)^```$", OPERATIONS.read_text(), re.MULTILINE | re.DOTALL
    )
    save_index, restore_index, save_state, restore_state = (
        next(block for block in blocks if wanted in block)
        for wanted in (
            "# back up an index",
            "# restore an index",
            "# back up outputs",
            "# restore outputs",
        )
    )
    mine, state = tmp_path / "srv" / "my.index", tmp_path / "lib" / "state"
    (tmp_path / "backup").mkdir()
    shutil.copytree(index, mine)
    documents = Index.open(mine).num_documents
    drafter = EmbeddedDrafter(state=state)
    drafter.remember([7, 8, 9, 10, 11, 12, 13, 14, 15, 16], tenant="t")
    drafter.shut_down()
    backed_up(save_index, tmp_path)
    backed_up(save_state, tmp_path)
    shutil.rmtree(mine / "segments")
    shutil.rmtree(state)
    backed_up(restore_index, tmp_path)
    backed_up(restore_state, tmp_path)
    assert Index.open(mine).num_documents == documents
    restored: Any = EmbeddedDrafter(state=state)
    tree = restored.draft_context([7, 8, 9, 10, 11, 12], 4, tenant="t")
    restored.shut_down()
    assert tree.token_ids[:2].tolist() == [13, 14]
    assert state.stat().st_mode & 0o777 == 0o700

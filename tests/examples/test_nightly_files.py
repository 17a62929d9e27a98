"""The files of the recipe agree with one another, with the image and with the settings."""

import json
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from decoder.engines.engine_options import resolve_settings
from examples.nightly.request_log import FOLDER_VARIABLE
from retriever.operations.resolving import resolve
from retriever.operations.settings import Settings

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "nightly"
SCRIPTS = ("nightly.sh", "run.sh")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((RECIPE / "compose.yml").read_text())["services"]
    return found


def variables(service: Any) -> dict[str, str]:
    """The environment of a container: the image's, and what compose sets."""
    image = (ROOT / "docs" / "deploy" / "Dockerfile").read_text()
    own: dict[str, str] = service["environment"]
    return dict(re.findall(r"(FOREDRAFT_\w+)=(\S+)", image)) | own


def option(service: Any, name: str) -> str:
    (value,) = (each for each in service["command"] if each.startswith(f"--{name}="))
    return str(value).partition("=")[2]


def targets(service: Any) -> dict[str, Any]:
    return {each["target"]: each for each in service["volumes"]}


def test_compose_takes_its_file() -> None:
    command = ["check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [sys.executable, "-m", *command, str(RECIPE / "compose.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_three_containers_share_what_they_must(services: dict[str, Any]) -> None:
    vllm, service, nightly = (services[name] for name in ("vllm", "foredraft", "nightly"))
    settings = resolve(Settings, {}, variables(service)).settings
    assert [str(path) for path in settings.index] == [nightly["environment"]["INDEX"]]
    assert settings.missing_indexes == "skip"
    logs = nightly["environment"][FOLDER_VARIABLE]
    assert vllm["environment"][FOLDER_VARIABLE] == logs
    models = {settings.tokenizer, option(vllm, "model"), nightly["entrypoint"][-1]}
    assert len(models) == 1
    for each in (vllm, service, nightly):
        assert targets(each)[models.copy().pop()]["read_only"] is True
        kept = targets(each)["/var/lib/foredraft"]["source"]
        assert kept == targets(nightly)["/var/lib/foredraft"]["source"]
    for path in (logs, nightly["environment"]["INDEX"], str(settings.state)):
        assert path.startswith("/var/lib/foredraft/")
    assert targets(vllm)["/run/foredraft"] == targets(service)["/run/foredraft"]


def test_vllm_drafts_from_the_service_and_leaves_its_state_alone(services: dict[str, Any]) -> None:
    vllm, service = services["vllm"], services["foredraft"]
    own = json.loads(option(vllm, "additional-config"))["foredraft"]
    settings = resolve_settings(own, variables(vllm), "here")
    assert settings.server == [resolve(Settings, {}, variables(service)).settings.address]
    assert settings.state is None
    speculative = json.loads(option(vllm, "speculative-config"))
    module, _, name = speculative["model"].rpartition(".")
    assert callable(getattr(import_module(module), name))


def test_no_container_has_rights_or_a_network_that_it_does_not_need(
    services: dict[str, Any],
) -> None:
    for name, service in services.items():
        assert service["user"] == "10001:10001"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service.get("network_mode") == (None if name == "vllm" else "none")
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


def test_the_image_holds_what_is_started(services: dict[str, Any]) -> None:
    lines = (RECIPE / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    (copied,) = (line.split()[1:] for line in lines if line.startswith("COPY "))
    *sources, folder = copied
    assert all((ROOT / source).is_file() for source in sources)
    names = {Path(source).name for source in sources}
    assert services["nightly"]["entrypoint"][0] in names
    middleware = option(services["vllm"], "middleware")
    assert f"{middleware.partition('.')[0]}.py" in names
    (environment,) = (line for line in lines if line.startswith("ENV "))
    for variable in ("PATH", "PYTHONPATH"):
        assert f"{variable}={folder.rstrip('/')}" in environment
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER foredraft"
    engines = (ROOT / "Makefile").read_text()
    (pinned,) = (line.partition("=")[2] for line in lines if line.startswith("ARG VLLM="))
    assert pinned in engines, "the version that is tested"


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_programs_of_any_posix_shell(name: str) -> None:
    path = RECIPE / name
    assert path.stat().st_mode & 0o111
    assert path.read_text().startswith("#!/bin/sh\n")
    shells = [shell for shell in ("sh", "dash", "bash", "busybox") if shutil.which(shell)]
    for shell in shells:
        command = [shell, "sh"] if shell == "busybox" else [shell]
        subprocess.run([*command, "-n", str(path)], check=True)


@pytest.mark.parametrize(
    ("arguments", "data", "said"),
    [([], "data", "name a model"), (["MODEL"], 'with "quotes"', "choose another folder")],
)
def test_a_run_that_cannot_begin_starts_nothing(
    arguments: list[str], data: str, said: str, tmp_path: Path
) -> None:
    environment = {"PATH": "/usr/bin:/bin", "DATA": str(tmp_path / data)}
    command = [str(RECIPE / "run.sh"), *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 2
    assert said in done.stderr
